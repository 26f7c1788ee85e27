# SPDX-License-Identifier: Apache-2.0
"""Small data for the ports and their originals, without internet access."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.utils.data import TensorDataset

MEAN, STD = 0.3, 0.35  # of the digits, in units of full white
FIRST, LAST = 1, 2  # tokens that an answer begins and ends with
PAD = 0


def digits(size: int) -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's digits as bytes, scaled: images `[N, 1, size, size]`, labels.

    Returns:
        1437 samples to train on and 360 to test with.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] * (255 / 16)
    if size != images.shape[-1]:
        images = F.interpolate(images, size=(size, size), mode="bilinear")
    pixels, labels = images.round().to(torch.uint8), torch.from_numpy(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return (
        TensorDataset(pixels[train], labels[train]),
        TensorDataset(pixels[test], labels[test]),
    )


def questions(count: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    """Texts with an answer to find, of different lengths, padded.

    An answer begins and ends with a token of its own. The question before the text
    may have these tokens, too. Columns are those of SQuAD's features.

    Returns:
        `input_ids`, `attention_mask` and `token_type_ids` `[count, length]`, and
        `start_positions` and `end_positions` `[count]`.
    """
    generator = torch.Generator().manual_seed(count)

    def draw(low: Tensor, high: Tensor) -> Tensor:
        """Whole numbers from `low` to below `high`, one for each sample."""
        share = torch.rand(count, generator=generator)
        return low + (share * (high - low)).long()

    whole = torch.full((count,), length)
    lengths = draw(whole // 2, whole + 1)
    start = draw(whole // 4, lengths - 2)
    end = draw(start + 1, torch.minimum(start + 5, lengths))
    place = torch.arange(length)
    ids = torch.randint(3, vocabulary, (count, length), generator=generator)
    ids[:, : length // 4] = torch.randint(
        1, 4, (count, length // 4), generator=generator
    )
    ids[place == start[:, None]] = FIRST
    ids[place == end[:, None]] = LAST
    mask = (place < lengths[:, None]).long()
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "token_type_ids": (place >= length // 4).long() * mask,
        "start_positions": start,
        "end_positions": end,
    }


def text(count: int, length: int, vocabulary: int) -> Tensor:
    """Sequences `[count, length]` in which each token tells the next but for noise."""
    generator = torch.Generator().manual_seed(count)
    follower = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(vocabulary, (count, length), generator=generator)
    is_noise = torch.rand(count, length, generator=generator) < 0.1
    for place in range(1, length):
        told = follower[tokens[:, place - 1]]
        tokens[:, place] = torch.where(is_noise[:, place], tokens[:, place], told)
    return tokens
