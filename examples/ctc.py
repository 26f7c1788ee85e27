# SPDX-License-Identifier: Apache-2.0
"""Read numbers of unknown length from images, with torch's CTC loss.

Shows a loss of your own whose targets are a dict: the digits of each number, padded
to one length, and how many there are. The network scores each column of an image, and
the loss sums over all ways to place the digits on the columns: nobody says where they
are.
PopTorch takes CTC with a mean or a sum and targets that are padded.

    python examples/ctc.py

It takes a quarter of a minute. The last line is the share of new images, of one to four
digits, that are read without any error: about 90%.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ipufit

WIDTH, LONGEST = 40, 4  # columns of an image, and digits at most
BLANK = 0  # the class of "no digit"; digit d has the class d + 1


class Numbers(NamedTuple):
    """Images `[N, 8, 40]`, what the loss gets of each, and the numbers as text."""

    images: Tensor
    targets: dict[str, Tensor]
    texts: list[str]


def make_reader(channels: int = 64) -> nn.Sequential:
    """Make a network from images [N, 8, 40] to scores of each column [N, 11, 40]."""
    first = nn.Conv1d(8, channels, 5, padding=2), nn.BatchNorm1d(channels)
    second = nn.Conv1d(channels, channels, 5, padding=2), nn.BatchNorm1d(channels)
    last = nn.Conv1d(channels, 11, 3, padding=1)
    return nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), last)


def ctc_loss(scores: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """Compute torch's CTC loss within PopTorch's limits."""
    log_probabilities = scores.permute(2, 0, 1).log_softmax(dim=2)  # [columns, N, 11]
    lengths = targets["lengths"]
    columns = torch.full_like(lengths, scores.shape[2], device=lengths.device)
    return F.ctc_loss(log_probabilities, targets["classes"], columns, lengths, BLANK)


def make_numbers(digits: Tensor, labels: Tensor, count: int) -> Numbers:
    """Put one to four scans of digits, `[8, 8]`, into an image, with random gaps."""
    images, texts = torch.zeros(count, 8, WIDTH), []
    classes = torch.full((count, LONGEST), BLANK + 1)  # padding doesn't count
    lengths = torch.randint(1, LONGEST + 1, (count,))
    for index, length in enumerate(lengths.tolist()):
        chosen = torch.randint(len(digits), (length,))
        classes[index, :length] = labels[chosen] + 1
        texts.append("".join(map(str, labels[chosen].tolist())))
        gaps = torch.rand(length + 1).softmax(dim=0) * (WIDTH - 8 * length)
        for place, digit in enumerate(digits[chosen]):
            left = int(gaps[: place + 1].sum()) + 8 * place
            images[index, :, left : left + 8] = digit
    return Numbers(images, {"classes": classes, "lengths": lengths}, texts)


def read(scores: Tensor) -> list[str]:
    """Return the best class of each column, without repetitions and blanks."""
    best = (torch.unique_consecutive(row).tolist() for row in scores.argmax(dim=1))
    return ["".join(str(c - 1) for c in row if c != BLANK) for row in best]


def plot(numbers: Numbers, readings: list[str], path: str) -> None:
    """Draw the first images, and what was read in them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    grid = figure.subplots(3, 4).flat
    for axes, image, reading in zip(grid, numbers.images, readings):
        axes.imshow(image.numpy(), cmap="gray_r")
        axes.set(title=reading, xticks=[], yticks=[])
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> float:
    """Train and read; returns the share of images that are read without any error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=3200, help="to train on")
    parser.add_argument("--epochs", type=int, default=8, help="of training")
    parser.add_argument("--plot", metavar="PATH", help="draw images into this file")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    scans, labels = load_digits().images / 16, load_digits().target
    digits, labels = torch.from_numpy(scans).float(), torch.from_numpy(labels)
    numbers = make_numbers(digits[:1400], labels[:1400], args.images)
    unseen = make_numbers(digits[1400:], labels[1400:], 400)

    model = ipufit.IPUModel(make_reader(), ipufit.IPUConfig(seed=0))
    model.compile(ipufit.Optimizer("adamw", 3e-3), ctc_loss, lr_schedule="cosine")
    model.fit(numbers.images, numbers.targets, 32, args.epochs, verbose=2)

    readings = read(model.predict(unseen.images, verbose=0))
    for text, reading in list(zip(unseen.texts, readings))[:5]:
        print(f"{text:4} was read as {reading}")
    if args.plot:
        plot(unseen, readings, args.plot)
    share = sum(a == b for a, b in zip(unseen.texts, readings)) / len(readings)
    print(f"read without any error: {share:.1%}")
    return share


if __name__ == "__main__":
    main()
