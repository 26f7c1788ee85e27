# SPDX-License-Identifier: Apache-2.0
"""LightningModules, trained by ipufit; Lightning itself needn't be installed."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
from typing import Any, Callable, ClassVar, Iterator, Mapping, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import lr_scheduler

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

_FIT, _VALIDATE, _TEST, _PREDICT, _SETUP = "fit", "validate", "test", "predict", "setup"
_STEPS = {
    _FIT: "training_step",
    _VALIDATE: "validation_step",
    _TEST: "test_step",
    _PREDICT: "predict_step",
}
_LOADERS = {
    "fit": "train_dataloader",
    "evaluate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
"""Lightning's method with the data, for a method of the model."""

_LIBRARIES = ("lightning", "lightning_fabric", "pytorch_lightning", "torch")
"""Packages whose own methods are no overrides."""


@all_suggesting
class LightningModel(IPUModel):
    """An `IPUModel` of a LightningModule; `from_lightning` makes it.

    `compile`, `fit`, `evaluate`, `predict` and the rest are those of `IPUModel`. In
    addition, they call the module's hooks between epochs.
    """

    _given: Mapping[str, Any] = {}
    _plateau: Callable[[], Callback] | None = None
    _of_test = False

    @functools.wraps(IPUModel.fit, assigned=())  # type: ignore[override]
    def fit(self, *args: Any, **kwargs: Any) -> History:
        """Train by `training_step`, with the arguments of `IPUModel.fit`."""
        own = [] if self._plateau is None else [self._plateau()]
        return self._with_hooks(IPUModel.fit, own, *args, **kwargs)

    @functools.wraps(IPUModel.evaluate, assigned=())  # type: ignore[override]
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate by `validation_step`, with the arguments of `IPUModel.evaluate`."""
        return self._with_hooks(IPUModel.evaluate, [], *args, **kwargs)

    @functools.wraps(IPUModel.predict, assigned=())  # type: ignore[override]
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict by `predict_step`, with the arguments of `IPUModel.predict`."""
        return self._with_hooks(IPUModel.predict, [], *args, **kwargs)

    def _with_hooks(
        self, method: Callable[..., Any], own: list[Callback], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method of `IPUModel` with the module's hooks as a callback."""
        given = inspect.signature(method).bind_partial(self, *args, **kwargs)
        loader = _LOADERS["test" if self._of_test else method.__name__]
        if given.arguments.get("x") is None and _is_overridden(self.module, loader):
            raise DataError(
                f"{method.__name__}() got no data, and nothing calls {loader}() of the "
                f"module: give it, {method.__name__}(model.module.{loader}())."
            )
        callbacks = given.arguments.get("callbacks")
        hooks = _ModuleHooks(self.module, self._given, of_test=self._of_test)
        given.arguments["callbacks"] = [
            hooks,
            *own,
            [] if callbacks is None else callbacks,
        ]
        return method(*given.args, **given.kwargs)

    def test(self, *args: Any, **kwargs: Any) -> Logs:
        """Evaluate by `test_step`, with the arguments of `IPUModel.evaluate`.

        Returns:
            The logged values, under the names that `test_step` gives them.

        Raises:
            UnsupportedError: The module has no `test_step`.
        """
        if not _is_overridden(self.module, "test_step"):
            raise UnsupportedError(
                f"{type(self.module).__name__} has no test_step: write one, or use "
                "evaluate(), which uses validation_step."
            )
        self.detach()
        tester = copy.copy(self)
        step = _Step(self.module, _TEST, self._given)
        arguments = {
            **self._calls.require_compiled().arguments,
            "validation_step": step,
        }
        IPUModel.compile(tester, **arguments)
        tester._of_test = True
        try:
            logs: Logs = tester.evaluate(*args, **kwargs)
        finally:
            tester.detach()
        return logs


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
      of a validation has `val_` before its name: one logged as `"val_loss"`,
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
        lr_schedule: Its schedule, as for `IPUModel.compile`.
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
            f"trainer={trainer!r} is no dict. ipufit takes the place of Lightning's "
            "Trainer: give the values that the module reads from it, {'max_epochs': "
            "10}, and the rest to fit()."
        )
    if not _is_overridden(module, "training_step"):
        raise ConfigError(
            f"{type(module).__name__} has no training_step: write one, or use "
            "ipufit.IPUModel(module) and compile(optimizer, loss)."
        )
    _refuse_hooks(module)
    given = dict(trainer or {})
    # Layers are made before their types are those of the config.
    if _is_overridden(module, "setup"):
        _at_start(module, given, "setup").setup(stage="fit")
    if _is_overridden(module, "configure_model"):
        _at_start(module, given, "configure_model").configure_model()
    model = LightningModel(module, config, in_place=in_place)
    own: Any = model.module
    configured = _Configured(optimizer, lr_schedule)
    if optimizer is None:
        if lr_schedule is not None:
            raise ConfigError(
                "lr_schedule was given, and the optimizer is that of "
                "configure_optimizers, which returns its scheduler too. Give the "
                "optimizer here as well, or the scheduler there."
            )
        if not _is_overridden(own, "configure_optimizers"):
            raise ConfigError(
                f"{type(own).__name__} has no configure_optimizers: write one, or pass "
                "from_lightning(module, optimizer='adamw')."
            )
        view = _at_start(own, given, "configure_optimizers")
        configured = _read_optimizers(view.configure_optimizers())
    IPUModel.compile(
        model,
        configured.optimizer,
        lr_schedule=configured.lr_schedule,
        step=_Step(own, _FIT, given),
        validation_step=_step(own, _VALIDATE, given),
        predict_step=_step(own, _PREDICT, given),
        **compile_arguments,
    )
    model._given = given
    model._plateau = configured.plateau
    return model


def _at_start(module: torch.nn.Module, given: Mapping[str, Any], hook: str) -> Any:
    """Return the module as a hook sees it before the first epoch."""
    live = {"current_epoch": lambda: 0, "global_step": lambda: 0}
    return _view_of(module, _no_log(hook), _Trainer(given, _SETUP, live))


def _step(
    module: torch.nn.Module, stage: str, given: Mapping[str, Any]
) -> _Step | None:
    has_one = _is_overridden(module, _STEPS[stage])
    return _Step(module, stage, given) if has_one else None


# Steps --------------------------------------------------------------------------------


class _Step:
    """A step of a LightningModule as a function of module and batch."""

    def __init__(
        self, module: torch.nn.Module, stage: str, given: Mapping[str, Any]
    ) -> None:
        self.name = _STEPS[stage]
        self.method = getattr(module, self.name)  # its code's values are looked at
        self.stage = stage
        self.given = given
        self.__qualname__ = f"{type(module).__qualname__}.{self.name}"

    def __call__(self, module: torch.nn.Module, batch: Any) -> Any:
        """Call the step; its logged values are logged by ipufit."""
        logged: dict[str, Tensor] = {}
        hear: Any = functools.partial(_hear, logged)
        if self.stage == _PREDICT:
            hear = _no_log(f"{self.name}, whose program gives outputs only")
        view = _view_of(module, hear, _Trainer(self.given, self.stage))
        step = getattr(view, self.name)
        with _metrics_refused(module, self.name), _lists_as_before(module, self.name):
            returned = step(batch, *([_BatchIndex()] if _takes_index(step) else []))
        if self.stage == _PREDICT:
            return returned
        is_loss = self.stage == _FIT  # elsewhere Lightning uses no returned tensor
        bare = {"loss": returned} if is_loss else {}
        parts = returned if isinstance(returned, Mapping) else bare
        loss = parts.get("loss")
        loss = loss if isinstance(loss, Tensor) else None
        report = self._trained if self.stage == _FIT else self._measured
        reported = report(loss, logged, _kind(returned))
        if "outputs" in parts:
            reported["outputs"] = parts["outputs"]
        return reported

    def _trained(
        self, loss: Tensor | None, logged: dict[str, Tensor], returned: str
    ) -> dict[str, Tensor]:
        if loss is None:
            raise ConfigError(
                f"{self.name} returned {returned}, and must return the loss, or a dict "
                "with 'loss'. None can't leave out a batch: a program makes an update "
                "of each."
            )
        if logged.pop("loss", loss) is not loss:
            raise ConfigError(
                f"{self.name} logs 'loss', and it isn't the tensor that it returns, "
                "which is reported as 'loss': log it under another name."
            )
        for name, value in logged.items():
            log(name, value)
        return {"loss": loss}

    def _measured(
        self, loss: Tensor | None, logged: dict[str, Tensor], returned: str
    ) -> dict[str, Tensor]:
        if loss is None and not logged:
            prefix = "val" if self.stage == _VALIDATE else "test"
            raise ConfigError(
                f"{self.name} logged nothing and returned {returned}: there is nothing "
                "to report, because Lightning logs nothing that it returns. Log each "
                f"value under its name, self.log('{prefix}_loss', loss) or "
                f"self.log('{prefix}_acc', accuracy), or return {{'loss': loss}}."
            )
        for name, value in logged.items():
            own = _own_name(name) if self.stage == _VALIDATE else name
            if own == "loss":
                loss = value
            else:
                log(own, value)
        return {} if loss is None else {"loss": loss}

    def __repr__(self) -> str:
        """Return the method's name with its class, which a resumed run compares."""
        return self.__qualname__

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same step of the same module."""
        return isinstance(other, _Step) and (
            (self.method, self.stage) == (other.method, other.stage)
            and self.given == other.given
        )

    def __hash__(self) -> int:
        return hash((self.method, self.stage))


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(repr, value)) or 'nothing'}"
    return "None" if value is None else f"a {type(value).__name__}"


def _takes_index(step: Callable[..., Any]) -> bool:
    """Return whether a step takes `batch_idx` after the batch."""
    parameters = inspect.signature(step).parameters
    if "dataloader_iter" in parameters:
        raise UnsupportedError(
            f"{step.__name__} takes dataloader_iter, and a program gets batches: take "
            "(self, batch, batch_idx)."
        )
    try:
        inspect.signature(step).bind(None, None)
    except TypeError:
        return False
    return True


class _BatchIndex:
    """Stands for `batch_idx`: a step may pass it on, but not use it.

    Example:
        >>> _BatchIndex() % 100
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: batch_idx was used in a step...
    """

    def __repr__(self) -> str:
        """Return a name for messages."""
        return "batch_idx (without a number: a step is compiled once)"


def _refuse_index(*_: Any) -> NoReturn:
    raise UnsupportedError(
        "batch_idx was used in a step. A step runs once in Python, when its program is "
        "compiled, so that every batch would have the same number. Do what belongs to "
        "every 100th batch in a callback, on_train_batch_end(batch, logs)."
    )


_USES = (
    *("index", "int", "float", "bool", "hash", "str", "format", "eq", "ne", "lt", "le"),
    *("gt", "ge", "neg", "abs", "add", "radd", "sub", "rsub", "mul", "rmul", "mod"),
    *("rmod", "floordiv", "rfloordiv", "truediv", "rtruediv", "divmod", "rdivmod"),
    *("pow", "rpow", "and"),
)
for _use in _USES:
    setattr(_BatchIndex, f"__{_use}__", _refuse_index)


@contextlib.contextmanager
def _metrics_refused(module: torch.nn.Module, name: str) -> Iterator[None]:
    """Refuse updates of torchmetrics's objects inside the context."""

    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedError(_metric_refusal(name))

    metrics = [
        part
        for part in module.modules()
        if "update" in vars(part)
        and any(
            kind.__module__.partition(".")[0] == "torchmetrics"
            for kind in type(part).__mro__
        )
    ]
    with contextlib.ExitStack() as stack:
        for metric in metrics:
            stack.callback(vars(metric).update, update=vars(metric)["update"])
            vars(metric)["update"] = refuse
        yield


def _metric_refusal(what: str) -> str:
    return (
        f"{what} uses an object of torchmetrics, which keeps what it has seen on the "
        "host, and a step runs on the device. Log the mean over the batch, "
        "self.log('acc', (logits.argmax(1) == y).float().mean()): its average over "
        "all samples is exact. Or return {'loss': loss, 'outputs': logits}, and give "
        "the metric to from_lightning(module, metrics=[...])."
    )


@contextlib.contextmanager
def _lists_as_before(module: torch.nn.Module, name: str) -> Iterator[None]:
    """Refuse a step that appends to a list or dict of its module."""
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


# self.log -----------------------------------------------------------------------------

_LOG_ARGUMENTS = (
    *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph"),
    *("sync_dist", "sync_dist_group", "add_dataloader_idx", "batch_size"),
    *("metric_attribute", "rank_zero_only"),
)
"""Arguments of `LightningModule.log` after name and value, in their order."""


def _hear(
    values: dict[str, Tensor], name: str, value: Any, *args: Any, **kwargs: Any
) -> None:
    """Record a value that a step logs, with the arguments of `LightningModule.log`.

    Every value is averaged over all samples of an epoch, and shown on the progress bar.
    So `reduce_fx` must be a mean, and the other arguments have no effect.
    """
    for argument in kwargs:
        if argument not in _LOG_ARGUMENTS:
            raise UnknownNameError("argument of self.log", argument, _LOG_ARGUMENTS)
    reduced = {**dict(zip(_LOG_ARGUMENTS, args)), **kwargs}.get("reduce_fx", "mean")
    if reduced not in ("mean", torch.mean):
        raise UnsupportedError(
            f"log({name!r}) has reduce_fx={reduced!r}. ipufit averages what is "
            "logged over all samples: leave it out, or use a metric of compile()."
        )
    if hasattr(value, "compute") and hasattr(value, "update"):
        raise UnsupportedError(_metric_refusal(f"log({name!r})"))
    if name in values:
        raise ConfigError(
            f"log({name!r}) was called twice in one step: give the values names of "
            "their own."
        )
    if not isinstance(value, Tensor) or value.numel() != 1:
        is_tensor = isinstance(value, Tensor)
        shown = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
        raise ConfigError(
            f"log({name!r}) got {shown}. A step runs once in Python, and a number "
            "would stay what it was then: pass a tensor of one element that is "
            "computed from the batch or the weights, such as a mean."
        )
    values[name] = value


def _no_log(where: str) -> Callable[..., NoReturn]:
    """Return a `log` that raises, for places outside of a step."""

    def refuse(name: str, value: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"log({name!r}) was called in {where}. Log in training_step or "
            "validation_step: ipufit averages each value over all samples of an epoch, "
            "and a callback gets the means in on_epoch_end(epoch, logs)."
        )

    return refuse


def _own_name(name: str) -> str:
    """Remove the mark of a validation, such as `val_`, from a name.

    ipufit adds `val_` to the names of a validation itself.

    Example:
        >>> _own_name("val_loss"), _own_name("valid/acc"), _own_name("acc")
        ('loss', 'acc', 'acc')
    """
    return re.sub(r"^(?:val|valid|validation)[_/](?=.)", "", name, flags=re.S)


# The module and self.trainer, as steps and hooks see them -----------------------------

_CALLBACKS = (
    "metrics reach loggers by callbacks, fit(callbacks=[ipufit.WandbLogger(...)])"
)
_ALL_RANKS = "one program runs on all replicas and processes"

_REFUSED_CALLS = {
    **{
        name: f"{name}() is for manual optimization, and the program makes the "
        "updates. Leave it out, and return the loss of training_step"
        for name in (
            *("optimizers", "lr_schedulers", "manual_backward"),
            *("toggle_optimizer", "untoggle_optimizer"),
        )
    },
    "all_gather": "all_gather() joins tensors of processes, and a program has those of "
    "one replica; metrics cover all of them without it",
}
_REFUSED_VALUES = {
    "logger": _CALLBACKS,
    "loggers": _CALLBACKS,
    "global_rank": _ALL_RANKS,
    "local_rank": _ALL_RANKS,
}
_OF_TRAINER = {
    "current_epoch": "the number of the epoch",
    "global_step": "the number of updates",
}
_CHANGING = {
    **_OF_TRAINER,
    "callback_metrics": "metrics",
    "logged_metrics": "metrics",
    "progress_bar_metrics": "metrics",
    "should_stop": "a flag of the run",
}
_ELSEWHERE = {
    **dict.fromkeys(
        ("logger", "loggers"), f"{_CALLBACKS}, and pictures by a callback of yours"
    ),
    "optimizers": "the optimizer runs in the program; model.optimizer is for callbacks",
    "callbacks": "ipufit's callbacks are arguments of fit",
    "datamodule": "data are arguments of fit and evaluate",
    "train_dataloader": "data are arguments of fit",
    "val_dataloaders": "data are arguments of fit",
}
_STAGE_FLAGS = {
    "training": _FIT,
    "validating": _VALIDATE,
    "testing": _TEST,
    "predicting": _PREDICT,
}


def _view_of(
    module: torch.nn.Module, log: Callable[..., Any], trainer: _Trainer
) -> Any:
    """Return a view of the module under another class, with `log`, `trainer` and so on.

    It shares the module's attributes: an attribute set in one is set in the other. The
    module itself doesn't change for other code.
    """
    kind = type(module)

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *args, **kwargs)

    def print_once(*values: Any, **settings: Any) -> None:
        if get_process_info().is_first:
            print(*values, **settings)  # noqa: T201 - what the user asks for

    added: dict[str, Any] = {
        **{name: property(_of_trainer(name, trainer)) for name in _OF_TRAINER},
        **{
            name: _refusing(f"self.{name}() was called: {why}.")
            for name, why in _REFUSED_CALLS.items()
        },
        **{
            name: property(_refusing(f"self.{name} was read: {why}."))
            for name, why in _REFUSED_VALUES.items()
        },
    }
    for name in vars(module):  # attributes of the user's own
        added.pop(name, None)
    added.update(
        log=staticmethod(log),
        log_dict=staticmethod(log_dict),
        print=staticmethod(print_once),
        trainer=property(lambda self: trainer),
        __module__=kind.__module__,
        __qualname__=kind.__qualname__,
        __doc__=kind.__doc__,
    )
    make: Any = type(kind)  # the metaclass
    view = object.__new__(make(kind.__name__, (kind,), added))
    object.__setattr__(view, "__dict__", vars(module))
    vars(trainer).update(_model=view)
    return view


def _of_trainer(name: str, trainer: _Trainer) -> Callable[[Any], Any]:
    def read(_: Any) -> Any:
        if vars(trainer)["_live"] is None:
            raise UnsupportedError(_changing(f"self.{name}", _OF_TRAINER[name]))
        return getattr(trainer, name)

    return read


def _refusing(message: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(message)

    return refuse


class _Trainer:
    """The values of a Trainer that are known, and reasons for those that aren't.

    Args:
        given: Values that the user has given, by name.
        stage: The present task of the module.
        live: Functions that return the present value of what changes; None in a step,
            where such a value would be compiled in.
        stop: Ends the run when `should_stop` is set; None where it can't be set.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        stage: str,
        live: Mapping[str, Callable[[], Any]] | None = None,
        stop: Callable[[], None] | None = None,
    ) -> None:
        vars(self).update(_given=given, _stage=stage, _live=live, _stop=stop)

    def __getattr__(self, name: str) -> Any:
        """Return a known value, or refuse."""
        if name.startswith("__"):
            raise AttributeError(name)
        known = vars(self)
        if name in (known["_live"] or ()):
            return known["_live"][name]()
        if name in known["_given"]:
            return known["_given"][name]
        if name in _STAGE_FLAGS:
            return known["_stage"] == _STAGE_FLAGS[name]
        if name == "sanity_checking":
            return False
        if name in ("model", "lightning_module"):
            return known["_model"]
        what = f"self.trainer.{name}"
        if name in _CHANGING:
            raise UnsupportedError(_changing(what, _CHANGING[name]))
        if name in _ELSEWHERE:
            raise UnsupportedError(
                f"{what} was read, and ipufit has no Trainer: {_ELSEWHERE[name]}."
            )
        where = "the hook" if known["_stage"] == _SETUP else "the step or hook"
        raise UnsupportedError(
            f"{what} was read, and ipufit has no Trainer. If {where} needs a number of "
            f"it, give it: from_lightning(module, trainer={{{name!r}: ...}})."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Accept `should_stop = True` in a hook, and nothing else."""
        stop = vars(self)["_stop"]
        if name != "should_stop" or stop is None:
            raise UnsupportedError(
                f"self.trainer.{name} was set, and ipufit has no Trainer. A hook "
                "between epochs may set self.trainer.should_stop; for anything else "
                "use an ipufit.Callback."
            )
        if value:
            stop()


def _changing(what: str, meaning: str) -> str:
    return (
        f"{what} was read in a step. A step runs once in Python, when its program is "
        f"compiled, so {meaning} would be fixed. Make what changes a 0-d buffer, "
        "register_buffer('beta', torch.tensor(0.0)), and fill it in a callback, "
        "on_epoch_begin: buffers of one value go to the program with every call."
    )


# Hooks: called between epochs, or refused ---------------------------------------------

_ON_DEVICE = "the backward pass and the optimizer run on the device. "
_CALLS = (
    "a program makes several updates per call. Use an ipufit.Callback: "
    "{hook}(batch, logs) comes with every call."
)
_BATCHES = (
    "batches go from ipufit's loader to the device. Change samples in the dataset, or "
    "tensors in the step."
)
_EPOCH_END = (
    "Lightning 2 doesn't call it any more. Log means in the step, which ipufit "
    "averages over all samples; a callback's on_epoch_end(epoch, logs) gets them."
)

_CLIPS = _ON_DEVICE + (
    "from_lightning(module, optimizer=ipufit.Optimizer('adamw', 1e-3, "
    "global_clipnorm=1.0)) clips there."
)
_FROM_ZERO = _ON_DEVICE + "Every update begins with gradients of zero."
_IN_LOSS = _ON_DEVICE + "Change the loss in training_step."
_MONITOR = _ON_DEVICE + "ipufit.GradientMonitor() shows gradients."
_STATES = (
    "checkpoints of ipufit are tensors and JSON. State of your own belongs into a "
    "callback with saved_attributes."
)
_STEP_END = "a step is the whole of what is computed of a micro-batch."
_HOOKS = {"train": "train", "validation": "test", "test": "test", "predict": "predict"}
"""Part of the names of Lightning's hooks of a batch, and of a callback's."""

_REFUSED = {
    "optimizer_step": _ON_DEVICE + "Freeze what isn't trained, or give it a group of "
    "its own; compile(lr_schedule=...) changes rates.",
    "optimizer_zero_grad": _FROM_ZERO,
    "backward": _IN_LOSS,
    "configure_gradient_clipping": _CLIPS,
    "clip_gradients": _CLIPS,
    "lr_scheduler_step": "ipufit steps the scheduler of configure_optimizers, with its "
    "interval and frequency.",
    "on_before_zero_grad": _FROM_ZERO,
    "on_before_backward": _IN_LOSS,
    "on_after_backward": _MONITOR,
    "on_before_optimizer_step": _MONITOR,
    "transfer_batch_to_device": _BATCHES,
    "on_before_batch_transfer": _BATCHES,
    "on_after_batch_transfer": _BATCHES,
    "configure_callbacks": "ipufit has callbacks of its own, called as Keras's: "
    "fit(callbacks=[ipufit.EarlyStopping(), ipufit.ModelCheckpoint(...)]).",
    "configure_sharded_model": "call it yourself before, if it makes layers.",
    "on_save_checkpoint": _STATES,
    "on_load_checkpoint": _STATES,
    "on_validation_model_eval": "programs of validations are always in eval mode.",
    "on_validation_model_train": "programs of training are always in train mode.",
    "on_test_model_eval": "programs of tests are always in eval mode.",
    "on_predict_model_eval": "programs of predictions are always in eval mode.",
    **{f"{name}_epoch_end": _EPOCH_END for name in ("training", "validation", "test")},
    **{f"{name}_step_end": _STEP_END for name in ("training", "validation", "test")},
    **{
        f"on_{stage}_batch_{end}": _CALLS.format(hook=f"on_{hook}_batch_{name}")
        for stage, hook in _HOOKS.items()
        for end, name in (("start", "begin"), ("end", "end"))
    },
}
"""Methods that nothing would call, and the way out."""


def _is_overridden(module: torch.nn.Module, name: str) -> bool:
    """Return whether a module has a method that isn't Lightning's own."""
    if name in vars(module):
        return True
    for kind in type(module).__mro__:
        if name in vars(kind):
            return kind.__module__.partition(".")[0] not in _LIBRARIES
    return False


def _refuse_hooks(module: torch.nn.Module) -> None:
    """Refuse a module with methods that can't be called, all in one message."""
    name = type(module).__name__
    if not getattr(module, "automatic_optimization", True):
        raise UnsupportedError(
            f"{name} has automatic_optimization=False. Gradients and updates are made "
            "on the device, so its training_step can't call manual_backward() or "
            "step(). Return the loss, and leave the rest to the program. Two "
            "optimizers in turn, as of a GAN, are two models, each with a "
            "training_step for its loss, and train_on_batch in turn."
        )
    found = [hook for hook in _REFUSED if _is_overridden(module, hook)]
    if found:
        reasons = "\n".join(f"- {hook}: {_REFUSED[hook]}" for hook in found)
        raise UnsupportedError(
            f"{name} has methods that nothing would call:\n{reasons}\nDelete them, or "
            "override them in a subclass for ipufit."
        )


class _ModuleHooks(Callback):
    """Calls the hooks of a module between epochs.

    In a hook `self.trainer` has `current_epoch`, `global_step`, `callback_metrics` and
    `is_global_zero`, and `should_stop` may be set.
    """

    is_saved = False
    reads_batch_logs = False

    def __init__(
        self, module: torch.nn.Module, given: Mapping[str, Any], *, of_test: bool
    ) -> None:
        self._module = module
        self._given = given
        self._epoch = 0
        self._figures: dict[str, Any] = {}
        self._stage_of_tests = "test" if of_test else "validation"

    def _call(self, stage: str, *names: str) -> None:
        live = {
            "current_epoch": lambda: self._epoch,
            "global_step": lambda: self.model.num_updates,
            "callback_metrics": self._tensors,
            "logged_metrics": self._tensors,
            "is_global_zero": lambda: self.model.processes.is_first,
        }
        trainer = _Trainer(self._given, stage, live, self._stop)
        for name in names:
            if _is_overridden(self._module, name):
                getattr(_view_of(self._module, _no_log(name), trainer), name)()

    def _tensors(self) -> dict[str, Tensor]:
        return {name: torch.tensor(value) for name, value in self._figures.items()}

    def _stop(self) -> None:
        self.model.stop_training = True

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        self._call(_FIT, "on_fit_start", "on_train_start")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        self._epoch = epoch
        self._call(_FIT, "on_train_epoch_start")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._epoch, self._figures = epoch, logs
        self._call(_FIT, "on_train_epoch_end")

    def on_train_end(self, logs: dict[str, Any]) -> None:
        self._figures = logs
        self._call(_FIT, "on_train_end", "on_fit_end")

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        stage = self._stage_of_tests
        self._call(_VALIDATE, f"on_{stage}_start", f"on_{stage}_epoch_start")

    def on_test_end(self, logs: dict[str, Any]) -> None:
        stage = self._stage_of_tests
        prefix = "val_" if stage == "validation" else ""
        named = {f"{prefix}{name}": value for name, value in logs.items()}
        self._figures = {**self._figures, **named}
        self._call(_VALIDATE, f"on_{stage}_epoch_end", f"on_{stage}_end")

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        self._call(_PREDICT, "on_predict_start", "on_predict_epoch_start")

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        self._call(_PREDICT, "on_predict_epoch_end", "on_predict_end")


# configure_optimizers: one optimizer, and its scheduler -------------------------------


class _Configured(NamedTuple):
    """The arguments of `compile` and `fit` that `configure_optimizers` determines.

    Attributes:
        optimizer: The optimizer.
        lr_schedule: Argument of `compile`; None for no schedule.
        plateau: Creates the callback of each `fit` that steps a scheduler by a metric.
    """

    optimizer: Any
    lr_schedule: Any = None
    plateau: Callable[[], Callback] | None = None


def _read_optimizers(configured: Any) -> _Configured:
    """Convert the result of `configure_optimizers`, in any form that Lightning takes.

    It is an optimizer; a list with one; two lists, with an optimizer and with
    schedulers; a dict with `"optimizer"` and maybe `"lr_scheduler"` and `"monitor"`; or
    a list with such a dict. A scheduler is one of torch, or a dict with `"scheduler"`,
    `"interval"` (`"epoch"` or `"step"`), `"frequency"`, `"monitor"` and `"strict"`.
    """
    optimizers, schedulers, monitor = _split(configured)
    if len(optimizers) != 1:
        raise UnsupportedError(
            f"configure_optimizers returned {len(optimizers)} optimizers. A program "
            "has one optimizer. Give parts of the module settings of their own as "
            "parameter groups: torch.optim.AdamW([{'params': self.head.parameters(), "
            "'lr': 1e-3}, ...]). Parts that are trained in turn, as in a GAN, are "
            "models of their own."
        )
    if len(schedulers) > 1:
        raise UnsupportedError(
            f"configure_optimizers returned {len(schedulers)} schedulers of one "
            "optimizer. Make one of them: torch.optim.lr_scheduler.SequentialLR for "
            "one after the other, ChainedScheduler for all at once."
        )
    [optimizer] = optimizers
    if not schedulers:
        return _Configured(optimizer)
    settings = _scheduler_settings(schedulers[0], monitor)
    scheduler, every = settings["scheduler"], settings["frequency"]
    is_per_epoch = settings["interval"] == "epoch"
    if not isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler = Every(scheduler, every) if every > 1 else scheduler
        return _Configured(
            optimizer, PerEpoch(scheduler) if is_per_epoch else scheduler
        )
    if settings["monitor"] is None:
        raise ConfigError(
            "configure_optimizers has ReduceLROnPlateau and doesn't say which metric "
            "to monitor. Return {'optimizer': ..., 'lr_scheduler': {'scheduler': ..., "
            "'monitor': 'val_loss'}}."
        )
    if not is_per_epoch:
        raise UnsupportedError(
            "configure_optimizers has ReduceLROnPlateau with interval='step'. A "
            "program makes its updates without asking for metrics: use "
            "interval='epoch'."
        )
    how = settings["monitor"], every, bool(settings["strict"])
    return _Configured(
        optimizer, None, functools.partial(SteppedByFigure, scheduler, *how)
    )


def _split(configured: Any) -> tuple[list[Any], list[Any], str | None]:
    """Return the optimizers, their schedulers, and the name of a metric to monitor."""
    parts = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    if len(parts) == 2 and isinstance(parts[0], (list, tuple)):
        several = isinstance(parts[1], (list, tuple))
        return list(parts[0]), list(parts[1]) if several else [parts[1]], None
    if configured is None:
        raise UnsupportedError(
            "configure_optimizers returned None, so nothing would be trained. Return "
            "an optimizer, or use evaluate() and predict() of an ipufit.IPUModel."
        )
    if parts and all(isinstance(part, torch.optim.Optimizer) for part in parts):
        return parts, [], None
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise ConfigError(
            f"configure_optimizers returned {configured!r}. Return an optimizer, "
            "[optimizer], ([optimizer], [scheduler]), or {'optimizer': ..., "
            "'lr_scheduler': ...}."
        )
    for part in parts:
        known = ("optimizer", "lr_scheduler", "monitor")
        for name in part:
            if name not in (*known, "frequency"):
                raise UnknownNameError("key of configure_optimizers", str(name), known)
        if "optimizer" not in part:
            raise ConfigError(
                "configure_optimizers returned a dict without 'optimizer': it has "
                f"{', '.join(map(repr, part)) or 'nothing'}."
            )
    given = [part.get("lr_scheduler") for part in parts]
    schedulers = [one for one in given if one is not None]
    return [part["optimizer"] for part in parts], schedulers, parts[0].get("monitor")


_SCHEDULER_KEYS = (
    *("scheduler", "interval", "frequency", "monitor", "strict", "name"),
    "reduce_on_plateau",
)


def _scheduler_settings(scheduler: Any, monitor: str | None) -> dict[str, Any]:
    """Return Lightning's dict of a scheduler, with its defaults."""
    given = scheduler if isinstance(scheduler, dict) else {"scheduler": scheduler}
    for name in given:
        if name not in _SCHEDULER_KEYS:
            raise UnknownNameError("key of a scheduler", str(name), _SCHEDULER_KEYS)
    if "scheduler" not in given:
        raise ConfigError(
            "A scheduler's dict of configure_optimizers has no 'scheduler': it has "
            f"{', '.join(map(repr, given)) or 'nothing'}."
        )
    defaults = {"interval": "epoch", "frequency": 1, "monitor": monitor, "strict": True}
    settings: dict[str, Any] = {**defaults, **given}
    if settings["interval"] not in ("epoch", "step"):
        raise ConfigError(
            f"A scheduler has interval={settings['interval']!r}: use 'epoch' or 'step'."
        )
    every = settings["frequency"]
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(
            f"A scheduler has frequency={every!r}: use a whole number of 1 or more."
        )
    return settings


class Every(lr_scheduler.LRScheduler):
    """Steps another scheduler of torch at every `frequency`-th of its own steps."""

    def __init__(self, scheduler: Any, frequency: int) -> None:
        # Not the base's: it would count a first step, and set the rates.
        self.optimizer = scheduler.optimizer
        self.frequency = frequency
        self.last_epoch = 0
        self._schedulers = [scheduler]

    def step(self, epoch: int | None = None) -> None:
        """Count one step."""
        self.last_epoch += 1
        if self.last_epoch % self.frequency == 0:
            self._schedulers[0].step()

    def get_last_lr(self) -> list[Any]:
        """Return the rates of the parameter groups."""
        return self._schedulers[0].get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps so far, and the other scheduler's state."""
        own = {"last_epoch": self.last_epoch, "frequency": self.frequency}
        return {**own, "scheduler": self._schedulers[0].state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state."""
        self.last_epoch = state_dict["last_epoch"]
        self._schedulers[0].load_state_dict(dict(state_dict["scheduler"]))


class SteppedByFigure(Callback):
    """Steps torch's `ReduceLROnPlateau` with a metric of each epoch.

    ipufit takes over what the scheduler changes in the torch optimizer.

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
        own = _own_name(self.monitor)  # a validation's metric, under any name of it
        figure = self.monitor if own == self.monitor else f"val_{own}"
        value = logs.get(self.monitor, logs.get(figure))
        if value is not None:
            self.scheduler.step(float(value))
        elif self.strict:
            raise ConfigError(
                f"configure_optimizers has ReduceLROnPlateau with monitor="
                f"{self.monitor!r}, which is not in the logs of epoch {epoch}: "
                f"{', '.join(sorted(logs))}. Log it, validate in every epoch, or use "
                "one of these names."
            )

    @property
    def scheduler_state(self) -> dict[str, Any]:
        """Return plain values of the scheduler's state."""
        plain = (bool, int, float, str, list, type(None))
        state: dict[str, Any] = self.scheduler.state_dict()
        return {name: one for name, one in state.items() if isinstance(one, plain)}

    @scheduler_state.setter
    def scheduler_state(self, state: Mapping[str, Any]) -> None:
        self.scheduler.load_state_dict(dict(state))

    @property
    def rates(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.scheduler.optimizer.param_groups]

    @rates.setter
    def rates(self, rates: list[float]) -> None:
        for group, rate in zip(self.scheduler.optimizer.param_groups, rates):
            group["lr"] = rate
