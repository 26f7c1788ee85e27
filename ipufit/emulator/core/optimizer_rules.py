# SPDX-License-Identifier: Apache-2.0
"""Read an optimizer into settings of the device, and check later changes.

The device runs no Python optimizer: it has kinds of its own, configured with hyper-
parameters. It takes PopTorch's optimizers, torch's SGD, Adam, AdamW and RMSprop, and
subclasses of these, which count as their base class.
"""

from __future__ import annotations

import functools
import logging
import math
import numbers
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterable, Iterator, Mapping, NamedTuple

import torch

from .._logging import logger
from ..errors import Error
from ..optim import ATTRIBUTES, LAMB, AdamW, Optimizer

_TYPE_NAMES = [name for name in ATTRIBUTES if name.endswith("accum_type")]

# Torch's optimizers don't tell what they were given: these values count as constants.
_ORDINARY = {
    "weight_decay": 0.0,
    "momentum": 0.0,
    "dampening": 0.0,
    "velocity_scaling": 1.0,
    "eps": 1e-8,
    "loss_scaling": 1.0,
}

# Never unexpected: what torch, some versions later than others, puts there itself.
_TORCH_GROUP_NAMES = """
    amsgrad capturable centered decoupled_weight_decay differentiable foreach fused
    maximize param_names params
"""
_OPTIMIZER_NAMES = """
    defaults host_state_is_dirty ipu_state_is_dirty loss_scaling param_groups state
    state_dict variable_attrs
"""


class OptimizerKind(NamedTuple):
    """An optimizer that the device has.

    Attributes:
        family: Name of its family in PopTorch.
        mode: Its name within the family. Family and mode decide the program.
        variables: Names of the hyper-parameters that are read from each parameter
            group.
    """

    name: str
    family: str
    mode: str
    variables: tuple[str, ...]


_SGD = ("lr", "weight_decay", "momentum", "dampening", "nesterov")
_ADAM = ("lr", "weight_decay", "betas", "eps")
_LAMB = (*_ADAM, "max_weight_norm")
_RMSPROP = ("lr", "weight_decay", "momentum", "eps", "alpha")


def _kind(optimizer: Any) -> OptimizerKind:
    """Return the kind of an optimizer, found by `isinstance` as in PopTorch 3.4.

    AdamW is tried before Adam, because newer torch derives it from Adam.
    """
    if isinstance(optimizer, torch.optim.SGD):
        if getattr(optimizer, "use_combined_accum", False):
            return OptimizerKind("SGD1", "SGD", "combined", (*_SGD, "velocity_scaling"))
        return OptimizerKind("SGD2", "SGD", "separate", _SGD)
    if isinstance(optimizer, torch.optim.AdamW):
        # The device corrects the bias in any case: the mode is AdamW's.
        corrects = not isinstance(optimizer, AdamW) or optimizer.bias_correction
        name = "ADAMW" if corrects else "ADAMW_NO_BIAS"
        return OptimizerKind(name, "Adam", "AdamW", _ADAM)
    if isinstance(optimizer, torch.optim.Adam):
        return OptimizerKind("ADAM", "Adam", "Adam", _ADAM)
    if isinstance(optimizer, torch.optim.RMSprop):
        centered = {bool(group.get("centered")) for group in optimizer.param_groups}
        if len(centered) > 1:
            raise AssertionError(
                "All parameter groups must have the same value for the 'centered' "
                "attribute: the device has one RMSprop for all of them."
            )
        name, mode = "RMSPROP", "RMSProp"
        if True in centered:
            name, mode = "RMSPROP_CENTERED", "CenteredRMSProp"
        return OptimizerKind(name, "Adaptive", mode, _RMSPROP)
    if isinstance(optimizer, LAMB):
        is_lamb = optimizer.bias_correction
        name, mode = ("LAMB", "Lamb") if is_lamb else ("LAMB_NO_BIAS", "LambNoBias")
        return OptimizerKind(name, "Adam", mode, _LAMB)
    raise AssertionError(
        "Unsupported optimizer type. Types supported are poptorch.optim's SGD, Adam, "
        "AdamW, RMSprop and LAMB, and torch.optim's SGD, Adam, AdamW and RMSprop; got "
        f"{type(optimizer).__name__}."
    )


class Variable(NamedTuple):
    """A hyper-parameter and whether it is compiled into the program."""

    value: float
    is_const: bool


Variables = Dict[str, Variable]
"""The hyper-parameters of a parameter group; `beta1` and `beta2` for `betas`."""


@dataclass(frozen=True)
class OptimizerSettings:
    """Hyper-parameters read from an optimizer; equal if there is nothing to send.

    Attributes:
        loss_scaling: The factor of the loss, and whether it is compiled in.
        defaults: Values for the parameters that are in no group.
        groups: Values for the parameters of each group.
        max_grad_norm: Largest global norm, infinite if there is no clipping.
        use_tf_variant: Whether RMSprop is TensorFlow's.
        accum_type: Type of accumulated gradients.
        velocity_accum_type: Type of SGD's velocity.
        first_order_momentum_accum_type: Type of Adam's, LAMB's and RMSprop's means.
        second_order_momentum_accum_type: Type of their second means.
    """

    kind: OptimizerKind
    loss_scaling: Variable
    defaults: Variables
    groups: tuple[Variables, ...]
    max_grad_norm: float
    use_tf_variant: bool
    accum_type: torch.dtype
    velocity_accum_type: torch.dtype
    first_order_momentum_accum_type: torch.dtype
    second_order_momentum_accum_type: torch.dtype

    @property
    def uses_running_mean(self) -> bool:
        """Whether gradients are accumulated as a running mean in any case.

        A sum could overflow a 16-bit accumulator. Combined SGD is an exception:
        `accum_type` isn't the type of its accumulator.
        """
        return self.accum_type == torch.float16 and self.kind.mode != "combined"

    def variables(self, group_index: int | None) -> Variables:
        """Return the hyper-parameters of a group, or the defaults for None."""
        return self.defaults if group_index is None else self.groups[group_index]

    def with_types_of(self, compiled: OptimizerSettings) -> OptimizerSettings:
        """Return the same settings with the state's types of compiled ones."""
        types = {name: getattr(compiled, name) for name in _TYPE_NAMES}
        return replace(self, **types)


class OptimizerReader:
    """Reads the optimizers of one executor, and warns about new attributes.

    The first reading records the names of all attributes. Later readings warn, once for
    each message, about new names: they have no effect, though a program that sets them
    probably expects one.

    Args:
        relax_attribute_checks: Log these warnings as debug messages instead.
        automatic_loss_scaling: Whether the device adapts the loss scaling, which makes
            it variable.
    """

    def __init__(
        self, relax_attribute_checks: bool, automatic_loss_scaling: bool = False
    ) -> None:
        self._level = logging.DEBUG if relax_attribute_checks else logging.WARNING
        self._automatic_loss_scaling = automatic_loss_scaling
        self._known: dict[str, set[str]] = {}
        self._logged: set[str] = set()

    def read(self, optimizer: torch.optim.Optimizer) -> OptimizerSettings:
        """Convert an optimizer to settings.

        Raises:
            AssertionError: If the device has no such optimizer, or an attribute is
                missing or of the wrong type.
            ValueError: If it uses a variant the device doesn't have.
            Error: If the device can't use a value.
        """
        kind = _kind(optimizer)
        cls = type(optimizer)
        is_torchs = cls.__module__.startswith("torch.optim.")
        bases = {torch.optim.Optimizer, Optimizer}
        if not is_torchs and not bases.intersection(cls.__bases__):
            self._log(
                logging.WARNING,
                f"{cls.__name__} is a custom optimizer: Poptorch does not run Python "
                "optimizer code directly, so it is treated as the optimizer it "
                "derives from",
            )
        self._check_names(kind, optimizer)
        defaults, *groups = [
            _variables(kind, optimizer, values)
            for values in (optimizer.defaults, *optimizer.param_groups)
        ]
        types = {name: getattr(optimizer, name, torch.float32) for name in _TYPE_NAMES}
        for name, dtype in types.items():
            if dtype not in (torch.float32, torch.float16):
                raise ValueError(
                    f"{name} must be torch.float32 or torch.float16, got {dtype!r}."
                )
        scaling = getattr(optimizer, "loss_scaling", 1.0)
        loss_scaling = _variable(kind, optimizer, "loss_scaling", scaling)
        if not abs(loss_scaling.value) > 0.0:  # or NaN
            raise Error(
                "Loss scaling cannot be 0: no gradient would be left.",
                type="popart_exception",
            )
        if self._automatic_loss_scaling:
            loss_scaling = loss_scaling._replace(is_const=False)
        return OptimizerSettings(
            kind,
            loss_scaling=loss_scaling,
            defaults=defaults,
            groups=tuple(groups),
            max_grad_norm=_max_grad_norm(kind, optimizer),
            use_tf_variant=bool(getattr(optimizer, "use_tf_variant", False)),
            **types,
        )

    def _check_names(
        self, kind: OptimizerKind, optimizer: torch.optim.Optimizer
    ) -> None:
        of_groups = {*_TORCH_GROUP_NAMES.split(), *kind.variables}
        of_optimizers = {*_OPTIMIZER_NAMES.split(), *ATTRIBUTES}
        places: list[tuple[str, Iterable[str], set[str]]] = [
            ("default group variable", optimizer.defaults, of_groups),
            ("optimizer attribute", vars(optimizer), of_optimizers),
        ]
        for index, values in enumerate(optimizer.param_groups):
            places.append((f"group {index} attribute", values, of_groups))
        is_first = not self._known
        for what, names, readable in places:
            public = {name for name in names if not name.startswith("_")}
            if is_first:
                self._known[what] = public
            unexpected = sorted(public - readable - self._known.get(what, set()))
            if unexpected:
                self._log(
                    self._level,
                    f"Ignoring unexpected {what} in {kind.name} optimizer: "
                    f"{unexpected}",
                )

    def _log(self, level: int, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.log(level, message)


def _variables(
    kind: OptimizerKind, optimizer: torch.optim.Optimizer, values: Mapping[str, Any]
) -> Variables:
    if kind.family == "Adam" and values.get("amsgrad", False):
        raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")
    # Newer torch has it and PopTorch's hasn't: to ignore it would train otherwise.
    if kind.mode == "Adam" and values.get("decoupled_weight_decay", False):
        raise ValueError(
            "Adam's decoupled_weight_decay is not supported: use AdamW, which is that."
        )
    variables: Variables = {}
    for name in kind.variables:
        if name not in values:
            raise AssertionError(
                f"Mandatory attribute {name} not found in optimizer group"
            )
        value = values[name]
        if name != "betas":
            variables[name] = _variable(kind, optimizer, name, value)
        elif isinstance(value, tuple) and len(value) == 2:
            for key, beta in zip(("beta1", "beta2"), value):
                variables[key] = _variable(kind, optimizer, name, _number(key, beta))
        else:
            raise AssertionError(
                f"Expected a pair for betas, a tuple, but got {value!r}"
            )
    return variables


def _variable(
    kind: OptimizerKind, optimizer: torch.optim.Optimizer, name: str, value: object
) -> Variable:
    number = _number(name, value)
    attributes = getattr(optimizer, "variable_attrs", None)
    if attributes is not None:
        return Variable(number, bool(attributes.isConstant(name)))
    ordinary = {**_ORDINARY, "weight_decay": 0.01 if kind.mode == "AdamW" else 0.0}
    is_ordinary = name not in ordinary or number == ordinary[name]
    return Variable(number, is_ordinary and name != "lr")


def _number(name: str, value: object) -> float:
    if not isinstance(value, numbers.Real):
        raise AssertionError(
            f"Expected a number for {name} but got {value!r} "
            f"of type {type(value).__name__}"
        )
    return float(value)


def _max_grad_norm(kind: OptimizerKind, optimizer: torch.optim.Optimizer) -> float:
    if kind.family == "Adaptive" or kind.variables is _LAMB:
        return math.inf  # RMSprop and LAMB don't clip
    value = _number("max_grad_norm", getattr(optimizer, "max_grad_norm", math.inf))
    if math.isnan(value):
        raise Error(
            "Maximum norm of gradients cannot be NaN.", type="poptorch_cpp_error"
        )
    return value


_VELOCITY_IS_SCALED = (
    ", and it is the loss scaling where velocity and accumulated gradient are separate"
)
_NEVER_NEGATIVE = ("weight_decay", "momentum", "dampening", "beta1", "beta2", "alpha")


def check_values(settings: OptimizerSettings) -> None:
    """Refuse hyper-parameters that PopART takes for errors (`runValueChecks`).

    Raises:
        Error: A value of the defaults or of a parameter group is one.
    """
    family, mistaken = settings.kind.family, "bailing as this might be a user error"
    for group in (settings.defaults, *settings.groups):
        values = {name: variable.value for name, variable in group.items()}
        lr = values["lr"]
        if lr < 0:
            raise _refusal(
                f"Negative learning rate ({lr:g}) in {family}, {mistaken}. Clamp a "
                "schedule at 0"
            )
        if group["lr"] == (0.0, True):
            raise _refusal(
                f"Constant, zero learning rate in {family}, {mistaken}. Pass lr to "
                "the optimizer's constructor, so that it is variable"
            )
        for name in _NEVER_NEGATIVE:
            if values.get(name, 0.0) < 0:
                what = name.replace("_", " ")
                raise _refusal(
                    f"Negative {what} ({values[name]:g}) in {family}, {mistaken}"
                )
        if values.get("eps", 1.0) <= 0:
            raise _refusal(
                f"Non-positive eps ({values['eps']:g}) in {family} is not supported. "
                "Take a tiny one, such as 1e-30"
            )
        is_narrow = settings.first_order_momentum_accum_type == torch.float16
        if family == "Adaptive" and is_narrow and not group["eps"].is_const:
            raise _refusal(
                "RMSprop can't add a variable eps, which is float32, to a float16 mean "
                "of squares: Inferred type of lhs (half) does not match inferred type "
                "of rhs (float). Leave eps out, or take "
                "first_order_momentum_accum_type=torch.float32"
            )
        if family != "SGD":
            continue
        velocity, reason = values.get("velocity_scaling"), ""
        if velocity is None:
            velocity, reason = settings.loss_scaling.value, _VELOCITY_IS_SCALED
        if velocity <= 0:
            raise _refusal(
                f"Non-positive velocity scaling ({velocity:g}) in SGD is not "
                f"supported{reason}"
            )
        if values["nesterov"] and values["dampening"] > 0:
            raise _refusal(
                f"With Nesterov momentum, dampening ({values['dampening']:g}) in SGD "
                "should be zero"
            )


def vanishing_constants(settings: OptimizerSettings) -> Iterator[str]:
    """Yield what becomes of an `eps` that float16 rounds to 0."""
    name = "second_order_momentum_accum_type"
    if settings.kind.family == "Adaptive":
        name = "first_order_momentum_accum_type"
    groups = settings.defaults, *settings.groups
    values = [group["eps"].value for group in groups if "eps" in group]
    for eps in dict.fromkeys(values):
        if torch.tensor(eps, dtype=getattr(settings, name)) == 0:
            yield (
                f"eps of {eps:g} is 0 in float16, in which {name} has a device divide "
                "by the root of the mean of squares: a weight whose gradients have all "
                "been 0 becomes NaN. Take eps=1e-7, or torch.float32 as that type"
            )


def check_replaceable(old: OptimizerSettings, new: OptimizerSettings) -> None:
    """Check that the compiled program can go on with new settings.

    Groups beyond those compiled are ignored: no parameter belongs to them. A constant
    dampening may change, since PopART doesn't compare it (`sgd.cpp`). The types of
    Adam's accumulators aren't compared: they stay as compiled.

    Args:
        old: The settings that the device has.
        new: The settings to take.

    Raises:
        Error: If the kind, the value of a constant, the set of constants, the largest
            gradient norm or SGD's accumulators differ.
        ValueError: If `accum_type` becomes float16: that needs another program.
    """
    if new.uses_running_mean and not old.uses_running_mean:
        raise ValueError(
            "accum_type can not become torch.float16, because the executable is "
            "already compiled."
        )
    if old.kind.family != new.kind.family:
        raise _refusal(
            f"Can not replace optimizer of type {old.kind.name} "
            f"with one of type {new.kind.name}"
        )
    fixed = {"mode": (old.kind.mode, new.kind.mode)}
    names = ["use_tf_variant"]
    if old.kind.family == "SGD":
        names += ["accum_type", "velocity_accum_type"]
    fixed.update({name: (getattr(old, name), getattr(new, name)) for name in names})
    changed = [
        f"{name} was {was}, now {now}"
        for name, (was, now) in fixed.items()
        if was != now
    ]
    if changed:
        raise _refusal(
            f"Can not replace this {old.kind.family} optimizer by one that needs "
            f"another program: {'; '.join(changed)}"
        )
    if new.max_grad_norm != old.max_grad_norm:
        raise _refusal(
            "Clip norm settings differ: max_grad_norm was "
            f"{old.max_grad_norm} when the model was compiled, now {new.max_grad_norm}"
        )
    if len(new.groups) < len(old.groups):
        raise _refusal(
            f"The model was compiled with {len(old.groups)} parameter groups, the "
            f"new optimizer has {len(new.groups)}"
        )
    scalings = {"loss_scaling": old.loss_scaling}, {"loss_scaling": new.loss_scaling}
    places = [("", *scalings), (" of the defaults", old.defaults, new.defaults)]
    for index, pair in enumerate(zip(old.groups, new.groups)):
        places.append((f" of group {index}", *pair))
    for place, old_variables, new_variables in places:
        for name, was in old_variables.items():
            now = new_variables[name]
            if now != was and name != "dampening":
                _check_change(f"{name}{place}", was, now)


def _check_change(what: str, was: Variable, now: Variable) -> None:
    if was.is_const != now.is_const:
        kinds = ("constant", "variable") if was.is_const else ("variable", "constant")
        raise _refusal(
            f"Can not replace a constant value with a non constant value. {what} was "
            f"{kinds[0]} ({was.value}) when the model was compiled, now {kinds[1]} "
            f"({now.value}). "
            "Pass it to the optimizer's constructor, or mark it with "
            "variable_attrs.markAsVariable, before the model is compiled"
        )
    if was.is_const:
        raise _refusal(
            f"Values are constant but do not match. {what} was compiled as "
            f"{was.value}, now {now.value}. Pass it to the constructor of a "
            "poptorch.optim optimizer, or mark it with variable_attrs.markAsVariable, "
            "before the model is compiled"
        )


def _refusal(message: str) -> Error:
    return Error(f"{message}.", type="popart_exception")


def optimizer_log(settings: OptimizerSettings) -> Iterator[str]:
    """Yield PopTorch's log lines about an optimizer: the graph's, then each group's.

    Constants of the compiled program are followed by `(const)`.
    """
    family, first = settings.kind.family, settings.first_order_momentum_accum_type
    types = {
        "accum_type": settings.accum_type,
        "first_order_momentum_accum_type": (
            settings.velocity_accum_type if family == "SGD" else first
        ),
        "second_order_momentum_accum_type": settings.second_order_momentum_accum_type,
    }
    groups = [("graph", "default_", settings.defaults)]
    groups += [(f"group {i}", "", group) for i, group in enumerate(settings.groups)]
    for place, prefix, group in groups:
        variables = {prefix + name: variable for name, variable in group.items()}
        if settings.kind.mode == "separate":  # its velocity is scaled as the loss is
            variables[f"{prefix}velocity_scaling"] = settings.loss_scaling
        variables["loss_scaling"] = settings.loss_scaling
        words = [f"Updating {place} optimizer with {family}"]
        for name, variable in variables.items():
            suffix = " (const)" if variable.is_const else ""
            words.append(f"{camel_case(name)}={variable.value:g}{suffix}")
        if prefix:
            words += [
                f"{camel_case(n)}={str(t).split('.')[1]}" for n, t in types.items()
            ]
        yield ", ".join(words)


@functools.lru_cache(maxsize=None)
def camel_case(name: str) -> str:
    """Return PopART's name of a hyper-parameter.

    Example:
        >>> camel_case("lr"), camel_case("weight_decay")
        ('learningRate', 'weightDecay')
    """
    first, *others = name.replace("lr", "learning_rate").split("_")
    return first + "".join(word.capitalize() for word in others)
