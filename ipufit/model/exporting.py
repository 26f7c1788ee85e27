# SPDX-License-Identifier: Apache-2.0
"""`export`: write an inference program to a file of PopTorch's, with a description."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Mapping

import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit._arguments import check_flags
from ipufit._files import (
    as_path,
    draft,
    file_errors,
    make_folder,
    open_folder,
    replace_file,
    sync_file,
)
from ipufit._poptorch import poptorch
from ipufit._tree import leaves_of, map_tensors
from ipufit._version import __version__
from ipufit.batching import BatchPlan
from ipufit.callbacks import make_progress
from ipufit.config import IPUConfig
from ipufit.data.datasets import Source
from ipufit.data.random_state import HostRandomState
from ipufit.data.sources import example_of
from ipufit.engine.objective import named_outputs
from ipufit.engine.precision import compute_in_types
from ipufit.engine.step import arguments_of, failures_explained
from ipufit.engine.weights import deep_copied
from ipufit.errors import ConfigError, DataError, IpufitError, UnsupportedError
from ipufit.placement import find_beginnings
from ipufit.types import PathLike

from .calls import CallPlanner, plan_of_pass, rows_to_evaluate

_ELSEWHERE = {
    ".pt2": "torch.export.export(model.module.eval(), args), from torch 2.1 on",
    ".onnx": "torch.onnx.export(model.module.eval(), args, path)",
}
_NAME_IN_FOLDER = "executable.popef"
"""The name that Triton's back end looks for in the folder of a version of a model."""


def export(
    planner: CallPlanner,
    path: PathLike,
    x: Any,
    batch_size: int | None,
    *,
    with_module: bool,
) -> dict[str, Any]:
    """Write a model's inference program; takes the arguments of `IPUModel.export`."""
    check_flags(with_module=with_module)
    suffix = as_path(path).suffix.lower()
    if suffix in _ELSEWHERE:
        raise ConfigError(
            f"export() writes programs for IPUs, not {suffix}. torch does: "
            f"{_ELSEWHERE[suffix]}; the weights are in the module."
        )
    source = planner.last_source
    if x is not None:
        source = example_of(x, inputs_only=True, **planner.loading)
    elif source is None:
        raise DataError(
            "export() needs to know the inputs' shapes: pass x, a batch or tensors "
            'on the device "meta". (After a run of the model x may be left out.)'
        )
    planner.settle(source)
    executors = planner.executors
    executors.fetch_weights()
    executors.share_buffers()
    executors.detach()
    config = replace(planner.config, process_id=0, num_processes=1)
    size, _ = rows_to_evaluate(config, source, batch_size, None)

    def write() -> dict[str, Any]:
        with HostRandomState():
            plan = plan_of_pass(planner.module, config, size)
            executor, about = _compiled(planner.module, config, source, plan)
            try:
                about.update(_saved(executor, about, Path(path), with_module))
            finally:
                executor.destroy()
        return about

    return files.written_by_one(write)


def _compiled(
    module: torch.nn.Module, config: IPUConfig, source: Source, plan: BatchPlan
) -> tuple[poptorch.PoplarExecutor, dict[str, Any]]:
    """Compile a copy of a module for one process, and describe its calls."""
    module = deep_copied(module).eval()
    options = config.build_inference_options(plan).clone()
    display = make_progress(1)
    if not display.shows_poptorch_bar:
        options.showCompilationProgressBar(False)
    _begin_blocks(module, config.inference_config, options)
    compute_in_types(module, config)
    example = source.example(plan.samples_per_call, inputs_only=True)
    if config.types.is_half:
        example = [t.half() if t.is_floating_point() else t for t in example]
    inputs = source.structure.nested([leaf.contiguous() for leaf in example])
    by_place, by_name = arguments_of(inputs)
    parameters = inspect.signature(module.forward).parameters
    executor = poptorch.inferenceModel(module, options=options)
    results: list[Any] = []
    without_values = partial(torch.empty_like, device="meta")
    handle = module.register_forward_hook(
        lambda _, __, outputs: results.append(map_tensors(without_values, outputs))
    )
    with handle, failures_explained(module, inputs), display.compiling("exported"):
        executor.compile(*by_place, **by_name)
    outputs, times = named_outputs(results[-1]), plan.micro_batches_per_call
    return executor, {
        "module": type(module).__name__,
        "samples_per_call": plan.samples_per_call,
        "inputs": _described({**dict(zip(parameters, by_place)), **by_name}, 1),
        "outputs": _described(outputs or {"output": results[-1]}, times),
        "versions": {
            "ipufit": __version__,
            "poptorch": str(poptorch.__version__),
            "torch": str(torch.__version__),
        },
    }


def _saved(
    executor: poptorch.PoplarExecutor,
    about: dict[str, Any],
    target: Path,
    with_module: bool,
) -> dict[str, Any]:
    """Write a program to a file, and the description beside it.

    A process that is killed meanwhile leaves the old pair of files, the new pair, or a
    program without a description.

    Returns:
        Size and SHA-256 of the program's file; the description has both, too.
    """
    if target.is_dir():
        target /= _NAME_IN_FOLDER
    description = target.with_name(f"{target.name}.json")
    with file_errors("can't be written", target):
        make_folder(target.parent)
        with open_folder(target.parent) as folder, draft(
            folder, target.name, 0o700
        ) as (directory, inner):
            try:  # wherever the directory is by now
                executor.save(f"/dev/fd/{inner}/program", with_module)
            except (OSError, poptorch.Error, IpufitError):
                raise
            except Exception as error:  # a user's object may raise anything
                raise UnsupportedError(
                    f"{about['module']} can't be pickled: {error}. Functions and "
                    "classes have to be defined at the top of a module; or give "
                    "with_module=False, and load the file with loadExecutable. A "
                    "strategy of PopTorch's with named stages can't be saved at all."
                ) from error
            size, digest = sync_file("program", inner)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(description.name, dir_fd=folder)  # the old one
            os.rename("program", target.name, src_dir_fd=inner, dst_dir_fd=folder)
            os.rmdir(directory, dir_fd=folder)
            os.fsync(folder)
        of_file = {"bytes": size, "sha256": digest}
        text = json.dumps({**about, **of_file}, indent=2)
        replace_file(description, [text.encode() + b"\n"])
    return of_file


def _begin_blocks(
    module: torch.nn.Module, config: IPUConfig, options: poptorch.Options
) -> None:
    """Begin blocks permanently at the submodules that stages name.

    ipufit begins them only while it compiles, but loading the file traces the module
    again. PopTorch can't pickle strategies with names, so the blocks have IPUs, from
    which the stages follow.

    Raises:
        UnsupportedError: A stage has a name that isn't a submodule, or begins after the
            layers.
    """
    if not config.stages:
        return
    before, after = find_beginnings(module, config)
    names = [name for stage in config.stages for name in stage]
    blocks = [name for name in names if name not in before.values()]
    if blocks and config.layers_per_ipu is None:
        raise UnsupportedError(
            f"pipeline names {blocks[0]!r}, a block of the module's own, and PopTorch "
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


def _described(values: Mapping[str, Any], times: int) -> list[dict[str, Any]]:
    """List names, shapes and types of tensors.

    Args:
        values: Tensors by name, nested ones too.
        times: Factor of the rows: how many such tensors a call has.
    """
    described = []
    for name, value in values.items():
        tensors = [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
        for index, tensor in enumerate(tensors):
            num_rows, *others = tensor.shape or (1,)
            described.append(
                {
                    "name": name if len(tensors) == 1 else f"{name}.{index}",
                    "shape": [num_rows * times, *others],
                    "dtype": str(tensor.dtype).replace("torch.", ""),
                }
            )
    return described
