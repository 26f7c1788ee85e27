# SPDX-License-Identifier: Apache-2.0
"""The backward pass, without what `torch.autograd.backward` does around it.

That looks at its arguments for as long as the whole backward pass of a small network
takes. Here they are always the same: one loss, and one gradient of its shape.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch import Tensor


def run_backward(loss: Tensor, gradient: Tensor) -> None:
    """Add gradients to the `grad` of all weights that a loss depends on.

    Args:
        loss: A tensor that requires a gradient.
        gradient: The factor of the loss, of its shape and type.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> run_backward((3.0 * weight).sum(), torch.tensor(2.0))
        >>> weight.grad
        tensor([6., 6.])
    """
    engine = _engine()
    if engine is None:
        torch.autograd.backward(loss, gradient)
    else:
        _run(engine, loss, gradient)


def _run(engine: Callable[..., Any], loss: Tensor, gradient: Tensor) -> None:
    engine(
        (loss,),
        (gradient,),
        False,  # keep the graph
        False,  # make one of this pass
        (),  # into the leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


@functools.lru_cache(maxsize=None)
def _engine() -> Callable[..., Any] | None:
    """Find torch's engine, if it takes these arguments: it is no public API."""
    try:
        engine: Callable[..., Any] = (
            torch.autograd.Variable._execution_engine.run_backward  # type: ignore[attr-defined,unused-ignore]
        )
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.ones((), requires_grad=True)
            _run(engine, torch.mul(leaf, 2.0), torch.ones(()))
    except (AttributeError, TypeError):
        return None
    return engine if leaf.grad is not None and float(leaf.grad) == 2.0 else None
