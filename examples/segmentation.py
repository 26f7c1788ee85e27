# SPDX-License-Identifier: Apache-2.0
"""Find shapes in images with a U-Net, and score its masks by Dice and IoU.

Shows targets that are masks, a loss of our own (cross-entropy plus Dice), and two
replicas. Images have bright squares and a disc, whose pixels the network marks.

    python examples/segmentation.py

It takes ten seconds. The last line is the intersection over union (IoU) in
unseen images: about 82%, where the best threshold of brightness has 43%.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import ipufit


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    """Make two convolutions that keep the size of images."""
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs)),
        *(nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU()),
    )


class UNet(nn.Module):
    """Convolutions at three sizes, down and up, joined where sizes are equal."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        one, two, four = channels, 2 * channels, 4 * channels
        self.fine, self.coarse = convolutions(1, one), convolutions(one, two)
        self.bottom, self.pool = convolutions(two, four), nn.MaxPool2d(2)
        self.up_coarse = nn.ConvTranspose2d(four, two, 2, stride=2)
        self.join_coarse = convolutions(four, two)
        self.up_fine = nn.ConvTranspose2d(two, one, 2, stride=2)
        self.join_fine = nn.Sequential(convolutions(two, one), nn.Conv2d(one, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return a logit for each pixel [N, 1, 32, 32] of images of that shape."""
        fine = self.fine(images)
        coarse = self.coarse(self.pool(fine))
        x = self.up_coarse(self.bottom(self.pool(coarse)))
        x = self.up_fine(self.join_coarse(torch.cat([coarse, x], dim=1)))
        return self.join_fine(torch.cat([fine, x], dim=1))


def mask_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Return cross-entropy plus 1 - Dice for each image [N]."""
    entropy = binary_cross_entropy_with_logits(logits, masks, reduction="none")
    found, pixels = logits.sigmoid(), (1, 2, 3)
    dice = 2 * (found * masks).sum(pixels) / (found + masks).sum(pixels)
    return entropy.mean(pixels) + 1 - dice


def make_images(count: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Draw images of two squares and a disc, and masks of the discs, [N, 1, 32, 32]."""
    rows, columns = torch.arange(size)[:, None], torch.arange(size)
    images = torch.zeros(count, size, size)
    for shape in ("square", "square", "disc"):  # the last one lies on top
        radius = 4 + 4 * torch.rand(count, 1, 1)
        y, x = radius + (size - 2 * radius) * torch.rand(2, count, 1, 1)
        y, x = (rows - y).abs() / radius, (columns - x).abs() / radius
        is_inside = (x**2 + y**2 if shape == "disc" else 1.2 * torch.maximum(x, y)) < 1
        images = torch.where(is_inside, 0.5 + 0.5 * torch.rand(count, 1, 1), images)
    noise = 0.15 * torch.randn(count, 1, size, size)
    return images[:, None] + noise, is_inside[:, None].float()


def iou(found: Tensor, masks: Tensor) -> float:
    """Return the intersection over union of pixels that were found, and of masks."""
    is_true = masks > 0.5
    return ((found & is_true).sum() / (found | is_true).sum()).item()


def plot(images: Tensor, masks: Tensor, logits: Tensor, path: str) -> None:
    """Draw the first images, with true outlines in white and those found in red."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.5), layout="constrained")
    for axes, image, mask, found in zip(figure.subplots(1, 6), images, masks, logits):
        axes.imshow(image[0].numpy(), cmap="gray", vmin=-0.3, vmax=1.5)
        axes.contour(mask[0].numpy(), [0.5], colors="white", linewidths=3)
        axes.contour(found[0].numpy(), [0.0], colors="red", linewidths=1)
        axes.set_axis_off()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> float:
    """Train and segment; returns the IoU of images that weren't trained on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8, help="of training")
    parser.add_argument("--plot", metavar="PATH", help="draw masks into this file")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    (x, y), (test_x, test_y) = make_images(960), make_images(400)
    model = ipufit.IPUModel(UNet(), ipufit.IPUConfig(replicas=2, seed=0))
    adamw = ipufit.Optimizer("adamw", 5e-3)
    model.compile(adamw, mask_loss, metrics=["dice", "iou"], lr_schedule="cosine")
    model.fit(x, y, batch_size=32, epochs=args.epochs)

    results = model.evaluate(test_x, test_y, verbose=0)
    level = max((i / 20 for i in range(20)), key=lambda level: iou(x > level, y))
    print(f"test IoU of the best threshold: {iou(test_x > level, test_y):.2%}")
    if args.plot:
        plot(test_x, test_y, model.predict(test_x, verbose=0), args.plot)
    print(f"test IoU of the U-Net: {results['iou']:.2%}")
    return results["iou"]


if __name__ == "__main__":
    main()
