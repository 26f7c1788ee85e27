# SPDX-License-Identifier: Apache-2.0
"""Show plans with rich in a terminal, or with matplotlib in a file."""

from __future__ import annotations

import io
import textwrap
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence, Union

from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from ipufit._files import file_errors, replace_file
from ipufit._lazy import need
from ipufit.errors import ConfigError
from ipufit.types import PathLike

_COLORS = ("#8ec1e8", "#f6b26b", "#c9b3e6", "#9fd3b6", "#e8d174")
_FILLS, _ASCII_FILLS = "█▓▒░▚", "#=+-o"
_MOST_CHARACTERS = 80  # of a bar
_SLOT_COLORS = {
    "F": ("#ddecf8", _COLORS[0]),
    "B": ("#fce8d3", _COLORS[1]),
    "FB": ("#efe8f8", _COLORS[2]),
}
"""Colors of a cycle and of the work in it, by the passes of a slot."""
_LIMIT_COLOR = "#d62728"
_FAR = 10  # a limit this many times the longest bar isn't drawn: no bar would be seen
_FORMATS = (".svg", ".png", ".pdf")
_COLUMNS = 80  # of a text


Columns = Mapping[str, Callable[[Any], str]]
"""The text of an item in each column, by the column's name."""


class Table(NamedTuple):
    """Table of texts.

    Attributes:
        title: A few words.
        columns: The columns.
        items: An item for each row.
        caption: Sentences below it.
    """

    title: str
    columns: Columns
    items: Sequence[Any]
    caption: str = ""

    def printed(self, console: Console) -> Iterator[Any]:
        """Yield columns, or a line for each row if the columns are too wide.

        Numbers aren't broken; texts are, between words.
        """
        header = list(self.columns)
        rows = [[text(item) for text in self.columns.values()] for item in self.items]
        columns = [*zip(header, *rows)]
        are_numbers = [
            any(cell.lstrip("~<")[:1].isdigit() for cell in cells)
            for _, *cells in columns
        ]
        widths = [
            max(map(len, cells if is_number else " ".join(cells).split()), default=0)
            for is_number, cells in zip(are_numbers, columns)
        ]
        if sum(widths) + 2 * (len(widths) - 1) > console.width:
            for name, *cells in rows:
                pairs = zip(header[1:], cells)
                words = [f"{head} {cell}" for head, cell in pairs if cell]
                yield f"{name}: {', '.join(words)}"
            return
        grid = rich_table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        described = zip(header, are_numbers, widths)
        for place, (name, is_number, width) in enumerate(described):
            side: Any = "right" if place and is_number else "left"
            grid.add_column(name, justify=side, no_wrap=is_number, min_width=width)
        for row in rows:
            grid.add_row(*row)
        yield grid


class Bars(NamedTuple):
    """Stacked bars.

    Attributes:
        title: A few words.
        labels: Name of each bar.
        parts: Amount in each bar, 0 or more, by the kind of the part.
        unit: Unit of the amounts, such as "B".
        ends: Text at the end of each bar.
        caption: Sentences below them.
        limit: Name and amount of a limit; None for none.
    """

    title: str
    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    unit: str
    ends: Sequence[str]
    caption: str = ""
    limit: tuple[str, float] | None = None

    @property
    def totals(self) -> list[float]:
        """Return the sum of each bar's parts."""
        return [sum(amounts) for amounts in zip(*self.parts.values())]

    @property
    def near_limit(self) -> tuple[str, float] | None:
        """Return the limit if it is near enough to be drawn, else None."""
        is_near = self.limit is not None and self.limit[1] < _FAR * max(self.totals)
        return self.limit if is_near else None

    def printed(self, console: Console) -> Iterator[Any]:
        """Yield the bars, and the kinds of their parts."""
        fills = _ASCII_FILLS if console.options.ascii_only else _FILLS
        styles = dict(zip(self.parts, zip(fills, _COLORS)))
        beside = max(map(len, self.labels)) + max(map(len, self.ends)) + 4
        room = min(max(console.width - beside, 1), _MOST_CHARACTERS)
        limit, limit_amount = self.near_limit or (None, 0.0)
        longest = max(*self.totals, limit_amount) or 1
        grid = rich_table.Table.grid(padding=(0, 2, 0, 0))
        for label, end, amounts in zip(
            self.labels, self.ends, zip(*self.parts.values())
        ):
            line, amount = Text(), 0.0
            for (fill, color), part in zip(styles.values(), amounts):
                amount += part
                line.append(fill * (round(amount / longest * room) - len(line)), color)
            if limit is not None:
                place = max(round(limit_amount / longest * room) - 1, 0)
                line.pad_right(place + 1 - len(line))
                line = line[:place] + Text("|", _LIMIT_COLOR) + line[place + 1 :]
            grid.add_row(label, line, end)
        yield grid
        if len(styles) > 1:
            if limit is not None:
                styles[limit] = "|", _LIMIT_COLOR
            kinds = [
                (f"{fill} {kind}   ", style) for kind, (fill, style) in styles.items()
            ]
            yield Text.assemble(*kinds)

    def draw(self, axes: Any) -> None:
        """Draw the bars with matplotlib."""
        ends = [0.0] * len(self.labels)
        for (kind, amounts), color in zip(self.parts.items(), _COLORS):
            axes.barh(self.labels, amounts, left=ends, label=kind, color=color)
            ends = [end + amount for end, amount in zip(ends, amounts)]
        for y, text in enumerate(self.ends):
            beside = axes.get_yaxis_transform()  # the right edge of the axes is 1
            axes.text(1.01, y, text, va="center", transform=beside)
        if self.near_limit is not None:
            name, amount = self.near_limit
            axes.axvline(amount, label=name, color=_LIMIT_COLOR)
        axes.locator_params(axis="x", nbins=6)
        axes.xaxis.set_major_formatter(
            lambda amount, _: amount_in_words(amount, self.unit)
        )
        if len(self.parts) > 1:
            axes.legend(
                fontsize="small", ncol=3, loc="upper left", bbox_to_anchor=(0, -0.2)
            )


class Timeline(NamedTuple):
    """Rows of numbered micro-batches over cycles.

    Attributes:
        title: A few words.
        columns: The cycles; None where some are left out.
        rows: For each named row the micro-batch in each cycle; None while it is idle.
        caption: Sentences below it.
        busy: Share of a cycle in which a row works, by the row's name; empty for 1.
    """

    title: str
    columns: Sequence[int | None]
    rows: Mapping[str, Sequence[int | None]]
    caption: str
    busy: Mapping[str, float] = MappingProxyType({})

    def printed(self, console: Console) -> Iterator[Any]:
        """Yield rows over cycles, in several blocks if they are too wide."""
        rows = {"cycle": self.columns, **self.rows}
        left = max(map(len, rows))
        pitch = 1 + max(
            len(str(n)) for cells in rows.values() for n in cells if n is not None
        )
        at_once = max((console.width - left) // pitch, 1)
        for start in range(0, len(self.columns), at_once):
            if start:
                yield ""
            block = slice(start, start + at_once)
            for name, cells in rows.items():
                line = name.ljust(left)
                for column, cell in zip(self.columns[block], cells[block]):
                    sign = "~" if column is None else "."
                    line += (sign if cell is None else str(cell)).rjust(pitch)
                yield line

    def draw(self, axes: Any) -> None:
        """Draw the rows with matplotlib."""
        for y, (name, cells) in enumerate(self.rows.items()):
            working = [x for x, number in enumerate(cells) if number is not None]
            text = {"ha": "center", "va": "center", "fontsize": "small"}
            colors = _SLOT_COLORS.get(name.rpartition(" ")[2], ())
            for color, width in zip(colors, (1.0, self.busy.get(name, 1.0))):
                spans = [(x - 0.5, width) for x in working]
                axes.broken_barh(spans, (y - 0.4, 0.8), color=color, linewidth=0)
                text["color"] = "black"
            for x in working:
                axes.text(x, y, cells[x], **text)
        axes.set_yticks(range(len(self.rows)), list(self.rows))
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        names = ["..." if column is None else column for column in self.columns]
        axes.set_xticks(range(len(names)), names, fontsize="small")
        words = "cycle; stages fill their shares of the slowest one's FLOPs"
        axes.set_xlabel(words if self.busy else "cycle")


Content = Union[str, Table, Bars, Timeline]


def amount_in_words(amount: float, unit: str, is_estimate: bool = False) -> str:
    """Format an amount with about three digits and a decimal prefix.

    Example:
        >>> amount_in_words(940_572_672, "B"), amount_in_words(260, "B")
        ('941 MB', '260 B')
        >>> amount_in_words(1536, "B", is_estimate=True)
        '~1.54 KB'
    """
    prefixes, power = ("", "K", "M", "G", "T", "P"), 0
    while power + 1 < len(prefixes) and amount >= 999.5 * 1000**power:
        power += 1
    value = amount / 1000**power
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    if not power and float(amount).is_integer():
        digits = 0
    about = "~" if is_estimate and amount else ""
    return f"{about}{value:.{digits}f} {prefixes[power]}{unit}"


def share_in_words(share: float) -> str:
    """Format a share as a percentage.

    Example:
        >>> share_in_words(0.4567), share_in_words(0.0001)
        ('45.7%', '<0.1%')
    """
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def show(contents: Sequence[Content], console: Console | None = None) -> None:
    """Print texts, tables and pictures, separated by blank lines.

    Args:
        contents: Texts, tables and pictures, from top to bottom.
        console: Console of rich; standard output by default.
    """
    console = console or Console()
    tell = partial(console.print, highlight=False, markup=False)
    for number, content in enumerate(contents):
        if number:
            tell()
        if isinstance(content, str):
            tell(content)
            continue
        tell(f"{content.title}:" if isinstance(content, Table) else content.title)
        for line in content.printed(console):
            tell(line)
        if content.caption:
            tell(content.caption)


def as_text(contents: Sequence[Content]) -> str:
    """Return texts and tables as `show` prints them, with sentences in short lines."""

    def short(text: str) -> str:
        return "\n".join(textwrap.fill(line, _COLUMNS) for line in text.split("\n"))

    file = io.StringIO()
    texts: list[Content] = []
    for content in contents:
        if isinstance(content, str):
            texts.append(short(content))
        elif isinstance(content, Table):
            texts.append(content._replace(caption=short(content.caption)))
    # Kernels of notebooks ask all consoles for a terminal's colors.
    console = Console(
        file=file, width=_COLUMNS, force_jupyter=False, force_terminal=False
    )
    show(texts, console)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def save(contents: Sequence[Content], title: str, path: PathLike) -> None:
    """Draw bars and timelines into a file.

    Raises:
        ConfigError: The path ends with an unknown format, or matplotlib is missing.
        FileError: The file can't be written.
    """
    target = Path(path)
    ending = target.suffix.lower()
    if ending not in _FORMATS:
        raise ConfigError(
            f"save({str(path)!r}) can't tell the format from this ending. Give a path "
            f"that ends with {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}."
        )
    with file_errors("can't be written", target):
        pictures = [part for part in contents if isinstance(part, (Bars, Timeline))]
        replace_file(target, [_drawn(pictures, title, ending[1:])])


# In a file ----------------------------------------------------------------------------


def _drawn(pictures: Sequence[Bars | Timeline], title: str, form: str) -> bytes:
    """Draw pictures below each other; in an SVG, text stays text."""
    matplotlib = need("matplotlib", "Saving pictures", "ipufit[plot]")
    make = need("matplotlib.figure", "Saving pictures", "ipufit[plot]").Figure
    heights = [
        1.3 + 0.25 * len(p.labels if isinstance(p, Bars) else p.rows) for p in pictures
    ]
    width = max(
        [8.0, *(len(p.columns) / 2.2 for p in pictures if isinstance(p, Timeline))]
    )
    style = {
        "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib
        "svg.fonttype": "none",
        "svg.hashsalt": "ipufit",
    }
    with matplotlib.rc_context(style):
        figure = make(figsize=(width, sum(heights)), layout="constrained")
        grid = figure.subplots(
            len(pictures), squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for axes, picture in zip(grid.flat, pictures):
            axes.set_title(picture.title, loc="left")
            axes.invert_yaxis()
            picture.draw(axes)
        metadata: dict[str, str | None] = {"Title": title}
        if form == "svg":
            metadata["Date"] = None  # the same plan gives the same file
        file = io.BytesIO()
        figure.savefig(file, format=form, metadata=metadata)
        return file.getvalue()
