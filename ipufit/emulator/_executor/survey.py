# SPDX-License-Identifier: Apache-2.0
"""A survey: everything at once that PopTorch would refuse in a program.

The program is traced on tensors without values, which takes neither memory nor time,
and each refusal is noted where a compilation would end at the first one.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node

from ipufit.emulator._executor.constraints import (
    check_updatable_buffers,
    checks_of_program,
)
from ipufit.emulator._ground.custom_args import flattenTensorStructure
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._layout.pod import Target
from ipufit.emulator._options.options import Options
from ipufit.emulator._program.args import check_inputs
from ipufit.emulator._program.checks import (
    check_node,
    check_numbers,
    other_numbers,
    used_ipus,
)
from ipufit.emulator._program.fakes import Fakes, RealResults, unseen
from ipufit.emulator._program.losses import add_final_loss
from ipufit.emulator._program.program import (
    Program,
    compiled_in,
    eliminate,
    kind_of,
    refuse_scripted,
    unvalidated_distributions,
    with_bodies,
)
from ipufit.emulator._program.strict import alternative_to, unsupported_nodes
from ipufit.emulator._program.survey_tracer import (
    Notes,
    Remark,
    SurveyGuard,
    SurveyTracer,
    place_of,
)
from ipufit.emulator._tracing.blocks import tracing_blocks
from ipufit.emulator._tracing.nodes import (
    NORM_FUNCTIONS,
    blamed_nodes,
    changed_memory,
    constant_nodes,
)
from ipufit.emulator._tracing.places import Place, Places
from ipufit.emulator._tracing.recording import (
    Recording,
    bindings_of,
    named_weights,
    refuse_rebound,
    restore_bindings,
)
from ipufit.emulator._tracing.refusals import refuse_tied_buffers
from ipufit.emulator._tracing.state import tracing
from ipufit.emulator._tracing.tracer import visible_indexing
from ipufit.emulator.errors import Error


class Survey(NamedTuple):
    """The findings of a survey.

    Attributes:
        remarks: The findings, in order.
        error: An error that ended the trace and is none of PopTorch's; None if there
            was none.
        place: The place of that error.
        is_whole: Whether the whole program was traced.
        norms: Modules that normalise over the rows of a micro-batch, and their places.
        returned_bytes: Bytes of what a micro-batch returns; 0 if unknown.
    """

    remarks: list[Remark]
    error: Exception | None
    place: Place
    is_whole: bool
    norms: list[Place]
    returned_bytes: int


def survey(
    module: torch.nn.Module,
    tensors: Sequence[Tensor],
    options: Options,
    *,
    is_training: bool,
) -> Survey:
    """Trace a module on one micro-batch without values, and note all refusals.

    The module and torch's generator stay as they are, and no device is asked for.

    Args:
        module: The module, with its loss if it is trained.
        tensors: Arguments of one micro-batch, of which shapes and types count.
        options: Options that the program would be compiled with.
        is_training: Whether it would be differentiated.

    Example:
        >>> class Reader(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x * x.sum().item() if x.max() > 0 else x
        >>> found = survey(Reader(), [torch.ones(2)], Options(), is_training=False)
        >>> [remark.topic for remark in found.remarks]
        ['control flow', 'value']
    """
    notes, fakes = Notes(Places()), Fakes()
    for check in (refuse_scripted, refuse_tied_buffers):
        _try(notes, "module", check, module)
    _try(notes, "dtype", check_inputs, list(tensors))
    inputs = [fakes.like(tensor) for tensor in tensors]
    weights = named_weights(module)
    error: Exception | None = None
    place = Place()
    recording = None
    outputs: Any = ()
    rng_state = torch.random.get_rng_state()
    try:
        with _prepared(is_training):
            recording = Recording(weights, inputs, fakes.weight)
            outputs = _called(
                module, recording, inputs, options, notes, fakes, is_training
            )
    except Error as refusal:
        notes.add("program", refusal, notes.places.of_error(refusal))
        error = refusal
    except Exception as other:  # noqa: BLE001 - a user's code may raise anything
        place, error = notes.places.of_error(other), other
    finally:
        torch.random.set_rng_state(rng_state)
    norms: list[Place] = []
    if recording is not None:
        with torch.set_grad_enabled(is_training):
            graphs = _examine(
                recording, outputs, weights, options, notes, error, is_training
            )
        check_buffers = check_updatable_buffers
        _try(notes, "options", check_buffers, module, options)
        norms = _norms(graphs)
    is_own = isinstance(error, Error)
    returned = flattenTensorStructure(outputs)
    return Survey(
        notes.list(),
        None if is_own else error,
        place,
        error is None,
        norms,
        sum(tensor.numel() * tensor.element_size() for tensor in returned),
    )


@contextlib.contextmanager
def _prepared(is_training: bool) -> Iterator[None]:
    loggers = logger, logging.getLogger(FakeTensorMode.__module__)
    before = [one.disabled for one in loggers]
    for one in loggers:  # a compilation will warn
        one.disabled = True
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(
            is_training
        ), visible_indexing(), unvalidated_distributions(), unseen():
            yield
    finally:
        for one, was_disabled in zip(loggers, before):
            one.disabled = was_disabled


def _try(notes: Notes, topic: str, check: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a check, and note its refusal."""
    try:
        return check(*args, **kwargs)
    except Error as refusal:
        notes.add(topic, refusal, None if blamed_nodes(refusal) else Place())
        return None


def _called(
    module: torch.nn.Module,
    recording: Recording,
    inputs: list[Tensor],
    options: Options,
    notes: Notes,
    fakes: Fakes,
    is_training: bool,
) -> Any:
    """Run the module under the tracer, and note the weights that it replaces."""
    tracer = SurveyTracer(recording, fakes, notes)
    bindings = bindings_of(module)
    with _assignments(notes.places) as assigned:
        try:
            with tracing(recording, is_training=is_training), tracing_blocks(
                options._execution_strategy, recording.begin_block, recording.end_block
            ), recording.scopes.of_modules(module), notes.places.following(
                module
            ), SurveyGuard(recording, tracer, notes), tracer:
                return module(*inputs)
        finally:
            for problem in restore_bindings(module, bindings):
                _note_rebound(notes, module, problem, assigned)


def _note_rebound(
    notes: Notes,
    module: torch.nn.Module,
    problem: str,
    assigned: dict[tuple[int, str], Place],
) -> None:
    path, _, name = problem.split()[1].rpartition(".")
    owner = module.get_submodule(path)
    place = assigned.get((id(owner), name), Place())._replace(module=path)
    try:
        refuse_rebound([problem])
    except Error as refusal:
        notes.add("buffer", refusal, place)


@contextlib.contextmanager
def _assignments(places: Places) -> Iterator[dict[tuple[int, str], Place]]:
    """Note where tensors are assigned to the attributes of modules."""
    found: dict[tuple[int, str], Place] = {}
    original = torch.nn.Module.__setattr__

    def noting(self: torch.nn.Module, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[id(self), name] = places.here()
        original(self, name, value)

    torch.nn.Module.__setattr__ = noting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        torch.nn.Module.__setattr__ = original  # type: ignore[method-assign]


def _examine(
    recording: Recording,
    outputs: Any,
    weights: dict[str, Tensor],
    options: Options,
    notes: Notes,
    error: Exception | None,
    is_training: bool,
) -> list[Graph]:
    """Look at the recorded program, and note what doesn't compile."""
    graph = recording.graph
    flat = list(flattenTensorStructure(outputs)) if error is None else []
    computed = [tensor for tensor in flat if recording.is_on_device(tensor)]
    results: list[Node] = []
    if error is None:
        results = _try(notes, "own backward", recording.finish, computed) or []
        for name in recording.weights.rebound():
            kind = kind_of(weights[name])
            try:
                refuse_rebound([f"{kind} {name} is reassigned"])
            except Error as refusal:
                notes.add("buffer", refusal, _place_of_exchange(graph))
        _try(notes, "control flow", eliminate, recording, results, weights)
    graph.output(tuple(results))
    graphs = with_bodies(graph, recording.root)
    constant_inputs = compiled_in(recording, weights)
    for one in graphs:
        _check_nodes(one, constant_inputs, notes)
    if error is not None:
        return graphs  # it is unknown which operations count, and which the loss is
    ipus = _try(notes, "blocks", used_ipus, graphs, constant_inputs) or (0,)
    has_loss = False
    if is_training:
        before = len(notes.list())
        _try(notes, "loss", add_final_loss, graph, RealResults(recording.results))
        has_loss = len(notes.list()) == before
    program = _program(recording, graphs, weights, ipus, has_loss=has_loss)
    layout = Layout.from_options(options)
    for check in checks_of_program(program, layout, options, is_training=is_training):
        _try(notes, "options", check)
    ipus_in_all = program.num_ipus * layout.replicas
    _try(notes, "options", Target.of, options, ipus_in_all)
    return graphs


def _place_of_exchange(graph: Graph) -> Place:
    """The place of the last `tensor.data = other`."""
    exchanges = [node for node in graph.nodes if node.target is setattr]
    return place_of(exchanges[-1]) if exchanges else Place()


def _check_nodes(graph: Graph, constant_inputs: set[str], notes: Notes) -> None:
    constants = constant_nodes(graph, constant_inputs)
    for node in graph.nodes:
        if node in constants or node.op not in ("call_function", "call_method"):
            continue
        for check, topic in (
            (lambda one: check_node(one, constants), "arguments"),
            (check_numbers, "numbers"),
        ):
            try:
                check(node)
            except Error as refusal:
                notes.add(topic, refusal, place_of(node))
        others = other_numbers(node)
        if others:
            notes.add("numbers", others, place_of(node), is_refused=False)
    for node, function, operators in unsupported_nodes(graph, constant_inputs):
        way = alternative_to(function)
        instead = (
            f"Try {way}."
            if way
            else (
                "Compose it of functions that it compiles, or let the host compute it "
                "before or after the model."
            )
        )
        shown = ", ".join(sorted(operators))
        notes.add(
            "operator",
            f"PopTorch doesn't compile {function} ({shown}). {instead}",
            place_of(node),
        )


def _program(
    recording: Recording,
    graphs: list[Graph],
    weights: dict[str, Tensor],
    ipus: tuple[int, ...],
    *,
    has_loss: bool,
) -> Program:
    floating = {name for name, weight in weights.items() if weight.is_floating_point()}
    changes, weight_of = changed_memory(graphs), recording.weights.memory()
    updates = {weight_of[m]: names for m, names in changes.items() if m in weight_of}
    return Program(
        graph=GraphModule(recording.root, graphs[0]),
        weight_names=tuple(weights),
        weight_shapes=tuple(weight.shape for weight in weights.values()),
        output_structure=None,
        constant_outputs={},
        host_outputs={},
        has_loss=has_loss,
        blocks=tuple(recording.begun),
        ipus=ipus,
        is_random=False,
        updated_weights=frozenset(updates.keys() & floating),
        volatile_weights=frozenset(updates.keys() - floating),
        unsynchronised_weights=frozenset(
            name for name in updates.keys() & floating if updates[name] - NORM_FUNCTIONS
        ),
        written_inputs=(),
    )


def _norms(graphs: list[Graph]) -> list[Place]:
    """Places of normalisations over the rows of a micro-batch, each module once."""
    found: dict[str, Place] = {}
    for graph in graphs:
        for node in graph.nodes:
            target = str(getattr(node.target, "__name__", node.target))
            if target == "batch_norm" and _is_over_rows(node):
                place = place_of(node)
                found.setdefault(place.module, place)
    return list(found.values())


def _is_over_rows(node: Node) -> bool:
    """Whether a batch norm takes the statistics of its input, and of no buffers."""
    is_training = node.kwargs.get("training", node.args[5:6])
    if isinstance(is_training, tuple):
        is_training = is_training[0] if is_training else False
    return bool(is_training)
