# SPDX-License-Identifier: Apache-2.0
"""Make the golden screens: what `program.py` shows, and where.

Run `python -m tests.golden.screens.make`, and read what has changed.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.interpreters import run_python

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
PROGRAM = HERE / "program.py"
_ABOUT_TERMINALS = ("COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "TERM")
_TOKENS = re.compile(r"\x1b\[\??[\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+")


def of_pipe(*arguments):
    """What a pipe gets."""
    return _printed([str(PROGRAM), *arguments])


def as_in_notebook():
    """What a process prints in which rich takes itself for one of a notebook."""
    code = (
        "import rich.console, runpy\n"
        "rich.console._is_jupyter = lambda: True\n"
        f"runpy.run_path({str(PROGRAM)!r})"
    )
    return _printed(["-c", code], FORCE_COLOR="1")


def _printed(arguments, **variables):
    done = run_python(*arguments, env=_environment(**variables))
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout + done.stderr


def sent_to_terminal(columns, *arguments, **variables):
    """The characters that a terminal gets."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = _environment(**{"TERM": "xterm-256color", **variables})
    terminal = os.ttyname(theirs)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_read_all, ours)
        done = run_python(PROGRAM, *arguments, env=environment, terminal=terminal)
        os.close(theirs)
        sent = reading.result().decode()
    os.close(ours)
    if done.returncode:
        raise RuntimeError(sent)
    return sent


def _read_all(descriptor):
    parts = []
    while True:
        try:
            parts.append(os.read(descriptor, 4096))
        except OSError:  # how Linux says that the other end is closed
            return b"".join(parts)


def screen(sent, columns):
    """What is on the screen of a terminal in the end.

    Args:
        sent: The characters that it got.
        columns: After so many a line goes on in the next one.
    """
    rows, row, column = [""], 0, 0
    for token in _TOKENS.findall(sent):
        if token == "\n":
            row += 1
            rows.extend([""] * (row + 1 - len(rows)))
        elif token == "\r":
            column = 0
        elif token == "\x1b[1A":
            row -= 1
        elif token == "\x1b[2K":
            rows[row] = ""
        elif not token.startswith("\x1b"):
            for character in token:
                if column == columns:
                    row, column = row + 1, 0
                    rows.extend([""] * (row + 1 - len(rows)))
                rows[row] = rows[row][:column].ljust(column) + character
                column += 1
    return "".join(f"{line.rstrip()}\n" for line in rows).rstrip("\n") + "\n"


def _environment(**variables):
    kept = {k: v for k, v in os.environ.items() if k not in _ABOUT_TERMINALS}
    return {
        **kept,
        "IPUFIT_BACKEND": "emulator",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
        **variables,
    }


SCREENS = {
    "pipe.txt": of_pipe,
    "terminal-40.txt": lambda: screen(sent_to_terminal(40), 40),
    "terminal-80.txt": lambda: screen(sent_to_terminal(80), 80),
    "terminal-120.txt": lambda: screen(sent_to_terminal(120), 120),
    "dumb-40.txt": lambda: screen(sent_to_terminal(40, TERM="dumb"), 40),
    "notebook.txt": as_in_notebook,
    "interrupted-pipe.txt": lambda: of_pipe("interrupted"),
    "interrupted-80.txt": lambda: screen(sent_to_terminal(80, "interrupted"), 80),
    "interrupted-120.txt": lambda: screen(sent_to_terminal(120, "interrupted"), 120),
}
"""How each screen is made, by its file."""


if __name__ == "__main__":
    for name, make in SCREENS.items():
        (HERE / name).write_text(make(), "utf-8")
