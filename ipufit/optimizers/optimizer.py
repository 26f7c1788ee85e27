# SPDX-License-Identifier: Apache-2.0
"""PopTorch's optimisers: described by an `Optimizer`, and made from it or torch's.

An `Optimizer` uses Keras's words where Keras has one. Settings that PopTorch lacks are
refused; `docs/reference/optimizers.md` describes the differences.

PopTorch takes four of torch's optimisers as they are, but keeps their momentum only
until the next detach, and compiles their settings in as constants. Its own optimisers
have neither fault, so torch's are rebuilt as PopTorch's, with their parameter groups.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence, Union

import torch

from ipufit._poptorch import poptorch
from ipufit.errors import ConfigError, UnknownNameError, UnsupportedError

from .checks import check_number, check_whole
from .parameters import parameter_groups, words
from .scaling import FLOAT16_LOSS_SCALING, LossScaleRamp
from .schedule import plain

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
_HOST_ONLY = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")

OTHER_WORDS: dict[str, str | None] = {
    **dict.fromkeys((*_HOST_ONLY, "ema_overwrite_frequency", "params")),
    "beta_1": "betas=(beta_1, beta_2)",
    "beta_2": "betas=(beta_1, beta_2)",
    "epsilon": "eps",
    "loss_scale_factor": "loss_scaling",
    "lr": "learning_rate, which was given, too",
    "max_grad_norm": "global_clipnorm",
    "rho": "alpha",
    "use_ema": "ema_momentum",
}
"""Words of Keras, torch or PopTorch, and ours; None if there is no such thing."""


def _arguments(name: str) -> set[str]:
    """Return the names of an optimiser's arguments in PopTorch."""
    return set(inspect.signature(getattr(poptorch.optim, CLASSES[name])).parameters)


@dataclass(frozen=True, init=False)
class Optimizer:
    """An optimizer of PopTorch for `compile`, which passes it the parameters.

    Args:
        name: "sgd", "adam", "adamw", "rmsprop" or "lamb".
        learning_rate: 0.001 by default, 0.01 for SGD. torch's `lr` will do.
        per_batch_size: Batch size that the learning rate is meant for. `fit` multiplies
            the rate by its own batch size, the samples of an update, and divides it by
            this one; `train_on_batch` does so with each batch. None uses the rate
            unchanged.
        weight_decay: By default 0.01 for AdamW and LAMB, 0 for the others.
        no_decay: Parameters that do not decay: "bias", "norm" (normalisation layers),
            "bias_and_norm" for both, or patterns of their names such as "embed*".
        no_trust_ratio: Parameters whose step LAMB does not scale by the norm of the
            weight, in the same words: they get a `max_weight_norm` of 0. Public BERT
            training has "bias" here.
        global_clipnorm: Largest norm of all gradients together. Adam, AdamW, and SGD
            without momentum have it.
        clipnorm: Keras's largest norm of each gradient: refused, PopTorch has none.
        clipvalue: Keras's largest element: refused likewise.
        loss_scaling: Factor of the loss in float16 training: a number, a
            `LossScaleRamp`, or "auto" for PopTorch's automatic one. It is taken out
            again before the update and from the reported loss. None: 128 with float16
            weights, else 1.
        ema_momentum: Train with a running average of the weights, as Keras's
            `use_ema`: from 0 to below 1; None for no average.
        **settings: Settings of the PopTorch optimizer by name, such as `betas`, `eps`,
            `momentum`, `nesterov`, `alpha`, `centered`, `accum_type` or
            `max_weight_norm`. Those that aren't given are constants of the program.

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
    per_batch_size: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __init__(
        self,
        name: str,
        learning_rate: float | None = None,
        *,
        per_batch_size: int | None = None,
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
        key = str(name).lower()
        if not isinstance(name, str) or key not in CLASSES:
            if key in ELSEWHERE:
                raise UnsupportedError(f"PopTorch has no {name}: {ELSEWHERE[key]}.")
            raise UnknownNameError("optimizer", str(name), CLASSES)
        if learning_rate is None:
            learning_rate = settings.pop("lr", None)
        if learning_rate is None:
            learning_rate = 1e-2 if key == "sgd" else 1e-3
        values = {
            "name": key,
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "no_decay": words(no_decay),
            "no_trust_ratio": words(no_trust_ratio),
            "global_clipnorm": global_clipnorm,
            "loss_scaling": loss_scaling,
            "ema_momentum": ema_momentum,
            "per_batch_size": per_batch_size,
            "settings": {
                # PopTorch takes betas as a tuple only.
                name: tuple(value) if isinstance(value, list) else value
                for name, value in settings.items()
                if value is not None
            },
        }
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)  # frozen from here on
        self._check_values()
        self._check_spared()
        self._check_settings()
        self._check_clipping(clipnorm, clipvalue)
        try:
            self._make([{"params": [torch.nn.Parameter(torch.zeros(1))]}], {})
        except (AssertionError, TypeError, ValueError) as error:
            given = ", ".join(f"{n}={v!r}" for n, v in self.settings.items())
            raise ConfigError(
                f"{self._who} can't have these settings: {given}. {error}"
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
            module: All its parameters are given to the optimizer.

        Returns:
            An optimizer of `poptorch.optim`, with further parameter groups for what
            `no_decay` and `no_trust_ratio` spare.

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
        # Automatic loss scaling goes with float16 accumulators, as Graphcore's own
        # scripts set them; only float16 weights should have those.
        is_half = any(p.dtype == torch.float16 for p in module.parameters())
        if self.is_scaled_automatically and is_half:
            more["accum_type"] = torch.float16
        groups = parameter_groups(module, self.no_decay, self.no_trust_ratio)
        return self._make(groups, more)

    def _make(
        self, groups: list[dict[str, Any]], more: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        # What is passed to PopTorch may change later, even if it has the default's
        # value; the rest are constants.
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
        given = {name: v for name, v in arguments.items() if v is not None}
        kind = getattr(poptorch.optim, CLASSES[self.name])
        optimizer: torch.optim.Optimizer = kind(groups, **given)
        return optimizer

    @property
    def _who(self) -> str:
        return f"Optimizer({self.name!r})"

    def _check_values(self) -> None:
        if isinstance(self.learning_rate, str) or callable(
            getattr(self.learning_rate, "factor", None)
        ):
            raise ConfigError(
                f"{self._who} has learning_rate={self.learning_rate!r}: give a number "
                "here, and the schedule to compile(lr_schedule=...)."
            )
        check_number(self._who, "learning_rate", self.learning_rate, least=0)
        if self.per_batch_size is not None:
            check_whole(self._who, "per_batch_size", self.per_batch_size, least=1)
        bounds: dict[str, dict[str, float]] = {
            "weight_decay": {"least": 0},
            "global_clipnorm": {"above": 0},
            "ema_momentum": {"least": 0, "below": 1},
        }
        for name, bound in bounds.items():
            if getattr(self, name) is not None:
                check_number(self._who, name, getattr(self, name), **bound)
        scaling = self.loss_scaling
        if isinstance(scaling, str) and scaling != "auto":
            raise ConfigError(
                f"{self._who} has loss_scaling={scaling!r}: use a number, 'auto', or "
                "an ipufit.LossScaleRamp."
            )
        if not isinstance(scaling, (str, LossScaleRamp, type(None))):
            check_number(self._who, "loss_scaling", scaling, above=0)

    def _check_spared(self) -> None:
        for argument in ("no_decay", "no_trust_ratio"):
            for word in getattr(self, argument):
                if not isinstance(word, str):
                    raise ConfigError(
                        f"{self._who} has {word!r} in {argument}: use 'bias', 'norm', "
                        "'bias_and_norm' or patterns of parameter names."
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
                f"{self._who} has no_decay={self.no_decay}, but no weight decay that "
                "it could spare them. Give weight_decay, or leave no_decay out."
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
        for name in self.settings:
            if name not in known:
                raise UnknownNameError(f"setting of {self._who}", name, known)
        if self.name == "adamw" and self.settings.get("bias_correction") is False:
            raise UnsupportedError(
                "Optimizer('adamw') has bias_correction=False, which PopTorch takes "
                "and ignores. Leave it out; 'lamb' has it."
            )
        if "velocity_scaling" in self.settings and not self._is_combined:
            raise ConfigError(
                f"{self._who} has velocity_scaling, which counts only with "
                "use_combined_accum=True."
            )

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
                    f"{self._who} has {word}={value!r}, which in Keras clips "
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
        if not isinstance(self.loss_scaling, (int, float, type(None))):
            raise UnsupportedError(
                f"{who} and a loss scaling that changes. PopTorch's SGD clips what is "
                "still multiplied by it, at a fixed norm. Use a fixed loss_scaling, or "
                "'adamw' or 'adam'."
            )


OptimizerLike = Union[str, Optimizer, torch.optim.Optimizer]
"""A name, an `ipufit.Optimizer`, one of torch, or one of `poptorch.optim`."""


def resolve_optimizer(
    optimizer: OptimizerLike,
    module: torch.nn.Module,
    own: Callable[[Any], Any] | None = None,
) -> torch.optim.Optimizer:
    """Return the PopTorch optimiser for a name or another optimiser.

    Names take PopTorch's defaults and a learning rate of 0.001 (0.01 for SGD).

    Args:
        optimizer: A name, an `ipufit.Optimizer`, a torch optimiser (SGD, Adam, AdamW,
            RMSprop), or one of `poptorch.optim`, which is used as it is.
        module: Its parameters are given to a named optimiser.
        own: Maps a parameter of the user's module to the parameter of its copy. An
            optimiser of `poptorch.optim` has the copy's parameters from then on.

    Returns:
        An optimiser of `poptorch.optim`.

    Raises:
        UnknownNameError: The name is unknown.
        ConfigError: It optimises other parameters than the module's.
        UnsupportedError: PopTorch has no such optimiser, or not that setting of it.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> adam = torch.optim.Adam(module.parameters(), lr=0.02)
        >>> resolve_optimizer(adam, module).param_groups[0]["lr"]
        0.02
    """
    if isinstance(optimizer, str):
        optimizer = Optimizer(optimizer)
    if isinstance(optimizer, Optimizer):
        return optimizer.bind(module)
    if isinstance(optimizer, (tuple, list, dict)):
        raise UnsupportedError(
            f"optimizer has several optimizers ({len(optimizer)}), and a program has "
            "one. Give parts of the module settings of their own as parameter groups: "
            "torch.optim.AdamW([{'params': model.head.parameters(), 'lr': 1e-3}, ...])."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"optimizer={optimizer!r} is neither a name ({', '.join(CLASSES)}) nor "
            "an ipufit.Optimizer, nor an optimizer made with the module's parameters."
        )
    groups = _own_groups(optimizer, module, own or (lambda parameter: parameter))
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


def _own_groups(
    optimizer: torch.optim.Optimizer,
    module: torch.nn.Module,
    own: Callable[[Any], Any],
) -> list[list[Any]]:
    """Return the module's parameters in the groups of an optimiser."""
    groups = [[own(one) for one in group["params"]] for group in optimizer.param_groups]
    known = {id(parameter) for parameter in module.parameters()}
    strangers = sum(id(one) not in known for group in groups for one in group)
    if strangers:
        raise ConfigError(
            f"{strangers} parameters of this {_class_name(optimizer)} are not the "
            "module's. Make it with module.parameters() of the module that you passed "
            "to IPUModel, or with model.module.parameters()."
        )
    return groups


def hyper_parameters(optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    """Return the values of an optimiser that a device has copies of.

    PopTorch sends a change only in `setOptimizer`; a caller compares these values to
    find a change.

    Returns:
        The values of each parameter group, then the loss scaling.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> before = hyper_parameters(sgd)
        >>> sgd.param_groups[0]["lr"] = 0.25
        >>> hyper_parameters(sgd) == before
        False
    """
    groups = [
        tuple((name, value) for name, value in group.items() if name != "params")
        for group in optimizer.param_groups
    ]
    return (*groups, getattr(optimizer, "loss_scaling", 1.0))


def program_key(optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    """Return the values of an optimiser that are compiled into a program.

    Args:
        optimizer: An optimiser of `poptorch.optim`.

    Returns:
        Its class and plain attributes; for each group and the defaults the constant
        values and the parameters. An optimiser whose state doesn't begin with zeros is
        itself a part.

    Example:
        >>> weights = [torch.nn.Parameter(torch.zeros(1))]
        >>> one, other = (poptorch.optim.SGD(weights, lr=lr) for lr in (0.1, 0.2))
        >>> program_key(one) == program_key(other)
        True
    """
    is_constant = optimizer.variable_attrs.isConstant  # type: ignore[attr-defined]
    known = optimizer.defaults
    groups = [
        (
            tuple((n, group.get(n) if is_constant(n) else None) for n in known),
            tuple(id(parameter) for parameter in group.get("params", ())),
        )
        for group in (*optimizer.param_groups, known)
    ]
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, (bool, int, float, str, torch.dtype))
        and not name.startswith("_")
        and not name.endswith("_is_dirty")
        and (name != "loss_scaling" or is_constant(name))
    }
    # PopART begins with other values than 0 only there (`sgd1decompose.cpp`).
    is_combined = getattr(optimizer, "use_combined_accum", False)
    return type(optimizer), groups, attributes, id(optimizer) if is_combined else None


def _rebuild(
    optimizer: torch.optim.Optimizer, name: str, parameters: list[list[Any]]
) -> torch.optim.Optimizer:
    for flag in ("amsgrad", "maximize"):
        if any(group.get(flag) for group in optimizer.param_groups):
            raise UnsupportedError(
                f"{_class_name(optimizer)} with {flag}=True can't run on an IPU: "
                f"PopTorch has no {flag}. Leave it out."
            )
    decoupled = {g.get(_DECOUPLED, name == "adamw") for g in optimizer.param_groups}
    if len(decoupled) > 1:
        raise UnsupportedError(
            f"{_class_name(optimizer)} has {_DECOUPLED} in some groups only, and "
            "PopTorch in all (AdamW) or none (Adam). Set it alike for all groups."
        )
    if name.startswith("adam"):
        name = "adamw" if decoupled == {True} else "adam"
    counting = _arguments(name).difference(_HOST_ONLY)
    unknown = set(optimizer.defaults).difference(counting, _HOST_ONLY, {_DECOUPLED})
    for setting in sorted(one for one in unknown if optimizer.defaults[one]):
        raise UnsupportedError(
            f"{_class_name(optimizer)} with {setting}={optimizer.defaults[setting]!r} "
            f"can't run on an IPU: PopTorch has no {setting}. Leave it out."
        )
    for when in ("pre", "post"):
        if getattr(optimizer, f"_optimizer_step_{when}_hooks", None):
            raise UnsupportedError(
                f"{_class_name(optimizer)} has a step {when}-hook, and the steps are "
                "made on the device, where no hook is called. Use a callback: "
                "on_train_batch_begin and on_train_batch_end come around each call."
            )
    if optimizer.state:
        raise UnsupportedError(
            f"This {_class_name(optimizer)} has made steps already, and its state "
            "can't be moved to an IPU. Pass a new one."
        )
    settings = [one for one in optimizer.defaults if one in counting]
    groups: list[dict[str, Any]] = [
        {"params": own, **{one: plain(group[one]) for one in settings}}
        for group, own in zip(optimizer.param_groups, parameters)
    ]
    defaults = {one: plain(optimizer.defaults[one]) for one in settings}
    if not isinstance(defaults["lr"], float):  # every group has its own
        defaults["lr"] = groups[0]["lr"]
    rebuilt: torch.optim.Optimizer = getattr(poptorch.optim, CLASSES[name])(
        groups, **defaults
    )
    if "momentum" not in rebuilt.defaults:
        return rebuilt
    # PopTorch is to do without a velocity if there is no momentum, as torch does: a
    # momentum that may change costs a tensor per weight. And without momentum torch
    # ignores the dampening, which PopTorch applies.
    values = (*rebuilt.param_groups, rebuilt.defaults)
    for group in values:
        if group["momentum"] == 0 and "dampening" in group:
            group["dampening"] = 0.0
    if all(group["momentum"] == 0 for group in values):
        rebuilt.variable_attrs.markAsConstant("momentum")  # type: ignore[attr-defined]
    return rebuilt


def _class_name(value: object) -> str:
    return f"{type(value).__module__.split('._')[0]}.{type(value).__qualname__}"


# `model.optimizer` ------------------------------------------------------------------

# PopTorch's optimisers read their rates from the parameter groups, and take any
# attribute without a word: `optimizer.lr = 0` changed nothing. Those of models have
# Keras's `learning_rate`, and refuse attributes that nobody reads.


class _Settable:
    """Methods that are added to the class of an optimizer."""

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
        rate = rate.item() if hasattr(rate, "item") else rate  # of NumPy or torch
        check_number("model.optimizer", "learning_rate", rate, least=0)
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
        optimizer: One of `poptorch.optim`; it stays the same object.
        schedule: The schedule that sets its rates, in words; None for no schedule.

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
        own: Any = type(optimizer)
        optimizer.__class__ = _settable_class(own)
    optimizer._schedule = schedule  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=None)
def _settable_class(own: type) -> Any:
    # PopTorch warns of classes that don't have its own base class as a direct base.
    base = poptorch.optim.Optimizer
    bases = (_Settable, own, *((base,) if base in own.__bases__ else ()))
    names = ("__module__", "__qualname__", "__doc__")
    return type(own.__name__, bases, {name: getattr(own, name) for name in names})


def _plain_class(settable: type) -> type:
    return settable.__mro__[2]  # after itself and `_Settable`


def _new(own: type) -> Any:
    return object.__new__(_settable_class(own))


def _advice(name: str, optimizer: Any) -> str:
    known = inspect.signature(_plain_class(type(optimizer))).parameters
    settings = sorted(set(optimizer.param_groups[0]).intersection(known) - {"params"})
    text = f"Nobody reads model.optimizer.{name}."
    meant = {name, *difflib.get_close_matches(name, settings, n=1)}
    for setting in (one for one in settings if one in meant):
        return (
            f"{text} It is a setting of parameter groups: for group in "
            f"model.optimizer.param_groups: group[{setting!r}] = ..."
        )
    if difflib.get_close_matches(name, ["learning_rate", "learningrate"]):
        return f"{text} Did you mean learning_rate?"
    return (
        f"{text} Set learning_rate, or in the dicts of model.optimizer.param_groups "
        f"{', '.join(settings)}; anything else is told to compile()."
    )


# State on the device ----------------------------------------------------------------

# Sources: PopTorch's readings of optimisers (`CompilerImpl.cpp`), and PopART's
# `sgd.hpp`, `adam.hpp` and `adaptive.hpp`. Hyper-parameters, a few bytes for each
# weight, aren't among them.


class StateTensor(NamedTuple):
    """A tensor of the optimiser's state of one weight.

    Attributes:
        slot: PopART's name of it, such as "Accl1".
        num_elements: Number of its elements.
        dtype: Type of its elements.
    """

    slot: str
    num_elements: int
    dtype: torch.dtype


class WeightState(NamedTuple):
    """The tensors that an optimiser keeps for one weight.

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
    """Return the tensors that an optimiser keeps on a device for each weight.

    Args:
        optimizer: An optimiser of `poptorch.optim`, or one of torch that PopTorch
            takes.
        weights: Weights that are trained; those of no parameter group are trained with
            the optimiser's defaults.

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
        dtype: torch.dtype = getattr(optimizer, name, torch.float32)
        return dtype

    def tensor(slot: str, dtype: torch.dtype) -> StateTensor:
        return StateTensor(slot, weight.numel(), dtype)

    # PopTorch's optimisers know which values were given, and those may change later.
    # Of torch's a zero is the default, and compiled in.
    attributes = getattr(optimizer, "variable_attrs", None)
    is_variable = attributes is not None and not attributes.isConstant("momentum")
    has_momentum = is_variable or bool(group.get("momentum"))
    accumulator: torch.dtype | None = type_of("accum_type")
    first = tensor("Accl1", type_of("first_order_momentum_accum_type"))
    second = tensor("Accl2", type_of("second_order_momentum_accum_type"))
    if isinstance(optimizer, torch.optim.SGD):
        velocity = tensor("Accl1", type_of("velocity_accum_type"))
        if getattr(optimizer, "use_combined_accum", False):
            # Its type is the weight's, whatever `accum_type` says.
            velocity = tensor("Accl1", weight.dtype)
            accumulator = None if has_momentum else weight.dtype
        return WeightState((velocity,) if has_momentum else (), accumulator)
    if isinstance(optimizer, torch.optim.RMSprop):
        tensors = [first, second] if group.get("centered") else [first]
        if has_momentum:
            tensors.append(tensor("Accl3", torch.float32))
        return WeightState(tuple(tensors), accumulator)
    count = StateTensor("Step", 1, torch.float32)
    return WeightState((first, second, count), accumulator)
