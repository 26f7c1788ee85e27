# SPDX-License-Identifier: Apache-2.0
"""Facts about a run that its profile names."""

from __future__ import annotations

from typing import Any

import torch

from ipufit._poptorch import poptorch
from ipufit._version import __version__


def facts_of(model: Any) -> dict[str, str]:
    """The module of a model, and the versions that run it.

    Args:
        model: An `IPUModel`.

    Example:
        >>> from types import SimpleNamespace
        >>> facts_of(SimpleNamespace(module=torch.nn.Linear(1, 1)))["module"]
        'Linear'
    """
    return {
        "module": type(model.module).__name__,
        "ipufit": __version__,
        "PopTorch": f"{poptorch.__version__} ({poptorch.__name__})",
        "torch": str(torch.__version__),
        "threads of torch": str(torch.get_num_threads()),
    }
