# SPDX-License-Identifier: Apache-2.0
"""Find the operators that PopTorch doesn't compile: a warning, or strict mode's error.

The emulator computes with all of torch. It warns of operators that no IPU has when a
model is compiled. With `IPUFIT_EMULATOR_STRICT=1` such a model is refused, as on a pod.

As in PopTorch's dispatcher, a function is judged by the ATen operators that torch
splits it into: it compiles if they do. So do functions of constants, which are computed
while the model is compiled, and unused results.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, Callable, Iterable, Iterator, NamedTuple

from torch import Tensor
from torch.fx.node import Node
from torch.overrides import resolve_name

from .._logging import logger
from .._switches import STRICT_VARIABLE, is_strict
from .autograd_grad import refusal_of_operator
from .dtypes import DispatchMode
from .graph import (
    Operation,
    base_name,
    error_about,
    original,
    tensors_in,
)
from .operators import handled_operators, replacements
from .places import place_of
from .tracer import Tracer

_INTERCEPTED = """
    _weight_norm_interface alias empty empty_strided
"""
"""Operators that PopTorch only intercepts (`RegisterOptionalAtenOps.cpp.inc`)."""

_COMPOSED = """
    addr affine_grid_generator block_diag _conj conj_physical conv_tbc deg2rad
    detach_copy dist empty_like _euclidean_dist expand_copy fill isinf lift lift_fresh
    lift_fresh_copy _linalg_check_errors _neg_view new_empty normal_functional
    permute_copy pixel_unshuffle rad2deg rand_like randint_like randn_like _reshape_copy
    rot90 scalar_tensor select_copy squeeze_copy _stack _to_copy transpose_copy
    unbind_copy unsafe_split unsafe_split_with_sizes unsqueeze_copy view_copy zero
"""
"""Operators that torch 2.0.1 composes of those with handlers on every device
(`CompositeExplicitAutograd` in its `native_functions.yaml`)."""

_COMPOSED_BACKWARD = "is_same_size new_empty_strided select_backward slice_backward"
"""Operators of backward passes that it composes so."""

_OF_PROCESSORS = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _addmm_activation
    _batch_norm_no_update _batch_norm_with_update _ctc_loss
    _embedding_bag_forward_only _fused_dropout _fused_rms_norm _index_put_impl
    _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _safe_softmax
    _scaled_dot_product_flash_attention_for_cpu _trilinear mkldnn_linear
    mkldnn_rnn_layer native_dropout
"""
"""Operators into which torch splits some of these on a CPU, but not on an IPU.
Some exist in newer torch only."""


@functools.lru_cache(maxsize=None)
def compiled_operators() -> frozenset[str]:
    """Return the names of all operators that PopTorch compiles.

    Example:
        >>> "relu" in compiled_operators(), "lgamma" in compiled_operators()
        (True, False)
    """
    others = f"{_INTERCEPTED} {_COMPOSED} {_COMPOSED_BACKWARD}"
    return handled_operators().union(others.split())


@functools.lru_cache(maxsize=None)
def _supported_operators() -> frozenset[str]:
    """Return the names of all operators that compile in strict mode."""
    return compiled_operators().union(_OF_PROCESSORS.split())


class OperatorWatch(DispatchMode):
    """Collects names of the ATen operators that torch runs for one operation.

    Operators on constants that were made during the operation don't count.

    Attributes:
        operators: Names without overloads.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.operators: set[str] = set()
        self._constants: dict[int, Tensor] = {}  # by id; kept alive: ids are reused

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and record its name."""
        touched = [id(tensor) for tensor in tensors_in((args, kwargs or {}))]
        result = func(*args, **(kwargs or {}))
        results = {id(tensor): tensor for tensor in tensors_in(result)}
        if all(tensor in self._constants for tensor in touched):
            self._constants.update(results)
            return result
        for changed in self._constants.keys() & results.keys():
            del self._constants[changed]
        library, _, name = func._schema.name.partition("::")
        self.operators.add(
            base_name(name) if library == "aten" else f"{library}::{name}"
        )
        return result


class WatchingTracer(Tracer):
    """Tracer that records the ATen operators of functions that may not compile."""

    def compute(self, operation: Operation) -> Any:
        """Run an operation, and store its operators for its nodes."""
        if base_name(operation.name) in _supported_operators():
            self.recording.notes = {}
            return super().compute(operation)
        with OperatorWatch() as watch:
            result = super().compute(operation)
        function = original(operation.function)
        self.recording.notes = {"operators": (function, watch.operators)}
        return result

    def record_operator(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record an operator of a backward pass, and why it doesn't compile."""
        name = base_name(operator._schema.name.partition("::")[2])
        refusal = refusal_of_operator(name, args, compiled_operators())
        self.recording.notes = {"refusal": refusal} if refusal else {}
        return super().record_operator(operator, args, kwargs)


class Unsupported(NamedTuple):
    """An operation with operators that PopTorch doesn't compile.

    Attributes:
        node: Its node.
        function: The name of its function as users write it.
        operators: The names of such operators, with their libraries.
    """

    node: Node
    function: str
    operators: frozenset[str]


def unsupported_nodes(nodes: Iterable[Node]) -> Iterator[Unsupported]:
    """Yield the operations with operators that PopTorch doesn't compile.

    Args:
        nodes: Recorded by a `WatchingTracer`.
    """
    for node in nodes:
        function, operators = node.meta.get("operators", (None, set()))
        module = getattr(function, "__module__", None) or ""
        name = base_name(getattr(function, "__name__", ""))
        unsupported = operators - _supported_operators()
        is_own = module.startswith("ipufit.emulator")
        if unsupported and not (is_own or name in _supported_operators()):
            names = (n if "::" in n else f"aten::{n}" for n in unsupported)
            yield Unsupported(node, _written(function), frozenset(names))


def refuse_unsupported(unsupported: list[Unsupported]) -> None:
    """Refuse operators that PopTorch doesn't compile, or warn of them.

    Raises:
        Error: In strict mode; the message lists them all.
    """
    nodes: dict[str, Node] = {}
    for node, function, _ in unsupported:
        nodes.setdefault(function, node)
    ways = {name: alternative_to(name) for name in sorted(nodes)}
    ways = {name: f"try {way}" if way else "" for name, way in ways.items()}
    if not is_strict():
        listed = "; ".join(
            ", ".join(filter(None, (name, str(place_of(nodes[name])), way)))
            for name, way in ways.items()
        )
        logger.warning(
            "PopTorch doesn't compile functions of this model, so that a pod refuses "
            "it: %s. The emulator computes them; with %s=1 it refuses them.",
            listed,
            STRICT_VARIABLE,
        )
        return
    names = ", ".join(sorted(set().union(*(u.operators for u in unsupported))))
    sources = "; ".join(f"{n} ({way})" if way else n for n, way in ways.items())
    raise error_about(
        f"Unsupported ops found in compiled model: [{names}]. They come from "
        f"{sources}. Not all operations of torch run on an IPU (PopTorch user "
        'guide, "IPU supported operations"): compose them of those that do, or let '
        "the host compute them before or after the model. This is the emulator's "
        f"strict mode: without {STRICT_VARIABLE} it computes them all.",
        *nodes.values(),
    )


def alternative_to(function: str) -> str:
    """Suggest another way to write an unsupported function; "" if none is known.

    Example:
        >>> alternative_to("torch.searchsorted")
        'torch.bucketize'
    """
    return replacements().get(base_name(function.rpartition(".")[2]), "")


def _written(function: Callable[..., Any]) -> str:
    """Return a function's name as users write it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks at what is deprecated too
        name: str | None = resolve_name(function)  # type: ignore[no-untyped-call,unused-ignore]
    name = name or str(getattr(function, "__name__", function))
    return name.replace(".__get__", "").replace("torch.functional.", "torch.")
