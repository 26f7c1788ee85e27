# SPDX-License-Identifier: Apache-2.0
"""`compare`: a batch on the device beside the same batch on the host, and its table."""

from __future__ import annotations

import dataclasses
import math
import textwrap
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit._tree import leaves_of, map_tensors
from ipufit.batching import BatchPlan
from ipufit.callbacks import make_progress
from ipufit.config import IPUConfig
from ipufit.data.calls import TrainingBatches
from ipufit.data.datasets import Source
from ipufit.data.random_state import HostRandomState
from ipufit.data.sources import as_batch, as_source
from ipufit.data.streams import StreamSource
from ipufit.engine.metric_state import MetricState
from ipufit.engine.objective import Computation, Objective
from ipufit.engine.step import CountsMissingError, NoForwardError, Step, results_of
from ipufit.engine.trace_checks import LossRecorder
from ipufit.engine.weights import deep_copied, mode
from ipufit.errors import ConfigError, suggesting
from ipufit.types import ShownAsText

from .arguments import FitArguments
from .copying import independent_copy
from .model import IPUModel

_WIDTH = 100
_SHOWN = 20
"""Rows of a table that is printed; the record has all."""

_NUMBER_COLUMNS = 26
"""Columns of the last three numbers."""


@dataclass(frozen=True)
class Difference:
    """The largest difference between two tensors, and where it is.

    Attributes:
        part: "output", "layer", "loss" or "gradient".
        name: Name of the tensor: of a parameter, a layer, or an output among several.
        index: Position of the largest difference; of the first element that is NaN or
            infinite on one side only, if there is one.
        host: The value at `index` on the host.
        device: The value at `index` on the device.
        absolute: The difference between both values; NaN or infinite if a value is.
        relative: `absolute` divided by the host's value.
        share: `absolute` divided by the largest absolute value of the host's tensor.
        num_broken: Number of elements that are NaN or infinite on one side only.
        num_elements: Number of elements of the tensor.
    """

    part: str
    name: str
    index: tuple[int, ...]
    host: float
    device: float
    absolute: float
    relative: float
    share: float
    num_broken: int
    num_elements: int

    @property
    def rank(self) -> tuple[float, float, float]:
        """Sort key of differences: the worst has the greatest."""
        broken = self.num_broken / self.num_elements
        share, absolute = (
            math.inf if math.isnan(x) else x for x in (self.share, self.absolute)
        )
        return broken, share, absolute


@dataclass(frozen=True, repr=False)
class Comparison(ShownAsText):
    """The results of `compare`.

    Attributes:
        differences: One for each tensor, the worst first: by the share of elements
            that are NaN or infinite on one side only, then by `share`.
        layers: Differences of layers, in the order of their calls.
        notes: Sentences about parts that were left out or can't be equal, and about
            operations that a device computes differently than torch.
    """

    differences: tuple[Difference, ...]
    layers: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, part: str) -> tuple[Difference, ...]:
        """Return the differences of one part, the worst first."""
        return tuple(d for d in self.differences if d.part == part)

    @property
    def first_broken_layer(self) -> str | None:
        """Name of the first layer that is NaN or infinite on the device only."""
        broken = (layer.name for layer in self.layers if layer.num_broken)
        return next(broken, None)

    def __str__(self) -> str:
        """Return a table of the worst differences, of at most 100 columns."""
        lines = [_line("", "tensor", "at", "host", "device", "abs", "rel", "share")]
        lines += map(_row, self.differences[:_SHOWN])
        left = len(self.differences) - _SHOWN
        if left > 0:
            lines.append(f"and {left} more, all smaller")
        if self.first_broken_layer is not None:
            lines.append(f"first broken layer: {self.first_broken_layer}")
        for note in self.notes:
            lines += textwrap.wrap(note, _WIDTH)
        return "\n".join(lines)


def _difference(part: str, name: str, host: Tensor, device: Tensor) -> Difference:
    """Return the largest difference between two tensors.

    Example:
        >>> host, device = torch.tensor([1.0, 4.0]), torch.tensor([1.0, 4.5])
        >>> largest = _difference("output", "", host, device)
        >>> largest.index, largest.absolute, largest.share
        ((1,), 0.5, 0.125)
    """
    expected = host.detach().double()
    got = device.detach().double().reshape(host.shape)
    apart = (got - expected).abs()
    is_same = got.eq(expected) | (got.isnan() & expected.isnan())
    apart[is_same] = 0.0
    if not apart.numel():
        return Difference(part, name, (), 0.0, 0.0, 0.0, 0.0, 0.0, 0, 1)
    broken = ~is_same & ~(got.isfinite() & expected.isfinite())
    finite = expected[expected.isfinite()].abs()
    where = broken if broken.any() else apart
    index = np.unravel_index(int(where.double().argmax()), tuple(host.shape))
    absolute, value = float(apart[index]), float(expected[index])
    return Difference(
        part,
        name,
        tuple(map(int, index)),
        value,
        float(got[index]),
        absolute,
        _ratio(absolute, abs(value)),
        _ratio(absolute, float(finite.max()) if finite.numel() else 0.0),
        int(broken.sum()),
        apart.numel(),
    )


def _ratio(part: float, whole: float) -> float:
    if part == 0:
        return 0.0
    return part / whole if whole else math.inf


def _row(difference: Difference) -> str:
    index = ",".join(map(str, difference.index))
    numbers = difference.absolute, difference.relative, difference.share
    cells = [f"{number:.1e}" for number in numbers]
    if difference.num_broken:
        broken = f"{difference.num_broken} of {difference.num_elements} broken"
        is_short = len(broken) <= _NUMBER_COLUMNS
        cells = [broken if is_short else f"{difference.num_broken} broken"]
    return _line(
        *(difference.part, difference.name, f"[{index}]" if index else ""),
        *(f"{difference.host:.4g}", f"{difference.device:.4g}", *cells),
    )


def _line(part: str, name: str, at: str, host: str, device: str, *numbers: str) -> str:
    if len(name) > 27:
        name = f"{name[:10]}...{name[-14:]}"
    if len(at) > 14:
        at = f"{at[:10]}...]"
    widths = " ".join(f"{number:>8}" for number in numbers)
    line = f"{part:<8} {name:<27} {at:<14} {host:>10} {device:>10} {widths}"
    return line.rstrip()


@suggesting
def compare(model: IPUModel, batch: Any, *, layers: bool = False) -> Comparison:
    """Compare what the device computes for a batch with plain torch in float32.

    It compares the outputs in eval mode. If `compile` was called and there are targets,
    it also compares the loss and the gradients of one weight update on the batch. Use
    it to find the layer that half precision breaks.

    The host computes in float32, with the weights of the model, which are rounded if
    the module is float16. It splits the update into the same micro-batches.

    Dropout layers are off, and samples aren't mixed (`compile(augment=)`). Labels are
    smoothed as in training. The model stays as it is: everything is done on copies,
    and random states are restored. Its IPUs are given back first, as by
    `model.detach()`. Two programs are compiled, three with `layers`.

    Args:
        model: Compiled, or not, to compare outputs only.
        batch: A batch as a loader gives it: inputs, `(inputs, targets)`, or `(inputs,
            targets, weights)`. Its samples are those of one update.
        layers: Compare the outputs of the layers too, in eval mode. Layers are the
            modules without children that return tensors with a row for each sample.
            Earlier stages of a pipeline pass them on.

    Returns:
        The largest difference of each tensor, the worst first. It prints as a table.

    Raises:
        ConfigError: `model` isn't an `IPUModel`, or the batch is not made of the
            config's factors; or the config is offline.
        DataError: Data that can't be used.
        UnsupportedError: The model can't be copied.
        Error: PopTorch refuses something (`ipufit.poptorch.Error`).

    Example:
        >>> import torch
        >>> from ipufit import IPUModel, compare
        >>> model = IPUModel(torch.nn.Linear(4, 3))
        >>> model.compile("sgd", "cross_entropy")
        >>> found = compare(model, (torch.randn(8, 4), torch.randint(0, 3, (8,))))
        >>> sorted({one.part for one in found.differences})
        ['gradient', 'loss', 'output']
        >>> max(one.share for one in found.differences) < 1e-3
        True
    """
    if not isinstance(model, IPUModel):
        raise ConfigError(f"model={model!r:.80} is not an ipufit.IPUModel.")
    model._require_ipus()
    with HostRandomState():
        source = as_source(iter([batch]), name="batch")
        assert isinstance(source, StreamSource)  # noqa: S101 - an iterator is one
        leaves = next(iter(source.blocks()))
        twins = _Twins(model, source, leaves)
        of_layers = twins.layers() if layers else []
        differences = [*twins.outputs(), *of_layers, *twins.update()]
        twins.device.detach()
    differences.sort(key=lambda difference: difference.rank, reverse=True)
    return Comparison(tuple(differences), tuple(of_layers), tuple(twins.notes))


class _Twins:
    """A copy of a model on the device, and of its module on the host.

    Attributes:
        device: The copy, which makes one update per call; its dropout layers are off.
        host: A float32 copy of its module.
        notes: Sentences about parts that were left out or can't be equal.
    """

    def __init__(
        self, model: IPUModel, source: StreamSource, leaves: Sequence[Tensor]
    ) -> None:
        self.structure, self.leaves = source.structure, list(leaves)
        self.wide = [t.float() if t.is_floating_point() else t for t in leaves]
        self.notes: list[str] = []
        config, settings = model._planner.user_config, model._planner.settings
        if settings is not None and settings.mixing is not None:
            self.notes.append("Samples aren't mixed, though compile() got augment.")
        options = config.training_options
        one_update: dict[str, Any] = {
            "device_iterations": 1,
            "profile_dir": None,
            "training_options": options and options.clone().deviceIterations(1),
        }
        self.device: IPUModel = independent_copy(
            model,
            "compare()",
            dataclasses.replace(config, **one_update),
            lr_schedule=None,
            steps_per_execution=None,
            augment=None,
        )
        module = self.device.module
        if not module.training:
            module.train()
        dropouts = [
            (name, child)
            for name, child in module.named_modules()
            if isinstance(child, torch.nn.modules.dropout._DropoutNd)
        ]
        for _, child in dropouts:
            child.training = False
        if dropouts:
            names = ", ".join(name for name, _ in dropouts)
            self.notes.append(f"Dropout layers are off: {names}.")
        self.device._planner.settle(source)
        settings = self.device._planner.settings
        losses = () if settings is None else settings.objective.modules
        self.device._executors.begin_alike(losses)
        self.host = deep_copied(module).float()

    def _on_host(self, module: torch.nn.Module, computation: Computation) -> Any:
        """Return the outputs of a module in eval mode, without its loss."""
        inputs = self.structure.nested([tensor.detach() for tensor in self.wide])
        # In the grad mode it is called in: `forward` may call torch.autograd.grad.
        with mode(module, training=False), LossRecorder() as noted:
            how = computation, module, self.structure, inputs, (), noted.marked
            return map_tensors(torch.detach, results_of(*how)[1])

    def outputs(self) -> list[Difference]:
        """Compare the outputs in eval mode."""
        try:
            outputs = self._on_host(self.host, self.device._planner.predicted)
        except NoForwardError:
            self.notes.append(
                "No outputs: there is neither a forward nor a predict_step."
            )
            return []
        on_device = self.device.predict_on_batch(self.structure.nested(self.leaves))
        return _differences("output", _named(outputs), _named(on_device))

    def layers(self) -> list[Difference]:
        """Compare the outputs of layers, in the order of their calls."""
        module = deep_copied(self.device.module)
        host = deep_copied(module).float()
        _return_layers(module)
        _return_layers(host)
        outputs = self._on_host(host, Computation(owns_loss=False))
        bare = IPUModel(module, self.device._planner.user_config)
        on_device = bare.predict_on_batch(self.structure.nested(self.leaves))
        bare.detach()
        return _differences("layer", outputs, on_device)

    def update(self) -> list[Difference]:
        """Compare the loss and the gradients of an update."""
        device, settings = self.device, self.device._planner.settings
        owns_loss = settings is not None and settings.objective.owns_loss
        if settings is None or not (owns_loss or self.structure.has_targets):
            self.notes.append(
                "Only outputs: compile() wasn't called, or there are no targets."
            )
            return []
        rows = len(self.leaves[0])
        size = device.config.training_plan(rows).micro_batch_size
        before = torch.get_rng_state()
        try:
            on_host = self._host_loss(settings.trained, size)
        except CountsMissingError:  # known now: what a function ignores
            on_host = self._host_loss(settings.trained, size)
        if not torch.equal(before, torch.get_rng_state()):
            self.notes.append(
                "forward draws random numbers in train mode: loss and gradients differ "
                "by those."
            )
        # A tensor that isn't in the program can't be watched.
        gradients = {
            name: parameter.grad
            for name, parameter in self.host.named_parameters()
            if parameter.requires_grad and parameter.grad is not None
        }
        if settings.optimization.automatic_loss_scaling:
            self.notes.append(
                "No gradients: the loss scaling is automatic, and unknown here."
            )
            gradients = {}
        training = device._planner.training(
            self._source(self.leaves),
            FitArguments(batch_size=rows, shuffle=False, updates_per_call=1),
            watched=list(gradients),
        )
        training.prepare(make_progress(0))
        training.metrics.reset()
        for call in training.batches:  # the only one, or each process's share of it
            sums, _ = training.train(call.batch)
            training.metrics.add(sums)
        training.metrics.gather()
        losses = torch.tensor([on_host, training.metrics.loss])
        return [
            _difference("loss", "", *losses),
            *_differences("gradient", gradients, training.gradients()),
        ]

    def _source(self, leaves: Sequence[Tensor]) -> Source:
        inputs, labels = self.structure.nested(leaves), self.structure.labels(leaves)
        targets = labels.targets if self.structure.has_targets else None
        return as_batch(inputs, targets, labels.weights)

    def _host_loss(self, objective: Objective, micro_batch_size: int) -> float:
        """Return the mean loss of an update on the host, and compute its gradients.

        One process calls the traced module for each micro-batch. The gradients are the
        mean over micro-batches, or their sum if the loss is a sum over samples, as on
        the device.

        Raises:
            CountsMissingError: A user's loss function ignores targets.
        """
        config = IPUConfig(num_processes=1, process_id=0)
        num_parts = len(self.leaves[0]) // micro_batch_size
        plan = BatchPlan(micro_batch_size, gradient_accumulation=num_parts)
        batches = TrainingBatches(
            self._source(self.wide),
            plan,
            config.build_training_options(plan),
            shuffle=False,
            seed=0,
            has_labels=objective.has_labels,
            ignored=objective.ignored,
        )
        (call,) = batches
        step = Step(
            *(self.host, config, batches.structure, (), objective.trained, objective)
        )
        metrics = MetricState(objective)
        with warnings.catch_warnings(), mode(step, training=True, root=self.host):
            warnings.simplefilter("ignore")  # the device's trace gives them again
            for tensors in zip(*(torch.split(t, micro_batch_size) for t in call.batch)):
                with torch.enable_grad():
                    sums, loss, *_ = step(*tensors)
                    loss.div(1 if objective.is_sum else num_parts).backward()
                metrics.adopt(step.findings.metrics, step.findings.entries)
                metrics.add(sums)
        return metrics.loss


def _differences(
    part: str, host: Mapping[str, Tensor], device: Mapping[str, Tensor]
) -> list[Difference]:
    return [_difference(part, name, host[name], device[name]) for name in host]


def _named(outputs: Any) -> dict[str, Tensor]:
    """Return the tensors of nested outputs by their paths."""
    leaves = [leaf for leaf in leaves_of(outputs) if isinstance(leaf, Tensor)]
    return {str(i) if leaves[1:] else "": leaf for i, leaf in enumerate(leaves)}


def _return_layers(module: torch.nn.Module) -> None:
    """Make a module return the outputs of its layers instead of its own."""
    outputs: dict[str, Tensor] = {}
    num_rows: list[int] = []  # of the call; a variable that changes is warned of

    def begin(_: Any, args: Any, kwargs: Any) -> None:
        outputs.clear()
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        num_rows[:] = [len(inputs[0])] if inputs and inputs[0].dim() else [0]

    def keep(_: Any, __: Any, output: Any, name: str) -> None:
        is_row_wise = isinstance(output, Tensor) and output.dim() > 0
        if not is_row_wise or [len(output)] != num_rows:
            return
        is_new = not any(kept is output for kept in outputs.values())
        if output.is_floating_point() and is_new:
            times = sum(1 for key in outputs if key.split(" ")[0] == name)
            outputs[f"{name} (call {times + 1})" if times else name] = output

    for name, child in module.named_modules():
        if child is not module and not any(True for _ in child.children()):
            child.register_forward_hook(partial(keep, name=name))
    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(lambda *_: dict(outputs))
