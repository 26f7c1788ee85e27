# SPDX-License-Identifier: Apache-2.0
"""Every metric by its name gives what a peer gives, on data drawn at random.

Each is computed from micro-batches; some of them by a model too, which is evaluated, or
validated by `fit`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import nn

import ipufit
from ipufit import IPUConfig, IPUModel, metrics
from tests.metrics import peers
from tests.metrics.harness import Through, figure
from tests.strategies import examples

IGNORED = -100

# A draw. ----------------------------------------------------------------------------


class Form(NamedTuple):
    """Shapes of a row's outputs and targets, and what they mean.

    Attributes:
        outputs: C stands for the number of classes.
        targets: Without the axis of classes for indices.
        kind: Names a function that makes the data.
        loss: Says what the metrics can't see in shapes.
    """

    kind: str
    outputs: tuple
    targets: tuple
    loss: str | None = None


C = "C"
FORMS = [
    *(Form("numbers", shape, shape) for shape in [(), (1,), (3,), (2, 3), (2, 2, 3)]),
    *(Form("numbers", *shapes) for shapes in [((1,), ()), ((), (1,))]),
    *(Form("vectors", shape, shape) for shape in [(3,), (2, 3)]),
    *(Form("bits", *shapes) for shapes in [((), ()), ((1,), ()), ((), (1,))]),
    *(Form("bits", shape, shape, "bce") for shape in [(), (1,), (2, 3)]),
    *(Form("bits", (1, 3, 2), shape) for shape in [(1, 3, 2), (3, 2)]),
    *(Form("labels", shape, shape, "bce") for shape in [(3,), (3, 2, 2)]),
    *(Form("classes", (C,), shape) for shape in [(), (1,), (C,)]),
    *(Form("classes", (5, C), shape) for shape in [(5,), (5, 1), (5, C)]),
    *(Form("classes", (C, 1), shape) for shape in [(), (1,)]),
    Form("classes", (C, 5), (5,)),
    Form("classes", (C, 4, 3), (4, 3)),
    *(Form("shares", shape, shape) for shape in [(C,), (2, C)]),
    *(Form("counts", shape, shape) for shape in [(), (2,)]),
]
SCALES = [1e-20, 1e-9, 1e-3, 1.0, 1.0, 1.0, 30.0, 1e9, 1e20]
UNIX = 1.7e9


def draw(random, kind):
    """What a case of a kind of data is made of, by a `random.Random`."""
    one = random.choice

    def rarely(share=0.2):
        return random.random() < share

    drawn = SimpleNamespace(
        seed=random.randrange(2**16),
        form=one([form for form in FORMS if form.kind == kind]),
        count=one([1, 2, 3, 7, 20, 37, 37]),
        num_classes=one([2, 2, 3, 4, 7]),
        scale=one(SCALES),
        mean=one([0.0, 0.0, 1.0, -30.0, 1e3, 1e4]),
        is_unix=rarely(),
        has_ties=rarely(0.4),
        has_one_class=rarely(),
        has_ignored=rarely(),
        is_squashed=rarely(0.3),
        weights=one([None, None, "rows", "rows", "positions", "0 and 1"]),
        are_weighted=rarely(0.8),
        dtype=one(["float32", "int64", "int32", "uint8", "bool"]),
        micro_batch=one([1, 2, 3, 5, 8]),
        replicas=one([1, 1, 2]),
        way=one(["evaluate", "fit"]),
        order=random,
    )
    if drawn.dtype == "uint8":
        drawn.has_ignored = False
    if kind not in ("bits", "classes") or drawn.form.loss:
        drawn.has_ignored = False
    if kind not in ("bits", "labels", "classes"):
        drawn.is_squashed = False
    if drawn.is_squashed or kind in ("shares", "counts"):
        drawn.scale = one([1e-3, 1.0, 3.0])
    return drawn


def sizes(shape, drawn):
    return [drawn.num_classes if size == C else size for size in shape]


def data(drawn):
    """Inputs, targets and weights of a draw."""
    noise = torch.Generator().manual_seed(drawn.seed)
    kind, shape = drawn.form.kind, sizes(drawn.form.outputs, drawn)
    wanted = sizes(drawn.form.targets, drawn)
    shape, wanted = (drawn.count, *shape), (drawn.count, *wanted)
    x = torch.randn(shape, generator=noise, dtype=torch.float64)
    if drawn.has_ties and kind != "vectors":
        x = x.mul(2).round().div(2)
    dtype = getattr(torch, drawn.dtype)
    if kind in ("numbers", "vectors"):
        y = torch.randn(shape, generator=noise, dtype=torch.float64)
        y = y.mul(2).round().div(2) if drawn.has_ties and kind == "numbers" else y
        mean, scale = (drawn.mean if kind == "numbers" else 0.0), drawn.scale
        if drawn.is_unix and kind == "numbers":
            mean, scale = UNIX / 1e5, 1e5
        if drawn.has_one_class and drawn.count > 1 and kind == "numbers":
            y = torch.full_like(y, 0.3)
        x, y = (scale * (mean + part) for part in (y + 0.5 * x, y))
        y = y.reshape(wanted).float()
    elif kind in ("bits", "labels"):
        y = (torch.randn(shape, generator=noise) + x).gt(0.3)
        y = torch.full_like(y, drawn.seed % 2) if drawn.has_one_class else y
        is_strict = drawn.form.loss and drawn.is_squashed  # BCELoss takes floats only
        y = y.to(torch.float32 if is_strict else dtype)
        y, x = y.reshape(wanted), x * drawn.scale
    elif kind == "classes":
        is_one_hot = drawn.form.targets[-1:] == (C,)
        indices = wanted[:-1] if is_one_hot else wanted
        y = torch.randint(0, drawn.num_classes, indices, generator=noise)
        y = (
            torch.full_like(y, drawn.seed % drawn.num_classes)
            if drawn.has_one_class
            else y
        )
        y = F.one_hot(y, drawn.num_classes) if is_one_hot else y
        is_bool = dtype == torch.bool and not is_one_hot
        y, x = y.to(torch.int64 if is_bool else dtype), x * drawn.scale
    elif kind == "shares":
        y = torch.randn(shape, generator=noise).mul(3).softmax(-1)
        y = (
            F.one_hot(y.argmax(-1), drawn.num_classes).float()
            if drawn.has_one_class
            else y
        )
        x = x * drawn.scale
    else:
        y = torch.randint(0, 9, shape, generator=noise).float()
    if drawn.has_ignored and y.dtype != torch.bool and not is_one_hot_form(drawn):
        y = y.masked_fill(torch.rand(y.shape, generator=noise).lt(0.3), IGNORED)
    return x.float(), y, sample_weights(drawn, noise, y)


def is_one_hot_form(drawn):
    return drawn.form.kind == "classes" and drawn.form.targets[-1:] == (C,)


def sample_weights(drawn, noise, targets):
    if drawn.weights is None:
        return None
    shape = (drawn.count,)
    if drawn.weights == "positions":
        shape = positions(drawn, targets)
    weights = torch.rand(shape, generator=noise) * 3
    weights[torch.rand(shape, generator=noise) < 0.3] = 0.0
    if drawn.weights == "positions":
        weights[0] = 1.0  # no column is without samples
    if drawn.weights == "0 and 1":
        return weights.gt(0).float()
    return weights


def positions(drawn, targets):
    """The shape of weights for each element, or for each target of a class."""
    shape = [drawn.count, *sizes(drawn.form.outputs, drawn)]
    kind, outputs = drawn.form.kind, drawn.form.outputs
    if kind in ("vectors", "shares"):
        return shape[:-1]
    if kind == "classes":
        del shape[1 + outputs.index(C)]
    if kind == "bits" and drawn.form.targets == (3, 2):
        del shape[1]  # of pixels
    return shape


def canonical(drawn, x, y, weights):
    """Columns of outputs, targets and weights, of what counts, in float64."""
    outputs = x.double()
    shape, kind = list(x.shape), drawn.form.kind
    if kind == "classes":
        axis = 1 + drawn.form.outputs.index(C)
        outputs = outputs.movedim(axis, -1)
        y = y.long().argmax(-1) if is_one_hot_form(drawn) else y
        y = y.reshape(outputs.shape[:-1])
        weights = spread(weights, y).reshape(-1)
        scores, labels = outputs.reshape(-1, outputs.shape[-1]), y.reshape(-1)
        kept = weights.ne(0) & labels.ne(IGNORED)
        return scores[kept].numpy(), labels[kept].long().numpy(), weights[kept].numpy()
    y = y.reshape(shape).double()
    like = y[..., 0] if kind in ("vectors", "shares") else y
    if weights is not None and weights.dim() == y.dim() - 1 == 3:
        weights = weights.unsqueeze(1)
    weights = spread(weights, like)
    if kind in ("vectors", "shares"):
        weights = weights.unsqueeze(-1).expand(y.shape)
    weights = weights.masked_fill(y.eq(IGNORED), 0.0)
    parts = outputs, y, weights
    if kind == "labels":
        parts = [part.movedim(1, -1) for part in parts]
    width = shape[-1] if kind in ("numbers", "vectors", "shares", "counts") else 1
    width = 3 if kind == "labels" else width
    width = 1 if len(shape) == 1 else width
    return tuple(part.reshape(-1, width).numpy() for part in parts)


def spread(weights, values):
    if weights is None:
        return torch.ones(values.shape, dtype=torch.float64)
    while weights.dim() > 1 and weights.shape[-1] == 1:
        weights = weights.squeeze(-1)
    missing = (1,) * (values.dim() - weights.dim())
    return weights.double().reshape(*weights.shape, *missing).expand(values.shape)


def references(drawn):
    """Metrics by name that fit the draw."""
    kind, is_one_hot = drawn.form.kind, is_one_hot_form(drawn)
    if kind in ("bits", "labels"):
        found = dict(peers.BITS)
    elif kind == "classes":
        found = {**peers.CLASSES, **(peers.ONE_HOT if is_one_hot else peers.INDICES)}
        if drawn.num_classes > 2:
            found.update(peers.MANY)
            kind_of_top = "top_k" if is_one_hot else "sparse_top_k"
            found[f"{kind_of_top}_categorical_accuracy"] = peers.top(5)
        elif not is_one_hot:
            found.update(peers.PAIRS)
    else:
        found = dict(getattr(peers, kind.upper()))
    left_out = set()
    if drawn.scale > 1e15:
        left_out.add("squared_hinge")  # infinite, as the loss is
    if drawn.is_squashed:
        left_out.update(["hinge", "squared_hinge", "categorical_hinge", "nll"])
    if drawn.are_weighted and drawn.weights in ("rows", "positions"):
        left_out.add("spearman")
    return {name: peer for name, peer in found.items() if name not in left_out}


def loss_of(drawn):
    """A loss with a value for each weight, which says nothing about metrics."""
    kind, outputs = drawn.form.kind, drawn.form.outputs
    if drawn.form.loss:
        return nn.BCELoss() if drawn.is_squashed else drawn.form.loss
    if kind == "classes":
        return lambda outputs_, _: outputs_.mean(1 + outputs.index(C))
    if kind in ("vectors", "shares"):
        return lambda outputs, _: outputs.mean(-1)
    if drawn.form.targets == (3, 2):
        return lambda outputs, _: outputs.squeeze(1)
    return lambda outputs, _: outputs * 0.5


def squash(drawn):
    if not drawn.is_squashed:
        return nn.Identity()
    if drawn.form.kind == "classes":
        return nn.Softmax(1 + drawn.form.outputs.index(C))
    return nn.Sigmoid()


def summed(drawn, name, outputs, targets, weights):
    """What a metric itself makes of micro-batches."""
    metric = metrics.resolve_metric(name)
    metric.has_binary_loss = True if drawn.form.loss else None
    metric.has_probabilities = drawn.is_squashed
    return figure(metric, outputs, targets, weights, (drawn.micro_batch,))


def ours(drawn, names, x, y, weights):
    """The figures of `evaluate` or of validation data."""
    config = IPUConfig(micro_batch_size=drawn.micro_batch, replicas=drawn.replicas)
    model = IPUModel(Through(squash(drawn)), config)
    where = "weighted_metrics" if drawn.are_weighted else "metrics"
    model.compile(ipufit.Optimizer("sgd", 0.0), loss_of(drawn), **{where: names})
    if drawn.way == "evaluate":
        found = model.evaluate(x, y, sample_weight=weights, verbose=0)
        return {name: found[name] for name in names}
    rows = torch.arange(drawn.micro_batch * drawn.replicas) % len(x)
    validation = (x, y) if weights is None else (x, y, weights)
    found = model.fit(x[rows], y[rows], validation_data=validation, verbose=0).history
    return {name: found[f"val_{name}"][0] for name in names}


def differences(drawn):
    """`name: (value, reference)` where they differ."""
    x, y, weights = data(drawn)
    table, outputs = references(drawn), squash(drawn)(x)
    counting = weights if drawn.are_weighted else None
    found = {name: summed(drawn, name, outputs, y, counting) for name in table}
    names = drawn.order.sample(sorted(table), min(len(table), 4))
    found.update(ours(drawn, names, x, y, weights))
    if drawn.is_squashed:
        outputs = outputs.double().clamp(1e-7, 1 - 1e-7)
        outputs = outputs.log() if drawn.form.kind == "classes" else outputs.logit()
    parts = canonical(drawn, outputs, y, counting)
    wrong = {}
    for name, function in table.items():
        expected = peers.reference(function, name, parts)
        about = pytest.approx(
            expected, rel=1e-4, abs=tolerance(drawn, name, parts, expected), nan_ok=True
        )
        if found[name] != about:
            wrong[name] = found[name], expected
    return wrong


def tolerance(drawn, name, parts, expected):
    """What rounding explains: float32 has 24 binary digits."""
    if name in ("r2", "explained_variance", "pearson"):
        # Sums are float64, and a variance is their difference.
        pair = np.array(parts[:2])
        spreads = np.ptp(pair, axis=1)
        least = spreads[spreads > 0].min(initial=abs(pair).max())
        lost = 1e-15 * (abs(pair).max() / least) ** 2
        return max(1.0, abs(expected)) * (1e-5 + lost)
    if name in ("mse", "rmse", "mae", "mape", "msle", "log_cosh", "huber"):
        return 1e-44
    is_distance = any(word in name for word in ("entropy", "hinge", "nll", "poisson"))
    return 1e-6 * max(drawn.scale, 1.0) if is_distance else 1e-5


def settings_of(name):
    metric = metrics.resolve_metric(name)
    return type(metric), {
        key: str(value)
        for key, value in vars(metric).items()
        if "name" not in key and key != "_arguments"
    }


def test_every_name_has_a_peer():
    tables = [value for key, value in vars(peers).items() if key.isupper()]
    names = {name for table in tables if isinstance(table, dict) for name in table}
    names.update(["top_k_categorical_accuracy", "sparse_top_k_categorical_accuracy"])
    known = [settings_of(name) for name in names]
    for name in metrics.metric_names():
        assert settings_of(name) in known, name


@pytest.mark.parametrize("kind", sorted({form.kind for form in FORMS}))
@settings(max_examples=examples(40))
@given(random=st.randoms(use_true_random=True))
def test_a_metric_is_the_peers(kind, random):
    drawn = draw(random, kind)
    note(str(drawn))
    assert differences(drawn) == {}
