# SPDX-License-Identifier: Apache-2.0
"""`summary`: order, shapes, parameters, stages."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from ipufit import IPUConfig, IPUModel, poptorch
from ipufit.summary import summarize
from tests import reference


class Crossed(nn.Module):
    """Made in another order than it is called, with tied and frozen weights."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 6, bias=False)
        self.body = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
        self.first = nn.Embedding(6, 6)
        self.shift = nn.Parameter(torch.zeros(6))
        self.unused = nn.Dropout()
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.body[0].bias.requires_grad_(False)

    def forward(self, x):
        hidden = self.tied(self.first(x) + self.shift)
        hidden = self.body(hidden)
        return {"scores": self.last(hidden), "hidden": (hidden, None)}


def rows(summary):
    return [(layer.name, layer.shape) for layer in summary.layers]


X = torch.randint(0, 6, (1, 3))


def test_layers_come_in_the_order_of_their_calls():
    assert rows(summarize(Crossed(), IPUConfig(), X)) == [
        ("first", "(N, 3, 6)"),
        ("tied", "(N, 3, 6)"),
        ("body.0", "(N, 3, 4)"),
        ("body.1", "(N, 3, 4)"),
        ("last", "(N, 3, 6)"),
        ("(itself)", "(N, 3, 6), (N, 3, 4)"),
        ("unused", "?"),
    ]


def test_without_inputs_they_come_as_they_were_made():
    assert rows(summarize(Crossed(), IPUConfig())) == [
        (name, "?")
        for name in (
            "(itself)",
            "last",
            "body.0",
            "body.1",
            "first",
            "unused",
            "tied",
        )
    ]


def test_tied_weights_count_once_in_the_total():
    summary = summarize(Crossed(), IPUConfig(), X)
    counts = {
        layer.name: (layer.parameters, layer.trainable) for layer in summary.layers
    }
    assert counts == {
        "first": (36, 36),
        "tied": (36, 36),
        "body.0": (28, 24),
        "body.1": (0, 0),
        "last": (24, 24),
        "(itself)": (6, 6),
        "unused": (0, 0),
    }
    assert summary.total_parameters == 36 + 28 + 24 + 6
    assert summary.trainable_parameters == summary.total_parameters - 4
    assert summary.total_parameters == sum(p.numel() for p in Crossed().parameters())


def test_nothing_of_the_module_changes():
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    module[0].eval()
    before = reference.weights(module)
    summarize(module, IPUConfig(), torch.randn(1, 3))
    assert [m.training for m in module.modules()] == [True, False, True]
    assert not any(m._forward_hooks for m in module.modules())
    after = reference.weights(module)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def stages(pipeline, inputs=X, module=None):
    config = IPUConfig(pipeline=pipeline)
    summary = summarize(module or Crossed(), config, inputs)
    return {layer.name: (layer.stage, layer.ipu) for layer in summary.layers}


def test_a_stage_lasts_until_the_next_one_begins():
    found = stages(("first", "body", "last"))
    assert found["first"] == found["tied"] == (0, 0)
    assert found["body.0"] == found["body.1"] == (1, 1)
    assert found["last"] == (2, 2)


def test_stages_may_have_several_names_and_ipus_of_their_own():
    first = poptorch.Stage("first").ipu(3)
    found = stages([first, ("body.1", "last")])
    assert found["first"] == found["tied"] == found["body.0"] == (0, 3)
    assert found["body.1"] == found["last"] == (1, 1)


@pytest.mark.parametrize("pipeline", [None, ("mine", "yours")])
def test_without_stages_of_submodules_there_is_no_column(pipeline):
    assert set(stages(pipeline).values()) == {(None, None)}


def printed(summary):
    stream = io.StringIO()
    summary.print(Console(file=stream, width=100))
    return stream.getvalue()


def test_a_table_is_printed():
    text = printed(summarize(Crossed(), IPUConfig(pipeline=("first", "last")), X))
    for word in ("Crossed", "Stage", "IPU", "body.0", "Linear", "(N, 3, 4)"):
        assert word in text
    assert "Parameters: 94, trainable: 90" in text
    assert "Stage" not in printed(summarize(Crossed(), IPUConfig()))


def test_thousands_are_set_apart():
    assert "1,001,000" in printed(summarize(nn.Linear(1000, 1000), IPUConfig()))


# Of a model ----------------------------------------------------------------------


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(3, 4)
        self.right = nn.LSTM(2, 5, batch_first=True)

    def forward(self, left, right):
        return self.left(left), self.right(right)[0]


@pytest.mark.parametrize("kind", [dict, tuple])
def test_inputs_may_nest(capsys, kind):
    x = {"left": torch.zeros(7, 3), "right": torch.zeros(7, 4, 2)}
    model = IPUModel(Several())
    summary = model.summary(x if kind is dict else tuple(x.values()))
    assert rows(summary)[:2][0] == ("left", "(N, 4)")
    assert rows(summary)[1][1].startswith("(N, 4, 5)")
    assert "LSTM" in capsys.readouterr().out


def test_the_inputs_of_the_last_run_will_do(capsys):
    model = IPUModel(reference.network())
    assert {shape for _, shape in rows(model.summary())} == {"?"}
    model.predict(torch.zeros(3, 3), verbose=0)
    assert rows(model.summary()) == [("0", "(N, 5)"), ("1", "(N, 5)"), ("2", "(N, 4)")]
    capsys.readouterr()


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_in_the_middle_of_a_training_it_looks_without_touching(capsys, precision):
    x, y = reference.samples(32)
    model = IPUModel(reference.network(), IPUConfig(precision=precision))
    model.compile("sgd", "cross_entropy")
    model.train_on_batch(x, y)
    summary = model.summary()
    assert rows(summary) == [("0", "(N, 5)"), ("1", "(N, 5)"), ("2", "(N, 4)")]
    assert summary.total_parameters == 3 * 5 + 5 + 5 * 4 + 4
    before = model.get_weights()
    model.train_on_batch(x, y)
    assert any((a != b).any() for a, b in zip(before, model.get_weights()))
    capsys.readouterr()
