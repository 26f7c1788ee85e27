# SPDX-License-Identifier: Apache-2.0
"""`compare`: a batch on the device beside the same batch on the host, and its table."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import textwrap
from dataclasses import dataclass
from functools import partial
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit._tree import leaves_of, map_tensors
from ipufit.callbacks import make_progress
from ipufit.config import IPUConfig
from ipufit.data.random_state import HostRandomState
from ipufit.data.sources import StreamSource, as_batch, as_source
from ipufit.engine.loop import Training
from ipufit.engine.objective import Inferred, Objective
from ipufit.engine.program import surveyed
from ipufit.engine.step import NoForwardError, results_of, total_loss
from ipufit.engine.trace_checks import ResultsNoted
from ipufit.engine.weights import deep_copied, mode
from ipufit.errors import ConfigError, UnsupportedError, suggesting
from ipufit.losses import LossTerms
from ipufit.types import ShownAsText

from .arguments import FitArguments
from .checking import findings_of_survey
from .model import IPUModel

_NUMBERS = (bool, int, float, tuple)
_WIDTH = 100
_SHOWN = 20
"""Rows of a table that is printed; the record has all."""

_NUMBER_COLUMNS = 26
"""Columns of the last three numbers."""


@dataclass(frozen=True)
class Difference:
    """The largest difference between two tensors, and where it is.

    Attributes:
        part: "output", "layer", "loss", "gradient", "weight" or "buffer".
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


def differences(
    part: str, host: Mapping[str, Tensor], device: Mapping[str, Tensor]
) -> Iterator[Difference]:
    """Yield the largest difference of each pair of tensors.

    Args:
        part: As in `Difference`.
        host: Tensors by name.
        device: Tensors with the same names.

    Example:
        >>> given = {"w": torch.tensor([1.0, 4.0])}, {"w": torch.tensor([1.0, 4.5])}
        >>> (one,) = differences("weight", *given)
        >>> one.index, one.absolute, one.share
        ((1,), 0.5, 0.125)
    """
    for name, expected in host.items():
        yield _difference(part, name, expected, device[name])


def _difference(part: str, name: str, host: Tensor, device: Tensor) -> Difference:
    expected = host.detach().to(torch.float64).reshape(host.shape)
    got = device.detach().to(torch.float64).reshape(host.shape)
    apart = (got - expected).abs()
    is_same = got.eq(expected) | (got.isnan() & expected.isnan())
    apart[is_same] = 0.0
    broken = ~is_same & ~(got.isfinite() & expected.isfinite())
    finite = expected[expected.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    if not apart.numel():
        return Difference(part, name, (), 0.0, 0.0, 0.0, 0.0, 0.0, 0, 1)
    where = broken if broken.any() else apart
    flat = int(where.reshape(-1).to(torch.float64).argmax())
    index = tuple(map(int, np.unravel_index(flat, tuple(apart.shape))))
    absolute = float(apart.reshape(-1)[flat])
    one, other = (float(values.reshape(-1)[flat]) for values in (expected, got))
    return Difference(
        part,
        name,
        index,
        one,
        other,
        absolute,
        _ratio(absolute, abs(one)),
        _ratio(absolute, largest),
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
    it also makes one weight update on the batch, and compares the loss, the gradients
    and the updated weights. Use it to find the layer that half precision breaks.

    The host computes in float32, with the weights of the model, which are rounded if
    the module is float16. It splits the update into the same micro-batches. The update
    is the first one of the optimizer, without momentum of earlier updates, with its
    present learning rates and other values. On the host the `step` of the same
    optimizer makes it, from the host's gradients.

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
        ['gradient', 'loss', 'output', 'weight']
        >>> max(one.share for one in found.differences) < 1e-3
        True
    """
    if not isinstance(model, IPUModel):
        raise ConfigError(f"model={model!r:.80} is not an ipufit.IPUModel.")
    model._require_ipus()
    before = HostRandomState()
    try:
        source = as_source(iter([batch]), name="batch")
        assert isinstance(source, StreamSource)  # noqa: S101 - an iterator is one
        leaves = next(iter(source.blocks()))
        model.detach()
        twin = _Twin(model, source, leaves)
        found = [*twin.outputs(), *twin.update()]
        twin.model.detach()
        of_layers = tuple(_Twin(model, source, leaves).layers()) if layers else ()
    finally:
        before.put_back()
    found = sorted((*found, *of_layers), key=lambda one: one.rank, reverse=True)
    return Comparison(tuple(found), of_layers, tuple(twin.notes))


class _Twin:
    """A copy of a model with its weights and a new optimizer, and a copy for the host.

    Attributes:
        model: The copy, which makes one update per call; its dropout layers are off.
        host: A float32 copy of its module.
        optimizer: An optimizer of the host's module; None if the model isn't compiled.
        notes: Sentences about what was left out or can't be equal.
    """

    def __init__(
        self, model: IPUModel, source: StreamSource, leaves: Sequence[Tensor]
    ) -> None:
        self.structure, self.leaves = source.structure, list(leaves)
        self.wide = [one.float() if one.is_floating_point() else one for one in leaves]
        self.notes: list[str] = []
        settings = model._calls.settings
        self._mixes = settings is not None and settings.mixing is not None
        state = {**model._copied_state(), "trained": None}
        attributes = state.pop("attributes")  # a step reads them
        if state["arguments"] is not None:
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
        self._dropouts = [
            name
            for name, child in module.named_modules()
            if isinstance(child, torch.nn.modules.dropout._DropoutNd)
        ]
        for name in self._dropouts:
            module.get_submodule(name).training = False
        self.model = type(model).__new__(type(model))
        self.model.__setstate__({**state, "attributes": attributes})
        self.model._calls.settle(source)
        own, executors = self.model._calls.settings, self.model._executors
        losses = () if own is None else own.objective.modules
        executors.begin_alike(losses)
        new: Any = self.model.optimizer
        old: Any = model.optimizer
        if new is not None and old is not None:  # learning rates and other numbers
            for group, values in zip(new.param_groups, old.param_groups):
                for name, value in values.items():
                    if isinstance(value, _NUMBERS) and name in group:
                        group[name] = value
            if hasattr(old, "loss_scaling"):
                new.loss_scaling = old.loss_scaling
        self.host, self.optimizer = deep_copied((module, self.model.optimizer))
        self.host.float()
        # PopTorch's copies lack some values, such as LAMB's largest norm.
        for name, value in getattr(self.model.optimizer, "__dict__", {}).items():
            if isinstance(value, _NUMBERS) and name not in vars(self.optimizer):
                vars(self.optimizer)[name] = value

    def _inputs(self, tensors: Sequence[Tensor]) -> Any:
        return self.structure.nested(tensors)

    def _on_host(self, inferred: Inferred) -> Any:
        """Return the outputs of the host's module in eval mode, without its loss."""
        inputs = self._inputs([tensor.detach() for tensor in self.wide])
        given = inferred, self.host, self.structure, inputs, ()
        # In the grad mode it is called in: `forward` may call torch.autograd.grad.
        with mode(self.host, training=False), ResultsNoted() as noted:
            return map_tensors(torch.detach, results_of(*given, noted.marked)[1])

    def outputs(self) -> Iterator[Difference]:
        """Compare the outputs in eval mode."""
        try:
            on_host = self._on_host(self.model._calls.predicted)
        except NoForwardError:
            self.notes.append(
                "No outputs: there is neither a forward nor a predict_step."
            )
        else:
            on_device = self.model.predict_on_batch(self._inputs(self.leaves))
            yield from differences("output", _named(on_host), _named(on_device))
        if self._dropouts:
            self.notes.append(f"Dropout layers are off: {', '.join(self._dropouts)}.")

    def update(self) -> Iterator[Difference]:
        """Compare the loss, the gradients, and the weights after an update."""
        model, notes, structure = self.model, self.notes, self.structure
        settings = model._calls.settings
        owns_loss = settings is not None and settings.objective.owns_loss
        if settings is None or not (owns_loss or structure.has_targets):
            notes.append(
                "Only outputs: compile() wasn't called, or there are no targets."
            )
            return
        rows = len(self.leaves[0])
        before = torch.get_rng_state()
        expected = self._host_loss(
            settings.trained,
            model.config.training_plan(rows).micro_batch_size,
        )
        draws = not torch.equal(before, torch.get_rng_state())
        trained = {n: p for n, p in self.host.named_parameters() if p.requires_grad}
        # A tensor that isn't in the program can't be watched.
        known = {n: p.grad for n, p in trained.items() if p.grad is not None}
        if settings.optimization.automatic_loss_scaling:
            notes.append(
                "No gradients: the loss scaling is automatic, and unknown here."
            )
            known = {}
        if self._mixes:
            notes.append("Samples aren't mixed, though compile() got augment.")
        if draws:
            notes.append(
                "forward draws random numbers in train mode: loss, gradients and "
                "weights differ by those."
            )
        inputs, labels = structure.split(self.leaves)
        targets = labels.targets if structure.has_targets else None
        training = model._calls.training(
            as_batch(inputs, targets, labels.weights),
            FitArguments(batch_size=rows, shuffle=False, updates=1),
            watched=list(known),
        )
        training.prepare(make_progress(0))
        training.metrics.reset()
        for call in training.batches:  # the only one, or each process's share of it
            sums, _ = training.train(call.batch)
            training.metrics.add(sums)
        training.metrics.gather()
        self._note_other_numbers(training)
        loss = torch.tensor(training.metrics.loss)
        yield from differences("loss", {"": torch.tensor(expected)}, {"": loss})
        yield from differences("gradient", known, training.gradients())
        model._executors.fetch_weights()
        reason = _step_on_host(self.optimizer, model.optimizer)
        if reason:
            notes.append(f"No weights: {reason}.")
        else:
            named = dict(model.module.named_parameters())
            yield from differences("weight", trained, named)
        buffers = {n: b for n, b in self.host.named_buffers() if b.is_floating_point()}
        if training.plan.replicas * training.plan.processes == 1:
            named = dict(model.module.named_buffers())
            yield from differences("buffer", buffers, named)
        elif buffers:
            notes.append("No buffers: each replica has its own.")

    def _note_other_numbers(self, training: Training) -> None:
        """Note the operations that a device computes otherwise than torch.

        They explain differences. The emulator knows them, so on PopTorch there are no
        such notes.
        """
        with contextlib.suppress(UnsupportedError):
            seen = surveyed(training.spec)
            self.notes += [
                str(finding)
                for finding in findings_of_survey(seen.survey)
                if finding.topic == "numbers"
            ]

    def _host_loss(self, objective: Objective, micro_batch_size: int) -> float:
        """Return the mean loss of an update on the host, and compute its gradients.

        These are the mean over micro-batches, or their sum if the loss is a sum over
        samples, as on the device. The module's buffers change as in training.
        """
        structure = self.structure
        parts = list(zip(*(torch.split(leaf, micro_batch_size) for leaf in self.wide)))
        factor = 1 if objective.is_sum else len(parts)
        sums: dict[str, list[float]] = {}
        self.host.zero_grad(set_to_none=True)
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

    def layers(self) -> Iterator[Difference]:
        """Compare the outputs of layers, in the order of their calls."""
        module = self.model.module
        self.host = deep_copied(module).float()
        _return_layers(module)
        _return_layers(self.host)
        on_host = self._on_host(Inferred(owns_loss=False))
        bare = IPUModel(module, dataclasses.replace(self.model._calls.given_config))
        on_device = bare.predict_on_batch(self._inputs(self.leaves))
        bare.detach()
        yield from differences("layer", on_host, on_device)


def _step_on_host(optimizer: Any, on_device: Any) -> str:
    """Make the first update of an optimizer on the host, by PopTorch's formula.

    Returns:
        The reason why it can't be made; "" if it was.
    """
    kind = type(optimizer).__name__
    if on_device.has_state() and optimizer.has_state():
        return "the optimizer was given with a state, which only a device can use"
    if any(group.get("use_tf_variant") for group in optimizer.param_groups) or getattr(
        optimizer, "use_tf_variant", False
    ):
        return f"the host's {kind} knows no use_tf_variant"
    limit = getattr(optimizer, "max_grad_norm", None)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if limit is not None and math.isfinite(limit):
        # PopTorch's SGD clips gradients of the scaled loss.
        scale = float(optimizer.loss_scaling) if kind == "SGD" else 1.0
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        for gradient in gradients if norm > limit / scale else ():
            gradient.mul_(limit / scale / norm)
    for group in optimizer.param_groups:
        if kind != "SGD" or not group["dampening"]:
            continue
        if not group["momentum"]:
            return "dampening counts on devices only, where there is no momentum"
        for parameter in group["params"]:  # torch dampens from the second update on
            zeros = torch.zeros_like(parameter)
            optimizer.state[parameter]["momentum_buffer"] = zeros
    groups = list(optimizer.param_groups)
    for group in groups:
        optimizer.param_groups[:] = [group]
        if "max_weight_norm" in group:  # LAMB's step reads the optimizer's own alone
            vars(optimizer)["max_weight_norm"] = group["max_weight_norm"]
        optimizer.step()
    optimizer.param_groups[:] = groups
    return ""


def _named(outputs: Any) -> dict[str, Tensor]:
    """Return the tensors of outputs, by their path."""
    leaves = [leaf for leaf in leaves_of(outputs) if isinstance(leaf, Tensor)]
    if len(leaves) == 1:
        return {"": leaves[0]}
    return {str(index): leaf for index, leaf in enumerate(leaves)}


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
