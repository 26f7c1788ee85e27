# SPDX-License-Identifier: Apache-2.0
"""A compilation of PopTorch, timed and shown on a display."""

from __future__ import annotations

import time

from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.callbacks import ProgressDisplay
from ipufit.types import Batch

from .building import Compile
from .ipus import IPUs


def compilation(
    what: str, example: Batch, display: ProgressDisplay, ipus: IPUs, news: list[str]
) -> Compile:
    """Have an executor compiled for an example, once IPUs are free.

    Args:
        what: "training" or "inference".
        example: A call's batch.
        display: Shows that PopTorch compiles, and how long it took.
        ipus: IPUs that other programs may have.
        news: Lines that the display shows before; each is shown once.
    """

    def compile_it(executor: poptorch.PoplarExecutor, values: list[Tensor]) -> None:
        display.compiling(what)
        while news:
            display.noted(news.pop(0))
        start = time.perf_counter()
        given = [tensor.contiguous() for tensor in (*example, *values)]

        def attach() -> None:
            if executor.isCompiled():  # and IPUs were short after it
                executor.attachToDevice()
            else:
                executor.compile(*given)

        ipus.acquire(executor, attach)
        display.compiled(what, time.perf_counter() - start)

    return compile_it
