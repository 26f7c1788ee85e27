# SPDX-License-Identifier: Apache-2.0
"""Costs of a module: of its stages for a plan, of its blocks for `pipeline="auto"`.

A pass on shapes alone measures the costs: a copy without values is called in train
mode. The pass takes little time and memory, and the module, its buffers and all random
states stay as they are.

Floating-point operations are those of `torch.utils.flop_counter` (torch 2.1 and later),
which counts a multiplication and an addition as two, and elementwise operators as
nothing. Torch 2.0 has no such counter. Beyond torch's, fused attention of processors
and products with vectors are counted.

Few processes need this module, so it is imported only there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
)

import torch
from torch import Tensor
from torch._C import _get_mkldnn_enabled, _set_mkldnn_enabled
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ipufit._modules import weights_of
from ipufit._poptorch import poptorch
from ipufit._tree import leaves_of
from ipufit.batching import BatchPlan
from ipufit.config import IPUConfig
from ipufit.data.datasets import Source
from ipufit.data.random_state import HostRandomState
from ipufit.data.structure import SampleStructure
from ipufit.engine.metric_state import collected
from ipufit.engine.objective import Steps
from ipufit.engine.precision import computed_in
from ipufit.engine.step import NoForwardError, call_module, call_step, kept_submodules
from ipufit.engine.trace_checks import tensors_of, user_line
from ipufit.engine.weights import deep_copied, mode, unfetched
from ipufit.errors import ConfigError, IpufitError, UnsupportedError
from ipufit.optimizers import WeightState, weight_states
from ipufit.placement import (
    Begun,
    annotated_blocks,
    blocks_begun,
    followed,
    stage_and_ipu,
)
from ipufit.planning import memory
from ipufit.planning.plan import HostTraffic, ModelPlan
from ipufit.planning.schedule import EpochPlan
from ipufit.planning.split import (
    BlockCost,
    Split,
    best_split,
    refuse_idle_stages,
    smallest_split,
)

CAPACITY = memory.DEVICES["mk2"].num_bytes
"""Bytes of one IPU, of Mk2 and of Bow."""

_ROWS = 2
"""Samples of the micro-batch that is measured, if the config leaves its size open: the
share of each block in the whole is the same for any number."""

_MOST_NAMES = 8

Call = Callable[[torch.nn.Module, Sequence[Tensor]], Any]
"""Calls a module with the tensors of a micro-batch, and returns its results."""


def plan_of_module(
    module: torch.nn.Module,
    config: IPUConfig,
    optimizer: torch.optim.Optimizer,
    steps: Steps | None,
    source: Source,
    epoch: EpochPlan,
    device: memory.Device,
) -> ModelPlan:
    """Measure a module's stages, and make its plan.

    Args:
        module: The user's module.
        config: The layout.
        optimizer: The optimizer, whose state counts.
        steps: Steps of the model's own; None to call the module.
        source: The data; only the first sample is read.
        epoch: The factors of a training call.
        device: The kind of IPU.

    Raises:
        ConfigError: The module can't be copied.
        DataError: The module can't be called with such data.
    """
    batch = epoch.batch
    example = source.example(batch.micro_batch_size)
    trained = [p for p in module.parameters() if p.requires_grad]
    cost = stage_costs(
        module,
        example,
        config,
        weight_states(optimizer, trained),
        _measured_call(steps, source.structure, is_fit=True),
    )
    num_stages = max(epoch.stages, len(cost.stages))
    one_by_one = (
        poptorch.ShardedExecution,
        poptorch.SerialPhasedExecution,
        poptorch.ParallelPhasedExecution,
    )
    is_pipelined = (
        config.is_pipelined
        and not isinstance(config.pipeline, one_by_one)
        and len(cost.stages) > 1
    )
    inference = config.inference_plan(
        batch.micro_batch_size * config.num_inference_replicas,
        own_stages=num_stages if is_pipelined else 1,
    )
    return ModelPlan(
        title=type(module).__name__,
        optimizer=type(optimizer).__name__,
        device=device,
        epoch=replace(epoch, stages=num_stages) if is_pipelined else epoch,
        stages=cost.stages,
        settings=_memory_settings(config, batch, is_pipelined),
        inference_iterations=inference.device_iterations,
        traffic=_traffic(
            example, source.structure, cost.output_bytes, batch, inference
        ),
        unused=cost.unused,
        shared=cost.shared,
    )


def _memory_settings(
    config: IPUConfig, batch: BatchPlan, is_pipelined: bool
) -> memory.MemorySettings:
    recomputes = config.recompute != "off"
    if config.recompute is None:
        recomputes = is_pipelined
    is_sharded, is_off_chip = config.shard_optimizer, config.offload_optimizer
    least = {}
    if config.training_options is not None or config.customize is not None:
        options: Any = config.build_training_options(batch)
        location = getattr(options.TensorLocations, "location_optimizer", None) or {}
        is_sharded = bool(location.get("useReplicatedTensorSharding", False))
        is_off_chip = not location.get("onChip", True)
        names = {
            "least_off_chip": "minElementsForOffChip",
            "least_sharded": "minElementsForReplicatedTensorSharding",
        }
        least = {ours: location[n] for ours, n in names.items() if n in location}
    return memory.MemorySettings(
        gradient_accumulation=batch.gradient_accumulation,
        is_pipelined=is_pipelined,
        recomputes=recomputes,
        is_off_chip=is_off_chip,
        num_shards=batch.replicas * batch.processes if is_sharded else 1,
        **least,
    )


def _traffic(
    example: Sequence[Tensor],
    structure: SampleStructure,
    output_bytes: int,
    batch: BatchPlan,
    inference: BatchPlan,
) -> tuple[HostTraffic, ...]:
    """Return the bytes of a call in one process, for each output mode."""
    sizes = [tensor.numel() * device_bytes(tensor.dtype) for tensor in example]
    trained = sum(sizes) * batch.micro_batches_per_call
    passes = inference.device_iterations * inference.replicas
    inputs = sum(sizes[: structure.num_inputs]) * passes
    every = output_bytes * batch.micro_batches_per_call
    last = output_bytes * batch.replicas
    accumulation = batch.gradient_accumulation
    return (
        HostTraffic("training", "Sum", trained, last),
        HostTraffic("training", "Final", trained, last),
        HostTraffic(
            "training", f"EveryN({accumulation})", trained, every // accumulation
        ),
        HostTraffic("training", "All", trained, every),
        HostTraffic("inference", "All", inputs, output_bytes * passes),
    )


# Stages that are left open -----------------------------------------------------------


def split_of_module(
    module: torch.nn.Module,
    config: IPUConfig,
    source: Source,
    optimizer: torch.optim.Optimizer | None,
    steps: Steps | None,
) -> tuple[tuple[str, ...], str]:
    """Choose the stages of a module.

    Args:
        module: The user's module.
        config: A config whose stages are left open.
        source: Source of samples; only the first sample is read.
        optimizer: The optimizer, whose state counts; None if there is none yet.
        steps: Steps of the model's own; None to call the module.

    Returns:
        Names of the submodules that begin the stages; and the stages in a line.

    Raises:
        ConfigError: There is no such split, or the model begins blocks itself.
        DataError: `forward` can't take such a sample.
    """
    for place, (name, _) in annotated_blocks(module).items():
        raise ConfigError(
            f"pipeline='auto' chooses where stages begin, and the submodule {place} "
            f"begins the block {name!r} itself (poptorch.BeginBlock). Take it out, "
            "poptorch.removeBlocks(module), or leave pipeline out."
        )
    example = source.example(config.micro_batch_size or _ROWS)
    call = _measured_call(steps, source.structure, is_fit=False)
    trained = [p for p in module.parameters() if p.requires_grad]
    states = {} if optimizer is None else weight_states(optimizer, trained)
    shares = config.num_replicas * config.process.count if config.shard_optimizer else 1
    placed = memory.MemorySettings(
        is_off_chip=config.offload_optimizer, num_shards=shares
    )
    with collected():
        costs = block_costs(module, example, config, states, call, placed)
    if isinstance(config.ipus, int):
        split = best_split(costs, config.ipus, CAPACITY)
        refuse_idle_stages(costs, config.ipus)
    else:
        split = smallest_split(costs, CAPACITY)
    uncounted = sorted({name for cost in costs for name in cost.uncounted})
    return split.names, _describe_split(split, uncounted)


def _describe_split(split: Split, uncounted: Sequence[str]) -> str:
    """Describe the stages in one line, to show with a compilation.

    Example:
        >>> print(_describe_split(Split(("stem", "body"), (3, 7), (0, 0), (8,)), []))
        pipeline='auto': 2 stages, 30% and 70% of the operations, begin at stem and body
    """
    if len(split.names) == 1:
        return "pipeline='auto': the parameters of the model fit on one IPU"
    total = sum(split.flops)
    shares = [f"{part / total:.0%}" if total else "0%" for part in split.flops]
    ending = f" ({', '.join(uncounted)} not counted)" if uncounted else ""
    return (
        f"pipeline='auto': {len(shares)} stages, {_listed(shares)} of the "
        f"operations{ending}, begin at {_listed(split.names)}"
    )


def _listed(words: Sequence[str]) -> str:
    if len(words) > _MOST_NAMES:
        words = [*words[: _MOST_NAMES - 1], f"{len(words) - _MOST_NAMES + 1} more"]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _measured_call(
    steps: Steps | None, structure: SampleStructure, *, is_fit: bool
) -> Callable[[torch.nn.Module, Sequence[Tensor]], Any]:
    """Return a function that calls a module, or a step with the module.

    The function takes a copy of the module, and the tensors of a micro-batch.

    Args:
        steps: Steps of the model's own; None to call the module.
        structure: Nesting of the data.
        is_fit: Whether the data are those of a `fit`. Otherwise data without targets
            may be those of `predict`: then the step of `predict` is called, or the
            module if there is no such step. The step of `fit` is called only if the
            module has no `forward`.

    Example:
        >>> from ipufit.data.sources import as_source
        >>> x = torch.zeros(4, 2)
        >>> call = _measured_call(None, as_source(x).structure, is_fit=False)
        >>> call(torch.nn.Linear(2, 3), [x]).shape
        torch.Size([4, 3])
    """

    def call(module: torch.nn.Module, tensors: Sequence[Tensor]) -> Any:
        inputs = structure.nested(tensors)
        if steps is None:
            return call_module(module, inputs)
        if is_fit or structure.has_targets:
            batch = structure.batch(inputs, tensors)
            return call_step(steps.training, module, batch)
        if steps.prediction is not None:
            return call_step(steps.prediction, module, inputs)
        try:
            return call_module(module, inputs)
        except NoForwardError:
            return call_step(steps.training, module, inputs)

    return call


# Costs of stages and blocks -----------------------------------------------------------


class ModelCost(NamedTuple):
    """The costs of a module in training.

    Attributes:
        stages: The module's stages in the order in which they run.
        output_bytes: Bytes of the module's outputs for one micro-batch.
        unused: Names of parameters that `forward` doesn't use.
        shared: Names of parameters that several stages use; the first stage counts
            them.
    """

    stages: tuple[memory.StageCost, ...]
    output_bytes: int
    unused: tuple[str, ...]
    shared: tuple[str, ...]


def block_costs(
    module: torch.nn.Module,
    example: Sequence[Tensor],
    config: IPUConfig,
    states: Mapping[int, WeightState],
    call: Call,
    placed: memory.MemorySettings,
) -> tuple[BlockCost, ...]:
    """Return the costs of each block of a module, in the order in which they run.

    A block begins at each submodule that one forward pass calls exactly once, and ends
    where the next begins. If several begin at the same operation, as a container and
    its first layer do, they are one block with the name of the outermost. So a stage of
    a pipeline may begin at each name. A submodule that is called several times, as
    shared layers are, belongs to the blocks that call it.

    Args:
        module: The user's module.
        example: Tensors of a micro-batch, of which only shapes and types matter. Floats
            become those of the config's precision.
        config: The precision of activations.
        states: State of the optimizer for each weight that is trained, by its `id`.
        call: Calls the copy with tensors like those of `example`.
        placed: Where the optimizer's state is kept.

    Raises:
        ConfigError: The module can't be copied.
        DataError: The module can't be called with such tensors.
        UnsupportedError: `forward` computes with values, or makes dynamic shapes.
    """
    parts = [_Part()]
    times: Counter[str] = Counter()
    is_filled = False  # since the block's own submodule was called

    def begin(_module: Any, _args: Any, name: str) -> None:
        times[name] += 1
        parts.append(_Part(names={name: None}))

    with shapes_only():
        recorded = _Pass(module, example, config, states)
        for name, child in recorded.module.named_modules():
            if name:
                child.register_forward_pre_hook(partial(begin, name=name))
        outputs = recorded.run(config, call, lambda: parts[-1])
        parts[0].made.update(recorded.keys(recorded.inputs))
        parts[-1].used.update(recorded.keys(outputs))
        blocks = [_Part()]
        for part in parts:
            if any(times[name] == 1 for name in part.names):
                if is_filled:
                    blocks.append(_Part())
                    is_filled = False
                blocks[-1].names = blocks[-1].names or part.names
            blocks[-1].add(part)
            is_filled |= bool(blocks[-1].names and part.has_operators)
        maker: dict[int, int] = {}
        last_use = {key: at for at, block in enumerate(blocks) for key in block.used}
        crossing = [0] * len(blocks)
        for at, block in enumerate(blocks):
            for key in block.made:
                for end in range(maker.setdefault(key, at), last_use.get(key, at)):
                    crossing[end] += recorded.num_bytes([key]) * (maker[key] == at)
        costs = recorded.costs(dict(enumerate(blocks)))
        return tuple(
            BlockCost(
                name=next(iter(block.names), ""),
                flops=block.flops,
                weights=tuple(
                    recorded.weights[key].name
                    for key in block.used
                    if key in recorded.weights
                ),
                held_bytes=cost.buffer_bytes
                + sum(
                    weight.num_bytes
                    + weight.accumulator_bytes
                    + memory.state_bytes(weight.state, placed)
                    for weight in cost.weights
                ),
                output_bytes=output_bytes,
                uncounted=cost.uncounted,
            )
            for block, cost, output_bytes in zip(blocks, costs, crossing)
        )


def stage_costs(
    module: torch.nn.Module,
    example: Sequence[Tensor],
    config: IPUConfig,
    states: Mapping[int, WeightState],
    call: Call,
) -> ModelCost:
    """Return the costs of each stage of a module in training, at least one stage.

    Args:
        module: The user's module.
        example: Tensors of a micro-batch, of which only shapes and types matter.
        config: Stages and precision.
        states: State of the optimizer for each weight that is trained, by its `id`.
        call: Calls the copy with such tensors.

    Raises:
        ConfigError: The module can't be copied, or a stage is known only to the user's
            own options.
        DataError: The module can't be called with such tensors.
        UnsupportedError: `forward` computes with values, or makes dynamic shapes.
    """
    stages: dict[int, _Part] = {}
    recorded: _Pass
    begins: Mapping[str, Begun]
    kept: set[str]
    present: Callable[[], Begun | None]

    @functools.lru_cache(maxsize=None)
    def place(block: Begun | None) -> tuple[int, int]:
        if block is None:
            return 0, 0
        stage, ipu = stage_and_ipu(block, config)
        if stage is ipu is None and config.training_options is not None:
            raise ConfigError(
                f"The module begins the block {block[0]!r}, and training_options have "
                "a strategy of their own, so its stage and its IPU aren't known here. "
                "Name the stages in pipeline= instead, and give what the options "
                "change as customize=, a function of the options that ipufit makes."
            )
        ipu = (stage or 0) if ipu is None else ipu
        return (ipu if stage is None else stage), ipu

    def now() -> _Part:
        number, ipu = place(present())
        return stages.setdefault(number, _Part(ipu=ipu))

    def called(name: str, child: torch.nn.Module) -> None:
        is_leaf = next(child.children(), None) is None
        if name and (is_leaf or name in begins):
            names = now().names
            if not any(name.startswith(f"{other}.") for other in names):
                names[name] = None

    def returned(name: str, output: Any) -> None:
        if name in kept:
            now().num_kept += 1
            now().kept.update(recorded.keys(tensors_of(output)))

    with shapes_only():
        recorded = _Pass(module, example, config, states)
        copied = recorded.module
        begins, _ = blocks_begun(copied, config)
        kept = set(kept_submodules(copied, config.recompute_patterns))
        with followed(copied, config, called, returned) as present:
            outputs = recorded.run(config, call, now)
            now()  # if nothing was computed
        users = Counter(key for stage in stages.values() for key in stage.used)
        weights = recorded.weights.items()
        return ModelCost(
            recorded.costs(stages),
            sum(t.numel() * device_bytes(t.dtype) for t in outputs),
            unused=tuple(weight.name for key, weight in weights if not users[key]),
            shared=tuple(weight.name for key, weight in weights if users[key] > 1),
        )


def weight_cost(
    name: str, parameter: torch.nn.Parameter, state: WeightState | None
) -> memory.WeightCost:
    """Return the costs of a parameter on a device, with its optimizer state.

    Args:
        name: Its name.
        parameter: The parameter, of which shape and type matter.
        state: The state and the accumulator; None if the parameter isn't trained.

    Example:
        >>> weight_cost("w", torch.nn.Parameter(torch.zeros(2, 3)), None).num_bytes
        24
    """
    shape, dtype = unfetched(parameter, "shape"), unfetched(parameter, "dtype")
    count, num_bytes = shape.numel(), shape.numel() * device_bytes(dtype)
    if state is None:
        return memory.WeightCost(name, count, num_bytes)
    accumulator = state.accumulator
    return memory.WeightCost(
        name,
        count,
        num_bytes,
        state=tuple(
            memory.StateCost(
                tensor.num_elements, tensor.num_elements * device_bytes(tensor.dtype)
            )
            for tensor in state.tensors
        ),
        accumulator_bytes=count * device_bytes(accumulator) if accumulator else 0,
        gradient_bytes=num_bytes,
    )


def device_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of a number on a device; 64-bit types are narrowed.

    Example:
        >>> device_bytes(torch.int64), device_bytes(torch.float16)
        (4, 2)
    """
    width: int = torch.empty((), dtype=dtype).element_size()
    return min(4, width)


# Recording a pass ---------------------------------------------------------------------


@dataclass
class _Part:
    """A part of a pass: its operators, and the keys of their tensors' storages.

    Attributes:
        ipu: IPU of the part's stage.
        names: Names of the submodules whose calls begin the part.
        used: Storages that operators read, or that are returned.
        made: Storages that operators make.
        saved: Storages that are saved for the backward pass, except weights.
        kept: Storages of outputs of submodules that `recompute` names.
    """

    ipu: int = 0
    names: dict[str, None] = field(default_factory=dict)
    has_operators: bool = False
    flops: int = 0
    num_kept: int = 0
    uncounted: dict[str, None] = field(default_factory=dict)
    used: dict[int, None] = field(default_factory=dict)
    made: dict[int, None] = field(default_factory=dict)
    saved: dict[int, None] = field(default_factory=dict)
    kept: dict[int, None] = field(default_factory=dict)

    def add(self, other: _Part) -> None:
        """Add the operators of a later part."""
        self.flops += other.flops
        self.uncounted.update(other.uncounted)
        self.used.update(other.used)
        self.made.update(other.made)
        self.saved.update(other.saved)


class _Pass(TorchDispatchMode):
    """Records each operator of a pass of a module in the present part.

    Tensors are identified by their storages. References keep these alive, so that no
    key is used twice; a view has the key of its base.

    Attributes:
        module: A copy without values.
        inputs: Tensors of a micro-batch for the module.
        weights: Costs of its parameters by their keys.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        example: Sequence[Tensor],
        config: IPUConfig,
        states: Mapping[int, WeightState],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._held: dict[int, tuple[Any, int]] = {}  # with the bytes on a device
        self.module = copy_of_shapes(module)
        self.inputs = [like(tensor) for tensor in example]
        if config.types.is_half:
            self.inputs = [
                t.half() if t.is_floating_point() else t for t in self.inputs
            ]
        copies = dict(self.module.named_parameters())
        self.weights = {
            self.key(copies[name]): weight_cost(name, weight, states.get(id(weight)))
            for name, weight in module.named_parameters()
        }
        self._buffers = {*self.keys(self.module.buffers())}

    def run(
        self, config: IPUConfig, call: Call, present: Callable[[], _Part]
    ) -> list[Tensor]:
        """Call the module in train mode, and return the tensors of its outputs."""
        self._present = present
        self._from_host = self.keys(self.inputs)
        with mode(self.module, training=True), torch.enable_grad(), saved_tensors_hooks(
            self._save, lambda tensor: tensor
        ), self, computed_in(self.module, config):
            outputs = call(self.module, self.inputs)
        return list(tensors_of(leaves_of(outputs)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        part = self._present()
        part.has_operators = True
        flops = _flops_of(func, args, result)
        part.flops += flops or 0
        if flops is None:
            part.uncounted[str(func._schema.name)] = None
        used = self.keys(tensors_of((args, kwargs)))
        part.used.update(used)
        for key in self.keys(tensors_of(result)):
            if key not in used and key not in self.weights:
                part.made[key] = None
        return result

    def _save(self, tensor: Tensor) -> Tensor:
        key = self.key(tensor)
        if key not in self.weights and key not in self._buffers:
            self._present().saved[key] = None
        return tensor

    def key(self, tensor: Tensor) -> int:
        """Return the key of a tensor's storage."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._held:
            count = storage.nbytes() // tensor.element_size()
            self._held[key] = storage, count * device_bytes(tensor.dtype)
        return key

    def keys(self, tensors: Iterable[Tensor]) -> dict[int, None]:
        """Return the keys of tensors without repetition, in their order."""
        return dict.fromkeys(map(self.key, tensors))

    def num_bytes(self, keys: Iterable[int]) -> int:
        """Return the bytes of storages on a device."""
        return sum(self._held[key][1] for key in keys)

    def costs(self, parts: Mapping[int, _Part]) -> tuple[memory.StageCost, ...]:
        """Return the costs of parts by their numbers; each storage counts once."""
        computed = {*self._from_host}.union(*(part.made for part in parts.values()))
        seen: set[int] = set()
        costs = []
        for number, part in sorted(parts.items()):
            inputs = [k for k in part.used if k in computed and k not in part.made]
            costs.append(
                memory.StageCost(
                    stage=number,
                    ipu=part.ipu,
                    names=tuple(part.names),
                    weights=tuple(
                        weight
                        for key, weight in self.weights.items()
                        if key in part.used and key not in seen
                    ),
                    buffer_bytes=self.num_bytes({*part.used} & self._buffers - seen),
                    flops=part.flops,
                    input_bytes=self.num_bytes(inputs),
                    saved_bytes=self.num_bytes(part.saved),
                    kept_bytes=self.num_bytes({*inputs, *part.kept}),
                    made_bytes=self.num_bytes({*inputs, *part.made}),
                    num_kept=part.num_kept,
                    uncounted=tuple(part.uncounted),
                )
            )
            seen.update(part.used)
        return tuple(costs)


# Floating-point operations ------------------------------------------------------------


def _flops_of(operator: Any, args: Sequence[Any], result: Any) -> int | None:
    """Return the floating-point operations of an operator; None without a formula.

    Operators with little work count 0.
    """
    space, _, name = operator._schema.name.partition("::")
    if space not in ("aten", "prim", "prims"):
        return None if isinstance(result, Tensor) else 0
    if name in _PRODUCTS:
        left, right = (args[place] for place in _PRODUCTS[name])
        columns = right.shape[-1] if right.dim() > 1 else 1
        return 2 * int(left.numel()) * int(columns)
    if name in _CONVOLUTIONS:
        place = _CONVOLUTIONS[name]
        is_transposed = place is not None and args[place]
        images = args[0] if is_transposed else result
        places = prod(map(int, (images.shape[0], *images.shape[2:])))
        return 2 * places * int(args[1].numel())
    if name in _ATTENTION:
        query, key, value = args[:3]
        pairs = prod(query.shape[:-1]) * key.shape[-2]
        return 2 * int(pairs) * (int(query.shape[-1]) + int(value.shape[-1]))
    is_costly = _COSTLY.search(name) and not _ELEMENTWISE.search(name)
    return None if is_costly else 0


_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), (1, 2)),
}
"""Matrix products, and the places of their arguments, of which the first may be a
batch."""

_CONVOLUTIONS: dict[str, int | None] = {
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), 6),
    **dict.fromkeys(("mkldnn_convolution", "_slow_conv2d_forward")),
}
"""Convolutions, and the place of the argument that says whether they are transposed."""

_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
}

_COSTLY = re.compile(
    r"(^|_)(b?mm|addbmm|mv|dot|ger|matmul|linear|conv\w*|attention|rnn|gru|lstm"
    r"|fft|linalg|cdist|pdist|trilinear)(_|\d|$)"
)
_ELEMENTWISE = re.compile(r"_thnn_fused_|_conj|convert")


# Shapes without values ----------------------------------------------------------------


_ASKS_FOR_VALUES = ".numpy() is not supp", "unsupported format string passed to Fake"
"""Beginnings of the messages of torch's errors that have no class of their own."""


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Create all tensors inside the context with shapes and types, but no values.

    Torch's module for this takes a second to import, so use it only where such tensors
    are needed. Random states are restored at the end: a module may draw numbers without
    torch.

    Raises:
        UnsupportedError: Code inside reads values.

    Example:
        >>> with shapes_only():
        ...     product = torch.ones(1_000_000, 2) @ torch.ones(2, 1_000_000)
        >>> product.shape
        torch.Size([1000000, 1000000])
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    random_state = HostRandomState()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True  # errors are raised all the same
    validated = Distribution._validate_args  # needs values; a trace leaves it out, too
    Distribution.set_default_validate_args(False)
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call,unused-ignore]
    known = KnownShapes()  # type: ignore[no-untyped-call,unused-ignore]
    try:
        with warnings.catch_warnings(), mode, known:
            warnings.simplefilter("ignore")  # they come again when it is traced
            yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, IpufitError) else error
        kinds = DataDependentOutputException, DynamicOutputShapeException
        if isinstance(cause, kinds) or str(cause).startswith(_ASKS_FOR_VALUES):
            raise UnsupportedError(
                "The costs of a module are measured on tensors that have shapes and "
                "no values, and code computes with values, or makes a tensor whose "
                f"shape depends on them, at {user_line(cause)}. Keep to operations on "
                "tensors of fixed shapes; `check` says what PopTorch refuses. (torch's "
                f"words: {cause})"
            ) from error
        raise
    finally:
        Distribution.set_default_validate_args(validated)
        log.disabled = was_disabled
        random_state.put_back()


def like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type, and a parameter for a parameter.

    Example:
        >>> like(torch.nn.Parameter(torch.zeros(2), requires_grad=False)).shape
        torch.Size([2])
    """
    shape, dtype = unfetched(tensor, "shape"), unfetched(tensor, "dtype")
    empty: Tensor = torch.empty(shape, dtype=dtype)
    if isinstance(tensor, torch.nn.Parameter):
        is_trained = bool(unfetched(tensor, "requires_grad"))
        return torch.nn.Parameter(empty, requires_grad=is_trained)
    return empty


def copy_of_shapes(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module inside `shapes_only`, with weights of its shapes and types.

    Other tensors in the module, such as plain attributes or elements of lists, are
    copied in the same way. Weights that PopTorch trains aren't fetched from their
    device.

    Raises:
        ConfigError: The module can't be copied.

    Example:
        >>> with shapes_only():
        ...     copied = copy_of_shapes(torch.nn.Linear(2, 3))
        >>> copied.weight.shape
        torch.Size([3, 2])
    """
    memo: dict[int, Any] = {id(weight): like(weight) for weight in weights_of(module)}
    try:
        return deep_copied(module, memo)
    except Exception as error:  # a user's attribute may raise anything
        raise ConfigError(
            f"The costs of {type(module).__name__} are measured on a copy without "
            f"values, and it can't be copied: {error}."
        ) from error


class KnownShapes(TorchFunctionMode):
    """Replaces functions by variants whose output shapes don't depend on values.

    PopTorch compiles these functions. On tensors without values, torch 2.0 computes
    none of them, and later versions only some.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = NotImplemented
        if func in _INSTEAD:
            result = _INSTEAD[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


def _repeated(
    input: Tensor,
    repeats: Any,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Any:
    if not isinstance(repeats, int) or repeats < 1:
        return NotImplemented
    rows = input.reshape(-1) if dim is None else input
    dim = 0 if dim is None else dim
    if not -rows.dim() <= dim < rows.dim():
        return NotImplemented
    place = dim % rows.dim()
    shape = [*rows.shape[: place + 1], repeats, *rows.shape[place + 1 :]]
    return rows.unsqueeze(place + 1).expand(shape).flatten(place, place + 1)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Any:
    if num_classes < 1 or tensor.dtype != torch.int64:
        return NotImplemented
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    if minlength < 1 or input.dim() != 1:
        return NotImplemented
    counts = torch.ones_like(input) if weights is None else weights
    zeros = torch.zeros(minlength, dtype=counts.dtype, device=input.device)
    return zeros.index_add(0, input, counts)


_without_mkldnn = threading.Lock()


def _lstm(*args: Any, **kwargs: Any) -> Any:
    # With this library it is one operator, which saves the library's own data. Only the
    # whole process can do without, so it does for as short a time as possible.
    # `torch.backends.mkldnn.flags` would set more than this, and warn.
    with _without_mkldnn:
        had_mkldnn = _get_mkldnn_enabled()
        _set_mkldnn_enabled(False)
        try:
            return torch.lstm(*args, **kwargs)
        finally:
            _set_mkldnn_enabled(had_mkldnn)


_INSTEAD: dict[Any, Callable[..., Any]] = {
    torch.lstm: _lstm,
    Tensor.__deepcopy__: lambda tensor, memo: like(tensor),
    torch.repeat_interleave: _repeated,
    Tensor.repeat_interleave: _repeated,
    torch.nn.functional.one_hot: _one_hot,
    torch.bincount: _bincount,
    Tensor.bincount: _bincount,
}
"""Each gives NotImplemented where the shape depends on values after all."""
