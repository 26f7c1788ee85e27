# SPDX-License-Identifier: Apache-2.0
"""The arguments of an executor's call, ordered by signature and checked.

PopTorch reads the signature of `forward` when the model is wrapped, and turns each call
into positional and keyword arguments. Every later call must have the structure, types,
shapes and constants that the model was compiled for (PopTorch, `_args_parser.py`).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Callable, Iterable

import torch
from torch import Tensor

from ._logging import logger
from ._utils import (
    flattenTensorStructure,
    reconstructTensorStructure,
)
from .core.float16 import device_tensor
from .core.refusals import refuse_empty, refuse_sparse
from .errors import Error, createPoptorchError

_MISMATCH = (
    "\nThe arguments of this call do not match those that the model was compiled for. "
    "Wrap the model again, or call destroy() first, to compile it for the new ones."
)

_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_SUPPORTED_DTYPES = {*_INTEGERS, *_FLOATS, torch.bool}


@dataclass(frozen=True)
class CallArguments:
    """The arguments of one call, ordered as `forward` takes them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self, like: CallArguments | None = None) -> list[Tensor]:
        """List the tensors, in the order of `like`, its dict keys included."""
        order = like or self
        return list(
            flattenTensorStructure((self.args, self.kwargs), (order.args, order.kwargs))
        )

    def with_tensors(self, tensors: Iterable[Tensor]) -> CallArguments:
        """Copy the arguments, with other tensors in place of the present ones."""
        args, kwargs = reconstructTensorStructure(
            (self.args, self.kwargs), iter(tensors)
        )
        return CallArguments(args, kwargs)


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
        every = list(signature.parameters.values())
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        positional, keyword = (
            [at for at, parameter in enumerate(every) if parameter.kind is kind]
            for kind in variadic
        )
        self._parameters = [p for p in every if p.kind not in variadic]
        self._variadic_position = positional[0] if positional else None
        self._variadic_name = every[positional[0]].name if positional else ""
        self._has_var_keyword = bool(keyword)
        self._has_warned_layout = False

    def parse(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_compiling: bool
    ) -> CallArguments:
        """Order the arguments of a call by the signature.

        Raises:
            AssertionError: Too many arguments, an unknown one, or one given twice.
            Error: A mandatory one is missing.
        """
        self._check_names(args, kwargs)
        remaining, given = dict(kwargs), list(args)
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for position, parameter in enumerate(self._parameters):
            variadic = self._variadic_position
            is_after_variadic = variadic is not None and position >= variadic
            if given and not is_after_variadic:
                positional.append(given.pop(0))
                if parameter.name in remaining:
                    raise AssertionError(
                        f"Parameter {parameter.name} was passed more than once"
                    )
                continue
            value = remaining.pop(parameter.name, parameter.default)
            if value is inspect.Parameter.empty:
                raise createPoptorchError(
                    f"Mandatory parameter {parameter.name} missing"
                )
            if is_after_variadic:
                keywords[parameter.name] = value
            else:
                positional.append(value)
        positional.extend(given)
        keywords.update(remaining)
        if is_compiling and any(isinstance(a, dict) for a in (*args, *kwargs.values())):
            logger.warning(
                "Dictionaries as arguments of a model have partial support: their keys "
                "and values other than tensors are constants of the compiled model."
            )
        return CallArguments(
            tuple(self._contiguous(value) for value in positional),
            {name: self._contiguous(value) for name, value in keywords.items()},
        )

    def plain_tensors(
        self, args: tuple[Any, ...], compiled: CallArguments
    ) -> list[Tensor] | None:
        """List the tensors of a call that obviously has the compiled arguments.

        This is the fast path: most calls need neither `parse` nor `validate`.

        Args:
            args: Positional arguments of a call without keyword arguments.
            compiled: Arguments that the model was compiled for.

        Returns:
            The tensors in order; None if the call needs `parse` and `validate`.
        """
        if compiled.kwargs or len(args) != len(compiled.args):
            return None
        for expected, tensor in zip(compiled.args, args):
            if (
                type(tensor) is not Tensor
                or type(expected) is not Tensor
                or tensor.dtype is not expected.dtype
                or tensor.shape != expected.shape
                or not tensor.is_contiguous()
            ):
                return None
        return list(args)

    def _check_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = [parameter.name for parameter in self._parameters]
        num_given = len(args) + len(kwargs)
        if self._has_var_keyword:
            return
        if self._variadic_position is None and num_given > len(names):
            raise AssertionError(
                f"Too many arguments provided: expected {names} ({len(names)}) but got "
                f"{num_given}"
            )
        for name in kwargs:
            if name not in names:
                raise AssertionError(
                    f"{name} is not a valid parameter. Allowed values are {names}"
                )

    def _contiguous(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_contiguous():
                return value
            if not self._has_warned_layout:
                logger.warning(
                    "At least one input tensor is not contiguous: it is copied into a "
                    "contiguous one at every call."
                )
                self._has_warned_layout = True
            return value.contiguous()
        if type(value) in (list, tuple):
            return type(value)(self._contiguous(element) for element in value)
        if type(value) is dict:
            return {key: self._contiguous(element) for key, element in value.items()}
        return value

    def validate(self, compiled: CallArguments, current: CallArguments) -> None:
        """Check `current` against the arguments that were compiled.

        Raises:
            Error: They differ in number, type, keys, dtype, shape or a constant.
        """
        if len(compiled.args) != len(current.args):
            raise _mismatch(
                "Number of positional arguments mismatch: expected "
                f"{len(compiled.args)} arguments but got {len(current.args)}."
            )
        for position, pair in enumerate(zip(compiled.args, current.args)):
            limit = self._variadic_position
            if limit is not None and position >= limit:
                name = f"*{self._variadic_name}[{position - limit}]"
            elif position < len(self._parameters):
                name = self._parameters[position].name
            else:
                name = f"argument {position}"
            _compare(name, *pair)
        _compare_dicts("named arguments", compiled.kwargs, current.kwargs, str)


def micro_batch(arguments: CallArguments, factor: int, explain: str) -> CallArguments:
    """Return the arguments of a call's first micro-batch, in types of an IPU.

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
        return device_tensor(rows.detach(), copy=True)

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
        _compare_dicts(name, expected, got, lambda key: f"{name}[{key}]")
    else:
        tensors = tuple(flattenTensorStructure(expected))
        if tensors:
            _compare(name, tensors, tuple(flattenTensorStructure(got)))
        else:
            _check_same(f"Value mismatch for {name}", expected, got)


def _check_same(what: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise _mismatch(f"{what}: expected {expected} but got {got}.")


def _compare_dicts(
    name: str,
    expected: dict[Any, Any],
    got: dict[Any, Any],
    element_name: Callable[[Any], str],
) -> None:
    if expected.keys() != got.keys():
        text = f"Keys mismatch for {name}:"
        for what, keys in (
            ("Unexpected", got.keys() - expected.keys()),
            ("Missing", expected.keys() - got.keys()),
        ):
            if keys:
                text += f" {what} arguments: {', '.join(sorted(map(str, keys)))}."
        raise _mismatch(text)
    for key, value in expected.items():
        _compare(element_name(key), value, got[key])
