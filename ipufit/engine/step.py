# SPDX-License-Identifier: Apache-2.0
"""The module that PopTorch traces: the user's, with a head that ipufit adds."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import re
from dataclasses import dataclass
from typing import Any, ContextManager, Iterator, NamedTuple, Protocol, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit._tree import Structure, tree_map
from ipufit.config import IPUConfig
from ipufit.data import NOTHING, SampleStructure
from ipufit.engine.constants import random_draws_warned
from ipufit.engine.metric_state import Entry, vector_of, widened_all
from ipufit.engine.objective import (
    OWN_LOSS,
    Inferred,
    Objective,
    StepFunction,
    StepResult,
    checked_scalar,
    dominant_labels,
    mixed_loss_terms,
    probability_outputs,
    result_of_step,
    shapes_of,
    split_own_loss,
)
from ipufit.engine.precision import computed_in
from ipufit.engine.trace_checks import (
    AutogradObserver,
    BufferObserver,
    LossObserver,
    Observing,
    ProbabilityObserver,
    refuse_hidden,
    require_gradient,
)
from ipufit.engine.weights import HostValue, replaced_by_inputs, weights_of
from ipufit.errors import ConfigError, DataError, IpufitError, UnknownNameError
from ipufit.losses import LossTerms
from ipufit.metrics import rows_of
from ipufit.mixing import mixed_inputs
from ipufit.placement import (
    Beginnings,
    Blocks,
    annotated_blocks,
    find_beginnings,
    is_inside,
    own_stages,
    started_blocks,
)
from ipufit.scalars import Scalars, collected

_NO_FORWARD = "_forward_unimplemented"
"""The name of torch's function in the place of a missing `forward`."""


class NoForwardError(DataError):
    """A module that has no `forward` is to be called."""


def call_module(module: torch.nn.Module, inputs: Any) -> Any:
    """Call a module: a dict of inputs gives arguments by name, a tuple by place.

    Raises:
        DataError: `forward` doesn't take such arguments, or not of these shapes.

    Example:
        >>> call_module(torch.nn.Linear(2, 3), torch.zeros(4, 2)).shape
        torch.Size([4, 3])
    """
    by_place, by_name = arguments_of(inputs)
    with failures_explained(module, inputs):
        return module(*by_place, **by_name)


def call_step(step: StepFunction, module: torch.nn.Module, batch: Any) -> Any:
    """Call a user's step.

    Args:
        step: Function of the module and a batch.
        module: The user's module.
        batch: Nested as the data: inputs, or inputs, targets and weights in a tuple.

    Raises:
        DataError: It doesn't take such a batch, or not of these shapes.

    Example:
        >>> call_step(lambda module, batch: module(batch).mean(), torch.nn.ReLU(),
        ...           torch.ones(4, 2))
        tensor(1.)
    """
    try:
        return step(module, batch)
    except (IpufitError, poptorch.Error):
        raise
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
        name = getattr(step, "__qualname__", type(step).__name__)
        raise DataError(
            f"{name} failed with {shape_of_batch(batch)}: {error}"
        ) from error


def shape_of_batch(batch: Any) -> str:
    """A batch in words: its parts and their shapes.

    Example:
        >>> shape_of_batch((torch.zeros(4, 2), torch.zeros(4)))
        'a batch (inputs, targets) of float32 [4, 2], float32 [4]'
    """
    names = ("inputs", "targets", "weights")
    parts = f" ({', '.join(names[: len(batch)])})" if isinstance(batch, tuple) else ""
    return f"a batch{parts} of {shapes_of(batch)}"


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module by place, and by name if inputs are a dict.

    Example:
        >>> arguments_of({"x": 1}), arguments_of([1, 2]), arguments_of(3)
        (((), {'x': 1}), ((1, 2), {}), ((3,), {}))
    """
    if isinstance(inputs, dict):
        return (), {str(name): value for name, value in inputs.items()}
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


@contextlib.contextmanager
def failures_explained(module: torch.nn.Module, inputs: Any) -> Iterator[None]:
    """Say with which inputs a module is called within, if it fails.

    Raises:
        DataError: `forward` doesn't take such arguments, or not of these shapes.
        NoForwardError: There is no `forward`.
    """
    name = type(module).__name__
    if getattr(module.forward, "__name__", "") == _NO_FORWARD:
        raise _without_forward(name)
    _check_arguments(module, *arguments_of(inputs))
    try:
        yield
    except poptorch.Error:
        raise
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, ValueError) and not _is_of_torch(error):
            raise  # the others are torch's, of shapes and types
        if f"[{name}] is missing" in str(error):  # a forward that calls torch's
            raise _without_forward(name) from error
        raise DataError(
            f"{name} failed with inputs of {shapes_of(inputs)}: {error}"
        ) from error


def _is_of_torch(error: Exception) -> bool:
    """Whether code of torch has raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return str(module).partition(".")[0] == "torch"


def _without_forward(name: str) -> NoForwardError:
    return NoForwardError(
        f"{name} has no forward, and was to be called with inputs. Write one; or give "
        "compile() a step= for fit and evaluate, and a predict_step= for predict."
    )


def _check_arguments(
    module: torch.nn.Module, by_place: tuple[Any, ...], by_name: dict[str, Any]
) -> None:
    try:
        signature = inspect.signature(module.forward)
    except ValueError:  # compiled code has no signature
        return
    try:
        signature.bind(*by_place, **by_name)
    except TypeError as error:
        given = ", ".join(map(repr, by_name)) or f"{len(by_place)} by place"
        strangers = _strangers(signature, by_name)
        if strangers:
            name = strangers[0]
            raise DataError(
                f"{type(module).__name__}.forward{signature} has no argument {name!r}, "
                f"and samples have {given}. A dict of inputs gives arguments by name. "
                f"If it is a target, name it, y={name!r}, in predict() too; else take "
                "it out of the samples."
            ) from None
        raise DataError(
            f"{type(module).__name__}.forward{signature} doesn't take the inputs that "
            f"are given ({given}): {error}. A dict of inputs gives arguments by name, "
            "a tuple or list by place."
        ) from None


def _strangers(signature: inspect.Signature, by_name: dict[str, Any]) -> list[str]:
    """Names of inputs that `forward` has no argument for."""
    known = signature.parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return []
    return [name for name in by_name if name not in known]


@dataclass(frozen=True)
class Packing:
    """Places the tensors that a program returns into outputs as the module nests them.

    Attributes:
        structure: Nesting of the module's outputs.
        leaves: Outputs that are no tensors, which are the same in every call; None for
            a tensor.
        is_tensor: Whether each leaf is a tensor.
        names: Names of the scalars that follow the outputs.
    """

    structure: Structure = NOTHING
    leaves: tuple[Any, ...] = ()
    is_tensor: tuple[bool, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, outputs: Any, scalars: Scalars) -> tuple[tuple[Tensor, ...], Packing]:
        """Flatten outputs and scalars; traceable.

        Args:
            outputs: Everything that the module returned.
            scalars: 0-d tensors that it gives besides.

        Raises:
            UnsupportedError: A tensor is hidden in an object.

        Returns:
            The tensors among the outputs, then the scalars, `[1]` each; and the
            packing that gets from such tensors back to outputs and scalars.

        Example:
            >>> import torch
            >>> tensors, packing = Packing.of({"a": torch.ones(2), "b": "c"}, {})
            >>> packing.unpack(tensors)
            ({'a': tensor([1., 1.]), 'b': 'c'}, {})
        """
        structure = Structure.of_outputs(outputs)
        leaves = structure.flatten(outputs)
        for leaf, path in zip(leaves, structure.paths("outputs")):
            if not isinstance(leaf, Tensor):
                refuse_hidden(leaf, path)
        is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        packing = cls(structure, others, is_tensor, tuple(scalars))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return (*tensors, *(value.reshape(1) for value in scalars.values())), packing

    def unpack(self, tensors: Sequence[Tensor]) -> tuple[Any, Scalars]:
        """Nest outputs as the module does, beside scalars of `[micro-batches]` each.

        The tensors become plain ones: PopTorch's have an attribute of their own, with
        which they can't be pickled.
        """
        plain = [tensor.detach() for tensor in tensors]
        count = len(plain) - len(self.names)
        given = iter(plain[:count])
        leaves = [
            next(given) if is_tensor else leaf
            for is_tensor, leaf in zip(self.is_tensor, self.leaves)
        ]
        return self.structure.rebuild(leaves), dict(zip(self.names, plain[count:]))


def kept_submodules(module: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    """Find the submodules whose outputs are kept.

    Args:
        patterns: Names of submodules, or patterns of them, as in `fnmatch`, where `*`
            stands for dots too. A pattern doesn't mean what is within its matches, so
            `"encoder.layer.*"` keeps what each layer returns, and nothing inside.

    Raises:
        UnknownNameError: A pattern matches none.

    Example:
        >>> layers = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
        >>> kept_submodules(torch.nn.ModuleDict({"layer": layers}), ["layer.*"])
        ['layer.0', 'layer.1']
        >>> kept_submodules(torch.nn.ModuleDict({"layer": layers}), ["l*"])
        ['layer']
    """
    names = [name for name, _ in module.named_modules() if name]
    kept: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise UnknownNameError("submodule in recompute", pattern, names)
        kept.update(
            name for name in found if not any(is_inside(name, other) for other in found)
        )
    return [name for name in names if name in kept]


@contextlib.contextmanager
def recomputed_between(
    module: torch.nn.Module, patterns: Sequence[str]
) -> Iterator[None]:
    """Have the outputs of submodules kept, and what is between them computed again.

    The hooks are there while a program is traced, so the module stays as it was.

    Args:
        patterns: As for `kept_submodules`.

    Raises:
        UnknownNameError: A pattern matches no submodule.
    """
    children = dict(module.named_modules())
    handles = [
        children[name].register_forward_hook(
            lambda _module, _inputs, outputs: tree_map(_kept, outputs)
        )
        for name in kept_submodules(module, patterns)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def refuse_unseen_pipeline(
    module: torch.nn.Module, config: IPUConfig, blocks: Blocks
) -> None:
    """Refuse recomputation in a pipeline that only the trace has shown.

    The options are made before `forward` begins its blocks, and what recomputes on one
    IPU does nothing in a pipeline (PopART, `ir.cpp`).

    Args:
        module: The user's module.
        config: Has `recompute`.
        blocks: Blocks that `forward` has begun.

    Raises:
        ConfigError: The blocks are on several IPUs, and something is to be recomputed.

    Example:
        >>> module, blocks = torch.nn.ReLU(), [("a", 0), ("b", 1)]
        >>> refuse_unseen_pipeline(module, IPUConfig(recompute="auto"), blocks)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: recompute='auto', and `forward` begins blocks on 2...
    """
    if config.recompute in (None, "off") or config.customize is not None:
        return
    is_known = config.placement is not None or own_stages(module, config) > 1
    num_ipus = len({ipu or 0 for _, ipu in blocks})
    if is_known or not config.is_pipelined or num_ipus < 2:
        return
    names = ", ".join(repr(name) for name, _ in blocks)
    raise ConfigError(
        f"recompute={config.recompute!r}, and `forward` begins blocks on {num_ipus} "
        "IPUs, a pipeline that isn't known before: there PopART would recompute "
        f"nothing. Name the blocks in pipeline=({names}), or leave recompute out: "
        "pipelines recompute by default."
    )


def _kept(output: Any) -> Any:
    """A checkpoint of a tensor that has a gradient; anything else as it is."""
    is_kept = isinstance(output, Tensor) and output.is_floating_point()
    return poptorch.recomputationCheckpoint(output) if is_kept else output


class ShortPipelineError(ConfigError):
    """A call has too few micro-batches for the blocks that the model begins itself."""


def check_stages_begin(
    module: torch.nn.Module, config: IPUConfig, started: Blocks, *, training: bool
) -> None:
    """Refuse names of stages that nothing begins: PopTorch would pass over them.

    Too much of the model, or all of it, would be on the first stage.

    Args:
        module: The user's module, whose `forward` has been traced.
        config: Names the stages.
        started: Blocks that `forward` has begun.
        training: Whether the program trains. In inference `forward` may leave parts
            out.

    Raises:
        UnknownNameError: A name is no submodule, and no block that was begun.
        ConfigError: A name is a submodule that was never called, or a pattern of such.

    Example:
        >>> module = torch.nn.ModuleDict({"encoder": torch.nn.ReLU()})
        >>> config = IPUConfig(pipeline=["enc"])
        >>> check_stages_begin(module, config, [], training=True)
        Traceback (most recent call last):
        ipufit.errors.UnknownNameError: Unknown submodule or block in pipeline 'enc'...
    """
    begun = {name for name, _ in started if name is not None}
    begun.update(name for name, _ in annotated_blocks(module).values() if name)
    is_counted = any(name is None for name, _ in started)  # their ids are numbers
    names = [name for stage in config.stages for name in stage]
    if config.layers_per_ipu is not None:
        del names[0]  # it begins before the module
    missing = [n for n in names if n not in begun and not (is_counted and n.isdigit())]
    if not missing or (not training and len(missing) < len(names)):
        return
    beginnings = find_beginnings(module, config)
    meant = {*beginnings.before.values(), *beginnings.after.values()}
    for name in missing:
        if name not in meant:
            known = begun.union(n for n, _ in module.named_modules() if n)
            raise UnknownNameError("submodule or block in pipeline", name, known)
    raise _never_called(module, beginnings, missing[0])


def _never_called(
    module: torch.nn.Module, beginnings: Beginnings, block: str
) -> ConfigError:
    submodules = dict(module.named_modules())
    places = (*beginnings.before.items(), *beginnings.after.items())
    names = [name for name, begun in places if begun == block]
    if block not in submodules:
        return ConfigError(
            f"The stage {block!r} begins at {', '.join(names[:3])}, and `forward` "
            "calls none of these: a stage begins where a submodule is called. Name one "
            "that is called, or begin a block there: with poptorch.Block(...)."
        )
    inner = [n for n in submodules if n.startswith(f"{block}.")]
    return ConfigError(
        f"pipeline names {block!r}, a {type(submodules[block]).__name__} "
        "that `forward` never calls: a stage begins where its submodule is called. "
        + (
            f"Name the first that is called in it, such as {inner[0]!r}, or "
            if inner
            else "Name one that is called, or "
        )
        + f"begin a block there: with poptorch.Block({block!r})."
    )


@contextlib.contextmanager
def stage_blocks(module: torch.nn.Module, config: IPUConfig) -> Iterator[None]:
    """Begin a block where a submodule that a config's stages name begins.

    Other names are blocks that the model makes itself. The hooks are only there while a
    program is traced, so the user's module stays as it was.

    Args:
        module: The user's module.
        config: Names the stages.

    Raises:
        ShortPipelineError: The model's own blocks need more micro-batches than a call
            has.
    """
    submodules = dict(module.named_modules())
    beginnings = find_beginnings(module, config)
    handles: list[Any] = []
    for name, block in beginnings.before.items():
        begin = _Begin(block)
        handles.append(submodules[name].register_forward_pre_hook(begin))
    for name, block in beginnings.after.items():
        handles.append(submodules[name].register_forward_hook(_Begin(block)))
    try:
        yield
    except poptorch.Error as error:
        _refuse_short_pipeline(error)
        raise
    finally:
        for handle in handles:
            handle.remove()


class _Begin:
    """A hook that begins a block."""

    def __init__(self, block: str) -> None:
        self._block = block

    def __call__(self, *_args: Any) -> None:
        poptorch.Block.start(self._block)


def _refuse_short_pipeline(error: poptorch.Error) -> None:
    """Explain an error of PopTorch about too few micro-batches for a model's blocks."""
    found = re.search(r"number of pipeline stages \((\d+)\)", str(error))
    if found is None:
        return
    least = int(found[1])
    is_training = "gradientAccumulation" in str(error)
    stages = (least + 1) // 2 if is_training else least
    way = (
        f"training keeps {least} micro-batches in flight: use "
        f"IPUConfig(gradient_accumulation={least}) or more, or a larger batch_size,"
        if is_training
        else f"a call needs {least} micro-batches: use "
        f"IPUConfig(inference_iterations={least}) or more,"
    )
    raise ShortPipelineError(
        f"The model begins blocks of {stages} stages, and {way} or name the blocks in "
        "pipeline=(...), so that ipufit sees to it, or take execution='sharded', which "
        "runs one stage after the other."
    ) from error


def last_block(name: str | None, started: Blocks) -> ContextManager[Any]:
    """Enter the block that the loss, and all else that ipufit adds, joins.

    After a `with Block(...)` no block is active, and PopTorch refuses every operator
    then. Entering the last one again makes no new stage.

    Args:
        name: Name of the block; None for the last one that the module started.
        started: Blocks that the module started.

    Returns:
        A context in which the block is open; without blocks one that does nothing.
    """
    if name is not None:
        return _named_block(name, started)
    return poptorch.Block(*started[-1]) if started else contextlib.nullcontext()


@contextlib.contextmanager
def _named_block(name: str, started: Blocks) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(poptorch.Block(name))
        except AssertionError as error:  # it would be a new one, on no IPU
            known = {one for one, _ in started if one is not None}
            raise UnknownNameError("loss_block", name, known) from error
        yield


class Findings(NamedTuple):
    """Everything that the trace of a step has found out.

    Attributes:
        packing: Nesting of the outputs that the program returns.
        entries: Figures in the vector that a training program returns.
        probabilities: Outputs that are probabilities (`probability_outputs`).
        increments: Number that a micro-batch adds to each buffer that is only counted
            up.
    """

    packing: Packing
    entries: tuple[Entry, ...]
    probabilities: dict[str, str]
    increments: dict[str, int]


class Called(NamedTuple):
    """The user's module, called once.

    Attributes:
        outputs: Everything that it returned; a `StepResult` of a user's step.
        scalars: Means that it logged.
        blocks: Blocks that it has started.
        losses: Observer of the loss functions that it called.
        probabilities: Outputs that are probabilities (`probability_outputs`).
    """

    outputs: Any
    scalars: Scalars
    blocks: Blocks
    losses: LossObserver
    probabilities: dict[str, str]


class Head(Protocol):
    """The part of a step that follows the user's module.

    Attributes:
        is_training: Whether the program updates weights.
        index_of_loss: Place of the marked loss in what the program returns; None if it
            has none.
        modules: Modules that are traced besides the user's.
        step: Function that is called in the place of the module; None for the module.
        takes_labels: Whether targets and weights are among the tensors of a batch.
    """

    is_training: bool
    index_of_loss: int | None
    modules: Sequence[torch.nn.Module]
    step: StepFunction | None
    takes_labels: bool

    def explained(self, module: torch.nn.Module) -> ContextManager[None]:
        """Explain errors of the module while it is called."""
        ...

    def results(
        self, tensors: Sequence[Tensor], called: Called, observing: Observing
    ) -> tuple[tuple[Tensor, ...], Findings]:
        """Compute the tensors that the program returns, and say what was found.

        Args:
            tensors: Tensors of the batch.
            called: The module's outputs.
            observing: Mode that shows operations to observers.
        """
        ...


class TrainingHead:
    """The loss, marked, and the sums of the figures.

    Args:
        objective: Losses and metrics.
        structure: Nesting of a batch.
    """

    is_training = True
    index_of_loss: int | None = 1
    takes_labels = True

    def __init__(self, objective: Objective, structure: SampleStructure) -> None:
        steps = objective.steps
        self.modules: Sequence[torch.nn.Module] = objective.modules
        self.step: StepFunction | None = None if steps is None else steps.training
        self._objective = objective
        self._structure = structure

    def results(
        self, tensors: Sequence[Tensor], called: Called, observing: Observing
    ) -> tuple[tuple[Tensor, ...], Findings]:
        """Compute sums of the figures, the loss, and the outputs if they are streamed.

        The loss is returned because PopTorch drops what no output depends on, before
        it looks for the loss.
        """
        own, outputs, packing = None, called.outputs, Packing()
        rows, labels = rows_of(tensors[0]), self._structure.labels(tensors)
        if self._objective.owns_loss:
            own, outputs = _split(called, rows)
        if self.step is not None and self._objective.measures:
            _require_outputs(outputs)
        wide, labels = widened_all(outputs, labels)
        if self._objective.owns_loss:
            terms = self._own_terms(own, wide, rows)
        else:
            self._objective.check_logits(wide, labels, called.probabilities)
            mixing = self._structure.mixing(tensors)
            if mixing is None:
                terms = self._objective.loss_terms(wide, labels, rows)
            else:
                terms = mixed_loss_terms(self._objective, wide, labels, rows, mixing)
                labels = dominant_labels(labels, mixing)
        with observing.also(called.losses):
            vector, entries = vector_of(
                self._objective, wide, labels, rows, terms, called.scalars
            )
        streamed: tuple[Tensor, ...] = ()
        if self._objective.is_streamed:
            streamed, packing = Packing.of(outputs, {})
        loss = total_loss(terms)
        require_gradient(loss)
        if called.losses.has_losses:
            loss = _with_other_losses(loss, (vector, *streamed))
        marked = poptorch.identity_loss(loss, reduction="sum")
        findings = Findings(packing, entries, called.probabilities, {})
        return (vector, marked, *streamed), findings

    def _own_terms(
        self, own: Tensor | None, outputs: Any, rows: int
    ) -> dict[str, tuple[LossTerms, float]]:
        if own is None and self.step is not None:
            raise ConfigError(
                "The training step returned no loss: it returned "
                f"{shapes_of(outputs)}. Return the mean over the samples, a tensor "
                "without dimensions: alone, first in a tuple, or as 'loss' in a dict."
            )
        if own is None:
            raise ConfigError(
                "There is no loss: compile() got none, and the module returns none "
                f"that would be understood ({OWN_LOSS}); it returned "
                f"{shapes_of(outputs)}. Return one, or pass loss='cross_entropy' or "
                f"the like to compile().{self._targets_hint}"
            )
        value: Tensor = own.to(torch.float32)
        total = value.detach().mul(rows)
        count = torch.full_like(total, float(rows), device=total.device)
        return {"": (LossTerms(value, total, count), 1.0)}

    @property
    def _targets_hint(self) -> str:
        """Advice if there are targets, which a module with its own loss doesn't get."""
        owns_loss = self._objective.owns_loss and self.step is None
        if not (owns_loss and self._structure.has_targets):
            return ""
        return (
            " The module doesn't get the targets, which are for losses of compile() "
            "and for metrics: what it computes its loss from must be among the inputs, "
            "as in fit({'x': x, 'labels': y}) or samples of the form ((x, labels),)."
        )

    @contextlib.contextmanager
    def explained(self, module: torch.nn.Module) -> Iterator[None]:
        """Give the advice if `forward` fails, as with None in the place of targets."""
        try:
            yield
        except (TypeError, AttributeError) as error:
            if not self._targets_hint:
                raise
            raise ConfigError(
                f"compile() got no loss, and {type(module).__name__} failed: "
                f"{error}.{self._targets_hint}"
            ) from error


class InferenceHead:
    """The outputs, and the scalars that the module gives.

    Args:
        inferred: The computation of the program.
    """

    is_training = False
    index_of_loss: int | None = None
    modules: Sequence[torch.nn.Module] = ()

    def __init__(self, inferred: Inferred) -> None:
        self.step: StepFunction | None = inferred.step
        self.takes_labels = inferred.takes_labels
        self._inferred = inferred

    def explained(self, module: torch.nn.Module) -> ContextManager[None]:
        """Leave errors as they are."""
        return contextlib.nullcontext()

    def results(
        self, tensors: Sequence[Tensor], called: Called, observing: Observing
    ) -> tuple[tuple[Tensor, ...], Findings]:
        """Return the outputs, then the scalars: the own loss and what is logged."""
        outputs, scalars = called.outputs, called.scalars
        if self._inferred.owns_loss:
            own, outputs = _split(called, rows_of(tensors[0]))
            if own is not None:
                scalars = _with_own_loss(own, scalars)
        if not self._inferred.gives_outputs:
            outputs = ()
        elif self.step is not None and self.takes_labels:
            _require_outputs(outputs)
        returned, packing = Packing.of(outputs, scalars)
        return returned, Findings(packing, (), called.probabilities, {})


def _split(called: Called, rows: int) -> tuple[Tensor | None, Any]:
    """Split what was returned into the module's own loss, or a step's, and the rest.

    Raises:
        ConfigError: The loss has several elements; or it is a sum over samples, so
            that it means something else in a micro-batch of another size.
    """
    if isinstance(called.outputs, StepResult):
        own, rest = called.outputs
    else:
        own, rest = split_own_loss(called.outputs, called.losses.marked)
    if rows > 1 and any(own is added for added in called.losses.sums):
        raise ConfigError(
            f"The model's own loss is a sum over the {rows} samples of a micro-batch "
            "(reduction='sum'), and has to be their mean: gradients and figures would "
            "depend on how samples are split into micro-batches. Use reduction='mean'."
        )
    return None if own is None else checked_scalar(own), rest


def _require_outputs(outputs: Any) -> None:
    """Refuse a step without outputs, where metrics need them.

    Raises:
        ConfigError: There are none.
    """
    if isinstance(outputs, tuple) and not outputs:
        raise ConfigError(
            "compile() got metrics, and the step returned no outputs for them. Return "
            "{'loss': loss, 'outputs': outputs}, or report scalars in that dict and "
            "leave metrics out."
        )


def _with_own_loss(own: Tensor, scalars: Scalars) -> Scalars:
    if "loss" in scalars:
        raise ConfigError(
            "log('loss') was called, and the module returns its own loss, which is "
            "called so: log it under another name."
        )
    return {"loss": own.detach().to(torch.float32), **scalars}


def total_loss(terms: dict[str, tuple[LossTerms, float]]) -> Tensor:
    """Sum the losses up, with their weights; 0-d.

    Args:
        terms: Terms and weight of each loss, by output.
    """
    values = [t.value if w == 1 else t.value.mul(w) for t, w in terms.values()]
    return values[0] if len(values) == 1 else torch.stack(values).sum()


def _with_other_losses(value: Tensor, returned: Sequence[Tensor]) -> Tensor:
    """Add everything else that is returned to the loss, as a part of it that is 0.

    Built-in loss functions that a metric, `log` or the module uses are markers too.
    PopTorch takes those for a step on the way from which the final loss is reached.
    """
    nothing = [
        tensor.detach().reshape(-1)[:1].to(torch.float32).mul(0.0)
        for tensor in returned
    ]
    return torch.cat([value.reshape(1), *nothing])


_OVERLAPS = {
    "accumulation": poptorch.OverlapMode.OverlapAccumulationLoop,
    "device_iterations": poptorch.OverlapMode.OverlapDeviceIterationLoop,
}


class Step(torch.nn.Module):
    """One micro-batch of the user's module, as PopTorch traces it.

    Args:
        config: Has its stages and precision.
        structure: Nesting of a batch. A dict of inputs becomes keyword arguments of the
            module, a tuple or list positional ones.
        host_values: Buffers whose values follow the tensors of a batch.
        head: Computes from the module's outputs what the program returns.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: IPUConfig,
        structure: SampleStructure,
        host_values: Sequence[HostValue],
        head: Head,
    ) -> None:
        super().__init__()
        self.module = module
        self.losses = torch.nn.ModuleList(head.modules)  # for their buffers
        self._head = head
        self.host_values = tuple(host_values)
        self._structure = structure
        self._first_block = config.first_block
        self._last_block = config.last_block
        self._config = config
        self._overlap = _OVERLAPS.get(config.overlap_io or "")
        # PopTorch traces a shallow copy, which shares this list.
        self._found: list[Findings] = []

    @property
    def findings(self) -> Findings:
        """The findings of the newest trace."""
        return self._found[-1]

    @property
    def num_given(self) -> int:
        """Number of the first tensors of a batch that the program takes."""
        structure = self._structure
        return structure.num_given if self._head.takes_labels else structure.num_inputs

    @property
    def weights(self) -> list[Tensor]:
        """Parameters and buffers of which the device has copies."""
        values = {id(value.tensor) for value in self.host_values}
        return [one for one in weights_of(self) if id(one) not in values]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Trace a micro-batch, and give all that the program returns.

        Args:
            *tensors: Tensors of the batch, then the host's values.

        Raises:
            UnsupportedError: PopTorch would pass over something.
        """
        count = len(tensors) - len(self.host_values)
        with replaced_by_inputs(self.host_values, tensors[count:]):
            buffers = BufferObserver(dict(self.named_buffers()))
            autograd = AutogradObserver(is_training=self._head.is_training)
            observing = Observing(autograd, buffers)
            with observing, random_draws_warned(self.module):
                if self._first_block is not None:  # casts and transfers belong to it
                    poptorch.Block.start(self._first_block)
                batch = self._loaded(tensors[:count])
                called = self._called(batch, observing)
                with last_block(self._last_block, called.blocks):
                    returned, findings = self._head.results(batch, called, observing)
                    returned = self._stored(returned)
            buffers.refuse_returned(returned)
            buffers.warn(is_counted=self._head.is_training)
        self._found.append(findings._replace(increments=buffers.increments()))
        return returned

    def _called(self, tensors: Sequence[Tensor], observing: Observing) -> Called:
        given = [self._cast(tensor) for tensor in tensors[: self._structure.num_inputs]]
        mixing = self._structure.mixing(tensors)
        if mixing is not None:
            given = [mixed_inputs(self._as_floats(one), mixing) for one in given]
        inputs = self._structure.inputs.rebuild(given)
        losses, probabilities = LossObserver(), ProbabilityObserver()
        with contextlib.ExitStack() as stack:
            scalars = stack.enter_context(collected())
            blocks = stack.enter_context(started_blocks(self._config.stages))
            stack.enter_context(observing.also(losses))
            stack.enter_context(observing.also(probabilities))
            stack.enter_context(self._head.explained(self.module))
            stack.enter_context(computed_in(self.module, self._config))
            outputs = self._computed(inputs, tensors, losses)
        check_stages_begin(
            self.module, self._config, blocks, training=self._head.is_training
        )
        if self._head.is_training:
            refuse_unseen_pipeline(self.module, self._config, blocks)
        found = probability_outputs(outputs, probabilities)
        return Called(outputs, scalars, blocks, losses, found)

    def _computed(
        self, inputs: Any, tensors: Sequence[Tensor], losses: LossObserver
    ) -> Any:
        """Call the user's module, or the user's step, with a micro-batch."""
        step = self._head.step
        if step is None:
            return call_module(self.module, inputs)
        if not self._head.takes_labels:
            return call_step(step, self.module, inputs)
        batch = self._structure.batch(inputs, tensors)
        returned = call_step(step, self.module, batch)
        return result_of_step(returned, losses.marked)

    def _loaded(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors of the batch, loaded while the device computes if asked for."""
        if self._overlap is None:
            return tensors
        return [poptorch.set_overlap_for_input(t, self._overlap) for t in tensors]

    def _stored(self, returned: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """All that the program returns, stored likewise; the loss stays the marked."""
        if self._overlap is None:
            return returned
        mark = poptorch.set_overlap_for_output
        return tuple(
            one if place == self._head.index_of_loss else mark(one, self._overlap)
            for place, one in enumerate(returned)
        )

    def _as_floats(self, tensor: Tensor) -> Tensor:
        """Pixels of 8 bits in the dtype of the program, so that they can be mixed."""
        if tensor.is_floating_point():
            return tensor
        floats: Tensor = tensor.to(self._config.types.activations)
        return floats

    def _cast(self, tensor: Tensor) -> Tensor:
        is_cast = self._config.types.is_half and tensor.is_floating_point()
        return tensor.to(torch.float16) if is_cast else tensor
