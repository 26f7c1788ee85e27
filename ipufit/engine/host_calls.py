# SPDX-License-Identifier: Apache-2.0
"""Calls of a user's module on the host: for shapes, sizes and comparisons."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import warnings
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ipufit._tree import Structure
from ipufit.data import HostRandomState, SampleStructure, Source
from ipufit.engine.objective import (
    AnyMetric,
    Inferred,
    Objective,
    StepResult,
    result_of_step,
    split_own_loss,
)
from ipufit.engine.precision import change_types
from ipufit.engine.step import call_module, call_step, total_loss
from ipufit.engine.trace_checks import ResultsNoted
from ipufit.engine.weights import mode, unfetched
from ipufit.errors import ConfigError
from ipufit.losses import LossTerms
from ipufit.metrics import Metric, rows_of
from ipufit.scalars import collected


def give_shapes(module: torch.nn.Module, source: Source) -> None:
    """Run a sample through a module if some of its weights have no shapes yet.

    PopTorch needs shapes. The sample is run on the host, in eval mode and without
    gradients, so torch draws the first weights and no other random numbers.

    Args:
        source: Source of samples; its first one is taken.

    Raises:
        ConfigError: Some weights still have no shapes.
        DataError: `forward` can't take such a sample.

    Example:
        >>> from ipufit.data import as_source
        >>> module = torch.nn.LazyLinear(3)
        >>> give_shapes(module, as_source(torch.zeros(4, 2)))
        >>> module
        Linear(in_features=2, out_features=3, bias=True)
    """
    if not lazy_layers(module):
        return
    leaves = [_as_on_devices(leaf) for leaf in source.example(1, inputs_only=True)]
    weights = [*module.named_parameters(), *module.named_buffers()]
    in_half = {name for name, weight in weights if weight.dtype == torch.float16}
    if in_half:  # in which many operations exist on devices only
        module.float()
    try:
        with mode(module, training=False), torch.no_grad():
            call_module(module, source.structure.inputs.rebuild(leaves))
    finally:
        if in_half:
            now = [*module.named_parameters(), *module.named_buffers()]
            halves = {id(one): torch.float16 for name, one in now if name in in_half}
            change_types(module, halves)
    left = lazy_layers(module)
    if left:
        raise ConfigError(
            f"The weights of {', '.join(left)} have no shapes, after a sample was run "
            "through the module: forward doesn't call these lazy layers. Call them, or "
            "take them out."
        )


def check_shapes(module: torch.nn.Module) -> None:
    """Refuse a module whose weights have no shapes yet.

    Raises:
        ConfigError: No sample has been run through the module's lazy layers.

    Example:
        >>> check_shapes(torch.nn.LazyLinear(3))
        Traceback (most recent call last):
        ipufit.errors.ConfigError: The weights of LazyLinear have no shapes yet: ...
    """
    lazy = lazy_layers(module)
    if lazy:
        raise ConfigError(
            f"The weights of {', '.join(lazy)} have no shapes yet: run a sample "
            "through the module first, as model.summary(x), fit, evaluate and predict "
            "do."
        )


def lazy_layers(module: torch.nn.Module) -> list[str]:
    """Return the names of layers that have weights without shapes.

    For the module itself it is the class. Only types of weights are read: reading a
    weight that PopTorch trains fetches all weights from the device.
    """
    return [
        name or type(module).__name__
        for name, layer in module.named_modules()
        if any(
            issubclass(type(tensor), (UninitializedBuffer, UninitializedParameter))
            for tensors in (layer._parameters, layer._buffers)
            for tensor in tensors.values()
        )
    ]


def _as_on_devices(leaf: Tensor) -> Tensor:
    return leaf.to(torch.float32) if leaf.is_floating_point() else leaf


class OutputSize(NamedTuple):
    """The size of a program's results for one micro-batch.

    Attributes:
        num_bytes: Bytes of all tensors that are returned.
        has_scalars: Whether it returns scalars: its own loss, or logged ones.
        moves_buffers: Whether the module changes a buffer in place in eval mode, so
            that a pass changes later ones.
    """

    num_bytes: int
    has_scalars: bool
    moves_buffers: bool = False


def output_size(
    module: torch.nn.Module,
    inferred: Inferred,
    structure: SampleStructure,
    example: Sequence[Tensor],
) -> OutputSize | None:
    """Call a module, or a step, with one sample of zeros, and return the output's size.

    A copy of the module with zero weights is called: one number for each parameter,
    expanded to its shape. So this takes little memory and time, and the module and all
    random states don't change. Nothing is printed: `forward` prints when it is traced.
    (Meta tensors would make torch import its compiler, which takes a second.)

    Args:
        module: The user's module.
        inferred: The computation of the program.
        structure: Structure of a batch.
        example: Tensors of a micro-batch, of which only shapes and types matter.

    Returns:
        None if the module can't be copied, or can't be called with such tensors.

    Example:
        >>> from ipufit.data import as_source
        >>> source = as_source(torch.zeros(8, 3))
        >>> module, example = torch.nn.Linear(3, 5), source.example(4)
        >>> output_size(module, Inferred(False), source.structure, example)
        OutputSize(num_bytes=80, has_scalars=False, moves_buffers=False)
    """
    try:
        with quiet(), collected() as scalars:
            copied = of_zeros(module)
            buffers = list(copied.buffers())
            outputs = called(copied, inferred, structure, first_of_zeros(example))
            leaves = [*_leaves(outputs), *scalars.values()]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    except Exception:  # noqa: BLE001 - a user's code may raise anything
        return None
    has_scalars = bool(scalars) or any(not tensor.dim() for tensor in tensors)
    rows = len(example[0])
    num_bytes = sum(bytes_of([t]) * (rows if t.dim() else 1) for t in tensors)
    return OutputSize(num_bytes, has_scalars, any(one._version for one in buffers))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Compute without gradients, output and warnings; restore random states.

    Example:
        >>> before = torch.get_rng_state()
        >>> with quiet():
        ...     print(torch.rand(()))
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    before = HostRandomState()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # they come again when it is traced
            with contextlib.redirect_stdout(io.StringIO()):
                yield
    finally:
        before.put_back()


def called(
    module: torch.nn.Module,
    inferred: Inferred,
    structure: SampleStructure,
    tensors: Sequence[Tensor],
) -> Any:
    """Return all results of a module in eval mode, or of a step.

    Args:
        module: A copy of the user's module.
        inferred: The computation of the program.
        structure: Structure of a batch.
        tensors: Tensors of a batch.
    """
    with mode(module, training=False):
        return _result(module, inferred, structure, tensors)


def _result(
    module: torch.nn.Module,
    inferred: Inferred,
    structure: SampleStructure,
    tensors: Sequence[Tensor],
) -> Any:
    inputs, _ = structure.split(tensors)
    if inferred.step is None:
        return call_module(module, inputs)
    if not inferred.takes_labels:
        return call_step(inferred.step, module, inputs)
    batch = structure.batch(inputs, tensors)
    result = result_of_step(call_step(inferred.step, module, batch))
    return result if inferred.gives_outputs else result.loss


def first_of_zeros(example: Sequence[Tensor]) -> list[Tensor]:
    """Return one sample of zeros, of the shapes and types of a batch.

    Example:
        >>> first_of_zeros([torch.ones(4, 2)])
        [tensor([[0., 0.]])]
    """
    return [_zeros_like(tensor[:1]) for tensor in example]


def of_zeros(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module, with zeros for its weights.

    Reading a weight that PopTorch trains fetches it from its device. So only attributes
    that `unfetched` reads are used.

    Example:
        >>> of_zeros(torch.nn.Linear(2, 1)).weight.tolist()
        [[0.0, 0.0]]
    """
    memo: dict[int, Any] = {}
    for weight in module.parameters():
        memo[id(weight)] = torch.nn.Parameter(_zeros_like(weight), requires_grad=False)
    for buffer in module.buffers():  # may be changed in place
        memo[id(buffer)] = _zeros_like(buffer).contiguous()
    return copy.deepcopy(module, memo)


def _zeros_like(tensor: Tensor) -> Tensor:
    """Return one zero expanded to a shape, as float32 for float16."""
    dtype = unfetched(tensor, "dtype")
    if dtype == torch.float16:
        dtype = torch.float32
    zeros: Tensor = torch.zeros((), dtype=dtype).expand(unfetched(tensor, "shape"))
    return zeros


def num_weights(module: torch.nn.Module) -> int:
    """Return the number of elements in all parameters, without fetching them.

    Example:
        >>> num_weights(torch.nn.Linear(3, 2))
        8
    """
    shapes = [unfetched(weight, "shape") for weight in module.parameters()]
    return sum(math.prod(shape) for shape in shapes)


def _leaves(outputs: Any) -> list[Any]:
    return Structure.of_outputs(outputs).flatten(outputs)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the size of tensors in bytes.

    Example:
        >>> bytes_of([torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)])
        56
    """
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors)


_BYTES_OF_SUM = 4 + 8
"""Bytes of a sum on the host: float32 as it comes back, and float64 added up."""


def figure_bytes(
    module: torch.nn.Module,
    objective: Objective,
    structure: SampleStructure,
    example: Sequence[Tensor],
) -> int:
    """Return the bytes on the host for a micro-batch's sums of metrics, if many.

    A training program returns these sums for each micro-batch, and the host keeps the
    running sums after each. A metric may have many sums: a matrix of all pairs of
    classes has a million for a thousand classes. Only the metric knows their number, so
    it computes the sums of one sample, from the outputs of a copy of the module for
    zeros.

    Args:
        module: The user's module.
        objective: Losses and metrics.
        structure: Structure of a batch.
        example: Tensors of a batch, of which only shapes and types matter.

    Returns:
        0 if all metrics are means, which have two sums, or streamed; the module isn't
        called then. Also 0 if the module can't be copied or called.

    Example:
        >>> from ipufit.data import as_source
        >>> from ipufit.engine.objective import resolve_objective
        >>> module = torch.nn.Linear(3, 5)
        >>> source = as_source(torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64))
        >>> for metric in ("accuracy", "f1"):
        ...     objective = resolve_objective("cross_entropy", metrics=[metric])
        ...     example = source.example(4)
        ...     print(figure_bytes(module, objective, source.structure, example))
        0
        240
    """
    if not any(_may_be_large(measure.metric) for measure in objective.measures):
        return 0
    try:
        with quiet():
            given = first_of_zeros(example)
            result = called(of_zeros(module), objective.evaluated, structure, given)
            outputs = _outputs(result, owns_loss=objective.owns_loss)
            labels = structure.labels(given)
            count: int = sum(
                measure.metric.sums(part.output, part.target, weights).numel()
                for _, measure, part, weights in objective.measured(outputs, labels)
                if isinstance(measure.metric, Metric)
            )
    except Exception:  # noqa: BLE001 - a user's code may raise anything
        return 0
    return _BYTES_OF_SUM * count


def _may_be_large(metric: AnyMetric) -> bool:
    """Return whether a metric may have more than two sums."""
    return isinstance(metric, Metric) and type(metric).result is not Metric.result


def _outputs(result: Any, *, owns_loss: bool) -> Any:
    """Return the outputs among the results."""
    if isinstance(result, StepResult):
        return result.outputs
    return split_own_loss(result)[1] if owns_loss else result


class HostUpdate(NamedTuple):
    """The first half of a weight update: loss and gradients.

    Attributes:
        loss: Mean over the samples.
        gradients: float32 gradients by parameter; None for a parameter that the loss
            doesn't depend on.
        draws: Whether the forward pass has drawn random numbers.
    """

    loss: float
    gradients: dict[str, Tensor | None]
    draws: bool


def host_outputs(module: torch.nn.Module, inputs: Any, predicted: Inferred) -> Any:
    """Return the outputs in eval mode, without the module's own loss.

    Args:
        module: A float32 module.
        inputs: As a sample's, with samples in dim 0.
        predicted: The computation of `predict`.
    """
    noted = ResultsNoted()
    with mode(module, training=False), torch.no_grad(), noted:
        if predicted.step is not None:
            return call_step(predicted.step, module, inputs)
        outputs = call_module(module, inputs)
    return split_own_loss(outputs, noted.marked)[1] if predicted.owns_loss else outputs


def host_update(
    module: torch.nn.Module,
    objective: Objective,
    structure: SampleStructure,
    batch: Sequence[Tensor],
    micro_batch_size: int,
) -> HostUpdate:
    """Return the loss and the gradients of an update, micro-batch by micro-batch.

    They are the mean over micro-batches, or their sum if the loss is a sum over
    samples, as on the device. The module's buffers change as in training.

    Args:
        module: A float32 module.
        objective: Its losses.
        structure: Structure of the batch.
        batch: All samples of the update.
        micro_batch_size: Samples of a forward pass.

    Raises:
        ConfigError: The module returns no loss, and there is no other.
    """
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    sums: dict[str, list[float]] = {}
    micro_batches = list(zip(*(torch.split(leaf, micro_batch_size) for leaf in batch)))
    factor = 1 if objective.is_sum else len(micro_batches)
    before = torch.get_rng_state()
    module.zero_grad(set_to_none=True)
    with mode(module, training=True), torch.enable_grad():
        for micro_batch in micro_batches:
            terms = _terms(module, objective, structure, micro_batch)
            loss = torch.div(total_loss(terms), factor)
            loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
            for name, (term, weight) in terms.items():
                total, divisor, _ = sums.setdefault(name, [0.0, 0.0, weight])
                sums[name][:2] = (
                    total + float(term.total),
                    divisor + float(term.divisor),
                )
    return HostUpdate(
        sum(
            weight * total / (divisor or 1) for total, divisor, weight in sums.values()
        ),
        {name: parameter.grad for name, parameter in parameters.items()},
        not torch.equal(before, torch.get_rng_state()),
    )


def _terms(
    module: torch.nn.Module,
    objective: Objective,
    structure: SampleStructure,
    tensors: Sequence[Tensor],
) -> dict[str, tuple[LossTerms, float]]:
    inputs, labels = structure.split(tensors)
    rows = rows_of(tensors[0])
    noted = ResultsNoted()
    with noted:
        if objective.steps is None:
            outputs = call_module(module, inputs)
        else:
            batch = structure.batch(inputs, tensors)
            outputs = call_step(objective.steps.training, module, batch)
    if not objective.owns_loss:
        return objective.loss_terms(outputs, labels, rows)
    if objective.steps is None:
        own, _ = split_own_loss(outputs, noted.marked)
    else:
        own, _ = result_of_step(outputs, noted.marked)
    if own is None:
        raise ConfigError(
            "There is no loss to compare: compile() got none, and the module returns "
            "none in train mode."
        )
    value = own.reshape(())
    count = torch.tensor(float(rows))
    return {"": (LossTerms(value, value.detach() * rows, count), 1.0)}
