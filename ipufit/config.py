# SPDX-License-Identifier: Apache-2.0
"""`IPUConfig`: the layout of a model on IPUs, as a frozen value.

ipufit makes PopTorch's options for training and for inference from the config.
`customize` changes these options; or you can pass whole `poptorch.Options` of your own.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import torch

from . import _env
from ._arguments import (
    ArgumentRepr,
    check_choice,
    check_function,
    check_instance,
    check_integer,
    check_number,
    is_number,
    refuse,
    shown,
)
from ._files import as_path
from ._poptorch import popdist, poptorch
from .batching import MOST_IPUS, BatchPlan, derive_plan, most_stages
from .distributed import ProcessInfo, get_process_info, has_group
from .errors import ConfigError, UnknownNameError, all_suggesting

Customize = Callable[[poptorch.Options, bool], Any]
"""A function that changes or replaces options; its second argument says whether they
train."""

_AUTO = "auto"

REST = -1
"""Stands for an even share of the remaining layers."""


class Precision(NamedTuple):
    """The types that a program computes in.

    Attributes:
        activations: Type of inputs, and of all results computed from them.
        weights: Type in which weights are stored and updated.
    """

    activations: torch.dtype
    weights: torch.dtype

    @property
    def word(self) -> str:
        """Name of the precision in checkpoints, the same for synonyms.

        Example:
            >>> IPUConfig(precision="16.16").types.word
            'float16'
        """
        if self.activations == self.weights:
            return str(self.weights).rpartition(".")[2]
        return "16.32"

    @property
    def is_half(self) -> bool:
        """Whether activations are float16."""
        return self.activations == torch.float16


_PRECISIONS = {
    "float16": Precision(torch.float16, torch.float16),
    "float32": Precision(torch.float32, torch.float32),
    "16.16": Precision(torch.float16, torch.float16),
    "16.32": Precision(torch.float16, torch.float32),
    "32.32": Precision(torch.float32, torch.float32),
}


# Fields -------------------------------------------------------------------------------


def _field(
    check: Callable[[str, Any], Any] | None = None,
    setter: str = "",
    value: str = "",
    *,
    phase: str = "",
    inference: bool | str | None = None,
    default: Any = None,
    **more: Any,
) -> Any:
    """Declare a field of `IPUConfig`: its check, and its option of PopTorch.

    `IPUConfig.__post_init__` also checks fields that must fit each other.

    Args:
        check: Refuses a value; called with the field's name and the value. A default of
            None isn't checked.
        setter: Setter of `poptorch.Options` that the field is passed to, or
            "_Popart." and the name of an option of PopART. The user's own options must
            have this setting if the field isn't at its default.
        value: Attribute of `_PhaseSettings` that is passed; the field by default.
        phase: "training" or "inference", if only such programs have the option.
        inference: Whether `IPUConfig(inference=...)` takes the field; or a text why it
            doesn't. By default `inference` takes the options of both phases.
        default: Default of the field.
        **more: Arguments of `dataclasses.field`.
    """
    if inference is None:
        inference = bool(setter) and not phase
    metadata = {
        "check": check,
        "setter": setter,
        "value": value,
        "phase": phase,
        "inference": inference,
    }
    return field(default=default, metadata=metadata, **more)


def _built_in(value: Any) -> Any:
    """Convert a sequence or mapping of another library, such as OmegaConf's."""
    if isinstance(value, Mapping):
        return {key: _built_in(element) for key, element in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, list, tuple)):
        return [_built_in(element) for element in value]
    return value


# Checks of single values --------------------------------------------------------------


def _check_names(name: str, value: Any) -> None:
    names = [value] if isinstance(value, str) else value
    is_listed = isinstance(names, (tuple, list)) and bool(names)
    if not is_listed or not all(isinstance(one, str) and one for one in names):
        words = "'auto', 'off'" if name == "recompute" else "'norm', 'loss'"
        refuse(name, value, f"{words}, or names or patterns of submodules")


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        refuse(name, value, "True or False")


def _check_tiles(name: str, value: Any) -> None:
    if not is_number(value, is_whole=True) or value not in range(32, 193, 2):
        refuse(name, value, "an even number from 32 to 192")


def _check_seed(name: str, value: Any) -> None:
    if not is_number(value, is_whole=True) or not -(2**63) <= value < 2**64:
        refuse(name, value, "a whole number of 64 bits")


def _check_path(name: str, value: Any) -> None:
    as_path(value, name)


def _check_precision(name: str, value: Any) -> None:
    if "bf" in shown(value).lower():
        refuse(name, value, "'float16', as IPUs have no bfloat16")
    check_choice(name, value, _PRECISIONS)


def _one_of(*choices: str | None) -> Callable[[str, Any], Any]:
    return partial(check_choice, choices=choices)


def _check_inference(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"inference={shown(value)} must be a mapping: give values by the names of "
            'fields, as in inference={"execution": "sharded"}.'
        )
    taken = {field.name: field.metadata["inference"] for field in fields(IPUConfig)}
    for field_name in value:
        reason = taken.get(field_name, False)
        if isinstance(reason, str):
            raise ConfigError(f"inference has {field_name!r}: {reason}.")
        if not reason:
            known = [name for name, is_taken in taken.items() if is_taken is True]
            raise UnknownNameError("field of inference", str(field_name), known)
    if value.get("pipeline") == _AUTO:
        raise ConfigError(
            "inference has pipeline='auto': evaluate and predict use the stages of "
            "training, if nothing else is given. Name others, or give None for one IPU."
        )


_COUNT = partial(check_integer, least=1)
_PARTIALS = {None: None, "half": torch.half, "float": torch.float}
_OPTIONS = partial(check_instance, kind=poptorch.Options)
_LOCATION = "TensorLocations.setOptimizerLocation"


@all_suggesting
@dataclass(frozen=True, repr=False)
class IPUConfig(ArgumentRepr):
    """The layout of a model on IPUs, or on the emulator.

    Args:
        micro_batch_size: Samples of one forward pass on one replica; derived from
            `batch_size` if left open.
        gradient_accumulation: Micro-batches per weight update; derived likewise.
        replicas: Copies of the model in each process, each with samples of its own; by
            default the launcher's (`ipufit launch --replicas`, PopRun), or else 1.
        device_iterations: Weight updates per call: Keras's `steps_per_execution`. By
            default `fit` chooses a number that divides the updates of an epoch, up to
            64 updates and 64 MiB of host memory. This doesn't change any result. If
            something happens after each update, such as a batch hook, it is 1.
        inference_iterations: Forward passes per call of `evaluate`, `predict` and
            validation. A larger number makes fewer, larger calls, which changes no
            result; the last call is padded. By default ipufit chooses it: as many
            passes as the data has, within 64 MiB of host memory and little padding,
            and fewer for large models. If a callback has batch hooks, it is
            `device_iterations`.
        pipeline: The stages of the model, in the order of the data, one IPU each:
            names of its submodules, or patterns of them as in `fnmatch`
            (`"encoder.layer.[0-5]*"`); names of the model's `poptorch.Block`s;
            sequences of such names, or `poptorch.Stage`s; or a ready PopTorch strategy.
            None for a model on one IPU, or one that begins blocks itself. `"auto"`
            leaves it to ipufit to cut the model into stages of even work.
        layers_per_ipu: Stages by the number of layers on each IPU, instead: `[0, 4, 4,
            4]` for the 12 layers of the only `ModuleList` or `Sequential` of that
            length. Modules before the layers are on the first IPU, modules after them
            on the last. -1 stands for the rest. If there are several lists, name them:
            `{"encoder.layer": [0, 4, 4, 4]}`.
        ipus: Number of IPUs that `pipeline="auto"` divides each replica over. `"auto"`,
            the default, takes the smallest power of two whose memory holds parameters,
            the optimizer's state and accumulators.
        execution: `"pipelined"` keeps all stages busy, `"sharded"` runs one stage after
            the other.
        loss_block: The block of the loss and of all other operations that ipufit adds.
            By default the last of `pipeline`, or the last block that the model begins
            with `poptorch.Block`.
        precision: Bits of activations, then of weights. `"16.16"`, or `"float16"`: both
            are float16. `"16.32"`: activations are float16, and float32 weights are
            rounded where they are used. `"32.32"`, or `"float32"`, the default. Losses
            and metrics of `compile` are float32 in each.
        float32_modules: Names or patterns of submodules that compute in float32 all the
            same, with float32 weights; `"norm"` for normalization layers, and `"loss"`
            for torch's losses.
        stochastic_rounding: Round float16 results of training up or down at random,
            unbiased; by default if weights are float16. `evaluate` and `predict` round
            to the nearest unless `inference` says otherwise.
        partials: Type of the sums in convolutions and matrix products: `"half"` or
            `"float"`; PopTorch's default otherwise.
        offload_optimizer: Keep the optimizer's state off the chip.
        shard_optimizer: Divide the optimizer's state among the replicas (replicated
            tensor sharding).
        recompute: Activations that are recomputed for the backward pass and not kept:
            `"auto"` lets PopART choose, `"off"` keeps all, and names or patterns of
            submodules (`"encoder.layer.*"`) keep only their outputs. By default
            pipelines recompute and other models don't.
        available_memory_proportion: Share of each IPU's memory, above 0 and up to 1,
            for the temporary data of convolutions and matrix products: one number for
            all, or one per IPU.
        num_io_tiles: Number of tiles of each IPU that only load and store: even, 32 to
            192.
        overlap_io: Load and store while computing, on these tiles: `"accumulation"`
            for each micro-batch, or `"device_iterations"` for each update.
        prefetch_depth: Number of calls whose data the host prepares ahead for a device
            (PopART's `defaultPrefetchBufferingDepth`).
        seed: Seed of the devices' random numbers and of shuffling. Without it, process
            0 draws the seed by which all processes shuffle.
        process_id: Index of this process, from 0, for launchers that ipufit doesn't
            know; with `num_processes`.
        num_processes: Number of processes that train together.
        num_workers: Processes that load map-style and iterable data; 0 for none.
        loader_mode: `"sync"` loads in this process, `"async"` in one beside it while
            the device computes, `"async_rebatched"` joins its workers' incomplete
            batches (`poptorch.DataLoaderMode`). Map-style data only.
        profile_dir: Write PopVision reports of training here. `torch.profiler`
            records what the host does.
        cache_dir: Keep compiled programs in this directory, and take them from it
            (`POPTORCH_CACHE_DIR` does so for all of PopTorch).
        offline: Compile for IPUs that aren't there: programs are built, not run.
        inference: Other values of fields for `evaluate`, `predict` and validation, by
            name, such as `{"execution": "sharded", "replicas": 1}`.
        customize: A function of the options that this config makes, and of whether they
            are for training. It may change them, after all other settings, or return
            other options.
        training_options: Your own options for training, cloned and used unchanged:
            fields that set the same options stay at their defaults. (PopTorch's bar is
            switched off where `verbose` or the terminal has no place for it.)
        inference_options: Your own options for `evaluate` and `predict`, likewise.

    Raises:
        ConfigError: A value is out of range, or own options contradict a field.

    Example:
        >>> config = IPUConfig(micro_batch_size=40, device_iterations=10)
        >>> config.training_plan(batch_size=400).gradient_accumulation
        10
    """

    micro_batch_size: int | None = _field(
        _COUNT, inference="give batch_size to evaluate, predict or validation"
    )
    gradient_accumulation: int | None = _field(
        _COUNT,
        "Training.gradientAccumulation",
        "plan.gradient_accumulation",
        phase="training",
        inference="inference accumulates nothing",
    )
    replicas: int | None = _field(_COUNT, "replicationFactor", "plan.replicas")
    device_iterations: int | None = _field(
        _COUNT,
        "deviceIterations",
        "plan.device_iterations",
        phase="training",
        inference="give IPUConfig(inference_iterations=...)",
    )
    inference_iterations: int | None = _field(
        _COUNT, "deviceIterations", "plan.device_iterations", phase="inference"
    )
    pipeline: Any = _field(inference=True)
    layers_per_ipu: Sequence[int] | Mapping[str, Sequence[int]] | None = _field(
        inference=True, hash=False
    )
    ipus: int | str | None = _field(
        inference="evaluate and predict use the stages of training, if no others are "
        "named"
    )
    execution: str = _field(
        _one_of("pipelined", "sharded"),
        "setExecutionStrategy",
        "strategy",
        default="pipelined",
    )
    loss_block: str | None = _field(partial(check_instance, kind=str), inference=True)
    precision: str = _field(
        _check_precision,
        "Precision.enableStochasticRounding",
        "rounds_at_random",
        phase="training",
        inference="the weights have one precision, in training and inference",
        default="float32",
    )
    float32_modules: str | Sequence[str] | None = _field(
        _check_names, inference="they have one precision, in training and inference"
    )
    stochastic_rounding: bool | None = _field(
        _check_flag, "Precision.enableStochasticRounding", "rounds_at_random"
    )
    partials: str | None = _field(
        _one_of(*_PARTIALS), "Precision.setPartialsType", "partials_type"
    )
    offload_optimizer: bool = _field(
        _check_flag, _LOCATION, "optimizer_location", phase="training", default=False
    )
    shard_optimizer: bool = _field(
        _check_flag, _LOCATION, "optimizer_location", phase="training", default=False
    )
    recompute: str | Sequence[str] | None = _field(
        _check_names, "_Popart.autoRecomputation", "recomputation", phase="training"
    )
    available_memory_proportion: float | Sequence[float] | None = _field(
        None, "setAvailableMemoryProportion", "config.memory_proportions"
    )
    num_io_tiles: int | None = _field(_check_tiles, "TensorLocations.numIOTiles")
    overlap_io: str | None = _field(
        _one_of(None, "accumulation", "device_iterations"),
        "setExecutionStrategy",
        "strategy",
    )
    prefetch_depth: int | None = _field(_COUNT, "_Popart.defaultPrefetchBufferingDepth")
    seed: int | None = _field(_check_seed, "randomSeed", inference=False)
    process_id: int | None = _field(check_integer)
    num_processes: int | None = _field(_COUNT)
    num_workers: int = _field(check_integer, default=0)
    loader_mode: str = _field(
        _one_of("sync", "async", "async_rebatched"), default="sync"
    )
    profile_dir: str | None = _field(
        _check_path, "enableProfiling", "profile_dir", phase="training"
    )
    cache_dir: str | os.PathLike[str] | None = _field(
        _check_path, "enableExecutableCaching", "cache_dir", inference=False
    )
    offline: bool = _field(
        _check_flag,
        "useOfflineIpuTarget",
        "ipu_version",
        default=False,
        inference=False,
    )
    inference: Mapping[str, Any] | None = _field(_check_inference, hash=False)
    customize: Customize | None = _field(check_function)
    training_options: poptorch.Options | None = _field(_OPTIONS)
    inference_options: poptorch.Options | None = _field(_OPTIONS)

    def __post_init__(self) -> None:
        for entry in fields(self):
            check, value = entry.metadata["check"], _built_in(getattr(self, entry.name))
            object.__setattr__(self, entry.name, value)
            if check is not None and not (value is None and entry.default is None):
                check(entry.name, value)
        _check_process(self)
        _check_stages(self)
        _check_layers(self)
        _check_ipus(self)
        self.memory_proportions  # noqa: B018 - checks them
        _take_own_options(self)
        _check_memory(self)
        if self.float32_modules is not None and not self.types.is_half:
            raise ConfigError(
                f"float32_modules={self.float32_modules!r}, and with precision="
                f"{self.precision!r} everything is float32: give precision='16.16' or "
                "'16.32', or leave float32_modules out."
            )
        self.inference_config  # noqa: B018 - checks its fields, too

    def __getstate__(self) -> dict[str, Any]:  # another process finds out itself
        return {field.name: getattr(self, field.name) for field in fields(self)}

    # Processes, replicas, IPUs ------------------------------------------------------

    @property
    def process(self) -> ProcessInfo:
        """This process, from the fields, `training_options` or the launcher."""
        # It is kept: reading all launchers' variables takes as long as a small call. A
        # process group that is made later counts.
        known = self.__dict__.get("_process")
        if known is None or known[1] != has_group():
            known = self.__dict__["_process"] = _process_of(self), has_group()
        return known[0]

    @property
    def own_replicas(self) -> int:
        """Number of replicas of this process, without regard to `training_options`."""
        process = self.process
        if self.replicas is None:
            return process.replicas or 1
        if process.replicas not in (None, self.replicas):
            raise ConfigError(
                f"replicas={self.replicas}, and the launcher gives this process "
                f"{process.replicas} replicas ({process.total_replicas} in "
                f"{process.count} processes). Leave `replicas` open, or launch with "
                f"{self.replicas * process.count} replicas in all."
            )
        return self.replicas

    @property
    def num_replicas(self) -> int:
        """Number of replicas of this process; `training_options` take precedence."""
        options = self.training_options
        return self.own_replicas if options is None else int(options.replication_factor)

    @property
    def updates_per_call(self) -> int | None:
        """Updates of a training call; None if `fit` chooses the number.

        `training_options` take precedence over `device_iterations`.

        Example:
            >>> IPUConfig(device_iterations=4).updates_per_call
            4
        """
        options = self.training_options
        return self.device_iterations if options is None else options.device_iterations

    @property
    def num_inference_replicas(self) -> int:
        """Number of replicas of this process in `evaluate` and `predict`."""
        options = self.inference_options
        if options is not None:
            return int(options.replication_factor)
        return self.inference_config.own_replicas

    @property
    def num_ipus(self) -> int:
        """Number of IPUs of all replicas, as far as `pipeline` names stages.

        `IPUModel.summary(x).num_ipus` counts those of the model's own blocks, too.

        Example:
            >>> IPUConfig(pipeline=["a", "b"], replicas=4).num_ipus
            8
        """
        return (max(self.stage_ipus, default=0) + 1) * self.num_replicas

    # Stages -------------------------------------------------------------------------

    @property
    def placement(self) -> Any:
        """Stages, or a strategy of PopTorch: `pipeline`, or another field that sets it.

        Example:
            >>> IPUConfig(layers_per_ipu=[0, 4]).placement
            ('layers on IPU 0', 'layers on IPU 1')
        """
        if self.layers_per_ipu is None:
            return self.pipeline
        numbers = next(iter(layer_lists(self.layers_per_ipu).values()))
        return tuple(f"layers on IPU {ipu}" for ipu in range(len(numbers)))

    @property
    def _listed_stages(self) -> Sequence[Any]:
        placement = self.placement
        return placement if isinstance(placement, (tuple, list)) else ()

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Names of each stage; empty without a pipeline or with a strategy.

        Example:
            >>> IPUConfig(pipeline=["a", ("b", "c")]).stages
            (('a',), ('b', 'c'))
        """
        return tuple(_stage_names(stage) for stage in self._listed_stages)

    @property
    def stage_ipus(self) -> tuple[int, ...]:
        """IPU of each stage in a replica, as far as `pipeline` names stages.

        Example:
            >>> IPUConfig(pipeline=["a", ("b", "c")]).stage_ipus
            (0, 1)
        """
        if self.has_open_stages:
            return tuple(range(self.ipus)) if isinstance(self.ipus, int) else ()
        # PopTorch has no public getter of a stage's IPU.
        ipus = [getattr(stage, "_ipu", None) for stage in self._listed_stages]
        return tuple(i if ipu is None else int(ipu) for i, ipu in enumerate(ipus))

    @property
    def num_stages(self) -> int:
        """Number of forward stages, as far as `pipeline` names them."""
        return max(1, len(self.stage_ipus))

    @property
    def has_open_stages(self) -> bool:
        """Whether ipufit will choose the stages, once there is data.

        Example:
            >>> IPUConfig(pipeline="auto", ipus=4).has_open_stages
            True
        """
        return isinstance(self.pipeline, str) and self.pipeline == _AUTO

    def resolved(self, model: Any, x: Any = None) -> IPUConfig:
        """Return this config with the stages that `pipeline="auto"` stands for.

        They are the stages that `fit`, `evaluate` and `predict` of the model choose. So
        a config can be printed, stored and edited. Nothing is compiled.

        Args:
            model: A compiled `IPUModel`; the optimizer's state counts for the memory.
            x: Data as for `fit`, of which only shapes matter; by default those of the
                model's last run.

        Returns:
            An equal config with `pipeline=[names]`, or without stages if one IPU is
            enough; this config itself if its stages aren't left open.

        Raises:
            ConfigError: There is no such data, or no such split.

        Example:
            >>> import torch
            >>> from ipufit import IPUConfig, IPUModel
            >>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
            >>> config = IPUConfig(pipeline="auto", ipus=2)
            >>> model = IPUModel(layers, config)
            >>> config.resolved(model, torch.zeros(8, 4))
            IPUConfig(pipeline=['0', '2'])
        """
        return model._planner.resolved(self, x) if self.has_open_stages else self

    @property
    def first_block(self) -> str | None:
        """The block for operations before the module, if `pipeline` names it.

        Outside of a block they would be on IPU 0, and PopTorch would refuse a first
        stage on another IPU.
        """
        return self.stages[0][0] if self.stages else None

    @property
    def last_block(self) -> str | None:
        """The block of the loss, if `loss_block` or `pipeline` names it."""
        if self.loss_block is not None:
            return self.loss_block
        return self.stages[-1][-1] if self.stages else None

    @property
    def is_pipelined(self) -> bool:
        """Whether all stages are busy at once."""
        return self.execution == "pipelined" and self.overlap_io is None

    # Precision and memory -----------------------------------------------------------

    @property
    def types(self) -> Precision:
        """The types of activations and of weights, which `precision` names."""
        return _PRECISIONS[self.precision]

    @property
    def rounds_at_random(self) -> bool | None:
        """Whether training rounds stochastically; None for PopTorch's default, no.

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
        patterns = self.float32_modules or ()
        return (patterns,) if isinstance(patterns, str) else tuple(patterns)

    @property
    def recompute_patterns(self) -> tuple[str, ...]:
        """Names and patterns of the submodules whose outputs are kept.

        Example:
            >>> IPUConfig(recompute="layer.*").recompute_patterns
            ('layer.*',)
        """
        patterns = self.recompute
        if patterns is None or patterns in ("auto", "off"):
            return ()
        return (patterns,) if isinstance(patterns, str) else tuple(patterns)

    @property
    def memory_proportions(self) -> dict[str, float] | None:
        """Memory share for temporary data of each IPU, by name; None if left open.

        A model that begins blocks itself may have any number of IPUs. So one number is
        set for as many IPUs as there can be: PopTorch looks up the share by IPU.
        """
        proportion: Any = self.available_memory_proportion
        if proportion is None:
            return None
        num_ipus = max(self.stage_ipus, default=MOST_IPUS - 1) + 1
        shares = [proportion] * num_ipus if is_number(proportion) else proportion
        if not isinstance(shares, (tuple, list)) or not all(map(is_number, shares)):
            raise ConfigError(
                f"available_memory_proportion={shown(proportion)}: give a number, or a "
                "sequence with one per IPU."
            )
        for share in shares:
            check_number("available_memory_proportion", share, above=0, most=1)
        is_known = bool(self.stage_ipus)
        if (
            len(shares) > num_ipus
            or (is_known and len(shares) < num_ipus)
            or not shares
        ):
            ipus = f"{num_ipus} IPUs" if is_known else f"at most {num_ipus} IPUs"
            raise ConfigError(
                f"available_memory_proportion={proportion!r} has {len(shares)} "
                f"numbers, and a replica has {ipus}. Give one number for each of them, "
                "or a single one."
            )
        return {f"IPU{ipu}": float(share) for ipu, share in enumerate(shares)}

    # Inference ----------------------------------------------------------------------

    @property
    def inference_config(self) -> IPUConfig:
        """The config of `evaluate` and `predict`, with the changes of `inference`.

        Example:
            >>> IPUConfig(replicas=4, inference={"replicas": 2}).inference_config
            IPUConfig(replicas=2)
        """
        return self if self.inference is None else self._make_inference_config

    @functools.cached_property
    def _make_inference_config(self) -> IPUConfig:
        overrides = dict(self.inference or {})
        changes: dict[str, Any] = {}
        if not {"pipeline", "layers_per_ipu"}.isdisjoint(overrides):
            # Other stages need another block for the loss: it is the last one again.
            names = "pipeline", "layers_per_ipu", "ipus", "loss_block"
            changes = dict.fromkeys(names)
        changes.update(overrides)
        if overrides.get("pipeline", ()) is None and self.pipeline is not None:
            # All on one IPU, blocks that the model begins by name, too.
            stage = tuple(name for names in self.stages for name in names)
            changes["pipeline"] = (stage,) if stage else None
        options = self.training_options
        if options is not None and options.Distributed.numProcesses > 1:
            changes["process_id"] = options.Distributed.processId
            changes["num_processes"] = options.Distributed.numProcesses
        # Of training alone; one replica of inference needn't share what isn't there.
        changes.update(inference=None, training_options=None, shard_optimizer=False)
        try:
            return dataclasses.replace(self, **changes)
        except ConfigError as error:
            raise ConfigError(f"With inference={self.inference!r}: {error}") from None

    # Plans of calls -----------------------------------------------------------------

    def training_plan(
        self,
        batch_size: int | None = None,
        own_stages: int = 1,
        device_iterations: int | None = None,
    ) -> BatchPlan:
        """Derive the factors of a training call.

        Args:
            batch_size: Samples per weight update; None for the product of the given
                factors, or 32 if none is given.
            own_stages: Number of stages of blocks that the model begins itself, for a
                gradient accumulation that is left open.
            device_iterations: Updates per call, if the config leaves them open; 1 by
                default.

        Raises:
            ConfigError: The factors don't multiply up to `batch_size`.

        Example:
            >>> IPUConfig(replicas=4).training_plan(batch_size=32).micro_batch_size
            8
        """
        options = self.training_options
        accumulation, stages = self.gradient_accumulation, forward_stages(self)
        if accumulation is None:
            stages = max(stages, own_stages)
        if options is not None:
            accumulation = options.Training.gradient_accumulation
        return derive_plan(
            batch_size,
            micro_batch_size=self.micro_batch_size,
            gradient_accumulation=accumulation,
            replicas=self.num_replicas,
            processes=self.process.count,
            device_iterations=self.updates_per_call or device_iterations or 1,
            stages=stages if options is None and self.is_pipelined else 1,
        )

    def inference_plan(
        self,
        batch_size: int,
        own_stages: int = 1,
        inference_iterations: int | None = None,
    ) -> BatchPlan:
        """Derive the factors of an inference call, with enough passes for all stages.

        Args:
            batch_size: Samples of one forward pass on every replica.
            own_stages: Number of stages of blocks that the model begins itself.
            inference_iterations: Forward passes per call, if the config leaves them
                open; its `device_iterations` by default, or else 1.

        Example:
            >>> IPUConfig(pipeline=("a", "b", "c")).inference_plan(8).device_iterations
            3
        """
        options = self.inference_options
        wanted = self.inference_iterations or inference_iterations
        iterations = wanted or self.device_iterations or 1
        config, least = self.inference_config, 1
        if config.stages:
            least = forward_stages(config) if config.is_pipelined else 1
        elif config.pipeline is not None:
            # The stages of a strategy are unknown, but training sets a limit to them.
            least = most_stages(config.gradient_accumulation or 1)
        iterations = max(iterations, least, own_stages)
        return derive_plan(
            batch_size,
            micro_batch_size=None,
            gradient_accumulation=1,
            replicas=self.num_inference_replicas,
            processes=self.process.count,
            device_iterations=iterations
            if options is None
            else options.device_iterations,
        )

    # Options of PopTorch ------------------------------------------------------------

    def build_training_options(
        self,
        plan: BatchPlan,
        *,
        own_stages: int = 1,
        sums_gradients: bool = False,
        returns_outputs: bool = False,
        scales_automatically: bool = False,
        divides_early: bool = False,
        anchors: Mapping[str, str] | None = None,
    ) -> poptorch.Options:
        """Build the options of the training program.

        Args:
            plan: From `training_plan`.
            own_stages: As for `training_plan`.
            sums_gradients: If True, the gradients of an update are added and not
                averaged: for losses that are sums themselves.
            returns_outputs: If True, the outputs of every micro-batch come back besides
                metrics.
            scales_automatically: If True, automatic loss scaling is on.
            divides_early: If True, the gradients of an update are divided while they
                are added up, so that their mean is clipped.
            anchors: PopART's names of tensors that every call sends to the host, by
                ipufit's names.

        Returns:
            New options. Metrics come back under `OutputMode.All`, unless the user's own
            options choose a mode. Anchored tensors follow the mode of the options, so
            with anchors they come back under `Sum`, if no outputs do: a tensor of each
            micro-batch would be large.

        Raises:
            ConfigError: The user's own options ask for sums of outputs, or `customize`
                changes what the plan is made of.
        """
        settings = _PhaseSettings.of(self, plan, "training", own_stages)
        options = _options_of(settings, self.training_options)
        training, mode = options.Training, poptorch.OutputMode
        if sums_gradients:
            training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
        if scales_automatically:
            training.setAutomaticLossScaling(True)
        if divides_early:
            training.setMeanAccumulationAndReplicationReductionStrategy(
                poptorch.MeanReductionStrategy.Running
            )
        for name, tensor in (anchors or {}).items():
            options.anchorTensor(name, tensor)
        if options.defaultOutputMode():
            is_summed = bool(anchors) and not returns_outputs
            options.outputMode(mode.Sum if is_summed else mode.All)
        options = _customized(settings, options)
        if returns_outputs and options.output_mode == mode.Sum.value:
            raise ConfigError(
                "training_options or customize ask for OutputMode.Sum, and a streamed "
                "metric needs the outputs themselves. Use OutputMode.All, or leave the "
                "mode at its default."
            )
        return options

    def build_inference_options(self, plan: BatchPlan) -> poptorch.Options:
        """Build the options of the inference program, which returns all outputs.

        The user's own options, or `customize`, may choose another output mode.
        """
        settings = _PhaseSettings.of(self, plan, "inference")
        options = _options_of(settings, self.inference_options)
        if options.defaultOutputMode():
            options.outputMode(poptorch.OutputMode.All)
        return _customized(settings, options)


def with_stages(config: IPUConfig, names: Sequence[str]) -> IPUConfig:
    """Return a config with chosen stages, as if the user had named them.

    Args:
        config: A config whose stages are left open.
        names: Name of the submodule that begins each stage. A single stage needs no
            name.

    Example:
        >>> with_stages(IPUConfig(pipeline="auto", ipus=2), ["0", "2"])
        IPUConfig(pipeline=['0', '2'])
    """
    pipeline = list(names) if len(names) > 1 else None
    return dataclasses.replace(config, pipeline=pipeline, ipus=None)


def forward_stages(config: IPUConfig) -> int:
    """Count forward stages as PopTorch does (`CompilerImpl.cpp`).

    The count begins on IPU 0: a first stage on another IPU makes one more.
    """
    return config.num_stages + (config.stage_ipus[:1] not in ((), (0,)))


def _process_of(config: IPUConfig) -> ProcessInfo:
    index, count = config.process_id, config.num_processes
    if index is not None and count is not None:
        return ProcessInfo(index, count, index, "config")
    info, options = get_process_info(), config.training_options
    if options is None or options.Distributed.numProcesses == 1:
        return info
    index, count = options.Distributed.processId, options.Distributed.numProcesses
    if info.count > 1 and (index, count) != (info.index, info.count):
        raise ConfigError(
            f"training_options say that this is process {index} of {count}, and "
            f"{info.launcher} says that it is {info.index} of {info.count}. Leave "
            "Options.Distributed alone: ipufit sets it."
        )
    return dataclasses.replace(info, index=index, count=count)


# Checks of fields ---------------------------------------------------------------------


def _check_process(config: IPUConfig) -> None:
    index, count = config.process_id, config.num_processes
    if (index is None) != (count is None):
        raise ConfigError(
            f"process_id={index} and num_processes={count}: give both, or neither to "
            "go by the launcher's variables."
        )
    if index is not None and count is not None and not 0 <= index < count:
        raise ConfigError(
            f"process_id={index} of num_processes={count}: processes count from 0 to "
            f"{count - 1}."
        )


def _check_stages(config: IPUConfig) -> None:
    pipeline = config.pipeline
    strategies = (
        poptorch.PipelinedExecution,
        poptorch.ShardedExecution,
        poptorch.SerialPhasedExecution,
        poptorch.ParallelPhasedExecution,
    )
    if isinstance(pipeline, str) and pipeline != _AUTO:
        raise ConfigError(
            f"pipeline={pipeline!r} is one name: give a sequence with a name for each "
            f"stage, as in pipeline=({pipeline!r}, ...), or 'auto' to have the model "
            "divided."
        )
    if isinstance(pipeline, (tuple, list)):
        names = [name for stage in pipeline for name in _stage_names(stage)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"pipeline names {', '.join(twice)} more than once.")
    elif pipeline is not None and not isinstance(pipeline, (str, *strategies)):
        raise ConfigError(
            f"pipeline={shown(pipeline)} is neither a sequence of stages nor a "
            "strategy such as poptorch.PipelinedExecution."
        )


def _stage_names(stage: Any) -> tuple[str, ...]:
    if isinstance(stage, poptorch.Stage):
        return tuple(stage.blocks)
    names = tuple(stage) if isinstance(stage, (tuple, list)) else (stage,)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"pipeline has the stage {shown(stage)}: a stage is a name, several of "
            "them, or a poptorch.Stage."
        )
    return names


def _check_layers(config: IPUConfig) -> None:
    layers = config.layers_per_ipu
    if layers is None:
        return
    if config.pipeline is not None:
        raise ConfigError(
            f"pipeline={config.pipeline!r} and layers_per_ipu={layers!r} are both "
            "given, and each says where stages begin. Give one of them."
        )
    lists: list[Any] = list(layer_lists(layers).values())
    are_listed = all(isinstance(counts, (tuple, list)) and counts for counts in lists)
    if not (lists and are_listed) or not all(
        is_number(n, is_whole=True) and n >= REST for counts in lists for n in counts
    ):
        raise ConfigError(
            f"layers_per_ipu={shown(layers)}: give the number of layers on each IPU, "
            "as in [0, 4, 4, 4], with -1 for the rest; or such numbers by the name of "
            'each list of layers, as in {"encoder.layer": [0, 4, 4, 4]}.'
        )
    if len({len(numbers) for numbers in lists}) > 1:
        raise ConfigError(
            f"layers_per_ipu={layers!r}: the lists have numbers for different IPUs. "
            "Give each as many, with 0 where it has no layers."
        )
    check_filled(layers, lists)


def layer_lists(layers_per_ipu: Any) -> dict[str | None, Sequence[int]]:
    """Return the numbers of layers per IPU by the name of the list, or by None."""
    return (
        dict(layers_per_ipu)
        if isinstance(layers_per_ipu, Mapping)
        else {None: layers_per_ipu}
    )


def check_filled(layers_per_ipu: Any, lists: Sequence[Sequence[int]]) -> None:
    """Refuse an IPU in the middle that has no layers.

    The first may have none: modules before the layers are on it. So may the last, which
    has the modules after them.

    Args:
        layers_per_ipu: The user's value, for messages.
        lists: Numbers of layers per IPU, of each list.

    Raises:
        ConfigError: An IPU has nothing to do.
    """
    columns = [any(column) for column in zip(*lists)]
    empty = [ipu for ipu, has_some in enumerate(columns) if not has_some]
    if not any(columns) or not {*empty} <= {0, len(columns) - 1}:
        ipu = next((ipu for ipu in empty if ipu > 0), 0)
        raise ConfigError(
            f"layers_per_ipu={layers_per_ipu!r} leaves IPU {ipu} without layers. Only "
            "the first IPU and the last may have none: they have what comes before "
            "all layers, and after them."
        )


def _check_ipus(config: IPUConfig) -> None:
    ipus: Any = config.ipus
    is_count = is_number(ipus, is_whole=True) and ipus > 0
    if not (ipus is None or is_count or (isinstance(ipus, str) and ipus == _AUTO)):
        refuse("ipus", ipus, "a whole number of 1 or more, or 'auto'")
    if not config.has_open_stages and ipus is not None:
        raise ConfigError(
            f"ipus={shown(ipus)} goes with pipeline='auto', and pipeline="
            f"{config.pipeline!r}. Stages with names have an IPU each, and a model "
            "without stages has one: leave ipus out, or give pipeline='auto'."
        )
    user_options = config.training_options, config.inference_options
    if config.has_open_stages and user_options != (None, None):
        raise ConfigError(
            "pipeline='auto' sets the execution strategy, and training_options or "
            "inference_options set one, too. Give customize= instead, a function that "
            "changes the options that ipufit makes; or name the stages."
        )
    if None not in user_options:
        return  # they have their replicas and stages
    replicas, per_replica = config.own_replicas, len({*config.stage_ipus}) or 1
    total = replicas * per_replica
    if total > MOST_IPUS:
        each = f" with {per_replica} IPUs each, its stages" if config.stage_ipus else ""
        raise ConfigError(
            f"replicas={replicas}{each}, need {total} IPUs, and a process has "
            f"{MOST_IPUS} at most. Use {MOST_IPUS // per_replica} replicas or fewer, "
            "or fewer stages; gradient_accumulation makes batches larger without more "
            "IPUs."
        )


def _is_ready_pipeline(config: IPUConfig) -> bool:
    """Return whether `pipeline` is a ready strategy of PopTorch that is pipelined."""
    is_sharded = isinstance(config.pipeline, poptorch.ShardedExecution)
    return isinstance(config.pipeline, poptorch.PipelinedExecution) and not is_sharded


def _check_memory(config: IPUConfig) -> None:
    has_stages = bool(config.stages) or config.has_open_stages
    is_pipeline = has_stages and config.execution != "sharded"
    if config.overlap_io is not None and config.num_io_tiles is None:
        raise ConfigError(
            f"overlap_io={config.overlap_io!r} needs tiles that load and store while "
            "the others compute: give num_io_tiles, such as 32."
        )
    if config.overlap_io is not None and (is_pipeline or _is_ready_pipeline(config)):
        raise ConfigError(
            f"overlap_io={config.overlap_io!r} doesn't go with a pipeline: PopTorch "
            "refuses it there. Take execution='sharded', or leave overlap_io out."
        )
    if config.shard_optimizer and config.num_replicas * config.process.count == 1:
        raise ConfigError(
            "shard_optimizer=True divides the optimizer's state among replicas, and "
            "there is one. Use more replicas, or offload_optimizer=True to keep the "
            "state off the chip."
        )


# Options that a config stands for -----------------------------------------------------


class _PhaseSettings(NamedTuple):
    """The values of PopTorch's options in one phase, derived from a config.

    None as a value leaves an option at PopTorch's default.

    Attributes:
        config: The config of the phase; for inference, with the changes of `inference`.
        plan: The factors of a call.
        phase: "training" or "inference".
        rounds_at_random: Whether the programs round stochastically.
        own_stages: Stages of blocks that the model begins itself.
    """

    config: IPUConfig
    plan: BatchPlan
    phase: str
    rounds_at_random: bool | None
    own_stages: int = 1

    @classmethod
    def of(
        cls, config: IPUConfig, plan: BatchPlan, phase: str, own_stages: int = 1
    ) -> _PhaseSettings:
        """Return the settings of a phase of the user's config."""
        if phase == "training":
            return cls(config, plan, phase, config.rounds_at_random, own_stages)
        rounds = (config.inference or {}).get("stochastic_rounding")
        return cls(config.inference_config, plan, phase, rounds)

    @property
    def strategy(self) -> Any:
        """The strategy that runs the stages."""
        config = self.config
        if config.has_open_stages:
            raise ConfigError(
                "pipeline='auto' stands for stages that are chosen when a model gets "
                "data. Options can be made of config.resolved(model, x), which has "
                "their names."
            )
        stages, is_pipelined = config.placement, config.is_pipelined
        if stages is None:
            # The model's own blocks are a pipeline if there is a micro-batch for each.
            is_short = self.phase == "inference" and self.plan.device_iterations == 1
            is_default = is_pipelined and not is_short
            return None if is_default else poptorch.ShardedExecution()
        if not isinstance(stages, (tuple, list)):
            return stages
        kind: Any = poptorch.ShardedExecution
        if is_pipelined:
            kind = poptorch.PipelinedExecution
        return kind(
            *(
                stage
                if isinstance(stage, poptorch.Stage)
                else poptorch.Stage(*_stage_names(stage)).ipu(index)
                for index, stage in enumerate(stages)
            )
        )

    @property
    def recomputation(self) -> int | None:
        """PopART's kind of recomputation (`sessionoptions.hpp`, `RecomputationType`).

        PopTorch recomputes in pipelines over several IPUs only (`Compiler.cpp`). PopART
        has one kind for pipelines, and refuses it on one IPU; the other kinds have no
        effect in a pipeline (`ir.cpp`, `recompute.cpp`).
        """
        none, standard, pipeline, recompute_all = 0, 1, 3, 4
        config = self.config
        if config.recompute is None:
            return None
        if config.recompute == "off":
            return none
        if _is_ready_pipeline(config):
            return None  # only PopTorch knows its IPUs
        has_stages = len(set(config.stage_ipus)) > 1 or self.own_stages > 1
        if config.is_pipelined and has_stages:
            return pipeline
        return standard if config.recompute == "auto" else recompute_all

    @property
    def optimizer_location(self) -> Any:
        """PopTorch's setting for the location of the optimizer's state."""
        config = self.config
        if not (config.offload_optimizer or config.shard_optimizer):
            return None
        location = poptorch.TensorLocationSettings()
        if config.offload_optimizer:
            location.useOnChipStorage(False)
        if config.shard_optimizer:
            location.useReplicatedTensorSharding(True)
        return location

    @property
    def partials_type(self) -> Any:
        """The type of sums in convolutions and matrix products."""
        return _PARTIALS[self.config.partials]

    @property
    def profile_dir(self) -> str | None:
        """The directory of reports; None in all processes but the first."""
        config = self.config
        return config.profile_dir if config.process.is_first else None

    @property
    def cache_dir(self) -> str | None:
        """The directory of compiled programs."""
        path = self.config.cache_dir
        return None if path is None else str(path)

    @property
    def ipu_version(self) -> int | None:
        """The version of the IPUs to compile for offline."""
        return _env.compile_for() if self.config.offline else None

    def options(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the field, PopTorch's setter and its argument of each option."""
        for entry in fields(self.config):
            setter, phase = entry.metadata["setter"], entry.metadata["phase"]
            if setter and phase in ("", self.phase):
                value = entry.metadata["value"] or f"config.{entry.name}"
                argument = attrgetter(value)(self)
                if argument is not None:
                    yield entry.name, setter, argument


def _set(options: poptorch.Options, setter: str, argument: Any) -> None:
    """Call a setter of options by its name, as in `_field`."""
    if setter == "replicationFactor" and options.replication_factor == argument:
        return  # PopDist has set it in its own options, and refuses to be told
    section, _, name = setter.rpartition(".")
    if section == "_Popart":
        options._Popart.set(name, argument)
    elif name == "randomSeed":
        # PopTorch takes numbers without a sign, and seeds torch's generator, too.
        with torch.random.fork_rng(devices=[]):
            options.randomSeed(argument % 2**64)
    else:
        attrgetter(setter)(options)(argument)


def _options_of(
    settings: _PhaseSettings, user_options: poptorch.Options | None
) -> poptorch.Options:
    """Make the options of a program for this process, or copy the user's options."""
    process = settings.config.process
    if user_options is not None:
        options = user_options.clone()
    elif process.launcher == "poprun":
        options = popdist().poptorch.Options()
    else:
        options = poptorch.Options()
    place, distributed = (process.index, process.count), options.Distributed
    if place != (distributed.processId, distributed.numProcesses):
        distributed.configureProcessId(*place)
    options.autoRoundNumIPUs(True)  # a device has a power of two of them
    if user_options is None:
        options.broadcastBuffers(False)  # each replica keeps its own, as design.md says
        # Schedulers of torch add attributes to the optimizer; each would be a warning.
        options.relaxOptimizerAttributesChecks(True)
    arguments = {
        setter: argument  # fields with one setter have one argument
        for name, setter, argument in settings.options()
        if user_options is None or _is_added(name, user_options)
    }
    for setter, argument in arguments.items():
        _set(options, setter, argument)
    return options


def _is_added(name: str, user_options: poptorch.Options) -> bool:
    """Return whether ipufit adds a field to the user's own options: a missing seed."""
    return name == "seed" and not user_options.exists("random_seed")


# The user's own options, and customize ------------------------------------------------
#
# PopTorch has no public getters for most settings; `Options.toDict()` shows them all.

_LAYOUT = {
    "deviceIterations": "device_iterations",
    "replicationFactor": "replication_factor",
    "Training.gradientAccumulation": "gradient_accumulation",
    "Distributed.configureProcessId": "distributed_process_id",
    "Distributed.setEnvVarNames": "num_distributed_processes",
}
"""Settings that determine the layout of data: setters, and names in `toDict`."""

_MERGED = ("engineOptions", "convolutionOptions", "matmulOptions")
"""Dicts that a setter of PopTorch replaces as a whole."""


def _settings_of(options: poptorch.Options) -> dict[str, Any]:
    """Return all settings of options by PopTorch's names, with an output mode."""
    if options.defaultOutputMode():
        options = options.clone().outputMode(poptorch.OutputMode.All)
    # The function that draws PopTorch's bar may be another one each time.
    return {key: v for key, v in options.toDict().items() if not callable(v)}


def _difference(
    options: poptorch.Options, setter: str, argument: Any
) -> tuple[str, Any, Any] | None:
    """Return the setting that a setter would change: its key, value and new value."""
    changed = options.clone()
    _set(changed, setter, argument)
    before = _settings_of(options)
    for key, after in _settings_of(changed).items():
        now = before.get(key)
        if isinstance(now, dict) and isinstance(after, dict):
            after = {**now, **after}  # the options may have more than is asked for
        if now != after and (now is not None or after):
            return key, now, after
    return None


def _take_own_options(config: IPUConfig) -> None:
    """Copy the user's own options; refuse options that contradict a field."""
    defaults = {entry.name: entry.default for entry in fields(config)}
    for phase, iterations in (
        ("training", config.device_iterations),
        ("inference", config.inference_iterations),
    ):
        options_name = f"{phase}_options"
        options = getattr(config, options_name)
        if options is None:
            continue
        if config.customize is not None:
            raise ConfigError(
                f"customize and {options_name} are both given, and own options are "
                f"taken whole: leave {options_name} out, or change them before you "
                "give them."
            )
        object.__setattr__(config, options_name, options.clone())
        accumulation, replicas = config.gradient_accumulation or 1, config.own_replicas
        plan = BatchPlan(1, accumulation, replicas, device_iterations=iterations or 1)
        for name, setter, argument in _PhaseSettings.of(config, plan, phase).options():
            value = getattr(config, name)
            if value == defaults[name] or _is_added(name, options):
                continue
            difference = _difference(options, setter, argument)
            if difference is not None:
                key, now, asked = difference
                popart = setter.partition("_Popart.")[2]
                call = f"_Popart.set({popart!r}, ...)" if popart else f"{setter}(...)"
                raise ConfigError(
                    f"{name}={value!r}, but {options_name} have {key}={now!r} where "
                    f"that makes it {asked!r}. Own options are taken whole: call "
                    f"options.{call} on them and leave {name} at its default; or give "
                    "customize=, a function that changes the options which ipufit "
                    f"makes, instead of {options_name}."
                )


def _customized(
    settings: _PhaseSettings, options: poptorch.Options
) -> poptorch.Options:
    """Call `customize` on the options of a phase.

    Engine options, and those of convolutions and matrix products, are merged with the
    present ones: PopTorch's setters replace all of them.
    """
    customize = settings.config.customize
    if customize is None:
        return options
    before = _settings_of(options)
    kept = {key: dict(before[key]) for key in _MERGED if key in before}
    returned = customize(options, settings.phase == "training")
    if isinstance(returned, (bool, int, float, str, tuple, list, Mapping)):
        raise ConfigError(
            f"customize returned {returned!r}: have it change the options that it "
            "gets, and return nothing, or other poptorch.Options."
        )
    if isinstance(returned, poptorch.Options):  # setters return parts of options, too
        options = returned
    after = _settings_of(options)
    for setter, key in _LAYOUT.items():
        if after.get(key) != before.get(key):
            raise ConfigError(
                f"customize has set {key} to {after.get(key)!r}, and data are laid "
                f"out for {before.get(key)!r}: leave options.{setter}(...) to ipufit, "
                "and give the fields of IPUConfig (device_iterations, replicas, "
                "gradient_accumulation, process_id)."
            )
    for key, values in kept.items():
        merged = {**values, **after.get(key, {})}
        if merged != after.get(key):
            options._Popart.set(key, merged)
    return options
