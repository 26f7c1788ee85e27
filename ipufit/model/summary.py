# SPDX-License-Identifier: Apache-2.0
"""`IPUModel.summary`: layers with their shapes, parameters, stages and IPUs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call  # type: ignore[attr-defined,unused-ignore]

from ipufit._tree import leaves_of
from ipufit.config import IPUConfig
from ipufit.data.sources import as_source
from ipufit.engine import host_calls
from ipufit.engine.step import arguments_of, failures_explained
from ipufit.engine.weights import mode
from ipufit.errors import users_frame
from ipufit.placement import Begun, blocks_begun, followed, stage_and_ipu

from .calls import CallPlanner

_CONSOLES = "<stdin>", "<python-input", "<console>", "<pyshell"
"""Names of the lines of Python's console, from 3.13 on, of `code` and of IDLE."""


@dataclass(frozen=True)
class Layer:
    """A module without children, or with parameters of its own.

    Attributes:
        name: Path in the user's module.
        kind: Name of its class.
        shape: Shape of its output for one sample, with `N` for rows; "?" if unknown.
        parameters: Number of elements in its own parameters.
        trainable: Number of these elements that are trained.
        stage: Stage of the pipeline, from 0; None without a pipeline.
        ipu: IPU of that stage in a replica.
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
    """The layers of a model, and their totals.

    Attributes:
        title: Class of the module.
        layers: Layers in the order of their calls if inputs were given, else in the
            order of their creation.
        total_parameters: Number of elements, where shared parameters count once.
        trainable_parameters: Number of these elements that are trained.
        num_ipus: IPUs of a replica times replicas; None if unknown: without inputs, and
            without stages in `pipeline`, the blocks of `forward` aren't known.
        was_run: Whether inputs were given.
    """

    title: str
    layers: tuple[Layer, ...]
    total_parameters: int
    trainable_parameters: int
    num_ipus: int | None
    was_run: bool

    def __repr__(self) -> str:
        """Return the table, which Python's console shows."""
        return str(self)

    def _ipython_display_(self) -> None:
        """Show nothing in a notebook: `IPUModel.summary` has printed the table."""

    def __str__(self) -> str:
        """Return the table that `IPUModel.summary` prints, and the totals."""
        rows: list[tuple[str, ...]] = [
            ("Layer", "Type", "Output shape", "Parameters", "Stage", "IPU")
        ]
        for layer in self.layers:
            place = ("-" if n is None else str(n) for n in (layer.stage, layer.ipu))
            count = f"{layer.parameters:,}"
            rows.append((layer.name, layer.kind, layer.shape, count, *place))
        if all(layer.stage is None for layer in self.layers):
            rows = [row[:4] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows)]
        layout = "  ".join(
            f"{{:{'<' if index < 3 else '>'}{width}}}"
            for index, width in enumerate(widths)
        )
        lines = [self.title, *(layout.format(*row) for row in rows)]
        lines.append(
            f"Parameters: {self.total_parameters:,}, trainable: "
            f"{self.trainable_parameters:,}"
        )
        if self.num_ipus is not None:
            lines.append(f"IPUs: {self.num_ipus}")
        if not self.was_run:
            lines.append(
                "summary(x) runs a sample, to show shapes and the IPUs of blocks that "
                "forward begins."
            )
        return "\n".join(lines)


def is_shown_by_console() -> bool:
    """Return whether a line of Python's own console asks, which shows its result."""
    code = users_frame()[0].f_code
    is_line = code.co_filename.startswith(_CONSOLES) and code.co_name == "<module>"
    return is_line and sys.displayhook is sys.__displayhook__


def summarize_inputs(planner: CallPlanner, x: Any) -> Summary:
    """Summarize a model with a sample of `x`, or of the model's last run."""
    source = planner.last_source if x is None else as_source(x)
    example = None
    if source is None:
        host_calls.check_shapes(planner.module)
    else:
        planner.settle(source)
        example = source.structure.nested(source.example(1, inputs_only=True))
    return summarize(planner.module, planner.config, example)


def summarize(
    module: torch.nn.Module, config: IPUConfig, inputs: Any = None
) -> Summary:
    """Summarize a module's layers.

    Args:
        module: The user's module. It is run on the host, in eval mode and without
            gradients, with copies of its buffers.
        config: The config that names the stages.
        inputs: One sample in the form that the module takes; None to leave shapes open.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> summary = summarize(module, IPUConfig(), torch.zeros(1, 2))
        >>> [(layer.name, layer.shape) for layer in summary.layers]
        [('0', '(N, 3)'), ('1', '(N, 3)')]
        >>> summary.total_parameters
        9
    """
    called, shapes = _calls(module, config, inputs)
    # Layers before the first block are on IPU 0; without any block there is no stage.
    places = {
        name: (0, 0) if block is None else stage_and_ipu(block, config)
        for name, block in called.items()
    }
    has_blocks = any(called.values())
    ipus = [0, *config.stage_ipus, *(ipu for _, ipu in places.values())]
    has_strategy = config.pipeline is not None and not config.stages
    num_ipus = None
    if (inputs is not None or config.stages) and not has_strategy and None not in ipus:
        # A replica has all IPUs up to its highest.
        num_ipus = (max(filter(None, ipus), default=0) + 1) * config.num_replicas
    children = {
        name: child
        for name, child in module.named_modules()
        if not any(True for _ in child.children())
        or any(True for _ in child.parameters(recurse=False))
    }
    layers = []
    for name in dict.fromkeys([*filter(children.__contains__, shapes), *children]):
        parameters = list(children[name].parameters(recurse=False))
        stage, ipu = None, None
        if name and has_blocks:
            stage, ipu = places.get(name, (None, None))
        layers.append(
            Layer(
                name=name or "(itself)",
                kind=type(children[name]).__name__,
                shape=shapes.get(name, "?"),
                parameters=_count(parameters),
                trainable=_count(p for p in parameters if p.requires_grad),
                stage=stage,
                ipu=ipu,
            )
        )
    return Summary(
        title=type(module).__name__,
        layers=tuple(layers),
        total_parameters=_count(module.parameters()),
        trainable_parameters=_count(p for p in module.parameters() if p.requires_grad),
        num_ipus=num_ipus,
        was_run=inputs is not None,
    )


def _count(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _calls(
    module: torch.nn.Module, config: IPUConfig, inputs: Any
) -> tuple[dict[str, Begun | None], dict[str, str]]:
    """Return the block of each layer, in the order of their calls, and their shapes.

    Without inputs the layers are in the order of their creation, without shapes.
    """
    called: dict[str, Begun | None] = {}
    shapes: dict[str, str] = {}
    if inputs is None:
        now: Begun | None = None
        if config.first_block is not None:
            now = config.first_block, None
        begins, ends = blocks_begun(module, config)
        names = {name for stage in config.stages for name in stage}
        known = {name for name, _ in (*begins.values(), *ends.values())}
        if config.layers_per_ipu is None and not names <= known:
            begins, ends, now = {}, {}, None  # forward begins them, nobody knows where
        last = None
        for name, _ in module.named_modules():
            if last is not None and not name.startswith(f"{last}."):
                now, last = ends[last], None
            now = begins.get(name, now)
            called[name] = now
            last = name if name in ends else last
        return called, shapes
    # Copies of the buffers, and in half precision of the weights, because many
    # operations on those exist on devices only. The module itself keeps all.
    tensors = {
        name: tensor.float() if tensor.dtype == torch.float16 else tensor
        for name, tensor in module.named_parameters()
    }
    for name, tensor in module.named_buffers():
        is_half = tensor.dtype == torch.float16
        tensors[name] = tensor.float() if is_half else tensor.clone()
    by_place, by_name = arguments_of(inputs)
    # In the grad mode it is called in: `forward` may call torch.autograd.grad.
    with failures_explained(module, inputs), mode(module, training=False), followed(
        module,
        config,
        lambda name, _: called.setdefault(name, present()),
        lambda name, output: shapes.setdefault(name, _describe(output)),
    ) as present:
        functional_call(module, tensors, by_place, by_name)
    return called, shapes


def _describe(output: Any) -> str:
    shapes = [
        "(" + ", ".join(["N", *map(str, leaf.shape[1:])][: leaf.dim()]) + ")"
        for leaf in leaves_of(output)
        if isinstance(leaf, Tensor)
    ]
    return ", ".join(shapes) or "-"
