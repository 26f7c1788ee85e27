# SPDX-License-Identifier: Apache-2.0
"""Probes of programs: results, losses, blocks, weights, optimizers, tracing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own short name
from torch import nn

from ipufit import poptorch
from tests.conformance.probing import (
    Program,
    apart,
    filled,
    infer,
    loss_of,
    probe,
    ramp,
    settings,
    train,
)


def regression(self: Any, x: Any, y: Any) -> Any:
    """Return the outputs of a layer, and their mean squared error."""
    out = self.layer(x)
    return out, F.mse_loss(out, y)


def line() -> Any:
    """Return a program of one linear layer with a loss."""
    return Program(regression, layer=filled(nn.Linear(3, 2)))


def twice(program: Any) -> Any:
    """Return the results of two calls of an inference model."""
    model = poptorch.inferenceModel(program.eval(), settings(2))
    results = model(ramp(4, 3)), model(ramp(4, 3))
    model.destroy()
    return results


def trained(forward: Any, *inputs: Any, **how: Any) -> Any:
    """Train a program of one linear layer."""
    return train(Program(forward, layer=filled(nn.Linear(3, 2))), *inputs, **how)


# Results ------------------------------------------------------------------------------


@probe("output modes and layout")
def output_modes_of_inference() -> Any:
    """Each mode returns its share of the micro-batches, in their order."""
    return {
        mode: infer(lambda x: 2 * x, ramp(8, 3), options=settings(4, mode=mode))
        for mode in ("All", "Final", "EveryN", "Sum")
    }


@probe("output modes and layout")
def output_modes_of_training() -> Any:
    """Micro-batches are those of [device iteration][accumulation]."""
    return {
        mode: train(line(), ramp(8, 3), ramp(8, 2), options=settings(2, 2, mode=mode))
        for mode in ("Default", "All", "Sum")
    }


@probe("output modes and layout")
def nested_results() -> Any:
    """Tuples, lists and dicts come back as they were returned."""
    return infer(
        lambda x: {"a": (x + 1, [x.sum(1), x]), "b": x[:, :1]},
        ramp(4, 3),
        options=settings(2),
    )


@probe("output modes and layout")
def results_without_a_batch() -> Any:
    """Numbers are stacked, and sums keep the type of the results."""
    options = settings(3, mode="Sum")
    return {
        "all": infer(lambda x: (x.sum(), x.argmax()), ramp(6, 2), options=settings(3)),
        "sum": infer(lambda x: (x > 0, x.int().sum()), ramp(6, 2), options=options),
    }


@probe("output modes and layout")
def types_of_results() -> Any:
    """Results have 32 bits, and the types of torch."""
    return infer(
        lambda x, whole: (x.half(), whole * 2, x > 0, x.double(), whole.to(x.dtype)),
        ramp(2, 3),
        torch.arange(6).reshape(2, 3),
    )


@probe("output modes and layout")
def result_of_a_factory() -> Any:
    """A tensor that only a factory has made comes back once."""
    return infer(lambda x: (x, torch.ones(2, 3)), ramp(4, 3), options=settings(2))


@probe("output modes and layout")
def an_input_returned() -> Any:
    """An input that is returned is a copy; one that is written comes back so."""

    def forward(x: Any) -> Any:
        y = x + 0
        y[0] = 7.0
        return x, y.clone().mul_(2)

    return infer(forward, ramp(2, 3))


@probe("output modes and layout")
def whole_numbers_beyond_32_bits() -> Any:
    """Inputs and constants of 64 bits are cut to 32."""
    large = torch.tensor([2**40 + 5, 2**31, -(2**33) - 7])
    return infer(lambda x: (x + 0, x + large.to(x.device)), large)


@probe("refused: inputs")
def inputs_that_are_refused() -> Any:
    """Batches that don't divide, and shapes that the program isn't compiled for."""

    def then(second: Any) -> Any:
        model = poptorch.inferenceModel(Program(lambda _, x: x * 2), settings(2))
        return model(ramp(4, 3)), model(second)

    return apart(
        rest=lambda: infer(lambda x: x, ramp(3, 2), options=settings(2)),
        larger=lambda: then(ramp(8, 3)),
        other_type=lambda: then(ramp(4, 3).int()),
        other_rank=lambda: then(ramp(4, 3, 1)),
    )


# Losses -------------------------------------------------------------------------------


def classes(self: Any, x: Any, target: Any) -> Any:
    """Return the loss of a classifier, `self.loss`."""
    return self.loss(self.layer(x), target)


def classified(loss: Any, options: Any = None, target: Any = None) -> Any:
    """Return a loss and the weights after one update by it."""
    program = Program(classes, layer=filled(nn.Linear(2, 3)), loss=loss)
    if target is None:
        target = torch.tensor([0, 2, 1, 1])
    return train(program, ramp(4, 2), target, options=options)


@probe("losses and their reduction")
def reductions_over_accumulation() -> Any:
    """Gradients of micro-batches are averaged, or added if the options say so."""

    def options(reduction: str) -> Any:
        found = settings(accumulation=2)
        reductions = poptorch.ReductionType
        found.Training.accumulationAndReplicationReductionType(reductions[reduction])
        return found

    return apart(
        mean_of_means=lambda: classified(nn.CrossEntropyLoss(), options("Mean")),
        mean_of_sums=lambda: classified(
            nn.CrossEntropyLoss(reduction="sum"), options("Mean")
        ),
        sum_of_sums=lambda: classified(
            nn.CrossEntropyLoss(reduction="sum"), options("Sum")
        ),
    )


@probe("losses and their reduction")
def reductions_of_identity_loss() -> Any:
    """A marker takes the mean or sum, or a number as it is."""

    def marked(reduction: str) -> Any:
        def forward(self: Any, x: Any) -> Any:
            squares = self.layer(x) ** 2
            value = squares.sum() if reduction == "none" else squares
            return poptorch.identity_loss(value, reduction=reduction)

        return trained(forward, ramp(4, 3), options=settings(2))

    return {name: marked(name) for name in ("mean", "sum", "none")}


@probe("losses and their reduction")
def forms_of_losses() -> Any:
    """Losses of one program: their numbers, and one update by their sum."""
    zeros = torch.tensor([0.0, 1.0, 1.0, 0.0])

    def forward(self: Any, x: Any, y: Any) -> Any:
        out = self.layer(x)[:, 0]
        losses = [
            F.mse_loss(out, y),
            F.l1_loss(out, y, reduction="sum"),
            F.smooth_l1_loss(out, y),
            F.binary_cross_entropy_with_logits(out, y),
            F.kl_div(F.log_softmax(out, 0), y + 0.5, reduction="sum"),
            F.poisson_nll_loss(out, y),
            F.hinge_embedding_loss(out, 2 * y - 1),
        ]
        total: Any = sum(losses)
        return losses, poptorch.identity_loss(total, reduction="none")

    program = Program(forward, layer=filled(nn.Linear(3, 1)))
    return train(program, ramp(4, 3) + 0.1, zeros)


@probe("losses and their reduction")
def loss_before_a_loss() -> Any:
    """A marker that another one is computed from has the shape [1]."""

    def forward(self: Any, x: Any, y: Any) -> Any:
        out, loss = regression(self, x, y)
        return out, loss, poptorch.identity_loss(2 * loss, reduction="none")

    return trained(forward, ramp(2, 3), ramp(2, 2))


@probe("losses and their reduction")
def smoothed_sum() -> Any:
    """With label smoothing and a sum, the part without smoothing trains."""
    return classified(nn.CrossEntropyLoss(label_smoothing=0.5, reduction="sum"))


@probe("losses and their reduction")
def kl_divergence_over_the_batch() -> Any:
    """The mean over the batch trains the sum."""
    loss = nn.KLDivLoss(reduction="batchmean")
    return classified(loss, target=(ramp(4, 3) + 2) / 8)


@probe("losses and their reduction")
def ignored_targets() -> Any:
    """A mean is over the targets that count."""
    target = torch.tensor([0, -100, 1, -100])
    return classified(nn.CrossEntropyLoss(), target=target)


def vector(self: Any, x: Any) -> Any:
    """Mark a vector as the final loss."""
    return poptorch.identity_loss(self.layer(x), reduction="none")


def two_losses(self: Any, x: Any) -> Any:
    """Return two losses of which none is computed from the other."""
    out = self.layer(x)
    return F.mse_loss(out, -out), F.l1_loss(out, 2 * out)


@probe("refused: losses")
def losses_that_are_refused() -> Any:
    """Forms of losses that a compiler doesn't take, or finds none in."""
    chances = (ramp(4, 3) + 2) / 8

    return apart(
        class_weights=lambda: classified(nn.CrossEntropyLoss(ramp(3))),
        smoothed_mean=lambda: classified(nn.CrossEntropyLoss(label_smoothing=0.5)),
        probabilities=lambda: classified(nn.CrossEntropyLoss(), target=chances),
        no_reduction=lambda: classified(nn.CrossEntropyLoss(reduction="none")),
        vector=lambda: trained(vector, ramp(2, 3)),
        independent=lambda: trained(two_losses, ramp(2, 3)),
        none=lambda: trained(lambda self, x: self.layer(x).sum(), ramp(2, 3)),
    )


# Dead operators -----------------------------------------------------------------------


@probe("dead operators")
def unused_losses() -> Any:
    """Losses that no result depends on aren't there."""

    def forward(self: Any, x: Any, y: Any) -> Any:
        out, loss = regression(self, x, y)
        F.l1_loss(out, y)
        poptorch.identity_loss(3 * loss, reduction="none")
        return out, loss

    return trained(forward, ramp(2, 3), ramp(2, 2))


@probe("dead operators")
def unused_operator_without_a_kernel() -> Any:
    """An operator that isn't compiled does no harm where its result isn't used."""

    def forward(x: Any) -> Any:
        torch.nan_to_num(x)
        return x + 1

    return infer(forward, ramp(2, 3))


@probe("dead operators", num_ipus=2)
def unused_block() -> Any:
    """A block with results that nothing uses isn't there."""

    def forward(x: Any) -> Any:
        with poptorch.Block("a", ipu_id=0):
            y = x + 1
        with poptorch.Block("b", ipu_id=1):
            _ = x * 2
        return y

    return infer(forward, ramp(4, 3), options=settings(2))


# Blocks -------------------------------------------------------------------------------


@probe("blocks")
def blocks_on_one_ipu() -> Any:
    """A block that is entered twice makes one stage."""

    def forward(x: Any) -> Any:
        with poptorch.Block("a", ipu_id=0):
            y = x + 1
        with poptorch.Block("a", ipu_id=0):
            return y * 2

    return infer(forward, ramp(2, 3))


def after_a_block(go_on: Any) -> Any:
    """Return a function that goes on where no block is open."""

    def forward(x: Any) -> Any:
        with poptorch.Block("a", ipu_id=0):
            y = x + 1
        return go_on(x, y)

    return lambda: infer(forward, ramp(2, 3))


@probe("refused: blocks")
def operators_outside_of_blocks() -> Any:
    """Where blocks are, each operator is in one, the copy of an input, too."""
    return apart(
        product=after_a_block(lambda x, y: y * 2),
        cast=after_a_block(lambda x, y: y.half()),
        input=after_a_block(lambda x, y: (x, y)),
    )


class Pipeline(nn.Module):
    """Two layers on two IPUs."""

    def __init__(self, is_shared: bool = False) -> None:
        super().__init__()
        self.first = filled(nn.Linear(3, 3))
        self.second = self.first if is_shared else filled(nn.Linear(3, 3))

    def forward(self, x: Any) -> Any:
        """Return the outputs, and the mean of their squares as the loss."""
        with poptorch.Block("first", ipu_id=0):
            x = self.first(x).tanh()
        with poptorch.Block("second", ipu_id=1):
            out = self.second(x)
            return out, poptorch.identity_loss((out**2).mean(), reduction="none")


@probe("pipelines", num_ipus=2)
def pipelined_training() -> Any:
    """A pipeline computes what its layers compute."""
    return train(Pipeline(), ramp(8, 3), options=settings(2, 4, mode="All"))


@probe("refused: pipelines", num_ipus=2)
def pipelines_that_are_refused() -> Any:
    """Too few micro-batches, and one weight on two IPUs."""
    return apart(
        micro_batches=lambda: train(Pipeline(), ramp(2, 3), options=settings(1, 1)),
        shared=lambda: train(Pipeline(True), ramp(8, 3), options=settings(1, 4)),
    )


# Weights and the device ---------------------------------------------------------------


@probe("weights and the device")
def detach_and_attach() -> Any:
    """Training goes on after the device was given back."""
    program = line()
    sgd = poptorch.optim.SGD(program.parameters(), lr=0.125, momentum=0.5)
    model = poptorch.trainingModel(program, settings(), sgd)
    model(ramp(2, 3), ramp(2, 2))
    model.detachFromDevice()
    between = program.layer.weight.detach().clone()
    model.attachToDevice()
    results = model(ramp(2, 3), ramp(2, 2))
    model.copyWeightsToHost()
    after = program.layer.weight.detach().clone()
    model.destroy()
    return between, results, after


@probe("weights and the device")
def weights_of_the_host() -> Any:
    """A weight that the host has changed counts when it is copied to the device."""
    layer = filled(nn.Linear(3, 2))
    model = poptorch.inferenceModel(layer.eval(), settings())
    first = model(ramp(2, 3))
    with torch.no_grad():
        layer.weight.zero_()
    second = model(ramp(2, 3))
    model.copyWeightsToDevice()
    third = model(ramp(2, 3))
    model.destroy()
    return first, second, third


@probe("weights and the device")
def inference_after_training() -> Any:
    """An inference model of the same module has the weights that were trained."""
    program = line()
    sgd = poptorch.optim.SGD(program.parameters(), lr=0.125)
    model = poptorch.trainingModel(program, settings(), sgd)
    model(ramp(2, 3), ramp(2, 2))
    model.detachFromDevice()
    other = poptorch.inferenceModel(program.layer, settings())
    results = other(ramp(2, 3))
    other.destroy()
    model.destroy()
    return results


@probe("weights and the device")
def buffers() -> Any:
    """Buffers of float32 change on the device, those of whole numbers don't."""

    def forward(self: Any, x: Any) -> Any:
        self.floats += x.sum()
        self.wholes += 1
        return self.floats * self.wholes, loss_of(self.layer(x))

    program = Program(forward, layer=filled(nn.Linear(3, 2)))
    program.register_buffer("floats", torch.ones(1))
    program.register_buffer("wholes", torch.ones(1, dtype=torch.int32))
    options = settings(2, mode="All")
    return train(program, ramp(4, 3) + 1, options=options, calls=2)


@probe("weights and the device")
def frozen_and_detached() -> Any:
    """Weights train that need a gradient, and to which one leads."""

    def forward(self: Any, x: Any) -> Any:
        out = self.a(x) + self.b(x).detach() + self.c(x)
        return loss_of(out**2)

    parts = {name: filled(nn.Linear(3, 2)) for name in "abc"}
    parts["c"].requires_grad_(False)
    return train(Program(forward, **parts), ramp(2, 3))


@probe("weights and the device")
def tied_weights() -> Any:
    """A weight under two names gets the gradients of both uses, and stays one."""

    def forward(self: Any, x: Any) -> Any:
        return loss_of(self.b(self.a(x)) ** 2)

    a, b = filled(nn.Linear(2, 2)), filled(nn.Linear(2, 2))
    b.weight = a.weight
    return train(Program(forward, a=a, b=b), ramp(2, 2))


@probe("weights and the device")
def hooks_of_gradients() -> Any:
    """A hook on a weight's gradient is never called."""
    program = line()
    program.layer.weight.register_hook(lambda gradient: gradient * 100)
    return train(program, ramp(2, 3), ramp(2, 2))


@probe("weights and the device")
def trained_again() -> Any:
    """A module trains anew after its first training model was destroyed."""
    program = line()
    first = train(program, ramp(2, 3), ramp(2, 2))
    return first, train(program, ramp(2, 3), ramp(2, 2))


# Optimisers ---------------------------------------------------------------------------


def updated(optimizer: Any, later: Any = None) -> Any:
    """Return the weights after three updates, the last by `later` if it is given."""
    program = line()
    groups = [
        {"params": [program.layer.weight]},
        {"params": [program.layer.bias], "weight_decay": 0.25},
    ]
    model = poptorch.trainingModel(program, settings(), optimizer(groups))
    model(ramp(2, 3), ramp(2, 2))
    model(ramp(2, 3), ramp(2, 2))
    if later is not None:
        model.setOptimizer(later(groups))
    results = model(ramp(2, 3), ramp(2, 2))
    model.copyWeightsToHost()
    state = {name: one.clone() for name, one in program.state_dict().items()}
    model.destroy()
    return {"results": results, **state}


@probe("optimizers")
def sgd() -> Any:
    """Momentum and dampening by PopTorch's rule."""
    return updated(
        lambda groups: poptorch.optim.SGD(groups, lr=0.125, momentum=0.5, dampening=0.5)
    )


@probe("optimizers")
def nesterov() -> Any:
    """Momentum that looks ahead."""
    return updated(
        lambda groups: poptorch.optim.SGD(groups, lr=0.125, momentum=0.5, nesterov=True)
    )


@probe("optimizers")
def adam() -> Any:
    """Adam's rule, with decay in the gradient."""
    return updated(lambda groups: poptorch.optim.Adam(groups, lr=0.125))


@probe("optimizers")
def adamw() -> Any:
    """AdamW's rule, which corrects the bias even if it is told not to."""
    return updated(
        lambda groups: poptorch.optim.AdamW(groups, lr=0.125, bias_correction=False)
    )


@probe("optimizers")
def rmsprop() -> Any:
    """RMSprop's rule, with momentum."""
    return updated(
        lambda groups: poptorch.optim.RMSprop(groups, lr=0.125, momentum=0.5)
    )


@probe("optimizers")
def lamb() -> Any:
    """LAMB's rule."""
    return updated(lambda groups: poptorch.optim.LAMB(groups, lr=0.125))


@probe("optimizers")
def state_after_set_optimizer() -> Any:
    """The state on the device stays when another optimiser is set."""
    return {
        "adam": updated(
            lambda groups: poptorch.optim.Adam(groups, lr=0.125),
            lambda groups: poptorch.optim.Adam(groups, lr=0.25),
        ),
        "sgd": updated(
            lambda groups: poptorch.optim.SGD(groups, lr=0.125, momentum=0.5),
            lambda groups: poptorch.optim.SGD(groups, lr=0.25, momentum=0.5),
        ),
    }


@probe("optimizers")
def weight_in_no_group() -> Any:
    """A weight that no group has trains by the defaults."""
    program = line()
    some = poptorch.optim.SGD([program.layer.bias], lr=0.125)
    return train(program, ramp(2, 3), ramp(2, 2), optimizer=some)


@probe("optimizers")
def clipped_and_scaled() -> Any:
    """The norm of all gradients is clipped; a loss scaling changes no update."""
    return {
        "clipped": updated(
            lambda groups: poptorch.optim.Adam(groups, lr=0.125, max_grad_norm=0.5)
        ),
        "scaled": updated(
            lambda groups: poptorch.optim.SGD(groups, lr=0.125, loss_scaling=64.0)
        ),
    }


@probe("optimizers", tolerance=0.004)
def weights_of_float16() -> Any:
    """Weights of float16 train, with accumulation in float16."""
    program = line().half()
    sgd = poptorch.optim.SGD(program.parameters(), lr=0.125, momentum=0.5)
    x, y = ramp(4, 3).half(), ramp(4, 2).half()
    return train(program, x, y, options=settings(1, 2), optimizer=sgd, calls=2)


def set_later(**changes: Any) -> Any:
    """Return a function that makes an SGD and changes its hyper-parameters then."""

    def make(groups: Any) -> Any:
        made = poptorch.optim.SGD(groups, lr=0.125)
        made.param_groups[0].update(changes)
        return made

    return make


def without_rate(groups: Any) -> Any:
    """Return an SGD with a constant learning rate of 0."""
    made = poptorch.optim.SGD(groups, lr=0.0)
    made.variable_attrs.markAsConstant("lr")
    return made


def scaled_losses() -> Any:
    """Train in float32 with automatic loss scaling."""
    options = settings()
    options.Training.setAutomaticLossScaling(True)
    return train(line(), ramp(2, 3), ramp(2, 2), options=options)


@probe("refused: optimizers")
def optimizers_that_are_refused() -> Any:
    """Hyper-parameters that PopART takes for errors."""
    return apart(
        negative_rate=lambda: updated(set_later(lr=-0.125)),
        negative_later=lambda: updated(set_later(), set_later(lr=-0.125)),
        negative_decay=lambda: updated(set_later(weight_decay=-0.125)),
        no_eps=lambda: updated(
            lambda groups: poptorch.optim.Adam(groups, lr=0.125, eps=0.0)
        ),
        constant_zero_rate=lambda: updated(without_rate),
        loss_scaling=scaled_losses,
    )


# Replicas -----------------------------------------------------------------------------


@probe("replicas", num_ipus=2)
def replicas() -> Any:
    """Gradients of replicas are averaged, results are in the order of the inputs."""
    options = settings(2, 2, replicas=2, mode="All")
    return train(line(), ramp(8, 3), ramp(8, 2), options=options)


@probe("replicas", num_ipus=2)
def batch_norm_over_replicas() -> Any:
    """Statistics are those of each replica, and the first's come back."""

    def forward(self: Any, x: Any) -> Any:
        return loss_of(self.layer(self.norm(x)) ** 2)

    parts = {"norm": filled(nn.BatchNorm1d(3)), "layer": filled(nn.Linear(3, 2))}
    after = train(Program(forward, **parts), ramp(8, 3), options=settings(replicas=2))
    return after["norm.running_mean"], after["norm.running_var"]


@probe("replicas", num_ipus=2)
def sums_over_replicas() -> Any:
    """The mode Sum returns a sum of each replica."""
    options = settings(2, replicas=2, mode="Sum")
    return infer(lambda x: x.sum(1), ramp(8, 3), options=options)


# Tracing ------------------------------------------------------------------------------


@probe("tracing")
def device_of_a_tensor() -> Any:
    """A tensor is on a device of the type ipu while the program is traced."""

    def forward(x: Any) -> Any:
        is_on_ipu = x.device.type == "ipu" and poptorch.isRunningOnIpu()
        return (x if is_on_ipu else -x), torch.zeros(2, device=x.device) + x[0, 0]

    return infer(forward, ramp(2, 3))


@probe("tracing")
def python_runs_once() -> Any:
    """Python numbers are constants of the program."""
    calls: list[int] = []

    def forward(x: Any) -> Any:
        calls.append(1)
        return x + len(calls)

    return twice(Program(lambda _, x: forward(x)))


@probe("tracing")
def equality_of_tensors() -> Any:
    """The value of torch.equal isn't known: it is False."""
    return infer(lambda x: x + 1 if torch.equal(x, x) else x - 1, ramp(2, 3))


@probe("tracing")
def gradients_in_inference() -> Any:
    """The function torch.autograd.grad works in an inference model."""

    def forward(x: Any) -> Any:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((x**3).sum(), x)
        return gradient

    return infer(forward, ramp(2, 3))


@probe("tracing")
def random_numbers() -> Any:
    """Random numbers of a seed come again, and differ between micro-batches."""

    def drawn() -> Any:
        options = settings(2)
        options.randomSeed(1)
        return infer(lambda x: torch.rand_like(x), ramp(8, 4), options=options)

    first, second = drawn(), drawn()
    inside = ((first >= 0) & (first <= 1)).all()
    return inside, (first == second).all(), (first[:4] != first[4:]).any()


@probe("tracing")
def functions_of_poptorch() -> Any:
    """Marks and hints compute nothing; slices may begin at a number of the device."""

    def forward(self: Any, x: Any, start: Any) -> Any:
        with poptorch.MultiConv():
            a, b = self.conv(x), self.conv(-x)
        return (
            poptorch.ipu_print_tensor(poptorch.nop(x)),
            poptorch.set_available_memory(x @ x, 0.5),
            poptorch.serializedMatMul(x, x, poptorch.MatMulSerializationMode.Disabled),
            poptorch.dynamic_slice(x, 2, start, 2, 1),
            a + b,
        )

    program = Program(forward, conv=filled(nn.Conv1d(4, 2, 1)))
    return infer(program, ramp(1, 4, 4), torch.tensor([1], dtype=torch.int32))


@probe("tracing")
def call_of_the_host() -> Any:
    """A poptorch.CPU runs a module on the host."""

    def forward(self: Any, x: Any) -> Any:
        return self.host(x + 1) * 2

    host = poptorch.CPU(nn.Softplus(), "softplus")
    return infer(Program(forward, host=host), ramp(2, 3))


@probe("tracing")
def part_without_gradients() -> Any:
    """A torch.no_grad() around a part keeps its weights as they are."""

    def forward(self: Any, x: Any) -> Any:
        with torch.no_grad():
            x = self.first(x)
        return loss_of(self.second(x) ** 2)

    parts = {"first": filled(nn.Linear(3, 2)), "second": filled(nn.Linear(2, 2))}
    return train(Program(forward, **parts), ramp(2, 3))


class Doubled(torch.autograd.Function):
    """A function whose gradient isn't that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Double a tensor."""
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return ten times the gradient."""
        return 10 * gradients[0]


@probe("tracing")
def own_backward_in_inference() -> Any:
    """The forward pass of a torch.autograd.Function is a part of the program."""
    return infer(
        lambda x: Doubled.apply(x),  # type: ignore[no-untyped-call]
        ramp(2, 3),
    )


@probe("refused: tracing")
def values_that_are_not_known() -> Any:
    """Nothing can be read of a tensor, nor can a shape depend on it."""
    attribute = ramp(2, 3)
    return apart(
        item=lambda: infer(lambda x: x * x.mean().item(), ramp(2, 3)),
        branch=lambda: infer(lambda x: x if x.sum() > 0 else -x, ramp(2, 3)),
        mask=lambda: infer(lambda x: x[x > 0], ramp(2, 3)),
        nonzero=lambda: infer(lambda x: x.nonzero(), ramp(2, 3)),
        size=lambda: infer(lambda x: x.new_zeros(x.int().sum()), ramp(2, 3)),
        numpy=lambda: infer(lambda x: x + x.numpy().sum(), ramp(2, 3)),
        attribute=lambda: infer(lambda x: x + attribute, ramp(2, 3)),
        zero_size=lambda: infer(lambda x: x + 1, ramp(0, 3)),
    )


def kept(self: Any, x: Any) -> Any:
    """Keep a tensor of the device in an attribute, and use that of the last time."""
    self.state = x + getattr(self, "state", 0)
    return self.state


@probe("tracing")
def state_in_an_attribute() -> Any:
    """A tensor in a plain attribute is no state: the next call has it not."""
    return twice(Program(kept))


# Loops --------------------------------------------------------------------------------


@probe("loops and branches")
def loop() -> Any:
    """A body of for_loop is repeated."""
    return infer(lambda x: poptorch.for_loop(3, lambda y: y * 2, [x])[0], ramp(2, 3))


@probe("refused: loops")
def buffer_in_a_loop() -> Any:
    """A buffer that the body of a loop changes."""

    def forward(self: Any, x: Any) -> Any:
        def body(y: Any) -> Any:
            self.count += 1
            return y + self.count

        return poptorch.for_loop(3, body, [x])[0], self.count + 0

    program = Program(forward)
    program.register_buffer("count", torch.zeros(1))
    return twice(program)


@probe("loops and branches")
def branch() -> Any:
    """A branch of cond is taken by a value of the device."""

    def forward(x: Any) -> Any:
        above = x.sum().reshape(1) > 0
        return poptorch.cond(above, lambda y: y + 1, [x], lambda y: y - 1, [x])[0]

    return infer(forward, ramp(2, 3))


@probe("refused: loops")
def loop_in_training() -> Any:
    """Loops are for inference alone."""

    def forward(self: Any, x: Any) -> Any:
        out = poptorch.for_loop(2, lambda y: y * 2, [self.layer(x)])[0]
        return loss_of(out)

    return trained(forward, ramp(2, 3))
