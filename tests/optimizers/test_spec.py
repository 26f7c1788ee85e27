# SPDX-License-Identifier: Apache-2.0
"""`ipufit.Optimizer`: what it makes, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest
import torch

from ipufit import ConfigError, UnknownNameError, UnsupportedError, poptorch
from ipufit.optimizers import LossScaleRamp, Optimizer, Schedule


@pytest.fixture
def module():
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))


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


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sgd", {"momentum": 0.5, "nesterov": True}),
        ("sgd", {"momentum": 0.5, "dampening": 0.25}),
        ("rmsprop", {"alpha": 0.5, "centered": True, "momentum": 0.25}),
        ("lamb", {"max_weight_norm": 10.0, "betas": (0.5, 0.5)}),
    ],
)
def test_settings_are_those_of_poptorch(module, name, settings):
    (group,) = Optimizer(name, **settings).bind(module).param_groups
    assert {key: group[key] for key in settings} == settings


def test_settings_that_are_attributes_arrive(module):
    made = Optimizer(
        "sgd", momentum=0.5, use_combined_accum=True, velocity_scaling=4.0
    ).bind(module)
    assert made.use_combined_accum is True
    assert made.param_groups[0]["velocity_scaling"] == 4.0
    assert Optimizer("rmsprop", use_tf_variant=True).bind(module).use_tf_variant
    assert not Optimizer("lamb", bias_correction=False).bind(module).bias_correction


def test_a_setting_of_none_is_not_given(module):
    assert is_constant(Optimizer("adam", betas=None).bind(module), "betas")


@pytest.mark.parametrize("wrong", [3, [3]])
def test_no_decay_of_another_type_is_refused(wrong):
    with pytest.raises(ConfigError, match="has 3 in no_decay"):
        Optimizer("adamw", no_decay=wrong)


@pytest.mark.parametrize(
    ("given", "first", "is_automatic", "constant"),
    [
        (None, 1.0, False, True),
        (1, 1.0, False, False),
        (64.0, 64.0, False, False),
        ("auto", 1.0, True, False),
        (LossScaleRamp(8, 2, 10, 64), 8.0, False, False),
    ],
)
def test_a_loss_scaling_is_variable_once_it_is_given(
    module, given, first, is_automatic, constant
):
    spec = Optimizer("adam", loss_scaling=given)
    made = spec.bind(module)
    assert made.loss_scaling == first
    assert is_constant(made, "loss_scaling") is constant
    assert spec.is_scaled_automatically is is_automatic


def test_automatic_loss_scaling_accumulates_in_half_precision_if_weights_are(module):
    spec = Optimizer("adam", loss_scaling="auto")
    assert spec.bind(module).accum_type is torch.float32
    assert spec.bind(module.half()).accum_type is torch.float16
    own = Optimizer("adam", loss_scaling="auto", accum_type=torch.float32)
    assert own.bind(module).accum_type is torch.float32


@pytest.mark.parametrize(
    ("name", "loss_scaling", "expected"),
    [
        ("sgd", None, 0.5),
        ("sgd", 8.0, 4.0),  # PopTorch's SGD clips what is still scaled
        ("adam", 8.0, 0.5),
        ("adamw", "auto", 0.5),
        ("adam", LossScaleRamp(8, 2, 10, 64), 0.5),
    ],
)
def test_global_clipnorm_is_the_norm_of_unscaled_gradients(
    module, name, loss_scaling, expected
):
    spec = Optimizer(name, global_clipnorm=0.5, loss_scaling=loss_scaling)
    assert spec.bind(module).max_grad_norm == expected


def test_it_is_a_value():
    spec = Optimizer("adamw", 0.1, betas=(0.5, 0.6), no_decay="bias")
    assert spec == Optimizer("AdamW", 0.1, betas=[0.5, 0.6], no_decay=["bias"])
    assert spec != Optimizer("adamw", 0.1, betas=(0.5, 0.7), no_decay="bias")
    assert hash(spec) == hash(pickle.loads(pickle.dumps(spec)))
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.learning_rate = 0.2


# What it refuses ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": -1}, r"Optimizer\('adamw'\) has learning_rate=-1"),
        ({"learning_rate": "cosine"}, r"compile\(lr_schedule="),
        ({"learning_rate": Schedule("cosine")}, r"compile\(lr_schedule="),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
        ({"learning_rate": True}, "learning_rate=True"),
        ({"weight_decay": -0.1}, r"weight_decay=-0\.1"),
        ({"global_clipnorm": 0}, "global_clipnorm=0"),
        ({"loss_scaling": 0}, "loss_scaling=0"),
        ({"loss_scaling": "dynamic"}, "'dynamic': use a number, 'auto', or"),
        ({"loss_scaling": math.inf}, "loss_scaling=inf"),
        ({"ema_momentum": 1}, "ema_momentum=1: .* at least 0 and below 1"),
        ({"ema_momentum": True}, "ema_momentum=True"),
        ({"no_decay": [torch.nn.LayerNorm]}, "LayerNorm.*in no_decay: use 'bias'"),
        ({"no_decay": "bias", "weight_decay": 0}, "no weight decay that it could"),
        ({"betas": (0.5, 1.5)}, r"can't have these settings: .*1\.5"),
        ({"betas": 0.5}, "can't have these settings"),
        ({"eps": -1}, "can't have these settings: .*-1"),
        ({"accum_type": torch.float64}, "can't have these settings: .*float64"),
        ({"learning_rate": 0.1, "lr": 0.1}, r"has lr\. .* which was given, too"),
        ({"max_grad_norm": 0.1}, "Here it is global_clipnorm"),
        ({"beta_1": 0.1}, r"Here it is betas=\(beta_1, beta_2\)"),
        ({"epsilon": 0.1}, "Here it is eps"),
        ({"use_ema": True}, "Here it is ema_momentum"),
    ],
)
def test_bad_values_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Optimizer("adamw", **settings)


def test_no_decay_needs_a_decay():
    Optimizer("lamb", no_decay="norm")
    with pytest.raises(ConfigError, match=r"Give weight_decay, or leave no_decay out"):
        Optimizer("adam", no_decay="norm")


def test_velocity_scaling_needs_the_combined_accumulator():
    with pytest.raises(ConfigError, match="use_combined_accum=True"):
        Optimizer("sgd", momentum=0.9, velocity_scaling=2.0)


def test_nesterov_without_momentum_is_refused():
    with pytest.raises(ConfigError, match=r"'sgd'.*Nesterov momentum requires"):
        Optimizer("sgd", nesterov=True)


def test_the_rate_may_be_called_as_in_torch():
    assert Optimizer("sgd", lr=0.25) == Optimizer("sgd", learning_rate=0.25)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("lars", "no lars: 'lamb' adapts"),
        ("Adagrad", "no Adagrad: 'rmsprop' is nearest.*alpha=0.999"),
        ("adafactor", "no adafactor: 'adamw' is nearest.*accum_type"),
        ("lion", "no lion: 'adamw' is nearest"),
        ("ftrl", "no ftrl: there are adam, ad"),
    ],
)
def test_what_poptorch_lacks_is_said_with_what_it_has(name, advice):
    with pytest.raises(UnsupportedError, match=f"^PopTorch has {advice}"):
        Optimizer(name)


@pytest.mark.parametrize("name", ["adammw", "adamm", None, 3])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(UnknownNameError, match=r"Unknown optimizer .*Known: adam, ada"):
        Optimizer(name)


@pytest.mark.parametrize(
    ("name", "setting", "hint"),
    [
        ("adamw", "beta", "'betas'"),
        ("sgd", "nestrov", "'nesterov'"),
        ("sgd", "betas", "momentum"),
        ("adam", "max_weight_norm", "accum_type"),
        ("rmsprop", "alhpa", "'alpha'"),
    ],
)
def test_an_unknown_setting_gets_a_suggestion(name, setting, hint):
    text = rf"Unknown setting of Optimizer\('{name}'\) '{setting}'.*{hint}"
    with pytest.raises(UnknownNameError, match=text):
        Optimizer(name, **{setting: 0.5})


@pytest.mark.parametrize(
    "name", ["amsgrad", "maximize", "foreach", "fused", "capturable", "params"]
)
def test_settings_that_no_ipu_has_are_refused(name):
    with pytest.raises(UnsupportedError, match=rf"has {name}, which IPUs don't"):
        Optimizer("adam", **{name: True})


def test_bias_correction_that_poptorch_ignores_is_refused():
    Optimizer("adamw", bias_correction=True)
    with pytest.raises(UnsupportedError, match="takes and ignores"):
        Optimizer("adamw", bias_correction=False)


@pytest.mark.parametrize(
    ("setting", "meaning"),
    [("clipnorm", "each weight by its own norm"), ("clipvalue", "each element")],
)
@pytest.mark.parametrize("name", ["adam", "rmsprop", "sgd"])
def test_keras_other_clippings_are_refused(name, setting, meaning):
    with pytest.raises(UnsupportedError, match=rf"{meaning}.*use global_clipnorm"):
        Optimizer(name, **{setting: 1.0})


@pytest.mark.parametrize("name", ["lamb", "rmsprop"])
def test_what_cannot_clip_is_refused(name):
    with pytest.raises(UnsupportedError, match=r"global_clipnorm=1\.0.*can't clip"):
        Optimizer(name, global_clipnorm=1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 0.9}, r"clip the velocity.*poptorch\.optim\.SGD"),
        ({"use_combined_accum": True}, "clip the velocity"),
        ({"loss_scaling": "auto"}, "loss scaling that changes"),
        ({"loss_scaling": LossScaleRamp(1, 2, 1, 8)}, "loss scaling that changes"),
    ],
)
def test_sgd_clips_only_where_it_is_the_gradient_that_is_clipped(settings, message):
    Optimizer("sgd", global_clipnorm=1.0)
    with pytest.raises(UnsupportedError, match=message):
        Optimizer("sgd", global_clipnorm=1.0, **settings)


def test_only_lamb_has_a_trust_ratio_to_leave_out():
    assert Optimizer("lamb", no_trust_ratio="bias").no_trust_ratio == ("bias",)
    with pytest.raises(UnsupportedError, match="only 'lamb' has a trust ratio"):
        Optimizer("adamw", no_trust_ratio="bias")
    with pytest.raises(ConfigError, match="has 1 in no_trust_ratio"):
        Optimizer("lamb", no_trust_ratio=[1])
