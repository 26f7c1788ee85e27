# SPDX-License-Identifier: Apache-2.0
"""Views of a model: its layers, its gradients, and itself in a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ipufit.data import as_source
from ipufit.engine import check_shapes
from ipufit.errors import ConfigError

from .parts import Model
from .splitting import settle

if TYPE_CHECKING:
    from ipufit.summary import Summary


def summary(self: Model, x: Any = None) -> Summary:
    """Show the layers: shapes, parameters, and the stage and IPU of each.

    Nothing is compiled for it.

    Args:
        x: Inputs to show shapes for, and the blocks that `forward` begins itself; by
            default the inputs of the last run. One sample of them is run through the
            module on the host.

    Returns:
        The summary, with `total_parameters` and `num_ipus`, the IPUs of all replicas;
        a notebook prints it once more.

    Example:
        >>> from ipufit import IPUConfig, IPUModel
        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> model = IPUModel(layers, IPUConfig(pipeline=("0", "1"), replicas=2))
        >>> model.summary(torch.zeros(1, 2)).num_ipus  # doctest: +ELLIPSIS
                    Sequential...
        4
    """
    source = self._data.source if x is None else as_source(x)
    self._executors.fetch_weights()
    example = None
    if source is None:
        check_shapes(self.module)
    else:
        settle(self, source)
        leaves = source.example(1, inputs_only=True)
        example = source.structure.inputs.rebuild(leaves)
    from ipufit.summary import summarize  # few processes ask for it

    summary = summarize(self.module, self.config, example)
    summary.print()
    return summary


def gradients(self: Model) -> dict[str, torch.Tensor]:
    """The gradients of the last call, in a callback that watches them.

    Returns:
        For each parameter that a callback names in `watched_gradients` the mean of
        the gradients of the call's updates: float32, of the parameter's shape,
        without loss scaling and before clipping.

    Raises:
        ConfigError: It isn't called while `fit` runs, or before the first call.
    """
    if self._runs.snapshot is None:
        raise ConfigError(
            "gradients() is for callbacks while fit() runs: there is no training "
            "program now. GradientMonitor shows how."
        )
    return self._runs.snapshot.training.gradients()


def described(model: Model) -> str:
    """A model in a line: its module, layout, and the settings of `compile`."""
    compiled = "not compiled"
    if model._settings is not None:
        objective = model._settings.objective
        losses = ", ".join(loss.name for _, loss in objective.losses)
        metrics = ", ".join(measure.full_name for measure in objective.measures)
        own = "of the module" if objective.steps is None else "of its own step"
        compiled = (
            f"compiled with {type(model._settings.optimization.optimizer).__name__}, "
            f"loss {losses or own}, metrics {metrics or 'none'}"
        )
    module = type(model.module).__name__
    return f"<{type(model).__name__}: {module} on {model.config}, {compiled}>"
