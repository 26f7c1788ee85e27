# SPDX-License-Identifier: Apache-2.0
"""The written form of a checkpoint: strict JSON, safetensors, and the manifest.

`docs/reference/checkpoint-format.md` is its specification.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple

import torch
from safetensors import (  # type: ignore[attr-defined,unused-ignore]
    SafetensorError,
    safe_open,
)
from safetensors.torch import save
from torch import Tensor

from ipufit._kinds import Kind, count, fields, list_of, number, optional, text
from ipufit._version import __version__
from ipufit.errors import CheckpointError, UnsupportedError

MANIFEST = "manifest.json"
STATE = "state.json"
SUFFIX = ".safetensors"
GROUP = re.compile(r"[a-z][a-z0-9_-]{0,63}")
TIED_KEY = "ipufit.tied"
MOMENT_KEY = "ipufit.moment"
MAX_DEPTH = 100  # levels of lists and objects in JSON

_FORMAT, _VERSION = "ipufit-checkpoint", 1
_NO_DIGEST = "0" * 64
_MAX_DIGITS = 20
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_HEXADECIMAL = re.compile(r"-?0x[0-9a-f]+")
_MOMENT = {
    "update": count,
    "monitor": optional(text),
    "value": optional(number),
    "mode": optional(text),
}
_COUNTS = "sequence", "epoch", "update"
_RECORD = {**dict.fromkeys(_COUNTS, count), "metric": optional(number)}
_MANIFEST = {
    "ipufit": text,
    "torch": text,
    "record": optional(fields(_RECORD)),
    "files": list_of(fields({"name": text, "size": count, "sha256": text})),
}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The tensors and the state that a checkpoint holds.

    Args:
        tensors: Groups of tensors by name: "model" becomes `model.safetensors`.
        state: Nested dicts with str keys, lists, str, int, float, bool and None.
        path: Directory that it was read from; None if it wasn't read.
    """

    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


@dataclass(frozen=True)
class SavedAt:
    """When in a run weights were saved, and the figure that they had then.

    Args:
        update: Number of weight updates.
        monitor: Name of the figure, such as "val_loss"; None without one.
        value: The figure; None if it wasn't known.
        mode: "min" or "max", whichever of the figure is better; None if unknown.
        epoch: Number of complete epochs.
        sequence: Number of the checkpoint in its store, in the order of writing; None
            if no store wrote it.
    """

    update: int
    monitor: str | None = None
    value: float | None = None
    mode: str | None = None
    epoch: int = 0
    sequence: int | None = None

    def plain(self) -> dict[str, Any]:
        """The values that a file of weights has, too."""
        return {name: getattr(self, name) for name in _MOMENT}


class Written(NamedTuple):
    """Size and SHA-256 of a file."""

    size: int
    sha256: str


class Manifest(NamedTuple):
    """The contents of a manifest: files of a checkpoint, and when it was saved.

    Attributes:
        files: Size and checksum of each file, by its name.
        moment: When it was saved; None if the manifest doesn't say.
    """

    files: Mapping[str, Written]
    moment: SavedAt | None


def belongs(name: str) -> bool:
    """Return whether a name is allowed for a file of a checkpoint.

    Example:
        >>> belongs("model.safetensors"), belongs("../model.safetensors")
        (True, False)
    """
    stem, suffix = name[: -len(SUFFIX)], name[-len(SUFFIX) :]
    is_group = suffix == SUFFIX and GROUP.fullmatch(stem) is not None
    return is_group or name in (MANIFEST, STATE)


# JSON --------------------------------------------------------------------------------


def dump_json(value: Any, *, name: str = "value", indent: int | None = None) -> bytes:
    r"""Encode nested dicts, lists, strings, numbers, bools and None.

    JSON has no NaN and no infinity, and readers differ on long integers. Those are
    written as objects with one key: `{"$float": "nan"}`, `{"$int": "0x1000..."}`. A
    dict with a key that starts with `$` is wrapped: `{"$dict": {...}}`.

    Args:
        name: Name of the value in error messages.
        indent: Spaces per level, for files that people read.

    Raises:
        UnsupportedError: A value in it is of another type, or nested too deeply.

    Example:
        >>> dump_json({"rate": float("inf"), "wait": 3})
        b'{"rate": {"$float": "inf"}, "wait": 3}\n'
    """
    text = json.dumps(_encoded(value, name, 1), allow_nan=False, indent=indent)
    return text.encode("ascii") + b"\n"


def load_json(data: bytes) -> Any:
    """Decode JSON of `dump_json`, and refuse any that it wouldn't write.

    Raises:
        ValueError: The data isn't strict JSON within the limits; the text says why.

    Example:
        >>> load_json(dump_json([float("nan"), 2**200 + 1]))[1] == 2**200 + 1
        True
    """
    brackets = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
    depths = accumulate(1 if one in b"[{" else -1 for one in brackets)
    if max(depths, default=0) > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    value = json.loads(
        data.decode("utf-8"),
        object_pairs_hook=_object,
        parse_constant=_finite,
        parse_float=_finite,
        parse_int=_short,
    )
    return _decoded(value)


def _encoded(value: Any, where: str, depth: int) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        plain = -(2**63) <= value < 2**64
        return int(value) if plain else {"$int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if not isinstance(value, (dict, list)):
        raise UnsupportedError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which "
            "JSON has no word for: give str, int, float, bool, None, a list or a dict."
        )
    names = list(value) if isinstance(value, dict) else []
    for name in names:
        if not isinstance(name, str):
            raise UnsupportedError(
                f"{where} has a key that is a {type(name).__qualname__}: make it a str."
            )
    is_wrapped = any(name.startswith("$") for name in names)
    depth += 1 + is_wrapped
    if depth > MAX_DEPTH:
        raise UnsupportedError(
            f"{where} is nested more than {MAX_DEPTH - 1} levels deep: flatten it."
        )
    if isinstance(value, list):
        return [_encoded(one, f"{where}[{i}]", depth) for i, one in enumerate(value)]
    items = {n: _encoded(one, f"{where}[{n!r}]", depth) for n, one in value.items()}
    return {"$dict": items} if is_wrapped else items


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decoded(item) for key, item in value.items()}
    held = value[tag]
    if len(value) > 1:
        raise ValueError(f"an object mixes {tag!r} with other keys")
    if tag == "$dict" and isinstance(held, dict):
        return {key: _decoded(item) for key, item in held.items()}
    if tag == "$float" and held in ("nan", "inf", "-inf"):
        return float(held)
    if tag == "$int" and isinstance(held, str) and _HEXADECIMAL.fullmatch(held):
        return int(held, 16)  # linear, and without a limit of digits
    raise ValueError(f"{tag!r} holds {repr(held)[:60]}, which it can't")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"the key {repr(key)[:60]} is there twice")
        value[key] = item
    return value


def _finite(token: str) -> float:
    value = float(token)
    if not math.isfinite(value):
        raise ValueError(f"{token[:60]} is no number, or too large")
    return value


def _short(token: str) -> int:
    if len(token) > _MAX_DIGITS:
        raise ValueError(f"the number {token[:60]} has too many digits")
    return int(token)


# The manifest ------------------------------------------------------------------------


def dump_manifest(files: Mapping[str, Written], moment: SavedAt | None) -> bytes:
    """Encode `manifest.json`.

    It has a checksum of its own: `manifest_sha256` is that of its bytes with 64 zeros
    in the place of the digits.
    """
    content: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "manifest_sha256": _NO_DIGEST,
        "ipufit": __version__,
        "torch": str(torch.__version__),
        "record": None,
    }
    if moment is not None:
        content["moment"] = moment.plain()
        if moment.sequence is not None:
            values = moment.sequence, moment.epoch, moment.update, moment.value
            content["record"] = dict(zip(_RECORD, values))
    content["files"] = [{"name": name, **one._asdict()} for name, one in files.items()]
    data = dump_json(content, indent=1)
    digest = hashlib.sha256(data).hexdigest()
    return data.replace(_NO_DIGEST.encode(), digest.encode(), 1)


def load_manifest(data: bytes) -> Manifest:
    """Decode `manifest.json`, and check it against itself.

    Raises:
        ValueError: It is damaged or malformed; the text says how.
        CheckpointError: A newer version of ipufit wrote it.
    """
    given = load_json(data)
    if not isinstance(given, dict) or given.get("format") != _FORMAT:
        raise ValueError(f"it doesn't name the format {_FORMAT!r}")
    digest = str(given.get("manifest_sha256")).encode("utf-8", "replace")
    zeroed = data.replace(digest, _NO_DIGEST.encode(), 1)
    if hashlib.sha256(zeroed).hexdigest().encode() != digest:
        raise ValueError("its own checksum doesn't fit")
    version: Any = given.get("version")
    if type(version) is not int or version < 1:
        raise ValueError("its version is no positive integer")
    if version > _VERSION:
        raise CheckpointError(
            f"{MANIFEST} is of version {version} of the format, and this ipufit reads "
            f"up to version {_VERSION}: upgrade ipufit (it was written by "
            f"{str(given.get('ipufit'))[:40]!r})."
        )
    given = {"record": None, "moment": None, **given}
    _check(fields(_MANIFEST), given, "it")
    files = {one["name"]: Written(one["size"], one["sha256"]) for one in given["files"]}
    for name in files:
        if not belongs(name) or name == MANIFEST:
            raise ValueError(f"it lists {name[:80]!r}, no name of a file in it")
    if len(files) < len(given["files"]) or STATE not in files:
        raise ValueError(f"it lists a file twice, or no {STATE}")
    record, moment = given["record"], given["moment"]
    if moment is not None:
        moment = moment_of(moment)
    if record is not None:
        monitor, mode = (moment.monitor, moment.mode) if moment else (None, None)
        figures = record["update"], monitor, record["metric"], mode
        moment = SavedAt(*figures, record["epoch"], record["sequence"])
    return Manifest(files, moment)


def moment_of(given: Any) -> SavedAt:
    """Check the plain values of a moment.

    Raises:
        ValueError: A value is missing, or of another kind.

    Example:
        >>> moment_of({"update": 20}).update
        20
    """
    if isinstance(given, dict):
        given = {**dict.fromkeys(_MOMENT), **given}
    _check(fields(_MOMENT), given, "moment")
    if given["mode"] not in ("min", "max", None):
        raise ValueError("moment.mode is neither min nor max")
    return SavedAt(**{name: given[name] for name in _MOMENT})


def _check(kind: Kind, value: Any, name: str) -> None:
    fault = kind(value, name)
    if fault is not None:
        raise ValueError(fault)


# Tensors -----------------------------------------------------------------------------


def dump_tensors(
    tensors: Mapping[str, Tensor], name: str, more: Mapping[str, str] | None = None
) -> list[bytes | memoryview]:
    """Encode tensors as a safetensors file, in parts.

    Tied tensors are written under each of their names, so that plain torch can load
    them with `load_state_dict(load_file(...))`. The metadata say which names are tied.

    Args:
        name: Name of the tensors in error messages.
        more: Entries of the file's metadata, besides the tied names.

    Raises:
        UnsupportedError: A name is no str, or a tensor is sparse, has no values or a
            dtype that safetensors lacks.
    """
    plain: dict[str, Tensor] = {}
    storages = set()
    for key, tensor in tensors.items():
        where = f"{name}[{key!r}]"
        if not isinstance(key, str) or key == "__metadata__":
            raise UnsupportedError(f"{key!r} can't name a tensor of {name}.")
        if not isinstance(tensor, Tensor):
            raise UnsupportedError(f"{where} is a {type(tensor).__name__}, no tensor.")
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            raise UnsupportedError(
                f"{where} is {tensor.layout} on {tensor.device}: only dense tensors "
                "with values can be written. Call `.to_dense()`, or leave it out."
            )
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = tensor.untyped_storage().data_ptr()  # safetensors refuses shared ones
        plain[key] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    try:
        data = memoryview(save(plain))
    except (KeyError, SafetensorError, UnicodeError) as error:
        raise UnsupportedError(
            f"{name} has names or dtypes that safetensors files can't hold ({error}): "
            "convert them."
        ) from error
    metadata = {"format": "pt", **(more or {})}
    tied = tied_names(tensors)
    if tied:
        metadata[TIED_KEY] = json.dumps(tied)
    # The library writes metadata in any order, and 0.4.0 breaks them without tensors.
    begin = 8 + int.from_bytes(data[:8], "little")
    header = {"__metadata__": metadata, **json.loads(bytes(data[8:begin]))}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # so that the values are aligned
    return [len(text).to_bytes(8, "little") + text, data[begin:]]


@contextlib.contextmanager
def open_tensors(descriptor: int) -> Iterator[Any]:
    """Open a safetensors file that is open already, whatever its name is by now.

    Raises:
        ValueError: The file breaks the format.
        CheckpointError: This version of torch lacks a dtype.
    """
    opened: Any = safe_open  # which has no types
    try:
        with opened(f"/dev/fd/{descriptor}", framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    except AttributeError as error:
        raise CheckpointError(
            f"It has a dtype that torch {torch.__version__} lacks ({error}): read it "
            "with a newer torch."
        ) from error


def load_tensors(descriptor: int) -> dict[str, Tensor]:
    """Read an open safetensors file.

    Returns:
        Tensors by name, copied from the file. Tied names share one tensor.

    Raises:
        ValueError: The file breaks the format; the text says how.
        CheckpointError: This version of torch lacks a dtype.
    """
    with open_tensors(descriptor) as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name).clone() for name in sorted(file.keys())}
    tied = load_json(metadata.get(TIED_KEY, "[]").encode("utf-8", "replace"))
    _check(list_of(list_of(text)), tied, TIED_KEY)
    for names in tied:
        for name in names[1:]:
            one, other = tensors.get(names[0]), tensors.get(name)
            if one is None or other is None or not _are_equal(one, other):
                raise ValueError(f"{names[0]!r} and {name!r} are tied, but differ")
            tensors[name] = one
    return tensors


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Compare bytes: NaN equals NaN."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def copied_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors; tensors that share all of their memory share a copy.

    Example:
        >>> weight = torch.zeros(2)
        >>> copies = copied_tensors({"in": weight, "out": weight})
        >>> copies["in"] is copies["out"], copies["in"] is weight
        (True, False)
    """
    first = {name: names[0] for names in tied_names(tensors) for name in names}
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        same = copies.get(first.get(name, name))
        copies[name] = tensor.detach().clone() if same is None else same
    return copies


def tied_names(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Group the names of tensors that share all of their memory."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            memory = (tensor.device, tensor.data_ptr())
            lazy = (tensor.is_conj(), tensor.is_neg())
            form = (tensor.dtype, tensor.shape, tensor.stride(), lazy)
            groups.setdefault((memory, form), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def names_that_differ(
    own: Mapping[str, Tensor], given: Mapping[str, Tensor], *properties: str
) -> list[str]:
    """Names of tensors that only one of two has, or that have other properties.

    Example:
        >>> names_that_differ({"a": torch.ones(2)}, {"a": torch.ones(3)}, "shape")
        ['a']
    """
    return [
        name
        for name in sorted({*own, *given})
        if name not in own
        or name not in given
        or any(getattr(own[name], p) != getattr(given[name], p) for p in properties)
    ]
