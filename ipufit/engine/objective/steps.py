# SPDX-License-Identifier: Apache-2.0
"""Steps of a user's own: functions that a program computes in the module's place."""

from __future__ import annotations

import inspect
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import Tensor

from ipufit.errors import ConfigError
from ipufit.scalars import log

from .outputs import shapes_of, split_own_loss

StepFunction = Callable[[torch.nn.Module, Any], Any]
"""Computes from the module and a batch what the program needs of them."""

_RETURNS = (
    "the loss, a tuple (loss, outputs), or a dict with 'loss', 'outputs' and scalars "
    "to report"
)


class Steps(NamedTuple):
    """The functions of a model that has a step of its own.

    Attributes:
        training: Gets the module and a batch; gives the loss, and what is reported.
        validation: The same in eval mode, for `evaluate`.
        prediction: Gets the module and inputs; gives outputs. None to call the module.
    """

    training: StepFunction
    validation: StepFunction
    prediction: StepFunction | None = None


class Inferred(NamedTuple):
    """The computation of an inference program.

    Attributes:
        owns_loss: Whether a loss is among what is computed.
        step: The user's function; None to call the module.
        takes_labels: Whether the program gets targets and weights besides inputs.
        gives_outputs: Whether outputs are needed beside the scalars.
    """

    owns_loss: bool
    step: StepFunction | None = None
    takes_labels: bool = False
    gives_outputs: bool = True


class StepResult(NamedTuple):
    """The results of a user's step for a batch.

    Attributes:
        loss: Mean over the samples; None if it gave none.
        outputs: One row per sample; `()` for nothing.
    """

    loss: Tensor | None
    outputs: Any


def result_of_step(returned: Any, marked: Sequence[Tensor] = ()) -> StepResult:
    """Take apart what a step has returned, and log the scalars in it.

    Args:
        returned: The loss; a dict of "loss", "outputs" and scalars; or all that a
            module with a loss of its own may return (`split_own_loss`).
        marked: Results of `identity_loss`.

    Raises:
        ConfigError: It is nothing of that kind.

    Example:
        >>> result_of_step({"loss": torch.tensor(2.0), "outputs": [1]})
        StepResult(loss=tensor(2.), outputs=[1])
        >>> result_of_step(torch.tensor(2.0))
        StepResult(loss=tensor(2.), outputs=())
    """
    if returned is None:
        return StepResult(None, ())
    if type(returned) is not dict:
        return StepResult(*split_own_loss(returned, marked))
    rest = {name: v for name, v in returned.items() if name not in ("loss", "outputs")}
    for name, value in rest.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigError(
                f"The step returned {name!r}, which is {shapes_of(value)} and no "
                f"scalar. A step returns {_RETURNS}. Put what belongs to samples "
                "under 'outputs'."
            )
        log(name, value)
    loss = returned.get("loss")
    if loss is not None and not isinstance(loss, Tensor):
        raise ConfigError(
            f"The step returned {loss!r} as its loss, and must return a tensor that is "
            "computed from the batch."
        )
    return StepResult(loss, returned.get("outputs", ()))


def checked_step(name: str, function: Any, *, is_method: bool = False) -> None:
    """Refuse what can't be called in the place of a module.

    Args:
        name: Name of the argument or method.
        function: The function; None is left alone.
        is_method: Whether it takes a batch alone, as a method of a model does.

    Raises:
        ConfigError: It is no function, or one of other arguments.

    Example:
        >>> checked_step("step", "mse")
        Traceback (most recent call last):
        ipufit.errors.ConfigError: step='mse' is no function ...
    """
    if function is not None and not callable(function):
        raise ConfigError(
            f"{name}={function!r} is no function of the module and a batch: write "
            f"`def {name}(module, batch)`, which returns {_RETURNS}."
        )
    if function is None:
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # compiled code has none
        return
    try:
        signature.bind(*[None] * (1 if is_method else 2))
    except TypeError:
        takes = "(self, batch)" if is_method else "(module, batch)"
        raise ConfigError(
            f"{name} has the arguments {signature}, and is called as {name}{takes}. "
            "An index of the batch would be baked into the program: leave it out."
        ) from None
