# SPDX-License-Identifier: Apache-2.0
"""Optimisers: `ipufit.Optimizer`, torch's and PopTorch's, and `model.optimizer`."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import pickle
import re
import types

import numpy as np
import pytest
import torch

from ipufit import (
    Callback,
    ConfigError,
    IPUConfig,
    IPUModel,
    Optimizer,
    UnknownNameError,
    UnsupportedError,
    poptorch,
)
from ipufit.optimizers import (
    LossScaleRamp,
    Schedule,
    check_covers,
    resolve_optimizer,
)
from tests import reference


@pytest.fixture
def module():
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def is_constant(optimizer, name):
    return optimizer.variable_attrs.isConstant(name)


# What it makes --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb", "rmsprop", "sgd"])
def test_a_name_alone_is_poptorchs_optimizer_with_its_defaults(module, name):
    made = Optimizer(name).bind(module)
    cls = type(made)
    assert cls.__name__.lower() == name
    plain = cls(module.parameters(), lr=made.param_groups[0]["lr"])
    for key, value in plain.param_groups[0].items():
        if key != "params":
            assert made.param_groups[0][key] == value
    for key in (*plain.defaults, "loss_scaling"):
        assert is_constant(made, key) == is_constant(plain, key)


def test_given_values_arrive_and_may_change(module):
    made = Optimizer(
        "AdamW",
        learning_rate=0.25,
        weight_decay=0.5,
        loss_scaling=128,
        global_clipnorm=2.0,
        betas=[0.5, 0.75],
        eps=0.125,
        accum_type=torch.float16,
    ).bind(module)
    (group,) = made.param_groups
    assert type(made) is poptorch.optim.AdamW
    assert (group["lr"], group["weight_decay"], group["eps"]) == (0.25, 0.5, 0.125)
    assert group["betas"] == (0.5, 0.75)
    assert (made.loss_scaling, made.max_grad_norm) == (128.0, 2.0)
    assert made.accum_type is torch.float16
    names = ("lr", "weight_decay", "eps", "betas", "loss_scaling")
    assert not any(is_constant(made, name) for name in names)


def test_settings_that_are_attributes_arrive(module):
    made = Optimizer(
        "sgd", momentum=0.5, use_combined_accum=True, velocity_scaling=4.0
    ).bind(module)
    assert made.use_combined_accum is True
    assert made.param_groups[0]["velocity_scaling"] == 4.0
    assert Optimizer("rmsprop", use_tf_variant=True).bind(module).use_tf_variant
    assert not Optimizer("lamb", bias_correction=False).bind(module).bias_correction


def test_automatic_loss_scaling_accumulates_in_half_precision_if_weights_are(module):
    spec = Optimizer("adam", loss_scaling="auto")
    assert spec.bind(module).accum_type is torch.float32
    assert spec.bind(module.half()).accum_type is torch.float16
    own = Optimizer("adam", loss_scaling="auto", accum_type=torch.float32)
    assert own.bind(module).accum_type is torch.float32


def test_it_is_a_value():
    spec = Optimizer("adamw", 0.1, betas=(0.5, 0.6), no_decay="bias")
    assert spec == Optimizer("AdamW", 0.1, betas=[0.5, 0.6], no_decay=["bias"])
    assert spec != Optimizer("adamw", 0.1, betas=(0.5, 0.7), no_decay="bias")
    assert hash(spec) == hash(pickle.loads(pickle.dumps(spec)))
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.learning_rate = 0.2


# What it refuses ------------------------------------------------------------------


def refused(error, *cases):
    return [(error, name, settings, said) for name, settings, said in cases]


RAMP = LossScaleRamp(1, 2, 1, 8)
REFUSED = [
    *refused(
        ConfigError,
        ("adamw", {"learning_rate": -1}, r"Optimizer\('adamw'\) has learning_rate=-1"),
        ("adamw", {"learning_rate": "cosine"}, r"compile\(lr_schedule="),
        ("adamw", {"learning_rate": Schedule("cosine")}, r"compile\(lr_schedule="),
        ("adamw", {"learning_rate": math.nan}, "learning_rate=nan"),
        ("adamw", {"weight_decay": -0.1}, r"weight_decay=-0\.1"),
        ("adamw", {"global_clipnorm": 0}, "global_clipnorm=0"),
        ("adamw", {"loss_scaling": 0}, "loss_scaling=0"),
        ("adamw", {"loss_scaling": "dynamic"}, "'dynamic': use a number, 'auto', or"),
        ("adamw", {"ema_momentum": 1}, "ema_momentum=1: .* of 0 or more and below 1"),
        ("adamw", {"no_decay": 3}, "has 3 in no_decay"),
        ("adamw", {"no_decay": [torch.nn.LayerNorm]}, "LayerNorm.*in no_decay: use"),
        ("adamw", {"no_decay": "bias", "weight_decay": 0}, "but no weight decay"),
        ("adam", {"no_decay": "norm"}, "Pass weight_decay, or leave no_decay out"),
        ("lamb", {"no_trust_ratio": [1]}, "has 1 in no_trust_ratio"),
        ("adamw", {"betas": (0.5, 1.5)}, r"betas\[1\]=1\.5: .* 0 or more and below 1"),
        *[
            (name, {"betas": betas}, f"betas={re.escape(repr(betas))}: {a_pair}")
            for a_pair in [r"use a tuple of 2 numbers, as in \(0\.9, 0\.999\)\."]
            for name in ("adam", "adamw", "lamb")
            for betas in (0.5, (0.5,), (0.5, 0.9, 0.9), "0.5", torch.ones(2) / 2)
        ],
        ("adam", {"betas": ("a", 0.9)}, r"betas\[0\]='a': use a number"),
        ("adam", {"eps": torch.tensor(1e-8)}, r"eps=tensor\(.*\): use a number\."),
        ("adam", {"eps": np.float32(1e-8)}, r"eps=.*: use Python's number"),
        ("lamb", {"max_weight_norm": "a"}, "max_weight_norm='a': use a number"),
        ("lamb", {"bias_correction": "no"}, "bias_correction='no': use True or False"),
        ("rmsprop", {"alpha": (0.9, 0.9)}, "alpha=.*: use a number"),
        ("rmsprop", {"centered": "no"}, "centered='no': use True or False"),
        ("rmsprop", {"use_tf_variant": 2}, "use_tf_variant=2: use True or False"),
        ("sgd", {"momentum": True}, "momentum=True: use a number"),
        ("sgd", {"dampening": "x"}, "dampening='x': use a number"),
        ("sgd", {"nesterov": "no"}, "nesterov='no': use True or False"),
        ("sgd", {"use_combined_accum": "no"}, "accum='no': use True or False"),
        ("sgd", {"velocity_scaling": "2"}, "velocity_scaling='2': use a number"),
        ("adamw", {"eps": -1}, "can't have these settings: .*-1"),
        ("adamw", {"accum_type": torch.float64}, "these settings: .*float64"),
        ("adamw", {"learning_rate": 0.1, "lr": 0.1}, r"lr\. .* which was given, too"),
        ("adamw", {"max_grad_norm": 0.1}, "Here it is global_clipnorm"),
        ("adamw", {"beta_1": 0.1}, r"Here it is betas=\(beta_1, beta_2\)"),
        ("adamw", {"epsilon": 0.1}, "Here it is eps"),
        ("adamw", {"use_ema": True}, "Here it is ema_momentum"),
        ("adam", {"momentum": 0.9}, "Here it is the first of betas"),
        ("sgd", {"decay": 1e-6}, r"weight_decay; for a rate that falls.*lr_schedule"),
        ("adamw", {"wd": 0.1}, "Here it is weight_decay"),
        ("sgd", {"momentum": 0.9, "velocity_scaling": 2.0}, "use_combined_accum=True"),
        ("sgd", {"nesterov": True}, "'sgd'.*Nesterov momentum requires"),
    ),
    *refused(
        UnsupportedError,
        ("lars", {}, "^PopTorch has no lars: 'lamb' adapts"),
        ("Adagrad", {}, r"no Adagrad: 'rmsprop' is nearest.*alpha=0\.999"),
        ("adafactor", {}, "no adafactor: 'adamw' is nearest.*accum_type"),
        ("lion", {}, "no lion: 'adamw' is nearest"),
        ("ftrl", {}, "no ftrl: there are adam, ad"),
        *[
            ("adam", {name: True}, rf"has {name}, which IPUs don't")
            for name in ("amsgrad", "maximize", "fused", "capturable", "params")
        ],
        ("adamw", {"bias_correction": False}, "takes and ignores"),
        ("adam", {"clipnorm": 1.0}, "each weight by its own norm.*global_clipnorm"),
        ("sgd", {"clipvalue": 1.0}, "each element.*use global_clipnorm"),
        ("lamb", {"global_clipnorm": 1.0}, r"global_clipnorm=1\.0.*can't clip"),
        ("rmsprop", {"global_clipnorm": 1.0}, r"global_clipnorm=1\.0.*can't clip"),
        *[
            ("sgd", {"global_clipnorm": 1.0, **settings}, message)
            for settings, message in (
                ({"momentum": 0.9}, r"clip the velocity.*poptorch\.optim\.SGD"),
                ({"use_combined_accum": True}, "clip the velocity"),
                ({"loss_scaling": "auto"}, "loss scaling that changes"),
                ({"loss_scaling": RAMP}, "loss scaling that changes"),
            )
        ],
        ("adamw", {"no_trust_ratio": "bias"}, "only 'lamb' has a trust ratio"),
    ),
    *refused(
        UnknownNameError,
        *[
            (name, {}, "Unknown optimizer .*Known: adam, ada")
            for name in ("adammw", None)
        ],
        ("adamw", {"beta": 0.5}, r"setting of Optimizer\('adamw'\) 'beta'.*'betas'"),
        ("adamw", {"clip_norm": 1.0}, "'clip_norm'.*'global_clipnorm'"),
        ("adamw", {"weightdecay": 0.1}, "'weightdecay'.*'weight_decay'"),
        ("sgd", {"nestrov": 0.5}, "'nestrov'.*'nesterov'"),
        ("sgd", {"betas": 0.5}, "'betas'.*momentum"),
        ("adam", {"max_weight_norm": 0.5}, "'max_weight_norm'.*accum_type"),
        ("rmsprop", {"alhpa": 0.5}, "'alhpa'.*'alpha'"),
    ),
]


@pytest.mark.parametrize(("error", "name", "settings", "message"), REFUSED)
def test_what_can_not_be_trained_with_is_refused(error, name, settings, message):
    with pytest.raises(error, match=message):
        Optimizer(name, **settings)


def test_what_is_near_to_what_is_refused_is_taken():
    Optimizer("lamb", no_decay="norm")
    Optimizer("adamw", bias_correction=True)
    Optimizer("sgd", global_clipnorm=1.0)
    assert Optimizer("lamb", no_trust_ratio="bias").no_trust_ratio == ("bias",)


# Names and torch's optimisers become PopTorch's -------------------------------------


def test_a_learning_rate_may_be_a_tensor(module):
    given = torch.optim.Adam(module.parameters(), lr=torch.tensor(0.25))
    lr = resolve_optimizer(given, module).param_groups[0]["lr"]
    assert lr == 0.25
    assert isinstance(lr, float)


def stepped(parameters):
    adam = torch.optim.Adam(parameters)
    for parameter in adam.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    return adam


def hooked(parameters, kind):
    sgd = torch.optim.SGD(parameters, lr=0.1)
    getattr(sgd, f"register_step_{kind}_hook")(lambda *_: None)
    return sgd


class Mine(torch.optim.SGD):
    """May do more than SGD."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adagrad(p, lr=0.1), r"torch\.optim.*Adagrad.*adamw"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "maximize=True"),
        (lambda p: torch.optim.SGD, "neither a name"),
        (lambda p: 3, "optimizer=3"),
        (lambda p: Mine(p, lr=0.1), "Mine"),
        (stepped, "made steps already"),
        (lambda p: hooked(p, "pre"), "SGD has a step pre-hook"),
        (lambda p: hooked(p, "post"), "SGD has a step post-hook"),
        (lambda p: [stepped(p)] * 2, r"several optimizers \(2\), .*'params'"),
        (lambda p: {1: stepped(p)}, r"several optimizers \(1\), .*'params'"),
    ],
)
def test_what_has_no_counterpart_is_refused(module, make, message):
    with pytest.raises(UnsupportedError, match=message):
        IPUModel(module).compile(make(module.parameters()), "mse")


@pytest.mark.parametrize("call", ["fit", "train_on_batch"])
def test_own_steps_between_fits_are_refused_if_they_leave_a_state(module, call):
    x, y = torch.randn(32, 3), torch.randn(32, 1)
    for momentum in (0.0, 0.9):
        given = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum)
        schedule = torch.optim.lr_scheduler.StepLR(given, 5)  # it wraps `given.step`
        model = IPUModel(module)
        model.compile(given, "mse", lr_schedule=schedule)
        getattr(model, call)(x, y)
        module(x).mean().backward()
        given.step()
        if momentum:
            with pytest.raises(UnsupportedError, match="made steps already"):
                getattr(model, call)(x, y)
        else:
            getattr(model, call)(x, y)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_replaced_step_is_refused(module, is_wrapped):
    given = torch.optim.SGD(module.parameters(), lr=0.1)
    model = IPUModel(module)
    given.step = types.MethodType(lambda self, closure=None: None, given)
    if is_wrapped:
        torch.optim.lr_scheduler.StepLR(given, 5)
    with pytest.raises(UnsupportedError, match=r"`step` of this .* was replaced"):
        model.compile(given, "mse")


@pytest.mark.parametrize("home", [torch.optim, poptorch.optim])
def test_an_optimizer_of_another_module_is_refused(module, home):
    other = home.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"2 parameters .* are not the module's"):
        resolve_optimizer(other, module)


def test_a_trainable_parameter_that_the_optimizer_lacks_is_refused(module):
    first, second = module
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    words = r"0\.weight, 0\.bias: trainable, but not .* call compile\(\) again"
    with pytest.raises(ConfigError, match=words):
        check_covers(optimizer, module)
    first.requires_grad_(False)
    check_covers(optimizer, module)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop])
def test_momentum_stays_variable_if_a_group_has_some(module, make):
    groups = [
        {"params": module[0].parameters()},
        {"params": module[1].parameters(), "momentum": 0.5},
    ]
    optimizer = resolve_optimizer(make(groups, lr=0.1), module)
    assert not optimizer.variable_attrs.isConstant("momentum")
    assert [group["momentum"] for group in optimizer.param_groups] == [0.0, 0.5]


# Keras's `optimizer.learning_rate` sets the rate; what nobody reads can't be set ----


X, Y = reference.samples(32)
FIT = {"batch_size": 8, "verbose": 0, "shuffle": False}
NAMES = ("sgd", "adam", "adamw", "rmsprop", "lamb")


def make(optimizer="sgd", **settings):
    model = IPUModel(reference.network(), IPUConfig())
    model.compile(optimizer, "cross_entropy", **settings)
    return model


def weights(model):
    return [p.detach().clone() for p in model.module.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_of_zero_trains_nothing(name):
    model = make(Optimizer(name, learning_rate=0.1, weight_decay=0.0))
    model.optimizer.lr = 0
    assert model.optimizer.learning_rate == model.optimizer.lr == 0.0
    before = weights(model)
    model.fit(X, Y, **FIT)
    assert all(map(torch.equal, before, weights(model)))
    model.optimizer.learning_rate = 0.1
    model.fit(X, Y, **FIT)
    assert not all(map(torch.equal, before, weights(model)))


def test_all_groups_get_it():
    module = reference.network()
    groups = [
        {"params": module[0].parameters(), "lr": 0.1},
        {"params": module[2].parameters(), "lr": 0.2},
    ]
    model = IPUModel(module)
    model.compile(torch.optim.SGD(groups, lr=0.3), "mse")
    assert model.optimizer.learning_rate == 0.1
    model.optimizer.learning_rate = 0.5
    assert [group["lr"] for group in model.optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize("kind", [np.float32, torch.tensor, int])
def test_a_rate_may_be_any_number(kind):
    optimizer = make().optimizer
    optimizer.learning_rate = kind(2)
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert optimizer.learning_rate == 2.0


@pytest.mark.parametrize("rate", [-1, "0.1", float("nan")])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(ConfigError, match="learning_rate"):
        make().optimizer.learning_rate = rate


def test_a_schedule_and_a_rate_exclude_each_other():
    model = make(lr_schedule="cosine")
    with pytest.raises(ConfigError, match="the schedule that compile"):
        model.optimizer.lr = 0.1
    model.compile(model.optimizer, "mse")
    model.optimizer.lr = 0.1


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("learningRate", r"Did you mean learning_rate\?"),
        (
            "warmup",
            "Set learning_rate, or in the dicts .* betas, .*lr, ",
        ),
        ("beta_1", r"group\['betas'\] = \.\.\."),
    ],
)
def test_what_nobody_reads_can_not_be_set(name, advice):
    optimizer = make("adamw").optimizer
    with pytest.raises(AttributeError, match=f"Nobody reads .*{name}.*{advice}"):
        setattr(optimizer, name, 0.5)
    assert not hasattr(optimizer, name)


@pytest.mark.parametrize("name", ["rmsprop", "lamb"])
def test_it_is_the_optimizer_that_was_given(name, caplog):
    module = reference.network()
    kinds = {"rmsprop": "RMSprop", "adamw": "AdamW", "adam": "Adam"}
    plain = getattr(poptorch.optim, kinds.get(name, name.upper()))
    own = plain(module.parameters(), lr=0.1)
    model = reference.compiled(module, optimizer=own)
    assert model.optimizer is own
    assert isinstance(own, plain)
    assert type(own).__name__ == plain.__name__
    kind = type(own)
    model.compile(own, "cross_entropy")
    assert type(own) is kind
    with caplog.at_level(logging.WARNING):
        model.fit(X, Y, **FIT)
    assert "subclass" not in caplog.text
    assert "custom optimizer" not in caplog.text


class Stepping(Callback):
    """Steps a scheduler of torch after each epoch, as torch's users do."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def on_epoch_end(self, epoch, logs):
        self.scheduler.step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_user_s_own_optimizer_is_followed():
    module = reference.network()
    twin = copy.deepcopy(module)
    given = torch.optim.SGD(module.parameters(), lr=0.4)
    model = reference.compiled(module, optimizer=given)
    scheduler = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
    model.fit(X, Y, epochs=3, callbacks=Stepping(scheduler), **FIT)
    assert model.optimizer.learning_rate == 0.1
    plain = torch.optim.SGD(twin.parameters(), lr=0.4)
    for epoch in range(3):
        plain.param_groups[0]["lr"] = 0.4 * 0.5**epoch
        for rows in torch.arange(32).split(8):
            plain.zero_grad()
            torch.nn.functional.cross_entropy(twin(X[rows]), Y[rows]).backward()
            plain.step()
    reference.assert_same_weights(module, twin)


def test_what_the_program_has_as_a_constant_cannot_be_followed():
    module = reference.network()
    given = torch.optim.SGD(module.parameters(), lr=0.4)
    model = reference.compiled(module, optimizer=given)
    given.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ConfigError, match="done to the SGD changes momentum"):
        model.fit(X, Y, **FIT)


FOLLOWED = {
    "SGD": {"momentum": 0.5, "weight_decay": 0.1, "nesterov": True, "dampening": 0.3},
    "AdamW": {"betas": (0.5, 0.6), "weight_decay": 0.3, "eps": 0.01},
    "RMSprop": {"alpha": 0.5, "momentum": 0.2, "weight_decay": 0.1, "eps": 0.01},
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in FOLLOWED for name in FOLLOWED[kind]]
)
def test_each_setting_of_the_user_s_own_optimizer_is_followed(kind, name):
    module = reference.network()
    own = {"weight_decay": 0.01} if kind == "AdamW" else {"momentum": 0.9}
    given = getattr(torch.optim, kind)(module.parameters(), lr=0.1, **own)
    model, twin = reference.compiled(module, optimizer=given), reference.network()
    model.fit(X, Y, epochs=1, **FIT)
    other = reference.compiled(
        twin, optimizer=getattr(torch.optim, kind)(twin.parameters(), lr=0.1, **own)
    )
    other.fit(X, Y, epochs=1, **FIT)
    given.param_groups[0][name] = FOLLOWED[kind][name]
    other.optimizer.param_groups[0][name] = FOLLOWED[kind][name]
    unchanged = reference.weights(twin)
    model.fit(X, Y, epochs=1, **FIT)
    other.fit(X, Y, epochs=1, **FIT)
    reference.assert_same_weights(module, twin)
    assert not torch.equal(unchanged["0.weight"], reference.weights(twin)["0.weight"])


def test_the_newest_of_both_counts():
    module = reference.network()
    given = torch.optim.SGD(module.parameters(), lr=0.4)
    model = reference.compiled(module, optimizer=given)
    given.param_groups[0]["lr"] = 0.2
    model.fit(X, Y, **FIT)
    model.optimizer.lr = 0.1
    model.fit(X, Y, **FIT)
    assert model.optimizer.lr == 0.1
