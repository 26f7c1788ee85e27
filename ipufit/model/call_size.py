# SPDX-License-Identifier: Apache-2.0
"""Choose how many updates a call of training makes, and how many passes other calls.

`choose_updates_per_call` decides for each training. The user's number counts
(`IPUConfig.updates_per_call`, which `compile` may set). If it is left open, the number
is as large as users can't notice. Each call has a fixed cost: on IPUs a round trip
between host and device. So larger calls cost less per update. A training call ends
wherever a callback or a check must run, and an epoch consists of whole calls.

The size of a call of `evaluate` or `predict` (`choose_passes_per_call`) changes no
number. It is limited by the
memory of inputs and outputs on the host, by the time of a call, and by the padding of
the last call, which is computed and discarded. Each other size is another program,
which takes minutes to compile on IPUs. So sizes come from a short list, four to each
doubling: 4, 5, 6, 7, then 8, 10, 12, 14, then 16, 20 and so on.
"""

from __future__ import annotations

import functools
import math
from typing import Callable, Iterator, Mapping, Sequence

import torch

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan, Choice, divisors
from ipufit.callbacks import CallbackList
from ipufit.config import IPUConfig
from ipufit.data.datasets import Source
from ipufit.data.sources import num_trained_on
from ipufit.distributed import Processes
from ipufit.engine import host_calls
from ipufit.engine.host_calls import HostProgram, OutputSize
from ipufit.engine.objective import Computation

from .arguments import CompileSettings, FitArguments

MOST_CALL_BYTES = 64 * 2**20
"""Maximum host bytes of inputs and outputs of a call in one process."""

MOST_UPDATES = 64
"""Updates of the largest call: the cost of a call is small compared with theirs."""

MOST_WORK = 2**31
"""Largest product of weights and samples of a call in one process.

A dense network multiplies each weight three times with each sample, and does this work
in less than a second on one core. Larger updates gain next to nothing from sharing a
call, and bars, Ctrl-C and SIGTERM wait for the end of it."""

MOST_PASSES = 512
"""Passes of the largest call: the cost of a call is negligible compared with theirs."""

MOST_LOADED_PASSES = 16
"""Passes of the largest call of samples that are loaded one by one."""

MOST_UNKNOWN_PASSES = 4
"""Passes of the largest call if the number of samples, or outputs' size, is unknown."""

MOST_FORWARD_WORK = 3 * MOST_WORK
"""Largest product of weights and samples of a call in one process, for the same time:
an update multiplies each weight three times with each sample."""

_MOST_PADDING = 16
"""Passes of data for each pass of padding."""

_METRIC_BYTES = 4096
"""Bytes of the losses, means and scalars of a micro-batch, without large metrics.

The real number is known once a program is traced.
"""

_LEAST_CALLS = 16
"""Calls of a pass over samples that are loaded: some are loaded while others train."""


def choose_updates_per_call(
    module: torch.nn.Module,
    config: IPUConfig,
    settings: CompileSettings,
    processes: Processes,
    source: Source,
    plan: BatchPlan,
    arguments: FitArguments,
    options: Callable[[], poptorch.Options],
    metric_bytes: Callable[[HostProgram], int],
) -> Choice:
    """Decide how many updates a call of training makes.

    The first of these that is known: the number that the caller or the config asks for,
    which has no reason; the number of the run that is resumed; ipufit's choice.

    With the chosen number `fit` gives the same results as with one update per call. The
    choice is the same in all processes. It depends on the arguments, the config, the
    callbacks, the settings of `compile`, the data and the size of the module.

    Args:
        module: The user's module.
        config: The layout.
        settings: The settings of `compile`.
        processes: The processes that train.
        source: The data.
        plan: The factors of a call.
        arguments: Arguments of the `fit`.
        options: Returns the options of a call of one update.
        metric_bytes: Returns the host bytes of a micro-batch's metric sums.
    """
    number = arguments.updates_per_call or config.updates_per_call
    if number is not None:
        return Choice(number)
    if arguments.checkpoint is not None:
        begun = int(arguments.checkpoint.state["plan"]["device_iterations"])
        return Choice(begun, "the run was begun with so many")
    objective = settings.objective
    multiples: dict[str, int] = {}
    most: dict[str, int] = {}

    # Callbacks of all processes.
    listening = CallbackList(arguments.callbacks)
    is_watching = bool(listening.watched_gradients(module))
    everyone = processes.gathered((listening.call_ends(), is_watching))
    for every, name in [end for ends, _ in everyone for end in ends]:
        if every > 1:
            multiples[f"the {every} updates that {name} counts"] = every
        else:
            most[f"{name} hears each update"] = 1
    if any(is_watching for _, is_watching in everyone):
        most["gradients are watched"] = 1

    # Settings with which something happens after each update.
    moves = settings.optimization.moves_per_update
    if moves:
        most[moves] = 1
    if objective.is_streamed:
        most["outputs come back for a streamed metric, and may be large"] = 1
    if config.customize is not None:
        # Larger calls would return metrics of fewer samples, or sums that the device
        # rounds.
        mode = poptorch.OutputMode(options().output_mode)
        if mode != poptorch.OutputMode.All:
            most[f"customize asks for {mode.name}"] = 1

    # Whole epochs.
    count, updates = source.num_certain, 0
    if count is None:
        most["the data doesn't say for certain how many samples come"] = 1
    else:
        if arguments.validation_split:
            count = num_trained_on(count, arguments.validation_split)
        updates = count // plan.batch_size
        if arguments.pads:
            updates = -(-count // plan.batch_size)
        if not updates:
            return Choice(1, "these data have fewer samples than an update")
        span = "an epoch" if arguments.steps_per_epoch is None else "a pass"
        words = "one update" if updates == 1 else f"{updates} updates"
        multiples = {f"the {words} of {span}": updates, **multiples}
    for name in ("steps_per_epoch", "validation_updates"):
        value = getattr(arguments, name)
        if value is not None:
            multiples[f"{name}={value}"] = value

    # What a call holds, and how long it takes.
    rows, weights = plan.samples_per_update, host_calls.num_weights(module)
    program = module, objective.evaluated, source.structure
    large = metric_bytes(HostProgram(*program, source.example(1)))
    of_metrics = (_METRIC_BYTES + large) * plan.micro_batches_per_call
    held = rows * host_calls.bytes_of(source.first()) + of_metrics
    most[
        "a call's samples and metrics take "
        f"{MOST_CALL_BYTES >> 20} MiB of host memory at most"
    ] = max(1, MOST_CALL_BYTES // held)
    most[
        f"a larger call would take long, with {rows} samples and {weights} weights per "
        "update"
    ] = max(1, MOST_WORK // max(1, rows * weights))
    if not source.is_in_memory:  # some samples are loaded while others train
        least = max(_LEAST_CALLS, 4 * config.num_workers)
        most[f"{least} calls or more share the data"] = max(1, updates // least)
        ahead = source.num_ahead
        if ahead is not None:
            reason = f"workers load {ahead} samples ahead"
            most[reason] = max(1, ahead // (2 * plan.batch_size))
    return largest_updates_per_call(multiples, most)


def largest_updates_per_call(
    multiples: Mapping[str, int], most: Mapping[str, int]
) -> Choice:
    """Choose the largest number of updates in a call that keeps all limits.

    Args:
        multiples: Numbers of updates after which a call must end, by their names. The
            chosen number divides each number.
        most: Maximum numbers of updates in a call, by the reasons for them, besides
            `MOST_UPDATES`.

    Returns:
        The number, 1 or more, and why the number isn't larger.

    Example:
        >>> epoch = {"the 600 updates of an epoch": 600}
        >>> largest_updates_per_call(epoch, {})
        Choice(value=60, reason='of the numbers that divide the 600 updates of an epo...
        >>> largest_updates_per_call(epoch, {"LogEach hears each update": 1})
        Choice(value=1, reason='LogEach hears each update')
        >>> largest_updates_per_call({**epoch, "validation_updates=50": 50}, {})
        Choice(value=50, reason='no larger number divides validation_updates=50')
    """
    most = {**most, f"a call has {MOST_UPDATES} updates at most": MOST_UPDATES}
    reason, bound = min(most.items(), key=lambda item: item[1])
    if not multiples:
        return Choice(bound, reason)
    common = functools.reduce(math.gcd, multiples.values())
    numbers = divisors(common)
    value = max(number for number in numbers if number <= bound)
    if value == bound:
        return Choice(value, reason)
    names = " and ".join(multiples)
    if value == common:
        equal = [name for name, number in multiples.items() if number == common]
        return Choice(value, f"no larger number divides {equal[0] if equal else names}")
    larger = numbers[numbers.index(value) + 1]
    reason = f"of the numbers that divide {names} the next is {larger}, and {reason}"
    return Choice(value, reason)


def choose_passes_per_call(
    module: torch.nn.Module,
    computation: Computation,
    source: Source,
    plan: BatchPlan,
    counts: Sequence[int | None],
    num_workers: int,
    size_of: Callable[[HostProgram], OutputSize | None],
) -> Choice:
    """Choose the passes of a call of `evaluate` or `predict`.

    Args:
        module: The user's module.
        computation: The computation of the program.
        source: The data.
        plan: The factors of the smallest call.
        counts: Number of samples of each set that uses the program; None if unknown.
        num_workers: Processes that load samples.
        size_of: Returns the size of a program's results; None if unknown.

    Raises:
        UnsupportedError: The first axis of an output isn't the samples'.
    """
    least = plan.device_iterations
    known = [count for count in counts if count is not None]
    is_one_call = len(known) == len(counts)
    is_one_call = is_one_call and max(known) <= plan.batch_size * least
    if is_one_call and all(count % plan.micro_batch_size == 0 for count in known):
        return Choice(least)

    # Bytes of inputs, labels and outputs of a pass in one process, if known.
    example = source.example(plan.micro_batch_size)
    on_host = HostProgram(module, computation, source.structure, example)
    size, num_bytes = size_of(on_host), None
    if size is not None:
        on_host.refuse_other_axes(size.outputs)
    if is_one_call:
        return Choice(least)
    if size is not None:
        num_bytes = plan.replicas * (host_calls.bytes_of(example) + size.num_bytes)
        if size.moves_buffers:
            reason = "the module changes a buffer, and would in padding, too"
            return Choice(least, reason)

    passes = []
    for count in known:
        if size is None or size.has_scalars:  # the others have their own program
            count -= count % plan.micro_batch_size
        passes.append(max(1, -(-count // plan.batch_size)))
    most = MOST_PASSES
    if not source.is_in_memory:  # some samples are loaded while others are computed
        most = MOST_LOADED_PASSES if passes else MOST_UNKNOWN_PASSES
        if passes and source.num_ahead is not None:
            most = min(most, source.num_ahead // (2 * plan.batch_size))
        elif passes and num_workers:  # each loads whole calls
            most = min(most, sum(passes) // (4 * num_workers))
    work = plan.samples_per_update * host_calls.num_weights(module)
    return largest_passes_per_call(passes, num_bytes, least, max(1, most), work)


def largest_passes_per_call(
    passes: Sequence[int],
    bytes_per_pass: int | None,
    least: int = 1,
    most: int = MOST_PASSES,
    work_per_pass: int = 0,
) -> Choice:
    """Choose the micro-batches of a call: `least` times 1, 2, 3, ... 8, 10, 12, 14, 16.

    The number is as large as four bounds allow: `MOST_CALL_BYTES`; `MOST_FORWARD_WORK`;
    `most`; and padding of a sixteenth of the passes, beyond the padding that calls of
    `least` passes have. `least` is always allowed.

    Args:
        passes: Number of micro-batches in each pass over data. Most data take one pass;
            single remaining rows run in calls of their own. A pass of unknown length is
            left out.
        bytes_per_pass: Bytes of inputs, outputs and targets of a micro-batch in one
            process; None if unknown, which limits the choice to `MOST_UNKNOWN_PASSES`.
        least: Micro-batches that each call must have, for the stages of a pipeline.
        most: Micro-batches that a call may have.
        work_per_pass: Number of weights times the samples of a micro-batch in one
            process.

    Returns:
        The number, and why the number isn't larger.

    Example:
        >>> largest_passes_per_call([500], bytes_per_pass=2_500)
        Choice(value=512, reason='one call takes all 500')
        >>> largest_passes_per_call([80], bytes_per_pass=2_500)
        Choice(value=80, reason='one call takes all 80')
        >>> largest_passes_per_call([81], bytes_per_pass=2_500)
        Choice(value=28, reason='32 would pad 81 passes to 96')
        >>> largest_passes_per_call([80], bytes_per_pass=10_000_000)
        Choice(value=6, reason='7 would take 66 MiB of host memory, beyond 64')
    """
    if bytes_per_pass is None:
        most = min(most, MOST_UNKNOWN_PASSES)
    held = bytes_per_pass or 0
    largest = max(passes, default=most)
    values: list[int] = []
    reason = ""
    for value in _numbers(least):
        if values and value > most:
            reason = f"calls of such data have {most} passes at most"
        elif values and value * held > MOST_CALL_BYTES:
            reason = (
                f"{value} would take {value * held >> 20} MiB of host memory, beyond "
                f"{MOST_CALL_BYTES >> 20}"
            )
        elif values and value * work_per_pass > MOST_FORWARD_WORK:
            reason = f"calls of {value} would take long with so many weights"
        else:
            values.append(value)
        if reason or value >= largest:
            break
    limit = _computed(passes, least) + sum(passes) // _MOST_PADDING
    padded = {value: _computed(passes, value) for value in values}
    at = max(i for i, value in enumerate(values) if padded[value] <= limit)
    if at + 1 < len(values):
        larger = values[at + 1]
        reason = f"{larger} would pad {sum(passes)} passes to {padded[larger]}"
    elif not reason:
        reason = f"one call takes all {largest}"
    return Choice(values[at], reason)


def _numbers(least: int) -> Iterator[int]:
    """Yield the least number times 1, 2, 3, ... 8, 10, 12, 14, 16, 20 and so on."""
    factor = 1
    while True:
        yield factor * least
        factor += 1 << max(0, factor.bit_length() - 3)


def _computed(passes: Sequence[int], per_call: int) -> int:
    """Return the number of micro-batches that are computed, padding included."""
    return sum(-(-number // per_call) * per_call for number in passes)
