# SPDX-License-Identifier: Apache-2.0
"""The device's optimizers against torch's, and against the formulas where they differ.

Formulas are computed here in float64, one weight at a time.
"""

import copy
import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit.emulator import identity_loss, optim, trainingModel
from ipufit.emulator.errors import Error
from tests.emulator.optimizers._training import (
    SHAPES,
    Training,
    make_gradients,
    make_weights,
    of,
)
from tests.strategies import examples

F16 = torch.float16
STEPS = 4
RATES = st.floats(1e-4, 0.5)
FACTORS = st.sampled_from([0.0, 0.3, 0.9])
SCALES = st.sampled_from([1.0, 0.5, 1024.0])
COMBINED = st.sampled_from(
    [{}, *({"use_combined_accum": True, "velocity_scaling": v} for v in (1.0, 8.0))]
)
quick = settings(max_examples=examples(25), deadline=None)


def run(cls, arguments, steps=STEPS):
    """Weights and training after some updates of a fresh optimizer."""
    training = Training(of(cls, **arguments))
    for step in range(steps):
        training.step(make_gradients(step))
    return training.weights, training


def run_torch(cls, arguments, steps=STEPS):
    weights = {n: torch.nn.Parameter(w) for n, w in make_weights().items()}
    optimizer = cls(weights.values(), **arguments)
    for step in range(steps):
        for name, gradient in make_gradients(step).items():
            weights[name].grad = gradient
        optimizer.step()
    return {n: w.detach() for n, w in weights.items()}


def run_formula(update, steps=STEPS):
    """Weights after `update(weight, gradient, state)`, which returns the new weight."""
    results = {n: w.double() for n, w in make_weights().items()}
    states = {name: {} for name in results}
    for step in range(steps):
        for name, gradient in make_gradients(step).items():
            results[name] = update(results[name], gradient.double(), states[name])
    return results


def assert_close(actual, expected, rtol=2e-4):
    assert set(actual) == set(expected) == set(SHAPES)
    initial = make_weights()
    assert any(not torch.equal(actual[n], w) for n, w in initial.items())
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name].double(), value.double(), rtol=rtol, atol=1e-5
        )


def one_weight(cls, weight, **arguments):
    """Training of a single weight, named `w`."""
    return Training(of(cls, **arguments), {"w": torch.tensor(weight)})


# Against torch ------------------------------------------------------------------------


@quick
@given(RATES, FACTORS, FACTORS, st.booleans(), SCALES, COMBINED)
def test_sgd_without_dampening_is_torchs(lr, momentum, decay, nesterov, scale, extras):
    arguments = {"lr": lr, "momentum": momentum, "weight_decay": decay}
    arguments["nesterov"] = nesterov and momentum > 0
    actual, _ = run(optim.SGD, {**arguments, **extras, "loss_scaling": scale})
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
@given(
    RATES,
    st.sampled_from([None, 0.0, 0.3, 0.9]),
    st.floats(0.0, 0.9),
    FACTORS,
    SCALES,
    st.booleans(),
)
def test_dampening_counts_from_the_first_velocity_on(
    lr, momentum, dampening, decay, scale, is_combined
):
    """Without momentum, too."""
    arguments = {"lr": lr, "dampening": dampening, "weight_decay": decay}
    arguments.update(momentum=momentum, loss_scaling=scale)
    actual, _ = run(optim.SGD, {**arguments, "use_combined_accum": is_combined})

    def update(w, g, state):
        v = (momentum or 0.0) * state.get("v", 0.0)
        v += (1 - dampening) * (g + decay * w)
        state["v"] = v
        return w - lr * v

    assert_close(actual, run_formula(update))


def test_lambs_ratio_is_one_where_a_norm_is_zero():
    training = one_weight(optim.LAMB, [0.0, 0.0], lr=0.5, betas=(0.0, 0.0))
    training.step({"w": torch.tensor([1.0, -1.0])})
    assert torch.allclose(training.weights["w"], torch.tensor([-0.5, 0.5]))

    arguments = {"lr": 0.5, "betas": (0.0, 0.0), "max_weight_norm": 0.0}
    training = one_weight(optim.LAMB, [1.0, 1.0], **arguments)
    training.step({"w": torch.tensor([1.0, -1.0])})
    assert torch.allclose(training.weights["w"], torch.tensor([0.495, 1.495]))


@pytest.mark.parametrize("is_tensorflow", [True, False])
def test_tensorflows_velocity_keeps_the_learning_rate_it_was_made_with(is_tensorflow):
    arguments = {"alpha": 0.0, "eps": 1e-30, "momentum": 0.5}
    arguments["use_tf_variant"] = is_tensorflow
    training = one_weight(optim.RMSprop, [0.0], lr=0.5, **arguments)
    training.step({"w": torch.tensor([3.0])})
    training.optimizer.param_groups[0]["lr"] = 0.25
    training.send()
    training.step({"w": torch.tensor([3.0])})
    second = 0.5 * 0.5 + 0.25 if is_tensorflow else 0.25 * (0.5 + 1.0)
    assert training.weights["w"].item() == -0.5 - second


def test_separate_sgd_stores_the_velocity_times_the_loss_scaling():
    training = one_weight(optim.SGD, [0.0], lr=1.0, momentum=0.5, loss_scaling=4.0)
    training.step({"w": torch.tensor([1.0])})
    assert training.state["Accl1___w"] == 4.0
    # The velocity isn't rescaled: after a change it counts for half of what it was.
    training.optimizer.loss_scaling = 8.0
    training.send()
    training.step({"w": torch.tensor([0.0])})
    assert training.weights["w"].item() == -1.0 - 0.5 * 4.0 / 8.0


def test_combined_sgd_takes_a_new_momentum_one_update_late():
    arguments = {"lr": 1.0, "momentum": 0.5, "use_combined_accum": True}
    training = one_weight(optim.SGD, [0.0], **arguments)
    training.step({"w": torch.tensor([1.0])})
    training.optimizer.param_groups[0]["momentum"] = 0.0
    training.send()
    for _ in range(2):
        training.step({"w": torch.tensor([0.0])})
        assert training.weights["w"].item() == -1.5  # the first one still with 0.5


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
    weights = {n: torch.nn.Parameter(w) for n, w in make_weights().items()}
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
    expected = make_weights()
    for name, gradient in gradients.items():
        expected[name] = expected[name] - 0.1 * factor * gradient
    assert_close(actual, expected)


@pytest.mark.parametrize("is_combined", [True, False])
def test_sgd_with_momentum_clips_what_it_subtracts_and_not_its_velocity(is_combined):
    scale, vs = 2.0, 1.0 if is_combined else 2.0
    arguments = {"lr": 0.1, "momentum": 0.5, "loss_scaling": scale}
    arguments.update(max_grad_norm=1.0, use_combined_accum=is_combined)
    actual, training = run(optim.SGD, arguments, steps=2)
    first, second = make_gradients(0), make_gradients(1)
    expected = make_weights()
    for velocity in (
        {n: vs * first[n] for n in SHAPES},
        {n: vs * (0.5 * first[n] + second[n]) for n in SHAPES},
    ):
        factor = 1.0 / max(1.0, norm(velocity.values()))
        assert factor < 1.0
        for name in SHAPES:
            expected[name] = expected[name] - 0.1 / vs * factor * velocity[name]
    assert_close(actual, expected)
    stored = training.state["Accl1___a"]
    torch.testing.assert_close(stored * (2.0 if is_combined else 1.0), velocity["a"])


def test_adam_clips_after_adding_the_penalty_and_adamw_before():
    arguments = {"lr": 0.0, "weight_decay": 1.0, "max_grad_norm": 1.0}
    for cls, expected in ((optim.Adam, 0.1), (optim.AdamW, 0.05)):
        training = one_weight(cls, [3.0], **arguments)
        training.step({"w": torch.tensor([0.5])})  # 0.5 + 3 is too long
        first = training.state["Accl1___w"]
        torch.testing.assert_close(first, torch.tensor([expected]))


def test_the_norm_is_global_over_groups_with_other_rules():
    def make(weights):
        a, b, c = weights.values()
        groups = [{"params": [a]}, {"params": [b, c], "momentum": 0.9}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        optimizer.max_grad_norm = 1.0
        return optimizer

    training, gradients = Training(make), make_gradients(0)
    training.step(gradients)
    factor = 1.0 / norm(gradients.values())
    for name, before in make_weights().items():
        expected = before - 0.1 * factor * gradients[name]
        torch.testing.assert_close(training.weights[name], expected)


# Groups, missing gradients, types -----------------------------------------------------


def test_groups_hold_weights_by_identity_or_by_memory():
    def make(weights):
        alias = weights["b"].detach().requires_grad_()  # another object, same memory
        groups = [{"params": [weights["a"]], "lr": 0.5}, {"params": [alias], "lr": 0.2}]
        return torch.optim.SGD(groups, lr=0.1)

    training, gradients = Training(make), make_gradients(0)
    training.step(gradients)
    for name, lr in (("a", 0.5), ("b", 0.2), ("c", 0.1)):
        expected = make_weights()[name] - lr * gradients[name]
        torch.testing.assert_close(training.weights[name], expected)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "LAMB"])
def test_weights_that_the_loss_does_not_reach_stay_and_so_does_their_state(name):
    arguments = {"lr": 0.1, "weight_decay": 0.1}
    if name in ("SGD", "RMSprop"):
        arguments["momentum"] = 0.9
    training = Training(of(getattr(optim, name), **arguments), used=["a", "c"])
    training.step(make_gradients(0))
    before = make_weights()
    assert torch.equal(training.weights["b"], before["b"])
    assert not torch.equal(training.weights["a"], before["a"])
    assert not training.state["Accl1___b"].any()


def test_no_gradient_at_all_is_no_update():
    arguments = {"lr": 0.1, "max_grad_norm": 1.0}
    model = torch.nn.Linear(2, 1)
    before = copy.deepcopy(model.state_dict())
    model.forward = lambda x: identity_loss((x * 2).sum(), reduction="sum")
    executor = trainingModel(model, None, optim.SGD(model.parameters(), **arguments))
    executor(torch.ones(1, 2))
    executor.copyWeightsToHost()
    assert all(torch.equal(before[n], w) for n, w in model.state_dict().items())


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "LAMB"])
def test_half_precision_weights_are_float32_results_rounded(name):
    halves = make_weights(dtype=F16)
    floats = {n: w.float() for n, w in halves.items()}
    results = []
    for weights, dtype in ((halves, F16), (floats, torch.float32)):
        training = Training(of(getattr(optim, name), lr=0.1), weights)
        gradients = {n: g.half().to(dtype) for n, g in make_gradients(0).items()}
        training.step(gradients)
        results.append(training.weights)
    narrow, wide = results
    for key, value in narrow.items():
        assert value.dtype == F16
        assert torch.equal(value, wide[key].half())


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
            },
            {"Accl1": F16, "Accl2": F16, "Accl3": torch.float32},
        ),
    ],
)
def test_state_has_the_types_asked_for(name, arguments, types):
    actual, training = run(getattr(optim, name), {"lr": 0.01, **arguments})
    for slot, dtype in types.items():
        assert training.state[f"{slot}___a"].dtype == dtype
    wide = {k: torch.float32 if v == F16 else v for k, v in arguments.items()}
    exact, _ = run(getattr(optim, name), {"lr": 0.01, **wide})
    assert any(not torch.equal(actual[n], exact[n]) for n in SHAPES)
    # Rounding a mean to 11 bits moves a step of 0.01 by a small part of it.
    for key in SHAPES:
        torch.testing.assert_close(actual[key], exact[key], rtol=0.0, atol=2e-3)


def test_a_type_of_rmsprops_second_mean_has_no_effect():
    arguments = {"centered": True, "second_order_momentum_accum_type": F16}
    _, training = run(optim.RMSprop, arguments, steps=1)
    assert training.state["Accl2___a"].dtype == torch.float32


SECOND, FIRST = (f"{n}_order_momentum_accum_type" for n in ("second", "first"))


@pytest.mark.parametrize(
    ("cls", "narrow"),
    [
        (optim.Adam, SECOND),
        (optim.AdamW, SECOND),
        (optim.LAMB, SECOND),
        (optim.RMSprop, FIRST),
    ],
)
def test_a_small_eps_is_0_beside_float16_means_of_squares(cls, narrow):
    """PopART, `adamupdaterx.cpp`, `rmspropupdaterx.cpp`: 0 / 0 then."""
    for arguments, is_finite in (({narrow: F16}, False), ({}, True)):
        training = one_weight(cls, [1.0], **arguments)
        training.step({"w": torch.zeros(1)})
        assert bool(torch.isfinite(training.weights["w"])) is is_finite


def test_factors_are_rounded_as_float16_state_is():
    factor = 1e-8  # 0 in float16, where 100 times as much is not
    arguments = {"lr": 1.0, "momentum": factor, "velocity_accum_type": F16}
    sgd = one_weight(optim.SGD, [1.0], **arguments)
    arguments = {"betas": (factor, factor), "eps": 0.1, FIRST: F16, SECOND: F16}
    adam = one_weight(optim.Adam, [1.0], **arguments)
    for training in (sgd, adam):
        for gradient in (100.0, 0.0):
            training.step({"w": torch.tensor([gradient])})
    states = {**adam.state, "velocity": sgd.state["Accl1___w"]}
    assert not any(states[n] for n in ("velocity", "Accl1___w", "Accl2___w"))


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


@pytest.mark.parametrize(("name", "arguments"), STATEFUL)
def test_a_resumed_run_equals_an_unbroken_one_to_the_bit(name, arguments, caplog):
    make = of(getattr(optim, name), **arguments)
    training = Training(make)
    for step in range(2):
        training.step(make_gradients(step))
    resumed = Training(make, training.weights)
    resumed.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    for step in (2, 3):
        training.step(make_gradients(step))
        resumed.step(make_gradients(step))
    weights, expected = resumed.weights, training.weights
    assert all(torch.equal(weights[n], expected[n]) for n in SHAPES)
    assert not caplog.records


def keys(cls, arguments):
    _, training = run(cls, arguments, steps=1)
    ends = ("___a", "FLOAT")
    parts = training.state, training.values
    return [{key for key in part if key.endswith(ends)} for part in parts]


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


def test_loaded_hyper_parameters_never_reach_the_device():
    """PopTorch, `writeOptimizerState`; PopART, `updateOptimizerFromHost`."""
    source = one_weight(optim.SGD, [0.0], lr=0.25, loss_scaling=8.0)
    source.step({"w": torch.tensor([0.0])})
    training = one_weight(optim.SGD, [0.0], lr=0.5, loss_scaling=2.0)
    training.optimizer.load_state_dict(source.optimizer.state_dict())
    training.step({"w": torch.tensor([1.0])})
    assert training.weights["w"].item() == -0.5


def test_missing_names_are_skipped_with_a_warning(caplog):
    training = Training(of(optim.Adam, lr=0.1))
    training.step(make_gradients(0))
    before = copy.deepcopy(training.optimizer.state_dict())
    partial = {n: t for n, t in before["ipu_state"].items() if n != "Accl1___a"}
    partial = {n: torch.zeros_like(t) for n, t in partial.items()}
    values = {"unknown": torch.tensor(1.0)}
    training.optimizer.set_state_dict({"ipu_state": partial, "ipu_param": values})
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        training.step({n: torch.zeros(shape) for n, shape in SHAPES.items()})
    after = training.state
    expected = 0.9 * before["ipu_state"]["Accl1___a"]
    torch.testing.assert_close(after["Accl1___a"], expected)
    assert not after["Accl1___b"].any()
    start = "writeOptimizerState: ignoring missing"
    assert f"{start} state Accl1___a" in caplog.text
    assert f"{start} parameter learningRate___specific___a" in caplog.text


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, optim.LAMB])
@pytest.mark.parametrize(("beta", "steps"), [(0.5, -1.0), (0.5, -2.0), (0.0, -2.0)])
def test_a_state_that_makes_no_sense_gives_no_numbers_and_no_error(cls, beta, steps):
    training = Training(of(cls, betas=(beta, beta)))
    training.step(make_gradients(0))
    state = copy.deepcopy(training.optimizer.state_dict())
    state["ipu_state"]["Step___a"].fill_(steps)
    training.optimizer.load_state_dict(state)
    training.step(make_gradients(0))
    assert not torch.isfinite(training.weights["a"]).all()


def test_states_of_another_shape_are_refused():
    training = Training(of(optim.Adam, lr=0.1))
    training.step(make_gradients(0))
    state = copy.deepcopy(training.optimizer.state_dict())
    state["ipu_state"]["Accl1___a"] = torch.zeros(1)
    training.optimizer.load_state_dict(state)
    with pytest.raises(Error, match="Accl1___a has shape"):
        training.step(make_gradients(0))


# Layouts in memory, which torch's fused kernels know nothing of -----------------------


def lay_out(tensor, layout):
    """The same values in other places of memory."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "channels_last" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "sliced" and tensor.dim():
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.contiguous()


class Loss(torch.nn.Module):
    """Its gradients are laid out as the operations leave them."""

    def __init__(self, shapes, layout):
        super().__init__()
        weights = make_weights({f"w{i}": shape for i, shape in enumerate(shapes)})
        for name, weight in weights.items():
            parameter = torch.nn.Parameter(lay_out(weight, layout))
            self.register_parameter(name, parameter)

    def forward(self, x):
        sums = []
        for weight in self.parameters():
            products = weight * weight.sin() * x.sum()
            if weight.dim() > 1:
                products = products.transpose(0, -1) + 1.5 * weight.transpose(0, -1)
            sums.append((products * 0.1).sum() + weight.sum())  # expanded gradients too
        return identity_loss(torch.stack(sums).sum(), reduction="sum")


SIZES = st.integers(1, 4)
LAYOUTS = st.sampled_from(["contiguous", "transposed", "channels_last", "sliced"])
OPTIMIZERS = st.sampled_from(
    [
        ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("Adam", {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-2}),
        ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-2}),
        ("RMSprop", {"lr": 0.01, "momentum": 0.5, "eps": 1e-2}),
        ("LAMB", {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-2}),
    ]
)


@quick
@given(
    st.lists(
        st.one_of(st.just(()), st.tuples(SIZES, SIZES), st.tuples(*[SIZES] * 4)),
        min_size=1,
        max_size=3,
    ),
    LAYOUTS,
    OPTIMIZERS,
    st.sampled_from([None, 2.0]),
)
def test_updates_are_torchs_whatever_the_layout(shapes, layout, optimizer, largest):
    name, arguments = optimizer
    model, twin = Loss(shapes, layout), Loss(shapes, layout)
    clips = {"max_grad_norm": largest} if name in ("Adam", "AdamW") else {}
    ours = getattr(optim, name)(model.parameters(), **arguments, **clips)
    executor = trainingModel(model, optimizer=ours)
    decay = arguments["weight_decay"] if name == "Adam" and largest else 0.0
    if decay:  # a device clips what has the decay already
        arguments = {**arguments, "weight_decay": 0.0}
    reference = getattr(optim, name)(twin.parameters(), **arguments)  # of the host
    for step in range(3):
        x = torch.tensor([1.0 + step])
        executor(x)
        reference.zero_grad()
        twin(x).backward()
        for weight in twin.parameters():
            weight.grad.add_(weight.data, alpha=decay)
        if clips and largest:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), largest)
        reference.step()
    executor.copyWeightsToHost()
    for weight, expected in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(weight.data, expected.data, rtol=2e-5, atol=1e-5)


VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.mark.skipif(VERSION < (2, 4), reason="has no fused kernels for processors")
@pytest.mark.parametrize(
    ("name", "arguments", "kernel"),
    [
        ("Adam", {"lr": 0.1, "weight_decay": 0.1}, "aten::_fused_adamw_"),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, "aten::_fused_sgd_"),
    ],
)
def test_kernels_are_what_runs(name, arguments, kernel):
    training = Training(of(getattr(optim, name), **arguments))
    training.step(make_gradients(0))
    with torch.profiler.profile() as profile:
        training.step(make_gradients(1))
    fused = [event.key for event in profile.key_averages() if "fused" in event.key]
    assert fused == [kernel]
