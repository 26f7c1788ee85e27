# SPDX-License-Identifier: Apache-2.0
"""The module as a program of torch or ONNX, for machines without IPUs."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import os
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from ipufit._files import file_errors, sha256_of, written_beside
from ipufit._optional import need
from ipufit._tree import Structure, tree_map
from ipufit._version import __version__
from ipufit.data import HostRandomState, Source
from ipufit.engine import arguments_of, failures_explained, named_outputs
from ipufit.errors import IpufitError, UnsupportedError

_ANY_ROWS = 2
"""Rows of the example, if the number is open: programs for one row may be others."""


class ExportedModule:
    """A copy of a module on the host, in eval mode and float32, with an example.

    Args:
        module: The user's module, which stays as it is.
        source: Samples; the first is the example.
        batch_size: Rows that the program takes; None for any number.
    """

    def __init__(
        self, module: torch.nn.Module, source: Source, batch_size: int | None
    ) -> None:
        self._module = copy.deepcopy(module).eval().float()
        self._is_open = batch_size is None
        leaves = source.example(batch_size or _ANY_ROWS, inputs_only=True)
        given = [_in_32_bits(leaf) for leaf in leaves]
        inputs = source.structure.inputs.rebuild(given)
        self._by_place, by_name = arguments_of(inputs)
        with torch.no_grad(), failures_explained(self._module, inputs):
            self._outputs = self._module(*self._by_place, **by_name)
        signature = inspect.signature(self._module.forward)
        self._named = dict(signature.bind(*self._by_place, **by_name).arguments)
        in_order = [name for name in self._named if name in by_name]
        self._by_name = {name: by_name[name] for name in (*in_order, *by_name)}

    def write(self, target: Path, format_: str, num_updates: int) -> dict[str, Any]:
        """Write the program to a file, and give its description.

        Args:
            target: The file.
            format_: `"torch"` or `"onnx"`.
            num_updates: Weight updates that were made.
        """
        save = self._save_torch if format_ == "torch" else self._save_onnx
        with file_errors("can't be written", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = written_beside(target, lambda part: self._saved(save, part))
            size, digest = partial.stat().st_size, sha256_of(partial)
            os.replace(partial, target)
        return {
            "format": format_,
            "module": type(self._module).__name__,
            "num_updates": num_updates,
            "versions": {"ipufit": __version__, "torch": str(torch.__version__)},
            "inputs": self._described(self._named),
            "outputs": self._described(self._named_outputs()),
            "bytes": size,
            "sha256": digest,
        }

    def _saved(self, save: Callable[[Path], None], path: Path) -> None:
        """Have a program made and saved, with nothing to be seen of how.

        Raises:
            UnsupportedError: Torch can't make it.
        """
        before = HostRandomState()
        try:
            with torch.no_grad(), _silence():
                save(path)
        except (OSError, IpufitError):
            raise
        except Exception as error:  # torch raises anything, of itself and of forward
            more = (
                " If forward works for one number of rows only, give batch_size=."
                if self._is_open
                else ""
            )
            raise UnsupportedError(
                f"torch can't export {type(self._module).__name__}: "
                f"{_beginning(error)}{more}"
            ) from error
        finally:
            before.put_back()

    def _save_torch(self, path: Path) -> None:
        export: Any = getattr(getattr(torch, "export", None), "export", None)
        if (
            export is None
            or "dynamic_shapes" not in inspect.signature(export).parameters
        ):
            raise UnsupportedError(
                "format='torch' needs torch.export, and torch "
                f"{torch.__version__} has none: use torch 2.2 or newer, or "
                "format='onnx'. model.save_weights(path) writes the weights for any."
            )
        program = export(
            self._module,
            self._by_place,
            self._by_name,
            dynamic_shapes=self._dynamic_shapes(),
        )
        content = io.BytesIO()  # a file would have to have torch's own suffix
        torch.export.save(program, content)  # type: ignore[attr-defined,unused-ignore]
        path.write_bytes(content.getvalue())

    def _save_onnx(self, path: Path) -> None:
        names = {
            "input_names": list(_leaves(self._named)),
            "output_names": list(_leaves(self._named_outputs())),
        }
        export: Any = torch.onnx.export
        if "dynamic_shapes" in inspect.signature(export).parameters:
            need("onnxscript", "export(format='onnx')", "onnx onnxscript")
            export(
                self._module,
                self._by_place,
                str(path),
                kwargs=self._by_name,
                dynamo=True,
                dynamic_shapes=self._dynamic_shapes(),
                external_data=False,
                verbose=False,
                **names,
            )
            return
        need("onnx", "export(format='onnx')", "onnx")
        axes = {name: {0: "batch"} for of in names.values() for name in of}
        options = {"dynamic_axes": axes} if self._is_open else {}
        arguments = (*self._by_place, self._by_name)  # the last dict has those by name
        export(self._module, arguments, str(path), **options, **names)

    def _dynamic_shapes(self) -> Any:
        """The dimension of rows of each input, by the parameters of `forward`."""
        if not self._is_open:
            return None
        rows = torch.export.Dim("batch")  # type: ignore[attr-defined,unused-ignore]
        return {
            name: tree_map(lambda leaf: {0: rows}, value)
            for name, value in self._named.items()
        }

    def _named_outputs(self) -> dict[str, Any]:
        several = named_outputs(self._outputs)
        return {"output": self._outputs} if several is None else several

    def _described(self, values: Any) -> list[dict[str, Any]]:
        """Names, shapes and types of tensors; `"batch"` is any number of rows."""
        return [
            {
                "name": name,
                "shape": (["batch"] if self._is_open and leaf.dim() else [])
                + list(leaf.shape[1 if self._is_open else 0 :]),
                "dtype": str(leaf.dtype).replace("torch.", ""),
            }
            for name, leaf in _leaves(values).items()
        ]


def _leaves(values: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors in nested values by name, as in `name.0` if a value has several."""
    found = {}
    for name, value in values.items():
        leaves = Structure.of_outputs(value).flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for index, tensor in enumerate(tensors):
            found[name if len(tensors) == 1 else f"{name}.{index}"] = tensor
    return found


def _in_32_bits(leaf: Tensor) -> Tensor:
    """A tensor of the example, floats in the type that the program computes in."""
    narrow = leaf.float() if leaf.is_floating_point() else leaf
    whole: Tensor = narrow.contiguous()
    return whole


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep torch's exporters from telling of themselves; what tracing warns of stays.

    The exporter of torch 2.0 prints a diagnosis, whether there is one or not.
    """
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
        yield


def _beginning(error: Exception) -> str:
    """The first lines of an error of torch, which may go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] or type(error).__name__
