"""Small pieces of a page that is one file: shell, section, table, figure, card. Plain text goes in, HTML comes out.

Text is escaped where it enters, and what is HTML already has the type :data:`Html`, so the type checker tells the two
apart. A page asks nothing of the network: styles are inside, pictures are data.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple, NewType

Html = NewType("Html", str)
"""Text that is markup already and must not be escaped again."""


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    best: bool = False
    """Set in bold."""
    rest: str = ""
    """Spread and marks: behind the figure, in wide tables below it."""


class Row(NamedTuple):
    """A row of a table."""

    name: str
    cells: Sequence[Cell]
    note: str = ""
    """What the row means, in small print across the whole table."""


_WIDE, _LONG = 11, 18  # more columns are set narrow, more rows may be printed on two pages


def text(value: str) -> Html:
    """Plain text as HTML.

    >>> text("a < b & c")
    'a &lt; b &amp; c'
    """
    return Html(html.escape(value))


def join(*parts: Html) -> Html:
    """One after the other."""
    return Html("\n".join(parts))


def tag(name: str, inner: Html, attributes: Mapping[str, str] | None = None) -> Html:
    """An element around ``inner``.

    >>> tag("p", text("2 > 1"), {"class": "note"})
    '<p class="note">2 &gt; 1</p>'
    """
    written = "".join(f' {key}="{html.escape(value)}"' for key, value in (attributes or {}).items())
    return Html(f"<{name}{written}>{inner}</{name}>")


def paragraph(words: str, *, style: str = "") -> Html:
    """A paragraph of plain text; ``style`` is a class of page.css, such as ``note``."""
    return tag("p", text(words), {"class": style} if style else None)


def page(title: str, body: Html, *, description: str) -> str:
    """The whole file: head with the styles inside, and the body."""
    style = files("vacsr.report").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="description" content="{html.escape(description)}">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def section(title: str, body: Html, *, name: str) -> Html:
    """A part of the page with its heading; ``name`` is its anchor."""
    heading = tag("h2", text(title), {"id": f"{name}-title"})
    return tag("section", join(heading, body), {"id": name, "aria-labelledby": f"{name}-title"})


def table(head: Sequence[str], rows: Sequence[Row], *, caption: str) -> Html:
    """A table of figures; ``head`` names the column of the rows' names too. One with many columns is set narrow."""
    top = Html("".join(tag("th", text(name), {"scope": "col"}) for name in head))
    lines = [line for row in rows for line in _rows(row, columns=len(head))]
    said = tag("caption", tag("span", text(caption)))  # stays in view while the table scrolls
    inner = join(said, tag("thead", tag("tr", top)), tag("tbody", join(*lines)))
    spread = any(cell.rest for row in rows for cell in row.cells)
    wide = " wide" if len(head) + spread > _WIDE else ""
    long = " long" if len(rows) > _LONG else ""
    # A table too wide for the screen scrolls by itself, by keyboard too.
    box = {"class": f"table{wide}{long}", "role": "region", "aria-label": caption, "tabindex": "0"}
    return tag("div", tag("table", inner), box)


def _rows(row: Row, *, columns: int) -> list[Html]:
    cells = Html(tag("th", text(row.name), {"scope": "row"}) + "".join(map(_cell, row.cells)))
    if not row.note:
        return [tag("tr", cells)]
    note = tag("td", text(row.note), {"colspan": str(columns)})
    return [tag("tr", cells), tag("tr", note, {"class": "meaning"})]


def _cell(cell: Cell) -> Html:
    figure = tag("strong", text(cell.text)) if cell.best else text(cell.text)
    rest = tag("span", text(cell.rest), {"class": "rest"}) if cell.rest else ""
    return tag("td", Html(figure + rest))


def figure(picture: Html, caption: str, *, title: str = "") -> Html:
    """A picture, mostly SVG, under its title and above its caption; either may be empty."""
    head = tag("h3", text(title)) if title else Html("")
    below = tag("figcaption", text(caption)) if caption else Html("")
    return tag("figure", join(head, picture, below))


def image(uri: str, alt: str, *, size: int) -> Html:
    """A picture within a square; ``alt`` says what it shows to those who cannot see it."""
    sizes = f'width="{size}" height="{size}"'
    return Html(f'<img src="{html.escape(uri)}" alt="{html.escape(alt)}" {sizes} loading="lazy" decoding="async">')


def badge(words: str, *, kind: str) -> Html:
    """A small label; ``kind`` chooses its colours in page.css."""
    return tag("span", text(words), {"class": f"badge {kind}"})


def gauge(label: str, value: float, *, ends: tuple[float, float], shown: str, kind: str = "bar") -> Html:
    """A figure and where it lies between two ends: a ``bar`` from the lower one, or a ``dot`` on the way.

    >>> "width:50.0%" in gauge("grade", 0.5, ends=(0.0, 1.0), shown="0.50")
    True
    """
    low, high = ends
    share = 100 * min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 50.0
    fill = tag("span", Html(f'<span style="width:{share:.1f}%"></span>'), {"class": "track", "aria-hidden": "true"})
    words = tag("span", text(label), {"class": "of"}) + fill + tag("span", text(shown), {"class": "value"})
    return tag("span", Html(words), {"class": f"gauge {kind}"})


def card(picture: Html, *, kind: str, lines: Sequence[Html]) -> Html:
    """A framed picture with lines below it; ``kind`` chooses the frame in page.css."""
    return tag("li", join(picture, tag("div", join(*lines), {"class": "lines"})), {"class": f"card {kind}"})


def command(line: str) -> Html:
    """Something to type."""
    return tag("pre", tag("code", text(line)), {"tabindex": "0"})
