# SPDX-License-Identifier: Apache-2.0
"""The arguments of an executor's call, ordered by signature and checked.

PopTorch reads the signature of `forward` when the model is wrapped, and turns each call
into positional and keyword arguments. Every later call must have the structure, types,
shapes and constants that the model was compiled for (PopTorch, `_args_parser.py`).
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any, Callable, Iterable, NamedTuple

import torch
from torch import Tensor

from ._logging import logger
from ._utils import flattenTensorStructure, reconstructTensorStructure
from .core.refusals import refuse_empty, refuse_sparse
from .errors import Error, createPoptorchError

_MISMATCH = (
    "\nThe arguments of this call do not match those that the model was compiled for. "
    "Wrap the model again, or call destroy() first, to compile it for the new ones."
)

_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_SUPPORTED_DTYPES = {*_INTEGERS, *_FLOATS, torch.bool}


class CallArguments(NamedTuple):
    """The arguments of one call, ordered as `forward` takes them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self, like: CallArguments | None = None) -> list[Tensor]:
        """List the tensors, in the order of `like`, its dict keys included."""
        return list(flattenTensorStructure(self, like))

    def with_tensors(self, tensors: Iterable[Tensor]) -> CallArguments:
        """Copy the arguments, with other tensors in place of the present ones."""
        copied: CallArguments = reconstructTensorStructure(self, tensors)
        return copied


class ArgsParser:
    """Turns the arguments of a call into `CallArguments`.

    Args:
        forward: The method that is traced, whose signature orders the arguments.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        try:
            signature = inspect.signature(forward)
        except (TypeError, ValueError):  # a callable that hides its signature
            signature = inspect.signature(lambda *args, **kwargs: None)
        parameters = signature.parameters.values()
        kinds = [parameter.kind for parameter in parameters]
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._parameters = [p for p in parameters if p.kind not in variadic]
        self._has_rest, self._has_others = (kind in kinds for kind in variadic)
        self._num_positional = len(self._parameters)
        self._rest_name = ""
        if self._has_rest:
            self._num_positional = kinds.index(inspect.Parameter.VAR_POSITIONAL)
            self._rest_name = list(signature.parameters)[self._num_positional]
        self._has_warned_layout = False

    def parse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """Order the arguments of a call by the signature.

        Raises:
            AssertionError: Too many arguments, an unknown one, or one given twice.
            Error: A mandatory one is missing.
        """
        names = [parameter.name for parameter in self._parameters]
        count = len(args) + len(kwargs)
        if not (self._has_rest or self._has_others) and count > len(names):
            raise AssertionError(
                f"Too many arguments provided: expected {names} ({len(names)}) but got "
                f"{count}"
            )
        for name in kwargs:
            if name not in names and not self._has_others:
                raise AssertionError(
                    f"{name} is not a valid parameter. Allowed values are {names}"
                )
        positional, keywords, others = list(args), {}, dict(kwargs)
        for position, parameter in enumerate(self._parameters):
            is_positional = position < self._num_positional
            if is_positional and position < len(args):
                if parameter.name in others:
                    raise AssertionError(
                        f"Parameter {parameter.name} was passed more than once"
                    )
                continue
            value = others.pop(parameter.name, parameter.default)
            if value is inspect.Parameter.empty:
                raise createPoptorchError(
                    f"Mandatory parameter {parameter.name} missing"
                )
            if is_positional:
                positional.append(value)
            else:  # after `*args`
                keywords[parameter.name] = value
        arguments = CallArguments(tuple(positional), {**keywords, **others})
        tensors = arguments.tensors()
        if all(t.layout != torch.strided or t.is_contiguous() for t in tensors):
            return arguments
        if not self._has_warned_layout:
            logger.warning(
                "At least one input tensor is not contiguous: it is copied into a "
                "contiguous one at every call."
            )
            self._has_warned_layout = True
        return arguments.with_tensors(
            t.contiguous() if t.layout == torch.strided else t for t in tensors
        )

    def tensors(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: CallArguments
    ) -> list[Tensor]:
        """Return the tensors of a call, in the order of the compiled arguments.

        Raises:
            AssertionError: As from `parse`.
            Error: As from `parse`, or the call differs from the compiled arguments in
                number, type, keys, dtype, shape or a constant.
        """
        is_plain = not (kwargs or compiled.kwargs) and len(args) == len(compiled.args)
        for expected, tensor in zip(compiled.args, args):
            is_plain = (
                is_plain
                and type(tensor) is Tensor
                and type(expected) is Tensor
                and tensor.dtype is expected.dtype
                and tensor.shape == expected.shape
                and tensor.is_contiguous()
            )
        if is_plain:  # most calls: they need no `parse`
            return list(args)
        current = self.parse(args, kwargs)
        if len(compiled.args) != len(current.args):
            raise _mismatch(
                "Number of positional arguments mismatch: expected "
                f"{len(compiled.args)} arguments but got {len(current.args)}."
            )
        names = [p.name for p in self._parameters[: self._num_positional]]
        rest = (f"*{self._rest_name}[{index}]" for index in itertools.count())
        pairs = zip(compiled.args, current.args)
        for name, pair in zip(itertools.chain(names, rest), pairs):
            _compare(name, *pair)
        _check_keys("named arguments", compiled.kwargs, current.kwargs)
        for name, value in compiled.kwargs.items():
            _compare(name, value, current.kwargs[name])
        return current.tensors(like=compiled)


def micro_batch(arguments: CallArguments, factor: int, explain: str) -> CallArguments:
    """Return a copy of the arguments of a call's first micro-batch.

    Args:
        arguments: Arguments of the whole call.
        factor: Number of micro-batches in a call.
        explain: Formula of `factor`, for the message.

    Raises:
        AssertionError: A leading dimension is not a multiple of `factor`.
    """

    def first_rows(tensor: Tensor) -> Tensor:
        size = tensor.shape[0] if tensor.dim() else 1
        if size % factor:
            raise AssertionError(
                f"Invalid batch dimension: In the input of shape "
                f"{tuple(tensor.shape)}, the batch dimension ({size}) must be a "
                f"multiple of {explain} = "
                f"{factor} because it is divided into that many micro-batches."
            )
        if tensor.requires_grad:
            logger.warning(
                "Input tensor has requires_grad=True set. This tensor will be detached "
                "because backward pass via inputs is not supported."
            )
        rows = tensor.narrow(0, 0, size // factor) if tensor.dim() else tensor
        return torch.clone(rows.detach())

    return arguments.with_tensors(map(first_rows, arguments.tensors()))


def check_inputs(tensors: list[Tensor]) -> None:
    """Refuse tensors that no IPU can take.

    Raises:
        Error: An unsupported dtype, or a tensor without elements.
    """
    for tensor in tensors:
        refuse_sparse(tensor, "an input")
        if tensor.dtype not in _SUPPORTED_DTYPES:
            raise createPoptorchError(f"Unsupported input type {tensor.dtype}")
        refuse_empty(tensor, "an input")


def _mismatch(text: str) -> Error:
    return createPoptorchError(text + _MISMATCH)


def _compare(name: str, expected: Any, got: Any) -> None:
    """Refuse an argument that differs in type or shape from the compiled one.

    Containers and custom types are compared by their elements. PopTorch compares only
    the tensors of a list that has any, so a number beside them may change unnoticed; so
    does the emulator.
    """
    _check_same(f"Type mismatch for {name}", type(expected), type(got))
    if isinstance(expected, Tensor):
        _check_same(f"Data type mismatch for {name}", expected.dtype, got.dtype)
        _check_same(f"Shape mismatch for {name}", expected.shape, got.shape)
    elif isinstance(expected, tuple):
        if len(expected) != len(got):
            raise _mismatch(
                f"Length mismatch for {name}: expected {len(expected)} elements but "
                f"got {len(got)}."
            )
        for index, pair in enumerate(zip(expected, got)):
            _compare(f"{name}[{index}]", *pair)
    elif isinstance(expected, dict):
        _check_keys(name, expected, got)
        for key, value in expected.items():
            _compare(f"{name}[{key}]", value, got[key])
    else:
        tensors = tuple(flattenTensorStructure(expected))
        if tensors:
            _compare(name, tensors, tuple(flattenTensorStructure(got)))
        else:
            _check_same(f"Value mismatch for {name}", expected, got)


def _check_same(what: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise _mismatch(f"{what}: expected {expected} but got {got}.")


def _check_keys(name: str, expected: dict[Any, Any], got: dict[Any, Any]) -> None:
    text = f"Keys mismatch for {name}:"
    for what, keys in (
        ("Unexpected", got.keys() - expected.keys()),
        ("Missing", expected.keys() - got.keys()),
    ):
        if keys:
            text += f" {what} arguments: {', '.join(sorted(map(str, keys)))}."
    if expected.keys() != got.keys():
        raise _mismatch(text)
