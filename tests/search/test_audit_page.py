"""`vacsr audit`: which data it reads, and what its lists and its page hold."""

import csv
import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
from PIL import Image

from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.errors import DataError
from vacsr.scoring import PairScorer
from vacsr.search.audit import AuditReport, audit
from vacsr.search.audit_page import write_audit
from vacsr.search.filter import write_pairs

Models = dict[str, Path]
Patch = pytest.MonkeyPatch
Command = Callable[..., Any]
CPU = ("--device", "cpu")


@pytest.fixture
def write(models: Models, features: str, tmp_path: Path) -> Callable[..., tuple[PairSet, AuditReport, str]]:
    """Audit features with some fields changed, write the files, and return the page."""

    def written(images: slice = slice(None), *, title: str = "x", **fields: Any) -> tuple[PairSet, AuditReport, str]:
        loaded = load_pairs(features, split="train")
        pairs = replace(loaded.subset(range(40)[images]), **fields)
        scorer = PairScorer.from_pretrained(models["features"], device="cpu")
        report = audit(scorer, pairs, top=3, min_grade=0.0)
        write_audit(tmp_path, report, pairs, title=title)
        return pairs, report, (tmp_path / "index.html").read_text(encoding="utf-8")  # type: ignore[return-value]

    return written


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def own_photos(folder: Path, *, split: str = "") -> str:
    """Four photos with a caption each; one file is no photo."""
    lines = ["image,caption" + (",split" if split else "")]
    for n in range(4):
        Image.new("RGB", (40, 40), (60 * n, 0, 0)).save(folder / f"{n}.png")
        lines.append(f"{n}.png,photo {n}" + (f",{split}" if split else ""))
    (folder / "2.png").write_bytes(b"no photo")
    (folder / "captions.csv").write_text("\n".join(lines), encoding="utf-8")
    return f"csv:{folder / 'captions.csv'}"


def test_the_command_writes_lists_and_a_page(vacsr: Command, models: Models, scenes: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "audit"
    answer = vacsr("audit", models["towers"], "--pairs", scenes, "--out", out, "--top", 4, "--min-grade", 0, *CPU)
    assert answer.code == 0, answer.err
    assert [line.split("\t")[0] for line in answer.out.splitlines()] == [
        "wrong",
        "missing",
        "duplicates",
        "rows",
        "page",
    ]
    assert "confidence" in answer.err
    pairs = load_pairs(scenes, split="train")
    for name in ("wrong", "missing"):
        rows = read_csv(out / f"{name}.csv")
        assert [row["rank"] for row in rows] == ["1", "2", "3", "4"]
        for row in rows:
            col = pairs.caption_ids.index(row["caption_id"])
            assert row["caption"] == pairs.captions[col]  # type: ignore[index]
            assert (pairs.image_ids[int(pairs.caption_image[col])] == row["image"]) == (name == "wrong")
            assert row["uncertainty"] == ""  # sigmoid has none
    every = read_csv(out / "rows.csv")
    assert [row["caption_id"] for row in every] == list(pairs.caption_ids)
    first = read_csv(out / "wrong.csv")[0]
    (same,) = (row for row in every if row["caption_id"] == first["caption_id"])
    assert (same["suggested_match"], same["suspicion"]) == (first["better_image"], first["suspicion"])
    assert {row["is_wrong"] for row in every} <= {"0", "1"}
    page = (out / "index.html").read_text(encoding="utf-8")
    assert page.count('class="suspect wrong"') == page.count('class="suspect missing"') == 4
    assert "data:image/" in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert sorted(path.name for path in out.iterdir()) == [
        "duplicates.csv", "index.html", "missing.csv", "rows.csv", "wrong.csv"
    ]  # fmt: skip


def test_embeddings_show_words_and_escape_them(write: Command, tmp_path: Path) -> None:
    pairs, report, page = write(captions=tuple(f"<b>caption {n}</b>" for n in range(120)), title="a & b")
    assert not re.search("<img|<b>caption", page)
    assert f"&lt;b&gt;caption {report.wrong[0].col}&lt;/b&gt;" in page
    assert "a &amp; b" in page
    labelled = re.findall(r"Labelled with this image, captioned “&lt;b&gt;caption (\d+)", page)
    assert len(labelled) == len(report.missing) == 3
    for match, col in zip(report.missing, labelled, strict=True):
        assert int(col) != match.col, "the other image is named by another caption"
        assert int(pairs.caption_image[int(col)]) == match.own_row
    first = read_csv(tmp_path / "wrong.csv")[0]
    known, better = report.wrong[0].known, report.wrong[0].better_image
    assert [first[name] for name in ("score", "grade", "uncertainty", "agreement")] == [f"{x:.4f}" for x in known]
    assert first["better_image"] == pairs.image_ids[report.wrong[0].better_row]
    assert (first["better_image_grade"], first["better_image_agreement"]) == (
        f"{better.grade:.4f}", f"{better.agreement:.4f}",
    )  # fmt: skip


def test_one_image_has_nothing_to_compare_with(write: Command, tmp_path: Path) -> None:
    _, _, page = write(slice(1))
    assert "None found." in page
    assert (read_csv(tmp_path / "missing.csv"), len(read_csv(tmp_path / "wrong.csv"))) == ([], 3)
    assert {row["better_image"] + row["better_caption"] for row in read_csv(tmp_path / "wrong.csv")} == {""}


@pytest.mark.parametrize("start", ["=HYPERLINK(0)", "\r", "\n"])
def test_ids_and_captions_are_no_formulas_and_end_no_line(start: str, write: Command, tmp_path: Path) -> None:
    images, ids = tuple(f"{start}{n}\rx" for n in range(40)), tuple(f"{start}c{n}\rx" for n in range(120))
    words = tuple(f"{start}1+1 \ud83d {n}" for n in range(120))  # half a character
    _, _, page = write(image_ids=images, caption_ids=ids, captions=words)
    shown = [
        {f"'{text}".replace("\r", " ").replace("\ud83d", "\\ud83d") for text in part} for part in (images, ids, words)
    ]
    columns = {
        "wrong": (("image", "better_image"), ("caption_id", "better_caption_id"), ("caption", "better_caption")),
        "missing": (("image", "labelled_image"), ("caption_id",), ("caption",)),
    }
    for name, kinds in columns.items():
        rows = read_csv(tmp_path / f"{name}.csv")
        assert len(rows) == 3
        for expected, keys in zip(shown, kinds, strict=True):
            assert {row[key] for row in rows for key in keys} <= expected
    assert r"\ud83d" in page


def test_an_unreadable_photo_is_left_out(models: Models, scenes: str, tmp_path: Path, monkeypatch: Patch) -> None:
    pairs = load_pairs(scenes, split="train")
    assert isinstance(pairs, PhotoSet)
    report = audit(PairScorer.from_pretrained(models["towers"], device="cpu"), pairs, top=4, min_grade=0.0)
    broken, plain = report.wrong[0].row, type(pairs.photos).open

    def opened(self: Any, row: int, *, side: int = 0) -> Any:
        if row == broken:
            raise DataError("it cannot be read")
        return plain(self, row, side=side)

    monkeypatch.setattr(type(pairs.photos), "open", opened)
    write_audit(tmp_path, report, pairs, title="photos")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert f'<p class="small">{pairs.image_ids[broken]}</p>' in page
    assert "data:image/" in page  # the others


def test_photos_come_from_a_folder(vacsr: Command, models: Models, features: str, tmp_path: Path) -> None:
    pairs = load_pairs(features, split="train")
    named = write_pairs(replace(pairs, image_ids=tuple(f"{n}.png" for n in range(40))), tmp_path / "named.safetensors")
    (tmp_path / "photos").mkdir()
    for n in range(1, 40):
        Image.new("RGB", (8, 8), "red").save(tmp_path / "photos" / f"{n}.png")
    ask = ("audit", models["features"], "--pairs", named, "--out", tmp_path / "o", "--top", 4, *CPU, "--photos")
    assert vacsr(*ask, tmp_path / "photos").code == 0
    assert "data:image/" in (tmp_path / "o" / "index.html").read_text(encoding="utf-8")


def test_a_grade_that_nothing_reaches(vacsr: Command, models: Models, features: str, tmp_path: Path) -> None:
    ask = ("audit", models["features"], "--pairs", features, "--out", tmp_path / "o", "--top", 3, *CPU)
    answer = vacsr(*ask, "--min-grade", 1)
    assert (answer.code, answer.out.splitlines()[1].split("\t")[1]) == (0, "0")
    assert "no missing match reaches grade 1; three of four labelled pairs reach" in answer.err
    assert "three of four" not in vacsr(*ask).err


def test_what_is_refused(vacsr: Command, models: Models, features: str, scenes: str, tmp_path: Path) -> None:
    ask = ("audit", models["features"], "--out", tmp_path / "o", *CPU, "--pairs")
    assert vacsr(*ask, features, "--photos", features).refused(2, "--photos", "embeddings")
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    assert vacsr(*ask, features, "--photos", tmp_path).refused(4, "--photos", "none of the data's images")
    assert vacsr(*ask, scenes).refused(4, "features")
    assert not (tmp_path / "o").exists()


def test_a_bad_file_stops_the_audit_or_is_left_out(vacsr: Command, models: Models, tmp_path: Path) -> None:
    spec, out = own_photos(tmp_path, split="train"), tmp_path / "audit"
    ask = ("audit", models["towers"], "--pairs", spec, "--out", out, "--min-grade", 0, *CPU)
    assert vacsr(*ask).refused(4, "2.png", "--skip")
    assert not out.exists()
    answer = vacsr(*ask, "--skip")
    assert answer.code == 0, answer.err
    assert "2.png" in answer.err
    rows = {row["image"]: row for row in read_csv(out / "wrong.csv")}
    assert {image: row["line"] for image, row in rows.items()} == {"0.png": "2", "1.png": "3", "3.png": "5"}
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "captions.csv, train" in page
    exported = [json.loads(html.unescape(cells)) for cells in re.findall('data-cells="(.*?)"', page)]
    assert [cells[1:] for cells in exported if cells[0] == "wrong"] == [
        [row[name] for name in ("image", "caption_id", "caption", "line")] for row in rows.values()
    ]


@pytest.mark.parametrize(("more", "captions"), [("", 120), (",split=dev", 30), ("--split all", 180)])
def test_the_split(vacsr: Command, models: Models, features: str, tmp_path: Path, more: str, captions: int) -> None:
    spec, options = (features, more.split()) if more.startswith("--") else (features + more, [])
    answer = vacsr("audit", models["features"], "--out", tmp_path / "audit", *CPU, "--pairs", spec, *options)
    assert answer.out.splitlines()[-1].split("\t")[1] == str(captions)


def test_near_duplicates_and_a_parquet_table(vacsr: Command, models: Models, tmp_path: Path) -> None:
    spec, out = own_photos(tmp_path, split="train"), tmp_path / "audit"
    for name in ("1.png", "2.png"):
        Image.new("RGB", (40, 40), (60, 0, 0)).save(tmp_path / name)
    ask = ("audit", models["towers"], "--pairs", spec, "--out", out, *CPU)
    answer = vacsr(*ask, "--format", "parquet", "--top", 1)
    assert answer.code == 0, answer.err
    (pair,) = read_csv(out / "duplicates.csv")
    assert tuple(pair.values()) == ("1.png", "2.png", "1.0000", "1")
    assert "Photos whose vectors have a cosine" in (out / "index.html").read_text(encoding="utf-8")
    table = pandas.read_parquet(out / "rows.parquet")
    assert table["image"].tolist() == [f"{n}.png" for n in range(4)]
    assert table["is_wrong"].dtype == bool
    assert not (out / "rows.csv").exists()
