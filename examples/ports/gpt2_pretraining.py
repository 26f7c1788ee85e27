# SPDX-License-Identifier: Apache-2.0
"""Graphcore's GPT-2 pretraining in ipufit: recomputation, sharding, loss scaling.

Shows what `nlp/gpt2/pytorch/train_gpt2.py` of Graphcore's examples does, on text that
is made up here: embedding and scores tied on IPU 0, layers on the IPUs that
`--layers-per-ipu` says, nothing kept of a layer but its output, float16 with loss
scaling, the optimizer's state divided among replicas, and a cosine with warm-up.

    python examples/ports/gpt2_pretraining.py

Without IPUs it runs on ipufit's emulator, in a minute or so. The last line is the share
of the next tokens that are foretold in other text: 90%, the most that is possible.
"""

from __future__ import annotations

import argparse
from typing import Any, Sequence

import torch
from networks import GPT2
from samples import text

import ipufit
from ipufit import poptorch


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The main switches of the public program, under its names."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--samples", type=int, default=2048, help="texts to train on")
    add("--length", type=int, default=16, help="tokens of a text")
    add("--vocabulary", type=int, default=32, help="number of tokens")
    add("--hidden-size", type=int, default=32, help="of a token's state")
    layers = [0, 1, 1, 1]
    add("--layers-per-ipu", type=int, nargs="+", default=layers, help="of GPT-2")
    add("--dropout", type=float, default=0.1, help="share of states left out")
    add("--micro-batch-size", type=int, default=2, help="texts of a forward pass")
    add("--gradient-accumulation", type=int, default=9, help="of them in an update")
    add("--replicas", type=int, default=2, help="copies of the pipeline")
    add("--device-iterations", type=int, default=1, help="updates of a call")
    add("--epochs", type=int, default=2, help="times to go through the texts")
    add("--optimizer", choices=["adamw", "lamb"], default="adamw", help="which one")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--lr-warmup", type=float, default=0.1, help="share of updates until then")
    add("--weight-decay", type=float, default=0.01, help="of all but biases and norms")
    add("--loss-scaling", type=float, default=64.0, help="of the float16 gradients")
    add("--memory", type=float, default=0.2, help="share for temporary data")
    add("--offload-optimizer", action="store_true", help="keep its state off the chip")
    add("--executable-cache-dir", help="where compiled programs are kept")
    add("--checkpoint-output-dir", help="where to save, and to go on from")
    add("--in-order", action="store_true", help="don't shuffle")
    add("--seed", type=int, default=1234, help="of weights and order")
    return parser.parse_args(arguments)


def stages(layers_per_ipu: Sequence[int]) -> list[poptorch.Stage]:
    """Words on IPU 0, each layer where it is asked for, and scores on IPU 0 again."""
    ipus = [ipu for ipu, count in enumerate(layers_per_ipu) for _ in range(count)]
    layers = [poptorch.Stage(f"h.{n}").ipu(ipu) for n, ipu in enumerate(ipus)]
    return [
        poptorch.Stage("wte", "wpe").ipu(0),
        *layers,
        poptorch.Stage("lm_head").ipu(0),
    ]


def main(
    arguments: Sequence[str] | None = None, callbacks: Sequence[Any] = ()
) -> float:
    """Train and test; returns the share of tokens that are foretold."""
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    layers = sum(args.layers_per_ipu)
    network = GPT2(args.vocabulary, args.length, args.hidden_size, layers, args.dropout)
    config = ipufit.IPUConfig(
        micro_batch_size=args.micro_batch_size,
        gradient_accumulation=args.gradient_accumulation,
        replicas=args.replicas,
        device_iterations=args.device_iterations,
        pipeline=stages(args.layers_per_ipu),
        recompute=[f"h.{number}" for number in range(layers)],
        precision="16.16",
        partials="half",
        offload_optimizer=args.offload_optimizer,
        shard_optimizer=args.replicas > 1,
        available_memory_proportion=args.memory,
        cache_dir=args.executable_cache_dir,
        seed=args.seed,
    )
    model = ipufit.IPUModel(network, config)
    model.compile(
        ipufit.Optimizer(
            args.optimizer,
            args.lr,
            eps=1e-6,
            weight_decay=args.weight_decay,
            no_decay="bias_and_norm",
            loss_scaling=args.loss_scaling,
            accum_type=torch.float16,
            first_order_momentum_accum_type=torch.float16,
            second_order_momentum_accum_type=torch.float32,
        ),
        loss="sparse_categorical_crossentropy",
        metrics=["sparse_categorical_accuracy"],
        lr_schedule=ipufit.Schedule("cosine", warmup_fraction=args.lr_warmup),
    )
    if args.checkpoint_output_dir:
        backup = ipufit.BackupAndRestore(args.checkpoint_output_dir)
        callbacks = [*callbacks, backup]
    tokens = text(args.samples, args.length + 1, args.vocabulary)
    model.fit(
        tokens[:, :-1],
        tokens[:, 1:],
        epochs=args.epochs,
        shuffle=not args.in_order,
        callbacks=callbacks,
    )
    tokens = text(args.samples // 4, args.length + 1, args.vocabulary)
    results = model.evaluate(tokens[:, :-1], tokens[:, 1:])
    share = results["sparse_categorical_accuracy"]
    print(f"foretold: {share:.2%}")
    return share


if __name__ == "__main__":
    main()
