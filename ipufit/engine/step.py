# SPDX-License-Identifier: Apache-2.0
"""The module that PopTorch traces: the user's, with loss and sums of metrics."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import os
import re
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ipufit._modules import weights_of
from ipufit._poptorch import operator_rules, poptorch
from ipufit._tree import Structure, leaves_of, map_tensors
from ipufit.batching import most_stages
from ipufit.config import IPUConfig
from ipufit.data.structure import NOTHING, Labels, SampleStructure
from ipufit.engine.metric_state import (
    MetricSums,
    Scalars,
    collected,
    log,
    vector_of,
    widened_all,
)
from ipufit.engine.objective import (
    OWN_LOSS,
    RETURNS,
    BoundMetric,
    Computation,
    Objective,
    StepFunction,
    TermsByOutput,
    dominant_labels,
    probability_outputs,
    real_rows,
    shapes_of,
    split_own_loss,
    sum_loss_message,
    weighed,
)
from ipufit.engine.precision import computed_in
from ipufit.engine.trace_checks import (
    LossRecorder,
    TraceChecks,
    refuse_hidden,
    require_gradient,
    tensors_of,
    warn_of_misuses,
)
from ipufit.engine.weights import (
    HostValue,
    mode,
    replaced_by_inputs,
    user_name,
)
from ipufit.errors import (
    ConfigError,
    DataError,
    IpufitError,
    UnknownNameError,
    UnsupportedError,
)
from ipufit.metrics.base import RowByRow
from ipufit.mixing import mixed_inputs
from ipufit.placement import (
    Beginnings,
    Begun,
    Blocks,
    annotated_blocks,
    find_beginnings,
    is_inside,
    own_stages,
    stage_and_ipu,
    started_blocks,
)

_NO_FORWARD = "_forward_unimplemented"
"""The name of torch's function in the place of a missing `forward`."""


_WHOLE = {
    torch.uint8: ("Byte", "unsigned char", "uint8"),
    torch.int32: ("Int", "int"),
    torch.int64: ("Long", "long", "int64"),
    torch.bool: ("Bool", "bool"),
}
"""What torch calls whole numbers where it wants floats."""

_AXIS_MISSING = (
    " (Dim 0 counts samples: one sample is x[None]; columns of numbers, and images "
    "without channels, are x[:, None].)"
)


class NoForwardError(DataError):
    """Raised if a module without `forward` is called."""


def call_module(module: torch.nn.Module, inputs: Any) -> Any:
    """Call a module; a dict gives keyword arguments, a tuple positional ones.

    Raises:
        DataError: `forward` doesn't take such arguments, or not of these shapes.

    Example:
        >>> call_module(torch.nn.Linear(2, 3), torch.zeros(4, 2)).shape
        torch.Size([4, 3])
    """
    by_place, by_name = arguments_of(inputs)
    with failures_explained(module, inputs):
        return module(*by_place, **by_name)


def call_step(step: StepFunction, module: torch.nn.Module, batch: Any) -> Any:
    """Call a user's step.

    Args:
        step: Function of the module and a batch.
        module: The user's module.
        batch: Nested as the data: inputs, or inputs, targets and weights in a tuple.

    Raises:
        DataError: The step doesn't take such a batch, or not with these shapes.

    Example:
        >>> call_step(lambda module, batch: module(batch).mean(), torch.nn.ReLU(),
        ...           torch.ones(4, 2))
        tensor(1.)
    """
    try:
        with RowByRow.in_step(module, batch):
            return step(module, batch)
    except (IpufitError, poptorch.Error):
        raise
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
        name = getattr(step, "__qualname__", type(step).__name__)
        layer, inputs = _layer_of(error, module), batch
        if isinstance(batch, tuple):
            inputs = batch[0]
        leaves = Structure.of_outputs(inputs).flatten(inputs) if layer else ()
        raise DataError(
            f"{name} failed with {shape_of_batch(batch)}{layer}: "
            f"{error}{_conversion(error, leaves)}"
        ) from error


def results_of(
    computation: Computation,
    module: torch.nn.Module,
    structure: SampleStructure,
    inputs: Any,
    tensors: Sequence[Tensor],
    marked: Sequence[Tensor],
) -> tuple[Tensor | None, Any]:
    """Call a module or a user's step, and return its own loss and its outputs.

    Args:
        computation: The function to call, and whether the function returns a loss.
        module: The user's module.
        structure: Structure of a batch.
        inputs: Inputs, nested as the data.
        tensors: Tensors of the batch; a step gets targets and weights from these.
        marked: Results of `identity_loss`, which the call adds to.
    """
    if computation.step is None:
        outputs = call_module(module, inputs)
        if not computation.owns_loss:
            return None, outputs
        return split_own_loss(outputs, marked)
    if not computation.takes_labels:
        return None, call_step(computation.step, module, inputs)
    batch = structure.batch(inputs, tensors)
    return result_of_step(call_step(computation.step, module, batch), marked)


def result_of_step(
    returned: Any, marked: Sequence[Tensor] = ()
) -> tuple[Tensor | None, Any]:
    """Split the result of a step into loss and outputs, and log its scalars.

    Args:
        returned: The loss; a dict of "loss", "outputs" and scalars; or outputs with an
            own loss (`split_own_loss`).
        marked: Results of `identity_loss`.

    Raises:
        ConfigError: The result has another form.

    Example:
        >>> result_of_step({"loss": torch.tensor(2.0), "outputs": [1]})
        (tensor(2.), [1])
        >>> result_of_step(torch.tensor(2.0))
        (tensor(2.), ())
    """
    if returned is None:
        return None, ()
    if type(returned) is not dict:
        return split_own_loss(returned, marked)
    rest = {name: v for name, v in returned.items() if name not in ("loss", "outputs")}
    for name, value in rest.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigError(
                f"The step returned {name!r}, which is {shapes_of(value)} and not a "
                f"scalar. A step returns {RETURNS}. Put what belongs to samples "
                "under 'outputs'."
            )
        log(name, value)
    loss = returned.get("loss")
    if loss is not None and not isinstance(loss, Tensor):
        raise ConfigError(
            f"The step returned {loss!r} as its loss, and must return a tensor that is "
            "computed from the batch."
        )
    return loss, returned.get("outputs", ())


def shape_of_batch(batch: Any) -> str:
    """Describe the parts of a batch and their shapes.

    Example:
        >>> shape_of_batch((torch.zeros(4, 2), torch.zeros(4)))
        'a batch (inputs, targets) of float32 [4, 2], float32 [4]'
    """
    names = ("inputs", "targets", "weights")
    parts = f" ({', '.join(names[: len(batch)])})" if isinstance(batch, tuple) else ""
    return f"a batch{parts} of {shapes_of(batch)}"


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional arguments for a module, and keyword arguments for a dict.

    Example:
        >>> arguments_of({"x": 1}), arguments_of([1, 2]), arguments_of(3)
        (((), {'x': 1}), ((1, 2), {}), ((3,), {}))
    """
    if isinstance(inputs, dict):
        return (), {str(name): value for name, value in inputs.items()}
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


@contextlib.contextmanager
def failures_explained(module: torch.nn.Module, inputs: Any) -> Iterator[None]:
    """Add the inputs' shapes to errors of a module inside the context.

    Raises:
        DataError: `forward` doesn't take such arguments, or not of these shapes.
        NoForwardError: There is no `forward`.
    """
    name = type(module).__name__
    if getattr(module.forward, "__name__", "") == _NO_FORWARD:
        raise _without_forward(name)
    _check_arguments(module, *arguments_of(inputs))
    try:
        yield
    except poptorch.Error:
        raise
    except TypeError as error:
        if "must be Tensor, not str" in str(error):
            raise DataError(
                f"{name} failed: {error}. Text is a constant of the program. Encode it "
                "as numbers, as a tokenizer does."
            ) from error
        if "invalid data type 'str'" not in str(error):
            raise
        raise DataError(
            f"{name}.forward takes parts of a tensor by name: {error}. If they are the "
            "columns of a frame, pass a dict for this argument, {'x': dict(frame)}."
        ) from error
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, ValueError) and not _is_raised_by_torch(error):
            raise  # the others are torch's, of shapes and types
        if f"[{name}] is missing" in str(error):  # a forward that calls torch's
            raise _without_forward(name) from error
        flat = leaves_of(inputs)
        dims = {leaf.dim() for leaf in flat if isinstance(leaf, Tensor)}
        # As of one sample, or of one image: its first dimension was taken for samples.
        hint = "" if dims.isdisjoint({1, 3}) else _AXIS_MISSING
        if "index out of range in self" in str(error):  # of an embedding
            hint = ""
        elif "'indices' to have" in str(error):
            hint = '. Convert them: x.long(), or x.astype("int64").'
        else:
            hint = _conversion(error, flat) or hint
        raise DataError(
            f"{name} failed with inputs of {shapes_of(inputs)}"
            f"{_layer_of(error, module)}: {error}{hint}"
        ) from error


def _conversion(error: Exception, leaves: Sequence[Any]) -> str:
    """Return how to convert integer inputs, if an error is about their type."""
    types = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)}
    if any(word in str(error) for kind in types for word in _WHOLE.get(kind, ())):
        return (
            ". Convert whole numbers for layers of floats, at the beginning of "
            "forward: x.float(), or x.float() / 255 for images of uint8."
        )
    return ""


def _layer_of(error: Exception, module: torch.nn.Module) -> str:
    """Describe the innermost submodule that failed and its inputs; "" for none."""
    names = {id(layer): name for name, layer in module.named_modules() if name}
    where = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer = frame.f_locals.get("self")
        if frame.f_code.co_name == "_call_impl" and id(layer) in names:
            kind = re.sub(r"\b(in|out)_features=|, bias=True", "", repr(layer))
            kind = type(layer).__name__ if len(kind) > 80 else kind
            passed = [*frame.f_locals["args"], *frame.f_locals["kwargs"].values()]
            shapes = shapes_of([value for value in passed if isinstance(value, Tensor)])
            shapes = shapes.replace("float32 ", "")
            where = f" in `{names[id(layer)]}`, {kind}, which got {shapes}"
    return where


def _is_raised_by_torch(error: Exception) -> bool:
    """Return whether torch's own code has raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return str(module).partition(".")[0] == "torch"


def _without_forward(name: str) -> NoForwardError:
    return NoForwardError(
        f"{name} has no forward, and was to be called with inputs. Write one; or give "
        "compile() a step= for fit and evaluate, and a predict_step= for predict."
    )


def _check_arguments(
    module: torch.nn.Module, by_place: tuple[Any, ...], by_name: dict[str, Any]
) -> None:
    try:
        signature = inspect.signature(module.forward)
    except ValueError:  # compiled code has no signature
        return
    try:
        signature.bind(*by_place, **by_name)
    except TypeError as error:
        kind = type(module).__name__
        passed = ", ".join(map(repr, by_name)) or f"{len(by_place)} by place"
        known = signature.parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        unknown = [name for name in by_name if name not in known and not takes_any]
        if unknown and known:
            first, *others = known
            nest = (
                "" if others else f" For a dict in one argument pass {{{first!r}: x}}."
            )
            raise DataError(
                f"{kind}.forward{signature} has no argument {unknown[0]!r}, and "
                f"samples have {passed}. A dict of inputs gives arguments by name. If "
                f"it is a target, name it, y={unknown[0]!r}, in predict() too; else "
                f"take it out of the samples.{nest}"
            ) from None
        are_numbers = [isinstance(x, Tensor) and x.dim() == 1 for x in by_place]
        row = ""
        if len(are_numbers) > 1 and all(are_numbers):
            row = " A list of numbers is an input for each: torch.tensor(row) is one."
        raise DataError(
            f"{kind}.forward{signature} doesn't take the inputs that are given "
            f"({passed}): {error}. A dict of inputs gives arguments by name, such as "
            "dict(frame) of the columns of a frame; a tuple or list by place. A "
            f"dataset's item has them in its first part: ((a, b), target).{row}"
        ) from None


@dataclass(frozen=True)
class Packing:
    """Converts between a module's nested outputs and a program's flat tensors.

    Attributes:
        structure: Structure of the module's outputs.
        leaves: Outputs that aren't tensors, which are equal in every call; `Tensor` in
            place of each tensor.
        names: Names of the scalars that follow the outputs.
    """

    structure: Structure = NOTHING
    leaves: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, outputs: Any, scalars: Scalars) -> tuple[tuple[Tensor, ...], Packing]:
        """Flatten outputs and scalars; traceable.

        Args:
            outputs: Everything that the module returned.
            scalars: 0-d tensors that the program returns besides the outputs.

        Raises:
            UnsupportedError: A tensor is hidden in an object.

        Returns:
            The tensors among the outputs, then the scalars, `[1]` each; and the packing
            that converts such tensors back to outputs and scalars.

        Example:
            >>> import torch
            >>> tensors, packing = Packing.of({"a": torch.ones(2), "b": "c"}, {})
            >>> packing.nest(tensors)
            {'a': tensor([1., 1.]), 'b': 'c'}
        """
        structure = Structure.of_outputs(outputs)
        leaves = structure.flatten(outputs)
        for leaf, path in zip(leaves, structure.paths("outputs")):
            if not isinstance(leaf, Tensor):
                refuse_hidden(leaf, path)
        others = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        packing = cls(structure, others, tuple(scalars))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return (*tensors, *(value.reshape(1) for value in scalars.values())), packing

    def split(self, returned: Sequence[Tensor]) -> tuple[list[Tensor], Scalars]:
        """Split the results of a program into outputs and scalars of `[micro-batches]`.

        PopTorch's tensors become plain tensors, because PopTorch adds an attribute that
        can't be pickled.
        """
        plain = [tensor.detach() for tensor in returned]
        count = len(plain) - len(self.names)
        return plain[:count], dict(zip(self.names, plain[count:]))

    def nest(self, tensors: Iterable[Tensor]) -> Any:
        """Nest the tensors of outputs as the module returns them.

        If `tensors` is an iterator, only the tensors of outputs are taken from it.
        """
        rest = iter(tensors)
        leaves = [next(rest) if leaf is Tensor else leaf for leaf in self.leaves]
        return self.structure.rebuild(leaves)


def kept_submodules(module: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the submodules whose outputs are kept.

    Args:
        patterns: Names of submodules, or patterns of them, as in `fnmatch`, where `*`
            matches dots too. Submodules inside a match aren't matched, so
            `"encoder.layer.*"` keeps the outputs of each layer, and nothing inside.

    Raises:
        UnknownNameError: A pattern matches none.

    Example:
        >>> layers = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
        >>> kept_submodules(torch.nn.ModuleDict({"layer": layers}), ["layer.*"])
        ['layer.0', 'layer.1']
        >>> kept_submodules(torch.nn.ModuleDict({"layer": layers}), ["l*"])
        ['layer']
    """
    names = [name for name, _ in module.named_modules() if name]
    kept: set[str] = set()
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise UnknownNameError("submodule in recompute", pattern, names)
        kept.update(
            name
            for name in matches
            if not any(is_inside(name, other) for other in matches)
        )
    return [name for name in names if name in kept]


def refuse_unseen_pipeline(
    module: torch.nn.Module, config: IPUConfig, blocks: Blocks
) -> None:
    """Refuse recomputation in a pipeline that was unknown before the trace.

    The options are made before `forward` begins its blocks, and the kind of
    recomputation for one IPU has no effect in a pipeline (PopART, `ir.cpp`).

    Args:
        module: The user's module.
        config: The config with `recompute`.
        blocks: Blocks that `forward` has begun.

    Raises:
        ConfigError: The blocks are on several IPUs, and `recompute` is on.

    Example:
        >>> module, blocks = torch.nn.ReLU(), [("a", 0), ("b", 1)]
        >>> refuse_unseen_pipeline(module, IPUConfig(recompute="auto"), blocks)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: recompute='auto', and `forward` begins blocks on 2...
    """
    if config.recompute in (None, "off") or config.customize is not None:
        return
    is_known = config.placement is not None or own_stages(module, config) > 1
    num_ipus = len({ipu or 0 for _, ipu in blocks})
    if is_known or not config.is_pipelined or num_ipus < 2:
        return
    names = ", ".join(repr(name) for name, _ in blocks)
    raise ConfigError(
        f"recompute={config.recompute!r}, and `forward` begins blocks on {num_ipus} "
        "IPUs, a pipeline that isn't known before: there PopART would recompute "
        f"nothing. Name the blocks in pipeline=({names}), or leave recompute out: "
        "pipelines recompute by default."
    )


def _is_known_pipeline(module: torch.nn.Module, config: IPUConfig) -> bool:
    """Return whether the IPU of each block of a pipeline is known in a trace."""
    is_set = config.customize is not None or config.training_options is not None
    is_named = len(set(config.stage_ipus)) > 1 and not is_set
    return is_named and config.is_pipelined and not annotated_blocks(module)


def _weights_on_device(
    module: torch.nn.Module, tensors: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the weights by name, without integer weights, which are constants."""
    inputs = set(map(id, tensors))
    named = [*module.named_parameters(), *module.named_buffers()]
    return {
        name: weight
        for name, weight in named
        if weight.dtype.is_floating_point and id(weight) not in inputs
    }


class WeightPlaces(TorchFunctionMode):
    """Refuses a weight that a pipeline's stages use on two IPUs, as PopART does.

    PopART finds it after it has compiled for minutes (`pipeline.cpp`).

    Args:
        weights: The weights in the trace, by their names.
        config: The stages.
        blocks: Blocks that have begun, in order; the last block is running.

    Example:
        >>> weights, config = {"w": torch.ones(2)}, IPUConfig(pipeline=["a", "b"])
        >>> blocks = [("a", None)]
        >>> with WeightPlaces(weights, config, blocks):
        ...     scaled = weights["w"] * 2
        ...     blocks.append(("b", None))
        ...     scaled * weights["w"]
        Traceback (most recent call last):
        ipufit.errors.ConfigError: Submodules that share a weight stay on one IPU...
    """

    def __init__(
        self, weights: Mapping[str, Tensor], config: IPUConfig, blocks: Blocks
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._name_of = {id(weight): name for name, weight in weights.items()}
        self._config, self._blocks = config, blocks
        self._places: dict[str, tuple[int, str]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function, and note the place of the weights that it reads."""
        result = func(*args, **(kwargs or {}))
        read = {id(tensor) for tensor in tensors_of((args, kwargs))}
        used = [self._name_of[key] for key in read if key in self._name_of]
        if used and any(id(tensor) not in read for tensor in tensors_of(result)):
            block: Begun = self._blocks[-1] if self._blocks else (None, 0)
            ipu = stage_and_ipu(block, self._config)[1] or 0
            where = (
                f"on IPU {ipu}" if block[0] is None else f"in {block[0]!r}, IPU {ipu}"
            )
            for name in used:
                first, place = self._places.setdefault(name, (ipu, where))
                if first != ipu:
                    raise ConfigError(
                        "Submodules that share a weight stay on one IPU. "
                        f"{user_name(name)} is used {place}, and {where}: PopART can't "
                        "pipeline it. Give each its own weight, or put the later "
                        f"submodule on the first IPU: poptorch.Stage(...).ipu({first}) "
                        "in pipeline=(...)."
                    )
        return result


class ShortPipelineError(ConfigError):
    """Raised if a call has too few micro-batches for the model's own blocks."""


def check_stages_begin(
    module: torch.nn.Module, config: IPUConfig, started: Blocks, *, training: bool
) -> None:
    """Refuse names of stages that never begin in the trace.

    PopTorch would ignore such a stage, and put too much of the model on the first one.

    Args:
        module: The user's module, whose `forward` has been traced.
        config: The config that names the stages.
        started: Blocks that `forward` has begun.
        training: Whether the program trains. In inference `forward` may leave parts
            out.

    Raises:
        UnknownNameError: A name is neither a submodule nor a block that was begun.
        ConfigError: A submodule with this name, or all with this pattern, was never
            called.

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
def traced_mode(step: Step) -> Iterator[None]:
    """Set the user's module to the mode of a trace, and begin its stages' blocks.

    A block begins at each submodule that the config's stages name; other names are
    blocks that the model makes itself. Outputs of submodules that `recompute` names are
    kept, and activations between them recomputed. The hooks exist only while a program
    is traced, so the user's module doesn't change.

    Args:
        step: The module that is traced.

    Raises:
        ShortPipelineError: The model's own blocks need more micro-batches than a call
            has.
    """
    module, config = step.module, step.config
    submodules = dict(module.named_modules())
    beginnings = find_beginnings(module, config)
    patterns = config.recompute_patterns if step.is_training else ()
    hooks = contextlib.ExitStack()
    with mode(step, training=step.is_training, root=module), hooks:
        for name, block in beginnings.before.items():
            begin = partial(_begin, block)
            hooks.enter_context(submodules[name].register_forward_pre_hook(begin))
        for name, block in beginnings.after.items():
            begin = partial(_begin, block)
            hooks.enter_context(submodules[name].register_forward_hook(begin))
        for name in kept_submodules(module, patterns):
            hooks.enter_context(submodules[name].register_forward_hook(_keep))
        try:
            yield
        except poptorch.Error as error:
            _refuse_short_pipeline(error)
            raise


def _begin(block: str, *_: Any) -> None:
    poptorch.Block.start(block)


def _keep(_module: Any, _inputs: Any, outputs: Any) -> Any:
    """Return checkpoints of tensors with gradients; other values unchanged."""
    return map_tensors(
        lambda tensor: (
            poptorch.recomputationCheckpoint(tensor)
            if tensor.is_floating_point()
            else tensor
        ),
        outputs,
    )


def _refuse_short_pipeline(error: poptorch.Error) -> None:
    """Explain PopTorch's error that a call has too few micro-batches for the blocks."""
    match = re.search(r"number of pipeline stages \((\d+)\)", str(error))
    if match is None:
        return
    least = int(match[1])
    is_training = "gradientAccumulation" in str(error)
    stages = most_stages(least) if is_training else least
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


@contextlib.contextmanager
def last_block(name: str | None, started: Blocks) -> Iterator[None]:
    """Enter the block for the loss and all other operations that ipufit adds.

    After a `with Block(...)` no block is active, and PopTorch then refuses every
    operator. Entering the last block again makes no new stage.

    Args:
        name: Name of the block; None for the last block that the module started.
        started: Blocks that the module started.
    """
    with contextlib.ExitStack() as stack:
        if name is not None:
            try:
                stack.enter_context(poptorch.Block(name))
            except AssertionError as error:  # it would be a new one, on no IPU
                known = {block for block, _ in started if block is not None}
                raise UnknownNameError("loss_block", name, known) from error
        elif started:
            stack.enter_context(poptorch.Block(*started[-1]))
        yield


def _maker(traced: Tensor) -> partial[Tensor]:
    """Return a function that makes zeros like a tensor after the trace."""
    # PopTorch has replaced torch.zeros until then by one that chooses the device.
    return partial(torch.zeros, tuple(traced.shape), dtype=traced.dtype, device="cpu")


class Findings(NamedTuple):
    """The findings of the trace of a step.

    Attributes:
        packing: Structure of the outputs that the program returns.
        probabilities: Outputs that are probabilities (`probability_outputs`).
        increments: Number that a micro-batch adds to each buffer that is only counted
            up.
        metrics: Metrics of a training program, bound to its outputs.
        entries: Entries of the vector that a training program returns.
    """

    packing: Packing
    probabilities: dict[str, str]
    increments: Mapping[str, int] = {}
    metrics: tuple[BoundMetric, ...] = ()
    entries: tuple[MetricSums, ...] = ()


_OVERLAPS = {
    "accumulation": poptorch.OverlapMode.OverlapAccumulationLoop,
    "device_iterations": poptorch.OverlapMode.OverlapDeviceIterationLoop,
}


_MASKS = os.path.join("transformers", "masking_utils.py")  # of transformers 5


class CountsMissingError(Exception):
    """Raised if a trace has shown that a user's loss function ignores targets."""


class Step(torch.nn.Module):
    """One micro-batch of the user's module, as PopTorch traces it.

    A training program returns the sums of loss and metrics, the marked loss, and the
    outputs if a metric is streamed. An inference program returns the outputs, then the
    scalars: the module's own loss and logged values.

    Args:
        module: The user's module. A dict of inputs becomes keyword arguments of it, a
            tuple or list positional ones.
        config: Stages and precision.
        structure: Structure of a batch.
        host_values: Buffers whose values follow the tensors of a batch.
        computation: The function to call, and whether the function takes labels.
        objective: Losses and metrics of a training program; None for inference.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: IPUConfig,
        structure: SampleStructure,
        host_values: Sequence[HostValue],
        computation: Computation,
        objective: Objective | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.host_values = tuple(host_values)
        self.structure = structure
        self.computation = computation
        self.objective: Any = objective
        self.is_training = objective is not None
        if objective is not None:
            self.losses = torch.nn.ModuleList(objective.modules)  # for their buffers
        operator_rules()  # imported here, because a trace would record its tensors
        # PopTorch traces a shallow copy, which shares these lists.
        self._findings: list[Findings] = []
        self.examples: list[tuple[Any, Labels]] = []

    @property
    def findings(self) -> Findings:
        """The findings of the last trace."""
        return self._findings[-1]

    @property
    def logs_scalars(self) -> bool:
        """Whether a trace logged scalars, or the module returns its loss itself."""
        return any(
            findings.packing.names
            or any(e.result is None and e.size for e in findings.entries)
            for findings in self._findings
        )

    @property
    def num_given(self) -> int:
        """Number of tensors of a batch that the program takes, from the first."""
        structure = self.structure
        takes_labels = self.computation.takes_labels
        return structure.num_given if takes_labels else structure.num_inputs

    @property
    def weights(self) -> list[Tensor]:
        """Parameters and buffers of which the device has copies."""
        values = {id(value.tensor) for value in self.host_values}
        return [weight for weight in weights_of(self) if id(weight) not in values]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute a micro-batch, and return all results of the program.

        Args:
            *tensors: Tensors of the batch, then the host's values.

        Raises:
            UnsupportedError: PopTorch would silently ignore something.
        """
        count, config = len(tensors) - len(self.host_values), self.config
        overlap = _OVERLAPS.get(config.overlap_io or "")
        with replaced_by_inputs(self.host_values, tensors[count:]):
            checks = TraceChecks(self, is_training=self.is_training)
            with checks:
                if config.first_block is not None:  # casts and transfers belong to it
                    poptorch.Block.start(config.first_block)
                batch: Sequence[Tensor] = tensors[:count]
                if overlap is not None:
                    batch = [poptorch.set_overlap_for_input(t, overlap) for t in batch]
                noted = LossRecorder(warns=True)
                with contextlib.ExitStack() as stack:
                    scalars = stack.enter_context(collected())
                    blocks = stack.enter_context(started_blocks(config.stages))
                    stack.enter_context(noted)
                    stack.enter_context(self._explained())
                    if self.is_training and _is_known_pipeline(self.module, config):
                        weights = _weights_on_device(self, tensors)
                        stack.enter_context(WeightPlaces(weights, config, blocks))
                    if config.types.is_half:
                        stack.enter_context(computed_in(self.module, config))
                    own_loss, outputs = self._called(batch, noted)
                warn_of_misuses(noted.misuses)
                training = self.is_training
                check_stages_begin(self.module, config, blocks, training=training)
                if training:
                    refuse_unseen_pipeline(self.module, config, blocks)
                with last_block(config.last_block, blocks):
                    rows = self.structure.num_rows(batch)
                    own_loss = _checked_mean(own_loss, noted, rows)
                    results = own_loss, outputs, scalars, noted
                    if training:
                        tensors, loss, findings = self._trained(batch, *results)
                    else:
                        (tensors, findings), loss = self._predicted(*results), ()
                    if overlap is not None:  # the loss stays the one that is marked
                        tensors = tuple(
                            poptorch.set_overlap_for_output(tensor, overlap)
                            for tensor in tensors
                        )
                returned = (*tensors[:1], *loss, *tensors[1:])
            checks.refuse_returned(returned)
            checks.warn()
        self._findings.append(findings._replace(increments=checks.increments()))
        return returned

    def _called(
        self, tensors: Sequence[Tensor], noted: LossRecorder
    ) -> tuple[Tensor | None, Any]:
        """Call the module or step, and return its own loss and its outputs."""
        inputs = [*tensors[: self.structure.num_inputs]]
        if self.config.types.is_half:
            inputs = [
                t.to(torch.float16) if t.is_floating_point() else t for t in inputs
            ]
        mixing = self.structure.mixing(tensors)
        if mixing is not None:
            # Pixels of 8 bits are mixed in the dtype of the program.
            dtype = self.config.types.activations
            inputs = [
                mixed_inputs(t if t.is_floating_point() else t.to(dtype), mixing)
                for t in inputs
            ]
        nested = self.structure.nested(inputs)
        return results_of(
            *(self.computation, self.module, self.structure, nested, tensors),
            noted.marked,
        )

    def _trained(
        self,
        batch: Sequence[Tensor],
        own_loss: Tensor | None,
        outputs: Any,
        scalars: Scalars,
        noted: LossRecorder,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Findings]:
        """Compute the sums of metrics, and the loss, for `forward`.

        The loss is returned because PopTorch drops operations that no output depends on
        before it looks for the loss.

        Args:
            batch: Tensors of the micro-batch.
            own_loss: The module's own loss.
            outputs: The module's other outputs.
            scalars: Values that the module has logged.
            noted: Results of the module's operations.

        Returns:
            Tensors to return; the marked loss, which follows the first tensor; and
            findings.
        """
        objective, rows = self.objective, self.structure.num_rows(batch)
        labels = self.structure.labels(batch)
        mask = real_rows(labels)
        if self.structure.rows is not None and mask is not None:
            labels = weighed(labels, mask)  # padding, with loss or targets that are NaN
        if self.computation.step is not None and objective.metrics:
            _require_outputs(outputs)
        wide, labels = widened_all(outputs, labels)
        self.examples[:] = [map_tensors(_maker, (wide, labels))]
        if own_loss is None and objective.owns_loss:
            raise self._without_loss(wide)
        probabilities = probability_outputs(outputs, noted)
        with collected() as unseen:
            bound = objective.bind(wide, labels, probabilities)
            mixing, ignored = self.structure.mixing(batch), objective.ignored
            if mixing is None:
                terms = bound.terms(wide, labels, rows, own_loss)
            else:
                terms = bound.mixed_terms(wide, labels, rows, mixing)
                labels = dominant_labels(labels, mixing)
            if labels.counted is not None and objective.ignored != ignored:
                raise CountsMissingError("a function ignores targets")
            with noted:
                vector, entries = vector_of(bound, wide, labels, rows, terms, scalars)
        if unseen:
            raise ConfigError(
                f"log({next(iter(unseen))!r}) was called in a loss or metric, which "
                "evaluate() computes on the host. Call it in forward, or pass a "
                "function of outputs and targets as a metric."
            )
        streamed, packing = Packing.of(outputs if objective.is_streamed else (), {})
        loss = total_loss(terms)
        require_gradient(loss)
        if noted.has_losses:
            loss = _with_other_losses(loss, (vector, *streamed))
        marked = poptorch.identity_loss(loss, reduction="sum")
        findings = Findings(packing, probabilities, {}, bound.metrics, entries)
        return (vector, *streamed), (marked,), findings

    def _without_loss(self, outputs: Any) -> ConfigError:
        if self.computation.step is not None:
            return ConfigError(
                "The training step returned no loss: it returned "
                f"{shapes_of(outputs)}. Return the mean over the samples, a tensor "
                "without dimensions: alone, first in a tuple, or as 'loss' in a dict."
            )
        return ConfigError(
            "There is no loss: compile() got none, and the module returns none in a "
            f"form that ipufit knows ({OWN_LOSS}); it returned "
            f"{shapes_of(outputs)}. Return one, or pass loss='cross_entropy' or "
            f"the like to compile().{self._targets_hint}"
        )

    def _predicted(
        self,
        own_loss: Tensor | None,
        outputs: Any,
        scalars: Scalars,
        noted: LossRecorder,
    ) -> tuple[tuple[Tensor, ...], Findings]:
        """Return the results of an inference program."""
        if own_loss is not None:
            if "loss" in scalars:
                raise ConfigError(
                    "log('loss') was called, and the module returns its own loss, "
                    "which is called so: log it under another name."
                )
            scalars = {"loss": own_loss.detach().to(torch.float32), **scalars}
        probabilities = probability_outputs(outputs, noted)
        if not self.computation.gives_outputs:
            outputs = ()
        elif self.computation.step is not None and self.computation.takes_labels:
            _require_outputs(outputs)
        tensors, packing = Packing.of(outputs, scalars)
        return tensors, Findings(packing, probabilities)

    @property
    def _targets_hint(self) -> str:
        """Advice that a module with its own loss doesn't get the targets."""
        objective, has_targets = self.objective, self.structure.has_targets
        is_called = objective is not None and self.computation.step is None
        if not (is_called and objective.owns_loss and has_targets):
            return ""
        return (
            " The module doesn't get the targets, which are for losses of compile() "
            "and for metrics: what it computes its loss from must be among the inputs, "
            "as in fit({'x': x, 'labels': y}) or samples of the form ((x, labels),)."
        )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Add advice to errors of `forward`, such as those about missing targets."""
        try:
            yield
        except poptorch.Error as error:
            places = traceback.extract_tb(error.__traceback__)
            if any(place.filename.endswith(_MASKS) for place in places):
                raise UnsupportedError(
                    "transformers reads the values of a mask of tokens, which a "
                    "program can't. Pass attention_mask with four dimensions, which "
                    "is added to the scores: -10000.0 * (1 - mask)[:, None, None, :] "
                    "for an encoder, one number for each pair of tokens for GPT-2."
                ) from error
            raise
        except (AssertionError, DataError) as error:  # torch's, without a GPU
            if not re.search("with CUDA|no NVIDIA", str(error)):
                raise
            raise UnsupportedError(
                f"{error}: the model runs on IPUs, and its tensors are there. Leave "
                ".cuda() and .to('cuda') out; x.device is the device of x."
            ) from error
        except (TypeError, AttributeError) as error:
            if not self._targets_hint:
                raise
            raise ConfigError(
                f"compile() got no loss, and {type(self.module).__name__} failed: "
                f"{error}.{self._targets_hint}"
            ) from error


def _checked_mean(loss: Tensor | None, noted: LossRecorder, rows: int) -> Tensor | None:
    """Return a module's or step's own loss as a scalar.

    Raises:
        ConfigError: The loss has several elements; or the loss is a sum over samples,
            which would depend on the size of micro-batches.
    """
    if rows > 1 and any(loss is added for added in noted.sums):
        raise ConfigError(sum_loss_message("The model's own loss", rows))
    if loss is None:
        return None
    if loss.numel() != 1:
        raise ConfigError(
            f"The module's own loss has shape {tuple(loss.shape)}: it must be a "
            "scalar, the mean over the samples of a micro-batch."
        )
    return loss.reshape(())  # PopTorch gives one inside another the shape [1]


def _require_outputs(outputs: Any) -> None:
    """Refuse a step without outputs if metrics need them.

    Raises:
        ConfigError: There are no outputs.
    """
    if isinstance(outputs, tuple) and not outputs:
        raise ConfigError(
            "compile() got metrics, and the step returned no outputs for them. Return "
            "{'loss': loss, 'outputs': outputs}, or report scalars in that dict and "
            "leave metrics out."
        )


def total_loss(terms: TermsByOutput) -> Tensor:
    """Return the weighted sum of the losses; 0-d.

    Args:
        terms: Terms and weight of each loss, by output.
    """
    values = [t.value if w == 1 else t.value.mul(w) for t, w in terms.values()]
    return values[0] if len(values) == 1 else torch.stack(values).sum()


def _with_other_losses(value: Tensor, returned: Sequence[Tensor]) -> Tensor:
    """Add all other results to the loss, multiplied by 0.

    A metric, `log` or the module may call a built-in loss function, which PopTorch
    marks as a loss. PopTorch accepts such marks if the final loss depends on them.
    """
    nothing = [
        tensor.detach().reshape(-1)[:1].to(torch.float32).mul(0.0)
        for tensor in returned
    ]
    return torch.cat([value.reshape(1), *nothing])
