# SPDX-License-Identifier: Apache-2.0
"""What the emulator makes of PopTorch's names, where it isn't simply the same.

Patterns are those of `fnmatch`; the last one that matches a name counts. What is
missing is in `differences.py`.
"""

EXACT = "exact"
APPROXIMATED = "approximated"
NO_EFFECT = "no effect"
MISSING = "missing"

LEGEND = {
    EXACT: "does what PopTorch does, errors included",
    APPROXIMATED: "does it in another way; the remark says how",
    NO_EFFECT: "is checked and kept as in PopTorch, and changes nothing on a host",
    MISSING: "isn't there: `AttributeError`",
}

REMARKS = {
    # Models
    "PoplarExecutor.__call__": (
        APPROXIMATED,
        "float32 sums are made in another order than on an IPU; random numbers come "
        "from torch's generator",
    ),
    "PoplarExecutor.compile": (APPROXIMATED, "compiling is tracing: nothing is built"),
    "PoplarExecutor.compilationTime": (APPROXIMATED, "the time to trace and check"),
    "PoplarExecutor.compileAndExport": (APPROXIMATED, "a file of the emulator's own"),
    "PoplarExecutor.save": (APPROXIMATED, "a file of the emulator's own"),
    "PoplarExecutor.loadExecutable": (APPROXIMATED, "reads the emulator's own files"),
    "AsynchronousDataAccessor": (
        APPROXIMATED,
        "`miss_sleep_time_in_ms` changes nothing: its process sleeps until a slot is "
        "free",
    ),
    "load": (APPROXIMATED, "reads the emulator's own files"),
    "importPoptorchMetadataFromFile": (APPROXIMATED, "of the emulator's own files"),
    "PoplarExecutor.cycleCount": (
        APPROXIMATED,
        "this machine's time in an IPU's clock",
    ),
    "PoplarExecutor.getPerfCounters": (APPROXIMATED, "this machine's times"),
    "PoplarExecutor.get*Latency": (APPROXIMATED, "this machine's times"),
    "PoplarExecutor.getTensorNames": (
        APPROXIMATED,
        "values of the traced program; PopART's own operators there are none",
    ),
    "PoplarExecutor.rng_state": (APPROXIMATED, "the state of torch's generator"),
    # Options
    "Options.anchorTensor": (
        APPROXIMATED,
        "of the names that `getTensorNames` lists, gradients and updated weights",
    ),
    "Options.appendToLocationExcludes": (NO_EFFECT, ""),
    "Options.enableExecutableCaching": (NO_EFFECT, "nothing is cached, and it says so"),
    "Options.enableProfiling": (NO_EFFECT, "no reports are written"),
    "Options.enableStableNorm": (NO_EFFECT, "normalisation is torch's"),
    "Options.enableSyntheticData": (
        APPROXIMATED,
        "inputs, outputs and weights stay on their side; outputs are of no use",
    ),
    "Options.logCycleCount": (APPROXIMATED, "see `PoplarExecutor.cycleCount`"),
    "Options.logDir": (NO_EFFECT, ""),
    "Options.maxRepeatLogs": (NO_EFFECT, ""),
    "Options.modelName": (NO_EFFECT, ""),
    "Options.randomSeed": (APPROXIMATED, "seeds torch's generator"),
    "Options.setAvailableMemoryProportion": (NO_EFFECT, "the range is checked"),
    "Options.showCompilationProgressBar": (
        NO_EFFECT,
        "there is no bar to show, but `compilationTime` asks for it",
    ),
    "Options.sourceLocationExcludes": (NO_EFFECT, ""),
    "Options.syncPattern": (NO_EFFECT, ""),
    "Options.useIpuModel": (APPROXIMATED, "the same computation, without a pod"),
    "Options.useOfflineIpuTarget": (APPROXIMATED, "no version makes a difference"),
    "Options.Jit.traceModel": (NO_EFFECT, "in PopTorch too"),
    "registerGeometricCustomArgParsers": (
        APPROXIMATED,
        "not called when the emulator is imported",
    ),
    "CPU.execute": (APPROXIMATED, "the emulator itself doesn't call it"),
    "CPU.registerPersistentData": (
        APPROXIMATED,
        "the emulator itself doesn't call it",
    ),
    "Options.Training.setAutomaticLossScaling": (
        APPROXIMATED,
        "counts the gradients that an update takes; ends at 2**15",
    ),
    "Options.Precision.enableFloatingPointExceptions": (
        APPROXIMATED,
        "checked after each call of torch, and at the weights' gradients",
    ),
    "Options.Precision.enableStochasticRounding": (
        APPROXIMATED,
        "float16 results are rounded at random, with torch's random numbers",
    ),
    "Options.Precision.halfFloatCasting": (NO_EFFECT, "in PopTorch too"),
    "Options.Precision.runningStatisticsAlwaysFloat": (NO_EFFECT, "in PopTorch too"),
    "Options.Precision.setPartialsType": (NO_EFFECT, "partial sums are float32"),
    "Options.TensorLocations.numIOTiles": (NO_EFFECT, "overlapped I/O asks for it"),
    "Options.TensorLocations.set?*Location": (NO_EFFECT, ""),
    "Options.Training.setConvolutionDithering": (NO_EFFECT, ""),
    "Options._Popart.set*": (NO_EFFECT, "what PopART refuses is refused"),
    "TensorLocationSettings.*": (NO_EFFECT, ""),
    "TensorLocationSettings.[!mu]*": (EXACT, ""),
    "TensorLocationSettings.update": (EXACT, ""),
    # Strategies
    "*PhasedExecution.useSeparateBackwardPhase": (NO_EFFECT, ""),
    "*PhasedExecution.setTensorsLiveness": (NO_EFFECT, ""),
    "*PhasedExecution.sendTensorsOffChipAfterFwd": (NO_EFFECT, ""),
    # Operations
    "Attribute*": (NO_EFFECT, ""),
    "MultiConv*": (NO_EFFECT, "one convolution after the other"),
    "MultiConv": (NO_EFFECT, "one convolution after the other; its rules are checked"),
    "ctc_beam_search_decoder": (
        APPROXIMATED,
        "a plain prefix beam search, where PopTorch has nothing to compare with",
    ),
    "custom_op": (
        APPROXIMATED,
        "those that PopTorch has itself; for a user's C++ `register_custom_op` names a "
        "stand-in",
    ),
    "fps": (APPROXIMATED, "a random start is torch's"),
    "nop": (NO_EFFECT, "the identity"),
    "recomputationCheckpoint": (NO_EFFECT, "the identity"),
    "serializedMatMul": (NO_EFFECT, "the product as a whole"),
    "set_available_memory": (NO_EFFECT, "the identity"),
    "set_overlap_for_*": (NO_EFFECT, "the identity; its rules are checked"),
    # The rest
    "getIpuTensorId": (APPROXIMATED, "the emulator's own numbers"),
    "ipuHardwareIsAvailable": (APPROXIMATED, "the emulated pod counts as hardware"),
    "ipuHardwareVersion": (APPROXIMATED, "2, that of a Mk2"),
    "logger": (APPROXIMATED, "says what the backend says too, as far as there is one"),
    "optim.logger": (APPROXIMATED, "says what the backend says too, see `logger`"),
    "poptorch_core": (APPROXIMATED, "errors, `_validateOptions` and a few more names"),
    "profiling*": (NO_EFFECT, "`libpvti` records nothing"),
    "setLogLevel": (APPROXIMATED, "traces and dumps of a backend there are none"),
    "HalfFloatCastingBehavior": (NO_EFFECT, "in PopTorch too"),
    "Liveness": (NO_EFFECT, ""),
    "MatMulSerializationMode": (NO_EFFECT, ""),
    "MultiConvPlanType": (NO_EFFECT, ""),
    "OverlapMode": (NO_EFFECT, ""),
    "SyncPattern": (NO_EFFECT, ""),
}
