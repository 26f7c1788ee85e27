# SPDX-License-Identifier: Apache-2.0
"""What all this makes of the weights on the device, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ipufit import poptorch
from ipufit.errors import SharedRateWarning
from ipufit.optimizers import (
    LossScaleRamp,
    Optimizer,
    Schedule,
    hyper_parameters,
    resolve_optimization,
)

BATCH = 8


class Network(nn.Module):
    """Returns its loss, a mean, as PopTorch wants it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 1, bias=False)

    def forward(self, x, y):
        outputs = self.head(torch.tanh(self.norm(self.body(x))))
        return poptorch.identity_loss(((outputs - y) ** 2).mean(), reduction="none")


def network():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Network()


def data(updates):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(updates * BATCH, 3, generator=generator)
    return x, 5.0 * torch.randn(updates * BATCH, 1, generator=generator)


def options(optimization, accumulation=1, replicas=1, per_call=1):
    made = poptorch.Options()
    made.deviceIterations(per_call)
    made.replicationFactor(replicas)
    made.Training.gradientAccumulation(accumulation)
    if optimization.automatic_loss_scaling:
        made.Training.setAutomaticLossScaling(True)
    if optimization.needs_running_mean:
        made.Training.setMeanAccumulationAndReplicationReductionStrategy(
            poptorch.MeanReductionStrategy.Running
        )
    made.showCompilationProgressBar(False)
    return made


def train(module, optimization, total, per_call=1, **layout):
    """Train as the engine does; give the losses, and how often values were sent."""
    x, y = data(total)
    executor = poptorch.trainingModel(
        module,
        options(optimization, per_call=per_call, **layout),
        optimization.optimizer,
    )
    sent, times, losses = hyper_parameters(optimization.optimizer), 0, []
    optimization.begin_fit(total, per_call)
    for rows in torch.arange(len(x)).split(BATCH * per_call):
        optimization.before_call()
        values = hyper_parameters(optimization.optimizer)
        if values != sent:
            executor.setOptimizer(optimization.optimizer)
            sent, times = values, times + 1
        losses.append(float(executor(x[rows], y[rows]).mean()))
        optimization.after_call(per_call)
    executor.destroy()
    return losses, times


def train_in_torch(module, optimizer, total, *, clip=None, before=None):
    """The same with torch's optimizer; gives the norms of the gradients."""
    x, y = data(total)
    norms = []
    for update, rows in enumerate(torch.arange(len(x)).split(BATCH)):
        if before is not None:
            before(update)
        optimizer.zero_grad()
        module(x[rows], y[rows]).backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip)))
        optimizer.step()
    return norms


def assert_same(module, twin):
    for (name, mine), theirs in zip(module.named_parameters(), twin.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6, msg=name)


LAYOUTS = [
    {},
    {"accumulation": 2},
    {"accumulation": 4},
    {"replicas": 2},
    {"accumulation": 2, "replicas": 2},
]
TORCHS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@pytest.mark.parametrize("loss_scaling", [None, 16.0])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", TORCHS)
def test_global_clipnorm_clips_as_torch_does(name, layout, loss_scaling):
    module, twin = network(), network()
    spec = Optimizer(
        name, 0.02, weight_decay=0.0, global_clipnorm=0.5, loss_scaling=loss_scaling
    )
    train(module, resolve_optimization(spec, None, module), 6, **layout)
    made = TORCHS[name](twin.parameters(), lr=0.02, weight_decay=0.0)
    norms = train_in_torch(twin, made, 6, clip=0.5)
    assert max(norms) > 1.0
    assert_same(module, twin)


def test_sgd_and_adamw_decay_outside_the_clipped_norm():
    for name in ("sgd", "adamw"):
        module, twin = network(), network()
        spec = Optimizer(name, 0.02, weight_decay=0.5, global_clipnorm=0.5)
        train(module, resolve_optimization(spec, None, module), 4)
        made = TORCHS[name](twin.parameters(), lr=0.02, weight_decay=0.5)
        train_in_torch(twin, made, 4, clip=0.5)
        assert_same(module, twin)


def test_adams_decay_is_inside_the_clipped_norm():
    """As documented: PopTorch adds the penalty first, torch afterwards."""
    module, twin = network(), network()
    spec = Optimizer("adam", 0.02, weight_decay=0.5, global_clipnorm=0.5, eps=1.0)
    train(module, resolve_optimization(spec, None, module), 4)

    adam = torch.optim.Adam(twin.parameters(), lr=0.02, eps=1.0)
    x, y = data(4)
    for rows in torch.arange(len(x)).split(BATCH):
        adam.zero_grad()
        twin(x[rows], y[rows]).backward()
        for parameter in twin.parameters():
            parameter.grad += 0.5 * parameter.detach()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        adam.step()
    assert_same(module, twin)


@pytest.mark.parametrize(
    ("name", "cls"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)]
)
def test_no_decay_is_torchs_second_group(name, cls):
    module, twin = network(), network()
    spec = Optimizer(name, 0.05, weight_decay=0.5, no_decay=("bias", "norm", "head.*"))
    train(module, resolve_optimization(spec, None, module), 6)
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
    train(module, resolve_optimization(Optimizer("adam", 0.1), schedule, module), 8)
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
    train(module, resolve_optimization(given, made, module), 8)
    assert_same(module, twin)


@pytest.mark.parametrize("replicas", [1, 2])
def test_updates_of_a_call_share_the_rate_of_the_first(replicas):
    module, twin = network(), network()
    optimization = resolve_optimization(Optimizer("adam", 0.1), "linear", module)
    with pytest.warns(SharedRateWarning):
        train(module, optimization, 8, per_call=4, replicas=replicas)
    made = torch.optim.Adam(twin.parameters(), lr=0.1)

    def set_rate(update):
        made.param_groups[0]["lr"] = 0.1 if update < 4 else 0.05

    train_in_torch(twin, made, 8, before=set_rate)
    assert_same(module, twin)


@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop", "lamb"])
@pytest.mark.parametrize(
    "loss_scaling",
    [4.0, "auto", LossScaleRamp(1, factor=4, every_updates=2, maximum=16)],
    ids=["fixed", "automatic", "ramp"],
)
def test_loss_scaling_changes_neither_the_weights_nor_the_losses(name, loss_scaling):
    module, twin = network(), network()
    spec = Optimizer(name, 0.01, loss_scaling=loss_scaling)
    losses, times = train(module, resolve_optimization(spec, None, module), 8)
    plain, _ = train(twin, resolve_optimization(Optimizer(name, 0.01), None, twin), 8)
    assert losses == pytest.approx(plain, rel=1e-5)
    assert_same(module, twin)
    assert times == (2 if isinstance(loss_scaling, LossScaleRamp) else 0)


def test_torchs_optimizer_without_momentum_trains_as_in_torch():
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, dampening=0.5),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
    ):
        module, twin = network(), network()
        train(module, resolve_optimization(make(module.parameters()), None, module), 5)
        train_in_torch(twin, make(twin.parameters()), 5)
        assert_same(module, twin)


def test_lamb_without_its_trust_ratio_is_adamw():
    module, twin = network(), network()
    spec = Optimizer("lamb", 0.02, weight_decay=0.1, no_trust_ratio="*")
    train(module, resolve_optimization(spec, None, module), 6)
    train_in_torch(
        twin, torch.optim.AdamW(twin.parameters(), 0.02, weight_decay=0.1), 6
    )
    assert_same(module, twin)


def test_a_word_makes_the_three_groups_of_public_bert_training():
    module, twin = network(), network()
    words = {"no_decay": "bias_and_norm", "no_trust_ratio": "bias"}
    spec = Optimizer("lamb", 0.02, weight_decay=0.1, **words)
    train(module, resolve_optimization(spec, None, module), 6)
    biases = [twin.body.bias, twin.norm.bias]
    groups = [
        {"params": [twin.body.weight, twin.head.weight], "weight_decay": 0.1},
        {"params": [twin.norm.weight], "weight_decay": 0.0},
        {"params": biases, "weight_decay": 0.0, "max_weight_norm": 0.0},
    ]
    own = poptorch.optim.LAMB(groups, lr=0.02)
    train(twin, resolve_optimization(own, None, twin), 6)
    assert_same(module, twin)
