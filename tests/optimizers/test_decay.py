# SPDX-License-Identifier: Apache-2.0
"""Which parameters are spared the weight decay."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from ipufit import ConfigError
from ipufit.optimizers.decay import groups_in_words, parameter_groups, spared, words


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


@pytest.mark.parametrize(
    ("no_decay", "expected"),
    [
        ((), set()),
        (("bias",), {"body.0.bias", "body.1.bias"}),
        (("norm",), {"body.1.weight", "body.1.bias"}),
        (words("bias_and_norm"), {"body.0.bias", "body.1.weight", "body.1.bias"}),
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
    assert spared(layer, ("norm",)) == own


def test_a_users_norm_goes_by_its_name_and_covers_no_layer_inside():
    assert spared(ScaleNorm(), ("norm",)) == {"scale"}


def test_a_tied_parameter_is_spared_by_any_of_its_names(module):
    module["decoder"] = nn.Linear(4, 2, bias=False)
    module["decoder"].weight = module["head"].weight
    assert spared(module, ("decoder.*",)) == {"head.weight"}


@pytest.mark.parametrize("pattern", ["head.bias", "Embed*", "body"])
def test_a_pattern_that_matches_nothing_is_refused(module, pattern):
    message = rf"'{re.escape(pattern)}'.*no parameter.*embed\.weight"
    with pytest.raises(ConfigError, match=message):
        spared(module, ("bias", pattern))


def test_a_kind_may_match_nothing(module):
    assert spared(module["head"], ("bias", "norm")) == set()


def test_groups_hold_every_parameter_once(module):
    groups = parameter_groups(module, ("bias", "norm"))
    together = [id(p) for group in groups for p in group["params"]]
    assert sorted(together) == sorted(id(p) for p in module.parameters())
    assert [len(group["params"]) for group in groups] == [3, 3]
    assert groups[1]["weight_decay"] == 0.0
    assert "weight_decay" not in groups[0]


@pytest.mark.parametrize(("no_decay", "decays"), [((), True), (("*",), False)])
def test_no_group_is_empty(module, no_decay, decays):
    (group,) = parameter_groups(module, no_decay)
    assert len(group["params"]) == 6
    assert ("weight_decay" in group) is not decays


def test_words_are_spelled_out_once():
    assert words("bias_and_norm") == ("bias", "norm")
    assert words(["norm", "bias_and_norm", "embed*"]) == ("norm", "bias", "embed*")
    assert words(()) == ()


def test_decay_and_trust_ratio_make_up_to_four_groups(module):
    groups = parameter_groups(module, ["norm"], ["bias"])
    names = {id(p): name for name, p in module.named_parameters()}
    found = [
        (
            group.get("weight_decay"),
            group.get("max_weight_norm"),
            {names[id(p)] for p in group["params"]},
        )
        for group in groups
    ]
    assert found == [
        (None, None, {"embed.weight", "body.0.weight", "head.weight"}),
        (0.0, None, {"body.1.weight"}),
        (0.0, 0.0, {"body.1.bias"}),
        (None, 0.0, {"body.0.bias"}),
    ]


def test_a_pattern_of_no_trust_ratio_that_matches_nothing_is_refused(module):
    with pytest.raises(ConfigError, match="no_trust_ratio has 'heads"):
        parameter_groups(module, (), ["heads.*"])


def test_groups_are_told_apart_by_what_differs(module):
    groups = parameter_groups(module, ["bias", "norm"])
    assert groups_in_words(torch.optim.AdamW(groups, weight_decay=0.25)) == (
        "weight_decay 0.25: 3 parameters (36 values); "
        "weight_decay 0: 3 parameters (12 values)"
    )
