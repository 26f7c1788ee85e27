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

__path__: list[str] = []
"""Makes the module a package for Python, which then asks `_install` for submodules."""


class PopartEnum(enum.Enum):
    """An enumeration of PopART's."""

    _value_: int

    def __int__(self) -> int:
        return self._value_

    __index__ = __int__


class AccumulateOuterFragmentSchedule(PopartEnum):
    """How operators of the weight update are scheduled across IPUs.

    Example:
        >>> int(AccumulateOuterFragmentSchedule.OverlapMemoryOptimized)
        3
    """

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class AutodiffStitchStrategy(PopartEnum):
    """Where the backward pass of a sub-graph gets values of the forward pass from."""

    RecomputeMinimal = 0
    RecomputeAllNonInputs = 1
    AddFwdOutputs = 2
    SafeAddFwdOutputs = 3


class BatchSerializationBatchSchedule(PopartEnum):
    """How the parts of a serialised batch are scheduled."""

    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class BatchSerializationMethod(PopartEnum):
    """How a batch is serialised."""

    UnrollDynamic = 0
    UnrollStatic = 1
    Loop = 2


class BatchSerializationTransformContext(PopartEnum):
    """When a batch is serialised: before or after gradients are added."""

    Fwd = 0
    Bwd = 1
    Forward = 0
    Backward = 1


class DeviceConnectionType(PopartEnum):
    """When a session attaches to a device."""

    Always = 0
    OnDemand = 1
    Never = 2


class GradientTensorTrackingMethod(PopartEnum):
    """Gradients that automatic loss scaling checks."""

    AllNonViewChangingGradientTensors = 0
    ConvAndMatmulGradients = 1
    GradientsOfUserSpecifiedTensors = 2


class Instrumentation(PopartEnum):
    """Part of a program in which hardware cycles are counted."""

    Outer = 0
    Inner = 1


class MeanReductionStrategy(PopartEnum):
    """When a mean over accumulated gradients is divided."""

    Running = 0
    Post = 1


class MergeVarUpdateType(PopartEnum):
    """Updates of weights that are merged."""

    Off = 0
    All = 1
    AutoLoose = 2
    AutoTight = 3


class PatternsLevel(PopartEnum):
    """The set of graph patterns that `_Popart.setPatterns` starts from."""

    NoPatterns = 0
    Minimal = 1
    Default = 2
    All = 3


class RecomputationType(PopartEnum):
    """Activations that the backward pass computes again."""

    NoRecompute = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class ReductionType(PopartEnum):
    """How values are reduced."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class SubgraphCopyingStrategy(PopartEnum):
    """When inputs and outputs of sub-graphs are copied."""

    OnEnterAndExit = 0
    JustInTime = 1


class SyncPattern(PopartEnum):
    """IPUs that wait for each other."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class SyntheticDataMode(PopartEnum):
    """Data of a device to which the host sends none."""

    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3


class VirtualGraphMode(PopartEnum):
    """Who places operators on IPUs."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3


__all__ = sorted(kind.__name__ for kind in PopartEnum.__subclasses__())

WHAT_IT_IS = (
    "popart is Graphcore's graph compiler, which the emulator doesn't contain: there "
    f"are only the enumerations that options of PopTorch take ({', '.join(__all__)}). "
    "What else a program does with PopART needs the Poplar SDK."
)


def __getattr__(name: str) -> object:
    """Raise an error that says what the module has, for any other name."""
    raise AttributeError(f"module 'popart' has no attribute {name!r}: {WHAT_IT_IS}")
