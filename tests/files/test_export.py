# SPDX-License-Identifier: Apache-2.0
"""`IPUModel.export`: an inference program in a file, beside its description."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
import torch

from ipufit import (
    ConfigError,
    DataError,
    IPUConfig,
    IPUModel,
    UnsupportedError,
    poptorch,
)
from tests import reference

X, Y = reference.samples(32)
HAS_HALF = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 1)


class TwoOutputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, left, right):
        hidden = self.layer(left)
        return hidden, {"sum": hidden + self.layer(right)}


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4)
    )


def make(**config):
    return reference.compiled(network(), **config, optimizer="adam")


def calls(loaded, about):
    """Outputs for all samples, call by call."""
    size = about["samples_per_call"]
    return torch.cat([loaded(X[at : at + size]) for at in range(0, len(X), size)])


LAYOUTS = {
    "plain": {"micro_batch_size": 8},
    "replicas": {"micro_batch_size": 4, "replicas": 2, "device_iterations": 2},
    "pipeline": {"micro_batch_size": 4, "pipeline": ["0", "2"]},
    "patterns": {"micro_batch_size": 4, "pipeline": ["[01]", "2*"]},
    "layers": {"micro_batch_size": 4, "layers_per_ipu": [1, -1]},
    "fewer IPUs": {
        "micro_batch_size": 4,
        "pipeline": ["0", "2"],
        "inference": {"pipeline": None},
    },
    "two blocks on one IPU": {"micro_batch_size": 4, "pipeline": [("0", "1"), "2"]},
    "sharded": {"micro_batch_size": 8, "pipeline": ["0", "2"], "execution": "sharded"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_that_the_file_gives_the_bits_of_predict(layout, tmp_path, monkeypatch):
    # Products of several micro-batches at once may be rounded otherwise.
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", "0")
    model = make(**LAYOUTS[layout])
    model.fit(X, Y, 16, verbose=0)
    about = model.export(tmp_path / "model.popef", X[:1])
    loaded = poptorch.load(str(tmp_path / "model.popef"))
    assert torch.equal(calls(loaded, about), model.predict(X, verbose=0))
    size = about["samples_per_call"]
    assert about["inputs"] == [
        {"name": "input", "shape": [size, 3], "dtype": "float32"}
    ]
    assert about["outputs"] == [
        {"name": "output", "shape": [size, 4], "dtype": "float32"}
    ]


@pytest.mark.skipif(not HAS_HALF, reason="torch computes nothing in float16 here")
def test_that_half_precision_takes_halves(tmp_path):
    model = make(micro_batch_size=32, precision="float16")
    about = model.export(tmp_path / "half.popef", X)
    loaded = poptorch.load(str(tmp_path / "half.popef"))
    assert torch.equal(loaded(X.half()), model.predict(X, verbose=0))
    assert about["inputs"][0]["dtype"] == about["outputs"][0]["dtype"] == "float16"


def test_that_inputs_have_names_and_outputs_nest(tmp_path):
    model = IPUModel(TwoOutputs(), IPUConfig(micro_batch_size=8))
    x = {"right": X, "left": -X}
    about = model.export(tmp_path / "two.popef", x)
    loaded = poptorch.load(str(tmp_path / "two.popef"))
    first, rest = loaded(left=-X[:8], right=X[:8])
    expected = model.predict(x, verbose=0)
    assert torch.equal(first, expected[0][:8])
    assert torch.equal(rest["sum"], expected[1]["sum"][:8])
    assert [one["name"] for one in about["inputs"]] == ["right", "left"]
    assert [one["name"] for one in about["outputs"]] == ["output_1", "output_2"]


def test_the_description(tmp_path):
    path = tmp_path / "deep" / "model.popef"
    about = make().export(path, torch.empty(1, 3, device="meta"), batch_size=4)
    written = json.loads((path.parent / "model.popef.json").read_text("utf-8"))
    assert written == about
    assert about["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert about["bytes"] == path.stat().st_size
    assert about["versions"]["torch"] == torch.__version__
    assert sorted(os.listdir(path.parent)) == ["model.popef", "model.popef.json"]


def test_an_executable_alone(tmp_path):
    """Made offline, in a folder under the name that Triton looks for."""
    offline = IPUModel(network(), IPUConfig(micro_batch_size=8, offline=True))
    offline.export(tmp_path, X)
    files = ["executable.popef", "executable.popef.json"]
    assert sorted(os.listdir(tmp_path)) == files
    model = make(micro_batch_size=8)
    loaded = poptorch.load(str(tmp_path / files[0]))
    assert torch.equal(loaded(X[:8]), model.predict(X[:8], verbose=0))
    path = str(tmp_path / "alone.popef")
    model.export(path, X, with_module=False)
    with pytest.raises(AssertionError):
        poptorch.load(path)
    options = model.config.build_inference_options(model.config.inference_plan(8))
    executor = poptorch.inferenceModel(model.module.eval(), options)
    executor.loadExecutable(path)
    assert torch.equal(executor(X[:8]), model.predict(X[:8], verbose=0))


def test_that_a_file_stays_whole_if_writing_fails(tmp_path):
    class Local(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 4)

        def forward(self, x):
            return self.layer(x)

    path = tmp_path / "model.popef"
    make().export(path, X)
    before = path.read_bytes(), (tmp_path / "model.popef.json").read_bytes()
    with pytest.raises(UnsupportedError, match="Local can't be pickled"):
        IPUModel(Local()).export(path, X)
    assert before == (path.read_bytes(), (tmp_path / "model.popef.json").read_bytes())
    assert len(os.listdir(tmp_path)) == 2
    IPUModel(Local()).export(path, X, with_module=False)


@pytest.mark.parametrize("inputs", [torch.rand(8, 5), (X, X)])
def test_that_inputs_which_do_not_fit_are_named(tmp_path, inputs):
    model = make(micro_batch_size=8)
    with pytest.raises(DataError, match=r"Sequential.*(\[8, 5\]|2 by place)"):
        model.export(tmp_path / "model.popef", inputs)
    assert not list(tmp_path.iterdir())
    assert len(model.predict(X, verbose=0)) == len(X)


def test_that_names_of_own_blocks_are_refused(tmp_path):
    model = IPUModel(network(), IPUConfig(pipeline=("front", "back")))
    with pytest.raises(UnsupportedError, match="names 'front', a block"):
        model.export(tmp_path / "model.popef", X)
    assert not os.listdir(tmp_path)


def test_that_a_stage_after_the_layers_is_refused(tmp_path):
    model = IPUModel(network(), IPUConfig(layers_per_ipu=[2, 1, 0]))
    with pytest.raises(UnsupportedError, match="begins a stage after the last"):
        model.export(tmp_path / "model.popef", X)


def test_that_the_model_goes_on_as_before(tmp_path):
    def train(*, exports):
        model = make(seed=1)
        model.fit(X, Y, 8, verbose=0)
        torch.manual_seed(5)
        if exports:
            model.export(tmp_path / "model.popef", X)
        assert not model.module._forward_pre_hooks
        drawn = torch.rand(2).tolist()
        history = model.fit(X, Y, 8, verbose=0).history
        return drawn, history, [one.tolist() for one in model.get_weights()]

    assert train(exports=True) == train(exports=False)


@pytest.mark.parametrize(
    ("name", "words"), [("a.pt2", r"torch\.export\.export"), ("a.onnx", "torch.onnx")]
)
def test_what_torch_exports_is_refused_with_the_way(tmp_path, name, words):
    with pytest.raises(ConfigError, match=words):
        IPUModel(torch.nn.Linear(4, 3)).export(tmp_path / name, torch.zeros(4, 4))
