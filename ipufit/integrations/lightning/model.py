# SPDX-License-Identifier: Apache-2.0
"""`from_lightning`: a LightningModule as a compiled `IPUModel`."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Callable, Mapping

import torch

from ipufit.callbacks import History
from ipufit.config import IPUConfig
from ipufit.errors import ConfigError, UnsupportedError
from ipufit.model import IPUModel
from ipufit.model.parts import settings_of
from ipufit.types import Logs

from .facts import FIT, PREDICT, SETUP, TEST, VALIDATE, TrainerFacts
from .hooks import ModuleHooks, is_overridden, refuse_hooks
from .logs import NoLog
from .optimizers import Configured, read_optimizers
from .schedulers import Plateau, SteppedByFigure
from .steps import STEPS, LightningStep
from .view import view_of


class LightningModel(IPUModel):
    """An `IPUModel` of a LightningModule, as `from_lightning` makes it.

    `compile`, `fit`, `evaluate`, `predict` and all else are those of `IPUModel`.
    Besides, they call the hooks of the module that come between epochs.
    """

    _given: Mapping[str, Any] = {}
    _plateau: Plateau | None = None
    _of_test = False

    def _own_callbacks(self) -> list[Any]:
        return [ModuleHooks(self.module, self._given, of_test=self._of_test)]

    def fit(  # type: ignore[override]
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> History:
        """Train, as `IPUModel.fit` does and with its arguments."""
        own = self._own_callbacks()
        if self._plateau is not None:
            own.append(SteppedByFigure(self._plateau))
        own += _listed(callbacks)
        return IPUModel.fit(
            self, x, y, batch_size, epochs, verbose, own, *args, **kwargs
        )

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate by `validation_step`, with the arguments of `IPUModel.evaluate`."""
        return self._with_hooks(IPUModel.evaluate, *args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict by `predict_step`, with the arguments of `IPUModel.predict`."""
        return self._with_hooks(IPUModel.predict, *args, **kwargs)

    def _with_hooks(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of `IPUModel` with the module's hooks among its callbacks."""
        given = inspect.signature(method).bind(self, *args, **kwargs)
        callbacks = _listed(given.arguments.get("callbacks"))
        given.arguments["callbacks"] = [*self._own_callbacks(), *callbacks]
        return method(*given.args, **given.kwargs)

    def test(self, *args: Any, **kwargs: Any) -> Logs:
        """Evaluate by `test_step`, with the arguments of `IPUModel.evaluate`.

        Returns:
            The figures, under the names that `test_step` logs them by.

        Raises:
            UnsupportedError: The module has no `test_step`.
        """
        if not is_overridden(self.module, "test_step"):
            raise UnsupportedError(
                f"{type(self.module).__name__} has no test_step: write one, or use "
                "evaluate(), which uses validation_step."
            )
        self.detach()
        tester = copy.copy(self)
        step = LightningStep(self.module, TEST, self._given)
        arguments = {**settings_of(self).arguments, "validation_step": step}
        IPUModel.compile(tester, **arguments)
        tester._of_test = True
        try:
            figures: Logs = tester.evaluate(*args, **kwargs)
        finally:
            tester.detach()
        return figures


def from_lightning(
    module: torch.nn.Module,
    config: IPUConfig | None = None,
    *,
    trainer: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    lr_schedule: Any = None,
    in_place: bool = False,
    **compile_arguments: Any,
) -> LightningModel:
    """Make a compiled model of a LightningModule.

    Lightning needn't be installed: any torch module with these methods will do.

    - `training_step(batch, batch_idx)` returns the loss, or a dict with `"loss"`. It is
      compiled as one program, with the backward pass and the optimizer.
    - `validation_step` is for `evaluate` and the validations of `fit`, and `test_step`
      for `test`. What they log is averaged over all samples.
    - `predict_step` gets the inputs of samples, without targets. Without it, `predict`
      calls the module.
    - `setup("fit")`, `configure_model` and `configure_optimizers` are called once, now.
      A scheduler keeps its `interval` and `frequency`, and `ReduceLROnPlateau` its
      `monitor`.
    - `self.log` and `self.log_dict` report tensors of one element. In History a
      validation's figure is `val_` and its name: one logged as `"val_loss"`,
      `"val/loss"` or `"loss"` is `val_loss`.
    - Hooks between epochs, such as `on_train_epoch_end`, are called. Methods that
      nothing would call, such as `optimizer_step`, are refused.

    `batch_idx`, `self.current_epoch` and `self.global_step` can't be used in a step: it
    runs once in Python.

    Args:
        module: A LightningModule, or another torch module with such methods.
        config: Layout on IPUs; one IPU by default.
        trainer: Values that the module reads from `self.trainer`, by name, as in
            `{"max_epochs": 10, "estimated_stepping_batches": 1000}`.
        optimizer: Optimizer in the place of `configure_optimizers`, in any form that
            `IPUModel.compile` takes.
        lr_schedule: Its schedule, as for `IPUModel.compile`.
        in_place: As for `IPUModel`.
        **compile_arguments: Further arguments of `IPUModel.compile`, such as
            `steps_per_execution`.

    Raises:
        ConfigError: Something is of an unusable type; or there is no `training_step`.
        UnknownNameError: `configure_optimizers` returned a dict with an unknown key.
        UnsupportedError: The module needs several optimizers, optimizes by hand, or has
            methods that nothing would call.

    Example:
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         return torch.nn.functional.mse_loss(self.layer(x), y)
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> model = from_lightning(Net())
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(dim=1, keepdim=True), 32, verbose=0)
        >>> sorted(history.history)
        ['loss']
    """
    _check(module, trainer)
    given = dict(trainer or {})
    _make_layers(module, given)  # before their types are those of the config
    model = LightningModel(module, config, in_place=in_place)
    own: Any = model.module
    configured = Configured(optimizer, lr_schedule, None)
    if optimizer is None:
        if lr_schedule is not None:
            raise ConfigError(
                "lr_schedule was given, and the optimizer is that of "
                "configure_optimizers, which returns its scheduler too. Give the "
                "optimizer here as well, or the scheduler there."
            )
        if not is_overridden(own, "configure_optimizers"):
            raise ConfigError(
                f"{type(own).__name__} has no configure_optimizers: write one, or pass "
                "from_lightning(module, optimizer='adamw')."
            )
        view = _view_for_setup(own, given, "configure_optimizers")
        configured = read_optimizers(view.configure_optimizers())
    IPUModel.compile(
        model,
        configured.optimizer,
        lr_schedule=configured.lr_schedule,
        step=LightningStep(own, FIT, given),
        validation_step=_step(own, VALIDATE, given),
        predict_step=_step(own, PREDICT, given),
        **compile_arguments,
    )
    model._given = given
    model._plateau = configured.plateau
    return model


def _listed(callbacks: Any) -> list[Any]:
    return [] if callbacks is None else [callbacks]  # which may be nested lists


def _check(module: Any, trainer: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"module={module!r} is not a LightningModule.")
    if trainer is not None and not isinstance(trainer, Mapping):
        raise ConfigError(
            f"trainer={trainer!r} is no dict. ipufit takes the place of Lightning's "
            "Trainer: give the values that the module reads from it, {'max_epochs': "
            "10}, and the rest to fit()."
        )
    if not is_overridden(module, "training_step"):
        raise ConfigError(
            f"{type(module).__name__} has no training_step: write one, or use "
            "ipufit.IPUModel(module) and compile(optimizer, loss)."
        )
    refuse_hooks(module)


def _make_layers(module: torch.nn.Module, given: Mapping[str, Any]) -> None:
    """Call the hooks that may make layers, in Lightning's order."""
    if is_overridden(module, "setup"):
        _view_for_setup(module, given, "setup").setup(stage="fit")
    if is_overridden(module, "configure_model"):
        _view_for_setup(module, given, "configure_model").configure_model()


def _view_for_setup(
    module: torch.nn.Module, given: Mapping[str, Any], hook: str
) -> Any:
    """The module as a hook sees it that is called before the first epoch."""
    at_start = {"current_epoch": lambda: 0, "global_step": lambda: 0}
    facts = TrainerFacts(given, SETUP, at_start)
    return view_of(module, NoLog(hook), facts)


def _step(
    module: torch.nn.Module, stage: str, given: Mapping[str, Any]
) -> LightningStep | None:
    if not is_overridden(module, STEPS[stage]):
        return None
    return LightningStep(module, stage, given)
