# SPDX-License-Identifier: Apache-2.0
"""The program that a device runs for each micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable

import torch
from torch import Tensor
from torch.fx.graph_module import GraphModule

from ipufit.emulator._ground.custom_args import reconstructTensorStructure
from ipufit.emulator._ground.switches import uses_channels_last
from ipufit.emulator._options.strategies import BlockPlacement
from ipufit.emulator._program.memory_format import in_channels_last
from ipufit.emulator._program.pooling import with_sliced_pooling


@dataclass(frozen=True)
class Program:
    """The operations on one micro-batch, recorded from the user's module.

    Attributes:
        graph: Takes the weights, then the inputs. Returns the outputs that it
            computes, then the loss if there is one.
        weight_names: Names of the weights, in the order in which the graph takes them.
        weight_shapes: Shapes of the weights, in the same order.
        output_structure: The value that `forward` returned, with the traced tensors.
        constant_outputs: Index to value of the outputs that are the same for every
            micro-batch.
        host_outputs: Index to value of the outputs that never were on the device.
        has_loss: Whether the last result is the final loss.
        blocks: The IPU, stage and phase of each block, in the order of their begins.
        ipus: The IPUs of one replica that run operators.
        is_random: Whether the program draws random numbers.
        updated_weights: Floating-point weights that it changes in place.
        volatile_weights: Integer weights that it changes in place. They are constants
            of the program, so the changes don't outlive a micro-batch.
        unsynchronised_weights: Updated weights that replicas would have to broadcast:
            all but the statistics of normalisation layers.
        written_inputs: Indices of the inputs that it changes in place.
    """

    graph: GraphModule
    weight_names: tuple[str, ...]
    weight_shapes: tuple[torch.Size, ...]
    output_structure: Any
    constant_outputs: dict[int, Tensor]
    host_outputs: dict[int, Tensor]
    has_loss: bool
    blocks: tuple[BlockPlacement, ...]
    ipus: tuple[int, ...]
    is_random: bool
    updated_weights: frozenset[str]
    volatile_weights: frozenset[str]
    unsynchronised_weights: frozenset[str]
    written_inputs: tuple[int, ...]

    @cached_property
    def run(self) -> Callable[..., tuple[Tensor, ...]]:
        """The graph as a function of the weights and the inputs."""
        forward: Callable[..., tuple[Tensor, ...]] = self.laid_out(self.graph).forward
        return forward

    @cached_property
    def used_weights(self) -> frozenset[str]:
        """Weights that an operation reads; the device has no others.

        PopTorch neither uploads nor downloads those (`LowerToPopart.cpp`).
        """
        nodes = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        named = zip(self.weight_names, nodes)
        return frozenset(name for name, node in named if node.users)

    def laid_out(self, graph: GraphModule) -> GraphModule:
        """Rewrite a graph of the program's weights to what runs fastest."""
        if not uses_channels_last():
            return graph
        program = in_channels_last(
            graph, self.weight_shapes, is_differentiated=self.has_loss
        )
        if self.has_loss or program is graph:
            return program
        return with_sliced_pooling(program)

    @cached_property
    def _is_flat(self) -> bool:
        """Whether `forward` returned a plain tuple of tensors."""
        structure = self.output_structure
        return type(structure) is tuple and all(type(t) is Tensor for t in structure)

    @property
    def runs_anything(self) -> bool:
        """Whether the program does anything else than return constants."""
        *_, output = self.graph.graph.nodes
        return bool(output.args[0] or self.updated_weights or self.written_inputs)

    @property
    def num_inputs(self) -> int:
        """Number of tensors that the graph takes besides the weights."""
        nodes = self.graph.graph.nodes
        num_arguments = sum(1 for node in nodes if node.op == "placeholder")
        return num_arguments - len(self.weight_names)

    @property
    def num_results(self) -> int:
        """Number of tensors that the graph returns besides the loss."""
        *_, output = self.graph.graph.nodes
        return len(output.args[0]) - self.has_loss

    @property
    def num_ipus(self) -> int:
        """IPUs that one replica needs: idle ones below the highest number count too."""
        return max(len(self.ipus), max(self.ipus) + 1)

    @property
    def num_forward_stages(self) -> int:
        """IPU switches along the data, plus one (PopTorch, `CompilerImpl.cpp`)."""
        last_ipu = 0
        switches = 0
        for block in self.blocks:
            switches += block.ipu != last_ipu
            last_ipu = block.ipu
        return switches + 1

    def device_outputs(self, results: list[Tensor]) -> list[Tensor]:
        """Put the constant outputs between the computed ones.

        Args:
            results: Outputs that the graph has computed.
        """
        if not self.constant_outputs:
            return results
        count = len(results) + len(self.constant_outputs) + len(self.host_outputs)
        computed = iter(results)
        return [
            self.constant_outputs[index].clone()
            if index in self.constant_outputs
            else next(computed)
            for index in range(count)
            if index not in self.host_outputs
        ]

    def rebuild_outputs(self, tensors: list[Tensor]) -> Any:
        """Arrange outputs in the structure that `forward` returned.

        Args:
            tensors: Result of `device_outputs`.
        """
        if self.output_structure is None:
            return None
        if self._is_flat and not self.host_outputs:
            return tuple(tensors)
        outputs = iter(tensors)
        values = [
            self.host_outputs[index] if index in self.host_outputs else next(outputs)
            for index in range(len(tensors) + len(self.host_outputs))
        ]
        return reconstructTensorStructure(self.output_structure, values)
