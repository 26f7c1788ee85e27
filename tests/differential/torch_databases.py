# SPDX-License-Identifier: Apache-2.0
"""The databases that torch tests itself with: operators, modules and optimizers."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import NamedTuple

import hypothesis
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import ipufit.emulator as poptorch
from ipufit.emulator.core import compile as stages
from ipufit.emulator.core.graph import DispatchMode

EQUAL, REFUSED, ROW, DIFFERENT = "equal", "refused", "row", "different"


@functools.lru_cache(maxsize=None)
def database(name):
    """A list of torch's, or skip the test where this torch hasn't got it."""
    module = {"op_db": "methods_invocations", "module_db": "modules"}
    where = f"torch.testing._internal.common_{module.get(name, 'optimizers')}"
    before = hypothesis.settings.default
    flags = torch.backends.__allow_nonbracketed_mutation_flag
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(importlib.import_module(where), name)
    except (ImportError, AttributeError) as error:
        return pytest.skip(f"torch's database isn't there: {error}")
    finally:  # torch's tests have a profile of their own, and freeze the flags
        hypothesis.settings.register_profile("as before", before)
        hypothesis.settings.load_profile("as before")
        torch.backends.__allow_nonbracketed_mutation_flag = flags


def tensors_of(value):
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


class Call:
    """A function and its arguments, whose tensors can be exchanged."""

    def __init__(self, function, *args, **kwargs):
        self.function = function
        self._leaves, self._form = tree_flatten((args, kwargs))
        self.tensors = tensors_of(self._leaves)

    def arguments(self, tensors=None):
        others = iter(self.tensors if tensors is None else tensors)
        leaves = [
            next(others) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in self._leaves
        ]
        return tree_unflatten(leaves, self._form)

    def run(self, tensors):
        """The tensors that the function returns for these."""
        args, kwargs = self.arguments(tensors)
        return tensors_of(self.function(*args, **kwargs))

    def expected(self):
        return self.run([tensor.clone() for tensor in self.tensors])


class Outcome(NamedTuple):
    """What became of a program on the device.

    Attributes:
        kind: `EQUAL` to torch, `REFUSED`, `ROW` of the table of operators that says
            that it differs, or `DIFFERENT`.
        values: Results, or the message.
    """

    kind: str
    values: object


def compare(run, expected, tolerance=1e-4):
    """Run a program on the device, and compare its results with those of torch."""
    seen = []

    def findings(*args, **kwargs):
        for finding in original(*args, **kwargs):
            seen.append(finding)
            yield finding

    original = stages.findings
    stages.findings = findings
    try:
        results = run()
    except poptorch.Error as error:
        return Outcome(REFUSED, str(error))
    except Exception as error:  # noqa: BLE001 - each is a fault
        return Outcome(DIFFERENT, f"{type(error).__name__}: {error}")
    finally:
        stages.findings = original
    difference = differ(results, expected, tolerance)
    if difference is None or seen:
        return Outcome(ROW if difference else EQUAL, results)
    return Outcome(DIFFERENT, difference)


def differ(results, expected, tolerance):
    """How results differ from those of torch in 32 bits; None if they don't."""
    if len(results) != len(expected):
        return f"{len(results)} results for {len(expected)}"
    for result, wanted in zip(in_32_bits(results), in_32_bits(expected)):
        if (result.dtype, result.shape) != (wanted.dtype, wanted.shape):
            return f"{result.dtype} {result.shape} for {wanted.dtype} {wanted.shape}"
        if not wanted.is_floating_point():
            if not torch.equal(result, wanted):
                return f"{result} for {wanted}"
            continue
        size = wanted.abs().nan_to_num(0, 0, 0).amax().item() if wanted.numel() else 0
        allowed = tolerance * size + 1e-6
        if not torch.allclose(result.float(), wanted.float(), 1e-3, allowed, True):
            gap = (result - wanted).abs().nan_to_num(0).max()
            return f"{gap:.3g} off, of {size:.3g}: {result} for {wanted}"
    return None


def in_32_bits(tensors):
    """What a device returns where torch has 64 bits."""
    dtypes = {torch.int64: torch.int32, torch.float64: torch.float32}
    dense = [t if t.layout == torch.strided else t.to_dense() for t in tensors]
    return [t.detach().to(dtypes.get(t.dtype, t.dtype)) for t in dense]


class _Undetermined(DispatchMode):
    is_seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.is_seen |= is_random or name.startswith(("empty", "new_empty"))
        return func(*args, **(kwargs or {}))


def is_comparable(call):
    """Whether torch runs it on copies, without random numbers and unwritten memory."""
    try:
        with _Undetermined() as mode:
            call.expected()
    except (RuntimeError, AssertionError, IndexError):
        # Such as functions of CUDA alone; torch_geometric changes `index_select`.
        return False
    return not mode.is_seen
