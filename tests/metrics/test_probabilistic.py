# SPDX-License-Identifier: Apache-2.0
"""Cross-entropies and hinges against scikit-learn; others against SciPy and torch."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional

from ipufit.errors import DataError
from ipufit.metrics import (
    BinaryCrossentropy,
    CategoricalCrossentropy,
    CategoricalHinge,
    CrossEntropy,
    KLDivergence,
    NegativeLogLikelihood,
    Perplexity,
    Poisson,
    SparseCategoricalCrossentropy,
    resolve_metric,
)
from tests.metrics import peers
from tests.metrics.harness import (
    Case,
    check,
    check_device,
    figure,
    labels,
    probabilities,
    scores,
)


def logarithm(outputs):
    return outputs.double().log()


def several(to=torch.clone):
    """By the targets: indices of classes, or a share of each."""
    of_indices = peers.of_classes(peers.class_entropy, to=to)
    of_shares = peers.of_columns(peers.cross, to=to)

    def reference(outputs, targets, weights):
        is_shares = targets.shape == outputs.shape
        return (of_shares if is_shares else of_indices)(outputs, targets, weights)

    return reference


def binary(to=torch.clone):
    return peers.of_columns(peers.BITS["binary_crossentropy"], to=to)


def divergence(to=torch.clone):
    return peers.of_columns(peers.divergence, to=to)


def rates(to=torch.clone):
    return peers.of_columns(peers.COUNTS["poisson"], to=to)


hinge, squared_hinge = (
    peers.of_columns(peers.BITS[name], width=1) for name in ("hinge", "squared_hinge")
)
TRUTHS, LABELS, POSITIONS = labels(1, num_classes=2), labels(2), labels(3, 5)
SHARES = probabilities(4, 4)
MARGINS = scores(0, 1), 2.0 * TRUTHS - 1.0
CASES = [
    Case("of shares", BinaryCrossentropy, scores(0), probabilities(7), binary()),
    Case(
        "binary_crossentropy of probabilities",
        partial(BinaryCrossentropy, from_logits=False),
        probabilities(8, 1),
        TRUTHS,
        binary(lambda outputs: outputs.double().logit()),
    ),
    *(
        Case(f"{kind.__name__} of probabilities", partial(kind, False), *given)
        for kind, *given in [
            (CategoricalCrossentropy, probabilities(11, 4), SHARES),
            (SparseCategoricalCrossentropy, probabilities(11, 4), LABELS),
            (CrossEntropy, probabilities(11, 5, 4), POSITIONS),
        ]
        for given in [[*given, several(logarithm)]]
    ),
    Case(
        "kl_divergence of probabilities",
        partial(KLDivergence, from_logits=False),
        probabilities(13, 4),
        SHARES,
        divergence(logarithm),
    ),
    Case(
        "poisson of rates",
        partial(Poisson, log_input=False),
        scores(15, 2).exp(),
        labels(16, 2),
        rates(logarithm),
    ),
    *(
        Case(f"{name} of -1 and 1", partial(resolve_metric, name), *MARGINS, reference)
        for name, reference in [("hinge", hinge), ("squared_hinge", squared_hinge)]
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_distance_with_settings_is_the_references(case):
    check(case)


def test_devices_compute_it():
    check_device(CASES)


@pytest.mark.parametrize(
    "make",
    [
        CrossEntropy,
        SparseCategoricalCrossentropy,
        Perplexity,
        NegativeLogLikelihood,
    ],
)
@pytest.mark.parametrize("ignored", [-100, 2])
def test_an_ignored_target_does_not_count_as_in_torch(make, ignored):
    outputs, targets = scores(0, 4), LABELS.clone()
    targets[::3] = ignored
    metric = make(ignore_index=ignored)
    logs = outputs if make is NegativeLogLikelihood else outputs.log_softmax(-1)
    expected = functional.nll_loss(logs, targets, ignore_index=ignored)
    if make is Perplexity:
        expected = expected.exp()
    assert figure(metric, outputs, targets, None, (5,)) == pytest.approx(
        float(expected), rel=1e-5
    )


def test_a_class_that_is_ruled_out_costs_nothing_where_it_is_not_the_target():
    outputs = torch.tensor([[0.0, 0.0, float("-inf")]])
    targets = torch.tensor([[0.5, 0.5, 0.0]])
    for metric in (CategoricalCrossentropy(), CrossEntropy()):
        assert figure(metric, outputs, targets) == pytest.approx(np.log(2))
    assert figure(KLDivergence(), outputs, targets) == pytest.approx(0, abs=1e-6)


def test_sure_and_wrong_is_bounded_for_probabilities_and_exact_for_logits():
    """Keras's bound, 1e-7."""
    outputs, targets = torch.tensor([1.0]), torch.tensor([0.0])
    bounded = figure(BinaryCrossentropy(from_logits=False), outputs, targets)
    assert bounded == pytest.approx(-np.log(1e-7), rel=0.02)  # 1 - 1e-7 in float32
    assert figure(BinaryCrossentropy(), 80 * outputs, targets) == pytest.approx(80.0)


def test_a_perplexity_may_be_larger_than_float32_has():
    outputs, targets = torch.tensor([[0.0, 200.0]]), torch.tensor([0])
    assert figure(Perplexity(), outputs, targets) == pytest.approx(np.exp(200.0))


def test_sure_and_right_costs_nearly_nothing():
    outputs, targets = torch.tensor([15.0]), torch.tensor([1.0])
    expected = np.log1p(np.exp(-15))
    assert figure(BinaryCrossentropy(), outputs, targets) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metric", "outputs", "targets"),
    [
        (BinaryCrossentropy(), (4, 2), (4,)),
        (CategoricalCrossentropy(), (4, 2), (4,)),
        (SparseCategoricalCrossentropy(), (4, 2), (4, 2)),
        (NegativeLogLikelihood(), (4, 2), (4, 2)),
        (CrossEntropy(), (4, 2), (3,)),
        (KLDivergence(), (4, 2), (4,)),
        (Poisson(), (4, 2), (4,)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(metric, outputs, targets):
    with pytest.raises(DataError, match=r"\(4, 2\)"):
        metric.sums(torch.zeros(outputs), torch.zeros(targets))


@pytest.mark.parametrize("metric", [CategoricalCrossentropy(), KLDivergence()])
def test_one_class_is_refused(metric):
    with pytest.raises(DataError, match="two classes or more"):
        metric.sums(torch.zeros(4, 1), torch.zeros(4, 1))


def test_a_class_that_is_ruled_out_is_no_rival_of_a_hinge():
    outputs = torch.tensor([[1.0, float("-inf"), 0.5]])
    assert figure(CategoricalHinge(), outputs, torch.tensor([0])) == 0.5


def test_a_hinge_of_classes_needs_classes():
    with pytest.raises(DataError, match=r"\(4, 1\)"):
        CategoricalHinge().sums(torch.zeros(4, 1), torch.zeros(4))
