# SPDX-License-Identifier: Apache-2.0
"""The update that each form of a loss makes: plain torch's, to 1e-5.

PopTorch drops what no output depends on before it looks for the loss, and takes the
result of a built-in loss function for one wherever it is. So these hold the step
against an IPU's rules as the emulator has them, and against PopTorch's own front end
where that is installed.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

from ipufit import ConfigError, IPUConfig, IPUModel, log, poptorch
from tests import reference

ROWS, RATE = 24, 0.1
X, Y = reference.samples(ROWS)
PLANS = {
    "one call": IPUConfig(),
    "parts": IPUConfig(gradient_accumulation=2, replicas=2, device_iterations=1),
}


class Net(nn.Module):
    """Three features to what `head` makes of four."""

    def __init__(self, head=lambda h: h):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.head = head

    def forward(self, x):
        return self.head(self.layer(x))


def probabilities():
    return torch.softmax(torch.randn(ROWS, 4, generator=generator()), dim=-1)


def generator():
    return torch.Generator().manual_seed(5)


def numbers():
    return torch.randn(ROWS, 4, generator=generator())


def smoothed(outputs, targets):
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)


# Name -> what compile() gets, what the outputs are made by, the targets, torch's loss.
FORMS = {
    "named": ("cross_entropy", None, Y, F.cross_entropy),
    "nll": ("nll", lambda h: F.log_softmax(h, -1), Y, F.nll_loss),
    "poisson": ("poisson", None, numbers().abs(), F.poisson_nll_loss),
    "binary": (
        "binary_cross_entropy",
        None,
        numbers().gt(0).float(),
        F.binary_cross_entropy_with_logits,
    ),
    "one-hot targets": (
        "categorical_crossentropy",
        None,
        probabilities(),
        F.cross_entropy,
    ),
    "log_cosh": (
        "log_cosh",
        None,
        numbers(),
        lambda o, t: torch.log(torch.cosh(o - t)).mean(),
    ),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), None, Y, smoothed),
    "batchmean": (
        nn.KLDivLoss(reduction="batchmean"),
        lambda h: F.log_softmax(h, -1),
        probabilities(),
        lambda o, t: F.kl_div(o, t, reduction="batchmean"),
    ),
    "probabilities": (
        lambda o, t: F.cross_entropy(o, t),
        None,
        probabilities(),
        F.cross_entropy,
    ),
}


def trained(loss, head, targets, config, *, x=X, fit=None, **compiled):
    torch.manual_seed(1)
    module = Net(head or nn.Identity())
    model = IPUModel(module, config)
    model.compile(torch.optim.SGD(module.parameters(), RATE), loss, **compiled)
    settings = {"batch_size": ROWS, "shuffle": False, "verbose": 0, **(fit or {})}
    model.fit(x, targets, **settings)
    return module


def assert_moved_as(module, loss_of, x=X):
    """`module` has made one step down the gradient of `loss_of(twin, x)`."""
    torch.manual_seed(1)
    twin = copy.deepcopy(module)
    for part in twin.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    optimizer = torch.optim.SGD(twin.parameters(), RATE)
    loss_of(twin).backward()
    optimizer.step()
    reference.assert_same_weights(module, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("form", FORMS)
def test_an_update_is_that_of_the_mean_loss(form, plan):
    loss, head, targets, torchs = FORMS[form]
    module = trained(loss, head, targets, PLANS[plan])
    assert_moved_as(module, lambda twin: torchs(twin(X), targets))


@pytest.mark.parametrize("plan", PLANS)
def test_a_sum_is_added_up_over_the_parts_of_a_batch(plan):
    module = trained(nn.MSELoss(reduction="sum"), None, numbers(), PLANS[plan])
    assert_moved_as(
        module, lambda twin: F.mse_loss(twin(X), numbers(), reduction="sum")
    )


@pytest.mark.parametrize("plan", PLANS)
def test_a_weight_on_the_only_loss_counts(plan):
    module = trained("cross_entropy", None, Y, PLANS[plan], loss_weights=0.25)
    assert_moved_as(module, lambda twin: 0.25 * F.cross_entropy(twin(X), Y))


@pytest.mark.parametrize("plan", PLANS)
def test_padding_counts_nothing(plan):
    settings = {"drop_last": "pad"}
    module = trained("cross_entropy", None, Y[:20], PLANS[plan], x=X[:20], fit=settings)
    assert_moved_as(module, lambda twin: F.cross_entropy(twin(X[:20]), Y[:20]))


# Built-in losses beside the loss -----------------------------------------------------


class Logging(Net):
    def forward(self, x):
        outputs = super().forward(x)
        log("distance", F.mse_loss(outputs, outputs.detach() * 0.5))
        return outputs


def own_distance(outputs, targets):
    return F.l1_loss(outputs, targets.reshape(-1, 1).to(outputs.dtype).expand(-1, 4))


def test_built_in_losses_in_metrics_and_logs_are_not_minimised():
    """PopTorch takes them for losses too: "Multiple independent losses"."""
    torch.manual_seed(1)
    module = Logging()
    model = IPUModel(module)
    model.compile(
        torch.optim.SGD(module.parameters(), RATE),
        "cross_entropy",
        metrics=[own_distance, F.cross_entropy],
    )
    untrained = copy.deepcopy(module)
    history = model.fit(X, Y, batch_size=ROWS, shuffle=False, verbose=0).history
    assert_moved_as(module, lambda twin: F.cross_entropy(twin.layer(X), Y))
    with torch.no_grad():
        outputs = untrained.layer(X)
    assert history["own_distance"] == [
        pytest.approx(own_distance(outputs, Y).item(), rel=1e-5)
    ]
    assert history["cross_entropy"] == pytest.approx(history["loss"], rel=1e-5)
    expected = F.mse_loss(outputs, outputs * 0.5).item()
    assert history["distance"] == [pytest.approx(expected, rel=1e-5)]


def test_a_metric_that_is_not_finite_leaves_the_update_alone():
    def endless(outputs, targets):
        return own_distance(outputs, targets) / 0.0

    module = trained("cross_entropy", None, Y, IPUConfig(), metrics=[endless])
    assert_moved_as(module, lambda twin: F.cross_entropy(twin(X), Y))


# Whole numbers ------------------------------------------------------------------------


def cut_off(outputs, targets):
    return (outputs.argmax(-1) == targets).sum() / len(targets)


def test_a_metric_that_divides_whole_numbers_is_refused_when_it_is_traced():
    model = reference.compiled(Net(), metrics=[cut_off])
    before = reference.weights(model.module)
    with pytest.raises(ConfigError, match=r"'cut_off' divides.*float\(\)\.mean"):
        model.fit(X, Y, batch_size=ROWS, verbose=0)
    after = reference.weights(model.module)
    assert all(torch.equal(after[name], before[name]) for name in before)
    # The host divides exactly.
    figures = model.evaluate(X, Y, verbose=0)
    with torch.no_grad():
        right = (model.module(X).argmax(-1) == Y).float().mean().item()
    assert figures["cut_off"] == pytest.approx(right, rel=1e-5)


# Blocks -------------------------------------------------------------------------------


class Closed(nn.Module):
    """Two blocks, closed at their ends; its own loss, and something logged."""

    def __init__(self, *, owns_loss):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 4)
        self.owns_loss = owns_loss

    def forward(self, x, labels):
        with poptorch.Block("early", ipu_id=0):
            hidden = torch.tanh(self.first(x))
        with poptorch.Block("late", ipu_id=1):
            outputs = self.second(hidden)
            log("size", outputs.abs().mean())
            if not self.owns_loss:
                return outputs
            return {"loss": F.cross_entropy(outputs, labels), "logits": outputs}


CLOSED = {
    "names": IPUConfig(pipeline=("early", "late")),
    "the module's own": IPUConfig(gradient_accumulation=3, device_iterations=2),
}


@pytest.mark.parametrize("owns_loss", [True, False])
@pytest.mark.parametrize("blocks", CLOSED)
def test_what_ipufit_adds_joins_the_last_block(blocks, owns_loss):
    torch.manual_seed(1)
    module = Closed(owns_loss=owns_loss)
    data = {"x": torch.cat([X, X]), "labels": torch.cat([Y, Y])}
    targets = () if owns_loss else (data["labels"],)
    model = IPUModel(module, CLOSED[blocks])
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    model.compile(optimizer, None if owns_loss else "cross_entropy")
    settings = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    validation = data if owns_loss else (data, *targets)
    model.fit(data, *targets, validation_data=validation, **settings)
    figures = model.evaluate(data, *targets, batch_size=4, verbose=0)
    with torch.no_grad():
        hidden = torch.tanh(module.first(data["x"]))
        outputs = module.second(hidden)
    expected = F.cross_entropy(outputs, data["labels"]).item()
    assert figures["loss"] == pytest.approx(expected, rel=1e-5)
    assert figures["size"] == pytest.approx(outputs.abs().mean().item(), rel=1e-5)
    predicted = model.predict(data, batch_size=4, verbose=0)
    if owns_loss:
        predicted = predicted["logits"]
    torch.testing.assert_close(predicted, outputs, rtol=1e-5, atol=1e-6)


def test_casts_before_the_first_block_are_inside_it(monkeypatch):
    """Half-precision inputs are cast before the module sees them."""
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "4")
    stages = [poptorch.Stage("0").ipu(1), poptorch.Stage("2").ipu(2)]
    config = IPUConfig(precision="float16", pipeline=stages, device_iterations=2)
    model = reference.compiled(config=config)
    history = model.fit(X, Y, batch_size=12, verbose=0)
    assert history.history["loss"][0] > 0


# What is noisy, and what is rounded ---------------------------------------------------


def test_nothing_that_ipufit_traces_is_warned_of(caplog):
    """PopTorch warns of each function that makes a tensor and isn't told a device."""
    model = IPUModel(Net(), IPUConfig(gradient_accumulation=2))
    metrics = ["accuracy", "cross_entropy", "top_2_accuracy", "f1"]
    model.compile("sgd", "cross_entropy", metrics=metrics)
    weights = torch.ones(20)
    with caplog.at_level("WARNING"):
        model.fit(
            X[:20],
            Y[:20],
            sample_weight=weights,
            batch_size=12,
            verbose=0,
            drop_last="pad",
        )
    assert [r for r in caplog.records if "device" in r.getMessage()] == []
