# SPDX-License-Identifier: Apache-2.0
"""`IPUModel`: what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

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
    poptorch,
)
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
    with pytest.raises(error, match=message) as caught:
        run(model)
    assert isinstance(caught.value, IpufitError)
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
    # numbers
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
}


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


def test_evaluate_and_predict_without_a_batch_size_take_that_of_training():
    model = compiled(IPUConfig(replicas=2))
    sizes = []

    class Sizes(Callback):
        def on_predict_batch_end(self, batch, logs):
            sizes.append(len(logs["outputs"]))

    model.fit(X, Y, batch_size=8, verbose=0)
    model.predict(X[:17], callbacks=Sizes(), verbose=0)
    assert sizes == [8, 8, 1]


# What is left out -----------------------------------------------------------------


def test_samples_that_do_not_fill_a_call_are_counted():
    model = compiled()
    with pytest.warns(DroppedRowsWarning, match="leaves out 5 of 32 .* 9 =") as caught:
        history = model.fit(X, Y, batch_size=9, epochs=2, verbose=0)
    assert history.dropped_samples == 5
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_several_processes_are_refused_so_far():
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    model = compiled(IPUConfig(training_options=options))
    refuse(model, UnsupportedError, "2 processes", lambda m: m.fit(X, Y))
