# SPDX-License-Identifier: Apache-2.0
"""Names for types that several modules use."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, Union

from torch import Tensor

Batch = List[Tensor]
"""The tensors of one call, inputs first, then targets; dim 0 counts rows."""

Logs = Dict[str, float]
"""Loss and metrics by name, as callbacks get them and History keeps them."""

LossFunction = Callable[[Any, Any], Tensor]
"""`loss(outputs, targets)`."""

PathLike = Union[str, "os.PathLike[str]"]
"""Where something is in the file system."""

Verbose = Union[int, str]
"""0 silent, 1 bars, 2 lines, or `"auto"`."""
