# SPDX-License-Identifier: Apache-2.0
"""LightningModules, trained by ipufit; Lightning itself needn't be installed."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
import sys
from dataclasses import dataclass, field
from typing import Any, Callable, ClassVar, Iterator, Mapping, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from ipufit._arguments import check_choice, check_integer
from ipufit._hints import hints_at
from ipufit._kinds import Kind, anything, list_of, number
from ipufit.callbacks import Callback, History
from ipufit.config import IPUConfig
from ipufit.distributed import get_process_info
from ipufit.engine.metric_state import log
from ipufit.errors import (
    ConfigError,
    DataError,
    UnknownNameError,
    UnsupportedError,
    all_suggesting,
)
from ipufit.model import IPUModel
from ipufit.optimizers import PerEpoch
from ipufit.types import Logs

__all__ = ["LightningModel", "from_lightning"]


class _Stage(NamedTuple):
    """Names of Lightning for a task of a module.

    Attributes:
        call: Method of the model.
        step: Method that is called with a batch.
        loader: Method that returns the data.
        flag: Attribute of the Trainer that is True during the task.
        hooks: Part of the names of hooks.
    """

    call: str
    step: str
    loader: str
    flag: str
    hooks: str


_FIT, _VALIDATE, _TEST, _PREDICT = _STAGES = (
    _Stage("fit", "training_step", "train_dataloader", "training", "train"),
    _Stage("evaluate", "validation_step", "val_dataloader", "validating", "validation"),
    _Stage("test", "test_step", "test_dataloader", "testing", "test"),
    _Stage("predict", "predict_step", "predict_dataloader", "predicting", "predict"),
)

_LIBRARIES = ("lightning", "lightning_fabric", "pytorch_lightning", "torch")
"""Packages of base classes: a method from there isn't an override."""


@all_suggesting
class LightningModel(IPUModel):
    """An `IPUModel` of a LightningModule; `from_lightning` makes it.

    `compile`, `fit`, `evaluate`, `predict` and the rest are methods of `IPUModel`.
    In addition, they call the module's hooks between epochs.
    """

    _trainer_values: Mapping[str, Any] = {}
    _plateau: Callable[[], Callback] | None = None

    @functools.wraps(IPUModel.fit, assigned=())  # type: ignore[override]
    def fit(self, *args: Any, **kwargs: Any) -> History:
        """Train by `training_step`, with the arguments of `IPUModel.fit`."""
        return self._call_with_hooks(IPUModel.fit, _FIT, args, kwargs)

    @functools.wraps(IPUModel.evaluate, assigned=())  # type: ignore[override]
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate by `validation_step`, with the arguments of `IPUModel.evaluate`."""
        return self._call_with_hooks(IPUModel.evaluate, _VALIDATE, args, kwargs)

    @functools.wraps(IPUModel.predict, assigned=())  # type: ignore[override]
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict by `predict_step`, with the arguments of `IPUModel.predict`."""
        return self._call_with_hooks(IPUModel.predict, _PREDICT, args, kwargs)

    def test(self, *args: Any, **kwargs: Any) -> Logs:
        """Evaluate by `test_step`, with the arguments of `IPUModel.evaluate`.

        Returns:
            The logged values, under the names that `test_step` gives them.

        Raises:
            UnsupportedError: The module has no `test_step`.
        """
        step = _find_step(self.module, _TEST, self._trainer_values)
        if step is None:
            raise UnsupportedError(
                f"{type(self.module).__name__} has no test_step: write one, or use "
                "evaluate(), which uses validation_step."
            )
        self.detach()
        tester = copy.copy(self)
        compiled = self._planner.require_compiled().arguments
        arguments = {**compiled, "validation_step": step}
        IPUModel.compile(tester, **arguments)
        try:
            logs: Logs = tester._call_with_hooks(IPUModel.evaluate, _TEST, args, kwargs)
        finally:
            tester.detach()
        return logs

    def _call_with_hooks(
        self,
        method: Callable[..., Any],
        stage: _Stage,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a method of `IPUModel` with the module's hooks as a callback."""
        bound = inspect.signature(method).bind_partial(self, *args, **kwargs)
        arguments = bound.arguments
        if arguments.get("x") is None and _is_overridden(self.module, stage.loader):
            raise DataError(
                f"{stage.call}() got no data, and nothing calls {stage.loader}() of "
                f"the module: pass {stage.call}(model.module.{stage.loader}())."
            )
        callbacks: list[Any] = [_ModuleHooks(self.module, self._trainer_values, stage)]
        if stage == _FIT and self._plateau is not None:
            callbacks.append(self._plateau())
        if arguments.get("callbacks") is not None:
            callbacks.append(arguments["callbacks"])
        arguments["callbacks"] = callbacks
        return method(*bound.args, **bound.kwargs)


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
    """Return a compiled model of a LightningModule.

    Lightning needn't be installed: any torch module with these methods will do.

    - `training_step(batch, batch_idx)` returns the loss, or a dict with `"loss"`. It is
      compiled as one program, with the backward pass and the optimizer.
    - `validation_step` is for `evaluate` and the validations of `fit`, and `test_step`
      for `test`. What they log is averaged over all samples, and so is the loss of a
      dict with `"loss"`. A tensor that they return isn't reported, as in Lightning.
    - `predict_step` gets the inputs of samples, without targets. Without it, `predict`
      calls the module.
    - `setup("fit")`, `configure_model` and `configure_optimizers` are called once, now.
      A scheduler keeps its `interval` and `frequency`, and `ReduceLROnPlateau` its
      `monitor`.
    - `self.log` and `self.log_dict` report tensors of one element. In History a value
      of a validation has `val_` before its name: a value logged as `"val_loss"`,
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
        optimizer: Optimizer in place of `configure_optimizers`, in any form that
            `IPUModel.compile` takes.
        lr_schedule: Schedule of `optimizer`, as for `IPUModel.compile`.
        in_place: As for `IPUModel`.
        **compile_arguments: Further arguments of `IPUModel.compile`, such as
            `steps_per_execution`.

    Raises:
        ConfigError: An argument is of an unusable type; or there is no `training_step`.
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
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"module={module!r} is not a LightningModule.")
    if trainer is not None and not isinstance(trainer, Mapping):
        raise ConfigError(
            f"trainer={trainer!r} must be a dict of values that the module reads from "
            "its Trainer, {'max_epochs': 10}. Pass everything else to fit()."
        )
    if not _is_overridden(module, "training_step"):
        raise ConfigError(
            f"{type(module).__name__} has no training_step: write one, or use "
            "ipufit.IPUModel(module) and compile(optimizer, loss)."
        )
    _refuse_methods(module)
    values = dict(trainer or {})
    # Layers are made first, so that the config sets their types.
    for hook, arguments in (("setup", {"stage": "fit"}), ("configure_model", {})):
        if _is_overridden(module, hook):
            _call_at_start(module, values, hook, **arguments)
    model = LightningModel(module, config, in_place=in_place)
    trained = model.module
    if optimizer is None:
        if lr_schedule is not None:
            raise ConfigError(
                "lr_schedule was given, and configure_optimizers returns the optimizer "
                "with its scheduler. Give the optimizer here too, or both there."
            )
        configured = None
        if _is_overridden(trained, "configure_optimizers"):
            configured = _call_at_start(trained, values, "configure_optimizers")
        if configured is None:
            raise ConfigError(
                f"{type(trained).__name__} has no configure_optimizers that returns "
                "an optimizer: write it, or give from_lightning() an optimizer."
            )
        optimizer, lr_schedule, model._plateau = _read_optimizers(configured)
    IPUModel.compile(
        model,
        optimizer,
        lr_schedule=lr_schedule,
        step=_find_step(trained, _FIT, values),
        validation_step=_find_step(trained, _VALIDATE, values),
        predict_step=_find_step(trained, _PREDICT, values),
        **compile_arguments,
    )
    model._trainer_values = values
    return model


def _is_overridden(module: torch.nn.Module, name: str) -> bool:
    """Return whether a module has a method that isn't Lightning's."""
    method = getattr(module, name, None)
    package = str(getattr(method, "__module__", "")).partition(".")[0]
    return method is not None and package not in _LIBRARIES


# Steps --------------------------------------------------------------------------------


def _find_step(
    module: torch.nn.Module, stage: _Stage, values: Mapping[str, Any]
) -> _Step | None:
    """Return the step of a stage; None if the module doesn't have it."""
    if not _is_overridden(module, stage.step):
        return None
    return _Step(getattr(module, stage.step), stage, values, type(module).__qualname__)


@dataclass(repr=False, unsafe_hash=True)
class _Step:
    """A step of a LightningModule as a function of module and batch.

    Attributes:
        method: The bound method, whose code is searched for constants.
        stage: The stage of the step.
        values: Values of the Trainer.
        owner: Name of the module's class.
    """

    method: Callable[..., Any]
    stage: _Stage
    values: Mapping[str, Any] = field(hash=False)
    owner: str

    def __post_init__(self) -> None:
        # A resumed run compares the name, and messages show it.
        self.__qualname__ = f"{self.owner}.{self.stage.step}"

    def __repr__(self) -> str:
        return self.__qualname__

    def __call__(self, module: torch.nn.Module, batch: Any) -> Any:
        """Call the step, and report the values that it logs."""
        name = self.stage.step
        logged: dict[str, Tensor] = {}
        is_training, is_prediction = self.stage == _FIT, self.stage == _PREDICT
        hear: Callable[..., None] = functools.partial(_record, logged)
        hear = _no_log(name) if is_prediction else hear
        view = _make_view(module, hear, self.stage, self.values)
        step = getattr(view, name)
        with _refuse_changes(module, name):
            returned = step(batch, *([_BatchIndex()] if _takes_index(step) else []))
        if is_prediction:
            return returned
        results = returned if isinstance(returned, Mapping) else {}
        if is_training and isinstance(returned, Tensor):  # as in Lightning, only here
            results = {"loss": returned}
        loss = results.get("loss")
        loss = loss if isinstance(loss, Tensor) else None
        what = "None" if returned is None else f"a {type(returned).__name__}"
        if loss is None and is_training:
            raise ConfigError(
                f"{name} returned {what}. Return the loss, or {{'loss': loss}}, for "
                "each batch: a program makes an update for each."
            )
        if loss is None and not logged:
            metric = "val_acc" if self.stage == _VALIDATE else "test_acc"
            raise ConfigError(
                f"{name} returned {what} and logged nothing: there is nothing to "
                f"report. Log each value, self.log('{metric}', accuracy), or return "
                "{'loss': loss}."
            )
        if is_training and logged.pop("loss", loss) is not loss:
            raise ConfigError(
                f"{name} logs 'loss', which is the name of the loss that it returns: "
                "log it under another name."
            )
        for key, value in logged.items():
            metric = _without_val(key) if self.stage == _VALIDATE else key
            if metric == "loss":
                loss = value
            else:
                log(metric, value)
        reported = {} if loss is None else {"loss": loss}
        if "outputs" in results:
            reported["outputs"] = results["outputs"]
        return reported


def _takes_index(step: Callable[..., Any]) -> bool:
    """Return whether a step takes `batch_idx` after the batch."""
    signature = inspect.signature(step)
    if "dataloader_iter" in signature.parameters:
        raise UnsupportedError(
            f"{step.__name__} takes dataloader_iter, and a program gets batches: take "
            "(self, batch, batch_idx)."
        )
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True


def _refusing(message: str) -> Callable[..., NoReturn]:
    """Return a function of any arguments that raises an error."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(message)

    return refuse


_INDEX_METHODS = {"__str__", *vars(int)} - {
    *("__new__", "__repr__", "__getattribute__", "__doc__"),
}
_REFUSE_INDEX = _refusing(
    "batch_idx was used in a step. A step runs once in Python, when its program is "
    "compiled, so that every batch would have the same number. Do what belongs to "
    "every 100th batch in a callback, on_train_batch_end(batch, logs)."
)
_BatchIndex = type("_BatchIndex", (), dict.fromkeys(_INDEX_METHODS, _REFUSE_INDEX))
"""Replaces `batch_idx`: a step may pass it on, but not use it as a number."""


@contextlib.contextmanager
def _refuse_changes(module: torch.nn.Module, name: str) -> Iterator[None]:
    """Refuse a step that adds values to torchmetrics' objects, lists or dicts."""

    def lengths() -> dict[str, int]:
        return {
            attribute: len(value)
            for attribute, value in vars(module).items()
            if isinstance(value, (list, dict, set)) and attribute[0] != "_"
        }

    refuse = _refusing(
        f"{name} uses an object of torchmetrics, which keeps values on the host. Log "
        "the mean over the batch, self.log('acc', (logits.argmax(1) == y).float()"
        ".mean()): its average over all samples is exact. Or return {'loss': loss, "
        "'outputs': logits}, and use from_lightning(module, metrics=[...])."
    )
    library: Any = sys.modules.get("torchmetrics")
    metrics = [m for m in module.modules() if library and isinstance(m, library.Metric)]
    updates = [metric.update for metric in metrics]
    before = lengths()
    try:
        for metric in metrics:
            metric.update = refuse
        yield
    finally:
        for metric, update in zip(metrics, updates):
            metric.update = update
    for attribute, length in lengths().items():
        if length > before.get(attribute, length):
            raise UnsupportedError(
                f"{name} puts something into self.{attribute}. A step runs once in "
                "Python, when its program is compiled. Log means, which are averaged "
                "over all samples, or get the outputs of all samples from predict()."
            )


# self.log -----------------------------------------------------------------------------

_LOG_ARGUMENTS = (
    *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph"),
    *("sync_dist", "sync_dist_group", "add_dataloader_idx", "batch_size"),
    *("metric_attribute", "rank_zero_only"),
)
"""Arguments of `LightningModule.log` after name and value, in their order."""


def _record(
    logged: dict[str, Tensor], name: str, value: Any, *args: Any, **kwargs: Any
) -> None:
    """Record a value that a step logs, with the arguments of `LightningModule.log`.

    Every value is averaged over all samples of an epoch, and shown on the progress bar.
    So `reduce_fx` must be a mean, and the other arguments have no effect.
    """
    for argument in kwargs:
        if argument not in _LOG_ARGUMENTS:
            raise UnknownNameError("argument of self.log", argument, _LOG_ARGUMENTS)
    reduce = {**dict(zip(_LOG_ARGUMENTS, args)), **kwargs}.get("reduce_fx", "mean")
    if reduce not in ("mean", torch.mean):
        raise UnsupportedError(
            f"log({name!r}) has reduce_fx={reduce!r}. ipufit averages what is logged "
            "over all samples: leave it out, or use a metric of compile()."
        )
    if name in logged:
        raise ConfigError(f"log({name!r}) was called twice in a step: use two names.")
    if not isinstance(value, Tensor) or value.numel() != 1:
        is_tensor = isinstance(value, Tensor)
        shown = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
        raise ConfigError(
            f"log({name!r}) got {shown}. Pass a tensor of one element that is computed "
            "from the batch or the weights, such as a mean: a step runs once in "
            "Python, and a number would stay the same."
        )
    logged[name] = value


def _no_log(where: str) -> Callable[..., NoReturn]:
    """Return a `log` that raises, for hooks and `predict_step`."""
    return _refusing(
        f"log() was called in {where}. Log in training_step or validation_step: ipufit "
        "averages each value over all samples of an epoch, and a callback gets the "
        "means in on_epoch_end(epoch, logs)."
    )


def _without_val(name: str) -> str:
    """Remove the prefix of a validation from a name, since ipufit adds `val_`.

    Example:
        >>> _without_val("val_loss"), _without_val("valid/acc"), _without_val("acc")
        ('loss', 'acc', 'acc')
    """
    return re.sub(r"^(?:val|valid|validation)[_/](?=.)", "", name, flags=re.S)


# The module and self.trainer, as steps and hooks see them -----------------------------


def _refuse_methods(module: torch.nn.Module) -> None:
    """Refuse a module with methods that nothing would call, in one message."""
    name = type(module).__name__
    if not getattr(module, "automatic_optimization", True):
        raise UnsupportedError(
            f"{name} has automatic_optimization=False. Updates are made on the device, "
            "so training_step can't call manual_backward() or step(): return the loss. "
            "Two optimizers in turn, as of a GAN, are two models, each with a "
            "training_step for its loss, and train_on_batch in turn."
        )
    reasons = [
        f"- {method}: {way}"
        for method, way in hints_at("LightningModule").items()
        if _is_overridden(module, method)
    ]
    if reasons:
        raise UnsupportedError(
            "\n".join([f"{name} has methods that nothing would call:", *reasons])
            + "\nDelete them, or override them in a subclass for ipufit."
        )


class _Trainer:
    """Stands for `self.trainer`: has the known values and refuses all others."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        way = f"Pass its value, from_lightning(module, trainer={{{name!r}: ...}})."
        raise UnsupportedError(
            f"self.trainer.{name} was read, and ipufit has no Trainer. "
            + hints_at("Lightning.trainer").get(name, way)
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "should_stop" or name not in vars(self):
            raise UnsupportedError(
                f"self.trainer.{name} was set, and ipufit has no Trainer. Hooks "
                "between epochs may set should_stop; for the rest use ipufit.Callback."
            )
        vars(self)[name] = value


def _make_view(
    module: torch.nn.Module,
    log: Callable[..., Any],
    stage: _Stage | None,
    values: Mapping[str, Any],
) -> Any:
    """Return a view of the module, of a subclass with `log`, `trainer` and so on.

    Module and view share their attributes: setting an attribute of one sets it in the
    other. The module keeps its class.

    Args:
        module: The module.
        log: Function in the place of `self.log`.
        stage: The task of the module; None before the first epoch.
        values: Values of the Trainer.
    """
    kind, ways = type(module), hints_at("Lightning.self")
    flags = {s.flag: s == stage for s in _STAGES}
    values = {"sanity_checking": False, **flags, **values}
    trainer = _Trainer(values)

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *args, **kwargs)

    def print_once(*args: Any, **kwargs: Any) -> None:
        if get_process_info().is_first:
            print(*args, **kwargs)  # noqa: T201 - what the user asks for

    def read(name: str, _: Any) -> Any:
        if name in values:
            return values[name]
        raise UnsupportedError(f"self.{name} was used in a step or hook. {ways[name]}")

    members: dict[str, Any] = {
        name: property(functools.partial(read, name))
        for name in ways
        if name not in vars(module)  # not attributes that the user has set
    }
    members.update(
        log=staticmethod(log),
        log_dict=staticmethod(log_dict),
        print=staticmethod(print_once),
        trainer=property(lambda self: trainer),
        __module__=kind.__module__,
        __qualname__=kind.__qualname__,
    )
    make: Any = type(kind)  # the metaclass
    view = object.__new__(make(kind.__name__, (kind,), members))
    object.__setattr__(view, "__dict__", vars(module))
    vars(trainer).update(model=view, lightning_module=view)
    return view


# Hooks --------------------------------------------------------------------------------


def _call_at_start(
    module: torch.nn.Module, values: Mapping[str, Any], hook: str, **arguments: Any
) -> Any:
    """Call a hook of the module before the first epoch."""
    values = {**values, "current_epoch": 0, "global_step": 0}
    return getattr(_make_view(module, _no_log(hook), None, values), hook)(**arguments)


class _ModuleHooks(Callback):
    """Calls the hooks of a module between epochs.

    In a hook `self.trainer` has `current_epoch`, `global_step`, `callback_metrics` and
    `is_global_zero`, and `should_stop` may be set.
    """

    is_saved = False
    reads_batch_logs = False

    def __init__(
        self, module: torch.nn.Module, values: Mapping[str, Any], stage: _Stage
    ) -> None:
        self._module, self._trainer_values = module, values
        self._evaluation = _TEST if stage == _TEST else _VALIDATE
        self._epoch = 0
        self._metrics: dict[str, Any] = {}

    def _call(self, stage: _Stage, *hooks: str) -> None:
        for hook in hooks:
            if not _is_overridden(self._module, hook):
                continue
            metrics = {
                name: torch.tensor(value)
                for name, value in self._metrics.items()
                if hasattr(value, "__float__")  # callbacks may put texts into logs
            }
            present = {
                "current_epoch": self._epoch,
                "global_step": self.model.num_updates,
                "callback_metrics": metrics,
                "logged_metrics": metrics,
                "is_global_zero": self.model.processes.is_first,
                "should_stop": False,
            }
            values = {**self._trainer_values, **present}
            view = _make_view(self._module, _no_log(hook), stage, values)
            getattr(view, hook)()
            if view.trainer.should_stop:
                self.model.stop_training = True

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        self._call(_FIT, "on_fit_start", "on_train_start")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        self._epoch = epoch
        self._call(_FIT, "on_train_epoch_start")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._metrics = logs
        self._call(_FIT, "on_train_epoch_end")

    def on_train_end(self, logs: dict[str, Any]) -> None:
        self._metrics = logs
        self._call(_FIT, "on_train_end", "on_fit_end")

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        stage = self._evaluation
        self._call(stage, f"on_{stage.hooks}_start", f"on_{stage.hooks}_epoch_start")

    def on_test_end(self, logs: dict[str, Any]) -> None:
        stage = self._evaluation
        prefix = "val_" if stage == _VALIDATE else ""
        metrics = {f"{prefix}{name}": value for name, value in logs.items()}
        self._metrics = {**self._metrics, **metrics}
        self._call(stage, f"on_{stage.hooks}_epoch_end", f"on_{stage.hooks}_end")

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        self._call(_PREDICT, "on_predict_start", "on_predict_epoch_start")

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        self._call(_PREDICT, "on_predict_epoch_end", "on_predict_end")


# configure_optimizers: one optimizer, and its scheduler -------------------------------

_OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", "monitor", "frequency")
_SCHEDULER_KEYS = (
    *("scheduler", "interval", "frequency", "monitor", "strict", "name"),
    "reduce_on_plateau",
)


def _read_optimizers(
    configured: Any,
) -> tuple[Any, Any, Callable[[], Callback] | None]:
    """Read the result of `configure_optimizers`, in any form that Lightning takes.

    `configured` is an optimizer; a list with an optimizer; two lists, with an optimizer
    and with schedulers; a dict with `"optimizer"` and maybe `"lr_scheduler"` and
    `"monitor"`; or a list with such a dict. A scheduler is one of torch, or a dict with
    `"scheduler"`, `"interval"` (`"epoch"` or `"step"`), `"frequency"`, `"monitor"` and
    `"strict"`.

    Returns:
        The optimizer; the schedule for `compile`; and None, or a function that creates
        the callback of a `fit`, which steps the scheduler by a metric.
    """
    parts = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    optimizers, schedulers, monitor = parts, [], None
    if len(parts) == 2 and isinstance(parts[0], (list, tuple)):
        optimizers, schedulers = parts
        if not isinstance(schedulers, (list, tuple)):
            schedulers = [schedulers]
    elif not all(isinstance(part, torch.optim.Optimizer) for part in parts):
        if not all(isinstance(part, dict) for part in parts):
            raise ConfigError(
                f"configure_optimizers returned {configured!r}. Return an optimizer, "
                "[optimizer], ([optimizer], [scheduler]), or {'optimizer': ..., "
                "'lr_scheduler': ...}."
            )
        for part in parts:
            _check_keys("configure_optimizers", part, _OPTIMIZER_KEYS)
        optimizers = [part["optimizer"] for part in parts]
        schedulers = [part.get("lr_scheduler") for part in parts]
        schedulers = [scheduler for scheduler in schedulers if scheduler is not None]
        monitor = parts[0].get("monitor")
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise UnsupportedError(
            f"configure_optimizers returned {len(optimizers)} optimizers and "
            f"{len(schedulers)} schedulers, and a program has one of each. Give parts "
            "of the module other settings by parameter groups, and join schedulers by "
            "SequentialLR or ChainedScheduler. Parts that are trained in turn, as in a "
            "GAN, are several models."
        )
    [optimizer] = optimizers
    if not schedulers:
        return optimizer, None, None
    [settings] = schedulers
    settings = settings if isinstance(settings, dict) else {"scheduler": settings}
    _check_keys("a scheduler", settings, _SCHEDULER_KEYS)
    scheduler = settings["scheduler"]
    interval, every = settings.get("interval", "epoch"), settings.get("frequency", 1)
    check_choice("interval", interval, ("epoch", "step"), of="A scheduler")
    check_integer("frequency", every, least=1, of="A scheduler")
    if not isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler = Every(scheduler, every) if every > 1 else scheduler
        return optimizer, scheduler if interval == "step" else PerEpoch(scheduler), None
    monitor = settings.get("monitor", monitor)
    if monitor is None or interval == "step":
        raise ConfigError(
            f"ReduceLROnPlateau has monitor={monitor!r} and interval={interval!r}. It "
            "is stepped at the end of epochs, by a metric: return {'scheduler': "
            "scheduler, 'interval': 'epoch', 'monitor': 'val_loss'} for it."
        )
    is_strict = bool(settings.get("strict", True))
    plateau = functools.partial(SteppedByFigure, scheduler, monitor, every, is_strict)
    return optimizer, None, plateau


def _check_keys(what: str, settings: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse unknown keys of a dict, and a dict without the first known key."""
    for name in settings:
        if name not in known:
            raise UnknownNameError(f"key of {what}", str(name), known)
    if known[0] not in settings:
        raise ConfigError(f"The dict of {what} has no {known[0]!r}: {settings!r}.")


class Every(lr_scheduler.ChainedScheduler):
    """Steps another scheduler of torch at every `frequency`-th step."""

    def __init__(self, scheduler: Any, frequency: int) -> None:
        super().__init__([scheduler])
        self.scheduler = scheduler
        self.frequency = frequency
        self.last_epoch = 0

    def step(self, epoch: int | None = None) -> None:
        """Count a step."""
        self.last_epoch += 1
        if self.last_epoch % self.frequency == 0:
            super().step()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps so far, and the other scheduler's state."""
        counts = {"last_epoch": self.last_epoch, "frequency": self.frequency}
        return {**counts, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state."""
        self.last_epoch = state_dict["last_epoch"]
        self.scheduler.load_state_dict(dict(state_dict["scheduler"]))
        self._last_lr = self.scheduler.get_last_lr()


class SteppedByFigure(Callback):
    """Steps torch's `ReduceLROnPlateau` with a metric of each epoch.

    ipufit copies the scheduler's changes of the torch optimizer to PopTorch's.

    Args:
        scheduler: The scheduler, which is bound to the optimizer that `compile` got.
        monitor: Name of the metric, as in the logs or as the module logs it.
        frequency: Number of epochs from one step to the next.
        strict: If False, an epoch without the metric is skipped.

    Raises:
        ConfigError: When an epoch ends without the metric.
    """

    saved_attributes: ClassVar[Mapping[str, Kind]] = {
        "scheduler_state": anything,
        "rates": list_of(number),
    }

    def __init__(
        self, scheduler: Any, monitor: str, frequency: int, strict: bool
    ) -> None:
        self.scheduler, self.monitor = scheduler, monitor
        self.frequency, self.strict = frequency, strict

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Step the scheduler every `frequency` epochs."""
        if (epoch + 1) % self.frequency:
            return
        bare = _without_val(self.monitor)  # val_loss, valid/loss, ... are the same
        name = self.monitor if bare == self.monitor else f"val_{bare}"
        value = logs.get(self.monitor, logs.get(name))
        if value is not None:
            self.scheduler.step(float(value))
        elif self.strict:
            raise ConfigError(
                f"ReduceLROnPlateau has monitor={self.monitor!r}, which is not in the "
                f"logs of epoch {epoch}: {', '.join(sorted(logs))}. Use one of these "
                "names, log it, or validate in every epoch."
            )

    @property
    def scheduler_state(self) -> dict[str, Any]:
        """The scheduler's state, without values that JSON can't hold."""
        plain = (bool, int, float, str, list, type(None))
        state = self.scheduler.state_dict()
        return {name: v for name, v in state.items() if isinstance(v, plain)}

    @scheduler_state.setter
    def scheduler_state(self, state: Mapping[str, Any]) -> None:
        self.scheduler.load_state_dict(dict(state))

    @property
    def rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.scheduler.optimizer.param_groups]

    @rates.setter
    def rates(self, rates: list[float]) -> None:
        for group, rate in zip(self.scheduler.optimizer.param_groups, rates):
            group["lr"] = rate
