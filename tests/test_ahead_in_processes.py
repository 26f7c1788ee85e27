# SPDX-License-Identifier: Apache-2.0
"""`build`, `compare` and `export` in two processes that train together."""

from __future__ import annotations

import os

import torch

from ipufit import IPUConfig, IPUModel, compare, poptorch
from tests import reference

X, Y = reference.samples(32)


def ahead(folder):
    torch.manual_seed(3)
    model = IPUModel(torch.nn.Linear(3, 4), IPUConfig(micro_batch_size=4))
    model.compile("adam", "cross_entropy")
    built = model.build(X, Y, batch_size=8, verbose=0)
    model.fit(X, Y, batch_size=8, verbose=0)
    found = compare(model, (X[:8], Y[:8]))
    about = model.export(f"{folder}/model.popef", X)
    return (
        [program.name for program in built.programs],
        max(one.share for one in found.differences),
        about["sha256"],
        model.predict(X, verbose=0).tolist(),
    )


def test_that_all_processes_agree_and_one_writes(pool, tmp_path):
    first, second = pool.run(ahead, str(tmp_path))
    assert first == second
    names, share, _, outputs = first
    assert names == ["inference", "training"]
    assert share < 1e-4
    assert sorted(os.listdir(tmp_path)) == ["model.popef", "model.popef.json"]
    loaded = poptorch.load(str(tmp_path / "model.popef"))
    whole = torch.cat([loaded(X[at : at + 4]) for at in range(0, 32, 4)])
    assert whole.tolist() == outputs
