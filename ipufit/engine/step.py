# SPDX-License-Identifier: Apache-2.0
"""The module that PopTorch traces: the user's, with the loss and the figures."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, ContextManager, Iterator, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit._tree import Structure, tree_map
from ipufit.data import Known, Layout
from ipufit.errors import ConfigError, DataError, UnknownNameError
from ipufit.losses import LossTerms
from ipufit.metrics import rows_of
from ipufit.scalars import Scalars, collected

from .figures import Figures
from .objective import shapes_of
from .outputs import split_own_loss

_WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32)


class Results:
    """How a program's flat outputs nest: found out when it is traced.

    What a module returns that is no tensor is the same in every call.
    """

    def __init__(self) -> None:
        self._structure = Structure.of(None)
        self._leaves: list[Any] = []
        self._names: list[str] = []

    def pack(self, outputs: Any, scalars: Scalars) -> tuple[Tensor, ...]:
        """The tensors among the outputs, then the scalars; traceable."""
        self._structure = Structure.of(outputs)
        leaves = self._structure.flatten(outputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._leaves = [None if isinstance(x, Tensor) else x for x in leaves]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self._names = list(scalars)
        return (*tensors, *(value.reshape(1) for value in scalars.values()))

    def unpack(self, tensors: Sequence[Tensor]) -> tuple[Any, Scalars]:
        """Outputs as the module returns them, and scalars, `[micro-batches]` each."""
        count = len(tensors) - len(self._names)
        given = iter(tensors[:count])
        leaves = [
            next(given) if is_tensor else leaf
            for is_tensor, leaf in zip(self._is_tensor, self._leaves)
        ]
        scalars = dict(zip(self._names, tensors[count:]))
        return self._structure.rebuild(leaves), scalars

    @property
    def has_scalars(self) -> bool:
        """Whether a micro-batch gives scalars besides rows."""
        return bool(self._names)


class Step(torch.nn.Module):
    """One micro-batch: from flat tensors to outputs, or to the figures' sums.

    In training it returns the vector of `Figures`, and the outputs if some metric
    needs them, and marks the loss. Else it returns the outputs, and the scalars that
    the module gives: its own loss and what it logs. One module serves both programs,
    as PopTorch wants it for weights to be shared.

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
        self.layout = Layout(Structure(tuple))
        self.figures: Figures | None = None
        self.owns_loss = False
        self.loss_block = loss_block
        self.dtype = dtype
        self.training_results, self.results = Results(), Results()

    def describe_inference(self, layout: Layout, *, owns_loss: bool) -> None:
        """Say how a batch nests, before the step is wrapped for inference.

        A dict of inputs becomes keyword arguments of the module, a tuple or list
        positional ones.
        """
        self.layout = layout
        self.owns_loss = owns_loss
        self.results = Results()

    def describe_training(self, layout: Layout, figures: Figures) -> None:
        """Say what is trained, before the step is wrapped for it."""
        self.layout = layout
        self.figures = figures
        self.owns_loss = figures.objective.owns_loss
        self.training_results = Results()
        # For the losses' buffers.
        self.losses = torch.nn.ModuleList(figures.objective.modules)

    def forward(self, *tensors: Tensor) -> Any:
        """The tensors of the layout; for inference only the inputs."""
        given = [self._cast(tensor) for tensor in tensors[: self.layout.num_inputs]]
        with collected() as scalars:
            outputs = call_module(self.module, self.layout.inputs.rebuild(given))
        own: Tensor | None = None
        if self.owns_loss:
            own, outputs = split_own_loss(outputs)
        if not self.training:
            if own is not None:
                if "loss" in scalars:
                    raise ConfigError(
                        "log('loss') was called, and the module returns its own loss, "
                        "which is called so: log it under another name."
                    )
                scalars = {"loss": own.detach().to(torch.float32), **scalars}
            return self.results.pack(outputs, scalars)
        known = self.layout.known(tensors)
        with self._loss_place():
            vector = self._sums(outputs, known, rows_of(tensors[0]), own, scalars)
        if self.figures is not None and self.figures.objective.is_streamed:
            return (vector, *self.training_results.pack(outputs, {}))
        return vector

    def _sums(
        self,
        outputs: Any,
        known: Known,
        rows: int,
        own: Tensor | None,
        scalars: Scalars,
    ) -> Tensor:
        """Mark the loss, and add up the figures."""
        if self.figures is None:
            raise RuntimeError("a step without figures was traced for training")
        outputs, known = widened_all(outputs, known)
        if self.owns_loss:
            if own is None:
                raise ConfigError(
                    "There is no loss: compile() got none, and the module returns "
                    "none either. Pass loss='cross_entropy' or the like, or return a "
                    "dict with 'loss', as transformers do when labels are among the "
                    "inputs."
                )
            wide: Tensor = own.to(torch.float32)
            total = wide.detach().mul(rows)
            count = torch.full_like(total, float(rows))
            terms = {"": (LossTerms(wide, total, count), 1.0)}
        else:
            terms = self.figures.objective.loss_terms(outputs, known, rows)
        values = [t.value if w == 1 else t.value.mul(w) for t, w in terms.values()]
        value = values[0] if len(values) == 1 else torch.stack(values).sum()
        poptorch.identity_loss(value, reduction="sum")
        return self.figures.vector(outputs, known, rows, terms, scalars)

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

    Raises:
        DataError: `forward` doesn't take such arguments, or not of these shapes.

    Example:
        >>> call_module(torch.nn.Linear(2, 3), torch.zeros(4, 2)).shape
        torch.Size([4, 3])
    """
    is_named = isinstance(inputs, dict)
    by_name = {str(name): value for name, value in inputs.items()} if is_named else {}
    is_several = isinstance(inputs, (tuple, list))
    by_place = () if is_named else tuple(inputs) if is_several else (inputs,)
    _check_arguments(module, by_place, by_name)
    try:
        return module(*by_place, **by_name)
    except poptorch.Error:
        raise
    except (RuntimeError, IndexError) as error:  # torch's, of shapes and types
        raise DataError(
            f"{type(module).__name__} failed with inputs of {shapes_of(inputs)}: "
            f"{error}"
        ) from error


def _check_arguments(
    module: torch.nn.Module, by_place: tuple[Any, ...], by_name: dict[str, Any]
) -> None:
    try:
        signature = inspect.signature(module.forward)
    except ValueError:  # of compiled code
        return
    try:
        signature.bind(*by_place, **by_name)
    except TypeError as error:
        given = ", ".join(map(repr, by_name)) or f"{len(by_place)} by place"
        raise DataError(
            f"{type(module).__name__}.forward{signature} doesn't take the inputs that "
            f"are given ({given}): {error}. A dict of inputs gives arguments by name, "
            "a tuple or list by place."
        ) from None


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


def widened_all(outputs: Any, known: Known) -> tuple[Any, Known]:
    """Outputs, targets and weights in the types that losses want."""
    outputs, targets, weights = widened((outputs, known.targets, known.weights))
    return outputs, known._replace(targets=targets, weights=weights)


@contextlib.contextmanager
def mode(
    module: torch.nn.Module, *, training: bool, root: torch.nn.Module | None = None
) -> Iterator[None]:
    """Put `module` and its children in train or eval mode, and back.

    PopTorch traces a module in the mode it is in, and calls neither `train` nor
    `eval` itself. To be trained, submodules that are in eval mode stay so if the user's
    module is in train mode: somebody has frozen them.

    Args:
        module: The one that is traced.
        training: Which mode.
        root: The user's, inside of it.

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
    if training and before[module] and (root is None or before[root]):
        for child, was_training in before.items():
            if not was_training:  # frozen by the user, such as batch norm
                child.training = False
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
