# SPDX-License-Identifier: Apache-2.0
"""Estimators of scikit-learn, beside its own tools and its own checks."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from ipufit import ConfigError, IPUConfig, Optimizer
from ipufit.integrations.sklearn import Classifier, Regressor

X, Y = load_iris(return_X_y=True)
X = (X - X.mean(0)) / X.std(0)
ADAM = Optimizer("adam", 0.05)


class Network(torch.nn.Sequential):
    def __init__(self, num_features, num_outputs, hidden=8):
        super().__init__(
            torch.nn.Linear(num_features, hidden),
            torch.nn.Tanh(),
            torch.nn.Linear(hidden, num_outputs),
        )


def classifier(**settings):
    return Classifier(
        **{"module": Network, "optimizer": ADAM, "random_state": 0, **settings}
    )


def test_it_learns_as_scikit_learns_own():
    names = np.array(["a", "b", "c"])[Y]
    found = classifier().fit(X, names)
    assert found.classes_.tolist() == ["a", "b", "c"]
    assert found.score(X, names) > 0.95
    expected = LogisticRegression().fit(X, names)
    assert (found.predict(X) == expected.predict(X)).mean() > 0.95
    chances = found.predict_proba(X)
    assert chances.shape == (150, 3)
    np.testing.assert_allclose(chances.sum(1), 1)
    assert (names[:0].dtype, found.predict(X).dtype) == (names.dtype, names.dtype)
    assert (found.classes_[chances.argmax(1)] == found.predict(X)).all()
    assert len(found.history_["loss"]) == 10


def test_a_state_repeats_the_run():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, other = (classifier(epochs=2).fit(X, Y).predict_proba(X) for _ in "12")
    assert (one == other).all()
    assert torch.equal(torch.get_rng_state(), before)
    another = classifier(epochs=2, random_state=1).fit(X, Y).predict_proba(X)
    assert abs(another - one).max() > 1e-3


def test_it_goes_into_pipelines_and_searches():
    pipeline = make_pipeline(StandardScaler(), classifier(epochs=3))
    assert cross_val_score(pipeline, X, Y, cv=3).mean() > 0.7
    grid = {"module_arguments": [{"hidden": 1}, {"hidden": 8}], "epochs": [1, 8]}
    search = GridSearchCV(classifier(), grid, cv=2).fit(X, Y)
    assert search.best_params_["epochs"] == 8
    assert search.best_estimator_.model_.module[0].out_features in (1, 8)


def test_parameters_are_those_that_were_given():
    one = classifier(epochs=3).set_params(batch_size=16)
    parameters = one.get_params()
    assert parameters["module"] is Network
    assert (parameters["epochs"], parameters["batch_size"]) == (3, 16)
    assert clone(one).get_params().keys() == parameters.keys()
    with pytest.raises(NotFittedError):
        one.predict(X)


def test_it_is_pickled_with_what_it_has_learnt():
    found = classifier(epochs=2).fit(X, Y)
    again = pickle.loads(pickle.dumps(found))
    assert (again.predict_proba(X) == found.predict_proba(X)).all()


def test_weights_of_samples_count():
    weights = np.where(Y == 2, 0.0, 1.0)
    found = classifier().fit(X, Y, sample_weight=weights)
    assert (found.predict(X[Y == 2]) != 2).all()


def test_a_module_is_copied_for_each_fit():
    module = Network(4, 3)
    before = module[0].weight.clone()
    found = classifier(module=module, epochs=1).fit(X, Y)
    assert torch.equal(module[0].weight, before)
    assert not torch.equal(found.model_.module[0].weight, before)
    with pytest.raises(ConfigError, match="module is a module"):
        classifier(module=module, module_arguments={"hidden": 3}).fit(X, Y)
    with pytest.raises(ConfigError, match=r"no torch\.nn\.Module"):
        classifier(module=lambda *_: 3).fit(X, Y)


class Flat(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).squeeze(1)


@pytest.mark.parametrize("module", [torch.nn.Linear, Flat])
def test_a_regressor_takes_targets_of_either_shape(module):
    x, y = make_regression(60, 3, random_state=0)
    y = y / y.std()
    settings = {"optimizer": Optimizer("adam", 0.1), "epochs": 30}
    found = Regressor(module, IPUConfig(replicas=2), random_state=0, **settings)
    assert found.fit(x, y).score(x, y) > 0.95
    assert found.predict(x).shape == (60,)
    if module is torch.nn.Linear:
        both = np.stack([y, -y], axis=1)
        assert found.fit(x, both).score(x, both) > 0.95
        assert found.predict(x).shape == (60, 2)


def test_without_scikit_learn_the_package_is_named():
    code = (
        "import sys; sys.modules['sklearn.base'] = None\n"
        "import ipufit.integrations.sklearn"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "pip install scikit-learn" in done.stderr


NOT_PASSED = (
    "check_parameters_default_constructible",  # a module must be given
    # A sample of weight 2 is one of a batch, and two samples may be in two batches.
    "check_sample_weight_equivalence",
    "check_sample_weights_invariance",
)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [
        Classifier(Network, optimizer=ADAM, batch_size=8, epochs=30, random_state=0),
        Regressor(Network, optimizer=ADAM, batch_size=8, epochs=30, random_state=0),
    ]
)
def test_checks_of_scikit_learn_pass(estimator, check):
    if any(name in str(check) for name in NOT_PASSED):
        pytest.skip("a module must be given, or batches are drawn")
    check(estimator)
