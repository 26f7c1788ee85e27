# SPDX-License-Identifier: Apache-2.0
"""The optimisers there are by name, and the words for their settings."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Iterable

import torch

from ipufit._poptorch import poptorch


@dataclass(frozen=True)
class Kind:
    """An optimiser of PopTorch.

    Attributes:
        class_name: Name of its class in `poptorch.optim`.
        torch_class: Torch's optimiser of the same settings, if there is one.
        learning_rate: The rate if none is given.
        has_decay: Whether it has weight decay by default.
        can_clip: Whether it clips gradients by their global norm.
        has_trust_ratio: Whether it scales each weight's step by the weight's norm.
    """

    class_name: str
    torch_class: type[torch.optim.Optimizer] | None = None
    learning_rate: float = 1e-3
    has_decay: bool = False
    can_clip: bool = True
    has_trust_ratio: bool = False

    @property
    def poptorch_class(self) -> Any:
        """The class in `poptorch.optim`."""
        return getattr(poptorch.optim, self.class_name)

    @property
    def _arguments(self) -> set[str]:
        return set(inspect.signature(self.poptorch_class).parameters)

    @property
    def own_settings(self) -> set[str]:
        """Names of the settings that `Optimizer` has no word of its own for."""
        return self._arguments - {"weight_decay", "loss_scaling", *OTHER_WORDS}

    def known(self, names: Iterable[str]) -> list[str]:
        """Choose the names of settings that count on a device.

        Example:
            >>> KINDS["sgd"].known(["momentum", "foreach", "betas"])
            ['momentum']
        """
        arguments = self._arguments
        return [name for name in names if name in arguments and name not in _HOST_ONLY]


KINDS = {
    "adam": Kind("Adam", torch.optim.Adam),
    "adamw": Kind("AdamW", torch.optim.AdamW, has_decay=True),
    "lamb": Kind("LAMB", has_decay=True, can_clip=False, has_trust_ratio=True),
    "rmsprop": Kind("RMSprop", torch.optim.RMSprop, can_clip=False),
    "sgd": Kind("SGD", torch.optim.SGD, learning_rate=1e-2),
}

NAMES = tuple(KINDS)

_NAMES = ", ".join(NAMES)

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
    **dict.fromkeys(("ftrl", "muon", "rprop"), f"there are {_NAMES}"),
    **dict.fromkeys(("adamax", "nadam", "radam"), "'adamw' or 'adam' is nearest"),
}
"""Names of optimizers that PopTorch doesn't have, and what it has instead."""

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
