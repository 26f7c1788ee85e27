# SPDX-License-Identifier: Apache-2.0
"""Losses that are modules of the user's: their modes, buffers and parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ipufit import IPUModel, Optimizer


class Counting(nn.Module):
    """Drops terms and counts calls in train mode, as batch norm does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.inner = nn.Dropout(0.5)

    def forward(self, outputs, targets):
        if self.training:
            self.calls.add_(1.0)
        return (self.inner(outputs) - targets).square().mean(1)


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(16, 3), torch.randn(16, 1)


@pytest.mark.parametrize("is_training", [True, False])
def test_evaluation_runs_a_loss_in_eval_mode(data, is_training):
    loss = Counting().train(is_training)
    model = IPUModel(nn.Linear(3, 1))
    model.compile(Optimizer("sgd", learning_rate=0.0), loss)
    figure = model.evaluate(*data, verbose=0)["loss"]
    expected = (model.predict(data[0]) - data[1]).square().mean()
    assert figure == pytest.approx(float(expected))
    history = model.fit(
        *data, batch_size=4, epochs=2, validation_data=data, verbose=0
    ).history
    assert history["val_loss"] == pytest.approx([figure, figure])
    assert (history["loss"] == pytest.approx([figure, figure])) is not is_training
    assert float(loss.calls) == (8 if is_training else 0)
    assert loss.training is loss.inner.training is is_training


def test_a_loss_may_change_its_mode_between_fits(data):
    loss = Counting()
    model = IPUModel(nn.Linear(3, 1))
    model.compile("sgd", loss)
    for is_training, calls in ((True, 4), (False, 4), (True, 8)):
        loss.train(is_training)
        model.fit(*data, batch_size=4, verbose=0)
        assert float(loss.calls) == calls
