# SPDX-License-Identifier: Apache-2.0
"""What `Options` holds: values, sections, private attributes and their defaults."""

from __future__ import annotations

import logging
from typing import Any, Callable

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

logger = logging.getLogger("poptorch::python")

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
    """The storage under `Options`, which adds the setters."""

    replication_factor: int
    input_group_size: int
    input_cgt: CommGroupType
    broadcast_buffers: bool
    device_iterations: int
    log_dir: str
    max_repeat_logs: int
    auto_round_num_ipus: bool
    anchored_tensors: dict[str, list[Any]]
    output_mode: int
    output_return_period: int
    connection_type: int
    sync_pattern: int
    available_memory_proportion: dict[int, float]
    # Absent until set.
    model_name: str
    use_model: bool
    ipu_id: int
    ipu_version: int
    random_seed: int

    _popart: _PopartOptions
    _jit: _JitOptions
    _graphProcessing: _PrecisionOptions
    _training: _TrainingOptions
    _distributed: _DistributedOptions
    _tensor_locations: _TensorLocationOptions
    _execution_strategy: ExecutionStrategy
    _source_location_excludes: list[str]
    _progress_bar: Callable[[int, int], None]
    _relax_optimizer_checks: bool
    _show_compilation_progress_bar: bool
    _module_namescope_enabled: bool

    def __init__(self) -> None:
        popart = _PopartOptions()
        super().__init__(
            {
                "replication_factor": 1,
                "input_group_size": 1,
                "input_cgt": CommGroupType.Consecutive,
                "broadcast_buffers": True,
                "device_iterations": 1,
                "log_dir": ".",
                "max_repeat_logs": 4,
                "auto_round_num_ipus": False,
                "anchored_tensors": {},
                # Plain integers, as PopTorch stores these.
                "output_mode": OutputMode.Default.value,
                "output_return_period": 1,
                "connection_type": ConnectionType.Always.value,
                "sync_pattern": SyncPattern.Full.value,
                "available_memory_proportion": {},
            },
            _popart=popart,
            _jit=_JitOptions(),
            _graphProcessing=_PrecisionOptions(popart),
            _training=_TrainingOptions(popart),
            _distributed=_DistributedOptions(),
            _tensor_locations=_TensorLocationOptions(),
            _execution_strategy=PipelinedExecution(),
            _source_location_excludes=list(_LOCATION_EXCLUDES),
            _progress_bar=_log_compilation_progress,
            _relax_optimizer_checks=False,
            _show_compilation_progress_bar=True,
            _module_namescope_enabled=True,
        )

    @property
    def TensorLocations(self) -> _TensorLocationOptions:
        """Where tensors are kept.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().TensorLocations.numIOTiles(32)
        """
        return self._tensor_locations

    @property
    def Distributed(self) -> _DistributedOptions:
        """Which of how many processes this is.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.disable().processId
            0
        """
        return self._distributed

    @property
    def Jit(self) -> _JitOptions:
        """What is left of tracing with torch.jit.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Jit.traceModel(False)
        """
        return self._jit

    @property
    def Precision(self) -> _PrecisionOptions:
        """Rounding, partial sums and floating-point traps.

        Example:
            >>> from ipufit.emulator import Options
            >>> _ = Options().Precision.enableStochasticRounding(True)
        """
        return self._graphProcessing

    @property
    def Training(self) -> _TrainingOptions:
        """How gradients are accumulated and reduced.

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

    def _describe(self) -> list[str]:
        values = [f"{name}={value!r}" for name, value in self._values.items()]
        return values + [f"{name}={getattr(self, name)!r}" for name in _SECTIONS]
