# SPDX-License-Identifier: Apache-2.0
"""The same program in a plain torch loop."""

from __future__ import annotations

import torch

from .cases import LAYOUTS, MICRO_BATCH, RULES, Case, Outcome, made, state_of
from .kinds import BEFORE_LOOKING, BETWEEN, COMPILED_AGAIN, MID_FIT, SAMPLES


def mean(values):
    return float(torch.stack([torch.mean(value) for value in values]).mean())


def run_plainly(case: Case) -> Outcome:
    """What plain torch makes of it."""
    program = made(case.kind)
    layout, rule = LAYOUTS[case.layout], RULES[case.rule]
    module = program.module
    x, y = (torch.as_tensor(data) for data in (program.x, program.y))
    if x.dtype == torch.float64:
        x = x.float()
    optimizer = rule.plain(module)
    figures = []

    def epoch():
        losses, values = [], []
        for update in torch.arange(SAMPLES).split(layout.samples_per_update):
            optimizer.zero_grad(set_to_none=True)
            parts = update.split(MICRO_BATCH)
            for part in parts:
                outputs = module(x[part])
                loss = program.torch_loss(outputs, y[part])
                (loss / len(parts)).backward()
                losses.append(loss.detach())
                if program.metric:
                    values.append(program.metric(outputs, y[part]).detach().mean())
            if rule.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), rule.max_norm)
            optimizer.step()
        found = {"loss": mean(losses), **looked("val_")}
        if values:
            found[program.metric.__name__] = mean(values)
        figures.append(found)

    def looked(prefix):
        modes = [part.training for part in module.modules()]
        module.eval()
        losses, values = [], []
        with torch.no_grad():
            for part in torch.arange(SAMPLES).split(MICRO_BATCH):
                outputs = module(x[part])
                losses.append(program.torch_loss(outputs, y[part]))
                if program.metric:
                    values.append(program.metric(outputs, y[part]).mean())
        for part, mode in zip(module.modules(), modes):
            part.training = mode
        found = {f"{prefix}loss": mean(losses)}
        if values:
            found[prefix + program.metric.__name__] = mean(values)
        return found

    def change():
        with torch.no_grad():
            program.change(module, optimizer)

    for number in range(case.epochs):
        epoch()
        if case.when == MID_FIT and number == 0:
            change()
    if case.when in (BETWEEN, COMPILED_AGAIN):
        change()
    if case.when == COMPILED_AGAIN:
        optimizer = rule.plain(module)
    epoch()
    if case.when == BEFORE_LOOKING:
        change()
    figures.append(looked(""))
    module.eval()
    with torch.no_grad():
        outputs = module(x)
    return Outcome(figures, outputs, state_of(module))
