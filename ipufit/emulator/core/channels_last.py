# SPDX-License-Identifier: Apache-2.0
"""Rewrite convolutional programs to channels_last: same values, faster on a CPU.

In channels_last the channels of a pixel are adjacent in memory. An image is copied to
that order where it enters a convolution. It is copied back before any operation that
isn't known to work in either order, so a program sees the same strides, and above all
the same views, as without the rewrite. Gradients are copied back by a reshape: torch's
backward pass of a batch norm whose output was reshaped, as instance norm's is, computes
other numbers from a gradient in channels_last of one image. Weights are never copied.

A tensor that was copied has two memories. So a program stays as it is if it writes to a
tensor that another operation may need, unless the tensor is an input or a weight.
Programs that turn gradients off for some operations, or branch, stay as they are, too.

Max-pooling in channels_last becomes comparisons of shifted views, which give the same
values. Torch's kernel also finds the indices of the largest values, which only a
backward pass needs, and goes through the channels pixel by pixel; a comparison of views
takes whole rows of an image at once. Of two zeros of different sign either may be
returned.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.node import Node

from .float16 import FUNCTION
from .graph import function_name, is_in_place

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

_FRESH = (
    _EITHER_ORDER
    | _CONVOLUTIONS
    | frozenset(
        """
    addmm baddbmm bmm cross_entropy group_norm layer_norm linear log_softmax logsumexp
    matmul mm mse_loss nll_loss softmax
    """.split()  # noqa: SIM905 - as above
    )
)
"""Operations whose result has memory of its own."""

_NOT_WORTH_A_RULE = frozenset(
    """
    _set_grad_enabled call_on_host run_branch run_custom_op run_loop set_ setattr
    """.split()  # noqa: SIM905 - as above
)

_MOST_WEIGHTS = 2**18
"""Where a convolution in the plain order begins to be faster, however it is used."""


def in_channels_last(
    graph: Graph,
    weight_shapes: Sequence[Sequence[int]],
    *,
    is_differentiated: bool,
) -> Graph:
    """Rewrite the convolutions of a program to channels_last where that is faster.

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
        >>> shapes = [(8, 3, 1, 1)]
        >>> graph = in_channels_last(plain.graph, shapes, is_differentiated=False)
        >>> [n.name for n in graph.nodes if n.op == "call_method"]
        ['to', 'contiguous', 'view']
        >>> program = torch.fx.GraphModule(plain, graph)
        >>> tensors = torch.ones(8, 3, 1, 1), torch.ones(2, 3, 4, 4)
        >>> torch.equal(program(*tensors), plain(*tensors))
        True
    """
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    shapes = {node: tuple(shape) for node, shape in zip(inputs, weight_shapes)}
    convolutions: dict[Node, tuple[int, ...]] = {}
    for node in nodes:
        if function_name(node) in _CONVOLUTIONS and len(node.args) > 1:
            weight = node.args[1]
            shape = shapes.get(weight, ()) if isinstance(weight, Node) else ()
            if len(shape) != 4 or torch.Size(shape).numel() > _MOST_WEIGHTS:
                break
            convolutions[node] = shape
    if not convolutions or any(
        function_name(node) in _NOT_WORTH_A_RULE for node in nodes
    ):
        return graph
    program = Graph()
    new: dict[Node, Node] = {}
    region: set[Node] = set()  # nodes that may be in channels_last
    entered: dict[Node, Node] = {}
    left: dict[Node, Node] = {}
    num_entries, has_pooling = 0, False
    for node in nodes:
        operands, replaced = node.all_input_nodes, {}
        if _is_identity(node):
            operands = operands[:1]
        elif _is_write(node):
            if not _is_only_its_own(node.args[0]) or node.kwargs.get("out") is not None:
                return graph
            operands = [node.args[0]]
            entered.clear()
        if node in convolutions:
            image = node.args[0]
            if isinstance(image, Node) and image not in region:
                if image not in entered:
                    plain = new[image]
                    if is_differentiated and image.op != "placeholder":
                        flat = program.call_method("flatten", (plain,))
                        plain = program.call_method("view_as", (flat, plain))
                    entered[image] = program.call_method(
                        "to", (plain,), {"memory_format": torch.channels_last}
                    )
                    num_entries += 1
                replaced = entered
            region.add(node)
        elif region.intersection(operands) and (
            _is_identity(node) or function_name(node) in _EITHER_ORDER
        ):
            region.add(node)
            has_pooling |= function_name(node) in _POOLING
        else:
            for operand in node.all_input_nodes:
                if operand in region and operand not in left:
                    left[operand] = program.call_method("contiguous", (new[operand],))
            replaced = left
        new[node] = program.node_copy(node, lambda n: replaced.get(n) or new[n])  # noqa: B023 - it is called here
        if not is_differentiated and _is_plain_pooling(node):
            new[node].meta[FUNCTION] = max_pool2d
    rows_and_columns = [shape[:2] for shape in convolutions.values()]
    is_of_single_channels = any(
        columns == 1 < rows and function_name(node) == "conv2d"
        for node, (rows, columns) in zip(convolutions, rows_and_columns)
    )
    is_padded = any(
        columns >= 4 and (rows % 16 or columns % 16)
        for rows, columns in rows_and_columns
    )
    pays = is_of_single_channels or has_pooling
    if len(convolutions) > 1:
        pays |= is_padded or not is_differentiated
    if not pays or 2 * num_entries > len(convolutions) + 1:
        return graph
    return program


def _is_write(node: Node) -> bool:
    """Return whether a node writes to one of its arguments."""
    is_asked_to = node.kwargs.get("inplace") or node.kwargs.get("out") is not None
    return node.op.startswith("call") and (is_in_place(node) or bool(is_asked_to))


def _is_only_its_own(target: Any) -> bool:
    """Return whether the written tensor is an input, or has no other reader."""
    while isinstance(target, Node) and _is_identity(target) and len(target.users) == 1:
        target = target.args[0]
    if not isinstance(target, Node) or target.op == "placeholder":
        return isinstance(target, Node)
    return len(target.users) == 1 and function_name(target) in _FRESH


def _is_identity(node: Node) -> bool:
    """Return whether a node returns its operand, as dropout does in eval mode."""
    is_dropout = "dropout" in function_name(node)
    return is_dropout and node.kwargs.get("training") is False


_MOST_PLACES = 3
"""Places of a window along one axis; each is a comparison."""


def _is_plain_pooling(node: Node) -> bool:
    """Return whether a node is max-pooling of whole windows without indices."""
    names = "padding", "dilation", "ceil_mode", "return_indices"
    given = {**dict(zip(names, node.args[3:])), **node.kwargs}
    return (
        node.target in (F.max_pool2d, torch.max_pool2d)
        and given.get("padding", 0) in (0, (0, 0), [0, 0])
        and given.get("dilation", 1) in (1, (1, 1), [1, 1])
        and not given.get("ceil_mode")
        and not given.get("return_indices")
    )


def max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute `torch.nn.functional.max_pool2d`, by comparisons of views if it can.

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
    return reduce(torch.maximum, (inner[..., at::width] for at in range(width)))


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    values = tuple(value)
    return values if len(values) == 2 else values * 2
