# SPDX-License-Identifier: Apache-2.0
"""The device's optimisers against torch's, and against the formulas where they differ.

Formulas are computed here in float64, one weight at a time.
"""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit.emulator import optim
from ipufit.emulator._optimizers.settings import OptimizerReader
from ipufit.emulator._update.device_optimizer import DeviceOptimizer
from ipufit.emulator._update.parameter_groups import group_indices
from ipufit.emulator.errors import Error
from tests.strategies import examples

F16 = torch.float16
SHAPES = {"a": (3, 2), "b": (4,), "c": ()}
STEPS = 4
RATES = st.floats(1e-4, 0.5)
FACTORS = st.sampled_from([0.0, 0.3, 0.9])
SCALES = st.sampled_from([1.0, 0.5, 1024.0])
quick = settings(max_examples=examples(25))


def make_weights(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def make_gradients(step):
    generator = torch.Generator().manual_seed(1000 + step)
    return {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}


def read(optimizer):
    return OptimizerReader(relax_attribute_checks=False).read(optimizer)


def make_device(optimizer, weights):
    return DeviceOptimizer(read(optimizer), weights, group_indices(optimizer, weights))


def run(cls, arguments, steps=STEPS, gradients=make_gradients):
    """Weights and device after some updates of a fresh optimiser."""
    weights = make_weights()
    host = cls(weights.values(), **arguments)
    device = make_device(host, weights)
    for step in range(steps):
        scale = getattr(host, "loss_scaling", 1.0)
        device.step({n: scale * g for n, g in gradients(step).items()})
    return {n: w.detach() for n, w in weights.items()}, device


def run_torch(cls, arguments, steps=STEPS):
    weights = make_weights()
    optimizer = cls(weights.values(), **arguments)
    for step in range(steps):
        for name, gradient in make_gradients(step).items():
            weights[name].grad = gradient
        optimizer.step()
    return {n: w.detach() for n, w in weights.items()}


def run_formula(update, steps=STEPS):
    """Weights after `update(weight, gradient, state)`, which returns the new weight."""
    results = {n: w.detach().double() for n, w in make_weights().items()}
    states = {name: {} for name in results}
    for step in range(steps):
        for name, gradient in make_gradients(step).items():
            gradient = gradient.double()
            results[name] = update(results[name], gradient, states[name])
    return results


def assert_close(actual, expected, rtol=2e-4):
    assert set(actual) == set(expected) == set(SHAPES)
    initial = make_weights()
    assert any(not torch.equal(actual[n], w) for n, w in initial.items())
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name].double(), value.double(), rtol=rtol, atol=1e-5
        )


# Against torch ------------------------------------------------------------------------


@quick
@given(RATES, FACTORS, FACTORS, st.booleans(), SCALES)
def test_sgd_without_dampening_is_torchs(lr, momentum, decay, nesterov, scale):
    arguments = {"lr": lr, "momentum": momentum, "weight_decay": decay}
    arguments["nesterov"] = nesterov and momentum > 0
    actual, _ = run(optim.SGD, {**arguments, "loss_scaling": scale})
    assert_close(actual, run_torch(torch.optim.SGD, arguments))


@quick
@given(RATES, FACTORS, FACTORS, st.booleans(), SCALES, st.sampled_from([1.0, 8.0]))
def test_combined_sgd_with_fixed_values_is_torchs(
    lr, momentum, decay, nesterov, scale, velocity_scaling
):
    arguments = {"lr": lr, "momentum": momentum, "weight_decay": decay}
    arguments["nesterov"] = nesterov and momentum > 0
    extras = {"loss_scaling": scale, "velocity_scaling": velocity_scaling}
    actual, _ = run(optim.SGD, {**arguments, **extras, "use_combined_accum": True})
    assert_close(actual, run_torch(torch.optim.SGD, arguments))


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@quick
@given(
    RATES, st.floats(0, 0.95), st.floats(0, 0.99), FACTORS, st.floats(1e-6, 0.1), SCALES
)
def test_adam_and_adamw_are_torchs(name, lr, beta1, beta2, decay, eps, scale):
    arguments = {"lr": lr, "betas": (beta1, beta2), "weight_decay": decay, "eps": eps}
    actual, _ = run(getattr(optim, name), {**arguments, "loss_scaling": scale})
    assert_close(actual, run_torch(getattr(torch.optim, name), arguments))


@quick
@given(
    RATES,
    st.floats(0.1, 0.99),
    FACTORS,
    FACTORS,
    st.booleans(),
    st.floats(1e-3, 0.1),
    SCALES,
)
def test_rmsprop_is_torchs(lr, alpha, momentum, decay, centered, eps, scale):
    arguments = {"lr": lr, "alpha": alpha, "momentum": momentum, "eps": eps}
    arguments.update(weight_decay=decay, centered=centered)
    actual, _ = run(optim.RMSprop, {**arguments, "loss_scaling": scale})
    assert_close(actual, run_torch(torch.optim.RMSprop, arguments))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_torchs_own_optimizers_and_default_values_match_too(name):
    arguments = {"lr": 0.1} if name == "SGD" else {}
    expected = run_torch(getattr(torch.optim, name), arguments, steps=10)
    for module in (torch.optim, optim):
        actual, _ = run(getattr(module, name), arguments, steps=10)
        assert_close(actual, expected, rtol=1e-5)


def test_adamw_corrects_the_bias_even_if_told_not_to():
    actual, _ = run(optim.AdamW, {"lr": 0.1, "bias_correction": False})
    assert_close(actual, run_torch(torch.optim.AdamW, {"lr": 0.1}))


@pytest.mark.parametrize("bias_correction", [True, False])
def test_lamb_is_its_hosts(bias_correction):
    arguments = {"lr": 0.1, "bias_correction": bias_correction, "max_weight_norm": 1.0}
    actual, _ = run(optim.LAMB, {**arguments, "loss_scaling": 64.0})
    assert_close(actual, run_torch(optim.LAMB, arguments))


# Against formulas ---------------------------------------------------------------------


@quick
@given(RATES, st.floats(0.0, 0.9), FACTORS, SCALES)
def test_dampening_counts_without_momentum(lr, dampening, decay, scale):
    arguments = {"lr": lr, "dampening": dampening, "weight_decay": decay}
    actual, _ = run(optim.SGD, {**arguments, "loss_scaling": scale})
    rate = lr * (1 - dampening)
    assert_close(actual, run_formula(lambda w, g, _: w * (1 - rate * decay) - rate * g))


@quick
@given(RATES, FACTORS, st.floats(0.1, 0.9), FACTORS, SCALES, st.booleans())
def test_dampening_counts_from_the_first_velocity_on(
    lr, momentum, dampening, decay, scale, is_combined
):
    arguments = {"lr": lr, "momentum": momentum, "dampening": dampening}
    arguments.update(weight_decay=decay, loss_scaling=scale)
    actual, _ = run(optim.SGD, {**arguments, "use_combined_accum": is_combined})

    def update(w, g, state):
        v = momentum * state.get("v", 0.0) + (1 - dampening) * (g + decay * w)
        state["v"] = v
        return w - lr * v

    assert_close(actual, run_formula(update))


@pytest.mark.parametrize(
    ("max_weight_norm", "bias_correction"), [(None, True), (0.5, True), (0.5, False)]
)
def test_lamb_follows_its_formula(max_weight_norm, bias_correction):
    arguments = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
    arguments.update(max_weight_norm=max_weight_norm, bias_correction=bias_correction)
    actual, _ = run(optim.LAMB, arguments)
    largest = max_weight_norm or 65500.0

    def update(w, g, state):
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = 0.8 * state.get("m", 0.0) + 0.2 * g
        v = state["v"] = 0.9 * state.get("v", 0.0) + 0.1 * g**2
        if bias_correction:
            m, v = m / (1 - 0.8**t), v / (1 - 0.9**t)
        x = m / (v.sqrt() + 1e-3) + 0.1 * w
        return w - 0.1 * min(float(w.norm()), largest) / float(x.norm()) * x

    assert_close(actual, run_formula(update))


def test_lambs_ratio_is_one_where_a_norm_is_zero():
    weight = torch.nn.Parameter(torch.zeros(2))
    host = optim.LAMB([weight], lr=0.5, betas=(0.0, 0.0))
    make_device(host, {"w": weight}).step({"w": torch.tensor([1.0, -1.0])})
    assert torch.allclose(weight, torch.tensor([-0.5, 0.5]))

    weight = torch.nn.Parameter(torch.ones(2))
    host = optim.LAMB([weight], lr=0.5, betas=(0.0, 0.0), max_weight_norm=0.0)
    make_device(host, {"w": weight}).step({"w": torch.tensor([1.0, -1.0])})
    assert torch.allclose(weight, torch.tensor([0.495, 1.495]))


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("momentum", [None, 0.5])
def test_rmsprops_tensorflow_variant_follows_its_formula(centered, momentum):
    arguments = {"lr": 0.1, "alpha": 0.9, "eps": 0.01, "weight_decay": 0.1}
    arguments.update(centered=centered, momentum=momentum, use_tf_variant=True)
    actual, _ = run(optim.RMSprop, arguments)

    def update(w, g, state):
        s = g + 0.1 * w
        q = state["v1"] = 0.9 * state.get("v1", 1.0) + 0.1 * s**2
        if centered:
            state["v2"] = 0.9 * state.get("v2", 0.0) + 0.1 * s
            q = q - state["v2"] ** 2
        x = s / (q + 0.01).sqrt()
        state["v3"] = (momentum or 0.0) * state.get("v3", 0.0) + 0.1 * x
        return w - state["v3"]

    assert_close(actual, run_formula(update))


@pytest.mark.parametrize("is_tensorflow", [True, False])
def test_tensorflows_velocity_keeps_the_learning_rate_it_was_made_with(is_tensorflow):
    weight = torch.nn.Parameter(torch.zeros(1))
    arguments = {"alpha": 0.0, "eps": 0.0, "momentum": 0.5}
    host = optim.RMSprop([weight], lr=0.5, use_tf_variant=is_tensorflow, **arguments)
    device = make_device(host, {"w": weight})
    device.step({"w": torch.tensor([3.0])})
    host.param_groups[0]["lr"] = 0.25
    device.update(read(host))
    device.step({"w": torch.tensor([3.0])})
    second = 0.5 * 0.5 + 0.25 if is_tensorflow else 0.25 * (0.5 + 1.0)
    assert weight.item() == -0.5 - second


def test_separate_sgd_stores_the_velocity_times_the_loss_scaling():
    weight = torch.nn.Parameter(torch.zeros(1))
    host = optim.SGD([weight], lr=1.0, momentum=0.5, loss_scaling=4.0)
    device = make_device(host, {"w": weight})
    device.step({"w": torch.tensor([4.0])})  # a gradient of one
    assert device.state_dict()["ipu_state"]["Accl1___w"] == 4.0
    # The velocity isn't rescaled: after a change it counts for half of what it was.
    host.loss_scaling = 8.0
    device.update(read(host))
    device.step({"w": torch.tensor([0.0])})
    assert weight.item() == -1.0 - 0.5 * 4.0 / 8.0


def test_combined_sgd_takes_a_new_momentum_one_update_late():
    weight = torch.nn.Parameter(torch.zeros(1))
    host = optim.SGD([weight], lr=1.0, momentum=0.5, use_combined_accum=True)
    device = make_device(host, {"w": weight})
    device.step({"w": torch.tensor([1.0])})
    host.param_groups[0]["momentum"] = 0.0
    device.update(read(host))
    device.step({"w": torch.tensor([0.0])})
    assert weight.item() == -1.5  # still with 0.5
    device.step({"w": torch.tensor([0.0])})
    assert weight.item() == -1.5


# Clipping -----------------------------------------------------------------------------


def norm(tensors):
    return math.sqrt(sum(float(t.double().pow(2).sum()) for t in tensors))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
        ("AdamW", {"lr": 0.1, "eps": 0.1}),
        ("Adam", {"lr": 0.1, "eps": 0.1}),
    ],
)
@pytest.mark.parametrize("largest", [0.5, 100.0])
def test_clipping_gradients_is_torchs(name, arguments, largest):
    weights = make_weights()
    reference = getattr(torch.optim, name)(weights.values(), **arguments)
    for step in range(STEPS):
        for key, gradient in make_gradients(step).items():
            weights[key].grad = gradient
        torch.nn.utils.clip_grad_norm_(weights.values(), largest)
        reference.step()
    extras = {"max_grad_norm": largest}
    actual, _ = run(getattr(optim, name), {**arguments, **extras})
    assert_close(actual, {n: w.detach() for n, w in weights.items()})


def test_plain_sgd_clips_before_the_loss_scaling_is_taken_out():
    arguments = {"lr": 0.1, "loss_scaling": 8.0, "max_grad_norm": 4.0}
    actual, _ = run(optim.SGD, arguments, steps=1)
    gradients = make_gradients(0)
    factor = 4.0 / (8.0 * norm(gradients.values()))
    assert factor < 1.0
    expected = {n: w.detach() for n, w in make_weights().items()}
    for name, gradient in gradients.items():
        expected[name] = expected[name] - 0.1 * factor * gradient
    assert_close(actual, expected)


@pytest.mark.parametrize("is_combined", [True, False])
def test_sgd_with_momentum_clips_what_it_subtracts_and_not_its_velocity(is_combined):
    scale, vs = 2.0, 1.0 if is_combined else 2.0
    arguments = {"lr": 0.1, "momentum": 0.5, "loss_scaling": scale}
    arguments.update(max_grad_norm=1.0, use_combined_accum=is_combined)
    actual, device = run(optim.SGD, arguments, steps=2)
    first, second = make_gradients(0), make_gradients(1)
    expected = {n: w.detach() for n, w in make_weights().items()}
    for velocity in (
        {n: vs * first[n] for n in SHAPES},
        {n: vs * (0.5 * first[n] + second[n]) for n in SHAPES},
    ):
        factor = 1.0 / max(1.0, norm(velocity.values()))
        assert factor < 1.0
        for name in SHAPES:
            expected[name] = expected[name] - 0.1 / vs * factor * velocity[name]
    assert_close(actual, expected)
    stored = device.state_dict()["ipu_state"]["Accl1___a"]
    torch.testing.assert_close(stored * (2.0 if is_combined else 1.0), velocity["a"])


def test_adam_clips_after_adding_the_penalty_and_adamw_before():
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    adam = optim.Adam([weight], lr=0.0, weight_decay=1.0, max_grad_norm=1.0)
    device = make_device(adam, {"w": weight})
    device.step({"w": torch.tensor([0.5])})  # 0.5 + 3 is too long
    first = device.state_dict()["ipu_state"]["Accl1___w"]
    torch.testing.assert_close(first, torch.tensor([0.1]))
    adamw = optim.AdamW([weight], lr=0.0, weight_decay=1.0, max_grad_norm=1.0)
    device = make_device(adamw, {"w": weight})
    device.step({"w": torch.tensor([0.5])})
    first = device.state_dict()["ipu_state"]["Accl1___w"]
    torch.testing.assert_close(first, torch.tensor([0.05]))


def test_the_norm_is_global_over_groups_with_other_rules():
    weights = make_weights()
    a, b, c = weights.values()
    groups = [{"params": [a]}, {"params": [b, c], "momentum": 0.9}]
    host = torch.optim.SGD(groups, lr=0.1)
    host.max_grad_norm = 1.0
    gradients = make_gradients(0)
    make_device(host, weights).step(gradients)
    factor = 1.0 / norm(gradients.values())
    for name, before in make_weights().items():
        expected = before.detach() - 0.1 * factor * gradients[name]
        torch.testing.assert_close(weights[name].detach(), expected)


# Groups, missing gradients, types -----------------------------------------------------


def test_groups_have_their_values_and_the_rest_the_defaults():
    weights = make_weights()
    groups = [{"params": [weights["a"]], "lr": 0.5}]
    host = optim.SGD(groups, lr=0.1)
    gradients = make_gradients(0)
    make_device(host, weights).step(gradients)
    for name, before in make_weights().items():
        lr = 0.5 if name == "a" else 0.1
        expected = before.detach() - lr * gradients[name]
        torch.testing.assert_close(weights[name].detach(), expected)


def test_group_indices_find_tensors_by_identity_and_memory():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    names = dict(model.named_parameters())
    alias = names["1.bias"].detach().requires_grad_()  # another object, same memory
    host = torch.optim.SGD(
        [{"params": [names["0.weight"]]}, {"params": [alias]}], lr=0.1
    )
    assert group_indices(host, names) == {
        "0.weight": 0,
        "0.bias": None,
        "1.weight": None,
        "1.bias": 1,
    }


def test_parameters_of_another_model_are_refused():
    host = torch.optim.SGD(make_weights().values(), lr=0.1)
    with pytest.raises(KeyError, match="neither a parameter nor a buffer"):
        group_indices(host, make_weights())


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "LAMB"])
def test_weights_without_a_gradient_stay_and_so_does_their_state(name):
    weights = make_weights()
    arguments = {"lr": 0.1, "weight_decay": 0.1}
    if name in ("SGD", "RMSprop"):
        arguments["momentum"] = 0.9
    host = getattr(optim, name)(weights.values(), **arguments)
    device = make_device(host, weights)
    device.step({**make_gradients(0), "b": None})
    before = make_weights()
    assert torch.equal(weights["b"], before["b"])
    assert not torch.equal(weights["a"], before["a"])
    assert not device.state_dict()["ipu_state"]["Accl1___b"].any()

    # From here on `b` lags an update behind, as if training began now.
    device.step(make_gradients(1))
    alone = {"b": before["b"]}
    other = getattr(optim, name)(alone.values(), **arguments)
    make_device(other, alone).step({"b": make_gradients(1)["b"]})
    torch.testing.assert_close(weights["b"], alone["b"])


def test_no_gradient_at_all_is_no_update():
    weights = make_weights()
    host = optim.SGD(weights.values(), lr=0.1, max_grad_norm=1.0)
    make_device(host, weights).step({"a": None})
    assert all(torch.equal(weights[n], w) for n, w in make_weights().items())


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "LAMB"])
def test_gradients_are_not_written_to(name):
    arguments = {"lr": 0.1, "weight_decay": 0.1, "loss_scaling": 2.0}
    weights = make_weights()
    host = getattr(optim, name)(weights.values(), **arguments)
    # What the backward pass of a sum gives: one number seen as a whole tensor.
    gradients = {n: torch.tensor(2.0).expand(shape) for n, shape in SHAPES.items()}
    make_device(host, weights).step(gradients)
    assert all(bool((g == 2.0).all()) for g in gradients.values())


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "LAMB"])
def test_half_precision_weights_are_float32_results_rounded(name):
    weights, doubles = make_weights(dtype=F16), make_weights(dtype=F16)
    doubles = {n: torch.nn.Parameter(w.detach().float()) for n, w in doubles.items()}
    for values in (weights, doubles):
        host = getattr(optim, name)(values.values(), lr=0.1)
        gradients = make_gradients(0)
        make_device(host, values).step(gradients)
    for key, value in weights.items():
        assert value.dtype == F16
        assert torch.equal(value, doubles[key].half())


@pytest.mark.parametrize(
    ("name", "arguments", "types"),
    [
        ("SGD", {"momentum": 0.9, "velocity_accum_type": F16}, {"Accl1": F16}),
        ("Adam", {"first_order_momentum_accum_type": F16}, {"Accl1": F16}),
        ("LAMB", {"second_order_momentum_accum_type": F16}, {"Accl2": F16}),
        (
            "RMSprop",
            {
                "momentum": 0.9,
                "centered": True,
                "first_order_momentum_accum_type": F16,
                "second_order_momentum_accum_type": F16,
            },
            {"Accl1": F16, "Accl2": F16, "Accl3": torch.float32},
        ),
    ],
)
def test_state_has_the_types_asked_for(name, arguments, types):
    actual, device = run(getattr(optim, name), {"lr": 0.01, **arguments})
    state = device.state_dict()["ipu_state"]
    for slot, dtype in types.items():
        assert state[f"{slot}___a"].dtype == dtype
    wide = {k: torch.float32 if v == F16 else v for k, v in arguments.items()}
    exact, _ = run(getattr(optim, name), {"lr": 0.01, **wide})
    assert any(not torch.equal(actual[n], exact[n]) for n in SHAPES)
    # Rounding a mean to 11 bits moves a step of 0.01 by a small part of it.
    for key in SHAPES:
        torch.testing.assert_close(actual[key], exact[key], rtol=0.0, atol=2e-3)


def test_combined_sgds_state_has_the_weights_type():
    weights = make_weights(dtype=F16)
    host = optim.SGD(weights.values(), 0.1, 0.9, use_combined_accum=True)
    state = make_device(host, weights).state_dict()["ipu_state"]
    assert {t.dtype for t in state.values()} == {F16}


# State --------------------------------------------------------------------------------

STATEFUL = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "loss_scaling": 4.0}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "dampening": 0.0}),
    (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "use_combined_accum": True},
    ),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.1, "loss_scaling": 2.0}),
    ("RMSprop", {"lr": 0.1, "momentum": 0.5, "centered": True}),
    ("LAMB", {"lr": 0.1, "max_weight_norm": 2.0}),
]


def fresh_run(name, arguments, start, first_step, state=None):
    weights = {n: torch.nn.Parameter(w.detach().clone()) for n, w in start.items()}
    host = getattr(optim, name)(weights.values(), **arguments)
    device = make_device(host, weights)
    if state is not None:
        device.load_state(state["ipu_state"], state["ipu_param"])
    for step in range(first_step, first_step + 2):
        device.step(make_gradients(step))
    return weights, device


def go_on(device, weights):
    for step in (2, 3):
        device.step(make_gradients(step))
    return weights


@pytest.mark.parametrize(("name", "arguments"), STATEFUL)
def test_a_resumed_run_equals_an_unbroken_one_to_the_bit(name, arguments, caplog):
    weights, device = fresh_run(name, arguments, make_weights(), 0)
    resumed, _ = fresh_run(name, arguments, weights, 2, device.state_dict())
    unbroken = go_on(device, weights)
    assert all(torch.equal(resumed[n], unbroken[n]) for n in SHAPES)
    assert not caplog.records


@pytest.mark.parametrize(("name", "arguments"), STATEFUL)
def test_reset_state_forgets_the_past(name, arguments):
    weights, device = fresh_run(name, arguments, make_weights(), 0)
    fresh, _ = fresh_run(name, arguments, weights, 2)
    device.reset_state()
    again = go_on(device, weights)
    assert all(torch.equal(fresh[n], again[n]) for n in SHAPES)


def keys(cls, arguments):
    _, device = run(cls, arguments, steps=1)
    state = device.state_dict()
    return [
        {key for key in state[part] if key.endswith(("___a", "FLOAT"))}
        for part in ("ipu_state", "ipu_param")
    ]


def test_state_keys_follow_poptorch():
    rate, decay = "learningRate___specific___a", "weightDecay___specific___a"
    arguments = {"lr": 0.1, "weight_decay": 0.1, "loss_scaling": 2.0}
    assert keys(optim.Adam, arguments) == [
        {"Accl1___a", "Accl2___a", "Step___a"},
        {rate, decay, "lossScaling_FLOAT"},
    ]
    assert keys(optim.AdamW, {"lr": 0.1})[1] == {rate}
    assert keys(optim.SGD, arguments) == [
        set(),
        {
            "scaledLearningRate0___specific___a",
            "weightDecayScaleFactor0___specific___a",
            "lossScaling_FLOAT",
        },
    ]
    assert keys(optim.SGD, {"lr": 0.1, "momentum": 0.9})[0] == {"Accl1___a"}
    assert keys(optim.RMSprop, {"lr": 0.1})[0] == {"Accl1___a"}


def test_plain_sgds_parameters_have_poptorchs_values():
    arguments = {"lr": 0.1, "dampening": 0.5, "weight_decay": 0.2, "loss_scaling": 4.0}
    values = run(optim.SGD, arguments, steps=1)[1].state_dict()["ipu_param"]
    assert values["scaledLearningRate0___specific___a"].item() == pytest.approx(0.0125)
    factor = values["weightDecayScaleFactor0___specific___a"].item()
    assert factor == pytest.approx(1 - 0.1 * 0.5 * 0.2)


def test_weights_outside_all_groups_share_the_defaults_parameter():
    weights = make_weights()
    device = make_device(optim.Adam([weights["a"]], lr=0.5), weights)
    values = device.state_dict()["ipu_param"]
    assert set(values) == {
        "learningRate___specific___a",
        "learningRate___default___FLOAT",
    }


def test_loaded_hyper_parameters_never_reach_the_device():
    """PopTorch, `writeOptimizerState`; PopART, `updateOptimizerFromHost`."""
    weight = torch.nn.Parameter(torch.zeros(1))
    source = optim.SGD([weight], lr=0.25, loss_scaling=8.0)
    saved = make_device(source, {"w": weight}).state_dict()
    host = optim.SGD([weight], lr=0.5, loss_scaling=2.0)
    device = make_device(host, {"w": weight})
    before = device.state_dict()["ipu_param"]
    device.load_state(saved["ipu_state"], saved["ipu_param"])
    assert device.state_dict()["ipu_param"] == before
    device.step({"w": torch.tensor([2.0])})  # a gradient of one
    assert weight.item() == -0.5


def test_missing_names_are_skipped_with_a_warning(caplog):
    weights = make_weights()
    device = make_device(optim.Adam(weights.values(), lr=0.1), weights)
    device.step(make_gradients(0))
    before = device.state_dict()
    partial = {n: t for n, t in before["ipu_state"].items() if n != "Accl1___a"}
    partial = {n: torch.zeros_like(t) for n, t in partial.items()}
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        device.load_state(partial, {"unknown": torch.tensor(1.0)})
    after = device.state_dict()["ipu_state"]
    assert torch.equal(after["Accl1___a"], before["ipu_state"]["Accl1___a"])
    assert not after["Accl1___b"].any()
    start = "writeOptimizerState: ignoring missing"
    assert f"{start} state Accl1___a" in caplog.text
    assert f"{start} parameter learningRate___specific___a" in caplog.text


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, optim.LAMB])
@pytest.mark.parametrize(("beta", "steps"), [(0.5, -1.0), (0.5, -2.0), (0.0, -2.0)])
def test_a_state_that_makes_no_sense_gives_no_numbers_and_no_error(cls, beta, steps):
    weights = make_weights()
    device = make_device(cls(weights.values(), betas=(beta, beta)), weights)
    state = device.state_dict()["ipu_state"]
    state["Step___a"] = torch.full_like(state["Step___a"], steps)
    device.load_state(state, None)
    device.step(make_gradients(0))
    assert not torch.isfinite(weights["a"]).all()


def test_states_of_another_shape_are_refused():
    weights = make_weights()
    device = make_device(optim.Adam(weights.values(), lr=0.1), weights)
    state = device.state_dict()["ipu_state"]
    state["Accl1___a"] = torch.zeros(1)
    with pytest.raises(Error, match="Accl1___a has shape"):
        device.load_state(state, None)


def test_what_state_dict_gives_is_a_copy():
    weights = make_weights()
    device = make_device(optim.Adam(weights.values(), lr=0.1), weights)
    device.state_dict()["ipu_state"]["Accl1___a"].fill_(7.0)
    assert not device.state_dict()["ipu_state"]["Accl1___a"].any()
