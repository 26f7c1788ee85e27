# SPDX-License-Identifier: Apache-2.0
"""Where the emulator's names and signatures are not PopTorch's, and why."""

MISSING = {
    # PopTorch's own business, although the names have no underscore.
    **{
        f"{kind}Execution.{method}": "its executor calls it around a trace"
        for kind in ("ParallelPhased", "Pipelined", "SerialPhased", "Sharded")
        for method in ("onStartTracing", "onEndTracing")
    },
    # Leaked imports.
    "profiling.logger": "it is `poptorch.logger`",
}
"""Names that the emulator hasn't got, and why."""

DIFFERENT = {
    "Options.TensorLocations.__init__": ("(self)", "only `Options` constructs it"),
    "PoplarExecutor.__init__": (
        "(self, model, options, training, poptorch_version=None, optimizer=None, "
        "user_model=None)",
        "only the wrappers construct it, and no version matters",
    ),
    "optim.Optimizer.__init__": (
        "(self, params, defaults)",
        "only subclasses construct it, and it is torch's too",
    ),
    "print": (
        "(m, *, **)",
        "`from poptorch import *` hides the built-in one, which takes more",
    ),
}
"""Signatures that differ: the emulator's, and why."""

FUNCTION_DEFAULTS = {
    "reconstructTensorStructure": "filter_fn",
}
"""Functions with a parameter whose default is a function, which has no useful text."""

ADDED = {"install", "register_custom_op", "uninstall"}
"""Public names that PopTorch hasn't got."""
