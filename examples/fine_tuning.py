# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a network of torchvision: new classes, a new head, frozen layers.

Shows `ipufit.freeze`. torchvision's ResNet learns the digits 0 to 6 from many images.
Then it gets a new last layer, and learns all ten digits from ten images of each, with
all other layers frozen. The same is done with frozen layers that have learnt nothing.

    python examples/fine_tuning.py

It needs torchvision, downloads nothing, and takes a quarter of a minute. The last line
is the accuracy on test images of all ten digits: about 88%; without the first training
it is about 24%.
"""

from __future__ import annotations

import argparse
import sys

import torch
from handwriting import import_torchvision, load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ipufit

KNOWN, FEW = 7, 10  # digits of the first training, images of each in the second


def make_network(num_classes: int) -> nn.Module:
    """Make a ResNet with one block in each of four layers, and random weights."""
    try:
        resnet = import_torchvision().models.resnet
    except ModuleNotFoundError:
        sys.exit("This example needs torchvision: pip install torchvision")
    torch.manual_seed(0)
    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=num_classes)


def prepare(digits: TensorDataset) -> tuple[Tensor, Tensor]:
    """Return images `[N, 3, 20, 20]` without a frame, in three colours, and labels."""
    images, labels = digits.tensors
    return images[..., 4:-4, 4:-4].expand(-1, 3, -1, -1).contiguous(), labels


def pretrain(x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """Train all layers."""
    network = make_network(KNOWN)
    model = ipufit.IPUModel(network, ipufit.IPUConfig(seed=0))
    model.compile("adamw", "cross_entropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=2)
    model.detach()  # gives its IPU back
    return network


def fine_tune(
    network: nn.Module,
    few: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    epochs: int,
) -> list[float]:
    """Train a new last layer alone; returns the test accuracy of each epoch."""
    network.fc = nn.Linear(network.fc.in_features, 10)
    # Batch norms use the statistics that they have: ten images would spoil them.
    print(ipufit.freeze(network, before="fc", statistics=True))
    model = ipufit.IPUModel(network, ipufit.IPUConfig(seed=0))
    model.compile(
        ipufit.Optimizer("adamw", 1e-2), "cross_entropy", metrics=["accuracy"]
    )
    history = model.fit(*few, 50, epochs, validation_data=test, verbose=0)
    return history.history["val_accuracy"]


def plot(curves: dict[str, list[float]], path: str) -> None:
    """Draw the accuracies while the new layer learns."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for name, accuracies in curves.items():
        axes.plot(range(1, 1 + len(accuracies)), accuracies, label=name)
    axes.set(xlabel="epoch of the last layer", ylabel="test accuracy", ylim=(0, 1))
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> float:
    """Pretrain and fine-tune; returns the accuracy on test images of all digits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2560, help="to pretrain on")
    parser.add_argument("--epochs", type=int, default=2, help="of pretraining")
    parser.add_argument("--fine-tune-epochs", type=int, default=10, help="of the rest")
    parser.add_argument("--plot", metavar="PATH", help="draw accuracies into this file")
    args = parser.parse_args(arguments)

    digits = load_digits("digits", folder="")
    (x, y), test = prepare(digits.train), prepare(digits.test)
    each = [(y == digit).nonzero()[:FEW, 0] for digit in range(10)]
    few = x[torch.cat(each)], y[torch.cat(each)]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    many = order[y[order] < KNOWN][: args.images]

    curves = {}
    trained = pretrain(x[many], y[many], args.epochs)
    for name, network in (("random", make_network(KNOWN)), ("pretrained", trained)):
        curves[name] = fine_tune(network, few, test, args.fine_tune_epochs)
        print(f"test accuracy with {name} layers: {curves[name][-1]:.2%}")
    if args.plot:
        plot(curves, args.plot)
    accuracy = curves["pretrained"][-1]
    print(f"test accuracy: {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    main()
