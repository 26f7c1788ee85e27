# SPDX-License-Identifier: Apache-2.0
"""Options from files and from JSON."""

from __future__ import annotations

import json

import pytest

from ipufit.emulator.options import ConfigFileError, Options


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "run.cfg"
        path.write_text(text)
        return str(path)

    return write_file


def test_a_file_calls_setters_of_options_and_sections(write):
    options = Options().loadFromFile(
        write(
            """
            # how this run is laid out

            deviceIterations(4)  # and a comment here
            Training.gradientAccumulation(7)
            outputMode(poptorch.OutputMode.Sum)
            replication_factor = 5
            logDir("logs").modelName("net")
            """
        )
    )

    assert options.device_iterations == 4
    assert options.Training.gradient_accumulation == 7
    assert options.output_mode == 3
    assert options.replication_factor == 5
    assert (options.log_dir, options.model_name) == ("logs", "net")


def test_files_add_up(write):
    options = Options().loadFromFile(write("deviceIterations(4)\n"))
    options.loadFromFile(write("replicationFactor(2)\n"))
    assert (options.device_iterations, options.replication_factor) == (4, 2)


def test_an_empty_file_changes_nothing(write):
    assert repr(Options().loadFromFile(write("\n# nothing\n"))) == repr(Options())


def test_a_syntax_error_counts_the_kept_lines_only(write):
    path = write("# first\n\ndeviceIterations(4)\n\nmodelName('a' 3)\nlogDir('b')\n")
    with pytest.raises(ConfigFileError) as info:
        Options().loadFromFile(path)

    first, second = str(info.value).split("\n")
    assert first.startswith("SyntaxError at line 2 of run.cfg: ")
    assert second == "> options.modelName('a' 3)"


def test_nothing_runs_of_a_file_with_a_syntax_error(write):
    options = Options()
    with pytest.raises(ConfigFileError):
        options.loadFromFile(write("deviceIterations(4)\nmodelName(\n"))
    assert options.device_iterations == 1


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("noSuchSetter(1)", AttributeError),
        ("deviceIterations('4')", AssertionError),
        ("Precision.setPartialsType(torch.half)", NameError),
    ],
)
def test_other_errors_come_through(write, line, error):
    with pytest.raises(error):
        Options().loadFromFile(write(line))


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        Options().loadFromFile(str(tmp_path / "none.cfg"))


def test_json_calls_setters():
    options = Options().from_json(
        json.dumps(
            {
                "deviceIterations": 4,
                "Training.gradientAccumulation": 7,
                "connectionType": "ConnectionType.OnDemand",
                "Distributed.configureProcessId": [1, 2],
                "_Popart.set": ["enableOutlining", False],
                "maxRepeatLogs": None,
            }
        )
    )

    assert options.device_iterations == 4
    assert options.Training.gradient_accumulation == 7
    assert options.connection_type == 1
    assert options.Distributed.processId == 1
    assert options._Popart.options["enableOutlining"] is False
    assert options.max_repeat_logs == 2**64 - 1


@pytest.mark.parametrize(
    "text", ["run.log", "OutputMode.None", "OutputMode.All.x", "enum.Enum", "plain"]
)
def test_a_string_that_names_no_member_stays_a_string(text):
    assert Options().from_json(json.dumps({"modelName": text})).model_name == text


def test_json_does_not_convert_strings_in_lists():
    with pytest.raises(AssertionError):
        Options().from_json('{"outputMode": ["OutputMode.EveryN", 10]}')


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"noSuchSetter": 1}', AttributeError),
        ('{"replication_factor": 1}', TypeError),
        ("", json.JSONDecodeError),
    ],
)
def test_wrong_json_is_refused(text, error):
    with pytest.raises(error):
        Options().from_json(text)
