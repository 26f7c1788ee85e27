# SPDX-License-Identifier: Apache-2.0
"""Processes that measure: started one at a time, contestants taking turns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Tuple

from .contestants import CONTESTANTS
from .worker import Job

ROOT = Path(__file__).parent.parent
_LIMIT_SECONDS = 900.0  # of one process
_BYTECODE_SWITCHES = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
_ERROR_LINES = 3

Report = Callable[[str], None]


@contextlib.contextmanager
def caches(journal: Path | None = None) -> Iterator[Path]:
    """A folder for what compilers cache, empty at first.

    Beside a journal it stays, so that a run that goes on finds it; else it goes away.
    """
    if journal is None:
        with tempfile.TemporaryDirectory(prefix="ipufit-benchmarks-") as name:
            yield Path(name)
        return
    folder = journal.absolute().with_name(f"{journal.name}.caches")
    if not journal.exists():
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


class Runner:
    """Starts the processes, and keeps what compilers cache for as long as it lives.

    The caches are empty at first: the first process of a contestant compiles, the
    others find what it left. Only Python's bytecode is there before, as it is where
    packages were installed: whoever lacks it would compile its source at each import.

    Args:
        folder: For caches and messages.
        journal: What was measured is appended to this file, a line per process, and
            what it has already isn't measured again; None for neither.
        report: Gets a line before each process.
    """

    def __init__(
        self, folder: Path, journal: Path | None = None, report: Report | None = None
    ) -> None:
        self.folder = folder
        self.journal = journal
        self.report = report or (lambda line: None)
        self._known: dict[str, Any] = {}
        self._imported: set[str | None] = set()
        if journal is not None and journal.is_file():
            for line in journal.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._known[entry["key"]] = entry["result"]

    def run(self, job: Job, repeat: int) -> dict[str, Any]:
        """Do a job in a process of its own.

        Returns:
            What `benchmarks.worker.measure` does; or `{"failed": reason}`.
        """
        entry = CONTESTANTS[job.contestant]
        return self.call(
            "benchmarks.worker",
            dataclasses.asdict(job),
            repeat,
            f"{job.workload}: {job.contestant}",
            job.threads,
            is_at_terminal=entry.is_at_terminal,
            imports=entry.imports,
        )

    def call(
        self,
        module: str,
        asked: Mapping[str, Any],
        repeat: int,
        title: str,
        threads: int = 1,
        *,
        is_at_terminal: bool = False,
        imports: str | None = None,
    ) -> dict[str, Any]:
        """Have a module do what is asked for, in a process of its own.

        Args:
            module: Its name; run with two paths, it reads JSON and writes JSON.
            asked: For the first file.
            repeat: Which turn it is.
            title: For the report.
            threads: Of torch.
            is_at_terminal: Whether it writes to a terminal.
            imports: A statement with what it imports, of which bytecode must be there.

        Returns:
            The second file; or `{"failed": reason}`.
        """
        key = json.dumps([module, dict(asked), repeat])
        if key not in self._known:
            self.report(title)
            self.have_bytecode(imports)
            with tempfile.TemporaryDirectory(dir=self.folder) as name:
                folder = Path(name)
                variables = self.environment(threads, folder)
                result = _run(module, asked, folder, variables, is_at_terminal)
            self._known[key] = result
            if self.journal is not None:
                with self.journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "result": result}) + "\n")
        return self._known[key]

    def have_bytecode(self, imports: str | None = None) -> None:
        """Leave bytecode of ipufit, of what measures it and of what is imported.

        Args:
            imports: A statement; done once, in a process that isn't measured.
        """
        ours = [str(ROOT / name) for name in ("ipufit", "benchmarks")]
        compiling = ["-m", "compileall", "-q", *ours]
        importing = ["-c", f"import torch\n{imports}"]
        for arguments, what in ((compiling, None), (importing, imports)):
            if what in self._imported:
                continue
            self._imported.add(what)
            with tempfile.TemporaryDirectory(dir=self.folder) as name:
                subprocess.run(
                    [sys.executable, *arguments],
                    cwd=ROOT,
                    env=self.environment(1, Path(name)),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=_LIMIT_SECONDS,
                    check=False,  # what fails will fail where it is measured
                )

    def environment(self, threads: int, folder: Path) -> dict[str, str]:
        """The variables of a process: threads, and caches under our folder.

        Bytecode is kept beside the source, where installed packages have theirs.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("IPUFIT_", "TORCHINDUCTOR_", "POPTORCH_"))
            and name not in _BYTECODE_SWITCHES
        }
        count = str(threads)
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "IPUFIT_BACKEND": "emulator",
            "KERAS_BACKEND": "torch",
            "KERAS_HOME": str(self.folder / "keras"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "TMPDIR": str(folder),
            "TERM": "xterm-256color",
            "COLUMNS": "100",
        }


Output = Iterator[Tuple[int, Callable[[], str]]]  # where to write, and what was written


@contextlib.contextmanager
def _file() -> Output:
    with tempfile.TemporaryFile() as file:

        def said() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        yield file.fileno(), said


@contextlib.contextmanager
def terminal() -> Output:
    """A terminal that somebody reads, so that bars are drawn."""
    ours, theirs = pty.openpty()
    chunks: deque[bytes] = deque(maxlen=100)

    def drain() -> None:
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # what Linux says when the other side is closed
                return
            if not chunk:
                return
            chunks.append(chunk)

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    try:
        yield theirs, lambda: b"".join(chunks).decode(errors="replace")
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


def _run(
    module: str,
    asked: Mapping[str, Any],
    folder: Path,
    environment: Mapping[str, str],
    is_at_terminal: bool,
) -> dict[str, Any]:
    question, answer = folder / "asked.json", folder / "answer.json"
    question.write_text(json.dumps(asked), encoding="utf-8")
    with terminal() if is_at_terminal else _file() as (stdout, said):
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, question, answer],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stdout,
                timeout=_LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"took more than {_LIMIT_SECONDS:.0f} s"}
        lines = said().strip().splitlines()[-_ERROR_LINES:]
    if not answer.is_file():
        return {"failed": f"exit {done.returncode}: " + " / ".join(lines)}
    return json.loads(answer.read_text(encoding="utf-8"))


def stop_in_order() -> None:
    """Have SIGTERM, too, end the process under way and remove the folder."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def interleaved(
    runner: Runner, jobs: list[Job], repeats: int
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Every job once, then every job again: A B C A B C.

    What fails isn't tried again.
    """
    failed = set()
    for repeat in range(repeats):
        for job in jobs:
            if job in failed:
                continue
            result = runner.run(job, repeat)
            if "failed" in result:
                failed.add(job)
            yield job, result


# Imports ------------------------------------------------------------------------------

_IMPORT = """
import time, torch
start = time.process_time()
{statement}
print(time.process_time() - start)
"""


def import_seconds(runner: Runner, statement: str) -> float:
    """CPU seconds of an import in a process that has imported torch.

    Another process has done it before, so that no source is compiled.
    """
    runner.have_bytecode(statement)
    with tempfile.TemporaryDirectory(dir=runner.folder) as name:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT.format(statement=statement)],
            cwd=ROOT,
            env=runner.environment(1, Path(name)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=True,
        )
    return float(done.stdout.strip().splitlines()[-1])
