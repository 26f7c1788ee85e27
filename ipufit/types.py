# SPDX-License-Identifier: Apache-2.0
"""Names for types that several modules use."""

from __future__ import annotations

import html
import os
from typing import Any, Callable, Dict, Union

from torch import Tensor

Logs = Dict[str, float]
"""Loss and metrics by name, as callbacks get them and History keeps them."""

LossFunction = Callable[[Any, Any], Tensor]
"""`loss(outputs, targets)`."""

PathLike = Union[str, "os.PathLike[str]"]
"""Where something is in the file system."""

Verbose = Union[int, str]
"""0 silent, 1 or `"auto"` bars and a line per epoch, 2 Keras's lines."""


class ShownAsText:
    """A result that a prompt and a notebook show as its text, not as a dataclass.

    Example:
        >>> class Found(ShownAsText):
        ...     def __str__(self):
        ...         return "1 < 2"
        >>> Found()
        1 < 2
        >>> Found()._repr_html_()
        '<pre style="font-family: monospace; white-space: pre">1 &lt; 2</pre>'
    """

    def __repr__(self) -> str:
        """Return the text, as `print` shows it."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return the text for a notebook, with its columns in line."""
        text = html.escape(str(self), quote=False)
        return f'<pre style="font-family: monospace; white-space: pre">{text}</pre>'
