# SPDX-License-Identifier: Apache-2.0
"""The steps of a model: functions given to `compile`, or methods of a subclass."""

from __future__ import annotations

from typing import Any, Callable

import torch

from ipufit.engine import StepFunction, Steps, checked_step
from ipufit.errors import ConfigError

_OF_KERAS = {
    "train_step": "training_step(self, batch), which returns the loss. Gradients and "
    "the update are the device's",
    "test_step": "validation_step(self, batch), which returns the loss",
    "compute_loss": "training_step(self, batch), which returns the loss",
    "compute_metrics": "training_step(self, batch), which returns figures beside the "
    "loss, {'loss': loss, 'error': error}",
}
"""Methods that Keras's users override, and what stands in their place."""


def resolve_steps(
    model: Any,
    step: StepFunction | None,
    validation_step: StepFunction | None,
    predict_step: StepFunction | None,
    with_step: dict[str, Any],
) -> Steps | None:
    """The steps of a model: those given, else the methods of a subclass.

    Args:
        model: The model, whose class may have methods of these names.
        step: Function of the module and a batch.
        validation_step: The same, for `evaluate`.
        predict_step: Function of the module and inputs.
        with_step: Arguments of `compile` that can't be used with a step, by name.

    Returns:
        None if there is no step: the module is called.

    Raises:
        ConfigError: Something is no function; or there is a loss beside the step, or a
            method of Keras's.
    """
    given = {
        "step": step,
        "validation_step": validation_step,
        "predict_step": predict_step,
    }
    for name, function in given.items():
        checked_step(name, function)
    for name, instead in _OF_KERAS.items():
        if hasattr(type(model), name):
            raise ConfigError(
                f"{type(model).__name__} has Keras's method {name}(), which nothing "
                f"calls: write {instead}."
            )
    training = step or _method(model, "training_step")
    validation = validation_step or _method(model, "validation_step") or training
    prediction = predict_step or _method(model, "predict_step")
    if training is None:
        if validation is None and prediction is None:
            return None
        raise ConfigError(
            "There is a validation_step or predict_step, and no step for training: "
            "give compile(step=...), or the class a training_step."
        )
    for name, value in with_step.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value!r} was given, and the model has a step of its own, "
                "which computes the loss: leave one of them out."
            )
    assert validation is not None  # noqa: S101 - it is the step if nothing else
    return Steps(training, validation, prediction)


def _method(model: Any, name: str) -> StepFunction | None:
    """A method of a subclass as a function of the module, which it has itself."""
    method = getattr(model, name, None)
    if method is None:
        return None
    checked_step(name, method, is_method=True)
    return MethodStep(method)


class MethodStep:
    """A method of a model in the place of a function of the module.

    Args:
        method: Method of one argument, of the model that is trained.

    Example:
        >>> class Model:
        ...     def training_step(self, batch):
        ...         return batch
        >>> MethodStep(Model().training_step)(None, 3)
        3
    """

    def __init__(self, method: Callable[[Any], Any]) -> None:
        self.method = method
        self.__qualname__ = str(getattr(method, "__qualname__", method))

    def __call__(self, module: torch.nn.Module, batch: Any) -> Any:
        """Call the method with a batch; `self.module` is the module meanwhile."""
        owner: Any = getattr(self.method, "__self__", None)
        own = getattr(owner, "module", module)
        if own is module:
            return self.method(batch)
        owner.module = module
        try:
            return self.method(batch)
        finally:
            owner.module = own

    def __eq__(self, other: object) -> bool:
        """Whether it is the same method of the same model."""
        return isinstance(other, MethodStep) and self.method == other.method

    def __hash__(self) -> int:
        return hash(self.method)
