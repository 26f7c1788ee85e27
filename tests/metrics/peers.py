# SPDX-License-Identifier: Apache-2.0
"""What metrics come to by their peers, for each name.

The peer is scikit-learn; SciPy, torch in float64 or a definition where scikit-learn has
no such function, or cuts values off, as its `log_loss` does. All functions get arrays
of float64: outputs, targets and weights.
"""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

sk = pytest.importorskip("sklearn.metrics", reason="metrics are held against its own")
special, stats = map(pytest.importorskip, ("scipy.special", "scipy.stats"))

# Metrics of numbers: outputs, targets and weights `[M, K]`. -------------------------


def pooled(function):
    """Of all numbers together."""

    def metric(outputs, targets, weights):
        some = weights != 0
        return function(targets[some], outputs[some], sample_weight=weights[some])

    return metric


def each(function):
    """The weighted mean of a value for each output and target."""
    return lambda o, t, w: np.average(function(o, t), weights=w)


def by_column(function):
    """The mean over columns of a function of outputs, targets and weights."""

    def metric(*parts):
        columns = zip(*(part.T for part in parts))
        return np.mean(
            [function(*(p[w != 0] for p in (o, t, w))) for o, t, w in columns]
        )

    return metric


def share(function):
    """Of differences from the first target, so that constant ones are exactly so."""
    return by_column(lambda o, t, w: function(t - t[0], o - t[0], sample_weight=w))


def pearson(outputs, targets, weights):
    if np.ptp(outputs) == 0 or np.ptp(targets) == 0:
        return math.nan
    x, y = (part - np.average(part, weights=weights) for part in (outputs, targets))
    x, y = x / abs(x).max(), y / abs(y).max()
    return (weights * x * y).sum() / math.sqrt(
        (weights * x * x).sum() * (weights * y * y).sum()
    )


def spearman(outputs, targets, weights):
    if np.ptp(outputs) == 0 or np.ptp(targets) == 0:
        return math.nan
    return stats.spearmanr(outputs, targets)[0]


def log_cosh(outputs, targets):
    size = abs(outputs - targets)
    near = np.log1p(2 * np.sinh(np.minimum(size, 1) / 2) ** 2)
    return np.where(size < 1, near, size + np.log1p(np.exp(-2 * size)) - np.log(2))


def percentage(outputs, targets):
    return 100 * abs(outputs - targets) / np.maximum(abs(targets), 1e-7)


def smooth_l1(outputs, targets):
    size = abs(outputs - targets)
    return np.where(size < 1, size**2 / 2, size - 0.5)


def logarithmic(outputs, targets, weights):
    clipped = outputs.clip(0), targets.clip(0)
    return pooled(sk.mean_squared_log_error)(*clipped, weights)


def root(*parts):
    return math.sqrt(pooled(sk.mean_squared_error)(*parts))


NUMBERS = {
    "mse": pooled(sk.mean_squared_error),
    "rmse": root,
    "mae": pooled(sk.mean_absolute_error),
    "mape": each(percentage),
    "msle": logarithmic,
    "log_cosh": each(log_cosh),
    "huber": each(smooth_l1),
    "r2": share(sk.r2_score),
    "explained_variance": share(sk.explained_variance_score),
    "pearson": by_column(pearson),
    "spearman": by_column(spearman),
}


def cosine(outputs, targets, weights):
    """Of vectors, whose scale makes no difference."""
    far = sk.pairwise.paired_cosine_distances(
        *(part / abs(part).max() for part in (outputs, targets))
    )
    return np.average(1 - far, weights=weights[:, 0])


# Metrics of 0s and 1s: logits, targets and weights `[M, labels]`. -------------------


def cells(scores, truths, weights):
    """False negatives and others, in the order of scikit-learn's matrix."""
    function = pooled(
        lambda t, s, **w: sk.confusion_matrix(t, s > 0, labels=[0, 1], **w)
    )
    return function(scores, truths, weights).ravel()


def hard(function, **options):
    """The mean over labels of a function of predictions."""
    return by_column(
        lambda s, t, w: function(t, (s > 0).astype(float), sample_weight=w, **options)
    )


def is_mixed(truths):
    return 0 < truths.mean() < 1


def exact_area(scores, truths, weights):
    if not is_mixed(truths):
        return math.nan
    return sk.roc_auc_score(truths, scores, sample_weight=weights)


def area(scores, truths, weights, num_thresholds=200):
    """Of scores that are told apart no better than by thresholds."""
    return exact_area(bins(scores, num_thresholds), truths, weights)


def bins(scores, num_thresholds):
    """The number of thresholds that scores are above: all are above the first."""
    probabilities = torch.from_numpy(scores).float().sigmoid().double().numpy()
    return np.maximum(np.ceil(probabilities * (num_thresholds - 1)), 1)


def precision_recall(scores, truths, weights, num_thresholds=200):
    """The integral of precision by recall; both counts grow in proportion."""
    if not is_mixed(truths):
        return math.nan
    places, total = bins(scores, num_thresholds), 0.0
    tp = fp = 0.0
    for place in np.unique(places)[::-1]:
        here = places == place
        t, f = ((weights * mark)[here].sum() for mark in (truths, 1 - truths))
        if t > 0:
            steps = t * (np.arange(4000) + 0.5) / 4000
            total += t * np.mean((tp + steps) / (tp + steps + fp + f * steps / t))
        tp, fp = tp + t, fp + f
    return total / tp


def average_precision(scores, truths, weights):
    return sk.average_precision_score(truths, scores, sample_weight=weights)


def entropy(scores, truths):
    return np.logaddexp(0, scores) - scores * truths


def hinge(scores, truths, weights):
    if is_mixed(truths[weights != 0]):
        return pooled(sk.hinge_loss)(scores, truths, weights)
    return each(margin)(scores, truths, weights)


def margin(scores, truths):
    return np.maximum(0, 1 - scores * np.where(truths > 0, 1, -1))


def exponential(metric):
    def value(*parts):
        return np.exp(metric(*parts))

    return value


zero = {"zero_division": 0}
BITS = {
    "accuracy": pooled(lambda t, s, **w: sk.accuracy_score(t, s > 0, **w)),
    "binary_accuracy": pooled(lambda t, s, **w: sk.accuracy_score(t, s > 0, **w)),
    "precision": hard(sk.precision_score, **zero),
    "recall": hard(sk.recall_score, **zero),
    "f1": hard(sk.f1_score, **zero),
    "dice": hard(sk.f1_score, **zero),
    "fbeta_score": hard(sk.fbeta_score, beta=1, **zero),
    "specificity": hard(sk.recall_score, pos_label=0, **zero),
    "iou": hard(sk.jaccard_score, **zero),
    "mean_iou": hard(sk.jaccard_score, average="macro", **zero),
    "balanced_accuracy": hard(sk.balanced_accuracy_score),
    "true_negatives": lambda *parts: cells(*parts)[0],
    "false_positives": lambda *parts: cells(*parts)[1],
    "false_negatives": lambda *parts: cells(*parts)[2],
    "true_positives": lambda *parts: cells(*parts)[3],
    "auc": by_column(area),
    "pr_auc": by_column(precision_recall),
    "exact_auc": by_column(exact_area),
    "average_precision": by_column(average_precision),
    "binary_crossentropy": each(entropy),
    "crossentropy": each(entropy),
    "perplexity": exponential(each(entropy)),
    "hinge": hinge,
    "squared_hinge": each(lambda s, t: margin(s, t) ** 2),
}
# Metrics of classes: logits `[M, C]`, indices and weights `[M]`. --------------------


def best(function, **options):
    def metric(scores, labels, weights):
        return function(labels, scores.argmax(1), sample_weight=weights, **options)

    return metric


def cells_of_classes(scores, labels, weights):
    return sk.multilabel_confusion_matrix(
        labels,
        scores.argmax(1),
        labels=range(scores.shape[1]),
        sample_weight=weights,
    ).reshape(-1, 4)


def specificity(*parts):
    tn, fp, fn, tp = cells_of_classes(*parts).T
    occurs = fp + fn + tp > 0
    return np.mean((tn / np.maximum(tn + fp, 1e-300))[occurs])


def top(k):
    def metric(scores, labels, weights):
        """scikit-learn takes the last of equal scores for the highest."""
        last = scores.shape[1] - 1
        return sk.top_k_accuracy_score(
            last - labels,
            scores[:, ::-1],
            k=k,
            labels=range(last + 1),
            sample_weight=weights,
        )

    return metric


def class_entropy(scores, labels, weights):
    logs = special.log_softmax(scores, axis=1)
    return picked(logs, labels, weights)


def picked(scores, labels, weights):
    return np.average(-scores[range(len(labels)), labels], weights=weights)


def class_hinge(scores, labels, weights):
    """Keras's, whose highest other score is no less than 0."""
    is_target = np.eye(scores.shape[1], dtype=bool)[labels]
    others = np.where(is_target, 0, scores).max(1)
    values = np.maximum(0, 1 + others - scores[is_target])
    return np.average(values, weights=weights)


def of_pairs(metric):
    """Of the difference of two classes' scores."""

    def value(scores, labels, weights):
        # In float32, as a device computes it.
        ones = scores[:, 1].astype(np.float32) - scores[:, 0].astype(np.float32)
        return metric(ones.astype(np.float64), labels, weights)

    return value


macro = {"average": "macro", **zero}
CLASSES = {
    "accuracy": best(sk.accuracy_score),
    "balanced_accuracy": best(sk.balanced_accuracy_score),
    "precision": best(sk.precision_score, **macro),
    "recall": best(sk.recall_score, **macro),
    "f1": best(sk.f1_score, **macro),
    "dice": best(sk.f1_score, **macro),
    "fbeta_score": best(sk.fbeta_score, beta=1, **macro),
    "specificity": specificity,
    "iou": best(sk.jaccard_score, **macro),
    "mean_iou": best(sk.jaccard_score, **macro),
    "true_negatives": lambda *parts: cells_of_classes(*parts)[:, 0].sum(),
    "false_positives": lambda *parts: cells_of_classes(*parts)[:, 1].sum(),
    "false_negatives": lambda *parts: cells_of_classes(*parts)[:, 2].sum(),
    "true_positives": lambda *parts: cells_of_classes(*parts)[:, 3].sum(),
    "crossentropy": class_entropy,
    "perplexity": exponential(class_entropy),
}
MANY = {  # scikit-learn's take more than two classes
    "top_5_accuracy": top(5),
    "top_2_accuracy": top(2),
    "categorical_hinge": class_hinge,
}
INDICES = {
    "sparse_categorical_accuracy": best(sk.accuracy_score),
    "sparse_categorical_crossentropy": class_entropy,
    "nll": picked,
}
ONE_HOT = {
    "categorical_accuracy": best(sk.accuracy_score),
    "categorical_crossentropy": class_entropy,
}
PAIRS = {
    "auc": of_pairs(area),
    "pr_auc": of_pairs(precision_recall),
    "exact_auc": of_pairs(exact_area),
    "average_precision": of_pairs(average_precision),
}

# Metrics of distributions `[M, C]` and of counts. -----------------------------------


def divergence(scores, shares, weights):
    logs = special.log_softmax(scores, axis=1)
    values = (special.xlogy(shares, shares) - shares * logs).sum(1)
    return np.average(values, weights=weights[:, 0])


def cross(scores, shares, weights):
    values = -(shares * special.log_softmax(scores, axis=1)).sum(1)
    return np.average(values, weights=weights[:, 0])


def poisson(scores, counts):
    parts = (torch.from_numpy(part) for part in (scores, counts))
    return F.poisson_nll_loss(*parts, reduction="none").numpy()


VECTORS = {"cosine_similarity": cosine}
COUNTS = {"poisson": each(poisson)}
SHARES = {"kl_divergence": divergence, "categorical_crossentropy": cross}


# References of cases (`harness.Case`): the metrics above, of tensors. ----------------


def of_columns(metric, *, width=None, to=lambda x: x):
    """Of numbers, bits or shares.

    Args:
        metric: Takes outputs, targets and weights `[M, width]`.
        width: 1 for all values together; the last axis if it is left out.
        to: Changes the outputs first.
    """

    def reference(outputs, targets, weights):
        size = width or (outputs.shape[-1] if outputs.dim() > 1 else 1)
        weights = weights.reshape(-1, *(1,) * (outputs.dim() - 1))
        parts = to(outputs), targets.reshape(outputs.shape), weights.expand_as(outputs)
        return metric(*(part.double().reshape(-1, size).numpy() for part in parts))

    return reference


def of_classes(metric, *, axis=-1, to=lambda x: x):
    """Of classes, along an axis of the outputs; targets are indices or one-hot."""

    def reference(outputs, targets, weights):
        outputs = to(outputs.double().movedim(axis, -1))
        labels = targets.argmax(-1) if targets.shape == outputs.shape else targets
        labels = labels.reshape(outputs.shape[:-1])
        weights = weights.reshape(-1, *(1,) * (labels.dim() - 1)).expand_as(labels)
        kept = weights > 0
        parts = outputs[kept], labels[kept].long(), weights[kept]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that don't occur
            return metric(*(part.numpy() for part in parts))

    return reference


def reference(function, name, parts):
    if not parts[2].any():
        return 0.0 if "positives" in name or "negatives" in name else math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that don't occur
        return float(function(*parts))
