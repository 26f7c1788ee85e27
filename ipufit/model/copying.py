# SPDX-License-Identifier: Apache-2.0
"""What `copy` and `pickle` take of a model: all but its programs and devices.

A copy is made anew: of the module as it is on the host, the config and the arguments of
`compile`. Then it is given what training has learnt beyond the weights.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, Mapping, TypeVar

import torch

from ipufit import checkpoint as files
from ipufit.engine import lazy_layers
from ipufit.errors import UnsupportedError
from ipufit.resume import Learnt, groups_of_module

from .runs import ModelBase

ModelT = TypeVar("ModelT", bound=ModelBase)

_COUNTS = ("_micro_batch_size", "_passes", "_target_columns")
"""What the next run goes by: the default batch size, the order and columns of data."""


class Copied(ModelBase):
    """A model that can be copied and pickled."""

    def __copy__(self: ModelT) -> ModelT:
        other = type(self).__new__(type(self))
        restore(other, {**state_of(self), "learnt": None})
        return other

    def __deepcopy__(self: ModelT, memo: dict[int, Any]) -> ModelT:
        other = memo[id(self)] = type(self).__new__(type(self))
        restore(other, copy.deepcopy(state_of(self), memo))
        return other

    def __getstate__(self) -> dict[str, Any]:
        state = state_of(self)
        check_picklable(state)
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        restore(self, state)


def state_of(model: ModelBase) -> dict[str, Any]:
    """What a copy of a model is made of.

    Args:
        model: Compiled or not, between runs or in a callback. Its newest weights are
            fetched; nothing else of it changes.

    Returns:
        Its own module, config, arguments and further attributes, not copies of them.
    """
    model._executors.fetch_weights()
    how = model._how
    has_learnt = how is not None and not lazy_layers(model.module)
    frame = vars(ModelBase(torch.nn.Identity()))
    return {
        "module": model.module,
        "config": model._given_config,
        "arguments": None if how is None else dict(how.arguments),
        "learnt": _beyond_the_module(model) if has_learnt else None,
        "is_swapped": bool(model.weight_average and model.weight_average.is_swapped),
        "counts": {name: getattr(model, name) for name in _COUNTS},
        "attributes": {n: v for n, v in vars(model).items() if n not in frame},
    }


def restore(model: ModelBase, state: Mapping[str, Any]) -> None:
    """Make a model of what `state_of` has taken of another.

    Args:
        model: Has no attributes yet; they become those of `ModelBase`, and the user's.
        state: A copy of the other one's, which belongs to this one from now on.
    """
    ModelBase.__init__(model, state["module"], state["config"])
    vars(model).update(state["counts"])
    vars(model).update(state["attributes"])
    if state["arguments"] is None:
        return
    model.compile(**state["arguments"])
    if state["learnt"] is None:
        return
    learnt = state["learnt"]
    tensors = {**groups_of_module(model.module), **learnt.tensors}
    learnt_by(model).put_back(files.Checkpoint(tensors, learnt.state))
    if state["is_swapped"]:
        model.swap_weights(is_average=True)


def check_picklable(state: Mapping[str, Any]) -> None:
    """Refuse what `pickle` would refuse, by its name.

    Args:
        state: From `state_of`.

    Raises:
        UnsupportedError: Something in it can't be pickled.
    """
    parts = {
        "module": state["module"],
        "config": state["config"],
        **{f"compile({n}=...)": one for n, one in (state["arguments"] or {}).items()},
        **state["attributes"],
    }
    for name, part in parts.items():
        try:
            _WithoutTensors(io.BytesIO()).dump(part)
        except Exception as error:  # a user's object may raise anything
            raise UnsupportedError(
                f"This model can't be pickled because of {name}: {error}. Functions "
                "and classes have to be defined at the top of a module, so that they "
                "are found by their names. copy.deepcopy(model) takes any, and "
                "model.save(path) keeps what was learnt."
            ) from error


def learnt_by(model: ModelBase) -> Learnt:
    """What training has learnt, of a compiled model."""
    how = model._compiled()
    return Learnt(model._executors, how.optimization, how.average)


def _beyond_the_module(model: ModelBase) -> files.Checkpoint:
    """The optimiser's state, the schedule's place and the averages.

    While averages are in the place of the weights, the weights too.
    """
    average, learnt = model.weight_average, learnt_by(model).take()
    if average is not None and average.is_swapped:
        return learnt
    own = groups_of_module(model.module)
    others = {name: t for name, t in learnt.tensors.items() if name not in own}
    return files.Checkpoint(others, learnt.state)


class _WithoutTensors(pickle.Pickler):
    """Goes through an object as pickle does, but for the values of its tensors."""

    def persistent_id(self, part: Any) -> str | None:
        """What stands for a part: something for tensors."""
        return "tensor" if isinstance(part, torch.Tensor) else None
