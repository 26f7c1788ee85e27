# SPDX-License-Identifier: Apache-2.0
"""`export`: write an inference program to a file of PopTorch's, with a description."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from pathlib import Path
from typing import Any, Callable, Mapping

import torch
from torch import Tensor

from ipufit._files import (
    as_path,
    draft,
    file_errors,
    make_folder,
    open_folder,
    sync_file,
    write_parts,
)
from ipufit._poptorch import poptorch
from ipufit._tree import leaves_of, tree_map
from ipufit._version import __version__
from ipufit.batching import BatchPlan
from ipufit.callbacks import make_progress
from ipufit.config import IPUConfig
from ipufit.data.datasets import Source
from ipufit.engine.objective import named_outputs
from ipufit.engine.precision import compute_in_types
from ipufit.engine.step import arguments_of, failures_explained
from ipufit.engine.weights import deep_copied
from ipufit.errors import ConfigError, IpufitError, UnsupportedError
from ipufit.placement import find_beginnings
from ipufit.types import PathLike

_FORMAT_VERSION = 1
_ELSEWHERE = {
    ".pt2": "torch.export.export(model.module.eval(), args)",
    ".onnx": "torch.onnx.export(model.module.eval(), args, path)",
}
_NAME_IN_FOLDER = "executable.popef"
"""The name that Triton's back end looks for in the folder of a version of a model."""


def check_path(path: PathLike) -> None:
    """Refuse files that torch writes.

    Raises:
        ConfigError: The path ends in `.pt2` or `.onnx`.
    """
    suffix = as_path(path).suffix.lower()
    if suffix in _ELSEWHERE:
        raise ConfigError(
            f"export() writes programs for IPUs, not {suffix}. torch does: "
            f"{_ELSEWHERE[suffix]}; the weights are in the module."
        )


def write_program(
    module: torch.nn.Module,
    config: IPUConfig,
    source: Source,
    plan: BatchPlan,
    path: PathLike,
    *,
    num_updates: int,
    with_module: bool,
) -> dict[str, Any]:
    """Compile a copy of a module by itself for one process, and write it to a file.

    Args:
        module: The user's module.
        config: Its layout, in one process.
        source: Samples to compile for.
        plan: The factors of a call.
        path: File, or a directory that exists.
        num_updates: Updates of the weights, for the description.
        with_module: Whether the module is pickled into the file.

    Returns:
        The description, which is written beside the file. A process that is killed in
        between leaves the old two, the new two, or a file without a description.
    """
    module = deep_copied(module).eval()
    options = config.build_inference_options(plan).clone()
    display = make_progress(1)
    if not display.shows_poptorch_bar:
        options.showCompilationProgressBar(False)
    _begin_blocks(module, config.inference_config, options)
    compute_in_types(module, config)
    example = source.example(plan.samples_per_call, inputs_only=True)
    inputs = source.structure.nested(
        [
            leaf.half().contiguous()
            if config.types.is_half and leaf.is_floating_point()
            else leaf.contiguous()
            for leaf in example
        ]
    )
    by_place, by_name = arguments_of(inputs)
    parameters = inspect.signature(module.forward).parameters
    executor = poptorch.inferenceModel(module, options=options)
    seen: list[Any] = []
    handle = module.register_forward_hook(
        lambda _, __, outputs: seen.append(tree_map(_traced, outputs))
    )
    try:
        with failures_explained(module, inputs), display.compiling("exported"):
            executor.compile(*by_place, **by_name)
    finally:
        handle.remove()
    outputs = named_outputs(seen[-1])
    about: dict[str, Any] = {
        "format": "ipufit export",
        "format_version": _FORMAT_VERSION,
        "module": type(module).__name__,
        "has_module": with_module,
        "num_updates": num_updates,
        "versions": {
            "ipufit": __version__,
            "poptorch": str(poptorch.__version__),
            "torch": str(torch.__version__),
        },
        "samples_per_call": plan.samples_per_call,
        "micro_batch_size": plan.micro_batch_size,
        "device_iterations": plan.device_iterations,
        "replicas": plan.replicas,
        "inputs": _described({**dict(zip(parameters, by_place)), **by_name}, 1),
        "outputs": _described(
            {"output": seen[-1]} if outputs is None else outputs,
            plan.micro_batches_per_call,
        ),
    }

    def save(path: str) -> None:
        try:
            executor.save(path, export_model=with_module)
        except (OSError, poptorch.Error, IpufitError):
            raise
        except Exception as error:  # a user's object may raise anything
            raise UnsupportedError(
                f"{type(module).__name__} can't be pickled: {error}. Functions "
                "and classes have to be defined at the top of a module; or give "
                "with_module=False, and load the file with loadExecutable. A strategy "
                "of PopTorch's with named stages can't be saved at all."
            ) from error

    target = Path(path)
    if target.is_dir():
        target /= _NAME_IN_FOLDER
    try:
        with file_errors("can't be written", target):
            make_folder(target.parent)
            with open_folder(target.parent) as folder:
                _write(folder, target.name, save, about)
    finally:
        executor.destroy()
    return about


def _write(
    folder: int, name: str, save: Callable[[str], None], about: dict[str, Any]
) -> None:
    """Write a program and its description into an open directory.

    Args:
        save: Writes the program to a path.
        about: The description; size and SHA-256 of the program are added.
    """
    described = f"{name}.json"
    private, beside = draft(folder, name, 0o700), draft(folder, described)
    with private as (directory, inner), beside as (hidden, file):
        save(f"/dev/fd/{inner}/program")  # wherever the directory is by now
        about["bytes"], about["sha256"] = sync_file("program", inner)
        write_parts(file, [json.dumps(about, indent=2).encode() + b"\n"])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(described, dir_fd=folder)  # it is of the old program
        os.rename("program", name, src_dir_fd=inner, dst_dir_fd=folder)
        os.rename(hidden, described, src_dir_fd=folder, dst_dir_fd=folder)
        os.rmdir(directory, dir_fd=folder)
        os.fsync(folder)


def _begin_blocks(
    module: torch.nn.Module, config: IPUConfig, options: poptorch.Options
) -> None:
    """Begin blocks permanently at the submodules that stages name.

    ipufit begins them only while it compiles, but loading the file traces the module
    again. PopTorch can't pickle strategies with names, so the blocks have IPUs, from
    which the stages follow.

    Raises:
        UnsupportedError: The stages have names that are no submodules, or one begins
            after the layers.
    """
    if not config.stages:
        return
    before, after = find_beginnings(module, config)
    names = [name for stage in config.stages for name in stage]
    own = [name for name in names if name not in before.values()]
    if own and config.layers_per_ipu is None:
        raise UnsupportedError(
            f"pipeline names {own[0]!r}, a block of the module's own, and PopTorch "
            "can't save options with the names of blocks. Give the blocks an ipu_id, "
            "and export a model with pipeline=None; or name submodules."
        )
    if after:
        raise UnsupportedError(
            f"layers_per_ipu={config.layers_per_ipu!r} begins a stage after the last "
            "layer, and a file keeps only stages that begin with a submodule. Name "
            "that in pipeline=(...)."
        )
    submodules = dict(module.named_modules())
    ipus = {
        name: ipu
        for stage, ipu in zip(config.stages, config.stage_ipus)
        for name in stage
    }
    for name, block in before.items():
        poptorch.BeginBlock(submodules[name], user_id=block, ipu_id=ipus[block])
    distinct = len(set(config.stage_ipus)) == len(config.stage_ipus)
    stages = poptorch.AutoStage
    auto = stages.SameAsIpu if distinct else stages.AutoIncrement
    is_pipelined = config.execution == "pipelined"
    options.setExecutionStrategy(
        poptorch.PipelinedExecution(auto)
        if is_pipelined
        else poptorch.ShardedExecution(auto)
    )


def _traced(output: Any) -> Any:
    """Return a tensor without values in place of a traced one."""
    if not isinstance(output, Tensor):
        return output
    return torch.empty(tuple(output.shape), dtype=output.dtype, device="meta")


def _described(values: Mapping[str, Any], times: int) -> list[dict[str, Any]]:
    """List names, shapes and types of tensors.

    Args:
        values: Tensors by name, nested ones too.
        times: How often their rows come in a call.
    """
    found = []
    for name, value in values.items():
        leaves = leaves_of(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for index, tensor in enumerate(tensors):
            shape = list(tensor.shape) or [1]
            found.append(
                {
                    "name": name if len(tensors) == 1 else f"{name}.{index}",
                    "shape": [shape[0] * times, *shape[1:]],
                    "dtype": str(tensor.dtype).replace("torch.", ""),
                }
            )
    return found
