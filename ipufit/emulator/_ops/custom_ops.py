# SPDX-License-Identifier: Apache-2.0
"""`custom_op`: operations written in C++ for PopART, by PopTorch or by users."""

from __future__ import annotations

import functools
import json
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding, interpolate, softplus

from ipufit.emulator._ground.torch_extras import host_tensor
from ipufit.emulator._layout.pod import ipu_model_is_on
from ipufit.emulator._tracing.operation import as_list
from ipufit.emulator._tracing.recording import current_trace
from ipufit.emulator.errors import Error, createPoptorchError

DOMAIN = "poptorch.custom_ops"


def _fast_gather_last_dim(data: Tensor, index: Tensor, /, **attributes: Any) -> Tensor:
    """Emulate `FastGatherLastDim.cpp`: `torch.gather` along the last dimension."""
    if ipu_model_is_on():
        raise _refused("requires hardware but IPU model is enabled")
    if data.dim() != index.dim():
        raise _refused(
            "Input and Index tensors do not have same rank: "
            f"{tuple(data.shape)} and {tuple(index.shape)}"
        )
    if data.shape[:-1] != index.shape[:-1]:
        raise _refused(
            "Index tensor must have same dimensions as Input except for last dim: "
            f"{tuple(data.shape)} and {tuple(index.shape)}"
        )
    if not data.is_floating_point() or index.dtype not in (torch.int32, torch.int64):
        raise _refused(
            "Input must be float32 or float16 and Index int32: "
            f"{data.dtype} and {index.dtype}"
        )
    return torch.gather(data, -1, index.long())


def _refused(why: str) -> Error:
    return Error(f"FastGatherLastDim: {why}.", type="popart_exception")


def _torch_softplus(x: Tensor, /, **attributes: Any) -> Tensor:
    """Emulate `TorchSoftplus.cpp`: linear above a threshold, by default 1."""
    beta = attributes.get("beta", 1.0)
    threshold = attributes.get("threshold", 1.0)
    return softplus(x, beta=beta, threshold=threshold)


def _embedding(weight: Tensor, indices: Tensor, /, **attributes: Any) -> Tensor:
    """Emulate `Embedding.cpp`: the row of `padding_idx` gets no gradient."""
    return embedding(indices, weight, padding_idx=attributes.get("padding_idx"))


def _upsample_bilinear_2d(x: Tensor, /, **attributes: Any) -> Tensor:
    """Emulate `UpsampleBilinear2d.cpp`: by `scaling_factor`, by default 2."""
    return interpolate(
        x,
        scale_factor=attributes.get("scaling_factor", 2.0),
        mode="bilinear",
        align_corners=bool(attributes.get("align_corners", 0)),
    )


SHIPPED_OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    "Embedding": _embedding,
    "FastGatherLastDim": _fast_gather_last_dim,
    "TorchSoftplus": _torch_softplus,
    "UpsampleBilinear2d": _upsample_bilinear_2d,
}
"""Name to the same computation with functions of torch."""


ATTR_PREFIX = "attr:"
"""Prefix of the address of an attribute dict in a string that PopTorch passes on."""

attributes_lists: list[dict[str, Any]] = []
"""The attributes of all calls of `custom_op`, kept for good."""

_ATTRIBUTE_TYPES = (float, int, str)
_LARGEST_FLOAT = torch.finfo(torch.float32).max


_registered: dict[tuple[str, str], Callable[..., Any]] = {}
"""Domain and name of an operation to the Python function that computes it."""


def register_custom_op(
    name: str, domain: str, function: Callable[..., Any] | None
) -> None:
    """Register a Python function for a custom operation that is written in C++.

    Models that are compiled from now on run `function` where they call
    `poptorch.custom_op` with this name and domain. PopTorch has no such function: a
    program that runs on IPUs loads the compiled operation.

    Args:
        name: Name of the operation.
        domain: Domain of the operation, such as `com.acme`.
        function: Takes the input tensors, and the attributes by name; returns a tensor,
            or a tuple or list of tensors. A trace doesn't look into it: it may read
            values, change its inputs in place and use a `torch.autograd.Function` for
            the gradients. It also runs while the model is traced. `None` removes the
            operation.

    Raises:
        Error: `function` can't be called.

    Example:
        >>> import ipufit.emulator as poptorch
        >>> def leaky_relu(x, alpha):
        ...     return torch.where(x > 0, x, alpha * x)
        >>> poptorch.register_custom_op("LeakyRelu", "com.acme", leaky_relu)
        >>> class Network(torch.nn.Module):
        ...     def forward(self, x):
        ...         return poptorch.custom_op(
        ...             [x], "LeakyRelu", "com.acme", 1, [x], attributes={"alpha": 0.5}
        ...         )[0]
        >>> poptorch.inferenceModel(Network())(torch.tensor([-1.0, 1.0]))
        tensor([-0.5000,  1.0000])
        >>> poptorch.register_custom_op("LeakyRelu", "com.acme", None)
    """
    if function is None:
        _registered.pop((domain, name), None)
        return
    if not callable(function):
        raise createPoptorchError(
            f"What computes {domain}::{name} must be a function. Got {function!r}."
        )
    _registered[domain, name] = function


def custom_op(
    inputs: Sequence[Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[Tensor],
    attributes: dict[str, Any] | None = None,
) -> list[Tensor]:
    """Run an operation that is written in C++ for PopART.

    On the host it gives zeros, as PopTorch does. There is no PopART here: a model may
    call the operations that PopTorch has itself (`FastGatherLastDim`), and those that
    `register_custom_op` knows.

    Args:
        inputs: Tensors that the operation takes.
        name: Name of the operation.
        domain: Domain of the operation, such as `com.acme`.
        domain_version: Version of the domain; only real IPUs look at it.
        example_outputs: Tensors of the shapes and types that it returns.
        attributes: Names to floats, ints, strings, or lists or tuples of one of
            these.

    Returns:
        Zeros like `example_outputs`; in a trace, the operation's results.

    Raises:
        ValueError: An attribute is none of these, or isn't ASCII.
        Error: In a trace: an attribute doesn't fit into 32 bits, an input is the
            host's, no function is registered for the operation, or it returns
            something else than `example_outputs`.

    Example:
        >>> x = torch.tensor([1.0])
        >>> custom_op([x], "Cube", "ops.example", 1, example_outputs=[x])
        [tensor([0.])]
    """
    attributes = attributes or {}
    for key, value in attributes.items():
        _check_attribute(key, value)
    attributes_lists.append(attributes)
    trace = current_trace()
    if trace is None:
        return [torch.zeros_like(example) for example in example_outputs]
    for value in attributes.values():
        for element in as_list(value):
            if isinstance(element, float) and abs(element) > _LARGEST_FLOAT:
                side = "high" if element > 0 else "low"
                raise createPoptorchError(
                    f"{element:g} is too {side} for a Popart float attribute."
                )
    outputs: list[Any]
    inputs, full_name = list(inputs), f"{domain}::{name}"
    trace.require_device(full_name, inputs)
    if (domain, name) in _registered:
        function = functools.partial(_registered[domain, name], **attributes)
        outputs = trace.record(run_custom_op, function, inputs)
    elif domain == DOMAIN and name in SHIPPED_OPERATIONS:
        outputs = [SHIPPED_OPERATIONS[name](*inputs, **attributes)]
    elif domain == DOMAIN:
        raise createPoptorchError(
            f"PopTorch has no custom operation {full_name} for models. There are "
            f"{', '.join(SHIPPED_OPERATIONS)}; parts of a model run on the host with "
            "poptorch.CPU."
        )
    else:
        raise createPoptorchError(
            f"The custom operation {full_name} (version {domain_version}) is C++ code "
            "of PopART, which can't be emulated. Say in Python what it computes, before"
            f" the model is compiled: `ipufit.emulator.register_custom_op({name!r}, "
            f"{domain!r}, function)` with `def function("
            f"{', '.join(['*inputs', *attributes])})`, or compose it of torch "
            "functions, or run this model on real IPUs."
        )
    got, expected = _kinds(outputs), _kinds(example_outputs)
    if got != expected:  # on which the rest of the model relies
        raise createPoptorchError(
            f"The custom operation {full_name} returns {', '.join(got) or 'nothing'}, "
            f"but example_outputs are {', '.join(expected) or 'empty'}."
        )
    return outputs


def run_custom_op(function: Callable[..., Any], inputs: list[Tensor]) -> list[Any]:
    """Run a registered custom operation on the device."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    # Views have gradients of their own, be they made by a torch.autograd.Function.
    return [o.view_as(o) if isinstance(o, Tensor) else o for o in outputs]


def _kinds(values: Sequence[Any]) -> list[str]:
    return [
        f"{host_tensor(value).dtype} of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
        for value in values
    ]


def attributes_at(address: str) -> dict[str, Any] | None:
    """Find attributes by the address that `torch.ops.poptorch` passes.

    Args:
        address: `ATTR_PREFIX` and the hexadecimal address of one of
            `attributes_lists`, or of `None`.

    Example:
        >>> attributes_at(f"{ATTR_PREFIX}{hex(id(None))}") is None
        True
    """
    by_address = {f"{ATTR_PREFIX}{hex(id(kept))}": kept for kept in attributes_lists}
    return by_address.get(address)


def _check_attribute(key: Any, value: Any) -> None:
    if not isinstance(key, str):
        raise ValueError(f"All attribute keys must be strings. Got {key!r}.")
    elements = as_list(value)
    if not all(isinstance(element, _ATTRIBUTE_TYPES) for element in elements):
        raise ValueError(
            "Attribute values must be floats, ints, strings or a list/tuple of "
            f"float, ints of strings. {key!r} is {value!r}."
        )
    if not all(isinstance(element, type(elements[0])) for element in elements):
        raise ValueError(
            "The types in a list/tuple attribute must all be the same. "
            f"{key!r} is {value!r}."
        )
    for text in (key, *elements):
        if isinstance(text, str) and not text.isascii():
            raise ValueError(f"{text} contains non-ASCII characters.")


def accessAttributes(attribute_id_str: str) -> dict[str, Any]:
    """Look up the attributes of a custom operation.

    Args:
        attribute_id_str: JSON, or `attr:` and the address of a dictionary that
            `custom_op` has kept, in hexadecimal.

    Raises:
        ValueError: `attribute_id_str` is neither.

    Example:
        >>> accessAttributes('{"alpha": 2}')
        {'alpha': 2}
    """
    if not isinstance(attribute_id_str, str):
        raise ValueError("Wrong type for attribute_id_str: it must be a string.")
    if attribute_id_str.startswith("{"):
        return json.loads(attribute_id_str)
    if not attribute_id_str.startswith(ATTR_PREFIX):
        raise ValueError(
            f"Invalid attribute_id_str: {attribute_id_str!r} begins neither with '{{' "
            f"nor with {ATTR_PREFIX!r}."
        )
    address = int(attribute_id_str[len(ATTR_PREFIX) :], 16)
    kept = attributes_at(f"{ATTR_PREFIX}{address:#x}")
    if kept is None:
        raise ValueError(
            f"Invalid attribute_id_str: no custom_op has attributes at {address:#x}."
        )
    return kept
