# SPDX-License-Identifier: Apache-2.0
"""`ipufit doctor`: report what is installed, which PopTorch is used, what is missing.

Training needs a Python, a torch and a PopTorch that fit each other, and IPUs that
PopTorch can see. Each is checked separately, so that a fault doesn't hide another.
"""

from __future__ import annotations

import argparse
import functools
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
import textwrap
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
"""Extras of ipufit, and the package that each installs."""

_PREFIXES = ("IPUFIT_", "IPUOF_", "POPART_", "POPDIST_", "POPLAR_", "POPTORCH_")
_SECRET = re.compile("KEY|PASSWORD|SECRET|TOKEN")
MOST_IPUS_OF_POD = 1024
"""IPUs of the largest pod, a Bow Pod1024."""


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        topic: The heading above the finding.
        name: The subject of the check, such as "torch".
        value: The result in words; `"missing"` if nothing was found.
        advice: A remedy; "" if no remedy is needed.
        is_wrong: Whether the finding prevents models from running as configured.
    """

    topic: str
    name: str
    value: str
    advice: str = ""
    is_wrong: bool = False


def examine() -> tuple[Finding, ...]:
    """Check the software and IPUs that ipufit needs; change nothing, raise nothing.

    Example:
        >>> found = {finding.name: finding for finding in examine()}
        >>> found["back end"].value.split(":")[0] in ("emulator", "PopTorch")
        True
    """
    return (
        *(Finding("Back end", *row) for row in _back_end()),
        *(Finding("Versions", *row) for row in _versions()),
        *(Finding("Poplar SDK", *row) for row in _poplar_sdk()),
        *(Finding("Optional packages", *row) for row in _extras()),
        *(Finding("Environment", *row) for row in _variables()),
    )


def main(arguments: Sequence[str]) -> None:
    """Report what is installed and missing, and which PopTorch is used.

    The exit status is 1 if models can't run as configured.
    """
    parser = argparse.ArgumentParser(
        prog="ipufit doctor",
        description=main.__doc__,
        formatter_class=functools.partial(argparse.HelpFormatter, width=80),
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
        margin = " " * (width + 4)
        for first, text in (
            (f"{mark}{finding.name:{width}}  ", finding.value),
            (f"{margin}-> ", finding.advice),
        ):
            if text:
                lines += textwrap.wrap(
                    text,
                    80,
                    initial_indent=first,
                    subsequent_indent=margin,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
    return "\n".join(lines) + "\n"


# Checks -------------------------------------------------------------------------------


_Row = Tuple[Any, ...]  # a Finding without its topic


def _back_end() -> Iterator[_Row]:
    """Import the PopTorch that models run on, and look for its IPUs."""
    logger = logging.getLogger("ipufit")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        poptorch: Any = importlib.import_module("ipufit._poptorch").poptorch
    except ConfigError as error:
        yield "back end", "none", str(error), True
        return
    except Exception as error:  # noqa: BLE001 - a broken PopTorch may raise any error
        value = f"PopTorch can't be imported: {type(error).__name__}: {error}"
        advice = "Source the enable.sh of the SDK's poplar and popart folders"
        yield "back end", value, advice, True
        return
    finally:
        logger.disabled = was_disabled
    if poptorch.__name__ == "poptorch":
        where = os.path.dirname(poptorch.__file__ or "")
        yield "back end", f"PopTorch {poptorch.__version__}, in {where}"
        yield _ipus(poptorch)
        return
    if _env.backend() == "emulator":
        yield "back end", "emulator: IPUFIT_BACKEND=emulator asks for it"
    else:
        yield (
            "back end",
            "emulator: PopTorch isn't installed",
            _env.poptorch_install_hint(),
        )
    try:
        torch: Any = importlib.import_module("torch")
        model = poptorch.inferenceModel(torch.nn.ReLU())
        model(torch.zeros(1))
        model.destroy()
    except Exception as error:  # noqa: BLE001 - any error is a finding
        value = f"a small model fails: {type(error).__name__}: {error}"
        advice = "Mend that: your models would end with the same error"
        yield "trial", value, advice, True
    else:
        yield "trial", "a small model runs"


def _ipus(poptorch: Any) -> _Row:
    if not poptorch.ipuHardwareIsAvailable(1):
        advice = (
            "Look at gc-monitor and at IPUOF_VIPU_API_PARTITION_ID; POPTORCH_IPU_MODEL "
            "and POPTORCH_SMALL_IPU_MODEL must not be set"
        )
        return "IPUs", "none", advice, True
    count = 1
    while count < MOST_IPUS_OF_POD and poptorch.ipuHardwareIsAvailable(2 * count):
        count *= 2
    version = poptorch.ipuHardwareVersion()
    return "IPUs", f"up to {count} for one program, of version {version}"


def _versions() -> Iterator[_Row]:
    has_poptorch = _is_there("poptorch")
    asked = "PopTorch 3.3 and 3.4 are built for Python 3.8 and torch 2.0.1"
    is_odd = has_poptorch and sys.version_info[:2] != POPTORCH_PYTHON
    yield "ipufit", __version__
    yield "Python", platform.python_version(), asked if is_odd else ""
    yield "system", f"{platform.system()}, {platform.machine()}"
    for package in ("torch", "numpy", "rich", "safetensors"):
        version = _installed(package)
        is_missing = version == "missing"
        is_odd = package == "torch" and not version.startswith(POPTORCH_TORCH)
        advice = asked if has_poptorch and is_odd else ""
        if is_missing:
            advice = f"pip install {package}"
        yield package, version, advice, is_missing


def _poplar_sdk() -> Iterator[_Row]:
    yield "SDK", os.environ.get("POPLAR_SDK_ENABLED", "") or "not enabled in this shell"
    for module in ("poptorch", "popdist"):
        yield module, "installed" if _is_there(module) else "missing"
    for tool in ("poprun", "popc", "gc-monitor"):
        yield tool, shutil.which(tool) or "missing"


def _extras() -> Iterator[_Row]:
    for extra, package in EXTRAS.items():
        version = _installed(package)
        advice = f'pip install "ipufit[{extra}]"' if version == "missing" else ""
        yield package, version, advice


def _variables() -> Iterator[_Row]:
    for name in sorted(os.environ):
        if name.startswith(_PREFIXES):
            yield name, "set" if _SECRET.search(name) else os.environ[name]


def _is_there(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # this process has another object under the module's name
        return False
    # A folder of this name has a spec without origin.
    return spec is not None and spec.origin is not None


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
