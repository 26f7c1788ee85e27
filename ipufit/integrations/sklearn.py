# SPDX-License-Identifier: Apache-2.0
"""Estimators of scikit-learn that train on IPUs: `Classifier` and `Regressor`.

They need scikit-learn, which nothing else of ipufit does: `pip install scikit-learn`.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Callable, Mapping, TypeVar, Union

import numpy as np
import torch

from ipufit.config import IPUConfig
from ipufit.errors import ConfigError
from ipufit.model import IPUModel

try:
    from sklearn import base, utils  # type: ignore[import-untyped,unused-ignore]
    from sklearn.utils import (  # type: ignore[import-untyped,unused-ignore]
        multiclass,
        validation,
    )
except ImportError as error:
    raise ConfigError(
        "ipufit.integrations.sklearn needs a package that isn't installed: "
        f"pip install scikit-learn ({error})"
    ) from error

__all__ = ["Classifier", "Regressor"]

ModuleLike = Union[torch.nn.Module, Callable[..., torch.nn.Module]]
EstimatorT = TypeVar("EstimatorT", bound="_Estimator")


class _Estimator(base.BaseEstimator):  # type: ignore[misc,unused-ignore]
    """The part of an estimator that classifiers and regressors have in common."""

    def __init__(
        self,
        module: ModuleLike,
        config: IPUConfig | None = None,
        *,
        optimizer: Any = "adam",
        loss: Any = None,
        batch_size: int = 32,
        epochs: int = 10,
        module_arguments: Mapping[str, Any] | None = None,
        fit_arguments: Mapping[str, Any] | None = None,
        random_state: Any = None,
    ) -> None:
        self.module = module
        self.config = config
        self.optimizer = optimizer
        self.loss = loss
        self.batch_size = batch_size
        self.epochs = epochs
        self.module_arguments = module_arguments
        self.fit_arguments = fit_arguments
        self.random_state = random_state

    def _train(
        self, x: Any, y: torch.Tensor, num_outputs: int, sample_weight: Any, loss: str
    ) -> None:
        """Make the module, and train it from the beginning."""
        given = {**dict(self.fit_arguments or {})}
        seed = int(utils.check_random_state(self.random_state).randint(2**31 - 1))
        config = self.config or IPUConfig()
        if config.seed is None:
            config = dataclasses.replace(config, seed=seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model_ = IPUModel(self._made(x.shape[1], num_outputs), config)
            self.model_.compile(self.optimizer, self.loss or loss)
            if sample_weight is not None:
                given["sample_weight"] = _weights_of(sample_weight)
            settings = {"drop_last": "pad", "verbose": 0, **given}
            self.history_ = self.model_.fit(
                torch.from_numpy(x),
                self._like_outputs(x, y),
                batch_size=self.batch_size,
                epochs=self.epochs,
                **settings,
            ).history

    def _made(self, num_features: int, num_outputs: int) -> torch.nn.Module:
        more = dict(self.module_arguments or {})
        if isinstance(self.module, torch.nn.Module):
            if more:
                raise ConfigError(
                    f"module_arguments={more} were given, and module is a module. "
                    "Pass a function that makes one, or a class."
                )
            return copy.deepcopy(self.module)
        made: Any = self.module(num_features, num_outputs, **more)
        if not isinstance(made, torch.nn.Module):
            raise ConfigError(
                f"module={self.module!r} made {made!r}, which is no torch.nn.Module."
            )
        return made

    def _like_outputs(self, x: Any, y: torch.Tensor) -> torch.Tensor:
        """The targets in the shape that the loss takes; as they are by default."""
        return y

    def _outputs(self, x: Any) -> Any:
        """The module's outputs for inputs, which are checked.

        Raises:
            NotFittedError: `fit` wasn't called.
        """
        validation.check_is_fitted(self, "model_")
        x = _checked(self, x, reset=False)
        outputs = self.model_.predict(torch.from_numpy(x), verbose=0)
        if not isinstance(outputs, torch.Tensor):
            raise ConfigError(
                f"The module returns a {type(outputs).__name__}, and an estimator "
                "takes one tensor."
            )
        return outputs.float()


class Classifier(base.ClassifierMixin, _Estimator):  # type: ignore[misc,unused-ignore]
    """A classifier of scikit-learn: `fit`, `predict`, `predict_proba`, `score`.

    It goes wherever scikit-learn takes a classifier: `cross_val_score`, `Pipeline`,
    `GridSearchCV`, `clone`, `pickle`. Each `fit` makes a new module and trains it from
    the beginning.

    Args:
        module: A function or class that makes the module, called with the numbers of
            features and of outputs: one logit for each class. Or a module, which is
            copied for each `fit`. To pickle the estimator, define it at the top of
            a file.
        config: Layout on IPUs; one IPU by default.
        optimizer: As for `IPUModel.compile`.
        loss: As for `IPUModel.compile`; the cross entropy by default.
        batch_size: Samples of one weight update. What is left at the end of the data is
            padded.
        epochs: Number of passes over the data.
        module_arguments: Further arguments of `module` by name, such as
            `{"hidden": 64}`; `GridSearchCV` takes a list of such.
        fit_arguments: Further arguments of `IPUModel.fit` by name, such as
            `{"callbacks": [...]}`.
        random_state: Seed of weights, shuffling and dropout, as scikit-learn has it.

    Attributes:
        classes_: Classes that `fit` has seen, in order.
        model_: The trained `IPUModel`.
        history_: Figures of each epoch.

    Example:
        >>> import numpy as np
        >>> from ipufit import Optimizer
        >>> x = np.random.RandomState(0).rand(64, 2)
        >>> y = np.where(x.sum(axis=1) > 1, "large", "small")
        >>> adam = Optimizer("adam", 0.1)
        >>> classifier = Classifier(torch.nn.Linear, optimizer=adam, random_state=0)
        >>> classifier.fit(x, y).predict(x[:2])
        array(['large', 'large'], dtype='<U5')
        >>> classifier.predict_proba(x).shape
        (64, 2)
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Classifier:  # noqa: N803
        """Train a new module.

        Args:
            X: Samples, shape (samples, features, ...), which become float32.
            y: Class of each sample, numbers or text.
            sample_weight: Weight of each sample in the loss.

        Raises:
            ValueError: Data that can't be used, or of one class only.
        """
        x, y = _checked(self, X, y, reset=True)
        multiclass.check_classification_targets(y)
        found: Any = np.unique(y, return_inverse=True)  # type: ignore[no-untyped-call,unused-ignore]
        self.classes_, indices = found
        if len(self.classes_) < 2:
            raise ValueError(
                f"There is one class, {self.classes_[0]!r}: a classifier needs more "
                "than one class."
            )
        targets = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        self._train(x, targets, len(self.classes_), sample_weight, "cross_entropy")
        return self

    def predict_proba(self, X: Any) -> Any:  # noqa: N803
        """Probability of each class: the softmax of the outputs.

        Args:
            X: Samples as for `fit`.

        Returns:
            Array of shape (samples, classes).
        """
        return torch.softmax(self._outputs(X).double(), dim=1).numpy()

    def predict(self, X: Any) -> Any:  # noqa: N803
        """The class of each sample.

        Args:
            X: Samples as for `fit`.
        """
        best = self._outputs(X).argmax(dim=1).numpy()
        return self.classes_[best]


class Regressor(base.RegressorMixin, _Estimator):  # type: ignore[misc,unused-ignore]
    """A regressor of scikit-learn: `fit`, `predict`, `score`.

    It has the arguments of `Classifier`. Its loss is the mean squared error by default,
    and `module` is called with the numbers of features and of targets.

    Example:
        >>> import numpy as np
        >>> from ipufit import Optimizer
        >>> x = np.random.RandomState(0).rand(64, 2)
        >>> sgd = Optimizer("sgd", 0.5)
        >>> regressor = Regressor(torch.nn.Linear, optimizer=sgd, epochs=40)
        >>> round(regressor.fit(x, x.sum(axis=1)).score(x, x.sum(axis=1)), 2)
        1.0
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Regressor:  # noqa: N803
        """Train a new module.

        Args:
            X: Samples, shape (samples, features, ...), which become float32.
            y: Targets, shape (samples,) or (samples, targets).
            sample_weight: Weight of each sample in the loss.

        Raises:
            ValueError: Data that can't be used.
        """
        x, y = _checked(self, X, y, reset=True, multi_output=True, y_numeric=True)
        self._has_columns = y.ndim > 1
        targets = torch.from_numpy(np.asarray(y, dtype=np.float32))
        num_targets = y.shape[1] if y.ndim > 1 else 1
        self._train(x, targets, num_targets, sample_weight, "mse")
        return self

    def predict(self, X: Any) -> Any:  # noqa: N803
        """The values for each sample, in the shape of the targets.

        Args:
            X: Samples as for `fit`.
        """
        outputs = self._outputs(X).double().numpy()
        return outputs if self._has_columns else outputs.reshape(len(outputs))

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that there may be several targets."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _more_tags(self) -> dict[str, Any]:
        """Tell it to scikit-learn before 1.6."""
        return {"multioutput": True}

    def _like_outputs(self, x: Any, y: torch.Tensor) -> torch.Tensor:
        """One column, unless the module gives a number for each sample."""
        if y.dim() > 1:
            return y
        module = copy.deepcopy(self.model_.module).float().eval()
        with torch.no_grad():
            outputs: Any = module(torch.from_numpy(x[:1]))
        return y if outputs.dim() == 1 else y.unsqueeze(1)


def _weights_of(sample_weight: Any) -> torch.Tensor:
    """The weights of samples, of which some count.

    Raises:
        ValueError: All are 0.
    """
    weights = torch.as_tensor(np.asarray(sample_weight), dtype=torch.float32)
    if not weights.any():
        raise ValueError("All sample weights are zero: sample_weight leaves no sample.")
    return weights


def _checked(estimator: Any, *arrays: Any, reset: bool, **more: Any) -> Any:
    """Arrays as scikit-learn checks them, in float32; it notes the features.

    Raises:
        ValueError: They can't be used, or have other features than those of `fit`.
    """
    settings = {"dtype": np.float32, "allow_nd": True, "reset": reset, **more}
    if not hasattr(validation, "validate_data"):  # before scikit-learn 1.6
        return estimator._validate_data(*arrays, **settings)
    return validation.validate_data(estimator, *arrays, **settings)
