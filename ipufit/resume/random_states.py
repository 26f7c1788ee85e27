# SPDX-License-Identifier: Apache-2.0
"""Random states of a run: of the device, of this process and of its streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit._poptorch import poptorch
from ipufit.data import (
    Replay,
    Source,
    StreamSource,
    TrainingBatches,
    check_random_state,
    random_state,
)
from ipufit.engine import Executors
from ipufit.errors import DataError

from .saved_form import damaged
from .trained import Tensors, under

_HOST, _PASS, _VALIDATION = "host/", "pass", "validation"


@dataclass(frozen=True)
class RandomStates:
    """Everything that draws random numbers in a run.

    A stream goes on by being gone through again from the beginning of its pass, so the
    states that it began at are kept, and how many blocks it has given.

    Attributes:
        executors: The programs, which have the states of the device.
        batches: The data.
        validation: The data to validate on; None for no validation.
    """

    executors: Executors
    batches: TrainingBatches
    validation: Source | None

    def take(self) -> tuple[Tensors, dict[str, int]]:
        """Tensors of all states by name, and the blocks that each stream has given."""
        tensors = {"device": _as_int64(self.executors.device_random_state() or [])}
        now = random_state(self.batches.source.generators)
        tensors.update({_HOST + name: state for name, state in now.items()})
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
        tensors = checkpoint.tensors.get("random", {})
        states = [under(_HOST, tensors)]
        for name in (_PASS, _VALIDATION):
            replay = _replay(name, checkpoint)
            if replay is not None:
                states += [replay.at_start, replay.at_last]
        device = tensors.get("device")
        if device is None or device.dtype != torch.int64 or device.dim() != 1:
            raise damaged(checkpoint, "it has no random state of the device")
        try:
            for state in states:
                check_random_state(state, self.batches.source.generators)
        except DataError as error:
            raise damaged(checkpoint, str(error)) from error

    def put_back_device(self, checkpoint: files.Checkpoint) -> None:
        """Set the states of the device.

        Raises:
            DamagedCheckpointError: The device can't take them.
        """
        device = checkpoint.tensors["random"]["device"].tolist()
        try:
            if device:
                self.executors.set_device_random_state([n % 2**64 for n in device])
        except (ValueError, poptorch.Error) as error:
            raise damaged(checkpoint, f"its random state is none: {error}") from error

    def put_back_host(self, checkpoint: files.Checkpoint) -> None:
        """Set the states of this process, and have streams go on where they were."""
        if isinstance(self.validation, StreamSource):
            self.validation.go_on(_replay(_VALIDATION, checkpoint), is_due=True)
        now = under(_HOST, checkpoint.tensors["random"])
        self.batches.go_on(now, _replay(_PASS, checkpoint))


def _as_int64(numbers: Sequence[int]) -> Tensor:
    """Numbers below 2^64, as seeds are, by their bits."""
    signed = [n - 2**64 if n >= 2**63 else n for n in numbers]
    return torch.tensor(signed, dtype=torch.int64)


def _replay(name: str, checkpoint: files.Checkpoint) -> Replay | None:
    num_blocks = checkpoint.state["data"]["num_blocks"][name]
    if not num_blocks:
        return None
    states = checkpoint.tensors.get("random", {})
    at_start, at_last = under(f"{name}/start/", states), under(f"{name}/last/", states)
    return Replay(num_blocks, at_start, at_last)
