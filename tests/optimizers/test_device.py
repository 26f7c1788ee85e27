# SPDX-License-Identifier: Apache-2.0
"""What all this makes of the weights on the device, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from ipufit import IPUConfig, IPUModel, poptorch
from ipufit.errors import SharedRateWarning
from ipufit.optimizers import LossScaleRamp, Optimizer, Schedule

BATCH = 8


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 1, bias=False)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(x))))


def network():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Network()


def data(updates):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(updates * BATCH, 3, generator=generator)
    return x, 5.0 * torch.randn(updates * BATCH, 1, generator=generator)


def train(module, optimizer, updates, schedule=None, **config):
    """Train, and give the loss."""
    model = IPUModel(module, IPUConfig(**config))
    model.compile(optimizer, "mse", lr_schedule=schedule)
    history = model.fit(*data(updates), batch_size=BATCH, shuffle=False, verbose=0)
    model.detach()
    return history.history["loss"]


def train_in_torch(module, optimizer, updates, *, clip=None, before=None):
    """The same with torch's optimizer; gives the norms of the gradients."""
    x, y = data(updates)
    norms = []
    for update, rows in enumerate(torch.arange(len(x)).split(BATCH)):
        if before is not None:
            before(update)
        optimizer.zero_grad()
        mse_loss(module(x[rows]), y[rows]).backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip)))
        optimizer.step()
    return norms


def assert_same(module, twin):
    for (name, mine), theirs in zip(module.named_parameters(), twin.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6, msg=name)


LAYOUTS = [
    {"gradient_accumulation": 4},
    {"replicas": 2},
    {"gradient_accumulation": 2, "replicas": 2},
]
TORCHS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
CLIPPED = [
    *((name, {}, None) for name in TORCHS),
    *((name, layout, 16.0) for name, layout in zip(TORCHS, LAYOUTS)),
]


@pytest.mark.parametrize(("name", "layout", "loss_scaling"), CLIPPED, ids=str)
def test_global_clipnorm_clips_as_torch_does(name, layout, loss_scaling):
    module, twin = network(), network()
    spec = Optimizer(
        name, 0.02, weight_decay=0.0, global_clipnorm=0.5, loss_scaling=loss_scaling
    )
    train(module, spec, 6, **layout)
    made = TORCHS[name](twin.parameters(), lr=0.02, weight_decay=0.0)
    norms = train_in_torch(twin, made, 6, clip=0.5)
    assert max(norms) > 1.0
    assert_same(module, twin)


@pytest.mark.parametrize(
    ("name", "cls"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)]
)
def test_no_decay_is_torchs_second_group(name, cls):
    module, twin = network(), network()
    spec = Optimizer(name, 0.05, weight_decay=0.5, no_decay=("bias", "norm", "head.*"))
    train(module, spec, 6)
    groups = [
        {"params": [twin.body.weight]},
        {
            "params": [
                twin.body.bias,
                twin.norm.weight,
                twin.norm.bias,
                twin.head.weight,
            ],
            "weight_decay": 0.0,
        },
    ]
    train_in_torch(twin, cls(groups, lr=0.05, weight_decay=0.5), 6)
    assert_same(module, twin)
    other = network()
    train_in_torch(other, cls(other.parameters(), lr=0.05, weight_decay=0.5), 6)
    with pytest.raises(AssertionError):
        assert_same(module, other)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("cosine", warmup_updates=2),
        Schedule("one_cycle"),
        Schedule("step", boundaries=(2, 4)),
    ],
    ids=lambda schedule: schedule.name,
)
def test_a_schedule_trains_as_torch_with_the_same_rates(schedule):
    module, twin = network(), network()
    train(module, Optimizer("adam", 0.1), 8, schedule)
    made = torch.optim.Adam(twin.parameters(), lr=0.1)

    def set_rate(update):
        made.param_groups[0]["lr"] = 0.1 * schedule.factor(update, 8)

    train_in_torch(twin, made, 8, before=set_rate)
    assert_same(module, twin)


@pytest.mark.parametrize("bound_to", ["torch", "poptorch", "nothing"])
def test_a_scheduler_of_torch_trains_as_in_torch(bound_to):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 8)

    module, twin = network(), network()
    made = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9)
    scheduler = schedule(made)
    train_in_torch(twin, made, 8, before=lambda update: update and scheduler.step())

    given = Optimizer("sgd", 0.01, momentum=0.9)
    if bound_to != "nothing":
        home = torch.optim if bound_to == "torch" else poptorch.optim
        given = home.SGD(module.parameters(), lr=0.01, momentum=0.9)
    made = schedule if bound_to == "nothing" else schedule(given)
    train(module, given, 8, made)
    assert_same(module, twin)


@pytest.mark.parametrize("replicas", [1, 2])
def test_updates_of_a_call_share_the_rate_of_the_first(replicas):
    module, twin = network(), network()
    optimizer = Optimizer("adam", 0.1)
    with pytest.warns(SharedRateWarning, match=r"makes 4 updates .* share one"):
        train(module, optimizer, 8, "linear", device_iterations=4, replicas=replicas)
    made = torch.optim.Adam(twin.parameters(), lr=0.1)

    def set_rate(update):
        made.param_groups[0]["lr"] = 0.1 if update < 4 else 0.05

    train_in_torch(twin, made, 8, before=set_rate)
    assert_same(module, twin)


RAMP = LossScaleRamp(1, factor=4, every_updates=2, maximum=16)


@pytest.mark.parametrize(
    ("name", "loss_scaling"),
    [("adam", RAMP), ("rmsprop", 4.0), ("rmsprop", RAMP), ("lamb", 4)],
    ids=str,
)
def test_loss_scaling_changes_neither_the_weights_nor_the_losses(name, loss_scaling):
    module, twin = network(), network()
    spec = Optimizer(name, 0.01, loss_scaling=loss_scaling)
    losses = train(module, spec, 8)
    assert losses == pytest.approx(train(twin, Optimizer(name, 0.01), 8), rel=1e-5)
    assert_same(module, twin)


@pytest.mark.parametrize(("name", "clip"), [("sgd", None), ("adamw", 0.5)])
def test_nor_does_an_automatic_one_which_needs_half_precision(name, clip):
    trained = []
    for loss_scaling in ("auto", 1.0):
        module = network()
        spec = Optimizer(name, 0.01, global_clipnorm=clip, loss_scaling=loss_scaling)
        losses = train(module, spec, 8, precision="16.32", stochastic_rounding=False)
        trained.append((losses, module))
    assert trained[0][0] == pytest.approx(trained[1][0], rel=1e-5)
    assert_same(trained[0][1], trained[1][1])


def test_torchs_optimizer_without_momentum_trains_as_in_torch():
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, dampening=0.5),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
    ):
        module, twin = network(), network()
        train(module, make(module.parameters()), 5)
        train_in_torch(twin, make(twin.parameters()), 5)
        assert_same(module, twin)


def test_lamb_without_its_trust_ratio_is_adamw():
    module, twin = network(), network()
    spec = Optimizer("lamb", 0.02, weight_decay=0.1, no_trust_ratio="*")
    train(module, spec, 6)
    train_in_torch(
        twin, torch.optim.AdamW(twin.parameters(), 0.02, weight_decay=0.1), 6
    )
    assert_same(module, twin)


def test_a_word_makes_the_three_groups_of_public_bert_training():
    module, twin = network(), network()
    words = {"no_decay": "bias_and_norm", "no_trust_ratio": "bias"}
    spec = Optimizer("lamb", 0.02, weight_decay=0.1, **words)
    train(module, spec, 6)
    biases = [twin.body.bias, twin.norm.bias]
    groups = [
        {"params": [twin.body.weight, twin.head.weight], "weight_decay": 0.1},
        {"params": [twin.norm.weight], "weight_decay": 0.0},
        {"params": biases, "weight_decay": 0.0, "max_weight_norm": 0.0},
    ]
    own = poptorch.optim.LAMB(groups, lr=0.02)
    train(twin, own, 6)
    assert_same(module, twin)
