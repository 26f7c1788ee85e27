# SPDX-License-Identifier: Apache-2.0
"""`update_bn`: the statistics of batch norm for the present weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ipufit.data import as_source
from ipufit.engine import check_shapes
from ipufit.errors import DataError
from ipufit.types import Verbose

from .copying import independent_copy
from .evaluating import inference_plan, rows_to_evaluate
from .inference import outputs_of_calls
from .parts import Model
from .splitting import settle


def update_bn(
    self: Model,
    x: Any,
    batch_size: int | None = None,
    verbose: Verbose = 0,
    steps: int | None = None,
) -> int:
    """Compute the running statistics of batch norm anew, for the present weights.

    Averaged weights, and weights that were set, give other activations than those that
    the statistics were made of. This goes through data without training, on the IPUs,
    as `torch.optim.swa_utils.update_bn` does on the host: each micro-batch is
    normalised by itself, and the running mean and variance become the averages of all
    micro-batches. Dropout is off, as when the statistics are used; torch's leaves it
    on. Samples that don't fill a micro-batch don't count.

    The program is an inference program of a copy of the model, for which this model
    gives its IPUs back. Several processes share the data, and get the same statistics.

    Args:
        x: Data as for `predict`, such as that of the training; targets are left alone.
        batch_size: Samples of one pass over all replicas, as for `predict`; each
            replica's share is a micro-batch.
        verbose: As for `fit`.
        steps: Batches to go through, from the beginning; None for all.

    Returns:
        The number of micro-batches; 0, and nothing is done, if no layer keeps
        statistics.

    Raises:
        DataError: Data that can't be used, or fewer samples than a micro-batch has.
        UnsupportedError: The model can't be copied.

    Example:
        >>> from ipufit import IPUConfig, IPUModel
        >>> norm = torch.nn.BatchNorm1d(1)
        >>> model = IPUModel(norm, IPUConfig(micro_batch_size=2))
        >>> model.update_bn(torch.tensor([[1.0], [3.0], [5.0], [9.0]]))
        2
        >>> norm.running_mean.item(), norm.running_var.item()
        (4.5, 5.0)
    """
    check_shapes(self.module)
    if not _norms(self.module):
        return 0
    other = independent_copy(self, "update_bn()")
    other._settings = None  # nothing is trained, and no loss is among the outputs
    source = as_source(
        x,
        num_workers=self.config.num_workers,
        processes=self.processes,
        inputs_only=True,
        left_out=self._data.target_columns,
    )
    size, max_rows = rows_to_evaluate(self.config, source, batch_size, steps)
    settle(other, source)
    rows = inference_plan(other.module, other.config, size)[0].micro_batch_size
    _measure(other.module, rows)
    totals: dict[str, Tensor] = {}
    count = 0
    outputs = outputs_of_calls(other, source, size, max_rows, verbose=verbose)
    for part in outputs.parts:
        for name, values in part.items():
            whole = len(values) // rows * rows
            sums = values[:whole:rows].double().sum(0)
            totals[name] = totals.get(name, 0) + sums
        count += whole // rows
    other._executors.detach()
    shared = [self.processes.summed(total) for total in totals.values()]
    count = int(self.processes.summed(torch.tensor([float(count)]))[0])
    if not count:
        raise DataError(
            f"update_bn() has fewer samples than the {rows} of a micro-batch. Lower "
            "batch_size, or pass more data."
        )
    self._executors.fetch_weights()
    _set(self.module, dict(zip(totals, shared)), count)
    self._executors.send_weights()
    return count


def _measure(module: torch.nn.Module, rows: int) -> None:
    """Have a module return the statistics of its micro-batch instead of its outputs.

    They are computed where the layers are, since nothing may be computed after the last
    block of a pipeline. Each is repeated for every sample: outputs have a row for each.

    Args:
        module: A copy of the user's module, which is changed for good.
        rows: Samples of a micro-batch.
    """
    found: dict[str, Tensor] = {}

    def measured(name: str, norm: torch.nn.Module) -> Any:
        def forward(values: Tensor) -> Tensor:
            wide = values.float()
            normalised, statistics = _normalised(wide, norm)
            times = sum(key.split("#")[0] == name for key in found)
            found[f"{name}#{times}"] = statistics.expand(rows, -1)
            typed: Tensor = normalised.to(values.dtype)
            return typed

        return forward

    def results(*_: Any) -> dict[str, Tensor]:
        given = dict(found)
        found.clear()  # as before the trace, or the program would count as changed
        return given

    for name, norm in _norms(module).items():
        norm.forward = measured(name, norm)
    module.register_forward_hook(results)


def _normalised(values: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """Normalise a micro-batch by itself, as batch norm does in training.

    Args:
        values: Shape (rows, channels, ...), in float32.
        norm: The layer.

    Returns:
        The normalised values; and the means of all channels followed by their unbiased
        variances, shape (1, 2 * channels).
    """
    num_channels = values.shape[1]
    count = values.numel() // num_channels
    if count < 2:
        raise DataError(
            "update_bn() needs more than one value per channel in a micro-batch. "
            "Raise batch_size."
        )
    dims = [dim for dim in range(values.dim()) if dim != 1]
    shape = [1, num_channels, *[1] * (values.dim() - 2)]
    mean = values.mean(dims, keepdim=True)
    left = values - mean
    variance = (left * left).mean(dims, keepdim=True)
    normalised = left / torch.sqrt(variance + norm.eps)
    if norm.weight is not None:
        normalised = normalised * norm.weight.reshape(shape)
        normalised = normalised + norm.bias.reshape(shape)
    unbiased = variance * (count / (count - 1))
    both = [one.reshape(1, num_channels) for one in (mean, unbiased)]
    return normalised, torch.cat(both, dim=1)


def _norms(module: torch.nn.Module) -> dict[str, Any]:
    """The layers of batch norm that keep running statistics, by name."""
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and part.running_mean is not None
    }


def _set(module: torch.nn.Module, sums: dict[str, Tensor], count: int) -> None:
    """Write the averages of all micro-batches into the layers.

    Args:
        module: The user's module.
        sums: Sums over micro-batches of means and variances, by `name#call`.
        count: Number of micro-batches.
    """
    for name, norm in _norms(module).items():
        of_calls = [one for key, one in sums.items() if key.split("#")[0] == name]
        if not of_calls:  # forward doesn't call this layer
            continue
        mean, variance = (torch.stack(of_calls).mean(0) / count).chunk(2)
        with torch.no_grad():
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)
            norm.num_batches_tracked.fill_(count * len(of_calls))
