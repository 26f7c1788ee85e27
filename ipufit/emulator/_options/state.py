# SPDX-License-Identifier: Apache-2.0
"""Values and sections of `Options`, with their defaults."""

from __future__ import annotations

from typing import Any

from ipufit.emulator._ground.logging import logger
from ipufit.emulator._options.distributed import _DistributedOptions
from ipufit.emulator._options.popart import _PopartOptions
from ipufit.emulator._options.sections import (
    _JitOptions,
    _PrecisionOptions,
    _TrainingOptions,
)
from ipufit.emulator._options.storage import OptionsDict
from ipufit.emulator._options.strategies import ExecutionStrategy, PipelinedExecution
from ipufit.emulator._options.tensor_locations import _TensorLocationOptions
from ipufit.emulator.enums import CommGroupType, ConnectionType, OutputMode, SyncPattern

_LOCATION_EXCLUDES = (
    "install/poptorch",
    "site-packages/torch",
    "site-packages/poptorch",
)
_SECTIONS = (
    "Distributed",
    "Jit",
    "Precision",
    "TensorLocations",
    "Training",
    "_Popart",
)


def _log_compilation_progress(progress: int, total: int) -> None:
    logger.debug("Graph compilation: %d/%d", progress, total)


class OptionsState(OptionsDict):
    """Storage of `Options`, to which other classes add the setters."""

    # Absent until set.
    model_name: str
    use_model: bool
    ipu_id: int
    ipu_version: int
    random_seed: int

    def __init__(self) -> None:
        self.replication_factor = 1
        self.input_group_size = 1
        self.input_cgt = CommGroupType.Consecutive
        self.broadcast_buffers = True
        self.device_iterations = 1
        self.log_dir = "."
        self.max_repeat_logs = 4
        self.auto_round_num_ipus = False
        self.anchored_tensors: dict[str, list[Any]] = {}
        # Plain integers, as PopTorch stores these.
        self.output_mode = OutputMode.Default.value
        self.output_return_period = 1
        self.connection_type = ConnectionType.Always.value
        self.sync_pattern = SyncPattern.Full.value
        self.available_memory_proportion: dict[int, float] = {}

        self._popart = _PopartOptions()
        self._jit = _JitOptions()
        self._graphProcessing = _PrecisionOptions(self._popart)
        self._training = _TrainingOptions(self._popart)
        self._distributed = _DistributedOptions()
        self._tensor_locations = _TensorLocationOptions()
        self._execution_strategy: ExecutionStrategy = PipelinedExecution()
        self._source_location_excludes = list(_LOCATION_EXCLUDES)
        self._progress_bar = _log_compilation_progress
        self._relax_optimizer_checks = False
        self._show_compilation_progress_bar = True
        self._module_namescope_enabled = True
        super().__init__()

    @property
    def TensorLocations(self) -> _TensorLocationOptions:
        """Options for where tensors are kept.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().TensorLocations.numIOTiles(32)
        """
        return self._tensor_locations

    @property
    def Distributed(self) -> _DistributedOptions:
        """The index of this process, and the number of processes.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.disable().processId
            0
        """
        return self._distributed

    @property
    def Jit(self) -> _JitOptions:
        """Options for tracing with torch.jit, which are deprecated.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Jit.traceModel(False)
        """
        return self._jit

    @property
    def Precision(self) -> _PrecisionOptions:
        """Options for rounding, partial sums and floating-point traps.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Precision.enableStochasticRounding(True)
        """
        return self._graphProcessing

    @property
    def Training(self) -> _TrainingOptions:
        """Options for how gradients are accumulated and reduced.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Training.gradient_accumulation
            1
        """
        return self._training

    @property
    def _Popart(self) -> _PopartOptions:
        """Settings handed to PopART as they are."""
        return self._popart

    def _shown(self) -> dict[str, Any]:
        return {**self._values, **{name: getattr(self, name) for name in _SECTIONS}}
