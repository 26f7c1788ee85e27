# SPDX-License-Identifier: Apache-2.0
"""`ipufit compile`: the programs of a script's first fit, compiled and not run."""

import sys
from pathlib import Path

import pytest

from ipufit import ConfigError, IPUConfig, _env, poptorch
from ipufit.cli import compile_

SCRIPT = """
import sys
import torch
import ipufit

def make():
    x, y = torch.randn(32, 3), torch.randint(0, 4, (32,))
    config = ipufit.IPUConfig(micro_batch_size=8)
    model = ipufit.IPUModel(torch.nn.Linear(3, 4), config)
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    return model, x, y

def predicting():
    model, x, _ = make()
    return ipufit.IPUModel(model.module, model.config), x

if __name__ == "__main__":
    model, x, y = make()
    model.fit(x, y, epochs=int(sys.argv[1]), validation_data=(x, y))
    model.save("saved")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    for name in (_env.COMPILE_FOR, "POPTORCH_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # and back
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("ahead.py").write_text(SCRIPT, "utf-8")
    yield tmp_path
    sys.modules.pop("ahead", None)  # other tests have modules of their own


@pytest.fixture
def options(monkeypatch):
    """Options of all programs that are compiled."""
    seen = []
    compile_program = poptorch.PoplarExecutor.compile

    def note(executor, *args):
        seen.append(executor.options.toDict())
        return compile_program(executor, *args)

    monkeypatch.setattr(poptorch.PoplarExecutor, "compile", note)
    return seen


def status_of(*line):
    with pytest.raises(SystemExit) as ending:
        compile_(line)
    return ending.value.code


def test_the_programs_of_the_first_fit_are_built_offline(script, options, capsys):
    assert status_of("--ipu-version", "21", "ahead.py", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "inference program of 32 samples per call",
        "training program of 32 samples per call",
    ]
    assert [one["ipu_version"] for one in options] == [21, 21]
    assert {one["cachePath"] for one in options} == {str(script / "compiled")}
    assert not (script / "saved").exists()


def test_a_function_gives_the_model_and_the_cache_is_named(script, options, capsys):
    assert status_of("--cache-dir", "programs", "ahead:predicting") == 0
    assert capsys.readouterr().out.startswith("inference program of ")
    assert [one["cachePath"] for one in options] == [str(script / "programs")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["missing.py"], "no script 'missing.py'"),
        (["."], "is a directory"),
        (["empty.py"], "before it called fit"),
    ],
)
def test_a_script_without_a_fit_is_refused(line, words, script, capsys):
    Path("empty.py").write_text("", "utf-8")
    assert status_of(*line) == 2
    assert words in capsys.readouterr().err


def test_the_version_of_the_ipus(monkeypatch):
    config = IPUConfig(offline=True)
    plan = config.training_plan(8)
    for text, version in (("", 2), ("21", 21)):
        monkeypatch.setenv(_env.COMPILE_FOR, text)
        options = config.build_training_options(plan)
        assert options.connection_type == poptorch.ConnectionType.Never
        assert options.toDict()["ipu_version"] == version
    monkeypatch.setenv(_env.COMPILE_FOR, "3")
    with pytest.raises(ConfigError, match="1, 2, 21"):
        config.build_training_options(plan)
