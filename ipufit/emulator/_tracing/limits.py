# SPDX-License-Identifier: Apache-2.0
"""Arguments of torch's functions that PopTorch doesn't support.

To add one, write a function that raises and put it into the table at the end.

Without these checks the host would compute what a pod refuses to compile (PopTorch,
`LossOps.cpp`, `RNNOps.cpp`, `ReshapeOps.cpp`, `EmbeddingOps.cpp`, `PoolingOps.cpp`,
`BitwiseOps.cpp`, and the limits in its user guide, "IPU supported operations").
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn import functional

from ipufit.emulator._tracing.operation import Operation
from ipufit.emulator.errors import createPoptorchError

_CTC_ARGUMENTS = "log_probs targets input_lengths target_lengths blank reduction"
_RNN_ARGUMENTS = (
    "input hx params has_biases num_layers dropout train bidirectional batch_first"
)
_CONV_TRANSPOSE_ARGUMENTS = (
    "input weight bias stride padding output_padding groups dilation"
)
_RNNS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
_NO_REDUCTION = ("none", 0)
_LINEAR_UPSAMPLING = {
    "linear": "aten::upsample_linear1d",
    "trilinear": "aten::upsample_trilinear3d",
}
_BITWISE = (
    "__invert__",
    "bitwise_not",
    "bitwise_not_",
    *(
        form.format(function)
        for function in ("and", "or", "xor")
        for form in ("bitwise_{}", "bitwise_{}_", "__{}__", "__i{}__", "__r{}__")
    ),
)


def refuse_unsupported(operation: Operation) -> None:
    """Refuse an operation whose arguments PopTorch doesn't support.

    Raises:
        Error: An argument is not supported; the message says what to do.

    Example:
        >>> refuse_unsupported(Operation(torch.relu, "relu", (), {}))
    """
    check = _CHECKS.get(operation.name)
    if check is not None:
        check(operation)


def _refuse_class_weights(operation: Operation) -> None:
    if operation.arguments("input target weight").get("weight") is not None:
        is_entropy = operation.name.startswith("cross")
        aten = "cross_entropy_loss" if is_entropy else "nll_loss_nd"
        raise createPoptorchError(
            f'Parameter "weight" is unsupported for aten::{aten}: weigh the classes '
            "yourself, with reduction='none' and `weight[target]`."
        )


def _refuse_cross_entropy(operation: Operation) -> None:
    _refuse_class_weights(operation)
    given = operation.arguments_of(functional.cross_entropy)
    is_of_classes = given["input"].shape != given["target"].shape
    is_mean = given.get("reduction", "mean") == "mean"
    if given.get("label_smoothing") and is_of_classes and is_mean:
        raise createPoptorchError(
            "F.cross_entropy with label_smoothing and reduction='mean' selects the "
            "samples that aren't ignored (aten::masked_select), whose number depends "
            "on values. Take the mean yourself: poptorch.identity_loss(F.cross_entropy("
            "..., reduction='none'), reduction='mean')."
        )


def _refuse_ctc(operation: Operation) -> None:
    given = operation.arguments(_CTC_ARGUMENTS)
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


def _refuse_rnn(operation: Operation) -> None:
    given = operation.arguments(_RNN_ARGUMENTS)
    if isinstance(given.get("hx"), Tensor) and given["hx"].dim() == 1:
        raise createPoptorchError("Packed sequences are not supported: pad them.")
    kind = _RNNS[operation.name]
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


def _refuse_open_classes(operation: Operation) -> None:
    if operation.arguments("input num_classes").get("num_classes", -1) == -1:
        raise createPoptorchError(
            "OneHot num classes must be specified and must be constant. The shape of "
            "the result would depend on values."
        )


def _refuse_open_bins(operation: Operation) -> None:
    if operation.arguments("input weights minlength").get("minlength", 0) <= 0:
        raise createPoptorchError(
            "Bincount `minlength` must be specified and must be a constant. On the IPU "
            "MK2 platform the minimum length is also the maximum length: values "
            "beyond it must not occur."
        )


def _refuse_upsampling(operation: Operation) -> None:
    given = operation.arguments_of(functional.interpolate)
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


def _refuse_sparse_embedding(operation: Operation) -> None:
    name = operation.name
    given = operation.arguments_of(getattr(functional, name))
    for option in ("scale_grad_by_freq", "sparse"):
        if given.get(option):
            raise createPoptorchError(f"Unsupported aten::{name} operation: {option}.")
    if name == "embedding_bag" and given.get("padding_idx") is not None:
        raise createPoptorchError(
            "Unsupported aten::embedding_bag operation: padding_idx parameter is "
            "unsupported."
        )


def _refuse_uneven_pooling(operation: Operation) -> None:
    given = operation.arguments("input output_size")
    rank = int(operation.name[-2])
    wanted = _as_tuple(given["output_size"])
    wanted = wanted * rank if len(wanted) == 1 else wanted
    for dim, (size, out) in enumerate(zip(given["input"].shape[-rank:], wanted)):
        if out and size % out:
            raise createPoptorchError(
                f"Input dim {dim} ({size}) is not divisible by the corresponding "
                f"output dim ({out}). An IPU would compute something else."
            )


def _refuse_indices(operation: Operation) -> None:
    kind = operation.name.replace("_with_indices", "")
    raise createPoptorchError(
        f"{kind} with return_indices=True is not "
        "supported: only the values of max pooling can be had."
    )


def _refuse_dilation(operation: Operation) -> None:
    dilation = operation.arguments(_CONV_TRANSPOSE_ARGUMENTS).get("dilation", 1)
    if any(step != 1 for step in _as_tuple(dilation)):
        raise createPoptorchError(
            "Non default value for dilations is not supported by transposed "
            f"convolutions: {dilation}."
        )


def _refuse_bytes(operation: Operation) -> None:
    operands = (*operation.args, *operation.kwargs.values())
    types = {x.dtype if isinstance(x, Tensor) else int for x in operands}
    if types <= {torch.uint8, torch.int8}:
        raise createPoptorchError(
            f"{operation.name}: Poplar does not support binary operations on 8-bit "
            "integral types. Cast to torch.int32, or to torch.bool."
        )


def _refuse_unsorted(operation: Operation) -> None:
    if not operation.arguments("input k dim largest sorted").get("sorted", True):
        raise createPoptorchError("sorted=False is not supported for torch.topk.")


def _refuse_singular_values(operation: Operation) -> None:
    name = operation.name
    which = "p" if name == "norm" else "ord"
    given = operation.arguments(f"input {which} dim")
    if given.get(which) == "nuc":
        raise createPoptorchError("Matrix nuclear norm is not supported.")
    # `torch.norm` takes a matrix for the vector of its elements.
    if name == "norm" or given.get(which) not in (2, -2):
        return
    dim, tensor = given.get("dim"), operation.tensors()[0]
    rank = tensor.dim() if dim is None else len(_as_tuple(dim))
    if name == "linalg_matrix_norm" or rank == 2:
        raise createPoptorchError(
            "Matrix 2-norm is not supported. The Frobenius norm is: "
            "torch.linalg.matrix_norm(x)."
        )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


_CHECKS: dict[str, Callable[[Operation], None]] = {
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
