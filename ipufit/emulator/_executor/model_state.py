# SPDX-License-Identifier: Apache-2.0
"""The state that all parts of an executor share."""

from __future__ import annotations

import datetime

import torch

from ipufit.emulator._device.attachment import Attachment, CallResults
from ipufit.emulator._executor.constraints import check_inference_options
from ipufit.emulator._executor.executable import Executable
from ipufit.emulator._layout.replica_groups import GroupedParameters
from ipufit.emulator._options.options import Options
from ipufit.emulator._program.anchors import resolve_modes
from ipufit.emulator._program.args import ArgsParser
from ipufit.emulator.enums import OutputMode
from ipufit.emulator.errors import createPoptorchError

NOT_COMPILED = "Model has not been compiled or has been destroyed."


class ModelState:
    """The module and options of an executor, and how far they have come.

    Args:
        model: The module that is traced.
        user_model: The user's module, which has the same weights.
        options: Frozen, and cloned for this executor.
        is_training: Whether calls update the weights.

    Attributes:
        parser: Orders the arguments of calls by the signature of `forward`.
        grouped_parameters: Parameters that the next compilation gives to groups of
            replicas.
        executable: The compiled program, or None.
        attachment: The IPUs that hold it, or None.
        compilation_time: Time that the last compilation took, attaching included.
        last_call: Results of the last call since the last compilation, or None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        user_model: torch.nn.Module,
        options: Options | None,
        *,
        is_training: bool,
    ) -> None:
        self.model = model
        self.user_model = user_model
        self.options = _own_options(options, is_training=is_training)
        self.is_training = is_training
        self.parser = ArgsParser(model.forward)
        self.grouped_parameters = GroupedParameters()
        self.executable: Executable | None = None
        self.attachment: Attachment | None = None
        self.compilation_time = datetime.timedelta()
        self.last_call: CallResults | None = None

    def isCompiled(self) -> bool:
        """Whether there is an executable.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inferenceModel(torch.nn.Linear(2, 1)).isCompiled()
            False
        """
        return self.executable is not None

    def isAttachedToDevice(self) -> bool:
        """Whether the executor holds IPUs.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.compile(torch.ones(1, 2))
            >>> inference.isAttachedToDevice()
            True
        """
        return self.attachment is not None

    def require_compiled(self) -> Executable:
        """Give the executable.

        Raises:
            Error: Not compiled.
        """
        if self.executable is None:
            raise createPoptorchError(NOT_COMPILED)
        return self.executable


def _own_options(options: Options | None, *, is_training: bool) -> Options:
    """Freeze the caller's options, and clone them with the output mode filled in.

    Raises:
        Error: `options` is something else, or makes inference accumulate gradients.
    """
    if options and not isinstance(options, Options):
        raise createPoptorchError(
            f"Invalid type: 'options' is of type {type(options)}, expected "
            "poptorch.Options."
        )
    options = options or Options()
    options._freeze()
    own = options.clone()
    if own.defaultOutputMode():
        own.outputMode(OutputMode.Final if is_training else OutputMode.All)
    resolve_modes(own)
    if not is_training:
        check_inference_options(own)
    own._freeze()
    return own
