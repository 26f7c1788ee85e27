# SPDX-License-Identifier: Apache-2.0
"""Copies and checks of callbacks' states."""

from __future__ import annotations

import difflib
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from ipufit._kinds import Kind, fields
from ipufit.errors import ConfigError, DamagedCheckpointError


def copied(value: Any) -> Any:
    """Copy a value of a state, with new lists and dicts.

    Args:
        value: Tensors and arrays in it stay the same objects; NumPy's scalars become
            Python's, which JSON can take.

    Example:
        >>> history = {"loss": [np.float32(0.5)]}
        >>> kept = copied(history)
        >>> history["loss"].append(0.25)
        >>> kept
        {'loss': [0.5]}
    """
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def check_keys(who: str, state: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a state whose keys aren't those of the callback.

    Args:
        who: Class of the callback.
        state: State that was saved.
        known: Keys that the state must have, and no others.

    Raises:
        ConfigError: A key is unknown or missing.

    Example:
        >>> check_keys("EarlyStopping", {"wait": 1, "beast": 2}, ("wait", "best"))
        Traceback (most recent call last):
        ipufit.errors.ConfigError: The state of EarlyStopping has beast, which it ...
    """
    known = list(known)
    unknown = sorted(set(state) - set(known))
    missing = [name for name in known if name not in state]
    faults = [f"has {', '.join(unknown)}, which it doesn't know"] if unknown else []
    if missing:
        faults.append(f"lacks {', '.join(missing)}")
    if faults:
        raise ConfigError(
            f"The state of {who} {', and '.join(faults)}. It was saved by another "
            "version of it, or by another callback."
        )


def check_kinds(who: str, state: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Refuse a state with values of other kinds.

    Args:
        who: Class of the callback.
        state: State that was saved.
        kinds: Kinds of values by key; values of other keys may be anything.

    Raises:
        DamagedCheckpointError: A value is of another kind.

    Example:
        >>> from ipufit._kinds import count
        >>> check_kinds("EarlyStopping", {"wait": "1"}, {"wait": count})
        Traceback (most recent call last):
        ipufit.errors.DamagedCheckpointError: The state of EarlyStopping isn't one ...
    """
    known = {name: kind for name, kind in kinds.items() if name in state}
    fault = fields(known)(state, "state")
    if fault is not None:
        raise DamagedCheckpointError(
            f"The state of {who} isn't one that it has saved: {fault}. Use another "
            "checkpoint."
        )


def check_callbacks(saved: Sequence[str], present: Sequence[str]) -> None:
    """Refuse states whose callbacks aren't those of the run.

    Args:
        saved: Keys `"position:name"` of the states.
        present: Such keys of the callbacks of the run.

    Raises:
        ConfigError: A callback was added, removed, or moved to another position.

    Example:
        >>> check_callbacks(["0:EarlyStopping", "1:History"], ["0:History"])
        Traceback (most recent call last):
        ipufit.errors.ConfigError: The state was saved with other callbacks: ...
    """
    before, now = _names(saved), _names(present)
    if before == now:
        return
    missing: list[str] = []
    new: list[str] = []
    changes = difflib.SequenceMatcher(None, before, now, autojunk=False).get_opcodes()
    for change, begin, end, new_begin, new_end in changes:
        if change != "equal":
            missing += [f"{before[i]} (number {i})" for i in range(begin, end)]
            new += [f"{now[i]} (number {i})" for i in range(new_begin, new_end)]
    faults = [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {what}"
        for names, what in ((missing, "missing"), (new, "new"))
        if names
    ]
    raise ConfigError(
        f"The state was saved with other callbacks: {', and '.join(faults)}. Pass the "
        "callbacks of the interrupted run, in its order."
    )


def _names(keys: Sequence[str]) -> list[str]:
    """Return the names in the order of their positions."""
    parts = [key.partition(":") for key in keys]
    wrong = [key for key, (i, _, _) in zip(keys, parts) if not i.isdecimal()]
    if wrong:
        raise ConfigError(
            f"{wrong[0]!r} is no key of a callback's state, such as '0:History'."
        )
    return [name for _, _, name in sorted(parts, key=lambda part: int(part[0]))]
