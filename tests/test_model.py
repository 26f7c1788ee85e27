# SPDX-License-Identifier: Apache-2.0
"""`IPUModel`: what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ipufit import (
    Callback,
    ConfigError,
    CoverageWarning,
    DataError,
    DroppedRowsWarning,
    IPUConfig,
    IpufitError,
    IPUModel,
    NotCompiledError,
    UnknownNameError,
    UnsupportedError,
    log,
    poptorch,
)
from ipufit.emulator._layout.pod import POD
from tests import reference

X, Y = reference.samples(32)


def compiled(config=None, **settings):
    model = IPUModel(reference.network(), config or IPUConfig())
    model.compile(
        **{
            "optimizer": "sgd",
            "loss": "cross_entropy",
            "metrics": ["accuracy"],
            **settings,
        }
    )
    return model


def own_options(mode, **settings):
    options = poptorch.Options().deviceIterations(2)
    return options.outputMode(poptorch.OutputMode[mode], **settings)


def refuse(model, error, message, run):
    """`run` raises, and leaves everything as it was, so that a later fit works."""
    model.module[0].eval()
    before = {
        "weights": reference.weights(model.module),
        "modes": [child.training for child in model.module.modules()],
        "optimizer": model.optimizer,
        "groups": model.optimizer and repr(model.optimizer.param_groups),
        "history": model.history,
    }
    taken = mock.patch.object(POD, "acquire", wraps=POD.acquire)
    with taken as acquire, pytest.raises(error, match=message) as caught:
        run(model)
    assert isinstance(caught.value, IpufitError)
    assert not acquire.called, "an IPU was taken before the call was refused"
    after = reference.weights(model.module)
    assert all(torch.equal(after[name], w) for name, w in before["weights"].items())
    assert [child.training for child in model.module.modules()] == before["modes"]
    assert model.optimizer is before["optimizer"]
    assert (model.optimizer and repr(model.optimizer.param_groups)) == before["groups"]
    assert model.history is before["history"]
    assert not any(child._forward_pre_hooks for child in model.module.modules())


class Ragged(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.zeros(3 + (index > 20)), 1


class Strings(Ragged):
    def __getitem__(self, index):
        return torch.zeros(3), "a label"


class Fours(Ragged):
    def __getitem__(self, index):
        return torch.zeros(3), 1, 2, 3


class Uneven(Ragged):
    def __getitem__(self, index):
        return (torch.zeros(3), 1) if index < 20 else ((torch.zeros(3),) * 2, 1)


class Inputs(Ragged):
    def __getitem__(self, index):
        return torch.zeros(3)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class NoLength(Dataset):
    def __getitem__(self, index):
        return torch.zeros(3), 1


class Named(Dataset):
    """The same row again and again: a dict, or a triple."""

    def __init__(self, x, label, weight=None):
        self.row = {"input": x, "label": label}
        if weight is not None:
            self.row = (x, label, weight)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return self.row


def batches():
    for at in range(0, 32, 8):
        yield X[at : at + 8], Y[at : at + 8]


PAIRS = TensorDataset(X, Y)

BAD_FITS = {
    # data
    "too few for a call": (
        DataError,
        "7 samples, .*32 = micro",
        lambda m: m.fit(X[:7], Y[:7]),
    ),
    "targets of another length": (
        DataError,
        r"\[32\], targets \[31\]",
        lambda m: m.fit(X, Y[1:]),
    ),
    "inputs of different lengths": (
        DataError,
        r"\[32, 30\]",
        lambda m: m.fit((X, X[2:]), Y),
    ),
    "no targets": (DataError, "`x` has no targets", lambda m: m.fit(X)),
    "a dataset of inputs": (DataError, "`x` has no targets", lambda m: m.fit(Inputs())),
    "nothing": (DataError, "a NoneType", lambda m: m.fit()),
    "a string": (DataError, "a str", lambda m: m.fit("train", Y)),
    "a list of strings": (DataError, "no arrays", lambda m: m.fit(["a", "b"], Y)),
    "an array of strings": (DataError, "<U1", lambda m: m.fit(np.array(["a", "b"]), Y)),
    "a number": (DataError, "an? int", lambda m: m.fit(3, Y)),
    "a list of numbers": (DataError, "single number", lambda m: m.fit([1.0, 2.0], Y)),
    "targets in a list": (
        DataError,
        "`y` holds a single number .* torch.tensor",
        lambda m: m.fit(X, Y.tolist()),
    ),
    "complex numbers": (
        DataError,
        "complex64",
        lambda m: m.fit(X.to(torch.complex64), Y),
    ),
    "sparse tensors": (DataError, "sparse_coo", lambda m: m.fit(X.to_sparse(), Y)),
    "tensors without memory": (DataError, "on meta", lambda m: m.fit(X.to("meta"), Y)),
    "dates": (DataError, "datetime64", lambda m: m.fit(np.zeros(32, "M8[s]"), Y)),
    "an empty dict": (DataError, "a dict", lambda m: m.fit({}, Y)),
    "nothing but targets": (DataError, "a NoneType", lambda m: m.fit(None, Y)),
    "a set": (DataError, "a set", lambda m: m.fit({1, 2}, Y)),
    "a function of batches": (DataError, "a function", lambda m: m.fit(lambda: PAIRS)),
    "inputs that the module doesn't know": (
        DataError,
        r"Sequential.forward.*'features'",
        lambda m: m.fit({"features": X}, Y),
    ),
    "more inputs than the module takes": (
        DataError,
        "2 by place",
        lambda m: m.fit((X, X), Y),
    ),
    "inputs of a width that the module can't take": (
        DataError,
        r"Sequential failed with inputs of float32 \[32, 2\]",
        lambda m: m.fit(X[:, :2], Y),
    ),
    "dataset targets of strings": (
        DataError,
        "no numbers: the first is 'b'",
        lambda m: m.fit(Named("a", "b"), "label"),
    ),
    "dataset targets of None": (
        DataError,
        "no targets",
        lambda m: m.fit(Named(X[0], None), "label"),
    ),
    # columns
    "a column of tensors": (
        DataError,
        r"y=\['label'\] names columns, and `x` has none: it is a Tensor",
        lambda m: m.fit(X, "label"),
    ),
    "a column of pairs": (
        DataError,
        "has none: it is a tuple",
        lambda m: m.fit(reference.Recorded(X, Y), "label"),
    ),
    "a column that isn't there": (
        DataError,
        "no column 'lable'. It has: input, label",
        lambda m: m.fit({"input": X, "label": Y}, "lable"),
    ),
    "every column a target": (
        DataError,
        "none is left for inputs",
        lambda m: m.fit({"input": X, "label": Y}, ["input", "label"]),
    ),
    # streams
    "a generator for two epochs": (
        DataError,
        "asks? for 2 passes",
        lambda m: m.fit(batches(), epochs=2),
    ),
    "a generator of nothing": (DataError, "no samples", lambda m: m.fit(iter([]))),
    "batches of nothing": (
        DataError,
        "no rows",
        lambda m: m.fit(iter([(X[:0], Y[:0])])),
    ),
    "batches of strings": (DataError, "holds no arrays", lambda m: m.fit(iter("ab"))),
    "batches of unequal rows": (
        DataError,
        r"\[4, 3\]",
        lambda m: m.fit(iter([(X[:4], Y[:3])])),
    ),
    "batches of four parts": (
        DataError,
        "4 parts",
        lambda m: m.fit(iter([(X, Y, Y, Y)])),
    ),
    "y beside a loader": (
        DataError,
        "`y` was given beside",
        lambda m: m.fit(DataLoader(PAIRS, 8), Y),
    ),
    "a loader of too little": (
        DataError,
        "16 samples",
        lambda m: m.fit(DataLoader(TensorDataset(X[:16], Y[:16]), 8), batch_size=17),
    ),
    "a loader of strings": (
        DataError,
        "are no numbers",
        lambda m: m.fit(DataLoader(Strings(), 8)),
    ),
    # weights
    "too few sample weights": (
        DataError,
        r"weights \[3\]",
        lambda m: m.fit(X, Y, sample_weight=torch.ones(3)),
    ),
    "sample weights of words": (
        DataError,
        "`sample_weight` holds no arrays: it is balanced",
        lambda m: m.fit(X, Y, sample_weight="balanced"),
    ),
    "sample weights in a list": (
        DataError,
        "`sample_weight` holds a single number",
        lambda m: m.fit(X, Y, sample_weight=[1.0] * 32),
    ),
    "sample weights for positions that aren't there": (
        ConfigError,
        r"weights of shape \(32, 2\)",
        lambda m: m.fit(X, Y, sample_weight=torch.ones(32, 2)),
    ),
    "sample weights beside a dataset": (
        DataError,
        "`sample_weight` was given beside",
        lambda m: m.fit(PAIRS, sample_weight=torch.ones(32)),
    ),
    "sample weights of strings in samples": (
        DataError,
        "weights of `x` are no numbers: the first is 'heavy'",
        lambda m: m.fit(Named(X[0], 1, "heavy")),
    ),
    "class weights in a list": (
        DataError,
        r"class_weight=\[1, 2\]",
        lambda m: m.fit(X, Y, class_weight=[1, 2]),
    ),
    "no class weights": (DataError, "{}", lambda m: m.fit(X, Y, class_weight={})),
    "weights of a class by name": (
        DataError,
        "the class 'cat'",
        lambda m: m.fit(X, Y, class_weight={"cat": 1.0}),
    ),
    "a class weight of words": (
        DataError,
        r"class_weight\[1\]='big'",
        lambda m: m.fit(X, Y, class_weight={1: "big"}),
    ),
    "a class weight below 0": (
        DataError,
        r"class_weight\[1\]=-1",
        lambda m: m.fit(X, Y, class_weight={1: -1}),
    ),
    "a class weight of NaN": (
        DataError,
        r"class_weight\[1\]=nan",
        lambda m: m.fit(X, Y, class_weight={1: float("nan")}),
    ),
    "class weights beside sample weights": (
        DataError,
        "multiply them",
        lambda m: m.fit(X, Y, class_weight={1: 2}, sample_weight=torch.ones(32)),
    ),
    "class weights of two targets": (
        DataError,
        "the data has 2",
        lambda m: m.fit(X, (Y, Y), class_weight={1: 2}),
    ),
    "class weights of positions": (
        DataError,
        "don't add up to 1",
        lambda m: m.fit(X, torch.full((32, 5), 2), class_weight={1: 2}),
    ),
    # steps
    "no steps": (
        ConfigError,
        "steps_per_epoch=0",
        lambda m: m.fit(X, Y, steps_per_epoch=0),
    ),
    "steps of words": (
        ConfigError,
        "steps_per_epoch='all'",
        lambda m: m.fit(X, Y, steps_per_epoch="all"),
    ),
    "steps of a fraction": (
        ConfigError,
        r"steps_per_epoch=2\.0",
        lambda m: m.fit(X, Y, steps_per_epoch=2.0),
    ),
    "no validation steps": (
        ConfigError,
        "validation_steps=0",
        lambda m: m.fit(X, Y, validation_data=PAIRS, validation_steps=0),
    ),
    "an empty list": (DataError, "a list", lambda m: m.fit([], Y)),
    "empty tensors": (DataError, "no samples", lambda m: m.fit(X[:0], Y[:0])),
    "an empty dataset": (
        DataError,
        "no samples",
        lambda m: m.fit(TensorDataset(X[:0], Y[:0])),
    ),
    "y beside a dataset": (
        DataError,
        "`y` was given beside",
        lambda m: m.fit(PAIRS, Y),
    ),
    "an empty stream": (DataError, "no samples", lambda m: m.fit(Stream())),
    "a dataset without length": (DataError, "NoLength", lambda m: m.fit(NoLength())),
    "an iterator of samples": (
        DataError,
        "IterableDataset",
        lambda m: m.fit(iter(PAIRS)),
    ),
    "samples of four parts": (DataError, "have 4 parts", lambda m: m.fit(Fours())),
    "tensors of four parts": (
        DataError,
        "have 4 parts",
        lambda m: m.fit(TensorDataset(X, X, Y, Y)),
    ),
    "targets that the loss can't take": (
        DataError,
        r"'cross_entropy'.*\[32, 3\]",
        lambda m: m.fit(TensorDataset(X, X.long(), Y)),
    ),
    "samples with strings": (DataError, "'a label'", lambda m: m.fit(Strings())),
    "samples of different shapes": (
        DataError,
        "different shapes",
        lambda m: m.fit(Ragged()),
    ),
    "samples of different nesting": (
        DataError,
        r"Sample \d+ of `x` has a tuple",
        lambda m: m.fit(Uneven()),
    ),
    # validation
    "a split above 1": (
        DataError,
        r"validation_split=1\.5",
        lambda m: m.fit(X, Y, validation_split=1.5),
    ),
    "a split below 0": (
        DataError,
        r"validation_split=-0\.5",
        lambda m: m.fit(X, Y, validation_split=-0.5),
    ),
    "a split of too little": (
        DataError,
        r"0\.999",
        lambda m: m.fit(X, Y, validation_split=0.999),
    ),
    "a split that is none": (
        DataError,
        "'0.5'",
        lambda m: m.fit(X, Y, validation_split="0.5"),
    ),
    "a split of a dataset": (
        DataError,
        "needs arrays",
        lambda m: m.fit(reference.Recorded(X, Y), validation_split=0.5),
    ),
    "validation data of four parts": (
        DataError,
        "4 parts",
        lambda m: m.fit(X, Y, validation_data=(X, Y, Y, Y)),
    ),
    "validation data without targets": (
        DataError,
        "`validation_data` has no targets",
        lambda m: m.fit(X, Y, validation_data=X),
    ),
    "validation data of unequal lengths": (
        DataError,
        "`validation_data` have different",
        lambda m: m.fit(X, Y, validation_data=(X, Y[1:])),
    ),
    "a validation frequency of 0": (
        ConfigError,
        "validation_freq=0",
        lambda m: m.fit(X, Y, validation_data=PAIRS, validation_freq=0),
    ),
    "validation after epoch 0": (
        ConfigError,
        "validation_freq=0",
        lambda m: m.fit(X, Y, validation_freq=[0, 1]),
    ),
    "a validation frequency of words": (
        ConfigError,
        "'often'",
        lambda m: m.fit(X, Y, validation_freq="often"),
    ),
    "validation data of a number": (
        DataError,
        "`validation_data` is an? int",
        lambda m: m.fit(X, Y, validation_data=3),
    ),
    "validation data of no parts": (
        DataError,
        "0 parts",
        lambda m: m.fit(X, Y, validation_data=()),
    ),
    "validation data with more inputs": (
        DataError,
        "2 by place",
        lambda m: m.fit(X, Y, validation_data=((X, X), Y)),
    ),
    "validation data of another width": (
        DataError,
        "failed with inputs",
        lambda m: m.fit(X, Y, validation_data=(X[:, :2], Y)),
    ),
    "a generator to validate on twice": (
        DataError,
        "`validation_data` is a generator",
        lambda m: m.fit(X, Y, epochs=2, validation_data=batches()),
    ),
    "a split of a generator": (
        DataError,
        "needs arrays",
        lambda m: m.fit(batches(), validation_split=0.5),
    ),
    # numbers
    "a batch size of words": (
        ConfigError,
        "batch_size='8'",
        lambda m: m.fit(X, Y, batch_size="8"),
    ),
    "a batch size of True": (
        ConfigError,
        "batch_size=True",
        lambda m: m.fit(X, Y, batch_size=True),
    ),
    "epochs of True": (
        ConfigError,
        "epochs=True",
        lambda m: m.fit(X, Y, epochs=True),
    ),
    "a batch size of 0": (
        ConfigError,
        "batch_size=0",
        lambda m: m.fit(X, Y, batch_size=0),
    ),
    "a batch size of a fraction": (
        ConfigError,
        r"batch_size=8\.0",
        lambda m: m.fit(X, Y, batch_size=8.0),
    ),
    "a validation batch size of 0": (
        ConfigError,
        "batch_size=0",
        lambda m: m.fit(X, Y, validation_data=PAIRS, validation_batch_size=0),
    ),
    "epochs below 0": (ConfigError, "epochs=-1", lambda m: m.fit(X, Y, epochs=-1)),
    "epochs of none": (ConfigError, "epochs=None", lambda m: m.fit(X, Y, epochs=None)),
    "an initial epoch of a fraction": (
        ConfigError,
        r"initial_epoch=0\.5",
        lambda m: m.fit(X, Y, initial_epoch=0.5),
    ),
    # the rest
    "an unknown way to drop": (
        ConfigError,
        "drop_last='wrap'",
        lambda m: m.fit(X, Y, drop_last="wrap"),
    ),
    "no way to drop": (
        ConfigError,
        "drop_last=None",
        lambda m: m.fit(X, Y, drop_last=None),
    ),
    "a way to shuffle": (
        ConfigError,
        "shuffle='batch'",
        lambda m: m.fit(X, Y, shuffle="batch"),
    ),
    "a verbosity of words": (
        ConfigError,
        "verbose='loud'",
        lambda m: m.fit(X, Y, verbose="loud"),
    ),
    "callbacks by name": (
        ConfigError,
        "'early_stopping'",
        lambda m: m.fit(X, Y, callbacks="early_stopping"),
    ),
    "an unknown verbosity": (
        ConfigError,
        "verbose=7",
        lambda m: m.fit(X, Y, verbose=7),
    ),
    "a verbosity of a list": (
        ConfigError,
        r"verbose=\[1\]",
        lambda m: m.fit(X, Y, verbose=[1]),
    ),
    "callbacks of a number": (
        ConfigError,
        "3: use ipufit.Callback",
        lambda m: m.fit(X, Y, callbacks=3),
    ),
    "a class for a callback": (
        ConfigError,
        "Callback",
        lambda m: m.fit(X, Y, callbacks=[Callback]),
    ),
}


@pytest.mark.parametrize("name", BAD_FITS)
def test_a_bad_fit_says_what_is_wrong_and_changes_nothing(name):
    error, message, run = BAD_FITS[name]
    model = compiled()
    # What fails in the first call of an epoch has begun: a history of nothing.
    if name.startswith("samples of different"):
        model.fit(X, Y, verbose=0)
        with pytest.raises(error, match=message):
            run(model)
    else:
        refuse(model, error, message, run)
    history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2


BAD_LOOKS = {
    "evaluate nothing": (DataError, "a NoneType", lambda m: m.evaluate()),
    "evaluate without targets": (
        DataError,
        "no targets to evaluate with",
        lambda m: m.evaluate(X),
    ),
    "evaluate on unequal lengths": (
        DataError,
        r"targets \[31\]",
        lambda m: m.evaluate(X, Y[1:]),
    ),
    "evaluate on a column that isn't there": (
        DataError,
        "no column 'b'",
        lambda m: m.evaluate({"a": X}, "b"),
    ),
    "evaluate on another width": (
        DataError,
        "failed with inputs",
        lambda m: m.evaluate(X[:, :2], Y),
    ),
    "evaluate no batches": (
        ConfigError,
        "batch_size=0",
        lambda m: m.evaluate(X, Y, batch_size=0),
    ),
    "evaluate no steps": (
        ConfigError,
        "steps=0",
        lambda m: m.evaluate(X, Y, steps=0),
    ),
    "evaluate half a step": (
        ConfigError,
        r"steps=0\.5",
        lambda m: m.evaluate(X, Y, steps=0.5),
    ),
    "evaluate with too few weights": (
        DataError,
        r"weights \[2\]",
        lambda m: m.evaluate(X, Y, sample_weight=torch.ones(2)),
    ),
    "evaluate aloud": (ConfigError, "verbose=9", lambda m: m.evaluate(X, Y, verbose=9)),
    "evaluate with a number that calls back": (
        ConfigError,
        "3: use ipufit.Callback",
        lambda m: m.evaluate(X, Y, callbacks=3),
    ),
    "predict nothing": (DataError, "a NoneType", lambda m: m.predict(None)),
    "predict a word": (DataError, "a str", lambda m: m.predict("x")),
    "predict no samples": (DataError, "no samples", lambda m: m.predict(X[:0])),
    "predict unequal lengths": (
        DataError,
        r"\[32, 31\]",
        lambda m: m.predict((X, X[1:])),
    ),
    "predict another width": (
        DataError,
        "failed with inputs",
        lambda m: m.predict(X[:, :2]),
    ),
    "predict unknown inputs": (
        DataError,
        "'features'",
        lambda m: m.predict({"features": X}),
    ),
    "predict no steps": (ConfigError, "steps=0", lambda m: m.predict(X, steps=0)),
    "predict less than no batch": (
        ConfigError,
        "batch_size=-1",
        lambda m: m.predict(X, batch_size=-1),
    ),
    "predict aloud": (
        ConfigError,
        "verbose='loud'",
        lambda m: m.predict(X, verbose="loud"),
    ),
    "predict a generator that is spent": (
        DataError,
        "no samples",
        lambda m: m.predict(iter([])),
    ),
    "train on a dataset as a batch": (
        DataError,
        "the arrays of one batch",
        lambda m: m.train_on_batch(PAIRS),
    ),
    "train on a batch without targets": (
        DataError,
        "no targets to train with",
        lambda m: m.train_on_batch(X),
    ),
    "train on a batch of unequal lengths": (
        DataError,
        r"targets \[31\]",
        lambda m: m.train_on_batch(X, Y[1:]),
    ),
    "train on no batch": (DataError, "a NoneType", lambda m: m.train_on_batch(None)),
    "train on an empty batch": (
        DataError,
        "no samples",
        lambda m: m.train_on_batch(X[:0], Y[:0]),
    ),
    "train on a batch with a number for class weights": (
        DataError,
        "class_weight=3",
        lambda m: m.train_on_batch(X, Y, class_weight=3),
    ),
    "train on a batch that is weighted twice": (
        DataError,
        "multiply them",
        lambda m: m.train_on_batch(X, Y, torch.ones(32), {1: 2.0}),
    ),
    "test a batch without targets": (
        DataError,
        "no targets to evaluate with",
        lambda m: m.test_on_batch(X),
    ),
    "test a generator as a batch": (
        DataError,
        "the arrays of one batch",
        lambda m: m.test_on_batch(batches()),
    ),
    "predict a word as a batch": (
        DataError,
        "the arrays of one batch",
        lambda m: m.predict_on_batch("x"),
    ),
    # weights
    "set no weights": (DataError, "0 arrays for 4", lambda m: m.set_weights([])),
    "set weights of None": (
        DataError,
        "got a NoneType",
        lambda m: m.set_weights(None),
    ),
    "set weights of words": (
        DataError,
        "0.weight is no array",
        lambda m: m.set_weights(["a"] * 4),
    ),
    "set ragged weights": (
        DataError,
        "0.weight is no array",
        lambda m: m.set_weights([[[1.0], [2.0, 3.0]]] * 4),
    ),
    "set weights of other shapes": (
        DataError,
        r"0.weight has shape \(1,\)",
        lambda m: m.set_weights([np.zeros(1)] * 4),
    ),
    "load weights of another kind": (
        ConfigError,
        "x.safetensors",
        lambda m: m.load_weights("x.h5"),
    ),
    "load weights from a number": (
        ConfigError,
        "3 is no path",
        lambda m: m.load_weights(3),
    ),
    "save weights of another kind": (
        ConfigError,
        "x.safetensors",
        lambda m: m.save_weights("x.h5"),
    ),
    "save weights to nowhere": (
        ConfigError,
        "None is no path",
        lambda m: m.save_weights(None),
    ),
    "show a word": (DataError, "a str", lambda m: m.summary("x")),
}


@pytest.mark.parametrize("name", BAD_LOOKS)
def test_a_bad_look_says_what_is_wrong_and_changes_nothing(name):
    error, message, run = BAD_LOOKS[name]
    model = compiled()
    refuse(model, error, message, run)
    assert sorted(model.evaluate(X, Y, verbose=0)) == ["accuracy", "loss"]
    assert model.predict(X, verbose=0).shape == (32, reference.NUM_CLASSES)


# Settings of a config, the call that is refused, and what is said.
BAD_WITH_CONFIGS = {
    "steps that are no whole calls": (
        {"device_iterations": 3},
        ConfigError,
        r"steps_per_epoch=4 is no multiple.*\[3, 6\]",
        lambda m: m.fit(X, Y, batch_size=4, steps_per_epoch=4),
    ),
    "a batch that makes no whole updates": (
        {"device_iterations": 3},
        DataError,
        "the 3 updates",
        lambda m: m.train_on_batch(X, Y),
    ),
    "a look that the replicas don't divide": (
        {"replicas": 3},
        ConfigError,
        "batch_size=4 .* 3",
        lambda m: m.evaluate(X, Y, batch_size=4),
    ),
    "steps per execution beside device iterations": (
        {"device_iterations": 3},
        ConfigError,
        "steps_per_execution=2",
        lambda m: m.compile("sgd", "mse", steps_per_execution=2),
    ),
}


@pytest.mark.parametrize("name", BAD_WITH_CONFIGS)
def test_what_a_config_does_not_allow_changes_nothing(name):
    settings, error, message, run = BAD_WITH_CONFIGS[name]
    model = compiled(IPUConfig(**settings))
    refuse(model, error, message, run)
    assert len(model.fit(X[:18], Y[:18], batch_size=6, verbose=0).epoch) == 1


BAD_SETTINGS = {
    "num_workers": (-1, 1.5, "two", True, None),
    "loader_mode": ("fast", None, 3),
    "micro_batch_size": (0, "8"),
    "gradient_accumulation": (0, 1.0),
    "replicas": (0, 1.5),
    "device_iterations": (0, "4"),
    "precision": ("float8", None),
    "execution": ("quick",),
    "pipeline": ("a", 3, [3], [()], ("a", "a")),
    "layers_per_ipu": (4, "4", [], [4, None], [0, 0], {"layers": 4}),
    "loss_block": (3,),
    "offload_optimizer": ("yes", None),
    "available_memory_proportion": (2, "half", [0.1, "b"]),
    "seed": ("lucky", 1.5, True),
    "profile_dir": (3,),
    "training_options": (3,),
    "inference_options": ({},),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD_SETTINGS.items() for value in values],
)
def test_a_bad_setting_is_refused_by_its_name(name, value):
    with pytest.raises(ConfigError, match=name):
        IPUConfig(**{name: value})


class Logging(torch.nn.Module):
    """Logs what it is told to."""

    def __init__(self, *calls):
        super().__init__()
        self.network = reference.network()
        self._calls = calls

    def forward(self, x):
        for name, value in self._calls:
            log(name, value(x) if callable(value) else value)
        return self.network(x)


BAD_LOGS = {
    "a number for a name": ([(3, torch.mean)], "needs a name"),
    "no name": ([("", torch.mean)], "needs a name"),
    "a number": ([("size", 3.0)], "would be baked"),
    "a vector": ([("size", lambda x: x[:, 0])], "no scalar"),
    "a name twice": ([("size", torch.mean), ("size", torch.sum)], "twice"),
    "the name of the loss": ([("loss", torch.mean)], "are called 'loss'"),
    "the name of a metric": ([("accuracy", torch.mean)], "are called 'accuracy'"),
}


@pytest.mark.parametrize("name", BAD_LOGS)
def test_what_cannot_be_logged_is_refused_before_a_device_is_taken(name):
    calls, message = BAD_LOGS[name]
    model = IPUModel(Logging(*calls))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    taken = mock.patch.object(POD, "acquire", wraps=POD.acquire)
    with taken as acquire, pytest.raises(ConfigError, match=message):
        model.fit(X, Y, verbose=0)
    assert not acquire.called
    model.module._calls = ()
    assert model.fit(X, Y, verbose=0).epoch == [0]


def test_the_name_of_a_metric_is_not_logged_in_an_evaluation_either():
    model = IPUModel(Logging(("accuracy", torch.mean)))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    with pytest.raises(ConfigError, match="are called 'accuracy'"):
        model.evaluate(X, Y, verbose=0)


def test_enough_malformed_calls_are_tried():
    tables = (BAD_FITS, BAD_LOOKS, BAD_WITH_CONFIGS, BAD_COMPILES, BAD_LOGS)
    assert sum(map(len, tables)) >= 130


# Settings, a batch size that is wrong with them, what is said, and a right one.
BAD_CONFIGS = {
    "a batch that does not divide": (
        {"micro_batch_size": 5, "replicas": 3},
        16,
        "micro-batch 5, .*3 .together 15.*15 and 30",
        15,
    ),
    "a batch too small for the replicas": ({"replicas": 8}, 4, "batch_size=4 .*8", 8),
    "factors that contradict the batch": (
        {"micro_batch_size": 4, "gradient_accumulation": 2},
        16,
        "batch_size=8",
        8,
    ),
    "a batch too small for the stages": (
        {"pipeline": ("0", "2"), "micro_batch_size": 8},
        16,
        "batch_size=24 or more",
        24,
    ),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_batch_that_does_not_fit_shows_every_factor_and_the_way_out(name):
    settings, wrong, message, right = BAD_CONFIGS[name]
    model = compiled(IPUConfig(**settings))
    refuse(model, ConfigError, message, lambda m: m.fit(X, Y, batch_size=wrong))
    x, y = reference.samples(4 * right)
    assert model.fit(x, y, batch_size=right, verbose=0).epoch == [0]


def test_accumulation_too_small_for_the_stages_is_refused():
    config = IPUConfig(pipeline=("0", "2"), gradient_accumulation=2)
    message = "gradient_accumulation=3 or more"
    refuse(compiled(config), ConfigError, message, lambda m: m.fit(X, Y, batch_size=16))


NOT_COMPILED = [
    lambda m: m.fit(X, Y),
    lambda m: m.evaluate(X, Y),
]


@pytest.mark.parametrize("run", NOT_COMPILED)
def test_nothing_is_trained_or_evaluated_before_compile(run):
    model = IPUModel(reference.network())
    refuse(model, NotCompiledError, r"compile\(\)", run)
    assert model.predict(X, verbose=0).shape == (32, 4)  # needs no loss


BAD_COMPILES = {
    "an empty list of losses": (ConfigError, "no loss in it", {"loss": []}),
    "an unknown optimizer": (UnknownNameError, "'adam", {"optimizer": "adamz"}),
    "an unknown loss": (UnknownNameError, "'mse'", {"loss": "msee"}),
    "an unknown metric": (UnknownNameError, "'accuracy'", {"metrics": ["acuracy"]}),
    "a loss of a number": (ConfigError, "loss=3", {"loss": 3}),
    "a metric of a number": (ConfigError, "metrics contains 3", {"metrics": [3]}),
    "metrics of a number": (ConfigError, "metrics=3", {"metrics": 3}),
    "an optimizer of a number": (UnsupportedError, "optimizer=3", {"optimizer": 3}),
    "no optimizer": (UnsupportedError, "optimizer=None", {"optimizer": None}),
    "a class for an optimizer": (
        UnsupportedError,
        "SGD",
        {"optimizer": torch.optim.SGD},
    ),
    "an optimizer of other parameters": (
        ConfigError,
        "not the module's",
        {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)},
    ),
    "a class for a loss": (ConfigError, "MSELoss", {"loss": torch.nn.MSELoss}),
    "losses of nothing": (ConfigError, "no loss in it", {"loss": {"a": None}}),
    "an unknown loss of an output": (
        UnknownNameError,
        "'nope'",
        {"loss": {"a": "nope"}},
    ),
    "a loss weight of words": (ConfigError, "'heavy'", {"loss_weights": "heavy"}),
    "a loss weight below 0": (ConfigError, "-1", {"loss_weights": [-1]}),
    "a loss weight without a loss": (
        ConfigError,
        "'b', for which there is no loss",
        {"loss": {"a": "mse"}, "loss_weights": {"b": 1}},
    ),
    "a weighted metric of a number": (
        ConfigError,
        "contains 3",
        {"weighted_metrics": [3]},
    ),
    "an unknown metric of an output": (
        UnknownNameError,
        "'nope'",
        {"metrics": {"a": "nope"}},
    ),
    "no steps per execution": (
        ConfigError,
        "steps_per_execution=0",
        {"steps_per_execution": 0},
    ),
    "steps per execution of words": (
        ConfigError,
        "steps_per_execution='auto'",
        {"steps_per_execution": "auto"},
    ),
    "an unknown schedule": (UnknownNameError, "'cosine'", {"lr_schedule": "cosin"}),
    "a schedule of a number": (ConfigError, "lr_schedule=3", {"lr_schedule": 3}),
}


BAD_LOSSES = {
    "no tensor": (lambda outputs, targets: None, ConfigError, "gives None"),
    "a number": (lambda outputs, targets: 1.0, ConfigError, r"gives 1\.0"),
    "none at all": (None, ConfigError, "There is no loss"),
    "for more outputs": (["mse", "mse"], ConfigError, "for output 2"),
}


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_a_loss_that_does_not_fit_is_refused_before_a_device_is_taken(name):
    loss, error, message = BAD_LOSSES[name]
    model = compiled(loss=loss, metrics=None)
    x, y = X, torch.zeros(32, reference.NUM_CLASSES)
    refuse(model, error, message, lambda m: m.fit(x, y))
    model.compile("sgd", "mse")
    assert model.fit(x, y, verbose=0).epoch == [0]


@pytest.mark.parametrize("name", BAD_COMPILES)
def test_a_bad_compile_keeps_what_was_compiled(name):
    error, message, settings = BAD_COMPILES[name]
    settings = {"optimizer": "sgd", "loss": "cross_entropy", **settings}
    model = compiled()
    refuse(model, error, message, lambda m: m.compile(**settings))
    assert sorted(model.fit(X, Y, verbose=0).history) == ["accuracy", "loss"]


BAD_OPTIMIZERS = {
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
}


@pytest.mark.parametrize("name", BAD_OPTIMIZERS)
def test_an_optimizer_that_ipus_lack_is_refused(name):
    model = compiled()
    optimizer = BAD_OPTIMIZERS[name](model.module.parameters())
    refuse(model, UnsupportedError, name, lambda m: m.compile(optimizer, "mse"))
    assert len(model.fit(X, Y, verbose=0).epoch) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet",), "module='resnet'"),
        ((torch.nn.Linear,), "module="),
        ((torch.nn.Linear(1, 1), {"replicas": 2}), "config="),
    ],
)
def test_only_modules_and_configs_make_a_model(arguments, message):
    with pytest.raises(ConfigError, match=message):
        IPUModel(*arguments)


# Own inference options ------------------------------------------------------------


@pytest.mark.parametrize("mode", ["Sum", "Final"])
def test_predict_needs_every_row(mode):
    model = compiled(IPUConfig(inference_options=own_options(mode)))
    refuse(model, ConfigError, f"OutputMode.{mode}", lambda m: m.predict(X))


def test_nothing_is_evaluated_from_sums_of_outputs():
    model = compiled(IPUConfig(inference_options=own_options("Sum")))
    refuse(model, ConfigError, "OutputMode.Sum", lambda m: m.evaluate(X, Y))
    refuse(
        model,
        ConfigError,
        "OutputMode.Sum",
        lambda m: m.fit(X, Y, validation_data=PAIRS),
    )
    assert model.fit(X, Y, verbose=0).epoch == [0]


def test_a_validation_of_a_part_of_the_samples_says_so():
    model = compiled(IPUConfig(inference_options=own_options("Final")))
    with pytest.warns(CoverageWarning, match="validation") as caught:
        history = model.fit(
            X,
            Y,
            batch_size=8,
            validation_data=PAIRS,
            validation_batch_size=4,
            verbose=0,
        )
    assert history.coverage == "validation OutputMode.Final: 4 of every 8 samples"
    assert caught[0].filename == __file__
    covered = torch.arange(32) // 4 % 2 == 1
    expected = reference.evaluate(model.module, X[covered], Y[covered])
    assert history.history["val_loss"] == [pytest.approx(expected["loss"], rel=1e-5)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (IPUConfig(replicas=2, micro_batch_size=4), [8, 8, 1]),
        (IPUConfig(inference_iterations=1), [17]),
    ],
)
def test_without_a_batch_size_the_config_counts_and_not_the_last_fit(config, expected):
    model = compiled(config)
    sizes = []

    class Sizes(Callback):
        def on_predict_batch_end(self, batch, logs):
            sizes.append(len(logs["outputs"]))

    for batch_size in (8, 16):
        model.fit(X, Y, batch_size=batch_size, verbose=0)
        model.predict(X[:17], callbacks=Sizes(), verbose=0)
        assert sizes == expected
        sizes.clear()


# What is left out -----------------------------------------------------------------


def test_samples_that_do_not_fill_a_call_are_counted():
    model = compiled()
    with pytest.warns(DroppedRowsWarning, match="leaves out 5 of 32 .* 9 =") as caught:
        history = model.fit(X, Y, batch_size=9, epochs=2, verbose=0)
    assert history.dropped_samples == 5
    assert len(caught) == 1
    assert caught[0].filename == __file__
