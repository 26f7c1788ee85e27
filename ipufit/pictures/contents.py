# SPDX-License-Identifier: Apache-2.0
"""The kinds of things that a report holds."""

from __future__ import annotations

from typing import Union

from .bar_chart import BarChart
from .tables import Table
from .timeline import Timeline

Picture = Union[Timeline, BarChart]
"""A thing that can be drawn."""

Content = Union[Timeline, BarChart, Table]
"""A picture, or a table of texts."""
