# SPDX-License-Identifier: Apache-2.0
"""The networks that are trained: plain torch, and nothing of ipufit."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ConvLayer(nn.Module):
    """Convolution, pooling, ReLU."""

    def __init__(self, channels: int, filters: int, kernel: int, pool: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, kernel)
        self.pool = nn.MaxPool2d(pool)

    def forward(self, x: Tensor) -> Tensor:
        """Images to images."""
        return self.pool(self.conv(x)).relu()


class TutorialNetwork(nn.Module):
    """That of PopTorch's pipelining tutorial, as in `examples/mnist_pipeline.py`.

    It is written once more so that a plain loop can have it without importing ipufit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = ConvLayer(1, 10, 5, 2)
        self.layer2 = ConvLayer(10, 20, 5, 2)
        self.layer3 = nn.Sequential(nn.Flatten(), nn.Linear(320, 256), nn.ReLU())
        self.layer4 = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[N, 1, 28, 28]` to scores `[N, 10]`."""
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


def mlp(width: int = 32) -> nn.Sequential:
    """16 features to 4 classes: so small that only overhead is left."""
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm beside a shortcut (He et al., 2015)."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(filters)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != filters:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, filters, 1, stride, bias=False),
                nn.BatchNorm2d(filters),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Images to images, of half the size if the stride is 2."""
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()


def resnet18() -> nn.Sequential:
    """ResNet-18 with the stem for 32x32 images: 11.2 million parameters, 10 classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
    ]
    channels = 64
    for filters, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers.append(ResidualBlock(channels, filters, stride))
        layers.append(ResidualBlock(filters, filters, 1))
        channels = filters
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1 with batch norm beside a shortcut."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        wide = 4 * filters
        self.body = nn.Sequential(
            *_normalised(channels, filters, 1),
            nn.ReLU(),
            *_normalised(filters, filters, 3, stride),
            nn.ReLU(),
            *_normalised(filters, wide, 1),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != wide:
            self.shortcut = nn.Sequential(*_normalised(channels, wide, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Images to images, of half the size if the stride is 2."""
        return (self.body(x) + self.shortcut(x)).relu()


def _normalised(
    channels: int, filters: int, kernel: int, stride: int = 1
) -> list[nn.Module]:
    padding = kernel // 2
    conv = nn.Conv2d(channels, filters, kernel, stride, padding, bias=False)
    return [conv, nn.BatchNorm2d(filters)]


def resnet50(classes: int = 10) -> nn.Sequential:
    """ResNet-50 with the stem for large images (He et al., 2015)."""
    layers: list[nn.Module] = [*_normalised(3, 64, 7, 2), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, padding=1))
    channels = 64
    for filters, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(channels, filters, 1 if number else stride))
            channels = 4 * filters
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


class LSTMClassifier(nn.Module):
    """One LSTM layer; the last step's state gives the scores."""

    def __init__(self, features: int = 16, hidden: int = 64, classes: int = 8) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences `[N, T, features]` to scores `[N, classes]`."""
        steps, _ = self.lstm(x)
        return self.head(steps[:, -1])


class TransformerClassifier(nn.Module):
    """Tokens, encoder layers, the mean over positions; no dropout.

    Without dropout each contestant computes the same, so that it can be checked.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        length: int = 32,
        width: int = 64,
        classes: int = 8,
        layers: int = 2,
        heads: int = 4,
        inner: int = 128,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, inner, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens `[N, T]` to scores `[N, classes]`."""
        return self.head(self.encoder(self.tokens(x) + self.positions).mean(dim=1))


def encoder12() -> TransformerClassifier:
    """12 layers of width 256: 9.6 million parameters."""
    return TransformerClassifier(
        256, 32, width=256, classes=8, layers=12, heads=4, inner=1024
    )
