# SPDX-License-Identifier: Apache-2.0
"""What is printed with `verbose=2`, but for times, is what Keras prints."""

import pytest

from ipufit.callbacks.progress import format_duration
from tests.keras.twins import compiled, data, networks, without_times


def printed(capsys, *calls):
    said = []
    for call in calls:
        call()
        said.append(without_times(capsys.readouterr().out))
    return said


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("frequency", [1, 2])
def test_a_fit_prints_keras_s_lines(capsys, epochs, frequency):
    x, y = data(48)
    common = {
        "batch_size": 4,
        "epochs": epochs,
        "shuffle": False,
        "validation_data": data(8, seed=1),
        "validation_freq": frequency,
        "verbose": 2,
    }
    model, ipu = compiled(networks(), metrics=["mae"])
    theirs, mine = printed(
        capsys,
        lambda: model.fit(x, y, **common),
        lambda: ipu.fit(x, y, **common),
    )
    assert mine == theirs
    assert theirs[-1].startswith("12/12 - TIME - TIME/step - loss: ")
    assert len(theirs) == (4 if epochs == 2 else 1)


def test_evaluate_and_predict_print_keras_s_lines(capsys):
    x, y = data(24)
    model, ipu = compiled(networks(), metrics=["mae"])
    for method, arguments in (("evaluate", (x, y)), ("predict", (x,))):
        theirs, mine = printed(
            capsys,
            *(
                lambda f=f: getattr(f, method)(*arguments, batch_size=8, verbose=2)  # noqa: B023
                for f in (model, ipu)
            ),
        )
        assert mine == theirs
        assert len(theirs) == 1
        assert theirs[0].startswith("3/3 - TIME - TIME/step")


def test_no_epochs_print_nothing(capsys):
    model, ipu = compiled(networks())
    x, y = data(8)
    for fitted in (model, ipu):
        (lines,) = printed(
            capsys, lambda f=fitted: f.fit(x, y, batch_size=4, epochs=0, verbose=2)
        )
        assert lines == []


@pytest.mark.parametrize("seconds", [0.0, 3e-7, 2.4e-5, 9.99e-4, 0.0024, 0.9994, 1, 75])
def test_durations_are_written_as_keras_writes_them(seconds):
    from keras.utils import Progbar

    theirs = Progbar(1)._format_time(seconds, "step")
    assert f" {format_duration(seconds)}/step" == theirs
