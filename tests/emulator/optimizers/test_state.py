# SPDX-License-Identifier: Apache-2.0
"""The host's optimiser object, its device counterpart, and when they meet."""

import gc
import logging
import weakref

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import optim


class Model(nn.Module):
    """The gradient of its weight is its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return poptorch.identity_loss(self.weight * x, reduction="sum")


def make(make_optimizer, options=None):
    model = Model()
    optimizer = make_optimizer(model.parameters())
    return model, optimizer, poptorch.trainingModel(model, options, optimizer)


def plain(params):
    return optim.SGD(params, lr=0.5)


def with_momentum(params):
    return optim.SGD(params, lr=1.0, momentum=0.5)


def torch_momentum(params):
    return torch.optim.SGD(params, lr=1.0, momentum=0.5)


def move(executor, model, x=1.0):
    """By how much one update moves the weight."""
    before = model.weight.item()
    executor(torch.tensor([x]))
    return before - model.weight.item()


MOVES = {
    "Writing weights from host to IPU memory": "upload",
    "Writing weights from IPU to host": "download",
    "Writing optimiser state tensors from IPU to host.": "read_state",
    "Writing optimiser state tensors from host to IPU memory.": "write_state",
}


@pytest.fixture
def moves(caplog):
    """Transfers of weights and of optimizer state since the last time, in order."""
    caplog.set_level(logging.DEBUG, "poptorch::python")

    def moves():
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [MOVES[text] for text in texts if text in MOVES]

    return moves


# Values ------------------------------------------------------------------------


@pytest.mark.parametrize("make_optimizer", [plain, torch_momentum])
def test_a_changed_rate_needs_set_optimizer(make_optimizer):
    model, optimizer, executor = make(make_optimizer)
    lr = optimizer.param_groups[0]["lr"]
    assert move(executor, model) == lr
    optimizer.param_groups[0]["lr"] = 0.0
    assert move(executor, model) >= lr
    executor.setOptimizer(optimizer)
    assert move(executor, model) == 0


@pytest.mark.parametrize(("is_sent", "rate"), [(True, 0.125), (False, 0.5)])
def test_a_rate_set_while_detached_is_used_if_sent(is_sent, rate):
    model, optimizer, executor = make(plain)
    move(executor, model)
    executor.detachFromDevice()
    optimizer.param_groups[0]["lr"] = 0.125
    if is_sent:
        executor.setOptimizer(optimizer)
    assert move(executor, model) == rate


def test_weights_of_others_are_refused():
    model = Model()
    optimizer = plain([*model.parameters(), nn.Parameter(torch.zeros(3))])
    executor = poptorch.trainingModel(model, optimizer=optimizer)
    with pytest.raises(KeyError, match="Parameter 1 of the optimizer's group 0"):
        executor(torch.ones(1))
    assert not executor.isCompiled()


def test_unsupported_optimizers_are_refused_when_wrapping():
    model = Model()
    with pytest.raises(AssertionError, match="Unsupported optimizer type"):
        poptorch.trainingModel(model, None, torch.optim.Adagrad(model.parameters()))
    assert type(model) is Model


# State -----------------------------------------------------------------------------


@pytest.mark.parametrize("upload", ["copyWeightsToDevice", "load_state_dict"])
@pytest.mark.parametrize(
    ("make_optimizer", "expected"), [(with_momentum, 1.5), (torch_momentum, 1.0)]
)
def test_uploading_weights_resets_only_what_torch_does_not_read_back(
    upload, make_optimizer, expected
):
    model, _, executor = make(make_optimizer)
    move(executor, model)
    arguments = (model.state_dict(),) if upload == "load_state_dict" else ()
    getattr(executor, upload)(*arguments)
    assert move(executor, model) == expected


def test_a_new_optimizer_object_keeps_the_devices_state():
    model, _, executor = make(with_momentum)
    move(executor, model)
    executor.setOptimizer(with_momentum(model.parameters()))
    assert move(executor, model) == 1.5


def test_the_state_dict_follows_the_device():
    _, optimizer, executor = make(with_momentum)
    assert optimizer.state_dict()["ipu_state"] is None
    executor.compile(torch.ones(1))
    assert optimizer.state_dict()["ipu_state"]["Accl1___weight"].item() == 0
    executor(torch.ones(1))
    state = optimizer.state_dict()
    assert state["ipu_state"]["Accl1___weight"].item() == 1
    assert all(key.endswith("___specific___weight") for key in state["ipu_param"])
    assert state["ipu_param"]
    executor(torch.ones(1))
    executor.detachFromDevice()
    assert optimizer.state_dict()["ipu_state"]["Accl1___weight"].item() == 1.5


# Whose state is newer (PopTorch, `optim.py` and `_poplar_executor.py`) -------------


def flags(optimizer):
    return optimizer.ipu_state_is_dirty, optimizer.host_state_is_dirty


def test_flags_say_which_side_is_newer(moves):
    _, optimizer, executor = make(with_momentum)
    assert flags(optimizer) == (False, False)
    executor.compile(torch.ones(1))
    assert moves() == ["upload"]
    assert flags(optimizer) == (False, True)
    state = optimizer.state_dict()
    assert flags(optimizer) == (False, False)
    executor(torch.ones(1))
    assert flags(optimizer) == (False, True)
    optimizer.load_state_dict(state)
    assert flags(optimizer) == (True, False)
    executor(torch.ones(1))
    assert flags(optimizer) == (False, True)
    assert moves() == ["read_state", "download", "write_state"]


@pytest.mark.parametrize(
    "leave", ["copyWeightsToDevice", "detachFromDevice", "destroy"]
)
def test_a_stale_state_is_read_before_weights_are_uploaded_or_gone(leave, moves):
    _, optimizer, executor = make(with_momentum)
    executor(torch.ones(1))
    executor.copyWeightsToHost()
    moves()
    getattr(executor, leave)()
    uploads = ["upload"] if leave == "copyWeightsToDevice" else []
    assert moves() == ["read_state", *uploads]
    assert flags(optimizer) == (False, False)


def test_a_state_of_torchs_optimizer_is_never_read(moves):
    _, _, executor = make(torch_momentum)
    executor(torch.ones(1))
    executor.copyWeightsToHost()
    executor.copyWeightsToDevice()
    executor.detachFromDevice()
    assert moves() == ["upload", "download", "upload"]


def test_the_device_part_of_a_state_can_be_set_alone():
    model, optimizer, executor = make(with_momentum)
    move(executor, model)
    saved = optimizer.state_dict()
    for _ in range(3):
        move(executor, model)
    saved["param_groups"][0]["lr"] = 0.0
    optimizer.set_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert move(executor, model) == 1.5


def test_a_state_of_a_model_that_is_not_compiled_cannot_be_read():
    model, optimizer, executor = make(with_momentum)
    executor(torch.ones(1))
    other = poptorch.trainingModel(Model(), optimizer=optimizer)
    with pytest.raises(poptorch.Error, match="Model has not been compiled"):
        optimizer.state_dict()
    assert executor.model is model
    assert other.isCompiled() is False


def test_two_executors_cannot_both_have_the_newest_state():
    model, _, executor = make(with_momentum)
    executor(torch.ones(1))
    _, other_optimizer, other = make(with_momentum)
    other(torch.ones(1))
    with pytest.raises(AssertionError, match="Both host and ipu states cannot be"):
        executor.setOptimizer(other_optimizer)
    assert executor.model is model


def test_a_detached_executor_saves_its_state_though_another_has_the_optimizer():
    model, optimizer, training = make(with_momentum)
    move(training, model)
    poptorch.trainingModel(Model(), optimizer=optimizer)  # and isn't compiled
    training.detachFromDevice()
    assert optimizer.state_dict()["ipu_state"]["Accl1___weight"].item() == 1.0


def test_an_optimizer_keeps_its_executor():
    """So its IPUs stay taken while somebody holds the optimizer."""
    _, optimizer, executor = make(with_momentum)
    executor(torch.ones(1))
    reference = weakref.ref(executor)
    del executor
    gc.collect()
    assert reference() is not None
    del optimizer
    gc.collect()
    assert reference() is None
