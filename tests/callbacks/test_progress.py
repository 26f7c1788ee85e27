# SPDX-License-Identifier: Apache-2.0
"""Which display a run has, and what it leaves; golden screens have the rest."""

import io
import logging
import re
import sys
import threading
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console

from ipufit import Callback, ConfigError, IpufitWarning, LambdaCallback, poptorch
from ipufit.callbacks import (
    ProgressBar,
    make_progress,
    progress,
)
from ipufit.callbacks.progress import (
    LineProgress,
    ProgressDisplay,
    format_logs,
)
from tests.callbacks.driving import linear
from tests.golden.screens.make import screen
from tests.interpreters import run_python
from tests.reference import AtEpochEnd, compiled

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_dumb_terminal_redraws_nothing(term):
    screen = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": term})
    assert progress.can_redraw(screen) is (term == "xterm")


@pytest.mark.parametrize(
    ("verbose", "is_terminal", "expected"),
    [
        (0, True, ProgressDisplay),
        (1, False, ProgressBar),
        (2, True, LineProgress),
        ("auto", True, ProgressBar),
        ("auto", False, ProgressBar),
    ],
)
def test_verbose_chooses_the_display(verbose, is_terminal, expected):
    screen = Console(file=io.StringIO(), force_terminal=is_terminal, _environ={})
    assert type(make_progress(verbose, screen)) is expected


@pytest.mark.parametrize("verbose", [3, "1", None])
def test_an_unknown_verbosity_is_refused(verbose):
    with pytest.raises(ConfigError, match="use one of 0, 1, 2, 'auto'"):
        make_progress(verbose)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, "0.5000"),
        (-0.5, "-0.5000"),  # unlike Keras's verbose=2, which writes -5.0000e-01
        (99.99, "99.9900"),
        (12345.678, "12345.7"),  # Keras: 12345.6777
        (1234567.0, "1.23457e+06"),
        (0.001, "0.0010"),
        (0.000012, "1.2e-05"),
        (0.0, "0.0000"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_have_four_decimals_or_six_digits(value, expected):
    assert format_logs({"loss": value}) == f"loss: {expected}"


def test_epochs_align_when_a_metric_loses_digits():
    widths = {}
    lines = [
        format_logs({"loss": loss, "mae": 0.5}, "  ", " ", widths)
        for loss in (12.5, 9.75, 0.25)
    ]
    assert lines == [
        *("loss 12.5000  mae 0.5000", "loss  9.7500  mae 0.5000"),
        *("loss  0.2500  mae 0.5000",),
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(2e-5, "20us"), (0.04, "40ms"), (3.25, "3.2s"), (12.5, "12s"), (0, "0s")],
)
def test_an_evaluation_says_its_time_with_digits(seconds, shown):
    text, now = io.StringIO(), [0.0]
    bar = ProgressBar(Console(file=text, width=80), clock=lambda: now[0])
    x = torch.ones(4, 1)

    class Passing(Callback):
        def on_test_batch_end(self, batch, logs):
            now[0] = seconds

    linear().evaluate(x, x, verbose=0, callbacks=[Passing(), bar])
    assert text.getvalue().startswith(f"Evaluated {shown}  loss ")


@pytest.mark.parametrize(("seconds", "lines"), [(0.99, 0), (1.0, 1)])
def test_a_prediction_of_less_than_a_second_leaves_no_line(seconds, lines, monkeypatch):
    model = linear()
    model.predict(torch.ones(4, 1), verbose=0)  # compiles
    monkeypatch.setattr(progress, "_QUICK_SECONDS", 1.0)
    text, now = io.StringIO(), [0.0]
    bar = ProgressBar(Console(file=text, width=80), clock=lambda: now[0])

    class Passing(Callback):
        def on_predict_batch_end(self, batch, logs):
            now[0] = seconds

    model.predict(torch.ones(4, 1), verbose=0, callbacks=[Passing(), bar])
    assert text.getvalue() == "Predicted 1.0s\n" * lines


# In a fit -------------------------------------------------------------------------


def make_model():
    return linear(2)


DATA = torch.randn(8, 2), torch.randn(8, 1)


def test_a_fit_with_lines_prints_them_to_standard_output(capsys):
    model = make_model()
    model.fit(*DATA, batch_size=4, epochs=2, validation_split=0.5, verbose=2)
    model.evaluate(*DATA, batch_size=4, verbose=2)
    model.predict(DATA[0], batch_size=4, verbose=2)
    out, err = capsys.readouterr()
    lines = [re.sub(r"[\d.]+s", "_s", line) for line in out.splitlines()]
    assert [re.sub("in .*", "in _", line.split(" - ")[0]) for line in lines] == [
        *("Epoch 1/2", "1/1", "Epoch 2/2", "1/1", "2/2", "2/2"),
    ]
    assert err == ""


def test_the_log_says_why_calls_are_not_larger(caplog):
    with caplog.at_level(logging.INFO, "ipufit"):
        make_model().fit(*DATA, batch_size=4, verbose=0)
    (said,) = (line for line in caplog.messages if line.startswith("Compiled"))
    assert re.fullmatch(
        r"Compiled the training program in [\d.]+ s: 2 updates per call "
        r"\(device_iterations left open\); not more because .*",
        said,
    )


# While a program is compiled ------------------------------------------------------


class Slow(torch.nn.Linear):
    """Takes longer to trace than a quick compilation, if that is less than a second."""

    def forward(self, x):
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer) and thread.interval < 1:
                thread.join(10)
        sys.stdout.write("traced\n")
        return super().forward(x)


@pytest.mark.parametrize("quick_seconds", [0.02, 100.0])
@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_a_slow_compilation_is_said_before_it_ends(
    monkeypatch, capsys, tmp_path, verbose, quick_seconds
):
    monkeypatch.setattr(progress, "_QUICK_SECONDS", quick_seconds)
    model = compiled(Slow(2, 1), loss="mse")
    for name, is_loud, run in (
        ("training", verbose, lambda: model.fit(*DATA, 4, verbose=verbose)),
        ("inference", verbose, lambda: model.predict(DATA[0], 2, verbose=verbose)),
        ("training", verbose, lambda: model.build(*DATA, 8, verbose=verbose)),
        ("exported", True, lambda: model.export(tmp_path / "linear.popef", DATA[0])),
    ):
        run()
        out = capsys.readouterr().out
        said = f"Compiling the {name} program, which takes minutes on IPUs\ntraced\n"
        assert (said in out) is bool(is_loud and quick_seconds < 1), name
        assert ("Compiling" in out) is (said in out), name


def test_what_says_it_draws_no_random_numbers():
    code = (
        "import ipufit\n"
        "from ipufit.callbacks import progress\n"
        "from tests.callbacks.test_progress import DATA, Slow\n"
        "import sys\n"
        "for name in [name for name in sys.modules if name.startswith('rich')]:\n"
        "    del sys.modules[name]\n"
        "progress._QUICK_SECONDS = 0.02\n"
        "model = ipufit.IPUModel(Slow(2, 1))\n"
        "model.compile(loss='mse')\n"
        "model.fit(*DATA, batch_size=4)\n"
    )
    done = run_python("-c", code)
    assert "Compiling the training program" in done.stdout, done.stderr
    assert "BakedInWarning" not in done.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("verbose", "out", "err", "is_shown"),
    [
        (1, Terminal, Terminal, True),
        (2, Terminal, Terminal, True),
        (0, Terminal, Terminal, False),
        (1, io.StringIO, Terminal, False),
        (1, Terminal, io.StringIO, False),
    ],
)
def test_poptorch_draws_its_bar_on_terminals_alone(
    monkeypatch, verbose, out, err, is_shown
):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", out())
    stderr = err()
    for name in ("stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, stderr)
    shown, compile_program = [], poptorch.PoplarExecutor.compile

    def compile_noting(executor, *args):
        shown.append("compilation_progress_bar_fn" in executor.options.toDict())
        return compile_program(executor, *args)

    monkeypatch.setattr(poptorch.PoplarExecutor, "compile", compile_noting)
    inner = AtEpochEnd(lambda callback, *_: callback.model.evaluate(*DATA))
    make_model().fit(*DATA, batch_size=4, verbose=verbose, callbacks=inner)
    # The second is compiled below the bar of an epoch, or after its line.
    assert shown == [is_shown, (is_shown and verbose == 2) or verbose == 0]


def test_a_run_within_a_bar_prints_above_it(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    inner = AtEpochEnd(lambda callback, *_: callback.model.evaluate(*DATA))
    make_model().fit(*DATA, batch_size=4, epochs=2, callbacks=inner)
    lines = screen(capsys.readouterr().out, 100).splitlines()
    assert [line.split()[0] for line in lines if line] == [
        *("Evaluated", "1/2", "Evaluated", "2/2"),
    ]


@pytest.mark.parametrize("verbose", [1, "auto"])
def test_an_error_within_a_bar_leaves_the_terminal_usable(monkeypatch, capsys, verbose):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich: behave as on a terminal

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model().fit(
            *DATA, batch_size=4, callbacks=AtEpochEnd(interrupt), verbose=verbose
        )
    out = capsys.readouterr().out
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h")  # cursor hidden, shown
    assert out.endswith("\n") or out.endswith("\x1b[?25h")
    model = make_model()
    model.fit(*DATA, batch_size=4, verbose=verbose)  # a bar of its own starts


@pytest.fixture
def shown_in_notebook(monkeypatch):
    outputs = []

    def display(data, raw, display_id):
        outputs.append([data])
        added = outputs[-1].append
        return SimpleNamespace(update=lambda data, raw=False: added(data))

    package = ModuleType("IPython")
    package.__spec__ = ModuleSpec("IPython", None)
    package.version_info = (9, 0)  # matplotlib asks for it
    monkeypatch.setitem(sys.modules, "IPython", package)
    module = SimpleNamespace(display=display, Image=lambda data: data)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    return outputs


def test_a_run_goes_on_without_its_picture(monkeypatch, shown_in_notebook):
    figures = pytest.importorskip("matplotlib.figure")

    def full_disk(*_, **__):
        raise OSError("no space")

    monkeypatch.setattr(figures.Figure, "savefig", full_disk)
    with pytest.warns(IpufitWarning, match=r"can't be drawn: OSError\('no space'"):
        history = make_model().fit(*DATA, batch_size=4, epochs=2)
    assert history.epoch == [0, 1]


@pytest.mark.parametrize("error", [RuntimeError("numpy.core"), ValueError("backend")])
def test_a_run_goes_on_where_matplotlib_is_broken(
    error, monkeypatch, shown_in_notebook, tmp_path
):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "matplotlib"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error!r}")
    monkeypatch.syspath_prepend(tmp_path)
    words = f"can't be drawn: {re.escape(repr(error))}"
    with pytest.warns(IpufitWarning, match=words) as caught:
        history = make_model().fit(*DATA, batch_size=4, epochs=2)
    assert len(caught) == 1
    assert history.epoch == [0, 1]


def test_a_fit_whose_loss_was_removed_has_no_picture(shown_in_notebook):
    remover = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.pop("loss"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", IpufitWarning)
        history = make_model().fit(*DATA, batch_size=4, epochs=2, callbacks=remover)
    assert "loss" not in history.history


@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_a_notebook_keeps_a_line_for_each_epoch_and_the_loss(
    monkeypatch, capsys, has_matplotlib, shown_in_notebook
):
    outputs = shown_in_notebook
    if has_matplotlib:
        pytest.importorskip("matplotlib.pyplot")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    model = make_model()
    model.fit(*DATA, batch_size=4, epochs=2, validation_split=0.5)
    if has_matplotlib:
        empty, *pictures = outputs.pop(0)
        assert empty == {"text/plain": ""}
        assert pictures[-1].startswith(b"\x89PNG")
    kept = [output[-1]["text/plain"] for output in outputs]
    assert len(kept) == 2
    for epoch, line in enumerate(kept, 1):
        assert re.fullmatch(
            rf"{epoch}/2 +[\d.]+m?s  loss [\d.]+  val_loss [\d.]+", line
        )
    drawn = outputs[0][1]["text/plain"]
    assert drawn.startswith("Epoch 1/2 ━")
    assert "1/1 00:00" in drawn
    assert capsys.readouterr().out == ""
    repr(model.plan(*DATA, batch_size=4))
    assert capsys.readouterr().out == ""  # rich would show it on the page at once


# `ProgressBar`, in the place of the display that `verbose` asks for ----------------


def bar_and_text():
    text = io.StringIO()
    return ProgressBar(
        Console(file=text, width=120, force_terminal=True), clock=lambda: 0.0
    ), text


def fitted(callbacks, verbose):
    model = linear()
    x = torch.ones(4, 1)
    model.fit(x, x, batch_size=2, callbacks=callbacks, verbose=verbose)
    return model, x


@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_it_shows_whatever_verbose_says_and_alone(verbose, capsys):
    bar, text = bar_and_text()
    fitted([bar], verbose)
    assert re.search(r"1/1    0s  loss \d", text.getvalue())
    assert capsys.readouterr().out == ""


def test_it_can_be_used_again_for_other_runs():
    bar, text = bar_and_text()
    model, x = fitted([[bar]], 0)
    model.evaluate(x, x, callbacks=bar, verbose=0)
    model.predict(x, callbacks=bar, verbose=0)
    assert "Evaluating" in text.getvalue()
    assert "Predicting" in text.getvalue()
