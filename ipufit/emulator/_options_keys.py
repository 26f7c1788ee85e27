# SPDX-License-Identifier: Apache-2.0
"""Names of the settings that PopTorch's backend takes, and their check."""

from __future__ import annotations

from typing import Any, Collection, Mapping

from . import _popart
from ._logging import logger
from .errors import Error

_NAMES = {
    "bool": """
        auto_round_num_ipus use_model serial_phases_execution separate_backward_phase
        broadcast_buffers enableExplicitIR enableInplaceAmbiguityChecking
        enableLoadAndOffloadRNGState
        batchSerializationSettings.concatOnVirtualGraphChange
        batchSerializationSettings.concatOnExecutionPhaseChange
        batchSerializationSettings.concatOnPipelineStageChange
        strictOpVersions opxAliasChecking opxModifyChecking dotOpNames
        exportPoplarComputationGraph exportPoplarVertexGraph separateCallOpPdfs
        enableOutlining enableOutliningCopyCostPruning rearrangeAnchorsOnHost
        rearrangeStreamsOnHost enablePrefetchDatastreams enableNonStableSoftmax
        enableReplicatedGraphs enableGradientAccumulation
        instrumentWithHardwareCycleCounter enablePipelining
        disableGradAccumulationTensorStreams disableOptimizerStateTensorStreams
        compileEngine constantWeights enableEngineCaching enableMergeExchange
        enableFloatingPointChecks enableStochasticRounding ensureFp32LossScaleTensor
        explicitRecomputation enableExplicitMainLoops useHostCopyOps aliasZeroCopy
        delayVarUpdates enableFullyConnectedPass enableSerializedMatmuls
        enableStableNorm decomposeGradSum enableDistributedReplicatedGraphs
        groupHostSync
        automaticLossScalingSettings.enabled enableSupportedDataTypeCasting
        groupNormStridedChannelGrouping scheduleNonWeightUpdateGradientConsumersEarly
        replicatedCollectivesSettings.prepareScheduleForMergingCollectives
        replicatedCollectivesSettings.mergeAllReduceCollectives
        """,
    "uint": """
        device_iterations num_distributed_processes distributed_process_id ipu_version
        ipu_id gradient_accumulation output_return_period replication_factor
        input_group_size input_cgt execution_mode tensors_liveness output_mode
        connection_type accumulateOuterFragmentSettings.schedule max_repeat_logs
        accumulation_and_replication_reduction_type sync_pattern random_seed
        executionPhaseSettings.phases executionPhaseSettings.stages
        batchSerializationSettings.factor firstDotOp finalDotOp numIOTiles
        mergeVarUpdateMemThreshold looseThresholdAtPeak accumulationFactor
        swapLimitScheduler globalReplicationFactor globalReplicaOffset
        defaultBufferingDepth defaultPrefetchBufferingDepth compilationProgressTotal
        transitiveClosureOptimizationThreshold automaticLossScalingSettings.updatePeriod
        autodiffSettings.stitchStrategy batchSerializationSettings.transformContext
        batchSerializationSettings.method batchSerializationSettings.batchSchedule
        autoRecomputation mergeVarUpdate virtualGraphMode syntheticDataMode
        subgraphCopyingStrategy accumulationAndReplicationReductionType
        meanAccumulationAndReplicationReductionStrategy
        automaticLossScalingSettings.gradientTensorTrackingMethod
        """,
    "float": """
        outlineSequenceBreakCost outlineThreshold timeLimitScheduler
        automaticLossScalingSettings.thresholdUpperCountProportion
        automaticLossScalingSettings.binEdgeLocation
        """,
    "str": """
        log_dir saveInitializersToFile model_name logDir cachePath partialsTypeMatMuls
        customCodeletCompileFlags serializedPoprithmsShiftGraphsDir kahnTieBreaker
        """,
    "list": """
        accumulateOuterFragmentSettings.excludedVirtualGraphs dotChecks
        hardwareInstrumentations customCodelets updatableNamedBuffers
        """,
    "dict": """
        engineOptions reportOptions convolutionOptions matmulOptions lstmOptions
        gclOptions location_activation location_weight location_optimizer
        location_accumulator
        """,
}
KNOWN_POPART_OPTIONS: Mapping[str, frozenset[str]] = {
    kind: frozenset(names.split()) for kind, names in _NAMES.items()
}
"""Names that the backend accepts, by the kind of their Python value."""

ENUMERATIONS: Mapping[str, type[_popart.PopartEnum]] = {
    "accumulateOuterFragmentSettings.schedule": _popart.AccumulateOuterFragmentSchedule,
    "accumulationAndReplicationReductionType": _popart.ReductionType,
    "accumulation_and_replication_reduction_type": _popart.ReductionType,
    "autoRecomputation": _popart.RecomputationType,
    "autodiffSettings.stitchStrategy": _popart.AutodiffStitchStrategy,
    "automaticLossScalingSettings.gradientTensorTrackingMethod": (
        _popart.GradientTensorTrackingMethod
    ),
    "batchSerializationSettings.batchSchedule": _popart.BatchSerializationBatchSchedule,
    "batchSerializationSettings.method": _popart.BatchSerializationMethod,
    "batchSerializationSettings.transformContext": (
        _popart.BatchSerializationTransformContext
    ),
    "connection_type": _popart.DeviceConnectionType,
    "hardwareInstrumentations": _popart.Instrumentation,
    "meanAccumulationAndReplicationReductionStrategy": _popart.MeanReductionStrategy,
    "mergeVarUpdate": _popart.MergeVarUpdateType,
    "subgraphCopyingStrategy": _popart.SubgraphCopyingStrategy,
    "sync_pattern": _popart.SyncPattern,
    "syntheticDataMode": _popart.SyntheticDataMode,
    "virtualGraphMode": _popart.VirtualGraphMode,
}
"""Enumerations of PopART that the numbers of some settings belong to."""


def validate_popart_options(options_dict: Mapping[str, Any]) -> None:
    """Check settings as PopTorch's backend does before compiling, and log them.

    A setting is looked up among the settings of its value's type, so a value of another
    type makes a known name unknown. Empty containers are skipped: they set nothing.
    Settings are logged at level DEBUG.

    Args:
        options_dict: Settings by name, from `Options.toDict`.

    Raises:
        Error: If a setting is unknown, out of range, or of a type that the
            backend doesn't take.

    Example:
        >>> from ipufit.emulator import Options, OutputMode
        >>> options = Options().outputMode(OutputMode.All)
        >>> validate_popart_options(options.toDict())
        >>> _ = options._Popart.set("enableOutlinning", True)
        >>> validate_popart_options(options.toDict())
        Traceback (most recent call last):
        ...
        ipufit.emulator.errors.Error: 'poptorch_cpp_error': Unknown bool option ...
    """
    for key, value in options_dict.items():
        if key in ("anchored_tensors", "patterns_level") or (
            key == "compilation_progress_bar_fn" and callable(value)
        ):
            continue
        if isinstance(value, dict):
            if key == "available_memory_proportion":
                for ipu, proportion in value.items():
                    if not isinstance(proportion, (int, float)):
                        raise _backend_error(
                            f"Unknown value type {type(proportion).__name__} for the "
                            f"memory proportion of IPU{ipu}: use a float."
                        )
            else:
                _check_elements(key, value.values())
                if key != "patterns":
                    _check_known("dict", key, value)
                elif "patterns_level" not in options_dict:
                    raise _backend_error(
                        "Option patterns needs patterns_level: use "
                        "`_Popart.setPatterns`."
                    )
            for name, item in value.items():
                logger.debug(
                    "poptorch.Options set %s[%s] to %s", key, name, _text(item)
                )
        elif isinstance(value, (list, tuple, set)):
            _check_elements(key, value)
            _check_known("list", key, value)
            for item in value:
                _check_range(key, item)
                logger.debug("poptorch.Options added %s to %s", _text(item), key)
        else:
            # `bool` comes before `int`, whose subclass it is.
            kinds = {bool: "bool", float: "float", int: "uint", str: "str"}
            kind = next((kinds[k] for k in kinds if isinstance(value, k)), None)
            if kind is None:
                raise _backend_error(
                    f"Unknown value type {type(value).__name__} for option {key}: use "
                    "a bool, int, float, str, or a list or dict of them."
                )
            _check_known(kind, key, [value])
            _check_range(key, value)
            if kind == "uint" and not 0 <= value < 2**64:
                raise _backend_error(
                    f"Option {key} is {value}, and must be an integer of 64 bits "
                    "without a sign."
                )
            logger.debug("poptorch.Options set %s to value %s", key, _text(value))


def _backend_error(message: str) -> Error:
    return Error(message, type="poptorch_cpp_error")


def _text(value: Any) -> str:
    """Format a value as C++ does: `true`, and enumerations as numbers."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, int) else str(value)


def _check_known(kind: str, key: str, values: Collection[Any]) -> None:
    """Refuse an unknown setting, unless it sets nothing."""
    if key in KNOWN_POPART_OPTIONS[kind] or not values:
        return
    homes = [other for other, keys in KNOWN_POPART_OPTIONS.items() if key in keys]
    hint = f" It takes a {homes[0]}." if homes else " Check its spelling."
    raise _backend_error(f"Unknown {kind} option {key}.{hint}")


def _check_range(key: str, value: Any) -> None:
    enumeration = ENUMERATIONS.get(key)
    if enumeration is None:
        return
    names = {str(int(member)): member.name for member in enumeration}
    if _text(value) not in names:
        known = ", ".join(f"{number} ({name})" for number, name in names.items())
        raise _backend_error(
            f"Value for {enumeration.__name__} out of range: option {key} = "
            f"{_text(value)}, and PopART knows {known}."
        )


def _check_elements(key: str, values: Any) -> None:
    for value in values:
        if not isinstance(value, (str, int)):
            raise _backend_error(
                f"Unknown value type {type(value).__name__} inside option {key}: "
                "use str or int."
            )
