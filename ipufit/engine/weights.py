# SPDX-License-Identifier: Apache-2.0
"""The weights of a user's module on the host: names, types, copies, modes.

PopTorch gives wrapper classes to the weights of a module that is trained. They fetch
the newest values from the device when a weight is read. PopTorch keeps the wrapper
classes after `destroy()`, and restores them in its next compilation. And
`copy.deepcopy` fails for a wrapped buffer. So ipufit wraps a weight only while the
value on the device is newer.

PopTorch sends weights of 64 bits as float32 or int32, and returns float64 rounded.
Integer buffers are constants of a program; the host counts buffers that `forward` only
counts up, such as batch norm's `num_batches_tracked`.

0-d buffers go to the device with every call. A value that changes during training, such
as an annealed loss weight, can't be a Python number, because Python numbers are
compiled in. Other buffers stay on the device, as weights do. So 0-d buffers are inputs
of a program, and a change takes effect in the next call.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
import weakref
import zlib
from typing import (
    Any,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    NamedTuple,
    Sequence,
    Tuple,
    TypeVar,
)

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils.weak import WeakIdKeyDictionary

from ipufit.distributed import warn_in_first_process
from ipufit.errors import (
    CopiedModuleWarning,
    IpufitWarning,
    UnsupportedError,
)

_WRAPPERS = {
    "OptimizedModule": ("_orig_mod", "torch.compile"),
    "DataParallel": ("module", "DataParallel"),
    "DistributedDataParallel": ("module", "DistributedDataParallel"),
}
"""The attribute of torch's wrappers that is the wrapped module, and how to name them.

`torch.compile` returns an `OptimizedModule`.
"""


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Remove the wrappers of torch.compile and DataParallel from a module.

    PopTorch compiles the whole program, and replicates it.

    Returns:
        The module itself, or the module inside its wrapper, with all wrapped submodules
        replaced.

    Warns:
        IpufitWarning: There was a wrapper.

    Example:
        >>> unwrapped(torch.nn.Linear(2, 1))
        Linear(in_features=2, out_features=1, bias=True)
    """
    names: dict[str, None] = {}
    seen: set[torch.nn.Module] = set()

    def unwrap(part: torch.nn.Module) -> torch.nn.Module:
        kind = type(part)
        while kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
            attribute, name = _WRAPPERS[kind.__name__]
            names[name] = None
            part = getattr(part, attribute)
            kind = type(part)
        if part in seen or isinstance(part, torch.jit.ScriptModule):  # type: ignore[attr-defined,unused-ignore]
            return part
        seen.add(part)
        forward = getattr(part.forward, "_torchdynamo_orig_callable", None)
        if forward is not None or getattr(part, "_compiled_call_impl", None):
            names["torch.compile"] = None
            vars(part)["_compiled_call_impl"] = None
        if forward is not None:
            is_bound = hasattr(inspect.unwrap(forward), "__self__")
            part.forward = forward if is_bound else types.MethodType(forward, part)
        for key, child in part._modules.items():
            if child is not None:
                part._modules[key] = unwrap(child)
        return part

    module = unwrap(module)
    if names:
        warn_in_first_process(
            f"The module is trained without {' and '.join(names)}: PopTorch compiles "
            "the whole program, and IPUConfig(replicas=...) sets the replicas.",
            IpufitWarning,
        )
    return module


MODULE = "module."
"""Prefix of the names of the user's weights in the module that is traced."""


def user_name(name: str) -> str:
    """Return the user's name for a weight or buffer of the traced module.

    Example:
        >>> user_name("module.layer.weight"), user_name("losses.0.beta")
        ('layer.weight', 'losses.0.beta')
    """
    return name[len(MODULE) :] if name.startswith(MODULE) else name


_ORIGINAL: MutableMapping[Tensor, type[Tensor]] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call,unused-ignore]
"""The class that each weight had before PopTorch saw it."""


_RAISED = object()


def unfetched(weight: Tensor, name: str, default: Any = _RAISED) -> Any:
    """Return an attribute of a weight without fetching the weight from its device.

    Args:
        weight: Tensor on the host, wrapped by PopTorch or not.
        name: Name of the attribute.
        default: Value if there is no such attribute, instead of an error.

    Example:
        >>> unfetched(torch.zeros(2), "ndim")
        1
    """
    with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
        try:
            return object.__getattribute__(weight, name)
        except AttributeError:
            if default is _RAISED:
                raise
            return default


def remember_classes(weights: Iterable[Tensor]) -> None:
    """Remember the classes of weights before they are wrapped for the first time."""
    for weight in weights:
        if weight not in _ORIGINAL:
            _ORIGINAL[weight] = type(weight)


def original_class(weight: Tensor) -> type[Tensor]:
    """Return the class of a weight without PopTorch's wrapper.

    Example:
        >>> original_class(torch.zeros(1))
        <class 'torch.Tensor'>
    """
    return _ORIGINAL.get(weight, type(weight))


def remove_wrappers(weights: Iterable[Tensor]) -> None:
    """Restore the classes that weights had before they were wrapped."""
    for weight in weights:
        weight.__class__ = original_class(weight)


class Wrappers:
    """The wrapper classes of one training program's weights.

    While they are on, code that reads a weight gets the newest values, and may change
    them, which PopTorch doesn't notice. So a method of ipufit is called first.

    Args:
        weights: Weights that PopTorch has just wrapped.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._classes = [
            (weight, _ORIGINAL[weight], type(weight)) for weight in weights
        ]
        self._on_touch: Callable[[], Callable[[], None] | None] = lambda: None
        reference = weakref.ref(self)  # PopTorch keeps its classes for good
        for wrapper in {new for _, plain, new in self._classes if new is not plain}:
            _report_touches(wrapper, reference)

    def put_on(self, on_touch: Callable[[], None]) -> None:
        """Wrap the weights, so that reading them fetches them from the device.

        Args:
            on_touch: A method to call before each read.
        """
        self._on_touch = weakref.WeakMethod(on_touch)
        for weight, _, wrapper in self._classes:
            weight.__class__ = wrapper

    def take_off(self) -> None:
        """Remove the wrappers; the weights keep the values that they have on the host.

        Weights that another program has wrapped since keep its wrappers.
        """
        for weight, plain, wrapper in self._classes:
            if type(weight) is wrapper:
                weight.__class__ = plain

    def touch(self) -> None:
        """Call the method before a weight is read."""
        on_touch = self._on_touch()
        if on_touch is not None:
            on_touch()


def _report_touches(wrapper: Any, reference: weakref.ReferenceType[Wrappers]) -> None:
    """Make a wrapper class report reads first, and return plain copies and results."""
    read, write = wrapper.__getattribute__, wrapper.__setattr__

    def touch() -> None:
        wrappers = reference()
        if wrappers is not None:
            wrappers.touch()

    def get(weight: Tensor, name: str) -> Any:
        touch()
        return read(weight, name)

    def put(weight: Tensor, name: str, value: Any) -> None:
        if name != "__class__":
            touch()
        write(weight, name, value)

    wrapper.__getattribute__, wrapper.__setattr__ = get, put
    wrapper.__torch_function__ = classmethod(_plain_result)
    wrapper.__deepcopy__ = _deep_copy


def _plain_result(
    cls: type[Tensor], func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Call a torch function with plain weights, so that state dicts can be saved."""
    with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
        return func(*args, **(kwargs or {}))


def _deep_copy(weight: Tensor, memo: dict[int, Any]) -> Any:
    """Copy a wrapped weight as a plain weight, with its newest value."""
    wrapper = type(weight)
    remove_wrappers([weight])
    try:
        return copy.deepcopy(weight, memo)
    finally:
        weight.__class__ = wrapper


class Counterparts:
    """Pairs of the user's parameters, and the parameters of the copy that is trained.

    No reference to the user's module is kept.

    Args:
        pairs: Each parameter of the user's module, and its counterpart.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self._of: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call,unused-ignore]
        self._before: list[tuple[weakref.ReferenceType[Tensor], Any]] = []
        for parameter, counterpart in pairs:
            self._of[parameter] = counterpart
            self._before.append((weakref.ref(parameter), _state(parameter)))

    def own(self, parameter: Tensor) -> Tensor:
        """Return the counterpart of a user's parameter; return other tensors unchanged.

        Example:
            >>> parameter, counterpart = torch.zeros(1), torch.ones(1)
            >>> Counterparts([(parameter, counterpart)]).own(parameter)
            tensor([1.])
        """
        return self._of.get(parameter, parameter)

    def among(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the pairs of these user's parameters."""
        return [(p, self._of[p]) for p in parameters if p in self._of]

    def warn_of_changes(self) -> None:
        """Warn once of user's parameters that were changed, frozen or unfrozen.

        Warns:
            CopiedModuleWarning: A parameter of the user's module has changed.
        """
        alive = [(reference(), before) for reference, before in self._before]
        if all(p is None or _state(p) == before for p, before in alive):
            return
        self._before = []
        warn_in_first_process(
            "The module that was given to IPUModel has been changed since, and what "
            "runs is model.module, a copy of it in the precision that was asked for: "
            "the change doesn't count. Change, load or freeze the weights of "
            "model.module, or give IPUModel(..., in_place=True).",
            CopiedModuleWarning,
        )


def _state(parameter: Tensor) -> tuple[Any, ...]:
    named = "requires_grad", "_version"
    return tuple(unfetched(parameter, name) for name in named)


T = TypeVar("T")


def deep_copied(value: T, memo: dict[int, Any] | None = None) -> T:
    """Copy modules as `copy.deepcopy` does, and the closures of their functions, too.

    `copy.deepcopy` returns functions as they are. A `forward` that is a closure over
    its module would go on with the module that was copied.

    Args:
        value: A module, or anything with modules in it.
        memo: As for `copy.deepcopy`.

    Example:
        >>> def closed(module):
        ...     module.forward = lambda x: x @ module.weight.T
        ...     return module
        >>> other = deep_copied(closed(torch.nn.Linear(2, 1)))
        >>> _ = other.weight.data.fill_(0.0)
        >>> other(torch.ones(1, 2)).tolist()
        [[0.0]]
    """
    memo = {} if memo is None else memo
    copied = copy.deepcopy(value, memo)
    for part in [c for c in memo.values() if isinstance(c, torch.nn.Module)]:
        for name, attribute in vars(part).items():
            vars(part)[name] = _rebound(attribute, memo)
    return copied


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a function, with copies of the modules and tensors in its closure."""
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _rebound(value.__self__, memo))
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        is_copied = isinstance(value, (torch.nn.Module, Tensor))
        return memo.get(id(value), value) if is_copied else value
    if id(value) not in memo:
        cells = tuple(types.CellType() for _ in value.__closure__)
        parts = value.__code__, value.__globals__, value.__name__, value.__defaults__
        rebound = memo[id(value)] = types.FunctionType(*parts, cells)
        rebound.__kwdefaults__ = value.__kwdefaults__
        rebound.__dict__.update(value.__dict__)
        for cell, old in zip(cells, value.__closure__):
            with contextlib.suppress(ValueError):  # it may be empty
                cell.cell_contents = _rebound(old.cell_contents, memo)
    return memo[id(value)]


_LIMITS = torch.iinfo(torch.int32)


def restore_exact(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Restore the exact values of float64 weights that no program has changed.

    A device gets the weights as float32, and returns them rounded.

    Args:
        values: The weights, and the values that they had on the host.

    Example:
        >>> table = torch.tensor([0.1], dtype=torch.float64)
        >>> exact = table.clone()
        >>> _ = table.copy_(table.to(torch.float32))  # as a device brings it back
        >>> restore_exact([(table, exact)])
        >>> float(table)
        0.1
    """
    for weight, value in values:
        plain = weight.detach()
        rounded = value.to(torch.float32).to(torch.float64)
        if torch.equal(plain.nan_to_num(), rounded.nan_to_num()):
            plain.copy_(value)


def check_values(module: torch.nn.Module) -> None:
    """Refuse weights that an IPU can't hold: complex ones, and too large integers.

    Args:
        module: The user's module, or the traced one.

    Raises:
        UnsupportedError: A weight is complex, or an integer needs more than 32 bits.

    Example:
        >>> module = torch.nn.Identity()
        >>> module.register_buffer("start", torch.tensor([2**40]))
        >>> check_values(module)
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: The buffer start has 1099511627776: an IPU ...
    """
    for kind, named in (
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ):
        for name, weight in ((user_name(long), weight) for long, weight in named):
            if weight.is_complex():
                raise UnsupportedError(
                    f"The {kind} {name} is of {weight.dtype}, and an IPU has no "
                    "complex numbers. Keep the real and the imaginary part as real "
                    "numbers, as torch.view_as_real gives them, and compute with those."
                )
            check_integers(name, weight)


def check_integers(name: str, buffer: Tensor) -> None:
    """Refuse a buffer with integers that an IPU can't hold.

    Args:
        name: Name of the buffer in messages.
        buffer: Tensor of any dtype; only int64 is checked.

    Raises:
        UnsupportedError: An integer needs more than 32 bits.
    """
    if buffer.dtype != torch.int64:
        return
    is_wrong = buffer.lt(_LIMITS.min).logical_or(buffer.gt(_LIMITS.max))
    if is_wrong.any():
        value = int(buffer[is_wrong][0])
        raise UnsupportedError(
            f"The buffer {name} has {value}: an IPU has integers of 32 bits, from "
            f"{_LIMITS.min} to {_LIMITS.max}. Make it smaller, a float, or a plain "
            "attribute that `forward` doesn't compute with."
        )


_COUNTERS = (torch.nn.modules.batchnorm._NormBase,)
"""Modules that change a 0-d buffer themselves in training."""


class HostValue(NamedTuple):
    """A 0-d buffer that only the host changes."""

    owner: torch.nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        """Return the present buffer."""
        return self.owner._buffers[self.name]  # type: ignore[return-value]


class MovedOnDeviceError(Exception):
    """Raised if `forward` changes 0-d buffers, which must then stay on the device."""

    def __init__(self, moved: list[HostValue]) -> None:
        super().__init__("0-d buffers are changed by forward")
        self.moved = moved


def host_values_of(
    modules: Iterable[torch.nn.Module], moved: Collection[HostValue] = ()
) -> list[HostValue]:
    """Return the 0-d buffers that only the host changes.

    Args:
        modules: The user's module, and losses.
        moved: Buffers that `forward` changes.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> module.register_buffer("beta", torch.tensor(0.5))
        >>> [value.name for value in host_values_of([module])]
        ['beta']
    """
    values: dict[HostValue, None] = {}
    for owner in (part for module in modules for part in module.modules()):
        buffers = vars(owner).get("_buffers")
        if isinstance(owner, _COUNTERS) or not isinstance(buffers, dict):
            continue
        for name, buffer in buffers.items():
            if isinstance(buffer, Tensor) and buffer.dim() == 0:
                values[HostValue(owner, name)] = None
    return [value for value in values if value not in moved]


def host_tensors(values: Iterable[HostValue], num_micro_batches: int) -> list[Tensor]:
    """Return inputs of a call for host values, of shape `[micro-batches]` each.

    Args:
        values: Buffers to read.
        num_micro_batches: Micro-batches of a call, over all replicas.

    Raises:
        UnsupportedError: A buffer has an integer that 32 bits can't hold.

    Example:
        >>> module = torch.nn.Module()
        >>> module.register_buffer("beta", torch.tensor(0.5))
        >>> host_tensors([HostValue(module, "beta")], 2)
        [tensor([0.5000, 0.5000])]
    """
    tensors = [(value.name, value.tensor) for value in values]
    for name, tensor in tensors:
        check_integers(name, tensor)
    return [
        tensor.detach().reshape(1).repeat(num_micro_batches) for _, tensor in tensors
    ]


@contextlib.contextmanager
def replaced_by_inputs(
    values: Sequence[HostValue], inputs: Sequence[Tensor]
) -> Iterator[None]:
    """Replace buffers by inputs of a program, while it is traced.

    Args:
        values: Buffers to replace.
        inputs: One tensor `[1]` for each buffer: its value in one micro-batch.

    Raises:
        MovedOnDeviceError: The traced code has changed some of the buffers.
    """
    before = [value.tensor for value in values]
    scalars = [tensor.reshape(()) for tensor in inputs]
    versions = [tensor._version for tensor in scalars]
    for value, tensor in zip(values, scalars):
        value.owner._buffers[value.name] = tensor
    moved: list[HostValue] = []
    try:
        yield
        moved = [
            value
            for value, tensor, version in zip(values, scalars, versions)
            if value.tensor is not tensor or tensor._version != version
        ]
    finally:
        for value, buffer in zip(values, before):
            value.owner._buffers[value.name] = buffer
    if moved:
        raise MovedOnDeviceError(moved)


Fingerprint = Tuple[int, ...]
"""A checksum for each weight."""


def fingerprint(weights: Iterable[Tensor]) -> Fingerprint:
    """Compute checksums of the values of weights.

    Nothing cheaper detects changes: torch doesn't count those made through
    `weight.data`. Reading the weights once costs far less than moving them to a device.

    Args:
        weights: Tensors on the host, of any type and layout.

    Example:
        >>> weight = torch.zeros(2)
        >>> before = fingerprint([weight])
        >>> _ = weight.data.fill_(1.0)
        >>> fingerprint([weight]) == before
        False
    """
    return tuple(checksum(weight) for weight in weights)


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the bytes of a tensor on the host.

    Example:
        >>> checksum(torch.zeros(2)) == checksum(torch.ones(2))
        False
    """
    plain = tensor.detach().contiguous().reshape(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy().data) if plain.numel() else 0


_COUNTED: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call,unused-ignore]


def is_counted(buffer: Tensor) -> bool:
    """Return whether the host counts a buffer up, so that its value changes by itself.

    Example:
        >>> is_counted(torch.tensor(0))
        False
    """
    return buffer in _COUNTED


def counted_up(
    module: torch.nn.Module, increments: Mapping[str, int]
) -> list[tuple[Tensor, int]]:
    """Return the buffers that the host counts up after each call, and the increments.

    Args:
        module: The module that is traced.
        increments: Number that each call adds, by the buffers' names.
    """
    buffers = dict(module.named_buffers())
    counted = [(buffers[name], number) for name, number in increments.items()]
    _COUNTED.update((buffer, True) for buffer, _ in counted)
    return counted


@contextlib.contextmanager
def mode(
    module: torch.nn.Module, *, training: bool, root: torch.nn.Module | None = None
) -> Iterator[None]:
    """Set `module` and its children to train or eval mode inside the context.

    PopTorch traces a module in its present mode, and calls neither `train` nor `eval`.
    In training, submodules in eval mode stay so if the user's module is in train mode:
    the user has frozen them.

    Args:
        module: The module that is traced.
        training: True for train mode, False for eval mode.
        root: The user's module inside of it.

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


def trained_modes(module: torch.nn.Module) -> list[bool]:
    """Return for each submodule whether it runs in train mode in training.

    Args:
        module: The user's module. If it is in train mode, its parts in eval mode are
            frozen.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.BatchNorm1d(2).eval())
        >>> trained_modes(module), trained_modes(module.eval())
        ([True, False], [True, True])
    """
    return [part.training or not module.training for part in module.modules()]


def learning_batch_norms(module: torch.nn.Module) -> list[str]:
    """Return the names of batch norms whose statistics move in training.

    Example:
        >>> norms = torch.nn.Sequential(*(torch.nn.BatchNorm1d(2) for _ in range(2)))
        >>> norms[0] = norms[0].eval()
        >>> learning_batch_norms(norms)
        ['1']
    """
    parts = zip(module.named_modules(), trained_modes(module))
    return [
        name or type(part).__name__
        for (name, part), is_trained in parts
        if is_trained and getattr(part, "track_running_stats", False)
    ]
