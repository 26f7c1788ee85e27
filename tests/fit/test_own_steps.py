# SPDX-License-Identifier: Apache-2.0
"""A step of one's own: against a plain torch loop, and against compile(loss=...)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import ipufit
from ipufit import ConfigError, DataError, IPUConfig, IPUModel
from tests import reference

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (48,), generator=torch.Generator().manual_seed(2))
W = torch.rand(48, generator=torch.Generator().manual_seed(3))
FIT = {"batch_size": 12, "shuffle": False, "verbose": 0}


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)
    )


def step(module, batch):
    x, y = batch
    outputs = module(x)
    size = outputs.square().mean()
    loss = functional.cross_entropy(outputs, y) + 0.1 * size
    return {"loss": loss, "outputs": outputs, "size": size}


class Own(IPUModel):
    factor = 0.1

    def training_step(self, batch):
        x, y = batch
        outputs = self.module(x)
        size = outputs.square().mean()
        ipufit.log("size", size)
        return functional.cross_entropy(outputs, y) + self.factor * size, outputs


def plain(epochs, lr=0.1):
    """The same training, as one writes it in torch."""
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr)
    for _ in range(epochs):
        for start in range(0, 48, 12):
            optimizer.zero_grad()
            rows = slice(start, start + 12)
            step(module, (X[rows], Y[rows]))["loss"].backward()
            optimizer.step()
    return module


def compiled(config=None, **more):
    model = IPUModel(network(), config)
    model.compile(ipufit.Optimizer("sgd", 0.1), step=step, **more)
    return model


def of_subclass(config=None, **more):
    model = Own(network(), config)
    model.compile(ipufit.Optimizer("sgd", 0.1), **more)
    return model


@pytest.mark.parametrize("make", [compiled, of_subclass])
@pytest.mark.parametrize(
    "factors",
    [
        {},
        {"device_iterations": 2},
        {"micro_batch_size": 3, "replicas": 2},
        {"micro_batch_size": 4, "pipeline": ("0", "2")},
    ],
    ids=str,
)
def test_it_learns_what_a_plain_loop_learns(make, factors):
    model = make(IPUConfig(**factors), metrics=["accuracy"])
    history = model.fit(X, Y, epochs=3, **FIT)
    expected = plain(3)
    for mine, theirs in zip(model.get_weights(), expected.parameters()):
        torch.testing.assert_close(torch.as_tensor(mine), theirs.detach())
    assert set(history.history) == {"accuracy", "loss", "size"}
    with torch.no_grad():
        whole = step(expected, (X, Y))
    figures = model.evaluate(X, Y, verbose=0)
    assert figures["loss"] == pytest.approx(float(whole["loss"]), rel=1e-5)
    assert figures["size"] == pytest.approx(float(whole["size"]), rel=1e-5)
    hits = whole["outputs"].argmax(1).eq(Y).float().mean()
    assert figures["accuracy"] == pytest.approx(float(hits))
    torch.testing.assert_close(model.predict(X, verbose=0), whole["outputs"])


def test_data_without_targets_and_with_weights():
    def of_inputs(module, x):
        return functional.mse_loss(module(x), x[:, :4])

    def of_weights(module, batch):
        x, y, w = batch
        each = functional.cross_entropy(module(x), y, reduction="none")
        return (each * w).mean()

    model = reference.compiled(network(), optimizer="adam", step=of_inputs, loss=None)
    model.fit(X, **FIT)
    assert model.evaluate(X, verbose=0) == {
        "loss": pytest.approx(float(of_inputs(model.module, X).detach()), rel=1e-5)
    }
    model.compile("adam", step=of_weights)
    model.fit(X, Y, sample_weight=W, **FIT)
    figures = model.evaluate(X, Y, sample_weight=W, verbose=0)
    expected = float(of_weights(model.module, (X, Y, W)).detach())
    assert figures["loss"] == pytest.approx(expected, rel=1e-5)


def test_dicts_of_inputs_come_as_they_are():
    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 4)

        def forward(self, left, right):
            return self.layer(left) + self.layer(right)

    def of_dict(module, batch):
        assert set(batch) == {"left", "right", "labels"}
        outputs = module(batch["left"], batch["right"])
        return functional.cross_entropy(outputs, batch["labels"])

    model = reference.compiled(Sum(), optimizer="adam", step=of_dict, loss=None)
    data = {"left": X, "right": X.flip(0), "labels": Y}
    first = model.evaluate(data, verbose=0)["loss"]
    model.fit(data, epochs=3, **FIT)
    assert model.evaluate(data, verbose=0)["loss"] < first


def test_validation_and_prediction_may_have_steps_of_their_own():
    class Three(Own):
        def validation_step(self, batch):
            x, y = batch
            assert not self.module.training
            return {"error": self.module(x).argmax(1).ne(y).float().mean()}

        def predict_step(self, x):
            return self.module(x).softmax(1)

    model = Three(network())
    model.compile("adam")
    history = model.fit(X, Y, validation_data=(X, Y), **FIT).history
    assert set(history) == {"loss", "size", "val_error"}
    outputs = model.predict(X, verbose=0)
    torch.testing.assert_close(outputs, model.module.eval()(X).softmax(1).detach())
    expected = float(outputs.argmax(1).ne(Y).float().mean())
    assert model.evaluate(X, Y, verbose=0) == {"error": pytest.approx(expected)}
    model.compile("adam", predict_step=lambda module, x: module(x).argmax(1))
    torch.testing.assert_close(model.predict(X, verbose=0).long(), outputs.argmax(1))


def test_values_that_a_step_reads_are_looked_after():
    class Changing(ipufit.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.factor = 0.5

    model = of_subclass()
    model.factor = 0.1
    with pytest.raises(ConfigError, match=r"model\.factor was 0\.1 .* and is 0\.5 now"):
        model.fit(X, Y, callbacks=[Changing()], **FIT)
    model.fit(X, Y, **FIT)  # between fits it may change
    whole = of_subclass()
    whole.factor = 0.5
    whole.module.load_state_dict(model.module.state_dict())
    expected = whole.evaluate(X, Y, verbose=0)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(expected)


def without_outputs(module, batch, reduction="mean"):
    return functional.cross_entropy(module(batch[0]), batch[1], reduction=reduction)


def of_squares(module, batch):
    outputs = module(batch[0])
    return {"loss": (outputs - 1).square().sum(), "size": outputs.mean()}


SUM = "own loss is a sum over the 12 samples"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": "mse"}, "step='mse' must be a function"),
        ({"step": step, "loss": "mse"}, "loss='mse' was given, and the model has a"),
        ({"validation_step": step}, "no step for training"),
        ({"step": lambda module, batch: None}, "returned no loss"),
        (
            {"step": lambda module, batch: {"loss": batch[0].mean(), "x": batch[0]}},
            r"'x', which is float32 \[12, 6\] and not a scalar",
        ),
        ({"step": lambda *given: without_outputs(*given, "sum")}, SUM),
        ({"step": lambda *given: without_outputs(*given, "none").sum()}, SUM),
        ({"step": of_squares}, SUM),
        ({"step": step, "label_smoothing": 0.1}, "computes the loss. Do it there"),
        (
            {"step": without_outputs, "metrics": ["accuracy"]},
            "got metrics, and the step returned no outputs",
        ),
        (
            {"step": lambda module, batch: module(batch[0]).mean().reshape(1)},
            r"no loss: it returned float32 \[1\]",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_can_not_be_a_step_is_refused(arguments, message, monkeypatch):
    if message == SUM:  # which is found before anything is compiled
        monkeypatch.delattr(ipufit.poptorch, "trainingModel")

    def trained():
        model = IPUModel(network())
        model.compile("adam", **arguments)
        model.fit(X, Y, **FIT)

    with pytest.raises(ipufit.IpufitError, match=message):
        trained()


class Parts(torch.nn.Module):
    """A module without forward: only steps use its layers."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)


def step_of_parts(module, batch):
    return functional.cross_entropy(module.layer(batch[0]), batch[1])


def test_a_module_needs_no_forward_for_steps():
    model = reference.compiled(Parts(), step=step_of_parts, loss=None)
    built = model.build(X, Y, batch_size=12, verbose=0)
    assert [one.name for one in built.programs] == ["inference"] * 2 + ["training"]
    assert model.benchmark(X, Y, batch_size=12, calls=2, verbose=0)
    model.fit(X, Y, **FIT)
    compared = ipufit.compare(model, (X[:12], Y[:12]))
    assert "No outputs: there is neither" in str(compared)
    assert {one.part for one in compared.differences} >= {"loss", "gradient"}
    assert max(one.relative for one in compared.differences) < 1e-4
    with pytest.raises(DataError, match=r"Parts has no forward.* predict_step="):
        model.predict(X, verbose=0)
    with pytest.raises(DataError, match="Parts has no forward"):
        model.predict({"x": X}, verbose=0)


@pytest.mark.parametrize(
    ("methods", "arguments", "message"),
    [
        ({"train_step": lambda self, data: None}, {}, r"train_step\(\), which nothing"),
        ({"test_step": lambda self, data: None}, {}, r"calls: write "),
        ({"training_step": lambda self, b, i: b}, {}, r"\(b, i\), and is called as"),
        ({}, {"step": lambda batch: batch}, r"called as step\(module, batch\)"),
        ({}, {"step": step, "optimizer": ["adam", "sgd"]}, "parameter groups"),
    ],
)
def test_methods_of_others_and_other_arguments_are_refused(methods, arguments, message):
    made = type("Theirs", (IPUModel,), methods)(network())
    with pytest.raises(ipufit.IpufitError, match=message):
        made.compile(**{"optimizer": "adam", **arguments})


def named_like_a_validation(module, batch):
    loss = functional.cross_entropy(module(batch[0]), batch[1])
    return {"loss": loss, "val_loss": loss}


def test_what_fit_refuses_names_the_step():
    message = r"Own\.training_step failed with a batch of float32 \[12, 6\]"
    with pytest.raises(DataError, match=message):
        of_subclass().fit(X, **FIT)
    model = reference.compiled(network(), step=named_like_a_validation, loss=None)
    assert "val_loss" in model.fit(X, Y, **FIT).history
    with pytest.raises(
        ConfigError, match=r"reports 'val_loss', but names that begin with val_"
    ):
        model.fit(X, Y, validation_data=(X, Y), **FIT)


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ({"class_weight": {0: 2.0}}, "Pass sample_weight"),
        ({"drop_last": "pad"}, "factors that divide"),
    ],
    ids=str,
)
def test_a_mean_can_not_be_weighted_afterwards(argument, instead):
    with pytest.raises(ipufit.UnsupportedError, match=f"the model's step.* {instead}"):
        compiled().fit(X, Y, **FIT, **argument)


def test_functions_of_torchmetrics_compute_or_are_refused():
    functions = pytest.importorskip("torchmetrics.functional.classification")

    def with_accuracy(module, batch):
        outputs = module(batch[0])
        accuracy = functions.multiclass_accuracy(
            outputs, batch[1], 4, average="micro", validate_args=False
        )
        loss = functional.cross_entropy(outputs, batch[1])
        return {"loss": loss, "outputs": outputs, "share": accuracy}

    def with_auroc(module, batch):
        found = with_accuracy(module, batch)
        area = functions.multiclass_auroc(
            found["outputs"], batch[1], 4, validate_args=False
        )
        return {**found, "area": area}

    model = IPUModel(network(), IPUConfig(micro_batch_size=4))
    model.compile("sgd", step=with_accuracy, metrics=["accuracy"])
    history = model.fit(X, Y, **FIT).history
    assert history["share"] == pytest.approx(history["accuracy"])
    model.compile("sgd", step=with_auroc)
    with pytest.raises(ipufit.poptorch.Error, match="determined by the tensor values"):
        model.fit(X, Y, **FIT)
