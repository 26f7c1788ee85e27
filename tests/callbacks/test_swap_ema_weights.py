# SPDX-License-Identifier: Apache-2.0
"""`SwapEMAWeights`: who sees the averages, and that the weights come back."""

import pytest
import torch

from ipufit import Checkpoint, ConfigError, IPUModel, Optimizer, load_checkpoint
from ipufit.callbacks import LambdaCallback, SwapEMAWeights
from ipufit.checkpoint import write_checkpoint
from tests.callbacks.driving import linear

X = torch.arange(8.0).reshape(8, 1) / 8
Y = 1 - 2 * X


def model_of():
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, 3.0)
    model = IPUModel(module)
    model.compile(Optimizer("sgd", 0.5, ema_momentum=0.5), "mse")
    return model


def fit(model, callbacks, epochs=3, **arguments):
    arguments.setdefault("validation_data", (X, Y))
    return model.fit(
        X,
        Y,
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        callbacks=callbacks,
        verbose=0,
        **arguments,
    )


def weight(model):
    return model.get_weights()[0].item()


def loss_of(value):
    return float((value * X - Y).square().mean())


def trained(epochs=3):
    """Weights and averages at the end of each epoch, by plain arithmetic."""
    value, average, ends = 3.0, None, []
    for _ in range(epochs):
        for rows in (slice(4), slice(4, 8)):
            x, y = X[rows], Y[rows]
            value -= 0.5 * float((2 * x * (value * x - y)).mean())
            average = value if average is None else (average + value) / 2
        ends.append((value, average))
    return ends


@pytest.mark.parametrize("waits", ["0", "1"])
def test_validations_see_the_averages_and_training_the_weights(waits, monkeypatch):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", waits)  # 1: programs take turns
    model, seen = model_of(), []
    look = LambdaCallback(on_epoch_end=lambda *_: seen.append(weight(model)))
    history = fit(model, [SwapEMAWeights(), look]).history
    ends = trained()
    assert seen == pytest.approx([value for value, _ in ends], rel=1e-5)
    expected = [loss_of(average) for _, average in ends]
    assert history["val_loss"] == pytest.approx(expected, rel=1e-4)
    assert abs(expected[0] - loss_of(ends[0][0])) > 1e-2
    assert weight(model) == pytest.approx(ends[-1][1], rel=1e-5)


def left_in_the_middle():
    """A model whose weights are not their average: training was interrupted."""
    model = model_of()

    def interrupt(logs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, LambdaCallback(on_test_begin=interrupt))
    assert weight(model) == pytest.approx(trained()[0][0], rel=1e-5)
    return model


def test_evaluate_and_predict_use_the_averages_and_put_the_weights_back():
    model = left_in_the_middle()
    value, average = trained()[0]
    loss = model.evaluate(X, Y, callbacks=SwapEMAWeights(), verbose=0)["loss"]
    assert loss == pytest.approx(loss_of(average), rel=1e-5)
    assert weight(model) == pytest.approx(value, rel=1e-5)
    outputs = model.predict(X, callbacks=SwapEMAWeights(), verbose=0)
    torch.testing.assert_close(outputs, average * X)
    assert weight(model) == pytest.approx(value, rel=1e-5)
    torch.testing.assert_close(model.predict(X, verbose=0), value * X)


def failing(*_):
    raise ValueError("by the test")


@pytest.mark.parametrize("hook", ["on_test_begin", "on_test_end"])
def test_the_weights_are_back_after_an_error_in_an_evaluation(hook):
    model = left_in_the_middle()
    value = weight(model)
    callbacks = [LambdaCallback(**{hook: failing}), SwapEMAWeights()]
    if hook == "on_test_begin":
        callbacks.reverse()
    with pytest.raises(ValueError, match="by the test"):
        model.evaluate(X, Y, callbacks=callbacks, verbose=0)
    assert weight(model) == value


def test_the_weights_are_back_after_a_prediction_that_nobody_finished():
    model = left_in_the_middle()
    value = weight(model)
    parts = model.predict(X, 4, callbacks=SwapEMAWeights(), verbose=0, stream=True)
    next(parts)
    assert weight(model) != value
    parts.close()
    assert weight(model) == value


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_test_batch_begin"])
def test_the_weights_are_back_after_a_fit_that_was_ended(hook):
    model = model_of()

    def end(*_):
        assert model.weight_average.is_swapped
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, [SwapEMAWeights(swap_on_epoch=True), LambdaCallback(**{hook: end})])
    assert weight(model) == pytest.approx(trained()[0][0], rel=1e-5)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_it_needs_an_average(method):
    model = linear()
    arguments = (X, Y, 4) if method != "predict" else (X, 4)
    with pytest.raises(ConfigError, match="no running average"):
        getattr(model, method)(*arguments, callbacks=SwapEMAWeights(), verbose=0)


def norm_model():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4))
    model = IPUModel(module)
    model.compile(Optimizer("sgd", 0.1, ema_momentum=0.5), "mse")
    return model


def test_a_checkpoint_without_averages_of_buffers_is_loaded(tmp_path):
    model = norm_model()
    y = Y.expand(8, 4).contiguous()
    arguments = {"batch_size": 4, "epochs": 1, "shuffle": False, "verbose": 0}
    model.fit(X, y, **arguments)
    model.save(tmp_path / "new")
    taken = load_checkpoint(tmp_path / "new")
    average, state = dict(taken.tensors["average"]), dict(taken.state)
    names = state["tensors"]["average"]
    for name in ("1.running_mean", "1.running_var"):  # as they were written before
        del average[name], names[name]
    tensors = {**taken.tensors, "average": average}
    write_checkpoint(tmp_path / "old", Checkpoint(tensors, state))
    other = norm_model()
    other.load(tmp_path / "old")
    for one in (model, other):
        one.fit(X, y, **arguments)
    for name, tensor in model.copied_weights().items():
        found = other.copied_weights()[name]
        assert tensor.shape == found.shape
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(found, tensor)
