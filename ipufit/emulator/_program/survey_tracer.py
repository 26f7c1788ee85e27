# SPDX-License-Identifier: Apache-2.0
"""A tracer that notes what PopTorch refuses, and goes on."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch.fx.node import Node

from ipufit.emulator._program.fakes import Fakes
from ipufit.emulator._program.strict import (
    OperatorWatch,
    last_node,
    note_operators,
)
from ipufit.emulator._program.substitutes import substitute
from ipufit.emulator._tracing.half import original
from ipufit.emulator._tracing.nodes import blamed_nodes
from ipufit.emulator._tracing.operation import (
    Operation,
    map_tensors,
    recorded,
    tensors_in,
)
from ipufit.emulator._tracing.places import Place, Places
from ipufit.emulator._tracing.recording import Recording
from ipufit.emulator._tracing.refusals import (
    refuse_custom_backward,
    refuse_dynamic_shape,
    refuse_gradients,
    refuse_unsupported,
    refuse_value_reader,
    untraceable,
)
from ipufit.emulator._tracing.tracer import EscapeGuard, Tracer
from ipufit.emulator.errors import Error

_PLACE = "place"
_MOST_SUBSTITUTES = 100
"""Substitutes for results at one place; code that asks for more may never end."""

_CONTROL_FLOW = ("__bool__", "__contains__", "is_nonzero")

_WITHOUT_RESULT: tuple[tuple[str, Callable[[Operation], None]], ...] = (
    ("value", refuse_value_reader),
    ("gradients", refuse_gradients),
    ("shape", refuse_dynamic_shape),
)
"""Topics, and refusals of operations that have no result to go on with."""


@dataclass(frozen=True)
class Remark:
    """One thing that a survey has found.

    Attributes:
        topic: Its subject in a word: "operator", "value", "shape", ...
        message: The problem in words, with a way out.
        place: The place in the program.
        is_refused: Whether PopTorch refuses the program for it; else it computes other
            numbers than torch does.
    """

    topic: str
    message: str
    place: Place
    is_refused: bool = True


class Notes:
    """The remarks of a survey, each once.

    Args:
        places: Tells where the program is.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self._remarks: dict[Remark, None] = {}

    def add(
        self,
        topic: str,
        message: object,
        place: Place | None = None,
        *,
        is_refused: bool = True,
    ) -> None:
        """Add a remark, or the message of an error; here if no place is given."""
        if isinstance(message, Error):
            nodes = blamed_nodes(message)
            for node in nodes if place is None else ():
                self.add(topic, message, place_of(node))
            if nodes and place is None:
                return
            message = message.message
        where = self.places.here() if place is None else place
        self._remarks[Remark(topic, str(message), where, is_refused)] = None

    def list(self) -> list[Remark]:
        """The remarks, in the order in which they were found."""
        return list(self._remarks)

    @property
    def has_refusals(self) -> bool:
        """Whether PopTorch would refuse the program."""
        return any(remark.is_refused for remark in self._remarks)


def place_of(node: Node) -> Place:
    """The place where a survey has recorded a node."""
    place: Place = node.meta.get(_PLACE, Place())
    return place


class EndlessError(Exception):
    """Code asks again and again for what is refused, and may never end."""


class _NoResult(Exception):
    """An operation was refused, and something has to stand for its result."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(operation.name)
        self.operation = operation


class SurveyTracer(Tracer):
    """Records operations on fake tensors, and notes those that are refused.

    Args:
        recording: The recording to append them to.
        fakes: Makes the tensors.
        notes: Gets the refusals.
    """

    def __init__(self, recording: Recording, fakes: Fakes, notes: Notes) -> None:
        super().__init__(recording)
        self._fakes = fakes
        self._notes = notes
        self._applied: dict[object, Place] = {}
        self._substitutes: Counter[Place] = Counter()
        self.has_escapes = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record an operation with its place, or note its refusal."""
        before = last_node(self.recording)
        if getattr(func, "__name__", "") == "equal":
            self._note_comparison(args)
        try:
            result = super().__torch_function__(func, types, args, kwargs)
        except _NoResult as refused:
            return self._substituted(refused)
        place: Place | None = None
        for node in reversed(self.recording.graph.nodes):
            if node is before:
                break
            if place is None:
                place = self._notes.places.here()
                self._note_widening(func, (args, kwargs), result, place)
            node.meta.setdefault(_PLACE, place)
        return result

    def check(
        self, operation: Operation, on_device: list[Tensor], touched: list[Tensor]
    ) -> None:
        """Note the refusals of an operation.

        Raises:
            _NoResult: It is refused and can't be computed.
        """
        if on_device:
            for topic, refuse in _WITHOUT_RESULT:
                is_flow = topic == "value" and operation.name in _CONTROL_FLOW
                with self._noted("control flow" if is_flow else topic) as refused:
                    refuse(operation)
                if refused:
                    raise _NoResult(operation)
            with self._noted("arguments"):
                refuse_unsupported(operation)
            for tensor in on_device:
                self._check_backward(tensor)
        if not self.has_escapes:
            with self._noted("host tensor"):
                self.refuse_host_tensors(operation.name, touched)

    def compute(self, operation: Operation) -> Any:
        """Run an operation on fake copies of the weights."""
        on_device = self.recording.weights.on_device
        args, kwargs = map_tensors((operation.args, operation.kwargs), on_device)
        before = last_node(self.recording)
        watch = OperatorWatch(self.recording)
        result = self._fakes.run(operation.function, *args, watch=watch, **kwargs)
        self._watched = before, recorded(original(operation.function)), watch
        return result

    def _run(self, operation: Operation) -> Any:
        result = super()._run(operation)
        note_operators(self.recording, *self._watched)
        return result

    @contextlib.contextmanager
    def _noted(self, topic: str) -> Iterator[list[Error]]:
        """Note the refusal of what is checked within."""
        refused: list[Error] = []
        try:
            yield refused
        except Error as error:
            refused.append(error)
            self._notes.add(topic, error)

    def _substituted(self, refused: _NoResult) -> Any:
        """Give a value in the place of a result.

        Raises:
            EndlessError: The same place has been given many.
        """
        place = self._notes.places.here()
        self._substitutes[place] += 1
        if self._substitutes[place] > _MOST_SUBSTITUTES:
            raise EndlessError(
                f"this place has asked {_MOST_SUBSTITUTES} times for what is refused, "
                "as a loop does that doesn't end with such values"
            )

        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self.__torch_function__(function, (), args, kwargs)

        return substitute(refused.operation, call)

    def _check_backward(self, tensor: Tensor) -> None:
        """Note an own backward pass, at the line that has called its function."""
        # torch looks once more at a fake view whose memory was written to, by operators
        # that are none of the program's.
        self.recording.is_running_operation = True
        try:
            refuse_custom_backward(tensor)
        except Error as error:
            kind = type(tensor.grad_fn)
            if kind not in self._applied:
                self._applied[kind] = self._notes.places.here()
                self._notes.add("own backward", error)
        finally:
            self.recording.is_running_operation = False

    def _note_comparison(self, tensors: tuple[Any, ...]) -> None:
        is_own = not self._notes.places.is_in_library()
        if is_own and any(map(self.recording.is_on_device, tensors_in(tensors))):
            self._notes.add(
                "control flow",
                "torch.equal() is False for whatever tensors of the device, whose "
                "values don't exist while the model is traced. Compare with "
                "(a == b).all() in torch.where.",
                is_refused=False,
            )

    def _note_widening(
        self, func: object, given: Any, result: Any, place: Place
    ) -> None:
        """Note the operation whose result is float64 though its arguments aren't.

        Operations of a named loss aren't noted: it takes the type of the outputs.
        """
        wide = [t for t in tensors_in(given) if t.dtype == torch.float64]
        is_users = bool(place.file or place.module)
        if not is_users or any(map(self.recording.is_on_device, wide)):
            return
        is_wide = any(t.dtype == torch.float64 for t in tensors_in(result))
        if is_wide and getattr(func, "__name__", "") != "__get__":
            self._notes.add(
                "dtype",
                f"`{getattr(func, '__name__', func)}` gives float64, which an IPU "
                "doesn't have: it computes in float32. Use .float().",
                place,
                is_refused=False,
            )


class SurveyGuard(EscapeGuard):
    """Notes operators that the tracer doesn't see, and runs them.

    Args:
        recording: Recording of the trace.
        tracer: The tracer, which can't tell any more what is on the device.
        notes: Gets the refusals.
    """

    def __init__(
        self, recording: Recording, tracer: SurveyTracer, notes: Notes
    ) -> None:
        super().__init__(recording)
        self._tracer = tracer
        self._notes = notes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and note it if nobody has seen it."""
        operands = list(tensors_in((args, kwargs or {})))
        recording = self._recording
        # "prim" asks a fake tensor for its device, and computes nothing.
        is_own = not recording.is_running_operation and func.namespace != "prim"
        if is_own and any(map(recording.is_on_device, operands)):
            self._tracer.has_escapes = True
            self._notes.add("tracing", untraceable(func))
            on_device = recording.weights.on_device
            args, kwargs = map_tensors(args, on_device), map_tensors(kwargs, on_device)
        return func(*args, **(kwargs or {}))
