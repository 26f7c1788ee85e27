# SPDX-License-Identifier: Apache-2.0
"""The module that PopTorch traces: the user's, with the loss and the figures."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Iterator, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit._tree import Structure, tree_map
from ipufit.errors import UnknownNameError
from ipufit.losses import Loss
from ipufit.metrics import MetricCollection
from ipufit.metrics.base import rows_of

_WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32)


class Step(torch.nn.Module):
    """One micro-batch: from flat tensors to outputs, or to the figures' sums.

    With targets it returns the vector of sums of `MetricCollection` and marks the
    loss; without it returns the model's outputs. One module serves both programs, as
    PopTorch wants it for weights to be shared.

    Args:
        module: The user's.
        loss_block: The block the loss joins; None if none has to be entered.
        dtype: Of activations; inputs are cast to it. Figures stay in float32.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        loss_block: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.module = module
        self.inputs = self.targets = Structure(tuple)
        self.loss: Loss | None = None
        self.figures: MetricCollection | None = None
        self.loss_block = loss_block
        self.dtype = dtype

    def describe_inputs(self, inputs: Structure) -> None:
        """Say how the inputs nest, before the step is wrapped.

        A dict becomes keyword arguments of the module, a tuple or list positional
        ones.
        """
        self.inputs = inputs

    def describe(
        self,
        inputs: Structure,
        targets: Structure,
        loss: Loss,
        figures: MetricCollection,
    ) -> None:
        """Say what training needs besides, before the step is wrapped."""
        self.describe_inputs(inputs)
        self.targets = targets
        self.loss = loss
        self.figures = figures
        is_module = isinstance(loss.function, torch.nn.Module)
        self.loss_module = loss.function if is_module else None  # for its buffers

    def forward(self, *tensors: Tensor) -> Any:
        """Inputs, then targets if there are any."""
        given = [self._cast(tensor) for tensor in tensors[: self.inputs.num_leaves]]
        outputs = call_module(self.module, self.inputs.rebuild(given))
        if len(tensors) == len(given):
            return outputs
        return self._sums(outputs, self.targets.rebuild(tensors[len(given) :]))

    def _sums(self, outputs: Any, targets: Any) -> Tensor:
        if self.loss is None or self.figures is None:
            raise RuntimeError("targets were passed to a step without a loss")
        with self._loss_place():
            outputs, targets = widened((outputs, targets))
            value = poptorch.identity_loss(
                self.loss.value(outputs, targets), reduction="sum"
            )
            rows = rows_of(targets)
            total = self.loss.total(value.detach(), rows)
            return self.figures.vector(total, outputs, targets, rows)

    def _loss_place(self) -> ContextManager[Any]:
        if self.loss_block is None:
            return contextlib.nullcontext()
        return poptorch.Block(self.loss_block)

    def _cast(self, tensor: Tensor) -> Tensor:
        if self.dtype == torch.float32 or not tensor.is_floating_point():
            return tensor
        narrowed: Tensor = tensor.to(self.dtype)
        return narrowed


def call_module(module: torch.nn.Module, inputs: Any) -> Any:
    """Call `module` the way its inputs nest.

    Example:
        >>> call_module(torch.nn.Linear(2, 3), torch.zeros(4, 2)).shape
        torch.Size([4, 3])
    """
    if isinstance(inputs, dict):
        return module(**inputs)
    if isinstance(inputs, (tuple, list)):
        return module(*inputs)
    return module(inputs)


def widened(values: Any) -> Any:
    """Nested tensors in the types that torch's losses and exact sums want.

    Half precision becomes float32, and every whole-number type int64, as which class
    indices leave a device but in 32 bits.

    Example:
        >>> widened((torch.zeros(1, dtype=torch.float16), 3))[0].dtype
        torch.float32
    """

    def widen(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dtype == torch.float16:
            return leaf.to(torch.float32)
        return leaf.to(torch.int64) if leaf.dtype in _WHOLE_NUMBERS else leaf

    return tree_map(widen, values)


@contextlib.contextmanager
def mode(module: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Put `module` and its children in train or eval mode, and back.

    PopTorch traces a module in the mode it is in, and calls neither `train` nor
    `eval` itself.

    Example:
        >>> module = torch.nn.Dropout()
        >>> with mode(module, training=False):
        ...     module.training
        False
        >>> module.training
        True
    """
    before: dict[torch.nn.Module, bool] = {m: m.training for m in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for child, was_training in before.items():
            child.training = was_training


def check_stage_names(module: torch.nn.Module, stages: Sequence[Sequence[str]]) -> None:
    """Refuse a mistyped submodule among the names of stages.

    The model's own blocks can't be known before it runs, but who names submodules
    names no blocks beside them.

    Args:
        module: The user's.
        stages: Names of each stage.

    Raises:
        UnknownNameError: Some names are submodules, and some are not.

    Example:
        >>> check_stage_names(torch.nn.Sequential(torch.nn.ReLU()), [["0"], ["1"]])
        Traceback (most recent call last):
        ipufit.errors.UnknownNameError: Unknown submodule in pipeline '1'. Known: 0.
    """
    submodules = {name for name, _ in module.named_modules() if name}
    names = [name for stage in stages for name in stage]
    strangers = [name for name in names if name not in submodules]
    if strangers and len(strangers) < len(names):
        raise UnknownNameError("submodule in pipeline", strangers[0], submodules)


@contextlib.contextmanager
def stage_blocks(
    module: torch.nn.Module, stages: Sequence[Sequence[str]]
) -> Iterator[None]:
    """Begin a block where a submodule that `stages` names begins.

    Names that are no submodule are blocks which the model makes itself. The hooks are
    only there while a program is traced, so the user's module stays as it was.

    Args:
        module: The user's.
        stages: Names of each stage.
    """
    submodules = dict(module.named_modules())
    handles: list[Any] = []
    for name in (name for stage in stages for name in stage):
        if name in submodules:
            handles.append(
                submodules[name].register_forward_pre_hook(
                    lambda _module, _inputs, name=name: poptorch.Block.start(name)
                )
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
