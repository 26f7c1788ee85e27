# SPDX-License-Identifier: Apache-2.0
"""Stochastic weight averaging: when weights are taken in, and what comes of it."""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.swa_utils import AveragedModel

from ipufit import (
    SWA,
    BackupAndRestore,
    ConfigError,
    DamagedCheckpointError,
    IPUConfig,
    IPUModel,
    Optimizer,
    SwapEMAWeights,
)
from ipufit.callbacks import LambdaCallback
from ipufit.checkpoint import write_checkpoint
from ipufit.optimizers import WeightAverage

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(dim=1, keepdim=True)


def module_of():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )


def model_of(swa, module=None, **config):
    model = IPUModel(module or module_of(), IPUConfig(**config))
    model.compile(Optimizer("sgd", 0.1, swa=swa), "mse")
    return model


def fit(model, callbacks=None, epochs=4, **more):
    return model.fit(
        X,
        Y,
        batch_size=6,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        **more,
    )


def averaged_by_torch(epochs, start, every, updates_of_a_call=None):
    """A plain loop, with torch's average of equal weights."""
    module = module_of()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    average = AveragedModel(module, use_buffers=True)
    done = 0
    for _ in range(epochs):
        for x, y in zip(X.split(6), Y.split(6)):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
            done += 1
            if updates_of_a_call is None or done % updates_of_a_call:
                continue
            last = done - updates_of_a_call
            if max(0, done - start) // every > max(0, last - start) // every:
                average.update_parameters(module)
        is_epoch = updates_of_a_call is None and done // 4 > start
        if is_epoch and (done // 4 - start) % every == 0:
            average.update_parameters(module)
    return average


def assert_equal_to(average, model):
    expected = average.module.state_dict()
    for name, tensor in model.module.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("start", "every"), [(0, 1), (2, 1), (1, 3)])
def test_epochs_are_averaged_as_torch_averages_them(start, every):
    model = model_of(SWA(start_epoch=start, every_epochs=every))
    fit(model, epochs=5)
    average = averaged_by_torch(5, start, every)
    assert int(average.n_averaged) == model.weight_average.num_averaged > 0
    assert_equal_to(average, model)


@pytest.mark.parametrize(
    ("start", "every", "calls"), [(0, 1, 1), (5, 3, 1), (3, 4, 2), (0, 3, 4)]
)
def test_updates_are_averaged_as_torch_averages_them(start, every, calls):
    swa = SWA(start_update=start, every_updates=every)
    model = model_of(swa, device_iterations=calls)
    fit(model)
    average = averaged_by_torch(4, start, every, calls)
    assert int(average.n_averaged) == model.weight_average.num_averaged > 0
    assert_equal_to(average, model)


def test_an_average_that_does_not_begin_leaves_the_weights():
    model, plain = model_of(SWA(start_epoch=9)), model_of(None)
    fit(model, SwapEMAWeights(), validation_data=(X, Y))
    fit(plain)
    assert model.weight_average.num_averaged == 0
    assert all((a == b).all() for a, b in zip(model.get_weights(), plain.get_weights()))


def test_weights_come_to_the_host_only_when_they_are_averaged(monkeypatch):
    model, shown = model_of(SWA(start_update=9, every_updates=3)), []
    show = model._executors.weights_shown
    monkeypatch.setattr(
        model._executors,
        "weights_shown",
        lambda: shown.append(model.num_updates) or show(),
    )
    fit(model)
    assert shown == [12, 15]


def test_validations_see_the_average_once_it_has_begun():
    model, weights, seen = model_of(SWA(start_epoch=1)), [], []
    look = LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            batch == 3 and weights.append(model.copied_weights()["0.weight"])
        ),
        on_test_begin=lambda logs: seen.append(model.copied_weights()["0.weight"]),
    )
    fit(model, [SwapEMAWeights(), look], validation_data=(X, Y))
    expected = [weights[0], *(torch.stack(weights[1:n]).mean(0) for n in (2, 3, 4))]
    assert len(seen) == 4
    torch.testing.assert_close(seen, expected)


def test_a_second_fit_goes_on_with_the_average():
    model = model_of(SWA(start_epoch=1, every_epochs=2))
    for _ in range(3):
        fit(model, epochs=1)
    assert model.weight_average.num_averaged == 1
    clone = copy.deepcopy(model)
    for one in (model, clone):
        fit(one, epochs=2)
        assert one.weight_average.num_averaged == 2
    assert all((a == b).all() for a, b in zip(model.get_weights(), clone.get_weights()))


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_run_that_is_evicted_while_it_validates_averages_each_epoch_once(
    tmp_path, epoch
):
    swa = SWA(start_epoch=1)
    expected = model_of(swa)
    history = fit(expected, SwapEMAWeights(), validation_data=(X, Y)).history
    counts = []

    def evict(logs):
        counts.append(model.weight_average.num_averaged)
        if len(counts) == epoch + 1:
            os.kill(os.getpid(), signal.SIGTERM)

    for _ in range(2):
        model = model_of(swa)
        callbacks = [
            SwapEMAWeights(),
            BackupAndRestore(tmp_path / "run"),
            LambdaCallback(on_test_begin=evict),
        ]
        resumed = fit(model, callbacks, validation_data=(X, Y))
    assert counts.count(epoch) == 2  # the validation that was broken off, and again
    assert resumed.history == history
    assert all(
        (a == b).all() for a, b in zip(model.get_weights(), expected.get_weights())
    )


@given(
    st.integers(0, 9),
    st.integers(1, 5),
    st.lists(st.tuples(st.floats(-8, 8), st.integers(1, 4)), min_size=1, max_size=20),
)
def test_each_weight_that_is_taken_in_counts_the_same(start, every, calls):
    module = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    average = WeightAverage(module, SWA(start_update=start, every_updates=every))
    taken, done = [], 0
    for weight, updates in calls:
        module.weight.data.fill_(weight)
        marks = range(start + every, start + 99, every)
        if any(done < mark <= done + updates for mark in marks):
            taken.append(weight)
        done += updates
        average.update(updates)
    average.apply()
    assert average.num_averaged == len(taken)
    expected = sum(taken) / len(taken) if taken else calls[-1][0]
    assert module.weight.item() == pytest.approx(expected, abs=1e-9)


def test_an_epoch_counts_once():
    module = torch.nn.Linear(1, 1, bias=False)
    average = WeightAverage(module, SWA(start_epoch=0))
    for weight in (1.0, 4.0):
        module.weight.data.fill_(weight)
        average.update(3)
        average.end_epoch()
        average.end_epoch()
    average.apply()
    assert (average.num_averaged, module.weight.item()) == (2, 2.5)


def test_it_goes_on_from_its_state():
    module = torch.nn.Linear(1, 1, bias=False)
    first, states = WeightAverage(module, SWA(start_epoch=1)), []
    for weight in (8.0, 1.0, 4.0):
        module.weight.data.fill_(weight)
        first.update(2)
        first.end_epoch()
        states.append(first.state_dict())
    assert states[0]["averages"] == {}
    for begun in states[:2]:
        second = WeightAverage(module, SWA(start_epoch=1))
        second.load_state_dict(begun)
        for weight in (8.0, 1.0, 4.0)[states.index(begun) + 1 :]:
            module.weight.data.fill_(weight)
            second.update(2)
            second.end_epoch()
        assert second.state_dict() == states[-1]


def checkpoint_of(**average):
    model = IPUModel(torch.nn.Linear(3, 1))
    model.compile(Optimizer("sgd", 0.1, **average), "mse")
    fit(model, epochs=1)
    return model, model.checkpoint()


def test_a_checkpoint_of_another_kind_of_average_is_refused(tmp_path):
    kinds = {"swa": SWA(start_epoch=0)}, {"ema_momentum": 0.9}, {}
    for index, kind in enumerate(kinds):
        model, _ = checkpoint_of(**kind)
        model.save(tmp_path / str(index))
    for index, kind in enumerate(kinds):
        model, _ = checkpoint_of(**kind)
        model.load(tmp_path / str(index))
        for other in {0, 1, 2} - {index}:
            with pytest.raises(ConfigError, match="average of the weights"):
                model.load(tmp_path / str(other))


@pytest.mark.parametrize("count", [-1, 1.5, None, "1"])
def test_a_damaged_count_is_refused(count, tmp_path):
    model, checkpoint = checkpoint_of(swa=SWA(start_epoch=0))
    checkpoint.state["average"]["epoch_ended_at"] = count
    write_checkpoint(tmp_path / "bad", checkpoint)
    with pytest.raises(DamagedCheckpointError, match="epoch_ended_at"):
        model.load(tmp_path / "bad")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, r"SWA\(start_epoch=75\)"),
        ({"start_epoch": -1}, "start_epoch=-1: use a whole number of at least 0"),
        ({"start_epoch": 0.75}, "start_epoch=0.75"),
        ({"every_epochs": 0}, "every_epochs=0: use a whole number of at least 1"),
        ({"start_update": True}, "start_update=True"),
        (
            {"start_epoch": 1, "every_updates": 5},
            "start_epoch=1, every_updates=5: give epochs or updates, not both",
        ),
    ],
)
def test_numbers_that_mean_nothing_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        SWA(**arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"swa": 5}, r"swa=5: use an ipufit\.SWA"),
        (
            {"swa": SWA(start_epoch=5), "ema_momentum": 0.9},
            "one average of its weights",
        ),
    ],
)
def test_an_optimizer_keeps_one_average(arguments, said):
    with pytest.raises(ConfigError, match=said):
        Optimizer("sgd", 0.1, **arguments)
