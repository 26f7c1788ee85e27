# SPDX-License-Identifier: Apache-2.0
"""Which rows come back under an output mode."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import UnsupportedError, poptorch
from ipufit.engine.loop import check_rows, cut, describe_coverage, returned_rows
from tests import reference
from tests.strategies import output_modes, plans


class Echo(torch.nn.Module):
    """Returns its input, which is row numbers, and trains something beside."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, rows):
        loss = poptorch.identity_loss(self.weight * rows.sum(), reduction="mean")
        return rows, loss


def options_for(plan, mode, period):
    options = poptorch.Options()
    options.deviceIterations(plan.device_iterations)
    options.replicationFactor(plan.replicas).autoRoundNumIPUs(True)
    options.Training.gradientAccumulation(plan.gradient_accumulation)
    if mode == "EveryN":
        return options.outputMode(
            poptorch.OutputMode.EveryN, output_return_period=period
        )
    return options.outputMode(poptorch.OutputMode[mode or "All"])


@given(st.data(), plans())
def test_the_rows_are_those_that_poptorch_returns(data, plan):
    mode, period = data.draw(output_modes(plan).filter(lambda mode: mode[0] != "Sum"))
    options = options_for(plan, mode, period)
    training = poptorch.trainingModel(Echo(), options=options)
    rows = torch.arange(plan.samples_per_call, dtype=torch.float32)
    returned, _ = training(rows)
    training.destroy()
    expected = returned_rows(options, plan)
    assert torch.equal(returned, rows if expected is None else expected.float())
    mask = reference.covered_samples(plan, len(rows), mode, period)
    assert torch.equal(returned, rows[mask])
    coverage = describe_coverage(options, plan)
    if mask.all():
        assert coverage == ""
    else:
        assert coverage.startswith(f"OutputMode.{mode}: {int(mask.sum())} of every")


def test_rows_are_cut_from_every_tensor_and_the_rest_stays():
    nested = {"a": torch.arange(6), "b": (torch.arange(6) * 2, None, 3)}
    result = cut(nested, torch.tensor([5, 0]))
    assert result["a"].tolist() == [5, 0]
    assert result["b"][0].tolist() == [10, 0]
    assert result["b"][1:] == (None, 3)


@pytest.mark.parametrize("bad", [torch.zeros(()), torch.zeros(3), torch.zeros(8, 2)])
def test_outputs_without_a_row_per_sample_are_refused(bad):
    with pytest.raises(UnsupportedError, match=r"shape .* for 4 samples"):
        check_rows({"good": torch.zeros(4, 2), "bad": bad}, 4)
