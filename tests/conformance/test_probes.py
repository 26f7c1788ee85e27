# SPDX-License-Identifier: Apache-2.0
"""What small programs do on a device, or are refused for.

Each probe is a test. Here it runs on the emulator, which does what the documentation
says of a device. On IPUs `--record FILE` writes down what it did there, and on any host
`--recording FILE` compares. The recordings of devices beside this file are compared
each time.
"""

import importlib.util
import json
import os
import re
import sys
import time
import types
from pathlib import Path

import pytest

from tests.conformance import recording
from tests.conformance.operators import LEFT
from tests.conformance.probing import PROBES, Probe, ramp
from tests.interpreters import run_python

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
RECORDINGS = [recording.Recording.read(path) for path in sorted(FOLDER.glob("*.json"))]
NAME = re.compile(r"poptorch-[\d.]+-(mk1|mk2|bow|ipu-model)-\d{4}-\d\d-\d\d\.json")
DEVICES = {"mk1": "IPU Mk1", "mk2": "IPU Mk2", "bow": "IPU Bow"}
PAGE = (ROOT / "docs/how-to/conformance.md").read_text("utf-8")
# Errors of torch in a probe whose errors come from PopTorch otherwise.
BY_TORCH = {
    *("AssertionError", "DynamicShapeError", "IndexError", "RuntimeError"),
    "TypeError",  # torch 2.0.1, for a size that is a tensor
}


@pytest.mark.parametrize("name", list(PROBES))
def test_probe(name, ask, host, request):
    outcome = ask(name)
    group = PROBES[name].group
    if host["device"] == "emulator" and group != LEFT:
        kind = "refused" if group.startswith("refused") else "values"
        assert {recording.kind_of(leaf) for leaf in outcome.values()} == {kind}
        refusals = [leaf["refused"] for leaf in outcome.values() if "refused" in leaf]
        assert {one.partition(":")[0] for one in refusals} <= {"Error", *BY_TORCH}
    for device in RECORDINGS:
        verdict, words = device.verdict(name, outcome)
        assert verdict not in ("differs", "changed"), f"{device.path.name}: {words}"
    compared = getattr(request.config, "recording", None)
    verdict, words = compared.verdict(name, outcome) if compared else ("agrees", "")
    if verdict == "known":
        pytest.xfail(words)
    if verdict.startswith("not"):
        pytest.skip(f"{verdict}: {words}")
    assert verdict == "agrees", words


def test_each_recorded_probe_is_there(request):
    compared = getattr(request.config, "recording", None)
    for device in [*RECORDINGS, *([compared] if compared else [])]:
        gone = sorted({*device.probes} - {*PROBES})
        assert gone == [], f"{str(device.path)!r} has probes that aren't here any more"


# Recordings ---------------------------------------------------------------------------


def run(*arguments):
    """Run some probes by pytest, and return its exit status and its lines."""
    names = "activations or sgd or nested_results or tied_weights or replicas or lamb"
    names += " or adam or equal_elements_in_order or not_a_number or recorded_probe"
    environment = {**os.environ, "IPUFIT_BACKEND": "emulator"}
    done = run_python(
        *("-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=line", "-q"),
        *("-k", names, "tests/conformance/test_probes.py", *map(str, arguments)),
        cwd=ROOT,
        env={**environment, "PYTEST_ADDOPTS": "-o addopts=--import-mode=importlib"},
    )
    return done.returncode, done.stdout + done.stderr


def outcomes(printed):
    """The word of each test in pytest's summary."""
    found = re.findall(r"^([A-Z]+) .*?::test_probe\[(\w+)\]", printed, re.M)
    skipped = re.findall(r"^SKIPPED .*: (not run|not recorded): ", printed, re.M)
    return {name: word for word, name in found}, sorted(skipped)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recording of the emulator, of some probes."""
    path = tmp_path_factory.mktemp("conformance") / "emulator.json"
    status, printed = run("--record", path)
    assert status == 0, printed
    return path


def test_a_recording_holds_numbers_exactly(recorded):
    found = recording.Recording.read(recorded)
    assert found.about["device"] == "emulator"
    probes = {name: one["outcome"] for name, one in found.probes.items()}
    gelu = probes["activations"]["gelu"]
    assert (gelu["dtype"], gelu["shape"]) == ("float32", [4, 9])
    assert any(one != round(one, 7) for one in gelu["data"])
    assert probes["not_a_number"]["cross_entropy"]["data"][0] == "nan"
    assert probes["nested_results"].keys() == {"a.0", "a.1.0", "a.1.1", "b"}


def test_a_comparison_agrees_and_finds_what_was_changed(recorded, tmp_path):
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

    status, printed = run("--recording", path)

    assert status == 1
    found, skipped = outcomes(printed)
    assert {name: one for name, one in found.items() if one != "PASSED"} == {
        "sgd": "FAILED",
        "nested_results": "FAILED",
        "tied_weights": "FAILED",
        "adam": "FAILED",
        "equal_elements_in_order": "XFAIL",
    }
    assert found["activations"] == "PASSED"
    assert skipped == ["not recorded", "not run"]
    assert "layer.weight: [1, 1]: " in printed
    assert "b: refused (Error: no) in the recording, float32 [4, 1] here" in printed
    assert "probes that aren't here any more" in printed


def test_a_recording_is_not_written_over(recorded):
    before = recorded.read_bytes()
    status, printed = run("--record", recorded)
    assert status == 4
    assert "never edited" in printed
    assert recorded.read_bytes() == before


ABOUT = {"format": 1, "poptorch": "3.3", "device": "IPU Bow", "date": "2026-01-01"}
NO_RECORDINGS = {
    "nothing": "",
    "a list": [],
    "another format": {"about": {**ABOUT, "format": 2}, "probes": {}},
    "no host": {"about": {"format": 1}, "probes": {}},
    "a list of probes": {"about": ABOUT, "probes": ["sgd"]},
    "a nested list": "[" * 100_000,
    **{
        f"the outcome {outcome}": {
            "about": ABOUT,
            "probes": {"sgd": {"source": "", "outcome": outcome}},
        }
        for outcome in (
            *(None, "", [1], {"": 1}, {"": {}}, {"": {"a": 1, "b": 2}}),
            {"": {"dtype": "float32", "shape": [2], "data": [1.0]}},
            {"": {"dtype": "float32", "shape": "a", "data": [1.0]}},
            {"": {"dtype": "float32", "shape": [1], "data": ["\x1b[2J"]}},
            {"": {"dtype": 1, "shape": [1], "data": [1.0]}},
            {"": {"dtype": "\x1b[2J", "shape": [1], "data": [1.0]}},
        )
    },
}


@pytest.mark.parametrize("name", NO_RECORDINGS)
def test_a_file_that_is_no_recording_is_refused(name, tmp_path):
    content = NO_RECORDINGS[name]
    path = tmp_path / "file.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match="is no recording of tests"):
        recording.Recording.read(path)


def test_the_name_of_a_recording_says_what_it_is_of():
    # One test and no parameters: it is there, and passes, while there is no recording.
    for device in RECORDINGS:
        kind = NAME.fullmatch(device.path.name)[1]
        assert device.probes
        assert device.about["device"] == DEVICES.get(kind, "IPU Model")
        assert device.about["date"] in device.path.name
        version = device.about["poptorch"].partition("+")[0]
        assert f"-{version}-" in device.path.name


# Probes -------------------------------------------------------------------------------


def crash():
    print("the last words", flush=True)  # noqa: T201
    os.abort()


def hang():
    time.sleep(60)


def fine():
    return {"x": ramp(2), "y": [True]}


def busy():
    raise RuntimeError("In file.cpp:726: Failed to acquire 1 IPU(s)")


def test_a_probe_that_crashes_or_hangs_is_an_answer(monkeypatch):
    def asked(run, num_ipus=1):
        return recording.ask(Probe("asked", "", run, num_ipus, 0.0), 1)

    assert asked(crash) == {"": {"crashed": "exit code -6: the last words"}}
    assert asked(fine)["y.0"] == {"value": True}
    assert asked(busy)[""]["not run"].startswith("RuntimeError: In file.cpp")
    assert asked(fine, 2) == {"": {"not run": "needs 2 IPUs, and here is 1"}}
    monkeypatch.setattr(recording, "LIMIT_SECONDS", 0.5)
    assert asked(hang) == {"": {"timed out": "ended after 0.5 s"}}


def test_a_host_with_ipus_is_described_by_their_number_and_kind(monkeypatch):
    for name in ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"):
        monkeypatch.delenv(name, raising=False)
    core = types.SimpleNamespace(__file__="/sdk/poptorch_core.cpython-38.so")
    poptorch = types.SimpleNamespace(
        __name__="poptorch",
        __version__="3.3.0",
        poptorch_core=core,
        ipuHardwareIsAvailable=lambda num_ipus=1: num_ipus <= 2,
        ipuHardwareVersion=lambda: 21,  # takes nothing, as PopTorch's own
    )
    monkeypatch.setattr(recording, "poptorch", poptorch)
    monkeypatch.setattr(
        recording, "_in_process", lambda function, *more: function(*more)
    )
    about = recording.about_this_host()
    assert (about["ipus"], about["device"]) == (2, "IPU Bow")


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
        name = f"tests.conformance.made_{number}_{size}_{len(words)}"
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
        assert (recording.difference(there, here, 1e-4) == "") is agree


@pytest.mark.parametrize("key", ["dtype", "shape"])
def test_types_and_shapes_are_compared(key):
    leaf = {"dtype": "float32", "shape": [1], "data": [1.0]}
    other = {**leaf, key: {"dtype": "float16", "shape": []}[key]}
    assert "in the recording" in recording.difference(leaf, other, 1.0)


# The page -----------------------------------------------------------------------------


def table(recordings):
    """The table of the page: which claims have been seen on which device."""
    seen = {"IPU": set(), "IPU Model": set()}
    for device in recordings:
        kind = "IPU Model" if device.about["device"] == "IPU Model" else "IPU"
        for name, found in device.probes.items():
            if "not run" not in found["outcome"].get("", ()):
                seen[kind].add(name)
    groups = {}
    for one in PROBES.values():
        groups.setdefault(one.group, set()).add(one.name)
    lines = [
        "| claims | probes | seen on an IPU | on the IPU Model |",
        "|---|---|---|---|",
    ]
    for group, names in sorted(groups.items()):
        cells = [len(names & some) or "nowhere yet" for some in seen.values()]
        lines.append(f"| {group} | {len(names)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def test_the_page_says_what_has_been_seen_where():
    assert table(RECORDINGS) in PAGE
    refused = {"outcome": {"": {"refused": "Error: no"}}}
    not_run = {"outcome": {"": {"not run": "needs 2 IPUs"}}}
    device = recording.Recording(Path("file.json"), {"device": "IPU Bow"})
    device.probes = {"sgd": refused, "adam": refused, "replicas": not_run}
    lines = table([device]).splitlines()
    assert "| optimizers | 10 | 2 | nowhere yet |" in lines
    assert "| replicas | 3 | nowhere yet | nowhere yet |" in lines


def test_a_workflow_that_records_starts_by_hand_alone():
    text = (ROOT / ".github/workflows/conformance.yml").read_text("utf-8")
    assert re.findall(r"^on:\n((?: .*\n)+)", text, re.M) == ["  workflow_dispatch:\n"]
    assert "POPTORCH_IPU_MODEL" in text
    assert "pytest tests/conformance --record" in text


def test_the_former_command_says_where_it_went():
    done = run_python("-m", "ipufit", "conformance", "record", "x.json", cwd=ROOT)
    assert done.returncode == 2
    assert "pytest tests/conformance --record" in done.stderr
