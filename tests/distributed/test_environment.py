# SPDX-License-Identifier: Apache-2.0
"""Variables of launchers become one record, or an error that says what is missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipufit.distributed import ALONE, ProcessInfo
from ipufit.distributed.environment import process_of
from ipufit.errors import ConfigError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
SLURM = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
POPRUN = {
    "POPDIST_NUM_TOTAL_REPLICAS": "8",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_REPLICA_INDEX_OFFSET": "6",
    "POPDIST_LOCAL_INSTANCE_INDEX": "1",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ALONE),
        (TORCHRUN, ProcessInfo(3, 8, 1, "torchrun")),
        (MPI, ProcessInfo(1, 2, 0, "mpirun")),
        (SLURM, ProcessInfo(2, 4, 0, "srun")),
        (POPRUN, ProcessInfo(3, 4, 1, "poprun", 2)),
        # PopRun starts processes with Open MPI, and torchrun often runs in SLURM.
        ({**MPI, **POPRUN}, ProcessInfo(3, 4, 1, "poprun", 2)),
        ({**SLURM, **TORCHRUN}, ProcessInfo(3, 8, 1, "torchrun")),
        # A batch script of SLURM is no task of a step.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ALONE),
    ],
)
def test_a_launcher_says_which_process_this_is(variables, expected):
    assert process_of(variables) == expected


@given(
    launcher=st.sampled_from(["torchrun", "PopRun", "mpirun"]),
    kept=st.integers(0, 2),
)
def test_half_of_a_launchers_variables_is_refused_with_the_others_names(launcher, kept):
    needed = {
        "torchrun": ["RANK", "WORLD_SIZE"],
        "mpirun": ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        "PopRun": [name for name in POPRUN if "LOCAL_INSTANCE" not in name],
    }[launcher]
    kept %= len(needed)
    source = {**TORCHRUN, **MPI, **POPRUN}
    with pytest.raises(ConfigError, match=f"{launcher}'s variable") as caught:
        process_of({needed[kept]: source[needed[kept]]})
    for name in needed:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({**TORCHRUN, "RANK": "eight"}, "RANK='eight' is not a whole number"),
        (
            {**TORCHRUN, "RANK": "8"},
            "RANK=8 doesn't fit WORLD_SIZE=8: .* 7 is the last",
        ),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is less than 1"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is less than 0"),
        ({**POPRUN, "POPDIST_NUM_LOCAL_REPLICAS": "3"}, "3 of 8 replicas"),
    ],
)
def test_values_that_do_not_fit_are_refused(variables, text):
    with pytest.raises(ConfigError, match=text):
        process_of(variables)


@given(count=st.integers(1, 64), each=st.integers(1, 16))
def test_the_replicas_of_a_launch_are_shared_equally(count, each):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPUFIT_REPLICAS", str(count * each))
        info = process_of({"RANK": "0", "WORLD_SIZE": str(count)})
        assert (info.replicas, info.total_replicas) == (each, count * each)
        patch.setenv("IPUFIT_REPLICAS", str(count * each + 1))
        if count > 1:
            with pytest.raises(ConfigError, match=f"Use a multiple of {count}"):
                process_of({"RANK": "0", "WORLD_SIZE": str(count)})
