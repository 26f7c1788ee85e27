# SPDX-License-Identifier: Apache-2.0
"""Options that record what the probes do on this host, and compare a recording."""

from pathlib import Path

import pytest

from tests.conformance import recording


def pytest_addoption(parser):
    group = parser.getgroup("conformance")
    group.addoption(
        "--record", type=Path, metavar="FILE", help="write what the probes do here"
    )
    group.addoption(
        "--recording", type=Path, metavar="FILE", help="compare the probes with a file"
    )


def pytest_configure(config):
    # Where pytest is given a folder above, it reads this file too late for options.
    target = config.getoption("--record", None)
    path = config.getoption("--recording", None)
    if target is not None and target.exists():
        raise pytest.UsageError(
            f"{str(target)!r} exists, and recordings are never edited: name another."
        )
    if target is not None and hasattr(config, "workerinput"):
        raise pytest.UsageError("--record writes one file: run pytest without -n.")
    try:
        config.recording = None if path is None else recording.Recording.read(path)
    except (OSError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def host():
    """What this host is."""
    return recording.about_this_host()


@pytest.fixture(scope="session")
def ask(host, request):
    """A function of a probe's name: its outcome here, which `--record` writes down."""
    target = request.config.getoption("--record", None)
    written = target and recording.Recording(target, host)
    outcomes = {}

    def outcome_of(name):
        if name not in outcomes:
            probe = recording.PROBES[name]
            outcomes[name] = recording.ask(probe, host["ipus"])
            if written:
                outcome = outcomes[name]
                written.probes[name] = {"source": probe.source, "outcome": outcome}
                written.write()
        return outcomes[name]

    return outcome_of
