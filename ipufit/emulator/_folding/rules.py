# SPDX-License-Identifier: Apache-2.0
"""The operations of torch that can run once for several micro-batches.

A rule takes an operation, adds to a folded graph what computes its results for all
micro-batches, and says how they are packed there; or it refuses. There is no rule for
what draws random numbers, reads values, or isn't known: that runs once for each.
"""

from __future__ import annotations

from typing import Any, Callable

from ipufit.emulator._folding.elementwise import (
    Along,
    Extreme,
    Fill,
    cast,
    creation,
    elementwise,
    shared,
    spread,
)
from ipufit.emulator._folding.layers import (
    Recurrent,
    Rows,
    Trailing,
    addmm,
    attention,
    batch_norm,
    dropout,
    einsum,
    embedding,
    gather,
    index_select,
    instance_norm,
    linear,
    matmul,
    multi_head_attention,
    normalized_dims,
    one_hot,
    prelu,
)
from ipufit.emulator._folding.losses import classes_loss, elements_loss, identity_loss
from ipufit.emulator._folding.shapes import (
    Concatenation,
    expand,
    index,
    pad,
    permute,
    repeat,
    reshape,
    squeeze,
    transposed,
)
from ipufit.emulator._folding.values import Operation, values_in

Rule = Callable[[Operation], Any]

_ELEMENTWISE = """
    abs absolute acos acosh add addcdiv addcmul alias arccos arccosh arcsin arcsinh
    arctan arctan2 arctanh asin asinh atan atan2 atanh bitwise_and bitwise_not
    bitwise_or bitwise_xor bool byte ceil celu char clamp clamp_max clamp_min clip
    clone contiguous copy copysign cos cosh deg2rad detach div divide double elu eq
    erf erfc erfinv exp exp2 expm1 float float_power floor floor_divide
    fmax fmin fmod frac full_like ge gelu greater greater_equal gt hardshrink
    hardsigmoid hardswish hardtanh heaviside hypot int isfinite isinf isnan isneginf
    isposinf ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2
    log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor
    logit logsigmoid long lt maximum minimum mish mul multiply
    nan_to_num ne neg negative nextafter nop not_equal ones_like positive pow
    rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu
    set_available_memory sgn short sigmoid sign signbit silu sin sinc sinh snapshot
    softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink
    threshold true_divide trunc where xlogy zero_ zeros_like
"""

_DUNDERS = """
    add and eq floordiv ge gt invert le lt mod mul ne neg or pos pow radd rand rfloordiv
    rmod rmul ror rpow rsub rtruediv rxor sub truediv xor abs div rdiv
"""

_IN_PLACE_DUNDERS = "add sub mul truediv floordiv mod pow and or xor div"

_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss
    huber_loss kl_div l1_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
"""


def _to(op: Operation) -> Any:
    others = values_in((op.args[1:], op.kwargs))
    return cast(op) if others else elementwise(op)


_OTHER: dict[str, Rule] = {
    "fill fill_": Fill(1),
    "masked_fill masked_fill_": Fill(2),
    "arange full linspace logspace ones tensor zeros": shared,
    "new_zeros new_ones new_full": creation,
    "to type_as": _to,
    # Along given dimensions
    "sum mean prod any all argmax argmin amax amin": Along(keepdim=2, over_all="same"),
    "logsumexp nansum nanmean": Along(keepdim=2),
    "count_nonzero": Along(over_all="same", is_spread=True),
    "max": Extreme("amax"),
    "min": Extreme("amin"),
    "norm linalg_vector_norm": Along(2, keepdim=3, over_all="same"),
    "std var": spread,
    "softmax log_softmax softmin cumsum cumprod": Along(keeps=True),
    "logcumsumexp cummax cummin narrow": Along(keeps=True),
    "sort argsort glu": Along(default=-1, keeps=True),
    "topk": Along(2, default=-1, keeps=True),
    "flip": Along(name="dims", keeps=True, is_spread=True),
    "roll": Along(2, name="dims", keeps=True),
    "normalize": Along(2, default=1, keeps=True),
    "select": Along(),
    "unbind": Along(default=0),
    "split chunk": Along(2, default=0, keeps=True),
    "repeat_interleave": Along(2, keeps=True),
    # Shapes
    "reshape reshape_as view view_as flatten unflatten ravel": reshape,
    "permute transpose swapaxes swapdims t movedim moveaxis unsqueeze": permute,
    "getattr": transposed,
    "squeeze": squeeze,
    "expand expand_as broadcast_to": expand,
    "repeat tile": repeat,
    "cat concat concatenate": Concatenation(is_new=False),
    "stack": Concatenation(is_new=True),
    "__getitem__ getitem": index,
    "pad": pad,
    "tril triu": Trailing(2),
    # Layers
    "linear": linear,
    "matmul bmm mm __matmul__": matmul,
    "addmm": addmm,
    "einsum": einsum,
    "conv1d conv2d conv3d": Rows(rank_of=1),
    "conv_transpose1d conv_transpose2d conv_transpose3d": Rows(rank_of=1),
    **{
        f"max_pool{n}d avg_pool{n}d adaptive_max_pool{n}d adaptive_avg_pool{n}d": (
            Trailing(n, any_rank=False)
        )
        for n in (1, 2, 3)
    },
    "lp_pool1d": Trailing(1, any_rank=False),
    "lp_pool2d": Trailing(2, any_rank=False),
    "layer_norm rms_norm": Trailing(normalized_dims),
    "group_norm": Rows(min_rank=2),
    "local_response_norm interpolate upsample": Rows(min_rank=3),
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "prelu": prelu,
    "dropout dropout1d dropout2d dropout3d alpha_dropout": dropout,
    "embedding": embedding,
    "one_hot": one_hot,
    "index_select": index_select,
    "gather": gather,
    "pixel_shuffle pixel_unshuffle": Trailing(3),
    "scaled_dot_product_attention": attention,
    "multi_head_attention_forward": multi_head_attention,
    "lstm": Recurrent(2),
    "gru rnn_tanh rnn_relu": Recurrent(),
    # Losses
    _LOSSES: elements_loss,
    "cross_entropy nll_loss": classes_loss,
    "identity_loss": identity_loss,
}

RULES: dict[str, Rule] = {
    **{
        form: elementwise
        for name in _ELEMENTWISE.split()
        for form in (name, name if name.endswith("_") else f"{name}_")
    },
    **{f"__{name}__": elementwise for name in _DUNDERS.split()},
    **{f"__i{name}__": elementwise for name in _IN_PLACE_DUNDERS.split()},
    **{name: rule for names, rule in _OTHER.items() for name in names.split()},
}
"""The rules by the names of functions and methods."""


def fold_operation(op: Operation) -> Any:
    """Add an operation to a folded graph.

    Returns:
        The value of its result; a tuple of values if it returns several.

    Raises:
        NotFolded: It has to run once for each micro-batch.
    """
    rule = RULES.get(op.name)
    if rule is None or op.kwargs.get("out") is not None:
        op.refuse()
    if op.is_shared and not _is_item(op):
        return shared(op)
    return rule(op)


def _is_item(op: Operation) -> bool:
    """Whether it takes one of several results, which has a value already."""
    return op.name == "getitem" and isinstance(op.args[0], tuple)
