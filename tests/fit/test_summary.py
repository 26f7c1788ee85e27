# SPDX-License-Identifier: Apache-2.0
"""`summary`: order, shapes, parameters, stages."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from ipufit import IPUConfig, IPUModel, poptorch
from tests import reference
from tests.interpreters import run_python


def summarize(module, config, inputs=None):
    with contextlib.redirect_stdout(io.StringIO()):
        return IPUModel(module, config).summary(inputs)


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


@pytest.mark.parametrize("is_own", [True, False])
def test_a_forward_that_is_a_closure_shows_its_layers(is_own):
    inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module, call = inner, inner.forward
    if not is_own:
        module, call = nn.Sequential(inner), inner
    module.forward = lambda x: call(x) * 2
    before = reference.weights(module)
    shapes = dict(rows(summarize(module, IPUConfig(), torch.randn(4, 3))))
    assert [shapes[name] for name in shapes if name[-1] in "012"] == [
        "(N, 4)",
        "(N, 4)",
        "(N, 2)",
    ]
    after = reference.weights(module)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def stages(pipeline, inputs=X, module=None):
    config = IPUConfig(pipeline=pipeline)
    summary = summarize(module or Crossed(), config, inputs)
    return {layer.name: (layer.stage, layer.ipu) for layer in summary.layers}


@pytest.mark.parametrize("inputs", [None, X])
def test_without_stages_there_is_no_column(inputs):
    assert set(stages(None, inputs).values()) == {(None, None)}


class Blocks(nn.Module):
    """Begins blocks itself, in one of PopTorch's ways."""

    def __init__(self, kind):
        super().__init__()
        self.zero, self.one = nn.Linear(3, 3), nn.Linear(3, 4)
        self.two = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.kind = kind
        self.early_ipu, self.late_ipu = (None, None) if kind == "names" else (1, 3)
        if kind == "annotated":
            poptorch.BeginBlock(self.one, "early", ipu_id=1)
            poptorch.BeginBlock(self.two, "late", ipu_id=3)

    def forward(self, x):
        if self.kind == "annotated":
            return self.two(self.one(self.zero(x)))
        if self.kind == "started":
            x = self.zero(x)
            poptorch.Block.start(ipu_id=1)
            x = self.one(x)
            poptorch.Block.start("late", ipu_id=3)
            return self.two(x)
        x = self.zero(x)
        with poptorch.Block("early", ipu_id=self.early_ipu):
            x = self.one(x)
        with poptorch.Block("late", ipu_id=self.late_ipu):
            return self.two(x)


OWN = torch.zeros(1, 3)
PLACES = {"zero": (0, 0), "one": (1, 1), "two.0": (3, 3), "two.1": (3, 3)}


@pytest.mark.parametrize("kind", ["annotated", "started", "with"])
def test_blocks_that_forward_begins_are_shown(kind):
    assert stages(None, OWN, Blocks(kind)) == PLACES


def test_annotations_are_seen_without_inputs():
    assert stages(None, None, Blocks("annotated")) == PLACES
    assert set(stages(None, None, Blocks("with")).values()) == {(None, None)}


@pytest.mark.parametrize(
    ("pipeline", "early", "late"),
    [
        (("early", "late"), (0, 0), (1, 1)),
        ((("other", "early"), "late"), (0, 0), (1, 1)),
        ([poptorch.Stage("early").ipu(2), "late"], (0, 2), (1, 1)),
        ([poptorch.Stage("early"), poptorch.Stage("late")], (0, 1), (1, 3)),
        (poptorch.PipelinedExecution("early", "late"), (None, 1), (None, 3)),
    ],
)
def test_a_pipeline_places_the_blocks_it_names(pipeline, early, late):
    found = stages(pipeline, OWN, Blocks("with"))
    assert (found["one"], found["two.0"]) == (early, late)


@pytest.mark.parametrize(
    ("config", "kind", "inputs", "expected"),
    [
        ({}, "with", OWN, 4),
        ({"replicas": 2}, "with", OWN, 8),
        ({}, "with", None, None),
        ({"pipeline": ("early", "late"), "replicas": 3}, "names", None, 6),
        ({"pipeline": ("early", "late"), "replicas": 3}, "names", OWN, 6),
        ({"pipeline": poptorch.PipelinedExecution("early", "late")}, "with", OWN, None),
        ({"training_options": poptorch.Options().replicationFactor(2)}, "with", OWN, 8),
        ({"pipeline": [("early", "late")], "replicas": 2}, "names", OWN, 2),
    ],
)
def test_the_ipus_are_counted_before_anything_is_compiled(
    config, kind, inputs, expected
):
    summary = summarize(Blocks(kind), IPUConfig(**config), inputs)
    assert summary.num_ipus == expected
    assert (f"IPUs: {expected}" in printed(summary)) is (expected is not None)
    assert ("summary(x) runs a sample" in printed(summary)) is (inputs is None)


@pytest.mark.parametrize("kind", ["annotated", "started", "with"])
def test_the_ipus_of_a_program_are_those_of_the_summary(monkeypatch, capsys, kind):
    """What forward begins trains with a loss of `compile`, which joins it."""
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "4")
    x, y = torch.randn(30, 3), torch.randint(0, 4, (30,))
    model = IPUModel(
        Blocks(kind), IPUConfig(gradient_accumulation=5, inference_iterations=3)
    )
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=10, verbose=0)
    assert 0 <= model.evaluate(x, y, verbose=0)["accuracy"] <= 1
    summary = model.summary()  # the inputs of the last run
    assert {layer.name: (layer.stage, layer.ipu) for layer in summary.layers} == PLACES
    assert summary.num_ipus == 4
    capsys.readouterr()
    model.detach()


def printed(summary):
    return str(summary)


def test_a_table_is_printed():
    text = printed(summarize(Crossed(), IPUConfig(pipeline=("first", "last")), X))
    for word in ("Crossed", "Stage", "IPU", "body.0", "Linear", "(N, 3, 4)"):
        assert word in text
    assert "Parameters: 94, trainable: 90" in text
    assert "Stage" not in printed(summarize(Crossed(), IPUConfig()))


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


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_in_the_middle_of_a_training_it_looks_without_touching(capsys, precision):
    x, y = reference.samples(32)
    model = reference.compiled(config=IPUConfig(precision=precision))
    model.train_on_batch(x, y)
    summary = model.summary()
    assert rows(summary) == [("0", "(N, 5)"), ("1", "(N, 5)"), ("2", "(N, 4)")]
    assert summary.total_parameters == 3 * 5 + 5 + 5 * 4 + 4
    before = model.get_weights()
    model.train_on_batch(x, y)
    assert any((a != b).any() for a, b in zip(before, model.get_weights()))
    capsys.readouterr()


CONSOLE = """
import torch, ipufit
def show(): model.summary()

model = ipufit.IPUModel(torch.nn.Linear(2, 3))
print("line"); model.summary()
print("function"); show()
print("number"); model.summary().num_ipus
print("end")
"""


def test_python_s_console_shows_it_once():
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=CONSOLE, capture_output=True, text=True
    )
    parts = re.split("line|function|number|end", done.stdout)[1:-1]
    assert [part.count("Parameters: 9") for part in parts] == [1, 1, 0]
    assert "<" not in done.stdout


def test_a_script_prints_it():
    code = "import torch, ipufit; ipufit.IPUModel(torch.nn.Linear(2, 3)).summary()"
    assert run_python("-c", code).stdout.count("Parameters: 9") == 1
