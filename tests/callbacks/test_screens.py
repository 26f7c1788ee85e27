# SPDX-License-Identifier: Apache-2.0
"""What `verbose=1` shows in a pipe, on terminals and in a notebook: golden files.

`python -m tests.golden.screens.make` makes them anew.
"""

import re

import pytest

from tests.golden.screens import make

COLOUR = re.compile(r"\x1b\[(?:\d+;)*[349]\d")


def golden(name):
    return (make.HERE / name).read_text("utf-8")


@pytest.mark.parametrize("name", make.SCREENS)
def test_a_screen_is_as_it_was(name):
    assert make.SCREENS[name]() == golden(name)


def test_without_colours_a_screen_is_the_same():
    plain = make.sent_to_terminal(40, NO_COLOR="1")
    assert not COLOUR.search(plain)
    assert make.screen(plain, 40) == golden("terminal-40.txt")
    assert COLOUR.search("\x1b[32m2/2\x1b[0m")


@pytest.mark.parametrize("name", ["terminal-40.txt", "dumb-40.txt"])
def test_forty_columns_break_no_word(name):
    screen, whole = golden(name), golden("pipe.txt")
    assert max(map(len, screen.splitlines())) <= 40
    words = set(re.findall(r"[a-z_]+ \d\.\d{4}", whole))
    assert words <= set(re.findall(r"[a-z_]+ \d\.\d{4}", screen))


def test_at_eighty_columns_an_epoch_has_one_line():
    lines = golden("terminal-80.txt").splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines] == [
        *("Compiled", *(f"{epoch}/10" for epoch in range(1, 11))),
        *("Evaluated", "Predicted"),
    ]
    assert {line.index("val_loss") for line in lines[1:11]} == {38}
    for name in ("terminal-120.txt", "pipe.txt", "notebook.txt"):
        assert golden(name).splitlines() == lines, name
