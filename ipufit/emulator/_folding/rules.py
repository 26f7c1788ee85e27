# SPDX-License-Identifier: Apache-2.0
"""Which functions of torch can be called once for several micro-batches.

A rule takes a call, adds to a folded graph what computes its results for all micro-
batches, and says where they are in there; or it refuses. There is no rule for what
draws random numbers, reads values, or isn't known: that runs once for each.
"""

from __future__ import annotations

from typing import Any, Callable

from ipufit.emulator._folding.elementwise import (
    Along,
    Extreme,
    cast,
    creation,
    elementwise,
    fill,
    masked_fill,
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
    pooling,
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
from ipufit.emulator._folding.values import Call, values_in

Rule = Callable[[Call], Any]

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

_CREATION = "arange full linspace logspace ones tensor zeros"

_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss
    huber_loss kl_div l1_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
"""


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for name in _ELEMENTWISE.split():
        rules[name] = elementwise
        if not name.endswith("_"):
            rules[f"{name}_"] = elementwise
    rules.update({f"__{name}__": elementwise for name in _DUNDERS.split()})
    rules.update({f"__i{name}__": elementwise for name in _IN_PLACE_DUNDERS.split()})
    rules.update(dict.fromkeys(("fill", "fill_"), fill))
    rules.update(dict.fromkeys(("masked_fill", "masked_fill_"), masked_fill))
    rules.update(dict.fromkeys(_CREATION.split(), shared))
    rules.update(dict.fromkeys(("new_zeros", "new_ones", "new_full"), creation))
    rules.update(dict.fromkeys(("to", "type_as"), _to))
    rules.update(dict.fromkeys(_LOSSES.split(), elements_loss))
    rules.update(_ALONG)
    rules.update(_SHAPES)
    rules.update(_LAYERS)
    return rules


def _to(call: Call) -> Any:
    others = list(values_in((call.args[1:], call.kwargs)))
    return cast(call) if others else elementwise(call)


_keeps = Along(keeps=True)
_keeps_last = Along(default=-1, keeps=True)

_ALONG: dict[str, Rule] = {
    **dict.fromkeys(("sum", "mean"), Along(keepdim=2, over_all="same")),
    **dict.fromkeys(("prod", "any", "all"), Along(keepdim=2, over_all="same")),
    **dict.fromkeys(("argmax", "argmin"), Along(keepdim=2, over_all="same")),
    **dict.fromkeys(("amax", "amin"), Along(keepdim=2, over_all="same")),
    **dict.fromkeys(("logsumexp", "nansum", "nanmean"), Along(keepdim=2)),
    "count_nonzero": Along(over_all="same", is_spread=True),
    "max": Extreme("amax"),
    "min": Extreme("amin"),
    **dict.fromkeys(
        ("norm", "linalg_vector_norm"), Along(2, keepdim=3, over_all="same")
    ),
    **dict.fromkeys(("std", "var"), spread),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod"), _keeps),
    **dict.fromkeys(("logcumsumexp", "cummax", "cummin"), _keeps),
    **dict.fromkeys(("sort", "argsort", "glu"), _keeps_last),
    "topk": Along(2, default=-1, keeps=True),
    "flip": Along(name="dims", keeps=True, is_spread=True),
    "roll": Along(2, name="dims", keeps=True),
    "normalize": Along(2, default=1, keeps=True),
    "narrow": _keeps,
    "select": Along(),
    "unbind": Along(default=0),
    "split": Along(2, default=0, keeps=True),
    "chunk": Along(2, default=0, keeps=True),
    "repeat_interleave": Along(2, keeps=True),
}

_SHAPES: dict[str, Rule] = {
    **dict.fromkeys(("reshape", "reshape_as", "view", "view_as"), reshape),
    **dict.fromkeys(("flatten", "unflatten", "ravel"), reshape),
    **dict.fromkeys(("permute", "transpose", "swapaxes", "swapdims", "t"), permute),
    **dict.fromkeys(("movedim", "moveaxis", "unsqueeze"), permute),
    "getattr": transposed,
    "squeeze": squeeze,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expand),
    **dict.fromkeys(("repeat", "tile"), repeat),
    **dict.fromkeys(("cat", "concat", "concatenate"), Concatenation(is_new=False)),
    "stack": Concatenation(is_new=True),
    **dict.fromkeys(("__getitem__", "getitem"), index),
    "pad": pad,
    **dict.fromkeys(("tril", "triu"), Trailing(2)),
}

_LAYERS: dict[str, Rule] = {
    "linear": linear,
    **dict.fromkeys(("matmul", "bmm", "mm", "__matmul__"), matmul),
    "addmm": addmm,
    "einsum": einsum,
    **{f"conv{dims}d": Rows(rank_of=1) for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": Rows(rank_of=1) for dims in (1, 2, 3)},
    **{
        f"{kind}_pool{dims}d": pooling(dims)
        for kind in ("max", "avg", "adaptive_max", "adaptive_avg")
        for dims in (1, 2, 3)
    },
    **{f"lp_pool{dims}d": pooling(dims) for dims in (1, 2)},
    "layer_norm": Trailing(normalized_dims),
    "rms_norm": Trailing(normalized_dims),
    "group_norm": Rows(min_rank=2),
    "local_response_norm": Rows(min_rank=3),
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "prelu": prelu,
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), dropout),
    "alpha_dropout": dropout,
    "embedding": embedding,
    "one_hot": one_hot,
    "index_select": index_select,
    "gather": gather,
    **dict.fromkeys(("interpolate", "upsample"), Rows(min_rank=3)),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), Trailing(3)),
    "scaled_dot_product_attention": attention,
    "multi_head_attention_forward": multi_head_attention,
    "lstm": Recurrent(2),
    **dict.fromkeys(("gru", "rnn_tanh", "rnn_relu"), Recurrent()),
    **dict.fromkeys(("cross_entropy", "nll_loss"), classes_loss),
    "identity_loss": identity_loss,
}

RULES = _rules()
"""Rules, by the names of functions and methods."""


def fold_call(call: Call) -> Any:
    """Add a call to a folded graph.

    Returns:
        A value, or a tuple of them, for what it returns.

    Raises:
        NotFolded: It has to run once for each micro-batch.
    """
    rule = RULES.get(call.name)
    if rule is None or call.kwargs.get("out") is not None:
        call.refuse()
    if call.is_shared and not _is_item(call):
        return shared(call)
    return rule(call)


def _is_item(call: Call) -> bool:
    """Whether it takes one of several results, which has a value already."""
    return call.name == "getitem" and isinstance(call.args[0], tuple)
