# SPDX-License-Identifier: Apache-2.0
"""`check` of models that run: nothing is refused.

Models of the zoo are compiled in the emulator's strict mode too, which must agree.
"""

from __future__ import annotations

import pytest
import torch

from ipufit import IPUConfig, IPUModel, UnsupportedError, poptorch
from tests.fit.test_models import ZOO, torchvisions_models
from tests.strategies import slow_but_each_fourth

TORCHVISION = """
    convnext_tiny alexnet densenet121 efficientnet_v2_s efficientnet_b0 googlenet
    inception_v3 maxvit_t mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_y_400mf
    resnet18 resnet50 resnext50_32x4d shufflenet_v2_x1_0 squeezenet1_1 vgg11 vit_b_16
    wide_resnet50_2 swin_t
""".split()  # noqa: SIM905 - one per line would be a page
LARGE = ("alexnet", "maxvit_t", "vgg11", "vit_b_16")
"""Those that take no small images."""


def runs(model, x, y, batch_size, monkeypatch):
    """Whether the program compiles in strict mode."""
    monkeypatch.setenv("IPUFIT_EMULATOR_STRICT", "1")
    try:
        model.build(x, y, batch_size, verbose=0)
    except (poptorch.Error, UnsupportedError):
        return False
    return True


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore::ipufit.IpufitWarning")
def test_a_check_agrees_with_a_compilation(name, monkeypatch):
    case = ZOO[name]()
    model = IPUModel(case.module, IPUConfig(micro_batch_size=4))
    model.compile("sgd", case.loss, metrics=case.metrics)
    report = model.check(case.x, case.y, 12)
    assert not report.is_refused, report
    assert runs(model, case.x, case.y, 12, monkeypatch)


@pytest.mark.parametrize("name", slow_but_each_fourth(TORCHVISION))
def test_torchvisions_networks_are_not_refused(name):
    has_aux = name in ("googlenet", "inception_v3")
    aux = {"aux_logits": False, "init_weights": False} if has_aux else {}
    size = 224 if name in LARGE else 96
    model = IPUModel(
        getattr(torchvisions_models(), name)(**aux), IPUConfig(micro_batch_size=2)
    )
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    x = torch.zeros(1, 3, size, size).expand(4, -1, -1, -1)
    report = model.check(x, torch.zeros(4, dtype=torch.int64), 4)
    assert not report.is_refused, report
