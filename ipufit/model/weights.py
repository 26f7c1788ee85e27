# SPDX-License-Identifier: Apache-2.0
"""Weights of a model: read, set, and kept in files of their own."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch

from ipufit import _env
from ipufit import checkpoint as files
from ipufit.engine import check_shapes
from ipufit.errors import DataError
from ipufit.types import PathLike

from .parts import Model


def get_weights(self: Model) -> list[Any]:
    """Copies of the weights and buffers, as NumPy arrays in `state_dict`'s order.

    Example:
        >>> from ipufit import IPUModel
        >>> [w.shape for w in IPUModel(torch.nn.Linear(2, 3)).get_weights()]
        [(3, 2), (3,)]
    """
    return [t.detach().numpy().copy() for t in fetched_state(self).values()]


def copied_weights(self: Model) -> dict[str, torch.Tensor]:
    """Copies of the weights and buffers by name, in any dtype.

    Returns:
        Tensors on the host; names that are tied share a copy.

    Example:
        >>> from ipufit import IPUModel
        >>> list(IPUModel(torch.nn.Linear(2, 3)).copied_weights())
        ['weight', 'bias']
    """
    return files.copied_tensors(fetched_state(self))


def set_weights(self: Model, weights: Sequence[Any] | Mapping[str, Any]) -> None:
    """Set the weights and buffers, on the device too.

    Args:
        weights: Arrays as from `get_weights`; or a state dict, such as the one that
            `average_checkpoints` gives.

    Raises:
        DataError: The weights aren't arrays, or their number, a name or a shape is
            wrong.
    """
    check_shapes(self.module)
    state = self.module.state_dict()
    if isinstance(weights, Mapping) and not weights and _env.compile_only():
        return  # an average of checkpoints that weren't written
    if isinstance(weights, Mapping):
        odd = sorted(str(name) for name in {*state} ^ {*weights})
        if odd:
            raise DataError(
                f"These weights are of another module: {', '.join(odd)} are only in "
                "one of the two."
            )
        weights = [weights[name] for name in state]
    if not isinstance(weights, (tuple, list)):
        raise DataError(
            "set_weights() takes a list of arrays, in the order of state_dict(), or a "
            f"state dict, and got a {type(weights).__name__}."
        )
    if len(weights) != len(state):
        raise DataError(
            f"There are {len(weights)} arrays for {len(state)} weights: "
            f"{', '.join(state)}."
        )
    given = {n: _as_weight(n, w) for n, w in zip(state, weights)}
    for name, tensor in state.items():
        if given[name].shape != tensor.shape:
            raise DataError(
                f"The array for {name} has shape {tuple(given[name].shape)}, and "
                f"the weight has {tuple(tensor.shape)}."
            )
    _set_state(self, given)


def save_weights(
    self: Model, path: PathLike, *, moment: files.SavedAt | None = None
) -> None:
    """Write the weights to a safetensors file, under the module's own names.

    Args:
        path: A file whose name ends in `.safetensors`.
        moment: When in a run they are saved, and the figure that they have then, as
            `ModelCheckpoint` tells it for `average_checkpoints`.

    Raises:
        ConfigError: The name ends in something else.
        FileError: The file can't be written; a file that was there before is whole.
    """
    if _env.compile_only() is not None:  # trained ones may be there
        return
    weights = fetched_state(self)

    def write() -> str:
        files.save_weights(weights, path, moment=moment)
        return str(path)

    files.written_by_one(write)


def load_weights(self: Model, path: PathLike) -> None:
    """Take the weights from a file, on the device too.

    Args:
        path: A file of safetensors (`.safetensors`) or a state dict of torch (`.pt`,
            `.pth`, `.bin`), which is read with `weights_only=True`.

    Raises:
        ConfigError: The name ends in something else.
        DataError: The file is damaged, or has other weights.
        MissingCheckpointError: There is no such file.
        FileError: The file can't be read.
    """
    check_shapes(self.module)
    given: dict[str, torch.Tensor] | None = None
    with files.missing_allowed():
        given = files.load_weights(path)
    if given is None:
        return
    state = self.module.state_dict()
    odd = files.names_that_differ(state, given, "shape")
    if odd:
        raise DataError(
            f"{str(path)!r} has the weights of another module: {', '.join(odd)} "
            "are only in one of the two, or have other shapes."
        )
    for name, tensor in state.items():
        if not torch.can_cast(given[name].dtype, tensor.dtype):
            raise DataError(
                f"{str(path)!r} has {name} in {given[name].dtype}, and the weight "
                f"is {tensor.dtype}, which can't hold it."
            )
    _set_state(self, given)


def fetched_state(model: Model) -> dict[str, torch.Tensor]:
    """The state dict of the module, with the newest weights of the device."""
    check_shapes(model.module)
    model._executors.fetch_weights()
    state: dict[str, torch.Tensor] = model.module.state_dict()
    return state


def _set_state(model: Model, given: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in model.module.state_dict().items():
            tensor.copy_(given[name])
    model._executors.send_weights()


def _as_weight(name: str, value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"What is given for {name} is no array of numbers: {error}."
        ) from error
