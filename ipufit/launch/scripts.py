# SPDX-License-Identifier: Apache-2.0
"""Scripts that a command runs in its own process."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from typing import Sequence


def run_script(script: str, arguments: Sequence[str], *, is_module: bool) -> str | int:
    """Run a script as Python would, and give its exit status."""
    before = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ending:
        return 0 if ending.code is None else ending.code
    except Exception:  # noqa: BLE001 - shown, and what was compiled after it
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path[:] = before
    return 0
