# SPDX-License-Identifier: Apache-2.0
"""Random states of a run: of the device, of this process and of its streams."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Sequence

import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit._poptorch import poptorch
from ipufit.data import (
    HostRandomState,
    RandomState,
    Replay,
    Source,
    StreamSource,
    TrainingBatches,
    check_random_state,
    mixed,
    packed,
    random_state,
    seed_all,
    unpacked,
)
from ipufit.distributed import Processes
from ipufit.engine import Executors
from ipufit.errors import DataError

from .saved_form import damaged
from .shares import Share, num_saved, share_of
from .trained import Tensors, under

_DEVICE, _HOST, _PASS, _VALIDATION = "device", "host/", "pass", "validation"
_LOADER = "loader/"
_GLOBAL = "torch", "python", "python_gauss", "numpy", "numpy_gauss"


@dataclass(frozen=True)
class RandomStates:
    """Everything that draws random numbers in a run.

    A stream goes on by being gone through again from the beginning of its pass, so the
    states that it began at are kept, and how many blocks it has given. A loader that
    keeps a state goes on from that.

    Attributes:
        executors: The programs, which have the states of the device.
        batches: The data.
        validation: The data to validate on; None for no validation.
        processes: The processes of the run.
    """

    executors: Executors
    batches: TrainingBatches
    validation: Source | None
    processes: Processes

    def take(self) -> tuple[Tensors, dict[str, int]]:
        """Tensors of all states by name, and the blocks that each stream has given."""
        tensors = {_DEVICE: _as_int64(self.executors.device_random_state() or [])}
        now = random_state(self.batches.source.generators)
        tensors.update({_HOST + name: state for name, state in now.items()})
        kept = self.batches.loader_state()
        if kept is not None:
            tensors.update({_LOADER + n: one for n, one in packed(kept).items()})
        replays = {_PASS: self.batches.replay(), _VALIDATION: None}
        if isinstance(self.validation, StreamSource):
            replays[_VALIDATION] = self.validation.first_pass()
        for name, replay in replays.items():
            if replay is not None:
                for time, state in ("start", replay.at_start), ("last", replay.at_last):
                    tensors.update({f"{name}/{time}/{n}": t for n, t in state.items()})
        return tensors, {
            name: 0 if replay is None else replay.num_blocks
            for name, replay in replays.items()
        }

    def check(self, checkpoint: files.Checkpoint) -> None:
        """Refuse states that can't be put back.

        Raises:
            DamagedCheckpointError: A state is missing, or is none.
        """
        for index in range(num_saved(checkpoint)):
            self._check(checkpoint, share_of(checkpoint, index))

    def _check(self, checkpoint: files.Checkpoint, share: Share) -> None:
        states = [under(_HOST, share.random)]
        for name in (_PASS, _VALIDATION):
            replay = _replay(name, share)
            if replay is not None:
                states += [replay.at_start, replay.at_last]
        device = share.random.get(_DEVICE)
        if device is None or device.dtype != torch.int64 or device.dim() != 1:
            raise damaged(checkpoint, "it has no random state of the device")
        try:
            unpacked(under(_LOADER, share.random))
            for state in states:
                check_random_state(state, self.batches.source.generators)
        except DataError as error:
            raise damaged(checkpoint, str(error)) from error

    def put_back_device(
        self, checkpoint: files.Checkpoint, *, is_other_layout: bool
    ) -> None:
        """Set the states of the device.

        Args:
            checkpoint: A checkpoint that `check` accepts.
            is_other_layout: Whether devices divide the samples otherwise than those of
                the run did: then they all go on from a seed made of their first state.

        Raises:
            DamagedCheckpointError: The device can't take them.
        """
        index = 0 if is_other_layout else self.processes.index
        device = share_of(checkpoint, index).random[_DEVICE].tolist()
        if is_other_layout and device:
            device = [mixed(*device)]
        try:
            if device:
                self.executors.set_device_random_state([n % 2**64 for n in device])
        except (ValueError, poptorch.Error) as error:
            raise damaged(checkpoint, f"its random state is none: {error}") from error

    def put_back_host(self, checkpoint: files.Checkpoint) -> None:
        """Set the states of this process, and have streams go on where they were.

        Among another number of processes, samples of streams come in the order of
        process 0. Where a process is new, or the others are, its own states may be.
        """
        index, count = self.processes.index, num_saved(checkpoint)
        is_same = count == self.processes.count
        share = share_of(checkpoint, index if is_same else 0)
        replays = {
            name: _replay(name, share, is_exact=is_same)
            for name in (_PASS, _VALIDATION)
        }
        if isinstance(self.validation, StreamSource):
            self.validation.go_on(replays[_VALIDATION], is_due=True)
        states = [
            under(_HOST, share_of(checkpoint, one).random) for one in range(count)
        ]
        kept = unpacked(under(_LOADER, share.random)) if is_same else None
        self.batches.go_on(_state_for(index, states), replays[_PASS], kept)


def _state_for(index: int, saved: Sequence[RandomState]) -> RandomState:
    """The state of a process; a new one draws other numbers than those that were there.

    Where all had one state, which a script may rely on, a new process has it too. And
    a loader's own generators give all processes one order.
    """
    if index < len(saved):
        return saved[index]
    first = saved[0]
    if len(saved) > 1 and all(_are_equal(first, other) for other in saved):
        return first
    own = {name: state for name, state in first.items() if name in _GLOBAL}
    digest = hashlib.sha256(repr([s.tolist() for s in own.values()]).encode()).digest()
    before = HostRandomState()
    seed_all(mixed(int.from_bytes(digest[:8], "little"), index))
    try:
        return {**first, **random_state()}
    finally:
        before.put_back()


def _are_equal(one: RandomState, other: RandomState) -> bool:
    return all(torch.equal(one[name], other[name]) for name in _GLOBAL)


def _as_int64(numbers: Sequence[int]) -> Tensor:
    """Numbers below 2^64, as seeds are, by their bits."""
    signed = [n - 2**64 if n >= 2**63 else n for n in numbers]
    return torch.tensor(signed, dtype=torch.int64)


def _replay(name: str, share: Share, *, is_exact: bool = True) -> Replay | None:
    """The state of a stream's pass; None if none has begun.

    Args:
        name: Name of the stream.
        share: The part of the process that has the stream.
        is_exact: If False, blocks are others, so that none of them is the last one.
    """
    num_blocks = share.num_blocks[name]
    if not num_blocks:
        return None
    at_start = under(f"{name}/start/", share.random)
    at_last = under(f"{name}/last/", share.random)
    return Replay(num_blocks if is_exact else 0, at_start, at_last)
