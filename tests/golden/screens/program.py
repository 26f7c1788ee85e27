# SPDX-License-Identifier: Apache-2.0
"""What the golden screens show: a fit, an evaluation, a prediction, with verbose=1.

Seconds pass only when a call ends, and the numbers are the same everywhere.
"""

import time

import torch

now = 0.0
time.perf_counter = lambda: now  # before ipufit and its displays ask for it

import ipufit  # noqa: E402


class Tick(ipufit.Callback):
    def on_train_batch_end(self, batch, logs):
        global now
        now += 1.0

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


module = torch.nn.Sequential(torch.nn.Linear(1, 1))
torch.nn.init.ones_(module[0].weight)
torch.nn.init.zeros_(module[0].bias)
x, y = torch.arange(8.0).reshape(8, 1) / 8, torch.ones(8, 1)

model = ipufit.IPUModel(module, ipufit.IPUConfig(device_iterations=2))
model.compile("sgd", "mse", metrics=["mae"])
model.fit(
    x,
    y,
    batch_size=2,
    epochs=2,
    shuffle=False,
    validation_data=(x, y),
    verbose=1,
    callbacks=Tick(),
)
model.evaluate(x, y, batch_size=2, verbose=1, callbacks=Tick())
outputs = model.predict(x, batch_size=2, verbose=1, callbacks=Tick())
