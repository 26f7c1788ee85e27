# SPDX-License-Identifier: Apache-2.0
"""What is traced: pipelines, and values of a micro-batch."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from ipufit import (
    ConfigError,
    IPUConfig,
    IPUModel,
    UnknownNameError,
    UnsupportedError,
    poptorch,
)
from tests import reference

X, Y = reference.samples(48)


class OwnBlocks(nn.Module):
    """Two stages that the module marks itself, closed at their ends."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 4)

    def forward(self, x):
        with poptorch.Block("early", ipu_id=0):
            x = torch.tanh(self.first(x))
        with poptorch.Block("late", ipu_id=1):
            return self.second(x)


def strategy(*stages, kind=poptorch.PipelinedExecution):
    return kind(*(poptorch.Stage(name).ipu(i) for i, name in enumerate(stages)))


PIPELINES = {
    "submodules": (reference.network, {"pipeline": ("0", "2")}),
    "several names a stage": (reference.network, {"pipeline": [("0", "1"), "2"]}),
    "own blocks": (OwnBlocks, {"pipeline": ("early", "late")}),
    "stages and names": (
        reference.network,
        {"pipeline": [poptorch.Stage("0").ipu(0), "2"]},
    ),
    "strategy": (
        OwnBlocks,
        {"pipeline": strategy("early", "late"), "loss_block": "late"},
    ),
    "sharded": (reference.network, {"pipeline": ("0", "2"), "execution": "sharded"}),
    "sharded strategy": (
        OwnBlocks,
        {
            "pipeline": strategy("early", "late", kind=poptorch.ShardedExecution),
            "loss_block": "late",
        },
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_learns_what_one_ipu_does(monkeypatch, name):
    make, settings = PIPELINES[name]
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "8")
    module = make()
    twin = copy.deepcopy(module)
    model = IPUModel(module, IPUConfig(gradient_accumulation=6, replicas=2, **settings))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    for _ in range(2):  # a second fit, with an evaluation between
        history = model.fit(X, Y, batch_size=24, shuffle=False, verbose=0)
        trained = reference.train(twin, optimizer, X, Y, 24)
        assert history.history["loss"] == [
            pytest.approx(trained.figures()["loss"], rel=1e-5)
        ]
        figures = model.evaluate(X[:11], Y[:11], verbose=0)
        expected = reference.evaluate(twin, X[:11], Y[:11])
        assert figures == pytest.approx(expected, rel=1e-4)
    reference.assert_same_weights(module, twin)
    model.detach()


VALUES = torch.randn(48, 1, generator=torch.Generator().manual_seed(2))


def own_blocks(**config):
    return reference.compiled(OwnBlocks(), IPUConfig(micro_batch_size=4, **config))


@pytest.mark.parametrize(
    "config", [{}, {"device_iterations": 2}, {"execution": "sharded"}]
)
def test_own_blocks_are_evaluated_whatever_the_config_knows_of_them(config):
    model = own_blocks(**config)
    with torch.no_grad():
        outputs = model.module(X)
    loss = torch.nn.functional.cross_entropy(outputs, Y).item()
    assert model.evaluate(X, Y, verbose=0)["loss"] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(model.predict(X, verbose=0), outputs)


def test_a_pipeline_of_own_blocks_that_calls_cannot_fill_is_explained():
    with pytest.raises(ConfigError, match=r"2 stages.*gradient_accumulation=3"):
        own_blocks().fit(X, Y, batch_size=8, verbose=0)
    three = nn.Sequential(*(InBlock(ipu) for ipu in range(3)))
    with torch.no_grad():
        expected = three(X)
    config = IPUConfig(micro_batch_size=4, inference_iterations=2)
    outputs = IPUModel(three, config).predict(X, verbose=0)
    torch.testing.assert_close(outputs, expected)  # one stage after the other
    config = dataclasses.replace(config, customize=lambda *_: None)
    with pytest.raises(ConfigError, match=r"3 stages.*inference_iterations=3"):
        IPUModel(three, config).predict(X, verbose=0)


class InBlock(nn.Linear):
    def __init__(self, ipu):
        super().__init__(3, 3)
        self.ipu = ipu

    def forward(self, x):
        with poptorch.Block(ipu_id=self.ipu):
            return super().forward(x)


def test_a_block_for_the_loss_that_nothing_begins_is_an_error():
    with pytest.raises(UnknownNameError, match=r"loss_block 'lat'.*mean 'late'"):
        own_blocks(loss_block="lat").fit(X, Y, batch_size=12, verbose=0)


class WithPenalty(nn.Linear):
    """Returns a value of the micro-batch beside its rows."""

    def forward(self, x):
        return super().forward(x), self.weight.square().sum()


def test_a_value_of_the_micro_batch_may_train_but_is_not_taken_for_rows():
    def loss(outputs, targets):
        return nn.functional.mse_loss(outputs[0], targets) + 0.1 * outputs[1]

    module = WithPenalty(3, 1)
    twin = copy.deepcopy(module)
    model = reference.compiled(module, IPUConfig(replicas=2), loss=loss)
    history = model.fit(X, VALUES, batch_size=48, verbose=0)
    expected = loss(twin(X), VALUES)
    assert history.history["loss"] == [pytest.approx(expected.item(), rel=1e-5)]
    for run in (model.predict, lambda x, **k: model.evaluate(x, VALUES, **k)):
        with pytest.raises(UnsupportedError, match=r"one row per sample.*ipufit\.log"):
            run(X, verbose=0)


class Halves(nn.Module):
    """An encoder and a decoder, and a list that nobody calls itself."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5)])
        self.decoder = nn.Linear(5, 4)

    def forward(self, x):
        h = self.encoder(x)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return self.decoder(h)


class HalfOwnBlocks(OwnBlocks):
    """Its second block is there in training only."""

    def forward(self, x):
        if self.training:
            return super().forward(x)
        with poptorch.Block("early", ipu_id=0):
            return self.second(torch.tanh(self.first(x)))


UNBEGUN = {
    "no submodules": (
        Halves,
        ("enc", "dec"),
        UnknownNameError,
        "block in pipeline 'enc'. Did you mean 'encoder'",
    ),
    "a mistyped block": (
        OwnBlocks,
        ("early", "lat"),
        UnknownNameError,
        "'late'. Did you mean 'lat'",
    ),
    "one block of three": (
        OwnBlocks,
        ("early", "later", "late"),
        UnknownNameError,
        "block in pipeline 'later'. Did you mean 'late'",
    ),
    "a list": (
        Halves,
        ("encoder", "layers"),
        ConfigError,
        "'layers', a ModuleList .* never calls: .* such as 'layers.0'",
    ),
}


@pytest.mark.parametrize("case", UNBEGUN)
def test_a_stage_that_nothing_begins_is_refused_when_it_is_traced(case):
    make, pipeline, error, message = UNBEGUN[case]
    model = reference.compiled(make(), IPUConfig(pipeline=pipeline))
    with pytest.raises(error, match=message):
        model.fit(X, Y, batch_size=24, verbose=0)
    if case == "no submodules":
        with pytest.raises(error, match=message):
            model.predict(X, verbose=0)


def test_a_program_that_looks_may_leave_a_stage_out():
    model = reference.compiled(HalfOwnBlocks(), IPUConfig(pipeline=("early", "late")))
    model.fit(X, Y, batch_size=24, verbose=0)
    with torch.no_grad():
        expected = HalfOwnBlocks.forward(model.module.eval(), X)
    torch.testing.assert_close(model.predict(X, verbose=0), expected)


class OnCuda(nn.Linear):
    def forward(self, x):
        return super().forward(x.cuda())


def step_on_cuda(module, batch):
    x, y = batch
    return nn.functional.mse_loss(module(x.to("cuda")), y)


def asserting(module, batch):
    raise AssertionError("mine")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has CUDA")
def test_calls_of_cuda_are_told_to_go():
    for module, settings in (
        (OnCuda(3, 1), {"loss": "mse"}),
        (nn.Linear(3, 1), {"loss": None, "step": step_on_cuda}),
    ):
        model = reference.compiled(module, **settings)
        with pytest.raises(UnsupportedError, match=r"Leave \.cuda\(\) and"):
            model.fit(X, VALUES, batch_size=4, verbose=0)
    model = reference.compiled(nn.Linear(3, 1), loss=None, step=asserting)
    with pytest.raises(AssertionError, match="mine"):
        model.fit(X, VALUES, batch_size=4, verbose=0)
