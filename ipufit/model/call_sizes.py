# SPDX-License-Identifier: Apache-2.0
"""The forward passes of a call that evaluates or predicts, where they are left open."""

from __future__ import annotations

from typing import Sequence

from ipufit.batching import BatchPlan
from ipufit.callbacks import CallbackList
from ipufit.callbacks.base import CallbackLike
from ipufit.data import Source
from ipufit.engine import Inferred, OutputSize, bytes_of, num_weights, output_size
from ipufit.planning.choices import (
    MOST_LOADED_PASSES,
    MOST_PASSES,
    MOST_UNKNOWN_PASSES,
    Choice,
    chosen_inference_iterations,
)

from .parts import Model


def passes_per_call(
    model: Model,
    source: Source,
    plan: BatchPlan,
    max_rows: int | None,
    inferred: Inferred,
    callbacks: CallbackLike,
    kind: str,
) -> Choice | None:
    """Choose the passes of a call, which the config leaves open.

    All processes choose the same: what process 0 sees counts, and a callback of any.

    Args:
        model: The model.
        source: The data.
        plan: The factors of a call with the least passes.
        max_rows: Number of samples to go through; None for all.
        inferred: The computation of the program.
        callbacks: Callbacks of the run. One that hears each batch gets each by itself.
        kind: "test" or "predict", as in the names of the hooks.

    Returns:
        None if a callback hears each batch.
    """
    hooks = f"on_{kind}_batch_begin", f"on_{kind}_batch_end"
    is_heard = CallbackList(callbacks).hears(*hooks)
    choice = None
    if not is_heard:
        choice = _chosen(model, source, plan, max_rows, inferred)
    if model.processes.are_several:
        everyone = model.processes.gathered((is_heard, choice))
        is_heard = any(heard for heard, _ in everyone)
        choice = everyone[0][1]
    return None if is_heard else choice


def _chosen(
    model: Model,
    source: Source,
    plan: BatchPlan,
    max_rows: int | None,
    inferred: Inferred,
) -> Choice:
    least = plan.device_iterations
    known = source.num_samples if source.num_certain is None else source.num_certain
    counts = [count for count in (known, max_rows) if count is not None]
    if counts and min(counts) <= plan.batch_size * least:
        return Choice(least)
    size = _size_of_pass(model, source, plan, inferred)
    if size is not None and size.moves_buffers:
        return Choice(least, "the module changes a buffer, and would in padding, too")
    passes = []
    if counts:
        count = min(counts)
        passes.append(-(-count // plan.batch_size))
        single_rows = count % plan.micro_batch_size
        if single_rows and (size is None or size.has_scalars):
            copies = plan.batch_size // plan.micro_batch_size
            passes.append(-(-single_rows // copies))
    most = _most(source, passes, plan, model.config.num_workers)
    num_bytes = None if size is None else size.num_bytes
    work = plan.samples_per_update * num_weights(model.module)
    return chosen_inference_iterations(passes, num_bytes, least, most, work)


def _most(
    source: Source, passes: Sequence[int], plan: BatchPlan, num_workers: int
) -> int:
    """The most passes of a call, so that samples are loaded while others are computed.

    Args:
        source: The data.
        passes: Passes over them; empty if unknown.
        plan: The factors of a call.
        num_workers: Processes of ours that load samples, each those of whole calls.
    """
    if source.is_in_memory:
        return MOST_PASSES
    if not passes:
        return MOST_UNKNOWN_PASSES
    most = MOST_LOADED_PASSES
    if source.num_ahead is not None:
        most = min(most, source.num_ahead // (2 * plan.batch_size))
    elif num_workers:
        most = min(most, sum(passes) // (4 * num_workers))
    return max(1, most)


def _size_of_pass(
    model: Model, source: Source, plan: BatchPlan, inferred: Inferred
) -> OutputSize | None:
    """Bytes of inputs, labels and outputs of a pass in one process; None if unknown."""
    example = source.example(plan.micro_batch_size)
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in example]
    key = inferred, source.structure, shapes
    known = model._runs.output_sizes
    if all(one != key for one, _ in known):
        size = output_size(model.module, inferred, source.structure, example)
        known.append((key, size))
    size = next(found for one, found in known if one == key)
    if size is None:
        return None
    num_bytes = plan.replicas * (bytes_of(example) + size.num_bytes)
    return size._replace(num_bytes=num_bytes)
