# SPDX-License-Identifier: Apache-2.0
"""Attributes of one object that are others for a while."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes, while the context is open.

    Other objects of its class are as before. Frozen ones can be given some too.

    Args:
        owner: The object; it must have a `__dict__`.
        **values: Attributes by name; they hide methods of these names.

    Example:
        >>> from types import SimpleNamespace
        >>> owner = SimpleNamespace(size=1)
        >>> with replaced(owner, size=2, width=3):
        ...     print(owner)
        namespace(size=2, width=3)
        >>> owner
        namespace(size=1)
    """
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)
