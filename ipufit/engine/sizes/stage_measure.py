# SPDX-License-Identifier: Apache-2.0
"""Counts what the operators of each stage of a pipeline take, make and save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ipufit.engine.observers.observing import tensors_of
from ipufit.planning.stage_cost import StageCost, WeightCost

from .operator_flops import flops_of, operator_name
from .position import Position


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


class Measure(TorchDispatchMode):
    """Counts what the operators of each stage take, make and save.

    Tensors are told apart by their storages, which are held until the end, so that none
    is taken for another.
    """

    def __init__(
        self,
        position: Position,
        given: Sequence[Tensor],
        weights: Sequence[WeightCost],
        module: torch.nn.Module,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._position = position
        self._sizes: dict[int, tuple[Any, int]] = {}
        named = dict(module.named_parameters())
        self._weights = {self._key(named[one.name]): one for one in weights}
        self._buffers = {self._key(buffer) for buffer in module.buffers()}
        self._computed = {self._key(tensor) for tensor in given}  # not constants
        self._stages: dict[int, _Seen] = {}
        self._users: dict[int, dict[int, None]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and count it."""
        result = func(*args, **(kwargs or {}))
        number, stage = self._now()
        flops = flops_of(func, args, result)
        stage.flops += flops or 0
        if flops is None:
            stage.uncounted[operator_name(func)] = None
        taken = [self._key(tensor) for tensor in tensors_of((args, kwargs or {}))]
        for key in taken:
            if key in self._weights or key in self._buffers:
                self._users.setdefault(key, {})[number] = None
            elif key in self._computed and key not in stage.made:
                stage.inputs[key] = None
        for tensor in tensors_of(result):
            key = self._key(tensor)
            if key not in taken and key not in self._weights:
                stage.made[key] = None
                self._computed.add(key)
        return result

    def save(self, tensor: Tensor) -> Tensor:
        """Count a tensor that is saved for the backward pass."""
        key = self._key(tensor)
        if key not in self._weights and key not in self._buffers:
            self._now()[1].saved[key] = None
        return tensor

    def name(self, name: str) -> None:
        """Remember a submodule that is called in the stage, unless one around it is."""
        _, stage = self._now()
        if not any(name.startswith(f"{other}.") for other in stage.names):
            stage.names[name] = None

    def keep(self, output: Any) -> None:
        """Keep the output of a submodule that `recompute` names."""
        _, stage = self._now()
        stage.num_kept += 1
        stage.kept.update(dict.fromkeys(map(self._key, tensors_of(output))))

    def stages(self) -> tuple[StageCost, ...]:
        """The costs of all stages that were come to."""
        if not self._stages:
            self._now()
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
                    buffer_bytes=self._bytes(own & self._buffers),
                    flops=stage.flops,
                    input_bytes=self._bytes(stage.inputs),
                    saved_bytes=self._bytes(stage.saved),
                    kept_bytes=self._bytes(kept),
                    made_bytes=self._bytes({**stage.inputs, **stage.made}),
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

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._sizes:
            width = tensor.element_size()
            count = storage.nbytes() // width
            self._sizes[key] = storage, count * device_bytes(tensor.dtype)
        return key

    def _bytes(self, keys: Any) -> int:
        return sum(self._sizes[key][1] for key in keys)


def device_bytes(dtype: torch.dtype) -> int:
    """Bytes of a number on a device, which has none of 64 bits.

    Example:
        >>> device_bytes(torch.int64), device_bytes(torch.float16)
        (4, 2)
    """
    width: int = torch.empty((), dtype=dtype).element_size()
    return min(4, width)
