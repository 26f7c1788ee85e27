# SPDX-License-Identifier: Apache-2.0
"""Pictures and tables that belong together: shown in a terminal, saved in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ipufit._files import file_errors
from ipufit.errors import ConfigError

from .contents import Content, Picture
from .tables import Table

if TYPE_CHECKING:
    from rich.console import Console

    from ipufit.types import PathLike


class Report(NamedTuple):
    """Pictures and tables with a title.

    Attributes:
        title: A few words.
        lines: Sentences above all pictures.
        contents: Pictures and tables from top to bottom. An SVG file has pictures only.

    Example:
        >>> from ipufit.pictures import Bar, BarChart, Part
        >>> bars = (Bar("stage 0", (Part("forward", 2e6),)),)
        >>> report = Report("A plan", (), (BarChart("FLOPs", "", "FLOP", bars),))
        >>> report.show()
        A plan
        <BLANKLINE>
        FLOPs
        <BLANKLINE>
        stage 0  ██████████████████████████████████████████████████   2.00 MFLOP, 100.0%
        █ forward
    """

    title: str
    lines: tuple[str, ...]
    contents: tuple[Content, ...]

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The contents that can be drawn."""
        return tuple(one for one in self.contents if not isinstance(one, Table))

    @property
    def has_one_title(self) -> bool:
        """Whether it is one picture or table under its own title."""
        titles = [one.title for one in self.contents]
        return titles == [self.title] and not self.lines

    def show(self, console: Console | None = None) -> None:
        """Print the pictures as characters, for a terminal of 40 columns or more.

        Args:
            console: Console of rich; standard output by default.
        """
        from rich.console import Console
        from rich.text import Text

        from .terminal import lines_of, wrapped

        console = console or Console()
        is_ascii = console.options.ascii_only
        width = console.width
        words = () if self.has_one_title else (self.title, *self.lines)
        lines = [text for line in words for text in wrapped(line, width)]
        for one in self.contents:
            lines += [Text()] if lines else []
            lines += lines_of(one, width, is_ascii=is_ascii)
        if is_ascii:  # labels and captions may have other letters
            for line in lines:
                line.plain = line.plain.encode("ascii", "replace").decode()
        console.print(Text("\n").join(lines), overflow="ignore")

    def save(self, path: PathLike) -> None:
        """Write the pictures to a file.

        Args:
            path: The file. Its ending says the format: `.svg` for the pictures one
                below the other, `.html` for a page with pictures and tables that needs
                no other file, no script and no network.

        Raises:
            ConfigError: Another ending, no picture for an SVG file, or matplotlib, by
                which pictures are drawn, isn't installed.
            FileError: The file can't be written.
        """
        target = Path(path)
        ending = target.suffix.lower()
        if ending == ".svg":
            from .vector import svg_file

            text = svg_file(self.pictures, self.title, self.lines)
        elif ending in (".html", ".htm"):
            from .page import html_page

            text = html_page(self.contents, self.title, self.lines)
        else:
            raise ConfigError(
                f"save({str(path)!r}) knows no format by this ending. Give a path that "
                "ends with .svg or .html."
            )
        with file_errors("can't be written", target):
            target.write_text(text, encoding="utf-8")
