# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits for the examples: MNIST, or scikit-learn's where it can't be had.

It is also the one place that imports torchvision, and knows what to do where
torchvision's compiled operators don't fit the installed torch.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch.utils.data import TensorDataset

MEAN, STD = 0.1307, 0.3081  # of MNIST's training images, in units of full white
_SHIFTS = [(dx, dy) for dx in (-2, 0, 2) for dy in (-2, 0, 2)]
_NUM_SHIFTED = 12_000  # three calls of the pipelining example

_operators: list[torch.library.Library] = []  # schemas live as long as their library


class Digits(NamedTuple):
    """Images `[N, 1, 28, 28]`, normalised, with labels `[N]`, and their origin."""

    train: TensorDataset
    test: TensorDataset
    origin: str


def load_digits(name: str, folder: str) -> Digits:
    """Find, or download, the images.

    Args:
        name: "mnist"; "digits", scikit-learn's; or "auto", MNIST if it can be had.
        folder: Where MNIST is, in torchvision's layout, or is to be put.

    Returns:
        The images. The program ends with a message if they can't be had.
    """
    if name == "digits":
        return _scikit_learn_digits()
    try:
        return _mnist(folder)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        if name == "mnist":
            sys.exit(
                f"MNIST can't be had ({reason}). torchvision reads it from {folder!r}, "
                "or downloads it. docs/reference/versions.md says how to install "
                "torchvision beside your torch. Or take scikit-learn's images: --data "
                "digits."
            )
        print(f"MNIST can't be had ({reason}) Using scikit-learn's digits instead.")
        return _scikit_learn_digits()


def _mnist(folder: str) -> Digits:
    torchvision = import_torchvision()
    found = Path(folder, "MNIST", "raw").is_dir()
    parts = []
    for train in (True, False):
        images = torchvision.datasets.MNIST(folder, train=train, download=not found)
        pixels = images.data[:, None].float() / 255
        parts.append(TensorDataset((pixels - MEAN) / STD, images.targets))
    return Digits(parts[0], parts[1], "MNIST")


def _scikit_learn_digits() -> Digits:
    """1797 scans of 8x8, scaled to MNIST's 20x20 in a frame of 28x28.

    Those to train on are shifted by up to two pixels as well, so that an epoch is long
    enough for the examples' calls.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ModuleNotFoundError:
        sys.exit("The digits come with scikit-learn: pip install scikit-learn")
    digits = load()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    images = F.interpolate(images, size=(20, 20), mode="bilinear", align_corners=False)
    images = (F.pad(images, (4, 4, 4, 4)) - MEAN) / STD
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    shifted = [torch.roll(images[train], shift, dims=(2, 3)) for shift in _SHIFTS]
    repeated = labels[train].repeat(len(_SHIFTS))
    return Digits(
        TensorDataset(torch.cat(shifted)[:_NUM_SHIFTED], repeated[:_NUM_SHIFTED]),
        TensorDataset(images[test], labels[test]),
        "scikit-learn's digits",
    )


def import_torchvision() -> ModuleType:
    """Import torchvision, even if its operators were built for another torch.

    Its import registers kernels for two operators and fails where their schemas are
    missing, as they are beside a torch of another build. Datasets, transforms and most
    models are plain Python and need neither, so the schemas are declared here.

    Returns:
        The module.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    if not _operators:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define(
            "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
        _operators.append(library)
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]  # what the failed import left behind
    return importlib.import_module("torchvision")
