# SPDX-License-Identifier: Apache-2.0
"""What `trainingModel` and `inferenceModel` return: a module on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ipufit.emulator._executor.measurements import Measurements
from ipufit.emulator._executor.parameter_view import ParameterView
from ipufit.emulator._executor.printing import module_repr
from ipufit.emulator._executor.saving import Saving
from ipufit.emulator._executor.state import NOT_COMPILED
from ipufit.emulator._program.args import CallArguments
from ipufit.emulator.enums import ConnectionType
from ipufit.emulator.errors import createPoptorchError


class PoplarExecutor(Saving, Measurements):
    """A module that runs on the device; made by `trainingModel` or `inferenceModel`.

    Attributes that it doesn't have itself are those of the user's module.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> executor = inferenceModel(torch.nn.Linear(2, 3).eval())
        >>> executor(torch.ones(1, 2)).shape, executor.training
        (torch.Size([1, 3]), False)

    Args:
        model: The object that is traced.
        options: Frozen and cloned.
        training: Whether calls update the weights.
        poptorch_version: Kept for PopTorch's signature; unused.
        optimizer: Of a training model.
        user_model: The module whose weights are kept in step, if it is not `model`.
    """

    def __getattr__(self, name: str) -> Any:
        """Attributes of the user's module."""
        if name in ("_user_model", "_model"):  # not set yet: a failed construction
            raise AttributeError(name)
        value = getattr(self._user_model, name)
        if isinstance(value, torch.nn.Parameter):
            return ParameterView(value, self)
        return value

    def __repr__(self) -> str:
        """As the module, with the places where blocks begin."""
        return module_repr(self._user_model)

    # Run ----------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call: `deviceIterations` times all accumulated micro-batches.

        Args:
            *args: As `forward` takes them, with `D * G * R` micro-batches in dim 0
                of every tensor, laid out `[D, G, R, B]`.
            **kwargs: The same by name.

        Returns:
            What `forward` returned when it was traced, its tensors replaced by
            the results that the output mode selects. They can't be pickled themselves,
            because they refuse `backward()`; their clones can.

        Raises:
            AssertionError: The connection type is `Never`, or a batch dimension is
                not a multiple of `D * G * R`.
            Error: The arguments differ from those compiled for; or any reason for
                which compilation fails.

        Example:
            >>> from ipufit.emulator import Options, inferenceModel
            >>> options = Options().deviceIterations(2).replicationFactor(2)
            >>> inference = inferenceModel(torch.nn.Linear(2, 1), options)
            >>> inference(torch.ones(4, 2)).shape
            torch.Size([4, 1])
            >>> inference(torch.ones(6, 2)).shape
            Traceback (most recent call last):
                ...
            ipufit.emulator.errors.Error: 'poptorch_py_error': Shape mismatch for ...
        """
        if self._options.connection_type == ConnectionType.Never:
            raise AssertionError(
                "Trying to run a model on an offline device (ConnectionType.Never): "
                "use model.compile(inputs) instead of model(inputs)"
            )
        arguments: CallArguments | None = None
        tensors: list[Tensor] | None = None
        compiled = self._compiled_arguments
        if compiled is not None and not kwargs:
            tensors = self._parser.plain_tensors(args, compiled)
        if tensors is None:
            arguments = self._parser.parse(args, kwargs, is_compiling=compiled is None)
            if compiled is None:
                self._compile(arguments)
        if not self.isAttachedToDevice():
            self.attachToDevice()
        if not self._training:
            self._fetch_from_trainer()
        if tensors is None:
            tensors = self._checked_tensors(arguments)
        self._write_optimizer_state()
        program = self._require_compiled()
        outputs = program.device_outputs(self._run(tensors))
        _refuse_backward(outputs)
        return program.rebuild_outputs(outputs)

    def _checked_tensors(self, arguments: CallArguments | None) -> list[Tensor]:
        """The tensors of a call, if it is like the one that was compiled."""
        compiled = self._compiled_arguments
        if compiled is None or arguments is None:
            raise createPoptorchError(NOT_COMPILED)
        self._parser.validate(compiled, arguments)
        return arguments.tensors(like=compiled)

    def _run(self, tensors: list[Tensor]) -> list[Tensor]:
        attachment = self._attachment
        if attachment is None:
            raise createPoptorchError(NOT_COMPILED)
        # Before the run: one that fails midway has made updates too.
        self._is_rng_state_stale = True
        if self._training:
            self._dirty_host_weights = True
            self._optimizer_was_stepped()
        results = attachment.run(tensors)
        self._anchored, self._times = results.anchored, results.times
        return results.outputs


def _refuse_backward(outputs: list[Tensor]) -> None:
    """Give each output a `backward` of its own.

    Being defined in here it can't be pickled, and then neither can the outputs, as in
    PopTorch: what is computed from them can, `output.clone()` for one.
    """

    def refuse() -> None:
        raise createPoptorchError(
            "backward() cannot be called explicitly on outputs of a PopTorch model. If "
            "you're using a trainingModel, the backwards pass is performed "
            "automatically when invoking the model. If you're using an "
            "inferenceModel, you should use a trainingModel instead."
        )

    for tensor in outputs:
        tensor.backward = refuse  # type: ignore[method-assign, assignment]
