# SPDX-License-Identifier: Apache-2.0
"""What an extra is for works with the real package, where that is installed.

tox has an environment for each extra alone (`extra-wandb`), in which nothing of this is
skipped; elsewhere it is slow. Each package runs in a process of its own, as some leave
threads behind.
"""

import importlib.metadata
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.interpreters import run_python

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
(SECTION,) = re.findall(
    r"^\[project\.optional-dependencies\]\n(.*?)^\[", PYPROJECT, re.M | re.S
)
EXTRAS = {
    name: re.findall(r'^\s*"?([\w.-]+)(?=\[|>=|==)', items.replace(', "', '\n"'), re.M)
    for name, items in re.findall(r"^(\w+) = \[(.*?)\]$", SECTION, re.M | re.S)
}
ALONE = os.environ.get("IPUFIT_TEST_EXTRA", "").partition("-")[2]

FIT = """
import sys
import torch
import ipufit

x, y = torch.rand(32, 4), torch.randint(0, 3, (32,))

def fit(*callbacks, metrics=("accuracy",)):
    model = ipufit.IPUModel(torch.nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", metrics=list(metrics))
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    return model, history
"""

# Extra -> a module that it brings, and a script that ends with a line "done".
SCRIPTS = {
    "metrics": (
        "torchmetrics",
        """
        import torchmetrics
        accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        _, history = fit(metrics=["accuracy", accuracy])
        both = [name for name in history.history if "ccuracy" in name]
        assert len(both) == 2, history.history
        first, second = (history.history[name] for name in both)
        assert all(abs(one - other) < 1e-6 for one, other in zip(first, second))
        """,
    ),
    "mlflow": (
        "mlflow",
        """
        import mlflow
        mlflow.set_tracking_uri("sqlite:///runs.db")
        logger = ipufit.MLflowLogger(run_name="first")
        _, history = fit(logger)
        client = mlflow.MlflowClient()
        assert client.get_run(logger.run_id).info.status == "FINISHED"
        found = client.get_metric_history(logger.run_id, "loss")
        assert [one.step for one in found] == [0, 1]
        expected = history.history["loss"]
        assert all(abs(a.value - b) < 1e-6 for a, b in zip(found, expected)), found
        """,
    ),
    "plot": (
        "matplotlib",
        """
        import matplotlib
        matplotlib.use("agg")
        _, history = fit()
        history.plot().savefig("curves.png")
        assert open("curves.png", "rb").read(4) == b"\\x89PNG"
        """,
    ),
    "tensorboard": (
        "tensorboard",
        """
        from tensorboard.backend.event_processing.event_accumulator import (
            EventAccumulator,
        )
        _, history = fit(ipufit.TensorBoard("logs"))
        events = EventAccumulator("logs/train")
        events.Reload()
        values = [one.value for one in events.Scalars("epoch_loss")]
        expected = history.history["loss"]
        assert all(abs(a - b) < 1e-6 for a, b in zip(values, expected)), values
        assert len(values) == 2
        """,
    ),
    "wandb": (
        "wandb",
        """
        import pathlib, wandb
        logger = ipufit.WandbLogger(project="first", mode="offline")
        fit(logger)
        assert list(pathlib.Path("wandb").glob(f"offline-run-*/*{logger.run_id}.wandb"))
        own = wandb.init(project="second", mode="offline")
        _, history = fit(ipufit.WandbLogger())
        assert abs(own.summary["epoch/loss"] - history.history["loss"][-1]) < 1e-6
        own.finish()
        """,
    ),
    "torchdata": (
        "torchdata",
        """
        from torchdata.stateful_dataloader import StatefulDataLoader
        loader = StatefulDataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=False
        )
        model = ipufit.IPUModel(torch.nn.Linear(4, 3))
        model.compile("sgd", "cross_entropy")
        history = model.fit(loader, epochs=2, verbose=0)
        assert len(history.history["loss"]) == 2
        """,
    ),
    "lightning": (
        "lightning",
        """
        import lightning.pytorch as pl
        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 3)
            def forward(self, x):
                return self.layer(x)
        model = ipufit.IPUModel(Module())
        model.compile("sgd", "cross_entropy")
        assert len(model.fit(x, y, batch_size=8, verbose=0).history["loss"]) == 1
        """,
    ),
    "transformers": (
        "transformers",
        """
        import datasets, transformers
        data = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})
        assert data.with_format("torch")[0]["x"].shape == (4,)
        settings = transformers.BertConfig(
            vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=8,
        )
        network = transformers.BertForSequenceClassification(settings)
        assert network(torch.tensor([[1, 2, 3]])).logits.shape == (1, 2)
        """,
    ),
}


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(one, marks=() if one == ALONE else pytest.mark.slow)
        for one in SCRIPTS
    ],
)
def test_an_extra_does_what_it_is_for(extra, tmp_path):
    module, script = SCRIPTS[extra]
    if extra != ALONE and find_spec(module) is None:
        pytest.skip(f"{module} isn't installed")
    lines = [line[8:] for line in script.splitlines()]
    (tmp_path / "script.py").write_text(
        "\n".join([FIT, *lines, 'print("done")']), encoding="utf-8"
    )
    environment = {
        **os.environ,
        "IPUFIT_BACKEND": "emulator",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),  # where these packages keep things
        "HF_HUB_OFFLINE": "1",
        "WANDB_SILENT": "true",
    }
    done = run_python("script.py", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done" in done.stdout.splitlines()


def test_every_extra_for_users_has_a_script():
    assert set(EXTRAS) - {"dev", "docs", "examples"} == set(SCRIPTS)


def test_no_extra_asks_for_a_package_that_comes_with_a_torch_of_its_own():
    named = {package.lower() for packages in EXTRAS.values() for package in packages}
    assert {"torchmetrics", "mypy", "optuna"} <= named  # the lists were read
    assert not named & {"torch", "torchvision", "torchaudio", "torchtext"}


@pytest.mark.skipif(not ALONE, reason="only where tox has installed an extra alone")
def test_the_extra_has_left_torch_alone():
    pinned = re.findall(r"torch==([\d.]+)", (ROOT / ".ci/torch.txt").read_text("utf-8"))
    version = importlib.metadata.version("torch").partition("+")[0]
    assert version == pinned[0 if sys.version_info >= (3, 10) else 1]
    assert ALONE in EXTRAS
