# SPDX-License-Identifier: Apache-2.0
"""What bert_finetuning.py does, written with PopTorch alone: its original.

    python -m ipufit.emulator examples/ports/bert_finetuning_by_hand.py

It prints the loss of each weight update, and the share of questions of which the
whole answer is found.
"""

from __future__ import annotations

import argparse
from typing import Any

import poptorch  # noqa: TID251 - as scripts without ipufit do
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from networks import answerer
from samples import questions
from torch import Tensor, nn
from torch.utils.data import TensorDataset

COLUMNS = ("input_ids", "attention_mask", "token_type_ids")
TARGETS = ("start_positions", "end_positions")


class WithLoss(nn.Module):
    """BERT, and the mean of two losses if it is told where the answer is."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        types: Tensor,
        start: Tensor | None = None,
        end: Tensor | None = None,
    ) -> Any:
        """Scores of each token as first and as last one; the loss in training."""
        scores = self.network(input_ids=ids, attention_mask=mask, token_type_ids=types)
        first, last = scores["start_logits"], scores["end_logits"]
        if start is None:
            return first, last
        loss = F.cross_entropy(first.float(), start) + F.cross_entropy(
            last.float(), end
        )
        return poptorch.identity_loss(loss / 2, reduction="none")


def begin_blocks(network: nn.Module, layers_per_ipu: list[int]) -> list:
    """Put layers on IPUs; the handles take the checkpoints of recomputation away."""
    handles = []
    poptorch.BeginBlock(network.bert.embeddings, "embeddings", ipu_id=0)
    ipus = [ipu for ipu, count in enumerate(layers_per_ipu) for _ in range(count)]
    for number, (layer, ipu) in enumerate(zip(network.bert.encoder.layer, ipus)):
        if number < len(ipus) - 1:
            handles.append(layer.register_forward_hook(keep_outputs))
        poptorch.BeginBlock(layer, f"layer{number}", ipu_id=ipu)
    poptorch.BeginBlock(network.qa_outputs, "answers", ipu_id=ipus[-1])
    return handles


def keep_outputs(module: nn.Module, inputs: tuple, outputs: Any) -> Any:
    """Keep what a layer gives; what is inside of it is computed again."""
    if isinstance(outputs, Tensor):
        return poptorch.recomputationCheckpoint(outputs)
    return tuple(map(poptorch.recomputationCheckpoint, outputs))


def make_options(args: argparse.Namespace, num_ipus: int) -> poptorch.Options:
    """Options that training and validation share."""
    options = poptorch.Options()
    options.deviceIterations(1)
    options.autoRoundNumIPUs(True)
    options.setExecutionStrategy(
        poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    )
    options.setAvailableMemoryProportion(
        {f"IPU{ipu}": args.memory for ipu in range(num_ipus)}
    )
    options.Precision.setPartialsType(torch.float16)
    return options


def training_options(args: argparse.Namespace) -> poptorch.Options:
    """Options of training: sums of losses, optimizer state divided among replicas."""
    options = make_options(args, len(args.layers_per_ipu))
    options.replicationFactor(args.replicas)
    options.outputMode(poptorch.OutputMode.Sum)
    options.broadcastBuffers(False)
    options.randomSeed(args.seed)
    options.Training.gradientAccumulation(args.gradient_accumulation)
    options.Training.accumulationAndReplicationReductionType(
        poptorch.ReductionType.Mean
    )
    options.TensorLocations.setOptimizerLocation(
        poptorch.TensorLocationSettings()
        .useOnChipStorage(not args.offload_optimizer)
        .useReplicatedTensorSharding(args.replicas > 1)
    )
    options.Precision.enableStochasticRounding(True)
    return options


def make_optimizer(
    network: nn.Module, args: argparse.Namespace
) -> torch.optim.Optimizer:
    """AdamW without decay of what has one dimension."""
    groups = [
        {
            "params": [p for p in network.parameters() if (p.dim() > 1) is has_decay],
            "weight_decay": args.weight_decay if has_decay else 0.0,
        }
        for has_decay in (True, False)
    ]
    optimizer = poptorch.optim.AdamW(
        groups, lr=args.lr, eps=1e-6, loss_scaling=args.loss_scaling
    )
    optimizer.variable_attrs.markAsConstant("weight_decay")
    return optimizer


def train(network: nn.Module, args: argparse.Namespace) -> None:
    """Train, with a rate that rises and falls in lines; print each update's loss."""
    columns = questions(args.samples, args.length, args.vocabulary)
    data = TensorDataset(*(columns[name] for name in COLUMNS + TARGETS))
    options, optimizer = training_options(args), make_optimizer(network, args)
    loader = poptorch.DataLoader(
        options,
        data,
        batch_size=args.micro_batch_size,
        shuffle=not args.in_order,
        drop_last=True,
    )
    total = args.epochs * len(loader)
    warmup = int(args.warmup * total)
    model = poptorch.trainingModel(WithLoss(network).train(), options, optimizer)
    update = 0
    for _ in range(args.epochs):
        for batch in loader:
            rising, falling = (
                update / max(1, warmup),
                (total - update) / (total - warmup),
            )
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(rising if warmup else 1, falling)
            model.setOptimizer(optimizer)
            loss = model(*batch).mean().item() / args.gradient_accumulation
            print(f"update {update}: loss {loss:.7f}")
            update += 1
    model.destroy()


def answer(network: nn.Module, args: argparse.Namespace) -> float:
    """Find the answers of other questions on two IPUs; the last call is padded."""
    columns = questions(args.test_samples, args.length, args.vocabulary)
    options = make_options(args, 2)
    options.deviceIterations(2)
    options.outputMode(poptorch.OutputMode.All)
    options.Precision.enableStochasticRounding(False)
    model = poptorch.inferenceModel(WithLoss(network).eval(), options)
    call, correct = 2 * args.test_micro_batch_size, 0
    for begin in range(0, args.test_samples, call):
        rows = slice(begin, begin + call)
        parts = [columns[name][rows] for name in COLUMNS]
        here = len(parts[0])
        filled = [torch.cat([part, part[:1].expand(call - here, -1)]) for part in parts]
        first, last = (scores[:here].float() for scores in model(*filled))
        spans = first[:, :, None] + last[:, None, :]
        best = (
            spans.masked_fill(torch.ones_like(spans).tril(-1).bool(), -1e4)
            .flatten(1)
            .argmax(1)
        )
        start, end = best // args.length, best % args.length
        correct += (
            (
                (start == columns["start_positions"][rows])
                & (end == columns["end_positions"][rows])
            )
            .sum()
            .item()
        )
    model.destroy()
    return correct / args.test_samples


def parse_arguments() -> argparse.Namespace:
    """The switches that bert_finetuning.py has, too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--network", choices=["transformers", "own", "auto"], default="auto")
    add("--samples", type=int, default=512)
    add("--test-samples", type=int, default=500)
    add("--length", type=int, default=24)
    add("--vocabulary", type=int, default=32)
    add("--hidden-size", type=int, default=32)
    add("--layers-per-ipu", type=int, nargs="+", default=[0, 1, 1, 1])
    add("--dropout", type=float, default=0.1)
    add("--micro-batch-size", type=int, default=4)
    add("--gradient-accumulation", type=int, default=8)
    add("--replicas", type=int, default=1)
    add("--epochs", type=int, default=2)
    add("--lr", type=float, default=3e-3)
    add("--warmup", type=float, default=0.1)
    add("--weight-decay", type=float, default=0.01)
    add("--loss-scaling", type=float, default=64.0)
    add("--memory", type=float, default=0.25)
    add("--offload-optimizer", action="store_true")
    add("--test-micro-batch-size", type=int, default=20)
    add("--in-order", action="store_true")
    add("--seed", type=int, default=1984)
    return parser.parse_args()


def main() -> None:
    """Train on three or more IPUs, and validate the same weights on two."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    layers = sum(args.layers_per_ipu)
    network = answerer(
        args.network,
        args.vocabulary,
        args.length,
        args.hidden_size,
        layers,
        args.dropout,
    ).half()
    handles = begin_blocks(network, args.layers_per_ipu)
    train(network, args)
    for handle in handles:
        handle.remove()
    for module in network.modules():
        if module is not network:
            poptorch.removeBlocks(module)
    for handle in begin_blocks(network, [layers // 2, layers - layers // 2]):
        handle.remove()
    print(f"exact match: {answer(network, args):.2%}")


if __name__ == "__main__":
    main()
