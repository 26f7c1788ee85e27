# SPDX-License-Identifier: Apache-2.0
"""Calls the user's module with inputs, or the user's step with a batch."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Iterator

import torch

from ipufit._poptorch import poptorch
from ipufit.engine.objective.outputs import shapes_of
from ipufit.engine.objective.steps import StepFunction
from ipufit.errors import DataError, IpufitError

_NO_FORWARD = "_forward_unimplemented"
"""The name of torch's function in the place of a missing `forward`."""


class NoForwardError(DataError):
    """A module that has no `forward` is to be called."""


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


def call_step(step: StepFunction, module: torch.nn.Module, batch: Any) -> Any:
    """Call a user's step.

    Args:
        step: Function of the module and a batch.
        module: The user's module.
        batch: Nested as the data: inputs, or inputs, targets and weights in a tuple.

    Raises:
        DataError: It doesn't take such a batch, or not of these shapes.

    Example:
        >>> call_step(lambda module, batch: module(batch).mean(), torch.nn.ReLU(),
        ...           torch.ones(4, 2))
        tensor(1.)
    """
    try:
        return step(module, batch)
    except (IpufitError, poptorch.Error):
        raise
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
        name = getattr(step, "__qualname__", type(step).__name__)
        raise DataError(
            f"{name} failed with {shape_of_batch(batch)}: {error}"
        ) from error


def shape_of_batch(batch: Any) -> str:
    """A batch in words: its parts and their shapes.

    Example:
        >>> shape_of_batch((torch.zeros(4, 2), torch.zeros(4)))
        'a batch (inputs, targets) of float32 [4, 2], float32 [4]'
    """
    names = ("inputs", "targets", "weights")
    parts = f" ({', '.join(names[: len(batch)])})" if isinstance(batch, tuple) else ""
    return f"a batch{parts} of {shapes_of(batch)}"


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
        NoForwardError: There is no `forward`.
    """
    name = type(module).__name__
    if getattr(module.forward, "__name__", "") == _NO_FORWARD:
        raise _without_forward(name)
    _check_arguments(module, *arguments_of(inputs))
    try:
        yield
    except poptorch.Error:
        raise
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, ValueError) and not _is_of_torch(error):
            raise  # the others are torch's, of shapes and types
        if f"[{name}] is missing" in str(error):  # a forward that calls torch's
            raise _without_forward(name) from error
        raise DataError(
            f"{name} failed with inputs of {shapes_of(inputs)}: {error}"
        ) from error


def _is_of_torch(error: Exception) -> bool:
    """Whether code of torch has raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return str(module).partition(".")[0] == "torch"


def _without_forward(name: str) -> NoForwardError:
    return NoForwardError(
        f"{name} has no forward, and was to be called with inputs. Write one; or give "
        "compile() a step= for fit and evaluate, and a predict_step= for predict."
    )


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
