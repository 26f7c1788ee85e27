# SPDX-License-Identifier: Apache-2.0
"""`torch.autograd.grad` in an inference model.

PopTorch doesn't differentiate such a model. While `forward` is traced, torch's autograd
runs as ever, and the operators of its backward pass become part of the program, as
those of `forward` do (PopTorch, `dispatch_tracer/README.md` and the message about
inputs with `requires_grad` in `_poplar_executor.py`). The emulator records the same
operators. So a function has a gradient if PopTorch has handlers for the operators of
its backward pass, and if autograd sees it at all.
"""

from __future__ import annotations

from typing import Any, Callable, NoReturn

import torch
from torch import Tensor
from torch._C import _nn, _VariableFunctions

from ..errors import createPoptorchError
from .graph import Operation, Place, storage_of, tensors_in

BINDINGS = (_VariableFunctions, _nn, Tensor.__base__)
"""Where torch has functions of Python for its operators."""

_UNSEEN = frozenset(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d bilinear
    cosine_embedding_loss ctc_loss dropout dropout1d dropout2d dropout3d feature_dropout
    hinge_embedding_loss kl_div l1_loss lstm margin_ranking_loss max_pool1d max_pool3d
    poisson_nll_loss take_along_dim triplet_margin_loss
    """.split()  # noqa: SIM905 - one per line would be a page
)
"""Functions that autograd knows by their parts only, and that PopTorch takes whole.

They are registered for an IPU (PopTorch, `RegisterOptionalAtenOps.cpp.inc`) and are
`CompositeImplicitAutograd` in torch 2.0.1, so their results have no `grad_fn`."""

UNKNOWN = "autograd has no derivative of it (`RegisterAtenOverloads.cpp`)"
_UNSEEN_WHY = "autograd doesn't see it on an IPU (`RegisterOptionalAtenOps.cpp.inc`)"

_BY_VALUE = "its backward pass reads a value (aten::item)"
"""As torch 2.0.1 writes it (`FunctionsManual.cpp`: `evenly_distribute_backward`,
`prod_backward`, `cumprod_backward`)."""

_WRITTEN = {
    "__getitem__": "indexing",
    "__setitem__": "an assignment to elements",
    "call_on_host": "poptorch.CPU",
    "run_branch": "poptorch.cond",
    "run_custom_op": "poptorch.custom_op",
    "run_loop": "poptorch.for_loop",
}
"""Functions that users write otherwise."""

_INSTEAD = {
    "__getitem__": "torch.gather, or whole numbers and slices without a step",
    "__setitem__": "torch.where or torch.cat",
    "abs": "torch.where(x < 0, -x, x)",
    "embedding": "torch.gather",
    "index_select": "torch.gather",
    "l1_loss": "torch.where(d < 0, -d, d).mean() with d = x - y",
    "max": "torch.amax",
    "min": "torch.amin",
    "mse_loss": "(x - y).pow(2).mean()",
    "norm": "torch.linalg.norm, or x.pow(2).sum(dim).sqrt()",
    "relu": "x.clamp(min=0)",
    "sigmoid": "1 / (1 + torch.exp(-x))",
    "silu": "x / (1 + torch.exp(-x))",
    "softmax": "torch.exp(x - x.amax(dim, True)) divided by its sum",
    "softplus": "torch.log(1 + torch.exp(x))",
    "tanh": "1 - 2 / (1 + torch.exp(2 * x))",
}
"""Functions without a gradient, and others that have one."""

_INDEXING = ("__getitem__", "__setitem__")
"""Functions of torch that the tracer wraps."""

_MAKER = "function of the trace"


def note_maker(result: Any, operation: Operation, place: Place) -> None:
    """Note in autograd's nodes which function of the user's made them.

    A gradient through a function that PopTorch hides from autograd is refused.

    Args:
        result: Its result.
        operation: The call.
        place: The line that calls it.
    """
    name = operation.name
    differentiable = [t for t in tensors_in(result) if t.requires_grad]
    why = _why_unseen(operation)
    for tensor in differentiable if why else ():
        refuse_gradient(tensor, name, place, why)
    tensors = [*differentiable, *operation.tensors]  # also what it changed in place
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors]
    while nodes:
        node = nodes.pop()
        if node is not None and _MAKER not in node.metadata:
            node.metadata[_MAKER] = name, place
            nodes += [before for before, _ in node.next_functions]


def _why_unseen(operation: Operation) -> str:
    """Return why a function has no gradient whatever its backward pass calls, or ""."""
    name, module = operation.name, getattr(operation.function, "__module__", "")
    if (module or "").startswith("ipufit.emulator") and name not in _INDEXING:
        return UNKNOWN
    is_alone = len(operation.args) + len(operation.kwargs) == 1
    if name in ("cumprod", "prod") or (is_alone and name in ("max", "median", "min")):
        return _BY_VALUE
    is_unseen = name in _UNSEEN
    if name == "norm":  # a tensor's on an IPU is `aten::frobenius_norm`
        is_unseen = operation.arguments.get("p", "fro") == "fro"
    return _UNSEEN_WHY if is_unseen else ""


def refuse_gradient(
    tensor: Tensor, name: str, place: Place, why: str = UNKNOWN
) -> None:
    """Refuse gradients that pass through a tensor.

    Args:
        tensor: Result of a function; nothing happens if it requires no gradient.
        name: Name of the function.
        place: The line that calls it.
        why: The reason.
    """

    def refuse(_: Tensor) -> NoReturn:
        raise createPoptorchError(_without_gradient(name, place, why))

    if tensor.requires_grad:
        tensor.register_hook(refuse)  # type: ignore[no-untyped-call,unused-ignore]


def _without_gradient(name: str, place: Place | None, why: str) -> str:
    """Return the message about a function through which no gradient passes."""
    where = "" if place is None else f" ({place})"
    way = _INSTEAD.get(name, _INSTEAD.get(name.rstrip("_"), ""))
    return (
        f"torch.autograd.grad() needs a gradient through {_WRITTEN.get(name, name)}"
        f"{where}, and PopTorch has none: {why}.{f' Instead: {way}.' if way else ''}"
    )


def refusal_of_operator(
    operator: str, args: tuple[Any, ...], compiled: frozenset[str]
) -> str:
    """Say why PopTorch doesn't compile an operator of a backward pass, if so.

    Args:
        operator: Name of the ATen operator, without overload and library.
        args: Its arguments.
        compiled: Operators that PopTorch compiles.

    Returns:
        The message, which names the function of `forward`; "" if it compiles.
    """
    problem = "" if operator in compiled else operator
    if operator == "index_put":  # for which torch takes another outside of a trace
        problem = "_index_put_impl_"
    elif operator == "slice_backward" and args[5] != 1:
        problem = "copy_ to a slice with a step"
    if not problem:
        return ""
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined,unused-ignore]
    # It is None where gradients are added; second derivatives have no maker.
    own = node.name().partition("Backward")[0] if node else "autograd.grad"
    name, place = getattr(node, "metadata", {}).get(_MAKER, (own, None))
    why = f"its backward pass is aten::{problem}, which PopTorch doesn't compile"
    return _without_gradient(name, place, why)


def function_of(operator: Any) -> Callable[..., Any]:
    """Return torch's function for an ATen operator, else the operator itself.

    Example:
        >>> function_of(torch.ops.aten.mul.Tensor) is torch.mul
        True
    """
    name = operator._schema.name.partition("::")[2]
    homes = [home for home in BINDINGS if hasattr(home, name)]
    return getattr(homes[0], name) if homes else operator


def written_by(operator: Any, args: tuple[Any, ...]) -> frozenset[int]:
    """Return the memory that an ATen operator changes."""
    arguments = operator._schema.arguments
    return frozenset(
        storage_of(value)
        for argument, value in zip(arguments, args)
        if isinstance(value, Tensor) and argument.alias_info is not None
        if argument.alias_info.is_write
    )


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two tensors share that are one value under two names.

    Autograd keeps results under names of its own.
    """
    return (
        storage_of(tensor),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride() if tensor.layout == torch.strided else (),
        tensor.dtype,
    )
