# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tests.engine.counting import Moves


@pytest.fixture
def moves(monkeypatch):
    """What is compiled and moved from here on."""
    watching = Moves().watch(monkeypatch)
    yield watching
    watching.stop()
