# SPDX-License-Identifier: Apache-2.0
"""`predict` leaves columns alone that are targets, whatever form the data has."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ipufit import CachedDataset, ConfigError, DataError
from tests import reference

X, Y = reference.samples(24)


ROWS = reference.Items([{"x": x, "label": y} for x, y in zip(X, Y)])


class Named(torch.nn.Module):
    """Takes its input by name."""

    def __init__(self):
        super().__init__()
        self.network = reference.network()

    def forward(self, x):
        return self.network(x)


FORMS = {
    "arrays": lambda: {"x": X, "label": Y},
    "dataset": lambda: ROWS,
    "cached": lambda: CachedDataset(ROWS),
    "stream": lambda: reference.Stream(list(ROWS)),
    "loader": lambda: DataLoader(ROWS, batch_size=5),
    "generator": lambda: ({"x": X[i : i + 4], "label": Y[i : i + 4]} for i in (0, 4)),
}


def make():
    return reference.compiled(Named())


def expected(model, rows):
    with torch.no_grad():
        return model.module.eval()(X[:rows])


@pytest.mark.parametrize(
    ("form", "method"), [*((form, "fit") for form in FORMS), ("arrays", "evaluate")]
)
def test_a_column_that_was_a_target_is_left_alone(form, method):
    model = make()
    if method == "fit":
        model.fit(ROWS, "label", batch_size=4, verbose=0)
    else:
        model.evaluate(ROWS, ["label"], verbose=0)
    predicted = model.predict(FORMS[form](), verbose=0)
    torch.testing.assert_close(predicted, expected(model, len(predicted)))
    if form == "arrays":
        assert torch.equal(model.predict_on_batch(FORMS[form]()), predicted)


@pytest.mark.parametrize("form", FORMS)
def test_one_that_forward_does_not_take_is_named_and_can_be_named(form):
    model = make()
    message = r"forward\(x\) has no argument 'label', .*'x', 'label'.*y='la"
    with pytest.raises(DataError, match=message):
        model.predict(FORMS[form](), verbose=0)
    with pytest.raises(DataError, match=r"y=tensor.* must be column names"):
        model.predict({"x": X}, y=Y, verbose=0)
    predicted = model.predict(FORMS[form](), y="label", verbose=0)
    torch.testing.assert_close(predicted, expected(model, len(predicted)))


@pytest.mark.parametrize("targets", [Y, Y.numpy(), Y.tolist(), TensorDataset(Y)])
def test_targets_in_the_place_of_the_batch_size_are_told_of_evaluate(targets):
    message = r"^batch_size=.* takes inputs only\. .* evaluate\(x, y\)"
    with pytest.raises(DataError, match=message):
        make().predict({"x": X}, targets)
    with pytest.raises(ConfigError, match="batch_size='4': use a whole number"):
        make().predict({"x": X}, "4")


@pytest.mark.parametrize("loss", ["mse", "mae", "cross_entropy", "bce_with_logits"])
def test_several_targets_of_one_output_can_be_one_of_several_columns(loss):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(torch.rand(8, 5).numpy(), columns=list("abcde"))
    model = reference.compiled(torch.nn.Linear(3, 2), loss=loss)
    words = r"one target .* got a dict .*y=frame\[(\['d', 'e'\])\] and .*columns=\1\)"
    with pytest.raises(DataError, match=words):
        model.fit(frame, ["d", "e"], 8, verbose=0)
    y = frame[["d", "e"]]
    model.fit(frame.drop(columns=["d", "e"]), y, 8, verbose=0)


def test_a_frame_with_too_many_columns_may_have_the_target_among_them():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X.numpy(), columns=["a", "b", "c"]).assign(label=Y.numpy())
    model = reference.compiled()
    for predict in (model.predict, model.predict_on_batch):
        with pytest.raises(DataError, match=r"'b', 'c', 'label'\]: .*y=\"its name\""):
            predict(frame)
    with pytest.raises(DataError, match=r"multiplied \([^)]*\)$"):
        model.predict(frame.to_numpy())
    assert len(model.predict(frame, y="label", verbose=0)) == len(frame)


def test_columns_of_frames_go_by_their_names():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X.numpy(), columns=["a", "b", "c"])
    model = reference.compiled()
    model.fit(frame, Y, batch_size=4, verbose=0, validation_split=0.5)
    other = frame.assign(more=1.0)[["more", "c", "a", "b"]]
    for one in (model, pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(one.predict(other, verbose=0), one.predict(X))
        torch.testing.assert_close(one.predict_on_batch(other), one.predict(X))
        assert one.evaluate(other, Y, 4) == pytest.approx(one.evaluate(X, Y, 4))
        with pytest.raises(DataError, match="lacks the columns 'b', which the model"):
            one.predict(frame[["a", "c"]])
    history = model.fit(frame, Y, 4, verbose=0, validation_data=(other, Y)).history
    assert history["val_loss"][0] == pytest.approx(model.evaluate(X, Y, 4)["loss"])
