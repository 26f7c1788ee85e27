# SPDX-License-Identifier: Apache-2.0
"""The phases of a run, in the order in which reports list them."""

from __future__ import annotations

from typing import NamedTuple


class Phase(NamedTuple):
    """A kind of work of which a profile gives the seconds.

    Attributes:
        about: The work, in a few words.
        color: Its colour on pages, as in CSS.
    """

    about: str
    color: str


PHASES = {
    "prepare": Phase("arguments checked, data looked at, calls planned", "#9aa5b1"),
    "programs": Phase("programs found, attached to devices, detached", "#b08968"),
    "compile": Phase("programs traced and compiled", "#7f5539"),
    "host data": Phase("waiting for the batch of the next call", "#f4a261"),
    "call": Phase("the host's part of a call: checks, changed values sent", "#84a59d"),
    "device": Phase("on the device; on IPUs with upload and download", "#2a9d8f"),
    "upload": Phase("emulated device: inputs taken over, types converted", "#90be6d"),
    "forward": Phase("emulated device: forward passes, rows and results", "#43aa8b"),
    "backward": Phase("emulated device: backward passes", "#277da1"),
    "update": Phase("emulated device: weight updates", "#577590"),
    "download": Phase("emulated device: results joined, types converted", "#4d908e"),
    "optimizer": Phase("learning rates and schedules, on the host", "#e9c46a"),
    "figures": Phase("losses and metrics, on the host", "#e76f51"),
    "callbacks": Phase("callbacks, with the bar", "#9d4edd"),
    "checkpoints": Phase("checkpoints taken, written and put back", "#d62828"),
    "weights": Phase("weights copied between host and device; averages", "#bc6c25"),
    "profile": Phase("what this profile takes: marks, spans put into words", "#adb5bd"),
    "loop": Phase("everything else: the control flow of the run", "#ced4da"),
}
"""Phase by name."""
