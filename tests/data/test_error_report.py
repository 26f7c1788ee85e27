# SPDX-License-Identifier: Apache-2.0
"""Errors of samples in a process of PopTorch's."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from ipufit import DataError, IPUConfig, IPUModel
from tests import reference


class Broken(Dataset):
    """Sample 5 can't be read."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("sample 5 is broken")
        return torch.zeros(3), torch.tensor(0)


@pytest.mark.parametrize("mode", ["async", "async_rebatched"])
def test_the_cause_is_shown_and_no_file_stays(monkeypatch, tmp_path, mode):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = IPUModel(reference.network(), IPUConfig(loader_mode=mode))
    model.compile("sgd", "cross_entropy")
    with pytest.raises(DataError, match="could not be loaded") as caught:
        model.fit(Broken(), batch_size=2, shuffle=False, verbose=0)
    assert "ValueError: sample 5 is broken" in str(caught.value)
    assert list(Path(tmp_path).glob("ipufit-*.txt")) == []
