# SPDX-License-Identifier: Apache-2.0
"""Losses by Keras's names take logits, and refuse what a sigmoid or softmax gives."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

import ipufit
from ipufit import (
    ConfigError,
    DataError,
    IpufitWarning,
    IPUModel,
    NonFiniteLossWarning,
)
from tests import reference

X, Y = reference.samples(16)
LABELS, ONE_HOT = (Y % 2).float(), F.one_hot(Y, 4).float()
CLASSES = ("categorical_crossentropy", "sparse_categorical_crossentropy", "kld")
BINARY = ("bce", "binary_crossentropy", "BinaryCrossentropy")
RUNS = {
    "fit": lambda m, y: m.fit(X, y, batch_size=8, verbose=0),
    "evaluate": lambda m, y: m.evaluate(X, y, verbose=0),
    "train_on_batch": lambda m, y: m.train_on_batch(X, y),
    "after predict": lambda m, y: (m.predict(X, verbose=0), m.test_on_batch(X, y)),
}


def in_runs(*cases):
    """Each case in `fit`, and the first case in every run."""
    in_fit = [("fit", *case) for case in cases[1:]]
    return [*in_fit, *((run, *cases[0]) for run in RUNS)]


class Net(torch.nn.Module):
    def __init__(self, end, width=4):
        super().__init__()
        self.layer = torch.nn.Linear(3, width)
        self.end = end

    def forward(self, x):
        return self.end(self.layer(x))


def model_of(end, loss, width=4):
    return reference.compiled(Net(end, width), loss=loss)


SOFTMAXES = [
    torch.nn.Softmax(-1),
    lambda h: h.softmax(1).float(),
]
SIGMOIDS = [
    torch.nn.Sigmoid(),
    lambda h: h.squeeze(1).sigmoid().reshape(-1, 1),
]
ENDS = [
    *((name, end, "softmax: .*lambda x, y:") for name in CLASSES for end in SOFTMAXES),
    *((name, end, "sigmoid: .*BCELoss") for name in BINARY for end in SIGMOIDS),
]


@pytest.mark.parametrize(
    ("run", "name", "end", "words"),
    [
        *(("evaluate", *case) for case in ENDS[1:-1]),
        *((run, *case) for run in RUNS for case in (ENDS[0], ENDS[-1])),
    ],
)
def test_what_a_softmax_or_sigmoid_gives_is_no_logits(run, name, end, words):
    targets = Y if name.startswith("sparse") else ONE_HOT
    if name in BINARY:
        targets = LABELS[:, None]
    model = model_of(end, name, 1 if name in BINARY else 4)
    match = f"^The loss '{name}' takes logits, .* comes from a {words}"
    with pytest.raises(ConfigError, match=match):
        RUNS[run](model, targets)


@pytest.mark.parametrize("run", ["fit", "evaluate"])
def test_what_is_written_instead_is_right(run):
    logits, squashed = Net(lambda h: h, 1), Net(torch.sigmoid, 1)
    squashed.load_state_dict(logits.state_dict())
    losses = []
    for module, loss in ((logits, "bce"), (squashed, torch.nn.BCELoss())):
        model = reference.compiled(module, loss=loss)
        RUNS[run](model, LABELS[:, None])
        losses.append(model.evaluate(X, LABELS[:, None], verbose=0)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("run", ["fit", "evaluate"])
@pytest.mark.parametrize(
    ("end", "loss"),
    [
        (lambda h: h.softmax(1), "mse"),
        (lambda h: h.softmax(1) * 5, "sparse_categorical_crossentropy"),
        (lambda h: h * h.sigmoid(), "sparse_categorical_crossentropy"),
        (lambda h: h.log_softmax(1), "kl_divergence"),
    ],
)
def test_all_else_is_taken(run, end, loss):
    sparse = loss in ("cross_entropy", "sparse_categorical_crossentropy")
    RUNS[run](model_of(end, loss), Y if sparse else ONE_HOT)


def of_classes(y_true, y_pred):
    return F.cross_entropy(y_pred, y_true, reduction="none")


EACH = functools.partial(F.binary_cross_entropy_with_logits, reduction="none")


@pytest.mark.parametrize(
    ("run", "loss", "end", "targets"),
    in_runs(
        ("cross_entropy", torch.nn.Softmax(-1), Y),
        ("ce", torch.sigmoid, Y),
        (torch.nn.CrossEntropyLoss(), torch.nn.Softmax(-1), Y),
        (F.cross_entropy, torch.nn.Softmax(-1), Y),
        (torch.nn.BCEWithLogitsLoss(), torch.sigmoid, ONE_HOT),
        (F.binary_cross_entropy_with_logits, torch.sigmoid, ONE_HOT),
        (torch.nn.MultiLabelSoftMarginLoss(), torch.sigmoid, ONE_HOT),
        (EACH, torch.sigmoid, ONE_HOT),
        ("kl_div", torch.nn.Softmax(-1), ONE_HOT),
        (of_classes, torch.nn.Softmax(-1), Y),
        (lambda x, y: 2 * F.cross_entropy(x.clamp(0.1), y), torch.nn.Softmax(-1), Y),
    ),
)
def test_losses_by_torchs_names_warn_once(run, loss, end, targets):
    model = model_of(end, loss)
    with pytest.warns(IpufitWarning, match="takes logits, .* comes from a s") as caught:
        _ = RUNS[run](model, targets), RUNS[run](model, targets)
    assert len(caught) == 1


def test_each_output_has_its_own_loss():
    def end(h):
        return {"a": h, "b": h.sigmoid()}

    model, targets = model_of(end, {"a": "bce", "b": torch.nn.BCELoss()}), {}
    for name in ("a", "b"):
        targets[name] = ONE_HOT
    model.fit(X, targets, batch_size=8, validation_split=0.5, verbose=0)
    model.compile("sgd", "bce")
    with pytest.raises(ConfigError, match="module's output 'b' comes from a sigmoid"):
        model.evaluate(X, targets, verbose=0)


@pytest.mark.parametrize(
    ("run", "loss", "targets"),
    in_runs(
        *(("nll", Y), (torch.nn.NLLLoss(), Y), (F.nll_loss, Y)),
        (lambda x, y: F.nll_loss(x, y, reduction="none"), Y),
        (torch.nn.KLDivLoss(reduction="batchmean"), ONE_HOT),
        (lambda x, y: F.kl_div(x, y, reduction="none").sum(1), ONE_HOT),
    ),
)
def test_losses_of_log_probabilities_take_no_softmax(run, loss, targets):
    words = "takes log-probabilities, .* softmax: .* end in log_softmax in the place"
    model = model_of(torch.nn.Softmax(-1), loss)
    with pytest.warns(IpufitWarning, match=words) as caught:
        _ = RUNS[run](model, targets), RUNS[run](model, targets)
    assert len(caught) == 1
    RUNS[run](model_of(torch.nn.LogSoftmax(-1), loss), targets)


def test_weights_and_several_outputs_hide_no_probabilities():
    def end(h):
        return {"a": h, "b": h.softmax(1)}

    def both(outputs, targets):
        errors = [
            F.cross_entropy(outputs[n], targets[n], reduction="none") for n in "ab"
        ]
        return errors[0] + errors[1]

    for loss in (both, {"a": "ce", "b": F.cross_entropy}):
        model = model_of(end, loss)
        with pytest.warns(IpufitWarning, match="comes from a softmax") as caught:
            model.fit(X, {"a": Y, "b": Y}, 8, sample_weight=Y.float(), verbose=0)
        assert len(caught) == 1


MASKED = torch.nn.Sequential(torch.nn.Unflatten(1, (2, 2)), torch.nn.Softmax(-1))
SMOOTH = ONE_HOT * 0.8 + 0.05
LAST = Y.reshape(16, 1).expand(16, 2) % 2
ADVISED = [
    ("ce", torch.nn.Softmax(-1), Y),
    ("sparse_categorical_crossentropy", torch.nn.Softmax(-1), Y),
    ("sparse_categorical_crossentropy", torch.nn.Softmax(-1), Y[:, None]),
    *((loss, torch.nn.Softmax(-1), SMOOTH) for loss in ("kld", "kl_div", "ce")),
    ("categorical_crossentropy", torch.nn.Softmax(-1), SMOOTH),
    ("categorical_crossentropy", torch.nn.Softmax(-1), ONE_HOT),
    ("categorical_crossentropy", MASKED, F.one_hot(LAST, 2).float()),
    ("sparse_categorical_crossentropy", MASKED, LAST),
    (torch.nn.CrossEntropyLoss(), torch.nn.Softmax(-1), Y),
    (of_classes, torch.nn.Softmax(-1), Y),
    ("bce", torch.nn.Sigmoid(), ONE_HOT),
    (torch.nn.MultiLabelSoftMarginLoss(), torch.nn.Sigmoid(), ONE_HOT),
    *((name, torch.nn.Sigmoid(), ONE_HOT) for name in ("dice", "Tversky")),
    ("binary_focal_crossentropy", torch.nn.Sigmoid(), ONE_HOT),
    ("CategoricalFocalCrossentropy", torch.nn.Softmax(-1), ONE_HOT),
]


@pytest.mark.parametrize(("loss", "end", "targets"), ADVISED)
def test_the_loss_that_is_advised_is_that_of_logits(loss, end, targets):
    model = model_of(end, loss)
    with pytest.raises((ConfigError, IpufitWarning)) as raised:
        model.evaluate(X, targets, verbose=0)
    message = str(raised.value)
    code = re.search(r"compile with loss=(.*)\.$", message)[1]
    of_logits = model_of(end[0] if end is MASKED else torch.nn.Identity(), loss)
    of_logits.module.layer.load_state_dict(model.module.layer.state_dict())
    model.compile("sgd", eval(code, {"torch": torch}))
    for _ in range(2):
        figures = [
            each.evaluate(X, targets, verbose=0)["loss"] for each in (model, of_logits)
        ]
        assert figures[0] == pytest.approx(figures[1], rel=1e-4)
        for each in (model, of_logits):
            each.fit(X, targets, batch_size=8, shuffle=False, verbose=0)


@pytest.mark.parametrize("run", ["fit", "evaluate"])
@pytest.mark.parametrize("name", ["dice", "tversky", "Dice", "DiceLoss"])
def test_losses_of_overlap_take_no_probabilities(run, name):
    match = f"^The loss '{name}' takes logits, .* sigmoid: .* Leave the sigmoid out"
    with pytest.raises(ConfigError, match=match):
        RUNS[run](model_of(torch.nn.Sigmoid(), name), ONE_HOT)
    RUNS[run](model_of(torch.nn.Identity(), name), ONE_HOT)


def overlap(outputs, targets):
    shares = outputs.sigmoid()
    common = (shares * targets).sum(1)
    return 1 - 2 * common / (shares.sum(1) + targets.sum(1))


@pytest.mark.parametrize(
    "loss",
    [
        overlap,
        functools.partial(ipufit.losses.tversky, alpha=0.3, beta=0.7),
        lambda x, y: (torch.sigmoid(x) - y).square(),
    ],
)
def test_a_sigmoid_in_the_loss_after_that_of_the_module_is_told_once(loss):
    model = model_of(torch.nn.Sigmoid(), loss)
    words = "takes logits, .* sigmoid: .*, or leave it out of the loss"
    with pytest.warns(IpufitWarning, match=words) as caught:
        model.fit(X, ONE_HOT, batch_size=8, epochs=2, verbose=0)
    assert len(caught) == 1
    model_of(torch.nn.Identity(), loss).fit(X, ONE_HOT, batch_size=8, verbose=0)


def test_gates_in_a_network_may_have_sigmoids_of_sigmoids():
    def step(module, batch):
        x, y = batch
        return F.mse_loss(module(x).sigmoid()[:, 0], y)

    model = IPUModel(Net(torch.sigmoid, 1))
    model.compile("sgd", step=step)
    model.fit(X, LABELS, batch_size=8, verbose=0)


def test_a_sigmoid_before_a_loss_of_classes_has_two_ways_out():
    model = model_of(torch.nn.Sigmoid(), torch.nn.CrossEntropyLoss())
    words = "Leave the sigmoid out .*if each output is a label .*torch.nn.BCELoss"
    with pytest.warns(IpufitWarning, match=words):
        model.fit(X, Y, batch_size=8, verbose=0)
    model.compile("sgd", torch.nn.BCELoss())
    model.fit(X, ONE_HOT, batch_size=8, verbose=0)


def test_losses_in_forward_and_steps_warn_once_a_line():
    class Owner(Net):
        def forward(self, x, y):
            return F.cross_entropy(super().forward(x), y)

    def step(module, batch):
        x, y = batch
        return F.binary_cross_entropy_with_logits(module(x)[:, 0], y)

    model = IPUModel(Owner(torch.nn.Softmax(-1)))
    model.compile("sgd")
    words = r"^cross_entropy\(\) takes logits"
    with pytest.warns(IpufitWarning, match=words) as caught:
        model.fit((X, Y), batch_size=8, epochs=2, verbose=0)
    assert len(caught) == 1
    model = IPUModel(Net(torch.sigmoid, 1))
    model.compile("sgd", step=step)
    with pytest.warns(IpufitWarning, match="what a sigmoid gives") as caught:
        model.fit(X, LABELS, batch_size=8, epochs=2, verbose=0)
    assert len(caught) == 1


@pytest.mark.parametrize("loss", [torch.nn.BCELoss(), F.binary_cross_entropy])
@pytest.mark.parametrize("logit", [-2.0, 2.0])
def test_logits_for_a_loss_of_probabilities_are_told(loss, logit):
    words = "end the module in a sigmoid; or in none, with loss='bce'"
    model = model_of(torch.nn.Identity(), loss, width=1)
    with torch.no_grad():
        model.module.layer.weight.fill_(logit)
        model.module.layer.bias.fill_(0.5)
    x = torch.ones(16, 3)
    with pytest.raises(DataError, match=words):  # torch refuses them in the trace
        model.fit(x, LABELS, batch_size=8, verbose=0)
    x[:8] = 0
    with pytest.warns(NonFiniteLossWarning, match=words):  # and a device makes NaN
        model.fit(x, LABELS, batch_size=8, shuffle=False, verbose=0)
