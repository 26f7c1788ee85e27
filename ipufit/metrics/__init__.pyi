# SPDX-License-Identifier: Apache-2.0
from .base import FunctionMetric as FunctionMetric
from .base import Metric as Metric
from .base import StreamedMetric as StreamedMetric
from .base import call_by_rows as call_by_rows
from .base import detached as detached
from .base import flat as flat
from .base import in_float32 as in_float32
from .base import mean_sums as mean_sums
from .base import outputs_first as outputs_first
from .base import rows_of as rows_of
from .base import spread_weights as spread_weights
from .classification import Accuracy as Accuracy
from .classification import BinaryAccuracy as BinaryAccuracy
from .classification import CategoricalAccuracy as CategoricalAccuracy
from .classification import CategoricalHinge as CategoricalHinge
from .classification import SparseCategoricalAccuracy as SparseCategoricalAccuracy
from .classification import (
    SparseTopKCategoricalAccuracy as SparseTopKCategoricalAccuracy,
)
from .classification import TopKAccuracy as TopKAccuracy
from .classification import TopKCategoricalAccuracy as TopKCategoricalAccuracy
from .confusion import BalancedAccuracy as BalancedAccuracy
from .confusion import ConfusionMatrix as ConfusionMatrix
from .confusion import F1Score as F1Score
from .confusion import FalseNegatives as FalseNegatives
from .confusion import FalsePositives as FalsePositives
from .confusion import FBetaScore as FBetaScore
from .confusion import IoU as IoU
from .confusion import MeanIoU as MeanIoU
from .confusion import Precision as Precision
from .confusion import Recall as Recall
from .confusion import Specificity as Specificity
from .confusion import TrueNegatives as TrueNegatives
from .confusion import TruePositives as TruePositives
from .correlation import ExplainedVariance as ExplainedVariance
from .correlation import PearsonCorrelation as PearsonCorrelation
from .correlation import R2Score as R2Score
from .correlation import SpearmanCorrelation as SpearmanCorrelation
from .names import AnyMetric as AnyMetric
from .names import MetricLike as MetricLike
from .names import listed_metrics as listed_metrics
from .names import metric_names as metric_names
from .names import resolve_metric as resolve_metric
from .names import resolve_metrics as resolve_metrics
from .probabilistic import BinaryCrossentropy as BinaryCrossentropy
from .probabilistic import CategoricalCrossentropy as CategoricalCrossentropy
from .probabilistic import CrossEntropy as CrossEntropy
from .probabilistic import KLDivergence as KLDivergence
from .probabilistic import NegativeLogLikelihood as NegativeLogLikelihood
from .probabilistic import Perplexity as Perplexity
from .probabilistic import Poisson as Poisson
from .probabilistic import (
    SparseCategoricalCrossentropy as SparseCategoricalCrossentropy,
)
from .ranking import AUC as AUC
from .ranking import AveragePrecision as AveragePrecision
from .ranking import ExactAUC as ExactAUC
from .ranking import PrecisionAtRecall as PrecisionAtRecall
from .ranking import RecallAtPrecision as RecallAtPrecision
from .ranking import SensitivityAtSpecificity as SensitivityAtSpecificity
from .ranking import SpecificityAtSensitivity as SpecificityAtSensitivity
from .regression import CosineSimilarity as CosineSimilarity
from .regression import RootMeanSquaredError as RootMeanSquaredError
from .streamed import StreamedFunction as StreamedFunction
from .torchmetrics_adapter import TorchMetric as TorchMetric
