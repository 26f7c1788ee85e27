# SPDX-License-Identifier: Apache-2.0
"""`IPUModel`: the door. It checks, decides the plan, and delegates."""

from __future__ import annotations

from .batches import SingleBatches
from .copying import Copied
from .weights import Weights


class IPUModel(SingleBatches, Weights, Copied):
    """A torch module with Keras's `compile`, `fit`, `evaluate` and `predict`.

    It runs on IPUs through PopTorch, and anywhere else on `ipufit.emulator`.

    * `compile` says how to train and what to report.
    * `fit` trains, and gives the figures of each epoch.
    * `evaluate` gives loss and metrics over every sample.
    * `predict` gives the outputs, one row per sample.

    `copy.deepcopy(model)`, and `pickle`, give a model that goes on as this one would:
    with its weights, its config, what `compile` was told, and the optimizer's state. It
    has no programs yet, and random numbers on its device begin anew. `copy.copy(model)`
    is another model of the same module, compiled alike.

    Args:
        module: Any module. Its weights are the ones trained: after `fit` they are in
            it, whatever device they were on. With `precision="float16"` they become
            float16.
        config: How it is laid out; one IPU by default.

    Raises:
        ConfigError: `module` is no torch module, or `config` no `IPUConfig`.
        UnknownNameError: `pipeline` names something else among submodules.

    Example:
        >>> import torch
        >>> from ipufit import IPUConfig
        >>> x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
        >>> model = IPUModel(torch.nn.Linear(4, 3), IPUConfig(micro_batch_size=8))
        >>> model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])
        >>> history = model.fit(x, y, batch_size=32, epochs=2, verbose=0)
        >>> sorted(history.history)
        ['accuracy', 'loss']
        >>> model.predict(x, verbose=0).shape
        torch.Size([64, 3])
    """

    # They are made on floors of their own; help() begins with what is here.
    compile = SingleBatches.compile
    fit = SingleBatches.fit
    evaluate = SingleBatches.evaluate
    predict = SingleBatches.predict


__all__ = ["IPUModel"]
