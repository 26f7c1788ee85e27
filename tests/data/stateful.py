# SPDX-License-Identifier: Apache-2.0
"""A double of torchdata's `StatefulDataLoader`, which gives and takes a state."""

from __future__ import annotations

import random

import numpy as np
import torch


class StatefulLoader:
    """Batches in a new order each pass, with noise that Python's generator draws.

    Attributes:
        drawn: Number of batches that were asked for.
        loaded: States that were put back.
    """

    def __init__(self, x, y, batch_size, *, shuffle=True):
        self.x, self.y, self.batch_size = x, y, batch_size
        self.shuffle = shuffle
        self.passes = self.given = self.drawn = 0
        self.has_ended = False
        self.order = None
        self.loaded = []
        self._next = None

    def __iter__(self):
        state, self._next = self._next, None
        if state is not None and not state["has_ended"]:
            self.passes, self.given = state["passes"], state["given"]
            self.order = state["order"]
            self.has_ended = False
            return self._batches()
        if state is not None:
            self.passes = state["passes"]
        torch.empty((), dtype=torch.int64).random_()  # as torch's loader draws a seed
        count = len(self.x)
        self.given, self.has_ended = 0, False
        self.order = torch.randperm(count) if self.shuffle else torch.arange(count)
        return self._batches()

    def _batches(self):
        while self.given * self.batch_size < len(self.x):
            at = self.given * self.batch_size
            rows = self.order[at : at + self.batch_size]
            self.given += 1
            self.drawn += 1
            noise = random.random() + np.random.rand() + self.passes
            yield self.x[rows] + noise, self.y[rows]
        self.passes += 1
        self.has_ended = True

    def state_dict(self):
        return {
            "passes": self.passes,
            "given": self.given,
            "order": self.order,
            "has_ended": self.has_ended,
            "kinds": (None, 1.5, float("inf"), b"\x00\xff", {3: np.arange(2)}, [True]),
            "numpy": np.float32(0.1),
        }

    def load_state_dict(self, state):
        assert state["kinds"][:4] == (None, 1.5, float("inf"), b"\x00\xff")
        assert state["kinds"][4][3].tolist() == [0, 1]
        assert state["kinds"][5] == [True]
        assert state["numpy"] == np.float32(0.1)
        self.loaded.append(state)
        self._next = state
