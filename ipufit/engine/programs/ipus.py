# SPDX-License-Identifier: Apache-2.0
"""IPUs that the programs of one model hold, and take in turns if they are short."""

from __future__ import annotations

import gc
from typing import Any, Callable, Iterable

from ipufit import _env
from ipufit._poptorch import poptorch
from ipufit.engine.weights.fingerprint import fingerprint

from .host_weights import HostWeights
from .programs import Program, TrainingProgram


class IPUs:
    """Attaches the programs of a model to IPUs, and detaches them.

    Args:
        programs: Gives the programs that there are.
        on_host: The host's weights, which programs bring back when they leave.
    """

    def __init__(
        self, programs: Callable[[], Iterable[Program]], on_host: HostWeights
    ) -> None:
        self._programs = programs
        self._on_host = on_host
        self._takes_turns = _env.waits_for_ipus()

    def attached(self) -> list[Program]:
        """The programs that hold IPUs."""
        return [one for one in self._programs() if one.executor.isAttachedToDevice()]

    def cloned(self, options: poptorch.Options) -> poptorch.Options:
        """Clone options for a program; a clone isn't frozen.

        If IPUs may be short, the program compiles before it takes some, so that it
        isn't traced twice.
        """
        own = options.clone()
        is_default = own.connection_type == poptorch.ConnectionType.Always
        if is_default and not self._takes_turns and self.attached():
            own.connectionType(poptorch.ConnectionType.OnDemand)
        return own

    def attach(self, program: Program) -> None:
        """Attach a program if it isn't, which uploads the host's weights.

        One that was compiled for IPUs which aren't there stays as it is.
        """
        executor = program.executor
        if executor.isAttachedToDevice():
            return
        if executor.options.connection_type == poptorch.ConnectionType.Never:
            return
        self.acquire(executor, executor.attachToDevice)
        program.on_device = fingerprint(program.weights)
        if isinstance(program, TrainingProgram):
            program.sent = ()  # the optimiser's state brings the values of its time

    def acquire(
        self, executor: poptorch.PoplarExecutor, action: Callable[[], Any]
    ) -> None:
        """Do what needs IPUs; other programs give way if they are short.

        Args:
            executor: The one that needs them.
            action: Takes them, and raises an error of PopTorch if they are short.
        """
        others = [one for one in self.attached() if one.executor is not executor]
        if not self._takes_turns:
            try:
                action()
            except poptorch.Error as error:
                if "acquire" not in str(error):
                    raise
                gc.collect()  # executors of models that are gone hold IPUs until then
                self._takes_turns = bool(others)
            else:
                return
        for other in others:
            self.detach(other)
        action()

    def detach(self, program: Program) -> None:
        """Detach a program; what it has learnt comes back before."""
        if isinstance(program, TrainingProgram):
            self._on_host.bring_for_good(program)
        program.executor.detachFromDevice()
