# SPDX-License-Identifier: Apache-2.0
"""The emulator's `popart`: the enumerations that options of PopTorch take.

Programs written for PopTorch use PopART for these alone, as in
`options._Popart.set("autoRecomputation", int(popart.RecomputationType.Pipeline))`.
Members and values are PopART 3.4's (graphcore/popart, `sessionoptions.hpp`,
`devicemanager.hpp`, `op.hpp`, `patterns.hpp` and `popart.cpp` of its Python bindings).
Like those of its compiled module, the members aren't ints.
"""

from __future__ import annotations

import enum
from typing import Any

__path__: list[str] = []
"""Makes the module a package for Python, which then asks `_install` for submodules."""


class PopartEnum(enum.Enum):
    """Base of the enumerations of PopART."""

    _value_: int

    def __int__(self) -> int:
        return self._value_

    __index__ = __int__


class BatchSerializationTransformContext(PopartEnum):
    """When a batch is serialised: before or after gradients are added."""

    Fwd = 0
    Bwd = 1
    Forward = 0
    Backward = 1


_MEMBERS = {
    # How operators of the weight update are scheduled across IPUs.
    "AccumulateOuterFragmentSchedule": (
        "Scheduler Serial OverlapCycleOptimized OverlapMemoryOptimized"
    ),
    # Where the backward pass of a sub-graph gets values of the forward pass from.
    "AutodiffStitchStrategy": (
        "RecomputeMinimal RecomputeAllNonInputs AddFwdOutputs SafeAddFwdOutputs"
    ),
    # How the parts of a serialised batch are scheduled.
    "BatchSerializationBatchSchedule": (
        "Scheduler Isomorphic OverlapOnIo OverlapOnCompute"
    ),
    # How a batch is serialised.
    "BatchSerializationMethod": "UnrollDynamic UnrollStatic Loop",
    # When a session attaches to a device.
    "DeviceConnectionType": "Always OnDemand Never",
    # Gradients that automatic loss scaling checks.
    "GradientTensorTrackingMethod": (
        "AllNonViewChangingGradientTensors ConvAndMatmulGradients "
        "GradientsOfUserSpecifiedTensors"
    ),
    # Part of a program in which hardware cycles are counted.
    "Instrumentation": "Outer Inner",
    # When a mean over accumulated gradients is divided.
    "MeanReductionStrategy": "Running Post",
    # Updates of weights that are merged.
    "MergeVarUpdateType": "Off All AutoLoose AutoTight",
    # The set of graph patterns that `_Popart.setPatterns` starts from.
    "PatternsLevel": "NoPatterns Minimal Default All",
    # Activations that the backward pass computes again.
    "RecomputationType": "NoRecompute Standard NormOnly Pipeline RecomputeAll",
    # How values are reduced.
    "ReductionType": "Sum Mean NoReduction",
    # When inputs and outputs of sub-graphs are copied.
    "SubgraphCopyingStrategy": "OnEnterAndExit JustInTime",
    # IPUs that wait for each other.
    "SyncPattern": "Full SinglePipeline ReplicaAndLadder",
    # Data of a device to which the host sends none.
    "SyntheticDataMode": "Off Zeros RandomNormal RandomUniform",
    # Who places operators on IPUs.
    "VirtualGraphMode": "Off Manual Auto ExecutionPhases",
}
"""Members of the other enumerations, which count from 0."""

_make: Any = PopartEnum
for _name, _members in _MEMBERS.items():
    globals()[_name] = _make(_name, _members, start=0, module=__name__)

__all__ = sorted(kind.__name__ for kind in PopartEnum.__subclasses__())

WHAT_IT_IS = (
    "popart is Graphcore's graph compiler, which the emulator doesn't contain: there "
    f"are only the enumerations that options of PopTorch take ({', '.join(__all__)}). "
    "What else a program does with PopART needs the Poplar SDK."
)


def __getattr__(name: str) -> Any:
    """Raise an error that lists the names of the module."""
    raise AttributeError(f"module 'popart' has no attribute {name!r}: {WHAT_IT_IS}")
