# SPDX-License-Identifier: Apache-2.0
"""Where stages begin: names, patterns, numbers of layers, and the module's blocks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ipufit import ConfigError, IPUConfig, IPUModel, UnknownNameError, poptorch
from tests import reference
from tests.fit.test_summary import summarize

X, Y = reference.samples(120)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.act = nn.Sequential(nn.Tanh(), nn.Identity())

    def forward(self, x):
        return x + self.act(self.inner(x))


class Encoder(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layer = nn.ModuleList([Layer() for _ in range(count)])

    def forward(self, x):
        for layer in self.layer:
            x = layer(x)
        return x


class Classifier(nn.Module):
    """Embeddings, an encoder of several layers, and a head."""

    def __init__(self, count=6):
        super().__init__()
        self.embeddings = nn.Linear(3, 5)
        self.encoder = Encoder(count)
        self.pooler = nn.Linear(5, 5)
        self.head = nn.Linear(5, 4)
        self.unused = nn.Linear(1, 1).requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.head(torch.tanh(self.pooler(self.encoder(self.embeddings(x)))))


def classifier(count=6):
    torch.manual_seed(0)
    return Classifier(count)


def ipus_of(module, **config):
    """The IPU of each layer that has weights, by name."""
    found = {}
    for inputs in (X[:1], None):
        layers = summarize(module, IPUConfig(**config), inputs).layers
        found[inputs is None] = {one.name: one.ipu for one in layers if one.parameters}
        found[inputs is None].pop("unused", None)
    assert found[False] == found[True]
    return found[False]


def placed(layers, embeddings=0, head=None):
    """The IPUs of a classifier's parts."""
    ends = layers[-1] if head is None else head
    names = {f"encoder.layer.{i}.inner": ipu for i, ipu in enumerate(layers)}
    return {"embeddings": embeddings, **names, "pooler": ends, "head": ends}


PLACES = {
    "patterns of layers": (
        {"pipeline": ["embed*", "encoder.layer.[0-2]*", "encoder.layer.[3-5].*"]},
        placed([1, 1, 1, 2, 2, 2]),
    ),
    "all layers": (
        {"pipeline": ["embeddings", "encoder.layer.*", "pooler"]},
        placed([1] * 6, head=2),
    ),
    "several in a stage": (
        {"pipeline": [("embed*", "encoder.layer.[01]*"), ("*.[2-5].inner", "poo*")]},
        placed([0, 0, 1, 1, 1, 1]),
    ),
    "a stage of PopTorch": (
        {"pipeline": ["embed*", poptorch.Stage("encoder.layer.*").ipu(3)]},
        placed([3] * 6),
    ),
    "layers": ({"layers_per_ipu": [0, 2, 4]}, placed([1, 1, 2, 2, 2, 2])),
    "layers on all": ({"layers_per_ipu": (4, 2)}, placed([0, 0, 0, 0, 1, 1])),
    "the rest": ({"layers_per_ipu": [1, -1, -1]}, placed([0, 1, 1, 2, 2, 2])),
    "an even share": ({"layers_per_ipu": [-1, -1]}, placed([0, 0, 0, 1, 1, 1])),
    "the head apart": (
        {"layers_per_ipu": [0, 3, 3, 0]},
        placed([1, 1, 1, 2, 2, 2], head=3),
    ),
    "a named list": (
        {"layers_per_ipu": {"encoder.layer": [3, 3]}},
        placed([0, 0, 0, 1, 1, 1]),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_stages_are_where_they_should_be(name):
    config, expected = PLACES[name]
    assert ipus_of(classifier(), **config) == expected


@pytest.mark.parametrize("name", ["patterns of layers", "the head apart", "layers"])
def test_a_model_learns_on_several_ipus_what_it_does_on_one(monkeypatch, name):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "4")
    config, expected = PLACES[name]
    begun = []
    x, y = X[:48], Y[:48]
    start = poptorch.Block.start

    def spy(user_id=None, ipu_id=None):
        begun.append(user_id)
        start(user_id, ipu_id)

    monkeypatch.setattr(poptorch.Block, "start", staticmethod(spy))
    trained = []
    for settings in (config, {}):
        module = classifier()
        model = reference.compiled(
            module, IPUConfig(gradient_accumulation=8, **settings)
        )
        history = model.fit(x, y, batch_size=24, shuffle=False, verbose=0)
        assert not any(m._forward_pre_hooks for m in module.modules())
        assert not any(m._forward_hooks for m in module.modules())
        rest = model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)
        trained.append((history.history["loss"], rest[0]["loss"], rest[1]))
        model.detach()
    (losses, loss, outputs), (one_losses, one_loss, one_outputs) = trained
    assert losses == one_losses
    assert loss == pytest.approx(one_loss, rel=1e-6)
    torch.testing.assert_close(outputs, one_outputs)
    stages = IPUConfig(**config).stages
    assert {*begun} == {name for stage in stages for name in stage}
    order = sorted({*begun}, key=begun.index)
    assert order == [name for stage in stages for name in stage]
    assert len(stages) == max(expected.values()) + 1


class Twice(nn.Module):
    """Two stacks of as many layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Encoder(2), Encoder(2)

    def forward(self, x):
        return self.two(self.one(x))


REFUSED = {
    "no match": (
        {"pipeline": ["embeddings", "encodr.layer.*"]},
        UnknownNameError,
        "in pipeline 'encodr.layer.*'. Did you mean 'encoder.layer",
    ),
    "no match in inference": (
        {"inference": {"pipeline": ["x*"]}},
        UnknownNameError,
        "pipeline 'x",
    ),
    "an overlap": (
        {"pipeline": ["encoder.layer.*", "encoder.layer.3"]},
        ConfigError,
        "'encoder.layer.*' and 'encoder.layer.3' in different stages",
    ),
    "too few": (
        {"layers_per_ipu": [0, 2, 3]},
        ConfigError,
        "places 5 layers, .* It has encoder.layer \\(6\\)",
    ),
    "too many": (
        {"layers_per_ipu": {"encoder.layer": [0, 4, 4]}},
        ConfigError,
        "places 8 layers of encoder.layer, which has 6",
    ),
    "a rest for too many": (
        {"layers_per_ipu": [3, -1, -1, -1, -1, -1]},
        ConfigError,
        "leaves IPU 1 without layers",
    ),
    "a mistyped list": (
        {"layers_per_ipu": {"encoder.layers": [3, 3]}},
        UnknownNameError,
        "layers_per_ipu 'encoder.layers'. Did you mean 'encoder.layer'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_the_module_is_refused_before_anything_happens(name):
    config, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        IPUModel(classifier(), IPUConfig(**config))


def test_two_lists_of_one_length_are_told_apart_by_name():
    module = Twice()
    with pytest.raises(ConfigError, match=r"about one.layer or two.layer.*\{'one"):
        IPUModel(module, IPUConfig(layers_per_ipu=[1, 1]))
    assert set(ipus_of_stack(module, {"two.layer": [1, 1]})) == {0, 1}
    both = {"one.layer": [1, 1, 0, 0], "two.layer": [0, 0, 1, 1]}
    assert ipus_of_stack(module, both) == [0, 1, 2, 3]


def ipus_of_stack(module, layers_per_ipu):
    config = IPUConfig(layers_per_ipu=layers_per_ipu)
    layers = summarize(module, config, torch.zeros(1, 5)).layers
    return [layer.ipu for layer in layers if layer.kind == "Linear"]


def test_the_layers_of_a_sequential_are_its_modules():
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh())
    assert list(ipus_of(module, layers_per_ipu=[2, 2]).values()) == [0, 1]
    shared = nn.Tanh()  # it joins what runs
    module = nn.Sequential(nn.Linear(3, 5), shared, nn.Linear(5, 5), shared)
    assert list(ipus_of(module, layers_per_ipu=[2, 2]).values()) == [0, 1]
    model = reference.compiled(module, IPUConfig(layers_per_ipu=[2, 2]))
    model.fit(X, Y, batch_size=12, verbose=0)  # on IPU 0 it would be a step back


def test_a_pattern_that_forward_never_calls_is_refused():
    model = reference.compiled(
        classifier(), IPUConfig(pipeline=["embeddings", "unus*"])
    )
    with pytest.raises(ConfigError, match=r"stage 'unus\*' begins at unused, .* none"):
        model.fit(X, Y, batch_size=12, verbose=0)


class Tied(nn.Module):
    """Multiplies by the table again at the end, as language models do."""

    def __init__(self, head=None):
        super().__init__()
        self.table, self.body = nn.Linear(3, 4, bias=False), nn.Linear(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        if head is None:
            self.head.weight = self.table.weight
        self.last = head or self.head

    def forward(self, x):
        x = self.body(self.table(x))
        return self.last(x) if self.last is self.head else self.last(self, x)


def by_function(module, x):
    return module.head(x) @ module.body.weight.t()


STAGES = ["table", "body", "head"]


@pytest.mark.parametrize("precision", ["float32", "16.16"])
@pytest.mark.parametrize(
    ("head", "weight"), [(None, "table.weight"), (by_function, "body.weight")]
)
def test_a_weight_on_two_ipus_is_refused_before_anything_compiles(
    head, weight, precision
):
    config = IPUConfig(pipeline=STAGES, precision=precision)
    model = reference.compiled(Tied(head), config)
    message = "Submodules that share a weight stay on one IPU"
    with pytest.raises(ConfigError, match=rf"{message}. {weight} is used in") as found:
        model.fit(X, Y, batch_size=20, verbose=0)
    assert "poptorch.Stage(...).ipu(" in str(found.value)
    assert message in model.check(X, Y, 20).findings[0].what


@pytest.mark.parametrize(
    "config",
    [
        IPUConfig(pipeline=["table", "body", poptorch.Stage("head").ipu(0)]),
        IPUConfig(pipeline=STAGES, execution="sharded"),
    ],
)
def test_a_weight_is_used_twice_on_one_ipu_or_by_one_after_the_other(config):
    model = reference.compiled(Tied(), config)
    assert not model.check(X, Y, 20).is_refused
    model.fit(X, Y, batch_size=20, verbose=0)


def test_a_block_with_a_bracket_in_its_name_is_no_pattern():
    module = reference.network()
    poptorch.BeginBlock(module[0], "part[0]")
    poptorch.BeginBlock(module[2], "part[1]")
    model = reference.compiled(module, IPUConfig(pipeline=("part[0]", "part[1]")))
    model.fit(X, Y, batch_size=12, verbose=0)
    assert summarize(module, model.config, X).num_ipus == 2


# Blocks of the module's own ---------------------------------------------------------


def annotated(ipus=(0, 1, 2)):
    """A module that begins a block at each of three layers."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 4))
    for child, ipu in zip(module, ipus):
        poptorch.BeginBlock(child, f"block {ipu}", ipu_id=ipu)
    return module


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_annotated_layers_are_evaluated_as_a_pipeline(monkeypatch, iterations):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "4")
    module = annotated()
    with torch.no_grad():
        outputs = module(X)
    expected = nn.functional.cross_entropy(outputs, Y).item()
    seen = []
    config = IPUConfig(
        micro_batch_size=4,
        inference_iterations=iterations,
        customize=lambda options, is_training: seen.append(options.toDict()),
    )
    model = reference.compiled(module, config)
    assert model.evaluate(X, Y, verbose=0)["loss"] == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(model.predict(X, verbose=0), outputs)
    assert {one["device_iterations"] for one in seen} == {max(iterations, 3)}
    assert {one["execution_mode"] for one in seen} == {0}  # pipelined
    model.detach()


def test_the_micro_batches_of_annotated_layers_are_derived():
    module = annotated()

    def stages(module, **config):
        model = reference.compiled(copy.deepcopy(module), IPUConfig(**config))
        return model.batch_plan(X, Y).stages

    assert stages(module) == 3
    assert stages(module, execution="sharded") == 1
    assert stages(module, pipeline=("block 0", ("block 1", "block 2"))) == 2
    assert stages(annotated((1, 3, 3))) == 3  # from IPU 0 on
    losses = []
    for given in ({"gradient_accumulation": 5}, {}):
        model = reference.compiled(copy.deepcopy(module), IPUConfig(**given))
        history = model.fit(X, Y, batch_size=10, verbose=0, shuffle=False)
        losses.append(history.history["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("names", "config", "message"),
    [
        (("early",), {"pipeline": ("0", "2")}, "2 begins the block 'early'"),
        ((None,), {"pipeline": ("begin", "end")}, "begins a block without a name"),
        (("early",), {"layers_per_ipu": [1, 2]}, "no stage that layers_per_ipu makes"),
        (
            ("early",),
            {"pipeline": ("early",), "inference": {"pipeline": ("0", "2")}},
            "'early'",
        ),
    ],
)
def test_annotated_blocks_of_no_stage_are_refused_at_once(names, config, message):
    module = reference.network()
    for child, name in zip(module[2:], names):
        poptorch.BeginBlock(child, name, ipu_id=1)
    with pytest.raises(ConfigError, match=message):
        IPUModel(module, IPUConfig(**config))
    poptorch.removeBlocks(module)
    IPUModel(module, IPUConfig(pipeline=("0", "2")))


@pytest.mark.parametrize(
    ("config", "batch_size"),
    [({"micro_batch_size": 4}, 8), ({"gradient_accumulation": 2}, 8)],
)
def test_too_few_micro_batches_for_annotated_layers_are_explained(config, batch_size):
    model = reference.compiled(annotated(), IPUConfig(**config))
    with pytest.raises(ConfigError, match=r"3 stages.*5"):
        model.fit(X, Y, batch_size=batch_size, verbose=0)
