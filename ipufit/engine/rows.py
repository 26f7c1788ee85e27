# SPDX-License-Identifier: Apache-2.0
"""Select, cut, join and buffer the rows that a call returns."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit._tree import Structure, leaves_of, map_tensors
from ipufit.batching import BatchPlan
from ipufit.engine.host_calls import bytes_of
from ipufit.errors import UnsupportedError


def returned_rows(options: poptorch.Options, plan: BatchPlan) -> Tensor | None:
    """Return the indices of the rows that a call returns, in order.

    Args:
        options: Options of the program.
        plan: Factors of the call, whose dim 0 is laid out `[D, G, R, B]`.

    Returns:
        Indices into dim 0, or None for all rows in order.

    Example:
        >>> options = poptorch.Options().outputMode(poptorch.OutputMode.Final)
        >>> returned_rows(options, BatchPlan(2, device_iterations=3))
        tensor([4, 5])
    """
    mode = poptorch.OutputMode(options.output_mode)
    if mode in (poptorch.OutputMode.All, poptorch.OutputMode.Sum):
        return None
    steps = plan.device_iterations * plan.gradient_accumulation
    period = (
        steps if mode == poptorch.OutputMode.Final else options.output_return_period
    )
    per_step = plan.replicas * plan.micro_batch_size
    rows = torch.arange(plan.samples_per_call).reshape(steps, per_step)
    return torch.flatten(rows[period - 1 :: period])


def describe_coverage(options: poptorch.Options, plan: BatchPlan) -> str:
    """Describe the samples of each call that metrics cover; "" if all.

    Example:
        >>> options = poptorch.Options().outputMode(poptorch.OutputMode.Final)
        >>> describe_coverage(options, BatchPlan(2, device_iterations=3))
        'OutputMode.Final: 2 of every 6 samples'
    """
    rows = returned_rows(options, plan)
    if rows is None or len(rows) == plan.samples_per_call:
        return ""
    name = poptorch.OutputMode(options.output_mode).name
    return f"OutputMode.{name}: {len(rows)} of every {plan.samples_per_call} samples"


def check_rows(
    outputs: Sequence[Tensor], num_rows: int, of_mask: int | None = None
) -> None:
    """Refuse outputs that don't have one row per sample.

    An output with one value per micro-batch can't be cut or joined by samples.

    Args:
        outputs: Tensors that the module returned.
        num_rows: Number of rows that a call returned, padding included.
        of_mask: Number of entries of the mask of real rows; None without a mask.

    Raises:
        UnsupportedError: An output is a scalar or has another number of rows.

    Example:
        >>> check_rows([torch.zeros(4, 3)], num_rows=4)
    """
    for output in outputs:
        if output.dim() == 0 or output.shape[0] != num_rows:
            if of_mask is not None:
                num_batches = num_rows // of_mask
                raise UnsupportedError(
                    f"The module returned a tensor of shape {tuple(output.shape)} for "
                    f"a call of {num_batches} batches, with masks of {of_mask} "
                    "entries. Every output needs one row for each entry: if it has a "
                    "row for each graph, pass the mask of graphs; for each node, that "
                    "of nodes."
                )
            number = (
                " A number of each micro-batch, such as a mean, is no output: "
                'ipufit.log("name", number) in forward reports it.'
            )
            way = "return batched tensors only, or leave this one out in eval mode."
            # A GRU's state has samples on axis 1: some rows for each micro-batch.
            rows = output.shape[:2].numel() if output.dim() > 1 else 0
            if rows and output.shape[0] < num_rows and rows % num_rows == 0:
                way = (
                    "return it with the samples' axis first, as in "
                    "output.transpose(0, 1)."
                )
            raise UnsupportedError(
                f"The module returned a tensor of shape {tuple(output.shape)} for "
                f"{num_rows} samples. Outside training every output needs one row per "
                f"sample: {way}{number if output.dim() < 2 else ''}"
            )


def cut(values: Any, rows: Any) -> Any:
    """Return rows of nested tensors, by a slice, a mask or indices.

    Example:
        >>> cut({"a": torch.arange(4), "b": None}, slice(2))
        {'a': tensor([0, 1]), 'b': None}
    """
    return map_tensors(lambda tensor: tensor[rows], values)


def in_passes(values: Any, rows_per_pass: int) -> list[Any]:
    """Cut nested tensors into passes, of which the last may have fewer rows.

    Example:
        >>> in_passes({"a": torch.arange(3)}, rows_per_pass=2)
        [{'a': tensor([0, 1])}, {'a': tensor([2])}]
    """
    leaves = leaves_of(values)
    count = max((len(leaf) for leaf in leaves if isinstance(leaf, Tensor)), default=1)
    firsts = range(0, max(count, 1), rows_per_pass)
    return [cut(values, slice(first, first + rows_per_pass)) for first in firsts]


def joined(parts: Iterable[Any]) -> Any:
    """Join the rows of nested tensors that nest alike.

    Example:
        >>> joined([(torch.zeros(2), None), (torch.ones(1), None)])
        (tensor([0., 0., 1.]), None)
    """
    structure = Structure.of_outputs(None)
    leaves: list[list[Any]] = []
    for part in parts:
        structure = Structure.of_outputs(part)
        leaves.append(structure.flatten(part))
    return structure.rebuild(_joined(leaf) for leaf in zip(*leaves))


def _joined(parts: tuple[Any, ...]) -> Any:
    """Concatenate a leaf of all parts; what isn't a tensor is the same in each."""
    if len(parts) == 1 or not isinstance(parts[0], Tensor):
        return parts[0]
    return torch.cat(parts)


_MOST_BYTES = 2**20


class Rows(NamedTuple):
    """Rows of outputs and of their labels, in flat lists.

    Attributes:
        tensors: Tensors of the outputs, then of the targets and weights.
        num_rows: Number of rows of each tensor.
    """

    tensors: list[Tensor]
    num_rows: int

    def cut(self, first: int, last: int) -> Rows:
        """Return the rows from `first` to `last`, without a copy."""
        if last - first == self.num_rows:
            return self
        return Rows([tensor[first:last] for tensor in self.tensors], last - first)


class RowBuffer:
    """Buffers outputs and labels until a group of rows is complete.

    Loss and metrics of a group take some twenty operations, which cost the same for ten
    rows as for ten thousand. Sums over other groups differ in their last bits. So
    groups don't depend on the number of rows in a call: they are passes that fill a
    mebibyte, or single passes.

    Args:
        rows_per_pass: Rows of a forward pass.
        by_pass: Whether each pass is a group by itself.

    Attributes:
        parts: The buffered rows, one after the other.
        num_rows: Number of buffered rows.

    Example:
        >>> waiting = RowBuffer(rows_per_pass=2, by_pass=True)
        >>> for value in (1.0, 2.0):
        ...     for group in waiting.groups(Rows([torch.full((3,), value)], 3)):
        ...         print(group.tensors[0])
        tensor([1., 1.])
        tensor([1., 2.])
        tensor([2., 2.])
    """

    def __init__(self, rows_per_pass: int, *, by_pass: bool) -> None:
        self.parts: list[Rows] = []
        self.num_rows = 0
        self._rows_per_pass = rows_per_pass
        self._size = rows_per_pass if by_pass else 0  # of groups; 0 if unknown

    def groups(self, rows: Rows) -> Iterator[Rows]:
        """Yield the groups that rows of a call complete, and buffer the other rows.

        Args:
            rows: Rows of a call, at least one row.
        """
        if not self._size:
            num_bytes = bytes_of(rows.tensors)
            of_pass = max(1, self._rows_per_pass * num_bytes // rows.num_rows)
            self._size = self._rows_per_pass * max(1, _MOST_BYTES // of_pass)
        done = 0
        while self.num_rows + rows.num_rows - done >= self._size:
            last = done + self._size - self.num_rows
            self._add(rows.cut(done, last))
            yield self.all()
            self.clear()
            done = last
        if done < rows.num_rows:
            # Copied, because asynchronous loaders use memory again.
            tensors, num_rows = rows.cut(done, rows.num_rows)
            self._add(Rows([tensor.clone() for tensor in tensors], num_rows))

    def _add(self, rows: Rows) -> None:
        self.parts.append(rows)
        self.num_rows += rows.num_rows

    def clear(self) -> None:
        """Remove all buffered rows."""
        self.parts, self.num_rows = [], 0

    def all(self) -> Rows:
        """Return all buffered rows, at least one, and keep them."""
        if len(self.parts) > 1:  # joined once, however often they are asked for
            columns = zip(*(part.tensors for part in self.parts))
            self.parts = [Rows([*map(torch.cat, columns)], self.num_rows)]
        return self.parts[0]
