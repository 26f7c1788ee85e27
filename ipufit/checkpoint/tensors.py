# SPDX-License-Identifier: Apache-2.0
"""Writes and reads tensors as safetensors files, without a copy in between.

The format is that of https://github.com/huggingface/safetensors#format: eight bytes
with the length of a JSON header, the header, the values. The library's own functions
copy every tensor to bytes first, and map files into memory. These here stream the
values: memory holds no second copy, and the checksum is that of exactly the bytes that
were written or read.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any, Iterator, Mapping, NamedTuple, Protocol

import torch
from torch import Tensor

from ipufit.errors import CheckpointError, UnsupportedError

from .atomic import Part
from .json_values import parse_json

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_DIMS = 64
TIED_KEY = "ipufit.tied"

_DTYPES = {  # name in safetensors -> name in torch; older versions lack some
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_NAMES = {
    getattr(torch, ours): theirs
    for theirs, ours in _DTYPES.items()
    if hasattr(torch, ours)
}


class ByteReader(Protocol):
    """A file that is read once, from its start."""

    def read(self, count: int) -> bytes:
        """Read the next `count` bytes."""

    def read_into(self, view: memoryview) -> None:
        """Fill a view with the next bytes."""


class _Entry(NamedTuple):
    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


def check_tensors(tensors: Mapping[str, Tensor], name: str) -> None:
    """Refuse tensors that a safetensors file can't hold.

    Args:
        tensors: Tensors by name.
        name: Name of the tensors in error messages.

    Raises:
        UnsupportedError: A name is no str, or a tensor is sparse, has no values or a
            dtype that safetensors lacks.
    """
    for key, tensor in tensors.items():
        where = f"{name}[{key!r}]"
        if not _is_name(key):
            raise UnsupportedError(f"{key!r} can't name a tensor of {name}.")
        if not isinstance(tensor, Tensor):
            raise UnsupportedError(f"{where} is a {type(tensor).__name__}, no tensor.")
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            raise UnsupportedError(
                f"{where} is {tensor.layout} on {tensor.device}: only dense tensors "
                "with values can be written. Call `.to_dense()`, or leave it out."
            )
        if tensor.dtype not in _NAMES or tensor.dim() > MAX_DIMS:
            raise UnsupportedError(
                f"{where} is a {tensor.dtype} of {tensor.dim()} dimensions, which "
                "safetensors files can't hold: convert it to another dtype."
            )


def _is_name(key: Any) -> bool:
    if not isinstance(key, str) or key == "__metadata__":
        return False
    return key.encode("utf-8", "replace").decode("utf-8") == key  # no lone surrogates


def tensor_parts(
    tensors: Mapping[str, Tensor], more: Mapping[str, str] | None = None
) -> Iterator[Part]:
    """The bytes of a safetensors file, part by part.

    Tied tensors are written under each of their names, so that plain torch can load
    them with `load_state_dict(load_file(...))`. The metadata say which names are tied.

    Args:
        tensors: Tensors by name, which passed `check_tensors`. They may be on any
            device and of any stride; if they must be copied, it is one at a time.
        more: Further metadata.

    Yields:
        The header, then the values of one tensor after the other.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    offsets, end = {}, 0
    for name in order:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        offsets[name] = [begin, end]
    metadata = {"format": "pt", **(more or {})}
    tied = tied_names(tensors)
    if tied:
        metadata[TIED_KEY] = json.dumps(tied)
    header: dict[str, Any] = {"__metadata__": metadata}
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets[name],
        }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # so that the values are aligned
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield _bytes_of(tensors[name].detach().cpu().contiguous())


def tied_names(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of tensors that share all of their memory, in groups.

    Example:
        >>> weight = torch.zeros(2)
        >>> tied_names({"in": weight, "out": weight, "other": torch.zeros(2)})
        [['in', 'out']]
    """
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


def copied_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors; tensors that share all of their memory share a copy.

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


def read_tensors(file: ByteReader, size: int) -> dict[str, Tensor]:
    """Read a safetensors file.

    Args:
        file: File that is open at its start.
        size: Size of the file in bytes.

    Returns:
        Tensors by name, in the order of the header. Tied names share one tensor.

    Raises:
        ValueError: The file breaks the format; the text says how.
        CheckpointError: This version of torch lacks a dtype.
    """
    entries, tied = _read_header(file, size)
    tensors: dict[str, Tensor] = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
        file.read_into(_bytes_of(tensors[name]))
        if entry.dtype == torch.bool and _flat(tensors[name]).gt(1).any():
            raise ValueError(f"tensor {name!r} has bools that are neither 0 nor 1")
    for first, *others in tied:
        for name in others:
            _check_equal(tensors, first, name)
            tensors[name] = tensors[first]
    return {name: tensors[name] for name in entries}


def _read_header(file: ByteReader, size: int) -> tuple[dict[str, _Entry], list[Any]]:
    if size < 8:
        raise ValueError(f"it has {size} bytes, too few for a safetensors file")
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(
            f"its header claims {length} bytes, and there are {size - 8} at most"
        )
    header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    entries = {name: _entry(name, given) for name, given in header.items()}
    _check_layout(entries, size - 8 - length)
    return entries, _read_tied(metadata, entries)


def _entry(name: str, given: Any) -> _Entry:
    if not isinstance(given, dict) or set(given) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} lacks dtype, shape and data_offsets")
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {str(dtype)[:20]!r}")
    if not _are_counts(shape) or len(shape) > MAX_DIMS:
        raise ValueError(f"tensor {name!r} has a shape that is none")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has offsets that are none")
    known = getattr(torch, _DTYPES[dtype], None)
    if known is None:
        raise CheckpointError(
            f"Tensor {name!r} is a {_DTYPES[dtype]}, which torch {torch.__version__} "
            "lacks: read it with a newer torch."
        )
    return _Entry(known, shape, offsets[0], offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and value >= 0 for value in values
    )


def _check_layout(entries: Mapping[str, _Entry], size: int) -> None:
    """Raise unless the values follow each other, without holes, up to the end."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        dtype, shape, begin, end = entry
        width = torch.empty((), dtype=dtype).element_size()
        # torch computes strides of empty tensors too: they mustn't overflow
        if math.prod(max(count, 1) for count in shape) * width >= 2**63:
            raise ValueError(f"tensor {name!r} has a shape beyond any memory")
        if begin != position or end - begin != math.prod(shape) * width:
            raise ValueError(f"tensor {name!r} lies where its values can't be")
        position = end
    if position != size:
        raise ValueError(f"its tensors take {position} bytes, and it holds {size}")


def _read_tied(metadata: Any, entries: Mapping[str, _Entry]) -> list[Any]:
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError("its metadata aren't strings")
    tied = parse_json(metadata.get(TIED_KEY, "[]").encode("utf-8", "replace"))
    if not isinstance(tied, list) or not all(
        isinstance(names, list) and len(names) > 1 for names in tied
    ):
        raise ValueError("its tied names are no lists")
    named = [name for names in tied for name in names]
    known = [name for name in named if isinstance(name, str) and name in entries]
    if len(known) < len(named) or len(set(known)) < len(named):
        raise ValueError("its tied names aren't names of tensors, each once")
    return tied


def _check_equal(tensors: Mapping[str, Tensor], first: str, name: str) -> None:
    one, other = tensors[first], tensors[name]
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    if not alike or not torch.equal(_flat(one), _flat(other)):  # NaN equals NaN
        raise ValueError(f"tensors {first!r} and {name!r} are tied, but differ")


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    if sys.byteorder != "little":
        raise UnsupportedError("Checkpoints are little-endian, and this machine isn't.")
    values: Any = _flat(tensor.resolve_conj().resolve_neg()).numpy()
    return memoryview(values)


def _flat(tensor: Tensor) -> Tensor:
    flat: Tensor = tensor.reshape(-1).view(torch.uint8)
    return flat
