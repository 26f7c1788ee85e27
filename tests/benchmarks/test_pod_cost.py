# SPDX-License-Identifier: Apache-2.0
"""The model of the cost of exchanging gradients, and its part of the page on pods."""

from __future__ import annotations

import doctest

import pytest

from benchmarks import page, pod_cost
from benchmarks.pod_cost import MODELS, exchange_seconds

RESNET, BERT_BASE, BERT_LARGE = MODELS


def test_examples_are_right():
    result = doctest.testmod(pod_cost)
    assert (result.attempted > 0, result.failed) == (True, 0)


def test_the_page_has_what_is_printed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pod_cost"])
    pod_cost.main()
    printed = capsys.readouterr().out.strip()
    text = pod_cost.PAGE.read_text(encoding="utf-8")
    assert page.replaced(text, "pod_cost", printed) == text


def test_what_the_page_says_of_shares_is_so():
    def share(model, replicas, size):
        exchange = exchange_seconds(model, replicas, "float16")
        return exchange / pod_cost.update_seconds(model, replicas, size)

    assert share(RESNET, 64, 2_560) == pytest.approx(1 / 6, rel=0.05)
    assert share(RESNET, 64, 10_240) == pytest.approx(1 / 20, rel=0.05)
    assert share(BERT_LARGE, 64, 65_536) < 0.03
