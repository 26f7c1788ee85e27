# SPDX-License-Identifier: Apache-2.0
"""Pictures of plans: in a terminal, as SVG, as a page. They take plain data."""

from __future__ import annotations

from .amounts import amount_in_words, share_in_words
from .bar_chart import Bar, BarChart, Part
from .contents import Content, Picture
from .report import Report
from .tables import Table
from .timeline import Row, Timeline

__all__ = [
    "Bar",
    "BarChart",
    "Content",
    "Part",
    "Picture",
    "Report",
    "Row",
    "Table",
    "Timeline",
    "amount_in_words",
    "share_in_words",
]
