# SPDX-License-Identifier: Apache-2.0
"""`History`: the metrics of each epoch."""

from __future__ import annotations

from html import escape
from typing import Any, ClassVar, Mapping, NoReturn, Sequence

from ipufit._arguments import number_in
from ipufit._kinds import Kind, anything, count, dict_of, list_of, text
from ipufit._plots import Axes, Figure, axes_for, draw_confusion
from ipufit.errors import ConfigError, UnknownNameError, UnsupportedError

from .base import Callback, numbers_in


class History(Callback):
    """Metrics of every epoch, which `fit` returns.

    Attributes:
        epoch: Indices of the epochs of the last `fit`.
        history: Values by name of the metric, one per epoch that had it.
        epochs_of: Indices of the epochs of these values, by name of the metric.
        dropped_samples: Number of samples that every epoch leaves out, since they don't
            fill a call.
        coverage: The samples that the metrics cover, in words; empty if all.

    Example:
        >>> history = History()
        >>> history.on_epoch_end(0, {"loss": 0.5})
        >>> history.history
        {'loss': [0.5]}
    """

    saved_attributes: ClassVar[Mapping[str, Kind]] = {
        "epoch": list_of(count),
        "history": dict_of(list_of(anything)),
        "epochs_of": dict_of(list_of(count)),
        "dropped_samples": count,
        "coverage": text,
    }

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}
        self.epochs_of: dict[str, list[int]] = {}
        self.dropped_samples = 0
        self.coverage = ""

    def set_model(self, model: Any) -> None:
        """Ignore the model: a reference to it would be a cycle that keeps its IPUs."""

    def __repr__(self) -> str:
        """Describe the number of epochs and the last metrics."""
        values = {name: of[-1] for name, of in sorted(self.history.items()) if of}
        last = [f"{name} {v:.4g}" for name, v in numbers_in(values).items()]
        plural = "" if len(self.epoch) == 1 else "s"
        return f"<History: {', '.join([f'{len(self.epoch)} epoch{plural}', *last])}>"

    def _repr_html_(self) -> str:
        """Return an HTML table of the epochs, which a notebook saves."""
        names = sorted(name for name in self.history if not self._has_matrices(name))
        values = {n: dict(zip(self.epochs_of[n], self.history[n])) for n in names}
        rows = ["".join(f"<th>{escape(name)}</th>" for name in ("epoch", *names))]
        for epoch in self.epoch:
            figures = (values[name].get(epoch) for name in names)
            cells = map(_cell, figures)
            rows.append("".join(f"<td>{cell}</td>" for cell in (epoch + 1, *cells)))
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"

    def __getitem__(self, name: str) -> NoReturn:
        raise UnsupportedError(
            f"History isn't a dict: its metrics are in history.history[{name!r}]."
        )

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Remove the epochs of an earlier run."""
        self.epoch = []
        self.dropped_samples = self.params.get("dropped_samples", 0)
        self.coverage = self.run.coverage

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Append the metrics of the epoch."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
            self.epochs_of.setdefault(name, []).append(epoch)

    def plot(
        self,
        names: str | Sequence[str] | None = None,
        *,
        axes: Axes | Sequence[Axes] | None = None,
    ) -> Figure:
        """Draw the metrics over epochs, with matplotlib.

        Each metric has axes of its own, with a curve of the training and one of each
        validation set. Epochs count from 1, as the display of `fit` does. Of a
        confusion matrix the last epoch's is drawn. No screen is needed:
        `history.plot().savefig("curves.png")` writes a file.

        Args:
            names: Names of the metrics to draw, in this order. "loss" draws `loss` and
                `val_loss`, "val_loss" the latter alone. None draws all, except details
                such as `grad_norm/layer.weight`, which `GradientMonitor.plot` draws.
            axes: matplotlib's axes to draw in, one for each name; by default new ones
                in a new figure of pyplot.

        Returns:
            The matplotlib figure that has the axes.

        Raises:
            ConfigError: matplotlib isn't installed, there is no epoch yet, or there are
                more or fewer axes than names.
            UnknownNameError: The history has no such metric.

        Example:
            >>> history = History()
            >>> history.on_epoch_end(0, {"loss": 0.5, "val_loss": 0.75})
            >>> try:
            ...     figure = history.plot()
            ... except ConfigError as error:
            ...     "pip install ipufit[plot]" in str(error)
            ... else:
            ...     [axes.get_ylabel() for axes in figure.axes] == ["loss"]
            True
        """
        shown = self._names_to_draw(names)
        all_axes = axes_for(len(shown), axes, "History.plot()")
        if len(all_axes) != len(shown):
            raise ConfigError(
                f"History.plot() draws {len(shown)} metrics, and got {len(all_axes)} "
                "axes. Pass axes for each, or choose with names=[...]."
            )
        for name, part in zip(shown, all_axes):
            drawn = name if name in self.history else f"val_{name}"
            if self._has_matrices(drawn):
                draw_confusion(part, self.history[drawn][-1])
                part.set_title(f"{drawn}, epoch {self.epochs_of[drawn][-1] + 1}")
                continue
            for key, values in self.history.items():
                trained, label = self._axes_and_label(key)
                if name in (key, trained) or key == f"val_{name}":
                    epochs = [epoch + 1 for epoch in self.epochs_of[key]]
                    marker = "." if len(epochs) < 50 else None  # for few points
                    part.plot(epochs, values, label=label, marker=marker)
            part.set_xlabel("epoch")
            part.set_ylabel(name)
            part.xaxis.get_major_locator().set_params(integer=True)
            # matplotlib warns of a default place that takes it more than a second.
            part.legend(loc="best")
        return all_axes[0].figure

    def _names_to_draw(self, names: str | Sequence[str] | None) -> list[str]:
        """Return the names to draw: the argument, or all numbers without `val_`."""
        if not self.history:
            raise ConfigError(
                "There is nothing to draw: this history has no epoch. Call plot() "
                "after fit()."
            )
        if names is None:
            return [
                name
                for name, values in self.history.items()
                if number_in(values[-1]) is not None or isinstance(values[-1], list)
                if self._axes_and_label(name)[0] == name
                and name.partition("/")[0] not in self.history.keys() - {name}
            ]
        asked = [names] if isinstance(names, str) else list(names)
        for name in asked:
            if name.endswith((".svg", ".png", ".pdf")):
                raise ConfigError(
                    f"plot({name!r}) would draw a metric of this name. To write a "
                    f"picture: history.plot().savefig({name!r})."
                )
            if name not in self.history and f"val_{name}" not in self.history:
                raise UnknownNameError("metric", name, self.history)
        return asked

    def _axes_and_label(self, key: str) -> tuple[str, str]:
        """Return the training metric whose axes show a metric, and the curve's label.

        `val_loss` is drawn with `loss`, as "validation". If validation sets have names,
        `val_hard_loss` is drawn with `loss`, as "validation hard". A metric without a
        training metric has axes of its own, and so has a matrix.
        """
        if self._has_matrices(key):
            return key, ""
        if not key.startswith("val_"):
            return key, "training"
        rest = key[4:]
        if rest in self.history:
            return rest, "validation"
        trained = [
            name
            for name in self.history
            if rest.endswith(f"_{name}") and f"val_{name}" not in self.history
        ]
        if not trained:
            return key, "validation"
        longest = max(trained, key=len)
        return longest, f"validation {rest[: -len(longest) - 1]}"

    def _has_matrices(self, name: str) -> bool:
        last = self.history[name][-1]
        return isinstance(last, list) and all(isinstance(row, list) for row in last)


def _cell(value: Any) -> str:
    """Format a value for a table; None is empty."""
    number = number_in(value)
    if number is not None:
        return f"{number:.4g}" if isinstance(number, float) else f"{number}"
    return "" if value is None else escape(str(value))
