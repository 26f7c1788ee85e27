# SPDX-License-Identifier: Apache-2.0
"""docs/how-to/check.md: its command shows its table, and its code runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "check.md").read_text("utf-8")
SCRIPT, PROGRAM = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
TABLE = textwrap.dedent(re.findall(r"^```\n\n((?: {4}.+\n)+)", PAGE, re.M)[0])
COMMAND = re.findall(r"^```sh\nipufit (.+)\n```$", PAGE, re.M)[0]


def run(folder, *line):
    width = max(map(len, TABLE.splitlines()))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(width)}
    return subprocess.run(
        [sys.executable, *line],
        capture_output=True,
        text=True,
        check=False,
        cwd=str(folder),
        env=environment,
    )


def test_the_command_of_the_page_shows_its_table(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT, "utf-8")
    done = run(tmp_path, "-m", "ipufit", *COMMAND.split())
    assert done.returncode == 1, done.stderr
    shown = textwrap.dedent(done.stdout).splitlines()
    assert [line.rstrip() for line in shown] == TABLE.splitlines()


def test_the_code_of_the_page_runs(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT, "utf-8")
    done = run(tmp_path, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
