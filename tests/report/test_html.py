"""Pieces of a page: what goes in as text comes out as text, and the whole asks nothing of the network."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vacsr.report.html import (
    Cell,
    Html,
    Row,
    badge,
    card,
    command,
    figure,
    gauge,
    image,
    page,
    section,
    table,
    tag,
    text,
)
from vacsr.report.images import data_uri, photo_uri

HOSTILE = st.text(alphabet="<>&\"' ab=/é", min_size=1, max_size=12)


class Reader(HTMLParser):
    """Texts and attributes as a browser would understand them."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.words: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.names: list[str] = []
        self.feed(source)
        self.close()

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs


@given(HOSTILE, HOSTILE)
def test_text_and_attributes_survive_as_they_are(words: str, value: str) -> None:
    read = Reader(tag("p", text(words), {"title": value}))
    assert read.names == ["p"]
    assert "".join(read.words) == words
    assert read.attributes == [("title", value)]


@given(HOSTILE)
def test_no_piece_lets_markup_through(words: str) -> None:
    pieces = [
        badge(words, kind="wrong"),
        command(words),
        figure(Html(""), words, title=words),
        section(words, Html(""), name="x"),
        table([words], [Row(words, [Cell(words, best=True)], words)], caption=words),
        gauge(words, 0.5, ends=(0, 1), shown=words),
    ]
    known = {"span", "pre", "code", "figure", "h3", "figcaption", "section", "h2", "div", "table", "caption"}
    known |= {"thead", "tbody", "tr", "th", "td", "strong"}
    for piece in pieces:
        read = Reader(piece)
        assert set(read.names) <= known
        assert words in read.words


def test_a_table_names_rows_and_columns_and_the_best() -> None:
    made = table(
        ["method", "x"], [Row("a", [Cell("1.0", best=True)]), Row("b", [Cell("0.5")], "what b is")], caption="c"
    )
    assert made.count('scope="col"') == 2
    assert made.count('scope="row"') == 2
    assert re.findall(r"<strong>(.*?)</strong>", made) == ["1.0"]
    assert '<td colspan="2">what b is</td>' in made


@pytest.mark.parametrize(
    ("columns", "rows", "rest", "style"),
    [
        (10, 1, "± 1", "table"), (11, 1, "± 1", "table wide"), (11, 1, "", "table"), (12, 1, "", "table wide"),
        (3, 19, "± 1", "table long"), (11, 19, "± 1", "table wide long"),
    ],
)  # fmt: skip
def test_tables_with_many_columns_are_set_narrow_and_long_ones_may_break(
    columns: int, rows: int, rest: str, style: str
) -> None:
    made = table(["x"] * columns, [Row("a", [Cell("1", rest=rest)] * (columns - 1))] * rows, caption="c")
    assert made.startswith(f'<div class="{style}"')
    assert made.count("± 1") == (rows * (columns - 1) if rest else 0)


@pytest.mark.parametrize(("value", "share"), [(-1.0, 0.0), (0.2, 0.0), (0.3, 50.0), (0.4, 100.0), (9.0, 100.0)])
def test_a_gauge_stays_within_its_ends(value: float, share: float) -> None:
    assert f"width:{share:.1f}%" in gauge("σ", value, ends=(0.2, 0.4), shown="")


def test_a_gauge_without_a_range_points_to_the_middle() -> None:
    assert "width:50.0%" in gauge("σ", 0.3, ends=(0.3, 0.3), shown="0.3")


def test_a_page_is_whole_and_asks_for_nothing() -> None:
    whole = page("a & b", card(Html("x"), kind="wrong", lines=[text("y")]), description='says "c"')
    assert whole.startswith("<!DOCTYPE html>")
    assert "<title>a &amp; b</title>" in whole
    assert not re.search(r"(?:https?:)?//|@import|url\(", whole)
    for query in ("prefers-color-scheme: dark", "@media print", 'name="viewport"', 'lang="en"'):
        assert query in whole


def test_a_picture_is_data_and_stays_what_it_was() -> None:
    pixels = np.zeros((40, 40, 3), dtype=np.uint8)
    pixels[:, :20] = (200, 30, 60)
    uri = data_uri(pixels)
    head, _, body = uri.partition(",")
    assert head in ("data:image/webp;base64", "data:image/png;base64")
    back = np.asarray(Image.open(io.BytesIO(base64.b64decode(body))).convert("RGB")).astype(int)
    assert back.shape == pixels.shape
    assert np.abs(back - pixels)[:, 5:15].max() < 20
    assert data_uri(pixels) == uri
    assert Reader(image(uri, "half red", size=40)).attributes[:2] == [("src", uri), ("alt", "half red")]


@pytest.mark.parametrize(
    ("size", "expected"), [((400, 200), (100, 50)), ((30, 60), (50, 100)), ((64, 64), (100, 100)), ((900, 1), (100, 1))]
)
def test_photos_are_shown_whole(size: tuple[int, int], expected: tuple[int, int]) -> None:
    """What stands at an edge may be what a caption speaks of."""
    photo = Image.new("RGB", size, (255, 255, 255))
    photo.paste((200, 0, 0), (0, 0, max(1, size[0] // 10), size[1]))
    uri = photo_uri(photo, side=100)
    shown = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB")
    assert shown.size == expected
    red, green, _ = shown.getpixel((0, shown.height // 2))  # type: ignore[misc]
    assert (red > 150, green < 120) == (True, True)
