# SPDX-License-Identifier: Apache-2.0
"""Graphcore's CNN training in ipufit: two stages, float16, ramped loss scaling.

Shows what `vision/cnns/pytorch/train` of Graphcore's examples does, on scikit-learn's
digits: a residual network cut into two stages by a layer's name, float16 with a loss
scaling that doubles, SGD whose decay spares biases and norms, a cosine with warm-up,
mixup and label smoothing on the device, the average of checkpoints, and fine-tuning of
the last layers on larger images.

    python examples/ports/cnn_training.py

Without IPUs it runs on ipufit's emulator, in a minute or so. The last line is the
accuracy over all test images: about 97%.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any, Sequence

import torch
from networks import Normalized, ResNet
from samples import MEAN, STD, digits

import ipufit


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The main switches of the public program, under its names."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--micro-batch-size", type=int, default=8, help="images of a forward pass")
    add("--gradient-accumulation", type=int, default=4, help="of them in an update")
    add("--replicas", type=int, default=1, help="copies of the pipeline")
    add("--epochs", type=int, default=8, help="of training on small images")
    add("--steps-per-epoch", type=int, default=44, help="weight updates of an epoch")
    add("--lr", type=float, default=0.2, help="learning rate of SGD")
    add("--momentum", type=float, default=0.9, help="of SGD")
    add("--weight-decay", type=float, default=1e-4, help="of all but biases and norms")
    add("--warmup-epochs", type=int, default=1, help="until the rate is reached")
    add("--initial-loss-scaling", type=float, default=16.0, help="of the first epochs")
    add("--loss-scaling", type=float, default=128.0, help="of the last epochs")
    add("--label-smoothing", type=float, default=0.1, help="share of other classes")
    add("--mixup-alpha", type=float, default=0.2, help="of the shares; 0 for none")
    add("--memory", type=float, default=0.3, help="share for temporary data")
    add("--enable-stochastic-rounding", action="store_true", help="of float16")
    kinds = ["mean", "exponential"]
    add("--weight-avg-strategy", choices=kinds, default="mean", help="of checkpoints")
    add("--weight-avg-exp-decay", type=float, default=0.97, help="of exponential")
    add("--weight-avg-n", type=int, default=3, help="checkpoints to average")
    add("--checkpoint-output-dir", help="where to keep a checkpoint of each epoch")
    add("--fine-tune-epochs", type=int, default=2, help="on images of full size")
    add("--fine-tune-lr", type=float, default=0.25, help="at first")
    layer = "network.layer2"
    add("--fine-tune-first-trainable-layer", default=layer, help="frozen before it")
    add("--in-order", action="store_true", help="don't shuffle")
    add("--seed", type=int, default=42, help="of weights and order")
    return parser.parse_args(arguments)


def scaled(args: argparse.Namespace) -> ipufit.LossScaleRamp:
    """A loss scaling that doubles after equal numbers of epochs."""
    doublings = int(math.log2(args.loss_scaling / args.initial_loss_scaling))
    return ipufit.LossScaleRamp(
        args.initial_loss_scaling,
        factor=2,
        every_epochs=max(1, args.epochs // (doublings + 1)),
        maximum=args.loss_scaling,
    )


def main(
    arguments: Sequence[str] | None = None, callbacks: Sequence[Any] = ()
) -> float:
    """Train, average, fine-tune and test; returns the accuracy on the test images."""
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    network = Normalized(ResNet(), MEAN, STD)
    config = ipufit.IPUConfig(
        micro_batch_size=args.micro_batch_size,
        gradient_accumulation=args.gradient_accumulation,
        replicas=args.replicas,
        pipeline=("network.conv1", "network.layer2"),
        precision="16.16",
        stochastic_rounding=args.enable_stochastic_rounding,
        available_memory_proportion=args.memory,
        seed=args.seed,
    )
    decay = {"weight_decay": args.weight_decay, "no_decay": "bias_and_norm"}
    recipe = {
        "loss": "cross_entropy",
        "metrics": ["accuracy"],
        "label_smoothing": args.label_smoothing,
    }
    order = {"steps_per_epoch": args.steps_per_epoch, "shuffle": not args.in_order}

    model = ipufit.IPUModel(network, config)
    model.compile(
        ipufit.Optimizer(
            "sgd",
            args.lr,
            momentum=args.momentum,
            use_combined_accum=True,
            loss_scaling=scaled(args),
            **decay,
        ),
        lr_schedule=ipufit.Schedule("cosine", warmup_epochs=args.warmup_epochs),
        augment=ipufit.Mixing(mixup=args.mixup_alpha) if args.mixup_alpha else None,
        **recipe,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.checkpoint_output_dir or folder, "{epoch}.safetensors")
        saver = ipufit.ModelCheckpoint(path, save_weights_only=True)
        small, _ = digits(8)
        model.fit(small, epochs=args.epochs, callbacks=[saver, *callbacks], **order)
        ema = args.weight_avg_exp_decay
        is_mean = args.weight_avg_strategy == "mean"
        model.set_weights(
            ipufit.average_checkpoints(
                path.parent, last=args.weight_avg_n, ema=None if is_mean else ema
            )
        )
    model.detach()

    network = model.module
    ipufit.freeze(network, before=args.fine_tune_first_trainable_layer, statistics=True)
    halves = {
        "micro_batch_size": args.micro_batch_size // 2,
        "gradient_accumulation": args.gradient_accumulation * 2,
    }
    model = ipufit.IPUModel(network, dataclasses.replace(config, **halves))
    model.compile(
        ipufit.Optimizer(
            "sgd", args.fine_tune_lr, loss_scaling=args.loss_scaling, **decay
        ),
        lr_schedule="cosine",
        **recipe,
    )
    train, test = digits(12)
    model.fit(train, epochs=args.fine_tune_epochs, callbacks=callbacks, **order)
    accuracy = model.evaluate(test)["accuracy"]
    print(f"test accuracy: {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    main()
