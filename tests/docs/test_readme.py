# SPDX-License-Identifier: Apache-2.0
"""The README's example runs, and what it says holds."""

import pickle
import re
from pathlib import Path

import pytest
import torch

from tests import reference

ROOT = Path(__file__).parents[2]
TIME = re.compile(r" *\d+(?:\.\d)?m?s\b")
SLOW = re.compile(r"^(?:Compil(?:ing the|ed in)|Predicted) .*\n", re.M)
"""Lines of what takes a second and more."""


def test_the_example_of_the_readme_runs(capsys):
    readme = (ROOT / "README.md").read_text("utf-8")
    code = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)[0]
    exec(compile(code, "README.md", "exec"), {})
    (said,) = re.findall(r"^```text\n(.*?)^```", readme, re.M | re.S)
    printed = SLOW.sub("", capsys.readouterr().out)
    number = re.compile(r"\d\.\d{4}")
    shapes = [TIME.sub("_", number.sub("_", text)) for text in (printed, said)]
    assert shapes[0] == shapes[1]
    figures, expected = (
        [float(one) for one in number.findall(text)] for text in (printed, said)
    )
    assert figures == pytest.approx(expected, abs=0.02)
    assert figures[-2] > 0.97


# Claims -------------------------------------------------------------------------------

X, Y = reference.samples(48)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    model = reference.compiled()
    model.fit(X, Y, batch_size=16, verbose=0)
    model.save(tmp_path / "saved")
    files = {path.suffix for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert files == {".safetensors", ".json"}

    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    other = reference.compiled()
    other.load(tmp_path / "saved")
    reference.assert_same_weights(other.module, model.module, rtol=0, atol=0)
