# SPDX-License-Identifier: Apache-2.0
"""Calls the user's module with the inputs of a sample or of a micro-batch."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Iterator

import torch

from ipufit._poptorch import poptorch
from ipufit.engine.objective.outputs import shapes_of
from ipufit.errors import DataError


def call_module(module: torch.nn.Module, inputs: Any) -> Any:
    """Call a module: a dict of inputs gives arguments by name, a tuple by place.

    Raises:
        DataError: `forward` doesn't take such arguments, or not of these shapes.

    Example:
        >>> call_module(torch.nn.Linear(2, 3), torch.zeros(4, 2)).shape
        torch.Size([4, 3])
    """
    by_place, by_name = arguments_of(inputs)
    with failures_explained(module, inputs):
        return module(*by_place, **by_name)


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module by place, and by name if inputs are a dict.

    Example:
        >>> arguments_of({"x": 1}), arguments_of([1, 2]), arguments_of(3)
        (((), {'x': 1}), ((1, 2), {}), ((3,), {}))
    """
    if isinstance(inputs, dict):
        return (), {str(name): value for name, value in inputs.items()}
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


@contextlib.contextmanager
def failures_explained(module: torch.nn.Module, inputs: Any) -> Iterator[None]:
    """Say with which inputs a module is called within, if it fails.

    Raises:
        DataError: `forward` doesn't take such arguments, or not of these shapes.
    """
    _check_arguments(module, *arguments_of(inputs))
    try:
        yield
    except poptorch.Error:
        raise
    except (RuntimeError, IndexError) as error:  # torch's, of shapes and types
        raise DataError(
            f"{type(module).__name__} failed with inputs of {shapes_of(inputs)}: "
            f"{error}"
        ) from error


def _check_arguments(
    module: torch.nn.Module, by_place: tuple[Any, ...], by_name: dict[str, Any]
) -> None:
    try:
        signature = inspect.signature(module.forward)
    except ValueError:  # compiled code has no signature
        return
    try:
        signature.bind(*by_place, **by_name)
    except TypeError as error:
        given = ", ".join(map(repr, by_name)) or f"{len(by_place)} by place"
        strangers = _strangers(signature, by_name)
        if strangers:
            name = strangers[0]
            raise DataError(
                f"{type(module).__name__}.forward{signature} has no argument {name!r}, "
                f"and samples have {given}. A dict of inputs gives arguments by name. "
                f"If it is a target, name it, y={name!r}, in predict() too; else take "
                "it out of the samples."
            ) from None
        raise DataError(
            f"{type(module).__name__}.forward{signature} doesn't take the inputs that "
            f"are given ({given}): {error}. A dict of inputs gives arguments by name, "
            "a tuple or list by place."
        ) from None


def _strangers(signature: inspect.Signature, by_name: dict[str, Any]) -> list[str]:
    """Names of inputs that `forward` has no argument for."""
    known = signature.parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return []
    return [name for name in by_name if name not in known]
