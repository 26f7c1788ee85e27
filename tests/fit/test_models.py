# SPDX-License-Identifier: Apache-2.0
"""A zoo: models as people have them train, evaluate and predict."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any, Callable, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

from ipufit import IPUConfig, IPUModel
from tests import reference

pytestmark = pytest.mark.floor

EXAMPLE = Path(__file__).parents[2] / "examples" / "handwriting.py"
COUNT, BATCH = 24, 12


class Case(NamedTuple):
    """A model with data that it can learn."""

    module: nn.Module
    x: Any
    y: Any
    loss: Any
    stages: tuple[str, str]
    metrics: Any = None
    mixes_samples: bool = False
    """Batch norm: what a sample gives depends on its micro-batch."""
    rate: float = 0.1


def rows_of(nested, rows):
    if isinstance(nested, dict):
        return {key: value[rows] for key, value in nested.items()}
    if isinstance(nested, tuple):
        return tuple(value[rows] for value in nested)
    return nested[rows]


# The models -------------------------------------------------------------------------


def torchvisions_models():
    """`torchvision.models`, also beside a torch of another release."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision isn't installed")
    spec = importlib.util.spec_from_file_location("handwriting_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.import_torchvision()
    return importlib.import_module("torchvision.models")


def resnet18():
    module = torchvisions_models().resnet18(num_classes=2)
    y = torch.arange(COUNT) % 2
    x = torch.randn(COUNT, 3, 16, 16) + y.reshape(-1, 1, 1, 1)
    return Case(
        module,
        x,
        y,
        "cross_entropy",
        ("conv1", "layer3"),
        ["accuracy"],
        mixes_samples=True,
        rate=0.01,
    )


class Encoder(nn.Module):
    """Tokens with a mask, as a dict, to classes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, tokens, mask):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=mask.eq(0))
        shares = mask.to(hidden.dtype)[:, :, None]
        return self.head((hidden * shares).sum(dim=1) / shares.sum(dim=1))


def transformer():
    tokens = torch.randint(1, 11, (COUNT, 6))
    mask = torch.arange(6).lt(torch.randint(2, 7, (COUNT, 1))).long()
    x = {"tokens": tokens * mask, "mask": mask}
    stages = ("embedding", "layers.1")
    return Case(
        Encoder(), x, tokens[:, 0] % 3, "cross_entropy", stages, ["accuracy"], rate=0.3
    )


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(6, 5)
        self.table = nn.Linear(3, 5)
        self.kind = nn.Linear(10, 3)
        self.price = nn.Linear(10, 1)

    def forward(self, image, table):
        both = torch.cat([self.image(image), self.table(table)], dim=1).tanh()
        return {"kind": self.kind(both), "price": self.price(both)}


def two_heads():
    image, table = torch.randn(COUNT, 6), torch.randn(COUNT, 3)
    y = {"kind": image[:, :3].argmax(dim=1), "price": table.sum(dim=1, keepdim=True)}
    return Case(
        TwoHeads(),
        (image, table),
        y,
        {"kind": "cross_entropy", "price": "mse"},
        ("image", "kind"),
        {"kind": ["accuracy"], "price": ["mae"]},
    )


class Speech(nn.Module):
    """Frames to log-probabilities of letters; 0 is the blank."""

    def __init__(self):
        super().__init__()
        self.frames = nn.Linear(4, 8)
        self.letters = nn.Linear(8, 5)

    def forward(self, x):
        return F.log_softmax(self.letters(self.frames(x).tanh()), dim=2)


class CTC:
    """What PopTorch takes: targets padded to one length, a mean or a sum."""

    def __init__(self):
        self.function = nn.CTCLoss(zero_infinity=True)

    def __call__(self, outputs, targets):
        rows, frames, _ = outputs.shape
        lengths = torch.full((rows,), frames, dtype=torch.long)
        return self.function(
            outputs.transpose(0, 1), targets["letters"], lengths, targets["length"]
        )


def ctc():
    letters = torch.randint(1, 5, (COUNT, 3))
    letters[:, 1] = letters[:, 0] % 4 + 1  # neighbours differ
    x = F.one_hot(letters - 1, 4).float().repeat_interleave(3, dim=1)  # 9 frames
    y = {"letters": letters, "length": torch.randint(2, 4, (COUNT,))}
    return Case(Speech(), x, y, CTC(), ("frames", "letters"))


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        hidden, _ = self.lstm(x)
        return self.head(hidden[:, -1])


def lstm():
    x = torch.randn(COUNT, 5, 3)
    y = x[:, :, 0].sum(dim=1, keepdim=True)
    return Case(Sequences(), x, y, "mse", ("lstm", "head"), ["mae"])


class OwnLoss(nn.Module):
    """Labels are among the inputs, as with transformers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, features, labels=None):
        logits = self.head(self.body(features).tanh())
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def own_loss():
    features, labels = reference.samples(COUNT)
    x = {"features": features, "labels": labels}
    return Case(OwnLoss(), x, None, None, ("body", "head"), rate=0.5)


ZOO: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (resnet18, transformer, two_heads, ctc, lstm, own_loss)
}
LAYOUTS = {
    "one IPU": lambda _: IPUConfig(),
    "replicas": lambda _: IPUConfig(replicas=2, device_iterations=2),
    "pipeline": lambda stages: IPUConfig(pipeline=stages, micro_batch_size=2),
}


# Beside plain torch -----------------------------------------------------------------


def loss_of(case, outputs, targets):
    if case.loss is None:
        return outputs["loss"]
    if isinstance(case.loss, dict):
        kind = F.cross_entropy(outputs["kind"], targets["kind"])
        return kind + F.mse_loss(outputs["price"], targets["price"])
    named = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss}
    return named.get(case.loss, case.loss)(outputs, targets)


def called(module, x):
    if isinstance(x, dict):
        return module(**x)
    return module(*x) if isinstance(x, tuple) else module(x)


def train_plainly(case, module, epochs):
    """The mean loss of each epoch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=case.rate)
    module.train()
    curve = []
    for _ in range(epochs):
        losses = []
        for rows in torch.arange(COUNT).split(BATCH):
            targets = None if case.y is None else rows_of(case.y, rows)
            optimizer.zero_grad()
            loss = loss_of(case, called(module, rows_of(case.x, rows)), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curve.append(sum(losses) / len(losses))
    return curve


# torch 2.0 makes floats of every mask on its way, and then warns of them.
@pytest.mark.filterwarnings("ignore:Converting mask without torch.bool")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[pytest.mark.slow])
        if name == "resnet18" and layout != "one IPU"
        # Slow, and batch norm leaves no plain loop to compare with.
        else (name, layout)
        for name in ZOO
        for layout in LAYOUTS
    ],
)
def test_a_model_of_the_zoo_learns_and_is_looked_at(monkeypatch, name, layout):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "8")
    case = ZOO[name]()
    if case.mixes_samples:
        # With batch norm, weights that differ by 1e-7 end up with losses that differ
        # by 5e-3, and another memory format rounds otherwise.
        monkeypatch.setenv("IPUFIT_EMULATOR_CHANNELS_LAST", "0")
    twin = copy.deepcopy(case.module)
    model = IPUModel(case.module, LAYOUTS[layout](case.stages))
    optimizer = torch.optim.SGD(case.module.parameters(), lr=case.rate)
    model.compile(optimizer, case.loss, metrics=case.metrics)
    epochs = 2
    data = (case.x,) if case.y is None else (case.x, case.y)
    history = model.fit(
        *data, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0
    )
    losses = history.history["loss"]
    assert losses[-1] < losses[0]
    if layout == "one IPU" or not case.mixes_samples:
        assert losses == pytest.approx(train_plainly(case, twin, epochs), rel=1e-4)
        reference.assert_same_weights(case.module, twin, rtol=1e-3, atol=1e-4)

    seen = 11  # no whole number of passes
    x = rows_of(case.x, slice(seen))
    y = None if case.y is None else rows_of(case.y, slice(seen))
    with torch.no_grad():
        expected = called(copy.deepcopy(case.module).eval(), x)
    figures = model.evaluate(x, y, batch_size=4, verbose=0)
    expected_loss = float(loss_of(case, expected, y))
    assert figures["loss"] == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    predicted = model.predict(x, batch_size=4, verbose=0)
    if isinstance(expected, dict):
        assert "loss" not in predicted
        expected.pop("loss", None)
    torch.testing.assert_close(predicted, expected, rtol=1e-4, atol=1e-5)
    model.detach()


def test_a_model_with_its_own_loss_needs_no_labels_to_predict():
    case = own_loss()
    model = reference.compiled(case.module, loss=None)
    model.fit(case.x, batch_size=BATCH, verbose=0)
    with_labels = model.predict(case.x, verbose=0)
    without = model.predict({"features": case.x["features"]}, verbose=0)
    assert list(with_labels) == list(without) == ["logits"]
    assert torch.equal(with_labels["logits"], without["logits"])
