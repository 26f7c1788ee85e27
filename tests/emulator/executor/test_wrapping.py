# SPDX-License-Identifier: Apache-2.0
"""The user's module while a training executor holds it.

Random sequences of such steps were compared with PopTorch 3.4's own Python front end;
what is expected here was seen there (`python/_impl.py`, `python/_poplar_executor.py`).
"""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch


class Model(nn.Module):
    """At module level: its pickles name it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.tied = self.fc
        self.top = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        self.steps += 1
        return poptorch.identity_loss(self.tied(self.fc(x)) * self.top, "sum")


@pytest.fixture
def trained(monkeypatch):
    """A module whose host copy is stale, its executor, and the copies made so far."""
    torch.manual_seed(0)
    model = Model()
    executor = poptorch.trainingModel(
        model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1)
    )
    executor(torch.ones(1, 2))
    copies = []
    original = executor._device.download
    monkeypatch.setattr(
        executor._device, "download", lambda: (copies.append(1), original())
    )
    return model, executor, copies


def test_the_class_says_whose_it_is(trained):
    model, *_ = trained
    assert type(model).__name__ == "PoptorchModel"
    assert isinstance(model, Model)
    assert isinstance(model.top, nn.Parameter)
    assert type(model.top).__name__ == "PoptorchParameter"
    assert type(model.steps).__name__ == "PoptorchBuffer"
    assert is_wrapped(model)
    assert not is_wrapped(model.fc)


READS = {
    "parameters": lambda model: list(model.parameters()),
    "buffers": lambda model: list(model.buffers()),
    "state_dict": lambda model: model.state_dict(),
    "parameter": lambda model: model.top + 1,
    "inner parameter": lambda model: model.fc.weight.sum(),
    "buffer": lambda model: model.steps.item(),
    "forward": lambda model: model(torch.ones(1, 2)),
    "deepcopy": lambda model: copy.deepcopy(model.top),
    "pickle": pickle.dumps,
    "save": lambda model: torch.save(model, io.BytesIO()),
}


@pytest.mark.parametrize("name", READS)
def test_reading_fetches_the_weights_once(trained, name):
    model, executor, copies = trained
    assert executor._dirty_host_weights
    for _ in range(3):
        READS[name](model)
    assert len(copies) == 1
    executor(torch.ones(1, 2))
    READS[name](model)
    READS["state_dict"](model)
    assert len(copies) == 2


def test_state_dicts_are_plain_and_load_elsewhere(trained):
    model, *_ = trained
    for keep_vars in (False, True):
        state = model.state_dict(keep_vars=keep_vars)
        assert list(state) == list(Model().state_dict())
        allowed = (torch.Tensor, nn.Parameter)
        assert {type(value) for value in state.values()} <= set(allowed)
        Model().load_state_dict(state)
        assert not hasattr(state, "_metadata")
    assert state["fc.weight"] is state["tied.weight"]
    assert isinstance(state["top"], nn.Parameter)
    assert model.state_dict(prefix="p.")["p.top"].item() == model.top.item()


def is_wrapped(value):
    return type(value).__name__.startswith("Poptorch")


def is_plain(value):
    return type(value) in (torch.Tensor, nn.Parameter)


def assert_plain_twin(twin, model):
    assert type(twin) is Model
    assert all(map(is_plain, [*twin.parameters(), *twin.buffers()]))
    assert twin.tied is twin.fc
    for name, value in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value)
    twin.top.data.fill_(100)
    assert model.top.item() != 100
    assert twin.top.requires_grad
    assert not twin.steps.requires_grad


def test_modules_with_buffers_cannot_be_copied_deeply(trained):
    model, *_ = trained
    for item in (model, model.steps):
        with pytest.raises(RuntimeError, match="__deepcopy__"):
            copy.deepcopy(item)
    assert is_wrapped(model)
    assert is_wrapped(model.steps)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_unpickled_module_is_plain(trained, protocol):
    model, *_ = trained
    data = pickle.dumps(model, protocol)
    assert_plain_twin(pickle.loads(data), model)
    assert is_wrapped(model)


def test_destroying_unwraps(trained):
    model, executor, _ = trained
    top = model.top
    executor.destroy()
    assert type(model) is Model
    assert model.top is top
    assert type(top) is nn.Parameter
    assert type(model.steps) is torch.Tensor
    assert top.item() != 1
    assert not hasattr(model, "copyWeightsToHostIfNeeded")
    poptorch.trainingModel(model)


def test_an_executor_that_is_gone_takes_what_it_learnt_with_it():
    model = Model()
    poptorch.trainingModel(model)(torch.ones(1, 2))
    gc.collect()
    assert model.top.item() == 1
    assert model._host_weights_version is None
    assert not model.copyWeightsToHostIfNeeded()
    assert len(list(model.parameters())) == 3


def test_buffers_of_other_classes_are_refused():
    class Special(torch.Tensor):
        pass

    model = nn.Linear(1, 1)
    model.register_buffer("special", torch.ones(1).as_subclass(Special))
    message = r"All buffers must be an instance of torch\.Tensor \(Got .*Special"
    with pytest.raises(poptorch.Error, match=message):
        poptorch.trainingModel(model)
    assert type(model) is nn.Linear
    assert type(model.weight).__name__ == "PoptorchParameter"  # of no executor


# What is remembered after `destroy()` --------------------------------------------


def normed():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = normed()

    def forward(self, x):
        return poptorch.identity_loss(self.net(x), "sum")


X = torch.ones(4, 2)


def test_an_inference_compilation_brings_the_destroyed_wrappers_back():
    model = Trained()
    executor = poptorch.trainingModel(model)
    executor(X)
    executor.destroy()
    assert all(map(is_plain, [*model.parameters(), *model.buffers()]))
    inference = poptorch.inferenceModel(model)
    assert all(map(is_plain, [*model.parameters(), *model.buffers()]))
    inference(X)
    assert type(model) is Trained
    assert all(map(is_wrapped, [*model.parameters(), *model.buffers()]))
    message = r"All buffers must be an instance of torch\.Tensor \(Got .*PoptorchBuffer"
    with pytest.raises(poptorch.Error, match=message):
        poptorch.trainingModel(model)


def test_a_module_whose_compilation_failed_stays_wrapped():
    model = Trained()
    executor = poptorch.trainingModel(model)
    with pytest.raises(RuntimeError):
        executor(torch.ones(4, 3))
    executor.destroy()  # not compiled: does nothing
    assert is_wrapped(model)
    del executor
    gc.collect()
    model.destroy()
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.trainingModel(model)


def test_forward_sees_plain_classes():
    seen = []

    class Looks(Trained):
        def forward(self, x):
            weight, mean = self.net[0].weight, self.net[1].running_mean
            seen.extend([type(self), type(weight), type(mean)])
            return super().forward(x)

    model = Looks()
    executor = poptorch.trainingModel(model)
    poptorch.inferenceModel(model)(X)
    executor(X)
    assert seen == [Looks, nn.Parameter, torch.Tensor] * 2
    assert is_wrapped(model)
    assert is_wrapped(model.net[1].running_mean)


def test_a_parameter_of_the_top_is_shown_as_no_tensor(trained):
    model, executor, _ = trained
    view = executor.top
    assert not isinstance(view, torch.Tensor)
    assert view.shape == (1,)
    assert view.item() == model.top.item()
    with pytest.raises(TypeError):
        torch.add(view, 1)
    assert executor.fc.weight is model.fc.weight
