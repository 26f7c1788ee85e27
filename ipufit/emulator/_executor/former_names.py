# SPDX-License-Identifier: Apache-2.0
"""Unpickling of executables whose classes have moved since they were saved.

`torch.load` takes this module as its `pickle_module`.
"""

from __future__ import annotations

import pickle
from typing import Any

_MODULES = {
    "_lamb": "_optimizers.lamb",
    "_markers": "_ops.markers",
    "_multi_conv": "_ops.multi_conv",
    "_optimizer_base": "_optimizers.base",
    "_options_distributed": "_options.distributed",
    "_options_sections": "_options.sections",
    "_options_state": "_options.state",
    "_popart_options": "_options.popart",
    "_stages": "_options.stages",
    "_tensor_locations": "_options.tensor_locations",
    "_wrapper_registry": "_executor.wrapper_registry",
    "blocks": "_tracing.blocks",
    "strategies": "_options.strategies",
}
"""Former modules of pickled classes -> those that have them now."""

_EMULATOR = "ipufit.emulator."

load = pickle.load


class Unpickler(pickle.Unpickler):
    """Unpickler that finds classes of the emulator by their former names too."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(_EMULATOR):
            tail = module[len(_EMULATOR) :]
            module = _EMULATOR + _MODULES.get(tail, tail)
        return super().find_class(module, name)
