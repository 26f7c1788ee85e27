# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline: where their blocks begin, and the block that the loss joins."""

from __future__ import annotations

import contextlib
import re
from typing import Any, ContextManager, Iterator

import torch

from ipufit._poptorch import poptorch
from ipufit.blocks import Blocks, annotated_blocks
from ipufit.config import IPUConfig
from ipufit.errors import ConfigError, UnknownNameError
from ipufit.placement import Beginnings, find_beginnings


class ShortPipelineError(ConfigError):
    """A call has too few micro-batches for the blocks that the model begins itself."""


def check_stages_begin(
    module: torch.nn.Module, config: IPUConfig, started: Blocks, *, training: bool
) -> None:
    """Refuse names of stages that nothing begins: PopTorch would pass over them.

    Too much of the model, or all of it, would be on the first stage.

    Args:
        module: The user's module, whose `forward` has been traced.
        config: Names the stages.
        started: Blocks that `forward` has begun.
        training: Whether the program trains. In inference `forward` may leave parts
            out.

    Raises:
        UnknownNameError: A name is no submodule, and no block that was begun.
        ConfigError: A name is a submodule that was never called, or a pattern of such.

    Example:
        >>> module = torch.nn.ModuleDict({"encoder": torch.nn.ReLU()})
        >>> config = IPUConfig(pipeline=["enc"])
        >>> check_stages_begin(module, config, [], training=True)
        Traceback (most recent call last):
        ipufit.errors.UnknownNameError: Unknown submodule or block in pipeline 'enc'...
    """
    begun = {name for name, _ in started if name is not None}
    begun.update(name for name, _ in annotated_blocks(module).values() if name)
    is_counted = any(name is None for name, _ in started)  # their ids are numbers
    names = [name for stage in config.stages for name in stage]
    if config.layers_per_ipu is not None:
        del names[0]  # it begins before the module
    missing = [n for n in names if n not in begun and not (is_counted and n.isdigit())]
    if not missing or (not training and len(missing) < len(names)):
        return
    beginnings = find_beginnings(module, config)
    meant = {*beginnings.before.values(), *beginnings.after.values()}
    for name in missing:
        if name not in meant:
            known = begun.union(n for n, _ in module.named_modules() if n)
            raise UnknownNameError("submodule or block in pipeline", name, known)
    raise _never_called(module, beginnings, missing[0])


def _never_called(
    module: torch.nn.Module, beginnings: Beginnings, block: str
) -> ConfigError:
    submodules = dict(module.named_modules())
    places = (*beginnings.before.items(), *beginnings.after.items())
    names = [name for name, begun in places if begun == block]
    if block not in submodules:
        return ConfigError(
            f"The stage {block!r} begins at {', '.join(names[:3])}, and `forward` "
            "calls none of these: a stage begins where a submodule is called. Name one "
            "that is called, or begin a block there: with poptorch.Block(...)."
        )
    inner = [n for n in submodules if n.startswith(f"{block}.")]
    return ConfigError(
        f"pipeline names {block!r}, a {type(submodules[block]).__name__} "
        "that `forward` never calls: a stage begins where its submodule is called. "
        + (
            f"Name the first that is called in it, such as {inner[0]!r}, or "
            if inner
            else "Name one that is called, or "
        )
        + f"begin a block there: with poptorch.Block({block!r})."
    )


@contextlib.contextmanager
def stage_blocks(module: torch.nn.Module, config: IPUConfig) -> Iterator[None]:
    """Begin a block where a submodule that a config's stages name begins.

    Other names are blocks that the model makes itself. The hooks are only there while a
    program is traced, so the user's module stays as it was.

    Args:
        module: The user's module.
        config: Names the stages.

    Raises:
        ShortPipelineError: The model's own blocks need more micro-batches than a call
            has.
    """
    submodules = dict(module.named_modules())
    beginnings = find_beginnings(module, config)
    handles: list[Any] = []
    for name, block in beginnings.before.items():
        begin = _Begin(block)
        handles.append(submodules[name].register_forward_pre_hook(begin))
    for name, block in beginnings.after.items():
        handles.append(submodules[name].register_forward_hook(_Begin(block)))
    try:
        yield
    except poptorch.Error as error:
        _refuse_short_pipeline(error)
        raise
    finally:
        for handle in handles:
            handle.remove()


class _Begin:
    """A hook that begins a block."""

    def __init__(self, block: str) -> None:
        self._block = block

    def __call__(self, *_args: Any) -> None:
        poptorch.Block.start(self._block)


def _refuse_short_pipeline(error: poptorch.Error) -> None:
    """Explain an error of PopTorch about too few micro-batches for a model's blocks."""
    found = re.search(r"number of pipeline stages \((\d+)\)", str(error))
    if found is None:
        return
    least = int(found[1])
    is_training = "gradientAccumulation" in str(error)
    stages = (least + 1) // 2 if is_training else least
    way = (
        f"training keeps {least} micro-batches in flight: use "
        f"IPUConfig(gradient_accumulation={least}) or more, or a larger batch_size,"
        if is_training
        else f"a call needs {least} micro-batches: use "
        f"IPUConfig(inference_iterations={least}) or more,"
    )
    raise ShortPipelineError(
        f"The model begins blocks of {stages} stages, and {way} or name the blocks in "
        "pipeline=(...), so that ipufit sees to it, or take execution='sharded', which "
        "runs one stage after the other."
    ) from error


def last_block(name: str | None, started: Blocks) -> ContextManager[Any]:
    """Enter the block that the loss, and all else that ipufit adds, joins.

    After a `with Block(...)` no block is active, and PopTorch refuses every operator
    then. Entering the last one again makes no new stage.

    Args:
        name: Name of the block; None for the last one that the module started.
        started: Blocks that the module started.

    Returns:
        A context in which the block is open; without blocks one that does nothing.
    """
    if name is not None:
        return _named_block(name, started)
    return poptorch.Block(*started[-1]) if started else contextlib.nullcontext()


@contextlib.contextmanager
def _named_block(name: str, started: Blocks) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(poptorch.Block(name))
        except AssertionError as error:  # it would be a new one, on no IPU
            known = {one for one, _ in started if one is not None}
            raise UnknownNameError("loss_block", name, known) from error
        yield
