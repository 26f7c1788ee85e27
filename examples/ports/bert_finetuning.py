# SPDX-License-Identifier: Apache-2.0
"""Graphcore's BERT fine-tuning in ipufit: answers as spans, on four IPUs in float16.

Shows what `nlp/bert/pytorch/run_squad.py` of Graphcore's examples does, on texts that
are made up here: layers of BERT on the IPUs that `--layers-per-ipu` says, float16 with
loss scaling, AdamW that spares biases and norms, a rate that rises and falls, and
answers to all questions. BERT is that of transformers where it is installed, with
random weights, and else a small one of our own with the same layers.

    python examples/ports/bert_finetuning.py

Without IPUs it runs on ipufit's emulator, in a minute or so. The last line is the share
of questions of which the whole answer is found: about 99%.
"""

from __future__ import annotations

import argparse
from typing import Any, Sequence

import torch
from networks import answerer
from samples import questions
from torch import Tensor

import ipufit


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The main switches of the public program, under its names."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    kinds = ["transformers", "own", "auto"]
    add("--network", choices=kinds, default="auto", help="whose BERT")
    add("--samples", type=int, default=512, help="questions to train on")
    add("--test-samples", type=int, default=500, help="questions to answer")
    add("--length", type=int, default=24, help="tokens of a text")
    add("--vocabulary", type=int, default=32, help="number of tokens")
    add("--hidden-size", type=int, default=32, help="of a token's state")
    layers = [0, 1, 1, 1]
    add("--layers-per-ipu", type=int, nargs="+", default=layers, help="of BERT")
    add("--dropout", type=float, default=0.1, help="share of states left out")
    add("--micro-batch-size", type=int, default=4, help="texts of a forward pass")
    add("--gradient-accumulation", type=int, default=8, help="of them in an update")
    add("--replicas", type=int, default=1, help="copies of the pipeline")
    add("--epochs", type=int, default=2, help="times to go through the questions")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add(
        "--warmup", type=float, default=0.1, help="share of updates until it is reached"
    )
    add("--weight-decay", type=float, default=0.01, help="of all but biases and norms")
    add("--loss-scaling", type=float, default=64.0, help="of the float16 gradients")
    add("--memory", type=float, default=0.25, help="share for temporary data")
    add("--offload-optimizer", action="store_true", help="keep its state off the chip")
    add("--test-micro-batch-size", type=int, default=20, help="texts of a pass")
    add("--in-order", action="store_true", help="don't shuffle")
    add("--seed", type=int, default=1984, help="of weights and order")
    return parser.parse_args(arguments)


def spans(scores: dict[str, Tensor]) -> Tensor:
    """First and last token of the best answer that doesn't end before it starts."""
    start, end = scores["start_logits"].float(), scores["end_logits"].float()
    both = start[:, :, None] + end[:, None, :]
    ends_early = torch.ones_like(both).tril(-1).bool()
    best = both.masked_fill(ends_early, -1e4).flatten(1).argmax(1)
    length = start.shape[1]
    return torch.stack([torch.div(best, length, rounding_mode="floor"), best % length])


def split(columns: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs by the names of arguments, and targets by those of outputs."""
    inputs = dict(columns)
    targets = {
        "start_logits": inputs.pop("start_positions"),
        "end_logits": inputs.pop("end_positions"),
    }
    return inputs, targets


def main(
    arguments: Sequence[str] | None = None, callbacks: Sequence[Any] = ()
) -> float:
    """Train and answer; returns the share of answers that are found whole."""
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    layers = sum(args.layers_per_ipu)
    network = answerer(
        args.network,
        args.vocabulary,
        args.length,
        args.hidden_size,
        layers,
        args.dropout,
    )
    config = ipufit.IPUConfig(
        micro_batch_size=args.micro_batch_size,
        gradient_accumulation=args.gradient_accumulation,
        replicas=args.replicas,
        layers_per_ipu=args.layers_per_ipu,
        recompute=[f"bert.encoder.layer.{number}" for number in range(layers - 1)],
        precision="16.16",
        partials="half",
        offload_optimizer=args.offload_optimizer,
        shard_optimizer=args.replicas > 1,
        available_memory_proportion=args.memory,
        seed=args.seed,
        inference={"layers_per_ipu": [layers // 2, layers - layers // 2]},
    )
    model = ipufit.IPUModel(network, config)
    model.compile(
        ipufit.Optimizer(
            "adamw",
            args.lr,
            eps=1e-6,
            weight_decay=args.weight_decay,
            no_decay="bias_and_norm",
            loss_scaling=args.loss_scaling,
        ),
        loss="cross_entropy",
        loss_weights={"start_logits": 0.5, "end_logits": 0.5},
        metrics={"start_logits": ["accuracy"], "end_logits": ["accuracy"]},
        lr_schedule=ipufit.Schedule("linear", warmup_fraction=args.warmup),
    )
    model.fit(
        *split(questions(args.samples, args.length, args.vocabulary)),
        epochs=args.epochs,
        shuffle=not args.in_order,
        callbacks=callbacks,
    )
    inputs, targets = split(questions(args.test_samples, args.length, args.vocabulary))
    found = spans(model.predict(inputs, batch_size=args.test_micro_batch_size))
    asked = torch.stack([targets["start_logits"], targets["end_logits"]])
    share = (found == asked).all(0).float().mean().item()
    print(f"exact match: {share:.2%}")
    return share


if __name__ == "__main__":
    main()
