# SPDX-License-Identifier: Apache-2.0
"""`ConfusionMatrix` against scikit-learn's, in logs, in History and drawn."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from ipufit import (
    ConfigError,
    CSVLogger,
    EarlyStopping,
    IPUConfig,
    IPUModel,
    LambdaCallback,
    ModelCheckpoint,
)
from ipufit.errors import DataError
from ipufit.metrics import ConfusionMatrix
from tests.metrics.harness import (
    COUNT,
    Case,
    check,
    check_device,
    labels,
    one_hot,
    scores,
    spread,
)
from tests.metrics.peers import sk

MODES = (None, "true", "pred", "all")
MATRIX = [[12.0, 0.5], [3.0, 1000.0]]


class Digest(ConfusionMatrix):
    """The matrix as one number, which differs for other cells."""

    def result(self, sums):
        return digest(super().result(sums))


def digest(matrix):
    matrix = np.array(matrix)
    factors = np.random.default_rng(0).uniform(1, 2, matrix.shape)
    return float((matrix * factors).sum())


def peer(normalize, num_classes, outputs, targets, weights):
    """scikit-learn's matrix of scores of classes, or of logits."""
    if targets.shape == outputs.shape and num_classes > 2:
        targets = targets.argmax(-1)
    is_binary = num_classes == 2
    predicted = outputs.gt(0).reshape(-1) if is_binary else outputs.argmax(-1)
    return sk.confusion_matrix(
        targets.reshape(-1),
        predicted.reshape(-1),
        labels=range(num_classes),
        sample_weight=spread(weights, targets),
        normalize=normalize,
    )


DATA = {
    "classes": (4, scores(0, 4), labels(1)),
    "one-hot": (4, scores(2, 4), one_hot(labels(3))),
    "positions": (4, scores(4, 5, 4), labels(5, 5)),
    "some that never occur": (6, scores(6, 6), labels(7, num_classes=2)),
    "bits": (2, scores(8), labels(9, num_classes=2)),
    "columns": (2, scores(8, 1), labels(9, num_classes=2).float()),
}
CASES = [
    Case(
        f"{name} {normalize}",
        partial(Digest, normalize),
        *data,
        lambda *given, mode=normalize, size=size: digest(peer(mode, size, *given)),
    )
    for name, (size, *data) in DATA.items()
    for normalize in MODES
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_matrix_is_scikit_learns(case):
    check(case)


def test_devices_compute_it():
    check_device(CASES[::4])


@pytest.mark.parametrize("normalize", MODES)
def test_evaluate_gives_rows_of_true_classes_over_calls_and_replicas(normalize):
    outputs, targets = scores(10, 4), labels(11)
    model = IPUModel(torch.nn.Identity(), IPUConfig(replicas=2))
    model.compile("sgd", "cross_entropy", weighted_metrics=[ConfusionMatrix(normalize)])
    weights = torch.arange(COUNT) % 3
    logs = model.evaluate(
        outputs, targets, batch_size=8, sample_weight=weights.float(), verbose=0
    )
    expected = peer(normalize, 4, outputs, targets, weights.float())
    np.testing.assert_allclose(logs["confusion_matrix"], expected, rtol=1e-6)
    json.dumps(logs)


def test_a_class_can_be_ignored_and_a_threshold_set():
    targets = labels(11)
    metric = ConfusionMatrix(ignore_class=3)
    matrix = metric.result(metric.sums(scores(10, 4), targets).double())
    np.testing.assert_array_equal(
        matrix, peer(None, 4, scores(10, 4), targets, targets.ne(3).float())
    )
    metric = ConfusionMatrix(threshold=0.7, from_logits=False)
    sums = metric.sums(torch.tensor([0.6, 0.8]), torch.tensor([0, 0]))
    assert metric.result(sums.double()) == [[1.0, 1.0], [0.0, 0.0]]


def test_what_has_no_matrix_is_refused():
    with pytest.raises(ConfigError, match=r"normalize='rows'.*'true', 'pred', 'all'"):
        ConfusionMatrix("rows")
    metric = ConfusionMatrix()
    with pytest.raises(DataError, match="classes of the outputs"):
        metric.result(metric.sums(scores(0, 4), labels(1) + 1).double())
    metric.has_binary_loss = True
    with pytest.raises(DataError, match=r"\(37, 3\), which are 3 labels"):
        metric.sums(scores(12, 3), labels(13, 3, num_classes=2))


# In a run ---------------------------------------------------------------------------

X, Y = scores(14, 3), labels(15, num_classes=3)


def compiled():
    torch.manual_seed(0)
    model = IPUModel(torch.nn.Linear(3, 3))
    model.compile("sgd", "cross_entropy", metrics=[ConfusionMatrix(name="pairs")])
    return model


def fit(**arguments):
    return compiled().fit(
        X, Y, batch_size=37, epochs=2, validation_data=(X, Y), **arguments
    )


@pytest.mark.parametrize("verbose", [1, 2])
def test_logs_have_it_and_displays_leave_it_out(verbose, tmp_path, capsys):
    history = fit(callbacks=CSVLogger(tmp_path / "log.csv"), verbose=verbose)
    assert "pairs" not in capsys.readouterr().out
    assert "pairs" not in repr(history) + history._repr_html_()
    matrices = history.history["val_pairs"]
    assert [np.shape(matrix) for matrix in matrices] == [(3, 3)] * 2
    assert {np.sum(matrix) for matrix in matrices} == {COUNT}
    assert str(matrices[1]) in (tmp_path / "log.csv").read_text()


@pytest.mark.parametrize("kind", [EarlyStopping, partial(ModelCheckpoint, "run")])
def test_a_matrix_can_not_be_monitored(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'val_pairs'.*not one number"):
        fit(callbacks=kind(monitor="val_pairs", mode="max"), verbose=0)


def test_a_run_resumed_within_an_epoch_has_the_matrices_of_the_whole(tmp_path):
    def fit_six_updates(*callbacks, **arguments):
        x, y = X[:36], Y[:36]
        saving = ModelCheckpoint(tmp_path, save_freq=2)
        data = {"validation_data": (X, Y), "validation_updates": 1}
        run = {"epochs": 2, "verbose": 0, "callbacks": [saving, *callbacks]}
        return compiled().fit(x, y, 12, **data, **run, **arguments).history

    failing = LambdaCallback(on_train_batch_end=lambda batch, _: 1 // (2 - batch))
    with pytest.raises(ZeroDivisionError):
        fit_six_updates(failing)
    resumed = fit_six_updates(LambdaCallback(), resume=tmp_path)
    assert resumed == fit_six_updates(LambdaCallback())


# Drawn ------------------------------------------------------------------------------


@pytest.fixture
def pyplot():
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def drawn(axes):
    """The cells, and the numbers in them by column and row."""
    (image,) = axes.get_images()
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    return image.get_array().tolist(), texts


def test_it_is_drawn_with_its_numbers(pyplot):
    figure = ConfusionMatrix.plot(MATRIX, ["cat", "dog"])
    axes = figure.axes[0]
    assert drawn(axes) == (
        MATRIX,
        {(0, 0): "12", (1, 0): "0.50", (0, 1): "3", (1, 1): "1000"},
    )
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")
    for labels_of in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [label.get_text() for label in labels_of] == ["cat", "dog"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([MATRIX, MATRIX],), "matrix=.*: use the matrix of one epoch"),
        (([[1.0, 2.0]],), "matrix=.*: use the matrix of one epoch"),
        (([],), "matrix=.*: use the matrix of one epoch"),
        ((0.5,), "matrix=0.5: use the matrix of one epoch"),
        ((MATRIX, ["cat"]), r"labels=\['cat'\]: use 2 names, one for each class"),
        ((MATRIX, ["a", "b", "c"]), "labels=.*: use 2 names, one for each class"),
    ],
)
def test_what_is_no_matrix_is_not_drawn(pyplot, arguments, message):
    with pytest.raises(ConfigError, match=message):
        ConfusionMatrix.plot(*arguments)
    assert not pyplot.get_fignums()


def test_numbers_without_room_are_left_out(pyplot):
    matrix = np.eye(100).tolist()
    axes = ConfusionMatrix.plot(matrix).axes[0]
    assert drawn(axes) == (matrix, {})
    assert len(axes.get_xticks()) < 50


def test_history_draws_the_last_epochs_matrices(pyplot):
    history = fit(verbose=0)
    figure = history.plot()
    titles = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
    assert set(titles) == {"pairs, epoch 2", "val_pairs, epoch 2"}
    shown, _ = drawn(titles["val_pairs, epoch 2"])
    assert shown == history.history["val_pairs"][-1]
    assert history.plot("pairs").axes[0].get_title() == "pairs, epoch 2"
