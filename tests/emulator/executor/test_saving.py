# SPDX-License-Identifier: Apache-2.0
"""Executors saved to files and loaded from them."""

import json
import os
import pickle
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator import _models
from tests.strategies import examples


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.dropout = nn.Dropout(0.5)
        self.second = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x, y):
        self.calls += 1
        out = self.second(self.dropout(torch.relu(self.first(x))))
        return out, nn.functional.mse_loss(out, y)


X, Y = torch.randn(8, 3), torch.randn(8, 2)


def make_options(seed=3):
    return _models.make_options(2, 2, 1, poptorch.OutputMode.All).randomSeed(seed)


def adam(parameters):
    return poptorch.optim.AdamW(parameters, lr=0.1)


def train(options=None, make=adam, module=None):
    module = Model() if module is None else module
    optimizer = make(module.parameters())
    return poptorch.trainingModel(module, options or make_options(), optimizer)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pop"


# Loading what was saved -----------------------------------------------------------


def test_a_loaded_training_model_goes_on_as_the_one_that_was_saved(path):
    training = train()
    training(X, Y)
    training.save(path)
    loaded = poptorch.load(path)
    for _ in range(2):
        for actual, expected in zip(loaded(X, Y), training(X, Y)):
            assert torch.equal(actual, expected)
    actual, expected = loaded.model.state_dict(), training.model.state_dict()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value)
    assert expected["calls"].item() == 3 * 4


def test_a_torch_optimizer_has_no_state_to_save(path):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    training = train(module=Model().eval(), make=sgd)
    training(X, Y)
    training.save(path)
    loaded = poptorch.load(path)
    before = loaded.model.second.bias.tolist()
    training.copyWeightsToDevice()  # puts the momentum back to zero
    loaded(X, Y)
    training(X, Y)
    assert loaded.model.second.bias.tolist() == training.model.second.bias.tolist()
    assert loaded.model.second.bias.tolist() != before


def test_tied_weights_stay_tied(path):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    inference = poptorch.inferenceModel(module)
    inference.compile(X)
    inference.save(path)
    loaded = poptorch.load(path).model
    assert loaded[0].weight is loaded[1].weight


# Options --------------------------------------------------------------------------


def test_options_are_those_of_the_file_and_frozen(path):
    train().compileAndExport(path, X, Y)
    options = poptorch.load(path).options
    assert options.device_iterations == 2
    assert options.Training.gradient_accumulation == 2
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options.deviceIterations(1)


def test_replica_groups_are_saved(path):
    class_of_groups = poptorch.CommGroupType.NoGrouping
    module = nn.Linear(2, 1, bias=False)
    module.weight = nn.Parameter(torch.tensor([[[1.0, 1.0]], [[2.0, 2.0]]]))
    inference = poptorch.inferenceModel(module, poptorch.Options().replicationFactor(2))
    inference.weight.replicaGrouping(
        class_of_groups, 0, poptorch.VariableRetrievalMode.OnePerGroup
    )
    inference.compileAndExport(path, torch.ones(2, 2))
    assert poptorch.load(path)(torch.ones(2, 2)).tolist() == [[2], [4]]


# Random state ---------------------------------------------------------------------


@pytest.mark.parametrize("saves", [True, False])
def test_the_random_state_is_saved_on_request(path, saves):
    inference = poptorch.inferenceModel(nn.RReLU(), poptorch.Options().randomSeed(5))
    first, _ = inference(-torch.ones(64)), inference(-torch.ones(64))
    inference.save(path, save_rng_state=saves)
    third = inference(-torch.ones(64))
    assert not torch.equal(first, third)
    loaded = poptorch.load(path)(-torch.ones(64))
    assert torch.equal(loaded, third if saves else first)


# Executables ----------------------------------------------------------------------


def test_an_executable_alone_is_no_model(path):
    train().compileAndExport(path, X, Y, export_model=False)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["metadata.json", "arguments.pt"]
    with pytest.raises(AssertionError, match="export_model=False"):
        poptorch.load(path)


def test_a_module_that_can_not_be_pickled_can_be_compiled_from_a_file(path):
    class Local(nn.Module):
        def forward(self, x):
            return 2 * x

    def local(x):
        return x

    inference = poptorch.inferenceModel(Local())
    inference.compileAndExport(path, X, export_model=False)
    other = poptorch.inferenceModel(Local())
    other.loadExecutable(path)
    assert torch.equal(other(X), 2 * X)
    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        inference.save(path)
    poptorch.inferenceModel(Local()).loadExecutable(path)  # the old file is still there
    assert os.listdir(path.parent) == [path.name]


def test_executables_are_for_one_kind_of_model(path):
    train().compileAndExport(path, X, Y, export_model=False)
    inference = poptorch.inferenceModel(Model())
    with pytest.raises(poptorch.Error, match=r"Invalid file .* compiled for training"):
        inference.loadExecutable(path)
    assert not inference.isCompiled()


def test_an_executable_replaces_that_of_a_compiled_model(path):
    train().compileAndExport(path, X, Y)
    training = train()
    training(X[:4], Y[:4])
    trained = [weight.clone() for weight in training.model.parameters()]
    training.loadExecutable(path)
    for weight, before in zip(training.model.parameters(), trained):
        assert torch.equal(weight, before)
    training(X, Y)
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        training(X[:4], Y[:4])


@pytest.mark.parametrize(
    ("module", "difference"),
    [
        (nn.Linear(3, 5), r"'weight' is .*\[2, 3\].* there and .*\[5, 3\]"),
        (nn.Linear(3, 2).half(), "float32.* there and .*float16"),
        (nn.Linear(3, 2, bias=False), "'bias' is .* there and missing here"),
        (nn.Sequential(nn.Linear(3, 2)), "'weight' is .* there and missing here"),
    ],
)
def test_executables_are_for_one_set_of_weights(path, module, difference):
    poptorch.inferenceModel(nn.Linear(3, 2)).compileAndExport(path, X)
    with pytest.raises(poptorch.Error, match=f"Invalid file .*{difference}"):
        poptorch.inferenceModel(module).loadExecutable(path)


# Arguments ------------------------------------------------------------------------


class Many(nn.Module):
    """Takes everything there is to take."""

    def forward(self, x, pair, table, factor=2, none=None):
        assert none is None
        out = x * factor + pair[0].float() + table["key"].float()
        return out if pair[1] == "text" else -out


def arguments(rows=4):
    return (
        torch.arange(rows, dtype=torch.float64),
        (torch.arange(rows), "text"),
        {"key": torch.ones(rows, dtype=torch.bool), "constant": [1, None]},
        3,
    )


def test_a_model_accepts_the_arguments_it_was_saved_with_and_no_others(path):
    options = poptorch.Options().deviceIterations(2)
    inference = poptorch.inferenceModel(Many(), options)
    expected = inference(*arguments())
    inference.save(path)
    loaded = poptorch.load(path)
    assert torch.equal(loaded(*arguments()), expected)
    assert metadata(path)["arguments"] == [
        {"shape": [4], "dtype": "torch.float64"},
        {"shape": [4], "dtype": "torch.int64"},
        {"shape": [4], "dtype": "torch.bool"},
    ]
    with pytest.raises(poptorch.Error, match="Shape mismatch"):
        loaded(*arguments(rows=6))
    with pytest.raises(poptorch.Error, match="Value mismatch for factor"):
        loaded(*arguments()[:3], 4)


# Files ----------------------------------------------------------------------------


def metadata(path):
    return json.loads(poptorch.importPoptorchMetadataFromFile(path))


def test_saving_follows_no_symbolic_link(path, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    planted = [path, path.with_name(f".{path.name}.{os.getpid()}.partial")]
    for link in planted:
        link.symlink_to(victim)
    poptorch.inferenceModel(nn.Linear(3, 2)).compileAndExport(path, X)
    assert victim.read_text() == "kept"
    assert not path.is_symlink()
    assert poptorch.load(path)(X).shape == (8, 2)
    assert sorted(tmp_path.iterdir()) == sorted([victim, *planted])


class Poison:
    """Objects that must not be unpickled."""

    def __reduce__(self):
        return os.mkdir, (self.folder,)

    def __init__(self, folder):
        self.folder = str(folder)


def test_metadata_are_read_without_unpickling_anything(path, tmp_path):
    training = train(make_options(seed=9))
    trap = tmp_path / "trap"
    training.model.poison = Poison(trap)
    training.compileAndExport(path, X, Y)
    read = metadata(path)
    assert not trap.exists()
    assert read["is_training"] is True
    assert read["has_model"] is True
    assert read["poptorch_version"] == poptorch.__version__
    assert read["micro_batches"] == 4
    assert read["rng_state"] == [9]
    assert read["weights"].keys() == training.model.state_dict().keys()
    poptorch.load(path)  # the risk that its documentation warns of
    assert trap.exists()


MEMBERS = ["metadata.json", "arguments.pt", "model.pt"]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "file"
    poptorch.inferenceModel(nn.Linear(3, 2)).compileAndExport(path, X)
    return path.read_bytes()


def assert_invalid(path, message=""):
    with pytest.raises(poptorch.Error, match=f"Invalid file .*{message}"):
        poptorch.load(path)
    with pytest.raises(poptorch.Error, match=f"Invalid file .*{message}"):
        poptorch.inferenceModel(nn.Linear(3, 2)).loadExecutable(path)
    with pytest.raises(poptorch.Error, match=f"Invalid file .*{message}"):
        poptorch.importPoptorchMetadataFromFile(path)


@pytest.mark.parametrize("contents", [b"", b"hello", b"PK\x03\x04", pickle.dumps({})])
def test_files_of_others_are_invalid(path, contents):
    path.write_bytes(contents)
    assert_invalid(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "it isn't a file of the emulator"),
        ("{", "Expecting property name"),
        ('{"format": "other"}', "it isn't a file of the emulator"),
        (
            '{"format": "ipufit.emulator executable", "format_version": 1}',
            "its format has version 1, and this is version 5: compile the model anew",
        ),
        (
            '{"format": "ipufit.emulator executable", "format_version": 5}',
            "its metadata differ in 'arguments'",
        ),
    ],
)
def test_other_archives_are_invalid(path, text, message):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", text)
    assert_invalid(path, message)


quick = settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@quick
@given(part=st.floats(0, 0.999))
def test_a_truncated_file_is_invalid(path, good, part):
    path.write_bytes(good[: int(len(good) * part)])
    assert_invalid(path)


def is_intact(path):
    try:
        with zipfile.ZipFile(path) as archive:
            members = [archive.read(member) for member in MEMBERS]
    except Exception:  # noqa: BLE001 - zipfile raises many kinds for broken archives
        return False
    return all(members)


@quick
@given(data=st.data())
def test_a_broken_file_is_invalid(path, good, data):
    place = data.draw(st.integers(0, len(good) - 1))
    flip = data.draw(st.integers(1, 255))
    broken = bytearray(good)
    broken[place] ^= flip
    path.write_bytes(bytes(broken))
    if is_intact(path):  # a byte that means nothing, as in a date
        poptorch.load(path).destroy()
    else:
        with pytest.raises(poptorch.Error, match="Invalid file"):
            poptorch.load(path)


def test_other_versions_are_invalid(path, monkeypatch):
    poptorch.inferenceModel(nn.Linear(3, 2)).compileAndExport(path, X)
    monkeypatch.setattr("ipufit.emulator._poplar_executor.__version__", "3.3.0")
    message = (
        r"Invalid file .* written by version 3.4.0\+emulator, and this is .* 3.3.0"
    )
    with pytest.raises(AssertionError, match=message):
        poptorch.load(path)
    with pytest.raises(poptorch.Error, match=message):
        poptorch.inferenceModel(nn.Linear(3, 2)).loadExecutable(path)
    assert metadata(path)["poptorch_version"] == "3.4.0+emulator"


def test_a_missing_file_is_missing(path):
    with pytest.raises(FileNotFoundError):
        poptorch.load(path)
    with pytest.raises(FileNotFoundError):
        poptorch.inferenceModel(nn.Identity()).loadExecutable(path)


def test_options_edited_on_loading_keep_the_micro_batch(tmp_path):
    path = tmp_path / "model.poptorch"
    options = poptorch.Options().deviceIterations(2)
    saved = poptorch.inferenceModel(torch.nn.Linear(2, 1), options)
    saved.compileAndExport(path, torch.ones(8, 2))
    loaded = poptorch.load(path, lambda edited: edited.deviceIterations(3))
    assert loaded(torch.ones(12, 2)).shape == (12, 1)
    other = poptorch.inferenceModel(torch.nn.Linear(2, 1))
    other.loadExecutable(path)
    assert other(torch.ones(4, 2)).shape == (4, 1)
