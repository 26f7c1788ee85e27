# SPDX-License-Identifier: Apache-2.0
"""`IPUConfig`: how a model is laid out on IPUs, as one frozen value.

Options of PopTorch for training and for inference are made from it. You can pass
`poptorch.Options` of your own for more, and they win.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Mapping, Sequence

import torch

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan, derive_plan
from ipufit.distributed import ProcessInfo
from ipufit.errors import ConfigError

from .checks import (
    check_fields,
    check_num_ipus,
    check_process,
    memory_proportions,
)
from .pipeline import check_pipeline, has_stages, stage_ipu, stage_names, strategy_of
from .processes import new_options, remembered_process, replicas_for, set_process


@dataclass(frozen=True)
class IPUConfig:
    """The layout of a model on IPUs, or on the emulator.

    Args:
        micro_batch_size: Samples of one forward pass on one replica; derived from
            `batch_size` if left open.
        gradient_accumulation: Micro-batches per weight update; derived likewise.
        replicas: Copies of the model in each process, each with samples of its own; by
            default the launcher's (`ipufit launch --replicas`, PopRun), or else 1.
        device_iterations: Weight updates per call: Keras's `steps_per_execution`.
        inference_iterations: Forward passes per call of `evaluate`, `predict` and
            validation: `device_iterations` by default. More of them make fewer, larger
            calls, which changes no figure; the last call is padded to as many.
        pipeline: The stages of the model, in the order of the data, one IPU each:
            names of the model's `poptorch.Block`s or of its submodules, sequences of
            such names, or `poptorch.Stage`s; or a ready PopTorch strategy. None for a
            model on one IPU, or one that begins `poptorch.Block(ipu_id=...)`s.
        execution: `"pipelined"` keeps all stages busy, `"sharded"` runs one after
            the other.
        loss_block: The block that the loss joins, and all else that ipufit adds. By
            default the last of `pipeline`, or the last block that the model begins
            with `poptorch.Block`.
        precision: `"float32"`, or `"float16"` for weights and activations; figures
            are summed in float32 all the same.
        offload_optimizer: Keep the optimiser's state off the chip.
        available_memory_proportion: Share of each IPU's memory, 0 to 1, for the
            temporary data of convolutions and matrix products: one number, or one
            per IPU.
        seed: Seed of the devices' random numbers and of shuffling. Several processes
            without one shuffle by a seed that process 0 draws.
        process_id: Number of this process, from 0, where no launcher that ipufit
            knows has set it; with `num_processes`.
        num_processes: Number of processes that train together.
        num_workers: Processes that load map-style and iterable data; 0 for none.
        loader_mode: `"sync"` loads in this process, `"async"` in one beside it while
            the device computes, `"async_rebatched"` joins its workers' incomplete
            batches (`poptorch.DataLoaderMode`). Map-style data only.
        profile_dir: Write PopVision reports of training here.
        training_options: Your own options for training. They are cloned, and win over
            this config.
        inference_options: Your own options for `evaluate` and `predict`.

    Raises:
        ConfigError: A value is out of range.

    Example:
        >>> config = IPUConfig(micro_batch_size=40, device_iterations=10)
        >>> config.training_plan(batch_size=400).gradient_accumulation
        10
    """

    micro_batch_size: int | None = None
    gradient_accumulation: int | None = None
    replicas: int | None = None
    device_iterations: int = 1
    inference_iterations: int | None = None
    pipeline: Any = None
    execution: str = "pipelined"
    loss_block: str | None = None
    precision: str = "float32"
    offload_optimizer: bool = False
    available_memory_proportion: float | Sequence[float] | None = None
    seed: int | None = None
    process_id: int | None = None
    num_processes: int | None = None
    num_workers: int = 0
    loader_mode: str = "sync"
    profile_dir: str | None = None
    training_options: poptorch.Options | None = None
    inference_options: poptorch.Options | None = None

    def __post_init__(self) -> None:
        check_fields(vars(self))
        check_process(self.process_id, self.num_processes)
        check_pipeline(self.pipeline)
        self._check_num_ipus()
        memory_proportions(self.available_memory_proportion, self.num_stages)
        for name in ("training_options", "inference_options"):
            own = getattr(self, name)
            if own is not None:
                object.__setattr__(self, name, own.clone())  # frozen, like all the rest

    def __repr__(self) -> str:
        """The class, and the fields that aren't at their defaults."""
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _check_num_ipus(self) -> None:
        """Refuse more IPUs than one process can have, as far as is known now."""
        has_own = self.training_options is not None
        if has_own and self.inference_options is not None:
            return  # replicas and stages are theirs
        check_num_ipus(self._own_replicas, self.stage_ipus)

    # Plans ------------------------------------------------------------------

    def training_plan(self, batch_size: int | None = None) -> BatchPlan:
        """Derive the factors of a training call.

        Args:
            batch_size: Samples per weight update; None to take the product of the
                factors given, or 32 if none is.

        Raises:
            ConfigError: The factors don't multiply up to `batch_size`.

        Example:
            >>> IPUConfig(replicas=4).training_plan(batch_size=32).micro_batch_size
            8
        """
        own = self.training_options
        return derive_plan(
            batch_size,
            micro_batch_size=self.micro_batch_size,
            gradient_accumulation=(
                self.gradient_accumulation
                if own is None
                else own.Training.gradient_accumulation
            ),
            replicas=self.num_replicas,
            processes=self.process.count,
            device_iterations=(
                self.device_iterations if own is None else own.device_iterations
            ),
            stages=self._ipu_changes() if own is None and self._is_pipelined() else 1,
        )

    def inference_plan(self, batch_size: int) -> BatchPlan:
        """Derive the factors of an inference call, with iterations for all stages.

        Args:
            batch_size: Samples of one forward pass on every replica.

        Example:
            >>> IPUConfig(pipeline=("a", "b", "c")).inference_plan(8).device_iterations
            3
        """
        own = self.inference_options
        iterations = max(
            self.inference_iterations or self.device_iterations,
            self._least_inference_iterations(),
        )
        return derive_plan(
            batch_size,
            micro_batch_size=None,
            gradient_accumulation=1,
            replicas=self.num_inference_replicas,
            processes=self.process.count,
            device_iterations=iterations if own is None else own.device_iterations,
        )

    @property
    def num_stages(self) -> int:
        """Forward stages, as far as `pipeline` names them."""
        return len(self.stages) if self.stages else 1

    @property
    def num_ipus(self) -> int:
        """IPUs of all replicas, as far as `pipeline` names stages.

        `IPUModel.summary(x).num_ipus` counts those of the model's own blocks, too.

        Example:
            >>> IPUConfig(pipeline=["a", "b"], replicas=4).num_ipus
            8
        """
        return (max(self.stage_ipus, default=0) + 1) * self.num_replicas

    @property
    def num_replicas(self) -> int:
        """Replicas of this process; `training_options` win if there are any."""
        own = self.training_options
        return self._own_replicas if own is None else int(own.replication_factor)

    @property
    def num_inference_replicas(self) -> int:
        """Replicas of this process in `evaluate` and `predict`."""
        own = self.inference_options
        return self._own_replicas if own is None else int(own.replication_factor)

    @property
    def _own_replicas(self) -> int:
        """Without own options."""
        return replicas_for(self.replicas, self.process)

    @property
    def process(self) -> ProcessInfo:
        """This process: by own fields, own `training_options`, or the launcher."""
        given = self.process_id, self.num_processes, self.training_options
        return remembered_process(self.__dict__, *given)

    def __getstate__(self) -> dict[str, Any]:  # another process finds out itself
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Names of each stage; empty without a pipeline or with a strategy.

        Example:
            >>> IPUConfig(pipeline=["a", ("b", "c")]).stages
            (('a',), ('b', 'c'))
        """
        pipeline = self.pipeline if has_stages(self.pipeline) else ()
        return tuple(stage_names(stage) for stage in pipeline)

    @property
    def stage_ipus(self) -> tuple[int, ...]:
        """IPU of each stage in a replica, as far as `pipeline` names stages.

        Example:
            >>> IPUConfig(pipeline=["a", ("b", "c")]).stage_ipus
            (0, 1)
        """
        pipeline = self.pipeline if has_stages(self.pipeline) else ()
        return tuple(stage_ipu(stage, index) for index, stage in enumerate(pipeline))

    @property
    def first_block(self) -> str | None:
        """The block that operations before the module join, if `pipeline` names it.

        Outside of it they would be on IPU 0, and PopTorch refuses a first stage on
        another IPU then.
        """
        return self.stages[0][0] if self.stages else None

    @property
    def last_block(self) -> str | None:
        """The block that the loss joins, if `loss_block` or `pipeline` names it."""
        if self.loss_block is not None:
            return self.loss_block
        return self.stages[-1][-1] if self.stages else None

    def _is_pipelined(self) -> bool:
        return self.execution == "pipelined"

    def _ipu_changes(self) -> int:
        """Forward stages as PopTorch counts them (`CompilerImpl.cpp`).

        They begin on IPU 0: a first stage elsewhere makes one more.
        """
        return self.num_stages + (self.stage_ipus[:1] not in ((), (0,)))

    def _least_inference_iterations(self) -> int:
        if self.stages:
            return self._ipu_changes() if self._is_pipelined() else 1
        if self.pipeline is not None and self.gradient_accumulation is not None:
            # The stages of a strategy are unknown, but training with G micro-batches
            # per update allows at most (G + 1) / 2 of them.
            return (self.gradient_accumulation + 1) // 2
        return 1

    # Options ----------------------------------------------------------------

    def build_training_options(
        self,
        plan: BatchPlan,
        *,
        sums_gradients: bool = False,
        returns_outputs: bool = False,
        scales_automatically: bool = False,
        divides_early: bool = False,
        anchors: Mapping[str, str] | None = None,
    ) -> poptorch.Options:
        """Build the options of the training program.

        Args:
            plan: From `training_plan`.
            sums_gradients: If True, the gradients of an update are added and not
                averaged: for losses that are sums themselves.
            returns_outputs: If True, the outputs of every micro-batch come back
                besides figures.
            scales_automatically: If True, automatic loss scaling is on.
            divides_early: If True, the gradients of an update are divided while they
                are added up, so that their mean is clipped.
            anchors: PopART's names of tensors that every call sends to the host, by
                ours.

        Returns:
            New options. Figures come back under `OutputMode.Sum`, or `All` if outputs
            do too, unless the user's own options choose a mode.

        Raises:
            ConfigError: The user's own options ask for sums of outputs.
        """
        options = self._own_or_derived(self.training_options, plan)
        if sums_gradients:
            options.Training.accumulationAndReplicationReductionType(
                poptorch.ReductionType.Sum
            )
        if scales_automatically:
            options.Training.setAutomaticLossScaling(True)
        if divides_early:
            options.Training.setMeanAccumulationAndReplicationReductionStrategy(
                poptorch.MeanReductionStrategy.Running
            )
        for name, tensor in (anchors or {}).items():
            options.anchorTensor(name, tensor)
        if self.training_options is None:
            options.Training.gradientAccumulation(plan.gradient_accumulation)
            if self.offload_optimizer:
                options.TensorLocations.setOptimizerLocation(
                    poptorch.TensorLocationSettings().useOnChipStorage(False)
                )
            if self.precision == "float16":
                options.Precision.enableStochasticRounding(True)
            if self.profile_dir is not None:
                options.enableProfiling(self.profile_dir)
        if options.defaultOutputMode():
            mode = poptorch.OutputMode
            options.outputMode(mode.All if returns_outputs else mode.Sum)
        elif returns_outputs and options.output_mode == poptorch.OutputMode.Sum.value:
            raise ConfigError(
                "training_options ask for OutputMode.Sum, and a streamed metric needs "
                "the outputs themselves. Use OutputMode.All, or leave the mode at its "
                "default."
            )
        return options

    def build_inference_options(self, plan: BatchPlan) -> poptorch.Options:
        """Build the options of the inference program, which returns all outputs.

        The user's own options may choose another output mode.
        """
        # The model's own blocks are a pipeline if there is a micro-batch for each.
        is_short = plan.device_iterations == 1
        options = self._own_or_derived(self.inference_options, plan, is_short=is_short)
        if options.defaultOutputMode():
            options.outputMode(poptorch.OutputMode.All)
        return options

    def _own_or_derived(
        self,
        own: poptorch.Options | None,
        plan: BatchPlan,
        *,
        is_short: bool = False,
    ) -> poptorch.Options:
        process = self.process
        if own is not None:
            options = own.clone()
            set_process(options, process)
            options.autoRoundNumIPUs(True)  # a device has a power of two of them
            return options
        options = new_options(process, plan.replicas)
        options.deviceIterations(plan.device_iterations)
        options.autoRoundNumIPUs(True)
        options.broadcastBuffers(False)  # each replica keeps its own, as design.md says
        options.showCompilationProgressBar(False)  # we show the phase ourselves
        # Schedulers of torch add attributes to the optimiser; each would be a warning.
        options.relaxOptimizerAttributesChecks(True)
        strategy = strategy_of(
            self.pipeline, is_pipelined=self._is_pipelined(), is_short=is_short
        )
        if strategy is not None:
            options.setExecutionStrategy(strategy)
        proportions = memory_proportions(
            self.available_memory_proportion, self.num_stages
        )
        if proportions:
            options.setAvailableMemoryProportion(proportions)
        if self.seed is not None:
            with torch.random.fork_rng(devices=[]):  # randomSeed reseeds torch
                options.randomSeed(self.seed)
        return options
