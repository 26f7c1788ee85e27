# SPDX-License-Identifier: Apache-2.0
"""Weights are copied to the host and to the device when they should be."""

import types

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import ONE, Function, on_device, wrap

pytestmark = pytest.mark.looped


@pytest.fixture
def transfers(monkeypatch):
    """Every copy of weights between host and device, in order."""
    from ipufit.emulator.core.device import Device

    seen = []
    for name in ("download", "upload"):
        original = getattr(Device, name)

        def spy(self, name=name, original=original):
            seen.append(name)
            original(self)

        monkeypatch.setattr(Device, name, spy)
    return seen


def test_weights_are_kept_apart():
    model, executor = wrap()
    executor(ONE)
    with torch.no_grad():
        model.weight.fill_(10)  # fetches first
    assert on_device(executor) == -1
    executor.copyWeightsToDevice()
    assert on_device(executor) == 10


@pytest.mark.parametrize("method", ["detachFromDevice", "destroy"])
def test_leaving_the_device_copies_if_stale(method, transfers):
    model, executor = wrap()
    executor(ONE)
    getattr(executor, method)()
    assert transfers == ["download"]
    assert model.weight.item() == -1


@pytest.mark.parametrize(
    "read",
    [
        lambda model, _: list(model.parameters()),
        lambda model, _: model.weight.data,
        lambda model, _: model.state_dict(),
        lambda model, _: model(ONE),
        lambda _, inference: inference(ONE),
    ],
)
def test_a_replaced_copy_to_the_host_is_the_implicit_one(read):
    model, executor = wrap()
    inference = poptorch.inferenceModel(model)
    counted, copy = [], executor.copyWeightsToHost

    def counting(self):
        counted.append(self)
        copy()

    executor.copyWeightsToHost = types.MethodType(counting, executor)
    executor(ONE)
    assert counted == []
    for _ in range(2):  # the second reading finds them up to date
        read(model, inference)
        assert counted == [executor]
    executor(ONE)
    executor.destroy()
    assert len(counted) == 2


def test_a_host_edit_of_stale_weights_is_overwritten_by_the_fetch():
    model, executor = wrap()
    memory = model.weight.data
    executor(ONE)
    memory.fill_(10)  # an alias: it fetches nothing
    assert model.weight.item() == -1
    assert on_device(executor) == -1


def test_loading_into_the_executor_uploads(transfers):
    model, executor = wrap()
    executor(ONE)
    state = {"weight": torch.tensor([7.0]), "calls": torch.tensor([3.0])}
    result = executor.load_state_dict(state)
    assert result.missing_keys == []
    assert "upload" in transfers
    assert on_device(executor) == 7
    assert model.calls.item() == 4
    with pytest.raises(RuntimeError, match="Missing key"):
        executor.load_state_dict({})
    assert executor.load_state_dict({}, strict=False).missing_keys == [*state]


def test_what_inference_writes_into_buffers_comes_back_on_request_only():
    def forward(self, x):
        self.calls += 1
        return x + self.calls

    model = Function(forward, buffers={"calls": torch.zeros(1)})
    executor = poptorch.inferenceModel(model)
    assert [executor(torch.zeros(1)).item() for _ in range(2)] == [1, 2]
    assert model.calls.item() == 0
    executor.copyWeightsToHost()
    assert model.calls.item() == 2
    executor(torch.zeros(1))
    executor.detachFromDevice()
    assert model.calls.item() == 2
    assert executor(torch.zeros(1)).item() == 3  # from the host's 2 again


def test_double_precision_weights_come_back_in_double_precision():
    model = nn.Linear(1, 1).double()
    model.forward = lambda x: poptorch.identity_loss(x * model.weight[0], "sum")
    executor = poptorch.trainingModel(model)
    executor(torch.ones(1))
    assert model.weight.dtype == torch.float64


# From a training executor to an inference executor of the same module ---------------
# (PopTorch, `python/_poplar_executor.py`, `__call__`)


def test_each_fetch_from_the_trainer_is_uploaded_once(transfers):
    model, training = wrap()
    inference = poptorch.inferenceModel(model)
    inference(ONE)
    for step in (1, 2):
        training(ONE)
        transfers.clear()
        assert inference(ONE)[1].item() == -step
        assert transfers == ["download", "upload"]
        inference(ONE)
        assert transfers == ["download", "upload"]


@pytest.mark.parametrize("method", ["copyWeightsToHost", "copyWeightsToDevice"])
def test_a_detached_model_copies_nothing(method, transfers):
    """A Poplar engine runs on a device only (PopART, `devicex.cpp`)."""
    _, executor = wrap()
    executor(ONE)
    executor.detachFromDevice()
    transfers.clear()
    with pytest.raises(poptorch.Error, match=f"{method}.* needs a device"):
        getattr(executor, method)()
    assert transfers == []


# Other tensors in the places of the weights -----------------------------------------
# (PopTorch, `copyWeightsToDevice`: it names the module's parameters each time)


def replaced(model, value):
    model.weight = nn.Parameter(torch.full((1,), value))


def test_weights_are_looked_up_by_name_at_each_copy():
    model, executor = wrap()
    executor(ONE)
    replaced(model, 10.0)
    assert on_device(executor) == -1
    executor.copyWeightsToDevice()
    assert on_device(executor) == 10
    executor(ONE)
    executor.copyWeightsToHost()
    assert model.weight.item() == 9


def test_a_weight_that_is_gone_is_an_error():
    model, executor = wrap()
    executor(ONE)
    del model.weight
    with pytest.raises(poptorch.Error, match="compiled with weight, which"):
        executor.copyWeightsToDevice()


def test_a_weight_that_no_operator_reads_is_never_fetched():
    """PopTorch removes such parameters (`LowerToPopart.cpp`, `lowerParameters`)."""

    def forward(self, x):
        _ = self.unread + 1.0
        return poptorch.identity_loss(self.layer(x), reduction="mean")

    module = Function(
        forward,
        buffers={"unread": torch.zeros(1)},
        layer=torch.nn.Linear(2, 1),
        unused=torch.nn.Parameter(torch.zeros(1)),
    )
    _, training = wrap(module, lr=0.1)
    before = module.layer.weight.detach().clone()
    training(torch.ones(1, 2))
    module.unread.data.fill_(3.0)
    module.unused.data.fill_(4.0)
    training(torch.ones(1, 2))
    training.copyWeightsToHost()
    assert not torch.equal(module.layer.weight, before)
    assert (module.unread.item(), module.unused.item()) == (3.0, 4.0)


# Buffers that are uploaded by themselves --------------------------------------------


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("first", torch.ones(1))
        self.register_buffer("second", torch.ones(1))
        self.register_buffer("count", torch.ones(1, dtype=torch.int32))

    def forward(self, x):
        total = self.weight * x + self.first + self.second + self.count
        return poptorch.identity_loss(total, reduction="sum")


def infer(*names):
    options = poptorch.Options().updatableNamedBuffers(list(names))
    return poptorch.inferenceModel(Sum(), options)


def test_every_replica_gets_the_new_value():
    options = poptorch.Options().replicationFactor(2).broadcastBuffers(False)
    options.updatableNamedBuffers(["total"])

    def forward(self, x):
        self.total += x
        return self.total * 1

    executor = poptorch.inferenceModel(
        Function(forward, buffers={"total": torch.zeros(1)}), options
    )
    assert executor(torch.tensor([1.0, 2.0])).tolist() == [1, 2]
    executor.total.fill_(10)
    executor.copyNamedBuffersToDevice()
    assert executor(torch.tensor([1.0, 2.0])).tolist() == [11, 12]


def test_what_training_has_learnt_is_not_fetched_afterwards():
    model = Sum()
    options = poptorch.Options().updatableNamedBuffers(["first"])
    _, training = wrap(model, options)
    training(ONE)
    training.copyNamedBuffersToDevice()
    assert model.weight.item() == 1
    assert training(ONE).item() == 3  # the device has gone on from its own weight
    assert model.weight.item() == -1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("third", "buffers are: first, second, count"),
        ("weight", "buffers are: first"),
        ("count", "only floating-point buffers"),
    ],
)
def test_names_are_those_of_buffers_that_can_be_uploaded(name, message):
    executor = infer(name)
    with pytest.raises(poptorch.Error, match=message):
        executor(ONE)
    assert not executor.isCompiled()
