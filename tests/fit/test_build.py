# SPDX-License-Identifier: Apache-2.0
"""`IPUModel.build`: programs compiled before the data is gone through."""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ipufit import (
    ConfigError,
    DataError,
    GradientMonitor,
    IPUConfig,
    IPUModel,
    poptorch,
)
from tests import reference

X, Y = reference.samples(32)
SPEC = (
    torch.empty(1, 3, device="meta"),
    torch.empty(1, dtype=torch.int64, device="meta"),
)


def make(optimizer="adam", *, dropout=0.0, **config):
    torch.manual_seed(3)
    module = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.Dropout(dropout), torch.nn.Linear(5, 4)
    )
    model = IPUModel(module, IPUConfig(**{"seed": 1, **config}))
    model.compile(optimizer, "cross_entropy", metrics=["accuracy"])
    return model


def names(built):
    return [program.name for program in built.programs]


CASES = {
    "plain": ({}, {}),
    "one micro-batch": ({"micro_batch_size": 4}, {}),
    "all factors": (
        {"replicas": 2, "gradient_accumulation": 2, "device_iterations": 2},
        {},
    ),
    "padded": ({}, {"drop_last": "pad", "batch_size": 12}),
    "class weights": ({}, {"class_weight": {1: 2.0}}),
    "sample weights": ({}, {"sample_weight": torch.ones(32)}),
    "gradients": ({}, {"callbacks": [GradientMonitor()]}),
    "validation": ({}, {"validation_batch_size": 16}),
    "steps": ({}, {"validation_split": 0.25, "steps_per_epoch": 6, "batch_size": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_that_the_next_runs_compile_nothing(case, moves):
    config, arguments = copy.deepcopy(CASES[case])  # a callback keeps its model
    arguments = {"batch_size": 8, **arguments}
    model = make(**config)
    built = model.build(X, Y, verbose=0, **arguments)
    compiled = moves.taken()["compiled"]
    assert compiled == len(built.programs)
    assert names(built)[-1] == "training"
    assert built.seconds > 0
    data = {} if "validation_split" in arguments else {"validation_data": (X, Y)}
    model.fit(X, Y, verbose=0, **data, **arguments)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert moves.taken()["compiled"] == 0


def test_that_shapes_and_types_are_enough(moves):
    model = make(device_iterations=1, inference_iterations=1)
    model.build(*SPEC, batch_size=8, verbose=0)
    compiled = moves.taken()["compiled"]
    assert compiled == 3
    model.fit(X, Y, 8, validation_data=(X, Y), verbose=0)
    assert moves.taken()["compiled"] == 0
    model = make(micro_batch_size=4)
    assert names(model.build(X, verbose=0)) == ["inference"]  # without targets
    model = IPUModel(torch.nn.Linear(3, 4))  # without settings
    assert names(model.build(X, Y, 16, verbose=0)) == ["inference"]
    data = reference.Recorded(X, Y)
    assert names(make(micro_batch_size=4).build(data, batch_size=8, verbose=0)) == [
        "inference",
        "training",
    ]
    assert set(data.asked) == {0}  # the first sample only


@pytest.mark.parametrize("way", ["data", "meta", "validation_data", "split"])
def test_that_open_iterations_go_by_the_number_of_samples(way, moves):
    x, y = reference.samples(160)
    given, more, fitted = (x, y), {}, {"validation_data": (x[:128], y[:128])}
    if way == "meta":
        given = x.to("meta"), y.to("meta")
    if way == "validation_data":
        given, more = (X, Y), {"validation_data": fitted["validation_data"]}
    if way == "split":
        more = fitted = {"validation_split": 0.2}
    model = make(device_iterations=1, micro_batch_size=4)
    built = model.build(*given, batch_size=4, verbose=0, **more)
    assert moves.taken()["compiled"] == len(built.programs)
    sizes = {one.plan.device_iterations for one in built.programs}
    assert (
        sizes
        == {
            "data": {1, 40},
            "meta": {1, 40},
            "validation_data": {1, 32},
            "split": {1, 8, 40},
        }[way]
    )
    model.fit(x, y, 4, verbose=0, **fitted)
    expected = {"data": 1, "meta": 1, "validation_data": 0, "split": 0}[way]
    assert moves.taken()["compiled"] == expected  # 40 passes aren't 32
    assert "inference_iterations left open" in str(built)


@pytest.mark.parametrize("seed", [1, None])
@pytest.mark.parametrize("is_loader", [False, True])
def test_that_a_run_has_the_same_bits_after_it(seed, is_loader):
    data = TensorDataset(X, Y)

    def train(*, is_built):
        model = make(dropout=0.3 if seed else 0.0, seed=seed)
        model.compile("adam", "cross_entropy", lr_schedule="cosine")
        torch.manual_seed(7)
        np.random.seed(7)
        x = DataLoader(data, 8, shuffle=True) if is_loader else data
        if is_built:
            model.build(x, batch_size=8, verbose=0)
        losses = model.fit(x, batch_size=8, epochs=2, verbose=0).history["loss"]
        return losses, model.get_weights()

    losses, weights = train(is_built=False)
    built_losses, built_weights = train(is_built=True)
    assert losses == built_losses
    assert all(map(np.array_equal, weights, built_weights))


def test_the_cache_of_executables(tmp_path):
    folder = tmp_path / "cache"
    files = iter(["1.popef", "2.popef"])

    def write():  # as PopART does
        folder.mkdir(exist_ok=True)
        (folder / next(files, "2.popef")).write_bytes(b"")

    def seen(**config):
        built = make(micro_batch_size=4, **config).build(X, Y, 8, 0)
        return [program.cache for program in built.programs]

    handle = poptorch.registerPostCompileHook(write)
    try:
        assert seen(cache_dir=folder) == ["miss", "miss"]
        assert seen(cache_dir=folder) == ["hit", "hit"]
        assert seen() == ["none", "none"]
    finally:
        handle.remove()
    assert sorted(os.listdir(folder)) == ["1.popef", "2.popef"]


def test_that_an_example_says_what_it_left_open():
    built = make(micro_batch_size=4).build(*SPEC, batch_size=8, verbose=0)
    program = built.programs[-1]
    assert program.plan.device_iterations == 1
    assert "device_iterations left open" in program.remark
    assert "fewer samples than an update" in program.remark
    given = make(micro_batch_size=4, device_iterations=2)
    assert given.build(*SPEC, batch_size=8, verbose=0).programs[-1].remark == ""


def test_that_a_generator_is_refused_before_a_batch_is_taken():
    batches = iter([(X, Y)])
    with pytest.raises(DataError, match="gone through once"):
        make().build(batches)
    assert len(list(batches)) == 1


class TestOffline:
    def test_that_programs_are_compiled(self, moves):
        built = make(offline=True, micro_batch_size=4).build(X, Y, 8, 0)
        assert names(built) == ["inference", "training"]
        assert moves["compiled"] == 2
        assert not moves["attachToDevice"]

    @pytest.mark.parametrize(
        "run",
        [
            lambda model: model.fit(X, Y, verbose=0),
            lambda model: model.evaluate(X, Y, verbose=0),
            lambda model: model.predict(X, verbose=0),
            lambda model: model.train_on_batch(X, Y),
            lambda model: model.test_on_batch(X, Y),
            lambda model: model.predict_on_batch(X),
        ],
    )
    def test_that_nothing_runs(self, run, moves):
        with pytest.raises(ConfigError, match=r"offline=True.*build"):
            run(make(offline=True))
        assert not moves["compiled"]
