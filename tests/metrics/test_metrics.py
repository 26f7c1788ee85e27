# SPDX-License-Identifier: Apache-2.0
"""Every metric against scikit-learn, through one harness, and their collection."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import ConfigError, IPUConfig, IPUModel, Metric, Sums, UnknownNameError
from ipufit.metrics import FunctionMetric, MetricCollection, resolve_metrics
from ipufit.metrics.classification import categorical_accuracy

COUNT = 37


def generator(seed):
    return torch.Generator().manual_seed(seed)


def scores(seed, *shape):
    return torch.randn(COUNT, *shape, generator=generator(seed))


def classes(seed, *shape):
    return torch.randint(0, 4, (COUNT, *shape), generator=generator(seed))


def one_hot(labels):
    return torch.nn.functional.one_hot(labels, 4).float()


def sparse(outputs, targets):
    return sklearn.metrics.accuracy_score(
        targets.reshape(-1), outputs.argmax(-1).reshape(-1)
    )


def dense(outputs, targets):
    return sklearn.metrics.accuracy_score(targets.argmax(-1), outputs.argmax(-1))


def binary(outputs, targets):
    probabilities = torch.sigmoid(outputs).reshape(-1)
    return sklearn.metrics.accuracy_score(
        targets.reshape(-1) > 0.5, probabilities > 0.5
    )


def squared(outputs, targets):
    return sklearn.metrics.mean_squared_error(targets.reshape(-1), outputs.reshape(-1))


def absolute(outputs, targets):
    return sklearn.metrics.mean_absolute_error(targets.reshape(-1), outputs.reshape(-1))


LABELS, POSITIONS = classes(1), classes(2, 5)
TRUTHS = classes(3).gt(1)

# Name, outputs, targets, and scikit-learn's figure for them.
CASES = [
    ("accuracy", scores(0, 4), LABELS, sparse),
    ("accuracy", scores(0, 4), LABELS.unsqueeze(1), sparse),
    ("accuracy", scores(0, 4), one_hot(LABELS), dense),
    ("accuracy", scores(0, 5, 4), POSITIONS, sparse),
    ("accuracy", scores(0, 1), TRUTHS.long(), binary),
    ("accuracy", scores(0), TRUTHS.float(), binary),
    ("accuracy", scores(0), TRUTHS.long().unsqueeze(1), binary),
    ("acc", scores(4, 4), LABELS, sparse),
    ("sparse_categorical_accuracy", scores(5, 4), LABELS, sparse),
    ("sparse_categorical_accuracy", scores(5, 4), LABELS.to(torch.uint8), sparse),
    ("categorical_accuracy", scores(6, 4), one_hot(LABELS), dense),
    ("binary_accuracy", scores(7, 1), TRUTHS.float(), binary),
    ("mse", scores(8, 2), scores(9, 2), squared),
    ("mse", scores(8, 1), scores(9), squared),
    ("mean_squared_error", scores(8), LABELS, squared),
    ("mae", scores(10, 2, 3), scores(11, 2, 3), absolute),
    ("mean_absolute_error", scores(10), scores(11, 1), absolute),
]
CASE_IDS = [f"{name}-{tuple(x.shape)}-{tuple(y.shape)}" for name, x, y, _ in CASES]


def stream(collection, outputs, targets, sizes):
    """Add up batches of these sizes, over and over, until all rows were added."""
    start = 0
    while start < COUNT:
        rows = slice(start, start + sizes[0])
        x, y = outputs[rows], targets[rows]
        collection.add(collection.vector(x.new_zeros(()), x, y, len(x)))
        start, sizes = start + sizes[0], sizes[1:] + sizes[:1]


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "expected"), CASES, ids=CASE_IDS
)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_a_metric_is_scikit_learns_whatever_the_batches(
    name, outputs, targets, expected, sizes
):
    collection = MetricCollection(resolve_metrics([name]))
    stream(collection, outputs, targets, sizes)
    assert collection.logs()[name] == pytest.approx(
        expected(outputs, targets), rel=1e-5
    )
    assert collection.samples == COUNT


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "expected"), CASES, ids=CASE_IDS
)
def test_a_metric_of_the_device_is_that_of_the_host(name, outputs, targets, expected):
    """In the training program, with a module that hands its input through."""

    class Through(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.scale

    model = IPUModel(Through(), IPUConfig(replicas=2, device_iterations=2))
    model.compile(
        torch.optim.SGD(model.module.parameters(), lr=0.0),
        lambda x, y: x.square(),
        [name],
    )
    outputs, targets = outputs[:36], targets[:36]
    history = model.fit(outputs, targets, batch_size=6, verbose=0)
    figure = pytest.approx(expected(outputs, targets), rel=1e-5)
    assert history.history[name] == [figure]
    assert model.evaluate(outputs, targets, verbose=0)[name] == figure


def test_every_name_is_tested():
    with pytest.raises(UnknownNameError) as caught:
        resolve_metrics([""])
    known = str(caught.value).split("Known: ")[1].rstrip(".").split(", ")
    assert known == sorted({name for name, *_ in CASES})


# Names ----------------------------------------------------------------------------


def bias(outputs, targets):
    return outputs - targets


class Ours(Metric):
    def sums(self, outputs, targets):
        return Sums(outputs.sum(), torch.full_like(outputs.sum(), 2.0))


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        (None, []),
        ([], []),
        ("mae", ["mae"]),
        (("mae", "mse"), ["mae", "mse"]),
        (bias, ["bias"]),
        ([lambda x, y: x], ["lambda"]),
        (["mae", "mae", "mae"], ["mae", "mae_1", "mae_2"]),
        (Ours("ours"), ["ours"]),
        ([FunctionMetric("loss", bias)], ["loss_1"]),
    ],
)
def test_a_metric_has_a_name_of_its_own(metrics, names):
    assert list(resolve_metrics(metrics)) == names


@pytest.mark.parametrize("metrics", [3, [3], {"mae": "mae"}, [None], [["mae"]]])
def test_what_is_no_metric_is_refused(metrics):
    with pytest.raises(ConfigError, match="metrics"):
        resolve_metrics(metrics)


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(UnknownNameError, match=r"'accurracy'.*'accuracy'"):
        resolve_metrics(["accurracy"])


def test_one_hot_targets_of_another_shape_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"\(2, 3\).*sparse_categorical_accuracy"):
        categorical_accuracy(torch.zeros(2, 3), torch.zeros(2, 4))


# Sums -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x - y).square(),
        lambda x, y: (x - y).square().mean(dim=1),
        lambda x, y: (x - y).square().mean(),
    ],
)
def test_a_function_gives_values_per_element_or_sample_or_a_mean(function):
    outputs, targets = scores(0, 3), scores(1, 3)
    collection = MetricCollection({"f": FunctionMetric("f", function)})
    stream(collection, outputs, targets, [10, 7])
    assert collection.logs()["f"] == pytest.approx(squared(outputs, targets), rel=1e-5)


def test_figures_are_sorted_prefixed_and_nan_before_anything_was_counted():
    collection = MetricCollection(resolve_metrics(["mse", "accuracy"]))
    logs = collection.logs("val_")
    assert list(logs) == ["val_accuracy", "val_loss", "val_mse"]
    assert all(np.isnan(value) for value in logs.values())


def test_a_reset_forgets():
    collection = MetricCollection({})
    collection.add(torch.tensor([6.0, 2.0]))
    assert collection.logs() == {"loss": 3.0}
    collection.reset()
    collection.add(torch.tensor([[1.0, 1.0], [5.0, 1.0]]))
    assert collection.logs() == {"loss": 3.0}
    assert collection.samples == 2


def test_many_samples_add_up_without_loss():
    """In float32, 2**24 + 1 is 2**24."""
    collection = MetricCollection({})
    collection.add(torch.tensor([2.0**24, 2.0**24]))
    for _ in range(100):
        collection.add(torch.tensor([0.0, 1.0]))
    assert collection.samples == 2**24 + 100


def test_the_sums_carry_no_gradient():
    weight = torch.ones(2, 1, requires_grad=True)
    collection = MetricCollection(resolve_metrics(["mae"]))
    vector = collection.vector(weight.sum(), weight * 2, torch.zeros(2, 1), 2)
    assert not vector.requires_grad
    assert vector.tolist() == [2.0, 2.0, 4.0, 2.0]
