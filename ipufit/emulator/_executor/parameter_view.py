# SPDX-License-Identifier: Apache-2.0
"""The stand-in for a parameter of the user's module that an executor hands out."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ipufit.emulator._executor.model_state import ModelState
from ipufit.emulator._layout.replica_groups import Grouping
from ipufit.emulator.enums import CommGroupType, VariableRetrievalMode

logger = logging.getLogger("poptorch::python")


class ParameterView:
    """A parameter of the top-level module, as its executor shows it.

    As in PopTorch it isn't a tensor: it only passes attributes on.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> view = inferenceModel(torch.nn.Linear(2, 3)).weight
        >>> isinstance(view, torch.Tensor), view.shape
        (False, torch.Size([3, 2]))
    """

    def __init__(self, parameter: torch.nn.Parameter, state: ModelState) -> None:
        self._parameter = parameter
        self._state = state

    def __getattr__(self, name: str) -> Any:
        """Get an attribute of the parameter."""
        return getattr(self._parameter, name)

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Let groups of replicas have values of their own for this parameter.

        The parameter must have a leading dimension, one element for each group; the
        module is traced with `parameter[0]`. Each group sums its own gradients. A mean
        still divides by the number of all replicas, unless it is a running mean,
        which divides by the size of the group. The state of PopTorch's optimisers has
        the leading dimension too. `max_grad_norm` counts the gradients of all groups.

        Call it before the model is compiled.

        Args:
            comm_group_type: Way in which replicas form groups.
            shards: Number of replicas in each group; without effect for `All` (one
                group) and `NoGrouping` (one group for each replica).
            variable_retrieval_mode: With `AllReplicas` the leading dimension is the
                number of replicas, and the value of each is read back into it; groups
                start from the value of their first replica.

        Raises:
            AssertionError: An argument has the wrong type.

        Example:
            >>> from ipufit.emulator import CommGroupType, Options
            >>> from ipufit.emulator import VariableRetrievalMode, inferenceModel
            >>> class Scale(torch.nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.factor = torch.nn.Parameter(torch.tensor([[2.0], [3.0]]))
            ...     def forward(self, x):
            ...         return self.factor * x
            >>> inference = inferenceModel(Scale(), Options().replicationFactor(2))
            >>> inference.factor.replicaGrouping(
            ...     CommGroupType.NoGrouping, 0, VariableRetrievalMode.OnePerGroup
            ... )
            >>> inference(torch.ones(2)).tolist()
            [2.0, 3.0]
        """
        if self._state.isCompiled():
            logger.warning(
                "replicaGrouping() has no effect on an executable that is already "
                "compiled: it counts for the next compilation, after destroy()"
            )
        self._state.grouped_parameters.add(
            self._parameter,
            Grouping(comm_group_type, shards, variable_retrieval_mode).check(),
        )
