# SPDX-License-Identifier: Apache-2.0
"""Why a process that loads samples has failed, told to the process that waits for it.

PopTorch's asynchronous loader says only that an error occurred in the data fetcher; the
error itself is printed by the other process, where notebooks and logs miss it.
"""

from __future__ import annotations

import os
import tempfile
import traceback
import uuid
from pathlib import Path
from typing import Any, Callable, Sized, cast

from torch.utils.data import Dataset


class ErrorReport:
    """A place for the traceback of an error in another process.

    It is a file that exists from an error until it is taken.

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
        """Call a function, and leave the traceback of an error here."""
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
        """The traceback; empty if there is none. It is deleted."""
        try:
            text = self._path.read_text(encoding="utf-8")
            self._path.unlink()
        except FileNotFoundError:
            return ""
        return text


class ReportedRows(Dataset):  # type: ignore[type-arg]
    """A map-style dataset whose errors are reported.

    Args:
        dataset: The samples.
        report: Gets the traceback.
    """

    def __init__(self, dataset: Any, report: ErrorReport) -> None:
        self._dataset = dataset
        self._report = report

    def __len__(self) -> int:
        """The number of samples."""
        return len(cast(Sized, self._dataset))

    def __getitem__(self, index: Any) -> Any:
        """A sample of the dataset."""
        return self._report.calling(self._dataset.__getitem__, index)
