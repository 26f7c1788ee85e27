# SPDX-License-Identifier: Apache-2.0
"""The emulated pod: how many IPUs there are, and who holds which.

Programs hold IPUs from attach to detach. Two of them fit side by side or take
turns, exactly as on hardware, so a forgotten `detachFromDevice()` shows here too.
"""

from __future__ import annotations

import gc
import logging
import os
import time
import weakref
from typing import Callable

from ipufit.emulator._ground.switches import is_on
from ipufit.emulator.errors import createPoptorchError

logger = logging.getLogger("poptorch::python")

MAX_IPUS_PER_PROCESS = 64
NUM_IPUS_VARIABLE = "IPUFIT_EMULATOR_IPUS"
WAIT_VARIABLE = "POPTORCH_WAIT_FOR_IPU"
SECONDS_BETWEEN_TRIES = 15.0


class Pod:
    """A number of IPUs that programs acquire and release.

    Args:
        num_ipus: By default `IPUFIT_EMULATOR_IPUS`, or 64, the most that PopTorch gives
            to one process.
        sleep: Waits between two tries to get IPUs that are in use.

    Example:
        >>> pod = Pod(num_ipus=2)
        >>> held = pod.acquire(2)
        >>> pod.release(held)
    """

    def __init__(
        self,
        num_ipus: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._num_ipus = num_ipus
        self._sleep = sleep
        self._held: set[int] = set()

    @property
    def num_ipus(self) -> int:
        """The number of IPUs, held or free."""
        if self._num_ipus is not None:
            return self._num_ipus
        text = os.environ.get(NUM_IPUS_VARIABLE, str(MAX_IPUS_PER_PROCESS))
        if not text.isdigit() or int(text) < 1:
            raise createPoptorchError(
                f"{NUM_IPUS_VARIABLE}={text!r} is not a number of IPUs: set it to 1 or "
                "more, or unset it."
            )
        return int(text)

    def acquire(self, count: int, first: int | None = None) -> frozenset[int]:
        """Take `count` free IPUs, or those from `first` on.

        With `POPTORCH_WAIT_FOR_IPU=1` it waits for IPUs that are in use, forever if
        need be, and tries every 15 seconds.

        Raises:
            Error: The pod has fewer IPUs, or they are in use.
        """
        taken = self._choose(count, first)
        if taken is None:
            gc.collect()  # a holder may be gone without Python knowing
            taken = self._choose(count, first)
        while taken is None and self._has(count, first) and is_on(WAIT_VARIABLE):
            logger.warning(
                "No IPU available, sleeping for %g seconds (%s is set).",
                SECONDS_BETWEEN_TRIES,
                WAIT_VARIABLE,
            )
            self._sleep(SECONDS_BETWEEN_TRIES)
            taken = self._choose(count, first)
        if taken is None:
            what = f"{count} IPU(s)" if first is None else f"device Id {first}"
            raise createPoptorchError(
                f"Failed to acquire {what}: {len(self._held)} of the {self.num_ipus} "
                f"emulated IPUs are in use. {self._advice(count)}"
            )
        self._held |= taken
        return taken

    def _advice(self, count: int) -> str:
        if count > self.num_ipus:
            return f"There are only {self.num_ipus}: use fewer stages or replicas."
        return "Detach or destroy another model first."

    def _has(self, count: int, first: int | None) -> bool:
        """Whether the pod has such IPUs, in use or not."""
        return (first or 0) + count <= self.num_ipus

    def _choose(self, count: int, first: int | None) -> frozenset[int] | None:
        ipus = range(self.num_ipus)
        wanted = ipus if first is None else ipus[first : first + count]
        free = [ipu for ipu in wanted if ipu not in self._held]
        return frozenset(free[:count]) if len(free) >= count else None

    def release(self, ipus: frozenset[int]) -> None:
        """Give back what `acquire` returned."""
        self._held -= ipus


POD = Pod()
"""The pod of this process."""


class Lease:
    """IPUs held by one owner, given back when the owner is garbage.

    Args:
        first: Number of the first IPU; None takes any.
    """

    def __init__(self, owner: object, count: int, first: int | None = None) -> None:
        self._release = weakref.finalize(owner, POD.release, POD.acquire(count, first))

    def end(self) -> None:
        """Give the IPUs back; does nothing the second time."""
        self._release()
