# SPDX-License-Identifier: Apache-2.0
"""Refuse what can't be traced: values, shapes and tensors that no trace has.

These refusals stop the model's Python, whether the result is used or not. Operators
that a device doesn't run are refused later, by the rules of `rules/`.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .._logging import logger
from ..errors import Error, createPoptorchError
from .graph import (
    NodesById,
    Operation,
    as_list,
    is_whole_number,
    requested_device,
    tensors_in,
)

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

_DYNAMIC_SHAPES = frozenset(
    """
    argwhere masked_select nonzero unique unique_consecutive _unique _unique2
    """.split()  # noqa: SIM905 - one per line would be longer
)
"""Functions whose result has a shape that depends on values."""


class DynamicShapeError(Error, DynamicOutputShapeException):
    """Raised if the shape of a result depends on values: a device's shapes are fixed.

    PopTorch 3.4 lets torch's own exception through, so this class derives from it.
    """

    __hash__ = Error.__hash__  # torch's is a dataclass, which has no hash


def refuse_value_reader(operation: Operation) -> None:
    """Refuse a function that reads a value of a device's tensor.

    Raises:
        Error: The operation needs a value, as `tensor.item()` does.
    """
    what = _VALUE_READERS.get(operation.name)
    if operation.name == "to" and requested_device(operation) == "cpu":
        what = '.to("cpu")'
    if operation.name == "__format__" and operation.args[0].dim() == 0:
        what = "formatting (an f-string)"
    if what is None:
        return
    codes = [frame.f_code for frame, _ in traceback.walk_stack(None)]
    if any("pack_padded_sequence" in code.co_names for code in codes):
        raise packed_sequence(f"{what} for `pack_padded_sequence`")
    raise value_needed(what)


_DERIVATIVES = (
    "For a derivative by an input there are two ways: finite differences, `(f(x + h) - "
    "f(x - h)) / (2 * h)`; or `forward` carries it along by hand, such as `dy = (1 - y "
    "** 2) * linear(dx, weight)` beside `y = tanh(linear(x, weight, bias))`."
)


def refuse_transforms(operation: Operation) -> None:
    """Refuse `torch.func.grad`, `jvp` and the like, and torch's forward mode.

    Raises:
        Error: The operation is a part of one.
    """
    is_forward_mode = operation.name == "_make_dual"
    if is_forward_mode or any(map(is_gradtrackingtensor, operation.tensors)):
        raise createPoptorchError(
            "torch.func.grad(), jvp(), vjp() and the like can't be traced: the "
            "compiler makes the backward pass of a training model by itself. An "
            f"inference model may call torch.autograd.grad(). {_DERIVATIVES}"
        )


def refuse_gradients(operation: Operation) -> None:
    """Refuse `tensor.backward()` in a trace.

    Raises:
        Error: It is this operation.
    """
    if operation.name == "backward":
        raise createPoptorchError(
            ".backward() needs gradients while the model is traced. The compiler makes "
            "the backward pass of a training model by itself: return the loss, and "
            "leave the call out. An inference model may return what "
            "torch.autograd.grad() gives."
        )


def refuse_training_gradients(operation: Operation) -> None:
    """Refuse `torch.autograd.grad()` and `tensor.backward()` in a trace for training.

    Raises:
        Error: It is one of these operations.
    """
    refuse_gradients(operation)
    if operation.function is torch.autograd.grad:
        raise createPoptorchError(
            "torch.autograd.grad() in a training model, as for a gradient penalty: the "
            "compiler makes the backward pass of the whole program by itself, and "
            "nobody has seen yet whether it differentiates a recorded one. An "
            f"inference model may make the call. {_DERIVATIVES}"
        )


def require_differentiable(operation: Operation) -> None:
    """Refuse `torch.autograd.grad()` of what has no gradient, or of whole batches.

    Raises:
        Error: No output requires a gradient, or `is_grads_batched` is true.
    """
    if operation.kwargs.get("is_grads_batched"):
        raise createPoptorchError(
            "torch.autograd.grad(is_grads_batched=True) uses vmap, which isn't traced: "
            "call it for each of the gradients."
        )
    outputs = tensors_in(operation.args[:1] or operation.kwargs.get("outputs"))
    if not any(tensor.requires_grad for tensor in outputs):
        raise createPoptorchError(
            "torch.autograd.grad(): the outputs depend on no tensor that requires a "
            "gradient. Call `x.requires_grad_()` in `forward` before computing with "
            "the input, in grad mode: a model that is called under torch.no_grad() is "
            "traced under it."
        )


def value_needed(what: str) -> Error:
    """Return the error for code that needs the value of a device's tensor."""
    return createPoptorchError(
        f"{what} needs the value of a tensor while the model is traced, but values "
        "exist only when the compiled model runs. Compute with tensors "
        "(torch.where, masks), or take the value from the output of the model."
    )


def packed_sequence(what: str) -> DynamicShapeError:
    """Return the error for a sequence without its padding."""
    return DynamicShapeError(
        f"Packed sequences are not supported ({what}): their shape is determined by "
        "the lengths, but a compiled model has fixed shapes. Run the layer on the "
        "padded sequence, and take the last valid step of each row: `index = (lengths "
        "- 1)[:, None, None].expand(-1, 1, outputs.shape[2])`, then `outputs.gather(1, "
        "index)[:, 0]` with batch_first=True. Padding after it changes nothing before "
        "it."
    )


def plain_number(value: Any, nodes: NodesById, name: str) -> Any:
    """Return the number of a 0-d integer tensor of the host; other values themselves.

    Raises:
        Error: The value is a tensor of the device; the message names the function.
    """
    if not isinstance(value, Tensor) or not is_whole_number(value):
        return value
    if id(value) in nodes:
        raise value_needed(f"a tensor as a size, dimension or index of `{name}`")
    return int(value)


def text_without_values(operation: Operation) -> str:
    """Return the `repr` of a device's tensor while a model is traced."""
    return f"tensor(<unavailable>, shape={tuple(operation.args[0].shape)})"


def tensors_are_equal(operation: Operation) -> bool:
    """Return the result of `torch.equal` for tensors of the device in a trace.

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
    if name == "_pack_padded_sequence":
        raise packed_sequence("`pack_padded_sequence`")
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


def refuse_sparse(tensor: Tensor, what: str) -> None:
    """Refuse a tensor that isn't dense: no handler of PopTorch makes or takes one.

    Raises:
        Error: It is sparse; the message says what it is.
    """
    if tensor.layout != torch.strided:
        raise createPoptorchError(
            f"Unsupported tensor type {tensor.layout} ({what}): an IPU has dense "
            "tensors only. Multiply by `x.to_dense()`, or keep indices and values as "
            "dense tensors and use torch.gather and torch.scatter_add."
        )


def refuse_empty(tensor: Tensor, what: str) -> None:
    """Refuse a tensor without elements (PopTorch, `errorOnZeroSizedTensor`).

    Raises:
        Error: It has none; the message says what it is.
    """
    if tensor.numel() == 0:
        raise createPoptorchError(
            "Zero-sized tensors are unsupported (Got shape "
            f"{list(tensor.shape)}): {what} has no elements."
        )


def refuse_weights(module: torch.nn.Module) -> None:
    """Refuse weights that are sparse, and those of fractions without elements.

    Raises:
        Error: The module has such a parameter or buffer; the message names it.
    """
    for name, weight in (*module.named_parameters(), *module.named_buffers()):
        refuse_sparse(weight, f"the weight {name}")
        if weight.is_floating_point():  # others are compiled in
            refuse_empty(weight, f"the weight {name}")


def refuse_tied_buffers(module: torch.nn.Module) -> None:
    """Refuse a buffer that a module has under two names.

    PopTorch maps device tensors back to the host's by the names of parameters alone. It
    fails with `KeyError` (`_compileWithDispatch`), or leaves a buffer that isn't
    persistent on the device.

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


def refuse_lazy(module: torch.nn.Module) -> None:
    """Refuse weights without shapes, which torch's lazy modules have.

    A training model of PopTorch changes their classes, so that they stay empty
    (PopTorch, `_install_state_hooks`).

    Raises:
        Error: There is such a weight.
    """
    for name, weight in (*module.named_parameters(), *module.named_buffers()):
        kinds = UninitializedBuffer, UninitializedParameter
        if issubclass(type(weight), kinds):  # which fetches nothing
            raise createPoptorchError(
                f"'{name}' has no shape yet, as it is of a lazy module: call the model "
                "with a sample on the host before it is wrapped."
            )


def refuse_scripted(module: torch.nn.Module) -> None:
    """Refuse TorchScript, which can't be traced, and torch.compile.

    PopTorch doesn't support that (`docs/user_guide/pytorch_to_poptorch.rst`).

    Raises:
        Error: The module, or a part of it, is scripted or compiled.
    """
    for part in module.modules():
        is_wrapper = type(part).__name__ == "OptimizedModule"
        is_compiled = hasattr(part.forward, "_torchdynamo_orig_callable")
        if is_wrapper or is_compiled or getattr(part, "_compiled_call_impl", None):
            raise createPoptorchError(
                "PopTorch doesn't support torch.compile, from which the model or a "
                "part of it comes. Leave it out: PopTorch compiles the whole model."
            )
        if isinstance(part, torch.jit.ScriptModule):  # type: ignore[attr-defined,unused-ignore]
            raise untraceable(f"a torch.jit.ScriptModule: {type(part).__name__}")


def untraceable(what: object) -> Error:
    """Return the error for a tensor made where the trace doesn't see it."""
    return createPoptorchError(
        f"The model computes with something that cannot be traced ({what}), such as "
        "TorchScript or a transform of torch.func. Use functions of torch's Python "
        "API."
    )


def host_tensor_among(name: str, tensor: Tensor) -> Error:
    """Return the error for an operation on tensors of both host and device."""
    dtype = tensor.type().rpartition(".")[2].replace("Tensor", "")  # "Float"
    way = (
        "Register it with `self.register_buffer`, or move it as a constant with "
        '`tensor.to("ipu")` or `tensor.to(x.device)`.'
    )
    if isinstance(tensor, torch.nn.Parameter):
        way = (
            "The model doesn't have this parameter: put layers of a list or a dict "
            "into a torch.nn.ModuleList or ModuleDict."
        )
    elif is_batchedtensor(tensor):
        way = "vmap isn't traced: call the function with whole batches."
    return createPoptorchError(
        f"Expected an IPU tensor but got tensor(device={tensor.device.type}, "
        f"shape={list(tensor.shape)}, dtype={dtype}), in `{name}`. Only weights, "
        "registered buffers, inputs and what is computed from them are on the IPU. "
        + way
    )


_RNNS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def refuse_arguments(operation: Operation) -> None:
    """Refuse arguments that PopTorch refuses while it traces.

    It infers shapes then (`RegisterMetaOps.cpp.inc`), and has norms of its own
    (`RegisterAtenOverloads.cpp`).

    Raises:
        Error: The message says what to do.
    """
    name = operation.name
    if name == "one_hot" and operation.arguments.get("num_classes", -1) == -1:
        raise createPoptorchError(
            "OneHot num classes must be specified and must be constant. The shape of "
            "the result would depend on values."
        )
    if name == "bincount" and operation.arguments.get("minlength", 0) <= 0:
        raise createPoptorchError(
            "Bincount `minlength` must be specified and must be a constant. On the IPU "
            "MK2 platform the minimum length is also the maximum length: values beyond "
            "it must not occur."
        )
    if name in _RNNS and "batch_sizes" in operation.arguments:
        raise packed_sequence(f"`{name}`")
    if name in ("norm", "linalg_norm", "linalg_matrix_norm"):
        power = operation.arguments.get("p" if name == "norm" else "ord")
        if power == "nuc":
            raise createPoptorchError("Matrix nuclear norm is not supported.")
        if power in (2, -2) and is_norm_of_matrices(operation):
            raise createPoptorchError(
                "Matrix 2-norm is not supported. The Frobenius norm is: "
                "torch.linalg.matrix_norm(x)."
            )


def is_norm_of_matrices(operation: Operation) -> bool:
    """Return whether a norm isn't of vectors; `torch.norm` takes all elements."""
    dim = operation.arguments.get("dim")
    rank = operation.tensors[0].dim() if dim is None else len(as_list(dim))
    is_matrix = operation.name == "linalg_norm" and rank == 2
    return is_matrix or operation.name == "linalg_matrix_norm"
