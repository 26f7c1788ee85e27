# SPDX-License-Identifier: Apache-2.0
"""Calls a module to measure it, as the model's programs call it."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from ipufit.data import SampleStructure
from ipufit.engine import NoForwardError, call_module, call_step

from .parts import Model


def measured_call(
    model: Model, structure: SampleStructure, *, is_fit: bool
) -> Callable[[torch.nn.Module, Sequence[Tensor]], Any]:
    """A function that calls the model's module by itself, or in a step.

    It takes a copy of the module, and the tensors of a micro-batch.

    Args:
        model: The model, compiled or not.
        structure: Nesting of the data.
        is_fit: Whether the data are those of a `fit`. If not, data without targets may
            be those of `predict`, too: then the step of `predict` is called if there is
            one, or the module, and the step of `fit` only if the module has no
            `forward`.

    Example:
        >>> from ipufit import IPUModel
        >>> from ipufit.data import as_source
        >>> model = IPUModel(torch.nn.Linear(2, 3))
        >>> x = torch.zeros(4, 2)
        >>> call = measured_call(model, as_source(x).structure, is_fit=False)
        >>> call(model.module, [x]).shape
        torch.Size([4, 3])
    """
    settings = model._settings
    steps = None if settings is None else settings.objective.steps

    def call(module: torch.nn.Module, tensors: Sequence[Tensor]) -> Any:
        inputs, _ = structure.split(tensors)
        if steps is None:
            return call_module(module, inputs)
        if is_fit or structure.has_targets:
            batch = structure.batch(inputs, tensors)
            return call_step(steps.training, module, batch)
        if steps.prediction is not None:
            return call_step(steps.prediction, module, inputs)
        try:
            return call_module(module, inputs)
        except NoForwardError:
            return call_step(steps.training, module, inputs)

    return call
