# SPDX-License-Identifier: Apache-2.0
"""Overlapped transfers: what is marked, and what compiling refuses."""

from __future__ import annotations

import pytest
import torch

import ipufit.emulator as poptorch
from tests.emulator import _models
from tests.emulator._models import Linear, X

MODE = poptorch.OverlapMode.OverlapAccumulationLoop


def options():
    result = poptorch.Options()
    result.setExecutionStrategy(poptorch.ShardedExecution())
    result.TensorLocations.numIOTiles(32)
    return result


def run(forward, opts=None):
    return _models.run(forward, X, options=opts or options())


def mark_in(x, mode=MODE):
    return poptorch.set_overlap_for_input(x, mode)


def mark_out(x, mode=MODE):
    return poptorch.set_overlap_for_output(x, mode)


@pytest.mark.parametrize("mark", [mark_in, mark_out])
def test_on_the_host_a_mark_returns_what_it_gets(mark):
    nested = {"a": [X, 3], "b": (X,)}
    assert mark(nested) is nested


def test_marked_inputs_and_outputs_keep_their_values():
    def forward(x):
        x = mark_in(x)
        return mark_out([x + 1, x * 2])

    first, second = run(forward)
    assert torch.equal(first, X + 1)
    assert torch.equal(second, X * 2)


def used_twice(x):
    return x + 1, mark_in(x)


def no_input(x):
    y = x + 1
    return y, mark_in(y)


def no_output(x):
    return mark_out(x) + 1


def returned_twice(x):
    y = x + 1
    return y, mark_out(y)


def mark_returned_twice(x):
    y = mark_out(x + 1)
    return y, y


@pytest.mark.parametrize(
    ("forward", "fragment"),
    [
        (used_twice, "must be the only op applied to an input.*input 0"),
        (no_input, "not a tensor input to the model"),
        (no_output, "not a tensor output to the model"),
        (returned_twice, "returned twice"),
        (mark_returned_twice, "returned twice"),
    ],
)
def test_a_mark_in_the_wrong_place_is_refused(forward, fragment):
    with pytest.raises(poptorch.Error, match=fragment):
        run(forward)


def test_no_overlap_is_never_refused():
    def forward(x):
        return mark_in(x + 1, poptorch.OverlapMode.NoOverlap)

    assert torch.equal(run(forward, poptorch.Options()), X + 1)


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        (
            options().setExecutionStrategy(poptorch.PipelinedExecution()),
            r"supported with poptorch\.Pipelined",
        ),
        (
            poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution()),
            "No IO tiles allocated",
        ),
        (options().outputMode(poptorch.OutputMode.Final), r"OutputMode.Sum, not Final"),
    ],
)
def test_options_without_an_overlap_are_refused(opts, message):
    with pytest.raises(poptorch.Error, match=message):
        run(lambda x: mark_in(x), opts)


def test_the_loss_may_be_a_marked_output():
    class Marked(Linear):
        def forward(self, x):
            loss = poptorch.identity_loss(super().forward(x), "mean")
            return mark_out(loss)

    opts = options().outputMode(poptorch.OutputMode.All)
    model = poptorch.trainingModel(Marked(lambda layer, x: layer(x)), opts)
    assert model(X).item() > 0
