# SPDX-License-Identifier: Apache-2.0
"""`summary`: layers, shapes, parameters, and the stage and IPU of each."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Iterator

import torch
from torch import Tensor

from ._tree import Structure
from .config import IPUConfig

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class Layer:
    """A module without children, or with parameters of its own.

    Attributes:
        name: Its path in the user's module.
        kind: Its class.
        shape: Of its output for one sample, with `N` for rows; "?" if unknown.
        parameters: How many of its own it has.
        trainable: How many of those are trained.
        stage: The pipeline stage it belongs to, from 0; None without a pipeline.
        ipu: The IPU of that stage in a replica.
    """

    name: str
    kind: str
    shape: str
    parameters: int
    trainable: int
    stage: int | None
    ipu: int | None


@dataclass(frozen=True)
class Summary:
    """A model's layers.

    Attributes:
        title: The module's class.
        layers: In the order in which they are called if that is known, else in which
            they were made.
        total_parameters: Each counted once, however often it is used.
        trainable_parameters: Those of them that are trained.
    """

    title: str
    layers: tuple[Layer, ...]
    total_parameters: int
    trainable_parameters: int

    def table(self) -> Table:
        """What is shown."""
        has_stages = any(layer.stage is not None for layer in self.layers)
        from rich.table import Column, Table

        table = Table(Column("Layer", overflow="fold"), "Type", "Output shape")
        for name in ("Parameters", *(("Stage", "IPU") if has_stages else ())):
            table.add_column(name, justify="right")
        table.title = self.title
        table.caption = (
            f"Parameters: {self.total_parameters:,}, trainable: "
            f"{self.trainable_parameters:,}"
        )
        for layer in self.layers:
            cells = [layer.name, layer.kind, layer.shape, f"{layer.parameters:,}"]
            if has_stages:
                cells += [_dash(layer.stage), _dash(layer.ipu)]
            table.add_row(*cells)
        return table

    def print(self, console: Console | None = None) -> None:
        """Show it.

        Args:
            console: Where to; standard output by default.
        """
        from rich.console import Console

        (console or Console()).print(self.table())


def summarize(
    module: torch.nn.Module, config: IPUConfig, inputs: Any = None
) -> Summary:
    """Look at a module's layers.

    Args:
        module: The user's. It is run on the host, in eval mode and without gradients,
            as a copy: nothing of it changes.
        config: Says which stages there are.
        inputs: One sample, as the module takes it; None to leave shapes open.

    Returns:
        The summary.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> summary = summarize(module, IPUConfig(), torch.zeros(1, 2))
        >>> [(layer.name, layer.shape) for layer in summary.layers]
        [('0', '(N, 3)'), ('1', '(N, 3)')]
        >>> summary.total_parameters
        9
    """
    called, shapes = _calls(module, inputs)
    stages = _stages(called, config)
    children = dict(_layers(module))
    order = [name for name in shapes if name in children]
    order += [name for name in children if name not in shapes]
    layers = tuple(
        Layer(
            name=name or "(itself)",
            kind=type(children[name]).__name__,
            shape=shapes.get(name, "?"),
            parameters=_count(children[name].parameters(recurse=False)),
            trainable=_count(
                p for p in children[name].parameters(recurse=False) if p.requires_grad
            ),
            stage=stages.get(name, (None, None))[0],
            ipu=stages.get(name, (None, None))[1],
        )
        for name in order
    )
    return Summary(
        title=type(module).__name__,
        layers=layers,
        total_parameters=_count(module.parameters()),
        trainable_parameters=_count(p for p in module.parameters() if p.requires_grad),
    )


def _layers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in module.named_modules():
        is_leaf = next(child.children(), None) is None
        if is_leaf or next(child.parameters(recurse=False), None) is not None:
            yield name, child


def _count(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _calls(module: torch.nn.Module, inputs: Any) -> tuple[list[str], dict[str, str]]:
    """Layers as their calls begin, and their outputs' shapes as the calls end.

    Without inputs the layers as they were made, and no shapes.
    """
    called: dict[str, None] = {}
    shapes: dict[str, str] = {}
    if inputs is None:
        return [name for name, _ in module.named_modules()], shapes
    # In half precision many operations exist on devices only.
    twin = copy.deepcopy(module).float().eval()
    for name, child in twin.named_modules():

        def begin(_module: Any, _inputs: Any, name: str = name) -> None:
            called.setdefault(name)

        def keep(_module: Any, _inputs: Any, output: Any, name: str = name) -> None:
            shapes.setdefault(name, _describe(output))

        child.register_forward_pre_hook(begin)
        child.register_forward_hook(keep)
    with torch.no_grad():
        if isinstance(inputs, dict):
            twin(**inputs)
        elif isinstance(inputs, (tuple, list)):
            twin(*inputs)
        else:
            twin(inputs)
    return list(called), shapes


def _describe(output: Any) -> str:
    leaves = Structure.of_outputs(output).flatten(output)
    shapes = [
        "(" + ", ".join(["N", *map(str, leaf.shape[1:])][: leaf.dim()]) + ")"
        for leaf in leaves
        if isinstance(leaf, Tensor)
    ]
    return ", ".join(shapes) or "-"


def _stages(called: list[str], config: IPUConfig) -> dict[str, tuple[int, int]]:
    """Stage and IPU by layer, if the stages are named after submodules.

    A stage begins with the submodule it names and lasts until the next one's.
    """
    begins = {
        name: (index, config.stage_ipus[index])
        for index, names in enumerate(config.stages)
        for name in names
    }
    found: dict[str, tuple[int, int]] = {}
    if not any(name in begins for name in called):
        return found
    now = (0, config.stage_ipus[0])
    for name in called:
        now = begins.get(name, now)
        if name:
            found[name] = now
    return found


def _dash(value: int | None) -> str:
    return "-" if value is None else str(value)
