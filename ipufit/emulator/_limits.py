# SPDX-License-Identifier: Apache-2.0
"""Arguments of torch's functions that PopTorch doesn't support.

Without these checks the host would compute what a pod refuses to compile (PopTorch,
`LossOps.cpp` and `RNNOps.cpp`).
"""

from __future__ import annotations

from typing import Any, Callable

from torch import Tensor

from .errors import createPoptorchError

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
    if given.get("num_layers", 1) != 1:
        raise createPoptorchError(
            f"Only {kind} with 1 layer supported, not {given['num_layers']}: put "
            "several one after the other."
        )
    if given.get("dropout", 0.0) != 0.0:
        raise createPoptorchError(f"{kind} only supports dropout = 0.0")
    if given.get("bidirectional"):
        raise createPoptorchError(
            f"bidirectional {kind} not supported: run a second one on the flipped "
            "sequence."
        )
    if kind != "GRU" and not given.get("has_biases", True):
        raise createPoptorchError(f"{kind} without biases not supported")


def _named(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    return {**dict(zip(names, args)), **kwargs}


_CHECKS: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], None]] = {
    "cross_entropy": _refuse_class_weights,
    "cross_entropy_loss": _refuse_class_weights,
    "nll_loss": _refuse_class_weights,
    "nll_loss_nd": _refuse_class_weights,
    "ctc_loss": _refuse_ctc,
    **dict.fromkeys(_RNNS, _refuse_rnn),
}
