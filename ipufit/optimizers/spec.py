# SPDX-License-Identifier: Apache-2.0
"""`Optimizer`: one of PopTorch's, described before there are parameters.

It has Keras's words where Keras has one. What PopTorch can't do is refused, and what it
does differently is said in `docs/reference/optimizers.md`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

import torch

from ipufit.errors import ConfigError, UnknownNameError, UnsupportedError

from .checks import check_number, check_whole
from .decay import parameter_groups, words
from .kinds import ELSEWHERE, KINDS, OTHER_WORDS, Kind
from .loss_scaling import FLOAT16_LOSS_SCALING, LossScaleRamp


@dataclass(frozen=True, init=False)
class Optimizer:
    """An optimizer of PopTorch for `compile`, which gives it the parameters.

    Args:
        name: "sgd", "adam", "adamw", "rmsprop" or "lamb".
        learning_rate: 0.001 by default, 0.01 for SGD. torch's `lr` will do.
        per_batch_size: Batch size that the learning rate is meant for. `fit` multiplies
            the rate by its own batch size, the samples of an update, and divides it by
            this one; `train_on_batch` does so with each batch. None: the rate is taken
            as it is.
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
        if not isinstance(name, str) or name.lower() not in KINDS:
            if str(name).lower() in ELSEWHERE:
                raise UnsupportedError(
                    f"PopTorch has no {name}: {ELSEWHERE[str(name).lower()]}."
                )
            raise UnknownNameError("optimizer", str(name), KINDS)
        name = name.lower()
        if learning_rate is None:
            learning_rate = settings.pop("lr", None)
        if learning_rate is None:
            learning_rate = KINDS[name].learning_rate
        values = {
            "name": name,
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "no_decay": words(no_decay),
            "no_trust_ratio": words(no_trust_ratio),
            "global_clipnorm": global_clipnorm,
            "loss_scaling": loss_scaling,
            "ema_momentum": ema_momentum,
            "per_batch_size": per_batch_size,
            "settings": {n: _plain(v) for n, v in settings.items() if v is not None},
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)  # frozen from here on
        self._check_values()
        self._check_settings()
        self._refuse_other_clipping(clipnorm=clipnorm, clipvalue=clipvalue)
        self._check_clipping()
        try:
            self._make([{"params": [torch.nn.Parameter(torch.zeros(1))]}], {})
        except (AssertionError, TypeError, ValueError) as error:
            given = ", ".join(f"{n}={v!r}" for n, v in self.settings.items())
            raise ConfigError(
                f"{self._who} can't have these settings: {given}. {error}"
            ) from error

    # Making it -----------------------------------------------------------------

    @property
    def is_scaled_automatically(self) -> bool:
        """Whether PopTorch adapts the loss scaling by itself."""
        return self.loss_scaling == "auto"

    @property
    def initial_loss_scaling(self) -> float | None:
        """The loss scaling of the first update; None for PopTorch's default.

        Example:
            >>> Optimizer("sgd", loss_scaling=LossScaleRamp(4, 2, 10, 64)
            ...           ).initial_loss_scaling
            4.0
        """
        if isinstance(self.loss_scaling, LossScaleRamp):
            return self.loss_scaling.value(0)
        if self.loss_scaling is None or isinstance(self.loss_scaling, str):
            return 1.0 if self.is_scaled_automatically else None
        return float(self.loss_scaling)

    @property
    def velocity_follows(self) -> bool:
        """Whether SGD's velocity is to be scaled as the loss is, while that grows."""
        return (
            self._is_combined
            and isinstance(self.loss_scaling, LossScaleRamp)
            and "velocity_scaling" not in self.settings
        )

    def scaled_for_float16(self) -> Optimizer:
        """Make the same with the default loss scaling of float16, if it has none.

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
        """Make the optimizer for the parameters of a module.

        Args:
            module: All its parameters are given to the optimizer.

        Returns:
            An optimizer of `poptorch.optim`, with further parameter groups for what
            `no_decay` and `no_trust_ratio` spare.

        Raises:
            ConfigError: One of their patterns matches no parameter.

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
        arguments = {
            "lr": float(self.learning_rate),
            "weight_decay": self.weight_decay,
            "loss_scaling": self.initial_loss_scaling,
            "max_grad_norm": self._max_grad_norm,
            "velocity_scaling": (
                self.initial_loss_scaling if self.velocity_follows else None
            ),
            **more,
            **self.settings,
        }
        given = {name: v for name, v in arguments.items() if v is not None}
        optimizer: torch.optim.Optimizer = self._kind.poptorch_class(groups, **given)
        return optimizer

    @property
    def _kind(self) -> Kind:
        return KINDS[self.name]

    @property
    def _max_grad_norm(self) -> float | None:
        """The norm that PopTorch gets: its SGD clips gradients of the scaled loss."""
        if self.global_clipnorm is None or self.name != "sgd":
            return self.global_clipnorm
        return self.global_clipnorm * (self.initial_loss_scaling or 1.0)

    @property
    def _who(self) -> str:
        return f"Optimizer({self.name!r})"

    # Checks -------------------------------------------------------------------

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
        if self.weight_decay is not None:
            check_number(self._who, "weight_decay", self.weight_decay, least=0)
        if self.global_clipnorm is not None:
            check_number(self._who, "global_clipnorm", self.global_clipnorm, above=0)
        if self.ema_momentum is not None:
            check_number(self._who, "ema_momentum", self.ema_momentum, least=0, below=1)
        self._check_spared()
        scaling = self.loss_scaling
        if scaling is not None and not isinstance(scaling, LossScaleRamp):
            if isinstance(scaling, str) and scaling != "auto":
                raise ConfigError(
                    f"{self._who} has loss_scaling={scaling!r}: use a number, 'auto', "
                    "or an ipufit.LossScaleRamp."
                )
            if not isinstance(scaling, str):
                check_number(self._who, "loss_scaling", scaling, above=0)

    def _check_spared(self) -> None:
        for argument in ("no_decay", "no_trust_ratio"):
            for word in getattr(self, argument):
                if not isinstance(word, str):
                    raise ConfigError(
                        f"{self._who} has {word!r} in {argument}: use 'bias', 'norm', "
                        "'bias_and_norm' or patterns of parameter names."
                    )
        if self.no_trust_ratio and not self._kind.has_trust_ratio:
            raise UnsupportedError(
                f"{self._who} has no_trust_ratio={self.no_trust_ratio}, and only "
                "'lamb' has a trust ratio. Leave it out."
            )
        has_decay = (
            self._kind.has_decay if self.weight_decay is None else self.weight_decay > 0
        )
        if self.no_decay and not has_decay:
            raise ConfigError(
                f"{self._who} has no_decay={self.no_decay}, but no weight decay that "
                "it could spare them. Give weight_decay, or leave no_decay out."
            )

    def _check_settings(self) -> None:
        for name in self.settings:
            if name not in OTHER_WORDS:
                continue
            word = OTHER_WORDS[name]
            if word is None:
                raise UnsupportedError(
                    f"{self._who} has {name}, which IPUs don't have. Leave it out."
                )
            raise ConfigError(f"{self._who} has {name}. Here it is {word}.")
        known = self._kind.own_settings
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

    def _refuse_other_clipping(self, **values: float | None) -> None:
        meanings = {
            "clipnorm": "the gradient of each weight by its own norm",
            "clipvalue": "each element of a gradient",
        }
        for name, value in values.items():
            if value is not None:
                raise UnsupportedError(
                    f"{self._who} has {name}={value!r}, which in Keras clips "
                    f"{meanings[name]}. PopTorch clips all gradients together by their "
                    "common norm, or not at all: use global_clipnorm for that."
                )

    def _check_clipping(self) -> None:
        if self.global_clipnorm is None:
            return
        who = f"{self._who} has global_clipnorm={self.global_clipnorm}"
        if not self._kind.can_clip:
            raise UnsupportedError(
                f"{who}, but PopTorch's {self._kind.class_name} can't clip. Use "
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


def _plain(value: Any) -> Any:
    """Make lists tuples: PopTorch takes betas as a pair only."""
    return tuple(value) if isinstance(value, list) else value
