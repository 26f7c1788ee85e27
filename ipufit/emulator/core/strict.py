# SPDX-License-Identifier: Apache-2.0
"""Find the operators that PopTorch doesn't compile: a warning, or strict mode's error.

The emulator computes with all of torch. It warns of operators that no IPU has when a
model is compiled. With `IPUFIT_EMULATOR_STRICT=1` such a model is refused, as on a pod.

As in PopTorch's dispatcher, a function is judged by the ATen operators that torch
splits it into: it compiles if they do. So do functions of constants, which are computed
while the model is compiled, and unused results.
"""

from __future__ import annotations

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
from .places import place_of
from .tracer import Tracer

_HANDLED = """
    __and__ __or__ __xor__ _cdist_forward _convolution _embedding_bag _log_softmax
    _prelu_kernel _reshape_alias _softmax _unsafe_view _weight_norm abs acos acosh
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d add addcdiv
    addcmul addmm addmv all amax amin any arange argmax argmin argsort asin asinh
    atan atan2 atanh avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bernoulli
    bilinear binary_cross_entropy binary_cross_entropy_with_logits bincount
    bitwise_and bitwise_not bitwise_or bitwise_xor bmm broadcast_to bucketize
    cartesian_prod cat cdist ceil celu chunk clamp clamp_max clamp_min clone
    col2im constant_pad_nd contiguous conv2d convolution copy cos cosh
    cosine_embedding_loss cosine_similarity count_nonzero cross cross_entropy_loss
    ctc_loss cumprod cumsum detach div dot dropout einsum elu embedding
    embedding_bag eq erf erfc exp expand expand_as expm1 exponential
    feature_dropout flatten flip floor floor_divide fmod frac frobenius_norm full
    full_like gather ge gelu glu group_norm gru gt hardshrink hardsigmoid
    hardswish hardtanh hinge_embedding_loss im2col index index_fill index_put
    index_reduce index_select instance_norm isnan kl_div l1_loss layer_norm le
    leaky_relu linalg_cross linalg_vector_norm linear log log10 log1p log2
    log_sigmoid log_sigmoid_forward log_softmax logical_and logical_not logical_or
    logsumexp lstm lt margin_ranking_loss masked_fill matmul max max_pool1d
    max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
    max_pool3d_with_indices maximum mean median meshgrid min minimum mish
    mkldnn_convolution mm mse_loss mul multilabel_soft_margin_loss mv nansum
    narrow native_batch_norm native_group_norm native_layer_norm ne neg new_full
    new_ones new_zeros nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd
    norm normal numpy_T one_hot ones ones_like pairwise_distance permute
    pixel_shuffle poisson_nll_loss pow prelu prod rand randint randn random
    randperm reciprocal reflection_pad1d reflection_pad2d relu remainder repeat
    replication_pad1d replication_pad2d replication_pad3d reshape rnn_relu
    rnn_tanh roll round rrelu rrelu_with_noise rsqrt rsub scatter scatter_add
    scatter_reduce select selu sigmoid sign silu sin sinh slice smooth_l1_loss
    soft_margin_loss softmax softplus softshrink sort split split_with_sizes sqrt
    square squeeze stack std std_mean sub sum t take_along_dim tan tanh tensordot
    threshold to topk transpose triplet_margin_loss triu true_divide trunc type_as
    unbind unfold uniform unsafe_chunk unsqueeze upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d var var_mean view where zeros
    zeros_like
"""
"""Operators that PopTorch lowers: `registerHandler` in graphcore/poptorch at c2a8b177,
`poptorch/source/popart_canonicalization`, which covers the list of its user guide ("IPU
supported operations"). `as_strided` is left out, as its handler only raises."""

_INTERCEPTED = """
    _weight_norm_interface alias empty empty_strided
"""
"""Operators that PopTorch only intercepts (`RegisterOptionalAtenOps.cpp.inc`)."""

_EXTENSIONS = """
    torch_cluster::grid torch_scatter::scatter_max torch_scatter::scatter_min
    torch_scatter::scatter_mul torch_spline_conv::spline_basis
    torch_spline_conv::spline_weighting
"""
"""Operators of other libraries that PopTorch lowers, with the library's name."""

_COMPOSED = """
    addr affine_grid_generator block_diag _conj conj_physical conv_tbc deg2rad
    detach_copy dist empty_like _euclidean_dist expand_copy fill isinf lift lift_fresh
    lift_fresh_copy _linalg_check_errors _neg_view new_empty normal_functional
    permute_copy pixel_unshuffle rad2deg rand_like randint_like randn_like _reshape_copy
    rot90 scalar_tensor select_copy squeeze_copy _stack _to_copy transpose_copy
    unbind_copy unsafe_split unsafe_split_with_sizes unsqueeze_copy view_copy zero
"""
"""Operators that torch 2.0.1 composes of the above on every device
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
"""Operators into which torch splits some of the above on a CPU, but not on an IPU.
Some exist in newer torch only."""

COMPILED_OPERATORS = frozenset(
    name
    for names in (_HANDLED, _INTERCEPTED, _EXTENSIONS, _COMPOSED, _COMPOSED_BACKWARD)
    for name in names.split()
)
"""Names of all operators that PopTorch compiles."""

SUPPORTED_OPERATORS = COMPILED_OPERATORS.union(_OF_PROCESSORS.split())
"""Names of all operators that compile in strict mode."""


_ALTERNATIVES = {
    "diag": "x[i, i] with i = torch.arange(n)",
    "diagonal": "x[i, i] with i = torch.arange(n)",
    "histc": "torch.bucketize and torch.bincount",
    "huber_loss": "torch.nn.SmoothL1Loss",
    "index_add": "torch.scatter_add",
    "index_copy": "torch.scatter, or poptorch.dynamic_update",
    "isin": "(x[..., None] == values).any(-1)",
    "kthvalue": "torch.topk",
    "lerp": "start + weight * (end - start)",
    "logaddexp": "torch.logsumexp of torch.stack",
    "logical_xor": "x != y, of bools",
    "nan_to_num": "torch.where(torch.isnan(x), value, x)",
    "quantile": "torch.sort",
    "searchsorted": "torch.bucketize",
    "take": "x.flatten()[index]",
    "trace": "(x * torch.eye(n)).sum()",
    "tril": "x * torch.ones(n, n).tril()",
    "xlogy": "x * torch.log(y)",
}
"""Unsupported functions, and a replacement that PopTorch compiles."""


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
        if base_name(operation.name) in SUPPORTED_OPERATORS:
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
        refusal = refusal_of_operator(name, args, COMPILED_OPERATORS)
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
        unsupported = operators - SUPPORTED_OPERATORS
        is_own = module.startswith("ipufit.emulator")
        if unsupported and not (is_own or name in SUPPORTED_OPERATORS):
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
    ways = {name: _way(name) for name in sorted(nodes)}
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
    names = ", ".join(sorted(set().union(*(one.operators for one in unsupported))))
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
    return _ALTERNATIVES.get(base_name(function.rpartition(".")[2]), "")


def _way(function: str) -> str:
    way = alternative_to(function)
    return f"try {way}" if way else ""


def _written(function: Callable[..., Any]) -> str:
    """Return a function's name as users write it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks at what is deprecated too
        name: str | None = resolve_name(function)  # type: ignore[no-untyped-call,unused-ignore]
    name = name or str(getattr(function, "__name__", function))
    name = name.replace(".__get__", "")  # a property
    return name.replace("torch.functional.", "torch.")
