# SPDX-License-Identifier: Apache-2.0
"""Arguments of torch's functions that PopTorch doesn't support.

Without these checks the host would compute what a pod refuses to compile (PopTorch,
`LossOps.cpp`, `RNNOps.cpp`, `ReshapeOps.cpp`, `EmbeddingOps.cpp`, `PoolingOps.cpp`,
`BitwiseOps.cpp`, and the limits in its user guide, "IPU supported operations").
"""

from __future__ import annotations

import inspect
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn import functional

from ipufit.emulator._tracing.operands import tensors_in
from ipufit.emulator.errors import createPoptorchError

_CTC_ARGUMENTS = (
    "log_probs",
    "targets",
    "input_lengths",
    "target_lengths",
    "blank",
    "reduction",
)
_RNN_ARGUMENTS = (
    "input",
    "hx",
    "params",
    "has_biases",
    "num_layers",
    "dropout",
    "train",
    "bidirectional",
    "batch_first",
)
_RNNS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
_NO_REDUCTION = ("none", 0)
_LINEAR_UPSAMPLING = {
    "linear": "aten::upsample_linear1d",
    "trilinear": "aten::upsample_trilinear3d",
}
_CONV_TRANSPOSE_ARGUMENTS = (
    "input",
    "weight",
    "bias",
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)
_BITWISE = (
    "__invert__",
    "bitwise_not",
    "bitwise_not_",
    *(
        form.format(operation)
        for operation in ("and", "or", "xor")
        for form in ("bitwise_{}", "bitwise_{}_", "__{}__", "__i{}__", "__r{}__")
    ),
)


def refuse_unsupported(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse a call of torch that doesn't compile.

    Args:
        name: Of the function.
        args: Its arguments.
        kwargs: The same by name.

    Raises:
        Error: One of them is not supported.

    Example:
        >>> refuse_unsupported("relu", (), {})
    """
    check = _CHECKS.get(name)
    if check is not None:
        check(name, args, kwargs)


def _refuse_class_weights(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if _named(("input", "target", "weight"), args, kwargs).get("weight") is not None:
        aten = "cross_entropy_loss" if name.startswith("cross") else "nll_loss_nd"
        raise createPoptorchError(
            f'Parameter "weight" is unsupported for aten::{aten}: weigh the classes '
            "yourself, with reduction='none' and `weight[target]`."
        )


def _refuse_cross_entropy(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    _refuse_class_weights(name, args, kwargs)
    given = _bound(functional.cross_entropy, args, kwargs)
    is_of_classes = given["input"].shape != given["target"].shape
    is_mean = given.get("reduction", "mean") == "mean"
    if given.get("label_smoothing") and is_of_classes and is_mean:
        raise createPoptorchError(
            "F.cross_entropy with label_smoothing and reduction='mean' selects the "
            "samples that aren't ignored (aten::masked_select), whose number depends "
            "on values. Take the mean yourself: poptorch.identity_loss(F.cross_entropy("
            "..., reduction='none'), reduction='mean')."
        )


def _refuse_ctc(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = _named(_CTC_ARGUMENTS, args, kwargs)
    if given.get("reduction") in _NO_REDUCTION:
        raise createPoptorchError(
            'CTCLoss with reduction="none" is currently not supported: use "sum" or '
            '"mean".'
        )
    targets = given["targets"]
    if targets.dim() != 2:
        raise createPoptorchError(
            "CTCLoss needs 2-D targets, padded to one length: [batch, length]. "
            f"Got {list(targets.shape)}."
        )


def _refuse_rnn(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = _named(_RNN_ARGUMENTS, args, kwargs)
    if isinstance(given.get("hx"), Tensor) and given["hx"].dim() == 1:
        raise createPoptorchError("Packed sequences are not supported: pad them.")
    kind = _RNNS[name]
    verb = "is " if kind == "RNN" else ""
    if given.get("num_layers", 1) != 1:
        raise createPoptorchError(
            f"Only {kind} with 1 layer {verb}supported, not {given['num_layers']}: put "
            "several one after the other."
        )
    if given.get("dropout", 0.0) != 0.0:
        raise createPoptorchError(f"{kind} only supports dropout = 0.0")
    if given.get("bidirectional"):
        word = "Bidirectional" if kind == "RNN" else "bidirectional"
        raise createPoptorchError(
            f"{word} {kind} {verb}not supported: run a second one on the flipped "
            "sequence."
        )
    if kind != "GRU" and not given.get("has_biases", True):
        raise createPoptorchError(f"{kind} without biases {verb}not supported")


def _refuse_open_classes(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if _named(("input", "num_classes"), args, kwargs).get("num_classes", -1) == -1:
        raise createPoptorchError(
            "OneHot num classes must be specified and must be constant. The shape of "
            "the result would depend on values."
        )


def _refuse_open_bins(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _named(("input", "weights", "minlength"), args, kwargs).get("minlength", 0) <= 0:
        raise createPoptorchError(
            "Bincount `minlength` must be specified and must be a constant. On the IPU "
            "MK2 platform the minimum length is also the maximum length: values "
            "beyond it must not occur."
        )


def _refuse_upsampling(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = _bound(functional.interpolate, args, kwargs)
    mode = given.get("mode", "nearest")
    if mode in _LINEAR_UPSAMPLING:
        raise createPoptorchError(
            f"Unsupported upsample mode {_LINEAR_UPSAMPLING[mode]}: currently only "
            "'nearest' is supported for this number of dimensions."
        )
    if mode == "bicubic" and given.get("align_corners"):
        raise createPoptorchError("Only support align_corners=False. Mode: bicubic.")
    factors = given.get("scale_factor")
    if mode == "bilinear" and factors and not given.get("recompute_scale_factor"):
        _refuse_bilinear(_as_tuple(factors))


def _refuse_bilinear(factors: tuple[float, ...]) -> None:
    if len(set(factors)) > 1:
        raise createPoptorchError(
            f"Non-uniform bilinear upsampling not supported: {list(factors)}. Give "
            "`size` instead."
        )
    if factors[0] != int(factors[0]):
        raise createPoptorchError(
            "Bilinear upsampling with non-integer factor not supported: "
            f"{factors[0]}. Give `size` instead."
        )


def _refuse_sparse_embedding(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = _bound(getattr(functional, name), args, kwargs)
    for option in ("scale_grad_by_freq", "sparse"):
        if given.get(option):
            raise createPoptorchError(f"Unsupported aten::{name} operation: {option}.")
    if name == "embedding_bag" and given.get("padding_idx") is not None:
        raise createPoptorchError(
            "Unsupported aten::embedding_bag operation: padding_idx parameter is "
            "unsupported."
        )


def _refuse_uneven_pooling(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = _named(("input", "output_size"), args, kwargs)
    rank = int(name[-2])
    wanted = _as_tuple(given["output_size"])
    wanted = wanted * rank if len(wanted) == 1 else wanted
    for dim, (size, out) in enumerate(zip(given["input"].shape[-rank:], wanted)):
        if out and size % out:
            raise createPoptorchError(
                f"Input dim {dim} ({size}) is not divisible by the corresponding "
                f"output dim ({out}). An IPU would compute something else."
            )


def _refuse_indices(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise createPoptorchError(
        f"{name.replace('_with_indices', '')} with return_indices=True is not "
        "supported: only the values of max pooling can be had."
    )


def _refuse_dilation(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    dilation = _named(_CONV_TRANSPOSE_ARGUMENTS, args, kwargs).get("dilation", 1)
    if any(step != 1 for step in _as_tuple(dilation)):
        raise createPoptorchError(
            "Non default value for dilations is not supported by transposed "
            f"convolutions: {dilation}."
        )


def _refuse_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    operands = (*args, *kwargs.values())
    types = {x.dtype if isinstance(x, Tensor) else int for x in operands}
    if types <= {torch.uint8, torch.int8}:
        raise createPoptorchError(
            f"{name}: Poplar does not support binary operations on 8-bit integral "
            "types. Cast to torch.int32, or to torch.bool."
        )


def _refuse_unsorted(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    names = ("input", "k", "dim", "largest", "sorted")
    if not _named(names, args, kwargs).get("sorted", True):
        raise createPoptorchError("sorted=False is not supported for torch.topk.")


def _refuse_singular_values(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    which = "p" if name == "norm" else "ord"
    given = _named(("input", which, "dim"), args, kwargs)
    if given.get(which) == "nuc":
        raise createPoptorchError("Matrix nuclear norm is not supported.")
    # `torch.norm` takes a matrix for the vector of its elements.
    if name == "norm" or given.get(which) not in (2, -2):
        return
    dim, tensor = given.get("dim"), next(tensors_in((args, kwargs)))
    rank = tensor.dim() if dim is None else len(_as_tuple(dim))
    if name == "linalg_matrix_norm" or rank == 2:
        raise createPoptorchError(
            "Matrix 2-norm is not supported. The Frobenius norm is: "
            "torch.linalg.matrix_norm(x)."
        )


def _bound(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    return inspect.signature(function).bind_partial(*args, **kwargs).arguments


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _named(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    return {**dict(zip(names, args)), **kwargs}


_CHECKS: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], None]] = {
    "cross_entropy": _refuse_cross_entropy,
    "cross_entropy_loss": _refuse_class_weights,
    "nll_loss": _refuse_class_weights,
    "nll_loss_nd": _refuse_class_weights,
    "ctc_loss": _refuse_ctc,
    **dict.fromkeys(_RNNS, _refuse_rnn),
    "one_hot": _refuse_open_classes,
    "bincount": _refuse_open_bins,
    "interpolate": _refuse_upsampling,
    "embedding": _refuse_sparse_embedding,
    "embedding_bag": _refuse_sparse_embedding,
    **{f"adaptive_avg_pool{n}d": _refuse_uneven_pooling for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": _refuse_indices for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _refuse_dilation for n in (1, 2, 3)},
    **dict.fromkeys(_BITWISE, _refuse_bytes),
    "topk": _refuse_unsorted,
    **dict.fromkeys(
        ("norm", "linalg_norm", "linalg_matrix_norm"), _refuse_singular_values
    ),
}
