# SPDX-License-Identifier: Apache-2.0
"""Rules of layers: products, convolutions, normalisation, embeddings and losses."""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn import _reduction, functional

from ..graph import as_list
from ..operators import Call, row, rule

_FEW = 100
"""Values below which a deviation without bias visibly differs from one with bias."""

_MOST_HALF = 65504
_CLASS_LOSSES = "cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd"
_TRANSPOSED = "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"
_NORMS = "batch_norm", "instance_norm", "group_norm", "layer_norm"


# Products and convolutions ------------------------------------------------------------


@rule(
    "matmul-whole",
    *("bmm", "dot", "mm", "mv", "matmul", "__matmul__", "__rmatmul__", "linear"),
    is_certain=False,
)
def matmul_whole(call: Call) -> Any:
    return call.is_whole


row("conv-whole", "conv1d conv2d conv3d", lambda call: call.is_whole, is_certain=False)


@rule("conv-transpose-dilation", *_TRANSPOSED, topic="arguments")
def conv_transpose_dilation(call: Call) -> Any:
    given = call.arguments
    dilation = given.get("dilation", 1)
    return any(step != 1 for step in as_list(dilation)) and (
        "Non default value for dilations is not supported by transposed "
        f"convolutions: {dilation}."
    )


@rule("baddbmm-beta-0", "baddbmm", is_reported=False)
def baddbmm_beta_0(call: Call) -> Any:
    if call.kwargs.get("beta", 1) != 0:
        return None

    def baddbmm(
        input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any, alpha: Any = 1
    ) -> Tensor:
        return torch.bmm(batch1, batch2) * alpha + input * beta

    return baddbmm


row("cumulative-0d", "cumsum cumprod", lambda call: bool(call.tensors()[0].dim() == 0))


@rule("cumsum-float32", "cumsum", is_reported=False)
def cumsum_float32(call: Call) -> Any:
    dtype = call.result.dtype
    if dtype.is_floating_point:
        return None
    return lambda input, dim, **_: torch.cumsum(input.to(dtype).float(), dim).to(dtype)


@rule("cumprod-dtype", "cumprod")
def cumprod_dtype(call: Call) -> Any:
    given = call.tensors()[0]
    if given.is_floating_point() == call.result.is_floating_point():
        return None
    return lambda input, dim, **_: torch.cumprod(input, dim)


_RNNS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}


@rule("rnn-options", *_RNNS, topic="arguments")
def rnn_options(call: Call) -> Any:
    given = call.arguments
    kind = _RNNS[call.name]
    verb = "is " if kind == "RNN" else ""
    if given.get("num_layers", 1) != 1:
        return (
            f"Only {kind} with 1 layer {verb}supported, not {given['num_layers']}: put "
            "several one after the other."
        )
    if given.get("dropout", 0.0) != 0.0:
        return f"{kind} only supports dropout = 0.0"
    if given.get("bidirectional"):
        word = "Bidirectional" if kind == "RNN" else "bidirectional"
        return (
            f"{word} {kind} {verb}not supported: run a second one on the flipped "
            "sequence."
        )
    if kind != "GRU" and not given.get("has_biases", True):
        return f"{kind} without biases {verb}not supported"
    return None


@rule("lstm-projection", "lstm")
def lstm_projection(call: Call) -> Any:
    hidden, cell = next(one for one in call.args if isinstance(one, (tuple, list)))
    return hidden.shape[-1] != cell.shape[-1]


# Normalisation ------------------------------------------------------------------------


@rule("norm-one-affine", *_NORMS)
def norm_one_affine(call: Call) -> Any:
    given = call.arguments
    return (given.get("weight") is None) != (given.get("bias") is None)


@rule("batch-norm-gradient", "batch_norm")
def batch_norm_gradient(call: Call) -> Any:
    given = call.arguments
    per_channel = given["input"].numel() // given["input"].shape[1]
    return bool(given.get("training")) and call.trains and per_channel < _FEW


@rule("instance-norm-gradient", "instance_norm")
def instance_norm_gradient(call: Call) -> Any:
    given = call.arguments
    per_channel = given["input"][0, 0].numel()
    return given.get("use_input_stats", True) and call.trains and per_channel < _FEW


@rule("instance-norm-statistics", "instance_norm")
def instance_norm_statistics(call: Call) -> Any:
    given = call.arguments
    is_updating = given.get("use_input_stats", True)
    if call.function is not functional.instance_norm or not is_updating:
        return None
    if given.get("running_mean") is None:
        return None
    return lambda input, running_mean, running_var, **kwargs: functional.instance_norm(
        input, None, None, **kwargs
    )


# Embeddings ---------------------------------------------------------------------------


@rule("embedding-options", "embedding", "embedding_bag", topic="arguments")
def embedding_options(call: Call) -> Any:
    given = call.arguments
    reasons = [o for o in ("scale_grad_by_freq", "sparse") if given.get(o)]
    return reasons and f"Unsupported aten::{call.name} operation: {reasons[0]}."


@rule("embedding-bag-padding", "embedding_bag", topic="arguments")
def embedding_bag_padding(call: Call) -> Any:
    return call.arguments.get("padding_idx") is not None and (
        "Unsupported aten::embedding_bag operation: padding_idx parameter is "
        "unsupported."
    )


@rule("embedding-bag-offsets", "embedding_bag", topic="arguments")
def embedding_bag_offsets(call: Call) -> Any:
    offsets = call.argument_node("offsets")
    return offsets not in (None, *call.constants) and (
        "Unsupported aten::embedding_bag operation: offsets tensor must be a "
        "constant, made in `forward` with torch.tensor or torch.arange."
    )


@rule("embedding-max-norm", "embedding")
def embedding_max_norm(call: Call) -> Any:
    return call.arguments.get("max_norm") is not None


@rule("embedding-bag-frozen", "embedding_bag")
def embedding_bag_frozen(call: Call) -> Any:
    return not call.arguments["weight"].requires_grad


@rule("embedding-bag-empty", "embedding_bag")
def embedding_bag_empty(call: Call) -> Any:
    given = call.arguments
    offsets = given.get("offsets")
    if offsets is None:
        return False
    indices = given.get("input", given.get("indices"))
    ends = [*offsets.tolist(), indices.numel()]
    if given.get("include_last_offset"):
        ends.pop()
    return any(end == start for start, end in zip(ends, ends[1:]))


@rule("repeat-interleave", "repeat_interleave")
def repeat_interleave(call: Call) -> Any:
    return call.kwargs.get("output_size") is None


# Losses -------------------------------------------------------------------------------


def _reduced(
    loss: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    **_: Any,
) -> Tensor:
    """Reduce a loss of elements as the arguments of a loss function say."""
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(
            size_average, reduce, emit_warning=False
        )
    if reduction == "batchmean":
        return loss.sum() / (loss.shape[0] if loss.dim() else 1)
    return loss if reduction == "none" else getattr(loss, reduction)()


@rule("class-weight", *_CLASS_LOSSES, topic="arguments")
def class_weight(call: Call) -> Any:
    is_entropy = call.name.startswith("cross")
    aten = "cross_entropy_loss" if is_entropy else "nll_loss_nd"
    return call.arguments.get("weight") is not None and (
        f'Parameter "weight" is unsupported for aten::{aten}: weigh the classes '
        "yourself, with reduction='none' and `weight[target]`."
    )


@rule("label-smoothing-mean", "cross_entropy", topic="arguments")
def label_smoothing_mean(call: Call) -> Any:
    given = call.arguments
    is_of_classes = given["input"].shape != given["target"].shape
    is_mean = given.get("reduction", "mean") == "mean"
    return (
        (given.get("label_smoothing") and is_of_classes and is_mean)
        and "F.cross_entropy with label_smoothing and reduction='mean' selects the "
        "samples that aren't ignored (aten::masked_select), whose number depends on "
        "values. Take the mean yourself: poptorch.identity_loss(F.cross_entropy(..., "
        "reduction='none'), reduction='mean')."
    )


@rule("ctc-loss-none", "ctc_loss", topic="arguments")
def ctc_loss_none(call: Call) -> Any:
    return call.arguments.get("reduction") in ("none", 0) and (
        'CTCLoss with reduction="none" is currently not supported: use "sum" or "mean".'
    )


@rule("ctc-loss-targets", "ctc_loss", topic="arguments")
def ctc_loss_targets(call: Call) -> Any:
    shape = list(call.arguments["targets"].shape)
    return len(shape) != 2 and (
        "CTCLoss needs 2-D targets, padded to one length: [batch, length]. "
        f"Got {shape}."
    )


@rule("class-loss-1d", *_CLASS_LOSSES)
def class_loss_1d(call: Call) -> Any:
    given = call.arguments
    scores = given.get("input", given.get("self"))
    return scores.dim() == 1 and given["target"].dim() == 0


@rule("class-loss-half-count", *_CLASS_LOSSES)
def class_loss_half_count(call: Call) -> Any:
    given = call.arguments
    scores = given.get("input", given.get("self"))
    is_mean = given.get("reduction", "mean") in ("mean", 1)
    count = given["target"].numel()
    return scores.dtype is torch.float16 and is_mean and count > _MOST_HALF


@rule("binary-cross-entropy", "binary_cross_entropy")
def binary_cross_entropy_rule(call: Call) -> Any:
    if call.function is not functional.binary_cross_entropy:
        return None

    def binary_cross_entropy(
        input: Tensor, target: Tensor, weight: Any = None, **reduction: Any
    ) -> Tensor:
        loss = target * torch.log(input) + (1.0 - target) * torch.log(1.0 - input)
        return _reduced(-loss if weight is None else -loss * weight, **reduction)

    return binary_cross_entropy


@rule("kl-div", "kl_div", is_reported=False)
def kl_div_rule(call: Call) -> Any:
    if call.function is not functional.kl_div:
        return None

    def kl_div(
        input: Tensor, target: Tensor, log_target: bool = False, **reduction: Any
    ) -> Tensor:
        function: Callable[..., Tensor] = torch.kl_div
        loss = function(input, target, 0, log_target=log_target)
        shares = target.exp() if log_target else target
        loss = torch.where(shares.gt(0), loss, torch.zeros_like(loss))
        return _reduced(loss, **reduction)

    return kl_div


@rule("cosine-embedding-loss-1d", "cosine_embedding_loss")
@rule("triplet-margin-loss-1d", "triplet_margin_loss")
def is_of_vectors(call: Call) -> Any:
    return bool(call.tensors()[0].dim() == 1)


@rule("triplet-margin-loss", "triplet_margin_loss")
def triplet_margin_loss_rule(call: Call) -> Any:
    is_flat = call.tensors()[0].dim() < 3
    if call.function is not functional.triplet_margin_loss or is_flat:
        return None

    def triplet_margin_loss(
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor,
        margin: float = 1.0,
        p: float = 2.0,
        eps: float = 1e-6,
        swap: bool = False,
        **reduction: Any,
    ) -> Tensor:
        def distance(x: Tensor, y: Tensor) -> Tensor:
            return torch.linalg.vector_norm(x - y + eps, p, dim=1)

        far = distance(anchor, negative)
        if swap:
            far = torch.minimum(far, distance(positive, negative))
        loss = distance(anchor, positive) - far + margin
        return _reduced(loss.clamp(min=0), **reduction)

    return triplet_margin_loss


row("gaussian-nll-loss", "gaussian_nll_loss", lambda call: True)


@rule("hinge-embedding-loss", "hinge_embedding_loss", is_reported=False)
def hinge_embedding_loss_rule(call: Call) -> Any:
    if call.function is not functional.hinge_embedding_loss:
        return None

    def hinge_embedding_loss(
        input: Tensor, target: Tensor, margin: float = 1.0, **reduction: Any
    ) -> Tensor:
        alike = torch.where(target.eq(1), input, torch.zeros_like(input))
        loss = torch.where(target.eq(-1), (margin - input).clamp(min=0), alike)
        return _reduced(loss, **reduction)

    return hinge_embedding_loss


@rule("soft-margin-loss", "soft_margin_loss", is_reported=False)
def soft_margin_loss_rule(call: Call) -> Any:
    if call.function is not functional.soft_margin_loss:
        return None

    def soft_margin_loss(input: Tensor, target: Tensor, **reduction: Any) -> Tensor:
        power = torch.exp(-target * input)
        nan = torch.full_like(power, math.nan)
        return _reduced(torch.where(power.isinf(), nan, power.log1p()), **reduction)

    return soft_margin_loss
