# SPDX-License-Identifier: Apache-2.0
"""Translate a program to machine code, or say why it can't be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

import torch
from torch import Tensor

from ipufit.emulator._device.obstacles import obstacle
from ipufit.emulator._device.runner import Call, Results, Runner, Training
from ipufit.emulator._folding.fold_runner import FoldRunner
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._layout.device_rng import DeviceRng
from ipufit.emulator._layout.replica_groups import ReplicaGroups
from ipufit.emulator._machine_code.machine_code_runner import (
    FoldFunctions,
    MachineCodeRunner,
    UpdateFunctions,
)
from ipufit.emulator._machine_code.machine_functions import (
    HALF,
    MachineFunction,
    require_compiler,
    translate_function,
)
from ipufit.emulator._machine_code.origins import origin_of
from ipufit.emulator._machine_code.traced import (
    Observed,
    TracedFold,
    TrainingFunctions,
)
from ipufit.emulator._machine_code.update import Update, states
from ipufit.emulator._options.options import Options
from ipufit.emulator._program.anchors import Anchors
from ipufit.emulator._program.program import Program
from ipufit.emulator._update.loss_scale import AutomaticLossScale


def suits_machine_code(
    program: Program,
    options: Options,
    anchors: Anchors,
    groups: Mapping[str, ReplicaGroups],
) -> bool:
    """Whether a program may be translated; a warning says why not.

    Raises:
        Error: There is nothing to translate with on this machine.
    """
    require_compiler()
    reason = _obstacle_in_options(options, anchors)
    reason = reason or obstacle(program, options, groups)
    if reason is not None:
        _runs_eagerly(reason)
    return reason is None


def _obstacle_in_options(options: Options, anchors: Anchors) -> str | None:
    if anchors.gradients or anchors.after_updates:
        return "gradients or tensors of the optimizer are anchored"
    if AutomaticLossScale.from_options(options) is not None:
        return "the loss scaling is automatic"
    return None


def translate(
    call: Call,
    training: Training | None,
    folded: FoldRunner | None,
    otherwise: Runner,
    folder: str | None,
) -> Runner:
    """Translate a program to machine code, if it can be.

    Args:
        call: A call like those that will be run. Its weights may be changed.
        training: How its weights are updated; None for inference.
        folded: Runs several micro-batches at once; None if that mustn't be.
        otherwise: Runs calls that don't suit the machine code.
        folder: Where machine code is kept; None: beside Inductor's own cache.

    Returns:
        The machine code; `otherwise`, if there is none: then a warning says why.
    """
    before = torch.random.get_rng_state()
    try:
        _refuse_types(call, training)
        plan = _Plan.of(call, training, folded, folder)
        if training is None:
            return plan.inference(otherwise)
        return plan.training(training, otherwise)
    except NotImplementedError as error:
        _runs_eagerly(_first_line(error))
    except Exception as error:  # noqa: BLE001 - torch raises anything
        _runs_eagerly(f"{type(error).__name__}: {_first_line(error)}")
    finally:
        torch.random.set_rng_state(before)
    return otherwise


def _refuse_types(call: Call, training: Training | None) -> None:
    if call.program.updated_weights & call.weights.trained.keys():
        raise NotImplementedError("it changes a weight that is trained")
    tensors = [*call.arguments(0), *call.inputs.rows(0)]
    if training is not None:
        tensors += training.optimizer.tensors().values()
    if any(tensor.dtype == torch.float16 for tensor in tensors):
        raise NotImplementedError(HALF)


def _runs_eagerly(reason: str) -> None:
    logger.warning("The program isn't compiled to machine code: %s.", reason)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "no message"


@dataclass(frozen=True)
class _Plan:
    """A plan to run the micro-batches of an inference call, or of an update.

    Attributes:
        call: A call like those that will be run.
        observed: Behaviour of the program that its graph doesn't show.
        sizes: The number of micro-batches in each fold; nothing if they run one by one.
        num_micro_batches: The number of them in an update, or an inference call.
        weights: The weights, without a history of their own.
        folded: Has the folds of these sizes.
        folder: Where machine code is kept.
    """

    call: Call
    observed: Observed
    sizes: tuple[int, ...]
    num_micro_batches: int
    weights: list[Tensor]
    folded: FoldRunner | None
    folder: str | None

    @classmethod
    def of(
        cls,
        call: Call,
        training: Training | None,
        folded: FoldRunner | None,
        folder: str | None,
    ) -> _Plan:
        weights, rows = call.arguments(0), call.inputs.rows(0)
        observed = Observed.of(call.program, weights, rows)
        count = call.micro_batches_per_update
        if training is None:
            count = len(call.micro_batches)
        sizes: tuple[int, ...] = ()
        # What differs between replicas isn't folded.
        if folded is not None and not call.program.updated_weights:
            with DeviceRng(seed=0):
                backward = None if training is None else training.backward
                folded.run(call, range(count), _ignore, backward)
            sizes = folded.folding.sizes(call, count)
            if any(folded.folding.fold_of(size).has_rest for size in set(sizes)):
                sizes = ()
        weights = [tensor.detach() for tensor in weights]
        return cls(call, observed, sizes, count, weights, folded, folder)

    def inference(self, otherwise: Runner) -> MachineCodeRunner:
        """Translate an inference program."""
        num_weights = len(self.weights)

        def translated(size: int) -> MachineFunction:
            traced = self._traced(size, ())

            def infer(*tensors: Tensor) -> list[Tensor]:
                return traced.results(tensors[:num_weights], tensors[num_weights:])

            return translate_function(
                f"inference of {_micro_batches(size)}",
                infer,
                [*self.weights, *self._rows(size)],
                self.folder,
                self._origin("inference", size),
                is_differentiated=False,
                is_random=self.call.program.is_random,
            )

        functions = {size: translated(size) for size in self._counts}
        return MachineCodeRunner(self._fold_functions(functions), otherwise)

    def training(self, training: Training, otherwise: Runner) -> MachineCodeRunner:
        """Translate a training program.

        Raises:
            NotImplementedError: Nothing is trained.
        """
        optimizer, weight_names = training.optimizer, self.call.program.weight_names
        reached = {weight_names[index] for index in self.observed.reached}
        names = tuple(name for name in optimizer.names if name in reached)
        if not names:
            raise NotImplementedError("nothing is trained")
        update = Update(tuple(optimizer.groups(names)), optimizer.max_grad_norm)
        trained = tuple(
            weight_names.index(name) for group in update.groups for name in group.names
        )
        weights = [self.weights[index] for index in trained]
        sums = [torch.zeros_like(weight) for weight in weights]
        # No zeros, and no two alike: machine code is held against these.
        state = [torch.full_like(tensor, 0.01) for tensor in states(update.groups)]
        values = torch.linspace(0.5, 1.5, update.num_values)
        is_alone = training.reduction.num_processes == 1
        is_whole = is_alone and len(self.sizes or range(self.num_micro_batches)) == 1

        def translated(size: int) -> MachineFunction:
            functions = TrainingFunctions(
                self._traced(size, trained), update, len(self.weights)
            )
            between = state if is_whole else sums
            subject = "an update" if is_whole else "training"
            origin = self._origin(subject, size, trained, update.origin)
            return translate_function(
                f"{subject} of {_micro_batches(size)}",
                functions.whole if is_whole else functions.part,
                [*self.weights, *between, values, *self._rows(size)],
                self.folder,
                origin,
                is_differentiated=True,
                is_random=self.call.program.is_random,
            )

        folds = self._fold_functions({size: translated(size) for size in self._counts})
        last = None
        if not is_whole:
            last = translate_function(
                "the optimizer",
                TrainingFunctions(self._traced(1, trained), update, 0).last,
                [*weights, *sums, *state, values],
                self.folder,
                self._origin("the optimizer", 1, trained, update.origin),
                is_differentiated=False,
                is_random=False,
            )
        updates = UpdateFunctions(names, trained, update, last)
        return MachineCodeRunner(folds, otherwise, updates)

    @property
    def _counts(self) -> list[int]:
        """The numbers of micro-batches that functions are needed for."""
        return sorted(set(self.sizes)) or [1]

    def _origin(self, subject: str, size: int, *parts: object) -> str | None:
        """Make a name for all that a function depends on besides its arguments."""
        observed = self.observed.reached, sorted(self.observed.copied)
        folds = self.sizes, size, self._sums_over, self.num_micro_batches
        return origin_of(self.call.program, [subject, observed, folds, *parts])

    @property
    def _sums_over(self) -> int:
        """The number of replicas, if a fold can add up its results, else 0."""
        replicas = self.call.layout.replicas
        can_sum = self.sizes and all(size % replicas == 0 for size in self.sizes)
        return replicas if can_sum and self.call.outputs.are_sums else 0

    def _rows(self, size: int) -> list[Tensor]:
        inputs = self.call.inputs
        return list(inputs.joined(0, size) if self.sizes else inputs.rows(0))

    def _traced(self, size: int, trained: tuple[int, ...]) -> TracedFold:
        fold = None
        if self.folded is not None and self.sizes:
            fold = self.folded.folding.fold_of(size)
        copied = self.observed.copied
        return TracedFold(self.call.program, fold, trained, copied, self._sums_over)

    def _fold_functions(
        self, functions: Mapping[int, MachineFunction]
    ) -> FoldFunctions:
        num_rows = len(self.call.inputs.rows(0))
        return FoldFunctions(functions, self.sizes, num_rows, self._sums_over)


def _micro_batches(count: int) -> str:
    return f"{count} micro-batch" if count == 1 else f"{count} micro-batches"


def _ignore(index: int, results: Results) -> None:
    pass
