# SPDX-License-Identifier: Apache-2.0
"""`IPUModel`: what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

import html
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ipufit import (
    Callback,
    ConfigError,
    CoverageWarning,
    DataError,
    DroppedRowsWarning,
    IPUConfig,
    IpufitError,
    IpufitWarning,
    IPUModel,
    NotCompiledError,
    UnknownNameError,
    UnsupportedError,
    poptorch,
)
from ipufit.emulator import _poplar_executor as executor
from tests import reference

X, Y = reference.samples(32)


def compiled(config=None, **settings):
    return reference.compiled(None, config, **{"metrics": ["accuracy"], **settings})


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
    taken = mock.patch.object(executor, "lease", wraps=executor.lease)
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


class NoLength(Dataset):
    def __getitem__(self, index):
        return torch.zeros(3), 1


def batches():
    for at in range(0, 32, 8):
        yield X[at : at + 8], Y[at : at + 8]


PAIRS = TensorDataset(X, Y)


def call(method):
    """Write down a call of a model's method, to make it later."""
    return lambda *args, **named: lambda model: getattr(model, method)(*args, **named)


fit, evaluate, predict = map(call, ("fit", "evaluate", "predict"))
train_on_batch, on_test_batch = map(call, ("train_on_batch", "test_on_batch"))
compile_, summary = map(call, ("compile", "summary"))
load_weights, save_weights = map(call, ("load_weights", "save_weights"))
set_weights = call("set_weights")


def cases(table):
    """The rows of a table of errors."""
    return [(error, *row) for error, rows in table.items() for row in rows]


BAD_FITS = {
    DataError: [
        (r"7 samples, .*32 = micro.*Lower batch_size \(32 here", fit(X[:7], Y[:7])),
        (r"\[32\], targets \[31\]", fit(X, Y[1:])),
        (r"\[32, 30\]", fit((X, X[2:]), Y)),
        ("`x` has no targets", fit(X)),
        ("a str", fit("train", Y)),
        ("a NoneType", fit(None, Y)),
        (r"Sequential.forward.*'features'", fit({"features": X}, Y)),
        ("2 by place", fit((X, X), Y)),
        (r"Sequential failed with inputs of float32 \[32, 2\]", fit(X[:, :2], Y)),
        ("asks? for 2 passes", fit(batches(), epochs=2)),
        ("`y` was given beside", fit(DataLoader(PAIRS, 8), Y)),
        (
            "16 samples",
            fit(DataLoader(TensorDataset(X[:16], Y[:16]), 8), batch_size=17),
        ),
        (r"weights \[3\]", fit(X, Y, sample_weight=torch.ones(3))),
        (
            "`sample_weight` holds no arrays: it is 'balanced'",
            fit(X, Y, sample_weight="balanced"),
        ),
        ("`sample_weight` was given beside", fit(PAIRS, sample_weight=torch.ones(32))),
        ("NoLength", fit(NoLength())),
        ("IterableDataset", fit(iter(PAIRS))),
        (r"'cross_entropy'.*\[32, 3\]", fit(TensorDataset(X, X.long(), Y))),
        ("needs arrays", fit(reference.Recorded(X, Y), validation_split=0.5)),
        ("4 parts", fit(X, Y, validation_data=(X, Y, Y, Y))),
        ("`validation_data` has no targets", fit(X, Y, validation_data=X)),
        ("`validation_data` have different", fit(X, Y, validation_data=(X, Y[1:]))),
        ("`validation_data` is an? int", fit(X, Y, validation_data=3)),
        (r"weights of shape \(32, 2\)", fit(X, Y, sample_weight=torch.ones(32, 2))),
        (
            "`validation_data` is a generator",
            fit(X, Y, epochs=2, validation_data=batches()),
        ),
    ],
    ConfigError: [
        ("steps_per_epoch=0", fit(X, Y, steps_per_epoch=0)),
        ("validation_steps=0", fit(X, Y, validation_data=PAIRS, validation_steps=0)),
        ("validation_freq=0", fit(X, Y, validation_freq=[0, 1])),
        ("epochs=True", fit(X, Y, epochs=True)),
        ("batch_size=0", fit(X, Y, batch_size=0)),
        ("batch_size=0", fit(X, Y, validation_data=PAIRS, validation_batch_size=0)),
        ("epochs=-1", fit(X, Y, epochs=-1)),
        (r"initial_epoch=0\.5", fit(X, Y, initial_epoch=0.5)),
        ("shuffle='batch'", fit(X, Y, shuffle="batch")),
        ("drop_last='wrap'", fit(X, Y, drop_last="wrap")),
        ("'early_stopping'", fit(X, Y, callbacks="early_stopping")),
        ("3: use ipufit.Callback", fit(X, Y, callbacks=3)),
    ],
}


BAD_LOOKS = {
    DataError: [
        ("a NoneType", evaluate()),
        ("no targets to evaluate with", evaluate(X)),
        (r"targets \[31\]", evaluate(X, Y[1:])),
        ("no column 'b'", evaluate({"a": X}, "b")),
        (r"weights \[2\]", evaluate(X, Y, sample_weight=torch.ones(2))),
        ("no samples", predict(X[:0])),
        (r"\[32, 31\]", predict((X, X[1:]))),
        ("failed with inputs", predict(X[:, :2])),
        ("'features'", predict({"features": X})),
        ("no samples", predict(iter([]))),
        ("the arrays of one batch", train_on_batch(PAIRS)),
        ("no targets to train with", train_on_batch(X)),
        ("no samples", train_on_batch(X[:0], Y[:0])),
        ("class_weight=3", train_on_batch(X, Y, class_weight=3)),
        ("multiply them", train_on_batch(X, Y, torch.ones(32), {1: 2.0})),
        ("no targets to evaluate with", on_test_batch(X)),
        ("0 arrays for 4", set_weights([])),
        ("0.weight must be an array", set_weights([[[1.0], [2.0, 3.0]]] * 4)),
        (r"0.weight has shape \(1,\)", set_weights([np.zeros(1)] * 4)),
        ("a str", summary("x")),
    ],
    ConfigError: [
        ("batch_size=0", evaluate(X, Y, batch_size=0)),
        ("steps=0", evaluate(X, Y, steps=0)),
        ("3: use ipufit.Callback", evaluate(X, Y, callbacks=3)),
        ("batch_size=-1", predict(X, batch_size=-1)),
        ("verbose='loud'", predict(X, verbose="loud")),
        ("x.safetensors", load_weights("x.h5")),
        ("path=3: use a path", load_weights(3)),
        ("validation_split='0.5'", fit(X, Y, validation_split="0.5")),
        ("x.safetensors", save_weights("x.h5")),
    ],
}


BAD_CALLS = [*cases(BAD_FITS), *cases(BAD_LOOKS)]


@pytest.mark.parametrize(("error", "message", "run"), BAD_CALLS)
def test_a_bad_call_says_what_is_wrong_and_changes_nothing(error, message, run):
    refuse(compiled(), error, message, run)


def test_a_model_runs_after_all_that_it_has_refused():
    model = compiled()
    for error, _, run in BAD_CALLS:
        with pytest.raises(error):
            run(model)
    history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2
    assert sorted(model.evaluate(X, Y, verbose=0)) == ["accuracy", "loss"]
    assert model.predict(X, verbose=0).shape == (32, reference.NUM_CLASSES)


# Settings of a config, the call that is refused, and what is said.
BAD_WITH_CONFIGS = [
    (
        {"device_iterations": 3},
        ConfigError,
        r"steps_per_epoch=4 must be a multiple.*\[3, 6\]",
        fit(X, Y, batch_size=4, steps_per_epoch=4),
    ),
    ({"device_iterations": 3}, DataError, "the 3 updates", train_on_batch(X, Y)),
    ({"replicas": 3}, ConfigError, "batch_size=4 .* 3", evaluate(X, Y, batch_size=4)),
    ({"replicas": 3}, ConfigError, "batch_size=32", train_on_batch(X, Y)),
    (
        {"device_iterations": 3},
        ConfigError,
        "steps_per_execution=2",
        compile_("sgd", "mse", steps_per_execution=2),
    ),
]


@pytest.mark.parametrize(("settings", "error", "message", "run"), BAD_WITH_CONFIGS)
def test_what_a_config_does_not_allow_changes_nothing(settings, error, message, run):
    model = compiled(IPUConfig(**settings))
    refuse(model, error, message, run)
    assert len(model.fit(X[:18], Y[:18], batch_size=6, verbose=0).epoch) == 1


@pytest.mark.parametrize(
    "run", [fit(X, Y), evaluate(X, Y), train_on_batch(X, Y), on_test_batch(X, Y)]
)
def test_nothing_is_trained_or_evaluated_before_compile(run):
    model = IPUModel(reference.network())
    refuse(model, NotCompiledError, r"compile\(\)", run)
    assert model.predict(X, verbose=0).shape == (32, 4)  # needs no loss


BAD_COMPILES = {
    ConfigError: [
        ("no loss in it", {"loss": []}),
        ("loss=3", {"loss": 3}),
        ("metrics contains 3", {"metrics": [3]}),
        (
            "not the module's",
            {
                "optimizer": torch.optim.SGD(
                    [torch.nn.Parameter(torch.zeros(1))], lr=0.1
                )
            },
        ),
        ("MSELoss", {"loss": torch.nn.MSELoss}),
        ("no loss in it", {"loss": {"a": None}}),
        ("'heavy'", {"loss_weights": "heavy"}),
        ("-1", {"loss_weights": [-1]}),
        (
            "for 'b', and losses for 'a'",
            {"loss": {"a": "mse"}, "loss_weights": {"b": 1}},
        ),
        ("steps_per_execution=0", {"steps_per_execution": 0}),
        ("lr_schedule=3", {"lr_schedule": 3}),
    ],
    UnknownNameError: [
        ("'adam", {"optimizer": "adamz"}),
        ("'accuracy'", {"metrics": ["acuracy"]}),
        ("'nope'", {"loss": {"a": "nope"}}),
        ("'cosine'", {"lr_schedule": "cosin"}),
    ],
    UnsupportedError: [
        ("optimizer=3", {"optimizer": 3}),
        ("SGD", {"optimizer": torch.optim.SGD}),
    ],
}


BAD_LOSSES = [
    (lambda outputs, targets: None, ConfigError, "gives None"),
    (lambda outputs, targets: 1.0, ConfigError, r"gives 1\.0"),
    (None, ConfigError, "There is no loss"),
    (["mse", "mse"], ConfigError, "for output 2"),
]


@pytest.mark.parametrize(("loss", "error", "message"), BAD_LOSSES)
def test_a_loss_that_does_not_fit_is_refused_before_a_device_is_taken(
    loss, error, message
):
    model = compiled(loss=loss, metrics=None)
    x, y = X, torch.zeros(32, reference.NUM_CLASSES)
    refuse(model, error, message, fit(x, y))
    model.compile("sgd", "mse")
    assert model.fit(x, y, verbose=0).epoch == [0]


@pytest.mark.parametrize(("error", "message", "settings"), cases(BAD_COMPILES))
def test_a_bad_compile_keeps_what_was_compiled(error, message, settings):
    settings = {"optimizer": "sgd", "loss": "cross_entropy", **settings}
    model = compiled()
    refuse(model, error, message, compile_(**settings))
    assert sorted(model.fit(X, Y, verbose=0).history) == ["accuracy", "loss"]


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
    refuse(model, ConfigError, f"OutputMode.{mode}", predict(X))


def test_nothing_is_evaluated_from_sums_of_outputs():
    model = compiled(IPUConfig(inference_options=own_options("Sum")))
    refuse(model, ConfigError, "OutputMode.Sum", evaluate(X, Y))
    refuse(
        model,
        ConfigError,
        "OutputMode.Sum",
        fit(X, Y, validation_data=PAIRS),
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
    said = "leaves out 5 of 32 .* an update of 9. .* batch_size=8"
    with pytest.warns(DroppedRowsWarning, match=said) as caught:
        history = model.fit(X, Y, batch_size=9, epochs=2, verbose=0)
    assert history.dropped_samples == 5
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert history.coverage == "training on 27 of 32 samples"  # 1 in 10 or more


def read_only(tensor):
    array = tensor.numpy().copy()
    array.setflags(write=False)
    return array


LOOPED = {
    "tensors": (lambda: (X, Y), {}),
    "arrays": (lambda: (X.numpy(), Y.numpy()), {}),
    "arrays that can't be written to": (lambda: (read_only(X), read_only(Y)), {}),
    "a metric with many sums": (lambda: (X, Y), {"metrics": ["f1"]}),
    "a scheduler of torch": (
        lambda: (X, Y),
        {"lr_schedule": lambda sgd: torch.optim.lr_scheduler.StepLR(sgd, 2)},
    ),
}


@pytest.mark.parametrize("name", LOOPED)
def test_a_loop_of_fits_warns_before_the_first_compilation_and_after_it(name):
    make, settings = LOOPED[name]
    model = compiled(**settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # once in a place, until filters change
        for _ in range(5):
            model.fit(*make(), batch_size=9, verbose=0)
    assert {warning.category for warning in caught} == {DroppedRowsWarning}
    assert len(caught) <= 2


def test_a_line_says_that_an_epoch_leaves_out_many_samples(capsys):
    with pytest.warns(DroppedRowsWarning, match="drop_last='pad', as Keras does, or"):
        compiled().fit(X, Y, batch_size=20)
    assert "(training on 20 of 32 samples)" in capsys.readouterr().out


def test_results_are_shown_as_their_text(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as kernels of notebooks do
    model = compiled()
    for result in (
        model.check(X, Y, batch_size=8),
        model.batch_plan(X, Y, batch_size=8),
        model.plan(X, Y, batch_size=8),
        model.build(X, Y, batch_size=8, verbose=0),
    ):
        assert repr(result) == str(result)
        text = html.unescape(result._repr_html_())
        style = "font-family: monospace; white-space: pre"
        assert text == f'<pre style="{style}">{result}</pre>'
        assert "\x1b" not in text


def compile_forward(module):
    module.forward = torch.compile(module.forward)
    return module


def compile_class(module):
    forward = torch.compile(torch.nn.Linear.forward)
    module.__class__ = type("Compiled", (torch.nn.Linear,), {"forward": forward})
    return module


def compile_in_place(module):
    module.compile()
    return module


def compile_part(module):
    return torch.nn.Sequential(torch.nn.ReLU(), torch.compile(module))


WRAPPERS = {
    "compile": torch.compile,
    "parallel": torch.nn.DataParallel,
    "both": lambda module: torch.nn.DataParallel(torch.compile(module)),
    "forward": compile_forward,
    "part": compile_part,
    "class": compile_class,
}
if hasattr(torch.nn.Module, "compile"):
    WRAPPERS["in place"] = compile_in_place


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_module_trains_as_the_module(wrapper):
    plain, module = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    module.load_state_dict(plain.state_dict())
    if wrapper == "part":
        plain = torch.nn.Sequential(torch.nn.ReLU(), plain)
    with warnings.catch_warnings():  # torch's compiler uses what torch deprecates
        warnings.simplefilter("ignore")
        wrapped = WRAPPERS[wrapper](module)
    with pytest.warns(IpufitWarning, match=r"trained without (torch\.c|DataP)"):
        model = IPUModel(wrapped)
    other = IPUModel(plain)
    for each in (model, other):
        each.compile("sgd", "cross_entropy")
        each.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert list(model.module.state_dict()) == list(plain.state_dict())
    reference.assert_same_weights(model.module, plain)


class LossOfItsOwn(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(X.shape[1], 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


def own_loss():
    model = IPUModel(LossOfItsOwn())
    model.compile("sgd")
    return model, (X,)


def own_step():
    model = IPUModel(torch.nn.Linear(X.shape[1], 1))
    model.compile("sgd", step=lambda module, x: module(x).square().mean())
    return model, (X,)


@pytest.mark.parametrize("make", [own_loss, own_step])
@pytest.mark.parametrize(
    ("size", "advice"), [(20, "To train on all of them: batch_size=16"), (31, "$")]
)
def test_padding_is_not_advised_where_the_loss_cannot_take_it(make, size, advice):
    model, data = make()
    count = 32 if size == 20 else 31 + 6  # 37 is a prime number
    data = [torch.cat([part, part])[:count] for part in data]
    with pytest.warns(DroppedRowsWarning, match=rf"fill .*\. ?{advice}") as caught:
        model.fit(*data, batch_size=size, verbose=0)
    assert "pad" not in str(caught[0].message)


def normed(norm):
    network = torch.nn.Sequential(norm, torch.nn.Linear(X.shape[1], 4))
    return reference.compiled(network)


def test_padding_that_moves_statistics_is_said():
    norm = torch.nn.BatchNorm1d(X.shape[1])
    run = {"batch_size": 20, "verbose": 0}
    with pytest.warns(IpufitWarning, match=r"8 copies of a sample, .* \(0\)") as caught:
        normed(norm).fit(X, Y, drop_last="pad", **run)
    assert "batch_size=16" in str(caught[0].message)
    assert len(caught) == 1
    data = DataLoader(TensorDataset(X, Y), batch_size=20)
    with pytest.warns(IpufitWarning, match="8 copies of a sample"):
        normed(norm).fit(data, drop_last="pad", verbose=0)
    with pytest.warns(DroppedRowsWarning) as caught:
        normed(norm).fit(X, Y, **run)
    assert "pad" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        normed(norm).fit(X, Y, batch_size=16, drop_last="pad", verbose=0)
        normed(torch.nn.LayerNorm(X.shape[1])).fit(X, Y, drop_last="pad", **run)
        norm.requires_grad_(False)
        normed(norm.eval()).fit(X, Y, drop_last="pad", **run)
