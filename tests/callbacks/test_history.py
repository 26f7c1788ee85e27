# SPDX-License-Identifier: Apache-2.0
"""`History`: one row per epoch; and its plot with matplotlib, without a screen."""

import io
import itertools
import re
import sys

import pytest
import torch

from ipufit import ConfigError, History, UnknownNameError
from ipufit.state import RunState
from tests.callbacks.driving import linear


def test_a_new_run_counts_epochs_anew_and_keeps_what_there_was():
    history = History()
    history.on_epoch_end(0, {"loss": 2.0})
    run = RunState(coverage="half", params={"dropped_samples": 3})
    history.set_run(run)
    history.on_train_begin({})
    assert history.epoch == []
    assert history.history == {"loss": [2.0]}
    assert (history.dropped_samples, history.coverage) == (3, "half")


# Plots ------------------------------------------------------------------------------


@pytest.fixture
def pyplot(monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def history_of(rows):
    history = History()
    for epoch, figures in rows.items():
        history.on_epoch_end(epoch, figures)
    return history


ROWS = {
    0: {"loss": 3.0, "mae": 9.0},
    1: {"loss": 2.0, "mae": 8.0, "val_loss": 2.5, "val_mae": 8.5},
    2: {"loss": 1.0, "mae": 7.0},
    3: {"loss": 0.5, "mae": 6.0, "val_loss": 1.5, "val_mae": 7.5},
}
BOTH = ["training", "validation"]


def curves(axes):
    """Label to points, of each curve."""
    return {line.get_label(): list(zip(*line.get_data())) for line in axes.get_lines()}


def test_training_and_validation_of_a_figure_share_axes(pyplot):
    figure = history_of(ROWS).plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "mae"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"epoch"}
    assert curves(figure.axes[0]) == {
        "training": [(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.5)],
        "validation": [(2, 2.5), (4, 1.5)],  # at the epochs that were validated
    }
    legend = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert legend == BOTH


def test_a_slow_machine_draws_without_a_warning(pyplot, monkeypatch):
    figure = history_of(ROWS).plot()
    monkeypatch.setattr("time.perf_counter", itertools.count(step=2).__next__)
    figure.savefig(io.BytesIO())


@pytest.mark.parametrize(
    ("trained", "validated", "drawn"),
    [
        (
            ["loss", "top_5", "5"],
            ["easy_loss", "hard_loss", "hard_top_5"],
            {
                "loss": ["training", "validation easy", "validation hard"],
                "top_5": ["training", "validation hard"],
                "5": ["training"],
            },
        ),
        (
            ["loss", "top_5", "5"],
            ["loss", "abs_loss", "top_5"],
            {
                "loss": BOTH,
                "top_5": BOTH,
                "5": ["training"],
                "val_abs_loss": ["validation"],
            },
        ),
    ],
)
def test_curves_stand_beside_what_they_validate(pyplot, trained, validated, drawn):
    names = [*trained, *(f"val_{name}" for name in validated)]
    history = history_of({0: dict(zip(names, range(1, 9)))})
    figure = history.plot()
    assert {axes.get_ylabel(): list(curves(axes)) for axes in figure.axes} == drawn
    for name in names[3:]:
        (axes,) = history.plot(name).axes
        assert list(curves(axes).values()) == [[(1, names.index(name) + 1)]]


@pytest.mark.parametrize(
    ("names", "drawn"),
    [
        ("mae", {"mae": BOTH}),
        (["val_mae", "loss"], {"val_mae": ["validation"], "loss": BOTH}),
    ],
)
def test_names_choose(pyplot, names, drawn):
    figure = history_of(ROWS).plot(names)
    assert {axes.get_ylabel(): list(curves(axes)) for axes in figure.axes} == drawn


def test_a_list_of_a_user_s_callback_is_drawn_as_several_curves(pyplot):
    history = history_of({0: {"each": [1, 5]}, 1: {"each": [2, 4]}})
    axes = history.plot("each").axes[0]
    drawn = [list(line.get_ydata()) for line in axes.get_lines()]
    assert drawn == [[1, 2], [5, 4]]
    assert "<th>each</th>" in history._repr_html_()


def test_it_draws_in_the_user_s_axes(pyplot):
    figure, grid = pyplot.subplots(1, 2)
    assert history_of(ROWS).plot(axes=grid) is figure
    assert history_of(ROWS).plot("loss", axes=grid[0]) is figure
    assert len(grid[0].get_lines()) == 4
    assert pyplot.get_fignums() == [figure.number]
    with pytest.raises(ConfigError, match=r"draws 2 metrics, and got 1 axes"):
        history_of(ROWS).plot(axes=grid[0])


def test_a_fit_draws_itself_into_a_file(pyplot, tmp_path):
    x, y = torch.rand(16, 3), torch.rand(16, 1)
    model = linear(3)
    history = model.fit(
        x, y, 4, epochs=4, validation_data=(x, y), validation_freq=2, verbose=0
    )
    assert history.epochs_of == {"loss": [0, 1, 2, 3], "val_loss": [1, 3]}
    history.plot().savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_notebook_shows_the_figure_once(pyplot, monkeypatch):
    monkeypatch.setattr(pyplot, "get_backend", lambda: "inline")
    figure = history_of(ROWS).plot()
    assert pyplot.get_fignums() == []
    assert len(figure.axes) == 2


def test_what_is_not_there_is_named():
    with pytest.raises(UnknownNameError, match=r"metric 'los'.*'loss'"):
        history_of(ROWS).plot(["los"])
    with pytest.raises(ConfigError, match=r"nothing to draw.*after fit"):
        History().plot()


def test_the_name_of_a_picture_is_no_metric(pyplot):
    history = History()
    history.on_epoch_end(0, {"loss": 0.5})
    with pytest.raises(ConfigError, match=r"history\.plot\(\)\.savefig\('a\.svg'\)"):
        history.plot("a.svg")


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ConfigError, match=r"History.plot.*pip install ipufit\[plot\]"):
        history_of(ROWS).plot()


def test_a_notebook_shows_a_table_of_the_epochs():
    history = History()
    history.on_epoch_end(0, {"loss": 0.5})
    history.on_epoch_end(1, {"loss": 0.25, "val_loss": 0.125})
    assert re.findall(r"<t[hd]>(.*?)</t", history._repr_html_()) == [
        *("epoch", "loss", "val_loss"),
        *("1", "0.5", ""),
        *("2", "0.25", "0.125"),
    ]
