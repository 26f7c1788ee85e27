# SPDX-License-Identifier: Apache-2.0
"""Read and write checkpoints: directories that exist whole or not at all.

A checkpoint has strict JSON, safetensors, and a manifest with the checksums of both:
`docs/reference/checkpoint-format.md` is the specification.

A checkpoint is written beside its target, synced, and renamed. A process that is killed
in between leaves a hidden path, `.NAME.XXXXXXXX.KIND` with eight hexadecimal digits,
which the next write of the same name removes. Directories are opened once, and files in
them are accessed through their descriptors (`ipufit._files`).

A directory can't be renamed over another. So an old checkpoint is renamed to a hidden
path beside it (`.NAME.XXXXXXXX.old`) before the new checkpoint takes its name. A
reader that finds nothing under the name looks for the hidden path.

No function deletes a whole tree: only the files that a checkpoint may have are
deleted, and a directory that holds anything else is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    IO,
    Any,
    Callable,
    Iterable,
    Mapping,
    NamedTuple,
    Sequence,
    Tuple,
)

import torch
from safetensors import SafetensorError  # type: ignore[attr-defined,unused-ignore]
from safetensors.torch import save
from torch import Tensor

from ipufit._files import (
    Written,
    as_path,
    delete_leftovers,
    draft,
    hidden_name,
    hidden_names,
    make_folder,
    open_folder,
    open_regular,
    put,
    remove,
    write_parts,
)
from ipufit._kinds import (
    Kind,
    are_numbers,
    count,
    dict_of,
    fields,
    list_of,
    number,
    optional,
    text,
)
from ipufit._version import __version__
from ipufit.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    MissingCheckpointError,
    UnsupportedError,
)
from ipufit.types import PathLike

MANIFEST = "manifest.json"
STATE = "state.json"
SUFFIX = ".safetensors"
TORCH_SUFFIXES = (".pt", ".pth", ".bin")
GROUP = re.compile(r"[a-z][a-z0-9_-]{0,63}")
TIED_KEY = "ipufit.tied"
MOMENT_KEY = "ipufit.moment"
_DIGEST_KEY = "ipufit.sha256"
_DIGEST = re.compile(rb'"ipufit\.sha256":"([^"]{64})"')
MAX_DEPTH = 100  # levels of lists and objects in JSON

_SUFFIXES_OF_FILES = {
    *(SUFFIX, *TORCH_SUFFIXES, ".ckpt", ".h5", ".hdf5", ".json", ".keras", ".npz"),
    *(".onnx", ".pickle", ".pkl", ".zip"),
}
_FORMAT, _VERSION = "ipufit-checkpoint", 1
_NO_DIGEST = "0" * 64
_MAX_DIGITS = 20
_HEXADECIMAL = re.compile(r"-?0x[0-9a-f]+")
_MOMENT = {
    "update": count,
    "monitor": optional(text),
    "value": optional(number),
    "mode": optional(text),
}
_TENSOR = {"dtype": text, "shape": list_of(count), "data_offsets": list_of(count)}
_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz"},
    **{"F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64"},
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
        path: Directory that the checkpoint was read from; None if it wasn't read.
    """

    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def copied(self) -> Checkpoint:
        """Return a checkpoint with copies of the tensors."""
        tensors = {name: copied_tensors(group) for name, group in self.tensors.items()}
        return Checkpoint(tensors, self.state, self.path)


@dataclass(frozen=True)
class SavedAt:
    """Update, epoch and metric at which weights were saved.

    Args:
        update: Number of weight updates.
        monitor: Name of the metric, such as "val_loss"; None without a metric.
        value: Value of the metric; None if it was unknown.
        mode: Whether "min" or "max" of the metric is better; None if unknown.
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
        """Return the values as plain types, as a file of weights contains them."""
        return {name: getattr(self, name) for name in _MOMENT}

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: in order of writing to a store; others come first."""
        return self.sequence or 0, self.update


def best_saved(saved: Sequence[Saved], mode: str | None, count: int) -> list[Saved]:
    """Choose the checkpoints with the best metric, the oldest of equals first.

    Args:
        saved: Paths and moments of checkpoints, oldest first. Those without a metric,
            or with NaN, are left out.
        mode: Whether "min" or "max" of the metric is better; None to return all that
            have a metric, unsorted.
        count: Number of checkpoints to choose.
    """
    rated = [
        (path, moment)
        for path, moment in saved
        if moment.value is not None and not math.isnan(moment.value)
    ]
    if mode is None:
        return rated
    is_max = mode == "max"
    return sorted(rated, key=lambda item: item[1].value or 0.0, reverse=is_max)[:count]


Saved = Tuple[Path, SavedAt]
"""Path of a checkpoint, or of a file of weights, and when it was saved."""


class Manifest(NamedTuple):
    """Lists the files of a checkpoint, and says when it was saved.

    Attributes:
        files: Size and checksum of each file, by its name.
        moment: Update, epoch and metric; None if the manifest has none.
    """

    files: Mapping[str, Written]
    moment: SavedAt | None


def belongs(name: str) -> bool:
    """Return whether a checkpoint may have a file of this name.

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

    JSON has no NaN and no infinity, and readers differ on long integers. Such values
    are written as objects with one key: `{"$float": "nan"}`, `{"$int": "0x1000..."}`. A
    dict with a key that starts with `$` is wrapped: `{"$dict": {...}}`.

    Args:
        name: Name of the value in error messages.
        indent: Spaces per level, for files that people read.

    Raises:
        UnsupportedError: A value is of another type, or nested too deeply.

    Example:
        >>> dump_json({"rate": float("inf"), "wait": 3})
        b'{"rate": {"$float": "inf"}, "wait": 3}\n'
    """
    text = json.dumps(_encoded(value, name, 1), allow_nan=False, indent=indent)
    return text.encode("ascii") + b"\n"


def load_json(data: bytes) -> Any:
    """Decode JSON that `dump_json` wrote, and refuse any other.

    Raises:
        ValueError: The data isn't strict JSON within the limits; the text says why.

    Example:
        >>> load_json(dump_json([float("nan"), 2**200 + 1]))[1] == 2**200 + 1
        True
    """
    return _decoded(_parsed(data), MAX_DEPTH)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_finite,
            parse_float=_finite,
            parse_int=_short,
        )
    except RecursionError:
        raise _too_deep() from None


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
            "JSON can't hold: use str, int, float, bool, None, a list or a dict."
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
        if are_numbers(value) and all(abs(item) < 2**63 for item in value):
            return value
        return [_encoded(item, f"{where}[{i}]", depth) for i, item in enumerate(value)]
    items = {n: _encoded(item, f"{where}[{n!r}]", depth) for n, item in value.items()}
    return {"$dict": items} if is_wrapped else items


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _decoded(value: Any, depth: int) -> Any:
    if not isinstance(value, (dict, list)):
        return value
    if not depth:
        raise _too_deep()
    if isinstance(value, list):
        return [_decoded(item, depth - 1) for item in value]
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decoded(item, depth - 1) for key, item in value.items()}
    held = value[tag]
    if len(value) > 1:
        raise ValueError(f"an object mixes {tag!r} with other keys")
    if tag == "$dict" and isinstance(held, dict) and depth > 1:
        return {key: _decoded(item, depth - 2) for key, item in held.items()}
    if tag == "$float" and held in ("nan", "inf", "-inf"):
        return float(held)
    if tag == "$int" and isinstance(held, str) and _HEXADECIMAL.fullmatch(held):
        return int(held, 16)  # linear, and without a limit of digits
    raise ValueError(f"{tag!r} has the invalid value {repr(held)[:60]}")


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

    The checksum `manifest_sha256` is taken over the file with 64 zeros in place of the
    checksum's digits.
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
    content["files"] = [
        {"name": n, **written._asdict()} for n, written in files.items()
    ]
    data = dump_json(content, indent=1)
    digest = hashlib.sha256(data).hexdigest()
    return data.replace(_NO_DIGEST.encode(), digest.encode(), 1)


def load_manifest(data: bytes) -> Manifest:
    """Decode `manifest.json`, and check its checksum and its values.

    Raises:
        ValueError: The manifest is damaged or malformed; the text says how.
        CheckpointError: A newer version of ipufit wrote the manifest.
    """
    content = load_json(data)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"it doesn't name the format {_FORMAT!r}")
    digest = str(content.get("manifest_sha256")).encode("utf-8", "replace")
    zeroed = data.replace(digest, _NO_DIGEST.encode(), 1)
    if hashlib.sha256(zeroed).hexdigest().encode() != digest:
        raise ValueError("its own checksum doesn't fit")
    version: Any = content.get("version")
    if type(version) is not int or version < 1:
        raise ValueError("its version must be a positive integer")
    if version > _VERSION:
        raise CheckpointError(
            f"{MANIFEST} is of version {version} of the format, and this ipufit reads "
            f"up to version {_VERSION}: upgrade ipufit (it was written by "
            f"{str(content.get('ipufit'))[:40]!r})."
        )
    content = {"record": None, "moment": None, **content}
    _check(fields(_MANIFEST), content, "it")
    files = {
        entry["name"]: Written(entry["size"], entry["sha256"])
        for entry in content["files"]
    }
    for name in files:
        if not belongs(name) or name == MANIFEST:
            raise ValueError(f"it lists {name[:80]!r}, no name of a file in it")
    if len(files) < len(content["files"]) or STATE not in files:
        raise ValueError(f"it lists a file twice, or no {STATE}")
    record, moment = content["record"], content["moment"]
    if moment is not None:
        moment = moment_of(moment)
    if record is not None:
        monitor, mode = (moment.monitor, moment.mode) if moment else (None, None)
        figures = record["update"], monitor, record["metric"], mode
        moment = SavedAt(*figures, record["epoch"], record["sequence"])
    return Manifest(files, moment)


def moment_of(values: Any) -> SavedAt:
    """Check the plain values of a `SavedAt`, and create it.

    Raises:
        ValueError: A value is missing, or of another kind.

    Example:
        >>> moment_of({"update": 20}).update
        20
    """
    if isinstance(values, dict):
        values = {**dict.fromkeys(_MOMENT), **values}
    _check(fields(_MOMENT), values, "moment")
    if values["mode"] not in ("min", "max", None):
        raise ValueError("moment.mode is neither min nor max")
    return SavedAt(**{name: values[name] for name in _MOMENT})


def _check(kind: Kind, value: Any, name: str) -> None:
    fault = kind(value, name)
    if fault is not None:
        raise ValueError(fault)


# Tensors -----------------------------------------------------------------------------


def dump_tensors(
    tensors: Mapping[str, Tensor], name: str, more: Mapping[str, str] | None = None
) -> list[bytes | memoryview]:
    """Encode tensors as the parts of a safetensors file, without copying values.

    Tied tensors are written under each of their names, so that plain torch can load
    the file with `load_state_dict(load_file(...))`. The metadata say which names are
    tied.

    Args:
        name: Name of the tensors in error messages.
        more: Further metadata, for a file outside of checkpoints, which also gets a
            checksum; None for a file of a checkpoint, whose manifest has the checksum.

    Raises:
        UnsupportedError: A name isn't a str, or a tensor is sparse, has no values, or
            has a dtype that safetensors lacks.
    """
    plain: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        where = f"{name}[{key!r}]"
        if not isinstance(key, str) or key == "__metadata__":
            raise UnsupportedError(f"{key!r} can't name a tensor of {name}.")
        if not isinstance(tensor, Tensor):
            raise UnsupportedError(
                f"{where} is a {type(tensor).__name__}, not a tensor."
            )
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            raise UnsupportedError(
                f"{where} is {tensor.layout} on {tensor.device}: only dense tensors "
                "with values can be written. Call `.to_dense()`, or leave it out."
            )
        plain[key] = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    try:
        # The library copies values several times. So it gets empty tensors, for the
        # names of dtypes and the order.
        empty = save({key: tensor.new_empty(0) for key, tensor in plain.items()})
    except (KeyError, SafetensorError, UnicodeError) as error:
        raise UnsupportedError(
            f"{name} has names or dtypes that safetensors files can't hold ({error}): "
            "convert them."
        ) from error
    entries = json.loads(empty[8 : 8 + int.from_bytes(empty[:8], "little")])
    values: list[bytes | memoryview] = []
    end = 0
    for key, entry in entries.items():
        values.append(plain[key].reshape(-1).view(torch.uint8).numpy().data)
        begin, end = end, end + len(values[-1])
        entry.update(shape=list(plain[key].shape), data_offsets=[begin, end])
    metadata = {"format": "pt", **(more or {})}
    if more is not None:
        metadata[_DIGEST_KEY] = _NO_DIGEST
    tied = tied_names(tensors)
    if tied:
        metadata[TIED_KEY] = json.dumps(tied)
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":"))
    text += " " * (-len(text) % 8)  # so that the values are aligned
    begun = len(text).to_bytes(8, "little") + text.encode("ascii")
    if more is not None:
        digest = hashlib.sha256(begun)
        for value in values:
            digest.update(value)
        begun = begun.replace(_NO_DIGEST.encode(), digest.hexdigest().encode(), 1)
    return [begun, *values]


class TensorHeader(NamedTuple):
    """Header of a safetensors file.

    Attributes:
        data: The bytes before the values.
        metadata: Texts by name.
        tensors: Dtype, shape and bytes of each tensor by name, in the order of values.
    """

    data: bytes
    metadata: Mapping[str, str]
    tensors: Mapping[str, tuple[torch.dtype, list[int], int]]


def read_header(file: IO[bytes]) -> TensorHeader:
    """Read the header of a safetensors file, and check that it describes all bytes.

    The values aren't read, so this takes the same time for any size of file.

    Raises:
        ValueError: The file breaks the format; the text says how.
        CheckpointError: This version of torch lacks a dtype.
    """
    size = os.fstat(file.fileno()).st_size
    data = file.read(8)
    length = int.from_bytes(data, "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError("its header has an invalid length")
    data += file.read(length)
    header = _parsed(data[8:])
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else {}
    _check(dict_of(text), metadata, "__metadata__")
    _check(dict_of(fields(_TENSOR)), header, "its header")
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _dtype(entry["dtype"]), entry["shape"]
        num_bytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        begin, end = end, end + num_bytes
        if [*entry["data_offsets"]] != [begin, end]:
            raise ValueError(f"{name[:80]!r} doesn't begin at {begin} or end at {end}")
        tensors[name] = dtype, shape, num_bytes
    if len(data) + end != size:
        raise ValueError(f"it has {size} bytes, and its header describes others")
    return TensorHeader(data, metadata, tensors)


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"its header has the dtype {name[:80]!r}")
    dtype: torch.dtype | None = getattr(torch, _DTYPES[name], None)
    if dtype is None:
        raise CheckpointError(
            f"It has the dtype {name}, which torch {torch.__version__} lacks: read it "
            "with a newer torch."
        )
    return dtype


def load_tensors(
    file: IO[bytes], header: TensorHeader, sha256: str | None = None
) -> dict[str, Tensor]:
    """Read the values of a safetensors file, after its header.

    The checksum is computed from the bytes that are returned, so a change of the file
    during the call is found. The file isn't memory-mapped, because a mapped file that
    shrinks kills the process.

    Args:
        sha256: SHA-256 of the file; None to use the SHA-256 in the header, if it is
            there.

    Returns:
        Tensors by name. Tied names share one tensor.

    Raises:
        ValueError: The file is damaged; the text says how.
        CheckpointError: A tensor doesn't fit into memory.
    """
    data = header.data
    digits = _DIGEST.search(data)
    if sha256 is None and digits is not None:
        sha256 = digits[1].decode("utf-8", "replace")
        data = data.replace(digits[1], _NO_DIGEST.encode(), 1)
    digest = hashlib.sha256(data)
    tensors = {}
    for name, (dtype, shape, size) in header.tensors.items():
        try:
            values = torch.empty(size, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"There is no memory for {name[:80]!r}, a tensor of {size} bytes."
            ) from error
        memory = values.numpy().data
        if file.readinto(memory) < size:  # type: ignore[attr-defined]
            raise ValueError("it was cut while it was read")
        digest.update(memory)
        if dtype == torch.bool:
            values = values.ne(0)
        try:
            tensors[name] = values.view(dtype).reshape(shape)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"{name[:80]!r} has an invalid shape") from error
    if sha256 not in (None, digest.hexdigest()):
        raise ValueError("its checksum doesn't fit")
    groups = load_json(header.metadata.get(TIED_KEY, "[]").encode("utf-8", "replace"))
    _check(list_of(list_of(text)), groups, TIED_KEY)
    for names in groups:
        for name in names[1:]:
            first, tied = tensors.get(names[0]), tensors.get(name)
            if first is None or tied is None or not are_equal(first, tied):
                raise ValueError(f"{names[0]!r} and {name!r} are tied, but differ")
            tensors[name] = first
    return {name: tensors[name] for name in sorted(tensors)}


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Compare two tensors byte by byte: NaN equals NaN."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def copied_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors; tensors that share all of their memory share the copy.

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
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], *properties: str
) -> list[str]:
    """List names of tensors that only one side has, or whose properties differ.

    Example:
        >>> names_that_differ({"a": torch.ones(2)}, {"a": torch.ones(3)}, "shape")
        ['a']
    """

    def form(tensor: Tensor | None) -> Any:
        return tensor is None or [getattr(tensor, name) for name in properties]

    return [n for n in sorted({*a, *b}) if form(a.get(n)) != form(b.get(n))]


def differences(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    *properties: str,
    of: tuple[str, str] = ("the module", "the file"),
) -> str:
    """Describe the first tensors of `names_that_differ`; "" if there are none.

    Example:
        >>> differences({"a": torch.ones(2)}, {"a": torch.ones(3)}, "shape")
        'a is [2] in the module and [3] in the file'
        >>> differences({}, {"a": torch.ones(3)}, "shape")
        'a is not in the module and [3] in the file'
    """

    def form(tensor: Tensor | None, place: str) -> str:
        if tensor is None:
            return f"not in {place}"
        values = (getattr(tensor, name) for name in properties)
        shown = (str(list(v) if isinstance(v, tuple) else v) for v in values)
        return f"{' '.join(shown)} in {place}"

    names = names_that_differ(a, b, *properties)
    first = [
        f"{name} is {form(a.get(name), of[0])} and {form(b.get(name), of[1])}"
        for name in names[:6]
    ]
    return "; ".join(first) + (f"; ... {len(names)} in all" if names[6:] else "")


MAX_READS = 100  # how often to read again if a writer replaced the checkpoint
MAX_STATE_BYTES = 64 * 2**20
_MAX_HEADER_BYTES = 100_000_000  # of safetensors
_MAX_MANIFEST_BYTES = 2**20
_NUM_LOOKS = 3  # how often to look: a writer may rename between two looks

# Errors of a file that is missing, not a regular file, or on a broken disk.
_ABSENCES = {errno.ENOENT, errno.ENOTDIR}
_DAMAGES = {*_ABSENCES, errno.EISDIR, errno.ELOOP, errno.ENXIO}
_DAMAGES |= {errno.EIO}


# Files and paths ---------------------------------------------------------------------


def what_loads(path: Path) -> str:
    """Describe what is at a path that can't be loaded, and say how to load it.

    Returns:
        One or two sentences; empty if nothing in a directory can be loaded.
    """
    shown = repr(str(path))
    if (path / MANIFEST).exists():
        return (
            f"{shown} is a checkpoint, a directory: model.load({shown}) loads it, and "
            f"model.load_weights({str(path / f'model{SUFFIX}')!r}) its weights alone."
        )
    if path.is_dir():
        inside = [p for p in path.iterdir() if (p / MANIFEST).exists()]
        inside += path.glob(f"*{SUFFIX}")
        if not inside:
            return ""
        return f"{shown} is a directory: name what is in it, {str(max(inside))!r}."
    if path.suffix in (SUFFIX, *TORCH_SUFFIXES):
        return f"{shown} is a file of weights: model.load_weights({shown}) loads it."
    return (
        f"{shown} is a file of a kind that ipufit doesn't read. If torch or Lightning "
        f"wrote it: model.set_weights(torch.load({shown}, weights_only=True)"
        "['state_dict']), without ['state_dict'] if it holds the weights alone."
    )


def refuse_name_of_file(path: PathLike) -> None:
    """Refuse the path of a file for a checkpoint, which is a directory.

    Raises:
        ConfigError: The path is a file, or has the suffix of a file.
    """
    target = as_path(path)
    if target.suffix.lower() in _SUFFIXES_OF_FILES or os.path.isfile(target):
        raise ConfigError(
            f"A checkpoint is a directory, and {str(target)!r} is a file or the name "
            f"of one. Use another name, such as '{target.with_suffix('')}-run'; or "
            f"write the weights alone: save_weights("
            f"{str(target.with_suffix(SUFFIX))!r})."
        )


def foreign_files(directory: int | Path) -> list[str]:
    """List the files in a directory that don't belong to a checkpoint."""
    with os.scandir(directory) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not belongs(entry.name) or not entry.is_file(follow_symlinks=False)
        )


def _current_path(target: Path) -> Path | None:
    """Find the checkpoint that should be at a path.

    Returns:
        The path; or the hidden path of the old checkpoint, if a writer was killed
        between its two renames; or None if there is no checkpoint.
    """
    for _ in range(_NUM_LOOKS):
        if os.path.lexists(target):
            return target
        aged = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in hidden_names(target.parent, re.escape(target.name), "old"):
                path = target.with_name(name)
                if not path.is_symlink():
                    with contextlib.suppress(FileNotFoundError):  # deleted since
                        # Deleting changes the time of a directory, not of a file.
                        aged.append(((path / MANIFEST).stat().st_mtime_ns, path))
        if aged:
            return max(aged)[1]
    return None


def delete_checkpoint(parent: int, name: str) -> None:
    """Delete a checkpoint so that no reader takes the rest of it for a checkpoint.

    A directory that holds other files is left alone.

    Raises:
        OSError: The checkpoint can't be deleted.
    """
    with open_folder(name, parent) as folder:
        if foreign_files(folder):
            return
    trash = hidden_name(name, "trash")
    os.replace(name, trash, src_dir_fd=parent, dst_dir_fd=parent)
    os.fsync(parent)
    delete_files(parent, trash)


def delete_files(parent: int, name: str) -> None:
    """Delete the files of a checkpoint, the manifest first, and their directory.

    If the path is a symbolic link, only the link is deleted.

    Raises:
        OSError: A file can't be deleted, or the directory holds other files.
    """
    remove(parent, name, _order_of_deletion)


def _try_to_delete_files(parent: int, name: str) -> None:
    with contextlib.suppress(OSError):  # the next write tries again
        delete_files(parent, name)


def _order_of_deletion(names: list[str]) -> list[str]:
    return sorted(filter(belongs, names), key=lambda name: (name != MANIFEST, name))


# Writing -----------------------------------------------------------------------------


def write_checkpoint(
    path: PathLike, checkpoint: Checkpoint, *, moment: SavedAt | None = None
) -> None:
    """Write a checkpoint; if that fails, keep the old checkpoint whole.

    If the process is killed at any moment, the path has the old or the new checkpoint
    (or no checkpoint, if there was no old one). Only one process may write to a path at
    a time.

    Args:
        path: A directory. Missing parents are made; a checkpoint there is replaced.
        checkpoint: The checkpoint. Its tensors must not change during the call.
        moment: Update, epoch and metric at which the checkpoint is saved.

    Raises:
        UnsupportedError: A value or tensor can't be written; no file was written.
        CheckpointError: The file system refuses, and `errno` says why (the disk may be
            full); or the path holds something else.

    Example:
        >>> import tempfile, torch
        >>> weights = {"w": torch.ones(2)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_checkpoint(f"{folder}/a", Checkpoint({"model": weights}, {}))
        ...     load_checkpoint(f"{folder}/a").tensors["model"]["w"]
        tensor([1., 1.])
    """
    write_at(Path(os.path.realpath(as_path(path))), checkpoint, moment)


def write_at(target: Path, checkpoint: Checkpoint, moment: SavedAt | None) -> None:
    """Write a checkpoint as `write_checkpoint` does, to a path that isn't a link."""
    state = dump_json(checkpoint.state, name="state")
    if not isinstance(checkpoint.state, dict) or len(state) > MAX_STATE_BYTES:
        raise UnsupportedError(
            f"The state is a {type(checkpoint.state).__name__} of {len(state)} bytes; "
            f"it must be a dict of {MAX_STATE_BYTES} at most. Large values belong "
            "into tensors."
        )
    for group in checkpoint.tensors:
        if not isinstance(group, str) or not GROUP.fullmatch(group):
            raise UnsupportedError(
                f"{group!r} is no name for a group of tensors: take up to 64 "
                "lower-case letters, digits, `_` and `-`, a letter first."
            )
    try:
        make_folder(target.parent)
        with open_folder(target.parent) as parent:
            _restore_old(parent, target)
            beside = draft(parent, target.name, 0o777, _order_of_deletion)
            with beside as (hidden, folder):
                files = {STATE: _write_file(folder, STATE, [state])}
                for group, tensors in checkpoint.tensors.items():
                    file = group + SUFFIX
                    parts = dump_tensors(tensors, group)
                    files[file] = _write_file(folder, file, parts)
                _write_file(folder, MANIFEST, [dump_manifest(files, moment)])
                os.fsync(folder)
                _rename_into_place(parent, hidden, folder, target.name)
    except CheckpointError:
        raise
    except OSError as cause:
        is_full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = " Free some, or keep fewer checkpoints." if is_full else ""
        error = CheckpointError(
            f"Checkpoint {str(target)!r} couldn't be written: "
            f"{cause.strerror or cause}.{hint} What was there before is whole."
        )
        error.errno = cause.errno
        raise error from cause


def _write_file(folder: int, name: str, parts: Iterable[bytes | memoryview]) -> Written:
    """Write a new file in a directory that this process has made, and sync it.

    Raises:
        OSError: The file exists, or can't be written; or another user has replaced the
            directory.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o666, dir_fd=folder)
    try:
        if os.fstat(descriptor).st_uid != os.fstat(folder).st_uid:
            raise OSError(errno.EBUSY, "Another user has replaced it meanwhile")
        return write_parts(descriptor, parts)
    finally:
        os.close(descriptor)


def _restore_old(parent: int, target: Path) -> None:
    """Rename a killed writer's old checkpoint back, or delete it if it was replaced.

    Raises:
        CheckpointError: The target exists and isn't a checkpoint.
        OSError: A file can't be renamed.
    """
    old = _current_path(target)
    if old is not None and old != target:
        os.replace(old.name, target.name, src_dir_fd=parent, dst_dir_fd=parent)
        os.fsync(parent)
    try:
        with open_folder(target.name, parent) as folder:
            foreign = foreign_files(folder)
    except FileNotFoundError:
        foreign = []
    except NotADirectoryError as error:
        raise CheckpointError(
            f"{str(target)!r} is a file: a checkpoint needs a directory of its own."
        ) from error
    if foreign:
        raise CheckpointError(
            f"{str(target)!r} holds {foreign[0]!r}, which isn't a checkpoint's, "
            "and would be lost: give another path, or move it away."
        )
    delete_leftovers(parent, re.escape(target.name), "old", _try_to_delete_files)


def _rename_into_place(parent: int, hidden: str, folder: int, name: str) -> None:
    """Rename a complete directory to its name, durably, and delete the old directory.

    Raises:
        OSError: The directory can't be renamed, or another process has replaced it.
            The old directory is still there, or `_current_path` finds it.
    """
    old = hidden_name(name, "old")
    with contextlib.suppress(FileNotFoundError):
        os.replace(name, old, src_dir_fd=parent, dst_dir_fd=parent)
    try:
        put(parent, hidden, name)
        with contextlib.suppress(FileNotFoundError):  # rotation of another process
            there = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if not os.path.samestat(there, os.fstat(folder)):
                raise OSError(errno.EBUSY, "Another process has replaced it")
    except BaseException:
        with contextlib.suppress(OSError):  # unless only the last sync has failed
            os.replace(old, name, src_dir_fd=parent, dst_dir_fd=parent)
        raise
    _try_to_delete_files(parent, old)


# Reading -----------------------------------------------------------------------------


def load_checkpoint(path: PathLike) -> Checkpoint:
    """Read a checkpoint, and check that every byte is as it was written.

    Args:
        path: The checkpoint's directory.

    Returns:
        The tensors, on the host, and the state. The shapes and dtypes in the file may
        differ from your model's.

    Raises:
        MissingCheckpointError: There is no checkpoint.
        DamagedCheckpointError: A file is missing, cut, changed or malformed.
        CheckpointError: A newer ipufit wrote the checkpoint, or a file can't be read.
    """
    folder, _, contents = _read(path, belongs)
    state = contents.pop(STATE)
    tensors = {name[: -len(SUFFIX)]: group for name, group in contents.items()}
    return Checkpoint(tensors, state, folder)


def read_group(path: PathLike, group: str) -> dict[str, Tensor]:
    """Read one group of tensors of a checkpoint.

    Returns:
        The tensors by name; empty if the checkpoint has no such group.
    """
    name = group + SUFFIX
    _, _, contents = _read(path, lambda other: other == name)
    return contents.get(name, {})


def read_manifest(path: PathLike) -> Manifest:
    """Read the manifest, and check the sizes of the files.

    This is fast: it finds missing and cut files, but not changed bytes.

    Raises:
        MissingCheckpointError: There is no checkpoint.
        DamagedCheckpointError: The manifest is damaged, or a file missing or cut.
        CheckpointError: A newer ipufit wrote the checkpoint, or a file can't be read.
    """
    return _read(path, lambda name: False)[1]


def _read(
    path: PathLike, is_wanted: Callable[[str], bool]
) -> tuple[Path, Manifest, dict[str, Any]]:
    """Read files of a checkpoint that another process may replace meanwhile.

    A writer deletes the checkpoint that it has replaced. So an error is raised only if
    the checkpoint is still at the path; otherwise the new checkpoint is read.

    Args:
        path: The checkpoint's directory.
        is_wanted: Function that returns whether to read the file of a name.

    Returns:
        The checkpoint's directory, its manifest, and the files' contents by name.
    """
    target = Path(os.path.realpath(as_path(path)))
    for _ in range(MAX_READS):
        there = _current_path(target)
        if there is None:
            raise MissingCheckpointError(
                f"There is no checkpoint at {str(target)!r}. Check the path."
            )
        try:
            folder = os.open(there, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _blamed(there, "its directory", error) from error
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, folder)
            name = MANIFEST
            try:
                file = stack.enter_context(open_regular(name, "rb", folder))
                manifest = load_manifest(file.read(_MAX_MANIFEST_BYTES + 1))
                files, headers = {}, {}
                for name, written in manifest.files.items():
                    file = stack.enter_context(open_regular(name, "rb", folder))
                    size = os.fstat(file.fileno()).st_size
                    if size != written.size:
                        raise ValueError(f"it has {size} bytes, and had {written.size}")
                    if is_wanted(name):
                        files[name] = file
                # Forms and sizes are checked before values are read, which takes long.
                for name in files:
                    if name != STATE:
                        headers[name] = read_header(files[name])
                    elif manifest.files[name].size > MAX_STATE_BYTES:
                        raise ValueError("it has too many bytes")
                contents: dict[str, Any] = {}
                for name, file in files.items():
                    written = manifest.files[name]
                    contents[name] = (
                        _state(file, written)
                        if name == STATE
                        else load_tensors(file, headers[name], written.sha256)
                    )
                return there, manifest, contents
            except (OSError, ValueError) as error:
                current = _current_path(target)
                with contextlib.suppress(FileNotFoundError):
                    if current and os.path.samestat(os.stat(current), os.fstat(folder)):
                        raise _blamed(there, name, error) from error
    raise CheckpointError(
        f"Checkpoint {str(target)!r} was replaced {MAX_READS} times while it was read: "
        "another process writes it faster than this one reads. Save less often, or "
        "each time to another path, as CheckpointStore does."
    )


def _state(file: IO[bytes], written: Written) -> dict[str, Any]:
    data = file.read(written.size + 1)
    if hashlib.sha256(data).hexdigest() != written.sha256:
        raise ValueError("its checksum doesn't fit")
    state = load_json(data)
    if not isinstance(state, dict):
        raise ValueError("it must be a JSON object")
    return state


def _blamed(path: Path, name: str, cause: Exception) -> CheckpointError:
    """Build the error for a file of a checkpoint that can't be read."""
    if isinstance(cause, CheckpointError):
        return type(cause)(f"Checkpoint {str(path)!r}: {cause}")
    number = getattr(cause, "errno", None)
    reason = cause.strerror if isinstance(cause, OSError) else cause
    if number == errno.ELOOP:
        reason = "it is a symbolic link"
    if isinstance(cause, ValueError) or number in _DAMAGES:
        is_part = any((path / part).exists() for part in (MANIFEST, STATE))
        is_other = number in _ABSENCES and not is_part
        error: CheckpointError = DamagedCheckpointError(
            (is_other and what_loads(path))
            or f"Checkpoint {str(path)!r} is damaged: {name}: {reason}. "
            "Use another one."
        )
    else:
        error = CheckpointError(
            f"Checkpoint {str(path)!r} can't be read: {name}: {reason}."
        )
    error.errno = number
    return error
