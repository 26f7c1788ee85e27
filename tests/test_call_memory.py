# SPDX-License-Identifier: Apache-2.0
"""Calls whose size is chosen stay within the memory that is stated for them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit import IPUConfig, IPUModel
from ipufit._tree import Structure
from ipufit.engine import Executors, Figures
from ipufit.planning.choices import MOST_CALL_BYTES
from tests.engine.traced.test_figure_bytes import Pairs
from tests.strategies import examples

BYTES_OF_SUM = 12  # float32 comes back, and is added up in float64


def num_bytes(values):
    leaves = Structure.of_outputs(values).flatten(values)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


@contextlib.contextmanager
def calls_seen(most):
    """Bytes of each call and its passes, while calls may take so many bytes."""
    training, inference, add = Executors.train, Executors.infer, Figures.add
    seen = {"train": [], "infer": []}

    def train(executors, batch):
        sums, outputs = training(executors, batch)
        held = num_bytes(batch) + BYTES_OF_SUM * sums.numel()
        seen["train"].append((held, executors._training.executor.options))
        return sums, outputs

    def infer(executors, batch):
        outputs, scalars = inference(executors, batch)
        held = num_bytes(batch) + num_bytes((outputs, dict(scalars)))
        seen["infer"].append((held, executors._inference.executor.options))
        return outputs, scalars

    at_once = []

    def added(figures, vectors):
        at_once.append(len(vectors) // figures._size)
        add(figures, vectors)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("model.updates_per_call", "planning.choices"):
            patch.setattr(f"ipufit.{module}.MOST_CALL_BYTES", most)
        patch.setattr(Executors, "train", train)
        patch.setattr(Executors, "infer", infer)
        patch.setattr(Figures, "add", added)
        yield seen, at_once


def passes(options):
    return options.device_iterations


@settings(max_examples=examples(60), deadline=None)
@given(
    classes=st.integers(2, 40),
    size=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    metrics=st.lists(st.sampled_from(["pairs", "f1", "accuracy"]), unique=True),
    most=st.integers(10_000, 1_000_000),
)
def test_a_call_takes_no_more_unless_one_pass_does(
    classes, size, accumulation, metrics, most
):
    config = IPUConfig(micro_batch_size=size, gradient_accumulation=accumulation)
    model = IPUModel(torch.nn.Linear(3, classes), config)
    chosen = [Pairs("pairs") if name == "pairs" else name for name in metrics]
    model.compile("sgd", "cross_entropy", metrics=chosen)
    rows = 16 * size * accumulation
    x, y = torch.zeros(rows, 3), torch.zeros(rows, dtype=torch.int64)
    with calls_seen(most) as (seen, at_once):
        model.fit(x, y, size * accumulation, verbose=0)
        del at_once[:]
        model.evaluate(x, y, verbose=0)
        assert set(at_once) == {1}  # however many passes a call has
        model.predict(x, verbose=0)
    for held, options in [*seen["train"], *seen["infer"]]:
        assert held <= most or passes(options) == 1


def test_a_thousand_classes_keep_calls_of_training_small():
    model = IPUModel(torch.nn.Linear(2, 1000), IPUConfig(micro_batch_size=4))
    x, y = torch.zeros(64, 2), torch.zeros(64, dtype=torch.int64)
    passes_of = {}
    for metric in ("accuracy", Pairs("pairs")):
        model.compile("sgd", "cross_entropy", metrics=[metric])
        with calls_seen(MOST_CALL_BYTES) as (seen, _):
            model.fit(x, y, 4, verbose=0)
        passes_of[metric if isinstance(metric, str) else "pairs"] = {
            passes(options) for _, options in seen["train"]
        }
    assert passes_of == {"accuracy": {16}, "pairs": {4}}
