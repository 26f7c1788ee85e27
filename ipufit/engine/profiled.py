# SPDX-License-Identifier: Apache-2.0
"""The parts of training and evaluation whose time a timeline gets.

Objects get attributes that hide their methods while a run is recorded, and nothing
else: the loop has no timers where nothing is.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

from ipufit.profiling import TimedItems, Timeline, timed, timed_methods
from ipufit.state import RunState

from .evaluation import Evaluation
from .objective.figures import Figures
from .programs.executors import Executors
from .training import Training

_EXECUTORS = {
    "train": ("call", "call"),
    "infer": ("call", "call"),
    "prepare_training": ("training program", "programs"),
    "prepare_inference": ("inference program", "programs"),
    "detach": ("detach", "programs"),
    "_built": ("compile", "compile"),
    "fetch_weights": ("fetch weights", "weights"),
    "send_weights": ("send weights", "weights"),
    "share_buffers": ("share buffers", "weights"),
}
_FIGURES = {
    "add": ("add sums", "figures"),
    "add_means": ("add means", "figures"),
    "gather": ("gather figures", "figures"),
    "logs": ("figures", "figures"),
    "running": ("figures so far", "figures"),
    "stream": ("metrics of outputs", "figures"),
}
_OPTIMIZATION = {
    "begin_fit": ("begin schedule", "optimizer"),
    "before_call": ("set rates", "optimizer"),
    "after_call": ("count updates", "optimizer"),
    "end_epoch": ("end epoch of schedule", "optimizer"),
}
_AVERAGE = {
    "update": ("average weights", "weights"),
    "end_epoch": ("average weights", "weights"),
    "apply": ("take average", "weights"),
}
_EVALUATION = {
    "_add_call": ("cut outputs", "figures"),
    "_vector": ("loss and metrics", "figures"),
}
DEVICE_CALL = "device call", "device"


@contextlib.contextmanager
def executors_recorded(timeline: Timeline, executors: Executors) -> Iterator[None]:
    """Record programs, calls and copies of weights, while the context is open.

    Args:
        timeline: Timeline of the profile, which the spans are added to.
        executors: The programs of a model; those that are built meanwhile count too.
    """
    with contextlib.ExitStack() as stack:
        known: set[int] = set()

        def look_for_programs() -> None:
            for program in executors._programs():
                if id(program) not in known:
                    known.add(id(program))
                    methods = {"run": DEVICE_CALL}
                    stack.enter_context(timed_methods(timeline, program, methods))

        def looking_after(prepare: Callable[..., Any]) -> Callable[..., Any]:
            def prepare_and_look(*args: Any, **kwargs: Any) -> Any:
                result = prepare(*args, **kwargs)
                look_for_programs()
                return result

            return prepare_and_look

        look_for_programs()
        stack.enter_context(timed_methods(timeline, executors, _EXECUTORS))
        own = vars(executors)
        for name in ("prepare_training", "prepare_inference"):
            own[name] = looking_after(own[name])
        yield


@contextlib.contextmanager
def training_recorded(timeline: Timeline, training: Training) -> Iterator[None]:
    """Record figures, the host's optimiser and averages, while the context is open."""
    with contextlib.ExitStack() as stack:
        for part, methods in (
            (training, {"_stream": ("cut outputs", "figures")}),
            (training.figures, _FIGURES),
            (training.optimization, _OPTIMIZATION),
            (training.average, _AVERAGE),
        ):
            if part is not None:
                stack.enter_context(timed_methods(timeline, part, methods))
        yield


@contextlib.contextmanager
def evaluation_recorded(timeline: Timeline, evaluation: Evaluation) -> Iterator[None]:
    """Record data and figures of an evaluation, while the context is open."""
    figures: Figures = evaluation.figures
    batches: Any = evaluation.batches
    evaluation.batches = TimedItems(timeline, batches, "batch", "host data")  # type: ignore[assignment]
    try:
        with timed_methods(timeline, evaluation, _EVALUATION), timed_methods(
            timeline, figures, _FIGURES
        ):
            yield
    finally:
        evaluation.batches = batches


@contextlib.contextmanager
def actions_recorded(timeline: Timeline, run: RunState) -> Iterator[None]:
    """Record what callbacks have done between calls: they save the run.

    Args:
        timeline: Timeline of the profile, which the spans are added to.
        run: Gets the actions.
    """
    own = vars(run)

    def recorded(ask: Callable[..., None], name: str) -> Callable[..., None]:
        return lambda action: ask(timed(timeline, action, name, "checkpoints"))

    asking = {"after_hooks": "after hooks", "on_eviction": "eviction"}
    for method, name in asking.items():
        own[method] = recorded(getattr(run, method), name)
    try:
        yield
    finally:
        for method in asking:
            own.pop(method, None)
