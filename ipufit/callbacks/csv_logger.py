# SPDX-License-Identifier: Apache-2.0
"""`CSVLogger`: a CSV file with one row per epoch."""

from __future__ import annotations

import csv
import io
import os
import warnings
from pathlib import Path
from typing import Any, ClassVar, Iterable, Mapping

from ipufit._files import file_errors
from ipufit._kinds import Kind, count, list_of, optional, text
from ipufit.errors import ConfigError, IpufitWarning

from .base import Callback

MISSING = "NA"


class CSVLogger(Callback):
    """Write the figures of every epoch into a CSV file.

    As in Keras, the columns are `epoch` (0-based) and the figures of the first epoch by
    name. If that epoch wasn't validated, each figure has a `val_` column too. A figure
    that is missing later is `NA`; lists and arrays are quoted, `"[1.0, 2.0]"`.

    Each row is written at once and the file closed again, so a process that is killed
    leaves the rows of all its epochs. A resumed run continues its file, without the
    rows of epochs that are trained again.

    Args:
        filename: Path of the file; missing folders are made.
        separator: Character between the values of a row.
        append: If True, keep the rows and columns of an existing file. If False, they
            are deleted when the first row is written.

    Raises:
        ConfigError: If `separator` isn't one character. When `fit` begins, with
            `append`: if the file has no header of a `CSVLogger`.
        FileError: If the file can't be written, when `fit` begins or at a later epoch.

    Example:
        >>> logger = CSVLogger("log.csv", separator=";", append=True)
    """

    writes_for_all = True
    saved_attributes = ("columns", "begin")
    saved_kinds: ClassVar[Mapping[str, Kind]] = {
        "columns": optional(list_of(text)),
        "begin": count,
    }

    def __init__(
        self,
        filename: str | os.PathLike[str],
        separator: str = ",",
        append: bool = False,
    ) -> None:
        if not isinstance(separator, str) or len(separator) != 1:
            raise ConfigError(f"separator={separator!r} is not one character.")
        self.filename = os.fspath(filename)
        self.separator = separator
        self.append = append
        self.columns: list[str] | None = None
        self.begin = 0  # size in bytes of the rows of earlier runs
        self._is_open = self._is_resumed = False

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Check that the file can be written, and read its columns with `append`."""
        path = Path(self.filename)
        with file_errors("can't be written", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                size = file.tell()
        self._is_open = self._is_resumed = False
        self.columns, self.begin = None, 0
        if self.append and size:
            self.columns, self.begin = self._read_columns(), size

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the file of the interrupted run."""
        super().load_state_dict(state)
        self._is_resumed = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Write the row of the epoch."""
        with file_errors("can't be written", self.filename):
            self._write(epoch, logs)

    def _write(self, epoch: int, logs: dict[str, Any]) -> None:
        rows: list[list[Any]] = []
        if not self._is_open:
            is_empty = self._cut(epoch) == 0
            if self.columns is None:
                self.columns = _columns(logs) if is_empty else self._read_columns()
            if is_empty:
                rows.append(["epoch", *self.columns])
            self._is_open = True
        columns = self.columns or []
        self._warn_of_others([name for name in logs if name not in columns])
        rows.append([epoch, *(_cell(logs.get(name, MISSING)) for name in columns)])
        text = io.StringIO(newline="")
        csv.writer(text, delimiter=self.separator).writerows(rows)
        with open(self.filename, "ab") as file:
            file.write(text.getvalue().encode())

    def _read_columns(self) -> list[str]:
        """Read the columns of the existing file."""
        with open(self.filename, newline="", encoding="utf-8") as file:
            header = next(csv.reader(file, delimiter=self.separator))
        if header[:1] != ["epoch"]:
            raise ConfigError(
                f"{self.filename!r} doesn't begin with the header of a CSVLogger with "
                f"separator={self.separator!r}, so nothing can be appended. Take "
                "another file, or append=False."
            )
        return header[1:]

    def _cut(self, epoch: int) -> int:
        """Cut the file to the whole rows that stay, and return its size in bytes."""
        path = Path(self.filename)
        is_kept = path.exists() and (self.begin or self._is_resumed)
        written = path.read_bytes() if is_kept else b""
        size = min(self.begin, len(written))
        if self._is_resumed:
            size += self._size_before(epoch, written[size:])
        with path.open("ab") as file:
            file.truncate(size)
            if size and written[size - 1 : size] != b"\n":
                size += file.write(b"\r\n")
        return size

    def _size_before(self, epoch: int, written: bytes) -> int:
        """Return the size of the header and the rows of epochs before `epoch`.

        Args:
            epoch: Index of the epoch that comes next.
            written: This run's part of the file.
        """
        size = 0
        for line in written.splitlines(keepends=True):
            first = line.decode(errors="replace").split(self.separator)[0].strip()
            is_over = first.isdecimal() and int(first) >= epoch
            if is_over or not line.endswith(b"\n"):
                break
            size += len(line)
        return size

    def _warn_of_others(self, others: list[str]) -> None:
        if others:
            warnings.warn(
                f"CSVLogger leaves out {', '.join(others)}: there is no such column in "
                f"{self.filename!r}. Columns are those of its first epoch.",
                IpufitWarning,
                stacklevel=4,
            )


def _columns(logs: dict[str, Any]) -> list[str]:
    names = sorted(logs)
    if any(name.startswith("val_") for name in names):
        return names
    return names + [f"val_{name}" for name in names]


def _cell(value: Any) -> Any:
    is_scalar = getattr(value, "ndim", 1) == 0  # an array of one number
    if isinstance(value, str) or not isinstance(value, Iterable) or is_scalar:
        return value
    return f'"[{", ".join(map(str, value))}]"'
