# SPDX-License-Identifier: Apache-2.0
"""Compile, attach, detach, destroy, and when weights move."""

from __future__ import annotations

import copy
import datetime

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import ConnectionType

NOT_COMPILED = "Model has not been compiled or has been destroyed"


class Model(nn.Module):
    """Each update of plain SGD with rate 1 subtracts the input from the weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        loss = poptorch.identity_loss(self.weight * x, reduction="sum")
        return loss, self.weight * 1


ONE = torch.ones(1)


def wrap(model=None, options=None):
    model = Model() if model is None else model
    sgd = poptorch.optim.SGD(model.parameters(), lr=1.0)
    return model, poptorch.trainingModel(model, options, sgd)


def on_device(executor):
    """The weight that the device has now, before it is trained on."""
    return executor(torch.zeros(1))[1].item()


@pytest.fixture
def transfers(monkeypatch):
    """Every copy of weights between host and device, in order."""
    from ipufit.emulator._attachment import Attachment

    seen = []
    for name in ("download", "upload"):
        original = getattr(Attachment, name)

        def spy(self, name=name, original=original):
            seen.append(name)
            original(self)

        monkeypatch.setattr(Attachment, name, spy)
    return seen


# Options ----------------------------------------------------------------------


def test_options_are_cloned_and_both_are_frozen():
    options = poptorch.Options().deviceIterations(3)
    executor = poptorch.inferenceModel(nn.Identity(), options)
    assert executor.options is not options
    assert executor.options.device_iterations == 3
    for frozen in (options, executor.options):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            frozen.deviceIterations(4)


def test_options_are_options():
    with pytest.raises(poptorch.Error, match="Invalid type: 'options' is of type"):
        poptorch.inferenceModel(nn.Identity(), {"deviceIterations": 2})


def test_options_serve_several_models():
    options = poptorch.Options()
    wrap(options=options)
    poptorch.inferenceModel(nn.Identity(), options)(ONE)


@pytest.mark.parametrize(
    ("mode", "training", "expected"),
    [
        (None, True, poptorch.OutputMode.Final),
        (None, False, poptorch.OutputMode.All),
        (poptorch.OutputMode.Sum, True, poptorch.OutputMode.Sum),
        (poptorch.OutputMode.Final, False, poptorch.OutputMode.Final),
    ],
)
def test_the_default_output_mode_depends_on_the_kind(mode, training, expected):
    options = poptorch.Options()
    if mode is not None:
        options.outputMode(mode)
    executor = (
        wrap(options=options)[1]
        if training
        else poptorch.inferenceModel(nn.Identity(), options)
    )
    assert executor.options.output_mode == expected.value


# Compile ----------------------------------------------------------------------


def test_compiling_runs_nothing_and_attaches():
    model, executor = wrap()
    assert not executor.isCompiled()
    assert not executor.isAttachedToDevice()
    executor.compile(ONE)
    assert executor.isCompiled()
    assert executor.isAttachedToDevice()
    assert model.weight.item() == 0
    assert model.calls.item() == 0


def test_compiling_twice_is_ignored_with_a_warning(caplog):
    _, executor = wrap()
    executor.compile(ONE)
    assert caplog.text == ""
    executor.compile(torch.ones(7))
    assert "Call to compile() ignored" in caplog.text
    executor(ONE)


def test_a_failed_compilation_leaves_nothing():
    executor = poptorch.trainingModel(nn.Linear(1, 1))
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        executor.compile(torch.ones(1, 1))
    assert not executor.isCompiled()
    with pytest.raises(poptorch.Error, match=NOT_COMPILED):
        executor.attachToDevice()


def test_on_demand_attaches_with_the_first_call():
    on_demand = poptorch.Options().connectionType(ConnectionType.OnDemand)
    _, executor = wrap(options=on_demand)
    executor.compile(ONE)
    assert executor.isCompiled()
    assert not executor.isAttachedToDevice()
    executor(ONE)
    assert executor.isAttachedToDevice()


def test_offline_models_only_compile():
    _, executor = wrap(options=poptorch.Options().connectionType(ConnectionType.Never))
    executor.compile(ONE)
    assert executor.isCompiled()
    assert not executor.isAttachedToDevice()
    with pytest.raises(AssertionError, match="Trying to run a model on an offline"):
        executor(ONE)
    with pytest.raises(AssertionError, match="attach to an offline device"):
        executor.attachToDevice()


def test_the_compilation_time_is_known_after_compiling():
    _, executor = wrap()
    with pytest.raises(poptorch.Error, match=NOT_COMPILED):
        executor.compilationTime()
    executor.compile(ONE)
    assert executor.compilationTime() > datetime.timedelta()
    quiet = poptorch.Options().showCompilationProgressBar(False)
    _, executor = wrap(options=quiet)
    executor.compile(ONE)
    with pytest.raises(poptorch.Error, match="showCompilationProgressBar"):
        executor.compilationTime()


# Attach and detach ------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        "attachToDevice",
        "detachFromDevice",
        "copyWeightsToHost",
        "copyWeightsToDevice",
    ],
)
def test_nothing_moves_before_compiling_or_after_destroying(method):
    model, executor = wrap()
    with pytest.raises(poptorch.Error, match=NOT_COMPILED):
        getattr(executor, method)()
    executor(ONE)
    executor.destroy()
    with pytest.raises(poptorch.Error, match=NOT_COMPILED):
        getattr(executor, method)()
    assert model.weight.item() == -1


def test_attaching_and_detaching_twice_are_errors():
    _, executor = wrap()
    executor.compile(ONE)
    with pytest.raises(poptorch.Error, match="Device is already attached"):
        executor.attachToDevice()
    executor.detachFromDevice()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        executor.detachFromDevice()


def test_a_call_attaches_again_and_training_goes_on():
    model, executor = wrap()
    executor(ONE)
    executor.detachFromDevice()
    assert model.weight.item() == -1
    executor(ONE)
    assert executor.isAttachedToDevice()
    assert model.weight.item() == -2
    assert model.calls.item() == 2


def test_host_edits_while_detached_are_uploaded_with_attaching():
    model, executor = wrap()
    executor(ONE)
    executor.detachFromDevice()
    model.weight.data.fill_(10)
    assert on_device(executor) == 10


def test_destroying_before_compiling_does_nothing():
    model, executor = wrap()
    executor.destroy()
    with pytest.raises(RuntimeError, match="already wrapped"):
        poptorch.trainingModel(model)


def test_destroying_twice_is_harmless():
    _, executor = wrap()
    executor(ONE)
    executor.destroy()
    executor.destroy()


def test_a_destroyed_executor_compiles_again_and_holds_its_module_again():
    model, executor = wrap()
    executor(ONE)
    executor.destroy()
    assert type(model) is Model
    executor(torch.ones(2))
    assert model.weight.item() == -3
    with pytest.raises(RuntimeError, match="already wrapped"):
        poptorch.trainingModel(model)
    executor.destroy()
    assert type(model) is Model


def test_a_destroyed_executor_leaves_the_module_to_the_next():
    model, first = wrap()
    first(ONE)
    first.destroy()
    _, second = wrap(model)
    second(ONE)
    assert model.weight.item() == -2
    first.destroy()
    assert model.copyWeightsToHostIfNeeded() is False


# Weights: the table of what copies what ---------------------------------------


def test_weights_are_kept_apart():
    model, executor = wrap()
    executor(ONE)
    with torch.no_grad():
        model.weight.fill_(10)  # fetches first
    assert on_device(executor) == -1
    executor.copyWeightsToDevice()
    assert on_device(executor) == 10


def test_a_training_call_copies_nothing(transfers):
    _, executor = wrap()
    executor(ONE)
    executor(ONE)
    assert transfers == []


def test_reading_copies_once_per_stale_period(transfers):
    model, executor = wrap()
    executor(ONE)
    model.state_dict()
    list(model.parameters())
    copy.deepcopy(model)
    assert transfers == ["download"]
    executor(ONE)
    assert model.weight.item() == -2
    assert transfers == ["download"] * 2


def test_copying_to_the_host_is_unconditional(transfers):
    _, executor = wrap()
    executor(ONE)
    executor.copyWeightsToHost()
    executor.copyWeightsToHost()
    assert not executor.copyWeightsToHostIfNeeded()
    assert transfers == ["download"] * 2


@pytest.mark.parametrize("method", ["detachFromDevice", "destroy"])
def test_leaving_the_device_copies_if_stale(method, transfers):
    model, executor = wrap()
    executor(ONE)
    getattr(executor, method)()
    assert transfers == ["download"]
    assert model.weight.item() == -1


@pytest.mark.parametrize("method", ["detachFromDevice", "destroy"])
def test_leaving_the_device_copies_nothing_if_not_stale(method, transfers):
    _, executor = wrap()
    executor.compile(ONE)
    getattr(executor, method)()
    assert transfers == []


def test_a_host_edit_of_stale_weights_is_overwritten_by_the_fetch():
    model, executor = wrap()
    memory = model.weight.data
    executor(ONE)
    memory.fill_(10)  # an alias: it fetches nothing
    assert model.weight.item() == -1
    assert on_device(executor) == -1


def test_uploading_without_reading_first_loses_what_was_learnt():
    model, executor = wrap()
    executor(ONE)
    executor.copyWeightsToDevice()
    assert on_device(executor) == 0
    assert model.weight.item() == 0


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


def test_loading_into_the_module_does_not_upload(transfers):
    model, executor = wrap()
    executor(ONE)
    model.load_state_dict({"weight": torch.tensor([7.0]), "calls": torch.zeros(1)})
    assert "upload" not in transfers
    assert on_device(executor) == -1


def test_loading_before_attaching_is_loading_on_the_host():
    _, executor = wrap()
    executor.load_state_dict({"weight": torch.tensor([7.0]), "calls": torch.zeros(1)})
    assert on_device(executor) == 7


def test_what_inference_writes_into_buffers_comes_back_on_request_only():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return x + self.calls

    model = Counter()
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
