# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies that several tests share."""

from collections import namedtuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from ipufit import BatchPlan, IPUConfig, poptorch


def examples(of_hundred):
    """How many examples a costly property gets, for `settings(max_examples=...)`.

    Args:
        of_hundred: Its number where other properties get 100. Each profile takes as
            many in a hundred as it takes examples by default, rounded up.
    """
    return -(-of_hundred * settings().max_examples // 100)


def is_long():
    """Whether the profile `long` was asked for."""
    return settings().max_examples >= 50


def slow_but_each_fourth(cases):
    """The cases as parameters: each fourth runs every day, the others are slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
        for number, case in enumerate(cases)
        for marks in [pytest.mark.slow if number % 4 else ()]
    ]


in_quarters = pytest.mark.parametrize("quarter", slow_but_each_fourth(range(4)))
"""A test that takes `cases[quarter::4]`: the first quarter runs every day."""


Pair = namedtuple("Pair", ["left", "right"])

leaves = st.integers(min_value=-1000, max_value=1000)

nestings = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)
"""Nested tuples, namedtuples, lists and dicts of whole numbers."""


def plans(most=3):
    """Every factor from 1 to `most`."""
    factor = st.integers(1, most)
    return st.builds(
        BatchPlan,
        micro_batch_size=factor,
        gradient_accumulation=factor,
        replicas=factor,
        device_iterations=factor,
    )


def config_for(plan, mode=None, period=1):
    """Lay a model out as a plan says; its training may have an output mode."""
    if mode is None:
        return IPUConfig(
            micro_batch_size=plan.micro_batch_size,
            gradient_accumulation=plan.gradient_accumulation,
            replicas=plan.replicas,
            device_iterations=plan.device_iterations,
        )
    own = poptorch.Options()
    own.deviceIterations(plan.device_iterations).replicationFactor(plan.replicas)
    own.Training.gradientAccumulation(plan.gradient_accumulation)
    if mode == "EveryN":
        own.outputMode(poptorch.OutputMode.EveryN, output_return_period=period)
    else:
        own.outputMode(poptorch.OutputMode[mode])
    return IPUConfig(micro_batch_size=plan.micro_batch_size, training_options=own)


@st.composite
def output_modes(draw, plan):
    """`(name, period)` of an output mode for training with `plan`; None: default."""
    name = draw(st.sampled_from([None, "All", "Sum", "Final", "EveryN"]))
    divisors = [n for n in range(1, 10) if plan.device_iterations % n == 0]
    return name, draw(st.sampled_from(divisors)) if name == "EveryN" else 1


@st.composite
def sample_counts(draw, plan, most_calls=2):
    """Enough samples for a call, and mostly not a multiple of it."""
    calls = draw(st.integers(1, most_calls))
    return calls * plan.samples_per_call + draw(
        st.integers(0, plan.samples_per_call - 1)
    )
