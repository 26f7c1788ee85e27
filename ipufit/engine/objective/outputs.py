# SPDX-License-Identifier: Apache-2.0
"""Several outputs by name, and the loss that a model returns itself."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from torch import Tensor

from ipufit._tree import Structure, is_record, parts_of, without
from ipufit.errors import ConfigError, DataError


def named_outputs(outputs: Any) -> dict[str, Any] | None:
    """Several outputs by name; None if there is only one.

    A dict has its keys, a tuple or list `output_1`, `output_2` and so on, an object
    such as a data class the names of the attributes that are tensors.

    Example:
        >>> named_outputs((1, 2)), named_outputs({"a": 1}), named_outputs(3)
        ({'output_1': 1, 'output_2': 2}, None, None)
    """
    if isinstance(outputs, dict):
        several = {str(name): value for name, value in outputs.items()}
    elif isinstance(outputs, (tuple, list)):
        several = {f"output_{i}": value for i, value in enumerate(outputs, 1)}
    elif is_record(outputs):
        several = _tensors_of(outputs)
    else:
        return None
    return several if len(several) > 1 else None


def only(values: Any) -> Any:
    """The element of a container that has one; anything else as it is.

    Example:
        >>> only({"a": 1}), only([1, 2])
        (1, [1, 2])
    """
    if isinstance(values, dict) and len(values) == 1:
        return next(iter(values.values()))
    if isinstance(values, (tuple, list)) and len(values) == 1:
        return values[0]
    return values


def bare(outputs: Any) -> Any:
    """The tensor that is the only one of an object; otherwise as `only`.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> bare(SimpleNamespace(logits=torch.tensor(1), count=3))
        tensor(1)
    """
    if is_record(outputs):
        tensors = list(_tensors_of(outputs).values())
        return tensors[0] if len(tensors) == 1 else outputs
    return only(outputs)


def _tensors_of(record: Any) -> dict[str, Any]:
    parts = parts_of(record)
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


def part_of(values: Any, name: str, position: int, count: int, what: str) -> Any:
    """The part of targets or weights that belongs to one of several outputs.

    Args:
        values: A dict by name or a sequence by position.
        name: Name of the output.
        position: Position of the output.
        count: Number of outputs.
        what: Name of the values in messages.

    Raises:
        DataError: The values have no part for this output.

    Example:
        >>> part_of({"a": 1}, "a", 0, 2, "targets"), part_of([1, 2], "b", 1, 2, "")
        (1, 2)
    """
    if isinstance(values, dict):
        if name not in values:
            raise DataError(
                f"The {what} have no {name!r}, which the model returns and which has "
                f"a loss or metric. They have: {', '.join(map(str, values))}."
            )
        return values[name]
    if isinstance(values, (tuple, list)):
        if len(values) != count:
            raise DataError(
                f"There are {len(values)} {what} for {count} outputs: give one for "
                "each, or a dict by the outputs' names."
            )
        return values[position]
    raise DataError(
        f"The model returns {count} outputs, and the {what} are one tensor: give "
        "one for each output, in a list or in a dict by name."
    )


def shapes_of(values: Any) -> str:
    """Types and shapes of nested tensors, for messages.

    Example:
        >>> import torch
        >>> shapes_of((torch.zeros(2, 3), None))
        'float32 [2, 3]'
    """
    shapes = [
        f"{str(leaf.dtype).replace('torch.', '')} {list(leaf.shape)}"
        for leaf in Structure.of_outputs(values).flatten(values)
        if isinstance(leaf, Tensor)
    ]
    return ", ".join(shapes) or "nothing"


OWN_LOSS = (
    "'loss' in a dict or an object, as transformers have it; the result of "
    "poptorch.identity_loss; a scalar alone, or one that a tuple begins or ends with, "
    "such as (output, loss)"
)
"""Everything that is understood as a module's own loss, for messages."""


def split_own_loss(
    outputs: Any, marked: Sequence[Tensor] = ()
) -> tuple[Tensor | None, Any]:
    """Split the outputs into the loss that a model returns itself, and the others.

    It is called "loss" in a dict, a named tuple or an object, as transformers have it;
    else it is the result of `identity_loss`; the first or the last of a tuple if it is
    a scalar; or all there is, if that is one. Objects stay what they are, without it.

    Args:
        outputs: Everything that the module returned.
        marked: Results of `identity_loss`, in the order of the calls. Of several that
            are returned the last is taken, because it may be made of the others.

    Raises:
        ConfigError: Two values might be the loss.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> split_own_loss({"loss": torch.tensor(2.0), "logits": 1})
        (tensor(2.), {'logits': 1})
        >>> split_own_loss(SimpleNamespace(loss=torch.tensor(2.0), logits=1))
        (tensor(2.), namespace(loss=None, logits=1))
        >>> split_own_loss(("logits", torch.tensor(2.0)))
        (tensor(2.), 'logits')
        >>> split_own_loss([5])
        (None, [5])
    """
    if isinstance(outputs, Tensor):
        is_loss = outputs.dim() == 0 or _is_among(outputs, marked)
        return (outputs, ()) if is_loss else (None, outputs)
    if isinstance(outputs, (tuple, list)):
        names = list(getattr(outputs, "_fields", range(len(outputs))))
        name = _loss_key(dict(zip(names, outputs)), marked)
        index = _scalar_end(outputs) if name is None else names.index(name)
        if index is not None:
            return outputs[index], only((*outputs[:index], *outputs[index + 1 :]))
    elif isinstance(outputs, dict) or is_record(outputs):
        parts = parts_of(outputs)
        key = _loss_key(parts, marked)
        if key is not None:
            return parts[key], without(outputs, key)
    return None, outputs


def _is_among(value: Any, tensors: Sequence[Tensor]) -> bool:
    return any(value is tensor for tensor in tensors)


def _loss_key(outputs: Mapping[Any, Any], marked: Sequence[Tensor]) -> Any:
    """The key "loss", or that of the scalar that was marked last; else None."""
    if "loss" in outputs:
        return "loss" if isinstance(outputs["loss"], (Tensor, type(None))) else None
    for tensor in reversed(marked):
        for key, value in outputs.items():
            if value is tensor and tensor.numel() == 1:
                return key
    return None


def _scalar_end(outputs: Sequence[Any]) -> int | None:
    """The first or last position of a tuple, if a scalar is there; else None."""
    ends = sorted({0, len(outputs) - 1}) if outputs else []
    found = [
        end
        for end in ends
        if isinstance(outputs[end], Tensor)
        and outputs[end].dim() == 0
        and outputs[end].is_floating_point()
    ]
    if len(found) > 1:
        raise ConfigError(
            f"The module returns {len(outputs)} values, of which the first and the "
            "last are scalars: either may be its loss. Return a dict with 'loss', or "
            "mark the loss with poptorch.identity_loss(loss, reduction='none')."
        )
    return found[0] if found else None


def checked_scalar(loss: Tensor) -> Tensor:
    """Reshape a loss to 0-d: PopTorch gives a loss inside another the shape [1].

    Raises:
        ConfigError: The loss has several elements.
    """
    if loss.numel() != 1:
        raise ConfigError(
            f"The module's own loss has shape {tuple(loss.shape)}: it must be a "
            "scalar, the mean over the samples of a micro-batch."
        )
    scalar: Tensor = loss.reshape(())
    return scalar
