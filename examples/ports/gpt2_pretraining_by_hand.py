# SPDX-License-Identifier: Apache-2.0
"""What gpt2_pretraining.py does, written with PopTorch alone: its original.

    python -m ipufit.emulator examples/ports/gpt2_pretraining_by_hand.py

It prints the loss and the accuracy of each weight update.
"""

from __future__ import annotations

import argparse
import math

import poptorch  # noqa: TID251 - as scripts without ipufit do
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from networks import GPT2
from samples import text
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class WithLoss(nn.Module):
    """The language model, with the loss and the accuracy over all tokens."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and share of tokens that are foretold."""
        scores = self.network(tokens).float().flatten(0, 1)
        following = following.flatten()
        correct = (scores.argmax(-1) == following).float().mean()
        loss = F.cross_entropy(scores, following)
        return poptorch.identity_loss(loss, reduction="none"), correct


def begin_blocks(network: GPT2, layers_per_ipu: list[int]) -> None:
    """Put words and scores on IPU 0, and layers where they are asked for."""
    poptorch.BeginBlock(network.wte, "words", ipu_id=0)
    ipus = [ipu for ipu, count in enumerate(layers_per_ipu) for _ in range(count)]
    for number, (layer, ipu) in enumerate(zip(network.h, ipus)):
        layer.register_forward_hook(keep_output)
        poptorch.BeginBlock(layer, f"layer{number}", ipu_id=ipu)
    poptorch.BeginBlock(network.lm_head, "scores", ipu_id=0)


def keep_output(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    """Keep what a layer gives; what is inside of it is computed again."""
    return poptorch.recomputationCheckpoint(output)


def make_options(args: argparse.Namespace) -> poptorch.Options:
    """Options of training: state of the optimizer divided among replicas."""
    options = poptorch.Options()
    options.replicationFactor(args.replicas)
    options.deviceIterations(args.device_iterations)
    options.autoRoundNumIPUs(True)
    options.broadcastBuffers(False)
    options.randomSeed(args.seed)
    options.outputMode(poptorch.OutputMode.Sum)
    options.Training.gradientAccumulation(args.gradient_accumulation)
    options.Training.accumulationAndReplicationReductionType(
        poptorch.ReductionType.Mean
    )
    options.setExecutionStrategy(
        poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    )
    options.setAvailableMemoryProportion(
        {f"IPU{ipu}": args.memory for ipu in range(len(args.layers_per_ipu))}
    )
    options.Precision.setPartialsType(torch.float16)
    options.Precision.enableStochasticRounding(True)
    options.TensorLocations.setOptimizerLocation(
        poptorch.TensorLocationSettings()
        .useOnChipStorage(not args.offload_optimizer)
        .useReplicatedTensorSharding(args.replicas > 1)
    )
    if args.executable_cache_dir:
        options.enableExecutableCaching(args.executable_cache_dir)
    return options


def make_optimizer(
    network: nn.Module, args: argparse.Namespace
) -> torch.optim.Optimizer:
    """AdamW or LAMB in float16, without decay of what has one dimension."""
    groups = [
        {
            "params": [p for p in network.parameters() if (p.dim() > 1) is has_decay],
            "weight_decay": args.weight_decay if has_decay else 0.0,
        }
        for has_decay in (True, False)
    ]
    kind = {"adamw": poptorch.optim.AdamW, "lamb": poptorch.optim.LAMB}[args.optimizer]
    return kind(
        groups,
        lr=args.lr,
        eps=1e-6,
        loss_scaling=args.loss_scaling,
        accum_type=torch.float16,
        first_order_momentum_accum_type=torch.float16,
        second_order_momentum_accum_type=torch.float32,
    )


def factor(update: int, warmup: int, total: int) -> float:
    """Factor of the learning rate: up in a line, then down along half a cosine."""
    if update < warmup:
        return update / warmup
    return (1 + math.cos(math.pi * (update - warmup) / (total - warmup))) / 2


def parse_arguments() -> argparse.Namespace:
    """The switches that gpt2_pretraining.py has, too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--samples", type=int, default=2048)
    add("--length", type=int, default=16)
    add("--vocabulary", type=int, default=32)
    add("--hidden-size", type=int, default=32)
    add("--layers-per-ipu", type=int, nargs="+", default=[0, 1, 1, 1])
    add("--dropout", type=float, default=0.1)
    add("--micro-batch-size", type=int, default=2)
    add("--gradient-accumulation", type=int, default=9)
    add("--replicas", type=int, default=2)
    add("--device-iterations", type=int, default=1)
    add("--epochs", type=int, default=2)
    add("--optimizer", choices=["adamw", "lamb"], default="adamw")
    add("--lr", type=float, default=3e-3)
    add("--lr-warmup", type=float, default=0.1)
    add("--weight-decay", type=float, default=0.01)
    add("--loss-scaling", type=float, default=64.0)
    add("--memory", type=float, default=0.2)
    add("--offload-optimizer", action="store_true")
    add("--executable-cache-dir")
    add("--in-order", action="store_true")
    add("--seed", type=int, default=1234)
    return parser.parse_args()


def main() -> None:
    """Train from random weights."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    layers = sum(args.layers_per_ipu)
    network = GPT2(args.vocabulary, args.length, args.hidden_size, layers, args.dropout)
    begin_blocks(network.half(), args.layers_per_ipu)
    tokens = text(args.samples, args.length + 1, args.vocabulary)
    options, optimizer = make_options(args), make_optimizer(network, args)
    loader = poptorch.DataLoader(
        options,
        TensorDataset(tokens[:, :-1], tokens[:, 1:]),
        batch_size=args.micro_batch_size,
        shuffle=not args.in_order,
        drop_last=True,
    )
    total = args.epochs * len(loader)
    warmup = math.ceil(args.lr_warmup * total)
    model = poptorch.trainingModel(WithLoss(network).train(), options, optimizer)
    passes = args.gradient_accumulation * args.device_iterations
    update = 0
    for _ in range(args.epochs):
        for batch in loader:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * factor(update, warmup, total)
            model.setOptimizer(optimizer)
            loss, correct = (part.mean().item() / passes for part in model(*batch))
            print(f"update {update}: loss {loss:.7f} accuracy {correct:.4f}")
            update += 1
    model.destroy()


if __name__ == "__main__":
    main()
