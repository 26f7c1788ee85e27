# SPDX-License-Identifier: Apache-2.0
"""Where processes meet, if their launcher doesn't say it as torch wants to hear it."""

from __future__ import annotations

import pytest

from ipufit.distributed import ProcessInfo
from ipufit.distributed.group import address
from ipufit.errors import ConfigError


def info(launcher):
    return ProcessInfo(1, 4, 1, launcher)


@pytest.mark.parametrize(
    ("launcher", "variables", "expected"),
    [
        ("mpirun", {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ("127.0.0.1", 29500)),
        ("poprun", {"MASTER_ADDR": "pod1", "MASTER_PORT": "7"}, ("pod1", 7)),
        ("config", {"MASTER_ADDR": "pod1", "MASTER_PORT": "7"}, ("pod1", 7)),
        (
            "srun",
            {"SLURM_STEP_NODELIST": "node[03-05,9],other", "SLURM_JOB_ID": "123456"},
            ("node03", 18456),
        ),
        (
            "srun",
            {"SLURM_STEP_NODELIST": "alpha,beta", "SLURM_JOB_ID": "1"},
            ("alpha", 15001),
        ),
    ],
)
def test_process_0_is_found(launcher, variables, expected):
    assert address(info(launcher), variables) == expected


@pytest.mark.parametrize(
    ("launcher", "variables", "missing"),
    [
        ("config", {}, "MASTER_ADDR and MASTER_PORT"),
        ("config", {"MASTER_ADDR": "pod1"}, "set MASTER_PORT"),
        # Two hosts: nothing says which is the first.
        ("poprun", {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "set MASTER_ADDR"),
    ],
)
def test_what_is_missing_is_named(launcher, variables, missing):
    with pytest.raises(ConfigError, match=missing):
        address(info(launcher), variables)


def test_a_port_is_a_number():
    with pytest.raises(ConfigError, match="MASTER_PORT='x'"):
        address(info("config"), {"MASTER_ADDR": "pod1", "MASTER_PORT": "x"})
