# SPDX-License-Identifier: Apache-2.0
"""Copies of a model: by `copy`, by `pickle`, and for runs that mustn't change it.

A copy is built from the module on the host, the config and the arguments of `compile`.
Then it gets the optimizer's state and the other parts that training has changed. It has
no programs and no device yet.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Collection, Mapping, Sequence

import torch
from torch.nn.parameter import is_lazy

from ipufit import checkpoint as files
from ipufit.config import IPUConfig
from ipufit.engine import host_calls
from ipufit.engine.weights import Counterparts, deep_copied
from ipufit.errors import UnsupportedError
from ipufit.resume.contents import groups_of_module


def state_of(model: Any, own_names: Collection[str]) -> dict[str, Any]:
    """Return the state from which a copy is built, with the newest weights.

    The state shares the model's module, config, arguments and attributes.

    Args:
        model: The model to copy.
        own_names: Attributes of every `IPUModel`; all others belong to a subclass.
    """
    model._executors.fetch_weights()
    settings, average = model._planner.settings, model.weight_average
    is_swapped = average is not None and average.is_swapped
    trained = None
    if settings is not None and not host_calls.lazy_layers(model.module):
        trained = model._saver().take().copied()
        if not is_swapped:  # the module has the weights
            of_module = groups_of_module(model.module)
            others = {n: t for n, t in trained.tensors.items() if n not in of_module}
            trained = files.Checkpoint(others, trained.state)
    # `compile` may have got an optimizer with the parameters of the user's module, of
    # which a copy is trained (`Counterparts`).
    optimizer = None if settings is None else settings.arguments["optimizer"]
    groups: Sequence[Any] = ()
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {
        "module": model.module,
        "config": model._planner.user_config,
        "arguments": None if settings is None else dict(settings.arguments),
        "counterparts": model._counterparts.among(parameters),
        "trained": trained,
        "is_swapped": is_swapped,
        "data": (model._target_columns, model._columns, model._planner.num_passes),
        "attributes": {n: v for n, v in vars(model).items() if n not in own_names},
    }


def unshare(state: Mapping[str, Any]) -> None:
    """Give the tensors of a state memory of their own.

    torch.multiprocessing sends tensors as memory that both processes share.
    """
    module, trained = state["module"], state["trained"]
    groups = {} if trained is None else trained.tensors
    of_training = [tensor for group in groups.values() for tensor in group.values()]
    for tensor in (*module.parameters(), *module.buffers(), *of_training):
        if not is_lazy(tensor) and tensor.is_shared():
            tensor.data = tensor.data.clone()


def continue_from(model: Any, state: Mapping[str, Any]) -> None:
    """Restore a state in a new model, which has the module and config of the state."""
    model._target_columns, model._columns, model._planner.num_passes = state["data"]
    vars(model).update(state["attributes"])
    model._counterparts = Counterparts(state["counterparts"])
    if state["arguments"] is None:
        return
    model.compile(**state["arguments"])
    trained = state["trained"]
    if trained is None:
        return
    tensors = {**groups_of_module(model.module), **trained.tensors}
    model._saver().put_back(files.Checkpoint(tensors, trained.state))
    if state["is_swapped"]:
        model.swap_weights(is_average=True)


def independent_copy(
    model: Any, purpose: str, config: IPUConfig | None = None, **arguments: Any
) -> Any:
    """Return a copy for a run that mustn't change the model, and release the IPUs.

    Args:
        model: The model.
        purpose: Subject of an error message: the run.
        config: Config of the copy; None for the model's.
        **arguments: Arguments of `compile` in place of the model's, if it was called.

    Raises:
        UnsupportedError: The model can't be copied.
    """
    model.detach()  # the copy needs the IPUs
    state = model._copied_state()
    if config is not None:
        state["config"] = config
    if arguments and state["arguments"] is not None:
        state["arguments"] = {**state["arguments"], **arguments}
        state["trained"] = None  # it belongs to another schedule
    attributes = state.pop("attributes")  # shared: steps of the model read them
    try:
        state = deep_copied(state)
    except Exception as error:  # a user's object may raise anything
        raise UnsupportedError(
            f"{purpose} runs on a copy of the model, so that the model doesn't "
            f"change, and it can't be copied: {error}. Take open files, locks and "
            "other objects that copy.deepcopy refuses out of the module and the "
            "arguments of compile()."
        ) from error
    other = object.__new__(type(model))
    other.__setstate__({**state, "attributes": attributes})
    return other


class _WithoutTensors(pickle.Pickler):
    """Pickles an object without the values of tensors."""

    def persistent_id(self, part: Any) -> str | None:
        """Return a name in place of a tensor; None for other objects."""
        return "tensor" if isinstance(part, torch.Tensor) else None


def refuse_unpicklable(state: Mapping[str, Any]) -> None:
    """Refuse to pickle a state, and name the part that can't be pickled.

    Raises:
        UnsupportedError: A part can't be pickled.
    """
    parts = {
        "module": state["module"],
        "config": state["config"],
        **{f"compile({n}=...)": v for n, v in (state["arguments"] or {}).items()},
        **state["attributes"],
    }
    for name, part in parts.items():
        try:
            _WithoutTensors(io.BytesIO()).dump(part)
        except Exception as error:  # a user's object may raise anything
            raise UnsupportedError(
                f"This model can't be pickled because of {name}: {error}. "
                "Functions and classes have to be defined at the top of a module, "
                "so that they are found by their names. copy.deepcopy(model) takes "
                "any, and model.save(path) keeps what was learnt."
            ) from error
