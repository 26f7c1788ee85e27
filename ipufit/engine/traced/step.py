# SPDX-License-Identifier: Apache-2.0
"""The modules that PopTorch traces: the user's, with what ipufit adds to it."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, ContextManager, Iterator, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.blocks import Blocks, started_blocks
from ipufit.config import IPUConfig
from ipufit.data import Labels, SampleStructure
from ipufit.engine.baked_in.compiled_for import draws_said
from ipufit.engine.objective.dtypes import widened_all
from ipufit.engine.objective.figures import Entry, vector_of
from ipufit.engine.objective.objective import Objective, shapes_of
from ipufit.engine.objective.outputs import OWN_LOSS, checked_scalar, split_own_loss
from ipufit.engine.objective.squashed import SquashWatch
from ipufit.engine.objective.watching import LossWatch
from ipufit.engine.weights.host_values import Place, put_in
from ipufit.engine.weights.whole_buffers import BufferWatch
from ipufit.engine.weights.wrapping import weights_of
from ipufit.errors import ConfigError, DataError
from ipufit.losses import LossTerms
from ipufit.metrics import rows_of
from ipufit.scalars import Scalars, collected

from .packing import Packing
from .silent import SilenceWatch, require_gradient
from .stages import check_stages_begin, last_block

_DTYPES = {"float32": torch.float32, "float16": torch.float16}


class Findings:
    """What the trace of a step finds out.

    PopTorch traces a shallow copy of the step, so this is shared and filled in.

    Attributes:
        packing: How the outputs nest that the program returns.
        entries: The figures in the vector that a training program returns.
        squashed: The outputs that are probabilities, as `SquashWatch` tells them.
        increments: By how much a micro-batch counts up buffers of whole numbers.
    """

    def __init__(self) -> None:
        self.packing = Packing()
        self.entries: tuple[Entry, ...] = ()
        self.squashed: dict[str, str] = {}
        self.increments: dict[str, int] = {}


class Step(torch.nn.Module):
    """One micro-batch of the user's module: base of the two steps.

    Args:
        module: The user's.
        config: Its layout on IPUs.
        structure: How the tensors of a batch nest. A dict of inputs becomes keyword
            arguments of the module, a tuple or list positional ones.
        host_values: Buffers whose values follow the tensors of a batch.
    """

    _is_training: bool

    def __init__(
        self,
        module: torch.nn.Module,
        config: IPUConfig,
        structure: SampleStructure,
        host_values: Sequence[Place],
    ) -> None:
        super().__init__()
        self.module = module
        self.findings = Findings()
        self.host_values = tuple(host_values)
        self._structure = structure
        self._stages = config.stages
        self._first_block = config.first_block
        self._last_block = config.last_block
        self._dtype = _DTYPES[config.precision]

    @property
    def weights(self) -> list[Tensor]:
        """Parameters and buffers that its device has copies of."""
        values = {id(owner._buffers[name]) for owner, name in self.host_values}
        return [one for one in weights_of(self) if id(one) not in values]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What the program returns.

        Args:
            *tensors: Of the structure, then the host's values.

        Raises:
            UnsupportedError: PopTorch would pass over something.
        """
        count = len(tensors) - len(self.host_values)
        values = put_in(self.host_values, tensors[count:])
        with values:
            silence = SilenceWatch(is_training=self._is_training)
            buffers = BufferWatch(dict(self.named_buffers()))
            try:
                with silence, buffers, draws_said():
                    returned = self._computed(tensors[:count])
            except TypeError:
                problem = silence.problem or buffers.problem
                if problem is None:
                    raise
                raise problem from None  # Python's operators raise one of their own
        buffers.refuse_returned(returned)
        self.findings.increments = buffers.increments()
        buffers.warn(is_counted=self._is_training)
        return returned

    def _computed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _called(self, tensors: Sequence[Tensor]) -> tuple[Any, Scalars, Blocks]:
        """The module's outputs, what it logs, and the blocks that it has started."""
        if self._first_block is not None:  # the casts belong to it
            poptorch.Block.start(self._first_block)
        given = [self._cast(tensor) for tensor in tensors[: self._structure.num_inputs]]
        inputs, watch = self._structure.inputs.rebuild(given), SquashWatch()
        with collected() as scalars, started_blocks(self._stages) as blocks, watch:
            outputs = call_module(self.module, inputs)
        self.findings.squashed = watch.squashed(outputs)
        check_stages_begin(
            self.module, self._stages, blocks, training=self._is_training
        )
        return outputs, scalars, blocks

    def _in_last_block(self, blocks: Blocks) -> ContextManager[Any]:
        return last_block(self._last_block, blocks)

    def _cast(self, tensor: Tensor) -> Tensor:
        if self._dtype == torch.float32 or not tensor.is_floating_point():
            return tensor
        narrowed: Tensor = tensor.to(self._dtype)
        return narrowed


class TrainingStep(Step):
    """One micro-batch of training: the loss, marked, and the sums of the figures.

    Args:
        module: The user's.
        config: Its layout on IPUs.
        structure: How the tensors of a batch nest.
        host_values: Buffers whose values follow the tensors of a batch.
        objective: Losses and metrics.
    """

    _is_training = True

    def __init__(
        self,
        module: torch.nn.Module,
        config: IPUConfig,
        structure: SampleStructure,
        host_values: Sequence[Place],
        objective: Objective,
    ) -> None:
        super().__init__(module, config, structure, host_values)
        self._objective = objective
        self.losses = torch.nn.ModuleList(objective.modules)  # for their buffers

    def _computed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The figures' sums, the loss, and the outputs if some metric needs them.

        The loss is returned because PopTorch drops what no output depends on, before
        it looks for the loss.
        """
        with LossWatch() as watch, self._hint_at_targets():
            outputs, scalars, blocks = self._called(tensors)
        own: Tensor | None = None
        with self._in_last_block(blocks):
            rows, known = rows_of(tensors[0]), self._structure.labels(tensors)
            if self._objective.owns_loss:
                own, outputs = _split(outputs, watch, rows)
            wide, known = widened_all(outputs, known)
            terms = self._loss_terms(wide, known, rows, own)
            with watch:
                vector, entries = vector_of(
                    self._objective, wide, known, rows, terms, scalars
                )
            others: tuple[Tensor, ...] = ()
            if self._objective.is_streamed:
                others, self.findings.packing = Packing.of(outputs, {})
            self.findings.entries = entries
            value = total_loss(terms)
            require_gradient(value)
            if watch.is_alarmed:
                value = _with_other_losses(value, (vector, *others))
            return (vector, poptorch.identity_loss(value, reduction="sum"), *others)

    def _loss_terms(
        self, outputs: Any, known: Labels, rows: int, own: Tensor | None
    ) -> dict[str, tuple[LossTerms, float]]:
        if not self._objective.owns_loss:
            self._objective.check_logits(outputs, known, self.findings.squashed)
            return self._objective.loss_terms(outputs, known, rows)
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
        """What to do with targets, which a module with its own loss doesn't get."""
        if not (self._objective.owns_loss and self._structure.has_targets):
            return ""
        return (
            " The module doesn't get the targets, which are for losses of compile() "
            "and for metrics: what it computes its loss from must be among the inputs, "
            "as in fit({'x': x, 'labels': y}) or samples of the form ((x, labels),)."
        )

    @contextlib.contextmanager
    def _hint_at_targets(self) -> Iterator[None]:
        """Say it if `forward` can't do without them: it has None in their place."""
        try:
            yield
        except (TypeError, AttributeError) as error:
            if not self._targets_hint:
                raise
            raise ConfigError(
                f"compile() got no loss, and {type(self.module).__name__} failed: "
                f"{error}.{self._targets_hint}"
            ) from error


class InferenceStep(Step):
    """One micro-batch of inference: the outputs, and the scalars that the module gives.

    Args:
        module: The user's.
        config: Its layout on IPUs.
        structure: How the tensors of a batch nest.
        host_values: Buffers whose values follow the tensors of a batch.
        owns_loss: Whether the module returns its own loss.
    """

    _is_training = False

    def __init__(
        self,
        module: torch.nn.Module,
        config: IPUConfig,
        structure: SampleStructure,
        host_values: Sequence[Place],
        *,
        owns_loss: bool,
    ) -> None:
        super().__init__(module, config, structure, host_values)
        self._owns_loss = owns_loss

    def _computed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs, then the scalars: the own loss and what is logged."""
        with LossWatch() as watch:
            outputs, scalars, blocks = self._called(tensors)
        with self._in_last_block(blocks):
            if self._owns_loss:
                own, outputs = _split(outputs, watch, rows_of(tensors[0]))
                if own is not None:
                    scalars = _with_own_loss(own, scalars)
            returned, self.findings.packing = Packing.of(outputs, scalars)
            return returned


def _split(outputs: Any, watch: LossWatch, rows: int) -> tuple[Tensor | None, Any]:
    """The module's own loss, and the other outputs.

    Raises:
        ConfigError: It has several elements; or it is a sum over samples, so that it
            means something else in a micro-batch of another size.
    """
    own, rest = split_own_loss(outputs, watch.marked)
    if rows > 1 and any(own is added for added in watch.sums):
        raise ConfigError(
            f"The module's own loss is a sum over the {rows} samples of a micro-batch "
            "(reduction='sum'), and has to be their mean: gradients and figures would "
            "depend on how samples are split into micro-batches. Use reduction='mean'."
        )
    return None if own is None else checked_scalar(own), rest


def _with_own_loss(own: Tensor, scalars: Scalars) -> Scalars:
    if "loss" in scalars:
        raise ConfigError(
            "log('loss') was called, and the module returns its own loss, which is "
            "called so: log it under another name."
        )
    return {"loss": own.detach().to(torch.float32), **scalars}


def total_loss(terms: dict[str, tuple[LossTerms, float]]) -> Tensor:
    """What is minimised: the weighted sum of the losses, 0-d.

    Args:
        terms: What each loss adds, and its weight, by output.
    """
    values = [t.value if w == 1 else t.value.mul(w) for t, w in terms.values()]
    return values[0] if len(values) == 1 else torch.stack(values).sum()


def _with_other_losses(value: Tensor, returned: Sequence[Tensor]) -> Tensor:
    """The loss, with everything else that is returned as a part of it that is 0.

    Built-in loss functions that a metric, `log` or the module uses are markers too.
    PopTorch takes those for a step on the way from which the final loss is reached.
    """
    nothing = [
        tensor.detach().reshape(-1)[:1].to(torch.float32).mul(0.0)
        for tensor in returned
    ]
    return torch.cat([value.reshape(1), *nothing])


def call_module(module: torch.nn.Module, inputs: Any) -> Any:
    """Call `module` the way its inputs nest.

    Raises:
        DataError: `forward` doesn't take such arguments, or not of these shapes.

    Example:
        >>> call_module(torch.nn.Linear(2, 3), torch.zeros(4, 2)).shape
        torch.Size([4, 3])
    """
    is_named = isinstance(inputs, dict)
    by_name = {str(name): value for name, value in inputs.items()} if is_named else {}
    is_several = isinstance(inputs, (tuple, list))
    by_place = () if is_named else tuple(inputs) if is_several else (inputs,)
    _check_arguments(module, by_place, by_name)
    try:
        return module(*by_place, **by_name)
    except poptorch.Error:
        raise
    except (RuntimeError, IndexError) as error:  # torch's, of shapes and types
        raise DataError(
            f"{type(module).__name__} failed with inputs of {shapes_of(inputs)}: "
            f"{error}"
        ) from error


def _check_arguments(
    module: torch.nn.Module, by_place: tuple[Any, ...], by_name: dict[str, Any]
) -> None:
    try:
        signature = inspect.signature(module.forward)
    except ValueError:  # of compiled code
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
    """The names that are no arguments."""
    known = signature.parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return []
    return [name for name in by_name if name not in known]
