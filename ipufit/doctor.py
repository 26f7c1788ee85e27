# SPDX-License-Identifier: Apache-2.0
"""`ipufit doctor`: what is installed, which PopTorch is used and why, what is missing.

A machine that trains has a Python, a torch and a PopTorch that fit together, and IPUs
that PopTorch can see. Each is looked at by itself, so that one that is broken doesn't
hide the others.
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
from typing import Any, Callable, NamedTuple, Sequence

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
_HOW_TO_INSTALL = (
    "PopTorch comes with the Poplar SDK and is on no package index: install the SDK's "
    "wheel with Python 3.8, and source the enable.sh of its poplar and popart folders"
)


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        topic: The heading that it belongs to.
        name: The thing.
        value: The findings in words; `"missing"` for nothing.
        advice: A remedy; empty if none is needed.
        is_wrong: Whether models can't run as was asked because of it.
    """

    topic: str
    name: str
    value: str
    advice: str = ""
    is_wrong: bool = False


def examine() -> tuple[Finding, ...]:
    """Look at all that ipufit runs on. Nothing is changed, and nothing raises.

    Example:
        >>> found = {finding.name: finding for finding in examine()}
        >>> found["back end"].value.split(":")[0] in ("emulator", "PopTorch")
        True
    """
    looks: tuple[Callable[[], list[Finding]], ...] = (
        _back_end,
        _versions,
        _poptorch,
        _devices,
        _extras,
        _variables,
    )
    return tuple(finding for look in looks for finding in look())


def main(arguments: Sequence[str]) -> None:
    """Print what was found, and end with 1 if something is wrong.

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
    sys.stdout.write(_as_json(found) if given.json else in_words(found))
    sys.exit(int(any(finding.is_wrong for finding in found)))


def in_words(found: Sequence[Finding]) -> str:
    """The findings as lines under their topics.

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


def _as_json(found: Sequence[Finding]) -> str:
    return json.dumps([finding._asdict() for finding in found], indent=2) + "\n"


# What is looked at --------------------------------------------------------------------


def _back_end() -> list[Finding]:
    """Which PopTorch runs the models, and why."""
    topic, name = "Back end", "back end"
    try:
        wanted = _env.backend()
    except ConfigError as error:
        return [Finding(topic, name, "none", str(error), is_wrong=True)]
    is_there = _is_there("poptorch")
    if wanted == "emulator":
        value = "emulator: IPUFIT_BACKEND=emulator asks for it"
        return [Finding(topic, name, value), *_trial(topic)]
    if is_there:
        why = "it is installed" if wanted == "auto" else "IPUFIT_BACKEND asks for it"
        return [Finding(topic, name, f"PopTorch: {why}")]
    if wanted == "poptorch":
        why = "IPUFIT_BACKEND=poptorch insists on PopTorch, which isn't installed"
        return [Finding(topic, name, f"none: {why}", _HOW_TO_INSTALL, is_wrong=True)]
    value = "emulator: PopTorch isn't installed"
    return [Finding(topic, name, value, _HOW_TO_INSTALL), *_trial(topic)]


def _trial(topic: str) -> list[Finding]:
    """Whether a model runs on the emulator, with what variables say of it."""
    name = "trial"
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
        advice = "Mend that: your models would end with the same error"
        return [Finding(topic, name, value, advice, is_wrong=True)]
    finally:
        logger.disabled = was_disabled
    return [Finding(topic, name, "a small model runs")]


def _versions() -> list[Finding]:
    """Python, torch and the other packages that ipufit always needs."""
    topic = "Versions"
    has_poptorch = _is_there("poptorch")
    python = platform.python_version()
    is_odd = has_poptorch and sys.version_info[:2] != POPTORCH_PYTHON
    asked = "PopTorch 3.3 and 3.4 are built for Python 3.8 and torch 2.0.1"
    found = [
        Finding(topic, "ipufit", __version__),
        Finding(topic, "Python", python, asked if is_odd else ""),
        Finding(topic, "system", f"{platform.system()}, {platform.machine()}"),
    ]
    for package in ("torch", "numpy", "rich", "safetensors"):
        version = _installed(package)
        advice, is_wrong = "", version == "missing"
        if is_wrong:
            advice = f"pip install {package}"
        elif package == "torch" and has_poptorch:
            advice = "" if version.startswith(POPTORCH_TORCH) else asked
        found.append(Finding(topic, package, version, advice, is_wrong))
    return found


def _poptorch() -> list[Finding]:
    """The parts of the Poplar SDK: whether they are there, and PopTorch imports."""
    topic = "Poplar SDK"
    enabled = os.environ.get("POPLAR_SDK_ENABLED", "")
    found = [Finding(topic, "SDK", enabled or "not enabled in this shell")]
    module, error = _real_poptorch()
    if error is not None:
        value = f"can't be imported: {type(error).__name__}: {error}"
        advice = "Source the enable.sh of the SDK's poplar and popart folders"
        found.append(Finding(topic, "poptorch", value, advice, is_wrong=True))
    elif module is not None:
        where = os.path.dirname(module.__file__ or "")
        found.append(Finding(topic, "poptorch", f"{module.__version__}, in {where}"))
    else:
        value = "installed, not used" if _is_there("poptorch") else "missing"
        found.append(Finding(topic, "poptorch", value))
    value = "installed" if _is_there("popdist") else "missing"
    found.append(Finding(topic, "popdist", value))
    for tool in ("poprun", "popc", "gc-monitor"):
        found.append(Finding(topic, tool, shutil.which(tool) or "missing"))
    return found


def _devices() -> list[Finding]:
    """The IPUs that PopTorch can see."""
    topic = name = "IPUs"
    poptorch, _ = _real_poptorch()
    if poptorch is None:
        return [Finding(topic, name, "not looked for: PopTorch isn't used")]
    if not poptorch.ipuHardwareIsAvailable(1):
        advice = (
            "Look at gc-monitor and at IPUOF_VIPU_API_PARTITION_ID; POPTORCH_IPU_MODEL "
            "and POPTORCH_SMALL_IPU_MODEL must not be set"
        )
        return [Finding(topic, name, "none", advice, is_wrong=True)]
    count = 1
    while count < _MOST_IPUS and poptorch.ipuHardwareIsAvailable(2 * count):
        count *= 2
    version = poptorch.ipuHardwareVersion()
    value = f"up to {count} for one program, of version {version}"
    return [Finding(topic, name, value)]


def _real_poptorch() -> tuple[Any, Exception | None]:
    """PopTorch if models run on it, and the error of its import if it has one."""
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
        return importlib.util.find_spec(module) is not None
    except ValueError:  # something else stands under its name in this process
        return False


def _extras() -> list[Finding]:
    """The optional packages."""
    found = []
    for extra, package in EXTRAS.items():
        version = _installed(package)
        advice = f'pip install "ipufit[{extra}]"' if version == "missing" else ""
        found.append(Finding("Optional packages", package, version, advice))
    return found


def _variables() -> list[Finding]:
    """Environment variables that change what runs."""
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES))
    topic = "Environment"
    shown = {n: "set" if _SECRET.search(n) else os.environ[n] for n in names}
    return [Finding(topic, *pair) for pair in shown.items()] or [
        Finding(topic, "variables", "none of IPUFIT_*, POPTORCH_*, POPLAR_*, IPUOF_*")
    ]


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
