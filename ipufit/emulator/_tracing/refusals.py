# SPDX-License-Identifier: Apache-2.0
"""Refuse what a model may not do while it is traced, as no device could follow."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.autograd.function import BackwardCFunction

from ipufit.emulator._ground.logging import logger
from ipufit.emulator._tracing.operands import tensors_in
from ipufit.emulator._tracing.operation import Operation
from ipufit.emulator._tracing.tensor_devices import moves_to_host
from ipufit.emulator.errors import Error, createPoptorchError

_VALUE_READERS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "cpu": ".cpu()",
    "is_nonzero": "is_nonzero()",
    "allclose": "torch.allclose()",
    "__bool__": "the truth value (`if tensor:`, `and`, `while`)",
    "__int__": "int()",
    "__float__": "float()",
    "__complex__": "complex()",
    "__index__": "use as an index",
    "__array__": "conversion to a NumPy array",
    "__contains__": "`in`",
}
"""Functions that give Python a value which exists only when the device runs."""

_TYPE_NAMES = {
    torch.bool: "Bool",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.uint8: "Byte",
}
"""Names of the types in torch's C++ side, and so in PopTorch's messages."""

_DYNAMIC_SHAPES = frozenset(
    """
    argwhere masked_select nonzero unique unique_consecutive _unique _unique2
    """.split()  # noqa: SIM905 - one per line would be longer
)
"""Functions whose result has a shape that depends on values."""


class DynamicShapeError(Error, DynamicOutputShapeException):
    """The shape of a result depends on values; a device's programs have fixed shapes.

    PopTorch 3.4 lets torch's own exception through, so it is that one too.
    """

    __hash__ = Error.__hash__  # torch's is a dataclass, which has no hash


def refuse_value_reader(operation: Operation) -> None:
    """Refuse a function that needs the value of a device's tensor.

    Raises:
        Error: The operation needs a value, as `tensor.item()` does.
    """
    what = _VALUE_READERS.get(operation.name)
    if moves_to_host(operation):
        what = '.to("cpu")'
    if operation.name == "__format__" and operation.args[0].dim() == 0:
        what = "formatting (an f-string)"
    if what is not None:
        raise value_needed(what)


def refuse_gradients(operation: Operation) -> None:
    """Refuse to compute gradients in a trace: the compiler differentiates a program.

    Raises:
        Error: The operation is `tensor.backward()` or `torch.autograd.grad()`.
    """
    is_grad = operation.function is torch.autograd.grad
    if is_grad or operation.name == "backward":
        what = "torch.autograd.grad()" if is_grad else ".backward()"
        raise createPoptorchError(
            f"{what} needs gradients while the model is traced, but the compiler makes "
            "the backward pass of the whole program by itself. Return the loss, and "
            "leave the call out."
        )


def value_needed(what: str) -> Error:
    """Build the error for what needs the value of a device's tensor."""
    return createPoptorchError(
        f"{what} needs the value of a tensor while the model is traced, but values "
        "exist only when the compiled model runs. Compute with tensors "
        "(torch.where, masks), or take the value from the output of the model."
    )


def text_without_values(operation: Operation) -> str:
    """The `repr` of a tensor of the device while a model is traced."""
    return f"tensor(<unavailable>, shape={tuple(operation.args[0].shape)})"


def tensors_are_equal(operation: Operation) -> bool:
    """The answer of `torch.equal` for the device's tensors while a model is traced.

    It is False, as in PopTorch (`RegisterMetaOps.cpp.inc`), whatever the values. Layers
    of torch rely on it: `torch.nn.TransformerEncoder` looks for a causal mask with it.
    """
    logger.warning(
        "torch.equal() is False for whatever tensors of the device: their values exist "
        "only when the compiled model runs."
    )
    return False


def refuse_dynamic_shape(operation: Operation) -> None:
    """Refuse a function whose result has no fixed shape.

    Raises:
        DynamicShapeError: The shape of the result depends on values.
    """
    name, args = operation.name, operation.args
    is_mask_read = name == "__getitem__" and any(
        index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1:])
    )
    is_where_read = name == "where" and len(args) + len(operation.kwargs) == 1
    if name in _DYNAMIC_SHAPES or is_mask_read or is_where_read:
        what = "indexing with a mask" if is_mask_read else f"`{name}`"
        raise DynamicShapeError(
            f"Operations such as {what} are unsupported because the output shape is "
            "determined by the tensor values, but a compiled model has fixed shapes. "
            "Keep the shape: use torch.where(mask, x, other) or multiply by the mask."
        )


def refuse_custom_backward(tensor: Tensor) -> None:
    """Refuse the result of a `torch.autograd.Function` in a trace for training.

    PopTorch differentiates the recorded operations. Those inside the function's
    `forward` were made without gradients, so nothing before them would train, and
    `backward` would never run. A result without elements has no gradient: checkpoints
    of torch 2.1 to 2.8 hold their inputs by one.

    Raises:
        Error: `tensor` is such a result.
    """
    if isinstance(tensor.grad_fn, BackwardCFunction) and tensor.numel():
        name = type(tensor.grad_fn).__name__
        raise createPoptorchError(
            f"The model uses a torch.autograd.Function ({name}): the device "
            "differentiates by itself and never runs its backward, so what comes "
            "before it would not train. Compose it of ordinary functions, for "
            "example `x + (f(x) - x).detach()` for a straight-through estimator, or "
            "checkpoint with use_reentrant=False."
        )


def refuse_tied_buffers(module: torch.nn.Module) -> None:
    """Refuse a buffer that a module has under two names.

    PopTorch brings the host's tensors back with a map of the parameters' names alone,
    so it fails with `KeyError` (`_compileWithDispatch`), or, for buffers that aren't
    persistent, leaves one on the device.

    Raises:
        Error: There is such a buffer, in the module or in one of its submodules.
    """
    names: dict[int, str] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        first = names.setdefault(id(buffer), name)
        if first != name:
            raise createPoptorchError(
                f"The buffer '{first}' is '{name}' as well: parameters can be tied, "
                "buffers can't (PopTorch fails with a KeyError). Give each module a "
                "buffer of its own, and a module with buffers one name only."
            )


def untraceable(what: object) -> Error:
    """Build the error for a tensor made where the trace doesn't see it."""
    return createPoptorchError(
        f"The model computes with something that cannot be traced ({what}), such as "
        "TorchScript or a transform of torch.func. Use functions of torch's Python "
        "API."
    )


def host_tensor_among(name: str, tensor: Tensor) -> Error:
    """Build the error for an operation on tensors of both the host and the device."""
    dtype = _TYPE_NAMES.get(tensor.dtype, tensor.dtype)
    return createPoptorchError(
        f"Expected an IPU tensor but got tensor(device={tensor.device.type}, "
        f"shape={list(tensor.shape)}, dtype={dtype}), in `{name}`. Only weights, "
        "registered buffers, inputs and what is computed from them are on the IPU. "
        "Register it with `self.register_buffer`, or move it as a constant with "
        '`tensor.to("ipu")` or `tensor.to(x.device)`.'
    )
