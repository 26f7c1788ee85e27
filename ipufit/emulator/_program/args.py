# SPDX-License-Identifier: Apache-2.0
"""The arguments of an executor call: ordered by signature, then compared.

PopTorch looks at `forward`'s signature when the model is wrapped, turns each call
into positional and keyword arguments, and demands that every later call has the
structure, types, shapes and constants of the one it compiled for
(PopTorch, `_args_parser.py`).
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any, Callable, Iterable

import torch
from torch import Tensor

from ipufit.emulator._ground.custom_args import (
    flattenTensorStructure,
    reconstructTensorStructure,
)
from ipufit.emulator._ground.torch_extras import device_tensor
from ipufit.emulator.errors import Error, createPoptorchError

logger = logging.getLogger("poptorch::python")

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
        """List the tensors, in the order (of dict keys too) of `like`."""
        order = like or self
        return list(
            flattenTensorStructure((self.args, self.kwargs), (order.args, order.kwargs))
        )

    def like_meta(self) -> CallArguments:
        """Copy the arguments, with tensors that have shapes and types but no data."""
        return self.with_tensors(
            tensor.detach().to("meta").as_subclass(type(tensor))
            for tensor in self.tensors()
        )

    def with_tensors(self, tensors: Iterable[Tensor]) -> CallArguments:
        """Copy the arguments, with other tensors in place of theirs."""
        args, kwargs = reconstructTensorStructure(
            (self.args, self.kwargs), iter(tensors)
        )
        return CallArguments(args, kwargs)


class ArgsParser:
    """Turns the arguments of a call into `CallArguments`.

    Args:
        forward: The method that will be traced; its signature counts.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        try:
            signature = inspect.signature(forward)
        except (TypeError, ValueError):  # a callable that hides its signature
            signature = inspect.signature(lambda *args, **kwargs: None)
        kinds = inspect.Parameter
        self._parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        ]
        self._variadic_position: int | None = None
        self._variadic_name = "args"
        self._has_var_keyword = False
        for position, parameter in enumerate(signature.parameters.values()):
            if parameter.kind is kinds.VAR_POSITIONAL:
                self._variadic_position = position
                self._variadic_name = parameter.name
            elif parameter.kind is kinds.VAR_KEYWORD:
                self._has_var_keyword = True
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
        remaining = dict(kwargs)
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        given = list(args)
        for position, parameter in enumerate(self._parameters):
            is_after_variadic = (
                self._variadic_position is not None
                and position >= self._variadic_position
            )
            if given and not is_after_variadic:
                positional.append(given.pop(0))
                if parameter.name in remaining:
                    raise AssertionError(
                        f"Parameter {parameter.name} was passed more than once"
                    )
                continue
            if parameter.name in remaining:
                value = remaining.pop(parameter.name)
            elif parameter.default is not inspect.Parameter.empty:
                value = parameter.default
            else:
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
        """List the tensors of a call that is obviously like the compiled one.

        This is the fast way: most calls need neither `parse` nor `validate`.

        Args:
            args: Positional arguments of a call without keyword arguments.
            compiled: Arguments that the model was compiled for.

        Returns:
            The tensors in order; None if the call needs `parse` and `validate`.
        """
        expected_args = compiled.args
        num_given = len(args)
        if compiled.kwargs or num_given > len(expected_args):
            return None
        if self._variadic_position is None:
            defaults = self._parameters[num_given : len(expected_args)]
        elif num_given == len(expected_args):
            defaults = []
        else:
            return None
        for parameter, constant in zip(defaults, expected_args[num_given:]):
            if constant is not parameter.default:
                return None
        for expected, tensor in zip(expected_args, args):
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
        is_limited = self._variadic_position is None and not self._has_var_keyword
        if is_limited and num_given > len(names):
            raise AssertionError(
                f"Too many arguments provided: expected {names} ({len(names)}) but got "
                f"{num_given}"
            )
        if not self._has_var_keyword:
            for name in kwargs:
                if name not in names:
                    raise AssertionError(
                        f"{name} is not a valid parameter. Allowed values are {names}"
                    )

    def _contiguous(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.is_contiguous():
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

    # Names in messages --------------------------------------------------------

    def argument_name(self, position: int) -> str:
        """Name of the positional argument at `position`, for messages."""
        limit = self._variadic_position
        if limit is not None and position >= limit:
            return f"*{self._variadic_name}[{position - limit}]"
        if position < len(self._parameters):
            return self._parameters[position].name
        return f"argument {position}"

    def validate(self, compiled: CallArguments, current: CallArguments) -> None:
        """Check `current` against the call that was compiled.

        Raises:
            Error: They differ in number, type, keys, dtype, shape or a constant.
        """
        if len(compiled.args) != len(current.args):
            raise _mismatch(
                "Number of positional arguments mismatch: expected "
                f"{len(compiled.args)} arguments but got {len(current.args)}."
            )
        for position, pair in enumerate(zip(compiled.args, current.args)):
            _compare(self.argument_name(position), *pair)
        _compare_dicts("named arguments", compiled.kwargs, current.kwargs, str)


def micro_batch(arguments: CallArguments, factor: int, explain: str) -> CallArguments:
    """Cut the first micro-batch out of a call, in types that an IPU has.

    Args:
        arguments: Arguments of the whole call.
        factor: Micro-batches per call.
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

    tensors = [first_rows(tensor) for tensor in arguments.tensors()]
    args, kwargs = reconstructTensorStructure(
        (arguments.args, arguments.kwargs), iter(tensors)
    )
    return CallArguments(args, kwargs)


def check_inputs(tensors: list[Tensor]) -> None:
    """Refuse tensors that no IPU can take.

    Raises:
        Error: An unsupported dtype, or a tensor without elements.
    """
    for tensor in tensors:
        if tensor.dtype not in _SUPPORTED_DTYPES:
            raise createPoptorchError(f"Unsupported input type {tensor.dtype}")
        if tensor.numel() == 0:
            raise createPoptorchError(
                f"Zero-sized tensors are unsupported (Got shape {list(tensor.shape)})."
            )


def _mismatch(text: str) -> Error:
    return createPoptorchError(text + _MISMATCH)


def _compare(name: str, expected: Any, got: Any) -> None:
    if type(expected) is not type(got):
        raise _mismatch(
            f"Type mismatch for {name}: expected {type(expected)} but got {type(got)}."
        )
    if isinstance(expected, Tensor):
        if expected.dtype != got.dtype:
            raise _mismatch(
                f"Data type mismatch for {name}: expected {expected.dtype} but got "
                f"{got.dtype}."
            )
        if expected.shape != got.shape:
            raise _mismatch(
                f"Shape mismatch for {name}: expected {expected.shape} but got "
                f"{got.shape}."
            )
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
        _compare_others(name, expected, got)


def _compare_dicts(
    name: str,
    expected: dict[Any, Any],
    got: dict[Any, Any],
    element_name: Callable[[Any], str],
) -> None:
    if expected.keys() != got.keys():
        parts = []
        unexpected = sorted(map(str, got.keys() - expected.keys()))
        missing = sorted(map(str, expected.keys() - got.keys()))
        if unexpected:
            parts.append(f"Unexpected arguments: {', '.join(unexpected)}.")
        if missing:
            parts.append(f"Missing arguments: {', '.join(missing)}.")
        raise _mismatch(f"Keys mismatch for {name}: {' '.join(parts)}")
    for key, value in expected.items():
        _compare(element_name(key), value, got[key])


def _compare_others(name: str, expected: Any, got: Any) -> None:
    """Compare lists and custom types by their tensors, everything else by value.

    PopTorch compares only the tensors of a list that holds any, so a number beside
    them may change unnoticed; the emulator keeps that.
    """
    tensors = tuple(flattenTensorStructure(expected))
    if tensors:
        _compare(name, tensors, tuple(flattenTensorStructure(got)))
    elif expected != got:
        raise _mismatch(
            f"Value mismatch for {name}: expected {expected} but got {got}."
        )
