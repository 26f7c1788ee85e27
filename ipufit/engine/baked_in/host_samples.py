# SPDX-License-Identifier: Apache-2.0
"""Samples of distributions that were made on the host, which a program has baked in."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any, Callable, Iterator

import torch
from torch.distributions import Distribution

from ipufit.errors import BakedInWarning

_SAMPLERS = ("sample", "rsample", "sample_n")


@contextlib.contextmanager
def host_samples_warned(module: torch.nn.Module) -> Iterator[None]:
    """Warn of distributions of a module that are sampled while it is traced.

    A distribution that the module has had before has its parameters on the host, and
    so has what is sampled of it: PopTorch traces one sample, which is a constant. One
    that `forward` makes is sampled by the device.

    Args:
        module: The user's module; attributes of its submodules count.

    Warns:
        BakedInWarning: `forward` samples such a distribution.
    """
    owned = dict(_distributions(module))
    if not owned:
        yield
        return
    sampled: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for path, distribution in owned.items():
            for name in _SAMPLERS:
                stack.enter_context(_watched(distribution, name, path, sampled))
        yield
    for path, kind in sampled.items():
        warnings.warn(
            f"forward samples {path}, a {kind} that was made before on the host. It "
            "runs once, when the program is compiled: that one sample is baked in, and "
            f"every batch is computed with it. Make the {kind} in forward, as in "
            "torch.distributions.Uniform(0.0, 1.0).sample(), and the device draws for "
            "each micro-batch; or pass the numbers as an input.",
            BakedInWarning,
            stacklevel=2,
        )


def _distributions(module: torch.nn.Module) -> Iterator[tuple[str, Distribution]]:
    for path, part in module.named_modules(prefix="module"):
        for name, value in vars(part).items():
            if isinstance(value, Distribution):
                yield f"{path}.{name}", value


@contextlib.contextmanager
def _watched(
    distribution: Distribution, name: str, path: str, sampled: dict[str, str]
) -> Iterator[None]:
    """Note calls of a method of one object, which has it as an attribute meanwhile."""
    own: dict[str, Any] = vars(distribution)
    before = own.get(name)
    method: Callable[..., Any] = getattr(distribution, name)

    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        sampled[path] = type(distribution).__name__
        return method(*args, **kwargs)

    own[name] = noted
    try:
        yield
    finally:
        if before is None:
            own.pop(name, None)
        else:
            own[name] = before
