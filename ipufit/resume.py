# SPDX-License-Identifier: Apache-2.0
"""Find, check, save and restore the state of a run in checkpoints.

The state of a run consists of weights (those of losses included), optimizer, averages,
schedules, callbacks, History, metrics of the present epoch, the position in the data,
and the random states of the device and of this process.

With several processes, some of the state differs by process: sums of metrics, random
states, positions in streams, and some buffers. Process 0 stores its share where a
single process does, and the sums over all processes. The shares of the other processes
are in the group of tensors `processes`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit._files import as_path
from ipufit._kinds import (
    Kind,
    anything,
    are_numbers,
    count,
    dict_of,
    each_of,
    fields,
    flag,
    like,
    list_of,
    metric,
    number,
    optional,
    text,
    whole,
)
from ipufit._poptorch import poptorch
from ipufit._signals import uninterrupted
from ipufit.batching import BatchPlan
from ipufit.callbacks import CallbackList
from ipufit.callbacks.base import CallbackLike
from ipufit.config import IPUConfig
from ipufit.data.calls import Place
from ipufit.data.datasets import Source
from ipufit.data.indexed import Position
from ipufit.data.random_state import (
    HostRandomState,
    RandomState,
    check_random_state,
    hash_seed,
    random_state,
    seed_all,
)
from ipufit.data.streams import StreamSource, StreamState, packed, unpacked
from ipufit.distributed import get_process_info, processes
from ipufit.engine.loop import Training
from ipufit.engine.metric_state import RunningSums
from ipufit.engine.objective import Objective
from ipufit.engine.program import Executors
from ipufit.errors import (
    ConfigError,
    DamagedCheckpointError,
    DataError,
    IpufitError,
    OtherLayoutWarning,
    warn,
)
from ipufit.optimizers import Optimization, WeightAverage
from ipufit.state import RunState
from ipufit.types import PathLike

_DEPTH = 4
_LARGEST = torch.finfo(torch.float32).max
_SEEDED = "samples seeded one by one"  # a setting that depends on processes


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
        checkpoint: From `Snapshot.take`; None for a new run, which may have any
            settings.
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
        if was.get(name, text) != text
        if name != _SEEDED or saved.processes == now.processes
    ]
    if odd:
        raise ConfigError(
            f"The run can't be resumed exactly: {'; '.join(odd)}. Use the settings and "
            "data that it began with; or, to train on from what was learnt, "
            "model.load(path) and fit() without resume."
        )
    if saved == now or not get_process_info().is_first:
        return
    others = ["random numbers of devices, such as dropout masks"]
    if _list_changes(saved, now, "replicas", "processes"):
        others.append("running statistics, which go on from the first replica's")
    if saved.processes != now.processes:
        others.append("random numbers of transforms that don't belong to one sample")
    changes = ", ".join(_list_changes(saved, now, *asdict(now)))
    warn(
        f"The run goes on in another layout: {changes}. Data order, optimizer, "
        "schedule, loss and metrics continue, equal up to rounding. These differ from "
        f"an unbroken run: {'; '.join(others)}.",
        OtherLayoutWarning,
    )


def _list_changes(saved: BatchPlan, now: BatchPlan, *names: str) -> list[str]:
    return [
        f"{name} was {getattr(saved, name)} and is {getattr(now, name)}"
        for name in names
        if getattr(saved, name) != getattr(now, name)
    ]


def compiled_settings(
    objective: Objective, optimization: Optimization
) -> dict[str, str]:
    """Describe the settings of `compile`.

    Called by `compile`, before a run changes the settings: a loss may count its calls
    in an attribute, and callbacks change learning rates.

    Args:
        objective: Losses and metrics.
        optimization: The optimizer and its schedule.

    Returns:
        The settings in words, by name. Functions are described by their names only.
    """
    return {
        "loss": described(
            [(key, loss.name, loss.function) for key, loss in objective.losses]
        ),
        "loss_weights": described(objective.loss_weights),
        "metrics": described([(m.full_name, m.metric) for m in objective.metrics]),
        "optimizer": type(optimization.optimizer).__name__,
        **{
            f"optimizer's {name}": described(value)
            for name, value in sorted(optimization.values.settings.items())
        },
        "ema_momentum": described(optimization.ema_momentum),
        "lr_schedule": optimization.schedule,
        "schedules": described(optimization.schedules),
    }


def numeric_settings(config: IPUConfig) -> dict[str, Any]:
    """Return the fields of a config that change the numbers that training computes.

    Example:
        >>> numeric_settings(IPUConfig(precision="16.16", partials="half"))
        {'precision': 'float16', 'float32_modules': (), 'stochastic_rounding': True, ...
    """
    return {
        "precision": config.types.word,
        "float32_modules": config.float32_patterns,
        "stochastic_rounding": bool(config.rounds_at_random),
        "partials": config.partials,
    }


def config_in_words(config: IPUConfig) -> dict[str, str]:
    """Describe the fields of a config that were set, for people.

    Example:
        >>> config_in_words(IPUConfig(replicas=2, pipeline=("a", "b")))
        {'replicas': '2', 'pipeline': "['a', 'b']"}
    """
    return {
        field.name: described(getattr(config, field.name), depth=1)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    }


def described(value: Any, depth: int = _DEPTH) -> str:
    """Describe a value in words that are the same in every process.

    Args:
        value: A setting. Objects are described by their class and plain attributes,
            functions by their names, tensors by their values.
        depth: Number of levels of attributes of attributes that are described.

    Example:
        >>> described({"loss": torch.nn.MSELoss(), "n": (1, None)})
        "{'loss': MSELoss(reduction='mean'), 'n': [1, None]}"
    """
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (Tensor, np.ndarray)):
        array = torch.as_tensor(value).detach().to(torch.float64)
        return f"array({array.tolist()})"
    if isinstance(value, (np.number, np.bool_)):
        return repr(value.item())
    if isinstance(value, Mapping):
        items = (f"{k!r}: {described(v, depth)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple, range)):
        return f"[{', '.join(described(one, depth) for one in value)}]"
    if isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
        return f"partial{described(parts, depth)}"
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):  # a function, or a class
        return name
    kind = type(value).__qualname__
    return f"{kind}({_attributes(value, depth - 1)})" if depth else kind


def _attributes(value: Any, depth: int) -> str:
    attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}
    if isinstance(value, torch.nn.Module):
        attributes.pop("training", None)
        attributes.update(value.named_buffers(recurse=False))
        attributes.update(value.named_children())
    return ", ".join(
        f"{name}={described(one, depth)}"
        for name, one in sorted(attributes.items())
        if not name.startswith("_")
    )


Tensors = Dict[str, Tensor]
_OPTIMIZER_STATE = "ipu_state", "ipu_param"

_FORM = fields(
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


@dataclass(frozen=True)
class TrainedState:
    """Saves, checks and restores the state of a model that training changes.

    Attributes:
        executors: The programs, which hold the weights.
        optimization: The optimizer and its schedule.
        average: The running average of the weights; None without an average.
    """

    executors: Executors
    optimization: Optimization
    average: WeightAverage | None

    @uninterrupted
    def take(self) -> files.Checkpoint:
        """Return a checkpoint of weights, optimizer, averages and schedule.

        Its tensors share memory with the module and the optimizer: training changes
        them.
        """
        self.executors.fetch_weights()
        average = self.average
        if average is not None and average.is_swapped:  # the trained weights are saved
            average.swap_out()
            try:
                return self.take().copied()
            finally:
                average.swap_in()
        optimizer = self.optimization.optimizer
        given = optimizer.state_dict()
        groups: dict[str, Mapping[str, Tensor]] = {
            **groups_of_module(self.executors.module)
        }
        groups["optimizer"] = {
            f"{part}/{name}": torch.as_tensor(value).detach()
            for part in _OPTIMIZER_STATE
            for name, value in (given.get(part) or {}).items()
        }
        state: dict[str, Any] = {
            "optimizer": self.optimization.values.plain(),
            "updates": self.optimization.state_dict(),
            "config": config_in_words(self.executors.config),
            "versions": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "numpy": np.__version__,
                "poptorch": str(getattr(poptorch, "__version__", "")),
            },
            "average": None,
        }
        if average is not None:
            state["average"] = average.state_dict()
            groups["average"] = state["average"].pop("averages")
        state["tensors"] = in_words(groups)
        return files.Checkpoint(groups, state)

    def check(self, checkpoint: files.Checkpoint) -> None:
        """Refuse a checkpoint that `put_back` can't restore; change nothing.

        Raises:
            DamagedCheckpointError: The checkpoint wasn't written by a model.
            ConfigError: The checkpoint is from another module, optimizer or schedule.
        """
        state = checkpoint.state
        check_form(checkpoint, _FORM)
        listed, given = state["tensors"], in_words(checkpoint.tensors)
        for group in sorted({*listed, *given}):
            before, now = listed.get(group, {}), given.get(group, {})
            for name in sorted({*before, *now}):
                there, was = now.get(name, "missing"), before.get(name, "missing")
                if there != was:
                    raise damaged(
                        checkpoint,
                        f"{name} of {group} is {there}, and was {was} when it was "
                        "saved",
                    )
        for group, named in groups_of_module(self.executors.module).items():
            check_weights(named, checkpoint.tensors.get(group, {}))
        self._check_optimizer_state(checkpoint)
        saved, own = state["optimizer"], self.optimization.values.plain()
        if saved["class"] != own["class"]:
            raise ConfigError(
                f"The checkpoint is of {saved['class']}, and compile() got "
                f"{own['class']}. Compile with the same optimizer."
            )
        if (state["average"] is None) != (self.average is None):
            raise ConfigError(
                "Only one of checkpoint and optimizer keeps an average of the weights "
                "(ema_momentum). Compile with the same optimizer."
            )
        if "num_averaged" in (state["average"] or {}):
            raise ConfigError(
                "The checkpoint has an equal average of the weights (SWA of version "
                "0.1), which can't go on. Load the weights alone: "
                "model.load_weights(path / 'model.safetensors')."
            )
        groups = own["groups"]
        if len(saved["groups"]) != len(groups):
            raise ConfigError(
                f"The checkpoint's optimizer has {len(saved['groups'])} parameter "
                f"groups, and this one {len(groups)}. Compile with the same optimizer."
            )
        self._check_schedule(state["updates"])
        kinds = [fields({n: like(v) for n, v in group.items()}) for group in groups]
        own_form: dict[str, Any] = {
            "optimizer": {"groups": each_of(kinds)},
            "updates": self.optimization.state_fault,
        }
        check_form(checkpoint, fields(own_form))
        if self.average is not None:
            self.average.check_state(_averages(checkpoint))

    def _check_optimizer_state(self, checkpoint: files.Checkpoint) -> None:
        """Refuse a state whose tensors differ in shape from their weights."""
        weights = dict(self.executors.module.named_parameters())
        given = under("ipu_state/", checkpoint.tensors.get("optimizer", {}))
        for key, tensor in given.items():  # such as Accl1___module.0.weight
            slot, _, name = key.partition("___")
            weight = weights.get(name.partition(".")[2])
            if weight is None:
                continue
            # A count of updates is 0-d (PopART, `adamdecompose.cpp`).
            if tensor.shape != (weight.shape if slot.startswith("Accl") else ()):
                raise damaged(
                    checkpoint,
                    f"{key} of optimizer has the shape {list(tensor.shape)}, and its "
                    f"weight {list(weight.shape)}",
                )
        if not 0 <= checkpoint.state["optimizer"]["loss_scaling"] <= _LARGEST:
            raise damaged(checkpoint, "state.optimizer.loss_scaling is no float32")

    def _check_schedule(self, saved: Mapping[str, Any]) -> None:
        own = self.optimization.state_dict()
        names = [
            (set(rates), set(inner) if isinstance(inner, dict) else set())
            for rates in (own["rates"], saved["rates"])
            for inner in [rates.get("scheduler")]  # of torch
        ]
        if names[0] != names[1]:
            raise ConfigError(
                "The checkpoint was saved with another learning rate schedule than "
                "compile() got. Compile with the same lr_schedule."
            )
        if set(own.get("schedules", ())) != set(saved.get("schedules", ())):
            raise ConfigError(
                "The checkpoint was saved with other schedules= than compile() got. "
                "Compile with the same schedules."
            )

    @uninterrupted
    def put_back(self, checkpoint: files.Checkpoint) -> None:
        """Restore weights, optimizer, averages and schedule from a checkpoint.

        The training program is dropped first.

        Raises:
            DamagedCheckpointError: The checkpoint wasn't written by a model.
            ConfigError: The checkpoint is from another module, optimizer or schedule.
        """
        self.check(checkpoint)
        self._put_back(checkpoint)

    @contextlib.contextmanager
    def kept_on_error(self) -> Iterator[None]:
        """Restore the state that the model has now if the block raises an error."""
        before = self.take().copied()
        try:
            yield
        except BaseException:
            self._put_back(before)
            raise

    def _put_back(self, checkpoint: files.Checkpoint) -> None:
        module, optimizer = self.executors.module, self.optimization.optimizer
        saved, tensors = checkpoint.state["optimizer"], checkpoint.tensors
        self.executors.drop_training()
        now = optimizer.state_dict()
        parts: dict[str, Any] = dict.fromkeys(_OPTIMIZER_STATE)
        if tensors["optimizer"]:
            parts = {p: under(f"{p}/", tensors["optimizer"]) for p in _OPTIMIZER_STATE}
        if tensors["optimizer"] or now.get("ipu_state") is not None:
            groups = now["param_groups"]
            optimizer.load_state_dict({**parts, "state": {}, "param_groups": groups})
        self.optimization.values.restore(saved)
        self.optimization.load_state_dict(checkpoint.state["updates"])
        if self.average is not None:
            self.average.load_state_dict(_averages(checkpoint))
        # Weights come last: after the checks, copying them can't fail.
        with torch.no_grad():
            for group, own in groups_of_module(module).items():
                for name, tensor in own.items():
                    tensor.copy_(tensors[group][name])


def groups_of_module(module: torch.nn.Module) -> dict[str, Mapping[str, Tensor]]:
    """Group the tensors of a module as a checkpoint does.

    Returns:
        The state dict, and the buffers that it leaves out (`persistent=False`), if any.
    """
    kept = module.state_dict()
    others = {name: b for name, b in module.named_buffers() if name not in kept}
    return {"model": kept, "buffers": others} if others else {"model": kept}


def _averages(checkpoint: files.Checkpoint) -> dict[str, Any]:
    averages = checkpoint.tensors.get("average", {})
    return {**checkpoint.state["average"], "averages": averages}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors whose names have a prefix, by names without the prefix."""
    return {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}


def in_words(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, str]]:
    """Describe the dtype and shape of each tensor of each group, in order of names.

    A loaded checkpoint has the tensors in this order, too, so a resumed run writes the
    same bytes as an unbroken run.

    Example:
        >>> in_words({"model": {"w": torch.zeros(2, 3)}})
        {'model': {'w': 'float32 [2, 3]'}}
    """
    return {
        group: {
            name: f"{str(one.dtype)[len('torch.') :]} {list(one.shape)}"
            for name, one in sorted(named.items())
        }
        for group, named in tensors.items()
    }


def check_weights(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Refuse the weights of another module.

    Raises:
        ConfigError: A name, shape or dtype differs.
    """
    odd = files.names_that_differ(own, given, "shape", "dtype")
    if odd:
        raise ConfigError(
            f"The checkpoint has the weights of another module: {', '.join(odd)} are "
            "only in one of the two, or have other shapes or types."
        )


def check_form(checkpoint: files.Checkpoint, kind: Kind) -> None:
    """Refuse a checkpoint whose state is of another kind.

    Raises:
        DamagedCheckpointError: The state is of another kind.
    """
    fault = kind(checkpoint.state, "state")
    if fault is not None:
        raise damaged(checkpoint, fault)


@contextlib.contextmanager
def naming(checkpoint: files.Checkpoint) -> Iterator[None]:
    """Add the checkpoint's path to errors raised inside the context.

    Raises:
        DamagedCheckpointError: In place of an unexpected error of Python, torch or
            PopTorch.
    """
    name = repr(str(checkpoint.path))
    try:
        yield
    except IpufitError as error:
        if checkpoint.path is not None and name not in str(error):
            error.args = (f"Checkpoint {name}: {error}", *error.args[1:])
        raise
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
        raise damaged(checkpoint, f"it can't be restored ({fault})") from error


def damaged(checkpoint: files.Checkpoint, fault: str) -> DamagedCheckpointError:
    """Build the error for a checkpoint that no model has written."""
    name = "The checkpoint" if checkpoint.path is None else repr(str(checkpoint.path))
    return DamagedCheckpointError(
        f"{name} isn't one that a model has written: {fault}. Use another one."
    )


AUTO = "auto"
_COUNTERS = "epoch", "calls", "updates", "samples"
_GLOBAL = "torch", "python", "python_gauss", "numpy", "numpy_gauss"
_REFERENCE = fields({"$tensor": text, "is_array": flag}, is_closed=True)
"""Check the dict that replaces an array in the saved state of a callback."""


def _figures(value: Any, where: str) -> str | None:
    """Check sums of metrics: their number must be that of `entries`."""
    kinds = {"entries": dict_of(count), "extra": dict_of(list_of(number, 2))}
    fault = fields({**kinds, "sums": optional(list_of(number))})(value, where)
    if fault is not None or value["sums"] is None:
        return fault
    length = 1 + sum(value["entries"].values())
    return list_of(number, length)(value["sums"], f"{where}.sums")


def _num_blocks(value: Any, where: str) -> str | None:
    """Check counts by stream; named validation sets add streams to these two."""
    least = fields({"pass": count, "validation": count})
    return dict_of(count)(value, where) or least(value, where)


_RUN = fields(
    {
        "run": {
            **dict.fromkeys(_COUNTERS, count),
            "stop_reason": optional(text),
            "validated": dict_of(metric),
            "validated_calls": count,
        },
        "data": {
            "seed": whole,
            "place": list_of(count, 2),
            "num_samples": optional(count),
            "num_blocks": _num_blocks,
        },
        "plan": fields(
            {one.name: count for one in dataclasses.fields(BatchPlan)}, is_closed=True
        ),
        "settings": dict_of(text),
        "figures": optional(_figures),
        "callbacks": dict_of(dict_of(anything)),
        "processes": list_of(
            fields({"num_blocks": _num_blocks, "figures": optional(_figures)})
        ),
    }
)


def _run_fault(value: Any, where: str) -> str | None:
    """Return what is wrong with the state of a run, without its model's; or None."""
    run = value["run"]
    if isinstance(run, Mapping):
        run = {"validated": {}, "validated_calls": 0, **run}
    fault = _RUN({"processes": [], **value, "run": run}, where)
    if fault is not None:
        return fault
    parts = value.get("processes", [])
    if max(1, len(parts)) != value["plan"]["processes"]:
        return f"{where}.processes has {len(parts)} of those in {where}.plan"
    if not value["run"]["calls"]:
        return None
    if value["figures"] is None or value["figures"]["sums"] is None:
        return f"{where}.figures has none in the middle of an epoch"
    if any(part["figures"] is None for part in parts):
        return f"{where}.processes has no figures in the middle of an epoch"
    return None


def stores_of(callbacks: CallbackLike) -> list[tuple[Any, files.CheckpointStore]]:
    """Return the callbacks that keep checkpoints in a directory, with their stores."""
    return [
        (callback, store)
        for callback in CallbackList(callbacks).callbacks
        for store in [getattr(callback, "store", None)]
        if isinstance(store, files.CheckpointStore)
    ]


@contextlib.contextmanager
def held_directories(callbacks: CallbackLike) -> Iterator[None]:
    """Keep other runs out of the directories of callbacks."""
    with contextlib.ExitStack() as stack:
        for _, store in stores_of(callbacks):
            stack.enter_context(store.held())
        yield


def find_checkpoint(
    resume: PathLike | None, callbacks: CallbackLike
) -> files.Checkpoint | None:
    """Return the checkpoint of the run that a `fit` resumes, or None.

    Args:
        resume: A checkpoint or a directory of them; `"auto"` for the latest intact one
            of the callbacks; None for the checkpoint of a callback that resumes by
            itself.
        callbacks: Callbacks of the `fit`.

    Returns:
        None if there is no checkpoint to resume.

    Raises:
        ConfigError: `resume` is `"auto"`, and no callback saves checkpoints; the
            directory has no checkpoint; the checkpoint is of a model alone; processes
            find different checkpoints; or another run uses a callback's directory.
        CheckpointError: The checkpoint can't be read, or is damaged.
    """
    is_automatic = isinstance(resume, str) and resume == AUTO
    stores = [
        store
        for callback, store in stores_of(callbacks)
        if is_automatic or getattr(callback, "resumes", False)
    ]
    if resume is None and not stores:
        return None
    found = None
    # First of all: a checkpoint of another run doesn't fit, or is just being deleted.
    with held_directories(callbacks):
        if resume is not None and not is_automatic:
            found = _checkpoint_at(as_path(resume, "resume"))
        elif stores:
            _, found = files.load_newest(stores) or (None, None)
        else:
            raise ConfigError(
                "resume='auto' goes on from the checkpoints of a callback, and no "
                "callback keeps checkpoints. Add BackupAndRestore(directory), or pass "
                "a path."
            )
        if found is not None:
            check_has_run(found)
    runs = processes().gathered(None if found is None else found.state["run"])
    odd = [index for index, run in enumerate(runs) if run != runs[0]]
    if odd:
        where = ["none" if run is None else f"update {run['updates']}" for run in runs]
        raise ConfigError(
            f"Process 0 goes on from {where[0]}, and process {odd[0]} from "
            f"{where[odd[0]]}: all must read the same checkpoint. Keep checkpoints in "
            "a directory that all hosts share."
        )
    return found


def _checkpoint_at(path: Path) -> files.Checkpoint:
    """Load a checkpoint, or the newest in a directory of checkpoints."""
    is_one = (path / files.MANIFEST).exists() or not path.is_dir()
    newest = None
    if not is_one:
        newest = files.load_newest([files.CheckpointStore(path)])
    if newest is not None:
        return newest[1]
    if is_one or any(files.belongs(file.name) for file in path.iterdir()):
        return files.load_checkpoint(path)  # or raise an error that names the fault
    raise ConfigError(
        f"There is no checkpoint in {str(path)!r} to resume. {files.what_loads(path)}"
    )


def check_has_run(checkpoint: files.Checkpoint) -> None:
    """Refuse a checkpoint without the state of a run.

    Raises:
        ConfigError: The checkpoint is of a model alone.
        DamagedCheckpointError: The checkpoint wasn't written by a run.
    """
    if "run" not in checkpoint.state:
        raise ConfigError(
            "The checkpoint holds a model, but not the place of a run: it was not "
            "saved while fit() ran. Load it with model.load(path)."
        )
    check_form(checkpoint, _run_fault)


class _ProcessState(NamedTuple):
    """The part of the state that differs by process.

    Attributes:
        random: Random states by name.
        num_blocks: Number of blocks (batches) that each stream has returned.
        metric_sums: Sums of the metrics of the present epoch; None between epochs.
        buffers: Tensors that differ from process 0's, as `"group/name"`.
    """

    random: Tensors
    num_blocks: dict[str, int]
    metric_sums: dict[str, Any] | None
    buffers: Tensors


def _num_processes(checkpoint: files.Checkpoint) -> int:
    return max(1, len(checkpoint.state.get("processes", ())))


def _process_state(checkpoint: files.Checkpoint, index: int) -> _ProcessState:
    state, tensors = checkpoint.state, checkpoint.tensors
    plain = {"num_blocks": state["data"]["num_blocks"], "figures": state["figures"]}
    if state.get("processes"):
        plain = state["processes"][index]
    random = dict(tensors.get("random", {}))
    if index:
        random = under(f"{index}/random/", tensors.get("processes", {}))
    return _ProcessState(random, plain["num_blocks"], plain["figures"], {})


@dataclass(frozen=True)
class Snapshot:
    """Saves, checks and restores the state of a run.

    Attributes:
        training: The training loop, with its data and the place in the data.
        hooks: The callbacks.
        run: Counters of the run.
        validated: The validation sets by name; a single set has the name `""`.
        settings: Settings that a resumed run must share, in words.
    """

    training: Training
    hooks: CallbackList
    run: RunState
    validated: Mapping[str, Source] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def trained(self) -> TrainedState:
        """The part of the state that belongs to the model."""
        training = self.training
        return TrainedState(training.executors, training.optimization, training.average)

    def take(self) -> files.Checkpoint:
        """Return a checkpoint of the state between two calls.

        Several processes call this together, and each gets the state of all.

        Returns:
            A checkpoint; its tensors may be those of the model, which training changes.

        Raises:
            UnsupportedError: A streamed metric is in the middle of an epoch.
            ProcessError: Another process has ended.
        """
        training, run = self.training, self.run
        training.executors.take_back()
        if run.is_epoch_done:
            training.batches.begin_next_pass()
        trained = self.trained.take()
        figures = None if run.is_epoch_done else training.metrics.state_dict()
        callbacks: Tensors = {}
        groups = {**trained.tensors, "callbacks": callbacks}
        losses = files.copied_tensors(self._loss_tensors())
        if losses:
            groups["losses"] = losses
        buffers = self._float_buffers(groups) if run.processes.are_several else {}
        place = training.batches.state_dict()
        own = _ProcessState(*self._random_states_and_places(place), figures, buffers)
        parts = run.processes.gathered(own)
        groups["random"] = parts[0].random
        state = {
            **trained.state,
            "run": {
                **{name: getattr(run, name) for name in _COUNTERS},
                "epoch": run.epoch + run.is_epoch_done,
                "stop_reason": run.stop_reason,
            },
            "data": {
                "seed": place.seed,
                "place": list(place.position),
                "num_samples": training.batches.source.num_samples,
                "num_blocks": parts[0].num_blocks,
            },
            "plan": asdict(training.plan),
            "settings": dict(self.settings),
            "figures": _sum_figures([part.metric_sums for part in parts]),
            "callbacks": _replace_arrays(self.hooks.state_dict(), callbacks),
        }
        if run.validated_calls and not run.is_epoch_done:
            state["run"]["validated"] = dict(run.validated)
            state["run"]["validated_calls"] = run.validated_calls
        if run.processes.are_several:
            state["processes"] = [
                {"num_blocks": part.num_blocks, "figures": part.metric_sums}
                for part in parts
            ]
            groups["processes"] = _other_process_tensors(parts)
        state["tensors"] = in_words(groups)
        return files.Checkpoint(groups, state)

    def _random_states_and_places(self, place: Place) -> tuple[Tensors, dict[str, int]]:
        """Return random states by name, and the number of blocks of each stream.

        A resumed run draws the blocks of a stream's pass again. So the random states at
        the beginning of the pass are saved, and the number of blocks that it has
        returned. A loader with a state of its own is resumed from that state.
        """
        seeds = self.training.device_random_state() or []
        signed = [n - 2**64 if n >= 2**63 else n for n in seeds]  # as int64 has them
        tensors = {"device": torch.tensor(signed, dtype=torch.int64)}
        tensors.update({f"host/{n}": state for n, state in place.random.items()})
        if place.stream is not None and place.stream.loader is not None:
            loader = packed(place.stream.loader)
            tensors.update({f"loader/{name}": t for name, t in loader.items()})
        streams = {"pass": place.stream, "validation": None}
        for name, stream in self._validated_streams():
            streams[name] = stream.first_pass()
        num_blocks = dict.fromkeys(streams, 0)
        for name, of in streams.items():
            if of is not None:
                num_blocks[name] = of.num_batches
                for time, state in ("start", of.at_start), ("last", of.at_last):
                    tensors.update({f"{name}/{time}/{n}": t for n, t in state.items()})
        return tensors, num_blocks

    def _validated_streams(self) -> Iterator[tuple[str, StreamSource]]:
        """Yield the name in checkpoints and the source of each validation stream."""
        for name, source in self.validated.items():
            if isinstance(source, StreamSource):
                yield f"validation:{name}" if name else "validation", source

    def _losses(self) -> torch.nn.Module:
        return torch.nn.ModuleList(self.training.metrics.objective.modules)

    def _loss_tensors(self) -> Tensors:
        """Return the tensors of losses, such as a weight that a callback anneals."""
        losses = self._losses()
        return dict([*losses.named_parameters(), *losses.named_buffers()])

    def _float_buffers(self, groups: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
        """Select the buffers that each process changes, as `"group/name"`.

        A device changes buffers of floats only.
        """
        of_module = dict(self.training.executors.module.named_buffers())
        names = dict.fromkeys(("model", "buffers", "average"), of_module)
        names["losses"] = dict(self._losses().named_buffers())
        return {
            f"{group}/{name}": tensor
            for group in names
            for name, tensor in groups.get(group, {}).items()
            if name in names[group] and tensor.is_floating_point()
        }

    def _groups(self) -> dict[str, Mapping[str, Tensor]]:
        groups = groups_of_module(self.training.executors.module)
        groups["losses"] = self._loss_tensors()
        if self.training.average is not None:
            groups["average"] = self.training.average.averages
        return groups

    def check(self, checkpoint: files.Checkpoint) -> None:
        """Refuse a checkpoint that can't be restored; change nothing.

        The sums of metrics aren't checked here: the names and sizes that they must
        have are unknown until the training program is traced. `put_back` checks them.

        Args:
            checkpoint: A checkpoint that `check_has_run` accepts.

        Raises:
            DamagedCheckpointError: The checkpoint wasn't written by a run.
            ConfigError: The checkpoint is of another model, or the callbacks differ.
        """
        training = self.training
        self.trained.check(checkpoint)
        self.hooks.check_state(_callback_states(checkpoint))
        if "losses" in checkpoint.tensors:
            check_weights(self._loss_tensors(), checkpoint.tensors["losses"])
        others = checkpoint.tensors.get("processes", {})
        for index in range(_num_processes(checkpoint)):
            for group, own in self._groups().items():
                given = under(f"{index}/{group}/", others)
                check_weights({n: t for n, t in own.items() if n in given}, given)
            part = _process_state(checkpoint, index)
            states = [under("host/", part.random)]
            device = part.random.get("device")
            if device is None or device.dtype != torch.int64 or device.dim() != 1:
                raise damaged(checkpoint, "it has no random state of the device")
            try:
                for name in part.num_blocks:
                    stream = _stream_state(name, part)
                    if stream is not None and stream.num_batches:
                        states += [stream.at_start, stream.at_last]
                for state in states:
                    check_random_state(state, training.batches.source.generators)
            except DataError as error:
                raise damaged(checkpoint, str(error)) from error

    @uninterrupted
    def put_back(self, checkpoint: files.Checkpoint) -> None:
        """Restore the state of a run, after `on_train_begin` was called.

        `TrainedState.put_back` has restored weights and the optimizer's state before.

        Args:
            checkpoint: A checkpoint that `check` accepts, of a run with equal settings.

        Raises:
            ConfigError: The metrics of the present epoch differ between the checkpoint
                and the training program.
            DamagedCheckpointError: The device can't take the random state.
        """
        state, training, run = checkpoint.state, self.training, self.run
        index, num_saved = run.processes.index, _num_processes(checkpoint)
        are_as_many = num_saved == run.processes.count
        part = _process_state(checkpoint, index if are_as_many else 0)
        figures = part.metric_sums
        if not are_as_many:  # process 0 gets the sums of all
            figures = state["figures"]
            if figures is not None and not run.processes.is_first:
                figures = {**figures, "sums": None, "extra": {}}
        if figures is not None:
            training.metrics.check_state(figures)
        self._put_back_device(checkpoint)
        with torch.no_grad():
            for name, tensor in checkpoint.tensors.get("losses", {}).items():
                self._loss_tensors()[name].copy_(tensor)
            if are_as_many:
                self._put_back_buffers(checkpoint.tensors.get("processes", {}))
        # Callbacks may look at the counters when they load their states.
        for name in _COUNTERS:
            setattr(run, name, state["run"][name])
        if state["run"]["stop_reason"] is not None:
            run.stop(state["run"]["stop_reason"])
        run.validated = dict(state["run"].get("validated", {}))
        run.validated_calls = state["run"].get("validated_calls", 0)
        self.hooks.load_state_dict(_callback_states(checkpoint))
        # on_train_begin may have set other rates than the run had.
        training.optimization.values.restore(state["optimizer"])
        training.optimization.load_state_dict(state["updates"])
        if figures is not None:
            training.metrics.load_state_dict(figures)
        # With another number of processes samples come in the order of process 0.
        for name, stream in self._validated_streams():
            place = _stream_state(name, part, is_exact=are_as_many)
            stream.load_state_dict(place, is_due=True)
        states = [
            under("host/", _process_state(checkpoint, one).random)
            for one in range(num_saved)
        ]
        data = state["data"]
        training.batches.load_state_dict(
            Place(
                data["seed"],
                Position(*data["place"]),
                _host_state(index, states),
                _stream_state("pass", part, is_exact=are_as_many),
            )
        )

    def _put_back_device(self, checkpoint: files.Checkpoint) -> None:
        """Set the random states of the device.

        If the samples are divided between devices in another way than in the
        interrupted run, all devices continue from a seed that is made from the first
        saved state.
        """
        is_other_layout = checkpoint.state["plan"] != asdict(self.training.plan)
        index = 0 if is_other_layout else self.run.processes.index
        seeds = _process_state(checkpoint, index).random["device"].tolist()
        if is_other_layout and seeds:
            seeds = [hash_seed(*seeds)]
        try:
            if seeds:
                executor = self.training.program.executor
                executor.rng_state = [seed % 2**64 for seed in seeds]
        except (ValueError, poptorch.Error) as error:
            raise damaged(
                checkpoint, f"the device can't take its random state: {error}"
            ) from error

    def _put_back_buffers(self, others: Mapping[str, Tensor]) -> None:
        """Set the buffers whose values in this process differed from process 0."""
        executors = self.training.executors
        executors.fetch_weights()
        for group, own in self._groups().items():
            given = under(f"{self.run.processes.index}/{group}/", others)
            for name, tensor in given.items():
                own[name].copy_(tensor)
        executors.send_weights()


def _other_process_tensors(parts: Sequence[_ProcessState]) -> Tensors:
    """Return the random states of processes 1 and up, and their buffers that differ."""
    tensors: Tensors = {}
    for index, part in enumerate(parts[1:], 1):
        tensors.update({f"{index}/random/{n}": t for n, t in part.random.items()})
    for name, first in parts[0].buffers.items():
        if not all(files.are_equal(first, part.buffers[name]) for part in parts):
            for index, part in enumerate(parts[1:], 1):
                tensors[f"{index}/{name}"] = part.buffers[name]
    return tensors


def _stream_state(
    name: str, part: _ProcessState, *, is_exact: bool = True
) -> StreamState | None:
    """Return the place in a stream; None if no pass has begun.

    Args:
        name: Name of the stream in checkpoints.
        part: The state of a process.
        is_exact: False if the blocks differ from those of the interrupted run, so that
            the random state before the last block is of no use.

    Raises:
        DataError: The state of a loader is damaged.
    """
    num_batches, loader = part.num_blocks.get(name, 0), None
    if name == "pass" and is_exact:
        loader = unpacked(under("loader/", part.random))
    if not num_batches:
        return None if loader is None else StreamState(0, {}, {}, loader)
    at_start = under(f"{name}/start/", part.random)
    at_last = under(f"{name}/last/", part.random)
    return StreamState(num_batches if is_exact else 0, at_start, at_last, loader)


def _host_state(index: int, saved: Sequence[RandomState]) -> RandomState:
    """Return the random states of a process; a new process draws its own numbers.

    If all saved processes had the same state, which a script may rely on, a new process
    gets that state too. The generators of a loader have the same state in all
    processes, so that all draw the same order.
    """
    if index < len(saved):
        return saved[index]
    first = saved[0]
    if len(saved) > 1 and all(
        torch.equal(first[name], other[name]) for other in saved for name in _GLOBAL
    ):
        return first
    own = [state.tolist() for name, state in first.items() if name in _GLOBAL]
    digest = hashlib.sha256(repr(own).encode()).digest()
    with HostRandomState():
        seed_all(hash_seed(int.from_bytes(digest[:8], "little"), index))
        return {**first, **random_state()}


def _sum_figures(figures: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Add up the sums of metrics of all processes; return None between epochs.

    Example:
        >>> one = {"entries": {"loss": 1}, "sums": [2.0, 0.5], "extra": {}}
        >>> _sum_figures([one, {**one, "sums": None}, one])["sums"]
        [4.0, 1.0]
    """
    given = [one for one in figures if one is not None]
    if len(given) < 2:
        return given[0] if given else None
    vectors = [
        None if sums is None else torch.tensor(sums, dtype=torch.float64)
        for sums in (one["sums"] for one in given)
    ]
    extras = [one["extra"] for one in given]
    total = RunningSums.joined([RunningSums(*pair) for pair in zip(vectors, extras)])
    return {
        **given[0],
        "sums": None if total.vector is None else total.vector.tolist(),
        "extra": {name: list(pair) for name, pair in total.extra.items()},
    }


def _replace_arrays(value: Any, tensors: Tensors) -> Any:
    """Replace the arrays in a state by their names, and add them to the tensors.

    Example:
        >>> tensors = {}
        >>> _replace_arrays({"best": np.ones(2), "wait": 1}, tensors)
        {'best': {'$tensor': '0', 'is_array': True}, 'wait': 1}
        >>> tensors
        {'0': tensor([1., 1.], dtype=torch.float64)}
    """
    if isinstance(value, (Tensor, np.ndarray)):
        name = str(len(tensors))
        tensors[name] = torch.as_tensor(value).detach().cpu().clone()
        return {"$tensor": name, "is_array": isinstance(value, np.ndarray)}
    if isinstance(value, dict):
        return {key: _replace_arrays(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        if are_numbers(value):
            return list(value)
        return [_replace_arrays(element, tensors) for element in value]
    return value


def _callback_states(checkpoint: files.Checkpoint) -> Any:
    """Return the states of the callbacks in a checkpoint, with their arrays.

    Raises:
        DamagedCheckpointError: An array is missing.
    """
    tensors = checkpoint.tensors.get("callbacks", {})

    def with_arrays(value: Any) -> Any:
        if isinstance(value, dict) and "$tensor" in value:
            fault = _REFERENCE(value, "the state of a callback")
            if fault is None and value["$tensor"] not in tensors:
                fault = f"callbacks.safetensors lacks {value['$tensor']}"
            if fault is not None:
                raise damaged(checkpoint, fault)
            tensor = tensors[value["$tensor"]]
            return tensor.numpy() if value["is_array"] else tensor
        if isinstance(value, dict):
            return {key: with_arrays(one) for key, one in value.items()}
        if isinstance(value, list):
            return [with_arrays(one) for one in value]
        return value

    return with_arrays(checkpoint.state["callbacks"])
