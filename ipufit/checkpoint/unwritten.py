# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that aren't there because programs are only compiled."""

from __future__ import annotations

import contextlib
import sys
from typing import Iterator

from ipufit import _env
from ipufit.errors import MissingCheckpointError


@contextlib.contextmanager
def missing_allowed() -> Iterator[None]:
    """Go on after a checkpoint that isn't there, if programs are only compiled.

    Nothing is saved then, so a script that trains, saves and loads would end there, and
    its later programs wouldn't be compiled. What is missing is said.

    Raises:
        MissingCheckpointError: Programs are run.

    Example:
        >>> with missing_allowed():
        ...     raise MissingCheckpointError("There is none.")
        Traceback (most recent call last):
        ipufit.errors.MissingCheckpointError: There is none.
    """
    try:
        yield
    except MissingCheckpointError as error:
        if _env.compile_only() is None:
            raise
        sys.stderr.write(
            f"ipufit: {error} Weights stay as they are, because nothing is saved where "
            "programs are only compiled.\n"
        )
