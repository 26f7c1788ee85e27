# SPDX-License-Identifier: Apache-2.0
"""From the user's data to the batches of calls."""

from __future__ import annotations

from .adapters import as_batch, as_source, fit_sources, split_validation
from .cached import CachedDataset
from .calls import Call, Loading
from .epochs import Epochs
from .host_random import (
    Moment,
    check_random_state,
    random_state,
    set_random_state,
)
from .inference import InferenceBatches
from .layout import NOTHING, Known, Layout
from .orders import BEGINNING, Place
from .passes import Replay
from .rebatching import pad
from .source import IndexedSource, Source, StreamSource
from .training import TrainingBatches
from .values import column_names

__all__ = [
    "BEGINNING",
    "NOTHING",
    "CachedDataset",
    "Call",
    "Epochs",
    "IndexedSource",
    "InferenceBatches",
    "Known",
    "Layout",
    "Loading",
    "Moment",
    "Place",
    "Replay",
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
