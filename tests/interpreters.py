# SPDX-License-Identifier: Apache-2.0
"""Interpreters of their own for tests, which needn't wait for the import of torch.

`run_python("-c", code)` is `subprocess.run([sys.executable, "-c", code])` that keeps
what is printed, as text. One process that has imported torch and nothing else serves
all such tests of a session: it forks for each of them. A test of what torch itself does
when it is imported, or of Python's own start, starts an interpreter instead.
"""

import atexit
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path

_SERVER = "from tests.interpreters import serve; serve()"
_server = None


def run_python(*arguments, cwd=None, env=None, terminal=None):
    """Run Python with arguments: `-c` and code, `-m` and a module, or a script.

    What it prints goes to the path of a terminal, if one is given.
    """
    global _server
    if _server is None or _server.poll() is not None:
        _server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
            text=True,
        )
        atexit.register(_server.communicate)
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "arguments": [str(one) for one in arguments],
            "cwd": str(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "files": [
                terminal or os.path.join(folder, name) for name in ("out", "err")
            ],
        }
        _server.stdin.write(json.dumps(job) + "\n")
        _server.stdin.flush()
        code = int(_server.stdout.readline())
        out, err = (
            "" if terminal else Path(name).read_text("utf-8") for name in job["files"]
        )
    return subprocess.CompletedProcess(arguments, code, out, err)


def serve():
    """Fork for each line of standard input, and print the exit code."""
    import torch  # noqa: F401 - for all that come

    for name in ("tests.interpreters", "tests"):
        del sys.modules[name]
    path = [one for one in sys.path if one not in ("", os.getcwd())]
    gc.freeze()  # what is there stays, so that no child looks at it
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become(path=path, **json.loads(line))
        status = os.waitpid(pid, 0)[1]
        ended = os.WIFEXITED(status)
        code = os.WEXITSTATUS(status) if ended else -os.WTERMSIG(status)
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


def _become(path, arguments, cwd, env, files):
    """Be the process of one test, to its end."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in enumerate(files, start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    first, *rest = arguments
    sys.argv = [first, *rest[1:]] if first in ("-c", "-m") else [first, *rest]
    paths = [one for one in env.get("PYTHONPATH", "").split(os.pathsep) if one]
    folder = "" if first == "-c" else cwd if first == "-m" else os.path.dirname(first)
    sys.path[:] = [folder, *paths, *path]
    code = 0
    try:
        if first == "-c":
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        elif first == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:  # noqa: BLE001 - as an interpreter ends
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
