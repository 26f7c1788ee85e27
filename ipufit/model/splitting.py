# SPDX-License-Identifier: Apache-2.0
"""The stages that `pipeline="auto"` leaves open, chosen when a model sees data.

They depend on the module, the shapes of samples, the config and the optimiser, and on
nothing else: so all processes choose the same, and so do a resumed run, `build` and
`ipufit compile`.
"""

from __future__ import annotations

from typing import Any

from ipufit.config import IPUConfig, with_stages
from ipufit.data import Source, as_source
from ipufit.engine import give_shapes
from ipufit.errors import ConfigError

from .parts import Model


def settle(model: Model, source: Source) -> None:
    """Have all that depends on shapes of samples be known: lazy weights, and stages.

    Args:
        model: Its config gets the names of stages that it leaves open.
        source: Source of samples.

    Raises:
        ConfigError: Some weights still have no shapes, or there is no such split.
        DataError: `forward` can't take such a sample.
    """
    give_shapes(model.module, source)
    if not model.config.has_open_stages:
        return
    from .measuring import split_of_model  # few processes need it

    names, in_words = split_of_model(model, model.config, source)
    now = with_stages(model._given_config, names)
    if now.pipeline != model._executors.config.pipeline:
        model._executors.place(now, in_words)
    model.config = with_stages(model.config, names)


def resolved(self: Model, config: IPUConfig, x: Any = None) -> IPUConfig:
    """A config of this model with the stages that it leaves open: `config.resolved`."""
    given = self._given_config
    is_chosen = given.has_open_stages and not self.config.has_open_stages
    if x is None and is_chosen and given.ipus == config.ipus:
        return with_stages(config, self.config.pipeline or ())
    source = self._data.source if x is None else as_source(x)
    if source is None:
        raise ConfigError(
            "pipeline='auto' needs the shapes of samples, and this model has seen "
            "none: give data, config.resolved(model, x), or call fit() before."
        )
    from .measuring import split_of_model

    give_shapes(self.module, source)
    return with_stages(config, split_of_model(self, config, source)[0])
