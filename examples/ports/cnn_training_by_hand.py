# SPDX-License-Identifier: Apache-2.0
"""What cnn_training.py does, written with PopTorch alone: its original to compare with.

    python -m ipufit.emulator examples/ports/cnn_training_by_hand.py

It prints the loss of each weight update, and the accuracy on the test images. Two
stages in float16, a loss scaling that doubles, mixup on the device, checkpoints and
their average, and fine-tuning of the last layers on larger images.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np
import poptorch  # noqa: TID251 - as scripts without ipufit do
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from networks import Normalized, ResNet
from samples import MEAN, STD, digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class WithLoss(nn.Module):
    """The network with mixup before it, and loss and accuracy after it."""

    def __init__(self, network: nn.Module, smoothing: float) -> None:
        super().__init__()
        self.network, self.smoothing = network, smoothing

    def forward(
        self, images: Tensor, labels: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss and share of correct answers of a micro-batch; `shares` [N, 1] mix."""
        own = shares.half()[:, :, None, None]
        images = images.half()
        mixed = images * own + images.roll(1, 0) * (1 - own)
        scores = self.network(mixed).float()
        losses = shares[:, 0] * self.losses(scores, labels)
        losses = losses + (1 - shares[:, 0]) * self.losses(scores, labels.roll(1, 0))
        correct = (scores.argmax(1) == labels).float().mean()
        return poptorch.identity_loss(losses, reduction="mean"), correct

    def losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of each sample."""
        return F.cross_entropy(
            scores, labels, label_smoothing=self.smoothing, reduction="none"
        )


def training_options(args: argparse.Namespace, accumulation: int) -> poptorch.Options:
    """Options of the training program: two IPUs, sums of loss and accuracy."""
    options = poptorch.Options()
    options.replicationFactor(args.replicas)
    options.deviceIterations(1)
    options.autoRoundNumIPUs(True)
    options.broadcastBuffers(False)
    options.randomSeed(args.seed)
    options.outputMode(poptorch.OutputMode.Sum)
    options.Training.gradientAccumulation(accumulation)
    options.Training.accumulationAndReplicationReductionType(
        poptorch.ReductionType.Mean
    )
    options.Precision.enableStochasticRounding(args.enable_stochastic_rounding)
    options.setAvailableMemoryProportion({"IPU0": args.memory, "IPU1": args.memory})
    options.setExecutionStrategy(
        poptorch.PipelinedExecution(
            poptorch.Stage("first").ipu(0), poptorch.Stage("second").ipu(1)
        )
    )
    return options


def parameter_groups(network: nn.Module, decay: float) -> list[dict]:
    """Weights with decay, and without it those of one dimension: biases and norms."""
    trained = [p for p in network.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def cosine(update: int, warmup: int, total: int) -> float:
    """Factor of the learning rate: up in a line, then down along half a cosine."""
    if update < warmup:
        return update / warmup
    return (1 + math.cos(math.pi * (update - warmup) / (total - warmup))) / 2


def train(
    network: nn.Module,
    data: TensorDataset,
    args: argparse.Namespace,
    options: poptorch.Options,
    optimizer: torch.optim.Optimizer,
    rates: list[float],
    scalings: list[float],
    micro_batch: int,
) -> None:
    """Train for as many updates as there are rates; the loss of each is printed."""
    network.train()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and not module.weight.requires_grad:
            module.eval()
    model = poptorch.trainingModel(
        WithLoss(network, args.label_smoothing), options, optimizer
    )
    loader = poptorch.DataLoader(
        options, data, batch_size=micro_batch, shuffle=not args.in_order, drop_last=True
    )
    generator = np.random.default_rng(args.seed)
    given = torch.load(args.mixup_shares) if args.mixup_shares else None
    base = [group["lr"] for group in optimizer.param_groups]
    factor = options.Training.gradient_accumulation
    batches = iter(loader)
    for update, (rate, scaling) in enumerate(zip(rates, scalings)):
        batch = next(batches, None)
        if batch is None:  # the end of a pass
            batches = iter(loader)
            batch = next(batches)
        for group, initial in zip(optimizer.param_groups, base):
            group["lr"] = initial * rate
            if "velocity_scaling" in group:
                group["velocity_scaling"] = scaling
        optimizer.loss_scaling = scaling
        model.setOptimizer(optimizer)
        shape = (len(batch[1]), 1)
        if args.mixup_alpha == 0:
            shares = torch.ones(shape)
        elif given is not None:
            shares = given[update * shape[0] : (update + 1) * shape[0]]
        else:
            drawn = generator.beta(args.mixup_alpha, args.mixup_alpha, shape)
            shares = torch.from_numpy(drawn.astype(np.float32))
        loss, correct = model(*batch, shares)
        means = [value.float().mean().item() / factor for value in (loss, correct)]
        print(f"update {update}: loss {means[0]:.7f} accuracy {means[1]:.4f}")
        if (update + 1) % args.steps_per_epoch == 0 and args.checkpoints:
            model.copyWeightsToHost()
            path = Path(args.checkpoints, f"{update // args.steps_per_epoch:04d}.pt")
            state = network.state_dict()
            torch.save({name: state[name].detach().clone() for name in state}, path)
    model.destroy()


def averaged(files: list[Path], decay: float | None) -> dict[str, Tensor]:
    """Mean of checkpoints, or their moving average; whole numbers are the last's."""
    sums: dict[str, Tensor] = {}
    for count, file in enumerate(files):
        state = torch.load(file, weights_only=False)
        for name, value in state.items():
            if not value.is_floating_point():
                sums[name] = value
            elif count == 0:
                sums[name] = value.double()
            else:
                share = 1 / (count + 1) if decay is None else 1 - decay
                sums[name] += (value.double() - sums[name]) * share
    return {name: total.to(state[name].dtype) for name, total in sums.items()}


def freeze_before(network: nn.Module, first: str) -> None:
    """Freeze the parameters before a layer."""
    for name, parameter in network.named_parameters():
        if name.startswith(first):
            break
        parameter.requires_grad = False


def evaluate(
    network: nn.Module, data: TensorDataset, args: argparse.Namespace
) -> float:
    """Accuracy on all images: the last call is padded, and the padding cut off."""
    options = poptorch.Options()
    options.deviceIterations(2)  # a pipeline of two stages needs two micro-batches
    options.outputMode(poptorch.OutputMode.All)
    options.setExecutionStrategy(
        poptorch.PipelinedExecution(
            poptorch.Stage("first").ipu(0), poptorch.Stage("second").ipu(1)
        )
    )
    network.eval()
    model = poptorch.inferenceModel(network, options)
    images, labels = data.tensors
    call, correct = 2 * args.micro_batch_size, 0
    for start in range(0, len(images), call):
        part = images[start : start + call]
        filling = images[:1].expand(call - len(part), -1, -1, -1)
        scores = model(torch.cat([part, filling]))[: len(part)]
        correct += (scores.argmax(1) == labels[start : start + call]).sum().item()
    model.destroy()
    return correct / len(images)


def parse_arguments() -> argparse.Namespace:
    """The switches that cnn_training.py has, too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--micro-batch-size", type=int, default=8)
    add("--gradient-accumulation", type=int, default=4)
    add("--replicas", type=int, default=1)
    add("--epochs", type=int, default=8)
    add("--steps-per-epoch", type=int, default=44)
    add("--lr", type=float, default=0.2)
    add("--momentum", type=float, default=0.9)
    add("--weight-decay", type=float, default=1e-4)
    add("--warmup-epochs", type=int, default=1)
    add("--initial-loss-scaling", type=float, default=16.0)
    add("--loss-scaling", type=float, default=128.0)
    add("--label-smoothing", type=float, default=0.1)
    add("--mixup-alpha", type=float, default=0.2)
    add("--mixup-shares", help="a file with the shares to mix by, else drawn")
    add("--memory", type=float, default=0.3)
    add("--enable-stochastic-rounding", action="store_true")
    kinds = ["mean", "exponential"]
    add("--weight-avg-strategy", choices=kinds, default="mean")
    add("--weight-avg-exp-decay", type=float, default=0.97)
    add("--weight-avg-n", type=int, default=3)
    add("--fine-tune-epochs", type=int, default=2)
    add("--fine-tune-lr", type=float, default=0.25)
    add("--fine-tune-first-trainable-layer", default="network.layer2")
    add("--in-order", action="store_true")
    add("--seed", type=int, default=42)
    args = parser.parse_args()
    args.checkpoints = None
    return args


def main() -> None:
    """Train on small images, average, fine-tune on large ones, and test."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    network = Normalized(ResNet(), MEAN, STD).half()
    poptorch.BeginBlock(network.network.conv1, "first")
    poptorch.BeginBlock(network.network.layer2, "second")
    optimizer = poptorch.optim.SGD(
        parameter_groups(network, args.weight_decay),
        lr=args.lr,
        momentum=args.momentum,
        loss_scaling=args.initial_loss_scaling,
        velocity_scaling=args.initial_loss_scaling,
        use_combined_accum=True,
    )
    per_epoch, total = args.steps_per_epoch, args.epochs * args.steps_per_epoch
    warmup = args.warmup_epochs * per_epoch
    steps = int(math.log2(args.loss_scaling / args.initial_loss_scaling)) + 1
    every = max(1, args.epochs // steps) * per_epoch
    scalings = [
        min(args.initial_loss_scaling * 2 ** (k // every), args.loss_scaling)
        for k in range(total)
    ]
    with tempfile.TemporaryDirectory() as args.checkpoints:
        train(
            network,
            digits(8)[0],
            args,
            training_options(args, args.gradient_accumulation),
            optimizer,
            [cosine(k, warmup, total) for k in range(total)],
            scalings,
            args.micro_batch_size,
        )
        files = sorted(Path(args.checkpoints).iterdir())
        is_moving = args.weight_avg_strategy == "exponential"
        decay = args.weight_avg_exp_decay if is_moving else None
        network.load_state_dict(averaged(files[-args.weight_avg_n :], decay))
    train_large, test_large = digits(12)
    if args.fine_tune_epochs:
        args.checkpoints, args.mixup_alpha = None, 0.0
        freeze_before(network, args.fine_tune_first_trainable_layer)
        total = args.fine_tune_epochs * per_epoch
        train(
            network,
            train_large,
            args,
            training_options(args, 2 * args.gradient_accumulation),
            poptorch.optim.SGD(
                parameter_groups(network, args.weight_decay),
                lr=args.fine_tune_lr,
                loss_scaling=args.loss_scaling,
            ),
            [cosine(k, 0, total) for k in range(total)],
            [args.loss_scaling] * total,
            args.micro_batch_size // 2,
        )
    print(f"test accuracy: {evaluate(network, test_large, args):.2%}")


if __name__ == "__main__":
    main()
