# SPDX-License-Identifier: Apache-2.0
"""When in a run weights were saved, and the figure that they had then."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Mapping

from .json_values import dump_json, load_json

MOMENT_KEY = "ipufit.moment"
AVERAGED_KEY = "ipufit.averaged"
"""Keys of the metadata of a file of weights."""


@dataclass(frozen=True)
class Moment:
    """When in a run weights were saved, and the figure that they had then.

    Args:
        update: Number of weight updates.
        monitor: Name of the figure, such as "val_loss"; None without one.
        value: The figure; None if it wasn't known.
        mode: "min" or "max", whichever of the figure is better; None if unknown.
    """

    update: int
    monitor: str | None = None
    value: float | None = None
    mode: str | None = None

    def plain(self) -> dict[str, Any]:
        """The values as JSON knows them, for `moment_of`."""
        return asdict(self)

    def metadata(self) -> dict[str, str]:
        """The values as metadata of a file of weights, for `moment_in`."""
        return {MOMENT_KEY: dump_json(self.plain(), name="moment").decode("ascii")}


def moment_of(given: Any) -> Moment:
    """Check a moment of a file.

    Args:
        given: Values as of `Moment.plain`; further keys are ignored.

    Raises:
        ValueError: It is none.

    Example:
        >>> moment_of({"update": 20}).update
        20
    """
    if not isinstance(given, dict):
        raise ValueError("its moment is no object")
    update: Any = given.get("update")
    if type(update) is not int or update < 0:
        raise ValueError("its moment lacks a count of updates")
    monitor, value, mode = (given.get(key) for key in ("monitor", "value", "mode"))
    if not isinstance(monitor, (str, type(None))):
        raise ValueError("its moment has a figure without a name")
    if not isinstance(value, (float, type(None))):
        raise ValueError("its moment has a figure that is no float")
    if mode not in ("min", "max", None):
        raise ValueError("its moment has a mode that is neither min nor max")
    return Moment(update, monitor, value, mode)


def moment_in(metadata: Mapping[str, str] | None) -> Moment | None:
    """The moment that the metadata of a file of weights tell, if they do.

    Raises:
        ValueError: They tell one that is none.

    Example:
        >>> moment_in(Moment(20, "val_loss", 0.5, "min").metadata()).value
        0.5
    """
    text = (metadata or {}).get(MOMENT_KEY)
    if text is None:
        return None
    return moment_of(load_json(text.encode("utf-8", "replace")))
