# SPDX-License-Identifier: Apache-2.0
"""Outputs and targets whose shapes differ: sample meets sample, never others."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipufit import DataError, IPUConfig, IPUModel, Metric, Optimizer, StreamedMetric
from ipufit.losses import resolve_loss
from tests import reference


def difference(outputs, targets):
    return (outputs - targets).square().mean()


def keras_difference(y_true, y_pred):
    return (y_true - y_pred).abs()


def pinball(outputs, targets):
    error = targets - torch.tanh(outputs)
    return torch.where(error > 0, 0.9 * error, -0.1 * error).mean()


def of_columns(outputs, targets):
    return torch.maximum(outputs, targets).reshape(len(outputs), -1).sum(1)


def weighted_by_targets(outputs, targets):
    return ((1 - outputs) ** 2 * targets / (1 + targets.exp())).mean()


def of_distance(outputs, targets):
    return torch.dist(outputs, targets)


def of_angles(outputs, targets):
    return torch.arctan2(*torch.broadcast_tensors(outputs, targets)).mean()


def of_likelihood(outputs, targets):
    normal = torch.distributions.Normal(outputs, 1.0, validate_args=False)
    return -normal.log_prob(targets).mean()


class Callable:
    def __call__(self, outputs, targets):
        return F.huber_loss(outputs, targets)


class Doubled(nn.MSELoss):
    def forward(self, outputs, targets):
        return 2 * super().forward(outputs, targets)


FUNCTIONS = [
    Callable(),
    difference,
    keras_difference,
    of_angles,
    of_columns,
    of_distance,
    of_likelihood,
    pinball,
    weighted_by_targets,
    functools.partial(F.smooth_l1_loss, beta=0.5),
    lambda outputs, targets: F.l1_loss(input=targets, target=outputs),
]
MODULES = [
    Doubled(),
    nn.BCELoss(),
    nn.BCEWithLogitsLoss(),
    nn.HuberLoss(),
    nn.KLDivLoss(reduction="batchmean"),
    nn.L1Loss(reduction="sum"),
    nn.MSELoss(reduction="none"),
    nn.MultiLabelSoftMarginLoss(),
    nn.PoissonNLLLoss(),
    nn.SmoothL1Loss(),
    nn.SoftMarginLoss(),
]


@st.composite
def shapes(draw):
    """Two shapes of as many samples that differ in axes of size 1 only."""
    axes = draw(st.lists(st.integers(2, 4), max_size=2))

    def padded():
        made = list(axes)
        for _ in range(draw(st.integers(0, 2))):
            made.insert(draw(st.integers(0, len(made))), 1)
        return made

    rows = draw(st.integers(1, 4))
    return (rows, *padded()), (rows, *padded())


@pytest.mark.parametrize(
    "loss", FUNCTIONS + MODULES, ids=lambda loss: str(loss).partition(" at ")[0]
)
@given(shapes(), st.booleans())
def test_axes_of_size_1_make_no_difference(loss, both, is_weighted):
    shape, target_shape = both
    rows = shape[0]
    whole = shape if len(shape) >= len(target_shape) else target_shape
    if isinstance(loss, nn.MultiLabelSoftMarginLoss) and len(whole) == 1:
        return  # torch's takes several labels
    outputs, targets = torch.rand(shape), torch.rand(target_shape)
    resolved = resolve_loss(loss)
    expected = resolved.function(outputs.reshape(whole), targets.reshape(whole))
    value = resolved.terms(outputs, targets, rows).value
    expected = expected.sum() if resolved.is_sum else expected.mean()
    torch.testing.assert_close(value, expected)
    if resolved.each is None or not is_weighted:
        return
    each = resolved.each(outputs.reshape(whole), targets.reshape(whole))
    weights = torch.rand(rows)
    value = resolved.terms(outputs, targets, rows, weights).value
    weighted = each.reshape(rows, -1) * weights[:, None]
    weighted = weighted.sum() if resolved.is_sum else weighted.mean(1).sum() / rows
    torch.testing.assert_close(value, weighted)


PAIRS = [
    lambda outputs, targets: F.mse_loss(outputs.squeeze(1), targets),
    lambda outputs, targets: F.mse_loss(outputs[:, 0], targets),
    lambda outputs, targets: F.mse_loss(outputs, targets[:, None]),
    lambda outputs, targets: difference(outputs.flatten(), targets),
    # Pairs on purpose: distances, rankings.
    lambda outputs, targets: (outputs.view(-1, 1) - targets.view(1, -1)).abs().mean(),
    lambda outputs, targets: (outputs.squeeze(1)[:, None] - targets).abs().mean(),
    lambda outputs, targets: (outputs - outputs.t()).abs()[targets[:, None] > targets],
    lambda outputs, targets: torch.cdist(outputs, targets[:, None]).mean(),
]


@pytest.mark.parametrize("loss", PAIRS)
def test_axes_that_a_loss_itself_adds_or_removes_stay(loss):
    outputs, targets = torch.rand(4, 1), torch.rand(4)
    value = resolve_loss(loss).terms(outputs, targets, 4).value
    torch.testing.assert_close(value, loss(outputs, targets).mean())


def by_slices(outputs, targets):
    return outputs[:, :1], outputs[:, 1:], targets


def by_chunks(outputs, targets):
    return (*outputs.chunk(2, dim=1), targets)


def by_narrow(outputs, targets):
    return outputs.narrow(1, 0, 1), outputs.narrow(1, 1, 1), targets


def without_axis(outputs, targets):
    return outputs[:, 0], outputs[:, 1], targets


def with_axis(outputs, targets):
    mean, log_variance = outputs.split(1, dim=1)
    return mean, log_variance, targets[:, None]


@pytest.mark.parametrize(
    "split", [by_chunks, by_narrow, by_slices, with_axis, without_axis]
)
@pytest.mark.parametrize("rows", [2, 5])
def test_columns_of_outputs_meet_their_targets(split, rows):
    def likelihood(outputs, targets):
        mean, log_variance, targets = split(outputs, targets)
        return (log_variance + (targets - mean) ** 2 / log_variance.exp()).mean()

    outputs, targets = torch.rand(rows, 2), torch.rand(rows)
    value = resolve_loss(likelihood).terms(outputs, targets, rows).value
    mean, log_variance = outputs.unbind(1)
    expected = log_variance + (targets - mean) ** 2 / log_variance.exp()
    torch.testing.assert_close(value, expected.mean())


def log_ratio(outputs, targets):
    return (torch.cdist(outputs, outputs) * (targets[:, None] == targets)).mean()


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        F.multi_margin_loss,
        log_ratio,
        nn.CrossEntropyLoss(),
        lambda outputs, targets: (outputs - F.one_hot(targets, 4)).square().mean(),
        lambda outputs, targets: -outputs.gather(1, targets[:, None]).mean(),
        lambda outputs, targets: (outputs.argmax(1) - targets).float().mean(),
    ],
)
def test_classes_and_labels_keep_their_shape(loss):
    outputs, targets = torch.rand(4, 4), torch.tensor([0, 2, 2, 3])  # as many classes
    value = resolve_loss(loss).terms(outputs, targets, 4).value
    torch.testing.assert_close(value, loss(outputs, targets))


def test_one_class_stays_one_class():
    outputs, targets = torch.rand(4, 1), torch.zeros(4, dtype=torch.int64)
    assert float(resolve_loss(F.cross_entropy).terms(outputs, targets, 4).value) == 0


@pytest.mark.parametrize(
    ("loss", "shape", "target_shape"),
    [
        (difference, (4, 4), (4,)),
        (nn.MSELoss(), (4, 3), (4, 1)),
        (nn.MSELoss(), (4, 1), (4, 3)),
        (F.l1_loss, (4, 4), (4,)),
        (keras_difference, (4, 2, 4), (4,)),
    ],
)
def test_other_shapes_are_refused(loss, shape, target_shape):
    torch_shapes = rf"\({', '.join(map(str, shape))}\) and"
    with pytest.raises(DataError, match=torch_shapes) as caught:
        resolve_loss(loss).terms(torch.rand(shape), torch.rand(target_shape), 4)
    assert str(target_shape) in str(caught.value) or str(shape) in str(caught.value)


def test_a_function_may_broadcast_along_its_own_axes():
    outputs, weights = torch.rand(4, 3), torch.rand(4, 1)

    def weighted(outputs, targets):
        return (outputs * targets).mean()

    value = resolve_loss(weighted).terms(outputs, weights, 4).value
    torch.testing.assert_close(value, (outputs * weights).mean())


class Errors(Metric):
    def sums(self, outputs, targets, weights=None):
        errors = (outputs - targets).abs()
        errors = errors if weights is None else errors * weights
        return torch.stack([errors.sum(), errors.sum() * 0 + len(outputs)])


class Worst(StreamedMetric):
    def reset(self):
        self.worst = 0.0

    def update(self, outputs, targets, weights=None):
        self.worst = max(self.worst, float((outputs - targets).abs().max()))

    def result(self):
        return self.worst


def absolute(outputs, targets):
    return (outputs - targets).abs().mean()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_of_one_output_trains_as_plain_torch(replicas):
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    y, truths = x.sum(1) + 1, (x.sum(1) + 1)[:, None]
    plain = nn.Linear(4, 1)
    module = nn.Linear(4, 1)
    module.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = []
    for start in range(0, 24, 8):
        loss = F.mse_loss(plain(x[start : start + 8]), truths[start : start + 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model = IPUModel(module, IPUConfig(replicas=replicas))
    metrics = [absolute, "mae", Errors("errors"), Worst("worst")]
    model.compile(Optimizer("sgd", 0.1), difference, metrics=metrics)
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    assert history["loss"] == [pytest.approx(sum(losses) / 3, rel=1e-5)]
    for name in ("absolute", "errors"):
        assert history[name] == pytest.approx(history["mae"], rel=1e-5)
    reference.assert_same_weights(module, plain)
    errors = (plain(x) - truths).detach()
    for batch_size in (2, 14, 24):
        figures = model.evaluate(x, y, batch_size=batch_size, verbose=0)
        assert figures == {
            "absolute": pytest.approx(float(errors.abs().mean()), rel=1e-5),
            "errors": pytest.approx(float(errors.abs().mean()), rel=1e-5),
            "loss": pytest.approx(float(errors.square().mean()), rel=1e-5),
            "mae": pytest.approx(float(errors.abs().mean()), rel=1e-5),
            "worst": pytest.approx(float(errors.abs().max()), rel=1e-5),
        }
    model.detach()


class TwoMasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 1, 1)

    def forward(self, x):
        return {"mask": self.layer(x), "area": self.layer(x).mean((1, 2, 3))}


def of_both(outputs, targets):
    return difference(outputs["mask"], targets["mask"]) + F.l1_loss(
        outputs["area"], targets["area"]
    )


def test_nested_outputs_and_targets_meet_sample_by_sample():
    x, mask, area = torch.randn(8, 2, 3, 3), torch.rand(8, 3, 3), torch.rand(8, 1)
    module = TwoMasks()
    model = reference.compiled(module, loss=of_both)
    figures = model.evaluate(x, {"mask": mask, "area": area}, batch_size=4, verbose=0)
    outputs = module(x)
    expected = of_both(outputs, {"mask": mask[:, None], "area": area[:, 0]})
    assert figures["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)


# Steps and forward --------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 1)
        self.loss, self.own_loss = nn.MSELoss(), Doubled()

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def by_hand(module, batch):
    return (module(batch[0]) - batch[1]).square().mean()


def of_torch(module, batch):
    outputs = module(batch[0])
    return {"loss": F.mse_loss(outputs, batch[1]), "outputs": outputs}


def by_parts(module, batch):
    x, y = batch
    return keras_difference(y, module.second(module.first(x).tanh())).square().mean()


def by_loss_modules(module, batch):
    outputs = module(batch[0])
    return (module.loss(outputs, batch[1]) + module.own_loss(outputs, batch[1])) / 3


def by_keywords(module, batch):
    return module.loss(target=batch[1], input=module(batch[0]))


def without_axes(module, batch):
    return difference(module(batch[0]).squeeze(1), batch[1])


def by_names(module, batch):
    return difference(module(batch["x"]), batch["y"])


@pytest.mark.parametrize(
    "step",
    [
        *(by_hand, by_keywords, by_loss_modules, by_names, by_parts, of_torch),
        without_axes,
    ],
)
def test_steps_train_sample_by_sample(step):
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    y = x.sum(1)
    module = Layers()
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in range(0, 16, 8):
        optimizer.zero_grad()
        outputs = plain(x[rows : rows + 8])
        F.mse_loss(outputs, y[rows : rows + 8, None]).backward()
        optimizer.step()
    model = IPUModel(module, IPUConfig(replicas=2))
    model.compile(Optimizer("sgd", 0.1), step=step)
    data = ({"x": x, "y": y},) if step is by_names else (x, y)
    model.fit(*data, batch_size=8, shuffle=False, verbose=0)
    reference.assert_same_weights(module, plain)
    expected = F.mse_loss(plain(x), y[:, None]).item()
    for batch_size in (2, 16):
        figures = model.evaluate(*data, batch_size=batch_size, verbose=0)
        assert figures["loss"] == pytest.approx(expected, rel=1e-5)
    hooks = [
        (part._forward_hooks, part._forward_pre_hooks) for part in module.modules()
    ]
    assert not any(map(any, hooks))
    model.detach()


def ranked(module, batch):
    scores = module(batch[0]).squeeze(1)
    order = (batch[1][:, None] > batch[1]).float()
    return (F.softplus(scores - scores[:, None]) * order).mean()


def test_pairs_in_a_step_stay_pairs():
    x = torch.randn(8, 4)
    module = Layers()
    model = IPUModel(module)
    model.compile(Optimizer("sgd", 0.0), step=ranked)
    figures = model.evaluate(x, x.sum(1), batch_size=8, verbose=0)
    expected = ranked(module, (x, x.sum(1))).item()
    assert figures["loss"] == pytest.approx(expected, rel=1e-5)


class OwnLoss(nn.Linear):
    def forward(self, x, y):
        return {"loss": F.mse_loss(super().forward(x), target=y)}


def test_forward_broadcasts_as_torch_does_and_warns_once():
    x = torch.randn(16, 4)
    data = {"x": x, "y": x.sum(1)}
    module = OwnLoss(4, 1)
    model = IPUModel(module)
    model.compile("sgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.evaluate(data, batch_size=8, verbose=0)
            model.fit(data, batch_size=8, verbose=0, validation_data=data)
        figures = model.evaluate(data, batch_size=16, verbose=0)
    (warning,) = (str(one.message) for one in caught)
    assert "(8,)) that is different to the input size ((8, 1)), in test_broa" in warning
    outputs = nn.functional.linear(x, module.weight, module.bias)
    expected = (outputs - data["y"]).square().mean().item()
    assert figures["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_check_shows_the_warning_of_sizes_too():
    class Huber(nn.Linear):
        def forward(self, x, y):
            return {"loss": F.huber_loss(super().forward(x), y)}

    model = IPUModel(Huber(4, 1))
    model.compile("sgd")
    report = model.check({"x": torch.randn(16, 4), "y": torch.randn(16)}, batch_size=8)
    assert "different to the input size" in str(report)
