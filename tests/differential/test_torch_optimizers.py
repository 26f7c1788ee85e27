# SPDX-License-Identifier: Apache-2.0
"""Each optimizer and each scheduler of torch in `fit`, beside a plain loop.

The arguments are those of `optim_db`, with which torch tests itself, and further ones.
After some updates the weights are torch's, or the optimizer is refused.
"""

import collections
import inspect

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ipufit.emulator as poptorch
from ipufit import IPUModel, PerEpoch
from ipufit.errors import IpufitError
from tests.differential.torch_databases import (
    DIFFERENT,
    EQUAL,
    REFUSED,
    Outcome,
    database,
    differ,
)
from tests.reference import network, samples

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH, BATCHES, EPOCHS = 4, 3, 2

FURTHER = {
    "SGD": [{"momentum": 0.9, "nesterov": True}],
    "Adam": [{"betas": (0.5, 0.7)}, {"eps": 1e-3}],
    "AdamW": [{"betas": (0.5, 0.7)}, {"eps": 1e-3}, {"weight_decay": 0.0}],
    "RMSprop": [{"alpha": 0.5}, {"eps": 1e-3}, {"momentum": 0.9}, {"centered": True}],
}
"""Arguments that torch's database doesn't vary, for what an IPU has."""

FLAGS = [{name: True} for name in ("foreach", "capturable", "differentiable", "fused")]

EXCLUDED = {
    "dampening": "PopTorch applies it from the first update on, torch from the second"
}
"""Arguments that differ, as docs/reference/optimizers.md says."""

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 7, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5, eta_min=0.01),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, 0.01, 0.1, step_size_up=2, cycle_momentum="momentum" in o.defaults
    ),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(
        o, 2
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=7),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
}


def outcome(optimizer_of, scheduler_of=None, *, is_per_epoch=False, is_bound=True):
    """What becomes of weights in `fit`, beside a plain loop with the same optimizer.

    Args:
        optimizer_of: Makes an optimizer for a module.
        scheduler_of: Makes a scheduler for an optimizer.
        is_per_epoch: Whether it is stepped per epoch, not per update.
        is_bound: Whether `compile` gets a scheduler, not the function that makes it.

    Returns:
        None if torch itself can't make an update.
    """
    x, y = samples(BATCH * BATCHES)
    module, plain = network(), network()
    try:
        optimizer = optimizer_of(module)
        schedule = scheduler_of
        if schedule is not None and is_bound:
            schedule = schedule(optimizer)
        schedule = PerEpoch(schedule) if is_per_epoch else schedule
        model = IPUModel(module)
        model.compile(optimizer, "cross_entropy", lr_schedule=schedule)
        model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    except (IpufitError, poptorch.Error) as error:
        return Outcome(REFUSED, str(error))
    optimizer = optimizer_of(plain)
    scheduler = None if scheduler_of is None else scheduler_of(optimizer)
    for update in range(1, EPOCHS * BATCHES + 1):
        rows = slice(
            (update - 1) % BATCHES * BATCH, (update - 1) % BATCHES * BATCH + BATCH
        )
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x[rows]), y[rows]).backward()
        try:
            optimizer.step()
        except (RuntimeError, AssertionError):  # such as `capturable` of processors
            return None
        if scheduler is not None and not (is_per_epoch and update % BATCHES):
            scheduler.step()
    difference = differ([*module.parameters()], [*plain.parameters()], 1e-5)
    return Outcome(EQUAL if difference is None else DIFFERENT, difference)


def in_two_groups(kind, arguments):
    """A function that makes an optimizer of two groups with different rates."""

    def make(module):
        first, *others = module.parameters()
        lr = arguments.get("lr", inspect.signature(kind).parameters["lr"].default)
        lr = lr if isinstance(lr, (float, torch.Tensor)) else 0.01  # SGD of torch 2.0
        groups = [{"params": [first]}, {"params": others, "lr": lr * 0.5}]
        return kind(groups, **{"lr": lr, **arguments})

    return make


def in_one_group(kind, arguments):
    lr = {"lr": 0.01} if kind is torch.optim.SGD else {}  # which torch 2.0 requires
    return lambda module: kind(module.parameters(), **{**lr, **arguments})


def test_optimizers_compute_what_torch_computes():
    counts = collections.Counter()
    for info in database("optim_db"):
        kind, name = info.optim_cls, info.optim_cls.__name__
        given = [made.kwargs for made in info.optim_inputs_func(device="cpu")]
        for arguments in (*given, *FURTHER.get(name, ()), *FLAGS):
            if not EXCLUDED.keys().isdisjoint(arguments):
                continue
            for make in (in_one_group(kind, arguments), in_two_groups(kind, arguments)):
                try:
                    make(network()).step  # noqa: B018 - torch may refuse it
                except (TypeError, ValueError, RuntimeError):
                    continue
                found = outcome(make)
                if found is None:
                    continue
                assert found.kind != DIFFERENT, (name, arguments, found.values)
                counts[found.kind, name] += 1
    for name in ("SGD", "Adam", "AdamW", "RMSprop"):
        assert counts[EQUAL, name] >= 8, counts
    assert len({name for kind, name in counts if kind == REFUSED}) > 8, counts


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_compute_what_torch_computes(name):
    sgd = in_two_groups(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    adam = in_two_groups(torch.optim.Adam, {})
    for optimizer, is_per_epoch, is_bound in [  # each pair of settings
        (sgd, False, True),
        (sgd, True, False),
        (adam, False, False),
        (adam, True, True),
    ]:
        found = outcome(
            optimizer, SCHEDULERS[name], is_per_epoch=is_per_epoch, is_bound=is_bound
        )
        is_refused = name == "ReduceLROnPlateau"
        assert found.kind == (REFUSED if is_refused else EQUAL), found


def test_no_scheduler_is_left_out():
    bases = {"LRScheduler", "_LRScheduler"}
    kinds = {
        kind.__name__
        for kind in vars(lr_scheduler).values()
        if inspect.isclass(kind)
        and hasattr(kind, "step")
        and kind is not torch.optim.Optimizer
    }
    assert kinds - bases <= {*SCHEDULERS}
