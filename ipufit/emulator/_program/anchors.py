# SPDX-License-Identifier: Apache-2.0
"""Anchored tensors: values inside a program that a user wants to see.

Tensors of the forward pass become further results of the program. Gradients, updated
weights and the optimiser's tensors aren't in its graph: `_device/watch.py` sees those
while the program runs.
"""

from __future__ import annotations

import difflib
import logging
from typing import Mapping, NamedTuple

from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.node import Node

from ipufit.emulator._options.options import Options
from ipufit.emulator._program.program import Program
from ipufit.emulator._program.tensor_names import GRADIENT, named_nodes
from ipufit.emulator.enums import OutputMode
from ipufit.emulator.errors import Error, createPoptorchError

logger = logging.getLogger("poptorch::python")

_MODES = {mode.value: mode.name.upper() for mode in OutputMode}
_MODES[OutputMode.Sum.value] = "Sum"


class Anchors(NamedTuple):
    """The anchored tensors of one program, by the names that the user gave them.

    Attributes:
        results: Names of the anchored results of the program, in their order.
        gradients: For each anchored gradient the name of its weight.
        after_updates: For each anchored tensor that only an update makes (an updated
            weight, a tensor of the optimiser) PopART's name.
    """

    results: tuple[str, ...] = ()
    gradients: Mapping[str, str] = {}
    after_updates: Mapping[str, str] = {}

    @property
    def num_watched(self) -> int:
        """Number of anchors that aren't results of the program."""
        return len(self.gradients) + len(self.after_updates)


def resolve_modes(options: Options) -> None:
    """Give anchors without an output mode that of the outputs.

    PopTorch keeps and logs these modes but never sends them to the device (PopTorch,
    `LowerToPopart.cpp`): anchored tensors come back as the outputs do, and so here.

    Example:
        >>> options = Options().outputMode(OutputMode.Sum)
        >>> options.anchorTensor("out", "Relu:0")
        >>> resolve_modes(options)
        >>> options.anchored_tensors["out"]
        ['Relu:0', True, 3, 1]
    """
    for anchor in options.anchored_tensors.values():
        _, is_unspecified, _, _ = anchor
        if is_unspecified:
            is_periodic = options.output_mode == OutputMode.EveryN.value
            period = options.output_return_period if is_periodic else 1
            anchor[2:] = [int(options.output_mode), period]


def add_anchors(program: Program, options: Options, names: list[str]) -> Anchors:
    """Make the tensors that options anchor further results of a program.

    Args:
        program: As it was traced; its graph is changed.
        options: The options of the executor, which `Options.anchorTensor` has filled.
        names: Names of all tensors, those outside the graph included.

    Raises:
        Error: An anchored tensor doesn't exist.
    """
    if not options.anchored_tensors:
        return Anchors()
    resolve_modes(options)  # of anchors that came late
    nodes = named_nodes(program)
    results: dict[str, Node] = {}
    gradients: dict[str, str] = {}
    after_updates: dict[str, str] = {}
    for short_name, anchor in options.anchored_tensors.items():
        long_name, _, mode, period = anchor
        if long_name in nodes:
            results[short_name] = nodes[long_name]
        elif long_name not in names:
            raise _unknown(short_name, long_name, names)
        elif long_name.startswith(GRADIENT):
            gradients[short_name] = long_name[len(GRADIENT) :]
        else:
            after_updates[short_name] = long_name
        logger.debug("Anchored tensor: %s %s/%d", long_name, _MODES[mode], period)
        if mode != options.output_mode:
            logger.warning(
                "The output mode of anchor %r has no effect, as in PopTorch: it comes "
                "back as the outputs do (%s).",
                short_name,
                _MODES[options.output_mode],
            )
    _append_results(program.graph.graph, list(results.values()), program.has_loss)
    program.graph.recompile()
    return Anchors(tuple(results), gradients, after_updates)


def snapshot(tensor: Tensor) -> Tensor:
    """Copy a tensor at this point of a program, before it is changed in place.

    Example:
        >>> import torch
        >>> x = torch.ones(1)
        >>> seen = snapshot(x)
        >>> _ = x.add_(1)
        >>> seen
        tensor([1.])
    """
    copy: Tensor = tensor.detach().clone()
    return copy


def _append_results(graph: Graph, nodes: list[Node], has_loss: bool) -> None:
    *_, output = graph.nodes
    seen = []
    for node in nodes:
        with graph.inserting_after(node):
            seen.append(graph.call_function(snapshot, (node,)))
    before = list(output.args[0])
    at = len(before) - has_loss
    output.args = ((*before[:at], *seen, *before[at:]),)


def _unknown(short_name: str, long_name: str, names: list[str]) -> Error:
    close = difflib.get_close_matches(long_name, names, n=5)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return createPoptorchError(
        f"Options.anchorTensor({short_name!r}, {long_name!r}): the program has no "
        f"tensor of that name.{hint} `getTensorNames()` of the compiled model lists "
        "them all."
    )
