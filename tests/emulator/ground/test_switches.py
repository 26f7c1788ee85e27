# SPDX-License-Identifier: Apache-2.0
"""Environment variables that are on or off, or numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch

MODEL = "POPTORCH_IPU_MODEL"
ON_OFF = [MODEL, "IPUFIT_EMULATOR_FOLD", "IPUFIT_EMULATOR_CHANNELS_LAST"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", True), ("2", True), ("-1", True), (" 1 ", True), ("0", False), ("", False)],
)
def test_any_integer_but_zero_is_on(monkeypatch, text, expected):
    monkeypatch.setenv(MODEL, text)
    assert poptorch.ipuHardwareIsAvailable() is not expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        *((name, text, "integer") for name in ON_OFF for text in ("yes", "1.0")),
        *(
            ("IPUFIT_EMULATOR_FOLD_MIB", text, "number of mebibytes")
            for text in ("much", "nan", "inf")
        ),
    ],
)
def test_what_makes_no_sense_is_named(monkeypatch, name, text, message):
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", "1")  # else nothing reads its MiB
    monkeypatch.setenv(name, text)
    options = poptorch.Options().deviceIterations(2)
    with pytest.raises(poptorch.Error, match=f"{name}={text!r} is no {message}"):
        poptorch.inferenceModel(nn.ReLU(), options)(torch.ones(2))


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_strange_time_out_is_refused(monkeypatch, text):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("IPUFIT_PROCESS_TIMEOUT", text)
    layer = nn.Linear(1, 1)
    layer.forward = lambda x: poptorch.identity_loss(x * layer.weight, "sum")
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    with pytest.raises(poptorch.Error, match=f"IPUFIT_PROCESS_TIMEOUT={text!r} is no"):
        poptorch.trainingModel(layer, options)(torch.ones(1, 1))
