# SPDX-License-Identifier: Apache-2.0
"""Find where the stages of a config begin in a module, and the module's own blocks."""

from __future__ import annotations

import contextlib
import fnmatch
import threading
from functools import partial
from typing import (
    Any,
    Callable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch

from ._modules import modules_of
from ._poptorch import poptorch
from .config import REST, IPUConfig, check_filled, layer_lists
from .errors import ConfigError, UnknownNameError

Layers = Union[torch.nn.ModuleList, torch.nn.Sequential]


Begun = Tuple[Optional[str], Optional[int]]
"""Name and IPU of a block, as the user passed them to PopTorch."""

Blocks = List[Begun]


_ONE_LIST = threading.RLock()  # `Block.start` is the same for all threads


@contextlib.contextmanager
def started_blocks(stages: Sequence[Sequence[str]] = ()) -> Iterator[Blocks]:
    """Record the blocks that a module starts, by `with Block(...)` or `Block.start`.

    Blocks of `BeginBlock` aren't recorded: they are never closed, so they needn't be
    entered again.

    Args:
        stages: Names of each stage; empty if the names aren't known.

    Yields:
        The blocks so far, in order.

    Raises:
        UnknownNameError: A block that the module starts isn't in any stage.

    Example:
        >>> with started_blocks() as blocks, poptorch.Block("head", ipu_id=1):
        ...     pass
        >>> blocks
        [('head', 1)]
    """
    blocks: Blocks = []
    names = {name for stage in stages for name in stage}

    def listed(user_id: str | None = None, ipu_id: int | None = None) -> None:
        if names and user_id is not None and user_id not in names:
            kind = "block of the model (`pipeline` names others)"
            raise UnknownNameError(kind, user_id, names)
        blocks.append((user_id, ipu_id))
        start(user_id, ipu_id)

    with _ONE_LIST:
        start = poptorch.Block.start
        poptorch.Block.start = staticmethod(listed)  # type: ignore[method-assign,assignment,unused-ignore]
        try:
            yield blocks
        finally:
            poptorch.Block.start = staticmethod(start)  # type: ignore[method-assign,assignment,unused-ignore]


def annotated_blocks(module: torch.nn.Module) -> dict[str, Begun]:
    """Return the blocks of `BeginBlock`, by the names of their submodules.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
        >>> _ = poptorch.BeginBlock(module[1], "head", ipu_id=1)
        >>> annotated_blocks(module)
        {'1': ('head', 1)}
    """
    blocks: dict[str, Begun] = {}
    for name, child in module.named_modules():
        if not child._forward_pre_hooks:
            continue
        probe = torch.nn.Module()  # PopTorch can remove its hooks, not list them
        probe._forward_pre_hooks.update(child._forward_pre_hooks)
        poptorch.removeBlocks(probe)
        for key, hook in child._forward_pre_hooks.items():
            if key not in probe._forward_pre_hooks:
                blocks[name] = (
                    getattr(hook, "_user_id", None),
                    getattr(hook, "_ipu_id", None),
                )
    return blocks


class Beginnings(NamedTuple):
    """Blocks that ipufit begins, by the names of their submodules.

    Attributes:
        before: Blocks that begin when a submodule is called.
        after: Blocks that begin when it has returned.
    """

    before: Mapping[str, str]
    after: Mapping[str, str]


def find_beginnings(module: torch.nn.Module, config: IPUConfig) -> Beginnings:
    """Find the submodules that begin the stages of a config.

    A pattern is the name of a block that begins at each submodule that matches. The
    first call of such a submodule begins the block; beginning a running block again
    changes nothing. Blocks that the module begins itself aren't included.

    Raises:
        UnknownNameError: Some names are submodules and another isn't, or a pattern
            matches no submodule, or there is no such list of layers.
        ConfigError: A submodule is named by two stages, the numbers of layers don't
            fit the module, or its `BeginBlock`s begin blocks of no stage.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
        >>> find_beginnings(network, IPUConfig(pipeline=["0", "[1-9]"])).before
        {'0': '0', '1': '[1-9]'}
        >>> find_beginnings(network, IPUConfig(layers_per_ipu=[1, -1])).before
        {'0': 'layers on IPU 0', '1': 'layers on IPU 1'}
    """
    _refuse_other_blocks(module, config)
    if config.layers_per_ipu is not None:
        return _beginnings_of_layers(module, config)
    names = [name for name, _ in module.named_modules() if name]
    before: dict[str, str] = {}
    stage_of: dict[str, int] = {}
    unmatched = []
    for number, stage in enumerate(config.stages):
        for pattern in stage:
            matches = [pattern] if pattern in names else []
            matches = matches or [n for n in names if fnmatch.fnmatchcase(n, pattern)]
            if not matches:
                unmatched.append(pattern)
            for name in matches:
                if stage_of.setdefault(name, number) != number:
                    raise ConfigError(
                        f"pipeline has {before[name]!r} and {pattern!r} in different "
                        f"stages, and both stand for the submodule {name}. Have one "
                        "of them match fewer."
                    )
                before.setdefault(name, pattern)
    annotated = {name for name, _ in annotated_blocks(module).values()}
    for name in unmatched:
        # Blocks that `forward` begins aren't known before it runs. But a pipeline
        # names either submodules or blocks, not both.
        is_pattern = "*" in name or "?" in name  # "layer[0]" may be a block
        if name not in annotated and (before or is_pattern):
            raise UnknownNameError("submodule in pipeline", name, names)
    return Beginnings(before, {})


def blocks_begun(
    module: torch.nn.Module, config: IPUConfig
) -> tuple[dict[str, Begun], dict[str, Begun]]:
    """Return the blocks that begin before and after submodules, by their names.

    Args:
        module: The user's module.
        config: The config that names the stages.

    Returns:
        The blocks of `config` and of `BeginBlock`. Blocks that `forward` begins are
        known when it runs.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
        >>> blocks_begun(network, IPUConfig(pipeline=["0", "1"]))
        ({'0': ('0', None), '1': ('1', None)}, {})
    """
    before, after = find_beginnings(module, config)
    return (
        {**annotated_blocks(module), **{n: (b, None) for n, b in before.items()}},
        {name: (block, None) for name, block in after.items()},
    )


@contextlib.contextmanager
def followed(
    module: torch.nn.Module,
    config: IPUConfig,
    called: Callable[[str, torch.nn.Module], Any],
    returned: Callable[[str, Any], Any],
) -> Iterator[Callable[[], Begun | None]]:
    """Track which block is running while a module runs inside the context.

    Args:
        module: The module that runs.
        config: The config that names the stages.
        called: Called with name and submodule at each call, after its block has begun.
        returned: Called with name and outputs after the call, before the next block
            begins.

    Yields:
        A function that returns the present block; None before the first.
    """
    now: Begun | None = None
    if config.first_block is not None:
        now = config.first_block, None
    begins, ends = blocks_begun(module, config)
    num_seen = 0
    with started_blocks() as blocks, contextlib.ExitStack() as hooks:

        def present() -> Begun | None:
            nonlocal now, num_seen
            if len(blocks) > num_seen:
                now, num_seen = blocks[-1], len(blocks)
            return now

        def begin(child: torch.nn.Module, _args: Any, name: str) -> None:
            nonlocal now
            now = begins.get(name, present())
            called(name, child)

        def end(_module: Any, _args: Any, output: Any, name: str) -> None:
            nonlocal now
            returned(name, output)
            now = ends.get(name, present())

        for name, child in module.named_modules():
            before, after = partial(begin, name=name), partial(end, name=name)
            hooks.enter_context(child.register_forward_pre_hook(before))
            hooks.enter_context(child.register_forward_hook(after))
        yield present


def stage_and_ipu(block: Begun, config: IPUConfig) -> tuple[int | None, int | None]:
    """Return stage and IPU of a block; None where a strategy of PopTorch decides.

    Example:
        >>> stage_and_ipu(("head", None), IPUConfig(pipeline=["body", "head"]))
        (1, 1)
    """
    name, ipu = block
    for index, names in enumerate(config.stages):
        if name in names:
            stage = config.placement[index]
            if ipu is not None and getattr(stage, "_ipu", 0) is None:
                return index, ipu  # the stage leaves it to the block
            return index, config.stage_ipus[index]
    has_default = config.placement is None and config.training_options is None
    return (ipu, ipu) if has_default else (None, ipu)


def own_stages(module: torch.nn.Module, config: IPUConfig) -> int:
    """Count the stages of a module's `BeginBlock`s.

    PopTorch's default puts each block on the stage of its IPU. Operations before the
    first block are on IPU 0. Blocks that `forward` begins are only known when it runs.

    Args:
        config: The program's config; its stages take precedence over the module's.

    Returns:
        Number of forward stages; 1 if the module's blocks don't make a pipeline.

    Example:
        >>> from ipufit import poptorch
        >>> network = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
        >>> _ = poptorch.BeginBlock(network[1], ipu_id=1)
        >>> own_stages(network, IPUConfig())
        2
    """
    if config.placement is not None or not config.is_pipelined:
        return 1
    if not any(part._forward_pre_hooks for part in modules_of(module)):
        return 1
    return len({0, *(ipu for _, ipu in annotated_blocks(module).values() if ipu)})


def _refuse_other_blocks(module: torch.nn.Module, config: IPUConfig) -> None:
    """Refuse a `BeginBlock` whose block isn't in any stage, as PopTorch's trace would.

    PopTorch numbers blocks without a name: "0", "1", ...
    """
    known = {name for stage in config.stages for name in stage}
    are_numbered = any(name.isdigit() for name in known)
    for place, (name, _) in annotated_blocks(module).items():
        if not known or name in known or (name is None and are_numbered):
            continue
        field = "pipeline" if config.layers_per_ipu is None else "layers_per_ipu"
        block = "a block without a name" if name is None else f"the block {name!r}"
        raise ConfigError(
            f"The submodule {place or 'itself'} begins {block} (poptorch.BeginBlock), "
            f"which is in no stage that {field} makes. Name it in pipeline=(...), or "
            "take it out: poptorch.removeBlocks(module)."
        )


def _beginnings_of_layers(module: torch.nn.Module, config: IPUConfig) -> Beginnings:
    layers_per_ipu, stages = config.layers_per_ipu, config.stages
    placed = {
        name: (layers, _expanded(layers_per_ipu, name, numbers, len(layers)))
        for name, layers, numbers in _lists(module, layers_per_ipu)
    }
    columns = [numbers for _, numbers in placed.values()]
    check_filled(layers_per_ipu, columns)
    before: dict[str, str] = {}
    blocks: dict[int, set[str]] = {}
    last = ""
    for name, (layers, numbers) in placed.items():
        ipus = [ipu for ipu, count in enumerate(numbers) for _ in range(count)]
        for (key, layer), ipu in zip(layers._modules.items(), ipus):
            last = f"{name}.{key}" if name else key
            before[last] = stages[ipu][0]
            blocks.setdefault(id(layer), set()).add(stages[ipu][0])
    # A layer in several places, such as an activation, joins what runs.
    known = {name: id(child) for name, child in module.named_modules()}
    moving = {layer for layer, names in blocks.items() if len(names) > 1}
    before = {name: b for name, b in before.items() if known.get(name) not in moving}
    before = {name: block for name, block in before.items() if name in known}
    has_rest = not any(column[-1] for column in columns)
    return Beginnings(before, {last: stages[-1][0]} if has_rest else {})


def _lists(
    module: torch.nn.Module, layers_per_ipu: Any
) -> Iterator[tuple[str, Layers, Sequence[int]]]:
    """Yield the lists of layers of a module, and the numbers for each."""
    lists = {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential))
    }
    for name, numbers in layer_lists(layers_per_ipu).items():
        if name is None:
            name = _fitting(lists, layers_per_ipu, numbers)
        elif name not in lists:
            raise UnknownNameError("list of layers in layers_per_ipu", name, lists)
        yield name, lists[name], numbers


def _fitting(
    lists: Mapping[str, Layers], layers_per_ipu: Any, numbers: Sequence[int]
) -> str:
    """Return the list with as many layers as numbers; the longest if there is a -1."""
    count = sum(number for number in numbers if number != REST)
    lengths = {name: len(layers) for name, layers in lists.items()}
    wanted = max(lengths.values(), default=0) if REST in numbers else count
    fitting = [name for name, length in lengths.items() if length == wanted]
    outer = [
        name
        for name in fitting
        if not any(is_inside(name, other) for other in fitting if other != name)
    ]
    if not outer:
        has = ", ".join(f"{name or 'itself'} ({n})" for name, n in lengths.items())
        raise ConfigError(
            f"layers_per_ipu={layers_per_ipu!r} places {count} layers, and the model "
            "has no ModuleList or Sequential of so many. It has "
            f"{has or 'none at all'}. Give numbers that add up, -1 for the rest, or "
            "names in pipeline=(...)."
        )
    if len(outer) > 1:
        raise ConfigError(
            f"layers_per_ipu={layers_per_ipu!r} may be about {' or '.join(outer)}, "
            f"lists of {wanted} layers: name the list, as in "
            f"{{{outer[0]!r}: {layers_per_ipu!r}}}."
        )
    return outer[0]


def is_inside(name: str, other: str) -> bool:
    """Return whether a submodule is within another one, by their names.

    Example:
        >>> is_inside("encoder.layer.0", "encoder"), is_inside("encoder", "encoder")
        (True, False)
    """
    return not other or name.startswith(f"{other}.")


def _expanded(
    layers_per_ipu: Any, name: str, numbers: Sequence[int], count: int
) -> Sequence[int]:
    """Replace -1 by an even division of the rest; the last IPUs get one layer more."""
    fixed = sum(number for number in numbers if number != REST)
    shares = [ipu for ipu, number in enumerate(numbers) if number == REST]
    if fixed > count or (fixed < count and not shares):
        raise ConfigError(
            f"layers_per_ipu={layers_per_ipu!r} places {fixed} layers of "
            f"{name or 'the Sequential'}, which has {count}. Give numbers that add up "
            "to that, or -1 for the rest."
        )
    expanded = list(numbers)
    for place, ipu in enumerate(shares):
        even, more = divmod(count - fixed, len(shares))
        expanded[ipu] = even + (place >= len(shares) - more)
    return expanded
