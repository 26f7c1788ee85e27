# SPDX-License-Identifier: Apache-2.0
from .benchmarking import BenchmarkResult as BenchmarkResult
from .checking import CheckReport as CheckReport
from .checking import Finding as Finding
from .comparing import Comparison as Comparison
from .comparing import Difference as Difference
from .comparing import compare as compare
from .model import IPUModel as IPUModel
