# SPDX-License-Identifier: Apache-2.0
"""Rules of layers: products, convolutions, normalisation, embeddings and losses."""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn import _reduction, functional

from ..graph import as_list
from ..operators import Call, row

_FEW = 100
"""Values below which a deviation without bias visibly differs from one with bias."""

_MOST_HALF = 65504
_CLASS_LOSSES = "cross_entropy cross_entropy_loss nll_loss nll_loss_nd"
_PRODUCTS = "bmm dot mm mv matmul __matmul__ __rmatmul__ linear"
_TRANSPOSED = "conv_transpose1d conv_transpose2d conv_transpose3d"
_NORMS = "batch_norm instance_norm group_norm layer_norm"


# Products and convolutions ------------------------------------------------------------


row("matmul-whole", _PRODUCTS, lambda call: call.is_whole)
row("conv-whole", "conv1d conv2d conv3d", lambda call: call.is_whole)


@row("conv-transpose-dilation", _TRANSPOSED, topic="arguments")
def conv_transpose_dilation(call: Call) -> Any:
    dilation = call.get("dilation", 1)
    return any(step != 1 for step in as_list(dilation)) and str(dilation)


@row("baddbmm-beta-0", "baddbmm", is_reported=False)
def baddbmm_beta_0(call: Call) -> Any:
    def baddbmm(
        input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any, alpha: Any = 1
    ) -> Tensor:
        return torch.bmm(batch1, batch2) * alpha + input * beta

    return call.kwargs.get("beta", 1) == 0 and baddbmm


row("cumulative-0d", "cumsum cumprod", lambda call: call.first.dim() == 0)


@row("cumsum-float32", "cumsum", is_reported=False)
def cumsum_float32(call: Call) -> Any:
    dtype = call.result.dtype
    return not dtype.is_floating_point and (
        lambda input, dim, **_: torch.cumsum(input.to(dtype).float(), dim).to(dtype)
    )


@row("cumprod-dtype", "cumprod")
def cumprod_dtype(call: Call) -> Any:
    is_cast = call.first.is_floating_point() != call.result.is_floating_point()
    return is_cast and (lambda input, dim, **_: torch.cumprod(input, dim))


@row("rnn-options", "lstm", topic="arguments")
def rnn_options(call: Call) -> Any:
    num_layers = call.get("num_layers", 1)
    if num_layers != 1:
        return (
            f"Only LSTM with 1 layer supported, not {num_layers}: put several one "
            "after the other."
        )
    if call.get("dropout", 0.0) != 0.0:
        return "LSTM only supports dropout = 0.0"
    if call.get("bidirectional"):
        return (
            "bidirectional LSTM not supported: run a second one on the flipped "
            "sequence."
        )
    is_without = not call.get("has_biases", True)
    return is_without and "LSTM without biases not supported"


@row("dropout-inference", "gru rnn_tanh rnn_relu")
def rnn_dropout(call: Call) -> Any:
    is_dropping = call.get("train") and call.get("dropout") and call.args[4] > 1
    return (is_dropping and not call.is_training) and (
        lambda *args: call.function(*args[:5], 0.0, *args[6:])
    )


@row("lstm-projection", "lstm")
def lstm_projection(call: Call) -> Any:
    hidden, cell = next(arg for arg in call.args if isinstance(arg, (tuple, list)))
    return hidden.shape[-1] != cell.shape[-1]


# Normalisation ------------------------------------------------------------------------


@row("norm-one-affine", _NORMS)
def norm_one_affine(call: Call) -> Any:
    return (call.get("weight") is None) != (call.get("bias") is None)


@row("batch-norm-gradient", "batch_norm")
def batch_norm_gradient(call: Call) -> Any:
    per_channel = call.first.numel() // call.first.shape[1]
    return bool(call.get("training")) and call.trains and per_channel < _FEW


@row("instance-norm-gradient", "instance_norm")
def instance_norm_gradient(call: Call) -> Any:
    per_channel = call.first[0, 0].numel()
    return call.get("use_input_stats", True) and call.trains and per_channel < _FEW


@row("instance-norm-statistics", "instance_norm")
def instance_norm_statistics(call: Call) -> Any:
    function = functional.instance_norm

    def norm(
        input: Tensor, running_mean: Any, running_var: Any, **options: Any
    ) -> Tensor:
        return function(input, None, None, **options)

    is_updating = call.get("use_input_stats", True) and call.function is function
    return is_updating and call.get("running_mean") is not None and norm


# Embeddings ---------------------------------------------------------------------------


@row("embedding-options", "embedding embedding_bag", topic="arguments")
def embedding_options(call: Call) -> Any:
    return next((o for o in ("scale_grad_by_freq", "sparse") if call.get(o)), None)


@row("embedding-bag-padding", "embedding_bag", topic="arguments")
def embedding_bag_padding(call: Call) -> Any:
    return call.get("padding_idx") is not None


@row("embedding-bag-offsets", "embedding_bag", topic="arguments")
def embedding_bag_offsets(call: Call) -> Any:
    return call.argument_node("offsets") not in (None, *call.constants)


@row("embedding-max-norm", "embedding embedding_bag")
def embedding_max_norm(call: Call) -> Any:
    return call.get("max_norm") is not None



@row("embedding-bag-frozen", "embedding_bag")
def embedding_bag_frozen(call: Call) -> Any:
    return not call.arguments["weight"].requires_grad


@row("embedding-bag-empty", "embedding_bag")
def embedding_bag_empty(call: Call) -> Any:
    offsets = call.get("offsets")
    if offsets is None:
        return False
    ends = [*offsets.tolist(), call.get("input", call.get("indices")).numel()]
    if call.get("include_last_offset"):
        ends.pop()
    return any(end == start for start, end in zip(ends, ends[1:]))


@row("repeat-interleave", "repeat_interleave")
def repeat_interleave(call: Call) -> Any:
    return call.kwargs.get("output_size") is None


# Losses -------------------------------------------------------------------------------


@row("class-weight", _CLASS_LOSSES, topic="arguments")
def class_weight(call: Call) -> Any:
    aten = "cross_entropy_loss" if call.name.startswith("cross") else "nll_loss_nd"
    return call.get("weight") is not None and aten


@row("label-smoothing-mean", "cross_entropy", topic="arguments")
def label_smoothing_mean(call: Call) -> Any:
    is_of_classes = call.arguments["input"].shape != call.arguments["target"].shape
    is_mean = call.get("reduction", "mean") == "mean"
    return call.get("label_smoothing") and is_of_classes and is_mean


@row("ctc-loss-none", "ctc_loss", topic="arguments")
def ctc_loss_none(call: Call) -> Any:
    return call.get("reduction") in ("none", 0)


@row("ctc-loss-targets", "ctc_loss", topic="arguments")
def ctc_loss_targets(call: Call) -> Any:
    shape = list(call.arguments["targets"].shape)
    return len(shape) != 2 and str(shape)


@row("class-loss-1d", _CLASS_LOSSES)
def class_loss_1d(call: Call) -> Any:
    return call.first.dim() == 1 and call.arguments["target"].dim() == 0


@row("class-loss-half-count", _CLASS_LOSSES)
def class_loss_half_count(call: Call) -> Any:
    is_mean = call.get("reduction", "mean") in ("mean", 1)
    return call.is_half and is_mean and call.arguments["target"].numel() > _MOST_HALF


row("cosine-embedding-loss-1d", "cosine_embedding_loss", lambda c: c.first.dim() == 1)
row("triplet-margin-loss-1d", "triplet_margin_loss", lambda c: c.first.dim() == 1)
row("gaussian-nll-loss", "gaussian_nll_loss", lambda call: True)


def _loss(
    name: str,
    is_other: Callable[[Call], bool] = lambda call: True,
    *,
    is_reported: bool = True,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Make a loss of elements the rule of a row, for torch's function of its name.

    Args:
        name: The row's name.
        is_other: Whether the row holds for a call.
        is_reported: As in `OperatorRule`.
    """

    def add(elements: Callable[..., Tensor]) -> Callable[..., Tensor]:
        function = getattr(functional, elements.__name__)

        def loss(
            *args: Any,
            size_average: Any = None,
            reduce: Any = None,
            reduction: str = "mean",
            **kwargs: Any,
        ) -> Tensor:
            loss = elements(*args, **kwargs)
            if size_average is not None or reduce is not None:
                reduction = _reduction.legacy_get_string(
                    size_average, reduce, emit_warning=False
                )
            if reduction == "batchmean":
                return loss.sum() / (loss.shape[0] if loss.dim() else 1)
            return loss if reduction == "none" else getattr(loss, reduction)()

        row(
            name,
            elements.__name__,
            lambda call: call.function is function and is_other(call) and loss,
            is_reported=is_reported,
        )
        return elements

    return add


@_loss("binary-cross-entropy")
def binary_cross_entropy(input: Tensor, target: Tensor, weight: Any = None) -> Tensor:
    loss = target * torch.log(input) + (1.0 - target) * torch.log(1.0 - input)
    return -loss if weight is None else -loss * weight


@_loss("kl-div", is_reported=False)
def kl_div(input: Tensor, target: Tensor, log_target: bool = False) -> Tensor:
    function: Callable[..., Tensor] = torch.kl_div
    loss = function(input, target, 0, log_target=log_target)
    shares = target.exp() if log_target else target
    return torch.where(shares.gt(0), loss, torch.zeros_like(loss))


@_loss("triplet-margin-loss", lambda call: call.first.dim() > 2)
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
) -> Tensor:
    def distance(x: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x - y + eps, p, dim=1)

    far = distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return (distance(anchor, positive) - far + margin).clamp(min=0)


@_loss("hinge-embedding-loss", is_reported=False)
def hinge_embedding_loss(input: Tensor, target: Tensor, margin: float = 1.0) -> Tensor:
    alike = torch.where(target.eq(1), input, torch.zeros_like(input))
    return torch.where(target.eq(-1), (margin - input).clamp(min=0), alike)


@_loss("soft-margin-loss", is_reported=False)
def soft_margin_loss(input: Tensor, target: Tensor) -> Tensor:
    power = torch.exp(-target * input)
    return torch.where(power.isinf(), torch.full_like(power, math.nan), power.log1p())
