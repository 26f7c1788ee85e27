# SPDX-License-Identifier: Apache-2.0
"""`TensorBoard`: real files, and the same folders, tags, steps, values as Keras's.

Keras's needs TensorFlow to write. It gets a double of `tensorflow.summary` instead,
which notes down what would be written.
"""

import os

import keras
import numpy as np
import pytest

from ipufit.callbacks import TensorBoard
from tests.keras.summary_double import Summary
from tests.keras.twins import compiled, data, networks

pytest.importorskip("tensorboard")

# tensorboard's own imports.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:pkg_resources is deprecated:UserWarning"),
]


def read(folder):
    """What is in the files of a folder: `(folder, tag, step)` to value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for name in sorted(os.listdir(folder)):
        # Files of one second are read by the last number in their names, 10 before 9.
        events = EventAccumulator(str(folder / name), purge_orphaned_data=False)
        for tag in events.Reload().Tags()["scalars"]:
            for event in sorted(events.Scalars(tag), key=lambda event: event.wall_time):
                found[name, tag, event.step] = event.value
    return found


@pytest.mark.parametrize("update_freq", ["epoch", "batch", 3])
def test_the_same_is_written(update_freq, tmp_path):
    model, ipu = compiled(networks(), "adam", metrics=["mae"])
    theirs = keras.callbacks.TensorBoard(
        "t", update_freq=update_freq, write_graph=False
    )
    theirs._summary_module = summary = Summary()
    mine = TensorBoard(tmp_path, update_freq=update_freq)
    x, y = data(20)
    for fitted, callback in ((model, theirs), (ipu, mine)):
        for _ in range(2):
            fitted.fit(
                x,
                y,
                batch_size=4,
                epochs=2,
                shuffle=False,
                validation_data=data(8, seed=1),
                validation_freq=2,
                callbacks=[callback],
                verbose=0,
            )
        fitted.evaluate(x, y, callbacks=[callback], verbose=0)
    found = {key: v for key, v in read(tmp_path).items() if "hparam" not in key[1]}
    if update_freq == 3:  # then Keras leaves out most epochs (a deviation)
        assert summary.written.keys() < found.keys()
        extra = found.keys() - summary.written.keys()
        assert not any(tag.startswith("batch_") for _, tag, _ in extra)
    else:
        assert found.keys() == summary.written.keys()
    assert len(found) > 10
    for key, value in summary.written.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, err_msg=str(key))
