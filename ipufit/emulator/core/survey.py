# SPDX-License-Identifier: Apache-2.0
"""Find everything at once that PopTorch would refuse in a program.

A survey traces the program on one micro-batch, as a compilation does. A compilation
ends at the first refusal; a survey records it, and goes on with torch's result.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.fx.node import Node

from .._args_parser import CallArguments, check_inputs
from .._logging import logger
from ..enums import OutputMode
from ..errors import Error
from ..options import Options
from .compile import Compilation
from .float16 import device_tensor
from .graph import (
    NOWHERE,
    Operation,
    Place,
    blamed_nodes,
    function_name,
    node_arguments,
    place_of,
    place_of_error,
    tensors_in,
)
from .operators import Finding
from .optimizer_rules import OptimizerReader, check_values, vanishing_constants
from .pipelines import LOWERING_CHECKS, SESSION_CHECKS, check_updatable_buffers
from .pod import reserved_ipus
from .recording import refuse_rebound
from .refusals import refuse_scripted, refuse_tied_buffers, refuse_weights
from .strict import Unsupported, alternative_to
from .tracer import Report

_MOST_REFUSALS = 100
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
    report = Survey()
    options = options.clone()
    if options.defaultOutputMode():
        options.outputMode(OutputMode.Final if is_training else OutputMode.All)
    for check in (refuse_scripted, refuse_tied_buffers, refuse_weights):
        report.attempt("module", check, module)
    report.attempt("dtype", check_inputs, list(tensors))
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):  # type: ignore[attr-defined,unused-ignore]
        report.is_whole = False
        return report
    inputs = [device_tensor(tensor.detach(), copy=True) for tensor in tensors]
    strategy = options._execution_strategy
    compilation = Compilation(strategy, report, is_training=is_training)
    was_disabled = logger.disabled
    logger.disabled = True  # a compilation will warn
    try:
        with report.following_assignments():
            arguments = CallArguments(tuple(inputs), {})
            compilation.trace(module, arguments, calls_hooks=False)
    finally:
        logger.disabled = was_disabled
    report.recording = None
    compilation.run()
    if report.is_whole:
        program = compilation.program()
        for check_program in (*LOWERING_CHECKS, *SESSION_CHECKS):
            report.attempt("options", check_program, program, options, is_training)
        num_ipus = program.num_ipus * options.replication_factor
        report.attempt("options", reserved_ipus, options, num_ipus)
    report.attempt("options", check_updatable_buffers, module, options)
    if optimizer is not None:
        settings = OptimizerReader(relax_attribute_checks=True).read(optimizer)
        report.attempt("optimizer", check_values, settings)
        for message in vanishing_constants(settings):
            report.add("optimizer", message, NOWHERE, is_refused=False)
    norms: dict[str, Place] = {}
    for graph in compilation.graphs:
        for node in graph.nodes:
            is_norm = function_name(node) == "batch_norm"
            if is_norm and node_arguments(node).get("training"):
                norms.setdefault(place_of(node).module, place_of(node))
    report.norms = list(norms.values())
    sizes = (tensor.numel() * tensor.element_size() for tensor in compilation.flat)
    report.returned_bytes = sum(sizes)
    return report


class Survey(Report):
    """The findings of a survey.

    Attributes:
        remarks: The findings without repetition, in order.
        error: The error other than a refusal that ended the trace; None if there was
            none.
        place: The place of the error that ended the trace.
        is_whole: Whether the whole program was traced.
        norms: Modules that normalise over the rows of a micro-batch, and their places.
        returned_bytes: Bytes that a micro-batch returns; 0 if unknown.
    """

    def __init__(self) -> None:
        self.remarks: list[Remark] = []
        self.error: Exception | None = None
        self.place, self.is_whole, self.returned_bytes = NOWHERE, True, 0
        self.norms: list[Place] = []
        self._assigned: dict[tuple[int, str], Place] = {}
        self._num_refusals: Counter[Place] = Counter()
        self._has_escapes = False

    def here(self) -> Place:
        """Return the place being traced."""
        return NOWHERE if self.recording is None else self.recording.here()

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
            place: Its place, unless an error is about nodes; None takes the place being
                traced.
            is_refused: As in `Remark`.
        """
        places = [self.here() if place is None else place]
        if isinstance(message, Error):
            places = list(map(place_of, blamed_nodes(message))) or places
            message = message.message
        for where in places:
            remark = Remark(topic, message, where, is_refused)
            if remark not in self.remarks:
                self.remarks.append(remark)

    def attempt(
        self,
        topic: str,
        check: Callable[..., Any],
        *args: Any,
        place: Place | None = None,
    ) -> bool:
        """Call a check, and record its refusal.

        Raises:
            EndlessError: Too much was refused at one place of the program.
        """
        try:
            check(*args)
        except Error as refusal:
            if topic == "value" and args[0].name in _CONTROL_FLOW:
                topic = "control flow"
            if topic == "host tensor" and self._has_escapes:
                return True  # the tracer can't tell any more what is on the device
            self.add(topic, refusal, place)
            if self.recording is not None and isinstance(args[0], Operation):
                self._num_refusals[self.here()] += 1
                if self._num_refusals[self.here()] > _MOST_REFUSALS:
                    raise EndlessError(
                        f"this place has asked {_MOST_REFUSALS} times for what is "
                        "refused, as a loop does that doesn't end"
                    ) from None
            return True
        return False

    def refuse(self, topic: str, error: Error) -> None:
        """Record the error at which a compilation would stop."""
        self._has_escapes |= topic == "tracing"
        self.add(topic, error)

    def refuse_rebound(self, module: torch.nn.Module, problems: list[str]) -> None:
        """Record assignments to names of weights."""
        for problem in problems:
            path, _, name = problem.split()[1].rpartition(".")
            key = id(module.get_submodule(path)), name
            place = self._assigned.get(key, NOWHERE)._replace(module=path)
            self.attempt("buffer", refuse_rebound, problem, place=place)

    def goes_on_after(
        self, error: Exception, module: torch.nn.Module, problems: list[str]
    ) -> bool:
        """Record an error that ended the trace."""
        self.refuse_rebound(module, problems)
        recording: Any = self.recording
        stop, running = recording.tracing_function, recording.running[-1]
        self.place, self.is_whole = place_of_error(error, stop, running), False
        if isinstance(error, Error):
            self.add("program", error.message, self.place)
        else:
            self.error = error
        return True

    def compare(self) -> None:
        """Record that tensors of the device are compared by `torch.equal`."""
        self.add(
            "control flow",
            "torch.equal() is False for whatever tensors of the device, whose values "
            "don't exist while the model is traced. Compare with (a == b).all() in "
            "torch.where.",
            is_refused=False,
        )

    def see(self, operation: Operation, result: Any) -> None:
        """Record an operation that makes float64 of other types.

        Operations of a named loss aren't recorded: it takes the type of the outputs.
        """
        recording: Any = self.recording
        wide = [t for t in operation.tensors if t.dtype == torch.float64]
        is_new = not any(map(recording.is_on_device, wide))
        if is_new and any(t.dtype == torch.float64 for t in tensors_in(result)):
            place, name = self.here(), operation.name
            if (place.file or place.module) and name != "__get__":
                what = (
                    f"`{name}` gives float64, which an IPU doesn't have: it computes "
                    "in float32. Use .float()."
                )
                self.add("dtype", what, place, is_refused=False)

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
                self._assigned[id(module), name] = self.here()
            set_attribute(module, name, value)

        torch.nn.Module.__setattr__ = assign  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]
