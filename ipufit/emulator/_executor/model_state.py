# SPDX-License-Identifier: Apache-2.0
"""What an executor consists of, from its construction to what it says of itself."""

from __future__ import annotations

import abc
import datetime
from typing import Any

import torch
from torch import Tensor

from ipufit.emulator._device.attachment import Attachment
from ipufit.emulator._device.timings import CallTimes
from ipufit.emulator._executor.constraints import check_inference_options
from ipufit.emulator._layout.device_rng import DeviceRng
from ipufit.emulator._layout.replica_groups import GroupedParameters, ReplicaGroups
from ipufit.emulator._layout.target import Target
from ipufit.emulator._options.options import Options
from ipufit.emulator._program.anchors import Anchors, resolve_modes
from ipufit.emulator._program.args import ArgsParser, CallArguments
from ipufit.emulator._program.program import Program
from ipufit.emulator._update.optimizer_link import OptimizerLink
from ipufit.emulator.enums import MeanReductionStrategy, OutputMode
from ipufit.emulator.errors import createPoptorchError

NOT_COMPILED = "Model has not been compiled or has been destroyed."


class ExecutorState(abc.ABC):
    """What `PoplarExecutor` knows of itself.

    Args:
        model: The object that is traced.
        options: Frozen and cloned.
        training: Whether calls update the weights.
        poptorch_version: Kept for PopTorch's signature; unused.
        optimizer: Of a training model.
        user_model: The module whose weights are kept in step, if it is not `model`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options | None,
        training: bool,
        poptorch_version: str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        user_model: torch.nn.Module | None = None,
    ) -> None:
        if options and not isinstance(options, Options):
            raise createPoptorchError(
                f"Invalid type: 'options' is of type {type(options)}, expected "
                "poptorch.Options."
            )
        options = options or Options()
        options._freeze()
        self._options = options.clone()
        self._model = model
        self._user_model = user_model if user_model is not None else model
        self._training = training
        self._executable: Program | None = None  # lightning-graphcore reads it
        self._target: Target | None = None
        self._compiled_arguments: CallArguments | None = None
        self._compiled_rows: CallArguments | None = None
        self._compilation_time = datetime.timedelta()
        self._times: CallTimes | None = None
        self._tensor_names: list[str] = []
        self._anchors = Anchors()
        self._anchored: dict[str, Tensor] = {}
        self._host_weights: dict[str, Tensor] = {}
        self._grouped_parameters = GroupedParameters()
        self._replica_groups: dict[str, ReplicaGroups] = {}
        self._attachment: Attachment | None = None
        self._rng: DeviceRng | None = None
        self._rng_state: list[int] | None = None
        self._is_rng_state_stale = False
        if self._options.exists("random_seed"):
            self._rng_state = [self._options.random_seed]
        self._dirty_host_weights = False
        self._host_weights_version: Any = 0  # None: of a trainer that is gone
        self._optimizer_link: OptimizerLink | None = None
        self._parser = ArgsParser(model.forward)
        self._resolve_output_mode()
        if training:
            self._start_training(optimizer)
        else:
            check_inference_options(self._options)
        self._options._freeze()

    # Construction -------------------------------------------------------------

    def _resolve_output_mode(self) -> None:
        if self._options.defaultOutputMode():
            self._options.outputMode(
                OutputMode.Final if self._training else OutputMode.All
            )
        resolve_modes(self._options)

    @abc.abstractmethod
    def _start_training(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Link the optimiser and wrap the module."""

    def _use_running_mean_if_needed(self) -> None:
        running = MeanReductionStrategy.Running
        training = self._options.Training
        strategy = training.meanAccumulationAndReplicationReductionStrategy
        link = self._optimizer_link
        if link is None or not link.settings.uses_running_mean or strategy == running:
            return
        if self.isCompiled():
            raise ValueError(
                "An optimizer with a 16-bit accum_type needs "
                "MeanReductionStrategy.Running, but the executable is already compiled."
            )
        self._options._unfreeze()
        training.setMeanAccumulationAndReplicationReductionStrategy(running)
        self._options._freeze()

    # What it is ---------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """The user's module.

        Example:
            >>> from ipufit.emulator import trainingModel
            >>> module = torch.nn.Linear(2, 1)
            >>> trainingModel(module).model is module
            True
        """
        return self._user_model

    @property
    def options(self) -> Options:
        """The frozen options of this executor, a clone of those given.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inferenceModel(torch.nn.Linear(2, 1)).options.replication_factor
            1
        """
        return self._options

    def isCompiled(self) -> bool:
        """Whether there is an executable.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inferenceModel(torch.nn.Linear(2, 1)).isCompiled()
            False
        """
        return self._executable is not None

    def isAttachedToDevice(self) -> bool:
        """Whether it holds IPUs.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.compile(torch.ones(1, 2))
            >>> inference.isAttachedToDevice()
            True
        """
        return self._attachment is not None

    def _require_compiled(self) -> Program:
        if self._executable is None:
            raise createPoptorchError(NOT_COMPILED)
        return self._executable
