# SPDX-License-Identifier: Apache-2.0
"""`layers_per_ipu`: stages by the number of layers on each IPU.

The stages have names of ipufit's own, so that they are known before the module is.
`ipufit.placement` says which layers begin them.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from ipufit.errors import ConfigError

REST = -1
"""Stands for an even share of the layers that the other numbers leave."""


def check_layers(given: Any, pipeline: Any = None) -> None:
    """Refuse what aren't numbers of layers for each IPU.

    Args:
        given: The value of the field.
        pipeline: The other field that makes stages.

    Raises:
        ConfigError: It is something else, or leaves an IPU without anything; or there
            is a pipeline.

    Example:
        >>> check_layers([4, 0, 4])
        Traceback (most recent call last):
        ipufit.errors.ConfigError: layers_per_ipu=[4, 0, 4] leaves IPU 1 without lay...
    """
    if given is None:
        return
    if pipeline is not None:
        raise ConfigError(
            f"pipeline={pipeline!r} and layers_per_ipu={given!r} are both given, and "
            "each says where stages begin. Give one of them."
        )
    lists = list(layer_lists(given).values())
    if not lists or not all(map(_are_numbers, lists)):
        raise ConfigError(
            f"layers_per_ipu={given!r}: give the number of layers on each IPU, as in "
            "[0, 4, 4, 4], with -1 for the rest; or such numbers by the name of each "
            'list of layers, as in {"encoder.layer": [0, 4, 4, 4]}.'
        )
    if len({len(numbers) for numbers in lists}) > 1:
        raise ConfigError(
            f"layers_per_ipu={given!r}: the lists have numbers for different IPUs. "
            "Give each as many, with 0 where it has no layers."
        )
    check_filled(given, lists)


def check_filled(given: Any, lists: Sequence[Sequence[int]]) -> None:
    """Refuse an IPU in the middle that has no layers.

    The first may have none: it has what comes before them. So may the last, which has
    what comes after them.

    Args:
        given: The user's value, for messages.
        lists: Numbers of layers per IPU, of each list.

    Raises:
        ConfigError: An IPU has nothing to do.
    """
    columns = [any(column) for column in zip(*lists)]
    empty = [ipu for ipu, has_some in enumerate(columns) if not has_some]
    if not any(columns) or not {*empty} <= {0, len(columns) - 1}:
        ipu = next((ipu for ipu in empty if ipu > 0), 0)
        raise ConfigError(
            f"layers_per_ipu={given!r} leaves IPU {ipu} without layers. Only the first "
            "IPU and the last may have none: they have what comes before all layers, "
            "and after them."
        )


def layer_lists(given: Any) -> dict[str | None, Sequence[int]]:
    """Numbers of layers per IPU, by the name of their list.

    Returns:
        None in the place of a name for a list that is to be found.

    Example:
        >>> layer_lists([0, 4])
        {None: [0, 4]}
    """
    return dict(given) if isinstance(given, Mapping) else {None: given}


def layer_stages(given: Any) -> tuple[str, ...]:
    """Names of the stages, one per IPU.

    Example:
        >>> layer_stages([0, 4])
        ('layers on IPU 0', 'layers on IPU 1')
    """
    numbers = next(iter(layer_lists(given).values()))
    return tuple(f"layers on IPU {ipu}" for ipu in range(len(numbers)))


def _are_numbers(numbers: object) -> bool:
    is_listed = isinstance(numbers, (tuple, list)) and bool(numbers)
    return is_listed and all(
        isinstance(one, int) and not isinstance(one, bool) and one >= REST
        for one in numbers  # type: ignore[attr-defined]
    )
