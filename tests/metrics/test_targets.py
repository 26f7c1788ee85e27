# SPDX-License-Identifier: Apache-2.0
"""Targets that can't be are refused by every metric, and -100 doesn't count."""

import pytest
import torch
from torch import nn

import ipufit
from ipufit import IPUModel
from ipufit.errors import DataError
from ipufit.metrics import metric_names, resolve_metric
from tests.metrics.harness import Through, figure

OF_NUMBERS = """
    cosine_similarity explained_variance huber l1 log_cosh mae mape mean_absolute_error
    mean_absolute_percentage_error mean_squared_error mean_squared_logarithmic_error mse
    msle pearson pearson_correlation poisson r2 r2_score rmse root_mean_squared_error
    smooth_l1 spearman spearman_correlation
""".split()  # noqa: SIM905 - one per line would be a page
"""Metrics for which -100 and 255 are numbers as any other."""
NAMES = [name for name in metric_names() if name not in OF_NUMBERS]


def drawn(*shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    return x, (x + torch.randn(shape)).gt(0.5).float()


def takes(name, outputs, targets):
    try:
        figure(resolve_metric(name), outputs, targets)
    except DataError:
        return False
    return True


SCORES, CLASSES = drawn(16, 3)[0], torch.arange(16) % 3
OF_BITS = [name for name in NAMES if takes(name, *drawn(16))]
OF_INDICES = [name for name in NAMES if takes(name, SCORES, CLASSES)]
OF_ONE_HOT = [
    name
    for name in NAMES
    if takes(name, SCORES, torch.eye(3)[CLASSES])
    if name in OF_INDICES or name not in OF_BITS
]


def test_every_other_metric_is_of_classes():
    assert {*OF_BITS, *OF_INDICES, *OF_ONE_HOT} == set(NAMES)


def refuses(name, outputs, targets, weights, words):
    with pytest.raises(DataError, match=words):
        figure(resolve_metric(name), outputs, targets, weights)


@pytest.mark.parametrize("weights", [None, torch.ones(16)])
@pytest.mark.parametrize("stranger", [3, -1, 255, 255.0, 0.5, float("nan")])
def test_targets_that_are_no_class_are_refused(weights, stranger):
    targets = CLASSES.clone().to(torch.tensor(stranger).dtype)
    targets[5] = stranger
    for name in OF_INDICES:
        refuses(name, SCORES, targets, weights, "classes of the outputs")


@pytest.mark.parametrize("weights", [None, torch.ones(16)])
@pytest.mark.parametrize("stranger", [2, -2, 255, float("nan")])
def test_targets_that_are_neither_0_nor_1_are_refused(weights, stranger):
    outputs, targets = drawn(16, 1)
    targets[5] = stranger
    for name in OF_BITS:
        words = "0s and 1s are other numbers|takes numbers from"
        refuses(name, outputs, targets, weights, words)


@pytest.mark.parametrize("weights", [None, torch.ones(16)])
@pytest.mark.parametrize(
    "stranger", [[0, 0, 0], [1, 1, 0], [2, -1, 0], [-100] * 3, [float("nan")] * 3]
)
def test_rows_that_are_no_probabilities_are_refused(weights, stranger):
    targets = torch.eye(3)[CLASSES]
    targets[5] = torch.tensor(stranger)
    for name in OF_ONE_HOT:
        refuses(name, SCORES, targets, weights, "don't sum to 1")


def test_a_target_that_can_not_be_may_have_weight_0():
    weights = torch.ones(16)
    weights[5] = 0
    outputs, targets = drawn(16)
    rows = torch.eye(3)[CLASSES]
    for names, x, y in (
        (OF_BITS, outputs, targets),
        (OF_INDICES, SCORES, CLASSES),
        (OF_ONE_HOT, SCORES, rows),
    ):
        marked = y.clone()
        marked[5] = 255
        kept = weights > 0
        for name in names:
            found = figure(resolve_metric(name), x, marked, weights)
            expected = figure(resolve_metric(name), x[kept], y[kept])
            assert found == pytest.approx(expected), name


def test_class_indices_of_minus_100_do_not_count():
    marked, kept = CLASSES.clone(), torch.arange(16) > 3
    marked[~kept] = -100
    for name in OF_INDICES:
        found = figure(resolve_metric(name), SCORES, marked)
        expected = figure(resolve_metric(name), SCORES[kept], CLASSES[kept])
        assert found == pytest.approx(expected), name


def masked(outputs, targets):
    values = nn.functional.softplus(outputs) - outputs * targets
    return torch.where(targets.eq(-100), torch.zeros_like(values), values)


@pytest.mark.parametrize("shape", [(16,), (16, 1), (16, 1, 3, 2)])
def test_0s_and_1s_of_minus_100_do_not_count(shape):
    x, y = drawn(*shape)
    is_kept = torch.rand(shape).gt(0.3)
    marked = y.masked_fill(is_kept.logical_not(), -100)
    model = IPUModel(Through())
    model.compile(ipufit.Optimizer("sgd", learning_rate=0.0), masked, metrics=OF_BITS)
    expected = model.evaluate(x[is_kept], y[is_kept], verbose=0)
    history = model.fit(x, marked, batch_size=4, verbose=0).history
    evaluated = model.evaluate(x, marked, batch_size=8, verbose=0)
    for name in OF_BITS:
        figures = [history[name][0], evaluated[name]]
        assert figures == pytest.approx([expected[name]] * 2, rel=1e-5), name


def with_one(targets, value):
    targets = targets.clone()
    targets[21] = torch.as_tensor(value)
    return targets


X, Y = torch.randn(32, 3), torch.arange(32) % 3
ONE_HOT, BITS = torch.eye(3)[Y], torch.arange(32) % 2.0
OF_CLASSES = [*("accuracy", "f1", "top_2_accuracy", "nll"), "categorical_hinge"]
NAMED = [  # outputs, targets, names, words
    (X, with_one(Y, 3), OF_CLASSES, "the target 3, and takes classes from 0 to 2"),
    (X, with_one(Y, -1), ["f1"], "the target -1, and takes"),
    (X, with_one(Y, 255), ["ce"], "the target 255, and takes"),
    (X, with_one(Y.float(), 0.5), ["f1"], "that is a fraction or NaN, and takes"),
    (X[:, 0], with_one(BITS, 2), ["auc", "exact_auc", "hinge"], "the target 2, and"),
    (X[:, 0], with_one(BITS, 0.5) * 3, ["accuracy", "bce"], "the target 3, and"),
    (X, with_one(ONE_HOT, [1, 1, 0]), ["accuracy", "f1"], "sum to 2 along"),
    (X, with_one(ONE_HOT, [2, -1, 0]), ["kl_div", "ce"], "that have -1 along"),
]


def size(outputs, targets):
    return outputs.square().mean()


def compiled(metrics, loss=size, **config):
    model = IPUModel(Through(), ipufit.IPUConfig(**config))
    model.compile("sgd", loss, metrics=metrics)
    return model


def calls(model, x, y):
    """Methods that compute metrics, each with the 22nd sample in it."""
    yield lambda: model.fit(x, y, batch_size=8, verbose=0)
    yield lambda: model.fit(x, y, batch_size=16, drop_last="pad", verbose=0)
    yield lambda: model.fit(x[:8], y[:8], 8, validation_data=(x, y), verbose=0)
    yield lambda: model.evaluate(x, y, batch_size=8, verbose=0)
    yield lambda: model.evaluate(x, y, batch_size=8, verbose=2)
    yield lambda: model.train_on_batch(x, y)
    yield lambda: model.test_on_batch(x, y)


@pytest.mark.parametrize(("x", "y", "names", "words"), NAMED)
def test_the_first_such_target_is_named(x, y, names, words):
    for name in names:
        with pytest.raises(DataError, match=rf"The metric '{name}' .*{words}"):
            compiled([name]).fit(x, y, 8, verbose=0)
        with pytest.raises(DataError, match=rf"The metric '{name}' .*{words}"):
            compiled([name]).evaluate(x, y, 8, verbose=0)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ["accuracy", "exact_auc"])
def test_every_method_names_it(replicas, name):
    model = compiled([size, name], replicas=replicas)
    for call in calls(model, X[:, :2], with_one(BITS.long(), 255)):
        with pytest.raises(DataError, match="the target 255, and takes classes"):
            call()


def test_a_loss_that_is_nan_is_no_matter_of_targets():
    model = compiled(["accuracy"], lambda outputs, _: outputs.log().mean())
    with pytest.warns(ipufit.IpufitWarning, match="loss is nan"):
        history = model.fit(X, Y, 8, verbose=0).history
    assert history["accuracy"][0] >= 0


@pytest.mark.parametrize("stranger", [3, -1, 255])
def test_what_the_message_says_works(stranger):
    y = with_one(Y, stranger)
    with pytest.raises(DataError, match="Mark those") as caught:
        compiled(["mean_iou"]).evaluate(X, y, 8, verbose=0)
    message = str(caught.value)
    kept = torch.arange(32) != 21
    expected = compiled(["mean_iou"]).evaluate(X[kept], Y[kept], 8, verbose=0)
    marked = y.masked_fill(y == stranger, -100)
    assert f"by ignore_index={stranger} of torch.nn.CrossEntropyLoss" in message
    assert f"ignore_class={stranger} of ipufit.metrics.MeanIoU" in message
    loss = nn.CrossEntropyLoss(ignore_index=stranger)
    metric = ipufit.metrics.MeanIoU(ignore_class=stranger)
    for model, targets in (
        (compiled(["mean_iou"]), marked),
        (compiled(["mean_iou"], loss), y),
        (compiled([metric]), y),
    ):
        found = model.evaluate(X, targets, 8, verbose=0)["mean_iou"]
        assert found == pytest.approx(expected["mean_iou"])
