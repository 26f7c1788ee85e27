# SPDX-License-Identifier: Apache-2.0
"""Functions that are translated ahead of time, and where they are kept."""

from __future__ import annotations

import logging
import os
import shutil
import time

import pytest
import torch

from ipufit.emulator._machine_code import machine_functions as _machine_functions

pytestmark = [
    pytest.mark.skipif(
        _machine_functions._missing() is not None,
        reason=str(_machine_functions._missing()),
    ),
    pytest.mark.not_in_mode(reason="it compiles, in all of them the same"),
]

FACTOR = torch.tensor([2.0, 3.0])


def scaled_sum(x, total):
    total.add_(x * FACTOR)
    return [total.sum()]


def example():
    return [torch.tensor([1.0, 2.0]), torch.zeros(2)]


def translated(folder, function=scaled_sum, **kwargs):
    flags = {"is_differentiated": False, "is_random": False, **kwargs}
    return _machine_functions.translate_function(
        "a sum", function, example(), str(folder), **flags
    )


@pytest.mark.thorough
def test_one_is_kept_loaded_and_made_anew_if_broken(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="poptorch::python")
    folder, kept = tmp_path / "made" / "here", tmp_path / "kept.pt2"
    function = translated(folder)
    x, total = example()
    (result,) = function.run([x, total])
    assert float(result) == 8.0
    assert total.tolist() == [2.0, 6.0]
    (package,) = folder.iterdir()
    shutil.copy(package, kept)

    def copy_it(graph, example, path):
        shutil.copy(kept, path)

    monkeypatch.setattr(_machine_functions, "_compile", None)
    assert float(translated(folder).run(example())[0]) == 8.0
    package.write_bytes(b"broken")
    monkeypatch.setattr(_machine_functions, "_compile", copy_it)
    assert float(translated(folder).run(example())[0]) == 8.0
    lines = [r.getMessage().split(" in ")[0] for r in caplog.records]
    assert lines[0] == lines[-1] == "Compiled a sum"
    assert lines[1] == "Loaded a sum"
    assert "can't be loaded" in caplog.text

    # Code that gives something else is refused.
    def another_sum(x, total):
        total.add_(x * FACTOR)
        return [total.sum() + 1.0]

    with pytest.raises(ArithmeticError, match="tensor 0 differs by 1"):
        translated(folder, another_sum)


def test_the_name_says_what_code_depends_on(monkeypatch):
    def name(function, tensors):
        return _machine_functions._key(
            _machine_functions._traced(function, tensors, {}), tensors
        )

    def another(x, total):
        total.add_(x + FACTOR)
        return [total.sum()]

    tensors = example()
    before = name(scaled_sum, tensors)
    assert before == name(scaled_sum, [tensor + 5 for tensor in tensors])
    others = [
        name(another, tensors),
        name(scaled_sum, [tensors[0][:1], tensors[1]]),
        name(scaled_sum, [torch.ones(2, 2).t()[0], tensors[1]]),
    ]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    others.append(name(scaled_sum, tensors))
    monkeypatch.undo()
    monkeypatch.setitem(globals(), "FACTOR", torch.tensor([2.0, 4.0]))
    others.append(name(scaled_sum, tensors))
    assert len({before, *others}) == 1 + len(others)


@pytest.mark.thorough
def test_what_was_unpacked_goes_at_the_end(tmp_path, monkeypatch):
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    monkeypatch.setenv("TMPDIR", str(unpacked))
    function = translated(tmp_path / "cache")
    before = os.listdir(unpacked)
    _machine_functions._unload_all()
    assert os.listdir(unpacked) == [] or before == []
    assert function._loader is None


def count_alone(folder):
    """Add one to a number in a file, slowly."""
    with _machine_functions._alone(str(folder / "function.pt2")):
        file = folder / "count"
        count = int(file.read_text()) if file.exists() else 0
        time.sleep(0.2)
        file.write_text(str(count + 1))


def test_processes_that_share_a_folder_compile_one_after_the_other(pool, tmp_path):
    pool.run(count_alone, tmp_path)
    assert (tmp_path / "count").read_text() == "2"
    assert os.listdir(tmp_path) == ["count"]
