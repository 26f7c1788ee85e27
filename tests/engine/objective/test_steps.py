# SPDX-License-Identifier: Apache-2.0
"""What steps return is taken apart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ipufit import ConfigError
from ipufit.engine.objective import StepResult, checked_step, result_of_step
from ipufit.scalars import collected

LOSS, OUTPUTS = torch.tensor(2.0), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("returned", "loss", "outputs"),
    [
        (LOSS, LOSS, ()),
        ((LOSS, OUTPUTS), LOSS, OUTPUTS),
        ((OUTPUTS, LOSS), LOSS, OUTPUTS),
        ({"loss": LOSS}, LOSS, ()),
        ({"loss": LOSS, "outputs": (OUTPUTS, 1)}, LOSS, (OUTPUTS, 1)),
        ({"outputs": OUTPUTS}, None, OUTPUTS),
        (None, None, ()),
    ],
    ids=range(7),
)
def test_losses_and_outputs(returned, loss, outputs):
    with collected() as scalars:
        result = result_of_step(returned)
    assert result == StepResult(loss, outputs)
    assert scalars == {}


def test_objects_of_modules_are_taken_too():
    result = result_of_step(SimpleNamespace(loss=LOSS, logits=OUTPUTS))
    assert result.loss is LOSS
    assert result.outputs.logits is OUTPUTS


def test_scalars_are_logged():
    with collected() as scalars:
        result_of_step({"loss": LOSS, "size": OUTPUTS.sum(), "one": torch.ones(1, 1)})
    assert scalars == {"size": torch.tensor(6.0), "one": torch.tensor(1.0)}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"loss": LOSS, "rows": OUTPUTS}, r"'rows', which is float32 \[3, 2\]"),
        ({"loss": LOSS, "rows": 3}, "'rows', which is nothing and no scalar"),
        ({"loss": 2.0}, r"returned 2\.0 as its loss"),
    ],
    ids=str,
)
def test_other_values_are_refused(returned, message):
    with pytest.raises(ConfigError, match=message):
        result_of_step(returned)


def test_a_step_is_a_function():
    checked_step("step", None)
    checked_step("step", result_of_step)
    with pytest.raises(ConfigError, match=r"step=3 is no function of the module"):
        checked_step("step", 3)
