# SPDX-License-Identifier: Apache-2.0
"""`compare`: a batch on the device beside the same batch on the host, and its table."""

from __future__ import annotations

import copy
import dataclasses
import math
import textwrap
from dataclasses import dataclass
from functools import partial
from typing import Any, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit._tree import leaves_of, map_tensors
from ipufit.callbacks import make_progress
from ipufit.config import IPUConfig
from ipufit.data.random_state import HostRandomState
from ipufit.data.sources import as_batch, as_source
from ipufit.data.streams import StreamSource
from ipufit.engine.objective import Inferred, Objective
from ipufit.engine.step import NoForwardError, results_of, total_loss
from ipufit.engine.trace_checks import ResultsNoted
from ipufit.engine.weights import deep_copied, mode
from ipufit.errors import ConfigError, suggesting
from ipufit.losses import LossTerms
from ipufit.types import ShownAsText

from .arguments import FitArguments
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
        absolute: The difference between both; NaN or infinite if one of them is.
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
            math.inf if math.isnan(one) else one for one in (self.share, self.absolute)
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
            operations that a device computes otherwise than torch.
    """

    differences: tuple[Difference, ...]
    layers: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, part: str) -> tuple[Difference, ...]:
        """Return the differences of one part, the worst first."""
        return tuple(one for one in self.differences if one.part == part)

    @property
    def first_broken_layer(self) -> str | None:
        """Name of the first layer that is NaN or infinite on the device only."""
        broken = (one.name for one in self.layers if one.num_broken)
        return next(broken, None)

    def __str__(self) -> str:
        """Return a table of the worst differences, of at most 100 columns."""
        lines = [_line("", "tensor", "at", "host", "device", "abs", "rel", "share")]
        lines += [_row(one) for one in self.differences[:_SHOWN]]
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


def _row(one: Difference) -> str:
    at = ",".join(map(str, one.index))
    broken = f"{one.num_broken} of {one.num_elements} broken"
    if len(broken) > _NUMBER_COLUMNS:
        broken = f"{one.num_broken} broken"
    return _line(
        one.part,
        one.name,
        f"[{at}]" if at else "",
        f"{one.host:.4g}",
        f"{one.device:.4g}",
        *(
            (broken,)
            if one.num_broken
            else (f"{value:.1e}" for value in (one.absolute, one.relative, one.share))
        ),
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
        ConfigError: `model` is none, or the batch is not made of the config's factors;
            or the config is offline.
        DataError: Data that can't be used.
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
        model.detach()
        twins = _Twins(model, source, leaves)
        of_layers = twins.layers() if layers else []
        differences = [*twins.outputs(), *of_layers, *twins.update()]
        twins.device.detach()
    differences.sort(key=lambda one: one.rank, reverse=True)
    return Comparison(tuple(differences), tuple(of_layers), tuple(twins.notes))


class _Twins:
    """A copy of a model for the device, and of its module for the host.

    Attributes:
        device: The copy, which makes one update per call; its dropout layers are off.
        host: A float32 copy of its module.
        notes: Sentences about what was left out or can't be equal.
    """

    def __init__(
        self, model: IPUModel, source: StreamSource, leaves: Sequence[Tensor]
    ) -> None:
        self.structure, self.leaves = source.structure, list(leaves)
        self.wide = [one.float() if one.is_floating_point() else one for one in leaves]
        self.notes: list[str] = []
        state = {**model._copied_state(), "trained": None}
        attributes = state.pop("attributes")  # a step reads them
        if state["arguments"] is not None:
            if state["arguments"].get("augment") is not None:
                self.notes.append("Samples aren't mixed, though compile() got augment.")
            once = {"lr_schedule": None, "steps_per_execution": None, "augment": None}
            state["arguments"] = {**state["arguments"], **once}
        config: IPUConfig = state["config"]
        changes: dict[str, Any] = {"device_iterations": 1, "profile_dir": None}
        if config.training_options is not None:
            own_options = config.training_options.clone()
            changes["training_options"] = own_options.deviceIterations(1)
        state["config"] = dataclasses.replace(config, **changes)
        state = copy.deepcopy(state)
        module: torch.nn.Module = state["module"]
        if not module.training:
            module.train()
        dropouts = []
        for name, child in module.named_modules():
            if isinstance(child, torch.nn.modules.dropout._DropoutNd):
                child.training = False
                dropouts.append(name)
        if dropouts:
            self.notes.append(f"Dropout layers are off: {', '.join(dropouts)}.")
        self.device = type(model).__new__(type(model))
        self.device.__setstate__({**state, "attributes": attributes})
        self.device._calls.settle(source)
        settings = self.device._calls.settings
        losses = () if settings is None else settings.objective.modules
        self.device._executors.begin_alike(losses)
        self.host = deep_copied(module).float()

    def _on_host(self, module: torch.nn.Module, inferred: Inferred) -> Any:
        """Return the outputs of a module in eval mode, without its loss."""
        inputs = self.structure.nested([tensor.detach() for tensor in self.wide])
        # In the grad mode it is called in: `forward` may call torch.autograd.grad.
        with mode(module, training=False), ResultsNoted() as noted:
            how = inferred, module, self.structure, inputs, (), noted.marked
            return map_tensors(torch.detach, results_of(*how)[1])

    def outputs(self) -> list[Difference]:
        """Compare the outputs in eval mode."""
        try:
            outputs = self._on_host(self.host, self.device._calls.predicted)
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
        outputs = self._on_host(host, Inferred(owns_loss=False))
        bare = IPUModel(module, dataclasses.replace(self.device._calls.given_config))
        on_device = bare.predict_on_batch(self.structure.nested(self.leaves))
        bare.detach()
        return _differences("layer", outputs, on_device)

    def update(self) -> list[Difference]:
        """Compare the loss and the gradients of an update."""
        device, structure = self.device, self.structure
        settings = device._calls.settings
        owns_loss = settings is not None and settings.objective.owns_loss
        if settings is None or not (owns_loss or structure.has_targets):
            self.notes.append(
                "Only outputs: compile() wasn't called, or there are no targets."
            )
            return []
        rows = len(self.leaves[0])
        before = torch.get_rng_state()
        size = device.config.training_plan(rows).micro_batch_size
        expected = torch.tensor(self._host_loss(settings.trained, size))
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
        inputs, labels = structure.split(self.leaves)
        targets = labels.targets if structure.has_targets else None
        training = device._calls.training(
            as_batch(inputs, targets, labels.weights),
            FitArguments(batch_size=rows, shuffle=False, updates=1),
            watched=list(gradients),
        )
        training.prepare(make_progress(0))
        training.metrics.reset()
        for call in training.batches:  # the only one, or each process's share of it
            sums, _ = training.train(call.batch)
            training.metrics.add(sums)
        training.metrics.gather()
        loss = torch.tensor(training.metrics.loss)
        return [
            _difference("loss", "", expected, loss),
            *_differences("gradient", gradients, training.gradients()),
        ]

    def _host_loss(self, objective: Objective, micro_batch_size: int) -> float:
        """Return the mean loss of an update on the host, and compute its gradients.

        These are the mean over micro-batches, or their sum if the loss is a sum over
        samples, as on the device.
        """
        structure = self.structure
        parts = list(zip(*(torch.split(leaf, micro_batch_size) for leaf in self.wide)))
        factor = 1 if objective.is_sum else len(parts)
        sums: dict[str, list[float]] = {}
        with mode(self.host, training=True), torch.enable_grad():
            for tensors in parts:
                inputs, labels = structure.split(tensors)
                with ResultsNoted() as noted:
                    own, outputs = results_of(
                        *(objective.trained, self.host, structure, inputs, tensors),
                        noted.marked,
                    )
                rows = len(tensors[0])
                if own is not None:
                    value, count = own.reshape(()), torch.tensor(float(rows))
                    terms = {"": (LossTerms(value, value.detach() * count, count), 1.0)}
                elif objective.owns_loss:
                    raise ConfigError(
                        "There is no loss to compare: compile() got none, and the "
                        "module returns none in train mode."
                    )
                else:
                    for _ in range(2):  # the first call shows what functions ignore
                        counted = self._counted(objective, len(parts))
                        labels = labels._replace(counted=counted)
                        terms = objective.loss_terms(outputs, labels, rows)
                torch.div(total_loss(terms), factor).backward()  # type: ignore[no-untyped-call,unused-ignore]
                for name, (term, weight) in terms.items():
                    one = sums.setdefault(name, [0.0, 0.0, weight])
                    one[0] += float(term.total)
                    one[1] += float(term.divisor)
        return sum(w * total / (count or 1) for total, count, w in sums.values())

    def _counted(self, objective: Objective, num_parts: int) -> dict[int, Any] | None:
        """Return `Labels.counted` of an update of several micro-batches."""
        targets = self.structure.labels(self.wide).targets

        def divisor(index: int, target: torch.Tensor) -> torch.Tensor:
            return target.ne(index).sum().clamp(min=1).div(num_parts).reshape(1)

        counted = {
            index: map_tensors(partial(divisor, index), targets)
            for index in objective.ignored
        }
        return counted if num_parts > 1 else None


def _differences(
    part: str, host: Mapping[str, Tensor], device: Mapping[str, Tensor]
) -> list[Difference]:
    return [_difference(part, name, host[name], device[name]) for name in host]


def _named(outputs: Any) -> dict[str, Tensor]:
    """Return the tensors of outputs, by their path."""
    leaves = [leaf for leaf in leaves_of(outputs) if isinstance(leaf, Tensor)]
    return {str(i) if leaves[1:] else "": leaf for i, leaf in enumerate(leaves)}


def _return_layers(module: torch.nn.Module) -> None:
    """Make a module return the outputs of its layers instead of its own."""
    found: dict[str, Tensor] = {}
    rows: list[int] = []

    def begin(_: Any, args: Any, kwargs: Any) -> None:
        found.clear()
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        rows[:] = [len(given[0])] if given and given[0].dim() else [0]

    def keep(name: str, output: Any) -> None:
        is_row_wise = isinstance(output, Tensor) and output.dim() > 0
        if not is_row_wise or [len(output)] != rows:
            return
        if output.is_floating_point() and not any(o is output for o in found.values()):
            times = sum(1 for key in found if key.split(" ")[0] == name)
            found[f"{name} (call {times + 1})" if times else name] = output

    for name, child in module.named_modules():
        if child is not module and not any(True for _ in child.children()):
            child.register_forward_hook(
                lambda _, __, output, name=name: keep(name, output)
            )
    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(lambda *_: dict(found))
