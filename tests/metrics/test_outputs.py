# SPDX-License-Identifier: Apache-2.0
"""Metrics of models with several outputs, also nested ones and ones without targets."""

import pytest
import torch
from torch import nn

import ipufit
from ipufit import IPUModel
from ipufit.errors import DataError

torch.manual_seed(0)
X = torch.randn(24, 4)
CLASSES, NUMBERS = torch.arange(24) % 3, torch.randn(24, 1)
FORMS = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"a": a, "b": b},
    "nested": lambda a, b: {"a": a, "b": (b, {"twice": 2 * b})},
}


class Heads(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.a, self.b, self.form = nn.Linear(4, 3), nn.Linear(4, 1), form

    def forward(self, x):
        return FORMS[self.form](self.a(x), self.b(x))


def figures(form, y, loss, metrics):
    """The logs of fit and evaluate, and the module."""
    model = IPUModel(Heads(form))
    model.compile(ipufit.Optimizer("sgd", learning_rate=0.0), loss, metrics=metrics)
    trained = model.fit(X, y, batch_size=8, verbose=0).history
    evaluated = model.evaluate(X, y, batch_size=8, verbose=0)
    assert {name: values[0] for name, values in trained.items()} == pytest.approx(
        evaluated, rel=1e-5
    )
    return evaluated, model.module


def right(module):
    return float((module.a(X).argmax(1) == CLASSES).float().mean())


def error(module):
    return float((module.b(X) - NUMBERS).detach().abs().mean())


@pytest.mark.parametrize("form", ["tuple", "list", "dict"])
@pytest.mark.parametrize("nothing", [None, []])
def test_an_output_may_have_no_targets_and_no_metrics(form, nothing):
    first = "a" if form == "dict" else "output_1"
    second = "b" if form == "dict" else "output_2"
    for y, loss, metrics, name, value in (
        (
            (CLASSES, None),
            ["cross_entropy", None],
            [["accuracy", "f1"], nothing],
            f"{first}_accuracy",
            right,
        ),
        (
            (None, NUMBERS),
            [None, "mse"],
            [nothing, ["mae", "spearman"]],
            f"{second}_mae",
            error,
        ),
    ):
        y = dict(zip("ab", y)) if form == "dict" else y
        found, module = figures(form, y, loss, metrics)
        assert found[name] == pytest.approx(value(module), rel=1e-5)
        assert len(found) == 3


@pytest.mark.parametrize("metric", ["mae", "r2", "exact_auc", "accuracy", "rmse"])
def test_a_metric_of_an_output_without_targets_is_refused(metric):
    y = {"a": CLASSES, "b": None}
    with pytest.raises(DataError, match=f"metric 'b_{metric}': There are no targets"):
        figures("dict", y, {"a": "cross_entropy"}, {"b": [metric]})
    found, _ = figures("dict", y, {"a": "cross_entropy"}, [["accuracy"], None])
    assert found.keys() == {"loss", "a_accuracy"}


def first_error(outputs, targets):
    return (outputs[0] - targets[0]).abs()


def test_a_function_takes_the_parts_of_an_output():
    y = {"a": CLASSES, "b": (NUMBERS, None)}
    loss = {"a": "cross_entropy"}
    words = r"metric 'b_mae': The outputs are of type tuple.*pass a function, such as"
    with pytest.raises(DataError, match=words) as caught:
        figures("nested", y, loss, {"b": ["mae"]})
    code = str(caught.value).partition("such as ")[2].rstrip(".")
    for function in (first_error, eval(code)):
        found, module = figures("nested", y, loss, {"a": ["accuracy"], "b": [function]})
        name = f"b_{function.__name__.strip('<>')}"
        assert found[name] == pytest.approx(error(module))
        assert found["a_accuracy"] == pytest.approx(right(module))


def test_errors_name_the_metric():
    y, words = {"a": CLASSES, "b": torch.zeros(24, 2)}, "The metric 'b_f1': Targets of"
    with pytest.raises(DataError, match=words):
        figures("dict", y, {"a": "cross_entropy"}, {"a": ["f1"], "b": ["f1"]})


def test_values_of_classes_and_thresholds_have_keys_of_their_own():
    """In calls of several replicas and updates, and for callbacks."""
    x, y = torch.randn(48, 4), torch.arange(48) % 3
    each, at = ipufit.metrics.F1Score(None), ipufit.metrics.Recall([0.2, 0.9])
    config = ipufit.IPUConfig(micro_batch_size=2, replicas=2, device_iterations=3)
    model = IPUModel(nn.Linear(4, 3), config)
    model.compile("sgd", "cross_entropy", metrics=[each, at])
    stop = ipufit.EarlyStopping("val_f1_score_2", patience=0, mode="auto")
    history = model.fit(
        x, y, batch_size=4, validation_data=(x, y), callbacks=[stop], verbose=0
    ).history
    names = ["f1_score_0", "f1_score_1", "f1_score_2", "recall_0.2", "recall_0.9"]
    assert list(history) == sorted(
        ["loss", "val_loss", *names, *(f"val_{name}" for name in names)]
    )
    results = model.evaluate(x, y, verbose=0)
    outputs = model.module(x).detach()
    for metric, keys in ((each, names[:3]), (at, names[3:])):
        values = metric.result(metric.sums(outputs, y).double())
        assert [results[key] for key in keys] == pytest.approx(list(values.values()))
    model.compile("sgd", "cross_entropy", metrics=[each])
    with pytest.raises(ipufit.ConfigError, match="f1_score_0"):
        model.fit(x, y, 4, callbacks=[ipufit.EarlyStopping("f1_score")], verbose=0)
