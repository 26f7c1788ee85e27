# SPDX-License-Identifier: Apache-2.0
"""Every loss module of torch with outputs and targets [N, 1] and [N]: plain torch."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

from ipufit import IPUConfig, IPUModel

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
OF_CLASSES = """
CrossEntropyLoss LinearCrossEntropyLoss MultiLabelMarginLoss MultiMarginLoss NLLLoss
NLLLoss2d
"""


def is_of_numbers(kind):
    """Whether a loss takes one output and one target of a sample."""
    is_loss = isinstance(kind, type) and issubclass(kind, nn.modules.loss._Loss)
    if not is_loss or kind.__name__ in (*OF_CLASSES.split(), "_Loss", "_WeightedLoss"):
        return False
    return list(inspect.signature(kind.forward).parameters)[1:] == ["input", "target"]


KINDS = [kind for kind in vars(nn.modules.loss).values() if is_of_numbers(kind)]
BROADCASTING = (nn.KLDivLoss, nn.MultiLabelSoftMarginLoss, nn.PoissonNLLLoss)
LOSSES = [
    *(kind() for kind in KINDS),
    *(kind(reduction=way) for kind in BROADCASTING for way in ("sum", "none")),
    nn.KLDivLoss(reduction="batchmean"),
]


class Column(nn.Module):
    def __init__(self, is_flat, is_squashed):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.is_flat, self.is_squashed = is_flat, is_squashed

    def forward(self, x):
        hidden = self.layer(x)
        hidden = hidden.sigmoid() if self.is_squashed else hidden
        return hidden.squeeze(1) if self.is_flat else hidden


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total")
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss} {loss.reduction}")
@pytest.mark.parametrize(
    ("is_flat", "replicas", "settings"),
    [
        (False, 2, {}),
        (True, 2, {"drop_last": "pad"}),
        (False, 1, {"sample_weight": torch.ones(14), "drop_last": "pad"}),
    ],
)
def test_one_axis_of_size_1_makes_no_difference(loss, is_flat, replicas, settings):
    count = 14 if settings else 16
    x, y = X[:count], X[:count].sum(1).gt(0).float()
    if isinstance(loss, (nn.SoftMarginLoss, nn.HingeEmbeddingLoss)):
        y = 2 * y - 1
    torch.manual_seed(0)
    module = Column(is_flat, isinstance(loss, nn.BCELoss))
    twin = copy.deepcopy(module)
    model = IPUModel(module, IPUConfig(micro_batch_size=2, replicas=replicas))
    model.compile(torch.optim.SGD(module.parameters(), lr=0.1), loss)
    targets = y[:, None] if is_flat else y
    model.fit(x, targets, batch_size=8, shuffle=False, verbose=0, **settings)

    def value(x, y):  # of one label, which is all that torch takes there
        if isinstance(loss, nn.MultiLabelSoftMarginLoss):
            return loss(twin(x).reshape(-1, 1), y.reshape(-1, 1)).mean()
        return loss(twin(x).flatten(), y).mean()

    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for rows, truths in zip(x.split(8), y.split(8)):
        optimizer.zero_grad()
        value(rows, truths).backward()
        optimizer.step()
    for mine, theirs in zip(module.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    expected = float(value(x, y).detach()) / (count if loss.reduction == "sum" else 1)
    assert model.evaluate(x, targets, verbose=0)["loss"] == pytest.approx(
        expected, rel=1e-4
    )
