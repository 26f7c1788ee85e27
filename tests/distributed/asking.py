# SPDX-License-Identifier: Apache-2.0
"""A dataset that asks which process it is in, importable by spawned processes."""

from __future__ import annotations

from torch.utils.data import IterableDataset

from ipufit.distributed import get_process_info


class Answers(IterableDataset):
    """Gives what it hears."""

    def __iter__(self):
        info = get_process_info()
        yield info.index, info.count
