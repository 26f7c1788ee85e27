# SPDX-License-Identifier: Apache-2.0
"""The beam search against all alignments there are."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipufit.emulator as poptorch
from tests.emulator._models import Function
from tests.strategies import examples

T, B, C = 4, 2, 3


def log_probs(seed):
    torch.manual_seed(seed)
    return torch.randn(T, B, C).mul(2).log_softmax(dim=2)


def all_paths(rows, blank):
    """Probability of each label sequence: the sum over its alignments."""
    totals = {}
    for alignment in itertools.product(range(C), repeat=len(rows)):
        merged = [label for label, _ in itertools.groupby(alignment)]
        labels = tuple(label for label in merged if label != blank)
        score = math.exp(sum(row[label] for row, label in zip(rows, alignment)))
        totals[labels] = totals.get(labels, 0.0) + score
    return totals


def decode(probs, lengths, **settings):
    module = Function(
        lambda _, p, n: poptorch.ctc_beam_search_decoder(p, n, **settings)
    )
    return poptorch.inferenceModel(module)(probs, lengths)


def best_paths(rows, blank, beam_width):
    """The label sequences of one sample with their log-probabilities."""
    probs = torch.tensor(rows).reshape(-1, 1, C)
    top_paths = min(40, beam_width)
    chosen = {"blank": blank, "beam_width": beam_width, "top_paths": top_paths}
    scores, sizes, labels = decode(probs, torch.tensor([len(rows)]), **chosen)
    found = zip(scores[0].tolist(), sizes[0].tolist(), labels[0].tolist())
    return [(tuple(ls[:n]), score) for score, n, ls in found if score > -math.inf]


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 1000), st.integers(0, C - 1), st.integers(1, T))
def test_a_wide_beam_finds_every_path_with_its_probability(seed, blank, length):
    rows = log_probs(seed)[:length, 0].tolist()
    expected = all_paths(rows, blank)
    found = best_paths(rows, blank, beam_width=1000)
    assert {labels for labels, _ in found} == set(expected)
    for labels, score in found:
        assert math.exp(score) == pytest.approx(expected[labels], rel=1e-4)
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True)


def test_the_device_decodes_each_sequence_to_its_length():
    probs, lengths = log_probs(3), torch.tensor([4, 2], dtype=torch.int32)
    scores, sizes, labels = decode(probs, lengths, blank=1, top_paths=2)
    assert scores.shape == sizes.shape == (B, 2)
    assert labels.shape == (B, 2, T)
    for sample, length in enumerate(lengths.tolist()):
        totals = all_paths(probs[:length, sample].tolist(), blank=1)
        ranked = sorted(totals, key=totals.get, reverse=True)[:2]
        for rank, expected in enumerate(ranked):
            size = sizes[sample, rank].item()
            assert tuple(labels[sample, rank, :size].tolist()) == expected
            assert (labels[sample, rank, size:] == 1).all()
            score = scores[sample, rank].exp().item()
            assert score == pytest.approx(totals[expected], rel=1e-4)


def test_paths_that_do_not_exist_are_impossible():
    probs = torch.zeros(1, 1, 1)
    scores, sizes, _ = decode(probs, torch.tensor([1]), top_paths=2)
    assert scores.tolist() == [[0.0, -math.inf]]
    assert sizes.tolist() == [[0, 0]]


def test_the_host_gives_zeros():
    results = poptorch.ctc_beam_search_decoder(
        log_probs(0), torch.tensor([4, 4]), top_paths=3
    )
    assert [tuple(r.shape) for r in results] == [(B, 3), (B, 3), (B, 3, T)]
    assert not any(result.any() for result in results)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (([1], torch.tensor([1])), "must take a torch.tensor of probs"),
        ((torch.zeros(1, 1, 1), [1]), "must take a torch.tensor of lengths"),
        ((torch.zeros(1, 1), torch.tensor([1])), "Incorrect shape for first input"),
    ],
)
def test_arguments_are_checked(arguments, fragment):
    with pytest.raises(poptorch.Error, match=fragment):
        poptorch.ctc_beam_search_decoder(*arguments)


@pytest.mark.parametrize(
    ("probs", "lengths", "fragment"),
    [
        (torch.zeros(4, 2, 3, dtype=torch.int32), [4, 4], "takes floating-point"),
        (torch.zeros(4, 2, 3), [[4, 4]], r"Got torch.float32 .* and \[1, 2\]"),
        (torch.zeros(4, 2, 3), [4, 4], r"at most beam_width \(2\) paths .* not 3"),
    ],
)
def test_the_device_refuses_other_arguments(probs, lengths, fragment):
    with pytest.raises(poptorch.Error, match=fragment):
        decode(probs, torch.tensor(lengths), beam_width=2, top_paths=3)


def test_what_is_impossible_is_not_found():
    never = -math.inf
    assert best_paths([[never, 0.0, never], [0.0, never, never]], 0, 9) == [((1,), 0.0)]
