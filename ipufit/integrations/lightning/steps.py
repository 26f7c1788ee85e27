# SPDX-License-Identifier: Apache-2.0
"""Steps of a LightningModule as steps of `compile`."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import Tensor

from ipufit.errors import ConfigError, UnsupportedError
from ipufit.scalars import log

from .batch_index import BatchIndex
from .facts import FIT, PREDICT, TEST, VALIDATE, TrainerFacts
from .logs import NoLog, StepLog, metric_refusal
from .names import own_name
from .view import view_of

STEPS = {
    FIT: "training_step",
    VALIDATE: "validation_step",
    TEST: "test_step",
    PREDICT: "predict_step",
}
"""The steps by what they are for."""


class LightningStep:
    """A step of a LightningModule in the place of a function of module and batch.

    Args:
        module: The module that is trained, which has the step as a method.
        stage: The purpose of the step: `FIT`, `VALIDATE`, `TEST` or `PREDICT`.
        given: Values of `self.trainer` that the user has given.

    Attributes:
        method: The step. ipufit looks at the values that its code reads.

    Example:
        >>> class Net(torch.nn.Linear):
        ...     def training_step(self, batch, batch_idx):
        ...         return self(batch).mean()
        >>> net = Net(2, 1)
        >>> step = LightningStep(net, FIT, {})
        >>> sorted(step(net, torch.zeros(3, 2)))
        ['loss']
    """

    def __init__(
        self, module: torch.nn.Module, stage: str, given: Mapping[str, Any]
    ) -> None:
        self.name = STEPS[stage]
        self.method = getattr(module, self.name)
        self.stage = stage
        self.given = given
        self.__qualname__ = f"{type(module).__qualname__}.{self.name}"

    def __call__(self, module: torch.nn.Module, batch: Any) -> Any:
        """Call the step; what it logs is logged by ipufit.

        Raises:
            ConfigError: It gave no loss, or logged what can't be reported.
            UnsupportedError: It used what isn't there in a program.
        """
        heard = StepLog()
        where = NoLog(f"{self.name}, whose program gives outputs only")
        view = view_of(
            module,
            where if self.stage == PREDICT else heard,
            TrainerFacts(self.given, self.stage),
        )
        step = getattr(view, self.name)
        with _metrics_refused(module, self.name), _lists_as_before(module, self.name):
            returned = step(batch, *([BatchIndex()] if _takes_index(step) else []))
        if self.stage == PREDICT:
            return returned
        if self.stage == FIT:
            return self._trained(returned, heard.values)
        return self._measured(returned, heard.values)

    def _trained(self, returned: Any, logged: dict[str, Tensor]) -> dict[str, Any]:
        loss, outputs = _taken_apart(returned)
        if loss is None:
            raise ConfigError(
                f"{self.name} returned {_kind(returned)}, and must return the loss, or "
                "a dict with 'loss'. None can't leave out a batch: a program makes an "
                "update of each."
            )
        other = logged.pop("loss", loss)
        if other is not loss:
            raise ConfigError(
                f"{self.name} logs 'loss', and it isn't the tensor that it returns, "
                "which is reported as 'loss': log it under another name."
            )
        for name, value in logged.items():
            log(name, value)
        return {"loss": loss, **outputs}

    def _measured(self, returned: Any, logged: dict[str, Tensor]) -> dict[str, Any]:
        loss, outputs = _taken_apart(returned)
        for name, value in logged.items():
            own = own_name(name) if self.stage == VALIDATE else name
            if own == "loss":
                loss = value
            else:
                log(own, value)
        if loss is None and not logged:
            raise ConfigError(
                f"{self.name} logged nothing and returned {_kind(returned)}: there is "
                "nothing to report. Log the loss, self.log('val_loss', loss)."
            )
        return {**({} if loss is None else {"loss": loss}), **outputs}

    def __repr__(self) -> str:
        """The method's name with its class, as a run that goes on compares it."""
        return self.__qualname__

    def __eq__(self, other: object) -> bool:
        """Whether it is the same step of the same module, for the same program."""
        return isinstance(other, LightningStep) and (
            (self.method, self.stage) == (other.method, other.stage)
            and self.given == other.given
        )

    def __hash__(self) -> int:
        return hash((self.method, self.stage))


def _taken_apart(returned: Any) -> tuple[Tensor | None, dict[str, Any]]:
    """The loss that a step has returned, if any; and its outputs, if it names them."""
    if isinstance(returned, Tensor):
        return returned, {}
    if not isinstance(returned, Mapping):
        return None, {}
    loss = returned.get("loss")
    outputs = {"outputs": returned["outputs"]} if "outputs" in returned else {}
    return (loss if isinstance(loss, Tensor) else None), outputs


def _takes_index(step: Callable[..., Any]) -> bool:
    """Whether a step takes `batch_idx` after the batch.

    Raises:
        UnsupportedError: It takes the data themselves.
    """
    parameters = inspect.signature(step).parameters
    if "dataloader_iter" in parameters:
        raise UnsupportedError(
            f"{step.__name__} takes dataloader_iter, and a program gets batches: take "
            "(self, batch, batch_idx)."
        )
    kinds = [parameter.kind for parameter in parameters.values()]
    by_place = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    is_open = inspect.Parameter.VAR_POSITIONAL in kinds
    return is_open or sum(kind in by_place for kind in kinds) > 1


@contextlib.contextmanager
def _metrics_refused(module: torch.nn.Module, name: str) -> Iterator[None]:
    """Refuse to update objects of torchmetrics within.

    Raises:
        UnsupportedError: One was updated.
    """

    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedError(metric_refusal(name))

    metrics = [part for part in module.modules() if _is_metric(part)]
    own = [vars(metric).get("update") for metric in metrics]
    for metric in metrics:
        vars(metric)["update"] = refuse
    try:
        yield
    finally:
        for metric, update in zip(metrics, own):
            vars(metric)["update"] = update


def _is_metric(part: torch.nn.Module) -> bool:
    """Whether a submodule is a metric of torchmetrics."""
    return "update" in vars(part) and any(
        kind.__module__.partition(".")[0] == "torchmetrics"
        for kind in type(part).__mro__
    )


@contextlib.contextmanager
def _lists_as_before(module: torch.nn.Module, name: str) -> Iterator[None]:
    """Refuse a step that keeps something in a list or dict of its module.

    Raises:
        UnsupportedError: One has grown.
    """
    before = _lengths(module)
    yield
    for attribute, length in _lengths(module).items():
        if length > before.get(attribute, length):
            raise UnsupportedError(
                f"{name} puts something into self.{attribute}. A step runs once in "
                "Python, when its program is compiled: it would be there once, and "
                "never again. Log means, which ipufit averages over all samples, or "
                "get the outputs of all samples from predict()."
            )


def _lengths(module: torch.nn.Module) -> dict[str, int]:
    return {
        name: len(value)
        for name, value in vars(module).items()
        if isinstance(value, (list, dict, set)) and not name.startswith("_")
    }


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(repr, value)) or 'nothing'}"
    return "None" if value is None else f"a {type(value).__name__}"
