# SPDX-License-Identifier: Apache-2.0
"""Counts what the operators of each stage of a pipeline take, make and save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Sequence

import torch
from torch import Tensor

from ipufit.engine.observers.observing import tensors_of
from ipufit.planning.memory import StageCost, WeightCost

from .position import Position
from .storages import Storages


@dataclass
class _Seen:
    """The findings of a pass about one stage: tensors by keys of their storages."""

    ipu: int
    names: dict[str, None] = field(default_factory=dict)
    flops: int = 0
    weights: dict[int, None] = field(default_factory=dict)
    buffers: dict[int, None] = field(default_factory=dict)
    inputs: dict[int, None] = field(default_factory=dict)
    saved: dict[int, None] = field(default_factory=dict)
    made: dict[int, None] = field(default_factory=dict)
    kept: dict[int, None] = field(default_factory=dict)
    num_kept: int = 0
    uncounted: dict[str, None] = field(default_factory=dict)


class Measure:
    """Counts what the operators of each stage take, make and save.

    It hears of operators, and of tensors that are saved. Tensors are told apart by
    their storages.

    Args:
        position: The stage that the pass has come to.
        given: The tensors that the module gets.
        weights: Costs of the module's parameters.
        module: The module that is called.
    """

    def __init__(
        self,
        position: Position,
        given: Sequence[Tensor],
        weights: Sequence[WeightCost],
        module: torch.nn.Module,
    ) -> None:
        self._position = position
        self._storages = storages = Storages()
        named = dict(module.named_parameters())
        self._weights = {storages.key(named[one.name]): one for one in weights}
        self._buffers = {*storages.keys(module.buffers())}
        self._computed = {*storages.keys(given)}  # not constants
        self._stages: dict[int, _Seen] = {}
        self._users: dict[int, dict[int, None]] = {}

    def run(self, given: Any, result: Any, flops: int, uncounted: str | None) -> None:
        """Count an operator."""
        number, stage = self._now()
        stage.flops += flops
        if uncounted is not None:
            stage.uncounted[uncounted] = None
        taken = self._storages.keys(tensors_of(given))
        for key in taken:
            if key in self._weights or key in self._buffers:
                self._users.setdefault(key, {})[number] = None
            elif key in self._computed and key not in stage.made:
                stage.inputs[key] = None
        for key in self._storages.keys(tensors_of(result)):
            if key not in taken and key not in self._weights:
                stage.made[key] = None
                self._computed.add(key)

    def save(self, tensor: Tensor) -> None:
        """Count a tensor that is saved for the backward pass."""
        key = self._storages.key(tensor)
        if key not in self._weights and key not in self._buffers:
            self._now()[1].saved[key] = None

    def name(self, name: str) -> None:
        """Remember a submodule that is called in the stage, unless one around it is."""
        _, stage = self._now()
        if not any(name.startswith(f"{other}.") for other in stage.names):
            stage.names[name] = None

    def keep(self, output: Any) -> None:
        """Keep the output of a submodule that `recompute` names."""
        _, stage = self._now()
        stage.num_kept += 1
        stage.kept.update(self._storages.keys(tensors_of(output)))

    def stages(self) -> tuple[StageCost, ...]:
        """The costs of all stages that were come to."""
        if not self._stages:
            self._now()
        num_bytes = self._storages.num_bytes
        owners = {key: min(users) for key, users in self._users.items()}
        costs = []
        for number, stage in sorted(self._stages.items()):
            own = {key for key, owner in owners.items() if owner == number}
            kept = {**stage.inputs, **stage.kept}
            costs.append(
                StageCost(
                    stage=number,
                    ipu=stage.ipu,
                    names=tuple(stage.names),
                    weights=tuple(w for k, w in self._weights.items() if k in own),
                    buffer_bytes=num_bytes(own & self._buffers),
                    flops=stage.flops,
                    input_bytes=num_bytes(stage.inputs),
                    saved_bytes=num_bytes(stage.saved),
                    kept_bytes=num_bytes(kept),
                    made_bytes=num_bytes({**stage.inputs, **stage.made}),
                    num_kept=stage.num_kept,
                    uncounted=tuple(stage.uncounted),
                )
            )
        return tuple(costs)

    def unused(self) -> tuple[str, ...]:
        """Names of parameters that nothing takes."""
        return tuple(w.name for k, w in self._weights.items() if k not in self._users)

    def shared(self) -> tuple[str, ...]:
        """Names of parameters that several stages take."""
        users = self._users
        return tuple(
            w.name for k, w in self._weights.items() if len(users.get(k, ())) > 1
        )

    def _now(self) -> tuple[int, _Seen]:
        number, ipu = self._position.place
        return number, self._stages.setdefault(number, _Seen(ipu))
