# SPDX-License-Identifier: Apache-2.0
"""Each operator of torch with torch's own samples, on the device and on the host.

The samples are those of `op_db`, with which torch tests itself. Each result is torch's,
or the program is refused, or a row of `operators.tsv` says that a device differs.
"""

import collections
import inspect
import itertools

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.differential.torch_databases import (
    DIFFERENT,
    EQUAL,
    REFUSED,
    ROW,
    Call,
    compare,
    database,
    differ,
    is_comparable,
    tensors_of,
)

pytestmark = pytest.mark.filterwarnings("ignore")

EVERY_DAY = """
    add argmax as_strided bucketize clamp_max div gather index_put index_reduce
    linalg.vector_norm matmul mean pow remainder scatter_add scatter_reduce softmax sort
    sparse.mm to_sparse unfold var_mean where nn.functional.conv2d
    nn.functional.cross_entropy nn.functional.layer_norm nn.functional.normalize
""".split()  # noqa: SIM905 - one per line would be longer

PARTS = 12
"""Tests into which the database is divided, so that several processes share it."""

EXCLUDED = {
    ("chalf", None): "torch doesn't compare halves of complex numbers",
    ("addbmm", "half"): "torch's `addbmm_` changes the shape of a tensor",
    ("linalg.pinv", "half"): "the samples are singular but for rounding",
    ("nn.functional.soft_margin_loss", "half"): "its exponential leaves float16",
    ("zeros_like", "folded"): "a constant comes back once, not for each micro-batch",
    ("full_like", "folded"): "a constant comes back once, not for each micro-batch",
}
"""Operators, and the ways of running them that aren't compared, with the reason."""

LARGEST = 3000
"""Elements of the largest samples that are run."""

HALF_REACHES = 1000
"""The largest result up to which squares and sums of a function fit into float16."""


def samples(operator, dtype, most):
    """Some samples of an operator, spread evenly over torch's."""
    torch.manual_seed(0)
    given = operator.sample_inputs("cpu", dtype, requires_grad=False)
    calls = (
        Call(operator.op, sample.input, *sample.args, **sample.kwargs)
        for sample in itertools.islice(given, 200)
    )
    calls = [
        call
        for call in calls
        if all(tensor.numel() for tensor in call.tensors)  # others are refused
        and sum(tensor.numel() for tensor in call.tensors) <= LARGEST
        and is_comparable(call)
    ]
    return calls[:: max(1, len(calls) // most)][:most]


def by_name(call):
    """The same call with all arguments by name; None where torch doesn't take it."""
    function, (args, kwargs) = call.function, call.arguments()
    if inspect.isbuiltin(function):
        operator = f"aten::{function.__name__}"
        schemas = torch._C._jit_get_schemas_for_operator(operator)
        forms = [[argument.name for argument in s.arguments] for s in schemas]
    elif inspect.isfunction(function):
        forms = [[*inspect.signature(function).parameters]]
    else:
        return None
    for names in forms:
        names = ["input" if name == "self" else name for name in names]
        if len(names) >= len(args):
            try:
                named = Call(function, **dict(zip(names, args)), **kwargs)
                results = named.expected()
            except (TypeError, RuntimeError, IndexError, ValueError, KeyError):
                continue
            if differ(results, call.expected(), 0) is None:
                return named
    return None


def in_place(operator, call):
    """The same call on a copy of its first argument that it changes, or None."""
    function = operator.inplace_variant
    if function is None:
        return None
    args, kwargs = call.arguments()
    changed = Call(lambda x, *a, **k: function(x * 1, *a, **k), *args, **kwargs)
    try:
        changed.expected()
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return changed


class Applied(nn.Module):
    """Calls the function with its inputs; numbers without dimension are buffers."""

    def __init__(self, call, *, has_rows):
        super().__init__()
        self.call = call
        self.fixed = [has_rows and tensor.dim() == 0 for tensor in call.tensors]
        for index, (tensor, is_fixed) in enumerate(zip(call.tensors, self.fixed)):
            if is_fixed:
                self.register_buffer(f"buffer_{index}", tensor.clone())

    def forward(self, *inputs):
        rows = iter(inputs)
        return tuple(
            self.call.run(
                getattr(self, f"buffer_{index}") if is_fixed else next(rows)
                for index, is_fixed in enumerate(self.fixed)
            )
        )


class Trained(nn.Module):
    """Trains the floating-point arguments on a weighted sum of the results."""

    def __init__(self, call, *, is_scaled):
        super().__init__()
        self.call, self.is_scaled = call, is_scaled
        for index, tensor in enumerate(call.tensors):
            if tensor.is_floating_point():
                weight = nn.Parameter(tensor.detach().clone())
                self.register_parameter(f"weight_{index}", weight)
            else:
                self.register_buffer(f"weight_{index}", tensor.clone())
        for index, result in enumerate(call.expected()):
            factors = torch.linspace(0.5, 1.5, result.numel()).view(result.shape)
            self.register_buffer(f"factors_{index}", factors)

    def loss(self, scale):
        weights = [
            getattr(self, f"weight_{index}") for index in range(len(self.call.tensors))
        ]
        if self.is_scaled:
            scale = scale.reshape(())
            weights = [w * scale if w.is_floating_point() else w for w in weights]
        return sum(
            (result * getattr(self, f"factors_{index}")).sum()
            for index, result in enumerate(self.call.run(weights))
            if result.is_floating_point() and result.requires_grad
        )

    def forward(self, scale):
        return poptorch.identity_loss(self.loss(scale), reduction="none")


def inference(call):
    model = poptorch.inferenceModel(Applied(call, has_rows=False))
    given = [tensor.clone() for tensor in call.tensors]
    return compare(lambda: tensors_of(model(*given)), call.expected())


def half(call):
    """In float16, as far as it reaches; compared with torch in float32."""
    if is_sparse(call) or not any(map(torch.is_floating_point, call.tensors)):
        return None
    halves = [t.half() if t.is_floating_point() else t for t in call.tensors]
    rounded = [t.float() if t.is_floating_point() else t for t in halves]
    expected = call.run(rounded)
    if any(map(torch.is_complex, expected)):
        return None
    expected = [tensor.float() for tensor in expected]
    if any(tensor.abs().gt(HALF_REACHES).any() for tensor in expected):
        return None
    model = poptorch.inferenceModel(Applied(call, has_rows=False))

    def run():
        return [tensor.float() for tensor in tensors_of(model(*halves))]

    return compare(run, expected, tolerance=0.02)


def folded(call):
    """Three micro-batches, twice: the second call trusts what the first has checked."""
    if not any(t.dim() for t in call.tensors) or is_sparse(call):
        return None
    parts = [
        [t * factor if t.dim() and t.is_floating_point() else t for t in call.tensors]
        for factor in (1.0, 0.8, 0.6)
    ]
    outputs = zip(*(call.run([t.clone() for t in part]) for part in parts))
    expected = [torch.cat(o) if o[0].dim() else torch.stack(o) for o in outputs]
    rows = [torch.cat(tensors) for tensors in zip(*parts) if tensors[0].dim()]
    options = poptorch.Options().deviceIterations(len(parts))
    model = poptorch.inferenceModel(Applied(call, has_rows=True), options)

    def run():
        return tensors_of([model(*[r.clone() for r in rows]) for _ in range(2)])

    return compare(run, [*expected, *expected])


def training(call, scales=(1.0,)):
    """One update of SGD of rate 1, of one micro-batch or the mean of several."""
    if is_sparse(call):
        return None
    module = Trained(call, is_scaled=len(scales) > 1)
    weights, scales = list(module.parameters()), torch.tensor(scales)
    try:
        loss = sum(module.loss(scale) for scale in scales) / len(scales)
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    except (RuntimeError, TypeError, AttributeError):  # nothing to differentiate
        return None
    expected = [
        weight.detach() - (0 if gradient is None else gradient)
        for weight, gradient in zip(weights, gradients)
    ]
    options = poptorch.Options()
    options.Training.gradientAccumulation(len(scales))
    sgd = torch.optim.SGD(weights, lr=1.0)
    model = poptorch.trainingModel(module, options, optimizer=sgd)

    def run():
        model(scales)
        model.copyWeightsToHost()
        return [weight.detach().clone() for weight in module.parameters()]

    return compare(run, expected)


def is_sparse(call):
    return any(t.layout != torch.strided for t in (*call.tensors, *call.expected()))


WAYS = {
    "inference": inference,
    "half": half,
    "folded": folded,
    "training": training,
    "accumulation": lambda call: training(call, (1.0, 0.8, 0.6)),
}


def run_operators(operators, most):
    """Run operators in all ways; count what became of them, and list the faults.

    Calls by name and in place take each second way, for the next sample the others.
    """
    counts, faults = collections.Counter(), []
    for operator in operators:
        ways = [
            (way, run)
            for way, run in WAYS.items()
            if EXCLUDED.keys().isdisjoint({(operator.name, way), (operator.name, None)})
        ]
        is_float = torch.float32 in operator.dtypes
        dtype = torch.float32 if is_float else torch.int64
        is_run = bool(ways) and dtype in operator.dtypes
        calls = samples(operator, dtype, most) if is_run else ()
        for number, call in enumerate(calls):
            forms = {
                "by place": call,
                "by name": by_name(call),
                "in place": in_place(operator, call),
            }
            for place, (way, run) in enumerate(ways):
                outcomes = {
                    form: run(variant)
                    for form, variant in forms.items()
                    if variant is not None
                    and (variant is call or (number + place) % 2 == 0)
                }
                outcomes = {f: o for f, o in outcomes.items() if o is not None}
                for form, (kind, values) in outcomes.items():
                    counts[way, kind] += 1
                    counts[form] += 1
                    if kind == DIFFERENT:
                        faults.append(
                            (operator.name, way, form, call.arguments(), values)
                        )
                placed, named = outcomes.get("by place"), outcomes.get("by name")
                if named is not None and named.kind != placed.kind:
                    faults.append((operator.name, way, "not as by name", placed, named))
    return counts, faults


def check(counts, faults):
    """Assert that nothing differs without a row, and that all ways were taken."""
    assert not faults, "\n".join(str(fault)[:1000] for fault in faults[:20])
    for way in WAYS:
        assert counts[way, EQUAL] > 10 * counts[way, ROW], counts
        assert counts[way, EQUAL] > counts[way, REFUSED] > 0, counts
    assert min(counts["by place"], counts["by name"], counts["in place"]) > 25, counts


def test_operators_compute_what_torch_computes():
    operators = [one for one in database("op_db") if one.name in EVERY_DAY]
    assert {operator.name for operator in operators} >= {*EVERY_DAY}
    check(*run_operators(operators, most=1))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_each_operator_computes_what_torch_computes(part):
    operators = database("op_db")[part::PARTS]
    assert len(operators) > 20
    check(*run_operators(operators, most=4))


def test_what_is_excluded_is_there():
    names = {operator.name for operator in database("op_db")}
    assert {name for name, _ in EXCLUDED} <= names
    assert {way for _, way in EXCLUDED if way} <= {*WAYS}
