# SPDX-License-Identifier: Apache-2.0
"""The memory that outputs of a module take, found by a call for one sample."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import warnings
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from ipufit._tree import Structure
from ipufit.data import HostRandomState, SampleStructure
from ipufit.engine.objective.steps import Inferred, result_of_step
from ipufit.engine.weights.modes import mode
from ipufit.engine.weights.wrapping import unfetched
from ipufit.scalars import collected

from .calling import call_module, call_step


class OutputSize(NamedTuple):
    """The results of a program for one micro-batch.

    Attributes:
        num_bytes: Bytes of all tensors that come back.
        has_scalars: Whether scalars are among them: an own loss, or logged ones.
        moves_buffers: Whether the module changes a buffer in place, in eval mode, so
            that each further pass changes the next ones.
    """

    num_bytes: int
    has_scalars: bool
    moves_buffers: bool = False


def output_size(
    module: torch.nn.Module,
    inferred: Inferred,
    structure: SampleStructure,
    example: Sequence[Tensor],
) -> OutputSize | None:
    """Call a module, or a step, with one sample of zeros.

    A copy of the module is called whose weights are zeros, too: one number for each
    parameter, seen in its shape. So this takes little memory and time, and the module
    and all random states stay as they are. Nothing is printed: `forward` prints when it
    is traced. (Tensors of shapes alone, on the device "meta",
    would have torch import its compiler, which takes a second.)

    Args:
        module: The user's module.
        inferred: The computation of the program.
        structure: Nesting of a batch.
        example: Tensors of a micro-batch, of which only shapes and types count.

    Returns:
        None if the module can't be copied, or not be called with such tensors.

    Example:
        >>> from ipufit.data import as_source
        >>> source = as_source(torch.zeros(8, 3))
        >>> module, example = torch.nn.Linear(3, 5), source.example(4)
        >>> output_size(module, Inferred(False), source.structure, example)
        OutputSize(num_bytes=80, has_scalars=False, moves_buffers=False)
    """
    try:
        with quiet(), collected() as scalars:
            copied = of_zeros(module)
            buffers = list(copied.buffers())
            outputs = called(copied, inferred, structure, first_of_zeros(example))
            leaves = [*_leaves(outputs), *scalars.values()]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    except Exception:  # noqa: BLE001 - a user's code may raise anything
        return None
    has_scalars = bool(scalars) or any(not tensor.dim() for tensor in tensors)
    rows = len(example[0])
    num_bytes = sum(bytes_of([t]) * (rows if t.dim() else 1) for t in tensors)
    return OutputSize(num_bytes, has_scalars, any(one._version for one in buffers))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Compute without gradients and put random states back; nobody hears of it.

    Example:
        >>> before = torch.get_rng_state()
        >>> with quiet():
        ...     print(torch.rand(()))
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    before = HostRandomState()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # they come again when it is traced
            with contextlib.redirect_stdout(io.StringIO()):
                yield
    finally:
        before.put_back()


def called(
    module: torch.nn.Module,
    inferred: Inferred,
    structure: SampleStructure,
    tensors: Sequence[Tensor],
) -> Any:
    """Everything that comes back from a module in eval mode, or from a step.

    Args:
        module: A copy of the user's module.
        inferred: The computation of the program.
        structure: Nesting of a batch.
        tensors: Tensors of a batch.
    """
    with mode(module, training=False):
        return _result(module, inferred, structure, tensors)


def _result(
    module: torch.nn.Module,
    inferred: Inferred,
    structure: SampleStructure,
    tensors: Sequence[Tensor],
) -> Any:
    inputs, _ = structure.split(tensors)
    if inferred.step is None:
        return call_module(module, inputs)
    if not inferred.takes_labels:
        return call_step(inferred.step, module, inputs)
    batch = structure.batch(inputs, tensors)
    result = result_of_step(call_step(inferred.step, module, batch))
    return result if inferred.gives_outputs else result.loss


def first_of_zeros(example: Sequence[Tensor]) -> list[Tensor]:
    """One sample of zeros, of the shapes and types of a batch.

    Example:
        >>> first_of_zeros([torch.ones(4, 2)])
        [tensor([[0., 0.]])]
    """
    return [_zeros_like(tensor[:1]) for tensor in example]


def of_zeros(module: torch.nn.Module) -> torch.nn.Module:
    """A copy whose weights are zeros.

    Whoever looks at a weight that PopTorch trains has it fetched from its device. So
    only what `unfetched` reads is looked at.

    Example:
        >>> of_zeros(torch.nn.Linear(2, 1)).weight.tolist()
        [[0.0, 0.0]]
    """
    memo: dict[int, Any] = {}
    for weight in module.parameters():
        memo[id(weight)] = torch.nn.Parameter(_zeros_like(weight), requires_grad=False)
    for buffer in module.buffers():  # may be changed in place
        memo[id(buffer)] = _zeros_like(buffer).contiguous()
    return copy.deepcopy(module, memo)


def _zeros_like(tensor: Tensor) -> Tensor:
    """One zero, seen in a shape; float16 becomes float32, of which it has all sums."""
    dtype = unfetched(tensor, "dtype")
    if dtype == torch.float16:
        dtype = torch.float32
    zeros: Tensor = torch.zeros((), dtype=dtype).expand(unfetched(tensor, "shape"))
    return zeros


def num_weights(module: torch.nn.Module) -> int:
    """Number of elements of all parameters, without fetching them from a device.

    Example:
        >>> num_weights(torch.nn.Linear(3, 2))
        8
    """
    shapes = [unfetched(weight, "shape") for weight in module.parameters()]
    return sum(math.prod(shape) for shape in shapes)


def _leaves(outputs: Any) -> list[Any]:
    return Structure.of_outputs(outputs).flatten(outputs)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that the elements of tensors take.

    Example:
        >>> bytes_of([torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)])
        56
    """
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors)
