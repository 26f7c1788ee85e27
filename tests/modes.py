# SPDX-License-Identifier: Apache-2.0
"""The ways in which the emulator runs a program, for all tests at once.

`pytest --emulator-mode looped --emulator-mode contiguous` runs whatever it is given as
if the variables of the modes were set. Numbers must be the same in all of them.
"""

import os

VARIABLES = {
    "looped": ("IPUFIT_EMULATOR_FOLD", "0"),
    "contiguous": ("IPUFIT_EMULATOR_CHANNELS_LAST", "0"),
}
"""What each mode sets. Without a mode, programs fold, and change layout."""


def enter(modes):
    """Run all programs from now on in these modes."""
    for mode in modes:
        name, value = VARIABLES[mode]
        os.environ[name] = value
