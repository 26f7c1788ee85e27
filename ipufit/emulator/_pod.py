# SPDX-License-Identifier: Apache-2.0
"""The emulated pod: how many IPUs there are, and who holds which.

Programs hold IPUs from attach to detach. Two of them fit side by side or take
turns, exactly as on hardware, so a forgotten `detachFromDevice()` shows here too.
"""

from __future__ import annotations

import gc
import os
import weakref

from .errors import createPoptorchError

MAX_IPUS_PER_PROCESS = 64
NUM_IPUS_VARIABLE = "IPUFIT_EMULATOR_IPUS"


class Pod:
    """A number of IPUs that programs acquire and release.

    Args:
        num_ipus: How many there are; by default `IPUFIT_EMULATOR_IPUS`, or 64,
            the most that PopTorch gives to one process.

    Example:
        >>> pod = Pod(num_ipus=2)
        >>> held = pod.acquire(2)
        >>> pod.release(held)
    """

    def __init__(self, num_ipus: int | None = None) -> None:
        self._num_ipus = num_ipus
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

        Raises:
            Error: There are not so many, or somebody holds them.
        """
        taken = self._choose(count, first)
        if taken is None:
            gc.collect()  # a holder may be gone without Python knowing
            taken = self._choose(count, first)
        if taken is None:
            what = f"{count} IPU(s)" if first is None else f"device Id {first}"
            raise createPoptorchError(
                f"Failed to acquire {what}: {len(self._held)} of the {self.num_ipus} "
                f"emulated IPUs are in use. {self._way_out(count)}"
            )
        self._held |= taken
        return taken

    def _way_out(self, count: int) -> str:
        if count > self.num_ipus:
            return f"There are only {self.num_ipus}: use fewer stages or replicas."
        return "Detach or destroy another model first."

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
    """IPUs held by one owner, given back when the owner is gone.

    Args:
        owner: Whose life bounds the lease.
        count: Number of IPUs.
        first: Demand those from this one on.
    """

    def __init__(self, owner: object, count: int, first: int | None = None) -> None:
        self._release = weakref.finalize(owner, POD.release, POD.acquire(count, first))

    def end(self) -> None:
        """Give the IPUs back; once is enough."""
        self._release()
