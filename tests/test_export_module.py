# SPDX-License-Identifier: Apache-2.0
"""`IPUModel.export` for torch and ONNX: programs that need no IPUs."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys

import pytest
import torch

from ipufit import (
    ConfigError,
    DataError,
    FileError,
    IPUConfig,
    IPUModel,
    UnknownNameError,
    UnsupportedError,
)
from tests import reference

try:
    import tqdm
except ImportError:
    pass
else:
    tqdm.tqdm.monitor_interval = 0  # its thread would outlive the exporter's bars

X, Y = reference.samples(24)
HAS_EXPORT = hasattr(torch, "export") and hasattr(torch.export, "Dim")
HAS_ONNX = importlib.util.find_spec("onnxruntime") is not None
IS_BY_EXPORT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)


class TwoOutputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, left, right):
        hidden = self.layer(left)
        return hidden, {"sum": hidden + self.layer(right)}


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 4)

    def forward(self, ids, mask=None):
        return {"mean": (self.embedding(ids) * mask[..., None]).mean(1)}


class Several(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, *parts):
        return self.layer(parts[0]) * self.layer(parts[1])


def network():
    return torch.nn.Sequential(
        torch.nn.Linear(3, 6),
        torch.nn.BatchNorm1d(6),
        torch.nn.Dropout(),
        torch.nn.Linear(6, 4),
    )


IDS = torch.arange(24 * 5).reshape(24, 5) % 9
CASES = {
    "one input": (network, X),
    "names": (TwoOutputs, {"right": X * 2, "left": X}),
    "tokens": (Tokens, {"ids": IDS, "mask": (IDS > 2).float()}),
    "any number of inputs": (Several, (X, X + 1)),
}


def loaded_torch(path, _inputs):
    program = torch.export.load(path).module()

    def run(inputs):
        if isinstance(inputs, dict):
            return program(**inputs)
        return program(*inputs) if isinstance(inputs, tuple) else program(inputs)

    return run


def loaded_onnx(path, about):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)

    def run(inputs):
        if not isinstance(inputs, (dict, tuple)):
            inputs = (inputs,)
        if isinstance(inputs, tuple):
            names = [one["name"] for one in about["inputs"]]
            inputs = dict(zip(names, inputs))
        given = {name: value.numpy() for name, value in inputs.items()}
        return [torch.from_numpy(one) for one in session.run(None, given)]

    return run


def leaves(outputs):
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    parts = outputs.values() if isinstance(outputs, dict) else outputs
    return [leaf for part in parts for leaf in leaves(part)]


def cut(inputs, rows):
    if isinstance(inputs, dict):
        return {name: value[:rows] for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(value[:rows] for value in inputs)
    return inputs[:rows]


FORMATS = {
    "torch": pytest.param(
        "torch",
        loaded_torch,
        marks=pytest.mark.skipif(not HAS_EXPORT, reason="torch has no torch.export"),
    ),
    "onnx": pytest.param(
        "onnx",
        loaded_onnx,
        marks=pytest.mark.skipif(not HAS_ONNX, reason="needs onnxruntime"),
    ),
}


@pytest.mark.parametrize(("format", "load"), FORMATS.values())
@pytest.mark.parametrize("case", CASES)
def test_a_program_gives_the_numbers_of_predict(tmp_path, case, format, load):
    make, inputs = CASES[case]
    torch.manual_seed(1)
    model = IPUModel(make(), IPUConfig(micro_batch_size=4))
    path = str(tmp_path / "program")
    about = model.export(path, inputs, format=format)
    run = load(path, about)
    for rows in (1, 2, 7, 24):
        given = cut(inputs, rows)
        expected = leaves(model.predict(given, verbose=0))
        found = leaves(run(given))
        assert len(found) == len(expected) == len(about["outputs"])
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert all(one["shape"][0] == "batch" for one in about["inputs"])
    with open(path, "rb") as file:
        assert hashlib.sha256(file.read()).hexdigest() == about["sha256"]
    assert os.listdir(tmp_path) == ["program"]


@pytest.mark.parametrize(("format", "load"), FORMATS.values())
def test_what_training_has_learnt_is_exported_and_the_module_stays(
    tmp_path, format, load
):
    model = IPUModel(network(), IPUConfig(micro_batch_size=4))
    model.compile("adam", "cross_entropy")
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    path = str(tmp_path / "program.pt2")
    about = model.export(path, format=format)  # the inputs are those of the last run
    assert about["num_updates"] == 6
    assert model.module.training
    run = load(path, about)
    assert type(run).__name__ == "function"
    torch.testing.assert_close(leaves(run(X))[0], model.predict(X, verbose=0))
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)  # training goes on
    change = leaves(run(X))[0] - model.predict(X, verbose=0)
    assert change.abs().max() > 1e-4


@pytest.mark.parametrize(("format", "load"), FORMATS.values())
def test_a_program_for_one_number_of_rows(tmp_path, format, load):
    class Fixed(torch.nn.Module):
        def forward(self, x):
            return x.reshape(4, 3) + torch.arange(3.0)

    model = IPUModel(Fixed(), IPUConfig(micro_batch_size=4))
    path = str(tmp_path / "program")
    with pytest.raises((UnsupportedError, DataError)):
        model.export(path, X, format=format)
    assert not os.listdir(tmp_path)
    about = model.export(path, X, 4, format=format)
    assert about["inputs"][0]["shape"] == [4, 3]
    torch.testing.assert_close(
        leaves(load(path, about)(X[:4]))[0], model.predict(X[:4], verbose=0)
    )


@pytest.mark.skipif(not HAS_EXPORT, reason="torch has no torch.export")
def test_half_precision_becomes_single(tmp_path):
    model = IPUModel(network(), IPUConfig(micro_batch_size=4, precision="float16"))
    about = model.export(tmp_path / "program.pt2", X)
    assert about["format"] == "torch"
    assert {one["dtype"] for one in about["inputs"] + about["outputs"]} == {"float32"}
    found = loaded_torch(tmp_path / "program.pt2", about)(X)
    expected = model.predict(X, verbose=0).float()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(HAS_EXPORT, reason="torch has torch.export")
def test_an_old_torch_is_named(tmp_path):
    model = IPUModel(network())
    with pytest.raises(UnsupportedError, match=r"torch 2\.0\.1\S* has none.*onnx"):
        model.export(tmp_path / "program.pt2", X)
    assert not os.listdir(tmp_path)


def test_onnx_needs_a_package(tmp_path, monkeypatch):
    name = "onnxscript" if IS_BY_EXPORT else "onnx"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match=r"export\(format='onnx'\) .* pip install onnx"
    ):
        IPUModel(network()).export(tmp_path / "program.onnx", X)


@pytest.mark.skipif(not HAS_EXPORT, reason="torch has no torch.export")
def test_what_torch_can_not_export_is_said(tmp_path):
    class Branching(torch.nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    with pytest.raises(UnsupportedError, match=r"can't export Branching.*batch_size="):
        IPUModel(Branching()).export(tmp_path / "program.pt2", X)


def test_a_format_that_is_unknown_is_refused(tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'onnx'"):
        IPUModel(network()).export(tmp_path / "program", X, format="onx")


def test_without_inputs_there_is_nothing_to_export(tmp_path):
    with pytest.raises(DataError, match="pass x"):
        IPUModel(network()).export(tmp_path / "program.onnx")


@pytest.mark.skipif(not HAS_EXPORT, reason="torch has no torch.export")
def test_a_file_that_can_not_be_written_is_an_error_of_its_own(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="can't be written"):
        IPUModel(network()).export(tmp_path / "file" / "program.pt2", X)


@pytest.mark.skipif(not HAS_ONNX, reason="needs onnxruntime")
def test_torch_prints_nothing_while_it_writes_onnx(tmp_path, capsys):
    about = IPUModel(network()).export(tmp_path / "program.onnx", X)
    assert about["format"] == "onnx"
    assert (tmp_path / "program.onnx").stat().st_size == about["bytes"] > 100
    assert capsys.readouterr().out == ""
