# SPDX-License-Identifier: Apache-2.0
"""The README's example runs, its claims hold, and its links lead somewhere."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

import ipufit
from ipufit import (
    CachedDataset,
    DroppedRowsWarning,
    IPUConfig,
    IPUModel,
    poptorch,
)
from tests import reference

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/*.md")),
]


def code_blocks(page, language):
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S
    )


def test_the_example_of_the_readme_runs(capsys):
    (code,) = code_blocks(ROOT / "README.md", "python")
    exec(compile(code, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    results, shape = (line for line in lines if line[0] in "{t")  # not the progress
    assert re.fullmatch(r"\{'accuracy': 0\.\d+, 'loss': \d\.\d+\}", results)
    assert shape == "torch.Size([2000, 4])"


# Links --------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors(page):
    """The anchors of a page's headings, as Markdown's sites make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)", text, re.M)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text("utf-8"))
    targets = [((page.parent / file) if file else page, name) for file, name in links]
    assert [name for target, name in targets if name not in anchors(target)] == []


def test_there_are_links_to_check():
    assert re.search(r"\]\(docs/", (ROOT / "README.md").read_text("utf-8"))
    assert any("#" in page.read_text("utf-8").partition("](")[2] for page in PAGES)


# Claims -------------------------------------------------------------------------------

X, Y = reference.samples(48)
TESTS = ROOT / "tests"

# What each claim of the README is tested by, here (without a file) or elsewhere. Claims
# are the items of its lists and the rows of its table, by how they begin.
CLAIMS = {
    "Two programs from one module.": [
        "test_training_and_validation_take_turns",
        "engine/programs/test_moves.py::test_what_moves_is_what_the_page_says",
    ],
    "Many processes.": [
        "distributed/test_scale.py::test_the_curve_is_the_same_on_any_layout",
        "distributed/test_callbacks.py::*",
        "launch/test_running.py::*",
    ],
    "What scripts write by hand is one argument.": [
        "test_by_hand.py::*",
        "test_pages.py::test_the_page_on_the_config_has_every_field",
        "test_a_pipeline_leaves_nothing_on_the_module",
    ],
    "One `batch_size`.": ["test_replicas_train_the_same_curve", "test_keras_s_name"],
    "Exact numbers.": [
        "test_the_example_of_the_readme_runs",
        "test_figures_are_of_every_sample",
        "engine/test_exactness.py::*",
    ],
    "Any data.": [
        "test_forms_of_data.py::test_every_form_of_data_trains_to_the_same_weights",
        "test_forms_of_data.py::test_evaluate_and_predict_see_each_sample_once",
        "test_transforms_are_computed_once",
    ],
    "Keras's contract.": ["keras/test_document.py::*"],
    "Nothing is lost.": [
        "test_kill.py::test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_"
        "not",
        "test_resume.py::test_resuming_after_any_call_is_as_not_having_stopped",
        "test_nothing_is_unpickled",
    ],
    "Fast with nothing set.": [
        "test_left_open.py::*",
        "emulator/optimizers/test_updates.py::*",
        "emulator/program/test_channels_last.py::*",
        "emulator/test_folding.py::*",
    ],
    "Known before it is compiled.": [
        "test_check.py::*",
        "emulator/executor/test_survey_of_refusals.py::test_the_programs_were_seen",
        "test_model_plan.py::*",
        "test_automatic_split.py::*",
        "callbacks/test_profiler.py::*",
    ],
    "Your own step.": [
        "test_own_steps.py::*",
        "test_what_is_logged_is_averaged_over_all_samples",
    ],
    "New here?": ["test_tutorial.py::*"],
    "You have a script?": ["test_migrate.py::*"],
    "You learn from examples?": ["test_examples.py::*"],
    "You have a question?": ["test_site.py::*"],
    "You know what you look for?": ["test_site.py::*"],
    "Errors before the compiler's.": [
        "test_model.py::test_a_batch_that_does_not_fit_shows_every_factor_and_the_way_"
        "out",
        "test_model.py::test_a_loss_that_does_not_fit_is_refused_before_a_device_is_"
        "taken",
    ],
    "`auto` (default)": [
        "test_seam.py::test_an_installed_poptorch_is_used",
        "test_seam.py::test_without_one_the_emulator_says_once_that_it_is_the_emulator",
        "test_seam.py::test_a_broken_poptorch_raises_its_own_error",
    ],
    "`poptorch`": ["test_seam.py::test_poptorch_can_be_insisted_on"],
    "`emulator`": [
        "test_seam.py::test_the_emulator_can_be_insisted_on",
        "test_own_options_win",
        "emulator/test_main.py::test_a_script_uses_poptorch_without_knowing",
        "emulator/test_main.py::test_ipus_are_as_scarce_as_asked",
        "emulator/test_main.py::test_strict_mode_refuses_what_no_ipu_computes",
    ],
    "What PopTorch itself leaves out": [
        "engine/traced/test_refusals.py::*",
        "engine/observers/test_whole_buffers.py::*",
    ],
    "A run on real IPUs": [],  # what can't be run here
}


def claims():
    text = (ROOT / "README.md").read_text("utf-8")
    text = text.partition("<!-- written by")[0] + text.partition("<!-- end of")[2]
    items = re.findall(r"^- (?:\*\*(.+?)\*\*|([^:(]+?)(?= \(|:))", text, re.M)
    rows = re.findall(r"^\| (?!`IPUFIT_BACKEND`)(.+?) \| .*\|$", text, re.M)
    return [bold or plain for bold, plain in items] + rows


def test_every_claim_has_a_test():
    assert sorted(claims()) == sorted(CLAIMS)


@pytest.mark.parametrize("test", [test for tests in CLAIMS.values() for test in tests])
def test_the_tests_of_claims_exist(test):
    file, _, name = test.rpartition("::")
    path = TESTS / file if file else Path(__file__)
    found = re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.M)
    assert found if name == "*" else name in found


def compiled(config=None, module=None, **settings):
    model = IPUModel(module or reference.network(), config)
    model.compile(
        torch.optim.SGD(model.module.parameters(), 0.5),
        "cross_entropy",
        metrics=["accuracy"],
        **settings,
    )
    return model


def test_training_and_validation_take_turns(monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "2")
    config = IPUConfig(replicas=2, micro_batch_size=4)
    model = compiled(config)
    history = model.fit(X, Y, epochs=2, validation_data=(X, Y), verbose=0).history
    expected = reference.evaluate(model.module, X, Y)
    assert history["val_loss"][-1] == pytest.approx(expected["loss"], rel=1e-4)


def test_replicas_train_the_same_curve():
    initial = reference.network()
    curves, networks = [], []
    for replicas in (1, 2, 4, 8):
        module = copy.deepcopy(initial)
        model = compiled(IPUConfig(replicas=replicas, micro_batch_size=1), module)
        run = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
        curves.append(model.fit(X, Y, **run).history)
        assert model.config.training_plan(16).gradient_accumulation == 16 // replicas
        model.detach()
        networks.append(module)
    for curve, network in zip(curves, networks):
        assert curve["loss"] == pytest.approx(curves[0]["loss"], rel=1e-4)
        assert curve["accuracy"] == curves[0]["accuracy"]
        reference.assert_same_weights(network, networks[0], rtol=1e-4)


def test_keras_s_name():
    model = compiled(steps_per_execution=3)
    assert model.config.device_iterations == 3


def test_figures_are_of_every_sample():
    model = compiled(IPUConfig(micro_batch_size=4, device_iterations=2))
    for count in (1, 9, 16, 47):
        x, y = X[:count], Y[:count]
        figures = model.evaluate(x, y, verbose=0)
        assert figures == pytest.approx(
            reference.evaluate(model.module, x, y), rel=1e-4
        )
        with torch.no_grad():
            torch.testing.assert_close(model.predict(x, verbose=0), model.module(x))
    with pytest.warns(DroppedRowsWarning, match="leaves out 7 of 47 samples"):
        model.fit(X[:47], Y[:47], batch_size=4, verbose=0)


def test_transforms_are_computed_once():
    class Transformed(Dataset):
        computed = 0

        def __len__(self):
            return len(X)

        def __getitem__(self, index):
            self.computed += 1
            return X[index], Y[index]

    data = Transformed()
    cached, filled = CachedDataset(data), data.computed
    compiled().fit(cached, batch_size=16, epochs=3, verbose=0)
    assert data.computed == filled


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    model = compiled()
    model.fit(X, Y, batch_size=16, verbose=0)
    model.save(tmp_path / "saved")
    files = {path.suffix for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert files == {".safetensors", ".json"}

    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    other = compiled()
    other.load(tmp_path / "saved")
    reference.assert_same_weights(other.module, model.module, rtol=0, atol=0)


def test_what_is_logged_is_averaged_over_all_samples():
    class Logging(torch.nn.Linear):
        def forward(self, x):
            ipufit.log("size", x.abs().mean())
            return super().forward(x)

    model = compiled(IPUConfig(micro_batch_size=4, replicas=2), Logging(3, 4))
    seen = []
    listener = ipufit.LambdaCallback(on_epoch_end=lambda _, logs: seen.append(logs))
    history = model.fit(X, Y, batch_size=16, callbacks=listener, verbose=0).history
    expected = pytest.approx(float(X.abs().mean()), rel=1e-5)
    assert history["size"] == [expected]
    assert seen[0]["size"] == expected


def test_a_pipeline_leaves_nothing_on_the_module(monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "4")
    config = IPUConfig(pipeline=("0", "2"), micro_batch_size=4)
    model = compiled(config)
    before = {name: set(vars(part)) for name, part in model.module.named_modules()}
    model.fit(X, Y, batch_size=16, validation_data=(X, Y), verbose=0)
    model.detach()
    for name, part in model.module.named_modules():
        assert set(vars(part)) == before[name]
        assert not part._forward_pre_hooks
        assert not part._forward_hooks
    assert {type(weight) for weight in model.module.parameters()} == {
        torch.nn.Parameter
    }


def test_own_options_win():
    assert ipufit.poptorch is poptorch
    own = poptorch.Options().deviceIterations(3).outputMode(poptorch.OutputMode.All)
    config = IPUConfig(device_iterations=2, inference_options=own)
    assert config.inference_plan(4).device_iterations == 3


def test_make_has_what_is_to_be_made():
    made = re.findall(
        r"^make (\w+)", "\n".join(code_blocks(ROOT / "README.md", "sh")), re.M
    )
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert made
    assert set(made) <= set(targets)


def test_the_versions_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    versions = re.findall(r"Python :: (3\.\d+)", text)
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"Python {versions[0]} to {versions[-1]}" in readme
    for extra in re.findall(r"\.\[(\w+)\]", readme):
        assert re.search(rf"^{extra} = \[", text, re.M)


def test_the_switches_of_the_environment_are_read():
    readme = (ROOT / "README.md").read_text("utf-8")
    source = "".join(
        path.read_text("utf-8") for path in (ROOT / "ipufit").rglob("*.py")
    )
    switches = set(re.findall(r"IPUFIT_\w+", readme))
    assert switches
    assert [name for name in switches if f'"{name}"' not in source] == []
