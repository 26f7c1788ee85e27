# SPDX-License-Identifier: Apache-2.0
"""Save the state of a model and of a run in checkpoints, and restore it.

The state of a run consists of weights (those of losses included), optimizer, averages,
schedules, callbacks, History, metrics of the present epoch, the place in the data
(`data/place.py`), and the random states of the device and of this process. With several
processes, some of the state differs by process: sums of metrics, random states,
positions in streams, and some buffers.

`contents.py` says where a checkpoint has each part, and `checks.py` refuses what can't
be restored.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
from dataclasses import asdict, dataclass, field
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit._kinds import damaged
from ipufit._poptorch import poptorch
from ipufit._signals import uninterrupted
from ipufit.callbacks import CallbackList
from ipufit.data.datasets import Source
from ipufit.data.place import TRAINED, Place, Position, under
from ipufit.data.random_state import (
    HostRandomState,
    RandomState,
    hash_seed,
    random_state,
    seed_all,
)
from ipufit.data.streams import StreamSource
from ipufit.engine.loop import Training
from ipufit.engine.metric_state import RunningSums
from ipufit.engine.program import Executors
from ipufit.optimizers import Optimization, WeightAverage
from ipufit.state import RESUMES, RunState

from .checks import COUNTERS, check_model, check_run, naming
from .contents import (
    OPTIMIZER_STATE,
    ProcessPart,
    Tensors,
    callback_states,
    groups_of_module,
    groups_of_training,
    in_words,
    modules_of_losses,
    parts_of,
    replace_arrays,
    state_of_average,
    tensors_of_losses,
    tensors_of_other_processes,
)
from .settings import config_in_words

_GLOBAL = "torch", "python", "python_gauss", "numpy", "numpy_gauss"


@dataclass(frozen=True)
class ModelSaver:
    """Saves and restores the state of a model that training changes.

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
        of_optimizer = self.optimization.optimizer.state_dict()
        groups: dict[str, Mapping[str, Tensor]] = {
            **groups_of_module(self.executors.module)
        }
        groups["optimizer"] = {
            f"{part}/{name}": torch.as_tensor(value).detach()
            for part in OPTIMIZER_STATE
            for name, value in (of_optimizer.get(part) or {}).items()
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

    @uninterrupted
    def put_back(self, checkpoint: files.Checkpoint) -> None:
        """Restore a checkpoint; if that fails, the model keeps its present state.

        The training program is dropped first.

        Raises:
            DamagedCheckpointError: The checkpoint wasn't written by a model.
            ConfigError: The checkpoint is from another module, optimizer or schedule.
        """
        with naming(checkpoint):
            check_model(
                checkpoint, self.executors.module, self.optimization, self.average
            )
        with self.kept_on_error():
            self.write(checkpoint)

    @contextlib.contextmanager
    def kept_on_error(self) -> Iterator[None]:
        """Restore the present state if an error is raised inside the context."""
        before = self.take().copied()
        is_swapped = self.average is not None and self.average.is_swapped
        try:
            yield
        except BaseException:
            self.write(before)
            if self.average is not None and is_swapped:
                self.average.swap_in()
            raise

    @uninterrupted
    def write(self, checkpoint: files.Checkpoint) -> None:
        """Restore a checkpoint that `check_model` accepts.

        Raises:
            DamagedCheckpointError: A user's scheduler, or torch, can't take its state.
        """
        with naming(checkpoint):
            module, optimizer = self.executors.module, self.optimization.optimizer
            state, of_device = checkpoint.state, checkpoint.tensors.get("optimizer", {})
            self.executors.drop_training()
            now = optimizer.state_dict()
            parts: dict[str, Any] = dict.fromkeys(OPTIMIZER_STATE)
            if of_device:
                parts = {part: under(f"{part}/", of_device) for part in OPTIMIZER_STATE}
            if of_device or now.get("ipu_state") is not None:
                groups = now["param_groups"]
                optimizer.load_state_dict(
                    {**parts, "state": {}, "param_groups": groups}
                )
            self.optimization.values.restore(state["optimizer"])
            self.optimization.load_state_dict(state["updates"])
            if self.average is not None:
                self.average.load_state_dict(state_of_average(checkpoint))
            with torch.no_grad():
                for group, tensors in groups_of_module(module).items():
                    for name, tensor in tensors.items():
                        tensor.copy_(checkpoint.tensors[group][name])


@dataclass(frozen=True)
class RunSaver:
    """Saves and restores the state of a run.

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
    def of_model(self) -> ModelSaver:
        """Saves and restores the part of the state that belongs to the model."""
        training = self.training
        return ModelSaver(training.executors, training.optimization, training.average)

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
        of_model = self.of_model.take()
        metric_sums = None if run.is_epoch_done else training.metrics.state_dict()
        callbacks: Tensors = {}
        groups = {**of_model.tensors, "callbacks": callbacks}
        losses = files.copied_tensors(tensors_of_losses(training))
        if losses:
            groups["losses"] = losses
        buffers = self._float_buffers(groups) if run.processes.are_several else {}
        place = training.batches.state_dict()
        random, num_blocks = self._random_states_and_counts(place)
        part = ProcessPart(random, num_blocks, metric_sums, buffers)
        parts = run.processes.gathered(part)
        groups["random"] = parts[0].random
        state = {
            **of_model.state,
            "run": {
                **{name: getattr(run, name) for name in COUNTERS},
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
            "figures": _sum_metrics([part.metric_sums for part in parts]),
            "callbacks": replace_arrays(self.hooks.state_dict(), callbacks),
        }
        if run.validated_calls and not run.is_epoch_done:
            state["run"]["validated"] = dict(run.validated)
            state["run"]["validated_calls"] = run.validated_calls
        counts = {
            name: source.num_validated for name, source in self._validated_streams()
        }
        if any(counts.values()):
            state["run"]["batches_validated"] = counts
        if run.processes.are_several:
            state["processes"] = [
                {"num_blocks": part.num_blocks, "figures": part.metric_sums}
                for part in parts
            ]
            groups["processes"] = tensors_of_other_processes(parts)
        state["tensors"] = in_words(groups)
        return files.Checkpoint(groups, state)

    def _random_states_and_counts(self, place: Place) -> tuple[Tensors, dict[str, int]]:
        """Return random states by name, and the number of blocks of each stream."""
        seeds = self.training.device_random_state() or []
        signed = [n - 2**64 if n >= 2**63 else n for n in seeds]  # as int64 has them
        tensors = {"device": torch.tensor(signed, dtype=torch.int64)}
        tensors.update({f"host/{n}": state for n, state in place.random.items()})
        streams = {TRAINED: place.stream, "validation": None}
        for name, source in self._validated_streams():
            streams[name] = source.state_dict()
        num_blocks = dict.fromkeys(streams, 0)
        for name, stream in streams.items():
            if stream is not None:
                num_blocks[name] = stream.num_batches
                tensors.update(stream.tensors(name))
        return tensors, num_blocks

    def _validated_streams(self) -> Iterator[tuple[str, StreamSource]]:
        """Yield the name in checkpoints and the source of each validation stream."""
        for name, source in self.validated.items():
            if isinstance(source, StreamSource):
                yield f"validation:{name}" if name else "validation", source

    def _float_buffers(self, groups: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
        """Select the buffers that each process changes, as `"group/name"`.

        A device changes buffers of floats only.
        """
        of_module = dict(self.training.executors.module.named_buffers())
        names = dict.fromkeys(("model", "buffers", "average"), of_module)
        names["losses"] = dict(modules_of_losses(self.training).named_buffers())
        return {
            f"{group}/{name}": tensor
            for group in names
            for name, tensor in groups.get(group, {}).items()
            if name in names[group] and tensor.is_floating_point()
        }

    def check(self, checkpoint: files.Checkpoint) -> None:
        """Refuse a checkpoint that can't be restored in this run; see `check_run`."""
        with naming(checkpoint):
            check_run(checkpoint, self.training, self.hooks)

    @uninterrupted
    def put_back(self, checkpoint: files.Checkpoint) -> None:
        """Restore the state of a run, after `on_train_begin` was called.

        `ModelSaver.write` has restored weights and the optimizer's state before.

        Args:
            checkpoint: A checkpoint that `check` accepts, of a run with equal settings.

        Raises:
            ConfigError: The metrics of the present epoch differ between the checkpoint
                and the training program.
            DamagedCheckpointError: The device can't take the random state.
        """
        with naming(checkpoint):
            self._put_back(checkpoint)

    def _put_back(self, checkpoint: files.Checkpoint) -> None:
        state, training, run = checkpoint.state, self.training, self.run
        parts, index = parts_of(checkpoint), run.processes.index
        are_as_many = len(parts) == run.processes.count
        part = parts[index if are_as_many else 0]
        metric_sums = part.metric_sums
        if not are_as_many:  # process 0 gets the sums of all
            metric_sums = state["figures"]
            if metric_sums is not None and not run.processes.is_first:
                metric_sums = {**metric_sums, "sums": None, "extra": {}}
        if metric_sums is not None:
            training.metrics.load_state_dict(metric_sums)
        is_other_layout = state["plan"] != asdict(training.plan)
        of_device = parts[0 if is_other_layout else index].random["device"]
        self._put_back_device(of_device.tolist(), is_other_layout)
        with torch.no_grad():
            for name, tensor in checkpoint.tensors.get("losses", {}).items():
                tensors_of_losses(training)[name].copy_(tensor)
            if are_as_many:
                self._put_back_buffers(checkpoint.tensors.get("processes", {}))
        # Callbacks may look at the counters when they load their states.
        for name in COUNTERS:
            setattr(run, name, state["run"][name])
        if checkpoint.path is not None:
            run.saved[RESUMES] = checkpoint.path, run.updates
        if state["run"]["stop_reason"] is not None:
            run.stop(state["run"]["stop_reason"])
        run.validated = dict(state["run"].get("validated", {}))
        run.validated_calls = state["run"].get("validated_calls", 0)
        self.hooks.load_state_dict(callback_states(checkpoint))
        # on_train_begin may have set other rates than the run had.
        training.optimization.values.restore(state["optimizer"])
        training.optimization.load_state_dict(state["updates"])
        # With another number of processes samples come in the order of process 0.
        streams = {name: part.stream(name) for name in part.num_blocks}
        if not are_as_many:
            streams = {n: s and s.of_other_blocks() for n, s in streams.items()}
        for name, source in self._validated_streams():
            source.load_state_dict(streams.get(name), is_due=True)
            batches = state["run"].get("batches_validated", {}).get(name, 0)
            source.skip_validated(batches)
        data, random = state["data"], [under("host/", part.random) for part in parts]
        training.batches.load_state_dict(
            Place(
                data["seed"],
                Position(*data["place"]),
                _host_state(index, random),
                streams[TRAINED],
            )
        )

    def _put_back_device(self, seeds: list[int], is_other_layout: bool) -> None:
        """Set the random states of the device.

        If the samples are divided between devices in another way than in the
        interrupted run, all devices continue from a seed that is made from the first
        saved state.
        """
        if is_other_layout and seeds:
            seeds = [hash_seed(*seeds)]
        try:
            if seeds:
                executor = self.training.program.executor
                executor.rng_state = [seed % 2**64 for seed in seeds]
        except (ValueError, poptorch.Error) as error:
            raise damaged(f"the device can't take its random state: {error}") from error

    def _put_back_buffers(self, others: Mapping[str, Tensor]) -> None:
        """Set the buffers whose values in this process differed from process 0."""
        self.training.executors.fetch_weights()
        for group, tensors in groups_of_training(self.training).items():
            saved = under(f"{self.run.processes.index}/{group}/", others)
            for name, tensor in saved.items():
                tensors[name].copy_(tensor)


def _host_state(index: int, saved: Sequence[RandomState]) -> RandomState:
    """Return the saved random states of a process; an added process gets new ones.

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


def _sum_metrics(
    of_processes: Sequence[dict[str, Any] | None],
) -> dict[str, Any] | None:
    """Add up the sums of metrics of all processes; return None between epochs.

    Example:
        >>> sums = {"entries": {"loss": 1}, "sums": [2.0, 0.5], "extra": {}}
        >>> _sum_metrics([sums, {**sums, "sums": None}, sums])["sums"]
        [4.0, 1.0]
    """
    states = [state for state in of_processes if state is not None]
    if len(states) < 2:
        return states[0] if states else None
    vectors = [
        None if sums is None else torch.tensor(sums, dtype=torch.float64)
        for sums in (state["sums"] for state in states)
    ]
    extras = [state["extra"] for state in states]
    total = RunningSums.joined([RunningSums(*pair) for pair in zip(vectors, extras)])
    return {
        **states[0],
        "sums": None if total.vector is None else total.vector.tolist(),
        "extra": {name: list(pair) for name, pair in total.extra.items()},
    }
