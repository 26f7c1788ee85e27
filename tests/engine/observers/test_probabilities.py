# SPDX-License-Identifier: Apache-2.0
"""Losses by Keras's names take logits, and refuse what a sigmoid or softmax gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from ipufit import ConfigError, IpufitWarning
from tests import reference

X, Y = reference.samples(16)
LABELS = (Y % 2).float()
CLASSES = ("categorical_crossentropy", "sparse_categorical_crossentropy", "kld")
BINARY = ("bce", "binary_crossentropy", "BinaryCrossentropy")
RUNS = {
    "fit": lambda m, y: m.fit(X, y, batch_size=8, verbose=0),
    "evaluate": lambda m, y: m.evaluate(X, y, verbose=0),
    "train_on_batch": lambda m, y: m.train_on_batch(X, y),
    "after predict": lambda m, y: (m.predict(X, verbose=0), m.test_on_batch(X, y)),
}


class Net(torch.nn.Module):
    def __init__(self, end, width=4):
        super().__init__()
        self.layer = torch.nn.Linear(3, width)
        self.end = end

    def forward(self, x):
        return self.end(self.layer(x))


def model_of(end, loss, width=4):
    return reference.compiled(Net(end, width), loss=loss)


SOFTMAXES = [
    torch.nn.Softmax(-1),
    lambda h: h.softmax(1).float(),
]
SIGMOIDS = [
    torch.nn.Sigmoid(),
    lambda h: h.squeeze(1).sigmoid().reshape(-1, 1),
]
ENDS = [
    *((name, end, "softmax: .*nll_loss") for name in CLASSES for end in SOFTMAXES),
    *((name, end, "sigmoid: .*BCELoss") for name in BINARY for end in SIGMOIDS),
]


@pytest.mark.parametrize(
    ("run", "name", "end", "words"),
    [
        *(("evaluate", *case) for case in ENDS),
        *((run, *case) for run in RUNS for case in (ENDS[0], ENDS[-1])),
    ],
)
def test_what_a_softmax_or_sigmoid_gives_is_no_logits(run, name, end, words):
    targets = Y if name.startswith("sparse") else F.one_hot(Y, 4).float()
    if name in BINARY:
        targets = LABELS[:, None]
    model = model_of(end, name, 1 if name in BINARY else 4)
    match = f"^The loss '{name}' takes logits, .* comes from a {words}"
    with pytest.raises(ConfigError, match=match):
        RUNS[run](model, targets)


@pytest.mark.parametrize("run", ["fit", "evaluate"])
def test_what_is_written_instead_is_right(run):
    logits, squashed = Net(lambda h: h, 1), Net(torch.sigmoid, 1)
    squashed.load_state_dict(logits.state_dict())
    losses = []
    for module, loss in ((logits, "bce"), (squashed, torch.nn.BCELoss())):
        model = reference.compiled(module, loss=loss)
        RUNS[run](model, LABELS[:, None])
        losses.append(model.evaluate(X, LABELS[:, None], verbose=0)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("run", ["fit", "evaluate"])
@pytest.mark.parametrize(
    ("end", "loss"),
    [
        (lambda h: h.softmax(1), "mse"),
        (lambda h: h.softmax(1) * 5, "sparse_categorical_crossentropy"),
        (lambda h: h * h.sigmoid(), "sparse_categorical_crossentropy"),
        (lambda h: h.log_softmax(1), "kl_divergence"),
    ],
)
def test_all_else_is_taken(run, end, loss):
    sparse = loss in ("cross_entropy", "sparse_categorical_crossentropy")
    RUNS[run](model_of(end, loss), Y if sparse else F.one_hot(Y, 4).float())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("loss", "end", "targets"),
    [
        ("cross_entropy", torch.nn.Softmax(-1), Y),
        ("ce", torch.sigmoid, Y),
        (torch.nn.CrossEntropyLoss(), torch.nn.Softmax(-1), Y),
        (F.cross_entropy, torch.nn.Softmax(-1), Y),
        (torch.nn.BCEWithLogitsLoss(), torch.sigmoid, F.one_hot(Y, 4).float()),
        (F.binary_cross_entropy_with_logits, torch.sigmoid, F.one_hot(Y, 4).float()),
    ],
)
def test_losses_by_torchs_names_warn_once(run, loss, end, targets):
    model = model_of(end, loss)
    with pytest.warns(IpufitWarning, match="takes logits, .* comes from a s") as caught:
        _ = RUNS[run](model, targets), RUNS[run](model, targets)
    assert len(caught) == 1


def test_each_output_has_its_own_loss():
    def end(h):
        return {"a": h, "b": h.sigmoid()}

    model, targets = model_of(end, {"a": "bce", "b": torch.nn.BCELoss()}), {}
    for name in ("a", "b"):
        targets[name] = F.one_hot(Y, 4).float()
    model.fit(X, targets, batch_size=8, validation_split=0.5, verbose=0)
    model.compile("sgd", "bce")
    with pytest.raises(ConfigError, match="module's output 'b' comes from a sigmoid"):
        model.evaluate(X, targets, verbose=0)
