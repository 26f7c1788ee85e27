# SPDX-License-Identifier: Apache-2.0
"""Names, modules and functions that mean a loss, and what a micro-batch adds."""

from __future__ import annotations

import collections
import functools
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from ipufit import (
    ConfigError,
    DataError,
    IPUConfig,
    IPUModel,
    Optimizer,
    UnknownNameError,
    UnsupportedError,
)
from ipufit.losses import (
    binary_focal_crossentropy,
    categorical_focal_crossentropy,
    resolve_loss,
    smoothed,
)
from tests import reference
from tests.reference import (
    NUM_CLASSES,
    NUM_FEATURES,
    assert_same_weights,
    network,
    samples,
)

pytestmark = pytest.mark.floor

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.2, -3.0], [1.0, 1.0, 1.0]])
CLASSES = torch.tensor([0, 1, 2])
ONE_HOT = torch.eye(3)
NUMBERS = torch.tensor([[0.5], [-1.0], [3.0]])
TRUTHS = torch.tensor([1, 0, 1])
FLAT, FLOATS = NUMBERS[:, 0], TRUTHS.float()


def _class_indices(reduction):
    return F.cross_entropy(LOGITS, CLASSES, reduction=reduction)


def _shares(reduction):
    return F.cross_entropy(LOGITS, ONE_HOT, reduction=reduction)


def _log_shares(reduction):
    return F.nll_loss(LOGITS, CLASSES, reduction=reduction)


def _of_numbers(function):
    return lambda reduction: function(FLAT, FLOATS, reduction=reduction)


def _by_formula(formula):
    def expected(reduction):
        values = formula()
        return values if reduction == "none" else values.mean()

    return expected


SIGNS = 2 * FLOATS - 1
BY_FORMULA = {
    ("mape", "mean_absolute_percentage_error"): (
        NUMBERS,
        TRUTHS + 1,
        lambda: 100 * (FLAT - FLOATS - 1).abs() / (FLOATS + 1),
    ),
    ("msle", "mean_squared_logarithmic_error"): (
        NUMBERS.abs(),
        TRUTHS,
        lambda: ((1 + FLAT.abs()).log() - (1 + FLOATS).log()) ** 2,
    ),
    ("log_cosh",): (NUMBERS, TRUTHS, lambda: (FLAT - FLOATS).cosh().log()),
    ("hinge",): (NUMBERS, TRUTHS, lambda: (1 - SIGNS * FLAT).relu()),
    ("squared_hinge",): (NUMBERS, TRUTHS, lambda: (1 - SIGNS * FLAT).relu() ** 2),
    ("kl_divergence", "kl_div"): (
        LOGITS,
        ONE_HOT,
        lambda: -LOGITS.log_softmax(1).diagonal(),
    ),
    ("binary_focal_crossentropy",): (
        NUMBERS,
        TRUTHS,
        lambda: (
            (FLAT.sigmoid() - FLOATS) ** 2
            * F.binary_cross_entropy_with_logits(FLAT, FLOATS, reduction="none")
        ),
    ),
    ("categorical_focal_crossentropy",): (
        LOGITS,
        ONE_HOT,
        lambda: (
            -0.25
            * (1 - LOGITS.softmax(1).diagonal()) ** 2
            * LOGITS.log_softmax(1).diagonal()
        ),
    ),
    ("categorical_hinge",): (
        LOGITS,
        ONE_HOT,
        lambda: (1 + (LOGITS * (1 - ONE_HOT)).amax(1) - LOGITS.diagonal()).relu(),
    ),
    ("dice", "tversky"): (
        LOGITS,
        ONE_HOT,
        lambda: 1 - 2 * LOGITS.sigmoid().diagonal() / (1 + LOGITS.sigmoid().sum(1)),
    ),
    ("cosine_similarity",): (
        LOGITS,
        ONE_HOT,
        lambda: -LOGITS.diagonal() / LOGITS.norm(dim=1),
    ),
}
EXPECTED = {
    **{
        name: (outputs, targets, _by_formula(formula))
        for names, (outputs, targets, formula) in BY_FORMULA.items()
        for name in names
    },
    "cross_entropy": (LOGITS, CLASSES, _class_indices),
    "sparse_categorical_crossentropy": (LOGITS, CLASSES, _class_indices),
    "categorical_crossentropy": (LOGITS, ONE_HOT, _shares),
    "nll": (LOGITS, CLASSES, _log_shares),
    "nll_loss": (LOGITS, CLASSES, _log_shares),
    **{
        name: (NUMBERS, TRUTHS, _of_numbers(function))
        for function, names in {
            F.mse_loss: ("mse", "mean_squared_error"),
            F.l1_loss: ("mae", "mean_absolute_error", "l1"),
            F.smooth_l1_loss: ("smooth_l1", "huber"),
            F.poisson_nll_loss: ("poisson",),
            F.binary_cross_entropy_with_logits: (
                "bce",
                "binary_cross_entropy",
                "binary_crossentropy",
            ),
        }.items()
        for name in names
    },
}
"""Outputs, targets, and torch's loss of them with a reduction."""


@pytest.mark.parametrize("name", EXPECTED)
def test_a_name_is_torchs_loss_with_weights_as_keras_has_them(name):
    outputs, targets, expected = EXPECTED[name]
    loss = resolve_loss(name)
    terms = loss.terms(outputs, targets, 3)
    torch.testing.assert_close(terms.value.squeeze(), expected("mean"))
    torch.testing.assert_close(terms.total, 3 * expected("mean"))
    weights = torch.tensor([0.5, 0.0, 3.0])
    terms = loss.terms(outputs, targets, 3, weights)
    weighted = expected("none") * weights
    torch.testing.assert_close(terms.value, weighted.sum() / 3)
    torch.testing.assert_close(terms.total, weighted.sum())
    share = torch.tensor([1.5, 1.5, 0.0])  # two real rows of three
    terms = loss.terms(outputs, targets, 3, share=share)
    real = expected("none")[:2]
    torch.testing.assert_close(terms.value, real.mean())
    torch.testing.assert_close(terms.total, real.sum())


class Factor(nn.Module):
    """Multiplies its input by a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.weight


def test_a_device_computes_every_loss_as_torch_does():
    model = IPUModel(Factor(), IPUConfig(micro_batch_size=1))
    for name, (outputs, targets, _) in EXPECTED.items():
        is_smoothed = "crossentropy" in name and "focal" not in name
        smoothed = {"label_smoothing": 0.1} if is_smoothed else {}
        model.compile("sgd", name, **smoothed)
        report = model.check(outputs, targets, 1, sample_weight=torch.ones(3))
        assert [one for one in report.findings if one.topic == "numbers"] == [], name
        assert not report.is_refused, name


SYNONYMS = {
    "BCE": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy",
    "binary_cross_entropy_with_logits": "binary_cross_entropy",
    "ce": "cross_entropy",
    "CrossEntropyLoss": "cross_entropy",
    "HuberLoss": "huber",
    "kld": "kl_divergence",
    "KullbackLeiblerDivergence": "kl_divergence",
    "kullback_leibler_divergence": "kl_divergence",
    "L1Loss": "mae",
    "l1_loss": "mae",
    "mse_loss": "mse",
    "MSELoss": "mse",
    "MeanSquaredError": "mse",
    "NLLLoss": "nll",
    "poisson_nll_loss": "poisson",
    "PoissonNLLLoss": "poisson",
    "smooth_l1_loss": "smooth_l1",
    "SmoothL1Loss": "smooth_l1",
    "SparseCategoricalCrossentropy": "sparse_categorical_crossentropy",
}


@pytest.mark.parametrize("name", SYNONYMS)
def test_other_words_for_a_loss_are_known(name):
    outputs, targets, _ = EXPECTED[SYNONYMS[name]]
    expected = resolve_loss(SYNONYMS[name]).terms(outputs, targets, 3)
    assert resolve_loss(name).terms(outputs, targets, 3) == expected
    torchs = getattr(torch.nn, name, None)
    if torchs is not None:  # the class of torch means the same
        like = targets if targets.dtype == CLASSES.dtype else targets.to(outputs.dtype)
        if name not in ("CrossEntropyLoss", "NLLLoss"):
            like = like.reshape(outputs.shape).to(outputs.dtype)
        torch.testing.assert_close(expected.value, torchs()(outputs, like))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "BCELoss",
            r"'binary_cross_entropy' takes logits.*torch.nn.BCELoss\(\) itself",
        ),
        ("KLDivLoss", r"torch.nn.KLDivLoss\(reduction='batchmean'\) itself"),
        ("CTCLoss", "lengths too.*lambda x, y"),
        ("SoftMarginLoss", r"pass torch.nn.SoftMarginLoss\(\) itself"),
    ],
)
def test_a_name_that_means_something_else_says_what_to_write(name, advice):
    with pytest.raises(ConfigError, match=f"^loss='{name}'.*{advice}"):
        resolve_loss(name)


@pytest.mark.parametrize(
    "name", ["cross_entropy", "nll", "sparse_categorical_crossentropy"]
)
def test_classes_may_have_an_axis_of_one_element(name):
    loss = resolve_loss(name)
    column = CLASSES.reshape(3, 1)
    for known in ({}, {"weights": torch.tensor([1.0, 0.0, 2.0])}):
        expected = loss.terms(LOGITS, CLASSES, 3, **known)
        assert loss.terms(LOGITS, column, 3, **known) == expected


def test_so_may_those_of_positions():
    outputs = torch.randn(2, 4, 5)  # rows, classes, positions
    targets = torch.tensor([[0, 1, -100, 3, 2], [0, 0, 1, 2, -100]])
    loss = resolve_loss("cross_entropy")
    expected = loss.terms(outputs, targets, 2)
    torch.testing.assert_close(
        expected.value, F.cross_entropy(outputs, targets, ignore_index=-100)
    )
    assert loss.terms(outputs, targets[:, None], 2) == expected


@pytest.mark.parametrize("shape", [(4, 1), (4, 1, 3, 3)])
@pytest.mark.parametrize(
    "loss",
    [
        *("ce", "cross_entropy", "crossentropy", "categorical_crossentropy", "nll"),
        torch.nn.CrossEntropyLoss(),
        torch.nn.NLLLoss(),
        F.cross_entropy,
    ],
)
def test_one_class_is_refused_with_targets_of_0_and_1(loss, shape):
    if loss == "categorical_crossentropy":
        shape = (*shape[:1], *shape[2:], 1)  # its classes are last
    model = IPUModel(torch.nn.Identity())
    model.compile("sgd", loss)
    with pytest.raises(DataError, match=r"one class, .* 'binary_cross_entropy'"):
        model.evaluate(torch.randn(shape), torch.ones(shape), verbose=0)


def test_one_class_is_no_choice():
    with pytest.raises(DataError, match=r"one class, .* 'binary_cross_entropy'"):
        resolve_loss("cross_entropy").terms(NUMBERS, TRUTHS[:, None], 3)


def test_every_name_is_tested():
    with pytest.raises(UnknownNameError) as caught:
        resolve_loss("")
    known = str(caught.value).split("Known: ")[1].rstrip(".").split(", ")
    assert sorted(EXPECTED) == known


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(UnknownNameError, match=r"'crossentrpy'.*'cross_entropy'"):
        resolve_loss("crossentrpy")


@pytest.mark.parametrize(
    ("loss", "words"),
    [(3, "neither a name"), (None, "neither a name"), (["mse"], "takes one loss")],
)
def test_what_is_no_loss_is_refused(loss, words):
    with pytest.raises(ConfigError, match=words):
        resolve_loss(loss)


# Reductions -----------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_weights_and_shares_go_together(reduction, weighted):
    loss = resolve_loss(torch.nn.MSELoss(reduction=reduction))
    outputs = torch.arange(8.0).reshape(4, 2)
    weights = torch.tensor([1.0, 2.0, 0.5, 9.0]) if weighted else None
    share = torch.tensor([4 / 3, 4 / 3, 4 / 3, 0.0])
    terms = loss.terms(outputs, torch.zeros(4, 2), 4, weights, share)
    squares = outputs.square() * (1.0 if weights is None else weights[:, None])
    each = squares.sum(dim=1) if reduction == "sum" else squares.mean(dim=1)
    total = each[:3].sum()
    torch.testing.assert_close(terms.total, total)
    expected = total if reduction == "sum" else total / 3
    torch.testing.assert_close(terms.value, expected)


@pytest.mark.parametrize(
    "kind", [torch.nn.KLDivLoss, torch.nn.CrossEntropyLoss, torch.nn.MSELoss]
)
@given(st.data())
def test_unit_weights_change_nothing(kind, data):
    is_kl = kind is torch.nn.KLDivLoss  # it warns of "mean"
    reductions = ["batchmean" if is_kl else "mean", "sum", "none"]
    loss = resolve_loss(kind(reduction=data.draw(st.sampled_from(reductions))))
    shape = data.draw(st.sampled_from([(3, 4), (3, 4, 5), (3, 4, 2, 2)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    outputs = torch.randn(shape, generator=generator)
    targets = torch.rand(shape, generator=generator).softmax(dim=1)
    plain = loss.terms(outputs, targets, 3)
    for known in ({"weights": torch.ones(3)}, {"share": torch.ones(3)}):
        terms = loss.terms(outputs, targets, 3, **known)
        torch.testing.assert_close(terms.value, plain.value)
        torch.testing.assert_close(terms.total, plain.total)


def test_the_mean_over_the_batch_is_no_mean_over_elements():
    loss = resolve_loss(torch.nn.KLDivLoss(reduction="batchmean"))
    outputs, targets = LOGITS.log_softmax(dim=1), LOGITS.flip(0).softmax(dim=1)
    weights = torch.tensor([1.0, 2.0, 0.0])
    each = F.kl_div(outputs, targets, reduction="none").sum(dim=1)
    terms = loss.terms(outputs, targets, 3, weights)
    torch.testing.assert_close(terms.value, (each * weights).sum() / 3)


def test_positions_may_have_weights_of_their_own():
    outputs = torch.randn(2, 4, 5)  # rows, classes, positions
    targets = torch.randint(0, 4, (2, 5))
    weights = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0], [2.0, 1.0, 1.0, 1.0, 0.0]])
    terms = resolve_loss("cross_entropy").terms(outputs, targets, 2, weights)
    each = F.cross_entropy(outputs, targets, reduction="none")
    torch.testing.assert_close(terms.value, (each * weights).mean())


def test_a_sum_may_come_as_one_value_per_sample_too():
    class Squares:
        reduction = "sum"

        def __call__(self, outputs, targets):
            return (outputs - targets).square()

    terms = resolve_loss(Squares()).terms(NUMBERS, torch.zeros(3, 1), 3)
    assert terms.value == terms.total == NUMBERS.square().sum()


def half_square(outputs, targets):
    return (outputs - targets).square().mean(dim=1) / 2


def test_a_function_may_give_one_value_per_sample():
    loss = resolve_loss(half_square)
    assert loss.name == "half_square"
    assert not loss.is_per_output
    each = NUMBERS.square()[:, 0] / 2
    terms = loss.terms(NUMBERS, torch.zeros(3, 1), 3)
    torch.testing.assert_close(terms.value, each.mean())
    weights = torch.tensor([1.0, 0.0, 2.0])
    terms = loss.terms(NUMBERS, torch.zeros(3, 1), 3, weights)
    torch.testing.assert_close(terms.value, (each * weights).mean())


# What can't be weighted ------------------------------------------------------------


@pytest.mark.parametrize(
    "known", [{"weights": torch.ones(3)}, {"share": torch.tensor([1.5, 1.5, 0.0])}]
)
def test_one_value_for_the_batch_can_not_be_weighted(known):
    loss = resolve_loss(lambda outputs, targets: (outputs - targets).mean())
    with pytest.raises(UnsupportedError, match=r"shape \(\) for 3 samples.*'pad'"):
        loss.terms(NUMBERS, NUMBERS, 3, **known)


@pytest.mark.parametrize("shape", [(2,), (3, 2), (3, 1, 2)])
def test_weights_of_other_shapes_are_refused(shape):
    with pytest.raises(DataError, match="one weight per sample"):
        resolve_loss("cross_entropy").terms(LOGITS, CLASSES, 3, torch.ones(shape))


@pytest.mark.parametrize("width", [(), (1,), (4,), (2, 4)])
@pytest.mark.parametrize("loss", ["mse", "msle", "bce", nn.L1Loss(), nn.HuberLoss()])
def test_axes_of_size_1_of_weights_make_no_difference(loss, width):
    generator = torch.Generator().manual_seed(2)
    outputs, targets = torch.rand(2, 6, *width, generator=generator)
    weights = torch.rand(6, generator=generator)
    loss = resolve_loss(loss)
    expected = loss.terms(outputs, targets, 6, weights)
    for shape in [(6, 1), (6, 1, 1)]:
        terms = loss.terms(outputs, targets, 6, weights.reshape(shape))
        assert terms == expected


# Targets that don't count -----------------------------------------------------


def token_data(rows=24):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, NUM_FEATURES, generator=generator)
    y = torch.randint(0, NUM_CLASSES, (rows,), generator=generator)
    y[::3] = -100
    y[:4] = -100  # a whole micro-batch of 4
    return x, y


@pytest.mark.parametrize(
    ("loss", "batch_size"),
    [
        ("cross_entropy", 4),
        (torch.nn.CrossEntropyLoss(), 24),
        ("categorical_crossentropy", 24),
    ],
)
def test_ignored_targets_count_in_no_figure(loss, batch_size):
    x, y = token_data()
    module = network()
    model = reference.compiled(module, IPUConfig(micro_batch_size=4), loss=loss)
    expected = float(F.cross_entropy(module(x), y).detach())
    figures = model.evaluate(x, y, batch_size=batch_size, verbose=0)
    assert figures["loss"] == pytest.approx(expected, rel=1e-5)
    model.compile(torch.optim.SGD(module.parameters(), lr=0.0), loss)
    history = model.fit(x, y, batch_size=batch_size, verbose=0)
    assert history.history["loss"] == [pytest.approx(expected, rel=1e-5)]


def test_a_micro_batch_of_ignored_targets_alone_trains_nothing():
    x, y = token_data(4)
    module = network()
    before = [p.detach().clone() for p in module.parameters()]
    model = reference.compiled(module)
    history = model.fit(x, y, batch_size=4, verbose=0)
    assert math.isnan(history.history["loss"][0])  # the mean over nothing: no warning
    assert all(map(torch.equal, before, module.parameters()))


def test_ignored_targets_stay_ignored_among_weights_and_padding():
    loss = resolve_loss("cross_entropy")
    targets = torch.tensor([0, -100, 2])
    weights, share = torch.tensor([2.0, 5.0, 1.0]), torch.tensor([1.5, 1.5, 0.0])
    each = F.cross_entropy(LOGITS, targets, reduction="none")
    terms = loss.terms(LOGITS, targets, 3, weights, share)
    torch.testing.assert_close(terms.value, 2 * each[0])
    torch.testing.assert_close(terms.total, 2 * each[0])
    assert float(terms.divisor) == 1


# Shapes and kinds -------------------------------------------------------------


def test_keras_s_crossentropies_have_the_class_axis_last():
    outputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, 2], [3, 0, 1]])
    expected = F.cross_entropy(outputs.movedim(-1, 1), labels)
    for name, targets in (
        ("sparse_categorical_crossentropy", labels),
        ("sparse_categorical_crossentropy", labels.unsqueeze(-1)),
        ("categorical_crossentropy", F.one_hot(labels, 4)),
    ):
        value = resolve_loss(name).terms(outputs, targets, 2).value
        torch.testing.assert_close(value, expected)


def test_whole_numbers_in_the_outputs_shape_are_no_class_indices():
    outputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    targets = F.one_hot(torch.tensor([0, 3, 1]), 4)
    terms = resolve_loss("categorical_crossentropy").terms(outputs, targets, 3)
    torch.testing.assert_close(terms.value, F.cross_entropy(outputs, targets.float()))
    assert float(terms.divisor) == 3


@pytest.mark.parametrize(
    "name",
    [
        "categorical_crossentropy",
        "cosine_similarity",
        "cross_entropy",
        "nll",
        "sparse_categorical_crossentropy",
        *(nn.CrossEntropyLoss(), nn.NLLLoss(reduction="sum"), F.cross_entropy),
        *(nn.MultiLabelSoftMarginLoss(), nn.MultiLabelMarginLoss()),
        *(nn.MultiMarginLoss(), functools.partial(F.cross_entropy, ignore_index=9)),
    ],
)
def test_rows_are_not_taken_for_classes(name):
    with pytest.raises(DataError, match="one value per sample"):
        resolve_loss(name).terms(torch.zeros(4), torch.zeros(4), 4)


def test_directions_are_compared_row_by_row():
    outputs, targets = torch.tensor([[2.0], [3.0], [-1.0]]), torch.tensor([1.0, -1, -4])
    value = resolve_loss("cosine_similarity").terms(outputs, targets, 3).value
    torch.testing.assert_close(value, torch.tensor(-1 / 3))


@pytest.mark.parametrize("name", ["mse", "mae", "binary_crossentropy"])
def test_targets_are_not_scrambled_into_the_outputs_shape(name):
    with pytest.raises(DataError, match="axes of size 1"):
        resolve_loss(name).terms(torch.zeros(4, 2, 3), torch.zeros(4, 3, 2), 4)


def test_numbers_of_classes_for_a_loss_of_numbers_are_refused_with_a_way_out():
    classes = torch.zeros(4, dtype=torch.int64)
    message = r"targets of shape \(4,\) don't fit .* \(4, 3\).* use 'cross_entropy'"
    with pytest.raises(DataError, match=message):
        resolve_loss("mse").terms(torch.zeros(4, 3), classes, 4)


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, outputs, targets):
        return (outputs - targets).square().mean() * self.scale


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (torch.nn.CTCLoss(), UnsupportedError, "functional.ctc_loss"),
        (
            torch.nn.CrossEntropyLoss(weight=torch.ones(4)),
            UnsupportedError,
            "class_weight",
        ),
        (Scaled(), ConfigError, "scale"),
    ],
)
def test_losses_that_could_not_be_trained_are_refused_at_once(loss, error, message):
    model = IPUModel(network())
    with pytest.raises(error, match=message):
        model.compile("sgd", loss)


def total(outputs, targets):
    return (outputs - targets).square().sum()


class Total(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, outputs, targets):
        self.calls.add_(1.0)
        return total(outputs, targets).mul(0.5)


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(NUM_FEATURES, 1)

    def forward(self, x):
        return self.layer(x), self.layer(x)


@pytest.mark.parametrize("loss", [total, Total()])
def test_a_function_that_sums_over_samples_is_refused(loss):
    model = IPUModel(torch.nn.Linear(NUM_FEATURES, 1))
    data = torch.randn(8, NUM_FEATURES), torch.randn(8, 1)
    model.compile("sgd", loss)
    state = torch.get_rng_state()
    with pytest.raises(ConfigError, match=r"is a sum over the 8 samples .*'mean'"):
        model.fit(*data, batch_size=8, shuffle=False, verbose=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert float(getattr(loss, "calls", 0)) == 0
    assert "is a sum over the 8" in str(model.check(*data, batch_size=8))


def log_ratio(outputs, targets):
    """A contrastive loss: it grows with the number of samples, and is no sum."""
    return F.cross_entropy(outputs @ targets.t(), torch.arange(len(outputs)))


@pytest.mark.parametrize(
    "loss",
    [
        log_ratio,
        lambda outputs, targets: (outputs - targets).sum() / len(outputs),
        lambda outputs, targets: (outputs - targets).square().sum(1),
        lambda outputs, targets: total(outputs[:2], targets[:2]),
        torch.nn.MSELoss(reduction="sum"),
    ],
)
def test_other_losses_are_no_sums(loss):
    model = reference.compiled(torch.nn.Linear(NUM_FEATURES, 1), loss=loss)
    model.fit(torch.randn(8, NUM_FEATURES), torch.randn(8, 1), batch_size=4, verbose=0)


# Rows of weight 0 ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "by_position"), [("mse", False), ("huber", True), (F.smooth_l1_loss, True)]
)
def test_missing_targets_of_weight_0_train_nothing(loss, by_position):
    inputs, targets = torch.randn(8, NUM_FEATURES), torch.randn(8, 3)
    weights = torch.ones(8, 3) if by_position else torch.ones(8)
    weights[[2, 5]] = 0.0
    if by_position:
        weights[0, 1] = 0.0
    with_holes = targets.masked_fill(weights.view(8, -1).eq(0), math.nan)
    if loss is F.smooth_l1_loss:
        loss = functools.partial(loss, reduction="none")
    trained = []
    for given_targets in (targets, with_holes):
        torch.manual_seed(0)
        model = IPUModel(
            torch.nn.Linear(NUM_FEATURES, 3), IPUConfig(micro_batch_size=2)
        )
        model.compile("sgd", loss, weighted_metrics=["mae"])
        history = model.fit(
            inputs,
            given_targets,
            batch_size=4,
            sample_weight=weights,
            shuffle=False,
            verbose=0,
        ).history
        trained.append((history, model.get_weights()))
    (history, weights), (history_with_holes, weights_with_holes) = trained
    assert history == history_with_holes
    np.testing.assert_array_equal(weights[0], weights_with_holes[0])


_WHERE = torch.where


class WhereOfADevice(torch.autograd.Function):
    """`torch.where` with PopART's gradient: that of its result times the mask."""

    @staticmethod
    def forward(ctx, condition, one, other):
        ctx.save_for_backward(condition)
        return _WHERE(condition, one, other)

    @staticmethod
    def backward(ctx, gradient):
        (condition,) = ctx.saved_tensors
        mask = condition.to(gradient.dtype)
        return None, gradient * mask, gradient * (1 - mask)


@pytest.mark.parametrize("name", ["mse", "mae", "huber", "bce", "mape", "log_cosh"])
def test_no_gradient_of_a_missing_target_is_nan_on_a_device(name, monkeypatch):
    monkeypatch.setattr(torch, "where", WhereOfADevice.apply)
    outputs = torch.randn(4, 2, requires_grad=True)
    targets, weights = torch.rand(4, 2), torch.tensor([1.0, 0.0, 2.0, 1.0])
    targets[1] = math.nan
    terms = resolve_loss(name).terms(outputs, targets, 4, weights)
    terms.value.backward()
    assert outputs.grad.isfinite().all()
    assert outputs.grad[1].eq(0).all()
    assert outputs.grad[0].ne(0).any()


# The order of arguments ---------------------------------------------------------------


def pinball(outputs, targets):
    return torch.maximum(0.9 * (targets - outputs), 0.1 * (outputs - targets))


def keras_pinball(y_true, y_pred):
    return pinball(y_pred, y_true)


class KerasPinball(torch.nn.Module):
    def forward(self, target, output):
        return pinball(output, target)


def test_parameters_names_say_which_order_a_loss_and_a_metric_have():
    inputs, targets = torch.randn(8, NUM_FEATURES), torch.randn(8, 1)
    curves = []
    for function in (pinball, keras_pinball):
        torch.manual_seed(0)
        model = IPUModel(torch.nn.Linear(NUM_FEATURES, 1))
        model.compile("sgd", function, metrics=[function])
        history = model.fit(inputs, targets, batch_size=4, epochs=3, verbose=0).history
        assert history["loss"] == pytest.approx(history[function.__name__])
        curves.append(history["loss"])
    assert curves[0] == curves[1]


ORDERS = {
    "y, y_hat": -100,
    "y, pred": -100,
    "gt, x": -100,
    "actual, predicted": -100,
    "expected, y": -100,
    "labels_true, labels_pred": -100,
    "x, x_recon, mask=None": -100,
    "Y_True, b": -100,
    "y_hat, y": 100,
    "a, b": 100,
    "x, y": 100,
    "y, x": 100,
    "y, t": 100,
    "logits, probabilities": 100,
    "outputs, teacher_logits": 100,
    "student, teacher": 100,
    "label, target": 100,
    "output, *pred": 100,
}


@pytest.mark.parametrize(("names", "difference"), ORDERS.items())
def test_one_clear_name_of_two_decides(names, difference):
    first, second = (name.strip("* ") for name in names.split(",")[:2])
    values = f"{first} - {second}" + "[0]" * ("*" in names)
    function = eval(f"lambda {names}: ({values}).mean()")
    model = IPUModel(torch.nn.Linear(NUM_FEATURES, 1))
    with torch.no_grad():
        model.module.weight.zero_()
        model.module.bias.fill_(100.0)
    model.compile("sgd", function, metrics=[function])
    values = model.evaluate(torch.randn(4, NUM_FEATURES), torch.zeros(4, 1), verbose=0)
    assert set(values.values()) == {difference}


def test_a_loss_module_that_takes_targets_first_is_refused():
    model = IPUModel(torch.nn.Linear(NUM_FEATURES, 1))
    with pytest.raises(ConfigError, match=r"KerasPinball\.forward takes the targets"):
        model.compile("sgd", KerasPinball())


# Losses with other arguments, and other types of targets ------------------------------


@pytest.mark.parametrize(
    ("loss", "advice"),
    [
        (torch.nn.TripletMarginLoss(), "outputs[0], outputs[1], outputs[2])). As y"),
        (torch.nn.CosineEmbeddingLoss(), "outputs[0], outputs[1], targets))"),
        (torch.nn.GaussianNLLLoss(), "outputs[0], targets, outputs[1]))"),
    ],
)
def test_a_loss_of_three_arguments_says_how_to_wrap_it(loss, advice):
    model = IPUModel(network())
    with pytest.raises(UnsupportedError, match=re.escape(f"module_loss({advice}")):
        model.compile("sgd", loss)


class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(NUM_FEATURES, 1)

    def forward(self, x):
        return {"mean": self.layer(x), "spread": self.layer(x)}


def test_an_output_that_is_not_there_is_named():
    model = IPUModel(Named())
    model.compile("sgd", lambda outputs, targets: (outputs["mena"] - targets).square())
    with pytest.raises(DataError, match=r": there is no 'mena'$"):
        model.fit(torch.randn(8, NUM_FEATURES), torch.randn(8, 1), 4, verbose=0)


Heads = collections.namedtuple("Heads", ["mean", "spread"])


class NamedHeads(TwoHeads):
    def forward(self, x):
        return Heads(*super().forward(x))


def test_the_fields_of_a_named_tuple_are_names_of_outputs():
    targets = torch.randn(8, 1)
    model = IPUModel(NamedHeads())
    model.compile("sgd", {"mean": "mse", "spread": "mae"}, metrics={"mean": ["mae"]})
    y = {"mean": targets, "spread": targets}
    history = model.fit(torch.randn(8, NUM_FEATURES), y, batch_size=4, verbose=0)
    assert set(history.history) == {"loss", "mean_loss", "spread_loss", "mean_mae"}


def fitted(loss, targets, outputs=2):
    torch.manual_seed(0)
    model = reference.compiled(torch.nn.Linear(NUM_FEATURES, outputs), loss=loss)
    inputs = torch.ones(*targets.shape, NUM_FEATURES)
    return model.fit(inputs, targets, batch_size=4, verbose=0).history["loss"]


@pytest.mark.parametrize(
    "loss",
    ["bce", "binary_crossentropy", nn.BCEWithLogitsLoss(), "hinge", nn.BCELoss()],
)
def test_labels_are_no_classes_to_weigh(loss):
    end = nn.Sigmoid() if isinstance(loss, nn.BCELoss) else nn.Identity()
    x, labels = torch.randn(8, NUM_FEATURES), torch.eye(4).repeat(2, 1)
    given = {"batch_size": 4, "verbose": 0}
    for targets in (labels, labels.roll(1, 0), labels.clamp(min=1)):
        model = IPUModel(nn.Sequential(nn.Linear(NUM_FEATURES, 4), end))
        model.compile("sgd", loss)
        for call in (model.fit, model.train_on_batch):
            settings = given if call == model.fit else {}
            with pytest.raises(DataError, match="several 0/1 labels per sample"):
                call(x, targets, class_weight={0: 2.0}, **settings)
        model.fit(x, targets, sample_weight=targets @ torch.arange(4.0), **given)
    weights = torch.tensor([1.0, 2.0, 0.0, 1.0])
    model.compile("sgd", nn.BCEWithLogitsLoss(weight=weights, pos_weight=weights + 1))
    if not isinstance(loss, nn.BCELoss):
        model.fit(x, labels, **given)
    one = IPUModel(nn.Sequential(nn.Linear(NUM_FEATURES, 1), end))
    one.compile("sgd", loss)
    one.fit(x, labels[:, :1], class_weight={0: 2.0}, **given)


def test_bools_are_classes():
    truths = torch.tensor([True, False, True, True])
    assert fitted("cross_entropy", truths) == fitted("cross_entropy", truths.long())
    with pytest.raises(DataError, match=r'y\.long\(\) of .*y\.astype\("int64"\)'):
        fitted(torch.nn.CrossEntropyLoss(), truths)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
@pytest.mark.parametrize("class_weight", [None, {0: 2.0}])
def test_one_hot_numbers_are_to_be_floats(dtype, class_weight):
    one_hot = torch.eye(4).to(dtype)
    model = reference.compiled(torch.nn.Linear(2, 4), loss="cross_entropy")
    given = {"batch_size": 4, "class_weight": class_weight, "verbose": 0}
    with pytest.raises(DataError, match=r'y\.float\(\) of .*y\.astype\("float32"\)'):
        model.fit(torch.ones(4, 2), one_hot, **given)
    model.fit(torch.ones(4, 2), one_hot.float(), **given)


def test_classes_on_the_last_axis_lead_to_the_loss_that_has_them_there():
    with pytest.raises(DataError, match="Use 'sparse_categorical_crossentropy'"):
        fitted("cross_entropy", torch.zeros(4, 3, dtype=torch.int64), outputs=5)
    fitted("sparse_categorical_crossentropy", torch.zeros(4, 3).long(), outputs=5)


@pytest.mark.parametrize("reduce", [torch.Tensor.sum, torch.Tensor.long])
def test_whole_numbers_have_no_gradient(reduce):
    def wrong(outputs, targets):
        return reduce(outputs.argmax(1).ne(targets))

    with pytest.raises(ConfigError, match="'wrong' gives whole numbers"):
        fitted(wrong, torch.zeros(4, dtype=torch.int64))


# Label smoothing, against torch's own -------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "pads"), [("cross_entropy", True), (torch.nn.CrossEntropyLoss(), False)]
)
def test_smoothing_is_that_of_torch(loss, pads):
    x, y = samples(22 if pads else 24)
    y[3] = -100  # ignored
    model = IPUModel(network(), IPUConfig(micro_batch_size=8))
    drop_last = "pad" if pads else True
    with torch.no_grad():
        expected = F.cross_entropy(network()(x), y, label_smoothing=0.2)
    model.compile(Optimizer("sgd", lr=0.0), loss, label_smoothing=0.2)
    history = model.fit(x, y, 8, verbose=0, drop_last=drop_last)
    assert history.history["loss"] == pytest.approx([float(expected)])


def test_smoothed_gradients_are_those_of_torch():
    x, y = samples(8)
    model, other = IPUModel(network()), network()
    model.compile(Optimizer("sgd", lr=0.1), "cross_entropy", label_smoothing=0.2)
    model.fit(x, y, 8, verbose=0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    F.cross_entropy(other(x), y, label_smoothing=0.2).backward()
    optimizer.step()
    assert_same_weights(model.module, other)


@pytest.mark.parametrize(
    ("loss", "of_log_probabilities"),
    [("nll", True), (torch.nn.NLLLoss(), True), ("sparse_categorical_crossentropy", 0)],
)
def test_other_losses_of_classes_are_smoothed(loss, of_log_probabilities):
    outputs, targets = torch.randn(4, NUM_CLASSES), torch.tensor([0, 2, 1, 1])
    expected = F.cross_entropy(outputs, targets, label_smoothing=0.1)
    if of_log_probabilities:
        outputs = outputs.log_softmax(1)
    terms = smoothed(resolve_loss(loss), 0.1).terms(outputs, targets, 4)
    torch.testing.assert_close(terms.value, expected)


def test_a_subclass_with_torchs_forward_is_smoothed():
    class Mine(torch.nn.CrossEntropyLoss):
        pass

    class Other(torch.nn.CrossEntropyLoss):
        def forward(self, outputs, targets):
            return super().forward(outputs, targets)

    outputs, targets = torch.randn(4, NUM_CLASSES), torch.tensor([0, 2, 1, 1])
    expected = F.cross_entropy(outputs, targets, label_smoothing=0.1)
    terms = smoothed(resolve_loss(Mine()), 0.1).terms(outputs, targets, 4)
    torch.testing.assert_close(terms.value, expected)
    with pytest.raises(UnsupportedError, match="needs a loss of classes"):
        smoothed(resolve_loss(Other()), 0.1)


def test_binary_targets_are_smoothed_towards_a_half():
    outputs, targets = torch.randn(4, 2), torch.tensor([[0.0, 1.0]] * 4)
    expected = F.binary_cross_entropy_with_logits(outputs, targets * 0.9 + 0.05)
    terms = smoothed(resolve_loss("bce"), 0.1).terms(outputs, targets, 4)
    torch.testing.assert_close(terms.value, expected)


def test_a_sum_stays_a_sum():
    outputs, targets = torch.randn(4, NUM_CLASSES), torch.tensor([0, 2, 1, 1])
    loss = torch.nn.CrossEntropyLoss(reduction="sum")
    terms = smoothed(resolve_loss(loss), 0.1).terms(outputs, targets, 4)
    given = {"label_smoothing": 0.1, "reduction": "sum"}
    torch.testing.assert_close(terms.value, F.cross_entropy(outputs, targets, **given))


# Modules of the user's: modes and buffers ---------------------------------------------


class Counting(nn.Module):
    """Drops terms and counts calls in train mode, as batch norm does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.inner = nn.Dropout(0.5)

    def forward(self, outputs, targets):
        if self.training:
            self.calls.add_(1.0)
        return (self.inner(outputs) - targets).square().mean(1)


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(16, 3), torch.randn(16, 1)


@pytest.mark.parametrize("is_training", [True, False])
def test_evaluation_runs_a_loss_in_eval_mode(data, is_training):
    loss = Counting().train(is_training)
    model = IPUModel(nn.Linear(3, 1))
    model.compile(Optimizer("sgd", learning_rate=0.0), loss)
    figure = model.evaluate(*data, verbose=0)["loss"]
    expected = (model.predict(data[0]) - data[1]).square().mean()
    assert figure == pytest.approx(float(expected))
    history = model.fit(
        *data, batch_size=4, epochs=2, validation_data=data, verbose=0
    ).history
    assert history["val_loss"] == pytest.approx([figure, figure])
    assert (history["loss"] == pytest.approx([figure, figure])) is not is_training
    assert float(loss.calls) == (8 if is_training else 0)
    assert loss.training is loss.inner.training is is_training


def test_a_loss_may_change_its_mode_between_fits(data):
    loss = Counting()
    model = reference.compiled(nn.Linear(3, 1), loss=loss)
    for is_training, calls in ((True, 4), (False, 4), (True, 8)):
        loss.train(is_training)
        model.fit(*data, batch_size=4, verbose=0)
        assert float(loss.calls) == calls


@pytest.mark.parametrize("gamma", [0.5, 2.0])
@pytest.mark.parametrize(
    "loss", [binary_focal_crossentropy, categorical_focal_crossentropy]
)
def test_a_focal_loss_learns_from_samples_beside_perfect_ones(loss, gamma):
    x, targets = torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    module = nn.Linear(1, 2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[200.0], [-200.0]]))
        module.bias.zero_()
    model = IPUModel(module)
    model.compile(
        Optimizer("sgd", learning_rate=1.0), functools.partial(loss, gamma=gamma)
    )
    model.fit(x, targets, batch_size=2, verbose=0)
    # Only the second sample has a gradient, and its input is 0.
    assert module.weight.tolist() == [[200.0], [-200.0]]
    first, second = module.bias.tolist()
    assert first == -second > 0.01


# Targets of binary losses -------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "shape", "advice"),
    [
        (
            nn.NLLLoss(),
            (4, 3, 2),
            r"axis 1.*movedim.*'sparse_categorical_crossentropy'",
        ),
        (
            "sparse_categorical_crossentropy",
            (4, 2, 3),
            "last axis.* on axis 1.* use 'cross_entropy'",
        ),
        (nn.CrossEntropyLoss(), (4, 2, 3, 1), r"Leave out the axis .*y\.squeeze\(1\)"),
        (nn.CrossEntropyLoss(), (4, 6), r"Leave out the axis .*y\.squeeze\(1\)"),
    ],
)
def test_classes_on_another_axis_have_a_way_out(loss, shape, advice):
    model = IPUModel(nn.Unflatten(1, shape[1:]))
    model.compile("sgd", loss)
    targets = torch.zeros(4, 3, dtype=torch.long)
    targets = {2: targets[:, :1], 3: targets, 4: targets[:, None, :, None]}[len(shape)]
    with pytest.raises(DataError, match=advice):
        model.evaluate(torch.rand(4, 6), targets, verbose=0)


BINARY_LOSSES = ["bce", "dice", "hinge", nn.BCEWithLogitsLoss(), nn.SoftMarginLoss()]


@pytest.mark.parametrize("loss", BINARY_LOSSES)
@pytest.mark.parametrize("bad", [-100, 2, 255])
def test_targets_that_are_no_labels_are_refused_before_training(loss, bad):
    model = IPUModel(nn.Linear(3, 2))
    model.compile("sgd", loss)
    x, y = torch.rand(8, 3), torch.zeros(8, 2)
    y[5, 1] = bad
    for data in ((x, y), (x, y.double()), (TensorDataset(x, y), None)):
        with pytest.raises(
            DataError, match=rf"a target is {bad}, in row 5.*sample_weight"
        ):
            model.fit(*data, batch_size=4, verbose=0)
    with pytest.raises(
        DataError, match=rf"`validation_data` is {bad}, in row 5"
    ) as error:
        model.fit(x, y * 0, batch_size=4, validation_data=(x, y), verbose=0)
    assert ("(y > 0).float()" in str(error.value)) == (bad == 255)
    part = Subset(TensorDataset(x, y), [0, 1, 2, 3])
    model.evaluate(part, verbose=0)


class Items(torch.utils.data.Dataset):
    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        return tuple(tensor[index] for tensor in self.tensors)


LOADED = {
    "a dataset": lambda *parts: Items(*parts),
    "a loader": lambda *parts: DataLoader(Items(*parts), 4),
    "a generator": lambda *parts: zip(*(part.split(4) for part in parts)),
}


@pytest.mark.parametrize("form", LOADED)
@pytest.mark.parametrize("bad", [-100, 255])
def test_targets_that_are_no_labels_are_refused_when_they_are_loaded(form, bad):
    model = IPUModel(nn.Linear(3, 2))
    model.compile("sgd", "bce")
    x, y = torch.rand(8, 3), torch.zeros(8, 2)
    settings = {} if "loader" in form else {"batch_size": 4}
    model.fit(LOADED[form](x, y), **settings, shuffle=False, verbose=0)
    y[5, 1] = bad
    words = rf"'bce' takes targets of 0 and 1 .* is {bad}, in sample 5\."
    with pytest.raises(DataError, match=words):
        model.fit(LOADED[form](x, y), **settings, shuffle=False, verbose=0)
    with pytest.raises(DataError, match=words):
        model.evaluate(LOADED[form](x, y), **settings, verbose=0)
    with pytest.raises(DataError, match=rf"of `validation_data` is {bad}, in sample 5"):
        model.fit(*(x, y * 0, 4), validation_data=LOADED[form](x, y), verbose=0)
    weights = torch.ones(8)
    model.evaluate(LOADED[form](x, y, weights), **settings, verbose=0)


@pytest.mark.parametrize("nest", [list, tuple, lambda pair: dict(zip("ab", pair))])
def test_unfit_labels_of_an_output_are_refused_however_they_are_nested(nest):
    class Two(nn.Linear):
        def forward(self, x):
            return nest((super().forward(x), x[:, :1]))

    x, labels, numbers = torch.rand(8, 3), torch.zeros(8, 2), torch.full((8, 1), 7.0)
    losses = {"a": "bce", "b": "mse"} if "a" in nest("12") else ["bce", "mse"]
    model = IPUModel(Two(3, 2))
    model.compile("sgd", losses)
    model.fit(x, nest((labels, numbers)), batch_size=4, verbose=0)
    with pytest.raises(DataError, match="a target is 7, in row 0"):
        model.fit(x, nest((labels + 7, numbers)), batch_size=4, verbose=0)


@pytest.mark.parametrize("loss", ["bce", "hinge"])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64", "bool", "float64"])
def test_labels_of_any_type_are_taken(loss, dtype):
    model = IPUModel(nn.Linear(3, 2))
    model.compile("sgd", loss)
    y = torch.tensor([[0, 1]] * 8)
    results = [
        model.evaluate(torch.ones(8, 3), targets, verbose=0)["loss"]
        for targets in (y.float(), y.to(getattr(torch, dtype)))
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "loss",
    [nn.BCELoss(), nn.BCEWithLogitsLoss(), nn.KLDivLoss(reduction="batchmean")],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_whole_numbers_for_shares_are_told_to_be_floats(loss, dtype):
    end = nn.LogSoftmax(1) if isinstance(loss, nn.KLDivLoss) else nn.Softmax(1)
    end = nn.Identity() if isinstance(loss, nn.BCEWithLogitsLoss) else end
    model = IPUModel(nn.Sequential(nn.Linear(3, 2), end))
    model.compile("sgd", loss)
    x, y = torch.rand(8, 3), torch.tensor([[0, 1]] * 8, dtype=dtype)
    with pytest.raises(DataError, match=r"y\.float\(\) of a tensor"):
        model.fit(x, y, batch_size=4, verbose=0)
    model.fit(x, y.float(), batch_size=4, verbose=0)


@pytest.mark.parametrize("bad", [-100, math.nan])
def test_targets_of_weight_zero_may_have_any_value(bad):
    model = IPUModel(nn.Linear(3, 2))
    model.compile("sgd", "bce", weighted_metrics=["accuracy"])
    x, y, weights = torch.rand(8, 3), torch.ones(8, 2), torch.ones(8, 2)
    y[5, 1], weights[5, 1] = bad, 0
    result = model.evaluate(x, y, sample_weight=weights, verbose=0)
    outputs = model.module(x)
    losses = F.binary_cross_entropy_with_logits(outputs, torch.ones(8, 2), weights)
    assert result["loss"] == pytest.approx(losses.item(), rel=1e-5)
    assert result["accuracy"] == pytest.approx(
        (outputs.gt(0) * weights).sum().item() / 15
    )


def test_noisy_labels_are_taken():
    model = IPUModel(nn.Linear(3, 1))
    model.compile("sgd", nn.BCEWithLogitsLoss())
    model.fit(torch.rand(8, 3), 0.7 + torch.rand(8) / 2, batch_size=4, verbose=0)


@pytest.mark.parametrize("delta", [0.5, 1.0, 2.0])
def test_the_advice_for_a_huber_loss_has_its_numbers(delta):
    x, y = torch.linspace(-4, 4, 12)[:, None], torch.zeros(12, 1)

    def advised(outputs, targets):
        return delta * F.smooth_l1_loss(outputs, targets, beta=delta)

    values = []
    for loss in (nn.HuberLoss(delta=delta), advised):
        model = IPUModel(nn.Linear(1, 1, bias=False))
        torch.nn.init.ones_(model.module.weight)
        model.compile("sgd", loss)
        values.append(model.evaluate(x, y, verbose=0)["loss"])
        said = str(model.check(x, y, batch_size=4))
        advice = "delta * smooth_l1_loss(x, y, beta=delta)"
        assert (advice in said) is (loss is not advised)
    assert values == pytest.approx([nn.HuberLoss(delta=delta)(x, y).item()] * 2)
