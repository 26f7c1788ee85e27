# SPDX-License-Identifier: Apache-2.0
"""Run several micro-batches at once, where that gives what the loop gives.

Which ones depends on the program, its options and two environment variables alone,
never on time: two runs of a script give the same numbers bit by bit.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import Any, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ipufit.emulator._device.loop import Call, Collect, Results, Runner
from ipufit.emulator._folding.fold import Forward, fold
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._ground.switches import fold_bytes, folds
from ipufit.emulator._ground.torch_extras import DispatchMode
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._layout.replica_groups import ReplicaGroups
from ipufit.emulator._ops.control_flow import run_branch, run_loop
from ipufit.emulator._ops.custom_ops import run_custom_op
from ipufit.emulator._ops.host_calls import call_on_host
from ipufit.emulator._ops.printing import print_tensor
from ipufit.emulator._options.settings import Settings
from ipufit.emulator._program.program import Program
from ipufit.emulator._tracing.half import original
from ipufit.emulator._tracing.operation import tensors_in

_RELATIVE = 1e-4
"""How far folds and loop may differ, as a share of a tensor's largest element."""

_RELATIVE_OF_HALF = 0.05
"""The same where values are rounded to float16 on the way.

A sum that is made in another order may be rounded to the next number: a step of 0.001,
which all that follows carries on.
"""

_SHARE_OF_LARGEST = 1e-6
"""The difference allowed besides, as a share of the largest element of all tensors.

Gradients that are 0 but for rounding, such as those of the keys' biases in attention,
have no size of their own.
"""

_LARGEST_BLOCK = 31 * 2**20

_LOOPED_OPERATIONS = {
    run_custom_op: "it runs what stands in for a custom operation",
    call_on_host: "it calls the host (poptorch.CPU)",
    print_tensor: "it prints a tensor (poptorch.ipu_print_tensor)",
    run_branch: "it branches (poptorch.cond)",
    run_loop: "it loops (poptorch.for_loop)",
}
"""Operations that must run as often as a device runs them, in the same order."""


def choose_runner(
    program: Program,
    layout: Layout,
    settings: Settings,
    groups: Mapping[str, ReplicaGroups],
) -> Runner:
    """Choose what runs a program: folds where they are allowed, else a loop.

    `groups` are the weights that differ between groups of replicas.
    """
    writes = program.updated_weights or program.volatile_weights
    reasons: dict[str, object] = {
        "folds are turned off": not folds(),
        "there is one only": layout.steps * layout.replicas == 1,
        "replicas have weights of their own": groups,
        "replicas share inputs": layout.input_groups != layout.replicas,
        "rounding is stochastic": settings.rounds_at_random,
        "it is to stop at floating-point exceptions": settings.stops_at_exceptions,
        "the program draws random numbers": program.is_random,
        "the program writes to its buffers or inputs": writes or program.written_inputs,
        "there are no inputs": program.num_inputs == 0,
    }
    for node in program.graph.graph.nodes:
        reason = _LOOPED_OPERATIONS.get(original(node.target))
        if reason is not None:
            reasons[reason] = True
    for reason, is_given in reasons.items():
        if is_given:
            logger.debug("Micro-batches run one after the other: %s", reason)
            return Runner()
    return FoldRunner(program)


class FoldRunner(Runner):
    """Runs several micro-batches at once, if that is possible.

    Folds of new sizes run beside the loop the first time. If they fail, or give
    something else, micro-batches run in the loop for good.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._max_bytes = fold_bytes(is_training=program.has_loss)
        self._is_looped = False
        self._sizes_of: dict[int, tuple[int, ...]] = {}
        self._folds: dict[int, Forward] = {}
        self._verified: set[int] = set()

    def run_micro_batches(self, call: Call, indices: range, collect: Collect) -> None:
        """Run the micro-batches of an update, or of an inference call."""
        count = len(indices)
        # Only the loop has the gradients of each micro-batch.
        if call.watch is not None or self._is_looped or count < 2:
            sizes: tuple[int, ...] = ()
        else:
            if count not in self._sizes_of:
                self._sizes_of[count] = self._choose_sizes(call, count)
            sizes = self._sizes_of[count]
        if not sizes:
            super().run_micro_batches(call, indices, collect)
        elif self._verified.issuperset(sizes):
            for first, results in self._run_folds(call, sizes, indices):
                _give(call, first, results, collect)
        else:
            self._verify(call, sizes, indices, collect)

    def _choose_sizes(self, call: Call, count: int) -> tuple[int, ...]:
        """Choose the numbers of micro-batches to run at once; nothing for the loop."""
        if any(t.dtype == torch.float16 for t in call.weights.trained.values()):
            self._loop_from_now_on("one backward pass would add up in float16")
            return ()
        rows = call.inputs.joined(0, 1)
        memory = _Memory()
        with torch.no_grad(), memory:
            call.program.run(*call.weights.arguments[0], *rows)
        # The backward pass needs all values.
        of_one = max(1, memory.total if self._program.has_loss else memory.most)
        most = self._max_bytes // of_one
        if most < 2:
            return ()
        num_folds = -(-count // min(count, most))
        size, longer = divmod(count, num_folds)
        # Have the C library keep the memory that one fold frees for the next. glibc
        # gives what is free at the end of the heap back to the system, and clears it
        # again for each fold: a quarter of its time, measured. Whenever a block is
        # freed that is larger than all before, up to 32 MiB, it keeps twice as much
        # from then on (mallopt(3), `M_MMAP_THRESHOLD`). So one is, unwritten.
        num_bytes = of_one * (size + bool(longer))
        torch.empty(min(num_bytes, _LARGEST_BLOCK), dtype=torch.uint8)
        return (size + 1,) * longer + (size,) * (num_folds - longer)

    def _run_folds(
        self,
        call: Call,
        sizes: Sequence[int],
        indices: range,
    ) -> Iterator[tuple[int, Results]]:
        """Yield the first index of each fold, and its results, stacked."""
        first = indices.start
        for size in sizes:
            started = perf_counter()
            rows = [row.contiguous() for row in call.inputs.joined(first, size)]
            replica = first % call.layout.replicas
            arguments = [*call.weights.arguments[replica], *rows]
            with torch.set_grad_enabled(call.optimizer is not None):
                if size not in self._folds:
                    module: Any = self._program.run
                    count = len(self._program.weight_names)
                    self._folds[size] = fold(module.__self__, arguments, count, size)
                results = self._folds[size](*arguments)
            if call.optimizer is not None and call.gradients is not None:
                factor = call.optimizer.loss_scale_factor
                results = call.gradients.add(results, factor)
            call.inputs.note_fold(started, size)
            yield first, tuple(result.detach() for result in results)
            first += size

    def _verify(
        self,
        call: Call,
        sizes: Sequence[int],
        indices: range,
        collect: Collect,
    ) -> None:
        """Run micro-batches both ways; go on with folds if both do the same."""
        trained, taken = call.weights.trained.values(), call.inputs.taken
        num_taken = len(taken)
        looped: list[Results] = []
        super().run_micro_batches(
            call,
            indices,
            lambda _, results: looped.append(tuple(r.detach() for r in results)),
        )
        loop_taken, gradients = taken[num_taken:], [t.grad for t in trained]
        del taken[num_taken:]
        for tensor in trained:
            tensor.grad = None
        folded: list[tuple[int, Results]] = []
        level = logging.WARNING
        try:
            folded.extend(self._run_folds(call, sizes, indices))
            columns = zip(*(results for _, results in folded))
            reason = self._difference(
                "results",
                [torch.stack(column) for column in zip(*looped)],
                [torch.cat(column) for column in columns],
            ) or self._difference("gradients", gradients, [t.grad for t in trained])
        except Exception as error:  # noqa: BLE001 - torch raises all kinds of them
            level, reason = logging.DEBUG, str(error).partition("\n")[0]
        if reason is None:
            logger.debug("Up to %d micro-batches run in one pass", max(sizes))
            self._verified.update(sizes)
            for first, results in folded:
                _give(call, first, results, collect)
            return
        self._loop_from_now_on(reason, level)
        taken[num_taken:] = loop_taken
        for tensor, gradient in zip(trained, gradients):
            tensor.grad = gradient
        for index, of_one in zip(indices, looped):
            collect(index, of_one)

    def _loop_from_now_on(self, reason: str, level: int = logging.DEBUG) -> None:
        self._is_looped = True
        self._folds.clear()
        logger.log(
            level,
            "Micro-batches run one after the other, not folded into one pass: %s",
            reason,
        )

    def _difference(
        self,
        what: str,
        looped: Sequence[Tensor | None],
        folded: Sequence[Tensor | None],
    ) -> str | None:
        """Describe how tensors differ beyond rounding; None if they don't."""
        nodes = self._program.graph.graph.nodes
        is_half = any(original(node.target) is not node.target for node in nodes)
        relative = _RELATIVE_OF_HALF if is_half else _RELATIVE
        floor = _SHARE_OF_LARGEST * max(map(_largest, looped), default=0.0)
        for index, (one, other) in enumerate(zip(looped, folded)):
            if one is None or other is None:
                if one is not other:
                    return f"{what}: tensor {index} is missing in one way"
                continue
            if one.dtype != other.dtype or one.shape != other.shape:
                return f"{what}: tensor {index} has another shape or type"
            allowed = relative * _largest(one) + floor
            is_close = (
                torch.allclose(other, one, 0.0, allowed, equal_nan=True)
                if one.is_floating_point()
                else torch.equal(other, one)
            )
            if not is_close:
                gap = (one.double() - other.double()).abs().max()
                return (
                    f"{what}: tensor {index} differs by {gap:.3g}, and its largest "
                    f"element is {_largest(one):.3g}"
                )
        return None


def _give(call: Call, first: int, results: Results, collect: Collect) -> None:
    """Give the stacked results of a fold to the outputs, uncut if all come back."""
    if call.outputs.takes_whole:
        call.outputs.add_whole([r.flatten(0, 1) if r.dim() > 1 else r for r in results])
        return
    for index, of_one in enumerate(zip(*(r.unbind() for r in results)), first):
        collect(index, of_one)


def _largest(tensor: Tensor | None) -> float:
    if tensor is None or tensor.numel() == 0 or not tensor.is_floating_point():
        return 0.0
    return float(tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())


class _Memory(DispatchMode):
    """Measures the tensors that are made while it is active.

    Attributes:
        total: The size of all of them, in bytes.
        most: The largest size of what there was at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.total = self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        old = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in old:
                self.total += storage.nbytes()
                alive = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
                self._alive[storage.data_ptr()] = alive
        self._alive = {p: a for p, a in self._alive.items() if not a[0].expired()}  # type: ignore[no-untyped-call]
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return result
