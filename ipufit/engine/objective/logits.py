# SPDX-License-Identifier: Apache-2.0
"""Losses by Keras's names take logits here, and refuse outputs that are probabilities.

They would squash them once more, and so be other numbers.
"""

from __future__ import annotations

from typing import Any

from ipufit.engine.observers.probabilities import ProbabilityObserver
from ipufit.errors import ConfigError
from ipufit.losses import Loss

from .outputs import named_outputs, only


def probability_outputs(
    outputs: Any, probabilities: ProbabilityObserver
) -> dict[str, str]:
    """The outputs that are probabilities, and the functions that they come from.

    Args:
        outputs: Everything that the module returned.
        probabilities: Observer of the module's operations.

    Returns:
        "sigmoid" or "softmax" by the output's name, which is empty for a single
        output.
    """
    parts = named_outputs(outputs) or {"": only(outputs)}
    functions = {name: probabilities.function_of(part) for name, part in parts.items()}
    return {name: function for name, function in functions.items() if function}


def check_logits(loss: Loss, name: str, functions: dict[str, str]) -> None:
    """Refuse probabilities as outputs for a loss that takes logits.

    Args:
        loss: Loss of one output.
        name: Name of the output; empty for a single one.
        functions: Result of `probability_outputs`.

    Raises:
        ConfigError: The output is probabilities.

    Example:
        >>> from ipufit.losses import resolve_loss
        >>> check_logits(resolve_loss("bce"), "", {"": "sigmoid"})
        Traceback (most recent call last):
        ipufit.errors.ConfigError: The loss 'bce' takes logits, and the module's outp...
    """
    function = functions.get(name)
    if function is None or not loss.takes_logits:
        return
    output = f"output {name!r}" if name else "output"
    own = (
        "torch.nn.BCELoss()"
        if function == "sigmoid"
        else "lambda x, y: torch.nn.functional.nll_loss(x.log(), y)"
    )
    raise ConfigError(
        f"The loss {loss.name!r} takes logits, and the module's {output} comes from a "
        f"{function}: they are probabilities, which would be squashed once more. Leave "
        f"the {function} out of the module and apply it to what predict() gives, or "
        f"compile with a loss of probabilities: loss={own}."
    )
