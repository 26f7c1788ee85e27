# SPDX-License-Identifier: Apache-2.0
"""Call a user's module on the host with a sample, to get shapes and sizes."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Sequence,
    Tuple,
)

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ipufit._modules import modules_of, parameters_of, path_of, weights_of
from ipufit._tree import leaves_of, tree_map
from ipufit.data.datasets import Source
from ipufit.data.random_state import HostRandomState
from ipufit.data.structure import Labels, SampleStructure
from ipufit.engine.metric_state import Scalars, collected
from ipufit.engine.objective import (
    Computation,
    Objective,
    named_outputs,
    only,
    sum_loss_message,
)
from ipufit.engine.precision import change_types
from ipufit.engine.step import Step, call_module, results_of
from ipufit.engine.trace_checks import PLAIN, LossRecorder, tensors_of
from ipufit.engine.weights import checksum, is_counted, mode, unfetched
from ipufit.errors import ConfigError, DataError, UnsupportedError
from ipufit.metrics import FunctionMetric, Metric
from ipufit.metrics.base import MeanMetric, call_by_rows


def give_shapes(module: torch.nn.Module, source: Source) -> None:
    """Run a sample through a module if some of its weights have no shapes yet.

    PopTorch needs shapes. The sample is run on the host, in eval mode and without
    gradients, so torch draws the first weights and no other random numbers.

    Args:
        source: Source of samples; only the first sample is used.

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
            halves = {id(w): torch.float16 for name, w in now if name in in_half}
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
    lazy = UninitializedBuffer, UninitializedParameter
    if not any(issubclass(kind, lazy) for kind in {*map(type, weights_of(module))}):
        return []
    return [
        path_of(module, layer) or type(module).__name__
        for layer in modules_of(module)
        if any(
            issubclass(type(tensor), lazy)
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
        has_scalars: Whether the program returns scalars: the module's own loss, or
            logged scalars.
        moves_buffers: Whether the module changes a buffer in place in eval mode, so
            that a pass changes later ones.
        outputs: Outputs for the samples of zeros.
    """

    num_bytes: int
    has_scalars: bool
    moves_buffers: bool
    outputs: Any


@contextlib.contextmanager
def _trial_calls() -> Iterator[None]:
    """Hide errors and warnings inside the context, and restore random states."""
    with HostRandomState(), contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _ReadsCounted():
            yield


class _ReadsCounted(TorchFunctionMode):
    """Ends calls that read values of tensors too often.

    A loop until a tensor has some value, which can't be traced, needn't end with
    made-up weights.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._num_left = 1000

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _READS:
            self._num_left -= 1
            if self._num_left < 0:
                raise RuntimeError("The values of tensors were read too often.")
        return func(*args, **(kwargs or {}))


_READS = frozenset({"__bool__", "__float__", "__index__", "__int__", "item", "tolist"})


class _CallsDescribed(TorchFunctionMode):
    """Describes the calls of torch's functions, with their constant arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.calls: list[str] = []
        self._numbers: Any = WeakIdKeyDictionary()  # type: ignore[no-untyped-call,unused-ignore]
        self._next_number = itertools.count()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        self.calls.append(name + self._described([args, kwargs]))
        for tensor in tensors_of(result):
            self._numbers.setdefault(tensor, next(self._next_number))
        return result

    def _described(self, value: Any) -> str:
        if isinstance(value, Tensor) and value in self._numbers:
            return f"#{self._numbers[value]}"
        if isinstance(value, Tensor):
            self._numbers[value] = next(self._next_number)
            return _contents(value)
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, (list, tuple)):
            return f"({', '.join(map(self._described, value))})"
        is_plain = isinstance(value, (*PLAIN, slice))
        return repr(value) if is_plain else type(value).__name__


def _contents(tensor: Tensor) -> str:
    """Describe a tensor by its values, or a weight by its shape."""
    values = 0 if isinstance(tensor, Parameter) else checksum(tensor)
    return f"{tensor.dtype} {[*tensor.shape]} {values}"


def _constant_or_ramp(tensor: Tensor) -> Tensor:
    """Return a copy of an integer buffer, which is compiled in; else a ramp."""
    is_whole = not unfetched(tensor, "dtype").is_floating_point
    if is_whole and unfetched(tensor, "ndim") and not is_counted(tensor):
        return Tensor.clone(tensor)  # which fetches nothing
    return _ramp_like(tensor, is_falling=False)


@dataclass(frozen=True)
class HostProgram:
    """A program that is called on the host, for facts that PopTorch doesn't report.

    The module is called with made-up weights, so that no weight is fetched from a
    device.

    Attributes:
        module: The user's module.
        computation: The computation of the program.
        structure: Structure of a batch.
        example: Tensors of a micro-batch.
    """

    module: torch.nn.Module
    computation: Computation
    structure: SampleStructure
    example: Sequence[Tensor]

    def _called(
        self,
        sample: Sequence[Tensor],
        make: Callable[[Tensor], Tensor],
        *,
        training: bool,
        noiseless: bool = False,
    ) -> tuple[Tensor | None, Any, Scalars, list[Tensor]]:
        """Call the module or step.

        Args:
            sample: Tensors of a batch.
            make: Makes the replacement of a weight.
            training: Whether the module is called in training mode.
            noiseless: Whether dropout drops nothing, and random numbers are constants.

        Returns:
            The module's own loss, its outputs, the scalars that it logs, and its
            buffers.
        """
        module, structure = self.module, self.structure
        with contextlib.ExitStack() as stack:
            stack.enter_context(mode(module, training=training))
            buffers = stack.enter_context(_weights_replaced(module, make))
            scalars = stack.enter_context(collected())
            marked = stack.enter_context(LossRecorder()).marked
            if noiseless:
                stack.enter_context(_WithoutNoise())  # type: ignore[no-untyped-call,unused-ignore]
                for part in module.modules():  # without dropout, also inside of others
                    if type(part).__module__.startswith("torch.nn."):
                        part.training = False
            inputs = structure.nested(sample)
            results = results_of(
                self.computation, module, structure, inputs, sample, marked
            )
        return (*results, scalars, buffers)

    def output_size(
        self, num_samples: int = 1, *, training: bool = False
    ) -> OutputSize | None:
        """Call the module or step with a sample of zeros, and measure the output.

        The weights are zeros, too: one number per weight, expanded to its shape. So the
        call takes little memory and time. Neither random states nor the module change.

        Args:
            num_samples: Number of samples to call the module with.
            training: Whether the module is called in training mode.

        Returns:
            None if the module can't be called with such tensors.

        Example:
            >>> from ipufit.data.sources import as_source
            >>> source, module = as_source(torch.zeros(8, 3)), torch.nn.Linear(3, 5)
            >>> program = module, Computation(False), source.structure
            >>> HostProgram(*program, source.example(4)).output_size().num_bytes
            80
        """
        sample = _first_as_zeros(self.example, num_samples)
        with _trial_calls():
            loss, outputs, scalars, buffers = self._called(
                sample, _zeros_like, training=training
            )
            results = loss, outputs
            leaves = [*leaves_of(results), *scalars.values()]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            rows = len(self.example[0])
            return OutputSize(
                sum(bytes_of([t]) * (rows if t.dim() else 1) for t in tensors),
                bool(scalars) or any(not tensor.dim() for tensor in tensors),
                any(buffer._version for buffer in buffers),
                outputs,
            )
        return None

    def refuse_other_axes(self, outputs: Any) -> None:
        """Refuse outputs whose first axis isn't the samples', but has its length.

        Where a buffer holds a state for each sample, outputs for one sample have the
        shapes of those for a micro-batch.

        Args:
            outputs: Outputs for one sample.

        Raises:
            UnsupportedError: An output has another first axis.
        """
        rows = len(self.example[0])
        for index, leaf in enumerate(leaves_of(outputs)):
            shape = tuple(getattr(leaf, "shape", ()))
            if len(shape) > 1 and shape[0] == rows > 1 and 1 in shape[1:]:
                size = self.output_size(rows)
                if size is not None and leaves_of(size.outputs)[index].shape == shape:
                    continue
                raise UnsupportedError(
                    f"The module returned a tensor of shape {shape} for one sample. "
                    "Outside training every output needs one row per sample: return it "
                    "with the samples' axis first, as in output.transpose(0, 1)."
                )

    def metric_bytes(self, objective: Objective) -> int:
        """Return the host bytes of a micro-batch's metric sums, or 0 if there are few.

        A training program returns these sums for each micro-batch, and the host keeps
        the running sums after each. A metric may have many sums: a matrix of all pairs
        of classes has a million for a thousand classes. Only the metric knows their
        number, so it computes the sums of one sample.

        Args:
            objective: Losses and metrics.

        Returns:
            0 if all metrics are means, which have two sums, or streamed; the module
            isn't called then. Also 0 if the module can't be called.

        Example:
            >>> from ipufit.data.sources import as_source
            >>> from ipufit.engine.objective import resolve_objective
            >>> module = torch.nn.Linear(3, 5)
            >>> source = as_source(torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64))
            >>> for metric in ("accuracy", "f1"):
            ...     objective = resolve_objective("cross_entropy", metrics=[metric])
            ...     program = module, objective.evaluated, source.structure
            ...     on_host = HostProgram(*program, source.example(4))
            ...     print(on_host.metric_bytes(objective))
            0
            240
        """
        metrics = [output_metric.metric for output_metric in objective.metrics]
        means = Metric.result, MeanMetric.result
        if all(not isinstance(m, Metric) or type(m).result in means for m in metrics):
            return 0
        size, count = self.output_size(), 0
        if size is not None:
            labels = self.structure.labels(_first_as_zeros(self.example))
            with _trial_calls():
                sums = _metric_sums(objective, size.outputs, labels)
                count = sum(tensor.numel() for tensor in sums)
        return _BYTES_OF_SUM * count

    def refuse_outputs_of_training(self, objective: Objective) -> None:
        """Refuse losses that fail because eval mode returns more or fewer outputs.

        Args:
            objective: Losses and metrics.

        Raises:
            UnsupportedError: A loss fails for the outputs of eval mode.
        """
        names, failures = [], []
        for training in (True, False):
            size = self.output_size(2, training=training)
            if size is None:
                return
            outputs = size.outputs
            if not isinstance(outputs, dict):
                outputs = named_outputs(outputs) or {"output_1": outputs}
            names.append(
                [str(name) for name, value in outputs.items() if value is not None]
            )
            labels = self.structure.labels(_first_as_zeros(self.example, 2))
            failures.append(_failure_of_losses(objective, size.outputs, labels))
        trained, evaluated = names
        missing = [
            name
            for name in objective.names_of_losses(trained)
            if name not in evaluated and (name != trained[0] or len(evaluated) != 1)
        ]
        reason = f"an evaluation can't compute the loss of {', '.join(missing)}"
        if not missing or len(evaluated) > len(trained):
            reason = "" if failures[0] else failures[1]
        if reason and len(evaluated) != len(trained):
            raise UnsupportedError(
                f"The module returns {len(trained)} outputs in training "
                f"({', '.join(trained)}), and in eval mode {len(evaluated)}: "
                f"{reason.rstrip('.')}. Return the same outputs in both modes; or "
                "compile with step= and validation_step= in place of the losses, "
                "functions that compute the loss of each mode."
            )

    def refuse_unfit_labels(
        self, objective: Objective, trained: HostProgram, name: str
    ) -> None:
        """Refuse targets and weights that losses and metrics can't take, by shape.

        Args:
            objective: Losses and metrics.
            trained: The same for the data of training, whose labels they can take.
            name: Name of the data in error messages.

        Raises:
            DataError: A loss or metric fails for these labels alone.
        """
        size = self.output_size(2)
        if size is None:
            return

        def failure(program: HostProgram) -> str:
            labels = program.structure.labels(_first_as_zeros(program.example, 2))
            return _failure_of_losses(
                objective, size.outputs, labels, with_metrics=True
            )

        fault = failure(self)
        if fault and not failure(trained):
            raise DataError(f"`{name}` doesn't fit: {fault}")

    def refuse_own_sums(self, *, training: bool) -> None:
        """Refuse a step, or a module's own loss, that sums over the samples.

        The scalars that are logged are checked, too. The module is called with copies
        of two samples, and with other weights, because layers may begin with zeros.

        Args:
            training: Whether the module is trained.

        Raises:
            ConfigError: The loss or a scalar is a sum, or contains a sum.
        """
        rows = len(self.example[0])
        # Several items that are whole micro-batches can't be called together.
        if rows == 1 or self.structure.rows is not None:
            return

        def values(are_other: bool, index: list[int]) -> list[tuple[str, float]]:
            sample = [_as_on_devices(tensor[index]) for tensor in self.example]
            if are_other:
                sample = [
                    t if t.is_floating_point() else _filled(t, index) for t in sample
                ]
            make = partial(_ramp_like, is_falling=are_other)
            loss, _, scalars, _ = self._called(
                sample, make, training=training, noiseless=True
            )
            losses = [] if loss is None else [("The model's own loss", float(loss))]
            logged = [(f"The scalar {name!r}", float(v)) for name, v in scalars.items()]
            return losses + logged

        if _refuse_sums(partial(values, False), rows):  # 0 may be a sum of zeros
            _refuse_sums(partial(values, True), rows)

    def refuse_traced_sums(self, step: Step) -> None:
        """Refuse sums among the losses, metrics and scalars that a trace has shown.

        Args:
            step: The step that was traced.

        Raises:
            ConfigError: A loss, metric or scalar is a sum.
        """
        if step.logs_scalars and not step.computation.owns_loss:
            self.refuse_own_sums(training=step.is_training)
        for outputs, labels in step.examples:
            refuse_sums(step.objective, outputs, labels, len(self.example[0]))

    def calls(self, objective: Objective | None) -> list[str] | None:
        """Describe the program's inputs, operations and results.

        Args:
            objective: Losses and metrics of a training program.

        Returns:
            The weights, the calls of torch's functions, and the results; None if the
            program can't be called on the host.
        """
        losses = [] if objective is None else objective.modules
        modules = [self.module, *losses]
        weights = [weight for part in modules for weight in weights_of(part)]
        kept = [
            id(weight) if unfetched(weight, "ndim") else unfetched(weight, "dtype")
            for weight in weights
        ]
        with _trial_calls(), contextlib.ExitStack() as stack:
            random.seed(0)
            np.random.seed(0)
            torch.default_generator.manual_seed(0)  # torch.manual_seed asks all devices
            for part in modules:
                stack.enter_context(_weights_replaced(part, _constant_or_ramp))
            stack.enter_context(torch.no_grad())
            described = stack.enter_context(_CallsDescribed())
            sample = [_as_on_devices(tensor) for tensor in self.example]
            training = objective is not None
            results = [*self._called(sample, Tensor.detach, training=training)]
            if objective is not None:
                outputs, labels = results[1], self.structure.labels(sample)
                results.append(_metric_sums(objective, outputs, labels))
                if not objective.owns_loss:
                    bound, rows = objective.bind(outputs, labels), len(sample[0])
                    results.append(bound.terms(outputs, labels, rows))
            values = map(_contents, tensors_of(results))
            return [str(kept), *described.calls, *values]
        return None


class _UnpackingRecorder(TorchFunctionMode):
    """Records whether code indexes or unpacks a tensor like several outputs."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._outputs, self.has_taken = only(outputs), False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.unbind, Tensor.__getitem__) and args[0] is self._outputs:
            self.has_taken |= len(args) == 1 or type(args[1]) is int
        return func(*args, **(kwargs or {}))


def _failure_of_losses(
    objective: Objective, outputs: Any, labels: Labels, *, with_metrics: bool = False
) -> str:
    """Return why the losses can't be computed from the outputs; "" if they can."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_trial_calls())
        for module in objective.modules:  # which may change their buffers
            stack.enter_context(_weights_replaced(module, torch.clone))
        rows = stack.enter_context(_UnpackingRecorder(outputs))
        stack.enter_context(torch.no_grad())
        try:
            objective.bind(outputs, labels).terms(outputs, labels, 2)
            if with_metrics:
                _metric_sums(objective, outputs, labels)
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything
            return str(error)
    unpacked = "the loss unpacks a single output as if it were several"
    return unpacked if rows.has_taken else ""


@contextlib.contextmanager
def _weights_replaced(
    module: torch.nn.Module, make: Callable[[Tensor], Tensor]
) -> Iterator[list[Tensor]]:
    """Replace the weights of a module inside the context.

    The module itself gets the weights, and not a copy, because `forward` may be a
    closure over the module. At the end all attributes of its submodules are restored.
    No weight is fetched from a device: only attributes that `unfetched` reads are used.

    Args:
        module: The module.
        make: Makes the replacement of a weight.

    Yields:
        The buffers of the context.
    """
    made: dict[int, Tensor] = {}
    for weight in module.parameters():
        made[id(weight)] = torch.nn.Parameter(make(weight), requires_grad=False)
    buffers = {id(buffer): make(buffer).contiguous() for buffer in module.buffers()}
    made.update(buffers)
    parts = [(vars(part), dict(vars(part))) for part in module.modules()]
    try:
        for attributes, before in parts:
            for name, value in before.items():
                if type(value) in (dict, OrderedDict):
                    items = [(k, made.get(id(v), v)) for k, v in value.items()]
                    attributes[name] = type(value)(items)
                elif type(value) is list:  # LSTM has its weights in one, too
                    attributes[name] = [
                        made.get(id(element), element) for element in value
                    ]
        yield list(buffers.values())
    finally:
        for attributes, before in parts:
            for name in attributes.keys() - before.keys():
                del attributes[name]
            attributes.update(before)


def _first_as_zeros(example: Sequence[Tensor], count: int = 1) -> list[Tensor]:
    return [_zeros_like(tensor[:count]) for tensor in example]


def _zeros_like(tensor: Tensor) -> Tensor:
    """Return one zero expanded to a shape, as float32 for float16."""
    dtype = unfetched(tensor, "dtype")
    if dtype == torch.float16:
        dtype = torch.float32
    return torch.zeros((), dtype=dtype).expand(unfetched(tensor, "shape"))


def _ramp_like(tensor: Tensor, *, is_falling: bool) -> Tensor:
    """Return evenly spaced test values from 0.5 to 1.5 over the first axis.

    The values are divided by the elements per row. Their signs alternate for a
    parameter, unless `is_falling`.
    """
    zeros = _zeros_like(tensor)
    if not zeros.is_floating_point():
        return zeros
    rows, *rest = zeros.shape or (1,)
    ramp = torch.linspace(0.5, 1.5, rows + 2)[1:-1] / max(math.prod(rest), 1)
    ramp = ramp.flip(0) if is_falling else ramp
    if issubclass(type(tensor), Parameter) and not is_falling:
        ramp[1::2] *= -1  # a penalty may be of negative units alone
    return ramp.reshape(zeros.shape[:1] + (1,) * len(rest)).expand(zeros.shape)


def num_weights(module: torch.nn.Module) -> int:
    """Return the number of elements in all parameters, without fetching them.

    Example:
        >>> num_weights(torch.nn.Linear(3, 2))
        8
    """
    shapes = [unfetched(weight, "shape") for weight in parameters_of(module)]
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


def _metric_sums(objective: Objective, outputs: Any, labels: Labels) -> list[Tensor]:
    return [
        bound.add(outputs, labels)
        for bound in objective.bind(outputs, labels).metrics
        if isinstance(bound.metric, Metric)
    ]


def _filled(tensor: Tensor, numbers: list[int]) -> Tensor:
    """Return a tensor like another, with one number for each row."""
    filled = torch.tensor(numbers).reshape(-1, *(1,) * (tensor.dim() - 1))
    return filled.expand(tensor.shape).to(tensor.dtype)


class _WithoutNoise(TorchFunctionMode):
    """Replaces random numbers by constants, so that copies of rows stay equal."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch without noise."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        result = func(*args, **kwargs)
        if name.rstrip("_") in _NOISE and result.is_floating_point():
            return result.fill_(0.5)
        return result


_NOISE = frozenset(
    {
        *("bernoulli", "exponential", "gumbel_softmax", "normal"),
        *("rand", "rand_like", "randn", "randn_like", "uniform"),
    }
)


MadeBatch = Callable[[List[int]], Tuple[Any, Labels]]
"""Make outputs and labels for chosen indices of two samples."""


def refuse_sums(objective: Objective, outputs: Any, labels: Any, rows: int) -> None:
    """Refuse users' losses and metrics that sum over a micro-batch's samples.

    The losses and metrics are called on the host, with random numbers. Metrics whose
    `sums` are means are refused, too.

    Args:
        objective: Losses and metrics.
        outputs: Outputs of the model, whose values don't matter; or functions that make
            such tensors.
        labels: Targets and weights, in the same form as `outputs`.
        rows: Samples of a micro-batch.

    Raises:
        ConfigError: A loss or metric contains a sum, or `sums` contains a mean.
    """
    if rows == 1:
        return
    labels = labels._replace(share=None, counted=None)
    for are_whole, bounds in ((False, (0, 1)), (True, (0, 1)), (False, (-2, 2))):
        batch = partial(_random_batch, outputs, labels, rows, are_whole, bounds)
        _refuse_sums(partial(_values, objective, batch), rows)
        _refuse_means(objective, batch)


def _random_batch(
    outputs: Any,
    labels: Labels,
    rows: int,
    are_whole: bool,
    bounds: tuple[int, int],
    index: list[int],
) -> tuple[Any, Labels]:
    """Return outputs within bounds, and labels, for chosen indices of two samples."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed asks all devices
    drawn = partial(_random_rows, rows, index)
    return (
        tree_map(partial(drawn, bounds=bounds), outputs),
        tree_map(partial(drawn, are_whole=are_whole), labels),
    )


def _random_rows(
    rows: int,
    index: list[int],
    leaf: Any,
    *,
    are_whole: bool = False,
    bounds: tuple[int, int] = (0, 1),
) -> Any:
    """Return rows of two random samples, whose first class is usually the largest."""
    tensor = leaf() if isinstance(leaf, partial) else leaf
    if not isinstance(tensor, Tensor) or tensor.shape[:1] != (rows,):
        return tensor
    if are_whole or not tensor.is_floating_point():
        return _filled(tensor[:1].expand(len(index), *tensor.shape[1:]), index)
    numbers = torch.empty(2, *tensor.shape[1:]).uniform_(*bounds)
    for axis in {1, tensor.dim() - 1} if tensor.dim() > 1 else ():
        if tensor.shape[axis] > 1:
            numbers.select(axis, 0).fill_(bounds[1])
    return numbers.to(tensor.dtype)[index]


def _values(
    objective: Objective, batch: MadeBatch, index: list[int]
) -> list[tuple[str, float]]:
    """Compute users' losses and metrics for some rows; NaN where a function fails."""
    outputs, labels = batch(index)
    values = []
    for slot, loss, _ in objective.bind(outputs, labels).losses:
        if not loss.is_function:
            continue
        part, function, value = slot.part(outputs, labels), loss.function, math.nan
        if isinstance(function, torch.nn.Module):  # it may change its buffers
            function = copy.deepcopy(function)
        with contextlib.suppress(Exception):
            result = call_by_rows(function, part.output, part.target)
            # Whole numbers are refused elsewhere, in other words.
            value = float(result.mean()) if result.is_floating_point() else math.nan
        values.append((f"The loss {loss.name!r}", value))
    for name, metric, sums in _sums_of_metrics(objective, outputs, labels):
        if isinstance(metric, FunctionMetric):
            values.append((f"The metric {name!r}", metric.result(sums)))
    return values


def _sums_of_metrics(
    objective: Objective, outputs: Any, labels: Labels
) -> Iterator[tuple[str, Metric, Tensor]]:
    """Yield the sums of users' metrics; NaN where a metric fails for these rows."""
    for bound in objective.bind(outputs, labels).metrics:
        metric = bound.metric
        origin = getattr(metric, "function", type(metric))
        is_ours = str(origin.__module__).startswith("ipufit.")
        if not isinstance(metric, Metric) or is_ours:
            continue
        if isinstance(origin, torch.nn.Module):
            bound = bound._replace(metric=copy.deepcopy(metric))
        sums = torch.full((2,), math.nan)
        with contextlib.suppress(Exception):
            sums = bound.add(outputs, labels)
        yield bound.name, metric, sums.to(torch.float64)


def _refuse_means(objective: Objective, batch: MadeBatch) -> None:
    """Refuse users' metrics whose `sums` are means, because ipufit adds them up."""
    means = []
    with _trial_calls():
        by_copies = [
            _sums_of_metrics(objective, *batch([0, 1] * copies)) for copies in (1, 2, 3)
        ]
        for (name, metric, once), (_, _, twice), (_, _, thrice) in zip(*by_copies):
            if isinstance(metric, FunctionMetric):
                continue
            added = [metric.result(once * copies) for copies in (1, 2, 3)]
            values = [metric.result(sums) for sums in (once, twice, thrice)]
            apart = [value - sum_ for value, sum_ in zip(values, added)]
            constant = 2 * once - twice
            is_even = (thrice - 2 * twice + once).abs() <= 1e-3 * constant.abs()
            is_mean = is_even & (constant.abs() > 1e-3 * once.abs())
            differs = abs(apart[1]) > 1e-3 * max(map(abs, (*values, *added)))
            is_steady = math.isclose(apart[2], 2 * apart[1], rel_tol=1e-3)
            if differs and (is_mean.any() or is_steady):
                means.append(name)
    if means:
        raise ConfigError(
            f"sums() of the metric {means[0]!r} must return sums over the rows, which "
            "are added up over all batches, and something in them is a mean. Return "
            "sums and what to divide them by, as in torch.stack([errors.sum(), "
            "torch.ones_like(errors).sum()]), and divide in result()."
        )


def _refuse_sums(
    values: Callable[[list[int]], list[tuple[str, float]]], rows: int
) -> bool:
    """Refuse values that grow, or whose squares grow, with the copies of a sample.

    A mean stays the same. A sum, or a mean plus a sum, grows by the same amount with
    each copy, and so does the square of a norm. A loss that compares all samples with
    each other may grow in this way, too. It isn't refused: copies of a single sample
    show the difference.

    Args:
        values: Computes values and their descriptions for chosen indices of two
            samples.
        rows: Samples of a micro-batch.

    Returns:
        Whether a value was 0 or NaN, which shows neither a sum nor a mean.

    Raises:
        ConfigError: A value is a sum.
    """
    once, messages = [], []
    with _trial_calls():
        once = values([0, 1])
        more = [values([0, 1] * copies) for copies in (2, 3) if once]
        for place, power in itertools.product(range(len(once)), (1, 2)):
            what, first = once[place][0], once[place][1] ** power
            second, third = (computed[place][1] ** power for computed in more)
            step, size = second - first, max(map(abs, (first, second, third)))
            error = 1e-3 * abs(step) + 2e-6 * size  # of float32
            is_even = abs(third - second - step) < error
            if not is_even or abs(step) < 1e-4 * size:
                continue
            alone = [values(index)[place][1] ** power for index in _ALONE]
            if abs((alone[1] - alone[0] + alone[3] - alone[2]) / 2 - step) < 4 * error:
                is_all = abs(step - first) < error
                messages.append(sum_loss_message(what, rows, is_all=is_all))
    if messages:
        raise ConfigError(messages[0])
    return not all(abs(value) > 0 for _, value in once)


_ALONE = ([0] * 2, [0] * 4, [1] * 2, [1] * 4)
"""Copies of one sample, by index."""
