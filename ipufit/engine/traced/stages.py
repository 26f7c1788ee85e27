# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline: where their blocks begin, and the block that the loss joins."""

from __future__ import annotations

import contextlib
import re
from typing import Any, ContextManager, Iterator, Sequence

import torch

from ipufit._poptorch import poptorch
from ipufit.blocks import Blocks, annotated_blocks
from ipufit.errors import ConfigError, UnknownNameError


def check_stage_names(module: torch.nn.Module, stages: Sequence[Sequence[str]]) -> None:
    """Refuse a mistyped submodule among the names of stages.

    The model's own blocks can't be known before it runs. But a pipeline names either
    submodules or blocks, not both.

    Args:
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


def check_stages_begin(
    module: torch.nn.Module,
    stages: Sequence[Sequence[str]],
    started: Blocks,
    *,
    training: bool,
) -> None:
    """Refuse names of stages that nothing begins: PopTorch would pass over them.

    Too much of the model, or all of it, would be on the first stage.

    Args:
        module: The user's module, whose `forward` has been traced.
        stages: Names of each stage.
        started: Blocks that `forward` has begun.
        training: Whether the program trains. In inference `forward` may leave parts
            out.

    Raises:
        UnknownNameError: A name is no submodule, and no block that was begun.
        ConfigError: A name is a submodule that was never called.

    Example:
        >>> module = torch.nn.ModuleDict({"encoder": torch.nn.ReLU()})
        >>> check_stages_begin(module, [["enc"]], [], training=True)
        Traceback (most recent call last):
        ipufit.errors.UnknownNameError: Unknown submodule or block in pipeline 'enc'...
    """
    submodules = dict(module.named_modules())
    begun = {name for name, _ in started if name is not None}
    begun.update(name for name, _ in annotated_blocks(module).values() if name)
    is_counted = any(name is None for name, _ in started)  # their ids are numbers
    names = [name for stage in stages for name in stage]
    missing = [n for n in names if n not in begun and not (is_counted and n.isdigit())]
    if not missing or (not training and len(missing) < len(names)):
        return
    for name in missing:
        if name not in submodules:
            known = begun.union(n for n in submodules if n)
            raise UnknownNameError("submodule or block in pipeline", name, known)
    inner = [n for n in submodules if n.startswith(f"{missing[0]}.")]
    raise ConfigError(
        f"pipeline names {missing[0]!r}, a {type(submodules[missing[0]]).__name__} "
        "that `forward` never calls: a stage begins where its submodule is called. "
        + (
            f"Name the first that is called in it, such as {inner[0]!r}, or "
            if inner
            else "Name one that is called, or "
        )
        + f"begin a block there: with poptorch.Block({missing[0]!r})."
    )


@contextlib.contextmanager
def stage_blocks(
    module: torch.nn.Module, stages: Sequence[Sequence[str]]
) -> Iterator[None]:
    """Begin a block where a submodule that `stages` names begins.

    Other names are blocks that the model makes itself. The hooks are only there while a
    program is traced, so the user's module stays as it was.

    Args:
        stages: Names of each stage.

    Raises:
        ConfigError: The model's own blocks need more micro-batches than a call has.
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
    except poptorch.Error as error:
        _refuse_short_pipeline(error)
        raise
    finally:
        for handle in handles:
            handle.remove()


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
    raise ConfigError(
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
