# SPDX-License-Identifier: Apache-2.0
"""The state that `copy` and `pickle` take of a model: all but its programs and devices.

A copy is made anew: of the module as it is on the host, the config and the arguments of
`compile`. Then it is given what training has changed beyond the weights.
"""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any, Mapping, TypeVar

import torch

from ipufit import checkpoint as files
from ipufit.engine import Counterparts, lazy_layers
from ipufit.errors import UnsupportedError
from ipufit.resume import groups_of_module

from .parts import Model
from .saving import trained_state

ModelT = TypeVar("ModelT", bound=Model)


def state_of(model: Model) -> dict[str, Any]:
    """The state that a copy of a model is made of.

    Args:
        model: Compiled or not, between runs or in a callback. Its newest weights are
            fetched; nothing else of it changes.

    Returns:
        Its own module, config, arguments and further attributes, not copies of them.
    """
    model._executors.fetch_weights()
    settings = model._settings
    average = None if settings is None else settings.average
    is_trained = settings is not None and not lazy_layers(model.module)
    own = Model.__annotations__
    return {
        "module": model.module,
        "config": model._given_config,
        "arguments": None if settings is None else dict(settings.arguments),
        "counterparts": _counterparts_in_use(model),
        "trained": _beyond_the_module(model) if is_trained else None,
        "is_swapped": average is not None and average.is_swapped,
        "data": replace(model._data, source=None),
        "attributes": {n: v for n, v in vars(model).items() if n not in own},
    }


def restore(model: Any, state: Mapping[str, Any]) -> None:
    """Make a model of the state of another one.

    Args:
        model: A new `IPUModel` of the module and config in the state.
        state: A copy of what `state_of` gave, which belongs to this model from now on.
    """
    model._data = state["data"]
    vars(model).update(state["attributes"])
    model._counterparts = Counterparts(state.get("counterparts", ()))
    if state["arguments"] is None:
        return
    model.compile(**state["arguments"])
    trained = state["trained"]
    if trained is None:
        return
    tensors = {**groups_of_module(model.module), **trained.tensors}
    trained_state(model).put_back(files.Checkpoint(tensors, trained.state))
    if state["is_swapped"]:
        model.swap_weights(is_average=True)


def independent_copy(model: ModelT, purpose: str) -> ModelT:
    """A copy for a run that must leave a model as it is, which gives its IPUs back.

    Args:
        model: Compiled or not.
        purpose: The run, to begin an error message with.

    Raises:
        UnsupportedError: The model can't be copied.
    """
    model._executors.detach()  # the copy needs them
    state = state_of(model)
    attributes = state.pop("attributes")  # a step of its own reads them
    try:
        state = copy.deepcopy(state)
    except Exception as error:  # a user's object may raise anything
        raise UnsupportedError(
            f"{purpose} runs on a copy of the model, so that nothing of it changes, "
            f"and it can't be copied: {error}. Leave out of the module, and of what "
            "compile() got, what copy.deepcopy refuses, such as open files and locks."
        ) from error
    other: Any = type(model).__new__(type(model))
    other.__setstate__({**state, "attributes": attributes})
    copied: ModelT = other
    return copied


def check_picklable(state: Mapping[str, Any]) -> None:
    """Refuse a state that `pickle` would refuse, and name the part.

    Args:
        state: From `state_of`.

    Raises:
        UnsupportedError: A part can't be pickled.
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


def _counterparts_in_use(model: Model) -> list[tuple[Any, Any]]:
    """The parameters of the module that was given which the optimizer given has."""
    settings = model._settings
    optimizer = None if settings is None else settings.arguments["optimizer"]
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    given = [one for group in optimizer.param_groups for one in group["params"]]
    return model._counterparts.among(given)


def _beyond_the_module(model: Model) -> files.Checkpoint:
    """The optimiser's state, the position in its schedule, and the averages.

    While averages are in the place of the weights, the weights too.
    """
    part = trained_state(model)
    trained = part.take()
    if part.average is not None and part.average.is_swapped:
        return trained
    own = groups_of_module(model.module)
    others = {name: t for name, t in trained.tensors.items() if name not in own}
    return files.Checkpoint(others, trained.state)


class _WithoutTensors(pickle.Pickler):
    """Goes through an object as pickle does, but not through the values of tensors."""

    def persistent_id(self, part: Any) -> str | None:
        """A name that stands for a tensor; None for all other parts."""
        return "tensor" if isinstance(part, torch.Tensor) else None
