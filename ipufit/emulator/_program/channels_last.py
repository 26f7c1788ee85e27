# SPDX-License-Identifier: Apache-2.0
"""Rewrites convolutional programs to channels_last: same values, faster on a CPU.

In channels_last the channels of a pixel lie side by side. Images are copied to that
order where they enter a convolution. They are copied back before any operation that
isn't known to work in either order, so a user's program sees the strides, and above all
the views, that it would see otherwise. Weights are never copied.

Three rules make that sound:

- Only operations in `_EITHER_ORDER` see a tensor in channels_last.
- A tensor that was copied back has two memories, so nothing may write to the first one
  afterwards, nor to anything that may be a view of the copy. A program that does stays
  as it is.
- Programs that compute gradients for some operations only, or branch, stay as they are:
  neither is worth a rule of its own.

Max-pooling in channels_last is rewritten, too. Torch's kernel also looks for the places
of the largest values, which only a backward pass needs, and goes through the channels
of one place at a time. The largest of shifted views are the same values, and whole rows
of an image are compared at once. Of zeros of both signs either may be taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node

from ipufit.emulator._ground.torch_extras import rewritten
from ipufit.emulator._tracing.half import original, rounded_alike
from ipufit.emulator._tracing.nodes import function_name, is_in_place

_CONVOLUTIONS = frozenset({"conv2d", "conv_transpose2d"})

_POOLING = frozenset({"avg_pool2d", "max_pool2d"})

_EITHER_ORDER = _POOLING | frozenset(
    """
    __add__ __iadd__ __imul__ __isub__ __itruediv__ __mul__ __neg__ __pow__ __radd__
    __rdiv__ __rmul__ __rsub__ __rtruediv__ __sub__ __truediv__ abs abs_
    adaptive_avg_pool2d add add_ amax amin batch_norm cat celu clamp clamp_ clamp_max
    clamp_min clone concat div div_ elu elu_ exp gelu hardsigmoid hardswish
    hardtanh hardtanh_ interpolate leaky_relu leaky_relu_ log logsigmoid maximum mean
    minimum mish mul mul_ neg neg_ pad pow prelu reciprocal relu relu6 relu_ rsqrt
    rsub selu sigmoid sigmoid_ silu snapshot softplus softsign sqrt square sub sub_ sum
    tanh tanh_ true_divide upsample where
    """.split()  # noqa: SIM905 - one per line would be two pages
)
"""Operations whose values don't depend on strides, and that return no views.

`group_norm` isn't among them: for channels_last torch takes the variance as the mean of
squares less the square of the mean, of which nothing is left where means are large.
"""

_FRESH = _EITHER_ORDER | frozenset(
    """
    addmm baddbmm bmm cross_entropy group_norm layer_norm linear log_softmax logsumexp
    matmul mm mse_loss nll_loss softmax
    """.split()  # noqa: SIM905 - as above
)
"""Operations whose result has its own memory, unless they write to an operand."""

_NOT_WORTH_A_RULE = frozenset(
    """
    _set_grad_enabled call_on_host run_branch run_custom_op run_loop set_ setattr
    """.split()  # noqa: SIM905 - as above
)

_LANES = 16
_MOST_WEIGHTS = 2**18
"""Where a convolution in the plain order begins to be faster, however it is used."""


def in_channels_last(
    graph: GraphModule,
    weight_shapes: Sequence[Sequence[int]],
    *,
    is_differentiated: bool,
) -> GraphModule:
    """Run the convolutions of a program in channels_last where that is faster.

    It pays for pooling and for convolutions of each channel by itself; and for two or
    more convolutions, if nothing is differentiated or if their numbers of channels
    aren't multiples of 16, which torch's kernels for the plain order pad. It doesn't
    from the first convolution on that has more than 2**18 weights. (Measured with
    oneDNN on an x86 processor, one thread.)

    Args:
        graph: A program; its first inputs are the weights.
        weight_shapes: Shapes of the weights, in their order.
        is_differentiated: Whether a backward pass will follow.

    Returns:
        An equal program whose results are contiguous; `graph` itself if there is
        nothing to gain, or no such program.

    Example:
        >>> class Blur(torch.nn.Module):
        ...     def forward(self, kernel, image):
        ...         blurred = torch.conv2d(image, kernel)
        ...         return torch.nn.functional.max_pool2d(blurred, 2).view(-1)
        >>> plain = torch.fx.symbolic_trace(Blur())
        >>> program = in_channels_last(plain, [(8, 3, 1, 1)], is_differentiated=False)
        >>> [n.name for n in program.graph.nodes if n.op == "call_method"]
        ['to', 'contiguous', 'view']
        >>> tensors = torch.ones(8, 3, 1, 1), torch.ones(2, 3, 4, 4)
        >>> torch.equal(program(*tensors), plain(*tensors))
        True
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    shapes = {node.name: tuple(s) for node, s in zip(inputs, weight_shapes)}
    chosen = _convolutions(graph.graph, shapes)
    if not chosen or _is_beyond_rules(graph.graph):
        return graph
    rewriting = _Rewriting(chosen)
    if not rewriting.run(graph.graph) or not rewriting.pays(is_differentiated):
        return graph
    program: GraphModule = GraphModule(graph, rewriting.graph)
    return program


def _convolutions(
    graph: Graph, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, _Convolution]:
    """Map node names to convolutions, up to the first one that is too large."""
    found: dict[str, _Convolution] = {}
    for node in graph.nodes:
        if function_name(node) not in _CONVOLUTIONS or len(node.args) < 2:
            continue
        weight = node.args[1]
        shape = shapes.get(weight.name, ()) if isinstance(weight, Node) else ()
        convolution = _Convolution(shape, function_name(node) == "conv_transpose2d")
        if len(shape) != 4 or convolution.num_weights > _MOST_WEIGHTS:
            break
        found[node.name] = convolution
    return found


@dataclass(frozen=True)
class _Convolution:
    """A convolution, known by the shape of its weight."""

    shape: tuple[int, ...]
    is_transposed: bool

    @property
    def num_weights(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def is_of_single_channels(self) -> bool:
        return not self.is_transposed and self.shape[1] == 1 and self.shape[0] > 1

    @property
    def is_padded(self) -> bool:
        """Whether kernels for the plain order pad its channels."""
        rows, columns = self.shape[:2]
        return columns >= _LANES // 4 and bool(rows % _LANES or columns % _LANES)


def _is_beyond_rules(graph: Graph) -> bool:
    return any(
        function_name(node) in _NOT_WORTH_A_RULE or node.target is setattr
        for node in graph.nodes
    )


@dataclass
class _Rewriting:
    """Copies a program node by node, with convolutions in channels_last.

    Attributes:
        chosen: The convolutions to run in channels_last, by name.
        region: Nodes that may be in channels_last, each with the first node whose
            memory it has.
        views: Nodes that may be views of a tensor that went back.
    """

    chosen: Mapping[str, _Convolution]
    graph: Graph = field(default_factory=Graph)
    region: dict[Node, Node] = field(default_factory=dict)
    views: set[Node] = field(default_factory=set)
    _new: dict[Node, Node] = field(default_factory=dict)
    _entered: dict[Node, Node] = field(default_factory=dict)
    _left: dict[Node, Node] = field(default_factory=dict)
    _num_entries: int = 0
    _num_convolutions: int = 0
    _has_pooling: bool = False

    def run(self, graph: Graph) -> bool:
        """Copy a program; False if it writes to a tensor that has been copied."""
        for node in graph.nodes:
            if self._writes_what_was_copied(node):
                return False
            if _is_write(node):
                self._entered.clear()
            if node.name in self.chosen:
                self._convolve(node)
            elif self._stays(node):
                self._copy(node)
                base = node.args[0] if _is_write(node) or _is_identity(node) else node
                self.region[node] = self.region.get(base, node)
                self._has_pooling |= function_name(node) in _POOLING
            else:
                self._leave(node)
        return True

    def pays(self, is_differentiated: bool) -> bool:
        """Whether the new program is faster, as measured for `in_channels_last`."""
        if 2 * self._num_entries > self._num_convolutions + 1:
            return False
        convolutions = self.chosen.values()
        return (
            self._has_pooling
            or any(c.is_of_single_channels for c in convolutions)
            or (
                len(convolutions) > 1
                and (not is_differentiated or any(c.is_padded for c in convolutions))
            )
        )

    def _writes_what_was_copied(self, node: Node) -> bool:
        if not _is_write(node):
            return False
        target = node.args[0] if node.args else None
        if not isinstance(target, Node) or node.kwargs.get("out") is not None:
            return True
        first = self.region.get(target)
        if first is None:
            return target in self.views
        # What isn't in the list would write to a copy.
        return first in map(self.region.get, self._left) or not self._stays(node)

    def _stays(self, node: Node) -> bool:
        """Whether an operation works in either order and has an operand in `region`."""
        if _is_identity(node):
            return node.args[0] in self.region
        if function_name(node) not in _EITHER_ORDER:
            return False
        if _is_write(node):
            return node.args[0] in self.region
        return any(argument in self.region for argument in node.all_input_nodes)

    def _convolve(self, node: Node) -> None:
        image = node.args[0]
        if isinstance(image, Node) and image not in self.region:
            if image not in self._entered:
                self._entered[image] = self.graph.call_method(
                    "to",
                    (self._new[image],),
                    {"memory_format": torch.channels_last},
                )
                self._num_entries += 1
            before, self._new[image] = self._new[image], self._entered[image]
            self._copy(node)
            self._new[image] = before
        else:
            self._copy(node)
        self.region[node] = node
        self._num_convolutions += 1

    def _leave(self, node: Node) -> None:
        """Copy an operation that needs its tensors in the plain order."""
        has_views = False
        for argument in node.all_input_nodes:
            if argument in self.region and argument not in self._left:
                back = self.graph.call_method("contiguous", (self._new[argument],))
                self._left[argument] = back
            has_views |= argument in self.region or argument in self.views
        is_fresh = function_name(node) in _FRESH and not _is_write(node)
        if has_views and not is_fresh:
            self.views.add(node)
        self._new[node] = self.graph.node_copy(
            node, lambda argument: self._left.get(argument, self._new[argument])
        )

    def _copy(self, node: Node) -> None:
        self._new[node] = self.graph.node_copy(node, self._new.__getitem__)


def _is_write(node: Node) -> bool:
    """Whether a node writes to a tensor that it is given."""
    is_asked_to = node.kwargs.get("inplace") or node.kwargs.get("out") is not None
    return node.op.startswith("call") and (is_in_place(node) or bool(is_asked_to))


def _is_identity(node: Node) -> bool:
    """Whether a node returns its operand as it is: dropout while evaluating."""
    is_dropout = "dropout" in function_name(node)
    return is_dropout and node.kwargs.get("training") is False


_MOST_PLACES = 3
"""Places of a window along one axis; each is a comparison."""


def with_sliced_pooling(graph: GraphModule) -> GraphModule:
    """Compute max-pooling of a program by comparisons of views.

    Args:
        graph: A program that isn't differentiated.

    Returns:
        An equal program; `graph` itself if there is nothing to rewrite.

    Example:
        >>> program = torch.fx.symbolic_trace(torch.nn.Identity())
        >>> with_sliced_pooling(program) is program
        True
    """
    return rewritten(graph, _is_plain, _slice)


def _slice(node: Node) -> None:
    node.target = rounded_alike(node.target, max_pool2d)


def max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Do what torch's function does, by comparisons if windows lie side by side.

    Gradients may differ from those of torch's function where values are equal.

    Example:
        >>> image = torch.rand(2, 3, 5, 4).to(memory_format=torch.channels_last)
        >>> torch.equal(max_pool2d(image, 2), F.max_pool2d(image, 2))
        True
    """
    height, width = _pair(kernel_size)
    is_sliced = (
        (stride is None or _pair(stride) == (height, width))
        and height * width > 1  # a single place would be a view, not a new tensor
        and max(height, width) <= _MOST_PLACES
        and input.dim() == 4
        and input.shape[2] >= height
        and input.shape[3] >= width
        and input.is_contiguous(memory_format=torch.channels_last)
    )
    if not is_sliced:
        return F.max_pool2d(input, kernel_size, stride, *args, **kwargs)
    rows, columns = input.shape[2] // height, input.shape[3] // width
    inner = input[:, :, : rows * height, : columns * width]
    inner = reduce(torch.maximum, (inner[:, :, at::height] for at in range(height)))
    found: Tensor = reduce(
        torch.maximum, (inner[..., at::width] for at in range(width))
    )
    return found


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    values = tuple(value)
    return values if len(values) == 2 else values * 2


def _is_plain(node: Node) -> bool:
    """Whether a node is max-pooling of whole windows that gives no places."""
    if original(node.target) not in (F.max_pool2d, torch.max_pool2d):
        return False
    names = "padding", "dilation", "ceil_mode", "return_indices"
    given = dict(zip(names, node.args[3:]))
    given.update(node.kwargs)
    return (
        given.get("padding", 0) in (0, (0, 0), [0, 0])
        and given.get("dilation", 1) in (1, (1, 1), [1, 1])
        and not given.get("ceil_mode")
        and not given.get("return_indices")
    )
