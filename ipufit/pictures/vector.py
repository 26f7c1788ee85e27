# SPDX-License-Identifier: Apache-2.0
"""Pictures as SVG: files of their own, and parts of a page.

The same data and the same matplotlib give the same bytes: no date and no random name.
"""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING, Sequence

from ipufit._optional import need
from ipufit.errors import ConfigError

from .drawing import INK, STYLE, figure_of

if TYPE_CHECKING:
    from .contents import Picture

_WHO = "Saving pictures"
_OPENING = re.compile(r"<svg\b[^>]*>")
_NAME = re.compile(r'(\bid="|href="#|url\(#)')


def svg_file(pictures: Sequence[Picture], title: str, lines: Sequence[str]) -> str:
    """Pictures one below the other as the text of a file, on a white background.

    Args:
        pictures: The pictures.
        title: Title of them all, for those who don't see them.
        lines: Sentences that go before their captions, likewise.

    Raises:
        ConfigError: There is no picture, or matplotlib isn't installed.
    """
    if not pictures:
        raise ConfigError(
            f"{title!r} has no picture for an SVG file. Save a page with its tables: a "
            "path that ends with .html."
        )
    text = _written(pictures, "white")
    description = " ".join([*lines, *(one.caption for one in pictures)]).strip()
    return _described(text, title, description, "ipufit")


def svg_element(picture: Picture, name: str) -> str:
    """A picture as an element of a page, which takes the page's colour of texts.

    Args:
        picture: The picture. Its title and caption aren't drawn: the page has them.
        name: Beginning of the names inside, other than those of the page's others.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    text = _written([picture._replace(caption="")], "none")
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = _NAME.sub(rf"\g<1>{name}-", text)
    return _described(text, picture.title, picture.caption, name)


def _written(pictures: Sequence[Picture], background: str) -> str:
    """The file that matplotlib writes."""
    matplotlib = need("matplotlib", _WHO, "ipufit[plot]")
    style = need("matplotlib.style", _WHO, "ipufit[plot]")
    file = io.StringIO()
    with style.context("default"), matplotlib.rc_context(STYLE):
        figure_of(pictures, _WHO).savefig(
            file,
            format="svg",
            facecolor=background,
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
    lines = (line.rstrip() for line in file.getvalue().splitlines())
    return "".join(f"{line}\n" for line in lines)


def _described(text: str, title: str, description: str, name: str) -> str:
    """Say to those who don't see the picture what it shows."""
    names = f"{name}-title"
    inside = f'<title id="{name}-title">{html.escape(title)}</title>'
    if description:
        names += f" {name}-description"
        told = html.escape(description)
        inside += f'\n <desc id="{name}-description">{told}</desc>'

    def with_words(opening: re.Match[str]) -> str:
        tag = opening[0][:-1]
        return f'{tag} role="img" aria-labelledby="{names}">\n {inside}'

    return _OPENING.sub(with_words, text, count=1)
