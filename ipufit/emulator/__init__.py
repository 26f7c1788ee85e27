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

from ipufit.emulator._ground.custom_args import (
    ICustomArgParser,
    flattenTensorStructure,
    reconstructTensorStructure,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)
from ipufit.emulator._ground.logging import logger, setLogLevel
from ipufit.emulator._ground.logging import start_logging as _start_logging
from ipufit.emulator._ground.switches import __version__
from ipufit.emulator._install import install, uninstall
from ipufit.emulator._layout.pod import (
    ipuHardwareIsAvailable,
    ipuHardwareVersion,
    isRunningOnIpu,
)
from ipufit.emulator._ops.custom_ops import accessAttributes, register_custom_op
from ipufit.emulator._ops.markers import (
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    module_repr,
    print,
    removeBlocks,
)
from ipufit.emulator._processes import guard_forks as _guard_forks
from ipufit.emulator._torch_ops import provide_operators as _provide_operators
from ipufit.emulator._tracing.recording import (
    getIpuTensorId,
    registerPostCompileHook,
    registerPreCompileHook,
)

from . import _impl as _impl
from . import enums, ops, optim, options, poptorch_core, profiling
from .enums import *
from .errors import (
    Error,
    RecoverableError,
    UnrecoverableError,
    createPoptorchError,
)
from .ops import *
from .options import *
from .poptorch_core import poptorchAtExit

if _typing.TYPE_CHECKING:
    from ipufit.emulator._executor.executor import (
        PoplarExecutor,
        importPoptorchMetadataFromFile,
        inferenceModel,
        load,
        trainingModel,
    )
    from ipufit.emulator._loading import AsynchronousDataAccessor, DataLoader
else:
    _HOME_OF = {
        "AsynchronousDataAccessor": "_loading",
        "DataLoader": "_loading",
        "PoplarExecutor": "_executor.executor",
        "importPoptorchMetadataFromFile": "_executor.executor",
        "inferenceModel": "_executor.executor",
        "load": "_executor.executor",
        "trainingModel": "_executor.executor",
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
