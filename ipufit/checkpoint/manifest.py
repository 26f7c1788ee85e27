# SPDX-License-Identifier: Apache-2.0
"""The list of a checkpoint's files, with their sizes and checksums.

The manifest has a checksum of its own, too: `manifest_sha256` is that of the manifest's
bytes with 64 zeros in the place of its digits.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass
from typing import Any, Mapping

import torch

from ipufit._version import __version__
from ipufit.errors import CheckpointError

from .atomic import Written
from .directory import MANIFEST, STATE, belongs
from .json_values import dump_json, load_json
from .moment import Moment, moment_of

FORMAT = "ipufit-checkpoint"
VERSION = 1
MAX_BYTES = 2**20

_COUNTS = ("sequence", "epoch", "update")
_NO_DIGEST = "0" * 64
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Record:
    """The numbers by which a store orders its checkpoints.

    Args:
        sequence: Number of the checkpoint in its store, in the order of writing.
        epoch: Number of complete epochs.
        update: Number of weight updates.
        metric: The figure that the best checkpoint is chosen by; None without one.
    """

    sequence: int
    epoch: int
    update: int
    metric: float | None = None


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Args:
        files: Size and SHA-256 by name.
        record: The store's numbers; None if no store wrote the checkpoint.
        ipufit: The version of ipufit that wrote it.
        torch: The version of torch that wrote it.
        moment: When in a run it was saved; None if the writer didn't say.
    """

    files: Mapping[str, Written]
    record: Record | None
    ipufit: str
    torch: str
    moment: Moment | None = None


def dump_manifest(
    files: Mapping[str, Written],
    record: Record | None,
    moment: Moment | None = None,
) -> bytes:
    """Encode a manifest of this version.

    Args:
        files: Size and SHA-256 by name.
        record: The store's numbers; None if no store writes the checkpoint.
        moment: When in a run it is saved, if that is known.

    Returns:
        The bytes of `manifest.json`.
    """
    listed = [{"name": name, **written._asdict()} for name, written in files.items()]
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "manifest_sha256": _NO_DIGEST,
        "ipufit": __version__,
        "torch": str(torch.__version__),
        "record": None if record is None else asdict(record),
    }
    if moment is not None:
        content["moment"] = moment.plain()
    data = dump_json({**content, "files": listed}, indent=1)
    digest = hashlib.sha256(data).hexdigest()
    return data.replace(_NO_DIGEST.encode(), digest.encode(), 1)


def load_manifest(data: bytes) -> Manifest:
    """Decode a manifest and check it against itself.

    Args:
        data: The bytes of `manifest.json`.

    Raises:
        ValueError: The manifest is damaged or malformed; the text says how.
        CheckpointError: A newer version of ipufit wrote it.
    """
    given = load_json(data)
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        raise ValueError(f"it doesn't name the format {FORMAT!r}")
    _check_digest(given, data)
    _check_version(given)
    writer, its_torch = given.get("ipufit"), given.get("torch")
    if not isinstance(writer, str) or not isinstance(its_torch, str):
        raise ValueError("it doesn't say which ipufit and torch wrote it")
    record = None if given.get("record") is None else _record(given["record"])
    moment = None if given.get("moment") is None else moment_of(given["moment"])
    return Manifest(_files(given.get("files")), record, writer, its_torch, moment)


def _check_digest(given: Mapping[str, Any], data: bytes) -> None:
    digest = given.get("manifest_sha256")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError("it has no `manifest_sha256`")
    zeroed = data.replace(digest.encode(), _NO_DIGEST.encode(), 1)
    if hashlib.sha256(zeroed).hexdigest() != digest:
        raise ValueError("its own checksum doesn't fit")


def _check_version(given: Mapping[str, Any]) -> None:
    version: Any = given.get("version")
    if not _is_count(version) or version == 0:
        raise ValueError("its version is no positive integer")
    if version > VERSION:
        raise CheckpointError(
            f"{MANIFEST} is of version {version} of the format, and this ipufit reads "
            f"up to version {VERSION}: upgrade ipufit (it was written by "
            f"{str(given.get('ipufit'))[:40]!r})."
        )


def _record(given: Any) -> Record:
    if not isinstance(given, dict):
        raise ValueError("its record is no object")
    counts: tuple[Any, ...] = tuple(given.get(key) for key in _COUNTS)
    metric: Any = given.get("metric")
    if not all(_is_count(count) for count in counts):
        raise ValueError("its record lacks a count of sequence, epoch or update")
    if metric is not None and type(metric) is not float:
        raise ValueError("its record has a metric that is no float")
    return Record(**dict(zip(_COUNTS, counts)), metric=metric)


def _files(given: Any) -> dict[str, Written]:
    if not isinstance(given, list):
        raise ValueError("it lists no files")
    files = {}
    for entry in given:
        if not isinstance(entry, dict):
            raise ValueError("a file of it is no object")
        name, digest = entry.get("name"), entry.get("sha256")
        size: Any = entry.get("size")
        if not isinstance(name, str) or not belongs(name) or name == MANIFEST:
            raise ValueError(f"it lists {str(name)[:80]!r}, no name of a file in it")
        if name in files:
            raise ValueError(f"it lists {name!r} twice")
        if not _is_count(size):
            raise ValueError(f"it gives no size of {name!r}")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError(f"it gives no SHA-256 of {name!r}")
        files[name] = Written(size, digest)
    if STATE not in files:
        raise ValueError(f"it lists no {STATE}")
    return files


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
