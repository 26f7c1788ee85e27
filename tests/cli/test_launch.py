# SPDX-License-Identifier: Apache-2.0
"""`ipufit launch` starts processes, and is their launcher from then on.

torchrun itself isn't started every day.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import printed_lines

ROOT = Path(__file__).parent.parent.parent
SECONDS = 240  # far more than a loaded machine needs

SUMMING = """
import os, random, sys
import torch
import ipufit
from ipufit.distributed import processes

class Drawing(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x + random.random() + torch.rand(1))

network = torch.nn.Sequential(Drawing(2, 4), torch.nn.BatchNorm1d(4))
model = ipufit.IPUModel(network)  # which lives to the end
model.compile("sgd", "mse")
torch.manual_seed(0)  # the same in both processes
x, y = torch.randn(33, 2), torch.randn(33, 4)
model.fit(x, y, batch_size=16, validation_data=(x, y), verbose=0)
total = processes().summed(torch.tensor([float(os.environ["RANK"]) + 1]))
print("total", total.item(), os.environ["IPUFIT_REPLICAS"], sys.argv[1:])
print(f"threads {os.environ['OMP_NUM_THREADS']}", file=sys.stderr)
"""


LAUNCH = sys.executable, "-m", "ipufit", "launch", "--processes", "2", "--launcher"


@pytest.mark.slow
def test_two_processes_sum_and_print_once(tmp_path):
    (tmp_path / "train.py").write_text(SUMMING, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    environment.pop("OMP_NUM_THREADS", None)
    arguments = "--replicas", "4", "train.py", "a b", "--", "--replicas"
    done = subprocess.run(
        [*LAUNCH, "torchrun", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    out, err = done.stdout, done.stderr
    assert done.returncode == 0, err
    assert printed_lines(out) == ["total 3.0 4 ['a b', '--', '--replicas']"]
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert err.count(f"threads {threads}") == 2  # lines of two may mix
    assert err.startswith("ipufit: IPUFIT_REPLICAS=4 OMP_NUM_THREADS=")
    assert "Setting OMP_NUM_THREADS" not in err
    for said, times in {
        "Running on this host": 1,
        "DroppedRowsWarning: ": 1,
        "enableExecutableCaching isn't set": 1,
        "No device set in torch.rand()": 1,
        "BakedInWarning: ": 2,  # of the training and of the validation program
    }.items():
        assert err.count(said) == times, (said, err)


def test_poprun_takes_the_place_of_the_command(tmp_path):
    """A stand-in for poprun shows what it gets, and its exit code is the command's."""
    (tmp_path / "train.py").touch()
    poprun = tmp_path / "poprun"
    poprun.write_text('#!/bin/sh\necho "$$ $@"\nexit 7\n', encoding="utf-8")
    poprun.chmod(0o755)
    process = subprocess.Popen(
        [*LAUNCH, "poprun", "--options=-vv", "train.py", "a"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{tmp_path}:/usr/bin:/bin",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 7
    assert out == (
        f"{process.pid} --num-instances=2 --num-replicas=2 "
        f"-vv {sys.executable} -u train.py a\n"
    )
    assert "poprun --num-instances=2" in err


def test_an_error_of_all_processes_is_shown_once(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys, torch\n"
        "from ipufit import IPUModel\n"
        "IPUModel(torch.nn.Linear(2, 1))\n"
        "if sys.argv[1:] == ['each']:\n"
        "    raise ValueError(f'of process {os.environ[\"RANK\"]}')\n"
        "raise ValueError('of all')\n"
    )

    def errors_of(*arguments):
        done = subprocess.run(
            [*LAUNCH, "torchrun", str(script), *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 1
        return done.stderr

    assert (
        errors_of().count("Traceback") == errors_of().count("ValueError: of all") == 1
    )
    assert re.search(r"ValueError: of process [01]\n", errors_of("each"))


@pytest.mark.parametrize("died", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_error_of_a_script_is_the_last_thing_on_the_screen(tmp_path, died):
    script = tmp_path / "fails.py"
    ending = "os.kill(os.getpid(), 9)" if died else "raise ValueError('bad data')"
    script.write_text(
        "import os, time\n"
        f"if os.environ['RANK'] == '1':\n    {ending}\n"
        "time.sleep(60)\n"
    )
    done = subprocess.run(
        [*LAUNCH, "torchrun", str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 1
    first, *said = done.stderr.splitlines()
    assert first.startswith("ipufit: ")
    if died:
        assert said == ["ipufit: process 1 was ended by SIGKILL"]
    else:
        assert said[0].startswith("Traceback")
        assert said[-1] == "ValueError: bad data"
