# SPDX-License-Identifier: Apache-2.0
"""Hands the error of a process that loads samples to the process that waits for it.

PopTorch's asynchronous loader says only that an error occurred in the data fetcher. The
error itself is printed by the other process, where notebooks and logs miss it.
"""

from __future__ import annotations

import os
import tempfile
import traceback
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from torch.utils.data import Dataset


class ErrorReport:
    """Keeps the traceback of an error in another process, until somebody takes it.

    It is kept in a file, which exists only in between.

    Example:
        >>> report = ErrorReport()
        >>> rows = ReportedRows([1, 2], report)
        >>> try:
        ...     rows[2]
        ... except IndexError:
        ...     print(report.take().splitlines()[-1])
        IndexError: list index out of range
        >>> report.take()
        ''
    """

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir(), f"ipufit-{uuid.uuid4().hex}.txt")

    def calling(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, and keep the traceback if it raises an error."""
        try:
            return function(*arguments)
        except Exception:
            with os.fdopen(
                os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600),
                "w",
                encoding="utf-8",
            ) as file:
                file.write(traceback.format_exc())
            raise

    def take(self) -> str:
        """Return the traceback and delete it; returns `""` if there is none."""
        try:
            text = self._path.read_text(encoding="utf-8")
            self._path.unlink()
        except FileNotFoundError:
            return ""
        return text


@dataclass(frozen=True, eq=False)
class ReportedRows(Dataset):  # type: ignore[type-arg]
    """A map-style dataset whose errors are reported.

    Args:
        report: Gets the traceback of an error.
    """

    dataset: Any
    report: ErrorReport

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        """One sample."""
        return self.report.calling(self.dataset.__getitem__, index)

    def __getitems__(self, indices: Any) -> Any:
        """A batch of samples: torch's loaders use this method if it exists."""
        together = getattr(self.dataset, "__getitems__", None)
        if together is None:
            return [self[index] for index in indices]
        return self.report.calling(together, indices)
