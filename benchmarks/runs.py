# SPDX-License-Identifier: Apache-2.0
"""Processes that measure: started one at a time, contestants taking turns."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Iterator

from .contestants import CONTESTANTS
from .worker import Job

ROOT = Path(__file__).parent.parent
_LIMIT_SECONDS = 900.0  # of one process
_BYTECODE_SWITCHES = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
_ERROR_LINES = 3


class Runner:
    """Starts the processes.

    Python's bytecode is there before, as it is where packages were installed.

    Args:
        journal: What was measured is appended to this file, a line per process, and
            what it has already isn't measured again; None for neither.
    """

    def __init__(self, journal: Path | None = None) -> None:
        self.journal = journal
        self._known: dict[str, Any] = {}
        self._imported: set[str] = set()
        if journal is not None and journal.is_file():
            for line in journal.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._known[entry["key"]] = entry["result"]

    def run(self, job: Job, repeat: int) -> dict[str, Any]:
        """Do a job in a process of its own.

        Args:
            job: What is to be done.
            repeat: Which turn it is.

        Returns:
            What `benchmarks.worker.measure` does; or `{"failed": reason}`.
        """
        key = json.dumps([dataclasses.asdict(job), repeat])
        if key not in self._known:
            print(f"{job.workload}: {job.contestant}", file=sys.stderr, flush=True)
            imports = CONTESTANTS[job.contestant].imports or "pass"
            if imports not in self._imported:
                self._imported.add(imports)
                import_seconds(imports)
            self._known[key] = result = _run(job)
            if self.journal is not None:
                with self.journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "result": result}) + "\n")
        return self._known[key]

    def interleaved(
        self, jobs: list[Job], repeats: int
    ) -> Iterator[tuple[Job, dict[str, Any]]]:
        """Every job once, then every job again: A B C A B C.

        What fails isn't tried again.
        """
        failed = set()
        for repeat in range(repeats):
            for job in jobs:
                if job in failed:
                    continue
                result = self.run(job, repeat)
                if "failed" in result:
                    failed.add(job)
                yield job, result


def environment(folder: Path, threads: int = 1) -> dict[str, str]:
    """The variables of a process; what it leaves goes into the folder."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("IPUFIT_", "POPTORCH_"))
        and name not in _BYTECODE_SWITCHES
    }
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "IPUFIT_BACKEND": "emulator",
        "KERAS_BACKEND": "torch",
        "KERAS_HOME": str(folder / "keras"),
        "TMPDIR": str(folder),
    }


def _run(job: Job) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as said:
        question, answer = Path(name, "asked.json"), Path(name, "answer.json")
        question.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.worker", question, answer],
                cwd=ROOT,
                env=environment(Path(name), job.threads),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                timeout=_LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"took more than {_LIMIT_SECONDS:.0f} s"}
        if answer.is_file():
            return json.loads(answer.read_text(encoding="utf-8"))
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    return {"failed": f"exit {done.returncode}: " + " / ".join(lines[-_ERROR_LINES:])}


_IMPORT = """
import time, torch
start = time.process_time()
{statement}
print(time.process_time() - start)
"""


def import_seconds(statement: str) -> float:
    """CPU seconds of an import in a process that has imported torch.

    Raises:
        RuntimeError: The import failed.
    """
    with tempfile.TemporaryDirectory() as name:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT.format(statement=statement)],
            cwd=ROOT,
            env=environment(Path(name)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{statement}: {done.stderr}")
    return float(done.stdout.strip().splitlines()[-1])
