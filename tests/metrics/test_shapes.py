# SPDX-License-Identifier: Apache-2.0
"""Every metric of classes finds their axis by one rule, whatever else has an axis."""

import pytest
import torch

from ipufit import IPUConfig, IPUModel
from ipufit.errors import DataError
from ipufit.metrics import resolve_metric
from tests.metrics.harness import COUNT, figure, labels, one_hot, scores

OF_INDICES = """
    accuracy balanced_accuracy categorical_hinge crossentropy f1 false_negatives
    false_positives fbeta_score iou mean_iou nll perplexity precision recall
    sparse_categorical_accuracy sparse_categorical_crossentropy top_2_accuracy
    sparse_top_k_categorical_accuracy specificity true_negatives true_positives
""".split()  # noqa: SIM905 - one per line would be a page
OF_ONE_HOT = """
    accuracy balanced_accuracy categorical_accuracy categorical_crossentropy
    categorical_hinge crossentropy f1 iou kl_divergence mean_iou perplexity precision
    top_2_accuracy top_k_categorical_accuracy auc exact_auc average_precision pr_auc
""".split()  # noqa: SIM905
AREAS = ["auc", "pr_auc", "exact_auc", "average_precision"]


def figures(names, outputs, targets, *, has_binary_loss=None):
    """Figures of micro-batches of 8."""
    values = {}
    for name in names:
        metric = resolve_metric(name)
        metric.has_binary_loss = has_binary_loss
        values[name] = figure(metric, outputs, targets, sizes=(8,))
    return values


def flat_figures(names, outputs, targets, axis):
    """Figures of the same positions as rows, which other tests hold."""
    moved = outputs.movedim(axis, -1).flatten(0, -2)
    if targets.dim() == outputs.dim():
        targets = targets.movedim(axis, -1).flatten(0, -2)
    else:
        targets = targets.reshape(-1)
    return figures(names, moved, targets)


INDICES = [  # shapes after the rows, and the axis of the classes
    ((4, 3), (4,), -1),
    ((4, 3), (4, 1), -1),
    ((3, 4), (4,), 1),
    ((5, 2), (2,), 1),
    ((3, 4, 5), (4, 5), 1),
    ((3, 4, 5), (1, 4, 5), 1),
    ((4, 5, 3), (4, 5), -1),
    ((1, 3), (), -1),
    ((3, 1), (), 1),
    ((3, 1), (1,), 1),
    ((3, 1), (1, 1), 1),
    ((3, 1, 1), (1, 1), 1),
    ((3, 1, 3), (3, 1), -1),
    ((3, 1, 3), (1, 3), 1),
]


@pytest.mark.parametrize(("shape", "positions", "axis"), INDICES)
def test_indices_say_which_axis_has_the_classes(shape, positions, axis):
    outputs = scores(0, *shape)
    targets = labels(1, *positions, num_classes=outputs.shape[axis])
    plain = targets.reshape(outputs.movedim(axis, -1).shape[:-1])
    expected = flat_figures(OF_INDICES, outputs, plain, axis)
    for kind in (torch.int64, torch.float32, torch.uint8):
        found = figures(OF_INDICES, outputs, targets.to(kind))
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(3,), (4, 3), (4, 5, 3)])
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.float32])
def test_one_hot_targets_have_classes_on_the_last_axis(shape, kind):
    outputs, indices = scores(0, *shape), labels(1, *shape[:-1], num_classes=3)
    targets = one_hot(indices, 3).to(kind)
    expected = flat_figures(OF_ONE_HOT, outputs, one_hot(indices, 3), -1)
    found = figures(OF_ONE_HOT, outputs, targets)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(3, 1), (3, 1, 1)])
@pytest.mark.parametrize("positions", [(), (1,)])
def test_one_hot_targets_of_one_position_have_classes_on_axis_1(shape, positions):
    outputs, targets = scores(0, *shape), one_hot(labels(1, num_classes=3), 3)
    expected = figures(OF_ONE_HOT, outputs.flatten(1), targets)
    targets = targets.reshape(COUNT, 3, *positions)
    found = figures(OF_ONE_HOT, outputs, targets, has_binary_loss=False)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (1, 4, 5)])
def test_one_output_per_position_is_binary(shape):
    outputs, targets = scores(0, *shape), labels(1, *shape, num_classes=2)
    names = [*AREAS, "accuracy", "f1", "mean_iou", "crossentropy"]
    expected = figures(names, outputs.reshape(-1), targets.reshape(-1))
    bare = targets.squeeze(1) if shape[0] == 1 else targets.squeeze(-1)
    for loss in (None, True):
        found = figures(names, outputs, bare, has_binary_loss=loss)
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "positions", "axis"),
    [((2,), (), -1), ((5, 2), (5,), -1), ((2, 5), (5,), 1), ((2, 1), (), 1)],
)
def test_areas_are_of_two_classes(shape, positions, axis):
    outputs, targets = scores(0, *shape), labels(1, *positions, num_classes=2)
    first, second = outputs.movedim(axis, -1).reshape(-1, 2).unbind(1)
    expected = figures(AREAS, second - first, targets.reshape(-1))
    assert figures(AREAS, outputs, targets) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [*AREAS, "f1", "accuracy", "crossentropy"])
@pytest.mark.parametrize("shape", [(4, 5), (3, 4, 5)])
def test_masks_without_a_binary_loss_are_no_rows_of_classes(name, shape):
    with pytest.raises(DataError, match=r"don't sum to 1|along the last"):
        figures([name], scores(0, *shape), labels(1, *shape, num_classes=2))


@pytest.mark.parametrize("name", [*OF_INDICES, *AREAS])
@pytest.mark.parametrize(("shape", "positions"), [((2, 2), (2,)), ((2, 1, 2), (2,))])
def test_classes_that_may_be_on_either_axis_are_refused(name, shape, positions):
    outputs, targets = scores(0, *shape), labels(1, *positions, num_classes=2)
    with pytest.raises(DataError, match="may be on axis 1 or") as caught:
        figures([name], outputs, targets)
    *_, advice = str(caught.value).partition("For classes on the last it is ")
    names = {"outputs": outputs, "targets": targets}
    followed = [eval(code, names) for code in advice.rstrip(".").split(" and ")]
    expected = flat_figures([name], outputs, targets, -1)
    assert figures([name], *followed) == pytest.approx(expected, rel=1e-5)


class Pooled(torch.nn.Module):
    """A convolutional classifier whose outputs are `[N, C, 1, 1]`."""

    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(1, 3, 3)

    def forward(self, x):
        return self.convolution(x).mean((2, 3), keepdim=True)


def test_a_model_whose_classes_are_on_axis_1_of_one_position():
    x, y = scores(0, 1, 6, 6)[:32], labels(1, 1, 1, num_classes=3)[:32]
    names = ["accuracy", "f1", "crossentropy"]
    model = IPUModel(Pooled(), IPUConfig(micro_batch_size=4))
    model.compile("sgd", torch.nn.CrossEntropyLoss(), metrics=names)
    flat = model.module(x).detach().flatten(1)
    expected = figures(names, flat, y.flatten())
    found = model.fit(x, y, 32, verbose=0).history
    assert {name: found[name][0] for name in names} == pytest.approx(expected)
    soft = one_hot(y, 3).movedim(-1, 1).flatten(3)
    assert model.evaluate(x, soft, 4, verbose=0)["f1"] == pytest.approx(
        model.evaluate(x, y, 4, verbose=0)["f1"]
    )


OF_BITS = [*AREAS, "accuracy", "f1", "mean_iou", "bce", "hinge", "mae", "r2", "pearson"]
PIXELS = [  # outputs, targets and weights after the rows, and whether for classes
    ((1, 4, 5), (1, 4, 5), (4, 5), False),
    ((1, 4, 5), (4, 5), (4, 5), False),
    ((1, 4, 5), (4, 5), (1, 4, 5), False),
    ((4, 5), (4, 5), (4, 5), False),
    ((4, 5), (4, 5), (1, 4, 5), False),
    ((3, 4, 5), (3, 4, 5), (4, 5), False),
    ((3, 4, 5), (3, 4, 5), (1, 4, 5), False),
    ((3, 4, 5), (4, 5), (4, 5), True),
    ((3, 4, 5), (4, 5), (1, 4, 5), True),
    ((3, 4, 5), (1, 4, 5), (4, 5), True),
    ((4, 5, 3), (4, 5), (4, 5), True),
    ((4, 5, 3), (4, 5), (4, 5, 1), True),
]


@pytest.mark.parametrize(("shape", "of_targets", "of_weights", "has_classes"), PIXELS)
def test_pixels_have_weights(shape, of_targets, of_weights, has_classes):
    names = OF_INDICES if has_classes else [*OF_BITS, "spearman"]
    outputs = scores(0, *shape)
    targets = labels(1, *of_targets, num_classes=3 if has_classes else 2)
    weights = labels(2, *of_weights, num_classes=2).float()
    pixels = weights.reshape(COUNT, 1, 4, 5)
    is_left_out = pixels.expand(COUNT, targets[0].numel() // 20, 4, 5).eq(0)
    marked = targets.masked_fill(is_left_out.reshape(targets.shape), -100)
    spread = is_left_out.logical_not().float().reshape(targets.shape)
    for name in names:
        metric, other = resolve_metric(name), resolve_metric(name)
        metric.has_binary_loss = other.has_binary_loss = not has_classes
        found = figure(metric, outputs, targets, weights, (8,))
        if metric.ignore_index == -100:
            expected = figure(other, outputs, marked, sizes=(8,))
        else:
            spread = spread.reshape(outputs.shape)
            expected = figure(other, outputs, targets, spread, (8,))
        assert found == pytest.approx(expected, rel=1e-5), name


def test_weights_that_fit_in_two_ways_are_refused():
    outputs, targets = scores(0, 4, 4, 4), labels(1, 4, 4, 4, num_classes=2)
    weights = labels(2, 4, 4, num_classes=2).float()
    with pytest.raises(DataError, match="with an axis of size 1 in the place"):
        figure(resolve_metric("mae"), outputs, targets, weights)
    of_channels = weights[:, :, 0]
    for given, spread in (
        (weights.unsqueeze(1), weights.unsqueeze(1)),
        (of_channels, of_channels[..., None, None]),
    ):
        expected = (outputs - targets).abs()[spread.expand(outputs.shape) > 0].mean()
        found = figure(resolve_metric("mae"), outputs, targets, given)
        assert found == pytest.approx(float(expected))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_ranks_leave_elements_out(shape):
    outputs, targets = scores(0, *shape), scores(1, *shape)
    weights = labels(2, *shape, num_classes=2).float()
    found = figure(resolve_metric("spearman"), outputs, targets, weights, (8, 3))
    size = shape[-1] if shape else 1
    columns = (part.reshape(-1, size).unbind(1) for part in (outputs, targets, weights))
    expected = [
        figure(resolve_metric("spearman"), x[kept > 0], y[kept > 0])
        for x, y, kept in zip(*columns)
    ]
    assert found == pytest.approx(sum(expected) / size)
    nothing = figure(resolve_metric("spearman"), outputs, targets, weights * 0)
    assert nothing != nothing
