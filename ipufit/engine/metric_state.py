# SPDX-License-Identifier: Apache-2.0
"""Loss, metrics and logged scalars of a run, summed over samples."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from contextvars import ContextVar
from functools import partial
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
)

import numpy as np
import torch
from torch import Tensor

from ipufit._tree import map_tensors
from ipufit.data.structure import Labels
from ipufit.distributed import Processes
from ipufit.engine.objective import (
    BoundMetric,
    BoundObjective,
    Objective,
    TermsByOutput,
    real_rows,
)
from ipufit.errors import ConfigError, DataError, UnsupportedError
from ipufit.metrics import Metric, StreamedMetric, detached, flat, in_float32
from ipufit.metrics.base import named_figures, naming_targets
from ipufit.metrics.target_means import unknown_number
from ipufit.types import Logs

Scalars = Dict[str, Tensor]
"""0-d tensors by name."""

_collector: ContextVar[Scalars | None] = ContextVar("collector", default=None)
"""Where this thread collects the scalars of the module that it traces."""


def log(name: str, value: Tensor) -> None:
    """Report a scalar under `name` in logs, History and on the progress bar.

    Call it in a module's `forward`, which Python runs once: the value is computed in
    the program, for every micro-batch, and averaged over all samples. In a validation
    the key begins with `val_`. Outside of ipufit's runs `log` does nothing, so the
    module works anywhere.

    Args:
        name: Key in logs, which no metric has.
        value: A tensor of one element, such as a mean over the samples. Its gradient
            doesn't change.

    Raises:
        ConfigError: The value isn't a tensor of one element, or a metric has the name.

    Example:
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(2, 1)
        ...     def forward(self, x):
        ...         log("size", x.abs().mean())
        ...         return self.layer(x)
        >>> Net()(torch.zeros(1, 2)).shape
        torch.Size([1, 1])
    """
    scalars = _collector.get()
    if scalars is None:
        return
    if not isinstance(name, str) or not name:
        raise ConfigError(f"log() needs a name, and got {name!r}.")
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"log({name!r}) got {value!r}: a {type(value).__name__} would be baked "
            "into the compiled program. Pass a tensor computed from the inputs or "
            "weights."
        )
    if value.numel() != 1:
        raise ConfigError(
            f"log({name!r}) got a tensor of shape {tuple(value.shape)}, which isn't a "
            "scalar: reduce it first, as with .mean()."
        )
    if name in scalars:
        raise ConfigError(
            f"log({name!r}) was called twice in one forward pass: add the values up, "
            "or give them names of their own."
        )
    scalars[name] = value.detach().reshape(()).to(torch.float32)


@contextlib.contextmanager
def collected() -> Iterator[Scalars]:
    """Collect the scalars that are logged inside the context.

    Example:
        >>> with collected() as scalars:
        ...     log("two", torch.tensor(2))
        >>> scalars
        {'two': tensor(2.)}
    """
    scalars: Scalars = {}
    token = _collector.set(scalars)
    try:
        yield scalars
    finally:
        _collector.reset(token)


_WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32)


def widened(values: Any) -> Any:
    """Convert nested tensors to the dtypes that torch's losses and exact sums need.

    Half precision becomes float32, and every integer type int64: class indices return
    from a device in 32 bits.

    Example:
        >>> widened((torch.zeros(1, dtype=torch.float16), 3))[0].dtype
        torch.float32
    """

    def widen(tensor: Tensor) -> Any:
        if tensor.dtype == torch.float16:
            return tensor.to(torch.float32)
        return tensor.to(torch.int64) if tensor.dtype in _WHOLE_NUMBERS else tensor

    return map_tensors(widen, values)


def widened_all(outputs: Any, labels: Labels) -> tuple[Any, Labels]:
    """Convert outputs, targets and weights to the dtypes that losses need."""
    outputs, targets, weights = widened((outputs, labels.targets, labels.weights))
    return outputs, labels._replace(targets=targets, weights=weights)


class RunningSums(NamedTuple):
    """The running sums of metrics, of one process or of all.

    Attributes:
        vector: The sum of all vectors, float64; None without any.
        extra: Total and number of rows, by name, of each metric outside the vectors.
        refusal: Message of a metric that refuses a target; None if no metric refuses
            one.
    """

    vector: Tensor | None
    extra: Mapping[str, Sequence[float]]
    refusal: str | None = None

    @classmethod
    def joined(cls, parts: Sequence[RunningSums]) -> RunningSums:
        """Add up the sums of all processes.

        Example:
            >>> one = RunningSums(torch.ones(2), {"loss": (3.0, 1.0)})
            >>> other = RunningSums(None, {"loss": (1.0, 1.0)})
            >>> joined = RunningSums.joined([one, other])
            >>> joined.vector, joined.extra
            (tensor([1., 1.]), {'loss': [4.0, 2.0]})
        """
        vectors = [part.vector for part in parts if part.vector is not None]
        extra: dict[str, list[float]] = {}
        for part in parts:
            for name, pair in part.extra.items():
                before = extra.setdefault(name, [0.0, 0.0])
                extra[name] = [sum(numbers) for numbers in zip(before, pair)]
        refusal = next((part.refusal for part in parts if part.refusal), None)
        vector = torch.stack(vectors).sum(dim=0) if vectors else None
        return cls(vector, extra, refusal)


def running_sums(sums: Tensor | None, vectors: Tensor, size: int) -> Tensor:
    """Return the sums after adding each vector in turn, in float64.

    Another order, or sums of pairs first, would round differently.

    Args:
        sums: The sums so far, `[size]`; None for zeros.
        vectors: Any number of vectors, one after the other in dim 0.
        size: Length of a vector.

    Returns:
        The sums after each vector, `[vectors, size]`, float64.

    Example:
        >>> running_sums(None, torch.tensor([1.0, 2.0, 10.0, 20.0]), size=2)
        tensor([[ 1.,  2.],
                [11., 22.]], dtype=torch.float64)
    """
    rows = vectors.numpy().reshape(-1, size)
    parts = np.empty((1 + len(rows), size))
    parts[0] = 0.0 if sums is None else sums.numpy()
    parts[1:] = rows
    np.add.accumulate(parts, axis=0, out=parts)
    return torch.from_numpy(parts[1:])


class MetricSums(NamedTuple):
    """A metric's part of the vector of sums.

    Attributes:
        name: Key in logs.
        size: Number of its sums; 0 for a streamed metric.
        result: Computes the metric's value from its sums; None for a mean over samples.
        direction: `"max"` or `"min"` if larger or smaller values are better.
        has_parts: Whether the result is a dict of numbers, each with a key of its own.
    """

    name: str
    size: int
    result: Callable[[Tensor], Any] | None
    direction: str | None
    has_parts: bool = False

    @property
    def names(self) -> list[str]:
        """Keys of its numbers in logs."""
        if not self.has_parts or self.result is None:
            return [self.name]
        nothing = torch.zeros(self.size, dtype=torch.float64)
        return list(named_figures(self.name, self.result(nothing)))


def vector_of(
    objective: BoundObjective,
    outputs: Any,
    labels: Labels,
    rows: int,
    terms: TermsByOutput,
    scalars: Scalars,
) -> tuple[Tensor, tuple[MetricSums, ...]]:
    """Compute the vector of metric sums of a micro-batch; traceable.

    Args:
        objective: Losses and metrics.
        outputs: Everything that the module returned.
        labels: Targets, weights and shares.
        rows: Number of samples, padding included.
        terms: Terms and weight of each loss, by output.
        scalars: Logged means over the samples, by name.

    Returns:
        A 1-d float32 vector without gradients, and its entries. The vector has the
        number of samples first, then the sums of each entry.
    """
    outputs = map_tensors(detached, outputs)
    entries, sums = [], []
    of_parts: list[float] = []
    for term, weight in terms.values():
        sums.append(flat(torch.stack([term.total, term.divisor], dim=-1)))
        of_parts += [weight] * term.total.numel()
    if terms:
        means = partial(_weighted_means, of_parts)
        entries.append(MetricSums("loss", 2 * len(of_parts), means, "min"))
    if len(terms) > 1:
        for name, pairs in zip(terms, list(sums)):
            sums.append(pairs)
            means = partial(_weighted_means, [1.0] * (pairs.numel() // 2))
            entries.append(MetricSums(f"{name}_loss", pairs.numel(), means, "min"))
    mask = real_rows(labels)
    for bound in objective.metrics:
        size, informed = 0, bound.informed()
        if isinstance(informed, Metric):
            sums.append(flat(bound.add(outputs, labels, mask)))
            size = sums[-1].numel()
        result = informed.result if size else None
        entry = MetricSums(bound.name, size, result, informed.direction)
        entries.append(entry._replace(has_parts=informed.has_parts))
    if mask is None:
        device = next((term.total.device for term, _ in terms.values()), None)
        count = torch.full((1,), float(rows), device=device)
    else:
        count = mask.sum().reshape(1)
    for name, value in scalars.items():
        sums.append(value.mul(count))
        entries.append(MetricSums(name, 1, None, None))
    _refuse_twins([entry.name for entry in entries])
    return torch.cat([in_float32(detached(s)) for s in (count, *sums)]), tuple(entries)


class MetricState:
    """The loss, metrics and logged scalars over the samples of an epoch or evaluation.

    A micro-batch adds one float32 vector: its samples, the total of the loss and of
    each output's loss, the sums of each metric, the totals of logged scalars. Running
    sums are float64, on the host. The entries of the vector are known once a program
    was traced; streamed metrics are stored separately.

    With several processes, each has its own sums until `gather`, and keeps the outputs
    for streamed metrics until then.

    Args:
        objective: Losses and metrics.
        processes: The processes whose samples the metrics cover.
    """

    def __init__(
        self, objective: Objective, processes: Processes | None = None
    ) -> None:
        self.objective = objective
        self.processes = processes or Processes()
        self._unstreamed: list[tuple[Any, Labels]] = []
        self._forgotten: list[str] = []
        self._entries: tuple[MetricSums, ...] = ()
        self._loss_entry: MetricSums | None = None  # the first, if there is one
        self._size = 1  # of a vector
        self._metrics: tuple[BoundMetric, ...] = ()
        self._streams: dict[str, StreamedMetric] = {}
        self._sums: Tensor | None = None
        self._partial: Tensor | None = None
        self._refusal: str | None = None
        self._extra: dict[str, list[float]] = {}
        self.reset()

    def adopt(
        self, metrics: Sequence[BoundMetric], entries: tuple[MetricSums, ...]
    ) -> None:
        """Set the layout of the vectors that `add` will get.

        Args:
            metrics: Metrics of the program, which may be those of an earlier
                `compile()` that made an equal program.
            entries: Entries of the vectors, from `vector_of`.

        Raises:
            ConfigError: Two metrics have the same name.
        """
        self._entries = entries
        if self._extra or any(entry.has_parts for entry in entries):
            _refuse_twins([*self.names, *self._extra])
        self._metrics = tuple(
            bound._replace(metric=output_metric.metric)
            for bound, output_metric in zip(metrics, self.objective.metrics)
        )
        is_loss = bool(entries) and entries[0].name == "loss"
        self._loss_entry = entries[0] if is_loss else None
        self._size = 1 + sum(entry.size for entry in entries)

    @property
    def names(self) -> list[str]:
        """Names of the metrics in a traced program."""
        return [name for entry in self._entries for name in entry.names]

    @property
    def matrices(self) -> list[str]:
        """Names of the metrics whose values are matrices."""
        metrics = self.objective.metrics
        return [each.full_name for each in metrics if each.metric.is_matrix]

    @property
    def parts(self) -> dict[str, list[str]]:
        """Names of each metric's numbers in a traced program."""
        return {entry.name: entry.names for entry in self._entries}

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, from which a resumed epoch can continue.

        Raises:
            UnsupportedError: A streamed metric has seen samples.
        """
        streamed = list(self._streams)
        if self.processes.are_several and self._sums is not None:
            # Processes refuse together, though only some have kept rows.
            streamed = [entry.name for entry in self._entries if not entry.size]
        if streamed:
            raise UnsupportedError(
                f"{', '.join(streamed)}: streamed metrics can't be saved in the "
                "middle of an epoch. Save at the ends of epochs."
            )
        sums = None if self._sums is None else self._sums.tolist()
        entries = {entry.name: entry.size for entry in self._entries}
        extra = copy.deepcopy(self._extra)
        return {"entries": entries, "sums": sums, "extra": extra}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`; a program must have been traced before.

        Raises:
            ConfigError: The state has sums of other metrics.
        """
        sizes = {entry.name: entry.size for entry in self._entries}
        if state["sums"] is not None and state["entries"] != sizes:
            raise ConfigError(
                f"The checkpoint is of an epoch with the metrics "
                f"{', '.join(state['entries'])}, and the model has {', '.join(sizes)}. "
                "Resume with the module that was saved, or from the end of an epoch."
            )
        sums = state["sums"]
        self._sums = None if sums is None else torch.tensor(sums, dtype=torch.float64)
        self._extra = copy.deepcopy(dict(state["extra"]))

    def forget(self) -> None:
        """Reset the metrics in the middle of an epoch; their names stay."""
        names = list(self.in_order())
        self.reset()
        self._forgotten = names

    def reset(self) -> None:
        """Reset all sums and streamed metrics."""
        self._forgotten = []
        self._sums = self._partial = None
        self._refusal = None
        self._extra = {}
        self._unstreamed = []
        for output_metric in self.objective.metrics:
            if isinstance(output_metric.metric, StreamedMetric):
                output_metric.metric.reset()

    def add(self, vectors: Tensor) -> None:
        """Add the vectors of any number of micro-batches, in one tensor.

        The vectors are added one after the other, so that the sums have the same bits
        for any number of micro-batches per call.
        """
        self._partial = None
        if len(vectors) == self._size:
            if self._sums is None:
                self._sums = torch.zeros(self._size, dtype=torch.float64)
            self._sums.add_(vectors.detach())
            return
        self._partial = running_sums(self._sums, vectors.detach(), self._size)
        self._sums = self._partial[-1].clone()

    def note_refused_target(
        self,
        vectors: Tensor,
        rows: Callable[[], tuple[Any, Labels]],
        naming: Callable[[], ContextManager[None]],
    ) -> None:
        """Note a target that a metric refuses, for the error that `logs` raises.

        A program can't report the target: it makes the metric's sums NaN. So the host
        checks the rows of the first NaN again.

        Args:
            vectors: As for `add`.
            rows: Returns outputs, whose values don't matter, and the labels of the
                rows.
            naming: Adds the place of the target to the error.
        """
        if not self._metrics or self._refusal is not None:
            return
        if not math.isnan(vectors.sum().item()):
            return
        self._refusal = ""  # the NaN may be of a loss
        outputs, labels = rows()
        for bound in self._metrics:
            is_ours = type(bound.metric).__module__.startswith("ipufit.")
            if is_ours and isinstance(bound.metric, Metric):
                try:
                    with naming(), naming_targets(bound.name):
                        bound.add(outputs, labels, real_rows(labels))
                except DataError as error:
                    self._refusal = str(error)
                    return

    def add_means(self, scalars: Mapping[str, float], rows: int) -> None:
        """Add means over a number of samples that aren't in the vectors."""
        for name, value in scalars.items():
            extra = self._extra.setdefault(name, [0.0, 0.0])
            extra[0] += value * rows
            extra[1] += rows

    def stream(self, outputs: Any, labels: Labels) -> None:
        """Update streamed metrics with the outputs of unpadded rows.

        Each metric gets copies, because it may store them, and an asynchronous loader
        reuses its memory.
        """
        if not self.objective.is_streamed:
            return
        copies = map_tensors(Tensor.clone, (outputs, labels))
        if self.processes.are_several:
            self._unstreamed.append(copies)
        else:
            self._update_streams(*copies)

    def _update_streams(self, outputs: Any, labels: Labels) -> None:
        for bound in self._metrics:
            if isinstance(bound.metric, StreamedMetric):
                bound.add(outputs, labels)
                self._streams[bound.name] = bound.metric

    def logs(self) -> Logs:
        """Return the metrics, by name in alphabetical order, as in Keras.

        A metric without samples is NaN.
        """
        return dict(sorted(self.in_order().items()))

    def gather(self) -> None:
        """Sum the metrics over all processes; all of them must call this."""
        if not self.processes.are_several:
            return
        everyone = self.processes.gathered((self.sums(), self._unstreamed))
        sums = RunningSums.joined([sums for sums, _ in everyone])
        self._sums, self._unstreamed = sums.vector, []
        self._refusal = sums.refusal
        self._extra = {name: list(pair) for name, pair in sums.extra.items()}
        # Call after call, as a single process would have had them.
        for of_one_call in itertools.zip_longest(*(rows for _, rows in everyone)):
            for rows in of_one_call:
                if rows is not None:
                    self._update_streams(*rows)

    def sums(self, more: Tensor | None = None) -> RunningSums:
        """Return the sums of this process so far.

        Args:
            more: A vector to include that isn't added to the metrics yet.
        """
        sums = self._sums
        if more is not None:
            wide = more.detach().to(torch.float64)
            sums = wide if sums is None else sums + wide
        return RunningSums(sums, self._extra, self._refusal)

    def running(self, sums: RunningSums) -> Logs:
        """Return the metrics so far, without streamed ones, for the hooks of a call.

        A streamed metric may need all samples to compute a value.
        """
        return dict(sorted(self._summed(sums).items()))

    def in_order(self) -> Logs:
        """Return losses, metrics and logged scalars, in the order of `compile()`."""
        forgotten = dict.fromkeys(self._forgotten, 0.0)
        values = {**forgotten, **self._summed(self.sums())}
        for name, metric in self._streams.items():
            values.update(named_figures(name, metric.result()))
        order = ("loss", *self.names, *values)
        return {name: values[name] for name in order if name in values}

    @property
    def loss(self) -> float:
        """Return the loss so far, read from the device once; NaN without samples."""
        if self._sums is None or self._loss_entry is None:
            return self._summed(self.sums()).get("loss", math.nan)
        return self._loss_of(self._sums)

    @property
    def is_loss_empty(self) -> bool:
        """Whether all targets of a loss were ignored so far, so that it is NaN."""
        if self._sums is None or self._loss_entry is None:
            return False
        return bool(self._sums[2 : 1 + self._loss_entry.size : 2].eq(0).any())

    def losses(self, parts: int) -> list[float]:
        """Return the running loss after each update of the last call.

        Args:
            parts: Number of equal parts of the last vectors, such as the updates of a
                call; 1 if they can't be divided.
        """
        partial = self._partial
        if partial is None or len(partial) % parts or self._loss_entry is None:
            return [self.loss]
        every = len(partial) // parts
        return [self._loss_of(sums) for sums in partial[every - 1 :: every]]

    def _loss_of(self, sums: Tensor) -> float:
        entry = self._loss_entry
        return float(entry.result(sums[1 : 1 + entry.size]))  # type: ignore[union-attr,misc]

    def _summed(self, sums: RunningSums) -> Logs:
        if sums.refusal:
            raise DataError(sums.refusal)
        values: Logs = {}
        if sums.vector is not None:
            count, at = float(sums.vector[0]), 1
            for entry in self._entries:
                if not entry.size:
                    continue
                of_entry = sums.vector[at : at + entry.size]
                at += entry.size
                value = (
                    _quotient(float(of_entry[0]), count)
                    if entry.result is None
                    else entry.result(of_entry)
                )
                values.update(named_figures(entry.name, value))
        extra = {name: _quotient(*pair) for name, pair in sums.extra.items()}
        if "loss" in extra:
            values = {"loss": extra.pop("loss"), **values}
        return {**values, **extra}

    @property
    def directions(self) -> dict[str, str]:
        """Return `"max"` or `"min"` for each metric that has a direction."""
        directions = {
            n: entry.direction for entry in self._entries for n in entry.names
        }
        directions.setdefault("loss", "min")
        return {name: way for name, way in directions.items() if way is not None}

    @property
    def samples(self) -> int:
        """Number of samples that the metrics cover."""
        return 0 if self._sums is None else int(self._sums[0])


def _weighted_means(weights: list[float], sums: Tensor) -> float:
    """Compute the loss of several outputs or parts: a weighted sum of means.

    Raises:
        DataError: A function ignores targets whose number isn't known.
    """
    numbers = sums.tolist()
    pairs = zip(numbers[::2], numbers[1::2])
    mean = sum(weight * _quotient(*pair) for weight, pair in zip(weights, pairs))
    if math.isnan(mean) and any(map(math.isnan, numbers[1::2])):
        raise unknown_number("A loss function")
    return mean


def _quotient(total: float, count: float) -> float:
    return total / count if count else float("nan")


def _refuse_twins(names: list[str]) -> None:
    """Refuse two metrics of the same name.

    Raises:
        ConfigError: Two metrics have the same name.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"Two metrics are called {twice[0]!r}: a metric or a loss has the name of "
            "another, or of something that forward() logs or a step reports. Rename "
            "one."
        )
