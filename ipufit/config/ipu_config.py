# SPDX-License-Identifier: Apache-2.0
"""`IPUConfig`: how a model is laid out on IPUs, as one frozen value.

Options of PopTorch for training and for inference are made from it. `customize` changes
them; or you can pass whole `poptorch.Options` of your own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any, Mapping, Sequence

import torch

from ipufit._poptorch import poptorch
from ipufit.distributed import ProcessInfo

from .automatic import AUTO, check_ipus, expected_ipus, resolved
from .checks import check_fields, check_num_ipus, check_process
from .inference import changed_for_inference, check_inference
from .layers import check_layers, layer_stages
from .memory import RECOMPUTE_WORDS, check_memory, memory_proportions
from .options import (
    build_inference_options,
    build_training_options,
    take_own_options,
)
from .own_options import Customize
from .pipeline import check_pipeline, has_stages, stage_ipu, stage_names
from .plans import inference_plan, training_plan
from .precision import Precision, check_precision, precision_of
from .processes import remembered_process, replicas_for


@dataclass(frozen=True)
class IPUConfig:
    """The layout of a model on IPUs, or on the emulator.

    Args:
        micro_batch_size: Samples of one forward pass on one replica; derived from
            `batch_size` if left open.
        gradient_accumulation: Micro-batches per weight update; derived likewise.
        replicas: Copies of the model in each process, each with samples of its own; by
            default the launcher's (`ipufit launch --replicas`, PopRun), or else 1.
        device_iterations: Weight updates per call: Keras's `steps_per_execution`. By
            default `fit` chooses them: as many as divide the updates of an epoch, if
            nothing happens after each update, within 64 updates and 64 MiB of host
            memory. That changes no number. Elsewhere it is 1 then.
        inference_iterations: Forward passes per call of `evaluate`, `predict` and
            validation. More of them make fewer, larger calls, which changes no figure;
            the last call is padded to as many. By default ipufit chooses them: as many
            as the data has, within 64 MiB of host memory and little padding, and fewer
            for large models. Where a callback hears each batch they are
            `device_iterations`.
        pipeline: The stages of the model, in the order of the data, one IPU each:
            names of its submodules, or patterns of them as in `fnmatch`
            (`"encoder.layer.[0-5]*"`); names of the model's `poptorch.Block`s;
            sequences of such names, or `poptorch.Stage`s; or a ready PopTorch strategy.
            None for a model on one IPU, or one that begins blocks itself. `"auto"`
            leaves it to ipufit to cut the model into stages of even work.
        layers_per_ipu: Stages by the number of layers on each IPU, instead: `[0, 4, 4,
            4]` for the 12 layers of a `ModuleList` or `Sequential`, the only one of
            that length. What comes before them is on the first IPU, what comes after
            on the last. -1 stands for the rest. Several lists, or another, by name:
            `{"encoder.layer": [0, 4, 4, 4]}`.
        ipus: Number of IPUs that `pipeline="auto"` divides each replica over. `"auto"`,
            the default, takes the smallest power of two whose memory holds parameters,
            the optimiser's state and accumulators.
        execution: `"pipelined"` keeps all stages busy, `"sharded"` runs one after
            the other.
        loss_block: The block that the loss joins, and all else that ipufit adds. By
            default the last of `pipeline`, or the last block that the model begins
            with `poptorch.Block`.
        precision: Bits of activations, then of weights. `"16.16"`, or `"float16"`:
            both are float16. `"16.32"`: activations are float16, and float32 weights
            are rounded where they are used. `"32.32"`, or `"float32"`, the default.
            Losses and figures of `compile` are float32 in each.
        float32_modules: Names or patterns of submodules that compute in float32 all the
            same, and keep float32 weights; `"norm"` for normalisation layers, and
            `"loss"` for torch's losses.
        stochastic_rounding: Round float16 results of training up or down at random,
            unbiased; by default if weights are float16. `evaluate` and `predict`
            round to the nearest unless `inference` says otherwise.
        partials: Type of the sums in convolutions and matrix products: `"half"` or
            `"float"`; PopTorch's default otherwise.
        offload_optimizer: Keep the optimiser's state off the chip.
        shard_optimizer: Divide the optimiser's state among the replicas (replicated
            tensor sharding).
        recompute: Activations that are computed again for the backward pass instead of
            kept: `"auto"` lets PopART choose, `"off"` keeps all, and names or patterns
            of submodules (`"encoder.layer.*"`) keep only their outputs. By default
            pipelines recompute and other models don't.
        available_memory_proportion: Share of each IPU's memory, 0 to 1, for the
            temporary data of convolutions and matrix products: one number for all, or
            one per IPU.
        num_io_tiles: Tiles of each IPU that load and store only: even, 32 to 192.
        overlap_io: Load and store while computing, on these tiles: `"accumulation"`
            for each micro-batch, or `"device_iterations"` for each update.
        prefetch_depth: Calls' worth of data that the host prepares ahead for a device
            (PopART's `defaultPrefetchBufferingDepth`).
        seed: Seed of the devices' random numbers and of shuffling. Several processes
            without one shuffle by a seed that process 0 draws.
        process_id: Number of this process, from 0, where no launcher that ipufit
            knows has set it; with `num_processes`.
        num_processes: Number of processes that train together.
        num_workers: Processes that load map-style and iterable data; 0 for none.
        loader_mode: `"sync"` loads in this process, `"async"` in one beside it while
            the device computes, `"async_rebatched"` joins its workers' incomplete
            batches (`poptorch.DataLoaderMode`). Map-style data only.
        profile_dir: Write PopVision reports of training here. `Profiler` records what
            the host does.
        cache_dir: Keep compiled programs in this directory, and take them from it
            (`POPTORCH_CACHE_DIR` does so for all of PopTorch).
        offline: Compile for IPUs that aren't there: programs are built, not run.
        inference: Other values of fields for `evaluate`, `predict` and validation, by
            name, such as `{"execution": "sharded", "replicas": 1}`.
        customize: A function that changes the options which this config makes, on top
            of everything: it gets them, and whether they train. It may return others.
        training_options: Your own options for training, cloned and taken whole: fields
            that they are made of stay at their defaults.
        inference_options: Your own options for `evaluate` and `predict`, likewise.

    Raises:
        ConfigError: A value is out of range, or own options contradict a field.

    Example:
        >>> config = IPUConfig(micro_batch_size=40, device_iterations=10)
        >>> config.training_plan(batch_size=400).gradient_accumulation
        10
    """

    micro_batch_size: int | None = None
    gradient_accumulation: int | None = None
    replicas: int | None = None
    device_iterations: int | None = None
    inference_iterations: int | None = None
    pipeline: Any = None
    layers_per_ipu: Sequence[int] | Mapping[str, Sequence[int]] | None = field(
        default=None, hash=False
    )
    ipus: int | str | None = None
    execution: str = "pipelined"
    loss_block: str | None = None
    precision: str = "float32"
    float32_modules: str | Sequence[str] | None = None
    stochastic_rounding: bool | None = None
    partials: str | None = None
    offload_optimizer: bool = False
    shard_optimizer: bool = False
    recompute: str | Sequence[str] | None = None
    available_memory_proportion: float | Sequence[float] | None = None
    num_io_tiles: int | None = None
    overlap_io: str | None = None
    prefetch_depth: int | None = None
    seed: int | None = None
    process_id: int | None = None
    num_processes: int | None = None
    num_workers: int = 0
    loader_mode: str = "sync"
    profile_dir: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    offline: bool = False
    inference: Mapping[str, Any] | None = field(default=None, hash=False)
    customize: Customize | None = None
    training_options: poptorch.Options | None = None
    inference_options: poptorch.Options | None = None

    def __post_init__(self) -> None:
        check_fields(vars(self))
        check_process(self.process_id, self.num_processes)
        check_pipeline(self.pipeline)
        check_layers(self.layers_per_ipu, self.pipeline)
        own = self.training_options or self.inference_options
        check_ipus(self.ipus, self.pipeline, has_own_options=own is not None)
        self._check_num_ipus()
        memory_proportions(self.available_memory_proportion, self.stage_ipus)
        take_own_options(self)
        check_memory(self)
        check_precision(self.precision, self.float32_modules)
        if self.inference is not None:
            object.__setattr__(self, "inference", check_inference(self.inference))
            changed_for_inference(self)  # checks them, too

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
        check_num_ipus(self.own_replicas, self.stage_ipus)

    @property
    def num_stages(self) -> int:
        """Forward stages, as far as `pipeline` names them."""
        return max(1, len(self.stage_ipus))

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
        return self.own_replicas if own is None else int(own.replication_factor)

    @property
    def num_inference_replicas(self) -> int:
        """Replicas of this process in `evaluate` and `predict`."""
        own = self.inference_options
        if own is not None:
            return int(own.replication_factor)
        return self.inference_config.own_replicas

    @property
    def own_replicas(self) -> int:
        """Replicas of this process, whatever own options say."""
        return replicas_for(self.replicas, self.process)

    @property
    def process(self) -> ProcessInfo:
        """This process: by own fields, own `training_options`, or the launcher."""
        given = self.process_id, self.num_processes, self.training_options
        return remembered_process(self.__dict__, *given)

    def __getstate__(self) -> dict[str, Any]:  # another process finds out itself
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def placement(self) -> Any:
        """Stages, or a strategy of PopTorch: `pipeline`, or what stands for it.

        Example:
            >>> IPUConfig(layers_per_ipu=[0, 4]).placement
            ('layers on IPU 0', 'layers on IPU 1')
        """
        if self.layers_per_ipu is None:
            return self.pipeline
        return layer_stages(self.layers_per_ipu)

    @property
    def _listed_stages(self) -> Sequence[Any]:
        given = self.placement
        return given if has_stages(given) else ()

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Names of each stage; empty without a pipeline or with a strategy.

        Example:
            >>> IPUConfig(pipeline=["a", ("b", "c")]).stages
            (('a',), ('b', 'c'))
        """
        return tuple(stage_names(stage) for stage in self._listed_stages)

    @property
    def stage_ipus(self) -> tuple[int, ...]:
        """IPU of each stage in a replica, as far as `pipeline` names stages.

        Example:
            >>> IPUConfig(pipeline=["a", ("b", "c")]).stage_ipus
            (0, 1)
        """
        if self.has_open_stages:
            return tuple(expected_ipus(self.pipeline, self.ipus))
        given = enumerate(self._listed_stages)
        return tuple(stage_ipu(stage, index) for index, stage in given)

    @property
    def has_open_stages(self) -> bool:
        """Whether stages are left to ipufit, which chooses them when data come.

        Example:
            >>> IPUConfig(pipeline="auto", ipus=4).has_open_stages
            True
        """
        return isinstance(self.pipeline, str) and self.pipeline == AUTO

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

    @property
    def types(self) -> Precision:
        """The types of activations and of weights, which `precision` names."""
        return precision_of(self.precision)

    @property
    def rounds_at_random(self) -> bool | None:
        """Whether training rounds at random; None for PopTorch's default, which is no.

        Example:
            >>> IPUConfig(precision="16.16").rounds_at_random
            True
        """
        if self.stochastic_rounding is None and self.types.weights == torch.float16:
            return True
        return self.stochastic_rounding

    @property
    def float32_patterns(self) -> tuple[str, ...]:
        """Words and patterns of `float32_modules`; empty for none.

        Example:
            >>> IPUConfig(precision="16.16", float32_modules="norm").float32_patterns
            ('norm',)
        """
        given = self.float32_modules or ()
        return (given,) if isinstance(given, str) else tuple(given)

    @property
    def is_pipelined(self) -> bool:
        """Whether all stages are busy at once."""
        return self.execution == "pipelined" and self.overlap_io is None

    @property
    def recompute_patterns(self) -> tuple[str, ...]:
        """Names and patterns of the submodules whose outputs are kept.

        Example:
            >>> IPUConfig(recompute="layer.*").recompute_patterns
            ('layer.*',)
        """
        if self.recompute is None or self.recompute in RECOMPUTE_WORDS:
            return ()
        given = self.recompute
        return (given,) if isinstance(given, str) else tuple(given)

    @property
    def inference_config(self) -> IPUConfig:
        """The config of `evaluate` and `predict`: this one, with what `inference` says.

        Example:
            >>> IPUConfig(replicas=4, inference={"replicas": 2}).inference_config
            IPUConfig(replicas=2)
        """
        if self.inference is None:
            return self
        known = self.__dict__.get("_inference_config")
        if known is None:
            known = changed_for_inference(self)
            self.__dict__["_inference_config"] = known
        config: IPUConfig = known
        return config

    # Stages, plans and options: functions of other files -------------------------

    resolved = resolved
    training_plan = training_plan
    inference_plan = inference_plan
    build_training_options = build_training_options
    build_inference_options = build_inference_options
