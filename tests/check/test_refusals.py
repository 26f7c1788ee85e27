# SPDX-License-Identifier: Apache-2.0
"""What PopTorch passes over without a word is refused."""

from __future__ import annotations

import pytest
import torch

from ipufit import ConfigError, IPUConfig, IPUModel, UnsupportedError, poptorch
from tests import reference

X, Y = torch.randn(8, 3), torch.randn(8, 2)
IS_EMULATED = poptorch.__name__ == "ipufit.emulator"


class Network(torch.nn.Module):
    """A linear layer, and what a test does to its result."""

    def __init__(self, change=lambda hidden: hidden):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.change = change

    def forward(self, x):
        return self.change(self.layer(x)) * 1.0


def fit(module, loss="mse", **config):
    model = reference.compiled(module, micro_batch_size=2, **config, loss=loss)
    model.fit(X, Y, verbose=0)
    return model


def hooked(hidden):
    hidden.register_hook(lambda gradient: gradient * 0.0)
    return hidden


def kept(hidden):
    hidden.retain_grad()
    return hidden


@pytest.mark.parametrize("change", [hooked, kept])
def test_a_hook_in_forward_is_refused_with_its_line(change):
    with pytest.raises(UnsupportedError, match=r"forward \(test_refusals.py:\d+: hid"):
        fit(Network(change))


def test_a_hook_in_a_loss_is_refused():
    with pytest.raises(UnsupportedError, match="register_hook"):
        fit(Network(), lambda outputs, targets: (hooked(outputs) - targets).sum())


def test_a_hook_in_forward_is_none_of_evaluation_s_business():
    model = IPUModel(
        Network(lambda hidden: hooked(hidden) if hidden.requires_grad else hidden),
        IPUConfig(micro_batch_size=2),
    )
    model.compile("sgd", "mse")
    assert model.evaluate(X, Y, verbose=0)["loss"] > 0


@pytest.mark.parametrize(
    "name", ["register_hook", "register_post_accumulate_grad_hook"]
)
def test_a_hook_on_a_weight_is_refused_by_the_weight_s_name(name):
    module = Network()
    if not hasattr(torch.Tensor, name):
        pytest.skip("not in this torch")
    handle = getattr(module.layer.weight, name)(lambda gradient: None)
    with pytest.raises(
        UnsupportedError, match=r"weight 'layer\.weight' has a gradient"
    ):
        fit(module)
    handle.remove()
    fit(module)


@pytest.mark.parametrize(
    "name",
    ["register_full_backward_hook", "register_full_backward_pre_hook"],
)
def test_a_backward_hook_of_a_module_is_refused_by_its_name(name):
    module = Network()
    getattr(module.layer, name)(lambda *_: None)
    with pytest.raises(UnsupportedError, match="module 'layer' has a backward hook"):
        fit(module)


def test_a_backward_hook_of_all_modules_is_refused():
    handle = torch.nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(UnsupportedError, match="All modules"):
            fit(Network())
    finally:
        handle.remove()
    fit(Network())


@pytest.mark.skipif(not IS_EMULATED, reason="this trace doesn't note dependencies")
def test_a_loss_without_gradient_is_refused():
    with pytest.raises(ConfigError, match="the loss depends on no weight"):
        fit(Network(torch.Tensor.detach))


def test_a_gradient_of_zero_is_one_as_in_torch():
    fit(Network(torch.sign))


def test_frozen_weights_are_refused():
    module = Network().requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of the module requires"):
        fit(module)
    fit(module.requires_grad_(True))


def test_a_layer_that_is_frozen_as_in_keras_is_refused():
    module = Network()
    module.layer.trainable = False
    with pytest.raises(ConfigError, match=r"^layer has trainable = False, which torch"):
        fit(module)
    module.layer.trainable = True
    fit(module)


def test_a_frozen_layer_may_have_any_attribute():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), Network())
    module[0].requires_grad_(False).trainable = False
    fit(module)
    module.trainable = False  # of which only a part is frozen
    fit(module)


def test_a_fit_without_gradients_around_it_trains():
    module = Network()
    before = module.layer.weight.detach().clone()
    with torch.no_grad():
        fit(module)
    assert not torch.equal(module.layer.weight, before)


def narrow(hidden):
    with torch.autocast("cpu"):
        return hidden @ torch.eye(2).to(hidden.device)


def penalised(hidden):
    gradient = torch.autograd.grad(hidden.sum(), hidden, create_graph=True)[0]
    return hidden + gradient.norm()


class InferenceMode(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def forward(self, x):
        with torch.inference_mode():
            second = torch.relu(self.second(x))
        return self.first(x) - second


@pytest.mark.parametrize("use", ["fit", "evaluate"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Network(narrow), r"autocast.*\(test_refusals.py:\d+: "),
        (InferenceMode, r"inference_mode\(\) .*second\(x\)"),
    ],
    ids=["autocast", "inference mode"],
)
def test_what_forward_can_not_do_is_refused_with_its_line(make, message, use):
    model = reference.compiled(make(), IPUConfig(micro_batch_size=2), loss="mse")
    with pytest.raises(UnsupportedError, match=message):
        getattr(model, use)(X, Y, verbose=0)


def test_training_refuses_gradients_in_forward_with_their_line():
    message = r"autograd\.grad\(\) was called in training \(test_refusals\.py:\d+: grad"
    with pytest.raises(UnsupportedError, match=message):
        fit(Network(penalised))


def test_autocast_is_refused_in_predict_too():
    with pytest.raises(UnsupportedError, match="autocast"):
        IPUModel(Network(narrow)).predict(X, verbose=0)


def synchronised():
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.SyncBatchNorm(2))


def test_norms_over_replicas_are_refused():
    with pytest.raises(UnsupportedError, match=r"1 \(SyncBatchNorm\) over 2 replicas"):
        fit(synchronised(), replicas=2)


def test_a_frozen_synchronised_norm_needs_no_statistics():
    module = synchronised()
    module[1].eval()
    module.requires_grad_(False)
    fit(torch.nn.Sequential(*module, torch.nn.Linear(2, 2)), replicas=2)


@pytest.mark.skipif(not IS_EMULATED, reason="the core's stand-in can't trace in it")
def test_inference_mode_around_a_run_is_fine():
    module = Network()
    model = IPUModel(module, IPUConfig(micro_batch_size=2))
    with torch.inference_mode():
        predicted = model.predict(X, verbose=0)
        torch.testing.assert_close(predicted, module(X))


def batch_norms():
    return torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    )


def tied_means():
    module = batch_norms()
    module[2].running_mean = module[1].running_mean
    return module


def one_norm_twice():
    module = batch_norms()
    module[2] = module[1]
    return module


def tied_where_no_state_shows_it():
    module = batch_norms()
    module.register_buffer("mean", module[1].running_mean, persistent=False)
    return module


@pytest.mark.parametrize("use", ["fit", "predict"])
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (tied_means, "1.running_mean and 2.running_mean"),
        (one_norm_twice, "1.running_mean and 2.running_mean"),
        (tied_where_no_state_shows_it, "mean and 1.running_mean"),
    ],
)
def test_a_buffer_under_two_names_is_refused(make, names, use):
    model = reference.compiled(make(), IPUConfig(micro_batch_size=2), loss="mse")
    with pytest.raises(UnsupportedError, match=f"^{names} are the same buffer"):
        getattr(model, use)(*(X, Y)[: 1 if use == "predict" else 2], verbose=0)
