# SPDX-License-Identifier: Apache-2.0
"""From users' data to the batches of calls."""

from __future__ import annotations

from .cached import CachedDataset
from .calls import (
    Call,
    Epochs,
    InferenceBatches,
    Loading,
    Position,
    TrainingBatches,
    pad,
)
from .datasets import Source
from .random_state import (
    HostRandomState,
    RandomState,
    check_random_state,
    mixed,
    random_state,
    seed_all,
    set_random_state,
)
from .sources import (
    as_batch,
    as_source,
    example_of,
    fit_sources,
    generated_like,
    is_stream,
    num_trained_on,
    validation_source,
)
from .streams import (
    Replay,
    StreamSource,
    generators_of,
    packed,
    unpacked,
)
from .structure import NOTHING, Labels, SampleStructure, column_names

__all__ = [
    "NOTHING",
    "CachedDataset",
    "Call",
    "Epochs",
    "HostRandomState",
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
