# SPDX-License-Identifier: Apache-2.0
"""Each module of torch with torch's own samples, in inference and in training.

The samples are those of `module_db`, with which torch tests itself. Outputs in eval
mode, gradients over two replicas of two steps each, and the buffers of the first
replica are torch's, or the module is refused, or a row of `operators.tsv` says that a
device differs.
"""

import collections
import copy
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
    is_comparable,
    tensors_of,
)

pytestmark = pytest.mark.filterwarnings("ignore")

EVERY_DAY = """
    BatchNorm2d Bilinear Conv2d ConvTranspose1d CrossEntropyLoss Embedding GRU GroupNorm
    InstanceNorm1d LSTM LayerNorm Linear MaxPool2d MultiheadAttention PReLU SmoothL1Loss
    Softplus TransformerEncoderLayer
""".split()  # noqa: SIM905 - one per line would be longer

STEPS = REPLICAS = 2
FACTORS = (1.0, 0.9, 0.8, 0.7)
"""Each micro-batch has the floating-point inputs of the first one times a factor."""


class Applied(nn.Module):
    """Calls a module with its inputs, the first of which is multiplied by a weight.

    Args:
        module: A module of torch.
        call: A call of it.
    """

    def __init__(self, module, call):
        super().__init__()
        self.module, self.call = module, call
        self.scale = nn.Parameter(torch.ones(()))

    def outputs(self, *inputs):
        first = [t * self.scale for t in inputs[:1] if t.is_floating_point()] or inputs
        self.call.function = self.module
        return self.call.run([*first[:1], *inputs[1:]])

    def forward(self, *inputs):
        return tuple(self.outputs(*inputs))


class Trained(Applied):
    def forward(self, *inputs):
        loss = sum(
            (
                output
                * torch.linspace(0.5, 1.5, output.numel(), device=output.device).view(
                    output.shape
                )
            ).sum()
            for output in self.outputs(*inputs)
            if output.is_floating_point() and output.requires_grad
        )
        return poptorch.identity_loss(loss, reduction="none")


def samples(info, *, is_training, most):
    """Modules of torch and calls of them: some of torch's samples, spread evenly."""
    torch.manual_seed(0)
    given = info.module_inputs_func(
        info,
        device="cpu",
        dtype=torch.float32,
        requires_grad=False,
        training=is_training,
    )
    found = []
    for sample in itertools.islice(given, 100):
        if sample.forward_input is None:
            continue
        made = sample.constructor_input
        try:
            module = info.module_cls(*made.args, **made.kwargs).train(is_training)
            module = copy.deepcopy(module)  # samples share weights of losses
        except (TypeError, ValueError, RuntimeError):
            continue
        passed = sample.forward_input
        call = Call(copy.deepcopy(module), *passed.args, **passed.kwargs)
        if (
            call.tensors
            and all(t.numel() for t in call.tensors)
            and is_comparable(call)
        ):
            found.append((module, call))
    return found[:: max(1, len(found) // most)][:most]


def rows_of(call):
    """The inputs of each micro-batch; None if one has no rows."""
    if any(tensor.dim() == 0 for tensor in call.tensors):
        return None
    return [
        [t * factor if t.is_floating_point() else t for t in call.tensors]
        for factor in FACTORS
    ]


def inference(module, call):
    applied = Applied(module, call)
    with torch.no_grad():
        expected = list(applied(*[tensor.clone() for tensor in call.tensors]))
    model = poptorch.inferenceModel(applied)
    given = [tensor.clone() for tensor in call.tensors]
    return compare(lambda: tensors_of(model(*given)), expected)


def training(module, call):
    """One update of SGD over all micro-batches, and what buffers become."""
    rows, trained = rows_of(call), Trained(module, call)
    weights = [w for w in trained.parameters() if w.requires_grad]
    if rows is None:
        return None
    plain, first_replica = copy.deepcopy(trained), copy.deepcopy(trained)
    mine = [w for w in plain.parameters() if w.requires_grad]
    try:
        loss = sum(plain(*inputs) for inputs in rows) / len(rows)
        gradients = torch.autograd.grad(loss, mine, allow_unused=True)
    except (RuntimeError, TypeError, AttributeError):  # nothing to differentiate
        return None
    for inputs in rows[::REPLICAS]:
        first_replica(*inputs)
    expected = [
        w.detach() - 0.1 * (torch.zeros_like(w) if g is None else g)
        for w, g in zip(mine, gradients)
    ]
    expected += [b for b in first_replica.buffers() if b.is_floating_point()]
    options = poptorch.Options().replicationFactor(REPLICAS).broadcastBuffers(False)
    options.Training.gradientAccumulation(STEPS)
    sgd = torch.optim.SGD(weights, lr=0.1)
    model = poptorch.trainingModel(trained, options, optimizer=sgd)

    def run():
        model(*map(torch.cat, zip(*rows)))
        model.copyWeightsToHost()
        buffers = [b for b in trained.buffers() if b.is_floating_point()]
        return [tensor.detach().clone() for tensor in (*weights, *buffers)]

    try:
        return compare(run, expected)
    finally:
        model.destroy()


WAYS = {"inference": inference, "training": training}


def run_modules(infos, most):
    """Run modules in all ways; count what became of them, and list the faults."""
    counts, faults = collections.Counter(), []
    for info in infos:
        for way, run in WAYS.items():
            for module, call in samples(info, is_training=way == "training", most=most):
                outcome = run(module, call)
                if outcome is not None:
                    counts[way, outcome.kind] += 1
                if outcome is not None and outcome.kind == DIFFERENT:
                    faults.append((module, way, call.arguments(), outcome.values))
    return counts, faults


def check(counts, faults):
    """Assert that nothing differs without a row, and that all ways were taken."""
    assert not faults, "\n".join(str(fault)[:1000] for fault in faults[:20])
    for way in WAYS:
        assert counts[way, EQUAL] > 2 * counts[way, ROW], counts
        assert counts[way, EQUAL] > counts[way, REFUSED], counts
        assert counts[way, EQUAL] > 5, counts


def test_modules_compute_what_torch_computes():
    infos = [one for one in database("module_db") if one.name[3:] in EVERY_DAY]
    assert len(infos) >= 12  # as torch 2.0 has of them
    check(*run_modules(infos, most=2))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_each_module_computes_what_torch_computes(part):
    check(*run_modules(database("module_db")[part::3], most=8))
