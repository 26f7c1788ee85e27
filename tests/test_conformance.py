# SPDX-License-Identifier: Apache-2.0
"""Probes are recorded and compared by the command, and what differs is found.

Recordings of devices, in tests/conformance, are replayed on the emulator. Until there
is one, the emulator's own shows that a replay agrees with it and finds a change.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

from ipufit import conformance
from ipufit.conformance import recording as command
from ipufit.conformance.operators import LEFT
from ipufit.conformance.probing import PROBES, Probe
from ipufit.errors import FileError
from tests.interpreters import run_python

ROOT = Path(__file__).parent.parent
RECORDINGS = sorted((ROOT / "tests/conformance").glob("*.json"))
NAME = re.compile(r"poptorch-[\d.]+-(mk1|mk2|bow|ipu-model)-\d{4}-\d\d-\d\d\.json")
DEVICES = {"mk1": "IPU Mk1", "mk2": "IPU Mk2", "bow": "IPU Bow"}
PAGE = (ROOT / "docs/how-to/conformance.md").read_text("utf-8")
# Errors of torch in a probe whose errors come from PopTorch otherwise.
BY_TORCH = {
    *("AssertionError", "DynamicShapeError", "IndexError", "RuntimeError"),
    "TypeError",  # torch 2.0.1, for a size that is a tensor
}


def run(action, path, backend="emulator"):
    """Run the command, and return its exit status and both outputs."""
    environment = {**os.environ, "IPUFIT_BACKEND": backend, "PYTHONPATH": str(ROOT)}
    arguments = ["-m", "ipufit", "conformance", action, str(path)]
    done = run_python(*arguments, env=environment)
    return done.returncode, done.stdout, done.stderr


def verdicts(printed):
    """The verdicts that a comparison prints, by probes, and the words after each."""
    found = {}
    for verdict, name, words in re.findall(
        r"^(\S+(?: \w+)?) {2,}(\w+):?((?:.*\n {14})*.*)$", printed, re.M
    ):
        found[name] = verdict, " ".join(words.split())
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recording of the emulator."""
    path = tmp_path_factory.mktemp("conformance") / "emulator.json"
    status, out, err = run("record", path)
    assert (status, err.count("\n")) == (0, len(PROBES)), err
    assert f"{len(PROBES)} probes on emulator" in out
    return path


@pytest.fixture(scope="module")
def outcomes(recorded):
    about, found = command.read(recorded)
    assert about["device"] == "emulator"
    return {name: one["outcome"] for name, one in found.items()}


# Recordings ---------------------------------------------------------------------------


def test_a_replay_agrees_and_finds_what_was_changed(recorded, tmp_path):
    data = json.loads(recorded.read_text("utf-8"))
    weights = data["probes"]["sgd"]["outcome"]["layer.weight"]["data"]
    weights[4] += 0.001
    data["probes"]["nested_results"]["outcome"]["b"] = {"refused": "Error: no"}
    data["probes"]["tied_weights"]["outcome"] = {"": {"timed out": "ended after 300 s"}}
    data["probes"]["replicas"]["outcome"] = {"": {"not run": "needs 2 IPUs"}}
    data["probes"]["adam"]["source"] = "another"
    left = data["probes"]["equal_elements_in_order"]["outcome"]
    left["sort"]["data"].reverse()
    del data["probes"]["lamb"]
    data["probes"]["former"] = data["probes"]["sgd"]
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data), "utf-8")

    status, out, err = run("compare", path)

    assert (status, err) == (1, "")
    assert max(map(len, out.splitlines())) <= 80
    found = verdicts(out)
    value = re.escape(str(weights[4]))
    assert re.fullmatch(
        rf"layer\.weight: \[1, 1\]: {value} in the recording, \S+ here",
        found["sgd"][1],
    )
    assert found["nested_results"] == (
        "differs",
        "b: refused (Error: no) in the recording, float32 [4, 1] here",
    )
    others = {name: verdict for name, (verdict, _) in found.items() if name in PROBES}
    assert {name: one for name, one in others.items() if one != "agrees"} == {
        "sgd": "differs",
        "nested_results": "differs",
        "tied_weights": "differs",
        "replicas": "not run",
        "adam": "changed",
        "lamb": "not recorded",
        "equal_elements_in_order": "known",
    }
    assert others.keys() == PROBES.keys()
    assert found["former"][0] == "gone"


def test_a_recording_holds_numbers_exactly(outcomes):
    gelu = outcomes["activations"]["gelu"]
    assert (gelu["dtype"], gelu["shape"]) == ("float32", [4, 9])
    assert any(one != round(one, 7) for one in gelu["data"])
    assert outcomes["not_a_number"]["cross_entropy"]["data"][0] == "nan"
    assert outcomes["nested_results"].keys() == {"a.0", "a.1.0", "a.1.1", "b"}


def test_what_is_called_refused_is_refused_here_and_nothing_else_is(outcomes):
    for name, outcome in outcomes.items():
        group = PROBES[name].group
        kinds = {command._kind(leaf) for leaf in outcome.values()}
        if group != LEFT:
            kind = "refused" if group.startswith("refused") else "values"
            assert kinds == {kind}, name


def test_refusals_are_those_of_poptorch(outcomes):
    leaves = [leaf for outcome in outcomes.values() for leaf in outcome.values()]
    refusals = [leaf["refused"] for leaf in leaves if "refused" in leaf]
    assert len(refusals) > 50
    assert {one.partition(":")[0] for one in refusals} <= {"Error", *BY_TORCH}


def test_each_recording_of_a_device_agrees_with_the_emulator():
    # One test and no parameters: it is there, and passes, while there is no recording.
    for path in RECORDINGS:
        kind = NAME.fullmatch(path.name)[1]
        about, found = command.read(path)
        assert about["device"] == DEVICES.get(kind, "IPU Model")
        assert about["date"] in path.name
        assert f"-{about['poptorch'].partition('+')[0]}-" in path.name
        status, out, _ = run("compare", path)
        assert found
        assert status == 0, out


def test_the_doctor_knows_the_versions_that_are_recorded():
    versions = {command.read(path)[0]["poptorch"] for path in RECORDINGS}
    assert set(conformance.RECORDED) == versions


def test_files_that_are_no_recordings_are_refused(tmp_path):
    for text in ("", "[]", '{"about": {"format": 2}, "probes": {}}'):
        (tmp_path / "file.json").write_text(text, "utf-8")
        with pytest.raises(FileError, match="is no recording"):
            command.read(tmp_path / "file.json")
    assert run("compare", tmp_path / "missing.json")[0] == 2


def test_a_recording_is_not_written_over(recorded):
    before = recorded.read_bytes()
    status, _, err = run("record", recorded)
    assert status == 2
    assert "never edited" in err
    assert recorded.read_bytes() == before


# Probes -------------------------------------------------------------------------------

CRASHES = """
import os, time
from ipufit.conformance import recording
from ipufit.conformance.probing import PROBES, probe, ramp

@probe("tests")
def crash():
    print("the last words", flush=True)
    os.abort()

@probe("tests")
def hang():
    time.sleep(60)

@probe("tests")
def fine():
    return {"x": ramp(2), "y": [True]}

@probe("tests")
def busy():
    raise RuntimeError("In file.cpp:726: Failed to acquire 1 IPU(s)")

@probe("tests", num_ipus=2)
def large():
    return ramp(2)

recording.LIMIT_SECONDS = 2
names = ["crash", "hang", "fine", "busy", "large"]
for one, outcome, _ in recording._run_each([PROBES[name] for name in names], 1):
    print(one.name, outcome)
"""


def test_a_probe_that_crashes_or_hangs_is_an_answer():
    environment = {**os.environ, "IPUFIT_BACKEND": "emulator"}
    done = run_python("-c", CRASHES, cwd=ROOT, env=environment)
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines["crash"] == "{'': {'crashed': 'exit code -6: the last words'}}"
    assert lines["hang"] == "{'': {'timed out': 'ended after 2 s'}}"
    assert "'y.0': {'value': True}" in lines["fine"]
    assert lines["busy"].startswith("{'': {'not run': 'RuntimeError: In file.cpp")
    assert lines["large"] == "{'': {'not run': 'needs 2 IPUs, and here is 1'}}"


ON_IPUS = """
import types
from ipufit.conformance import recording

recording._in_process = lambda function, *arguments: function(*arguments)
recording.poptorch = types.SimpleNamespace(
    __name__="poptorch",
    poptorch_core=types.SimpleNamespace(__file__="/sdk/poptorch_core.cpython-38.so"),
    ipuHardwareIsAvailable=lambda num_ipus=1: num_ipus <= 2,
    ipuHardwareVersion=lambda: 21,  # takes nothing, as PopTorch's own
)
print(recording._num_ipus(), recording._device(2))
"""


def test_a_host_with_ipus_is_described_by_their_number_and_kind():
    environment = {**os.environ, "IPUFIT_BACKEND": "emulator"}
    done = run_python("-c", ON_IPUS, cwd=ROOT, env=environment)
    assert done.stdout == "2 IPU Bow\n", done.stderr


MODULE = '''
def helper(x):
    """Add."""
    return x + {number}

def other(x):
    return x

class Net:
    size = {size}

@decorated({number})
def asks():
    """{words}"""
    return helper(Net.size)
'''


@pytest.fixture
def source_of(tmp_path):
    """A function: the hash of `asks` in a module that it writes."""

    def made(number=1, size=2, words="Ask."):
        name = f"ipufit.conformance.made_{number}_{size}_{len(words)}"
        path = tmp_path / f"{name}.py"
        path.write_text(MODULE.format(number=number, size=size, words=words), "utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        module.decorated = lambda _: lambda function: function
        spec.loader.exec_module(module)
        return Probe("asks", "", module.asks, 1, 0.0).source

    yield made
    for name in [one for one in sys.modules if "conformance.made_" in one]:
        del sys.modules[name]


def test_the_hash_of_a_probe_is_that_of_all_it_runs(source_of):
    assert source_of() == source_of(words="Ask it in other words.")
    assert len({source_of(), source_of(number=3), source_of(size=3)}) == 3


def test_probes_have_no_hash_in_common():
    assert len({one.source for one in PROBES.values()}) == len(PROBES) > 90


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        ({"refused": "Error: a"}, {"refused": "Error: b"}, True),
        ({"crashed": "exit code -6"}, {"refused": "Error: b"}, True),
        ({"timed out": "ended"}, {"refused": "Error: b"}, False),
        ({"value": True}, {"value": True}, True),
        ({"value": True}, {"value": False}, False),
        ([1.0, "nan", "inf"], [1.00001, "nan", "inf"], True),
        ([1.0, "nan", "inf"], [1.001, "nan", "inf"], False),
        ([0.0, "nan", 1.0], [0.0, 0.0, 1.0], False),
        (["inf", 0.0, 0.0], [1e30, 0.0, 0.0], False),
        (["inf", 0.0, 0.0], ["-inf", 0.0, 0.0], False),
        ([1000.0, 0.0, 0.0], [1000.05, 0.0, 0.0], True),
    ],
)
def test_answers_agree_by_kind_and_within_the_tolerance(one, other, agree):
    leaves = [
        {"dtype": "float32", "shape": [3], "data": leaf}
        if isinstance(leaf, list)
        else leaf
        for leaf in (one, other)
    ]
    for there, here in (leaves, leaves[::-1]):
        assert (command._difference(there, here, 1e-4) == "") is agree


@pytest.mark.parametrize("key", ["dtype", "shape"])
def test_types_and_shapes_are_compared(key):
    leaf = {"dtype": "float32", "shape": [1], "data": [1.0]}
    other = {**leaf, key: {"dtype": "float16", "shape": []}[key]}
    assert "in the recording" in command._difference(leaf, other, 1.0)


# The page and the doctor --------------------------------------------------------------


def table(recordings):
    """The table of the page: which claims have been seen on which device."""
    seen = {"IPU": set(), "IPU Model": set()}
    for about, found in recordings:
        kind = "IPU Model" if about["device"] == "IPU Model" else "IPU"
        for name, one in found.items():
            if "not run" not in one["outcome"].get("", ()):
                seen[kind].add(name)
    groups = {}
    for probe in PROBES.values():
        groups.setdefault(probe.group, set()).add(probe.name)
    lines = [
        "| claims | probes | seen on an IPU | on the IPU Model |",
        "|---|---|---|---|",
    ]
    for group, names in sorted(groups.items()):
        cells = [len(names & some) or "nowhere yet" for some in seen.values()]
        lines.append(f"| {group} | {len(names)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def test_the_page_says_what_has_been_seen_where(outcomes):
    assert table([command.read(path) for path in RECORDINGS]) in PAGE
    one = {"outcome": {"": {"refused": "Error: no"}}}
    none = {"outcome": {"": {"not run": "needs 2 IPUs"}}}
    probes = {"sgd": one, "adam": one, "replicas": none}
    lines = table([({"device": "IPU Bow"}, probes)]).splitlines()
    assert "| optimisers | 10 | 2 | nowhere yet |" in lines
    assert "| replicas | 3 | nowhere yet | nowhere yet |" in lines


def test_a_workflow_that_records_starts_by_hand_alone():
    text = (ROOT / ".github/workflows/conformance.yml").read_text("utf-8")
    assert re.findall(r"^on:\n((?: .*\n)+)", text, re.M) == ["  workflow_dispatch:\n"]
    assert "POPTORCH_IPU_MODEL" in text
    assert "ipufit conformance record" in text
