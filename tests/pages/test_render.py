"""Whole pages: what they show and leave out, that hostile text stays text, and that they need no network."""

import base64
import io
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vacsr.pages.curves import RunRecord
from vacsr.pages.examples import Answer, Examples, Interval, Picture, Query, RowAnswers, photo_uri
from vacsr.pages.render import Cell, Comparison, Row, SettingTable, comparison_page, render

VOID = ("meta", "img", "link")


class Page(HTMLParser):
    """Tags, text and attributes as a browser reads them; refuses elements that are not closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def sections(self) -> list[str | None]:
        return [attributes.get("id") for attributes in self.all("section")]


def report(*, sigma: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"rsum": 1.0, "uncertainty": None}
    found["scores"] = {"score": {"edges": [0.0, 1.0], "positive": [1], "negative": [9]}}
    if sigma:
        found["uncertainty"] = {"bins_i2t": {"r1": [0.9, 0.1]}, "topk_i2t": {"raw": [-0.3], "binned": [None]}}
    return found


HISTORY = ({"epoch": 1, "dev_rsum": 100.0}, {"epoch": 2, "dev_rsum": 200.0})
RUNS = [RunRecord(row, where, 0, {"test": report(sigma=row == "vacsr")}, HISTORY)
        for row in ("vacsr", "infonce") for where in ("clean", "noisy")]  # fmt: skip


def setting_table(setting: str = "clean", **fields: Any) -> SettingTable:
    rows = [Row("vacsr", [Cell("1"), Cell("300.1", best=True, spread="0.1")]), Row("infonce", [Cell("1"), Cell("–")])]
    return SettingTable(setting, f"c, {setting}", ["method", "seeds", "RSUM"], rows, **fields)


def comparison(**fields: Any) -> Comparison:
    plain = {"title": "A <title> & more", "lead": "2 rows.", "note": "", "tables": [setting_table()], "runs": RUNS}
    return Comparison(**{**plain, "rows": ["vacsr", "infonce"], "settings": ["clean", "noisy"], **fields})  # type: ignore[arg-type]


def answer(text: str = "a dog", **fields: Any) -> Answer:
    return Answer(**{"picture": None, "text": text, "kind": "wrong", "badge": "0% true", "grade": 0.25,
                     "uncertainty": None, **fields})  # fmt: skip


def examples(word: str = "a dog", *, sigmas: Sequence[float] = (0.2, 0.3, 0.4)) -> Examples:
    picture = Picture(f"id {word}", word)
    found = tuple(answer(word, picture=picture, uncertainty=sigma) for sigma in sigmas)
    rows = (RowAnswers("vacsr", 1, found), RowAnswers("infonce", 2_000, (answer(word, picture=picture),)))
    captions = (RowAnswers("vacsr", 3, (answer(word),)),)
    return Examples(
        "clean", "test", ("vacsr", "infonce"), "exact",
        (Query("q", word, None, 2, rows), Query("i", "", picture._replace(uri="data:image/png;base64,"), 0, captions)),
        (Interval(0.02, 0.06, 7, found[0]), Interval(0.06, 0.1, 0, None)), 40_000,
    )  # fmt: skip


def test_every_section_with_data_is_there_and_linked() -> None:
    page = Page(comparison_page(comparison(examples=examples())))
    assert page.sections() == ["tables", "sigma", "scores", "training", "answers", "intervals", "model"]
    assert [attributes["href"] for attributes in page.all("a")] == [f"#{name}" for name in page.sections()]
    assert "A <title> & more" in page.words
    plots = [attributes["aria-label"] or "" for attributes in page.all("svg")]
    assert sum("R@1 by the uncertainty" in plot for plot in plots) == 2  # once per setting
    assert any("Dev RSUM by epoch, noisy. vacsr: from 100.0 to 200.0; infonce" in plot for plot in plots)


def test_sections_without_data_are_left_out_and_named() -> None:
    bare = [RunRecord("infonce", "clean", 0, {"test": {"rsum": 1.0, "uncertainty": None}})]
    for runs in (bare, []):
        assert Page(comparison_page(comparison(runs=runs))).sections() == ["tables", "model"]
    whole = comparison_page(comparison(runs=bare, examples_wanted=True, left_out=3, not_run=["pcme"]))
    footer = " ".join(whole[whole.index("<footer>") :].split())
    assert "“How scores are distributed” and “How training went”" in footer
    assert "“What the uncertainty is worth”" not in footer  # infonce has none
    assert "need the trained models" in footer
    assert "3 more are in the tables" in footer
    assert "Not run: pcme." in footer
    assert "page.gallery" in comparison_page(comparison())


def test_a_page_needs_nothing_from_outside_and_can_be_read_by_all() -> None:
    differences = [Row("vacsr", [Cell(text) for text in ("RSUM", "infonce", "+1.0", "0.5 to 1.5", "<0.001")])]
    whole = comparison_page(comparison(examples=examples(), tables=[setting_table(differences=differences)]))
    assert not re.search(r"https?:|@import|url\((?!#)|<script", whole)
    page = Page(whole)
    assert page.all("html") == [{"lang": "en"}]
    assert all(attributes.get("aria-label") for attributes in page.all("svg"))
    assert all(attributes.get("scope") for attributes in page.all("th"))
    assert all(attributes.get("alt") for attributes in page.all("img"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert whole.count('<details class="tested">') == 1
    assert comparison_page(comparison(examples=examples())) == comparison_page(comparison(examples=examples()))


HOSTILE = st.text(alphabet="<>&\"' ab=/é", min_size=1, max_size=12).filter(str.strip)


@settings(deadline=None, max_examples=15)
@given(HOSTILE)
def test_hostile_text_stays_text(word: str) -> None:
    table = SettingTable(word, word, [word, word], [Row(word, [Cell(word, best=True, spread=word)])], [word])
    given = comparison(
        title=word, lead=word, note=word, tables=[table], runs=[], not_run=[word], examples=examples(word)
    )
    page, plain = Page(comparison_page(given)), Page(comparison_page(given._replace(examples=examples("x"))))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert page.words.count(word) > 10
    assert {attributes["alt"] for attributes in page.all("img")} == {word}


def test_a_table_names_rows_columns_and_the_best() -> None:
    whole = render("tables.html", tables=[setting_table(notes=["see < there"])], note="all & more")
    assert re.findall(r"<strong>(.*?)</strong>(?:<span class=\"rest\">(.*?)</span>)?", whole) == [("300.1", " ± 0.1")]
    assert whole.count('scope="col"') == 3
    assert whole.count('scope="row"') == 2
    assert "see &lt; there" in whole
    assert "all &amp; more" in whole
    assert "<details" not in whole


@pytest.mark.parametrize(
    ("columns", "rows", "rest", "style"),
    [
        (10, 1, "± 1", "table"), (11, 1, "± 1", "table wide"), (11, 1, "", "table"), (12, 1, "", "table wide"),
        (3, 19, "± 1", "table long"), (11, 19, "± 1", "table wide long"),
    ],
)  # fmt: skip
def test_wide_tables_are_set_narrow_and_long_ones_may_break(columns: int, rows: int, rest: str, style: str) -> None:
    body = [Row("a", [Cell("1", spread=rest)] * (columns - 1))] * rows
    assert f'<div class="{style}"' in render(
        "tables.html", tables=[SettingTable("s", "c", ["x"] * columns, body)], note=""
    )


@pytest.mark.parametrize(("grade", "share"), [(-1.0, 0), (0.0, 0), (0.3, 30), (9.0, 100)])
def test_a_gauge_stays_within_its_ends(grade: float, share: float) -> None:
    found = examples()
    query = Query("i", "", Picture("i", "x"), 0, (RowAnswers("vacsr", 1, (answer(grade=grade),)),))
    whole = comparison_page(comparison(examples=found._replace(queries=(query,), intervals=found.intervals[1:])))
    assert re.findall(r"width:([\d.]+)%", whole) == [f"{share:.1f}"]


def test_a_dot_is_placed_among_the_answers_of_its_own_row() -> None:
    whole = comparison_page(comparison(examples=examples(sigmas=(0.2, 0.25, 0.4))))
    pattern = r'gauge dot">.*?width:([\d.]+)%.*?value">([\d.]+)<'
    assert re.findall(pattern, whole) == [("0.0", "0.200"), ("25.0", "0.250"), ("100.0", "0.400")]
    assert re.findall(pattern, comparison_page(comparison(examples=examples(sigmas=(0.3,))))) == [("50.0", "0.300")]
    assert "rank 2,000" in whole
    assert "2 images without a label" in whole


@pytest.mark.parametrize(
    ("size", "expected"), [((400, 200), (100, 50)), ((30, 60), (50, 100)), ((64, 64), (100, 100)), ((900, 1), (100, 1))]
)
def test_photos_are_shown_whole(size: tuple[int, int], expected: tuple[int, int]) -> None:
    photo = Image.new("RGB", size, (255, 255, 255))
    photo.paste((200, 0, 0), (0, 0, max(1, size[0] // 10), size[1]))
    shown = Image.open(io.BytesIO(base64.b64decode(photo_uri(photo, side=100).partition(",")[2]))).convert("RGB")
    assert shown.size == expected
    red, green, _ = shown.getpixel((0, shown.height // 2))  # type: ignore[misc]
    assert (red > 150, green < 120) == (True, True)
