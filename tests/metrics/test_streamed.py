# SPDX-License-Identifier: Apache-2.0
"""Functions of all outputs, on the host."""

import pickle

import numpy as np
import pytest
import sklearn.metrics
import torch

from ipufit.errors import DataError, UnsupportedError
from ipufit.metrics.streamed import StreamedFunction
from tests.metrics.harness import COUNT, figure, labels, scores


def kappa(outputs, targets):
    return sklearn.metrics.cohen_kappa_score(targets, outputs.argmax(-1))


def test_a_function_gets_all_rows_as_arrays():
    outputs, targets = scores(0, 4), labels(1)
    metric = StreamedFunction(kappa, direction="max")
    actual = figure(metric, outputs, targets, sizes=(5, 3))
    assert actual == pytest.approx(kappa(outputs.numpy(), targets.numpy()))
    assert (metric.name, metric.direction) == ("kappa", "max")


def test_rows_of_weight_0_are_left_out():
    outputs, targets = scores(0, 4), labels(1)
    weights = labels(2, num_classes=2).float()
    weights[:8] = 0.0  # a whole batch
    actual = figure(StreamedFunction(kappa), outputs, targets, weights, (8,))
    kept = weights > 0
    assert actual == pytest.approx(kappa(outputs[kept].numpy(), targets[kept].numpy()))


def test_nested_outputs_stay_nested():
    def gap(outputs, targets):
        assert isinstance(outputs["a"], np.ndarray)
        return abs(outputs["a"] - targets[0]).max() + outputs["b"].sum()

    metric = StreamedFunction(gap, "mine")
    for start in (0, 2):
        part = torch.arange(4.0)[start : start + 2]
        metric.update({"a": part, "b": part}, (part + 1,))
    assert metric.result() == 7.0
    assert metric.name == "mine"


def surplus(y_true, y_pred):
    return float((y_pred - y_true).sum())


def test_names_of_parameters_say_the_order_in_a_copy_for_another_process_too():
    for metric in (
        StreamedFunction(surplus),
        pickle.loads(pickle.dumps(StreamedFunction(surplus))),
    ):
        metric.update(torch.tensor([3.0, 2.0]), torch.tensor([1.0, 1.0]))
        assert (metric.name, metric.result()) == ("surplus", 3.0)


def test_other_weights_than_0_and_1_are_refused():
    with pytest.raises(UnsupportedError, match="must be 0 or 1"):
        figure(
            StreamedFunction(kappa), scores(0, 4), labels(1), torch.full((COUNT,), 2)
        )


def test_positions_are_left_out():
    outputs, targets = scores(0, 3, 4), labels(0, 3)
    weights = torch.zeros(COUNT, 3, 1)
    weights[:, 1] = 1.0
    actual = figure(StreamedFunction(kappa), outputs, targets, weights, (8,))
    assert actual == pytest.approx(kappa(outputs[:, 1].numpy(), targets[:, 1].numpy()))


@pytest.mark.parametrize(
    "value", [torch.zeros(2), {"a": 1}, None, (1.0, 2.0), np.zeros((2, 2))]
)
def test_what_is_not_one_number_is_refused(value):
    with pytest.raises(DataError, match="isn't one number"):
        figure(StreamedFunction(lambda outputs, targets: value), scores(0), labels(0))


def test_weights_of_axes_that_outputs_do_not_have_are_refused():
    outputs, targets = scores(0, 4, 3, 2), labels(1, 3, 2)
    metric = StreamedFunction(lambda outputs, targets: 0.0)
    with pytest.raises(DataError, match=r"weights of shape \(37, 3, 2\) don't fit"):
        figure(metric, outputs, targets, torch.ones(COUNT, 3, 2))
