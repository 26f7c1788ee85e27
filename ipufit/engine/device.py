# SPDX-License-Identifier: Apache-2.0
"""Compiled programs on a device, their weights and optimiser in step."""

from __future__ import annotations

import contextlib
import gc
import re
from dataclasses import dataclass, field
from typing import (
    Any,
    Callable,
    Generic,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    TypeVar,
)

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from ipufit import _env
from ipufit._poptorch import poptorch
from ipufit._spans import span
from ipufit.batching import BatchPlan
from ipufit.distributed import Processes
from ipufit.engine.constants import BakedInValues
from ipufit.engine.step import Findings, Step
from ipufit.engine.weights import (
    MODULE,
    Counters,
    ExactWeights,
    Fingerprint,
    TrainedParts,
    Wrappers,
    checksum,
    fingerprint,
    host_tensors,
    weights_of,
)
from ipufit.errors import ConfigError, DataError, IpufitError
from ipufit.optimizers import hyper_parameters

_OUT_OF_RANGE = re.compile(r"out of (range|bounds)|index.* invalid|Class values must")


def refuse_index(
    error: Exception, module: torch.nn.Module, batch: Sequence[Tensor]
) -> None:
    """Raise an error of torch's with the indices of the call, if one doesn't exist.

    The first micro-batch fails when it is traced, with shapes; later ones in the call.

    Args:
        error: Error that the call raised.
        batch: Tensors of the call.

    Raises:
        DataError: torch refused an index.

    Example:
        >>> error = IndexError("index out of range in self")
        >>> refuse_index(error, torch.nn.Embedding(2, 3), [torch.tensor([0, 5])])
        Traceback (most recent call last):
        ipufit.errors.DataError: Embedding failed in a call: index out of range in ...
    """
    is_own = isinstance(error, (IpufitError, poptorch.Error))
    text = str(error).rstrip(".")
    if is_own or not (isinstance(error, IndexError) or _OUT_OF_RANGE.search(text)):
        return
    raise DataError(
        f"{type(module).__name__} failed in a call: {text}. The integers of this call "
        f"are {_ranges(batch)}: a class, or the row of an embedding, must be less than "
        "their number, and 0 or more."
    ) from error


def _ranges(batch: Sequence[Tensor]) -> str:
    ranges = [
        f"{str(t.dtype).replace('torch.', '')} {list(t.shape)} from {int(t.min())} to "
        f"{int(t.max())}"
        for t in batch
        if not t.is_floating_point() and t.dtype != torch.bool and t.numel()
    ]
    return ", ".join(ranges) or "none"


KEPT_PROGRAMS = 4
"""Programs of a kind that a model keeps: those that were used last."""


@dataclass(eq=False)
class Program:
    """A compiled program of the user's module.

    Attributes:
        executor: PopTorch's executor.
        step: The module that was traced.
        num_micro_batches: Micro-batches of a call, over all replicas.
        baked_in: Values that its code has computed with.
        on_device: Fingerprint of the weights that the device has; None if unknown.
        must_compare: Whether the device's weights have to be compared with the host's
            before the next call.
    """

    executor: poptorch.PoplarExecutor
    step: Step
    num_micro_batches: int
    baked_in: BakedInValues
    on_device: Fingerprint | None
    must_compare: bool = field(default=True, init=False)

    @property
    def findings(self) -> Findings:
        """Everything that its trace has found out."""
        return self.step.findings

    @property
    def weights(self) -> list[Tensor]:
        """The host's tensors that its device has copies of, those of losses too."""
        return self.step.weights

    def run(self, batch: list[Tensor]) -> Any:
        """Make one call, and give all that the program returns.

        Args:
            batch: Tensors of the batch; the host's values are added.

        Raises:
            DataError: The batch has an index that doesn't exist.
        """
        values = host_tensors(self.step.host_values, self.num_micro_batches)
        try:
            with span("device call"):
                return self.executor(*batch, *values)
        except (IndexError, RuntimeError) as error:
            refuse_index(error, self.step.module, batch)
            raise


@dataclass(eq=False)
class TrainingProgram(Program):
    """A compiled program that updates the weights.

    Attributes:
        wrappers: Classes that PopTorch has given to the weights.
        optimizer: The one whose values and state the device has, or gets when it is
            attached.
        random_state: State of the device's generator when the program was compiled;
            None if it has no seed.
        sent: Values of the optimiser that were sent last; empty if the device may have
            others.
        counters: Buffers that the host counts up.
        trained_parts: Parts of the module that it trains.
    """

    wrappers: Wrappers
    optimizer: torch.optim.Optimizer
    random_state: list[int] | None
    sent: tuple[object, ...]
    counters: Counters
    trained_parts: TrainedParts


ProgramT = TypeVar("ProgramT", bound=Program)


class KeptPrograms(Generic[ProgramT]):
    """Programs by all that they were built for; the one used last comes last."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, ProgramT]] = []

    def __iter__(self) -> Iterator[ProgramT]:
        """The programs, beginning with the one that was used longest ago."""
        return iter([program for _, program in self._kept])

    def get(self, key: object) -> ProgramT | None:
        """Find the program of a key, which counts as used now.

        A program is destroyed, and not found, if its code would compute with other
        values now.
        """
        for entry in self._kept:
            if entry[0] == key:
                self._kept.remove(entry)
                if entry[1].baked_in.changed() is not None:
                    entry[1].executor.destroy()
                    return None
                self._kept.append(entry)
                return entry[1]
        return None

    def make_room(self) -> None:
        """Destroy the program that was used longest ago, if no other can be kept."""
        while len(self._kept) >= KEPT_PROGRAMS:
            self._kept.pop(0)[1].executor.destroy()

    def add(self, key: object, program: ProgramT) -> None:
        """Keep a program."""
        self._kept.append((key, program))

    def drop_incomplete(self) -> None:
        """Destroy programs that may have baked in values which nobody compares."""
        for entry in [e for e in self._kept if not e[1].baked_in.is_complete]:
            self._kept.remove(entry)
            entry[1].executor.destroy()

    def clear(self) -> None:
        """Destroy all programs."""
        while self._kept:
            self._kept.pop()[1].executor.destroy()


def ready(program: Any) -> Any:
    """The program, which was prepared before it is used."""
    if program is None:
        raise RuntimeError("the program was not prepared")
    return program


class HostWeights:
    """The weights of the user's module, and the program that has newer ones.

    While it has, whoever touches a weight of the module gets them all, and may change
    them: the program's next call compares.
    """

    def __init__(self) -> None:
        self._ahead: TrainingProgram | None = None
        self._exact = ExactWeights()

    def is_behind(self, program: object) -> bool:
        """Whether a program has newer weights."""
        return program is self._ahead

    def begin_call(self, program: TrainingProgram) -> None:
        """Make weights plain before a program trains.

        Args:
            program: The one that is ahead, if there is one.
        """
        if self._ahead is None:
            program.wrappers.take_off()
            self._exact.remember(program.weights)

    def end_call(self, program: TrainingProgram) -> None:
        """Note that a program has trained, so that it is ahead.

        Args:
            program: The one that was given to `begin_call`.
        """
        if self._ahead is None:
            program.wrappers.put_on(self.bring)
        self._ahead, program.on_device, program.must_compare = program, None, False

    def bring(self) -> None:
        """Bring the newest weights to the host; the classes of weights stay."""
        program = self._ahead
        if program is not None:
            with self.shown():
                program.on_device = fingerprint(program.weights)
                program.must_compare = True
            self._ahead = None

    def bring_for_good(self, program: TrainingProgram | None) -> None:
        """Bring the newest weights, and make them plain.

        Args:
            program: The one whose classes weights may have; None if there is none.
        """
        self.bring()
        if program is not None:
            program.wrappers.take_off()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Have the newest weights on the host, plain and to be read only."""
        program = self._ahead
        if program is None:
            yield
            return
        self._ahead = None  # PopTorch itself touches weights when it fetches them
        program.wrappers.take_off()
        program.executor.copyWeightsToHostIfNeeded()
        self._exact.restore()
        try:
            yield
        finally:
            program.wrappers.put_on(self.bring)
            self._ahead = program

    def be_newest(self) -> None:
        """Let the host's weights count, whatever a program has learnt."""
        self._ahead = None


_LOSS_SCALE_FACTOR = "lossScaleUpdateFactor"


def bind_optimizer(program: TrainingProgram, optimizer: torch.optim.Optimizer) -> None:
    """Have a program train with an optimiser of the kind that it was compiled with.

    One without a state begins at the beginning, as in a program that was just compiled.

    Args:
        program: Attached or not.
        optimizer: An optimiser of `poptorch.optim`.
    """
    executor, previous = program.executor, program.optimizer
    if previous is not optimizer:
        if not optimizer.has_state():  # type: ignore[attr-defined]
            _give_first_state(optimizer, previous)
            if program.random_state is not None:
                executor.rng_state = program.random_state
        program.optimizer, program.sent = optimizer, ()
    if previous is not optimizer or not executor.isAttachedToDevice():
        # Another program may have had it meanwhile: `optimizer.state_dict()` reads from
        # the executor that it was set on last.
        give_states(optimizer, program.step)
        executor.setOptimizer(optimizer)


def give_states(optimizer: torch.optim.Optimizer, step: torch.nn.Module) -> None:
    """Give an optimiser states for weights that it hasn't trained so far.

    PopTorch gives a program the state that the optimiser has from another one, and
    logs a line for each tensor of it that is missing: those of layers that were frozen
    then. They begin with zeros, as on the device. (Values such as learning rates are
    sent before the first call; what stands for them here doesn't count.)

    Args:
        optimizer: An optimiser of `poptorch.optim`.
        step: Module that PopTorch traces; its parameters have PopTorch's names.
    """
    if not optimizer.has_state():  # type: ignore[attr-defined]
        return
    state = optimizer.state_dict()
    given = {n: state[n] for n in ("ipu_state", "ipu_param") if state.get(n)}
    with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
        weights = {name: weight.shape for name, weight in step.named_parameters()}
    full = {name: _completed(tensors, weights) for name, tensors in given.items()}
    if any(len(full[name]) > len(given[name]) for name in given):
        optimizer.load_state_dict({**state, **full})


def _completed(
    tensors: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Add tensors to an optimiser's state for the weights that have none.

    Args:
        tensors: Tensors of the state by name: the kind of state, `___`, the weight.
        weights: Shapes of all weights, by name.
    """
    kinds: dict[str, list[str]] = {}
    for key in tensors:
        start, mark, name = key.rpartition("___")
        if name in weights:
            kinds.setdefault(start + mark, []).append(name)
    full = dict(tensors)
    for kind, names in kinds.items():
        has_shape = all(tensors[kind + name].shape == weights[name] for name in names)
        like = torch.as_tensor(tensors[kind + names[0]])
        for name, shape in weights.items():
            if name not in names:
                full[kind + name] = like.new_zeros(shape if has_shape else like.shape)
    return full


def send_changes(program: TrainingProgram) -> None:
    """Send the optimiser's values to the device if it has others."""
    values = hyper_parameters(program.optimizer)
    if values != program.sent:
        program.executor.setOptimizer(program.optimizer)
        program.sent = values


def _give_first_state(
    optimizer: torch.optim.Optimizer, previous: torch.optim.Optimizer
) -> None:
    """Give an optimiser the state that one on a device begins with.

    That is zeros, and 1 for the factor of automatic loss scaling (PopART,
    `addStateTensor`; `program_key` leaves out the optimiser that begins otherwise).

    Args:
        optimizer: An optimiser without a state.
        previous: One of the same kind and parameters; the device has its state.
    """
    state = previous.state_dict()
    if state["ipu_state"] is None:
        return
    first = {
        name: torch.full_like(torch.as_tensor(value), float(name == _LOSS_SCALE_FACTOR))
        for name, value in state["ipu_state"].items()
    }
    optimizer.load_state_dict(
        {
            **optimizer.state_dict(),
            "ipu_state": first,
            "ipu_param": state["ipu_param"],
        }
    )


class IPUs:
    """Attaches the programs of a model to IPUs, and detaches them.

    Args:
        programs: Gives the programs that there are.
        on_host: The host's weights, which programs bring back when they leave.
    """

    def __init__(
        self, programs: Callable[[], Iterable[Program]], on_host: HostWeights
    ) -> None:
        self._programs = programs
        self._on_host = on_host
        self._takes_turns = _env.waits_for_ipus()

    def attached(self) -> list[Program]:
        """The programs that hold IPUs."""
        return [one for one in self._programs() if one.executor.isAttachedToDevice()]

    def cloned(self, options: poptorch.Options) -> poptorch.Options:
        """Clone options for a program; a clone isn't frozen.

        If IPUs may be short, the program compiles before it takes some, so that it
        isn't traced twice.
        """
        own = options.clone()
        is_default = own.connection_type == poptorch.ConnectionType.Always
        if is_default and not self._takes_turns and self.attached():
            own.connectionType(poptorch.ConnectionType.OnDemand)
        return own

    def attach(self, program: Program) -> None:
        """Attach a program if it isn't, which uploads the host's weights.

        One that was compiled for IPUs which aren't there stays as it is.
        """
        executor = program.executor
        if executor.isAttachedToDevice():
            return
        if executor.options.connection_type == poptorch.ConnectionType.Never:
            return
        self.acquire(executor, executor.attachToDevice)
        program.on_device = fingerprint(program.weights)
        if isinstance(program, TrainingProgram):
            program.sent = ()  # the optimiser's state brings the values of its time

    def acquire(
        self, executor: poptorch.PoplarExecutor, action: Callable[[], Any]
    ) -> None:
        """Do what needs IPUs; other programs give way if they are short.

        Args:
            executor: The one that needs them.
            action: Takes them, and raises an error of PopTorch if they are short.
        """
        others = [one for one in self.attached() if one.executor is not executor]
        if not self._takes_turns:
            try:
                action()
            except poptorch.Error as error:
                if "acquire" not in str(error):
                    raise
                gc.collect()  # executors of models that are gone hold IPUs until then
                self._takes_turns = bool(others)
            else:
                return
        for other in others:
            self.detach(other)
        action()

    def detach(self, program: Program) -> None:
        """Detach a program; what it has learnt comes back before."""
        if isinstance(program, TrainingProgram):
            self._on_host.bring_for_good(program)
        program.executor.detachFromDevice()


@dataclass
class CommonWeights:
    """Gives all processes the same weights, where they may have others.

    Args:
        module: The user's module.
        processes: The processes that run it together.
    """

    module: torch.nn.Module
    processes: Processes
    _are_common: bool = field(default=False, init=False)
    _lent: list[tuple[Tensor, int, Tensor]] = field(default_factory=list, init=False)

    def begin_alike(
        self, fetch: Callable[[], None], more: Iterable[torch.nn.Module] = ()
    ) -> None:
        """Give all processes the weights of process 0, the first time.

        Afterwards their updates are the same, and only buffers differ.

        Args:
            fetch: Brings the newest weights into the module.
            more: Further modules, such as losses with weights.
        """
        if not self.processes.are_several or self._are_common:
            return
        fetch()
        modules = (self.module, *more)
        with torch.no_grad():
            self.processes.broadcast([w for m in modules for w in weights_of(m)])
        self._are_common = True

    @torch.no_grad()
    def share_buffers(self, fetch: Callable[[], None]) -> None:
        """Give all processes the buffers of process 0.

        Each replica has running statistics of its own, such as those of batch norm. The
        first replica's count, so that all processes evaluate and end alike. They train
        on with their own, which `take_back` has restored then: otherwise some devices
        would get weights anew, and others not.

        Args:
            fetch: Brings the newest weights into the module, if it has buffers.
        """
        buffers = self.module.buffers
        if self.processes.are_several and any(True for _ in buffers()):
            fetch()
            self.take_back()
            own = [buffer.detach().clone() for buffer in buffers()]
            self.processes.broadcast(list(buffers()))
            if not self.processes.is_first:
                given = map(checksum, buffers())
                self._lent = list(zip(buffers(), given, own))

    def take_back(self) -> None:
        """Restore the buffers of this process, but those that were changed since."""
        if not self._lent:
            return
        with torch.no_grad():
            for buffer, given, own in self._lent:
                if checksum(buffer) == given:
                    buffer.copy_(own)
        self._lent = []


_PREFIX = "gradient of "
_POPART_PREFIX = f"Gradient___{MODULE}"


@dataclass(frozen=True)
class WatchedGradients:
    """The parameters whose gradients come back from the device.

    Attributes:
        shapes: Shapes of these parameters, by name.
    """

    shapes: Mapping[str, torch.Size] = field(default_factory=dict)

    @classmethod
    def of(cls, module: torch.nn.Module, names: Sequence[str]) -> WatchedGradients:
        """Watch the gradients of some of a module's parameters."""
        if not names:
            return cls()
        parameters = dict(module.named_parameters())
        return cls({name: parameters[name].shape for name in names})

    @property
    def anchors(self) -> dict[str, str]:
        """PopART's names of the gradients, by our own."""
        return {_PREFIX + name: _POPART_PREFIX + name for name in self.shapes}

    def means(
        self,
        anchored: Callable[[str], Tensor],
        options: poptorch.Options,
        plan: BatchPlan,
        loss_scaling: float,
        processes: Processes,
    ) -> dict[str, Tensor]:
        """Compute the mean of the gradients of a call's updates, over all processes.

        An anchored gradient is that of one micro-batch on one replica, multiplied by
        the loss scaling (PopART, `tensornames.hpp`); under `OutputMode.Sum` they are
        added up on each replica. An update's is their mean, or their sum if gradients
        are reduced by adding.

        Args:
            anchored: Gives the tensors that an anchor got.
            options: Options of the training program.
            plan: Factors of a call.
            loss_scaling: Factor of the loss, by which gradients are too large.
            processes: The processes that train, each with replicas of its own.

        Returns:
            float32 tensors of the parameters' shapes, by name.

        Raises:
            ConfigError: No call was made yet.
        """
        kind = options.Training.accumulation_and_replication_reduction_type
        per_update = plan.gradient_accumulation * plan.replicas
        factor = per_update if kind == poptorch.ReductionType.Sum else 1
        is_sum = options.output_mode == poptorch.OutputMode.Sum.value
        means = {}
        for name, shape in self.shapes.items():
            try:
                seen = anchored(_PREFIX + name).to(torch.float32)
            except AssertionError as error:  # PopTorch's
                raise ConfigError(
                    "There are no gradients before the first call of a run: ask for "
                    "them in on_train_batch_end."
                ) from error
            seen = seen.reshape(seen.numel() // max(shape.numel(), 1), *shape)
            count = per_update * plan.device_iterations if is_sum else max(len(seen), 1)
            means[name] = seen.sum(0).mul(factor / (count * loss_scaling))
        if processes.are_several and means:
            joined = torch.cat([mean.reshape(-1) for mean in means.values()])
            is_mean = kind != poptorch.ReductionType.Sum
            total: Any = processes.summed(joined)
            total.div_(processes.count if is_mean else 1)
            parts = total.split([mean.numel() for mean in means.values()])
            for (name, mean), part in zip(means.items(), parts):
                means[name] = part.reshape(mean.shape)
        return means
