# SPDX-License-Identifier: Apache-2.0
"""From the user's data to the batches of calls."""

from __future__ import annotations

from .adapters import as_batch, as_source, fit_sources, split_validation
from .cached import CachedDataset
from .calls import Call, Loading
from .epochs import Epochs
from .host_random import (
    HostRandomState,
    check_random_state,
    random_state,
    set_random_state,
)
from .inference import InferenceBatches
from .orders import BEGINNING, Position
from .passes import Replay
from .rebatching import pad
from .source import IndexedSource, Source, StreamSource
from .structure import NOTHING, Labels, SampleStructure
from .training import TrainingBatches
from .values import column_names

__all__ = [
    "BEGINNING",
    "NOTHING",
    "CachedDataset",
    "Call",
    "Epochs",
    "HostRandomState",
    "IndexedSource",
    "InferenceBatches",
    "Labels",
    "Loading",
    "Position",
    "Replay",
    "SampleStructure",
    "Source",
    "StreamSource",
    "TrainingBatches",
    "as_batch",
    "as_source",
    "check_random_state",
    "column_names",
    "fit_sources",
    "pad",
    "random_state",
    "set_random_state",
    "split_validation",
]
