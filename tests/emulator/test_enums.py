# SPDX-License-Identifier: Apache-2.0
"""The enumerations have PopTorch 3.4's members and values."""

from __future__ import annotations

import enum
import inspect
import pickle

import pytest

from ipufit.emulator import enums

# shared facts, options section 8: `python/enums.py` of PopTorch 3.4.0.
EXPECTED = {
    "MeanReductionStrategy": {"Running": 0, "Post": 1, "PostAndLoss": 2},
    "DataLoaderMode": {"Sync": 0, "Async": 1, "AsyncRebatched": 2},
    "SharingStrategy": {
        "SharedMemory": 0,
        "FileSystem": 1,
        "Fork": 2,
        "ForkServer": 3,
    },
    "OutputMode": {"Final": 0, "EveryN": 1, "All": 2, "Sum": 3, "Default": 4},
    "ConnectionType": {"Always": 0, "OnDemand": 1, "Never": 2},
    "HalfFloatCastingBehavior": {
        "FloatDowncastToHalf": 0,
        "HalfUpcastToFloat": 1,
        "Default": 2,
    },
    "ReductionType": {"Sum": 0, "Mean": 1, "NoReduction": 2},
    "SyncPattern": {"Full": 0, "SinglePipeline": 1, "ReplicaAndLadder": 2},
    "MatMulSerializationMode": {
        "InputChannels": "input_channels",
        "ReducingDim": "reducing_dim",
        "OutputChannels": "output_channels",
        "Disabled": "none",
    },
    "Liveness": {
        "AlwaysLive": 0,
        "OffChipAfterFwd": 1,
        "OffChipAfterFwdNoOverlap": 2,
        "OffChipAfterEachPhase": 3,
    },
    "OverlapMode": {
        "NoOverlap": "no_overlap",
        "OverlapAccumulationLoop": "overlap_accumulation_loop",
        "OverlapDeviceIterationLoop": "overlap_device_iteration_loop",
    },
    "AutoStage": {"SameAsIpu": 0, "AutoIncrement": 1},
    "MultiConvPlanType": {"Parallel": 0, "Serial": 1},
    "CommGroupType": {
        "All": 0,
        "Consecutive": 1,
        "Orthogonal": 2,
        "NoGrouping": 3,
    },
    "VariableRetrievalMode": {"OnePerGroup": 0, "AllReplicas": 2},
}


def test_the_module_holds_these_enumerations_and_no_other():
    classes = {
        name
        for name, value in vars(enums).items()
        if inspect.isclass(value) and issubclass(value, enum.Enum)
    }
    assert classes == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_members_have_poptorchs_values(name):
    members = getattr(enums, name).__members__
    assert {member: value.value for member, value in members.items()} == EXPECTED[name]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_only_the_two_with_string_values_are_not_integers(name):
    is_integer = issubclass(getattr(enums, name), enum.IntEnum)
    assert is_integer == (name not in {"MatMulSerializationMode", "OverlapMode"})


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_members_pickle(name):
    for member in getattr(enums, name):
        assert pickle.loads(pickle.dumps(member)) is member
