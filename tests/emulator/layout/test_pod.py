# SPDX-License-Identifier: Apache-2.0
"""Who holds which IPUs."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator._layout.pod import POD, Pod, lease


@pytest.fixture
def two_ipus(monkeypatch):
    gc.collect()  # leases of earlier tests
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "2")


def make_executor(replicas=1, options=None):
    options = (options or poptorch.Options()).replicationFactor(replicas)
    return poptorch.inferenceModel(nn.Identity(), options)


def run(executor, replicas=1):
    return executor(torch.ones(replicas)).tolist()


# The pod ----------------------------------------------------------------------


def test_ipus_are_held_until_they_are_released():
    pod = Pod(num_ipus=3)
    first = pod.acquire(2)
    with pytest.raises(poptorch.Error, match=r"Failed to acquire 2 IPU\(s\)"):
        pod.acquire(2)
    assert pod.acquire(1).isdisjoint(first)
    pod.release(first)
    assert pod.acquire(2) == first


def test_releasing_twice_is_harmless():
    pod = Pod(num_ipus=1)
    held = pod.acquire(1)
    pod.release(held)
    pod.release(held)
    assert pod.acquire(1) == held


def test_ipus_can_be_demanded_by_number():
    pod = Pod(num_ipus=4)
    assert pod.acquire(2, first=2) == {2, 3}
    for first in (3, 4):
        with pytest.raises(
            poptorch.Error, match=f"Failed to acquire device Id {first}"
        ):
            pod.acquire(1, first=first)
    assert pod.acquire(2) == {0, 1}


@pytest.mark.parametrize("text", ["0", "-1", "many", "", "1.5"])
def test_a_wrong_number_of_ipus_is_named(monkeypatch, text):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", text)
    with pytest.raises(poptorch.Error, match=f"IPUFIT_EMULATOR_IPUS={text!r}"):
        Pod().acquire(1)


def test_there_are_64_unless_somebody_says_otherwise(monkeypatch):
    monkeypatch.delenv("IPUFIT_EMULATOR_IPUS", raising=False)
    assert Pod().num_ipus == 64
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "3")
    assert Pod().num_ipus == 3


def test_a_lease_ends_once_and_with_its_owner():
    class Owner:
        pass

    owner = Owner()
    before = set(POD._held)
    end = lease(owner, 2)
    assert len(POD._held - before) == 2
    end()
    end()
    assert before == POD._held
    lease(owner, 2)
    del owner
    gc.collect()
    assert before == POD._held


# Executors --------------------------------------------------------------------


def test_programs_that_fit_run_side_by_side(two_ipus):
    first, second = make_executor(), make_executor()
    assert run(first) == run(second) == [1]
    with pytest.raises(poptorch.Error, match=r"Failed to acquire 1 IPU\(s\)"):
        run(make_executor())


@pytest.mark.parametrize("free", ["detachFromDevice", "destroy"])
def test_programs_take_turns(two_ipus, free):
    first, second = make_executor(2), make_executor(2)
    run(first, 2)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        run(second, 2)
    assert not second.isCompiled()
    assert not second.isAttachedToDevice()
    getattr(first, free)()
    assert run(second, 2) == [1, 1]
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        run(first, 2)


def test_an_executor_that_is_gone_holds_nothing(two_ipus):
    executor = make_executor(2)
    run(executor, 2)
    del executor
    gc.collect()
    run(make_executor(2), 2)


def test_an_executor_that_is_gone_but_not_collected_holds_nothing(two_ipus):
    executor = make_executor(2)
    run(executor, 2)
    executor.itself = executor  # only the collector can free it
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        del executor
        assert run(make_executor(2), 2) == [1, 1]
    finally:
        if was_enabled:
            gc.enable()


def test_an_inference_model_goes_with_its_last_reference(two_ipus):
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(2):  # a numbered IPU isn't looked for by the collector
            options = poptorch.Options().useIpuId(1)
            executor = poptorch.inferenceModel(nn.Linear(1, 1), options)
            executor(torch.ones(1, 1))
            del executor
    finally:
        if was_enabled:
            gc.enable()


def test_a_training_executor_that_is_gone_holds_nothing(two_ipus):
    class Model(nn.Linear):
        def forward(self, x):
            return poptorch.identity_loss(super().forward(x), "sum")

    model = Model(1, 1)
    poptorch.trainingModel(model, poptorch.Options().replicationFactor(2))(
        torch.ones(2, 1)
    )
    gc.collect()
    run(make_executor(2), 2)


def test_a_failed_attachment_can_be_tried_again(two_ipus):
    first = make_executor(2)
    run(first, 2)
    on_demand = poptorch.Options().connectionType(poptorch.ConnectionType.OnDemand)
    second = make_executor(2, on_demand)
    for attempt in (lambda: second.compile(torch.ones(2)), lambda: run(second, 2)):
        with pytest.raises(poptorch.Error, match="Failed to acquire"):
            attempt()
    assert second.isCompiled()
    first.destroy()
    assert run(second, 2) == [1, 1]


def test_two_models_pinned_to_one_ipu_exclude_each_other():
    pinned = [make_executor(1, poptorch.Options().useIpuId(7)) for _ in range(2)]
    run(pinned[0])
    with pytest.raises(poptorch.Error, match="Failed to acquire device Id 7"):
        pinned[1].compile(torch.ones(1))
    pinned[0].detachFromDevice()
    assert run(pinned[1]) == [1]


def test_an_attachment_that_fails_half_way_holds_nothing(two_ipus):
    class Model(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size))

        def forward(self, x):
            return poptorch.identity_loss(self.weight.sum() * x, "sum")

    def make(size):
        model = Model(size)
        sgd = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        return sgd, poptorch.trainingModel(model, optimizer=sgd)

    sgd, executor = make(2)
    executor(torch.ones(1))
    state = sgd.state_dict()
    executor.destroy()
    other_sgd, other = make(3)
    other_sgd.load_state_dict(state)
    before = set(POD._held)
    with pytest.raises(poptorch.Error, match="has shape"):
        other(torch.ones(1))
    assert before == POD._held
    assert not other.isAttachedToDevice()


def test_a_pod_that_is_too_small_says_so():
    with pytest.raises(
        poptorch.Error, match="There are only 3: use fewer stages or replicas"
    ):
        Pod(3).acquire(4)


# Waiting ----------------------------------------------------------------------


class Sleeper:
    """A sleep that takes no time; somebody frees the IPUs during the last one."""

    def __init__(self, naps):
        self.naps = naps
        self.seconds = []

    def __call__(self, seconds):
        self.seconds.append(seconds)
        if len(self.seconds) == self.naps:
            self.free()


def test_who_is_told_to_waits_for_ipus(monkeypatch, caplog):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    sleeper = Sleeper(naps=3)
    pod = Pod(num_ipus=2, sleep=sleeper)
    held = pod.acquire(2)
    sleeper.free = lambda: pod.release(held)
    assert pod.acquire(1) <= held
    assert sleeper.seconds == [15.0] * 3
    assert caplog.text.count("No IPU available, sleeping") == 3


@pytest.mark.parametrize(("count", "first"), [(3, None), (1, 2), (2, 1)])
def test_nobody_waits_for_ipus_that_are_not_there(monkeypatch, count, first):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    sleeper = Sleeper(naps=1)
    pod = Pod(num_ipus=2, sleep=sleeper)
    pod.acquire(1)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        pod.acquire(count, first)
    assert sleeper.seconds == []


@pytest.mark.parametrize("text", [None, "0"])
def test_others_do_not_wait(monkeypatch, text):
    if text is not None:
        monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", text)
    sleeper = Sleeper(naps=1)
    pod = Pod(num_ipus=1, sleep=sleeper)
    pod.acquire(1)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        pod.acquire(1)
    assert sleeper.seconds == []
