# SPDX-License-Identifier: Apache-2.0
"""`ipufit plan`: the plan of a script's first fit, and none of its training."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ipufit import cli as program

ROOT = Path(__file__).parent.parent.parent
MODEL = """
import torch
from ipufit import IPUConfig, IPUModel
layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
model = IPUModel(layers, IPUConfig(micro_batch_size=4, pipeline=["0", "1"]))
model.compile("adamw", "cross_entropy")
x, y = torch.zeros(100, 4), torch.zeros(100, dtype=torch.int64)
"""
FIT = MODEL + "print('begins')\nmodel.fit(x, y, batch_size=20)\nprint('trained')\n"
MAKE = MODEL + "def make():\n    return model, x, y\n"
_number = itertools.count()


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])


def written(tmp_path, source):
    name = f"planned_{next(_number)}"
    (tmp_path / f"{name}.py").write_text(source, "utf-8")
    return name


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        program.plan(arguments)
    return stop.value.code


def as_json(capsys, *arguments):
    assert run("--json", *arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_a_script_is_planned_at_its_first_fit(tmp_path, capsys):
    name = written(tmp_path, FIT)
    assert run(f"{name}.py") == 0
    said = capsys.readouterr()
    assert said.out.startswith("Plan of Sequential with AdamW, on 2 IPUs: Mk2 (GC200)")
    assert "An epoch of 100 samples is 1 call, 5 updates." in said.out
    assert said.err.startswith("begins")
    assert "trained" not in said.err
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.py"]


def test_numbers_come_as_json(tmp_path, capsys):
    plan = as_json(capsys, f"{written(tmp_path, FIT)}.py")
    assert plan["epoch"]["batch"]["gradient_accumulation"] == 5
    assert [memory["parameters"] for memory in plan["memory"]] == [160, 108]
    assert plan["memory"][0]["gradients"] == {"value": 128, "least": 128, "most": 160}
    assert [stage["names"] for stage in plan["stages"]] == [["0"], ["1"]]
    assert plan["num_ipus"] == 2
    assert plan["choices"][0]["change"] == ""
    assert plan["device"]["num_tiles"] == 1472


def test_a_function_gives_model_and_data(tmp_path, capsys):
    plan = as_json(capsys, "--batch-size", "40", f"{written(tmp_path, MAKE)}:make")
    assert plan["epoch"]["batch"]["gradient_accumulation"] == 10
    assert plan["epoch"]["num_samples"] == 100


def test_a_validation_split_leaves_fewer_samples(tmp_path, capsys):
    fit = FIT.replace("batch_size=20", "batch_size=20, validation_split=0.2")
    plan = as_json(capsys, f"{written(tmp_path, fit)}.py")
    assert plan["epoch"]["num_samples"] == 80


@pytest.mark.parametrize(
    ("arguments", "samples", "updates"),
    [("steps_per_epoch=3", 60, 3), ("steps_per_epoch=12", 240, 12)],
)
def test_an_epoch_has_the_updates_that_fit_is_given(
    tmp_path, capsys, arguments, samples, updates
):
    fit = FIT.replace("batch_size=20", f"batch_size=20, {arguments}")
    assert run(f"{written(tmp_path, fit)}.py") == 0
    told = capsys.readouterr().out
    assert f"An epoch of {samples} samples is" in told
    assert f" {updates} updates.\n" in told


def test_a_generator_gives_its_first_batch(tmp_path, capsys):
    def plan_with(data):
        fit = FIT.replace("x, y, ", f"{data}, steps_per_epoch=3, ")
        return as_json(capsys, f"{written(tmp_path, fit)}.py")

    of_batches = plan_with("((x[:20], y[:20]) for _ in range(3))")
    of_tensors = plan_with("x, y")
    for one in ("memory", "bubble"):
        assert of_batches[one] == of_tensors[one]
    for one in ("num_samples", "stages", "is_padding"):
        assert of_batches["epoch"][one] == of_tensors["epoch"][one]


def test_too_few_samples_for_a_call_are_told_with_steps_too(tmp_path, capsys):
    fit = FIT.replace("batch_size=20", "batch_size=200, steps_per_epoch=3")
    assert run(f"{written(tmp_path, fit)}.py") == 0
    assert "fit will refuse this data" in capsys.readouterr().out


def test_the_kind_of_ipu_is_an_option(tmp_path, capsys):
    name = f"{written(tmp_path, FIT)}.py"
    assert as_json(capsys, "--device", "mk1", name)["device"]["num_tiles"] == 1216
    assert run("--device", "mk9", name) == 2
    assert "Unknown kind of IPU 'mk9'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (MODEL, "before it called fit"),
        (FIT.replace("Linear(8, 3)", "Linear(7, 3)"), "inputs of float32 [4, 4]"),
        (FIT.replace("batch_size=20", "batch_size=21"), "batch_size=21"),
    ],
)
def test_what_cant_be_planned_is_said(tmp_path, capsys, source, message):
    assert run(f"{written(tmp_path, source)}.py") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "ipufit plan: " in said.err
    assert message in said.err
    assert "Traceback" not in said.err


def test_a_model_without_data_is_refused(tmp_path, capsys):
    name = written(tmp_path, MODEL + "def make():\n    return model\n")
    assert run(f"{name}:make") == 2
    assert "gives a model and no data" in capsys.readouterr().err


def test_it_is_a_command_with_a_help():
    assert "plan" in program.COMMANDS
    found = subprocess.run(
        [sys.executable, "-m", "ipufit", "plan", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "models:make" in found.stdout


def test_pictures_are_printed_with_the_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    name = written(tmp_path, FIT)
    assert run("--pictures", f"{name}.py") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Plan of Sequential with AdamW, on 2 IPUs: Mk2 (GC200)"
    assert "Pipeline of 2 stages, 5 micro-batches in training" in lines
    assert "1 FB    . 0 1 2 3 4 ." in lines
    assert max(map(len, lines)) <= 60


def test_a_page_is_saved_beside_what_is_printed(tmp_path, capsys):
    name = written(tmp_path, FIT)
    assert run("--save", "plan.html", "--json", f"{name}.py") == 0
    assert json.loads(capsys.readouterr().out)["num_ipus"] == 2
    assert "Plan of Sequential" in (tmp_path / "plan.html").read_text("utf-8")


def test_a_file_of_another_kind_is_an_error(tmp_path, capsys):
    name = written(tmp_path, FIT)
    assert run("--save", "plan.gif", f"{name}.py") == 2
    said = capsys.readouterr()
    assert "ipufit plan: " in said.err
    assert "or .html" in said.err
    assert said.out == ""
