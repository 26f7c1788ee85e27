# SPDX-License-Identifier: Apache-2.0
"""PopTorch's enumerations, with PopTorch 3.4's values.

All are integers except `MatMulSerializationMode` and `OverlapMode`, whose values
are strings.
"""

from __future__ import annotations

import enum


class MeanReductionStrategy(enum.IntEnum):
    """When the mean of accumulated gradients is divided by their number.

    - `Running`: while accumulating, so that sums can't overflow.
    - `Post`: once, after the sum.
    - `PostAndLoss`: in part before and in part after. Deprecated: PopART 3.4
      refuses it when compiling.

    Example:
        >>> from ipufit.emulator import MeanReductionStrategy
        >>> MeanReductionStrategy.Post.value
        1
    """

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(enum.IntEnum):
    """How a `DataLoader` fetches its batches.

    - `Sync`: in this process.
    - `Async`: in a background process.
    - `AsyncRebatched`: in a background process that also puts the workers'
      partial batches together again.

    Example:
        >>> from ipufit.emulator import DataLoaderMode
        >>> DataLoaderMode.Async.value
        1
    """

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(enum.IntEnum):
    """How a dataset travels to the background process of an asynchronous loader.

    - `SharedMemory`: spawn, with the dataset in shared memory.
    - `FileSystem`: spawn, with the dataset pickled to a file.
    - `Fork`: inherited by forking.
    - `ForkServer`: through a fork server.

    Example:
        >>> from ipufit.emulator import SharingStrategy
        >>> SharingStrategy.ForkServer.value
        3
    """

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class OutputMode(enum.IntEnum):
    """Which micro-batches' outputs a call returns.

    - `Final`: the last micro-batch.
    - `EveryN`: every Nth micro-batch.
    - `All`: all micro-batches.
    - `Sum`: all, as the elementwise sum of their outputs.
    - `Default`: `Final` when training, `All` for inference.

    Example:
        >>> from ipufit.emulator import OutputMode
        >>> OutputMode.All.value
        2
    """

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class ConnectionType(enum.IntEnum):
    """When a model attaches to its device.

    - `Always`: before compiling.
    - `OnDemand`: after compiling, which succeeds even if no IPU is free then.
    - `Never`: not at all; the model can be compiled only.

    Example:
        >>> from ipufit.emulator import ConnectionType
        >>> ConnectionType.Never.value
        2
    """

    Always = 0
    OnDemand = 1
    Never = 2


class HalfFloatCastingBehavior(enum.IntEnum):
    """Deprecated types for mixed half and float operands, which always become float.

    Example:
        >>> from ipufit.emulator import HalfFloatCastingBehavior
        >>> HalfFloatCastingBehavior.Default.value
        2
    """

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class ReductionType(enum.IntEnum):
    """How gradients of micro-batches and replicas are combined.

    `NoReduction` isn't accepted for gradients.

    Example:
        >>> from ipufit.emulator import ReductionType
        >>> ReductionType.Mean.value
        1
    """

    Sum = 0
    Mean = 1
    NoReduction = 2


class SyncPattern(enum.IntEnum):
    """Which IPUs wait for each other around host transfers; numbers don't change.

    - `Full`: all of them.
    - `SinglePipeline`: each on its own.
    - `ReplicaAndLadder`: groups of replicas in turn.

    Example:
        >>> from ipufit.emulator import SyncPattern
        >>> SyncPattern.ReplicaAndLadder.value
        2
    """

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class MatMulSerializationMode(enum.Enum):
    """The dimension along which a product (m x n) @ (n x p) is split.

    - `InputChannels`: m.
    - `ReducingDim`: n.
    - `OutputChannels`: p.
    - `Disabled`: none.

    Example:
        >>> from ipufit.emulator import MatMulSerializationMode
        >>> MatMulSerializationMode.Disabled.value
        'none'
    """

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class Liveness(enum.IntEnum):
    """When a phase's tensors leave the chip.

    - `AlwaysLive`: never.
    - `OffChipAfterFwd`: after the forward pass.
    - `OffChipAfterFwdNoOverlap`: the same, without loads overlapping stores.
    - `OffChipAfterEachPhase`: after each phase.

    Example:
        >>> from ipufit.emulator import Liveness
        >>> Liveness.OffChipAfterEachPhase.value
        3
    """

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class OverlapMode(enum.Enum):
    """How far a host transfer runs ahead of the computation.

    - `NoOverlap`: on demand.
    - `OverlapAccumulationLoop`: within the accumulation loop.
    - `OverlapDeviceIterationLoop`: across device iterations too.

    Example:
        >>> from ipufit.emulator import OverlapMode
        >>> OverlapMode.NoOverlap.value
        'no_overlap'
    """

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


class AutoStage(enum.IntEnum):
    """How blocks get their stage when none is given.

    - `SameAsIpu`: the number of their IPU.
    - `AutoIncrement`: the next number for each new block.

    Example:
        >>> from ipufit.emulator import AutoStage
        >>> AutoStage.AutoIncrement.value
        1
    """

    SameAsIpu = 0
    AutoIncrement = 1


class MultiConvPlanType(enum.IntEnum):
    """Whether the convolutions of a `MultiConv` run side by side or in turn.

    Example:
        >>> from ipufit.emulator import MultiConvPlanType
        >>> MultiConvPlanType.Serial.value
        1
    """

    Parallel = 0
    Serial = 1


class CommGroupType(enum.IntEnum):
    """How R replicas are put into groups of k.

    - `All`: one group.
    - `Consecutive`: runs of k replicas.
    - `Orthogonal`: replicas R / k apart.
    - `NoGrouping`: each replica alone.

    Example:
        >>> from ipufit.emulator import CommGroupType
        >>> CommGroupType.NoGrouping.value
        3
    """

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(enum.IntEnum):
    """Which replicas' copies of a grouped weight are read back.

    - `OnePerGroup`: the first replica of each group.
    - `AllReplicas`: every replica. Its value is 2; PopART's 1 has no name here.

    Example:
        >>> from ipufit.emulator import VariableRetrievalMode
        >>> VariableRetrievalMode.AllReplicas.value
        2
    """

    OnePerGroup = 0
    AllReplicas = 2
