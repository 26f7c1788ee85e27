# SPDX-License-Identifier: Apache-2.0
"""Check the state in a checkpoint, before anything of it is used.

`check_model` and `check_run` check all values that a model or a run has saved, and call
nothing else but `check_state` of schedules, of the average, and of callbacks, which
anybody may write. `check_has_run` and `check_same_run` check before that whether a run
can go on from the checkpoint. (When the files are read, their bytes were checked; and
when the program is traced, the sums of metrics are compared with its metrics.)

Values that no model has can only be damage: `DamagedCheckpointError`. Values of another
model or run are a `ConfigError`. The saved state isn't changed, nor is the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import asdict
from typing import Any, Iterator, Mapping

import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit._arguments import LARGEST_FLOAT32
from ipufit._kinds import (
    anything,
    check_saved,
    count,
    damaged,
    dict_of,
    each_of,
    fields,
    like,
    list_of,
    metric,
    number,
    optional,
    text,
    whole,
)
from ipufit.batching import BatchPlan
from ipufit.callbacks import CallbackList
from ipufit.data.place import TRAINED, under
from ipufit.data.random_state import check_random_state
from ipufit.distributed import warn_in_first_process
from ipufit.engine.loop import Training
from ipufit.errors import (
    ConfigError,
    DataError,
    IpufitError,
    OtherLayoutWarning,
)
from ipufit.optimizers import Optimization, WeightAverage

from .contents import (
    callback_states,
    groups_of_module,
    groups_of_training,
    in_words,
    parts_of,
    state_of_average,
)

COUNTERS = "epoch", "calls", "updates", "samples"
_WEIGHTS_ALONE = "the weights alone: model.load_weights(path / 'model.safetensors')."
_SAME_OPTIMIZER = f"Compile with the same optimizer, or load {_WEIGHTS_ALONE}"
SEEDED = "samples seeded one by one"
"""Name of a setting that depends on the number of processes."""


@contextlib.contextmanager
def naming(checkpoint: files.Checkpoint) -> Iterator[None]:
    """Add the checkpoint's path to errors raised inside the context.

    Raises:
        DamagedCheckpointError: In place of an unexpected error of Python, torch or
            PopTorch.
    """
    try:
        try:
            yield
        except IpufitError:
            raise
        except Exception as error:
            fault = f"it can't be restored ({type(error).__name__}: {error})"
            raise damaged(fault) from error
    except IpufitError as error:
        name = repr(str(checkpoint.path))
        if checkpoint.path is not None and name not in str(error):
            error.args = (f"Checkpoint {name}: {error}", *error.args[1:])
        raise


_MODEL = fields(
    {
        "optimizer": {
            "class": text,
            "groups": list_of(dict_of(anything)),
            "loss_scaling": number,
        },
        "updates": {"num_updates": count, "rates": dict_of(anything)},
        "average": optional(fields({"num_updates": count})),
        "tensors": dict_of(dict_of(text)),
    }
)
"""The state of any model; `config` and `versions` are for people."""


def check_model(
    checkpoint: files.Checkpoint,
    module: torch.nn.Module,
    optimization: Optimization,
    average: WeightAverage | None,
) -> None:
    """Refuse a checkpoint that can't be restored in a model.

    Args:
        checkpoint: The checkpoint.
        module: The module that is trained.
        optimization: The optimizer and its schedule.
        average: The running average of the weights; None without an average.

    Raises:
        DamagedCheckpointError: The checkpoint wasn't written by a model.
        ConfigError: The checkpoint is from another module, optimizer or schedule.
    """
    state = checkpoint.state
    check_saved(_MODEL, state)
    _check_listed(state["tensors"], in_words(checkpoint.tensors))
    for group, tensors in groups_of_module(module).items():
        _check_same_tensors(tensors, checkpoint.tensors.get(group, {}))
    of_device = checkpoint.tensors.get("optimizer", {})
    _check_optimizer_tensors(under("ipu_state/", of_device), module)
    saved, now = state["optimizer"], optimization.values.plain()
    if not 0 <= saved["loss_scaling"] <= LARGEST_FLOAT32:
        raise damaged("state.optimizer.loss_scaling is no float32")
    if saved["class"] != now["class"]:
        raise ConfigError(
            f"The checkpoint is of {saved['class']}, and compile() got "
            f"{now['class']}. {_SAME_OPTIMIZER}"
        )
    if (state["average"] is None) != (average is None):
        raise ConfigError(
            "Only one of checkpoint and optimizer keeps an average of the weights "
            f"(ema_momentum). {_SAME_OPTIMIZER}"
        )
    if "num_averaged" in (state["average"] or {}):
        raise ConfigError(
            "The checkpoint has an equal average of the weights (SWA of version "
            f"0.1), which can't go on. Load {_WEIGHTS_ALONE}"
        )
    if len(saved["groups"]) != len(now["groups"]):
        raise ConfigError(
            f"The checkpoint's optimizer has {len(saved['groups'])} parameter groups, "
            f"and this one {len(now['groups'])}. {_SAME_OPTIMIZER}"
        )
    optimization.check_state(state["updates"])
    kinds = [fields({n: like(v) for n, v in group.items()}) for group in now["groups"]]
    check_saved(each_of(kinds), saved["groups"], "state.optimizer.groups")
    if average is not None:
        average.check_state(state_of_average(checkpoint))


def _check_listed(
    listed: Mapping[str, Mapping[str, str]], present: Mapping[str, Mapping[str, str]]
) -> None:
    """Refuse tensors that aren't those of the list in the state."""
    for group in sorted({*listed, *present}):
        before, now = listed.get(group, {}), present.get(group, {})
        for name in sorted({*before, *now}):
            there, was = now.get(name, "missing"), before.get(name, "missing")
            if there != was:
                raise damaged(
                    f"{name} of {group} is {there}, and was {was} when it was saved"
                )


def _check_same_tensors(now: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Refuse tensors of another module, or of other types."""
    odd = files.names_that_differ(now, saved, "shape", "dtype")
    if odd and not files.names_that_differ(now, saved, "shape"):
        name = odd[0]
        raise ConfigError(
            f"{name} is {saved[name].dtype} in the checkpoint, and {now[name].dtype} "
            "in the module. Make the module with the types that it was saved with; or "
            f"load {_WEIGHTS_ALONE} They are converted."
        )
    if odd:
        of = "the module", "the checkpoint"
        raise ConfigError(
            "The checkpoint has the weights of another module: "
            f"{files.differences(now, saved, 'shape', of=of)}."
        )


def _check_optimizer_tensors(
    saved: Mapping[str, Tensor], module: torch.nn.Module
) -> None:
    """Refuse an optimizer's tensors whose shapes differ from those of the weights."""
    weights = dict(module.named_parameters())
    for key, tensor in saved.items():  # such as Accl1___module.0.weight
        slot, _, name = key.partition("___")
        weight = weights.get(name.partition(".")[2])
        if weight is None:
            continue
        # A count of updates is 0-d (PopART, `adamdecompose.cpp`).
        if tensor.shape != (weight.shape if slot.startswith("Accl") else ()):
            raise damaged(
                f"{key} of optimizer has the shape {list(tensor.shape)}, and its "
                f"weight {list(weight.shape)}"
            )


def _metric_sums(value: Any, where: str) -> str | None:
    """Check sums of metrics: their number must be that of `entries`."""
    kinds = {"entries": dict_of(count), "extra": dict_of(list_of(number, 2))}
    fault = fields({**kinds, "sums": optional(list_of(number))})(value, where)
    if fault is not None or value["sums"] is None:
        return fault
    length = 1 + sum(value["entries"].values())
    return list_of(number, length)(value["sums"], f"{where}.sums")


def _num_blocks(value: Any, where: str) -> str | None:
    """Check counts by stream; named validation sets add streams to these two."""
    least = fields({TRAINED: count, "validation": count})
    return dict_of(count)(value, where) or least(value, where)


_RUN = fields(
    {
        "run": {
            **dict.fromkeys(COUNTERS, count),
            "stop_reason": optional(text),
            "validated": dict_of(metric),
            "validated_calls": count,
            "batches_validated": dict_of(count),
        },
        "data": {
            "seed": whole,
            "place": list_of(count, 2),
            "num_samples": optional(count),
            "num_blocks": _num_blocks,
        },
        "plan": fields(
            {field.name: count for field in dataclasses.fields(BatchPlan)},
            is_closed=True,
        ),
        "settings": dict_of(text),
        "figures": optional(_metric_sums),
        "callbacks": dict_of(dict_of(anything)),
        "processes": list_of(
            fields({"num_blocks": _num_blocks, "figures": optional(_metric_sums)})
        ),
    }
)


def check_has_run(checkpoint: files.Checkpoint) -> None:
    """Refuse a checkpoint without the state of a run.

    Raises:
        ConfigError: The checkpoint is of a model alone.
        DamagedCheckpointError: The checkpoint wasn't written by a run.
    """
    state = checkpoint.state
    if "run" not in state:
        raise ConfigError(
            "The checkpoint holds a model, but not the place of a run: it was not "
            "saved while fit() ran. Load it with model.load(path)."
        )
    run = state["run"]
    if isinstance(run, Mapping):  # earlier versions didn't save all
        later = {"validated": {}, "validated_calls": 0, "batches_validated": {}}
        run = {**later, **run}
    check_saved(_RUN, {"processes": [], **state, "run": run})
    parts = parts_of(checkpoint)
    if len(parts) != state["plan"]["processes"]:
        raise damaged(
            f"it holds the state of {len(parts)} processes, and state.plan.processes "
            f"is {state['plan']['processes']}"
        )
    if run["calls"]:
        sums_of_all = state["figures"]
        if sums_of_all is None or sums_of_all["sums"] is None:
            raise damaged("state.figures has no sums in the middle of an epoch")
        if any(part.metric_sums is None for part in parts):
            raise damaged("state.processes has no sums in the middle of an epoch")


def check_run(
    checkpoint: files.Checkpoint, training: Training, hooks: CallbackList
) -> None:
    """Refuse a checkpoint that can't be restored in a run.

    Args:
        checkpoint: A checkpoint that `check_has_run` accepts.
        training: The training of the run.
        hooks: The callbacks of the run.

    Raises:
        DamagedCheckpointError: The checkpoint wasn't written by a run.
        ConfigError: The checkpoint is of another model, or the callbacks differ.
    """
    check_model(
        checkpoint,
        training.executors.module,
        training.optimization,
        training.average,
    )
    hooks.check_state(callback_states(checkpoint))
    groups, others = groups_of_training(training), checkpoint.tensors.get("processes")
    if "losses" in checkpoint.tensors:
        _check_same_tensors(groups["losses"], checkpoint.tensors["losses"])
    for index, part in enumerate(parts_of(checkpoint)):
        for group, tensors in groups.items():
            saved = under(f"{index}/{group}/", others or {})
            _check_same_tensors({n: t for n, t in tensors.items() if n in saved}, saved)
        device = part.random.get("device")
        if device is None or device.dtype != torch.int64 or device.dim() != 1:
            raise damaged("it has no random state of the device")
        try:
            states = [under("host/", part.random)]
            for stream in map(part.stream, part.num_blocks):
                if stream is not None and stream.num_batches:
                    states += [stream.at_start, stream.at_last]
            for state in states:
                check_random_state(state, training.batches.source.generators)
        except DataError as error:
            raise damaged(str(error)) from error


def check_same_run(
    checkpoint: files.Checkpoint | None,
    training: Training,
    num_samples: int | None,
    settings: Mapping[str, str],
) -> None:
    """Refuse to resume a run with other settings than the checkpoint's.

    Micro-batch, gradient accumulation, replicas and processes may differ, as long as
    an update has the same number of samples. Settings that the checkpoint lacks are
    ignored.

    Args:
        checkpoint: A checkpoint that `check_has_run` accepts; None for a new run, which
            may have any settings.
        training: Training of the run to resume.
        num_samples: Number of samples in the data; None if unknown.
        settings: Further settings of the run, as text.

    Raises:
        ConfigError: The samples of an update or call, the data or the settings differ.

    Warns:
        OtherLayoutWarning: The layout differs, so a part of the numbers will differ
            from an uninterrupted run.
    """
    if checkpoint is None:
        return
    saved, now = BatchPlan(**checkpoint.state["plan"]), training.plan
    odd = _list_changes(saved, now, "batch_size", "device_iterations")
    before = checkpoint.state["data"]["num_samples"]
    if before != num_samples:
        odd.append(f"samples were {before} and are {num_samples}")
    was = checkpoint.state.get("settings", {})
    odd += [
        f"{name} was {was[name]} and is {text}"
        for name, text in settings.items()
        if _of_any_version(name, was.get(name, text)) != _of_any_version(name, text)
        if name != SEEDED or saved.processes == now.processes
    ]
    if odd:
        raise ConfigError(
            f"The run can't be resumed exactly: {'; '.join(odd)}. Use the settings and "
            "data that it began with; or, to train on from what was learnt, "
            "model.load(path) and fit() without resume."
        )
    if saved == now:
        return
    others = ["random numbers of devices, such as dropout masks"]
    if _list_changes(saved, now, "replicas", "processes"):
        others.append("running statistics, which go on from the first replica's")
    if saved.processes != now.processes:
        others.append("random numbers of transforms that don't belong to one sample")
    changes = ", ".join(_list_changes(saved, now, *asdict(now)))
    warn_in_first_process(
        f"The run goes on in another layout: {changes}. Data order, optimizer, "
        "schedule, loss and metrics continue, equal up to rounding. These differ from "
        f"an unbroken run: {'; '.join(others)}.",
        OtherLayoutWarning,
    )


def _of_any_version(name: str, text: str) -> str:
    """Return what every version of ipufit would say of a setting.

    A later version has further settings, which are None. 0.3.0 described the attributes
    of metrics along with their names: `[['mse', FunctionMetric(direction='min', ...`.
    """
    if name == "metrics" and text.startswith("[["):
        names = re.findall(r"\[('[^']*'), [\w.<>]+\(", text)
        return f"[{', '.join(names)}]"
    return re.sub(r", \w+=None", "", text)


def _list_changes(saved: BatchPlan, now: BatchPlan, *names: str) -> list[str]:
    return [
        f"{name} was {getattr(saved, name)} and is {getattr(now, name)}"
        for name in names
        if getattr(saved, name) != getattr(now, name)
    ]
