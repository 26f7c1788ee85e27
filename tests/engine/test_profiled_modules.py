# SPDX-License-Identifier: Apache-2.0
"""Modules have the names in timelines that users know them by."""

from __future__ import annotations

import pytest
from torch import nn

from ipufit.engine.profiled_modules import NamedModules
from ipufit.profiling import Timeline


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.Linear(1, 1)
        self.encoder = nn.ModuleList([nn.Sequential(nn.ReLU())])
        self.decoder = nn.ModuleDict({"0": nn.ReLU(), "end": nn.ReLU()})
        self.again = self.loss


def name_of(scope):
    timeline = Timeline()
    timeline.start("run")
    heard = NamedModules(timeline, Network())
    heard.end(heard.begin(scope, "forward"))
    timeline.stop()
    return timeline.spans[0].name


@pytest.mark.parametrize(
    ("scope", "name"),
    [
        ("forward", "forward"),
        ("backward", "backward"),
        ("upload", "upload"),
        ("download", "download"),
        ("", "loss"),
        ("0", "loss"),
        ("module", "Network"),
        ("module/loss", "loss"),
        ("module/again", "again"),
        ("module/0", "0"),  # of two lists
        ("module/0/0", "encoder.0.0"),
        ("module/end", "decoder.end"),
        ("module/of the user's own", "of the user's own"),
    ],
)
def test_scopes_have_names(scope, name):
    assert name_of(scope) == name


def test_it_is_on_while_the_timeline_is():
    timeline = Timeline()
    heard = NamedModules(timeline, Network())
    assert not heard.is_on
    assert heard.begin("module", "forward") is None
    timeline.start("run")
    assert heard.is_on
