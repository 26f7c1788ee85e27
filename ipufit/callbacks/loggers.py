# SPDX-License-Identifier: Apache-2.0
"""Callbacks that write metrics to files, and to services that track runs."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import asdict, fields
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Iterable, Iterator, Mapping

import numpy as np
import torch

from ipufit._arguments import check_flags, check_integer, refuse
from ipufit._files import as_path, file_errors, open_regular
from ipufit._kinds import Kind, count, list_of, optional, text
from ipufit._lazy import need
from ipufit.errors import ConfigError, IpufitWarning, warn
from ipufit.optimizers.values import OptimizerValues

from .base import Callback, check_frequency, numbers_in
from .monitoring import learning_rate

if TYPE_CHECKING:
    from ipufit.state import RunState


def hyperparameters(model: Any, run: RunState) -> dict[str, Any]:
    """Return the settings of a `fit`, as numbers and texts that trackers take.

    Args:
        model: The model that trains.
        run: State of the `fit`.

    Returns:
        The optimizer, its settings (those of a second parameter group as `lr/1`), the
        epochs, the factors of the batch size, the fields of the config that aren't at
        their defaults, and `config` and `plan` as texts. Empty outside of `fit`.
    """
    if run.plan is None:
        return {}
    config, optimizer = model.config, OptimizerValues(model.optimizer).plain()
    settings = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if getattr(config, field.name) != field.default
    }
    for number, group in enumerate(optimizer["groups"]):
        ending = f"/{number}" if number else ""
        settings.update({f"{name}{ending}": v for name, v in group.items()})
    settings.update(
        asdict(run.plan.batch),
        batch_size=run.plan.batch.batch_size,
        config=config,
        epochs=run.params["epochs"],
        loss_scaling=optimizer["loss_scaling"],
        optimizer=optimizer["class"],
        plan=run.plan,
    )
    return {
        name: value if isinstance(value, (bool, int, float)) else str(value)
        for name, value in settings.items()
    }


_TEXTS = ("config", "plan")
"""Hyperparameters that are texts of several lines."""


_LONGEST_PARAMETER = 250
"""Characters of a parameter that MLflow's servers before 1.28 take; later 500, 6000."""


class FigureLogger(Callback):
    """Base of callbacks that log the metrics of epochs, and of calls on request.

    Values that aren't single numbers, such as a confusion matrix or a text, are left
    out.
    Subclasses define `write(group, logs, step)`. The group is `"epoch"`, with the index
    of the epoch as the step, or `"batch"`, with the metrics of the epoch so far and the
    number of updates.

    Args:
        update_freq: `"epoch"` to log metrics of epochs only. With a number n, also log
            the metrics of the epoch so far, after each call that makes an n-th update.
            `"batch"` is the same as 1.
        histogram_freq: Number of epochs from one histogram of the weights to the next,
            from the first epoch on; 0 for none.

    Attributes:
        updates: Number of updates since `fit` began.

    Raises:
        ConfigError: If `update_freq` or `histogram_freq` has another value.
    """

    writes_for_all = True
    saved_attributes: ClassVar[Mapping[str, Kind]] = {"updates": count}
    hears_every: int | None = None

    def __init__(self, update_freq: int | str, histogram_freq: int = 0) -> None:
        check_frequency(self, "update_freq", update_freq, "epoch", "batch")
        check_integer("histogram_freq", histogram_freq, of=type(self).__name__)
        self.update_freq = update_freq
        self.histogram_freq = histogram_freq
        self.updates = 0
        every = 1 if update_freq == "batch" else update_freq
        self.hears_every = every if isinstance(every, int) else None
        self.reads_batch_logs = self.hears_every is not None

    write: Callable[[str, Mapping[str, Any], int], None]

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Set the count of updates to 0."""
        self.updates = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Count the call's updates, and log metrics every `update_freq` updates."""
        before, self.updates = self.updates, self.run.updates
        every = self.hears_every
        if every and self.updates // every > before // every:
            self.write("batch", numbers_in(logs), self.updates)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Log the metrics of the epoch."""
        self.write("epoch", numbers_in(logs), epoch)

    def histograms(self, epoch: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yield name and finite values of each weight and buffer of floats, if due.

        All weights are copied to the host. A tensor without finite values is left out.

        Args:
            epoch: Index of the epoch, from 0.

        Yields:
            Name in the state dict, and float32 values in one dimension.
        """
        if not self.histogram_freq or epoch % self.histogram_freq:
            return
        for name, tensor in self.model.copied_weights().items():
            if tensor.is_floating_point():
                values: np.ndarray[Any, Any] = tensor.float().reshape(-1).numpy()
                finite = values[np.isfinite(values)]
                if finite.size:
                    yield name, finite


class RunLogger(FigureLogger):
    """Base of loggers for services with runs: join the active run, or begin a run.

    A run that the logger begins ends with `fit`, as failed if `fit` raised. A resumed
    `fit` continues it. Subclasses define `service`, the name of its package;
    `active_run()`, which returns the service's active run or None; `begin_run()`, which
    begins a run, or continues the run of `run_id`; `write_settings(settings)`, which
    keeps the values that the run has; and `end_run(is_failed=)`.

    Args:
        arguments: Arguments for the service's function that begins a run.

    Attributes:
        run_id: Id of the run that the logger began; None if it began none.
    """

    service: ClassVar[str]
    hears_every = FigureLogger.hears_every  # though the class has a hook of calls
    saved_attributes: ClassVar[Mapping[str, Kind]] = {
        "updates": count,
        "run_id": optional(text),
    }

    def __init__(
        self,
        arguments: dict[str, Any],
        update_freq: int | str,
        histogram_freq: int = 0,
    ) -> None:
        super().__init__(update_freq, histogram_freq)
        self._package()
        self.arguments = arguments
        self.run_id: str | None = None
        self._active: Any = None
        self._has_begun = False

    def _package(self) -> Any:
        """Import the service's package; as an attribute, it couldn't be pickled."""
        return need(self.service, type(self).__name__, self.service)

    active_run: Callable[..., Any]
    begin_run: Callable[..., Any]
    end_run: Callable[..., None]
    write_settings: Callable[[Mapping[str, Any]], None]

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Forget the run that an earlier `fit` began."""
        super().on_train_begin(logs)
        self.run_id = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Join the active run, or begin a run.

        Not in `on_train_begin`, because a resumed `fit` restores `run_id` after it.
        """
        if self._active is None:
            self._active = self.active_run()
            self._has_begun = self._active is None
            if self._has_begun:
                self._active = self.begin_run()
            self.write_settings(hyperparameters(self.model, self.run))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Join or begin a run, if `fit` is resumed inside an epoch."""
        self.on_epoch_begin(self.run.epoch, logs)

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """End the run, if the logger began it."""
        self._leave(is_failed=False)

    def close(self) -> None:
        """End the run as failed, if an error prevented `on_train_end`."""
        self._leave(is_failed=True)

    def _leave(self, *, is_failed: bool) -> None:
        if self._has_begun:
            self.end_run(is_failed=is_failed)
        self._active, self._has_begun = None, False


class CSVLogger(Callback):
    """Write the metrics of every epoch into a CSV file.

    As in Keras, the columns are `epoch` (0-based) and the metrics of the first epoch by
    name. If that epoch wasn't validated, each metric has a `val_` column too. A metric
    that is missing later is `NA`; lists and arrays are quoted, `"[1.0, 2.0]"`.

    Each row is written at once and the file closed again, so a process that is killed
    leaves the rows of all its epochs. A resumed run continues its file, without the
    rows of epochs that are trained again.

    Args:
        filename: Path of the file; missing folders are made.
        separator: Character between the values of a row.
        append: If True, keep the rows and columns of an existing file. If False, they
            are deleted when the first row is written.

    Raises:
        ConfigError: If `separator` isn't one character. When `fit` begins, with
            `append`: if the file has no header of a `CSVLogger`.
        FileError: If the file can't be written, when `fit` begins or at a later epoch.

    Example:
        >>> logger = CSVLogger("log.csv", separator=";", append=True)
    """

    writes_for_all = True
    saved_attributes: ClassVar[Mapping[str, Kind]] = {
        "columns": optional(list_of(text)),
        "begin": count,
    }

    def __init__(
        self,
        filename: str | os.PathLike[str],
        separator: str = ",",
        append: bool = False,
    ) -> None:
        is_character = isinstance(separator, str) and len(separator) == 1
        if not is_character or not (separator.isprintable() or separator == "\t"):
            refuse("separator", separator, "one printable character, or a tab")
        self.filename = str(as_path(filename, "filename"))
        check_flags("CSVLogger", append=append)
        self.separator = separator
        self.append = append
        self.columns: list[str] | None = None
        self.begin = 0  # size in bytes of the rows of earlier runs
        self._is_open = self._is_resumed = False

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Check that the file can be written, and read its columns with `append`."""
        path = Path(self.filename)
        with file_errors("can't be written", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_regular(path, "ab") as file:
                size = file.tell()
        self._is_open = self._is_resumed = False
        self.columns, self.begin = None, 0
        if self.append and size:
            self.columns, self.begin = self._read_columns(), size

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the file of the interrupted run."""
        super().load_state_dict(state)
        self._is_resumed = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Write the row of the epoch."""
        with file_errors("can't be written", self.filename):
            self._write(epoch, logs)

    def _write(self, epoch: int, logs: dict[str, Any]) -> None:
        rows: list[list[Any]] = []
        if not self._is_open:
            is_empty = self._cut(epoch) == 0
            if self.columns is None:
                self.columns = _columns(logs) if is_empty else self._read_columns()
            if is_empty:
                rows.append(["epoch", *self.columns])
            self._is_open = True
        columns = self.columns or []
        others = [name for name in logs if name not in columns]
        if others:
            warn(
                f"CSVLogger leaves out {', '.join(others)}: there is no such column in "
                f"{self.filename!r}. Columns are those of its first epoch.",
                IpufitWarning,
            )
        rows.append([epoch, *(_cell(logs.get(name, "NA")) for name in columns)])
        text = io.StringIO(newline="")
        csv.writer(text, delimiter=self.separator).writerows(rows)
        with open_regular(self.filename, "ab") as file:
            file.write(text.getvalue().encode())

    def _read_columns(self) -> list[str]:
        """Read the columns of the existing file."""
        try:
            with open_regular(self.filename) as file:
                lines = io.TextIOWrapper(file, "utf-8", newline="")
                header = next(csv.reader(lines, delimiter=self.separator), [])
        except (UnicodeError, csv.Error):
            header = []
        if header[:1] != ["epoch"]:
            raise ConfigError(
                f"{self.filename!r} doesn't begin with the header of a CSVLogger with "
                f"separator={self.separator!r}, so nothing can be appended. Use "
                "another file, or append=False."
            )
        return header[1:]

    def _cut(self, epoch: int) -> int:
        """Cut the file to the whole rows that stay, and return its size in bytes."""
        path = Path(self.filename)
        is_kept = path.exists() and (self.begin or self._is_resumed)
        written = path.read_bytes() if is_kept else b""
        size = min(self.begin, len(written))
        # A resumed run keeps its header and the whole rows of earlier epochs.
        lines = written[size:].splitlines(keepends=True) if self._is_resumed else []
        for line in lines:
            first = line.decode(errors="replace").split(self.separator)[0].strip()
            is_over = first.isdecimal() and int(first) >= epoch
            if is_over or not line.endswith(b"\n"):
                break
            size += len(line)
        with open_regular(path, "ab") as file:
            file.truncate(size)
            if size and written[size - 1 : size] != b"\n":
                size += file.write(b"\r\n")
        return size


def _columns(logs: dict[str, Any]) -> list[str]:
    names = sorted(logs)
    if any(name.startswith("val_") for name in names):
        return names
    return names + [f"val_{name}" for name in names]


def _cell(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    is_scalar = getattr(value, "ndim", 1) == 0  # an array of one number
    if isinstance(value, str) or not isinstance(value, Iterable) or is_scalar:
        return value
    return f'"[{", ".join(map(str, value))}]"'


class TensorBoard(FigureLogger):
    """Write metrics for TensorBoard, in Keras's folders and under Keras's tags.

    In `train`: `epoch_<name>` and `epoch_learning_rate` (of the first parameter group)
    for every epoch, 0-based, and `batch_<name>` for updates, with `update_freq`. In
    `validation`: `epoch_<name>` without `val_`, and for every `evaluate` and validation
    `evaluation_<name>_vs_iterations`, at the number of updates since `compile`.
    With `histogram_freq` also, in `train`, a histogram of each weight and buffer of
    floats, under its name with `/` for `.`, so that TensorBoard groups them by module.
    When `fit` begins, `config` and `plan` as texts; when it ends, the hyperparameters,
    with the last epoch's metrics as `hparam/<name>`.

    Show them with `tensorboard --logdir logs`.

    Args:
        log_dir: Directory to write to.
        update_freq: `"epoch"` to log metrics of epochs only. With a number n, also log
            the metrics of the epoch so far, after each call that makes an n-th update.
            `"batch"` is the same as 1.
        histogram_freq: Number of epochs from one histogram of the weights to the next,
            from the first epoch on; 0 for none. Each brings all weights to the host,
            and leaves out values that aren't finite.

    Raises:
        ConfigError: If `update_freq` or `histogram_freq` has another value, or
            tensorboard isn't installed.

    Example:
        >>> from ipufit import ConfigError
        >>> try:
        ...     callback = TensorBoard("logs", update_freq=100)
        ... except ConfigError as error:
        ...     "pip install ipufit[tensorboard]" in str(error)
        ... else:
        ...     callback.update_freq == 100
        True
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        *,
        update_freq: int | str = "epoch",
        histogram_freq: int = 0,
    ) -> None:
        super().__init__(update_freq, histogram_freq)
        self.log_dir = str(as_path(log_dir, "log_dir"))
        module = need("torch.utils.tensorboard", "TensorBoard", "ipufit[tensorboard]")
        self._make_writer = module.SummaryWriter
        self._writers: dict[str, Any] = {}

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Write config and plan, and set the count of updates to 0."""
        super().on_train_begin(logs)
        for name, value in hyperparameters(self.model, self.run).items():
            if name in _TEXTS:
                self._writer("train").add_text(name, indent(value, "    "))  # as code

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Write the hyperparameters, beside the last metrics."""
        settings = hyperparameters(self.model, self.run)
        short = {name: v for name, v in settings.items() if name not in _TEXTS}
        metrics = {f"hparam/{name}": v for name, v in numbers_in(logs).items()}
        if short:
            self._writer("train").add_hparams(short, metrics, run_name=".")

    def write(self, group: str, logs: Mapping[str, Any], step: int) -> None:
        """Write metrics as `epoch_<name>` or `batch_<name>`; flush after an epoch."""
        training = {n: v for n, v in logs.items() if not n.startswith("val_")}
        if group == "epoch":
            training["learning_rate"] = learning_rate(self.model.optimizer)
        self._write("train", group + "_{}", training, step)
        validation = {n[4:]: v for n, v in logs.items() if n.startswith("val_")}
        self._write("validation", group + "_{}", validation, step)
        if group == "epoch":
            writer = self._writer("train")
            for name, values in self.histograms(step):
                writer.add_histogram(name.replace(".", "/"), values, step)
            self._flush()

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Write the metrics of an evaluation as `evaluation_<name>_vs_iterations`."""
        updates = self.model.num_updates
        tag = "evaluation_{}_vs_iterations"
        self._write("validation", tag, numbers_in(logs), updates)
        self._flush()

    def close(self) -> None:
        """Close the files, also after an error."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write(self, folder: str, tag: str, logs: dict[str, Any], step: int) -> None:
        if not logs:
            return
        writer = self._writer(folder)
        for name, value in logs.items():
            writer.add_scalar(tag.format(name), value, step)

    def _writer(self, folder: str) -> Any:
        if folder not in self._writers:
            path = os.path.join(self.log_dir, folder)
            with file_errors("can't be written", path):
                self._writers[folder] = self._make_writer(path)
        return self._writers[folder]

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()


class WandbLogger(RunLogger):
    """Log metrics to Weights & Biases.

    Metrics of epochs are `epoch/<name>`, with `epoch/epoch` (0-based). Metrics of calls
    are `batch/<name>`, with `batch/updates`. Histograms of weights are `weights/<name>`
    and come with the metrics of their epoch. They go to the active run, `wandb.run`.
    Without an active run, a run is begun with the first epoch and finished with `fit`,
    as failed if `fit` raised. A resumed `fit` continues its run. Hyperparameters go to
    the run's config, where values that are there stay as they are.

    Args:
        update_freq: `"epoch"` to log metrics of epochs only. With a number n, also log
            the metrics of the epoch so far, after each call that makes an n-th update.
            `"batch"` is the same as 1.
        histogram_freq: Number of epochs from one histogram of the weights to the next,
            from the first epoch on; 0 for none. Each brings all weights to the host,
            and leaves out values that aren't finite.
        **arguments: Arguments of `wandb.init`, such as `project`, `name` or `config`.

    Attributes:
        run_id: Id of the run that the logger began; None if it began none.

    Raises:
        ConfigError: If `update_freq` or `histogram_freq` has another value, or wandb
            isn't installed.

    Example:
        >>> from ipufit import ConfigError
        >>> try:
        ...     callback = WandbLogger(project="mnist")
        ... except ConfigError as error:
        ...     "pip install wandb" in str(error)
        ... else:
        ...     callback.run_id is None
        True
    """

    service = "wandb"

    def __init__(
        self,
        update_freq: int | str = "epoch",
        *,
        histogram_freq: int = 0,
        **arguments: Any,
    ) -> None:
        super().__init__(arguments, update_freq, histogram_freq)

    def active_run(self) -> Any:
        """Return `wandb.run`."""
        return self._package().run

    def begin_run(self) -> Any:
        """Begin a run, or continue the run of `run_id`."""
        known = {"id": self.run_id, "resume": "allow"} if self.run_id else {}
        run = self._package().init(**{**self.arguments, **known})
        self.run_id = run.id
        return run

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Add hyperparameters to the run's config."""
        self._active.config.setdefaults(settings)

    def end_run(self, *, is_failed: bool) -> None:
        """Finish the run with exit code 1 if `fit` failed, else 0."""
        self._active.finish(exit_code=int(is_failed))

    def write(self, group: str, logs: Mapping[str, Any], step: int) -> None:
        """Log metrics as `epoch/<name>` or `batch/<name>`."""
        step_name = "epoch" if group == "epoch" else "updates"
        figures = {f"{group}/{n}": v for n, v in {step_name: step, **logs}.items()}
        for name, values in self.histograms(step) if group == "epoch" else ():
            figures[f"weights/{name}"] = self._package().Histogram(values)
        self._active.log(figures)


class MLflowLogger(RunLogger):
    """Log metrics to MLflow.

    Metrics of epochs keep their names, with the epoch (0-based) as their step. Metrics
    of calls are `batch_<name>`, with the number of updates as their step. They go to
    the active run. Without an active run, a run is begun with the first epoch and ended
    with `fit`, as `FAILED` if `fit` raised. A resumed `fit` continues its run.
    Hyperparameters are parameters of the run, where those that are there stay. Of those
    with more than 250 characters, which older servers refuse, the parameter has the
    beginning, and the artifact `<name>.txt` the whole text.

    Args:
        update_freq: `"epoch"` to log metrics of epochs only. With a number n, also log
            the metrics of the epoch so far, after each call that makes an n-th update.
            `"batch"` is the same as 1.
        **arguments: Arguments of `mlflow.start_run`, such as `run_name` or `tags`.

    Attributes:
        run_id: Id of the run that the logger began; None if it began none.

    Raises:
        ConfigError: If `update_freq` has another value, or mlflow isn't installed.

    Example:
        >>> from ipufit import ConfigError
        >>> try:
        ...     callback = MLflowLogger(run_name="first")
        ... except ConfigError as error:
        ...     "pip install mlflow" in str(error)
        ... else:
        ...     callback.run_id is None
        True
    """

    service = "mlflow"

    def __init__(self, update_freq: int | str = "epoch", **arguments: Any) -> None:
        super().__init__(arguments, update_freq)

    def active_run(self) -> Any:
        """Return MLflow's active run, or None."""
        return self._package().active_run()

    def begin_run(self) -> Any:
        """Begin a run, or continue the run of `run_id`."""
        known = {"run_id": self.run_id} if self.run_id else {}
        run = self._package().start_run(**{**self.arguments, **known})
        self.run_id = run.info.run_id
        return run

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Log hyperparameters as parameters of the run, whose values can't change."""
        mlflow = self._package()
        known = mlflow.get_run(self._active.info.run_id).data.params
        parameters = {n: v for n, v in settings.items() if n not in known}
        for name, value in parameters.items():
            if len(str(value)) <= _LONGEST_PARAMETER:
                continue
            parameters[name] = f"{value[: _LONGEST_PARAMETER - 3]}..."
            try:
                mlflow.log_text(value, f"{name}.txt")
            except Exception as error:  # noqa: BLE001 - no store of artifacts
                warn(f"MLflow can't keep {name}.txt: {error!r}", IpufitWarning)
        mlflow.log_params(parameters)

    def end_run(self, *, is_failed: bool) -> None:
        """End the run as `FINISHED` or `FAILED`."""
        self._package().end_run(status="FAILED" if is_failed else "FINISHED")

    def write(self, group: str, logs: Mapping[str, Any], step: int) -> None:
        """Log metrics of epochs under their names, of calls as `batch_<name>`."""
        prefix = "" if group == "epoch" else "batch_"
        figures = {prefix + name: value for name, value in logs.items()}
        self._package().log_metrics(figures, step=step)
