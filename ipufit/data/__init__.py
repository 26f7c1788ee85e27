# SPDX-License-Identifier: Apache-2.0
"""The way from the user's data to the batches of calls."""

from __future__ import annotations

from .adapters import as_batch, as_source
from .cached import CachedDataset
from .calls import Call, Loading
from .columns import column_names
from .epochs import Epochs
from .example import example_of
from .generation import generated_like
from .host_random import (
    HostRandomState,
    RandomState,
    check_random_state,
    random_state,
    set_random_state,
)
from .inference import InferenceBatches
from .kinds import is_stream
from .loader_states import packed, unpacked
from .orders import Position
from .passes import Replay, generators_of
from .rebatching import pad
from .seeds import mixed, seed_all
from .source import IndexedSource, Source, StreamSource
from .structure import NOTHING, Labels, SampleStructure
from .training import TrainingBatches
from .validation import fit_sources, num_trained_on, validation_source

__all__ = [
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
    "RandomState",
    "Replay",
    "SampleStructure",
    "Source",
    "StreamSource",
    "TrainingBatches",
    "as_batch",
    "as_source",
    "check_random_state",
    "column_names",
    "example_of",
    "fit_sources",
    "generated_like",
    "generators_of",
    "is_stream",
    "mixed",
    "num_trained_on",
    "packed",
    "pad",
    "random_state",
    "seed_all",
    "set_random_state",
    "unpacked",
    "validation_source",
]
