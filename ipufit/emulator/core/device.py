# SPDX-License-Identifier: Apache-2.0
"""A compiled model on its IPUs: weights, gradients, and calls on micro-batches.

The device shares no tensor with the host's module. Only `upload` and `download` copy
weights, so a script that forgets a copy sees stale values, as on a pod.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor
from torch._C import _set_grad_enabled

from .._args_parser import CallArguments
from .._logging import logger
from .._processes import Processes
from ..enums import MeanReductionStrategy, ReductionType
from ..options import Options, Settings
from .anchors import UPDATED, Anchors, snapshot
from .device_optimizer import DeviceOptimizer
from .float16 import device_tensor, rounding
from .layout import (
    Inputs,
    Layout,
    Outputs,
    ReplicaGroups,
    element_name,
    synthetic_inputs,
)
from .program import Program, refuse_bad_gradients
from .recording import is_learned

Results = Tuple[Tensor, ...]
"""Tensors that a program returns for one micro-batch."""

Collect = Callable[[int, Results], None]
"""Takes the index of a micro-batch and its results."""


class DeviceWeights:
    """The weights of one model on its replicas.

    Parameters are equal on all replicas, so they are stored once; grouped ones once
    for each group. A buffer that the program changes has a copy of its own on each.

    Args:
        program: The program that reads and changes the weights.
        host: Host tensors by name; their values are uploaded.
        replicas: The number of replicas.
        groups: The weights, by name, whose values differ between groups of replicas.

    Attributes:
        trained: The weights that have gradients; a grouped weight has one tensor for
            each group.
        groups_of_elements: Number of groups of each tensor of a grouped weight, by the
            tensor's name.
        groups: As given.
        arguments: For each replica the weights in the order in which the program takes
            them.
    """

    def __init__(
        self,
        program: Program,
        host: dict[str, Tensor],
        replicas: int,
        groups: Mapping[str, ReplicaGroups],
    ) -> None:
        self._prepare: list[Callable[[Tensor], Tensor] | None] = []
        self.groups = groups
        self._used = program.used_weights
        self._replicas: list[dict[str, Tensor]] = [{} for _ in range(replicas)]
        self.trained: dict[str, Tensor] = {}
        self.groups_of_elements: dict[str, int] = {}
        for name in program.weight_names:
            is_trained = program.has_loss and is_learned(host[name])
            elements = [
                device_tensor(value, copy=True).requires_grad_(is_trained)
                for value in self._elements(name, host)
            ]
            is_own = name in program.updated_weights and not is_trained
            if name in program.volatile_weights:
                self._prepare.append(torch.clone)
            elif is_own and name in program.unsynchronised_weights:
                self._prepare.append(torch.detach)
            else:
                self._prepare.append(None)
            for replica, weights in enumerate(self._replicas):
                element = elements[self._group(name, replica)]
                weights[name] = element.clone() if is_own else element
            if is_trained and name in groups:
                keys = [element_name(name, group) for group in range(len(elements))]
                self.trained.update(zip(keys, elements))
                self.groups_of_elements.update(dict.fromkeys(keys, len(elements)))
            elif is_trained:
                self.trained[name] = elements[0]
        self.arguments = [list(weights.values()) for weights in self._replicas]

    def _elements(self, name: str, host: dict[str, Tensor]) -> list[Tensor]:
        """Return the host's value for each group of replicas, or the only value."""
        value = host[name].detach()
        groups = self.groups.get(name)
        if groups is None:
            return [value]
        return [value[groups.row(group)] for group in range(groups.count)]

    def _group(self, name: str, replica: int) -> int:
        return self.groups[name].members[replica] if name in self.groups else 0

    def of_replicas(self, name: str) -> list[Tensor]:
        """Return the tensors of one weight, one for each replica."""
        return [weights[name] for weights in self._replicas]

    def fresh_arguments(self, replica: int) -> list[Tensor]:
        """Return the weights of a micro-batch.

        Integers that it changes are copied. Other buffers that it changes are written
        through an alias, so that their values aren't part of the next backward pass.
        """
        pairs = zip(self.arguments[replica], self._prepare)
        return [prepare(tensor) if prepare else tensor for tensor, prepare in pairs]

    @torch.no_grad()
    def upload(self, host: dict[str, Tensor]) -> None:
        """Copy the values of some or all of the host's weights to the device."""
        for name in host:
            elements = self._elements(name, host)
            for replica, weights in enumerate(self._replicas):
                element = elements[self._group(name, replica)]
                weights[name].copy_(device_tensor(element))

    @torch.no_grad()
    def download(self, host: dict[str, Tensor]) -> None:
        """Copy the weights to the host: the first replica's, or one of each group."""
        for name in self._used:
            target = host[name].detach()
            if name in self.groups:
                for row, replica in enumerate(self.groups[name].returned):
                    target[row].copy_(self._replicas[replica][name])
            else:
                target.copy_(self._replicas[0][name])


class Gradients:
    """Computes gradients, and adds up or averages those of an update.

    A mean over P processes divides by P * G * R: each gradient before it is added
    (`Running`), or the sum afterwards (`Post`). The running mean of a group of replicas
    divides by G and the size of the group (PopART, `optimizerdecompose.cpp`).

    Args:
        options: The executor's options.
        layout: The factors G and R.
        weights: The device's weights.
        optimizer: Updates the weights.
        processes: Add up gradients over processes; None for a single process.

    Attributes:
        share: Divisor of each micro-batch's gradients, 1 without a running mean.
    """

    def __init__(
        self,
        options: Options,
        layout: Layout,
        weights: DeviceWeights,
        optimizer: DeviceOptimizer,
        processes: Processes | None,
    ) -> None:
        self.optimizer = optimizer
        training = options.Training
        strategy = training.meanAccumulationAndReplicationReductionStrategy
        reduction = training.accumulation_and_replication_reduction_type
        is_mean = reduction == ReductionType.Mean
        is_running = is_mean and strategy == MeanReductionStrategy.Running
        replicas = layout.replicas * options.Distributed.numProcesses
        divisor = layout.gradient_accumulation * replicas if is_mean else 1
        self.share = divisor if is_running else 1
        self._divisor = 1 if is_running else divisor
        self._factors = weights.groups_of_elements if is_running else {}
        self._trained = weights.trained
        self._halves = {n for n, t in self._trained.items() if t.dtype == torch.float16}
        self._is_checked = Settings(options).stops_at_exceptions
        self._processes = processes
        self._scale = 1.0
        self._accum_type = torch.float32
        self._accumulated: dict[str, Tensor] = {}
        self._backward = find_backward()
        self._seed = torch.empty(())
        self._seed_key: tuple[object, ...] = ()
        # Weights whose gradient torch gives as a zero without memory, as of `sgn`.
        self._zeros: list[Tensor] | None = None

    def begin(self) -> None:
        """Begin a call, and drop the gradients of a call that failed.

        The loss scaling of the optimizer multiplies the losses, and the optimizer
        divides it out. float16 gradients are added up in its `accum_type`.
        """
        settings = self.optimizer.settings
        self._scale = settings.loss_scaling.value / self.share
        self._accum_type = settings.accum_type
        self._accumulated.clear()
        for tensor in self._trained.values():
            tensor.grad = None

    def add(self, results: Results) -> Results:
        """Back-propagate the loss, and return the other results of the program.

        Args:
            results: Results of a program, the loss last: one micro-batch's, or one for
                each micro-batch of a fold.
        """
        *others, loss = results
        if not loss.requires_grad:  # nothing is trained
            return tuple(others)
        scale = self._scale * self.optimizer.loss_scale_factor
        key = scale, loss.dtype, loss.shape
        if key != self._seed_key:
            self._seed, self._seed_key = torch.full_like(loss, scale), key
        self._backward(loss, self._seed)
        if self._zeros is None:
            self._zeros = [
                tensor
                for tensor in self._trained.values()
                if tensor.grad is not None and tensor.grad._is_zerotensor()
            ]
        for tensor in self._zeros:
            tensor.grad = torch.clone(tensor.grad)  # type: ignore[arg-type,unused-ignore]
        # torch would add them up in float16; a device does as `accum_type` says.
        for name in self._halves:
            tensor = self._trained[name]
            if tensor.grad is not None:
                gradient = tensor.grad.to(self._accum_type)
                tensor.grad = None
                if name in self._accumulated:
                    self._accumulated[name] += gradient
                else:
                    self._accumulated[name] = gradient
        return tuple(others)

    def take(self) -> dict[str, Tensor | None]:
        """Return the reduced gradients by name, and reset the sums."""
        gradients: dict[str, Tensor | None] = {}
        for name, tensor in self._trained.items():
            gradients[name] = tensor.grad
            tensor.grad = None
        if self._accumulated:
            gradients.update(self._accumulated)
            self._accumulated.clear()
        if self._processes is not None:
            self._processes.add_up(gradients, self._divisor)
        for name, factor in self._factors.items():
            gradient = gradients[name]
            if gradient is not None:
                gradient.mul_(factor)
        if self._divisor != 1 and self._processes is None:
            present = [g for g in gradients.values() if g is not None]
            if present:
                torch._foreach_div_(present, float(self._divisor))
        if self._is_checked:
            refuse_bad_gradients(gradients)
        return gradients


@functools.lru_cache(maxsize=None)
def find_backward() -> Callable[[Tensor, Tensor], None]:
    """Return a function that adds the gradients of a loss to the `grad` of weights.

    `torch.autograd.backward` checks its arguments, which takes as long as the whole
    backward pass of a small network. The device always passes one loss and one gradient
    of its shape. So the function calls torch's engine directly if that private
    interface takes these arguments.
    """
    try:
        engine = torch.autograd.Variable._execution_engine.run_backward  # type: ignore[attr-defined,unused-ignore]

        def backward(loss: Tensor, gradient: Tensor) -> None:
            engine(
                (loss,),
                (gradient,),
                False,  # keep the graph
                False,  # make one of this pass
                (),  # into the leaves
                allow_unreachable=True,
                accumulate_grad=True,
            )

        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.ones((), requires_grad=True)
            backward(torch.mul(leaf, 2.0), torch.ones(()))
    except (AttributeError, TypeError):
        return torch.autograd.backward
    return backward


class DeviceCall(contextlib.ExitStack):
    """A call while it runs.

    Args:
        device: The device that runs it.
        tensors: The tensors of all micro-batches.
    """

    def __init__(self, device: Device, tensors: list[Tensor]) -> None:
        super().__init__()
        self.device = device
        program = device.program
        self.inputs = Inputs(
            device.layout,
            tensors,
            program.written_inputs,
            reads_memory=program.reads_memory,
        )
        self.outputs = Outputs(device.layout)

    def collect(self, index: int, results: Results) -> None:
        """Store the results of a micro-batch; called in the order of indices."""
        self.outputs.add(index, results)

    def saw_update(self, indices: range) -> None:
        """Note that the update of these micro-batches is done."""

    def watched(self) -> dict[str, Tensor]:
        """Return the anchored tensors that aren't results of the program."""
        return {}


class WatchedCall(DeviceCall):
    """A call of a training model that collects anchored gradients and updates.

    A gradient is that of one micro-batch on one replica, multiplied by the loss
    scaling, before gradients are accumulated and reduced. On a device the tensor of
    this name is the same (PopART, `tensornames.hpp`). All micro-batches of an update
    have the same tensors after it.
    """

    def __init__(self, device: Device, tensors: list[Tensor]) -> None:
        super().__init__(device, tensors)
        self._gradients = Outputs(device.layout)
        self._updates = Outputs(device.layout)
        self._latest: dict[str, Tensor] = {}
        for name in set(device.anchors.gradients.values()):
            for element in {
                id(t): t for t in device.weights.of_replicas(name)
            }.values():
                keep = functools.partial(self._latest.__setitem__, name)
                self.callback(element.register_hook(keep).remove)  # type: ignore[no-untyped-call,unused-ignore]

    def collect(self, index: int, results: Results) -> None:
        """Store the results and gradients of a micro-batch; zeros where it has none."""
        super().collect(index, results)
        device, values = self.device, []
        replica = index % device.layout.replicas
        share = device.gradients.share if device.gradients is not None else 1
        for name in device.anchors.gradients.values():
            gradient = self._latest.get(name)
            if gradient is None:
                gradient = torch.zeros_like(device.weights.of_replicas(name)[replica])
            # A copy in any case: torch goes on adding to this memory.
            values.append(torch.mul(gradient, share))
        self._gradients.add(index, tuple(values))

    def saw_update(self, indices: range) -> None:
        """Store the tensors after an update."""
        if not self.device.anchors.after_updates or self.device.gradients is None:
            return
        tensors = self.device.gradients.optimizer.tensors()
        values = [
            [snapshot(value) for value in self._of_replicas(name, tensors)]
            for name in self.device.anchors.after_updates.values()
        ]
        of_replicas = list(zip(*values))
        for index in indices:
            self._updates.add(index, of_replicas[index % len(of_replicas)])

    def _of_replicas(self, name: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        weights = self.device.weights
        if name.startswith(UPDATED):
            return weights.of_replicas(name[len(UPDATED) :])
        for weight, groups in weights.groups.items():
            if name.endswith(f"___{weight}"):
                return [tensors[element_name(name, g)] for g in groups.members]
        return [tensors[name]] * len(weights.arguments)

    def watched(self) -> dict[str, Tensor]:
        """Return the collected tensors, by the names that the user gave them."""
        anchors = self.device.anchors
        return {
            **dict(zip(anchors.gradients, self._gradients.tensors())),
            **dict(zip(anchors.after_updates, self._updates.tensors())),
        }


class Runner:
    """Runs the micro-batches of calls one after the other."""

    def run(self, call: DeviceCall) -> None:
        """Run a call: each micro-batch once, and in training D updates.

        Each update accumulates the gradients of G micro-batches on each of R
        replicas, reduces them, and steps the optimizer once (PopART,
        `popprograms.cpp`).
        """
        gradients, layout = call.device.gradients, call.device.layout
        if gradients is None:
            self.run_micro_batches(call, layout.micro_batches)
            return
        gradients.begin()
        size = layout.micro_batches_per_update
        for first in layout.micro_batches[::size]:
            indices = range(first, first + size)
            self.run_micro_batches(call, indices)
            gradients.optimizer.step(gradients.take())
            call.saw_update(indices)

    def run_micro_batches(self, call: DeviceCall, indices: range) -> None:
        """Run the micro-batches of an update, or of an inference call.

        Args:
            call: The call.
            indices: Indices of the micro-batches: all replicas of one or more steps.
        """
        self.loop(call, indices, call.collect, call.device.program.run)

    def loop(
        self,
        call: DeviceCall,
        indices: range,
        collect: Collect,
        run: Callable[..., Results],
    ) -> None:
        """Run micro-batches one after the other by a function of weights and inputs."""
        device = call.device
        replicas, gradients = device.layout.replicas, device.gradients
        weights = device.weights
        records = torch.is_grad_enabled()
        try:
            for index in indices:
                rows = call.inputs.rows(index)
                arguments = weights.fresh_arguments(index % replicas)
                # Each time: the program may leave it otherwise.
                _set_grad_enabled(gradients is not None)
                results = run(*arguments, *rows)
                if gradients is not None:
                    results = gradients.add(results)
                collect(index, results)
        finally:
            _set_grad_enabled(records)


CLOCK_HZ = 1.33e9
"""The clock rate of a Mk2 IPU (Graphcore, IPU-M2000 data sheet)."""


@dataclass(frozen=True)
class Executable:
    """A compiled model: its program, and everything it was compiled with.

    Attributes:
        num_ipus: Number of IPUs that the pod reserves for it.
        arguments: The arguments of a call, as tensors with shapes but no data.
        first_micro_batch: The arguments of the first micro-batch it was compiled with,
            in the types that were passed.
        host_weights: The module's parameters and buffers by name. Integers are
            copies: they are constants of the program.
        replica_groups: The groups of replicas, by the name of the parameter that
            differs between them.
        tensor_names: Names that `Options.anchorTensor` accepts.
        anchors: The tensors of the program that are anchored.
        runner: Runs the program: looped or folded.
    """

    program: Program
    num_ipus: int
    arguments: CallArguments
    first_micro_batch: CallArguments
    host_weights: dict[str, Tensor]
    replica_groups: dict[str, ReplicaGroups]
    tensor_names: list[str]
    anchors: Anchors
    runner: Runner


class CallResults(NamedTuple):
    """The results of one call on the host, and the times at which it got on.

    Times are seconds of this machine's clock.

    Attributes:
        anchored: Anchored tensors, by the user's names.
        started: Time at which the caller handed over the inputs.
        taken: Time at which each micro-batch was taken by its replica, in order. The
            results of the micro-batch before it had been collected then.
        ran: Time at which the results of the last micro-batch had been collected.
        returned: Time at which the outputs were complete.
    """

    outputs: list[Tensor]
    anchored: dict[str, Tensor]
    started: float
    taken: list[float]
    ran: float
    returned: float

    def cycles(self) -> int:
        """Return the clock cycles of an IPU in the time that the device ran."""
        return round((self.ran - self.taken[0]) * CLOCK_HZ)


class Device:
    """IPUs with a compiled model on them, from attach to detach.

    Args:
        executable: The model, with the host's weights to upload and to download into.
        options: The executor's options.
        lease: Releases the IPUs.
        rng: The device's random state.
        optimizer: Updates the weights; None for inference.
        processes: The processes that train the model; None if there is only this
            process.
    """

    def __init__(
        self,
        executable: Executable,
        options: Options,
        lease: Callable[[], Any],
        rng: DeviceRng,
        optimizer: DeviceOptimizer | None,
        processes: Processes | None = None,
    ) -> None:
        self._executable = executable
        self._settings = settings = Settings(options)
        self._lease = lease
        self.rng = rng
        self._optimizer = optimizer
        self.layout = layout = Layout(options)
        self.program, self.anchors = executable.program, executable.anchors
        self._draws = self.program.is_random or settings.rounds_at_random
        self.gradients: Gradients | None = None
        # Have the C library keep the memory that one micro-batch frees for the next.
        # glibc gives what is free at the end of the heap back to the system, and clears
        # it again when it is needed: up to a quarter of the time, measured. Whenever a
        # block is freed that is larger than all before, up to 32 MiB, it keeps twice as
        # much from then on (mallopt(3), `M_MMAP_THRESHOLD`). So one is, unwritten.
        torch.empty(31 * 2**20, dtype=torch.uint8)
        logger.debug("Writing weights from host to IPU memory")
        try:
            with torch.inference_mode(False):
                self.weights = DeviceWeights(
                    self.program,
                    executable.host_weights,
                    layout.replicas,
                    executable.replica_groups,
                )
                if optimizer is not None:
                    optimizer.attach(
                        self.weights.trained, executable.replica_groups, processes
                    )
                    self.gradients = Gradients(
                        options, layout, self.weights, optimizer, processes
                    )
        except Exception:
            lease()
            raise

    def release(self) -> None:
        """Save the optimizer's state on the host, and release the IPUs."""
        if self._optimizer is not None:
            self._optimizer.detach()
        self._lease()

    def download(self) -> None:
        """Copy the device's weights to the host, unless the data is synthetic.

        With synthetic data PopART doesn't stream weights (`Devicex::weightsToHost`).
        """
        if not self._settings.is_synthetic:
            logger.debug("Writing weights from IPU to host")
            self.weights.download(self._executable.host_weights)

    def upload(self, names: Iterable[str] | None = None) -> None:
        """Copy all or the named weights of the host to the device."""
        host = self._executable.host_weights
        if names is not None:
            self.weights.upload({name: host[name] for name in names})
            return
        logger.debug("Writing weights from host to IPU memory")
        self.weights.upload(host)
        if self._optimizer is not None:
            self._optimizer.weights_were_uploaded()

    def run(self, tensors: list[Tensor]) -> CallResults:
        """Run one call of the executor on these tensors."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # updates need tensors with versions
                return self.run(tensors)
        started = perf_counter()
        is_synthetic = self._settings.is_synthetic
        if is_synthetic:
            tensors = synthetic_inputs(tensors)
        kind = WatchedCall if self.anchors.num_watched else DeviceCall
        with kind(self, tensors) as call:
            if self._draws:
                call.enter_context(self.rng)
            if self._settings.rounds_at_random:
                call.enter_context(rounding(is_stochastic=True))
            self._executable.runner.run(call)
        ran = perf_counter()
        results = call.outputs.tensors()
        num_outputs = len(results) - len(self.anchors.results)
        anchored = dict(zip(self.anchors.results, results[num_outputs:]))
        anchored.update(call.watched())
        outputs = results[:num_outputs]
        if is_synthetic:  # PopTorch returns uninitialised memory
            outputs = list(map(torch.zeros_like, outputs))
            anchored = {name: torch.zeros_like(t) for name, t in anchored.items()}
        elif self.program.written_inputs:
            call.inputs.write_back()
        taken = call.inputs.taken
        done = CallResults(outputs, anchored, started, taken, ran, perf_counter())
        if self._settings.counts_cycles:
            logger.debug("Total number of IPU cycles: %d", done.cycles())
        return done


# Random state ----------------------------------------------------------------------


_NUM_WORDS = torch.Generator().get_state().numel() // 4


class DeviceRng:
    """The random state of a device: torch's generator, apart from the host's.

    Args:
        seed: The seed of all processes of a run.
        process: The index of this process. Process 0 draws the numbers of the seed,
            each other process numbers of its own.

    Example:
        >>> rng = DeviceRng(seed=1)
        >>> with rng:
        ...     first = torch.rand(2)
        >>> with DeviceRng(seed=1):
        ...     print(torch.equal(torch.rand(2), first))
        True
    """

    def __init__(self, seed: int, process: int = 0) -> None:
        self._seed = seed
        self._process = process
        self._state = self._seeded(seed).get_state()
        self._host_state: Tensor | None = None

    def __enter__(self) -> None:
        self._host_state = torch.random.get_rng_state()
        torch.random.set_rng_state(self._state)

    def __exit__(self, *exception: object) -> None:
        if self._host_state is not None:
            self._state = torch.random.get_rng_state()
            torch.random.set_rng_state(self._host_state)

    def _seeded(self, seed: int) -> torch.Generator:
        if self._process:
            text = f"{seed} {self._process}".encode()
            seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
        return torch.Generator().manual_seed(seed)

    def save(self) -> list[int]:
        """Return the state as a list: the seed, then torch's state in 32-bit words."""
        logger.debug("Reading random seed")
        logger.debug("Reading RNG state")
        return [self._seed, *self._state.numpy().view(np.uint32).tolist()]

    def restore(self, state: Sequence[int]) -> None:
        """Set the state to a list from `save`, or seed it with a list of a seed.

        Raises:
            ValueError: `state` is neither.

        Example:
            >>> rng = DeviceRng(seed=1)
            >>> saved = rng.save()
            >>> with rng:
            ...     first = torch.rand(2)
            >>> rng.restore(saved)
            >>> with rng:
            ...     print(torch.equal(torch.rand(2), first))
            True
        """
        seed, *words = check_rng_state(state)
        logger.debug("Setting random seed to %d", seed)
        generator = self._seeded(seed)
        if words:
            logger.debug("Setting RNG state")
            generator.set_state(
                torch.from_numpy(np.array(words, dtype=np.uint32).view(np.uint8))
            )
        self._seed, self._state = seed, generator.get_state()


def check_rng_state(state: Sequence[int]) -> list[int]:
    """Check a list that describes a random state, and return a copy.

    Args:
        state: A seed alone, or a seed and the words of a state.

    Raises:
        ValueError: The list has another length, or a word has more than 32 bits.

    Example:
        >>> check_rng_state([42])
        [42]
        >>> check_rng_state([42, 1])
        Traceback (most recent call last):
            ...
        ValueError: A random state is a list of a seed, or of a seed and ... Got 2 ...
    """
    integers = list(state)
    if len(integers) not in (1, 1 + _NUM_WORDS):
        raise ValueError(
            "A random state is a list of a seed, or of a seed and the state that "
            f"`rng_state` gave ({1 + _NUM_WORDS} integers in all). Got "
            f"{len(integers)} of them; a list from real IPUs can't be used here."
        )
    if not all(0 <= word < 2**32 for word in integers[1:]):
        raise ValueError(
            "The words of a random state have 32 bits: it isn't one that `rng_state` "
            "of the emulator gave."
        )
    return integers
