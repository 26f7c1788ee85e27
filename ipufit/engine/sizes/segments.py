# SPDX-License-Identifier: Apache-2.0
"""Segments of a forward pass, from call to call of submodules, made into blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Sequence

import torch
from torch import Tensor

from ipufit.engine.observers.observing import tensors_of
from ipufit.planning.split import BlockCost

from .storages import Storages, device_bytes


@dataclass
class _Segment:
    """The operators from the call of one submodule to the call of the next.

    Attributes:
        name: Name of the submodule; empty before the first.
        used: Storages that operators read, or that are returned.
        made: Storages that operators make.
    """

    name: str
    has_operators: bool = False
    flops: int = 0
    uncounted: dict[str, None] = field(default_factory=dict)
    used: dict[int, None] = field(default_factory=dict)
    made: dict[int, None] = field(default_factory=dict)
    saved: dict[int, None] = field(default_factory=dict)

    def join(self, other: _Segment) -> None:
        """Take up what runs next."""
        self.flops += other.flops
        for mine, its in (
            (self.uncounted, other.uncounted),
            (self.used, other.used),
            (self.made, other.made),
            (self.saved, other.saved),
        ):
            mine.update(its)  # type: ignore[arg-type]


class Segments:
    """The segments of a forward pass on tensors without values.

    It hears of operators, and of tensors that are saved. Tensors are told apart by
    their storages.

    Args:
        module: The module that is called.
        inputs: The tensors that it gets.

    Example:
        >>> layer, x = torch.nn.Linear(2, 3), torch.zeros(4, 2)
        >>> segments = Segments(layer, [x])
        >>> segments.run([x, layer.weight], torch.zeros(4, 3), 48, None)
        >>> [cost.flops for cost in segments.costs()]
        [48]
    """

    def __init__(self, module: torch.nn.Module, inputs: Sequence[Tensor]) -> None:
        self._storages = storages = Storages()
        named = module.named_parameters()
        self._parameters = {storages.key(p): (name, p) for name, p in named}
        self._buffers = {storages.key(b): b for b in module.buffers()}
        self._segments = [_Segment("")]
        self._segments[0].made.update(storages.keys(inputs))

    def begin(self, name: str) -> None:
        """Begin a segment, where a submodule is called."""
        self._segments.append(_Segment(name))

    def run(self, given: Any, result: Any, flops: int, uncounted: str | None) -> None:
        """Take an operator into the segment."""
        now = self._segments[-1]
        now.has_operators = True
        now.flops += flops
        if uncounted is not None:
            now.uncounted[uncounted] = None
        used = self._storages.keys(tensors_of(given))
        now.used.update(used)
        made = self._storages.keys(tensors_of(result))
        now.made.update(dict.fromkeys(key for key in made if key not in used))

    def save(self, tensor: Tensor) -> None:
        """Take a tensor into the segment that is saved for the backward pass."""
        self._segments[-1].saved[self._storages.key(tensor)] = None

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Use tensors in the last segment: they are returned."""
        self._segments[-1].used.update(self._storages.keys(tensors))

    def costs(self) -> tuple[BlockCost, ...]:
        """The costs of the blocks that the segments make."""
        blocks = self._blocks()
        maker = {key: n for n, b in reversed(list(enumerate(blocks))) for key in b.made}
        last_use = {key: n for n, block in enumerate(blocks) for key in block.used}
        crossing = [0] * len(blocks)
        for key, first in maker.items():
            for boundary in range(first, last_use.get(key, first)):
                crossing[boundary] += self._storages.num_bytes([key])
        used: set[int] = set()
        saved: set[int] = set()
        costs = []
        for block, output_bytes in zip(blocks, crossing):
            cost = self._cost(block, used)
            activations = {*block.saved} & {*maker} - saved
            num_saved = self._storages.num_bytes(activations)
            costs.append(
                cost._replace(saved_bytes=num_saved, output_bytes=output_bytes)
            )
            used.update(block.used)
            saved.update(activations)
        return tuple(costs)

    def _cost(self, block: _Segment, used: set[int]) -> BlockCost:
        """The costs of a block but for those of activations."""
        weights = [key for key in block.used if key in self._parameters]
        new = [self._parameters[key][1] for key in weights if key not in used]
        buffers = {*block.used} & {*self._buffers} - used
        return BlockCost(
            name=block.name,
            flops=block.flops,
            weights=tuple(self._parameters[key][0] for key in weights),
            parameters=sum(one.numel() for one in new),
            parameter_bytes=sum(map(_device_bytes, new)),
            trained_parameters=sum(one.numel() for one in new if one.requires_grad),
            buffer_bytes=sum(_device_bytes(self._buffers[key]) for key in buffers),
            uncounted=tuple(block.uncounted),
        )

    def _blocks(self) -> list[_Segment]:
        """Join segments that begin at no name of their own, or do nothing yet."""
        times = Counter(segment.name for segment in self._segments)
        blocks = [_Segment("")]
        is_filled = False  # since the block's own submodule was called
        for segment in self._segments:
            if segment.name and times[segment.name] == 1:
                if is_filled:
                    blocks.append(_Segment(""))
                    is_filled = False
                blocks[-1].name = blocks[-1].name or segment.name
            blocks[-1].join(segment)
            is_filled |= bool(blocks[-1].name and segment.has_operators)
        return blocks


def _device_bytes(tensor: Tensor) -> int:
    return int(tensor.numel()) * device_bytes(tensor.dtype)
