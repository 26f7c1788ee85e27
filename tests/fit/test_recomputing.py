# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of recomputation, and transfers that overlap with computation."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from ipufit import ConfigError, IPUConfig, IPUModel, UnknownNameError, poptorch
from tests.reference import NUM_CLASSES, NUM_FEATURES, compiled, samples


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Nested(torch.nn.Module):
    """Layers whose outputs nest in every way that a hook may meet."""

    def __init__(self):
        super().__init__()
        self.one = Branch(lambda x: (x, [x + 1]))
        self.two = Branch(lambda x: {"x": x, "size": 3, "index": x.argmax(1)})
        self.three = Branch(lambda x: Pair(x, None))
        self.head = torch.nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x):
        first, (second,) = self.one(x)
        named = self.two(first + second)
        return self.head(self.three(named["x"]).left)


class Branch(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.layer = torch.nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.shape = shape

    def forward(self, x):
        return self.shape(self.layer(x))


def trained(**fields):
    torch.manual_seed(0)
    module = Nested()
    model = IPUModel(module, IPUConfig(micro_batch_size=4, **fields))
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    x, y = samples(16)
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return history.history, module.state_dict(), model.predict(x, verbose=0)


def assert_same(one, other):
    assert one[0] == other[0]
    for name, tensor in one[1].items():
        assert torch.equal(tensor, other[1][name]), name
    assert torch.equal(one[2], other[2])


@pytest.mark.parametrize("recompute", ["auto", "off", "one", ["one.*", "t*"]])
def test_recomputation_changes_no_number(recompute):
    assert_same(trained(recompute=recompute), trained())


@pytest.fixture
def kept(monkeypatch):
    """Shapes of the tensors that become checkpoints."""
    found = []
    checkpoint = poptorch.recomputationCheckpoint

    def keep(tensor):
        found.append(tuple(tensor.shape))
        return checkpoint(tensor)

    monkeypatch.setattr(poptorch, "recomputationCheckpoint", keep)
    return found


def test_each_output_that_a_pattern_names_becomes_a_checkpoint(kept):
    trained(recompute=["one", "two", "three"])
    # (x, [x + 1]), x of the dict without its indices, and the left of the pair.
    assert len(kept) == 4
    kept.clear()
    module = Nested()
    trained(recompute="head")
    assert len(kept) == 1  # training alone: nothing is kept for a backward pass else
    assert not module.head._forward_hooks


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["*.layer"], ["one.layer", "two.layer", "three.layer"]),
        (["[ot]*"], ["one", "two", "three"]),  # and nothing inside of them
        (["two*", "two.layer"], ["two", "two.layer"]),
    ],
)
def test_a_pattern_names_submodules_but_none_inside_of_others(kept, patterns, names):
    trained(recompute=patterns)
    found = list(kept)
    kept.clear()
    trained(recompute=names)
    assert found == kept
    assert found


def test_a_pattern_without_a_match_is_refused_with_the_model():
    with pytest.raises(UnknownNameError, match=r"submodule in recompute 'won'.*one"):
        IPUModel(Nested(), IPUConfig(recompute=["two", "won"]))


@pytest.mark.parametrize("mode", ["accumulation", "device_iterations"])
@pytest.mark.parametrize("pipeline", [None, ["one", "two"]])
def test_transfers_that_overlap_change_no_number(mode, pipeline):
    fields = {"num_io_tiles": 32, "overlap_io": mode}
    if pipeline is not None:
        fields.update(pipeline=pipeline, execution="sharded")
    one, other = trained(**fields), trained()
    for name, values in one[0].items():  # summed in a loop, or folded
        assert values == pytest.approx(other[0][name], rel=1e-6)
    assert_same((None, *one[1:]), (None, *other[1:]))


def test_all_inputs_and_outputs_but_the_loss_overlap(monkeypatch):
    marked = {"input": 0, "output": 0}

    def counted(kind):
        mark = getattr(poptorch, f"set_overlap_for_{kind}")

        def count(tensors, mode):
            assert mode == poptorch.OverlapMode.OverlapAccumulationLoop
            marked[kind] += 1
            return mark(tensors, mode)

        monkeypatch.setattr(poptorch, f"set_overlap_for_{kind}", count)

    counted("input")
    counted("output")
    trained(num_io_tiles=32, overlap_io="accumulation")
    # Training: x, y and the number of targets, and the figures. Prediction: x, and the
    # outputs.
    assert marked == {"input": 4, "output": 2}


class OwnBlocks(torch.nn.Module):
    """Two layers on two IPUs, by blocks that the module begins itself."""

    def __init__(self, *, annotated=False):
        super().__init__()
        self.one = torch.nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.two = torch.nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.annotated = annotated
        if annotated:
            poptorch.BeginBlock(self.two, ipu_id=1)

    def forward(self, x):
        if self.annotated:
            return self.two(self.one(x))
        with poptorch.Block("first", ipu_id=0):
            x = self.one(x)
        with poptorch.Block("second", ipu_id=1):
            return self.two(x)


def fitted(module, **fields):
    model = compiled(module, gradient_accumulation=4, **fields)
    model.fit(*samples(16), batch_size=16, verbose=0)


@pytest.mark.parametrize("recompute", ["auto", ["one"]])
def test_annotated_blocks_recompute_as_a_pipeline(recompute):
    kinds = []

    def look(options, is_training):
        kinds.append(options.toDict().get("autoRecomputation"))

    fitted(OwnBlocks(annotated=True), recompute=recompute, customize=look)
    assert set(kinds) == {3}


def test_recomputation_is_refused_in_a_pipeline_that_forward_begins():
    with pytest.raises(ConfigError, match=r"pipeline=\('first', 'second'\)"):
        fitted(OwnBlocks(), recompute="auto")
    fitted(OwnBlocks(), recompute="auto", pipeline=("first", "second"))
    fitted(OwnBlocks(), recompute="auto", execution="sharded")
    fitted(OwnBlocks(), recompute="off")
