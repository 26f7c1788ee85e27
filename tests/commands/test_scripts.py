# SPDX-License-Identifier: Apache-2.0
"""The model and the arguments of fit, of scripts, modules and functions."""

from __future__ import annotations

import itertools
import sys

import pytest

from ipufit import IPUModel
from ipufit.cli import look_at_model
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


def found(program, arguments=(), **kind):
    return look_at_model(program, arguments, lambda *found: found, **kind)


def files(tmp_path):
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))


def test_a_script_stops_at_its_first_fit(tmp_path, capsys):
    script = "import sys\nprint('said', sys.argv[1:])\n" + FIT + "print('trained')\n"
    name = written(tmp_path, script) + ".py"
    model, arguments = found(name, ["--fast", "3"])
    assert isinstance(model, IPUModel)
    assert "self" not in arguments
    assert (arguments["batch_size"], arguments["epochs"]) == (4, 1)
    assert arguments["x"].shape == (8, 2)
    assert model.history is None
    model.fit(**{**arguments, "verbose": 0})  # it is only stopped in the script
    assert model.history.epoch == [0]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "said ['--fast', '3']\n"


def test_modules_run_by_name_and_find_their_neighbours(tmp_path):
    other = written(tmp_path, "size = 4")
    name = written(tmp_path, f"from {other} import size\n" + FIT)
    _, arguments = found(name, is_module=True)
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
    model, arguments = found(f"{name}:make")
    assert isinstance(model, IPUModel)
    assert sorted(arguments) == names


def test_a_function_that_trains_is_stopped_too(tmp_path):
    body = "".join(f"    {line}\n" for line in FIT.splitlines())
    name = written(tmp_path, f"class Home:\n  @staticmethod\n  def make():\n{body}")
    _, arguments = found(f"{name}:Home.make")
    assert arguments["batch_size"] == 4


def test_no_file_is_left_and_temporary_ones_are_still_there(tmp_path):
    other = written(tmp_path, "size = 4")
    fit = "".join(f"    {line}\n" for line in FIT.splitlines())
    script = f"import {other}, os, tempfile\n"
    script += "with tempfile.TemporaryDirectory() as folder:\n"
    script += "    os.environ['SEEN_FOLDER'] = folder\n" + fit
    name = written(tmp_path, script) + ".py"
    before = files(tmp_path)

    def look(model, arguments):
        import os

        folder = os.environ.pop("SEEN_FOLDER")
        return folder, os.path.isdir(folder)

    _, was_there = look_at_model(name, [], look)
    assert was_there
    assert files(tmp_path) == before


def test_errors_of_who_looks_come_through(tmp_path):
    script = FIT.replace("model.fit", "try:\n    model.fit")
    script += "except Exception:\n    pass\n"
    name = written(tmp_path, script) + ".py"

    def look(model, arguments):
        raise KeyError("of the look")

    with pytest.raises(KeyError, match="of the look"):
        look_at_model(name, [], look)


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_that_catches_everything_has_called_fit(tmp_path, fails):
    script = FIT.replace("model.fit", "try:\n    model.fit") + "except:\n    pass\n"
    name = written(tmp_path, script) + ".py"

    def look(model, arguments):
        if fails:
            raise KeyError("of the look")
        return arguments["batch_size"]

    if fails:
        with pytest.raises(KeyError, match="of the look"):
            look_at_model(name, [], look)
    else:
        assert look_at_model(name, [], look) == 4


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
        found(name)
    assert ("ZeroDivisionError" in capsys.readouterr().err) == ("1 / 0" in source)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("absent_one:make", "There is no module 'absent_one', neither"),
        ("json.absent:make", "There is no module 'json.absent'"),
        ("absent_one.absent:make", "There is no module 'absent_one.absent'"),
        ("-m absent_one", "There is no module 'absent_one'"),
        ("-m json.absent", "There is no module 'json.absent'"),
        (
            "code/absent.py:make",
            r"'code/absent.py' is a file\..*give absent:make\.",
        ),
    ],
)
def test_names_of_no_module_are_refused_without_a_traceback(target, message, capsys):
    with pytest.raises(ConfigError, match=message):
        found(target.replace("-m ", ""), is_module=target.startswith("-m"))
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
        found(name if is_module else f"{name}:make", is_module=is_module)
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
        found(f"{name}:{end}")
    assert ("line 2, in broken" in capsys.readouterr().err) == (end == "broken")


def test_what_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"There is no script 'absent\.py'"):
        found("absent.py")
    with pytest.raises(ConfigError, match=r"without arguments\. Got --fast"):
        found("absent_module:make", ["--fast"])
