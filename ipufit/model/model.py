# SPDX-License-Identifier: Apache-2.0
"""The class `IPUModel`: its parts, and the list of its methods.

A method that is a function of another file has its signature, docstring and code there.
"""

from __future__ import annotations

import copy
from typing import Any, Mapping, TypeVar

import torch

from ipufit.callbacks import History
from ipufit.config import IPUConfig
from ipufit.distributed import Processes, configure, get_process_info
from ipufit.engine import Executors, in_own_types
from ipufit.errors import ConfigError
from ipufit.optimizers import WeightAverage

from . import (
    batches,
    benchmarking,
    building,
    checking,
    compiling,
    copying,
    exporting,
    fitting,
    inference,
    inspecting,
    planning,
    saving,
    splitting,
    weights,
)
from .parts import CompileSettings, PastData, Runs

ModelT = TypeVar("ModelT", bound="IPUModel")


class IPUModel:
    """A torch module with Keras's `compile`, `fit`, `evaluate` and `predict`.

    It runs on IPUs through PopTorch, and anywhere else on `ipufit.emulator`.

    * `compile` says how to train and what to report.
    * `fit` trains, and gives the figures of each epoch.
    * `evaluate` gives loss and metrics over every sample.
    * `predict` gives the outputs, one row per sample.

    `copy.deepcopy(model)`, and `pickle`, give a model that goes on as this one would:
    with its weights, its config, the settings of `compile`, and the optimizer's state.
    It has no programs yet, and random numbers on its device begin anew.
    `copy.copy(model)` is another model of the same module, compiled alike.

    Args:
        module: Any module. Its weights are the ones trained: after `fit` they are in
            it, whatever device they were on. If `config` asks for weights of another
            type, a copy with such weights is trained instead: `model.module`. The
            module that was given stays as it was.
        config: Layout on IPUs; one IPU by default.
        in_place: Change the types of the module's own weights rather than those of a
            copy.

    Raises:
        ConfigError: `module` is no torch module, or `config` no `IPUConfig`; or the
            module can't be copied.
        UnknownNameError: `pipeline` names something else among submodules, or a
            pattern of `float32_modules` matches none.

    Example:
        >>> import torch
        >>> from ipufit import IPUConfig
        >>> x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
        >>> model = IPUModel(torch.nn.Linear(4, 3), IPUConfig(micro_batch_size=8))
        >>> model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])
        >>> history = model.fit(x, y, batch_size=32, epochs=2, verbose=0)
        >>> sorted(history.history)
        ['accuracy', 'loss']
        >>> model.predict(x, verbose=0).shape
        torch.Size([64, 3])
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: IPUConfig | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"module={module!r} is not a torch.nn.Module.")
        if config is not None and not isinstance(config, IPUConfig):
            raise ConfigError(f"config={config!r} is not an ipufit.IPUConfig.")
        self.config = self._given_config = config or IPUConfig()
        self.module, self._counterparts = in_own_types(
            module, self.config, in_place=in_place
        )
        self.history: History | None = None
        process = self.config.process
        if process != get_process_info():
            configure(process)  # for datasets that ask, and files
        self.processes = Processes(process)
        self._executors = Executors(self.module, self.config, self.processes)
        self._settings: CompileSettings | None = None
        self._runs = Runs()
        self._data = PastData()

    # Keras's methods.
    compile = compiling.compile
    fit = fitting.fit
    evaluate = inference.evaluate
    predict = inference.predict
    train_on_batch = batches.train_on_batch
    test_on_batch = batches.test_on_batch
    predict_on_batch = batches.predict_on_batch
    batch_plan = planning.batch_plan
    plan = planning.plan
    build = building.build
    check = checking.check
    benchmark = benchmarking.benchmark
    summary = inspecting.summary
    reset_metrics = compiling.reset_metrics

    # Weights.
    get_weights = weights.get_weights
    copied_weights = weights.copied_weights
    set_weights = weights.set_weights
    save_weights = weights.save_weights
    load_weights = weights.load_weights
    swap_weights = compiling.swap_weights

    # Checkpoints: weights and the optimiser's state, and in a callback the whole run.
    checkpoint = saving.checkpoint
    save = saving.save
    load = saving.load

    # A program for others.
    export = exporting.export

    # For callbacks of a run.
    gradients = inspecting.gradients

    def detach(self) -> None:
        """Give the IPUs back; the weights stay in `module`, the programs compiled."""
        self._executors.detach()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The `poptorch.optim` optimizer that trains; None before `compile`."""
        settings = self._settings
        return None if settings is None else settings.optimization.optimizer

    @property
    def has_lr_schedule(self) -> bool:
        """Whether a schedule sets the learning rates, so that callbacks must not."""
        settings = self._settings
        return settings is not None and settings.optimization.has_schedule

    @property
    def num_updates(self) -> int:
        """Weight updates made since `compile`."""
        settings = self._settings
        return 0 if settings is None else settings.optimization.num_updates

    @property
    def weight_average(self) -> WeightAverage | None:
        """The average of the weights (`ema_momentum`); None for none."""
        return None if self._settings is None else self._settings.average

    @property
    def stop_training(self) -> bool:
        """Keras's flag: a callback sets it to end `fit` after this call."""
        return self._runs.fit.is_stopping

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if value:
            self._runs.fit.stop("model.stop_training was set")
        else:
            self._runs.fit.stop_reason = None

    @property
    def stop_evaluating(self) -> bool:
        """Keras's flag: a callback sets it to end the evaluation after this call."""
        return self._runs.innermost.stop_evaluating

    @stop_evaluating.setter
    def stop_evaluating(self, value: bool) -> None:
        self._runs.innermost.stop_evaluating = value

    @property
    def stop_predicting(self) -> bool:
        """Keras's flag: a callback sets it to end `predict` after this call."""
        return self._runs.innermost.stop_predicting

    @stop_predicting.setter
    def stop_predicting(self, value: bool) -> None:
        self._runs.innermost.stop_predicting = value

    def __repr__(self) -> str:
        """Module, layout, and the settings of `compile`."""
        return inspecting.described(self)

    # For `IPUConfig.resolved`.
    _resolved = splitting.resolved

    # Copies: a model is made anew from what `copying` takes of this one.

    def __copy__(self: ModelT) -> ModelT:
        other = type(self).__new__(type(self))
        IPUModel.__setstate__(other, {**copying.state_of(self), "trained": None})
        return other

    def __deepcopy__(self: ModelT, memo: dict[int, Any]) -> ModelT:
        other = memo[id(self)] = type(self).__new__(type(self))
        IPUModel.__setstate__(other, copy.deepcopy(copying.state_of(self), memo))
        return other

    def __getstate__(self) -> dict[str, Any]:
        state = copying.state_of(self)
        copying.check_picklable(state)
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        IPUModel.__init__(self, state["module"], state["config"])
        copying.restore(self, state)

    # help() lists methods in the order of these names, and the others after them.
    _fields = tuple(name for name in vars() if not name.startswith("_"))
