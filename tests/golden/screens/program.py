# SPDX-License-Identifier: Apache-2.0
"""What the golden screens show: a fit, an evaluation, a prediction, with verbose=1.

Seconds pass only when a program is compiled and when a call ends, and the numbers are
the same everywhere. With the argument `interrupted` Ctrl-C ends the fit in its third
epoch.
"""

import os
import signal
import sys
import tempfile
import threading
import time

import torch

now = 0.0
time.perf_counter = lambda: now  # before ipufit and its displays ask for it

import ipufit  # noqa: E402


class Timer(threading.Timer):
    """Would fire if a compilation took a second on a clock that doesn't go here."""

    def __init__(self, interval, *rest):
        super().__init__(1e6, *rest)


threading.Timer = Timer


class Tick(ipufit.Callback):
    def on_train_batch_end(self, batch, logs):
        global now
        now += 1.0

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


class Interrupt(ipufit.Callback):
    def on_train_batch_end(self, batch, logs):
        if self.run.updates == 11:
            signal.raise_signal(signal.SIGINT)


def compile_slowly(executor, *args, compile_=ipufit.poptorch.PoplarExecutor.compile):
    global now
    now += 0.75
    return compile_(executor, *args)


ipufit.poptorch.PoplarExecutor.compile = compile_slowly

module = torch.nn.Sequential(torch.nn.Linear(1, 1))
torch.nn.init.ones_(module[0].weight)
torch.nn.init.zeros_(module[0].bias)
x, y = torch.arange(8.0).reshape(8, 1) / 8, torch.ones(8, 1)

model = ipufit.IPUModel(module, ipufit.IPUConfig(device_iterations=1))
model.compile("sgd", "mse", metrics=["mae"])
fit = {"batch_size": 2, "epochs": 10, "shuffle": False, "validation_data": (x, y)}
if sys.argv[1:] == ["interrupted"]:
    os.chdir(tempfile.mkdtemp())
    backup = ipufit.BackupAndRestore("backup")
    try:
        model.fit(x, y, callbacks=[Tick(), backup, Interrupt()], **fit)
    except KeyboardInterrupt:
        sys.exit()
model.fit(x, y, callbacks=Tick(), **fit)
model.evaluate(x, y, batch_size=2, verbose=1, callbacks=Tick())
outputs = model.predict(x, batch_size=2, verbose=1, callbacks=Tick())
