# SPDX-License-Identifier: Apache-2.0
"""Who holds which IPUs."""

import gc

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator.core.pod import held_ipus
from tests.emulator._models import Function


@pytest.fixture
def two_ipus(monkeypatch):
    gc.collect()  # leases of earlier tests
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "2")


def make_executor(replicas=1, options=None):
    options = (options or poptorch.Options()).replicationFactor(replicas)
    return poptorch.inferenceModel(nn.Identity(), options)


def run(executor, replicas=1):
    return executor(torch.ones(replicas)).tolist()


@pytest.mark.parametrize("text", ["0", "-1", "many", "", "1.5"])
def test_a_wrong_number_of_ipus_is_named(monkeypatch, text):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", text)
    with pytest.raises(poptorch.Error, match=f"IPUFIT_EMULATOR_IPUS={text!r}"):
        run(make_executor())


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


def test_two_models_pinned_to_one_ipu_exclude_each_other():
    pinned = [make_executor(1, poptorch.Options().useIpuId(7)) for _ in range(2)]
    run(pinned[0])
    with pytest.raises(poptorch.Error, match="Failed to acquire device Id 7"):
        pinned[1].compile(torch.ones(1))
    pinned[0].detachFromDevice()
    assert run(pinned[1]) == [1]


def test_an_attachment_that_fails_half_way_holds_nothing(two_ipus):
    def make(size):
        model = Function(
            lambda m, x: poptorch.identity_loss(m.weight.sum() * x, "sum"),
            weight=nn.Parameter(torch.ones(size)),
        )
        sgd = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        return sgd, poptorch.trainingModel(model, optimizer=sgd)

    sgd, executor = make(2)
    executor(torch.ones(1))
    state = sgd.state_dict()
    executor.destroy()
    other_sgd, other = make(3)
    other_sgd.load_state_dict(state)
    before = set(held_ipus)
    with pytest.raises(poptorch.Error, match="has shape"):
        other(torch.ones(1))
    assert before == held_ipus
    assert not other.isAttachedToDevice()


def test_a_pod_that_is_too_small_says_so(two_ipus):
    with pytest.raises(
        poptorch.Error, match="There are only 2: use fewer stages or replicas"
    ):
        run(make_executor(4), 4)


# Waiting ----------------------------------------------------------------------


@pytest.fixture
def naps(monkeypatch):
    """Seconds that were slept; `naps.free` is called during the third time."""

    class Naps(list):
        free = None

        def append(self, seconds):
            super().append(seconds)
            if len(self) == 3:
                self.free()

    naps = Naps()
    monkeypatch.setattr("time.sleep", naps.append)
    return naps


def test_who_is_told_to_waits_for_ipus(two_ipus, monkeypatch, caplog, naps):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    first = make_executor(2)
    run(first, 2)
    naps.free = first.detachFromDevice
    assert run(make_executor()) == [1]
    assert naps == [15.0] * 3
    assert caplog.text.count("No IPU available, sleeping") == 3


@pytest.mark.parametrize(("replicas", "first"), [(4, None), (1, 2), (2, 1)])
def test_nobody_waits_for_ipus_that_are_not_there(
    two_ipus, monkeypatch, naps, replicas, first
):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    holder = make_executor()
    run(holder)
    options = poptorch.Options()
    if first is not None:
        options.useIpuId(first)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        run(make_executor(replicas, options), replicas)
    assert naps == []
