# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F403 - as PopTorch does: each of these modules lists what it exports
"""PopTorch's public API on the host: `import ipufit.emulator as poptorch`.

It keeps PopTorch 3.4's contract, not only its names: `forward` is traced once, inputs
are cut `[D, G, R, B]`, weights live on an emulated device until they are copied,
options freeze, and what a pod would refuse is refused here. The numbers are those of
torch on this machine's processor.

The modules that trace, compile and run, and those that load data, are imported when one
of their names is first used: options and optimizers need neither.
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

import torch  # noqa: F401 - PopTorch has it too: configuration files use it

from . import _impl as _impl
from . import enums as enums
from . import ops as ops
from . import optim as optim
from . import options as options
from . import poptorch_core as poptorch_core
from . import profiling as profiling
from ._install import install as install
from ._install import uninstall as uninstall
from ._logging import logger as logger
from ._logging import setLogLevel as setLogLevel
from ._logging import start_logging as _start_logging
from ._processes import guard_forks as _guard_forks
from ._switches import __version__ as __version__
from ._torch_ops import provide_operators as _provide_operators
from ._utils import ICustomArgParser as ICustomArgParser
from ._utils import flattenTensorStructure as flattenTensorStructure
from ._utils import reconstructTensorStructure as reconstructTensorStructure
from ._utils import registerCustomArgParser as registerCustomArgParser
from ._utils import (
    registerGeometricCustomArgParsers as registerGeometricCustomArgParsers,
)
from .core.pod import ipuHardwareIsAvailable as ipuHardwareIsAvailable
from .core.pod import ipuHardwareVersion as ipuHardwareVersion
from .core.pod import isRunningOnIpu as isRunningOnIpu
from .core.recording import getIpuTensorId as getIpuTensorId
from .core.recording import registerPostCompileHook as registerPostCompileHook
from .core.recording import registerPreCompileHook as registerPreCompileHook
from .enums import *
from .errors import *
from .ops import *
from .ops import module_repr as module_repr
from .ops import print as print
from .options import *
from .poptorch_core import poptorchAtExit as poptorchAtExit

if _typing.TYPE_CHECKING:
    from ._dataloader import AsynchronousDataAccessor as AsynchronousDataAccessor
    from ._dataloader import DataLoader as DataLoader
    from ._poplar_executor import PoplarExecutor as PoplarExecutor
    from ._poplar_executor import (
        importPoptorchMetadataFromFile as importPoptorchMetadataFromFile,
    )
    from ._poplar_executor import inferenceModel as inferenceModel
    from ._poplar_executor import load as load
    from ._poplar_executor import trainingModel as trainingModel
else:
    _HOME_OF = {
        "AsynchronousDataAccessor": "_dataloader",
        "DataLoader": "_dataloader",
        "PoplarExecutor": "_poplar_executor",
        "importPoptorchMetadataFromFile": "_poplar_executor",
        "inferenceModel": "_poplar_executor",
        "load": "_poplar_executor",
        "trainingModel": "_poplar_executor",
    }

    def __getattr__(name: str) -> object:
        """Import a class or function at its first use."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = _importlib.import_module(f".{_HOME_OF[name]}", __name__)
        value = globals()[name] = getattr(home, name)
        return value

    def __dir__() -> list[str]:
        """List all names, also of classes and functions that aren't imported yet."""
        return sorted({*globals(), *_HOME_OF})

    _hidden = {"annotations", "core", "enum", "errors", "torch"}
    __all__ = [name for name in __dir__() if name[0] != "_" and name not in _hidden]
    __all__ += ["__version__"]

_start_logging()
_provide_operators()
_guard_forks()
