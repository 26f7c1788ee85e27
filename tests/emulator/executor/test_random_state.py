# SPDX-License-Identifier: Apache-2.0
"""The random state of the device, read, kept and set."""

import pytest
import torch

import ipufit.emulator as poptorch
from tests.emulator._models import Function


def noise(self, x):
    return x + torch.rand(4)


X = torch.zeros(4)
SEED = 11


def infer(seed=SEED, connection=poptorch.ConnectionType.Always):
    options = poptorch.Options().connectionType(connection)
    if seed is not None:
        options.randomSeed(seed)
    return poptorch.inferenceModel(Function(noise), options)


def draws(executor, count):
    return [executor(X).tolist() for _ in range(count)]


def reference(count, seed=SEED):
    return draws(infer(seed), count)


def test_without_a_seed_it_is_none_until_the_first_call():
    executor = infer(seed=None)
    executor.compile(X)
    assert executor.rng_state is None
    executor(X)
    assert executor.rng_state[0] == torch.initial_seed()


def test_a_state_continues_in_another_executor():
    first = infer()
    first(X)
    second = infer(seed=99)
    second(X)
    second.rng_state = first.rng_state
    assert draws(second, 2) == draws(first, 2)
    assert second.rng_state == first.rng_state


def test_a_seed_alone_begins_its_stream():
    executor = infer()
    executor(X)
    executor.rng_state = [5]
    assert executor.rng_state == [5]
    assert draws(executor, 2) == reference(2, seed=5) != reference(2)


def test_detaching_reads_it_and_attaching_restores_it():
    executor = infer()
    first = draws(executor, 1)
    executor.detachFromDevice()
    assert len(executor.rng_state) > 1
    assert first + draws(executor, 2) == reference(3)


def test_destroying_forgets_what_the_host_has_not_seen():
    expected = reference(2)
    executor = infer()
    executor(X)
    executor.destroy()
    assert draws(executor, 1) == expected[:1]
    seen = executor.rng_state
    executor(X)
    executor.destroy()
    executor.compile(X)
    assert executor.rng_state == seen
    assert draws(executor, 1) == expected[1:]


@pytest.mark.parametrize("state", [None, [], [1, 2], range(5000)])
def test_what_is_no_state_is_refused_and_changes_nothing(state):
    executor = infer()
    executor.compile(X)
    with pytest.raises(ValueError, match="A random state is a list of a seed"):
        executor.rng_state = state
    assert executor.rng_state == [SEED]
    assert draws(executor, 1) == reference(1)


def test_words_of_a_state_have_32_bits():
    executor = infer()
    executor(X)
    state = list(executor.rng_state)
    state[7] = 2**32
    with pytest.raises(ValueError, match="have 32 bits"):
        executor.rng_state = state


def test_it_is_the_devices_not_the_hosts():
    executor = infer(seed=None)
    executor(X)
    state = list(executor.rng_state)
    torch.manual_seed(3)
    torch.rand(5)
    assert executor.rng_state == state
    before = torch.random.get_rng_state()
    executor.rng_state = state
    assert torch.equal(torch.random.get_rng_state(), before)
