# SPDX-License-Identifier: Apache-2.0
"""Rewrites self-attention of `nn.MultiheadAttention`: same values, fewer copies.

In eval mode torch runs an encoder layer as one fused kernel. A trace sees the ordinary
operations instead, as PopTorch's does, and these run here. Nearly all that the kernel
saves are copies: with `batch_first` the module swaps batch and sequence, and makes
queries, keys and values contiguous. In the order in which the batch comes no copy is
needed. The same numbers are added up; where a matrix product is blocked in another way,
the sums differ by rounding. In half precision the result is rounded once either way.

Only programs without gradients are rewritten: those of weights would be added up in
another order. The result has the strides of the batch, so it must go where strides have
no effect.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node

from ipufit.emulator._ground.rewriting import rewritten
from ipufit.emulator._tracing.constant_nodes import function_name
from ipufit.emulator._tracing.half import original, rounded_alike

_NONE = ("bias_k", "bias_v", "key_padding_mask", "attn_mask", "static_k", "static_v")
_ARGUMENTS = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight"),
    *("in_proj_bias", "bias_k", "bias_v", "add_zero_attn", "dropout_p"),
    *("out_proj_weight", "out_proj_bias", "training", "key_padding_mask"),
    *("need_weights", "attn_mask"),
)


def with_plain_attention(graph: GraphModule) -> GraphModule:
    """Run the self-attention of a program without copies.

    Args:
        graph: A program that isn't differentiated.

    Returns:
        An equal program; `graph` itself if there is nothing to rewrite.

    Example:
        >>> import torch
        >>> layer = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval()
        >>> program = torch.fx.symbolic_trace(torch.nn.Identity())
        >>> with_plain_attention(program) is program
        True
    """
    return rewritten(graph, _is_plain, _make_plain)


def _make_plain(node: Node) -> None:
    given = _given(node)
    node.args = tuple(
        given[name]
        for name in (
            *("query", "num_heads", "in_proj_weight", "in_proj_bias"),
            *("out_proj_weight", "out_proj_bias"),
        )
    )
    node.kwargs = {}
    node.target = rounded_alike(node.target, self_attention)


def self_attention(
    x: Tensor,
    num_heads: int,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
) -> tuple[Tensor, None]:
    """Compute the self-attention of sequences, of which the batch is dimension 1.

    Args:
        x: `[T, N, E]`, best a view of a contiguous `[N, T, E]`.
        num_heads: Number of heads; divides E.
        in_weight: `[3 * E, E]`: of queries, keys and values.
        in_bias: `[3 * E]`, or None.
        out_weight: `[E, E]`.
        out_bias: `[E]`, or None.

    Returns:
        `[T, N, E]`, a view of a contiguous `[N, T, E]`; and None for the weights.

    Example:
        >>> import torch
        >>> layer = torch.nn.MultiheadAttention(4, 2).eval()
        >>> x = torch.ones(3, 1, 4)
        >>> out = layer.out_proj
        >>> packed = layer.in_proj_weight, layer.in_proj_bias
        >>> y, _ = self_attention(x, 2, *packed, out.weight, out.bias)
        >>> torch.allclose(y, layer(x, x, x)[0])
        True
    """
    length, batch, width = x.shape
    packed = F.linear(x.transpose(0, 1), in_weight, in_bias)
    heads = packed.view(batch, length, 3, num_heads, width // num_heads)
    query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(query, key, value)
    joined = mixed.transpose(1, 2).reshape(batch, length, width)
    return F.linear(joined, out_weight, out_bias).transpose(0, 1), None


def _given(node: Node) -> dict[str, Any]:
    return {**dict(zip(_ARGUMENTS, node.args)), **node.kwargs}


def _is_plain(node: Node) -> bool:
    """Whether a node is self-attention without masks, whose strides nobody sees."""
    if original(node.target) is not F.multi_head_attention_forward:
        return False
    given = _given(node)
    query = given["query"]
    is_self = _is_swap(query) and query is given["key"] and query is given["value"]
    is_simple = (
        all(given.get(name) is None for name in _NONE)
        and not given.get("add_zero_attn")
        and not (given.get("training") and given.get("dropout_p"))
        and not given.get("need_weights", True)
        and not given.get("use_separate_proj_weight")
        and not given.get("is_causal")
        and len(node.args) <= len(_ARGUMENTS)
    )
    return is_self and is_simple and _is_swapped_back(node)


def _is_swap(node: Any) -> bool:
    is_transpose = isinstance(node, Node) and function_name(node) == "transpose"
    return is_transpose and set(node.args[1:]) == {0, 1} and not node.kwargs


def _is_swapped_back(node: Node) -> bool:
    results = list(node.users)
    if len(results) != 1 or function_name(results[0]) != "getitem":
        return False
    swaps = list(results[0].users)
    is_swapped = len(swaps) == 1 and _is_swap(swaps[0])
    return is_swapped and results[0].args[1] == 0 and _hides_strides(swaps[0])


def _hides_strides(node: Node) -> bool:
    """Whether strides have no effect on what a value goes into."""
    for user in node.users:
        name = function_name(user)
        is_identity = name == "dropout" and user.kwargs.get("training") is False
        if is_identity and not user.kwargs.get("inplace"):
            if not _hides_strides(user):
                return False
        elif name in ("layer_norm", "linear"):
            if user.args[0] is not node:
                return False
        elif name != "add" or user.args[0] is node or len(user.args) != 2:
            return False  # of a sum the first decides
    return bool(node.users)
