# SPDX-License-Identifier: Apache-2.0
"""Find everything at once that PopTorch would refuse in a program.

A survey traces the program on one micro-batch, as a compilation does. A compilation
ends at the first refusal; a survey records it, and goes on with torch's result.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter
from dataclasses import replace
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.fx.node import Node

from .._args_parser import check_inputs
from .._logging import logger
from .._utils import flattenTensorStructure
from ..errors import Error
from ..options import Options
from .compile import REFUSED, Compilation, Report
from .dtypes import device_tensor
from .graph import (
    Operation,
    blamed_nodes,
    function_name,
    map_tensors,
    node_arguments,
    tensors_in,
)
from .optimizer_rules import OptimizerReader, check_values, vanishing_constants
from .pipelines import PROGRAM_CHECKS, check_updatable_buffers
from .places import (
    NOWHERE,
    PACKAGE,
    TORCH,
    Place,
    find_place,
    inside,
    place_of,
    place_of_error,
)
from .pod import reserved_ipus
from .recording import (
    Recording,
    named_weights,
    refuse_rebound,
    tracing,
    unchanged,
)
from .refusals import (
    refuse_scripted,
    refuse_tied_buffers,
    refuse_weights,
    untraceable,
)
from .rules import Finding
from .strict import (
    Unsupported,
    WatchingTracer,
    alternative_to,
)
from .tracer import guarded

_MOST_ASKED = 100
"""Refusals at one place after which the survey ends: a loop may never end."""

_CONTROL_FLOW = ("__bool__", "__contains__", "is_nonzero")


class Remark(NamedTuple):
    """One finding of a survey.

    Attributes:
        topic: Subject in a word: "operator", "value", "shape", ...
        message: The problem in words, with a way out.
        place: The place in the program.
        is_refused: Whether PopTorch refuses the program; else it computes other numbers
            than torch.
    """

    topic: str
    message: str
    place: Place
    is_refused: bool = True


class Survey(NamedTuple):
    """The findings of a survey.

    Attributes:
        remarks: The findings, in order.
        error: The error other than a refusal that ended the trace; None if there was
            none.
        place: The place of that error.
        is_whole: Whether the whole program was traced.
        norms: Modules that normalise over the rows of a micro-batch, and their places.
        returned_bytes: Bytes that a micro-batch returns; 0 if unknown.
    """

    remarks: list[Remark]
    error: Exception | None
    place: Place
    is_whole: bool
    norms: list[Place]
    returned_bytes: int


class EndlessError(Exception):
    """Raised when code repeats a refused operation, as an endless loop does."""


def survey(
    module: torch.nn.Module,
    tensors: Sequence[Tensor],
    options: Options,
    *,
    is_training: bool,
    optimizer: torch.optim.Optimizer | None = None,
) -> Survey:
    """Trace a module on one micro-batch, and record all refusals.

    Weights, buffers and torch's generator stay as they are. No device is asked for.

    Args:
        module: The module, with its loss if it is trained.
        tensors: Arguments of one micro-batch.
        options: Options that the program would be compiled with.
        is_training: Whether it would be differentiated.
        optimizer: The optimizer, to check its hyper-parameters.

    Example:
        >>> class Reader(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x * x.sum().item() if x.max() > 0 else x
        >>> found = survey(Reader(), [torch.ones(2)], Options(), is_training=False)
        >>> [remark.topic for remark in found.remarks]
        ['control flow', 'value']
    """
    notes = Notes()
    for check in (refuse_scripted, refuse_tied_buffers, refuse_weights):
        notes.attempt("module", check, module)
    notes.attempt("dtype", check_inputs, list(tensors))
    if any(isinstance(one, torch.jit.ScriptModule) for one in module.modules()):  # type: ignore[attr-defined,unused-ignore]
        return Survey(list(notes.remarks), None, NOWHERE, False, [], 0)
    inputs = [device_tensor(tensor.detach(), copy=True) for tensor in tensors]
    outputs: Any = ()
    error: Exception | None = None
    was_disabled = logger.disabled
    logger.disabled = True  # a compilation will warn
    records = is_training or torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        recording = Recording(
            named_weights(module),
            inputs,
            options._execution_strategy,
            is_training=is_training,
        )
        tracer = SurveyTracer(recording, notes)
        try:
            with unchanged(module) as rebound, tracing(
                recording
            ), recording.module_scopes(module), notes.following_assignments(), guarded(
                tracer
            ):
                outputs = module(*inputs)
        except Exception as raised:  # noqa: BLE001 - a user's code may raise anything
            error = raised
        finally:
            logger.disabled = was_disabled
        for problem in rebound:
            path, _, name = problem.split()[1].rpartition(".")
            place = notes.assigned.get((id(module.get_submodule(path)), name), NOWHERE)
            place = place._replace(module=path)
            notes.attempt("buffer", refuse_rebound, [problem], place=place)
        place = NOWHERE if error is None else notes.of_error(error)
        if isinstance(error, Error):
            notes.add("program", error, place)
        compilation = Compilation(recording, outputs, notes)
        compilation.run(is_whole=error is None)
        if error is None:
            program = compilation.program()
            for check_program in PROGRAM_CHECKS:
                notes.attempt("options", check_program, program, options, is_training)
            num_ipus = program.num_ipus * options.replication_factor
            notes.attempt("options", reserved_ipus, options, num_ipus)
    notes.attempt("options", check_updatable_buffers, module, options)
    if optimizer is not None:
        settings = OptimizerReader(relax_attribute_checks=True).read(optimizer)
        notes.attempt("optimizer", check_values, settings)
        for message in vanishing_constants(settings):
            notes.add("optimizer", message, NOWHERE, is_refused=False)
    norms: dict[str, Place] = {}
    for graph in compilation.graphs:
        for node in graph.nodes:
            is_norm = function_name(node) == "batch_norm"
            if is_norm and node_arguments(node).get("training"):
                norms.setdefault(place_of(node).module, place_of(node))
    return Survey(
        list(notes.remarks),
        None if isinstance(error, Error) else error,
        place,
        error is None,
        list(norms.values()),
        sum(
            one.numel() * one.element_size() for one in flattenTensorStructure(outputs)
        ),
    )


class Notes(Report):
    """The remarks of a survey without repetition, and the place being traced.

    Attributes:
        remarks: The remarks, in the order in which they were found.
        assigned: Places where tensors were assigned to modules, by module and name.
        running: As in `Recording`.
    """

    replaces_functions = False  # nothing runs

    def __init__(self) -> None:
        self.remarks: dict[Remark, None] = {}
        self.assigned: dict[tuple[int, str], Place] = {}
        self.running = [""]

    def add(
        self,
        topic: str,
        message: str | Error,
        place: Place | None = None,
        *,
        is_refused: bool = True,
    ) -> None:
        """Add a remark, or the message of an error.

        Args:
            topic: Its subject.
            message: The problem.
            place: Its place; None takes that of the nodes that an error is about, or
                else the place being traced.
            is_refused: As in `Remark`.
        """
        places = [self.here() if place is None else place]
        if isinstance(message, Error):
            if place is None and blamed_nodes(message):
                places = list(map(place_of, blamed_nodes(message)))
            message = message.message
        for one in places:
            self.remarks[Remark(topic, message, one, is_refused)] = None

    def attempt(
        self,
        topic: str,
        check: Callable[..., Any],
        *args: Any,
        place: Place | None = NOWHERE,
    ) -> Any:
        """Call a check, and record its refusal."""
        try:
            return check(*args)
        except Error as refusal:
            self.add(topic, refusal, None if blamed_nodes(refusal) else place)
            return None

    def refuse(self, topic: str, error: Error) -> None:
        """Record what a compilation would refuse."""
        self.add(topic, error)

    def remark(self, finding: Finding, node: Node) -> None:
        """Record an operation that a device computes otherwise than torch."""
        if finding.rule.is_reported:
            what = finding.message(function_name(node))
            self.add(finding.rule.topic, what, place_of(node), is_refused=False)

    def refuse_unsupported(self, unsupported: list[Unsupported]) -> None:
        """Record each operator that PopTorch doesn't compile."""
        for node, function, operators in unsupported:
            way = alternative_to(function)
            instead = (
                f"Try {way}."
                if way
                else "Compose it of functions that it compiles, or let the host "
                "compute it before or after the model."
            )
            shown = ", ".join(sorted(operators))
            what = f"PopTorch doesn't compile {function} ({shown}). {instead}"
            self.add("operator", what, place_of(node))

    @contextlib.contextmanager
    def following_assignments(self) -> Iterator[None]:
        """Record the places of assignments of tensors to modules."""
        set_attribute: Any = torch.nn.Module.__setattr__

        def assign(module: torch.nn.Module, name: str, value: Any) -> None:
            if isinstance(value, Tensor):
                self.assigned[id(module), name] = self.here()
            set_attribute(module, name, value)

        torch.nn.Module.__setattr__ = assign  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]

    def here(self) -> Place:
        """Return the place being traced."""
        frames = traceback.walk_stack(sys._getframe(1))
        return find_place(frames, survey.__code__, self.running[-1])

    def of_error(self, error: BaseException) -> Place:
        """Return the place where an error was raised, or where its cause was."""
        return place_of_error(error, survey.__code__, self.running[-1])

    def is_in_torch(self) -> bool:
        """Return whether torch's own code makes the call, and no line of the user's."""
        for path, _ in inside(traceback.walk_stack(sys._getframe(1)), survey.__code__):
            if not path.startswith((PACKAGE, f"{TORCH}overrides")):
                return path.startswith(TORCH)
        return True


class SurveyTracer(WatchingTracer):
    """Tracer that records refused operations, and runs them.

    Attributes:
        has_escapes: Whether a tensor has left the trace, so that the tracer can't tell
            any more which tensors are on the device.
    """

    def __init__(self, recording: Recording, notes: Notes) -> None:
        super().__init__(recording)
        self.notes = notes
        notes.running = recording.running
        self._own_backward: set[type] = set()
        self._asked: Counter[Place] = Counter()
        self._refused = ""
        self.has_escapes = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record an operation with its place."""
        before = next(iter(reversed(self.recording.graph.nodes)), None)
        name = getattr(func, "__name__", str(func))
        compared = tensors_in(args) if name == "equal" else ()
        is_compared = any(map(self.recording.is_on_device, compared))
        if is_compared and not self.notes.is_in_torch():
            self.notes.add(
                "control flow",
                "torch.equal() is False for whatever tensors of the device, whose "
                "values don't exist while the model is traced. Compare with "
                "(a == b).all() in torch.where.",
                is_refused=False,
            )
        result = super().__torch_function__(func, types, args, kwargs)
        place: Place | None = None
        for node in reversed(self.recording.graph.nodes):
            if node is before:
                break
            if place is None:
                place = self.notes.here()
                self._note_widening(name, (args, kwargs), result, place)
            node.meta.setdefault("place", place)
            node.meta.setdefault(REFUSED, self._refused)
        return result

    def check(
        self, operation: Operation, on_device: list[Tensor], touched: list[Tensor]
    ) -> None:
        """Record the refusals of an operation."""
        self._refused = ""
        super().check(operation, on_device, touched)

    def attempt(self, topic: str, refuse: Callable[..., None], *args: Any) -> None:
        """Call a function that raises an `Error` if it refuses, and record it.

        Raises:
            EndlessError: The same place was refused too often.
        """
        try:
            refuse(*args)
        except Error as error:
            if topic == "host tensor":
                if not self.has_escapes:
                    self.notes.add(topic, error)
            elif topic == "own backward":
                kind = type(args[0].grad_fn)
                if kind not in self._own_backward:
                    self.notes.add(topic, error)
                self._own_backward.add(kind)
            else:
                is_flow = topic == "value" and args[0].name in _CONTROL_FLOW
                self.notes.add("control flow" if is_flow else topic, error)
                self._refused = topic
                self._ask(self.notes.here())

    def _ask(self, place: Place) -> None:
        self._asked[place] += 1
        if self._asked[place] > _MOST_ASKED:
            raise EndlessError(
                f"this place has asked {_MOST_ASKED} times for what is refused, as a "
                "loop does that doesn't end"
            )

    def escaped(self, func: Any) -> None:
        """Record an operator that the tracer hasn't seen."""
        self.has_escapes = True
        self.notes.add("tracing", untraceable(func))

    def compute(self, operation: Operation) -> Any:
        """Run an operation; a refused one in a form that torch accepts."""
        if operation.name in ("numpy", "__array__"):
            on_device = self.recording.on_device
            args = map_tensors(operation.args, lambda t: on_device(t).detach())
            operation = replace(operation, args=args)
        return super().compute(operation)

    def _note_widening(self, name: str, given: Any, result: Any, place: Place) -> None:
        """Record an operation that makes float64 of other types.

        Operations of a named loss aren't recorded: it takes the type of the outputs.
        """
        is_users = (place.file or place.module) and name != "__get__"
        wide = [one for one in tensors_in(given) if one.dtype == torch.float64]
        is_new = not any(map(self.recording.is_on_device, wide))
        results = (one.dtype for one in tensors_in(result))
        if is_users and is_new and torch.float64 in results:
            self.notes.add(
                "dtype",
                f"`{name}` gives float64, which an IPU doesn't have: it computes in "
                "float32. Use .float().",
                place,
                is_refused=False,
            )
