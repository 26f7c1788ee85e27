# SPDX-License-Identifier: Apache-2.0
"""The model of the cost of exchanging gradients, and its part of the page on pods."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import page, pod_cost
from benchmarks.pod_cost import MODELS, Model, Published, exchange_seconds

RESNET, BERT_BASE, BERT_LARGE = MODELS
GB = 1e9

# Each IPU a replica of 1e9 parameters: 2 GB of gradients in float16.
LARGE = Model("large", 1e9, 1, (Published(4, 4, 1),))

powers = st.integers(0, 10).map(lambda exponent: 2**exponent)


def test_examples_are_right():
    result = doctest.testmod(pod_cost)
    assert (result.attempted > 0, result.failed) == (True, 0)


def test_the_page_has_what_is_printed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pod_cost"])
    pod_cost.main()
    printed = capsys.readouterr().out.strip()
    text = pod_cost.PAGE.read_text(encoding="utf-8")
    assert page.replaced(text, "pod_cost", printed) == text


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (1, 0.0),
        (2, 2 * 1 / 2 * 2 * GB / 64e9),
        (16, 2 * 15 / 16 * 2 * GB / 64e9),
        (64, 2 * 63 / 64 * 2 * GB / 64e9),
        # Two racks: each of 16 machines has 125 MB for its peer.
        (128, 2 * 63 / 64 * 2 * GB / 64e9 + 2 * 1 / 2 * 0.125 * GB / 25e9),
    ],
)
def test_bytes_go_over_links_and_gateways(replicas, expected):
    assert exchange_seconds(LARGE, replicas, "float16", step=0.0) == pytest.approx(
        expected
    )


def test_steps_are_those_of_the_rings():
    nothing = LARGE._replace(parameters=0)
    assert exchange_seconds(nothing, 64, "float16", step=1.0) == 2 * 63
    assert exchange_seconds(nothing, 256, "float16", step=1.0) == 2 * 63 + 2 * 3
    four = nothing._replace(ipus=4)  # 16 replicas fill a rack
    assert exchange_seconds(four, 64, "float16", step=1.0) == 2 * 15 + 2 * 3


@given(st.sampled_from(MODELS), powers)
def test_more_replicas_and_wider_gradients_take_longer(model, replicas):
    half = exchange_seconds(model, replicas, "float16")
    assert exchange_seconds(model, 2 * replicas, "float16") > half
    single = exchange_seconds(model, replicas, "float32")
    assert half <= single <= 2 * half


@given(st.sampled_from(MODELS), powers.filter(lambda replicas: replicas > 1))
def test_from_the_batch_size_on_the_exchange_takes_a_tenth(model, replicas):
    size = pod_cost.counting_batch_size(model, replicas)
    exchange = exchange_seconds(model, replicas, "float16")
    assert exchange / pod_cost.update_seconds(model, replicas, size) == pytest.approx(
        pod_cost.SHARE
    )


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_model_gives_back_what_its_times_are_from(model):
    first = model.published[0]
    seconds = pod_cost.update_seconds(model, first.ipus // model.ipus, first.batch_size)
    assert first.batch_size / seconds == pytest.approx(first.samples_per_second)


def test_the_time_of_a_step_is_what_two_published_results_leave():
    assert pod_cost.implied_step_seconds() == pytest.approx(
        pod_cost.STEP_SECONDS, rel=0.05
    )


def test_what_the_page_says_of_shares_is_so():
    def share(model, replicas, size):
        exchange = exchange_seconds(model, replicas, "float16")
        return exchange / pod_cost.update_seconds(model, replicas, size)

    assert share(RESNET, 64, 2_560) == pytest.approx(1 / 6, rel=0.05)
    assert share(RESNET, 64, 10_240) == pytest.approx(1 / 20, rel=0.05)
    assert share(BERT_LARGE, 64, 65_536) < 0.03
