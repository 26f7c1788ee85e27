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
from . import enums, ops, optim, options, poptorch_core, profiling
from ._install import install, uninstall
from ._logging import logger, setLogLevel
from ._logging import start_logging as _start_logging
from ._processes import guard_forks as _guard_forks
from ._switches import __version__
from ._torch_ops import provide_operators as _provide_operators
from ._utils import (
    ICustomArgParser,
    flattenTensorStructure,
    reconstructTensorStructure,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)
from .core.pod import (
    ipuHardwareIsAvailable,
    ipuHardwareVersion,
    isRunningOnIpu,
)
from .core.recording import (
    getIpuTensorId,
    registerPostCompileHook,
    registerPreCompileHook,
)
from .enums import *
from .errors import (
    Error,
    RecoverableError,
    UnrecoverableError,
    createPoptorchError,
)
from .ops import *
from .ops import (
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    accessAttributes,
    module_repr,
    print,
    register_custom_op,
    removeBlocks,
)
from .options import *
from .poptorch_core import poptorchAtExit

if _typing.TYPE_CHECKING:
    from ._dataloader import AsynchronousDataAccessor, DataLoader
    from ._poplar_executor import (
        PoplarExecutor,
        importPoptorchMetadataFromFile,
        inferenceModel,
        load,
        trainingModel,
    )
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


_start_logging()
_provide_operators()
_guard_forks()

__all__ = [
    "AsynchronousDataAccessor",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "DataLoader",
    "Error",
    "ICustomArgParser",
    "LegacyBeginBlockFn",
    "PoplarExecutor",
    "RecoverableError",
    "UnrecoverableError",
    "__version__",
    "accessAttributes",
    "createPoptorchError",
    "enums",
    "flattenTensorStructure",
    "getIpuTensorId",
    "importPoptorchMetadataFromFile",
    "inferenceModel",
    "install",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "isRunningOnIpu",
    "load",
    "logger",
    "module_repr",
    "ops",
    "optim",
    "options",
    "poptorchAtExit",
    "poptorch_core",
    "print",
    "profiling",
    "reconstructTensorStructure",
    "registerCustomArgParser",
    "registerGeometricCustomArgParsers",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "register_custom_op",
    "removeBlocks",
    "setLogLevel",
    "trainingModel",
    "uninstall",
]
__all__ += enums.__all__
__all__ += ops.__all__
__all__ += options.__all__
