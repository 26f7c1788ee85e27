# SPDX-License-Identifier: Apache-2.0
"""PopTorch's optimizers: parameter groups, values between updates, device state.

An `Optimizer` describes an optimizer, with Keras's names of settings where they exist.
Settings that PopTorch lacks are refused; `docs/reference/optimizers.md` lists the
differences.

PopTorch accepts four of torch's optimizers, but keeps their momentum only until the
next detach, and compiles their settings in as constants. The optimizers of
`poptorch.optim` have neither fault, so torch's optimizers are rebuilt as
`poptorch.optim`'s, with their parameter groups.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import fnmatch
import functools
import inspect
from dataclasses import dataclass, field
from typing import (
    AbstractSet,
    Any,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
    Union,
)

import torch

from ipufit._arguments import (
    ArgumentRepr,
    check_flags,
    check_instance,
    check_number,
    refuse,
    shown,
)
from ipufit._kinds import anything, check_saved, dict_of
from ipufit._modules import parameters_of, path_of
from ipufit._poptorch import poptorch
from ipufit.distributed import warn_in_first_process
from ipufit.errors import (
    ConfigError,
    SharedRateWarning,
    UnknownNameError,
    UnsupportedError,
    refuse_foreign,
)

from .schedule import (
    FLOAT16_LOSS_SCALING,
    Fit,
    LossScaleRamp,
    RampedScaling,
    ScheduledValues,
    ScheduleLike,
    SchedulesLike,
    Setter,
    TorchScheduler,
    make_rates,
    make_schedules,
)
from .values import KERNEL_SETTINGS, OptimizerValues, plain

# Parameters ------------------------------------------------------------------------


@dataclass(frozen=True)
class Frozen:
    """What `freeze` has frozen, in numbers; `str()` returns a sentence.

    Attributes:
        before: Name of the first layer that is trained.
        parameters: Number of parameters that are frozen.
        values: Number of values in frozen parameters.
        trained_parameters: Number of parameters that are trained.
        trained_values: Number of values in trained parameters.
    """

    before: str
    parameters: int
    values: int
    trained_parameters: int
    trained_values: int

    def __str__(self) -> str:
        """Return the counts as a sentence."""
        return (
            f"Frozen before {self.before!r}: {self.parameters:,} parameters "
            f"({self.values:,} values); trained: {self.trained_parameters:,} "
            f"({self.trained_values:,} values)"
        )


def freeze(module: torch.nn.Module, *, before: str, statistics: bool = False) -> Frozen:
    """Freeze the parameters of all layers before a named layer.

    Layers come in the order of `module.named_modules()`. The named layer and later
    layers don't change. A parameter that a later layer shares with an earlier layer is
    frozen. Call `freeze` before `fit`; `compile` needn't be called again.

    A frozen layer still behaves as in training: a batch norm normalizes by the batch,
    and its running statistics move. With `statistics=True` frozen layers are in eval
    mode, and the module in train mode, which `fit` keeps: batch norms use their
    running statistics without updating them, and dropout does nothing.

    Args:
        module: The user's module.
        before: Name of the first layer that is trained, such as "layer3" or
            "encoder.layer.8".
        statistics: Whether frozen layers are put into eval mode, too.

    Returns:
        The numbers of parameters; `print` shows a sentence.

    Raises:
        UnknownNameError: The module has no such layer; the nearest is suggested.
        ConfigError: No layer with parameters comes before the named layer; or `module`
            isn't a `torch.nn.Module`.

    Example:
        >>> from torch import nn
        >>> module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        >>> print(freeze(module, before="2"))
        Frozen before '2': 4 parameters (15 values); trained: 2 (4 values)
    """
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"freeze() got a {type(module).__name__}, which isn't a torch.nn.Module. "
            "The module of an IPUModel is model.module."
        )
    check_instance("before", before, str, of="freeze()")
    names = [name for name, _ in module.named_modules() if name]
    if before not in names:
        near = difflib.get_close_matches(before, names, n=5)
        known = near or [name for name, _ in module.named_children()]
        raise UnknownNameError("layer", before, known)
    kept = {id(layer) for layer in module.get_submodule(before).modules()}
    chosen: dict[int, torch.nn.Parameter] = {}
    layers = []
    for name, layer in module.named_modules():
        if name == before:
            break
        contains_it = not name or before.startswith(f"{name}.")
        if not contains_it and id(layer) not in kept:
            layers.append(layer)
        # A module that contains the named layer has its parameters before it.
        chosen.update({id(p): p for p in layer.parameters(recurse=False)})
    if not chosen:
        raise ConfigError(
            f"Nothing with parameters comes before {before!r}: nothing was frozen. "
            f"Layers are, in this order: {', '.join(names)}."
        )
    for parameter in chosen.values():
        parameter.requires_grad_(False)
    if statistics:
        if not module.training:  # `fit` keeps eval mode only in a module in train mode
            module.train()
        for layer in layers:
            layer.training = False
    trained = [p for p in module.parameters() if p.requires_grad]
    frozen_values = sum(p.numel() for p in chosen.values())
    trained_values = sum(p.numel() for p in trained)
    return Frozen(before, len(chosen), frozen_values, len(trained), trained_values)


def check_covers(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    """Refuse trainable weights that aren't in a parameter group.

    torch wouldn't train such weights; PopTorch trains them with the optimizer's
    defaults (PopTorch, `CompilerImpl.cpp`), which nobody expects.

    Raises:
        ConfigError: A trainable parameter isn't in any group.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> check_covers(torch.optim.SGD([module.weight], lr=0.1), module)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: bias: trainable, but not among the optimizer's ...
    """
    grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        p
        for p in parameters_of(module)
        # In this order, because reading a trained weight copies all from the device.
        if id(p) not in grouped and p.requires_grad
    ]
    if missing:
        names = [path_of(module, p) for p in missing]
        raise ConfigError(
            f"{', '.join(names)}: trainable, but not among the optimizer's "
            "parameters. An IPU would train them with the optimizer's defaults. Freeze "
            "them with requires_grad_(False), or give them to the optimizer; and call "
            "compile() again if layers or groups were added since."
        )


_NORMS = (
    torch.nn.modules.batchnorm._NormBase,  # batch and instance norms
    torch.nn.GroupNorm,
    torch.nn.LayerNorm,
    getattr(torch.nn, "RMSNorm", torch.nn.LayerNorm),  # torch 2.0 has none
)


def is_norm(layer: torch.nn.Module) -> bool:
    """Return whether a layer is a normalization of torch, or its class ends in "Norm".

    Example:
        >>> is_norm(torch.nn.LayerNorm(2)), is_norm(torch.nn.Linear(2, 2))
        (True, False)
    """
    return isinstance(layer, _NORMS) or type(layer).__name__.endswith("Norm")


def split_words(words: str | Sequence[str]) -> tuple[str, ...]:
    """Split a selection of parameters into words, `"bias_and_norm"` into two.

    Example:
        >>> split_words("bias_and_norm"), split_words(["bias", "embed.*"])
        (('bias', 'norm'), ('bias', 'embed.*'))
    """
    is_listed = isinstance(words, (Sequence, AbstractSet))
    several: Any = words if is_listed and not isinstance(words, str) else (words,)
    if not all(isinstance(word, str) for word in several):
        return tuple(several)  # the caller refuses it
    both = ("bias", "norm")
    spelled = [both if word == "bias_and_norm" else (word,) for word in several]
    return tuple(dict.fromkeys(word for some in spelled for word in some))


def find_parameters(
    module: torch.nn.Module, words: Sequence[str], argument: str
) -> set[int]:
    """Return the ids of the parameters that the words select.

    Args:
        module: The module that has the parameters.
        words: `"bias"`: parameters whose last name part is `bias`. `"norm"`: parameters
            of normalization layers, which are torch's and classes whose name ends in
            `Norm`. Any other word is a pattern of names, as in `fnmatch`.
        argument: Name of the user's argument, for messages.

    Raises:
        ConfigError: A pattern matches no parameter.
    """
    # A tied parameter is selected by any of its names.
    every = list(module.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    for word in words:
        if word == "norm":
            norms = filter(is_norm, module.modules())
            chosen.update(id(p) for n in norms for p in n.parameters(recurse=False))
        elif word == "bias":
            chosen.update(id(p) for n, p in every if n.rpartition(".")[2] == "bias")
        else:
            matches = {id(p) for n, p in every if fnmatch.fnmatchcase(n, word)}
            if not matches:
                raise ConfigError(
                    f"{argument} has {word!r}, which matches no parameter. Use 'bias', "
                    "'norm', 'bias_and_norm' or patterns of names such as "
                    f"{', '.join(repr(name) for name, _ in every[:3]) or 'head.*'}."
                )
            chosen |= matches
    return chosen


def parameter_groups(
    module: torch.nn.Module,
    no_decay: Sequence[str],
    no_trust_ratio: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer: with weight decay and without.

    Args:
        module: The module that has the parameters.
        no_decay: Words for `find_parameters`.
        no_trust_ratio: Words for parameters that LAMB updates as Adam does: a
            `max_weight_norm` of 0 makes their trust ratio 1.

    Returns:
        One to four groups, without empty groups. The first group has the optimizer's
        values; `weight_decay` or `max_weight_norm` is 0 in the others.

    Raises:
        ConfigError: A pattern matches no parameter.

    Example:
        >>> groups = parameter_groups(torch.nn.Linear(2, 1), ["bias"])
        >>> [group.get("weight_decay") for group in groups]
        [None, 0.0]
    """
    undecayed = find_parameters(module, no_decay, "no_decay")
    untrusted = find_parameters(module, no_trust_ratio, "no_trust_ratio")
    groups: dict[tuple[bool, bool], dict[str, Any]] = {
        (False, False): {"params": []},
        (True, False): {"params": [], "weight_decay": 0.0},
        (True, True): {"params": [], "weight_decay": 0.0, "max_weight_norm": 0.0},
        (False, True): {"params": [], "max_weight_norm": 0.0},
    }
    for parameter in module.parameters():
        key = id(parameter)
        groups[key in undecayed, key in untrusted]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]] or [{"params": []}]


def groups_in_words(optimizer: torch.optim.Optimizer) -> str:
    """Describe the number of parameters of each group, and settings that differ.

    Args:
        optimizer: An optimizer with several groups of `parameter_groups`.

    Example:
        >>> groups = parameter_groups(torch.nn.Linear(2, 3), ["bias"])
        >>> print(groups_in_words(torch.optim.AdamW(groups, weight_decay=0.1)))
        weight_decay 0.1: 1 parameter (6 values); weight_decay 0: 1 parameter (3 values)
    """

    def plural(number: int, noun: str) -> str:
        return f"{number:,} {noun}{'' if number == 1 else 's'}"

    groups = optimizer.param_groups
    parts = []
    for group in groups:
        settings = [
            f"{name} {group[name]:g}"
            for name in ("weight_decay", "max_weight_norm")
            if len({other.get(name) for other in groups}) > 1
        ]
        number = plural(len(group["params"]), "parameter")
        values = plural(sum(p.numel() for p in group["params"]), "value")
        parts.append(f"{', '.join(settings)}: {number} ({values})")
    return "; ".join(parts)


# Optimizers ------------------------------------------------------------------------

CLASSES = {
    "adam": "Adam",
    "adamw": "AdamW",
    "lamb": "LAMB",
    "rmsprop": "RMSprop",
    "sgd": "SGD",
}
"""Names of classes in `poptorch.optim` by the names of optimizers."""

ELSEWHERE = {
    "lars": "'lamb' adapts the rate of each layer as LARS does, with Adam's momentum",
    "adagrad": (
        "'rmsprop' is nearest, which divides by a running mean of squared gradients "
        "where Adagrad divides by their sum; alpha=0.999 makes it a long one"
    ),
    "adadelta": (
        "'rmsprop' is nearest, which needs a learning rate where Adadelta scales by "
        "its earlier steps"
    ),
    "adafactor": (
        "'adamw' is nearest, whose state is smaller with first_order_momentum_accum_"
        "type=torch.float16; PopTorch has no factored second moment"
    ),
    "lion": "'adamw' is nearest, with a rate 3 to 10 times as large",
    **dict.fromkeys(("ftrl", "muon", "rprop"), f"there are {', '.join(CLASSES)}"),
    **dict.fromkeys(("adamax", "nadam", "radam"), "'adamw' or 'adam' is nearest"),
}
"""Names of optimizers that PopTorch doesn't have, and what it has instead."""

_DECOUPLED = "decoupled_weight_decay"
_HOST_ONLY = ("amsgrad", *KERNEL_SETTINGS)

OTHER_WORDS: dict[str, str | None] = {
    **dict.fromkeys((*_HOST_ONLY, "ema_overwrite_frequency", "params")),
    "beta_1": "betas=(beta_1, beta_2)",
    "beta_2": "betas=(beta_1, beta_2)",
    "decay": "weight_decay; for a rate that falls, compile(lr_schedule=...)",
    "epsilon": "eps",
    "loss_scale_factor": "loss_scaling",
    "lr": "learning_rate, which was given, too",
    "max_grad_norm": "global_clipnorm",
    "rho": "alpha",
    "use_ema": "ema_momentum",
    "wd": "weight_decay",
}
"""ipufit's name for a setting of Keras, torch or PopTorch; None if IPUs lack it."""


def _class_in_poptorch(name: str) -> Any:
    return getattr(poptorch.optim, CLASSES[name])


def _arguments(name: str) -> set[str]:
    """Return the names of an optimizer's arguments in PopTorch."""
    return set(inspect.signature(_class_in_poptorch(name)).parameters)


@dataclass(frozen=True, init=False, repr=False)
class Optimizer(ArgumentRepr):
    """A description of an optimizer of PopTorch, for `compile`.

    Args:
        name: "sgd", "adam", "adamw", "rmsprop" or "lamb".
        learning_rate: 0.001 by default, 0.01 for SGD. torch's name `lr` works, too.
        weight_decay: By default 0.01 for AdamW and LAMB, 0 for the others.
        no_decay: Parameters without weight decay: "bias", "norm" (normalization
            layers), "bias_and_norm" for both, or patterns of parameter names such as
            "embed*".
        no_trust_ratio: Parameters whose step LAMB does not scale by the norm of the
            weight, in the same form as `no_decay`. Their `max_weight_norm` is 0. Public
            BERT training has "bias" here.
        global_clipnorm: Largest norm of all gradients together; for Adam, AdamW, and
            SGD without momentum.
        clipnorm: Keras's largest norm of each gradient: refused, PopTorch lacks it.
        clipvalue: Keras's largest element: refused, PopTorch lacks it.
        loss_scaling: Factor of the loss in float16 training: a number, a
            `LossScaleRamp`, or "auto" for PopTorch's automatic loss scaling. The
            update and the reported loss are divided by it again. None: 128 with float16
            weights, else 1.
        ema_momentum: Train with a running average of the weights, as Keras's
            `use_ema`: from 0 to below 1; None for no average.
        **settings: Settings of the PopTorch optimizer by name, such as `betas`, `eps`,
            `momentum`, `nesterov`, `alpha`, `centered`, `accum_type` or
            `max_weight_norm`. All other settings are constants of the program.

    Raises:
        UnknownNameError: The name or a setting is unknown; the nearest is suggested.
        ConfigError: A value is out of range.
        UnsupportedError: PopTorch has no such optimizer or setting.

    Example:
        >>> Optimizer("adamw", learning_rate=2e-4, weight_decay=0.05,
        ...           no_decay=("bias", "norm"), global_clipnorm=1.0, betas=(0.9, 0.95))
        Optimizer(name='adamw', learning_rate=0.0002, weight_decay=0.05, ...)
    """

    name: str
    learning_rate: float
    weight_decay: float | None = None
    no_decay: tuple[str, ...] = ()
    no_trust_ratio: tuple[str, ...] = ()
    global_clipnorm: float | None = None
    loss_scaling: float | str | LossScaleRamp | None = None
    ema_momentum: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __init__(
        self,
        name: str,
        learning_rate: float | None = None,
        *,
        weight_decay: float | None = None,
        no_decay: str | Sequence[str] = (),
        no_trust_ratio: str | Sequence[str] = (),
        global_clipnorm: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        loss_scaling: float | str | LossScaleRamp | None = None,
        ema_momentum: float | None = None,
        **settings: Any,
    ) -> None:
        name = name if isinstance(name, str) else shown(name)
        key = name.lower()
        if key not in CLASSES:
            if key in ELSEWHERE:
                raise UnsupportedError(f"PopTorch has no {name}: {ELSEWHERE[key]}.")
            raise UnknownNameError("optimizer", name, CLASSES)
        if learning_rate is None:
            learning_rate = settings.pop("lr", None)
        if learning_rate is None:
            learning_rate = 1e-2 if key == "sgd" else 1e-3
        values = {
            "name": key,
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "no_decay": split_words(no_decay),
            "no_trust_ratio": split_words(no_trust_ratio),
            "global_clipnorm": global_clipnorm,
            "loss_scaling": loss_scaling,
            "ema_momentum": ema_momentum,
            "settings": {
                # PopTorch takes betas as a tuple only.
                name: tuple(value) if isinstance(value, list) else value
                for name, value in settings.items()
                if value is not None
            },
        }
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)  # the dataclass is frozen
        self._check_values()
        self._check_spared()
        self._check_settings()
        self._check_clipping(clipnorm, clipvalue)
        try:
            self._make([{"params": [torch.nn.Parameter(torch.zeros(1))]}], {})
        except (AssertionError, TypeError, ValueError) as error:
            passed = ", ".join(f"{n}={v!r}" for n, v in self.settings.items())
            raise ConfigError(
                f"{self._who} can't have these settings: {passed}. {error}"
            ) from error

    @property
    def is_scaled_automatically(self) -> bool:
        """Whether PopTorch adapts the loss scaling."""
        return self.loss_scaling == "auto"

    @property
    def initial_loss_scaling(self) -> float | None:
        """Loss scaling of the first update; None for PopTorch's default.

        Example:
            >>> Optimizer("sgd", loss_scaling=LossScaleRamp(4, 2, 10, 64)
            ...           ).initial_loss_scaling
            4.0
        """
        if isinstance(self.loss_scaling, LossScaleRamp):
            return self.loss_scaling.value(0)
        if self.is_scaled_automatically:
            return 1.0
        return None if self.loss_scaling is None else float(self.loss_scaling)

    @property
    def velocity_follows(self) -> bool:
        """Whether SGD's velocity is scaled along with a growing loss scaling."""
        return (
            self._is_combined
            and isinstance(self.loss_scaling, LossScaleRamp)
            and "velocity_scaling" not in self.settings
        )

    @property
    def changes_loss_scaling(self) -> bool:
        """Whether the loss scaling may change from update to update."""
        return isinstance(self.loss_scaling, (str, LossScaleRamp))

    def scaled_for_float16(self) -> Optimizer:
        """Return a copy with float16's default loss scaling, if it has none.

        Example:
            >>> Optimizer("sgd").scaled_for_float16().loss_scaling
            128.0
            >>> Optimizer("sgd", loss_scaling=1.0).scaled_for_float16().loss_scaling
            1.0
        """
        if self.loss_scaling is not None:
            return self
        scaled = copy.copy(self)
        object.__setattr__(scaled, "loss_scaling", FLOAT16_LOSS_SCALING)
        if self._is_combined:
            settings = {"velocity_scaling": FLOAT16_LOSS_SCALING, **self.settings}
            object.__setattr__(scaled, "settings", settings)
        return scaled

    def bind(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        """Create the optimizer for the parameters of a module.

        Args:
            module: The module. The optimizer gets all its parameters.

        Returns:
            An optimizer of `poptorch.optim`, with further parameter groups for
            parameters of `no_decay` and `no_trust_ratio`.

        Raises:
            ConfigError: A pattern of `no_decay` or `no_trust_ratio` matches no
                parameter.

        Example:
            >>> spec = Optimizer("adamw", no_decay="bias")
            >>> groups = spec.bind(torch.nn.Linear(2, 1)).param_groups
            >>> [group["weight_decay"] for group in groups]
            [0.01, 0.0]
        """
        more: dict[str, Any] = {}
        # Automatic loss scaling goes with float16 accumulators, as Graphcore's scripts
        # set them; only float16 weights should have those.
        is_half = any(p.dtype == torch.float16 for p in module.parameters())
        if self.is_scaled_automatically and is_half:
            more["accum_type"] = torch.float16
        groups = parameter_groups(module, self.no_decay, self.no_trust_ratio)
        return self._make(groups, more)

    def _make(
        self, groups: list[dict[str, Any]], more: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        # Settings that are passed to PopTorch may change later, even if they have the
        # default's value. All other settings are constants.
        scaling, norm = self.initial_loss_scaling, self.global_clipnorm
        if norm is not None and self.name == "sgd":
            norm *= scaling or 1.0  # PopTorch's SGD clips gradients of the scaled loss
        arguments = {
            "lr": float(self.learning_rate),
            "weight_decay": self.weight_decay,
            "loss_scaling": scaling,
            "max_grad_norm": norm,
            "velocity_scaling": scaling if self.velocity_follows else None,
            **more,
            **self.settings,
        }
        passed = {name: v for name, v in arguments.items() if v is not None}
        return _class_in_poptorch(self.name)(groups, **passed)

    @property
    def _who(self) -> str:
        return f"Optimizer({self.name!r})"

    def _check_values(self) -> None:
        if isinstance(self.learning_rate, str) or callable(
            getattr(self.learning_rate, "factor", None)
        ):
            raise ConfigError(
                f"{self._who} has learning_rate={self.learning_rate!r}: use a number "
                "here, and the schedule to compile(lr_schedule=...)."
            )
        check_number("learning_rate", self.learning_rate, of=self._who, least=0)
        bounds: dict[str, dict[str, Any]] = {
            "weight_decay": {"least": 0},
            "global_clipnorm": {"above": 0},
            "ema_momentum": {"least": 0, "below": 1},
        }
        for name, bound in bounds.items():
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), of=self._who, **bound)
        scaling = self.loss_scaling
        if isinstance(scaling, str) and scaling != "auto":
            raise ConfigError(
                f"{self._who} has loss_scaling={scaling!r}: use a number, 'auto', or "
                "an ipufit.LossScaleRamp."
            )
        if not isinstance(scaling, (str, LossScaleRamp, type(None))):
            check_number("loss_scaling", scaling, of=self._who, above=0)

    def _check_spared(self) -> None:
        for argument in ("no_decay", "no_trust_ratio"):
            for word in getattr(self, argument):
                if not isinstance(word, str):
                    raise ConfigError(
                        f"{self._who} has {shown(word)} in {argument}: use 'bias', "
                        "'norm', 'bias_and_norm' or patterns of parameter names."
                    )
        if self.no_trust_ratio and self.name != "lamb":
            raise UnsupportedError(
                f"{self._who} has no_trust_ratio={self.no_trust_ratio}, and only "
                "'lamb' has a trust ratio. Leave it out."
            )
        has_decay = self.name in ("adamw", "lamb")
        if self.weight_decay is not None:
            has_decay = self.weight_decay > 0
        if self.no_decay and not has_decay:
            raise ConfigError(
                f"{self._who} has no_decay={self.no_decay}, but no weight decay. Pass "
                "weight_decay, or leave no_decay out."
            )

    def _check_settings(self) -> None:
        for name in self.settings:
            if OTHER_WORDS.get(name):
                raise ConfigError(
                    f"{self._who} has {name}. Here it is {OTHER_WORDS[name]}."
                )
            if name in OTHER_WORDS:
                raise UnsupportedError(
                    f"{self._who} has {name}, which IPUs don't have. Leave it out."
                )
        known = _arguments(self.name) - {"weight_decay", "loss_scaling", *OTHER_WORDS}
        ours = set(inspect.signature(type(self)).parameters)
        ours -= {"name", "clipnorm", "clipvalue", "settings"}
        for name in self.settings:
            if name == "momentum" and "betas" in known:
                raise ConfigError(
                    f"{self._who} has momentum. Here it is the first of betas, as in "
                    "betas=(0.9, 0.999)."
                )
            if name not in known:
                raise UnknownNameError(f"setting of {self._who}", name, known | ours)
        if self.name == "adamw" and self.settings.get("bias_correction") is False:
            raise UnsupportedError(
                "Optimizer('adamw') has bias_correction=False, which PopTorch takes "
                "and ignores. Leave it out; 'lamb' has it."
            )
        self._check_kinds()
        if "velocity_scaling" in self.settings and not self._is_combined:
            raise ConfigError(
                f"{self._who} has velocity_scaling, which counts only with "
                "use_combined_accum=True."
            )

    def _check_kinds(self) -> None:
        """Refuse settings of another kind than PopTorch's default for them."""
        weights = [torch.nn.Parameter(torch.zeros(1))]
        plain: Any = _class_in_poptorch(self.name)(weights, lr=1.0)
        defaults = {"velocity_scaling": 1.0, **vars(plain), **plain.defaults}
        for name, value in self.settings.items():
            default = defaults.get(name)
            if isinstance(default, bool):
                check_flags(self._who, **{name: value})
            elif isinstance(default, (int, float)):
                check_number(name, value, of=self._who, is_finite=False)
            elif isinstance(default, tuple):  # betas
                count = len(default)
                if not isinstance(value, tuple) or len(value) != count:
                    instead = f"a tuple of {count} numbers, as in {default}"
                    refuse(name, value, instead, self._who)
                for index, part in enumerate(value):
                    of_part = f"{name}[{index}]"
                    check_number(of_part, part, of=self._who, least=0, below=1)

    @property
    def _is_combined(self) -> bool:
        return bool(self.settings.get("use_combined_accum"))

    def _check_clipping(self, clipnorm: float | None, clipvalue: float | None) -> None:
        for word, value, meaning in (
            ("clipnorm", clipnorm, "the gradient of each weight by its own norm"),
            ("clipvalue", clipvalue, "each element of a gradient"),
        ):
            if value is not None:
                raise UnsupportedError(
                    f"{self._who} has {word}={shown(value)}, which in Keras clips "
                    f"{meaning}. PopTorch clips all gradients together by their "
                    "common norm, or not at all: use global_clipnorm for that."
                )
        if self.global_clipnorm is None:
            return
        who = f"{self._who} has global_clipnorm={self.global_clipnorm}"
        if "max_grad_norm" not in _arguments(self.name):
            raise UnsupportedError(
                f"{who}, but PopTorch's {CLASSES[self.name]} can't clip. Use "
                "'adamw', 'adam' or 'sgd', or leave it out."
            )
        if self.name != "sgd":
            return
        if self.settings.get("momentum", 0.0) != 0.0 or self._is_combined:
            raise UnsupportedError(
                f"{who} and momentum. PopTorch would clip the velocity there, that is "
                "the whole step, and not the gradient. Leave the momentum out, use "
                "'adamw' or 'adam', or, if you want just that, "
                "poptorch.optim.SGD(..., max_grad_norm=...)."
            )
        if self.changes_loss_scaling:
            raise UnsupportedError(
                f"{who} and a loss scaling that changes. PopTorch's SGD clips "
                "gradients while they are still multiplied by the loss scaling, at a "
                "fixed norm. Use a fixed loss_scaling, or 'adamw' or 'adam'."
            )


OptimizerLike = Union[str, Optimizer, torch.optim.Optimizer]
"""A name, an `ipufit.Optimizer`, or an optimizer of torch or `poptorch.optim`."""

Counterpart = Callable[[Any], Any]
"""Maps a parameter of the user's module to the parameter of the module's copy."""


def _same_parameter(parameter: Any) -> Any:
    return parameter


def resolve_optimizer(
    optimizer: Optimizer | torch.optim.Optimizer,
    module: torch.nn.Module,
    counterpart: Counterpart = _same_parameter,
) -> torch.optim.Optimizer:
    """Return the PopTorch optimizer for another optimizer.

    Args:
        optimizer: An `ipufit.Optimizer`, a torch optimizer (SGD, Adam, AdamW, RMSprop),
            or one of `poptorch.optim`, which is used as it is.
        module: The module. An optimizer without parameters gets its parameters.
        counterpart: Maps a parameter of the user's module to the parameter of the
            module's copy. An optimizer of `poptorch.optim` has the copy's parameters
            from then on.

    Returns:
        An optimizer of `poptorch.optim`.

    Raises:
        ConfigError: The optimizer has parameters that the module doesn't have.
        UnsupportedError: PopTorch doesn't have the optimizer or one of its settings.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> adam = torch.optim.Adam(module.parameters(), lr=0.02)
        >>> resolve_optimizer(adam, module).param_groups[0]["lr"]
        0.02
    """
    if isinstance(optimizer, Optimizer):
        return optimizer.bind(module)
    parts = list(optimizer.values()) if isinstance(optimizer, dict) else optimizer
    kinds = (str, Optimizer, torch.optim.Optimizer)
    if isinstance(parts, (tuple, list)) and all(isinstance(p, kinds) for p in parts):
        raise UnsupportedError(
            f"optimizer has several optimizers ({len(parts)}), and a program has "
            "one. Use parameter groups for parts of the module with other settings: "
            "torch.optim.AdamW([{'params': model.head.parameters(), 'lr': 1e-3}, ...])."
        )
    refuse_foreign("optimizer", optimizer, "an ipufit.Optimizer", CLASSES)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"optimizer={shown(optimizer)} is neither a name ({', '.join(CLASSES)}) "
            "nor an ipufit.Optimizer, nor an optimizer made with the module's "
            "parameters. Settings belong to ipufit.Optimizer('adam', 0.001)."
        )
    for name, kind in ((_DECOUPLED, "AdamW"), ("centered", "RMSprop")):
        values = [group[name] for group in optimizer.param_groups if name in group]
        if any(values) and not all(values):
            raise UnsupportedError(
                f"{_class_name(optimizer)} has {name} in some groups only, but an IPU "
                f"uses one {kind} for all groups. Set {name} in all of them, or in "
                "none."
            )
    groups = _grouped_parameters(optimizer, module, counterpart)
    if isinstance(optimizer, poptorch.optim.Optimizer):
        for group, parameters in zip(optimizer.param_groups, groups):
            group["params"] = parameters
        return optimizer
    for name, class_name in CLASSES.items():
        if type(optimizer) is getattr(torch.optim, class_name, None):
            return _rebuild(optimizer, name, groups)
    nearest = ELSEWHERE.get(type(optimizer).__name__.lower())
    raise UnsupportedError(
        f"{_class_name(optimizer)} can't run on an IPU"
        f"{'' if nearest is None else f' ({nearest})'}. Use one of "
        f"{', '.join(CLASSES)}, torch.optim's SGD, Adam, AdamW or RMSprop, or "
        "an optimizer of poptorch.optim."
    )


def _grouped_parameters(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, counterpart: Counterpart
) -> list[list[Any]]:
    """Return the module's parameters in the groups of an optimizer."""
    groups = [[*map(counterpart, group["params"])] for group in optimizer.param_groups]
    known = {id(parameter) for parameter in module.parameters()}
    strangers = sum(id(p) not in known for group in groups for p in group)
    if strangers:
        raise ConfigError(
            f"{strangers} parameters of this {_class_name(optimizer)} are not the "
            "module's. Make it with module.parameters() of the module that you passed "
            "to IPUModel, or with model.module.parameters()."
        )
    return groups


def refuse_steps_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of torch whose steps on the host do more than an IPU's.

    Raises:
        UnsupportedError: The optimizer has hooks, a replaced `step`, or the state of
            steps.
    """
    who = _class_name(optimizer)
    step, of_class = optimizer.step, type(optimizer).step
    if getattr(step, "__func__", step) is not of_class:
        step = inspect.unwrap(step)  # schedulers wrap it
        step = inspect.unwrap(getattr(step, "__func__", step))
        of_class = inspect.unwrap(of_class)
    if getattr(step, "__func__", step) is not of_class:
        raise UnsupportedError(
            f"`step` of this {who} was replaced, and the steps are made on the device, "
            "where it is never called. Use a callback: on_train_batch_begin and "
            "on_train_batch_end come around each call."
        )
    for when in ("pre", "post"):
        if getattr(optimizer, f"_optimizer_step_{when}_hooks", None):
            raise UnsupportedError(
                f"{who} has a step {when}-hook, and the steps are "
                "made on the device, where no hook is called. Use a callback: "
                "on_train_batch_begin and on_train_batch_end come around each call."
            )
    if any(
        isinstance(value, torch.Tensor)
        for state in optimizer.state.values()
        for value in state.values()
    ):
        raise UnsupportedError(
            f"This {who} has made steps already, and its state "
            "can't be moved to an IPU. Pass a new one."
        )


def _rebuild(
    optimizer: torch.optim.Optimizer, name: str, parameters: list[list[Any]]
) -> torch.optim.Optimizer:
    if name.startswith("adam"):
        is_decoupled = optimizer.param_groups[0].get(_DECOUPLED, name == "adamw")
        name = "adamw" if is_decoupled else "adam"
    known = _arguments(name).difference(_HOST_ONLY)
    ignored = {_DECOUPLED, *KERNEL_SETTINGS} - {"maximize"}
    for setting in sorted(set(optimizer.defaults) - known - ignored):
        for group in optimizer.param_groups:
            if group.get(setting):
                raise UnsupportedError(
                    f"{_class_name(optimizer)} with {setting}={group[setting]!r} "
                    f"can't run on an IPU: PopTorch has no {setting}. Leave it out."
                )
    refuse_steps_on_host(optimizer)
    settings = [name for name in optimizer.defaults if name in known]
    groups: list[dict[str, Any]] = [
        {"params": weights, **{name: plain(group[name]) for name in settings}}
        for group, weights in zip(optimizer.param_groups, parameters)
    ]
    defaults = {name: plain(optimizer.defaults[name]) for name in settings}
    if not isinstance(defaults["lr"], float):  # every group has a rate
        defaults["lr"] = groups[0]["lr"]
    rebuilt: torch.optim.Optimizer = _class_in_poptorch(name)(groups, **defaults)
    if "momentum" not in rebuilt.defaults:
        return rebuilt
    # Without momentum torch has no velocity. PopTorch is set to the same: a
    # momentum that may change costs a tensor per weight. torch then ignores the
    # dampening, which PopTorch would apply.
    values = (*rebuilt.param_groups, rebuilt.defaults)
    for group in values:
        if group["momentum"] == 0 and "dampening" in group:
            group["dampening"] = 0.0
    if all(group["momentum"] == 0 for group in values):
        rebuilt.variable_attrs.markAsConstant("momentum")  # type: ignore[attr-defined]
    return rebuilt


def _class_name(value: object) -> str:
    return f"{type(value).__module__.split('._')[0]}.{type(value).__qualname__}"


# Values that change between updates -------------------------------------------------


class Optimization:
    """The optimizer of a model, and its schedules.

    This class only writes values into the optimizer; executors send changed values to
    the device.

    Args:
        optimizer: An optimizer of `poptorch.optim`.
        rates: The setter of its learning rates.
        spec: The `ipufit.Optimizer` that `optimizer` was made from, or None.
        schedules: Setters of other values of parameter groups, by name.
        source: The optimizer of torch that `optimizer` was made from, or None.

    Attributes:
        optimizer: An optimizer of `poptorch.optim`.
        num_updates: Number of updates made since `compile`.
        ema_momentum: Momentum of the weights' running average; None for no average.
        automatic_loss_scaling: Whether the options must turn automatic loss scaling on.
        needs_running_mean: Whether the options must ask for
            `MeanReductionStrategy.Running`: otherwise the optimizer clips gradients
            before they are divided by the number of replicas.
        has_schedule: Whether a schedule sets the learning rates.
        schedule: The source of the learning rates, in words.
        schedules: The schedules of other values of parameter groups, in words, by name.
        needs_total: Whether a schedule depends on the number of updates of a fit.
        needs_epochs: Whether a schedule or ramp has lengths in epochs.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rates: Setter,
        spec: Optimizer | None,
        schedules: Mapping[str, Setter],
        source: torch.optim.Optimizer | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.num_updates = 0
        self.ema_momentum = spec.ema_momentum if spec else None
        self.automatic_loss_scaling = bool(spec and spec.is_scaled_automatically)
        self.needs_running_mean = bool(
            spec and spec.name == "sgd" and spec.global_clipnorm is not None
        )
        self._rates = rates
        self._schedules = dict(schedules)
        self.has_schedule = isinstance(rates, (ScheduledValues, TorchScheduler))
        self.schedule = rates.describe()
        self.schedules = {name: setter.describe() for name, setter in schedules.items()}
        by_name = {"learning rate": rates, **schedules}
        self._set_per_update = [
            name for name, setter in by_name.items() if setter.is_per_update
        ]
        self._setters = [s for s in by_name.values() if type(s) is not Setter]
        if spec is not None and isinstance(spec.loss_scaling, LossScaleRamp):
            ramp = RampedScaling(optimizer, spec.loss_scaling, spec.velocity_follows)
            self._setters.append(ramp)
        self.needs_total = any(setter.needs_total for setter in self._setters)
        self.needs_epochs = any(setter.needs_epochs for setter in self._setters)
        self._spec = spec
        self._source = source
        self._notes: list[str] = []
        self._told: set[str] = set()

    @property
    def program_key(self) -> tuple[object, ...]:
        """Settings that are compiled into a program: a change needs a new program."""
        # A loss scaling that a device has adapted can't be reset.
        adapted = self.optimizer if self.automatic_loss_scaling else None
        return self.values.constant, adapted, self.needs_running_mean

    @property
    def values(self) -> OptimizerValues:
        """The values of the optimizer."""
        return OptimizerValues(self.optimizer)

    @property
    def moves_per_update(self) -> str:
        """Reason why each update needs work on the host; "" if it doesn't.

        Example:
            >>> module = torch.nn.Linear(2, 1)
            >>> resolve_optimization("sgd", None, module).moves_per_update
            ''
            >>> spec = Optimizer("sgd", ema_momentum=0.9)
            >>> resolve_optimization(spec, None, module).moves_per_update
            'weights are averaged after each update'
        """
        if self._set_per_update:
            names = " and the ".join(self._set_per_update)
            return f"a schedule sets the {names} of each update"
        if self._spec is not None and self._spec.changes_loss_scaling:
            return "the loss scaling may change with each update"
        if self.ema_momentum is not None:
            return "weights are averaged after each update"
        return ""

    def news(self) -> list[str]:
        """Return the lines about automatic choices, each line only once."""
        lines = list(self._notes)
        if self._spec is not None and len(self.optimizer.param_groups) > 1:
            lines.append(f"Optimizer groups: {groups_in_words(self.optimizer)}")
        new = [line for line in lines if line not in self._told]
        self._told.update(new)
        return new

    def begin_fit(
        self,
        updates_per_epoch: int | None,
        updates_per_call: int,
        epochs: int | None = None,
    ) -> None:
        """Prepare for the updates of a fit, and set the values of the first update.

        Args:
            updates_per_epoch: Number of updates of an epoch; None if unknown.
            updates_per_call: Number of updates that share one learning rate, since
                values are sent between calls only.
            epochs: Number of epochs of the fit; None outside `fit`.

        Raises:
            ConfigError: A schedule needs to know the total, or is longer than the fit.

        Warns:
            SharedRateWarning: A schedule can't be followed update by update.
        """
        fit = Fit(self.num_updates, updates_per_epoch, epochs)
        for setter in self._setters:
            setter.begin_fit(fit)
        self.before_call()
        shared = " and one ".join(self._set_per_update)
        if shared and updates_per_call > 1:
            warn_in_first_process(
                f"A call makes {updates_per_call} updates (device_iterations), which "
                f"share one {shared}: the schedule's for the first of them. With "
                "device_iterations=1 each has its own.",
                SharedRateWarning,
            )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let another run train inside the context, and continue schedules after it."""
        begun = self.num_updates
        states = [setter.state_dict() for setter in self._setters]
        try:
            yield
        finally:
            for setter, state in zip(self._setters, states):
                setter.go_on(state, self.num_updates - begun)

    def note(self, line: str) -> None:
        """Add a line for `news`."""
        self._notes.append(line)

    def before_call(self) -> None:
        """Set the values of the next call, which all its updates share.

        Raises:
            UnsupportedError: The optimizer of torch has made steps itself.
        """
        if self._source is not None:
            refuse_steps_on_host(self._source)
        for setter in self._setters:
            setter.write(self.num_updates)

    def state_dict(self) -> dict[str, Any]:
        """Return the plain values that a resumed run needs.

        The optimizer's state on the device isn't included.
        """
        state = {"num_updates": self.num_updates, "rates": self._rates.state_dict()}
        if self._schedules:
            others = self._schedules.items()
            state["schedules"] = {name: rates.state_dict() for name, rates in others}
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of other schedules; change nothing.

        Args:
            state: From `state_dict`; `num_updates` and `rates` are known to be there.

        Raises:
            ConfigError: The state is of other schedules.
            DamagedCheckpointError: No schedule has such a state.
        """
        schedules, where = state.get("schedules", {}), "state.updates"
        check_saved(dict_of(dict_of(anything)), schedules, f"{where}.schedules")
        names = [
            (set(rates), set(inner) if isinstance(inner, dict) else set())
            for rates in (self._rates.state_dict(), state["rates"])
            for inner in [rates.get("scheduler")]  # of torch
        ]
        if names[0] != names[1]:
            raise ConfigError(
                "The checkpoint was saved with another learning rate schedule than "
                "compile() got. Compile with the same lr_schedule, or load the "
                "weights alone."
            )
        if set(self._schedules) != set(schedules):
            raise ConfigError(
                "The checkpoint was saved with other schedules= than compile() got. "
                "Compile with the same schedules, or load the weights alone."
            )
        is_begun = bool(state["num_updates"])
        self._rates.check_state(state["rates"], f"{where}.rates", is_begun)
        for name, setter in self._schedules.items():
            setter.check_state(schedules[name], f"{where}.schedules.{name}", is_begun)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same optimizer and schedules."""
        self.num_updates = int(state["num_updates"])
        self._rates.load_state_dict(state["rates"])
        for name, rates in self._schedules.items():
            rates.load_state_dict(state["schedules"][name])

    def after_call(self, num_updates: int) -> None:
        """Count the updates of a call, and step torch's scheduler as often."""
        self.num_updates += num_updates
        for setter in self._setters:
            setter.step(updates=num_updates)

    def end_epoch(self) -> None:
        """Step the scheduler of torch if it is stepped per epoch."""
        self._rates.step(epochs=1)


def resolve_optimization(
    optimizer: OptimizerLike,
    lr_schedule: ScheduleLike,
    module: torch.nn.Module,
    schedules: SchedulesLike = None,
    *,
    counterpart: Counterpart = _same_parameter,
    is_half: bool = False,
) -> Optimization:
    """Create the optimizer and its schedules from the arguments of `compile`.

    Args:
        optimizer: As for `resolve_optimizer`.
        lr_schedule: As for `make_rates`.
        module: The module. An optimizer without parameters gets its parameters.
        schedules: As for `make_schedules`.
        counterpart: As for `resolve_optimizer`.
        is_half: Whether training is in float16; True is implied by float16 weights.

    Raises:
        UnknownNameError: A name is unknown.
        ConfigError: Optimizer, schedule and module don't fit each other.
        UnsupportedError: PopTorch has no such optimizer or setting.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> schedule = lambda sgd: torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
        >>> optimization = resolve_optimization("sgd", schedule, module)
        >>> optimization.begin_fit(updates_per_epoch=3, updates_per_call=1)
        >>> for _ in range(3):
        ...     optimization.before_call()
        ...     print(optimization.optimizer.param_groups[0]["lr"])
        ...     optimization.after_call(1)
        0.01
        0.005
        0.0025
    """
    if isinstance(optimizer, str):
        optimizer = Optimizer(optimizer)
    spec = optimizer if isinstance(optimizer, Optimizer) else None
    is_half = is_half or any(p.dtype == torch.float16 for p in module.parameters())
    is_scaled = is_half and spec is not None and spec.loss_scaling is None
    if spec is not None and is_scaled:
        optimizer = spec = spec.scaled_for_float16()
    resolved = resolve_optimizer(optimizer, module, counterpart)
    rates = make_rates(lr_schedule, resolved, optimizer)
    others = make_schedules(schedules, resolved)
    is_torchs = spec is None and optimizer is not resolved
    source: Any = optimizer if is_torchs else None
    optimization = Optimization(resolved, rates, spec, others, source)
    make_settable(
        resolved, optimization.schedule if optimization.has_schedule else None
    )
    if spec is not None and is_scaled:
        optimization.note(
            f"Loss scaling: {spec.loss_scaling:g}, for float16; "
            "Optimizer(..., loss_scaling=1.0) turns it off"
        )
    return optimization


# `model.optimizer` ------------------------------------------------------------------

# PopTorch's optimizers read their rates from the parameter groups, and accept any
# attribute: `optimizer.lr = 0` changed nothing. The optimizer of a model has Keras's
# `learning_rate`, and refuses attributes that nobody reads.


class _Settable:
    """Methods that are added to the class of a model's optimizer."""

    param_groups: list[dict[str, Any]]
    _schedule: str | None = None

    @property
    def learning_rate(self) -> float:
        """The rate of the first parameter group; setting it sets all groups' rates.

        A rate is used from the next call on.

        Raises:
            ConfigError: The rate isn't a number of 0 or more, or a schedule sets it.
        """
        return float(self.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        rate = rate.item() if hasattr(rate, "item") else rate  # NumPy's or torch's
        check_number("learning_rate", rate, of="model.optimizer", least=0)
        if self._schedule is not None:
            raise ConfigError(
                f"model.optimizer.learning_rate={rate!r} was set, and the schedule "
                f"that compile() got sets it, too ({self._schedule}). Use one of them."
            )
        for group in self.param_groups:
            group["lr"] = float(rate)

    lr = learning_rate

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not hasattr(self, name):
            raise AttributeError(_advice(name, self))
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Let `copy` and `pickle` rebuild the class, which can't be imported."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *rest = reduced
        return (_new, (_plain_class(type(self)),), *rest)


def make_settable(
    optimizer: torch.optim.Optimizer, schedule: str | None = None
) -> None:
    """Let `learning_rate` be set, and refuse attributes that have no effect.

    Args:
        optimizer: An optimizer of `poptorch.optim`; its class is changed in place.
        schedule: The schedule that sets the rates, in words; None for no schedule.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> sgd = poptorch.optim.SGD(module.parameters(), lr=0.5)
        >>> make_settable(sgd)
        >>> sgd.learning_rate = 0.25
        >>> sgd.param_groups[0]["lr"]
        0.25
        >>> sgd.momentun = 0.9
        Traceback (most recent call last):
        AttributeError: Nobody reads model.optimizer.momentun. ...
    """
    if not isinstance(optimizer, _Settable):
        plain_class: Any = type(optimizer)
        optimizer.__class__ = _settable_class(plain_class)
    optimizer._schedule = schedule  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=None)
def _settable_class(plain_class: type) -> Any:
    # PopTorch warns of classes that don't have its base class as a direct base.
    base = poptorch.optim.Optimizer
    extra = (base,) if base in plain_class.__bases__ else ()
    names = ("__module__", "__qualname__", "__doc__")
    attributes = {name: getattr(plain_class, name) for name in names}
    return type(plain_class.__name__, (_Settable, plain_class, *extra), attributes)


def _plain_class(settable: type) -> type:
    return settable.__mro__[2]  # after itself and `_Settable`


def _new(plain_class: type) -> Any:
    return object.__new__(_settable_class(plain_class))


def _advice(name: str, optimizer: Any) -> str:
    known = inspect.signature(_plain_class(type(optimizer))).parameters
    settings = sorted(set(optimizer.param_groups[0]).intersection(known) - {"params"})
    text = f"Nobody reads model.optimizer.{name}."
    meant = {name, *difflib.get_close_matches(name, settings, n=1)}
    for setting in sorted(meant.intersection(settings)):
        return (
            f"{text} It is a setting of parameter groups: for group in "
            f"model.optimizer.param_groups: group[{setting!r}] = ..."
        )
    if difflib.get_close_matches(name, ["learning_rate", "learningrate"]):
        return f"{text} Did you mean learning_rate?"
    return (
        f"{text} Set learning_rate, or in the dicts of model.optimizer.param_groups "
        f"{', '.join(settings)}; for anything else call compile() again."
    )


# State on the device ----------------------------------------------------------------

# Sources: PopTorch's `CompilerImpl.cpp`, and PopART's `sgd.hpp`, `adam.hpp` and
# `adaptive.hpp`. Hyper-parameters, a few bytes for each weight, are left out.


class StateTensor(NamedTuple):
    """A tensor that an optimizer keeps for a weight.

    Attributes:
        slot: PopART's name of the tensor, such as "Accl1".
        num_elements: Number of elements.
        dtype: Type of the elements.
    """

    slot: str
    num_elements: int
    dtype: torch.dtype


class WeightState(NamedTuple):
    """The tensors that an optimizer keeps for a weight.

    Attributes:
        tensors: The state, which lasts from update to update.
        accumulator: Type of the accumulated gradients, where an update has several
            micro-batches; None if a tensor of the state holds them.
    """

    tensors: tuple[StateTensor, ...]
    accumulator: torch.dtype | None


def weight_states(
    optimizer: torch.optim.Optimizer, weights: Iterable[torch.nn.Parameter]
) -> dict[int, WeightState]:
    """Return the tensors that an optimizer keeps on a device for each weight.

    Args:
        optimizer: An optimizer of `poptorch.optim`, or of torch if PopTorch takes it.
        weights: Weights that are trained. Weights outside of parameter groups have the
            optimizer's defaults.

    Returns:
        The state by `id(weight)`.

    Example:
        >>> from ipufit import poptorch
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> adam = poptorch.optim.Adam([weight], accum_type=torch.float16)
        >>> state = weight_states(adam, [weight])[id(weight)]
        >>> [(t.slot, t.num_elements) for t in state.tensors], state.accumulator
        ([('Accl1', 3), ('Accl2', 3), ('Step', 1)], torch.float16)
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {
        id(weight): _weight_state(
            optimizer, groups.get(id(weight), optimizer.defaults), weight
        )
        for weight in weights
    }


def _weight_state(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    weight: torch.nn.Parameter,
) -> WeightState:
    def type_of(name: str) -> torch.dtype:
        return getattr(optimizer, name, torch.float32)

    def tensor(slot: str, dtype: torch.dtype) -> StateTensor:
        return StateTensor(slot, weight.numel(), dtype)

    # PopTorch's optimizers record which arguments were passed: these may change later.
    # A momentum of 0 in an optimizer of torch is the default, and compiled in.
    attributes = getattr(optimizer, "variable_attrs", None)
    is_variable = attributes is not None and not attributes.isConstant("momentum")
    has_momentum = is_variable or bool(group.get("momentum"))
    accumulator: torch.dtype | None = type_of("accum_type")
    first = tensor("Accl1", type_of("first_order_momentum_accum_type"))
    second = tensor("Accl2", type_of("second_order_momentum_accum_type"))
    if isinstance(optimizer, torch.optim.SGD):
        velocity = tensor("Accl1", type_of("velocity_accum_type"))
        if getattr(optimizer, "use_combined_accum", False):
            # The type is the weight's, whatever `accum_type` says.
            velocity = tensor("Accl1", weight.dtype)
            accumulator = None if has_momentum else weight.dtype
        return WeightState((velocity,) if has_momentum else (), accumulator)
    if isinstance(optimizer, torch.optim.RMSprop):
        tensors = [first]
        if group.get("centered"):  # type of the first state (PopART, `adaptive.cpp`)
            tensors.append(tensor("Accl2", first.dtype))
        if has_momentum:
            tensors.append(tensor("Accl3", torch.float32))
        return WeightState(tuple(tensors), accumulator)
    count = StateTensor("Step", 1, torch.float32)
    return WeightState((first, second, count), accumulator)
