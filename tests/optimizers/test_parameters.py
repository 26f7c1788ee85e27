# SPDX-License-Identifier: Apache-2.0
"""Which parameters are trained, and which are spared the weight decay."""

from __future__ import annotations

import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

from ipufit import ConfigError, IPUConfig, IPUModel, Optimizer, UnknownNameError, freeze


class ScaleNorm(nn.Module):
    """Made by a user; torch knows nothing of it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.inner = nn.Linear(2, 2)


class MyLayer(nn.LayerNorm):
    pass


@pytest.fixture
def module():
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(3, 4),
            "body": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
            "head": nn.Linear(4, 2, bias=False),
        }
    )


def groups_of(module, **words):
    """Names of the parameters of each group, and the zeros that set it apart."""
    settings = {"weight_decay": 0.5, "max_weight_norm": 2.0}
    made = Optimizer("lamb", **settings, **words).bind(module)
    names = {id(p): name for name, p in module.named_parameters()}
    return [
        (
            {names[id(p)] for p in group["params"]},
            {name for name in settings if group[name] == 0},
        )
        for group in made.param_groups
    ]


def spared(module, no_decay):
    groups = groups_of(module, no_decay=no_decay)
    every = [name for names, _ in groups for name in names]
    assert sorted(every) == sorted(name for name, _ in module.named_parameters())
    return set().union(*(names for names, zeros in groups if zeros))


@pytest.mark.parametrize(
    ("no_decay", "expected"),
    [
        ((), set()),
        (("bias",), {"body.0.bias", "body.1.bias"}),
        (("norm",), {"body.1.weight", "body.1.bias"}),
        ("bias_and_norm", {"body.0.bias", "body.1.weight", "body.1.bias"}),
        (("bias", "norm"), {"body.0.bias", "body.1.weight", "body.1.bias"}),
        (("embed.*",), {"embed.weight"}),
        (("body.?.weight",), {"body.0.weight", "body.1.weight"}),
        (("head.weight", "bias"), {"head.weight", "body.0.bias", "body.1.bias"}),
    ],
)
def test_kinds_and_patterns_choose_parameters(module, no_decay, expected):
    assert spared(module, no_decay) == expected


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(2),
        nn.BatchNorm2d(2),
        nn.SyncBatchNorm(2),
        nn.InstanceNorm1d(2, affine=True),
        nn.GroupNorm(1, 2),
        nn.LayerNorm(2),
        MyLayer(2),
        *([nn.RMSNorm(2)] if hasattr(nn, "RMSNorm") else []),
    ],
)
def test_all_parameters_of_torchs_norms_are_norms(layer):
    own = {name for name, _ in layer.named_parameters()}
    assert own
    assert spared(layer, "norm") == own


def test_a_users_norm_goes_by_its_name_and_covers_no_layer_inside():
    assert spared(ScaleNorm(), "norm") == {"scale"}


def test_a_tied_parameter_is_spared_by_any_of_its_names(module):
    module["decoder"] = nn.Linear(4, 2, bias=False)
    module["decoder"].weight = module["head"].weight
    assert spared(module, "decoder.*") == {"head.weight"}


@pytest.mark.parametrize("word", ["no_decay", "no_trust_ratio"])
@pytest.mark.parametrize("pattern", ["head.bias", "Embed*", "body"])
def test_a_pattern_that_matches_nothing_is_refused(module, pattern, word):
    message = rf"{word} has '{re.escape(pattern)}'.*no parameter.*embed\.weight"
    with pytest.raises(ConfigError, match=message):
        groups_of(module, **{word: ("bias", pattern)})


def test_decay_and_trust_ratio_make_up_to_four_groups(module):
    assert groups_of(module, no_decay="norm", no_trust_ratio="bias") == [
        ({"embed.weight", "body.0.weight", "head.weight"}, set()),
        ({"body.1.weight"}, {"weight_decay"}),
        ({"body.1.bias"}, {"weight_decay", "max_weight_norm"}),
        ({"body.0.bias"}, {"max_weight_norm"}),
    ]


# Which parameters are frozen, and what becomes of them in training ------------------


def network():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
        return nn.Sequential(
            OrderedDict(stem=nn.Linear(4, 4), body=body, head=nn.Linear(5, 2))
        )


def trained(module):
    return [name for name, p in module.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("before", "frozen"),
    [
        ("body", ["stem"]),
        ("body.0", ["stem"]),
        ("body.2", ["stem", "body.0", "body.1"]),
        ("head", ["stem", "body"]),
    ],
)
def test_all_before_the_layer_is_frozen_and_nothing_else(before, frozen):
    module = network()
    result = freeze(module, before=before)
    expected = [
        name
        for name, _ in module.named_parameters()
        if not name.startswith(tuple(f"{layer}." for layer in frozen))
    ]
    assert trained(module) == expected
    assert result.trained_parameters == len(expected)
    assert result.parameters + result.trained_parameters == 10
    values = sum(p.numel() for p in module.parameters())
    assert result.values + result.trained_values == values
    assert str(result).startswith(f"Frozen before {before!r}: {result.parameters} ")


def test_own_parameters_of_what_contains_the_layer_are_frozen():
    module = network()
    module.body.scale = nn.Parameter(torch.ones(1))
    module.late = nn.Parameter(torch.ones(1))
    freeze(module, before="body.2")
    assert not module.body.scale.requires_grad
    assert not module.late.requires_grad
    assert module.body[2].weight.requires_grad


def test_a_parameter_that_a_later_layer_shares_is_frozen():
    module = network()
    module.body[2].weight = module.body[0].weight = nn.Parameter(torch.ones(5, 5))
    freeze(module, before="body.1")
    assert not module.body[2].weight.requires_grad


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("bodi.2", r"Unknown layer 'bodi\.2'.*'body\.2'"),
        ("", "Unknown layer ''"),
        ("classifier", "Known: body, head, stem"),
    ],
)
def test_a_layer_that_is_not_there_is_refused(before, message):
    module = network()
    with pytest.raises(UnknownNameError, match=message):
        freeze(module, before=before)
    assert len(trained(module)) == 10


def test_freezing_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"before 'stem'.*stem, body, body\.0"):
        freeze(network(), before="stem")


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_frozen_layers_stay_in_training_and_their_statistics_if_asked(statistics, mode):
    module = network().train(mode)
    freeze(module, before="body.2", statistics=statistics)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = IPUModel(module, IPUConfig(seed=1))
    model.compile("adamw", "cross_entropy")
    x, y = torch.randn(16, 4), torch.randint(2, (16,))
    model.fit(x, y, batch_size=8, verbose=0)
    changed = {
        name
        for name, t in module.state_dict().items()
        if not torch.equal(t, before[name])
    }
    expected = {"body.2.weight", "body.2.bias", "head.weight", "head.bias"}
    if not statistics:
        expected |= {f"body.1.running_{name}" for name in ("mean", "var")}
        expected.add("body.1.num_batches_tracked")
    assert changed == expected


def test_what_is_no_module_is_refused():
    with pytest.raises(ConfigError, match=r"an IPUModel is model\.module"):
        freeze(IPUModel(network()), before="head")
