# SPDX-License-Identifier: Apache-2.0
"""Arguments that compute on the host and don't compile for a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import Function

X = torch.linspace(-1, 1, 24).reshape(4, 6)
LABELS = torch.tensor([0, 1, 2, 5])
SEQUENCES = torch.linspace(-1, 1, 30).reshape(2, 5, 3)


def run(layer, *inputs):
    return poptorch.inferenceModel(
        Function(lambda self, *given: self.layer(*given), layer=layer)
    )(*inputs)


@pytest.mark.parametrize(
    ("loss", "name"),
    [(nn.CrossEntropyLoss, "cross_entropy_loss"), (nn.NLLLoss, "nll_loss_nd")],
)
def test_class_weights_are_refused(loss, name):
    assert run(loss(), X, LABELS).shape == ()
    with pytest.raises(poptorch.Error, match=f'"weight" is unsupported .*::{name}'):
        run(loss(weight=torch.ones(6)), X, LABELS)


def ctc(reduction, targets):
    def loss(x):
        probs = x.reshape(4, 2, 3).log_softmax(2)
        labels = torch.ones(targets, dtype=torch.int64)
        return nn.functional.ctc_loss(
            probs, labels, (4, 4), (1, 1), reduction=reduction
        )

    return loss


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_reduced_ctc_loss_of_padded_targets_is_fine(reduction):
    assert torch.equal(
        run(ctc(reduction, (2, 2)), X), ctc(reduction, (2, 2))(X).detach()
    )


def test_other_ctc_losses_are_refused():
    with pytest.raises(poptorch.Error, match='reduction="none" is currently not'):
        run(ctc("none", (2, 2)), X)
    with pytest.raises(poptorch.Error, match="2-D targets"):
        run(ctc("sum", (2,)), X)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_plain_recurrent_layer_is_fine(kind):
    layer = kind(3, 4, batch_first=True)
    with torch.no_grad():
        expected = layer(SEQUENCES)[0]
    assert torch.allclose(run(layer, SEQUENCES)[0], expected)


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.parametrize(("kind", "name"), [(nn.LSTM, "LSTM"), (nn.GRU, "GRU")])
@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"num_layers": 2}, "Only {} with 1 layer supported"),
        ({"dropout": 0.5}, "{} only supports dropout = 0.0"),
        ({"bidirectional": True}, "bidirectional {} not supported"),
    ],
)
def test_other_recurrent_layers_are_refused(kind, name, settings, fragment):
    with pytest.raises(poptorch.Error, match=fragment.format(name)):
        run(kind(3, 4, **settings), SEQUENCES)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
def test_recurrent_layers_need_biases(kind):
    with pytest.raises(poptorch.Error, match="without biases not supported"):
        run(kind(3, 4, bias=False), SEQUENCES)


def test_a_gru_needs_none():
    layer = nn.GRU(3, 4, bias=False)
    with torch.no_grad():
        expected = layer(SEQUENCES)[0]
    assert torch.allclose(run(layer, SEQUENCES)[0], expected)
