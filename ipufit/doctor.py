# SPDX-License-Identifier: Apache-2.0
"""`ipufit doctor`: what is installed, which PopTorch is used and why, what is missing.

A machine that trains has a Python, a torch and a PopTorch that fit together, and IPUs
that PopTorch can see. Each is checked by itself, so that a broken one doesn't hide the
others.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import sys
from typing import Any, Iterator, NamedTuple, Sequence, Tuple

from ipufit import _env
from ipufit._version import __version__
from ipufit.errors import ConfigError

POPTORCH_PYTHON, POPTORCH_TORCH = (3, 8), "2.0.1"
"""Versions that the wheels of PopTorch 3.3 and 3.4 are built for."""

EXTRAS = {
    "metrics": "torchmetrics",
    "plot": "matplotlib",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "lightning": "lightning",
    "transformers": "transformers",
    "torchdata": "torchdata",
}
"""Extras of ipufit, and the package that each is for."""

_PREFIXES = ("IPUFIT_", "IPUOF_", "POPART_", "POPDIST_", "POPLAR_", "POPTORCH_")
_SECRET = re.compile("KEY|PASSWORD|SECRET|TOKEN")
_MOST_IPUS = 1024


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        topic: The heading above it.
        name: The thing that was checked.
        value: The result in words; `"missing"` for nothing.
        advice: A remedy; "" if none is needed.
        is_wrong: Whether it prevents models from running as asked.
    """

    topic: str
    name: str
    value: str
    advice: str = ""
    is_wrong: bool = False


Found = Tuple[Any, ...]
"""Name, value, advice and whether it is wrong: a `Finding` without its topic."""


def examine() -> tuple[Finding, ...]:
    """Check all that ipufit runs on, without changes or errors.

    Example:
        >>> found = {finding.name: finding for finding in examine()}
        >>> found["back end"].value.split(":")[0] in ("emulator", "PopTorch")
        True
    """
    looks = {
        "Back end": _back_end,
        "Versions": _versions,
        "Poplar SDK": _poplar_sdk,
        "IPUs": _ipus,
        "Optional packages": _extras,
        "Environment": _variables,
    }
    return tuple(
        Finding(topic, *one) for topic, look in looks.items() for one in look()
    )


def main(arguments: Sequence[str]) -> None:
    """Print the findings, and exit with 1 if something is wrong.

    Args:
        arguments: The command line, without `ipufit doctor`.

    Raises:
        SystemExit: Always.
    """
    parser = argparse.ArgumentParser(
        prog="ipufit doctor",
        description="Say what is installed, which PopTorch is used and why, and what "
        "is missing. The exit status is 1 if models can't run as was asked.",
    )
    parser.add_argument("--json", action="store_true", help="print data for programs")
    given = parser.parse_args(arguments)
    found = examine()
    if given.json:
        text = json.dumps([finding._asdict() for finding in found], indent=2) + "\n"
    else:
        text = in_words(found)
    sys.stdout.write(text)
    sys.exit(int(any(finding.is_wrong for finding in found)))


def in_words(found: Sequence[Finding]) -> str:
    """Format findings as lines under their topics.

    Example:
        >>> print(in_words([Finding("Versions", "torch", "2.0.1")]), end="")
        Versions
          torch  2.0.1
    """
    width = max(len(finding.name) for finding in found)
    lines: list[str] = []
    topic = ""
    for finding in found:
        if finding.topic != topic:
            topic = finding.topic
            lines += ([""] if lines else []) + [topic]
        mark = "! " if finding.is_wrong else "  "
        lines.append(f"{mark}{finding.name:{width}}  {finding.value}")
        if finding.advice:
            lines.append(f"  {'':{width}}  -> {finding.advice}")
    return "\n".join(lines) + "\n"


# What is looked at --------------------------------------------------------------------


def _back_end() -> Iterator[Found]:
    name, is_there = "back end", _is_there("poptorch")
    try:
        wanted = _env.backend()
    except ConfigError as error:
        yield name, "none", str(error), True
        return
    if wanted == "poptorch" and not is_there:
        why = "IPUFIT_BACKEND=poptorch insists on PopTorch, which isn't installed"
        yield name, f"none: {why}", _env.no_poptorch(), True
    elif wanted == "emulator":
        yield name, "emulator: IPUFIT_BACKEND=emulator asks for it"
        yield _trial()
    elif is_there:
        why = "it is installed" if wanted == "auto" else "IPUFIT_BACKEND asks for it"
        yield name, f"PopTorch: {why}"
    elif _env.signs_of_ipus():
        signs = ", ".join(_env.signs_of_ipus())
        why = f"this host has IPUs ({signs}), and PopTorch isn't installed"
        yield name, f"none: {why}", _env.no_poptorch(), True
    else:
        yield name, "emulator: PopTorch isn't installed", _env.no_poptorch()
        yield _trial()


def _trial() -> Found:
    """Check that a model runs on the emulator, and report its variables."""
    logger = logging.getLogger("ipufit")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        torch: Any = importlib.import_module("torch")
        seam: Any = importlib.import_module("ipufit._poptorch")
        model = seam.poptorch.inferenceModel(torch.nn.ReLU())
        model(torch.zeros(1))
        model.destroy()
    except Exception as error:  # noqa: BLE001 - that is what it looks for
        value = f"a small model fails: {type(error).__name__}: {error}"
        return (
            "trial",
            value,
            "Mend that: your models would end with the same error",
            True,
        )
    finally:
        logger.disabled = was_disabled
    return "trial", "a small model runs"


def _versions() -> Iterator[Found]:
    has_poptorch = _is_there("poptorch")
    is_odd = has_poptorch and sys.version_info[:2] != POPTORCH_PYTHON
    asked = "PopTorch 3.3 and 3.4 are built for Python 3.8 and torch 2.0.1"
    yield "ipufit", __version__
    yield "Python", platform.python_version(), asked if is_odd else ""
    yield "system", f"{platform.system()}, {platform.machine()}"
    for package in ("torch", "numpy", "rich", "safetensors"):
        version = _installed(package)
        if version == "missing":
            yield package, version, f"pip install {package}", True
            continue
        is_odd = package == "torch" and not version.startswith(POPTORCH_TORCH)
        yield package, version, asked if has_poptorch and is_odd else ""


def _poplar_sdk() -> Iterator[Found]:
    yield "SDK", os.environ.get("POPLAR_SDK_ENABLED", "") or "not enabled in this shell"
    module, error = _real_poptorch()
    if error is not None:
        value = f"can't be imported: {type(error).__name__}: {error}"
        advice = "Source the enable.sh of the SDK's poplar and popart folders"
        yield "poptorch", value, advice, True
    elif module is not None:
        where = os.path.dirname(module.__file__ or "")
        yield "poptorch", f"{module.__version__}, in {where}"
    elif _is_there("poptorch"):
        yield "poptorch", "installed, not used"
    else:
        found = ", ".join(_folders("poptorch"))
        advice = f"{found} is a folder of that name only, and no PopTorch"
        yield "poptorch", "missing", advice if found else ""
    yield "popdist", "installed" if _is_there("popdist") else "missing"
    for tool in ("poprun", "popc", "gc-monitor"):
        yield tool, shutil.which(tool) or "missing"


def _ipus() -> Iterator[Found]:
    poptorch, _ = _real_poptorch()
    if poptorch is None:
        yield "IPUs", "not looked for: PopTorch isn't used"
    elif not poptorch.ipuHardwareIsAvailable(1):
        advice = (
            "Look at gc-monitor and at IPUOF_VIPU_API_PARTITION_ID; POPTORCH_IPU_MODEL "
            "and POPTORCH_SMALL_IPU_MODEL must not be set"
        )
        yield "IPUs", "none", advice, True
    else:
        count = 1
        while count < _MOST_IPUS and poptorch.ipuHardwareIsAvailable(2 * count):
            count *= 2
        version = poptorch.ipuHardwareVersion()
        yield "IPUs", f"up to {count} for one program, of version {version}"


def _extras() -> Iterator[Found]:
    for extra, package in EXTRAS.items():
        version = _installed(package)
        advice = f'pip install "ipufit[{extra}]"' if version == "missing" else ""
        yield package, version, advice


def _variables() -> Iterator[Found]:
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES))
    if not names:
        yield "variables", "none of IPUFIT_*, POPTORCH_*, POPLAR_*, IPUOF_*"
    for name in names:
        yield name, "set" if _SECRET.search(name) else os.environ[name]


def _real_poptorch() -> tuple[Any, Exception | None]:
    """Return PopTorch if models run on it, and the error of its import, if any."""
    if not _is_there("poptorch") or os.environ.get("IPUFIT_BACKEND") == "emulator":
        return None, None
    try:
        seam: Any = importlib.import_module("ipufit._poptorch")
    except Exception as error:  # noqa: BLE001 - a broken one may raise anything
        return None, error
    is_real = seam.poptorch.__name__ == "poptorch"
    return (seam.poptorch if is_real else None), None


def _is_there(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # something else stands under its name in this process
        return False
    return spec is not None and spec.origin is not None  # else a folder of this name


def _folders(module: str) -> list[str]:
    """List the folders of a module's name on the path that have no `__init__.py`."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:
        return []
    if spec is None or spec.origin is not None:
        return []
    return list(spec.submodule_search_locations or ())


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
