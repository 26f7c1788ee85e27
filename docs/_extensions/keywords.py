# SPDX-License-Identifier: Apache-2.0
"""Words that people look for, and the page that the search shows for each.

Sphinx's search ranks main entries of the index first. They stand here and not in the
pages, where readers of the Markdown would see them.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError


def list_of(things: str) -> list[str]:
    """Return words that people look for a list by."""
    return [things, f"available {things}", f"list of {things}", f"which {things}"]


KEYWORDS = {
    "changelog": ["changelog", "release notes", "breaking changes"],
    "concepts/batch": ["batch size", "micro-batch"],
    "concepts/calls": ["device iterations", "steps per execution"],
    "concepts/limits": ["limitations", "unsupported", "derivative", "pinn"],
    "glossary": ["glossary", "terms"],
    "how-to/callbacks": [
        *list_of("callbacks"),
        *("verbose", "progress bar", "early stopping"),
    ],
    "how-to/check": ["check", "unsupported operator"],
    "how-to/data": ["data", "dataset", "dataloader", "generator"],
    "how-to/encoder-decoder": ["seq2seq", "encoder-decoder", "teacher forcing"],
    "how-to/hyperparameters": ["hyperparameter", "optuna", "hydra", "sweep", "tuning"],
    "how-to/pipelines": ["pipeline", "model parallel", "sharding"],
    "how-to/pods": ["multi-node", "distributed", "replicas", "pod", "data parallel"],
    "how-to/precision": ["precision", "float16", "half precision", "loss scaling"],
    "how-to/resume": ["resume", "continue training", "checkpoint", "preemption"],
    "how-to/segmentation": ["u-net", "unet", "segmentation"],
    "how-to/sites": ["slurm", "docker", "cloud"],
    "how-to/steps": ["custom training step", "train_step"],
    "how-to/tables": ["pandas", "categorical", "columns"],
    "how-to/transformers": ["huggingface", "hugging face", "transformers", "bert"],
    "how-to/weights": ["save weights", "state_dict"],
    "install": ["install", "installation", "pip", "requirements"],
    "questions/contrastive": ["contrastive", "infonce", "in-batch negatives"],
    "questions/gradients": ["vanishing gradients", "exploding gradients"],
    "questions/gan": ["gan", "reinforcement learning", "train_on_batch"],
    "questions/log-a-value": ["log a value", "logging"],
    "questions/out-of-memory": ["out of memory", "oom"],
    "questions/own-loss": ["custom loss"],
    "questions/save-and-load": ["save", "load"],
    "questions/sigmoid": ["sigmoid", "softmax", "from_logits"],
    "reference/config": ["config", "gradient accumulation"],
    "reference/errors": ["errors", "error messages"],
    "reference/losses": ["loss", *list_of("losses")],
    "reference/metrics": [*list_of("metrics"), "accuracy"],
    "reference/operators": ["operators"],
    "reference/optimizers": [
        *list_of("optimizers"),
        *("optimizer", "learning rate", "scheduler", "schedule"),
    ],
    "tutorial": [
        "quickstart",
        "quick start",
        "getting started",
        "first example",
        "predict",
    ],
}
"""Page -> the words, in lower case, that lead to it."""


def add_entries(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the entries of a page before its title."""
    words = KEYWORDS.get(page)
    if words:
        entries = ", ".join(f"! {word}" for word in words)
        source[0] = f"```{{index}} {entries}\n```\n\n{source[0]}"


def check_pages(app: Sphinx, env: BuildEnvironment) -> None:
    """Refuse words that lead to a page which isn't there."""
    missing = sorted(set(KEYWORDS) - env.found_docs)
    if missing:
        raise ExtensionError(f"keywords.py names pages that don't exist: {missing}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the entries when a page is read."""
    app.connect("source-read", add_entries, priority=600)
    app.connect("env-updated", check_pages)
    return {"parallel_read_safe": True}
