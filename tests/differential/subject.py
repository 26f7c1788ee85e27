# SPDX-License-Identifier: Apache-2.0
"""A program trained and looked at by ipufit."""

from __future__ import annotations

import torch

from ipufit import IPUModel, LambdaCallback

from .cases import LAYOUTS, RULES, Case, Outcome, made, state_of
from .kinds import BEFORE_LOOKING, BETWEEN, COMPILED_AGAIN, MID_FIT


def run(case: Case) -> Outcome:
    """What ipufit makes of it."""
    program = made(case.kind)
    layout, rule = LAYOUTS[case.layout], RULES[case.rule]
    model = IPUModel(program.module, layout.config())
    metrics = [program.metric] if program.metric else None
    figures = []

    def compile_model():
        model.compile(rule.given(program.module), program.loss, metrics=metrics)

    def change():
        with torch.no_grad():
            program.change(model.module, model.optimizer)

    def fit(epochs, *callbacks):
        history = model.fit(
            program.x,
            program.y,
            epochs=epochs,
            shuffle=False,
            validation_data=(program.x, program.y),
            callbacks=list(callbacks),
            verbose=0,
        ).history
        for epoch in range(epochs):
            figures.append({name: values[epoch] for name, values in history.items()})

    def change_once(epoch, _):
        if epoch == 0:
            change()

    compile_model()
    first = [LambdaCallback(on_epoch_end=change_once)] if case.when == MID_FIT else []
    fit(case.epochs, *first)
    if case.when in (BETWEEN, COMPILED_AGAIN):
        change()
    if case.when == COMPILED_AGAIN:
        compile_model()
    fit(1)
    if case.when == BEFORE_LOOKING:
        change()
    figures.append(dict(model.evaluate(program.x, program.y, verbose=0)))
    outputs = model.predict(program.x, verbose=0)
    return Outcome(figures, outputs, state_of(model.module))
