# SPDX-License-Identifier: Apache-2.0
"""Calls of a user's module on the host, with a sample: for shapes and sizes."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections import OrderedDict
from functools import partial
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ipufit._tree import Structure, tree_map
from ipufit.data.datasets import SampleStructure, Source
from ipufit.data.random_state import HostRandomState
from ipufit.engine.metric_state import collected
from ipufit.engine.objective import (
    Inferred,
    LossInputs,
    Objective,
    sum_instead_of_mean,
)
from ipufit.engine.precision import change_types
from ipufit.engine.step import call_module, results_of
from ipufit.engine.trace_checks import ResultsNoted
from ipufit.engine.weights import mode, unfetched
from ipufit.errors import ConfigError, UnsupportedError
from ipufit.losses import Loss
from ipufit.metrics import Metric


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
        >>> from ipufit.data.sources import as_source
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
        with mode(module, training=False):
            call_module(module, source.structure.nested(leaves))
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
        outputs: Outputs for one sample of zeros.
    """

    num_bytes: int
    has_scalars: bool
    moves_buffers: bool
    outputs: Any


def output_size(
    module: torch.nn.Module,
    inferred: Inferred,
    structure: SampleStructure,
    example: Sequence[Tensor],
) -> OutputSize | None:
    """Call a module, or a step, with one sample of zeros, and return the output's size.

    The weights are zeros, too: one number for each, expanded to its shape. So this
    takes little memory and time. Random states don't change, nor does the module.

    Args:
        module: The user's module.
        inferred: The computation of the program.
        structure: Structure of a batch.
        example: Tensors of a micro-batch, of which only shapes and types matter.

    Returns:
        None if the module can't be called with such tensors.

    Example:
        >>> from ipufit.data.sources import as_source
        >>> source = as_source(torch.zeros(8, 3))
        >>> module, example = torch.nn.Linear(3, 5), source.example(4)
        >>> output_size(module, Inferred(False), source.structure, example).num_bytes
        80
    """
    sample = _first_as_zeros(example)
    inputs = structure.nested(sample)
    before = HostRandomState()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mode(module, training=False))
            buffers = stack.enter_context(_weights_as_zeros(module))
            scalars = stack.enter_context(collected())
            marked = stack.enter_context(ResultsNoted()).marked
            results = results_of(inferred, module, structure, inputs, sample, marked)
    except Exception:  # noqa: BLE001 - a user's code may raise anything
        return None
    finally:
        before.put_back()
    leaves = [*Structure.of_outputs(results).flatten(results), *scalars.values()]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rows = len(example[0])
    return OutputSize(
        sum(bytes_of([t]) * (rows if t.dim() else 1) for t in tensors),
        bool(scalars) or any(not tensor.dim() for tensor in tensors),
        any(buffer._version for buffer in buffers),
        results[1],
    )


def refuse_other_axes(outputs: Any, micro_batch_size: int) -> None:
    """Refuse outputs whose first axis isn't that of samples, but has its length.

    Args:
        outputs: Outputs for one sample.
        micro_batch_size: Samples of a micro-batch.

    Raises:
        UnsupportedError: There is such an output.
    """
    for leaf in Structure.of_outputs(outputs).flatten(outputs):
        shape = tuple(getattr(leaf, "shape", ()))
        if len(shape) > 1 and shape[0] == micro_batch_size > 1 and 1 in shape[1:]:
            raise UnsupportedError(
                f"The module returned a tensor of shape {shape} for one sample. "
                "Outside training every output needs one row per sample: return it "
                "with the samples' axis first, as in output.transpose(0, 1)."
            )


@contextlib.contextmanager
def _weights_as_zeros(module: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Give a module zeros as weights inside the context.

    They replace its own weights in the module itself, because `forward` may be a
    closure over it. All attributes of its parts are restored. A weight that PopTorch
    trains isn't fetched from its device: only attributes that `unfetched` reads are
    used.

    Yields:
        The buffers of the context.
    """
    zeros: dict[int, Tensor] = {}
    for weight in module.parameters():
        zeros[id(weight)] = torch.nn.Parameter(_zeros_like(weight), requires_grad=False)
    buffers = {id(one): _zeros_like(one).contiguous() for one in module.buffers()}
    zeros.update(buffers)
    parts = [(vars(part), dict(vars(part))) for part in module.modules()]
    try:
        for attributes, before in parts:
            for name, value in before.items():
                if type(value) in (dict, OrderedDict):
                    items = [(k, zeros.get(id(one), one)) for k, one in value.items()]
                    attributes[name] = type(value)(items)
                elif type(value) is list:  # LSTM has its weights in one, too
                    attributes[name] = [zeros.get(id(one), one) for one in value]
        yield list(buffers.values())
    finally:
        for attributes, before in parts:
            attributes.clear()
            attributes.update(before)


def _first_as_zeros(example: Sequence[Tensor]) -> list[Tensor]:
    return [_zeros_like(tensor[:1]) for tensor in example]


def _zeros_like(tensor: Tensor) -> Tensor:
    """Return one zero expanded to a shape, as float32 for float16."""
    dtype = unfetched(tensor, "dtype")
    if dtype == torch.float16:
        dtype = torch.float32
    return torch.zeros((), dtype=dtype).expand(unfetched(tensor, "shape"))


def num_weights(module: torch.nn.Module) -> int:
    """Return the number of elements in all parameters, without fetching them.

    Example:
        >>> num_weights(torch.nn.Linear(3, 2))
        8
    """
    shapes = [unfetched(weight, "shape") for weight in module.parameters()]
    return sum(math.prod(shape) for shape in shapes)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the size of tensors in bytes.

    Example:
        >>> bytes_of([torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)])
        56
    """
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors)


_BYTES_OF_SUM = 4 + 8
"""Bytes of a sum on the host: float32 as it comes back, and float64 added up."""


def metric_bytes(
    module: torch.nn.Module,
    objective: Objective,
    structure: SampleStructure,
    example: Sequence[Tensor],
) -> int:
    """Return the bytes on the host for a micro-batch's sums of metrics, if many.

    A training program returns these sums for each micro-batch, and the host keeps the
    running sums after each. A metric may have many sums: a matrix of all pairs of
    classes has a million for a thousand classes. Only the metric knows their number, so
    it computes the sums of one sample.

    Args:
        module: The user's module.
        objective: Losses and metrics.
        structure: Structure of a batch.
        example: Tensors of a batch, of which only shapes and types matter.

    Returns:
        0 if all metrics are means, which have two sums, or streamed; the module isn't
        called then. Also 0 if the module can't be called.

    Example:
        >>> from ipufit.data.sources import as_source
        >>> from ipufit.engine.objective import resolve_objective
        >>> module = torch.nn.Linear(3, 5)
        >>> source = as_source(torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64))
        >>> for metric in ("accuracy", "f1"):
        ...     objective = resolve_objective("cross_entropy", metrics=[metric])
        ...     example = source.example(4)
        ...     print(metric_bytes(module, objective, source.structure, example))
        0
        240
    """
    metrics = [output_metric.metric for output_metric in objective.metrics]
    means = Metric.result
    if all(not isinstance(m, Metric) or type(m).result is means for m in metrics):
        return 0
    size = output_size(module, objective.evaluated, structure, example)
    if size is None:
        return 0
    labels = structure.labels(_first_as_zeros(example))
    try:
        with torch.no_grad():
            count: int = sum(
                output_metric.metric.sums(part.output, part.target, weights).numel()
                for _, output_metric, part, weights in objective.metrics_of(
                    size.outputs, labels
                )
                if isinstance(output_metric.metric, Metric)
            )
    except Exception:  # noqa: BLE001 - a user's metric may raise anything
        return 0
    return _BYTES_OF_SUM * count


def refuse_own_sum(
    module: torch.nn.Module,
    objective: Objective,
    structure: SampleStructure,
    example: Sequence[Tensor],
    rows: int,
) -> None:
    """Refuse a step, or a module's own loss, that sums over a micro-batch's samples.

    It is called on the host before it is compiled, with copies of the first sample and
    weights of zeros.

    Args:
        module: The user's module.
        objective: Losses and metrics.
        structure: Structure of a batch.
        example: Tensors of a batch.
        rows: Samples of a micro-batch.

    Raises:
        ConfigError: The loss is a sum.
    """

    def value(times: int) -> float:
        sample = [_as_on_devices(torch.cat([one[:1]] * 3 * times)) for one in example]
        inputs = structure.nested(sample)
        with mode(module, training=True), _weights_as_zeros(
            module
        ), collected(), ResultsNoted() as noted:
            own, _ = results_of(
                objective.trained, module, structure, inputs, sample, noted.marked
            )
        return math.nan if own is None else float(own)

    # Several items that are whole micro-batches can't be called together.
    if objective.owns_loss and rows > 1 and structure.rows is None:
        _refuse_doubled("The model's own loss", value, rows)


def refuse_sum_functions(inputs: Iterable[LossInputs], rows: int) -> None:
    """Refuse users' loss functions that sum over a micro-batch's samples.

    A trace has shown their inputs; they are called on the host with random ones.

    Args:
        inputs: Inputs of the functions.
        rows: Samples of a micro-batch.

    Raises:
        ConfigError: A loss is a sum.
    """
    for loss, given in inputs if rows > 1 else ():
        value = partial(_of_random_rows, loss, given, rows)
        _refuse_doubled(f"The loss {loss.name!r}", value, rows)


def _of_random_rows(loss: Loss, given: Any, rows: int, times: int) -> float:
    """Compute a user's loss of three random rows, each of them `times` times."""

    def drawn(leaf: Any) -> Any:
        tensor = leaf() if isinstance(leaf, partial) else leaf
        if tensor is leaf or tensor.shape[:1] != (rows,):
            return tensor
        three = tensor[:1].expand(3, *tensor.shape[1:])
        if tensor.is_floating_point():
            three = torch.rand(three.shape)
        return torch.cat([three] * times)

    function = loss.function
    if isinstance(function, torch.nn.Module):  # it may change its buffers
        function = copy.deepcopy(function)
    torch.manual_seed(0)
    value: Any = function(*tree_map(drawn, given))
    # Whole numbers are refused elsewhere, in other words.
    return float(value) if value.is_floating_point() else math.nan


def _refuse_doubled(what: str, value: Callable[[int], float], rows: int) -> None:
    """Refuse a loss that doubles with the number of rows; it may raise anything.

    Args:
        what: The loss, for the message.
        value: Computes it for some rows, each given once or twice.
        rows: Samples of a micro-batch.
    """
    once = twice = math.nan
    with contextlib.ExitStack() as stack:
        stack.enter_context(HostRandomState())
        stack.enter_context(contextlib.suppress(Exception))  # of a user's code
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # about data that nobody gave
        stack.enter_context(torch.no_grad())
        once, twice = value(1), value(2)
    if 0 < abs(once) < math.inf and math.isclose(twice, 2 * once, rel_tol=1e-5):
        raise ConfigError(sum_instead_of_mean(what, rows))
