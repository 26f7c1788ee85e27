# SPDX-License-Identifier: Apache-2.0
"""A profiler of torch sees what a run does, by name."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from ipufit import IPUConfig, IPUModel, LambdaCallback, ModelCheckpoint, Optimizer

X, Y = torch.arange(48.0).view(24, 2) / 48, torch.ones(24, 1)


def make(optimizer="sgd"):
    torch.manual_seed(1)
    model = IPUModel(
        torch.nn.Linear(2, 1), IPUConfig(device_iterations=1, inference_iterations=1)
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fit(model, callbacks=None, **arguments):
    return model.fit(
        *(X, Y, 4), verbose=0, shuffle=False, callbacks=callbacks, **arguments
    )


def recorded(run, **settings):
    with profile(activities=[ProfilerActivity.CPU], **settings) as profiler:
        run(profiler)
    return {event.key: event.count for event in profiler.key_averages()}


def test_a_fit_is_recorded_with_the_operators_of_torch(tmp_path):
    model = make(Optimizer("sgd", ema_momentum=0.9))
    saving = ModelCheckpoint(tmp_path / "{epoch}")
    counts = recorded(lambda _: fit(model, saving, epochs=2, validation_data=(X, Y)))
    assert counts["device call"] >= 2 * 6
    assert counts["compile"] == 2
    assert counts["aten::linear"] >= 2
    for name in ("metrics", "weights", "save", "ModelCheckpoint.on_epoch_end"):
        assert counts[name] >= 2, name
    assert counts["host data"] >= 2 * 6
    assert counts["optimizer"] >= 2 * 6


def test_other_methods_are_recorded():
    model = make()
    counts = recorded(lambda _: model.evaluate(X, Y, 4, verbose=0))
    assert counts["device call"] == 6
    counts = recorded(lambda _: model.predict(X, 4, verbose=0))
    assert counts["device call"] == 6


def test_a_schedule_of_torch_records_some_calls():
    waiting = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    calls = []

    def run(profiler):
        def step(batch, logs):
            calls.append(batch)
            profiler.step()

        fit(make(), LambdaCallback(on_train_batch_end=step))

    assert recorded(run, schedule=waiting)["device call"] == 3
    assert len(calls) == 6


def test_a_recording_changes_neither_numbers_nor_calls():
    plain, profiled = make(), make()
    before, after = fit(plain, epochs=2), []
    recorded(lambda _: after.append(fit(profiled, epochs=2)))
    assert before.history == after[0].history
    for weight, other in zip(plain.get_weights(), profiled.get_weights()):
        assert (weight == other).all()
    assert after[0].params["calls"] == before.params["calls"]
