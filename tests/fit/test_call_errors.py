# SPDX-License-Identifier: Apache-2.0
"""An index that isn't there is a DataError in whichever micro-batch it is."""

from __future__ import annotations

import pytest
import torch

from ipufit import DataError, IPUConfig, IPUModel

ROWS = 16
PLANS = {
    "calls of one": IPUConfig(),
    "calls of several": IPUConfig(device_iterations=2),
    "accumulated": IPUConfig(gradient_accumulation=2, replicas=2),
}


def labels(at=None, value=9):
    numbers = torch.zeros(ROWS, dtype=torch.int64)
    if at is not None:
        numbers[at] = value
    return numbers


def embedding(config):
    model = IPUModel(
        torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 4)), config
    )
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    return model


METHODS = {
    "fit": lambda m, x, y: m.fit(x, y, batch_size=4, shuffle=False, verbose=0),
    "evaluate": lambda m, x, y: m.evaluate(x, y, batch_size=4, verbose=0),
    "predict": lambda m, x, y: m.predict(x, batch_size=4, verbose=0),
    "train_on_batch": lambda m, x, y: m.train_on_batch(x, y),
    "test_on_batch": lambda m, x, y: m.test_on_batch(x, y),
}


@pytest.mark.parametrize(
    ("plan", "method", "at"),
    [
        *((plan, method, ROWS - 1) for plan in PLANS for method in METHODS),
        ("accumulated", "fit", 0),
        ("calls of several", "evaluate", 5),
    ],
)
@pytest.mark.filterwarnings("ignore::ipufit.errors.EmptyUpdatesWarning")
def test_an_index_out_of_range_is_a_data_error_wherever_it_is(plan, method, at):
    run = METHODS[method]
    for x, y in ((labels(at), labels()), (labels(), labels(at))):
        if method == "predict" and not x.any():
            continue
        model = embedding(PLANS[plan])
        with pytest.raises(DataError, match=r"index out of range|out of bounds"):
            run(model, x, y)
        run(model, labels(), labels())  # and the model works on


@pytest.mark.parametrize("at", [0, ROWS - 1])
@pytest.mark.parametrize("method", METHODS)
def test_the_message_has_the_range_of_the_integers(method, at):
    model = embedding(IPUConfig(device_iterations=1))
    with pytest.raises(
        DataError, match=r"int64 \[\d+\] from \d to 9.*from 0 to their number - 1"
    ) as e:
        METHODS[method](model, labels(at), labels())
    assert "Dim 0" not in str(e.value)


SOURCES = {
    "arrays": lambda x, y: (x, y),
    "a dataset": lambda x, y: (torch.utils.data.TensorDataset(x, y), None),
}


@pytest.mark.parametrize("value", [9, -3])
@pytest.mark.parametrize("metrics", [None, ["accuracy"], ["f1"]])
@pytest.mark.parametrize("loss", ["cross_entropy", lambda x, y: x.sum(1)])
@pytest.mark.parametrize("source", SOURCES)
def test_the_message_has_the_row_of_a_target(source, loss, metrics, value):
    if callable(loss) and metrics is None:
        return
    data = SOURCES[source](labels(), labels(9, value))
    for method in ("fit", "evaluate"):
        model = embedding(IPUConfig())
        model.compile("sgd", loss, metrics=metrics)
        message = rf"arget {value}\b.*\(In row 9 of `x`\.\)$"
        with pytest.raises(DataError, match=message):
            METHODS[method](model, *data)


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.many, self.few = torch.nn.Linear(4, 10), torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.many(x), self.few(x)


def test_the_row_is_that_of_the_output_which_refuses_the_target():
    x, many = torch.rand(16, 4), torch.arange(16) % 8
    few = many % 3
    for value, row in ((9, True), (5, False)):  # both outputs have a 5
        few[13] = value
        model = IPUModel(TwoHeads())
        model.compile("sgd", ["cross_entropy", "cross_entropy"])
        with pytest.raises(DataError) as caught:
            model.evaluate(x, (many, few), batch_size=4, verbose=0)
        assert ("(In row 13 of `x`.)" in str(caught.value)) == row
        assert ("(In row " in str(caught.value)) == row


def test_the_row_is_none_whose_weight_is_0():
    x, y = torch.rand(16, 4), torch.zeros(16, dtype=torch.int64)
    y[3] = y[9] = 7
    weights = torch.arange(16).ne(3).float()
    model = IPUModel(torch.nn.Linear(4, 3))
    model.compile("sgd", lambda x, y: x.sum(1), weighted_metrics=["accuracy"])
    for method in (model.fit, model.evaluate):
        with pytest.raises(DataError, match=r"\(In row 9 of `x`\.\)$"):
            method(x, y, batch_size=16, sample_weight=weights, verbose=0)
