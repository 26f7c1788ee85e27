# SPDX-License-Identifier: Apache-2.0
"""Settings that PopTorch's backend takes, and their checks.

`popart_options.tsv` has their names, the types of their values in C++, and the
enumerations of PopART that values belong to (PopTorch, `SessionOptions.cpp`); the
names inside locations of tensors; and PopART's patterns (`patterns/*.cpp`).
"""

from __future__ import annotations

import ctypes
import difflib
from pathlib import Path
from typing import Any, Collection, Iterator, Mapping

from . import _popart
from ._logging import logger
from .enums import OutputMode
from .errors import Error

_TABLE = Path(__file__).with_name("popart_options.tsv").read_text("utf-8")
_ROWS: dict[str, dict[str, str]] = {}
for _line in _TABLE.splitlines()[1:]:
    _name, _type_name, _values = _line.split("\t")
    _ROWS.setdefault(_type_name, {})[_name] = _values
PATTERNS = _ROWS.pop("pattern")
"""Graph patterns of PopART -> `mandatory`, or nothing."""

_MANDATORY = {name for name, kind in PATTERNS.items() if kind}
_LOCATION = _ROWS.pop("location")
TYPES = {name: type_name for type_name, names in _ROWS.items() for name in names}
"""Settings that the backend accepts -> the types of their values."""

ENUMERATIONS: Mapping[str, type[_popart.PopartEnum]] = {
    name: getattr(_popart, values)
    for names in _ROWS.values()
    for name, values in names.items()
    if values
}
"""Settings that are numbers -> the enumerations of PopART that these belong to."""

_CPP_TYPES: dict[type, str] = {
    kind: kind.__name__ for kind in (bool, float, str, dict, list)
}
_CPP_TYPES.update({int: "uint", tuple: "list", set: "list"})


def validate_popart_options(options_dict: Mapping[str, Any]) -> None:
    """Check settings as PopTorch's backend does before compiling, and log them.

    A setting is looked up among the settings of its value's type, so a value of another
    type makes a known name unknown. Empty containers are skipped: they set nothing.
    Settings are logged at level DEBUG.

    Args:
        options_dict: Settings by name, from `Options.toDict`.

    Raises:
        Error: If a setting is unknown, out of range, or of a type that the
            backend doesn't take.

    Example:
        >>> from ipufit.emulator import Options, OutputMode
        >>> options = Options().outputMode(OutputMode.All)
        >>> validate_popart_options(options.toDict())
        >>> _ = options._Popart.set("enableOutlinning", True)
        >>> validate_popart_options(options.toDict())
        Traceback (most recent call last):
        ...
        ipufit.emulator.errors.Error: 'poptorch_cpp_error': Unknown bool option ...
    """
    for key, value in options_dict.items():
        if key in ("anchored_tensors", "patterns_level") or (
            key == "compilation_progress_bar_fn" and callable(value)
        ):
            continue
        kinds = (kind for kind in type(value).__mro__ if kind in _CPP_TYPES)
        type_name = _CPP_TYPES.get(next(kinds, object))
        if type_name == "dict":
            if key == "available_memory_proportion":
                _check_proportions(value)
            else:
                _check_elements(key, value.values())
                _check_known("dict", key, value)
            if key == "patterns":
                if "patterns_level" not in options_dict:
                    raise _backend_error(
                        "Option patterns needs patterns_level: use "
                        "`_Popart.setPatterns`."
                    )
                _check_range("patterns_level", options_dict["patterns_level"])
                _check_patterns(value)
            if key.startswith("location_") and not value.keys() <= _LOCATION.keys():
                raise _backend_error(
                    f"Unknown option for tensor location {key}: {list(value)}, and "
                    f"there are {list(_LOCATION)}."
                )
            for name, item in value.items():
                logger.debug(
                    "poptorch.Options set %s[%s] to %s", key, name, _text(item)
                )
        elif type_name == "list":
            _check_elements(key, value)
            _check_known("list", key, value)
            for item in value:
                _check_range(key, item)
                logger.debug("poptorch.Options added %s to %s", _text(item), key)
        elif type_name is None:
            raise _backend_error(
                f"Unknown value type {type(value).__name__} for option {key}: use "
                "a bool, int, float, str, or a list or dict of them."
            )
        else:
            _check_known(type_name, key, [value])
            _check_range(key, value)
            if type_name == "uint" and not 0 <= value < 2**64:
                raise _backend_error(
                    f"Option {key} is {value}, and must be an integer of 64 bits "
                    "without a sign."
                )
            logger.debug("poptorch.Options set %s to value %s", key, _text(value))


_EXPLICIT = ("useHostCopyOps", "enableExplicitMainLoops", "explicitRecomputation")
_SCALING = "automaticLossScalingSettings."


def _backend_error(message: str) -> Error:
    return Error(message, type="poptorch_cpp_error")


def popart_error(message: str) -> Error:
    """Return an error of PopART's."""
    return Error(message, type="popart_exception")


def _text(value: Any) -> str:
    """Format a value as C++ does: `true`, and enumerations as numbers."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, int) else str(value)


def _check_known(type_name: str, key: str, values: Collection[Any]) -> None:
    """Refuse an unknown setting, unless it sets nothing."""
    if TYPES.get(key) == type_name or not values:
        return
    hint = f"It takes a {TYPES[key]}." if key in TYPES else "Check its spelling."
    raise _backend_error(f"Unknown {type_name} option {key}. {hint}")


def _check_range(key: str, value: Any) -> None:
    enumeration = ENUMERATIONS.get(key)
    if enumeration is None:
        return
    names = {str(int(member)): member.name for member in enumeration}
    if _text(value) not in names:
        known = ", ".join(f"{number} ({name})" for number, name in names.items())
        raise _backend_error(
            f"Value for {enumeration.__name__} out of range: option {key} = "
            f"{_text(value)}, and PopART knows {known}."
        )


def _check_elements(key: str, values: Any) -> None:
    for value in values:
        if not isinstance(value, (str, int)):
            raise _backend_error(
                f"Unknown value type {type(value).__name__} inside option {key}: "
                "use str or int."
            )


def _check_proportions(proportions: Mapping[int, Any]) -> None:
    for ipu, proportion in proportions.items():
        if not isinstance(proportion, (int, float)):
            raise _backend_error(
                f"Unknown value type {type(proportion).__name__} for the memory "
                f"proportion of IPU{ipu}: use a float."
            )


def _check_patterns(patterns: Mapping[str, Any]) -> None:
    for name, is_enabled in patterns.items():
        if name not in PATTERNS:
            similar = difflib.get_close_matches(str(name), PATTERNS) or PATTERNS
            raise popart_error(f"Unknown pattern {name}: PopART has {list(similar)}.")
        if name in _MANDATORY and not is_enabled:
            raise popart_error(f"Pattern '{name}' is mandatory: it can't be disabled.")


def refused_settings(
    settings: Mapping[str, Any], ipus: Collection[int], *, is_training: bool
) -> Iterator[str]:
    """List what PopART refuses of known settings in a program.

    Args:
        settings: Settings by name, from `Options.toDict`.
        ipus: The IPUs of one replica that run operators.
        is_training: Whether the program is differentiated.

    Yields:
        Problems in words, each with the file of PopART that refuses it.
    """
    mode, is_split = settings["execution_mode"], len(ipus) > 1
    micro_batches = settings["gradient_accumulation"]
    replicas = settings["replication_factor"]
    session = {
        # PopTorch's choices of what options leave open (PopTorch, `Compiler.cpp`).
        "enableGradientAccumulation": micro_batches > 1,
        "enablePipelining": mode == 0 and is_split,
        "enableReplicatedGraphs": replicas > 1,
        "executionPhaseSettings.phases": 2 if mode == 2 else 0,
        "virtualGraphMode": 3 if mode == 2 else 1 if is_split else 2,
        **dict.fromkeys(_EXPLICIT, settings.get("enableExplicitIR", False)),
        **settings,
    }
    get = session.get
    copies, loops, recomputes = map(get, _EXPLICIT)
    pipelines, graphs = session["enablePipelining"], session["virtualGraphMode"]
    phases = session["executionPhaseSettings.phases"]
    accumulates = session["enableGradientAccumulation"]
    is_explicit = pipelines and copies and loops
    needs_pipeline = get("autoRecomputation") == 3 and phases < 2 and not is_explicit

    for ipu, proportion in settings["available_memory_proportion"].items():
        stored = ctypes.c_float(proportion).value
        if ipu in ipus and (stored > 1 or stored <= 0):
            yield (
                f"The available memory proportion of IPU{ipu} is {proportion}: it must "
                "be above 0, and 1 at most (`builder.cpp`)."
            )
    if graphs == 0 and is_split:
        yield f"virtualGraphMode Off is for 1 IPU, not for {len(ipus)} (`ir.cpp`)."
    if pipelines and not is_explicit and not is_split:
        yield "enablePipelining is for models on several IPUs (`ir.cpp`)."
    if phases > 1 and graphs != 3:
        yield f"{phases} phases need virtualGraphMode ExecutionPhases (`ir.cpp`)."
    if needs_pipeline and (recomputes or not pipelines):
        yield "autoRecomputation Pipeline needs a pipeline: use 1 (`recompute.cpp`)."
    if get("aliasZeroCopy") and not (recomputes and (is_explicit or not pipelines)):
        yield "aliasZeroCopy needs enableExplicitIR (`ir.cpp`)."
    if loops and not copies:
        yield "enableExplicitMainLoops needs useHostCopyOps (`ir.cpp`)."
    if is_explicit and not recomputes:
        yield "Explicit pipelines need explicitRecomputation (`pipeline.cpp`)."
    if loops and settings["output_mode"] == OutputMode.EveryN:
        yield "enableExplicitMainLoops doesn't go with EveryN (`mainloops.cpp`)."
    if accumulates != (micro_batches > 1) and not (accumulates and is_training):
        yield (
            f"enableGradientAccumulation is {accumulates}, and gradients of "
            f"{micro_batches} micro-batches are added (`sessionoptions.cpp`, `ir.cpp`)."
        )
    if replicas > 1 and not get("enableReplicatedGraphs"):
        yield f"{replicas} replicas need enableReplicatedGraphs (`irlowering.cpp`)."
    depth = get("defaultPrefetchBufferingDepth", get("defaultBufferingDepth", 1))
    if depth < 1 and not get("syntheticDataMode"):
        yield f"The buffering depth is {depth}, below 1 (`sessionoptions.cpp`)."
    tiles = get("numIOTiles", 0)
    if tiles and graphs and (tiles % 2 or not 32 <= tiles < 1472):
        yield f"numIOTiles is {tiles}: take an even number from 32 (`irlowering.cpp`)."
    unknown = {*get("gclOptions", ())} - {"useSynclessCollectives", "maxBytesPerTile"}
    if unknown:
        yield f"Unknown gclOptions: {', '.join(sorted(unknown))} (`irlowering.cpp`)."
    has_all = _MANDATORY.issubset(get("patterns", _MANDATORY))
    if is_training and get("patterns_level") == 0 and not has_all:
        yield "patterns_level 0 lacks mandatory patterns: use 1 (`patterns.cpp`)."
    if not get(f"{_SCALING}enabled"):
        return
    if not is_training:
        yield "setAutomaticLossScaling is for training (`automaticlossscaling.cpp`)."
    if get(f"{_SCALING}gradientTensorTrackingMethod") == 2:
        yield (
            "gradientTensorTrackingMethod 2 needs names of tensors, which PopTorch "
            "doesn't pass: use 0 or 1 (`automaticlossscaling.cpp`)."
        )
    for name in ("binEdgeLocation", "thresholdUpperCountProportion"):
        share = get(f"{_SCALING}{name}", 0)
        if not 0 <= share <= 1:
            yield f"{_SCALING}{name} is {share}, and must be from 0 to 1."
