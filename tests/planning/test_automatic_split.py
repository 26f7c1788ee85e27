# SPDX-License-Identifier: Apache-2.0
"""`pipeline="auto"`: the numbers of names by hand, chosen once, and the best split."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import ipufit
from ipufit import ConfigError, IPUConfig, IPUModel, poptorch
from ipufit.model import costs as measured_costs
from ipufit.planning.split import TooFullError

X = torch.linspace(-1, 1, 56 * 8).reshape(56, 8)
Y = torch.arange(56) % 3
AUTO = IPUConfig(pipeline="auto", ipus=3)


class Network(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(8, width)
        self.layer = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layer:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def compiled(config, module=None, optimizer="adamw", **settings):
    model = IPUModel(Network() if module is None else module, config)
    model.compile(optimizer, "cross_entropy", metrics=["accuracy"], **settings)
    return model


def fitted(model, **settings):
    validation = {"validation_data": (X, Y)}
    settings = {"batch_size": 28, "verbose": 0, **validation, **settings}
    torch.manual_seed(0)
    return model.fit(X, Y, **settings).history


def test_the_numbers_are_those_of_the_names_written_by_hand():
    automatic = compiled(AUTO)
    figures = fitted(automatic)
    config = AUTO.resolved(automatic)
    assert config == IPUConfig(pipeline=["stem", "layer.1", "layer.3"])
    assert automatic.config == config
    by_hand = compiled(config)
    assert fitted(by_hand) == figures
    for name, weight in by_hand.module.state_dict().items():
        assert torch.equal(weight, automatic.module.state_dict()[name])
    assert automatic.evaluate(X, Y, verbose=0) == by_hand.evaluate(X, Y, verbose=0)
    assert torch.equal(automatic.predict(X, verbose=0), by_hand.predict(X, verbose=0))


def test_the_module_stays_as_it_was():
    module = Network()
    names = [name for name, _ in module.named_parameters()]
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    model = compiled(AUTO, module)
    AUTO.resolved(model, X)
    assert model.module is module
    assert [name for name, _ in module.named_parameters()] == names
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, before[name])
    assert not any(child._forward_pre_hooks for child in module.modules())


def test_nothing_is_compiled_twice_for_it(moves):
    model = compiled(AUTO)
    model.build(X, Y, batch_size=28, verbose=0, validation_data=(X, Y))
    AUTO.resolved(model)
    fitted(model)
    model.evaluate(X, Y, verbose=0)
    automatic = moves.taken()["compiled"]
    by_hand = compiled(AUTO.resolved(model))
    by_hand.build(X, Y, batch_size=28, verbose=0, validation_data=(X, Y))
    fitted(by_hand)
    by_hand.evaluate(X, Y, verbose=0)
    assert moves.taken()["compiled"] == automatic == 3


def lines_of(monkeypatch, run):
    written = io.StringIO()
    console = Console(file=written, width=200)
    monkeypatch.setattr("ipufit.callbacks.progress._standard_output", lambda: console)
    run()
    return [line for line in written.getvalue().splitlines() if "'auto'" in line]


def test_the_split_is_printed_once(monkeypatch):
    model = compiled(AUTO)
    (line,) = lines_of(monkeypatch, lambda: fitted(model, verbose=2))
    assert line == (
        "pipeline='auto': 3 stages, 34%, 41% and 25% of the operations, begin at stem, "
        "layer.1 and layer.3"
    )
    assert lines_of(monkeypatch, lambda: fitted(model, verbose=2)) == []
    model.compile("adamw", "cross_entropy")
    assert lines_of(monkeypatch, lambda: fitted(model, verbose=2)) == []


def test_all_runs_choose_the_same():
    models = [compiled(AUTO) for _ in range(6)]
    models[0].build(X, Y, batch_size=28, verbose=0)
    models[1].predict(X, verbose=0)
    models[2].train_on_batch(X, Y)
    models[3].evaluate(X, Y, verbose=0)
    models[4].batch_plan(X, Y)
    models[5].summary(X)
    chosen = {str(model.config) for model in models}
    assert chosen == {"IPUConfig(pipeline=['stem', 'layer.1', 'layer.3'])"}


def test_a_resumed_run_goes_on_bit_by_bit(tmp_path):
    whole = fitted(compiled(AUTO), epochs=2)
    first = compiled(AUTO)
    keep = ipufit.ModelCheckpoint(tmp_path)
    fitted(first, callbacks=[keep])
    second = compiled(AUTO)
    figures = fitted(second, epochs=2, callbacks=[keep], resume=tmp_path)
    assert figures == whole
    assert second.config == first.config


def test_another_compile_may_change_the_stages(monkeypatch):
    monkeypatch.setattr(measured_costs, "CAPACITY", 3000)
    model = compiled(IPUConfig(pipeline="auto"), optimizer="sgd")
    figures = fitted(model)
    assert model.config.num_ipus == 4
    monkeypatch.setattr(measured_costs, "CAPACITY", 1_000_000)
    model.compile("adamw", "cross_entropy")
    again = fitted(model)
    assert model.config == IPUConfig()
    assert again["loss"] != figures["loss"]


def test_the_fewest_ipus_are_taken_that_hold_the_optimizers_state(monkeypatch):
    parameters = sum(one.numel() for one in Network().parameters())
    buffers = 4 * 2 * 12 + 4
    config = IPUConfig(pipeline="auto")
    for name, words in ("sgd", 2), ("adamw", 4):
        counts = 4 * len(list(Network().parameters())) * (name == "adamw")
        needed = 4 * words * parameters + buffers + counts
        for less, expected in (0, 1), (1, 2):
            monkeypatch.setattr(measured_costs, "CAPACITY", needed - less)
            found = config.resolved(compiled(config, None, name), X)
            assert found.num_ipus == expected


def test_a_model_that_fits_nowhere_is_refused(monkeypatch):
    monkeypatch.setattr(measured_costs, "CAPACITY", 1000)
    with pytest.raises(TooFullError, match="An IPU has 1,000"):
        fitted(compiled(IPUConfig(pipeline="auto")))


def test_more_ipus_than_blocks_are_refused():
    with pytest.raises(ConfigError, match="cut into more stages than 1"):
        fitted(compiled(AUTO, nn.Linear(8, 3)))


def test_blocks_of_the_models_own_are_refused():
    module = Network()
    poptorch.BeginBlock(module.head, "head", ipu_id=1)
    with pytest.raises(ConfigError, match="the submodule head begins the block 'head'"):
        fitted(compiled(AUTO, module))


def test_a_config_needs_data():
    with pytest.raises(ConfigError, match=r"config.resolved\(model, x\)"):
        AUTO.resolved(compiled(AUTO))


class Writer(nn.Module):
    """A language model whose head has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).mean(1)


def test_a_tied_language_model_is_refused_with_its_tie_and_a_way_out():
    tokens, words = torch.randint(0, 20, (24, 6)), torch.randint(0, 20, (24,))
    refused = compiled(IPUConfig(pipeline="auto", ipus=2), Writer())
    with pytest.raises(ConfigError) as raised:
        refused.fit(tokens, words, batch_size=12, verbose=0)
    message = str(raised.value)
    assert "can't be cut into more stages than 1" in message
    assert (
        "embedding.weight is used by embedding and head: no stage may begin from "
        "layers.0 to head"
    ) in message
    names = "['embedding', 'layers.0', poptorch.Stage('head').ipu(0)]"
    assert f"pipeline={names}" in message
    stages = ["embedding", "layers.0", poptorch.Stage("head").ipu(0)]
    model = compiled(IPUConfig(pipeline=stages), Writer())
    model.fit(tokens, words, batch_size=12, verbose=0)
    plan = model.plan(tokens, words, batch_size=12)
    assert plan.num_ipus == 2
    assert [stage.ipu for stage in plan.stages] == [0, 1, 0]


class Counted(Writer):
    """Adds positions before it looks up words, as the language models of others do."""

    def __init__(self):
        super().__init__()
        self.counted = nn.Identity()
        self.register_buffer("positions", torch.arange(6) % 2)

    def forward(self, tokens):
        return super().forward(self.counted(tokens) + self.positions)


def test_a_stage_without_any_work_is_no_way_to_cut():
    tokens, words = torch.randint(0, 19, (24, 6)), torch.randint(0, 20, (24,))
    model = compiled(IPUConfig(pipeline="auto", ipus=2), Counted())
    with pytest.raises(ConfigError) as raised:
        model.fit(tokens, words, batch_size=12, verbose=0)
    assert "ipus=2, and all weights and operations of the model" in str(raised.value)
    assert "embedding.weight is used by embedding and head" in str(raised.value)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_gets_shapes_before():
    module = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    model = compiled(IPUConfig(pipeline="auto", ipus=2), module)
    fitted(model)
    assert model.config.pipeline == ["0", "1"]


def test_a_step_of_ones_own_is_measured():
    def step(module, batch):
        x, y = batch
        return nn.functional.cross_entropy(module(x), y)

    model = IPUModel(Network(), AUTO)
    model.compile("adamw", step=step)
    model.fit(X, Y, batch_size=28, verbose=0)
    assert model.config.pipeline == ["stem", "layer.1", "layer.3"]


def test_half_precision_evaluates_on_one_ipu():
    config = IPUConfig(
        pipeline="auto", ipus=2, precision="16.16", inference={"pipeline": None}
    )
    model = compiled(config)
    figures = fitted(model)
    assert np.isfinite(figures["val_loss"]).all()
    assert model.config.num_ipus == 2
    assert model.config.inference_config.num_ipus == 1
