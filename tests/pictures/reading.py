# SPDX-License-Identifier: Apache-2.0
"""Read pictures: the numbers that stand in them, and where."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import NamedTuple
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
IDLE = {"·", ".", "…", "~", "..."}


class Timetable(NamedTuple):
    """(name of a row, cycle) -> micro-batch, and cycle -> rows at work."""

    cells: dict
    at_work: dict


def timetable_of_lines(lines, names):
    """The cells in the lines of a terminal, of one block or more.

    Args:
        lines: Lines of text.
        names: Beginnings of the rows that have cells.
    """
    cells, at_work = {}, {}
    starts = [place for place, line in enumerate(lines) if re.match(r"cycle +\d", line)]
    for start, end in zip(starts, [*starts[1:], None]):
        head, *rows = [line for line in lines[start:end] if line]
        cycle_at = _cycles(head, rows[-1])
        for line in rows:
            name = next(one for one in (*names, "at work") if line.startswith(one))
            for end_of_cell, told in _words(line[len(name) :], len(name)):
                if told in IDLE:
                    continue
                cycle = cycle_at[end_of_cell]
                if name == "at work":
                    assert cycle not in at_work
                    at_work[cycle] = int(told)
                else:
                    assert (name, cycle) not in cells
                    cells[name, cycle] = int(told)
    return Timetable(cells, at_work)


def _words(text, start=0):
    return [(start + word.end(), word[0]) for word in re.finditer(r"\S+", text)]


def _cycles(head, at_work):
    """End of a column -> its cycle; numbers that have no room are counted."""
    cycle_at = {end: int(told) for end, told in _words(head) if told.isdigit()}
    columns = _words(at_work[len("at work") :], len("at work"))
    for every in (columns, columns[::-1]):
        step = 1 if every is columns else -1
        last = None
        for end, told in every:
            if told in IDLE:
                last = None
            elif end in cycle_at:
                assert last is None or cycle_at[end] == last + step
                last = cycle_at[end]
            elif last is not None:
                last = cycle_at[end] = last + step
    return cycle_at


def texts_of_svg(text):
    """(x, y, text) of each text in a picture, rounded to a hundredth of a point."""
    root = ElementTree.fromstring(text)
    return [
        (round(float(one.get("x")), 2), round(float(one.get("y")), 2), one.text)
        for one in root.iter(f"{SVG}text")
    ]


def timetable_of_svg(text):
    """The cells of a picture, by the places where their texts stand."""
    texts = texts_of_svg(text)
    left = min(x for x, _, _ in texts)
    (top,) = [y for x, y, told in texts if told == "cycle"]
    number_at = {
        x: int(told) for x, y, told in texts if abs(y - top) < 3 and told.isdigit()
    }
    names = {y: told for x, y, told in texts if x == left and y > top}
    cells, at_work = {}, {}
    for x, y, told in texts:
        if x == left or y <= top + 3 or told in IDLE:
            continue
        name = names[min(names, key=lambda other: abs(other - y))]
        cycle = number_at[min(number_at, key=lambda other: abs(other - x))]
        if name.startswith("at work"):
            at_work[cycle] = int(told)
        else:
            assert (name, cycle) not in cells
            cells[name, cycle] = int(told)
    return Timetable(cells, at_work)


class Rectangle(NamedTuple):
    colour: str
    left: float
    right: float
    middle: float


def rectangles_of_svg(text):
    """The filled rectangles with an outline, in the order in which they are drawn."""
    found = []
    root = ElementTree.fromstring(text)
    in_patterns = set(root.iterfind(f".//{SVG}defs//{SVG}path"))
    for path in root.iter(f"{SVG}path"):
        if path in in_patterns:
            continue
        fill = re.search(r"fill: (#\w+|url\(#\w+\))", path.get("style") or "")
        numbers = [float(one) for one in re.findall(r"-?[\d.]+", path.get("d"))]
        if fill and "stroke: #8a939c" in path.get("style"):
            x, y = numbers[::2], numbers[1::2]
            found.append(Rectangle(fill[1], min(x), max(x), (min(y) + max(y)) / 2))
    return found


class Page(HTMLParser):
    """What a page has: tables, ids, addresses, and the elements."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.ids, self.tags, self.addresses = [], [], [], []
        self.labelled = []
        self._cell = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            if name in attributes:
                self.addresses.append(attributes[name])
        if tag == "svg":
            self.labelled.append((attributes["role"], attributes["aria-labelledby"]))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = ""

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.tables[-1][-1].append(self._cell)
            self._cell = None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data


def timetable_of_table(rows):
    """The cells of a timeline's table."""
    head, *others = rows
    cells, at_work = {}, {}
    for name, *texts in others:
        for column, told in zip(head[1:], texts):
            if told.isdigit():
                if name == "at work":
                    at_work[int(column)] = int(told)
                else:
                    cells[name, int(column)] = int(told)
    return Timetable(cells, at_work)
