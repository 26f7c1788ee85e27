# SPDX-License-Identifier: Apache-2.0
"""Files that somebody sends: whatever is in them, the error is typed and names them."""

from __future__ import annotations

import copy
import json
import random
import warnings
import zipfile

import pytest
import torch

from ipufit import (
    CSVLogger,
    DamagedCheckpointError,
    EarlyStopping,
    IpufitError,
    IPUModel,
    LearningRateScheduler,
    Optimizer,
    Schedule,
    load_checkpoint,
)
from ipufit.checkpoint import Checkpoint, write_checkpoint
from ipufit.emulator import Error, importPoptorchMetadataFromFile, inferenceModel
from tests.conformance.probing import PROBES
from tests.conformance.recording import Recording
from tests.strategies import slow_but_each_fourth

X = torch.linspace(-1, 1, 32).reshape(16, 2)
Y = X.sum(1, keepdim=True)
ESCAPE = "\x1b[31mred\x07"
VALUES = [
    *(None, True, -1, 3, 2**64 - 1, 10**100_000, 0.5, 1e40, float("nan")),
    *("", "x", ESCAPE, [], [1], [[]], ["x"], {}, {"x": 1}, {"$tensor": "x"}),
]


def places(value, path=()):
    """Yield the path of each part of nested dicts and lists."""
    if path:
        yield path
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, part in value.items() if isinstance(value, dict) else ():
        yield from places(part, (*path, key))


def forged(value, path, new):
    """Return a copy of nested dicts and lists with another value at a path."""
    value = copy.deepcopy(value)
    part = value
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = new
    return value


def check_text(error, name):
    text = str(error)
    assert name in text
    assert "\x1b" not in text


# Checkpoints -----------------------------------------------------------------------


def compiled():
    torch.manual_seed(0)
    model = IPUModel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)))
    model.compile(
        Optimizer("adamw", 0.1, ema_momentum=0.9),
        "mse",
        schedules={"weight_decay": Schedule("linear", total_updates=9)},
    )
    return model, [EarlyStopping("loss", restore_best_weights=True)]


def state_of(model):
    now = model.checkpoint()
    tensors = {g: {n: t.tolist() for n, t in p.items()} for g, p in now.tensors.items()}
    return tensors, {name: now.state[name] for name in ("optimizer", "average")}


@pytest.mark.parametrize("seed", slow_but_each_fourth(range(4)))
def test_hostile_states_are_refused_by_name_and_nothing_is_taken(seed, tmp_path):
    model, callbacks = compiled()
    model.fit(X, Y, 4, epochs=1, verbose=0, callbacks=[*callbacks, Saver(tmp_path)])
    saved = load_checkpoint(tmp_path / "good")
    draw, refused = random.Random(seed), 0
    values = [value for value in VALUES if value == value]  # a loss may be NaN
    for path in draw.sample(list(places(saved.state)), 25):
        state = forged(saved.state, path, draw.choice(values))
        write_checkpoint(tmp_path / "bad", Checkpoint(saved.tensors, state))
        for way in ("load", "resume"):
            model, callbacks = compiled()
            before = state_of(model)
            fault = None
            try:
                if way == "load":
                    model.load(tmp_path / "bad")
                else:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        model.fit(
                            *(X, Y, 4),
                            epochs=1,
                            verbose=0,
                            callbacks=callbacks,
                            resume=tmp_path / "bad",
                        )
            except IpufitError as error:
                fault = error
            if fault is not None:
                refused += 1
                is_named = isinstance(fault, DamagedCheckpointError)
                check_text(fault, str(tmp_path / "bad") if is_named else "")
                assert state_of(model) == before, (way, path, repr(fault))
    assert refused > 10


class Saver(LearningRateScheduler):
    """Save a run in the middle of its epoch."""

    is_saved = False

    def __init__(self, folder):
        super().__init__(lambda epoch: 0.1)
        self.folder = folder

    def on_train_batch_end(self, batch, logs):
        if batch == 1:
            self.run.after_hooks(
                lambda: write_checkpoint(self.folder / "good", self.model.checkpoint())
            )


def test_an_error_between_a_resumed_runs_weights_and_its_state_takes_nothing(tmp_path):
    model, callbacks = compiled()
    model.fit(X, Y, 4, epochs=1, verbose=0, callbacks=[*callbacks, Saver(tmp_path)])

    class Failing(EarlyStopping):
        def on_train_begin(self, logs):
            raise KeyError("mine")

    model, _ = compiled()
    before = state_of(model)
    Failing.__name__ = "EarlyStopping"
    with pytest.raises(KeyError, match="mine"):
        model.fit(
            *(X, Y, 4),
            verbose=0,
            callbacks=Failing("loss", restore_best_weights=True),
            resume=tmp_path / "good",
        )
    assert state_of(model) == before


# Recordings ------------------------------------------------------------------------

RECORDING = {
    "about": {"format": 1, "poptorch": "3.4.0", "device": "IPU", "date": "2024-01-01"},
    "probes": {
        "sgd": {
            "source": PROBES["sgd"].source,
            "outcome": {
                "a": {"dtype": "float32", "shape": [2], "data": [1.0, "nan"]},
                "b": {"value": 3},
                "c": {"refused": "no"},
            },
        }
    },
}


def test_recordings_with_other_types_are_refused_by_name(tmp_path):
    file = tmp_path / "sent.json"
    file.write_text(json.dumps(RECORDING), "utf-8")
    assert Recording.read(file).probes == RECORDING["probes"]
    here = {**RECORDING["probes"]["sgd"]["outcome"], "c": {"value": 0}}
    contents = [b"", b"[" * 100_000, b"\xff", b'{"about": {"format": 1}}']
    values = [value for value in VALUES if value != 10**100_000]
    for path in places(RECORDING):
        contents += [json.dumps(forged(RECORDING, path, v)).encode() for v in values]
    verdicts = set()
    for content in contents:
        file.write_bytes(content)
        try:
            verdict, words = Recording.read(file).verdict("sgd", here)
        except ValueError as error:
            check_text(error, str(file))
        else:
            verdicts.add(verdict)
            assert "\x1b" not in words
    assert verdicts == {"differs", "changed", "not recorded"}


# Executables of the emulator -------------------------------------------------------


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "good.poptorch"
    inferenceModel(torch.nn.Linear(2, 1)).compileAndExport(str(path), torch.ones(4, 2))
    return json.loads(importPoptorchMetadataFromFile(path))


def executable(path, text, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("metadata.json", text)


def test_executables_with_other_metadata_are_refused_by_name(metadata, tmp_path):
    path = tmp_path / "sent.poptorch"
    texts = ["[" * 100_000, "null", "3", '"x"']
    values = [value for value in VALUES if value != 10**100_000]
    for place in places(metadata):
        texts += [json.dumps(forged(metadata, place, value)) for value in values]
    texts.append(json.dumps({**metadata, ESCAPE: 1}))
    for text in texts:
        executable(path, text)
        with pytest.raises(Error) as caught:
            inferenceModel(torch.nn.Linear(2, 1)).loadExecutable(path)
        check_text(caught.value, str(path))


def test_metadata_that_unpack_to_much_are_not_unpacked(metadata, tmp_path):
    path = tmp_path / "sent.poptorch"
    text = json.dumps({**metadata, "torch_version": " " * 1_000_000})
    executable(path, text, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10_000
    with pytest.raises(Error, match="is compressed"):
        importPoptorchMetadataFromFile(path)


# CSV -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"\n", b'"', b"x" * 200_000, b"a\0b", b"\x1b[31m,loss\n"]
)
def test_a_file_that_no_csv_logger_wrote_is_refused_by_name(content, tmp_path):
    file = tmp_path / "sent.csv"
    file.write_bytes(content)
    model, _ = compiled()
    with pytest.raises(IpufitError) as caught:
        model.fit(X, Y, 4, verbose=0, callbacks=CSVLogger(file, append=True))
    check_text(caught.value, str(file))
    assert file.read_bytes() == content
