# SPDX-License-Identifier: Apache-2.0
"""The model and the arguments of fit, of scripts, modules and functions."""

from __future__ import annotations

import argparse
import itertools
import sys

import pytest

from ipufit import IPUModel
from ipufit.commands.subject import Subject, Target, add_target, looked_at, target_of
from ipufit.errors import ConfigError

MODEL = """
import torch
from ipufit import IPUModel
model = IPUModel(torch.nn.Linear(2, 1))
model.compile("sgd", "mse")
"""
FIT = MODEL + "model.fit(torch.zeros(8, 2), torch.zeros(8, 1), batch_size=4)\n"
_number = itertools.count()


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])


def written(tmp_path, source, name=None):
    """Name of a module of a source; no two tests have the same."""
    name = name or f"subject_{next(_number)}"
    (tmp_path / f"{name}.py").write_text(source, "utf-8")
    return name


def files(tmp_path):
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))


def test_a_script_stops_at_its_first_fit(tmp_path, capsys):
    script = "import sys\nprint('said', sys.argv[1:])\n" + FIT + "print('trained')\n"
    name = written(tmp_path, script) + ".py"
    subject = looked_at(Target(name, ("--fast", "3")), lambda subject: subject)
    assert isinstance(subject, Subject)
    assert isinstance(subject.model, IPUModel)
    assert subject.arguments["batch_size"] == 4
    assert subject.arguments["x"].shape == (8, 2)
    assert subject.model.history is None
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "said ['--fast', '3']\n"


def test_modules_run_by_name_and_find_their_neighbours(tmp_path):
    other = written(tmp_path, "size = 4")
    name = written(tmp_path, f"from {other} import size\n" + FIT)
    arguments = looked_at(Target(name, is_module=True), lambda one: one.arguments)
    assert arguments["batch_size"] == 4


@pytest.mark.parametrize(
    ("result", "names"),
    [
        ("model", []),
        ("(model, torch.zeros(4, 2))", ["x"]),
        ("(model, torch.zeros(4, 2), torch.zeros(4, 1))", ["x", "y"]),
    ],
)
def test_a_function_gives_model_and_data(tmp_path, result, names):
    name = written(tmp_path, MODEL + f"def make():\n    return {result}\n")
    subject = looked_at(Target(f"{name}:make"), lambda subject: subject)
    assert isinstance(subject.model, IPUModel)
    assert sorted(subject.arguments) == names


def test_a_function_that_trains_is_stopped_too(tmp_path):
    body = "".join(f"    {line}\n" for line in FIT.splitlines())
    name = written(tmp_path, f"class Home:\n  @staticmethod\n  def make():\n{body}")
    subject = looked_at(Target(f"{name}:Home.make"), lambda subject: subject)
    assert subject.arguments["batch_size"] == 4


def test_no_file_is_left_and_temporary_ones_are_still_there(tmp_path):
    other = written(tmp_path, "size = 4")
    fit = "".join(f"    {line}\n" for line in FIT.splitlines())
    script = f"import {other}, os, tempfile\n"
    script += "with tempfile.TemporaryDirectory() as folder:\n"
    script += "    os.environ['SEEN_FOLDER'] = folder\n" + fit
    name = written(tmp_path, script) + ".py"
    before = files(tmp_path)

    def look(subject):
        import os

        folder = os.environ.pop("SEEN_FOLDER")
        return folder, os.path.isdir(folder)

    _, was_there = looked_at(Target(name), look)
    assert was_there
    assert files(tmp_path) == before


def test_errors_of_who_looks_come_through(tmp_path):
    script = FIT.replace("model.fit", "try:\n    model.fit")
    script += "except Exception:\n    pass\n"
    name = written(tmp_path, script) + ".py"

    def look(subject):
        raise KeyError("of the look")

    with pytest.raises(KeyError, match="of the look"):
        looked_at(Target(name), look)


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_that_catches_everything_has_called_fit(tmp_path, fails):
    script = FIT.replace("model.fit", "try:\n    model.fit") + "except:\n    pass\n"
    name = written(tmp_path, script) + ".py"

    def look(subject):
        if fails:
            raise KeyError("of the look")
        return subject.arguments["batch_size"]

    if fails:
        with pytest.raises(KeyError, match="of the look"):
            looked_at(Target(name), look)
    else:
        assert looked_at(Target(name), look) == 4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (MODEL, "ended before it called fit"),
        ("raise SystemExit(3)", "ended with 3 before it called fit"),
        ("1 / 0", "ended with 1 before it called fit"),
    ],
)
def test_scripts_without_a_fit_are_refused(tmp_path, source, message, capsys):
    name = written(tmp_path, source) + ".py"
    with pytest.raises(ConfigError, match=message):
        looked_at(Target(name), lambda subject: subject)
    assert ("ZeroDivisionError" in capsys.readouterr().err) == ("1 / 0" in source)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Target("absent_one:make"), "There is no module 'absent_one', neither"),
        (Target("json.absent:make"), "There is no module 'json.absent'"),
        (Target("absent_one.absent:make"), "There is no module 'absent_one.absent'"),
        (Target("absent_one", is_module=True), "There is no module 'absent_one'"),
        (Target("json.absent", is_module=True), "There is no module 'json.absent'"),
        (
            Target("code/absent.py:make"),
            r"'code/absent.py' is a file\..*give absent:make\.",
        ),
    ],
)
def test_names_of_no_module_are_refused_without_a_traceback(target, message, capsys):
    with pytest.raises(ConfigError, match=message):
        looked_at(target, lambda subject: subject)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_module", [False, True])
@pytest.mark.parametrize("source", ["import absent_one", "1 / 0"])
def test_a_module_that_fails_is_told_from_none(tmp_path, source, is_module, capsys):
    """Where its import ends with an error, the traceback leads to the line."""
    folder = tmp_path / f"package_{next(_number)}"
    folder.mkdir()
    (folder / "__init__.py").write_text(source, "utf-8")
    (folder / "train.py").write_text(FIT, "utf-8")
    name = f"{folder.name}.train"
    with pytest.raises(ConfigError, match=r"ended with 1|can't be imported"):
        looked_at(
            Target(name if is_module else f"{name}:make", is_module=is_module),
            lambda subject: subject,
        )
    assert source in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("nothing", "has no function 'nothing'"),
        ("", "has no function ''"),
        ("broken", "ZeroDivisionError"),
        (
            "other",
            r"must return a compiled IPUModel with its data: .* It has returned int",
        ),
        ("many", r"It has returned \(int, str, int, int\)\."),
        ("module", r"It has returned \(Linear, int\)\."),
        ("empty", "It has returned tuple"),
    ],
)
def test_functions_that_give_no_model_are_refused(tmp_path, end, message, capsys):
    source = "def broken():\n    1 / 0\ndef other():\n    return 3\n"
    source += "def many():\n    return 1, 'x', 3, 4\ndef empty():\n    return ()\n"
    source += "def module():\n    import torch\n    return torch.nn.Linear(1, 1), 3\n"
    name = written(tmp_path, source)
    with pytest.raises(ConfigError, match=message):
        looked_at(Target(f"{name}:{end}"), lambda subject: subject)
    assert ("line 2, in broken" in capsys.readouterr().err) == (end == "broken")


def test_what_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"There is no script 'absent\.py'"):
        looked_at(Target("absent.py"), lambda subject: subject)
    with pytest.raises(ConfigError, match=r"without arguments\. Got --fast"):
        looked_at(Target("absent_module:make", ("--fast",)), lambda subject: subject)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["train.py"], Target("train.py")),
        (["train.py", "-m", "--json"], Target("train.py", ("-m", "--json"))),
        (["-m", "a.b", "x"], Target("a.b", ("x",), is_module=True)),
        (["a.b:make"], Target("a.b:make")),
    ],
)
def test_options_after_the_script_are_the_scripts(line, expected):
    parser = argparse.ArgumentParser()
    add_target(parser)
    assert target_of(parser.parse_args(line)) == expected
