# SPDX-License-Identifier: Apache-2.0
"""Tensors without values, on which a program is traced in no time and memory."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Iterator, Mapping

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import Node
from torch.utils._mode_utils import no_dispatch

from ipufit.emulator._program.kernel_types import check_types
from ipufit.emulator._tracing.operation import map_tensors, tensors_in

_STORED_AS = {torch.float64: torch.float32, torch.bfloat16: torch.float32}


class Fakes:
    """Makes tensors that have shapes and types, and runs functions on them.

    Example:
        >>> fakes = Fakes()
        >>> x = fakes.like(torch.ones(2, 3))
        >>> fakes.run(torch.matmul, x, fakes.like(torch.ones(3, 4))).shape
        torch.Size([2, 4])
    """

    def __init__(self) -> None:
        make: Any = FakeTensorMode
        self.mode = make(allow_non_fake_inputs=True)

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, in the type that a device stores."""
        dtype = _STORED_AS.get(tensor.dtype, tensor.dtype)
        with self.mode:
            return torch.empty(tuple(tensor.shape), dtype=dtype, device="cpu")

    def weight(self, weight: Tensor) -> Tensor:
        """A tensor in the place of a weight, which is trained if that is."""
        fake = self.like(weight)
        fake.requires_grad_(weight.requires_grad and fake.is_floating_point())
        return fake

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        watch: ContextManager[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function of torch's on fake tensors, and on real ones among them.

        A function that needs values, or is unknown to fake tensors, is called on real
        ones of the same shapes: its result has the shape that these give. `watch` sees
        the operators that the function runs.

        Raises:
            RuntimeError: torch's kernels refuse the types of the tensors.
        """
        around = contextlib.nullcontext() if watch is None else watch
        try:
            with _exported(FakeTensor), self.mode, around:
                fake = function(*args, **kwargs)
        except Exception:
            with no_dispatch():  # type: ignore[no-untyped-call,unused-ignore]
                given, named = map_tensors((args, kwargs), _real)
            try:
                with around:
                    result = function(*given, **named)
            except Exception:  # noqa: BLE001 - it is the program's, as the first one
                result = None
            if result is None:
                raise
        else:
            check_types(function, args, kwargs)
            return fake
        trained = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        return map_tensors(result, lambda tensor: self._fake(tensor, trained))

    def _fake(self, tensor: Tensor, sources: list[Tensor]) -> Tensor:
        """A fake of a result, which depends on what it was computed from."""
        fake = self.like(tensor)
        if not tensor.is_floating_point():
            return fake
        with self.mode:
            for source in sources:
                fake = fake + source.sum() * 0
        return fake


class _NoTensor:
    """Stands for the class of fake tensors, for a program that asks for it."""


def unseen() -> ContextManager[None]:
    """Hide from a program that its tensors are fake.

    Libraries look for it: transformers 5 leaves out its questions about values where
    tensors are fake, so a survey wouldn't meet them.
    """
    return _exported(_NoTensor)


@contextlib.contextmanager
def _exported(cls: type) -> Iterator[None]:
    """Have torch export a class as that of fake tensors.

    torch's own code takes it from the module that defines it, but for a few operators.
    """
    package: Any = torch._subclasses
    before = package.FakeTensor
    package.FakeTensor = cls
    try:
        yield
    finally:
        package.FakeTensor = before


class RealResults(Mapping[Node, Any]):
    """Results of a trace with zeros in the place of fake tensors, made when asked for.

    Args:
        results: Node to its result.
    """

    def __init__(self, results: Mapping[Node, Any]) -> None:
        self._results = results

    def __getitem__(self, node: Node) -> Any:
        """The result of a node."""
        return map_tensors(self._results[node], _zeros)

    def __iter__(self) -> Iterator[Node]:
        """The nodes."""
        return iter(self._results)

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self._results)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)


def _real(tensor: Tensor) -> Tensor:
    size, strides = tuple(tensor.shape), tensor.stride()
    ones: Tensor = torch.empty_strided(size, strides, dtype=tensor.dtype).fill_(1)
    ones.requires_grad_(tensor.requires_grad)
    return ones
