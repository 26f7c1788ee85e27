# SPDX-License-Identifier: Apache-2.0
"""`compile(augment=, label_smoothing=)` against plain torch that mixes alike."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import ipufit
from ipufit import ConfigError, DataError, IPUConfig, IPUModel, Mixing, UnsupportedError
from ipufit.data.random_state import hash_seed
from tests.reference import assert_same_weights

SEED, SIDE, CLASSES = 7, 6, 3
BOTH = Mixing(mixup=0.4, cutmix=1.0, probability=0.8)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Conv2d(2, 3, 3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(3 * (SIDE - 2) ** 2, CLASSES),
        )


def images(count=24):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 2, SIDE, SIDE, generator=generator)
    return x, torch.randint(0, CLASSES, (count,), generator=generator)


def drawn(mixing, number_of_pass, micro_batch, rows, size=(SIDE, SIDE)):
    seed = hash_seed(SEED, number_of_pass, micro_batch, 1)
    return mixing.coefficients([seed], rows, size if mixing.cutmix else None).numpy()


def mixed_by_hand(x, columns):
    """Mix images one by one, with slices instead of masks."""
    result = x.clone()
    for i, column in enumerate(columns):
        share, other = column[0], x[i - 1]
        if len(column) == 1:
            result[i] = share * x[i] + (1 - share) * other
            continue
        blend, top, bottom, left, right = column[1], *map(int, column[2:])
        result[i] = blend * x[i] + (1 - blend) * other
        result[i, ..., top:bottom, left:right] = other[..., top:bottom, left:right]
    return result


def plain_torch(
    module,
    x,
    y,
    mixing,
    batch,
    micro,
    *,
    epochs=1,
    smoothing=0.0,
    each=None,
):
    """SGD over samples in order, mixing with the coefficients that ipufit draws.

    Rows that fill up the last batch are copies of the last sample, and count nothing.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses, hits = [], []
    if each is None:

        def each(outputs, targets):
            return F.cross_entropy(
                outputs, targets, reduction="none", label_smoothing=smoothing
            )

    for epoch in range(epochs):
        for at in range(0, len(x), batch):
            optimizer.zero_grad()
            for first in range(at, at + batch, micro):
                rows = torch.arange(first, first + micro)
                is_real, rows = rows < len(x), rows.clamp(max=len(x) - 1)
                own, target = x[rows], y[rows]
                columns = drawn(mixing, epoch, first // micro, micro)
                share = torch.from_numpy(columns[:, 0])
                outputs = module(mixed_by_hand(own, columns))
                other = target.roll(1, 0)
                value = share * each(outputs, target) + (1 - share) * each(
                    outputs, other
                )
                value = value[is_real]
                (value.sum() / min(batch, len(x) - at)).backward()
                losses.append(value.detach())
                major = torch.where(share >= 0.5, target, other)
                if isinstance(outputs, torch.Tensor):
                    hits.append(outputs.argmax(1).eq(major).float()[is_real])
            optimizer.step()
    return float(torch.cat(losses).mean()), float(
        torch.cat([*hits, torch.empty(0)]).mean()
    )


def fitted(
    x,
    y,
    mixing,
    batch,
    *,
    epochs=1,
    smoothing=0.0,
    loss="cross_entropy",
    module=None,
    fit=None,
    metrics=("accuracy",),
    **config,
):
    module = network() if module is None else module
    model = IPUModel(module, IPUConfig(seed=SEED, **config))
    model.compile(
        torch.optim.SGD(module.parameters(), lr=0.1),
        loss,
        metrics=list(metrics),
        augment=mixing,
        label_smoothing=smoothing,
    )
    history = model.fit(x, y, batch, epochs, verbose=0, shuffle=False, **(fit or {}))
    return model, history


LAYOUTS = [
    {},
    {"gradient_accumulation": 3},
    {"replicas": 2},
    {"device_iterations": 2, "gradient_accumulation": 3},
]


@pytest.mark.parametrize(
    ("mixing", "layout"),
    [
        *((BOTH, layout) for layout in LAYOUTS),
        (Mixing(mixup=0.4), LAYOUTS[1]),
        (Mixing(cutmix=1.0), LAYOUTS[2]),
    ],
)
def test_training_is_that_of_plain_torch_which_mixes_alike(mixing, layout):
    x, y = images()
    size = 4 * layout.get("gradient_accumulation", 1) * layout.get("replicas", 1)
    model, history = fitted(x, y, mixing, size, micro_batch_size=4, **layout)
    other = network()
    loss, accuracy = plain_torch(other, x, y, mixing, size, 4)
    assert_same_weights(model.module, other)
    assert history.history["loss"] == pytest.approx([loss])
    assert history.history["accuracy"] == pytest.approx([accuracy])


@pytest.fixture
def strict(monkeypatch):
    """Operators that no IPU has are refused."""
    monkeypatch.setenv("IPUFIT_EMULATOR_STRICT", "1")


@pytest.mark.usefixtures("strict")
def test_it_goes_with_label_smoothing_and_each_epoch_draws_anew():
    x, y = images()
    given = {"epochs": 2, "smoothing": 0.1, "micro_batch_size": 8}
    fit = {"validation_data": (x, y)}
    model, history = fitted(x, y, BOTH, 8, fit=fit, **given)
    other = network()
    plain_torch(other, x, y, BOTH, 8, 8, epochs=2, smoothing=0.1)
    assert_same_weights(model.module, other)
    with torch.no_grad():  # evaluation neither mixes nor smooths
        plain = float(F.cross_entropy(model.module(x), y))
    assert model.evaluate(x, y, verbose=0)["loss"] == pytest.approx(plain)
    assert history.history["val_loss"][-1] == pytest.approx(plain)


@pytest.mark.parametrize("weights", [{}, {0: 0.25, 1: 3.0}])
@pytest.mark.parametrize("count", [24, 21])
def test_weights_go_with_their_targets_and_padding_counts_nothing(weights, count):
    x, y = images(count)
    fit = {"drop_last": "pad", "class_weight": weights or None}
    given = {"micro_batch_size": 4, "gradient_accumulation": 2, "metrics": ()}
    model, history = fitted(x, y, BOTH, 8, fit=fit, **given)
    weight = torch.tensor([weights.get(kind, 1.0) for kind in range(CLASSES)])

    def each(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none") * weight[targets]

    other = network()
    loss, _ = plain_torch(other, x, y, BOTH, 8, 4, each=each)
    assert_same_weights(model.module, other)
    assert history.history["loss"] == pytest.approx([loss])


@pytest.fixture(scope="module")
def of_classes():
    return fitted(*images(), BOTH, 8, micro_batch_size=4)


@pytest.mark.parametrize("form", ["float", "int", "column"])
def test_one_hot_targets_mean_the_same(of_classes, form):
    x, y = images()
    targets = y[:, None]
    if form != "column":
        targets = F.one_hot(y, CLASSES)
    if form == "float":
        targets = targets.float()
    plain, history = of_classes
    loss = "cross_entropy" if form == "column" else "categorical_crossentropy"
    model, other = fitted(x, targets, BOTH, 8, micro_batch_size=4, loss=loss)
    assert_same_weights(model.module, plain.module)
    for name, values in history.history.items():
        assert other.history[name] == pytest.approx(values)


def test_without_a_seed_runs_follow_torchs_generator():
    x, y = images()
    losses = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        model = IPUModel(network(), IPUConfig(micro_batch_size=4))
        model.compile("sgd", "cross_entropy", augment=BOTH)
        history = model.fit(x, y, 8, verbose=0, shuffle=False)
        losses += history.history["loss"]
    assert losses[0] == losses[1] != losses[2]


def test_pixels_of_8_bits_are_mixed_as_floats():
    x, y = images()
    pixels = x.mul(40).add(128).clamp(0, 255).to(torch.uint8)
    plain, _ = fitted(pixels.float(), y, BOTH, 8, micro_batch_size=4)

    class Floats(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(x.to(torch.float32))

    model, _ = fitted(pixels, y, BOTH, 8, micro_batch_size=4, module=Floats(*network()))
    assert_same_weights(model.module, plain.module)


def test_batches_of_ones_own_loop_draw_anew():
    x, y = images(4)
    losses = []
    for _ in range(2):
        model = IPUModel(network(), IPUConfig(seed=SEED, micro_batch_size=4))
        model.compile(ipufit.Optimizer("sgd", lr=0.0), "cross_entropy", augment=BOTH)
        losses.append([model.train_on_batch(x, y)["loss"] for _ in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


class Staged(torch.nn.Module):
    """Two stages, of which the second has two outputs."""

    def __init__(self):
        super().__init__()
        self.first = network()[:3]
        self.kind, self.size = torch.nn.Linear(48, CLASSES), torch.nn.Linear(48, 1)

    def forward(self, x):
        hidden = self.first(x)
        return {"kind": self.kind(hidden), "size": self.size(hidden)}


@pytest.mark.parametrize("pipeline", [None, ("first", "kind")])
def test_each_output_has_both_targets(pipeline):
    x, y = images()
    size = x.mean(dim=(1, 2, 3), keepdim=False).gt(0).float()[:, None]
    config = {"gradient_accumulation": 3, "pipeline": pipeline}
    model = IPUModel(Staged(), IPUConfig(seed=SEED, micro_batch_size=4, **config))
    other = copy.deepcopy(model.module)
    losses = {"kind": "cross_entropy", "size": "bce"}
    model.compile(
        torch.optim.SGD(model.module.parameters(), lr=0.1),
        losses,
        loss_weights={"kind": 1.0, "size": 0.5},
        augment=BOTH,
    )
    history = model.fit(x, {"kind": y, "size": size}, 12, verbose=0, shuffle=False)

    def each(outputs, rows):
        kind = F.cross_entropy(outputs["kind"], y[rows], reduction="none")
        binary = F.binary_cross_entropy_with_logits(
            outputs["size"], size[rows], reduction="none"
        )
        return kind + 0.5 * binary[:, 0]

    loss, _ = plain_torch(other, x, torch.arange(24), BOTH, 12, 4, each=each)
    assert_same_weights(model.module, other)
    assert history.history["loss"] == pytest.approx([loss])


# Refusals -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "mixes nothing"),
        ({"mixup": -0.1}, "mixup=-0.1: use a number of 0 or more"),
        ({"cutmix": float("nan")}, "cutmix=nan"),
        ({"mixup": True}, "mixup=True"),
        ({"mixup": 1.0, "probability": 1.1}, "probability=1.1"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Mixing(**arguments)


def refused(error, message, x, y, compiled, **config):
    model = IPUModel(network(), IPUConfig(**{"micro_batch_size": 4, **config}))

    def train():
        model.compile("sgd", **{"loss": "cross_entropy", **compiled})
        model.fit(x, y, 8, verbose=0)

    with pytest.raises(error, match=message):
        train()
    assert not model._executors._programs()  # no device was taken


@pytest.mark.parametrize(
    ("compiled", "error", "message"),
    [
        ({"augment": 0.2}, ConfigError, "augment=0.2 must be an ipufit.Mixing"),
        ({"augment": BOTH, "loss": None}, UnsupportedError, "returns its own loss"),
        ({"label_smoothing": 0.1, "loss": None}, UnsupportedError, "its own loss"),
        ({"label_smoothing": 1.0}, ConfigError, "label_smoothing=1.0: use a number"),
        ({"label_smoothing": 0.1, "loss": "mse"}, UnsupportedError, "loss of classes"),
        (
            {"label_smoothing": 0.1, "loss": lambda o, t: o.sum()},
            UnsupportedError,
            "loss of classes",
        ),
        (
            {
                "label_smoothing": 0.1,
                "loss": torch.nn.CrossEntropyLoss(label_smoothing=0.2),
            },
            ConfigError,
            "Give one of them",
        ),
        (
            {"augment": BOTH, "loss": lambda o, t: F.cross_entropy(o, t)},
            UnsupportedError,
            "one value per sample",
        ),
    ],
)
def test_compile_refuses_what_has_no_meaning(compiled, error, message):
    refused(error, message, *images(8), compiled)


def test_data_that_cannot_be_mixed_are_refused():
    x, y = images(8)
    given = {"augment": BOTH}
    refused(ConfigError, "has one sample", x, y, given, micro_batch_size=1)
    refused(DataError, "needs one input, and the data has 2", (x, x), y, given)
    refused(DataError, "whole numbers", x.long(), y, given)
    refused(DataError, "height and width", x[:, 0, 0], y, given)
    refused(DataError, "values outside of 0 to 1", x, x[:, 0, 0], given)
    refused(DataError, "3 whole numbers for each", x, y[:, None].expand(8, 3), given)
    refused(DataError, "several rows for each", x, x[:, 0].clamp(0, 1), given)
