"""The audit: agreement against slow loops, noise found, lists and files that hold what they promise."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from vacsr import BackboneConfig, HeadConfig, TrainConfig, fit
from vacsr.data import load_pairs
from vacsr.data.noise import apply_noise, derange_captions
from vacsr.errors import UsageError
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.search import suspects
from vacsr.search.audit import audit, signals, usual_grade
from vacsr.search.audit_files import write_audit
from vacsr.search.audit_page import Pictures
from vacsr.search.suspects import caption_sums, find_neighbours, own_agreement, prototypes, suspicion, weights

SPEC = "synthetic:images=40,held_out=10,per_image=3"
PHOTOS = "scenes:images=6,held_out=2,per_image=2,size=32"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    plain = TrainConfig(epochs=12, batch_size=16, lr=0.003, device="cpu")
    small, tiny = BackboneConfig(head=HeadConfig(dim=16)), "tiny:width=16,depth=1,text_depth=1,heads=2,size=32"
    quick = TrainConfig(epochs=1, batch_size=2, device="cpu")
    kinds = {
        "vacsr": fit("vacsr", load_pairs(SPEC, split="train"), plain, backbone=small),
        "photos": fit(
            "sigmoid",
            load_pairs(PHOTOS, split="train"),
            quick,
            backbone=BackboneConfig(spec=tiny, head=HeadConfig(dim=8)),
        ),
    }
    for name, run in kinds.items():
        run.model.save_pretrained(root / name)
    return {name: root / name for name in kinds}


def vectors(images: int, captions: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    v, t = (normalize(torch.randn(n, 6, generator=generator), dim=1) for n in (images, captions))
    owner = torch.randint(images, (captions,), generator=generator)
    return v, t, owner, torch.rand(captions, generator=generator)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 1000))
def test_own_agreement_leaves_the_caption_out(images: int, captions: int, seed: int) -> None:
    v, t, owner, weight = vectors(images, captions, seed)
    found = own_agreement(v, t, owner, weight=weight, sums=caption_sums(t, owner, weight, images=images))
    for col in range(captions):
        rest = v[owner[col]].double().numpy().copy()
        for other in range(captions):
            if other != col and owner[other] == owner[col]:
                rest += float(weight[other]) * t[other].double().numpy()
        expected = rest @ t[col].double().numpy() / np.linalg.norm(rest)
        assert float(found[col]) == pytest.approx(expected, abs=2e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 1000), st.sampled_from([1, 30, 1 << 20]))
def test_neighbours_are_those_of_the_whole_matrix(images: int, captions: int, seed: int, room: int) -> None:
    v, t, owner, weight = vectors(images, captions, seed)
    p = prototypes(v, caption_sums(t, owner, weight, images=images))
    before, suspects._ELEMENTS = suspects._ELEMENTS, room
    try:
        found = find_neighbours(p, t, owner, captions=2)
    finally:
        suspects._ELEMENTS = before
    matrix = (p @ t.T).double()
    matrix[owner, torch.arange(captions)] = -math.inf
    for col in range(captions):
        best = float(matrix[:, col].max())
        assert float(found.image_agreement[col]) == pytest.approx(best, abs=1e-6)
        assert int(found.image[col]) == (-1 if best == -math.inf else int(matrix[:, col].argmax()))
    for row in range(images):
        expected = sorted(matrix[row].tolist(), reverse=True)[:2]
        assert found.caption_agreement[row].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_caption_that_fits_elsewhere_is_more_suspect() -> None:
    own = torch.tensor([0.5, 0.5, 0.2])
    assert suspicion(own, torch.tensor([0.9, 0.1, 0.1])).argsort(descending=True).tolist() == [0, 2, 1]


def test_weights_and_the_usual_grade_do_not_know_the_scale() -> None:
    grade = torch.rand(40, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(weights(grade), weights(grade / 50))
    assert weights(torch.zeros(3)).tolist() == [0, 0, 0]
    assert float((grade >= usual_grade(grade)).float().mean()) == 0.75


def test_moved_captions_are_found(models: dict[str, Path]) -> None:
    clean = load_pairs(SPEC, split="train")
    noise = derange_captions(clean.caption_image, ratio=0.1, seed=0)
    moved = set((noise.assignment != noise.original).nonzero().flatten().tolist())
    report = audit(MatchingModel.from_pretrained(models["vacsr"]), apply_noise(clean, noise), top=len(moved))
    assert len(moved & {pair.col for pair in report.wrong}) >= 0.7 * len(moved)
    values = [pair.suspicion for pair in report.wrong]
    assert values == sorted(values, reverse=True)


def test_what_is_said_of_a_pair_is_what_the_model_says(models: dict[str, Path]) -> None:
    pairs = load_pairs(SPEC, split="train")
    scorer = PairScorer.from_pretrained(models["vacsr"], device="cpu")
    scores, seen = scorer.score_set(pairs), []
    report = audit(scorer, pairs, top=7, min_grade=0.0, progress=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (len(pairs.image_ids),) * 2
    for pair in report.wrong:
        assert pair.row == int(pairs.caption_image[pair.col])
        assert pair.known.score == pytest.approx(float(scores.score[pair.row, pair.col]), abs=1e-4)
        assert pair.better_row not in (None, pair.row)
        assert pair.better_col is not None
        assert int(pairs.caption_image[pair.better_col]) != pair.row
    every = signals(scores, pairs.caption_image)
    for match in report.missing:
        assert match.row != match.own_row == int(pairs.caption_image[match.col])
        sigma = scores.uncertainty(torch.tensor([match.row]), torch.tensor([match.col]))
        assert match.known.uncertainty == pytest.approx(float(sigma), abs=1e-5)
        assert match.own.agreement == pytest.approx(float(every.own[match.col]), abs=1e-6)
    assert [m.known.agreement for m in report.missing] == pytest.approx(
        every.near_agreement.flatten().sort(descending=True).values[:7].tolist()
    )


def test_a_least_grade_is_kept(models: dict[str, Path]) -> None:
    scorer = PairScorer.from_pretrained(models["vacsr"], device="cpu")
    pairs = load_pairs(SPEC, split="train")
    all_of_them = audit(scorer, pairs, top=100, min_grade=0.0).missing
    middle = sorted(match.known.grade for match in all_of_them)[50]
    kept = audit(scorer, pairs, top=100, min_grade=middle).missing
    assert kept
    assert all(match.known.grade >= middle for match in kept)
    assert audit(scorer, pairs, top=5, min_grade=1.0).missing == ()
    with pytest.raises(UsageError, match="top=0"):
        audit(scorer, pairs, top=0)
    with pytest.raises(UsageError, match="min_grade=2"):
        audit(scorer, pairs, min_grade=2)


def test_one_image_has_no_other(models: dict[str, Path], tmp_path: Path) -> None:
    pairs = load_pairs(SPEC, split="train").subset([3])
    report = audit(PairScorer.from_pretrained(models["vacsr"], device="cpu"), pairs, min_grade=0.0)
    assert len(report.wrong) == 3
    assert all(pair.better_row is pair.better_image is pair.better_col is None for pair in report.wrong)
    assert report.missing == ()
    write_audit(tmp_path, report, pairs, title="one")
    assert "None found." in (tmp_path / "index.html").read_text(encoding="utf-8")


Command = Callable[..., Any]


def test_the_command_writes_lists_and_a_page(vacsr: Command, models: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "new" / "audit"
    answer = vacsr("audit", models["photos"], "--pairs", PHOTOS, "--out", out, "--top", 4, "--min-grade", 0,
                   "--device", "cpu")  # fmt: skip
    assert answer.code == 0, answer.err
    assert [line.split("\t")[0] for line in answer.out.splitlines()] == ["wrong", "missing", "page"]
    pairs = load_pairs(PHOTOS, split="train")
    for name in ("wrong", "missing"):
        with (out / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["rank"] for row in rows] == ["1", "2", "3", "4"]
        for row in rows:
            col = pairs.caption_ids.index(row["caption_id"])
            assert row["caption"] == pairs.captions[col]
            labelled = pairs.image_ids[int(pairs.caption_image[col])] == row["image"]
            assert labelled == (name == "wrong")
            assert row["uncertainty"] == ""  # sigmoid has none
    page = (out / "index.html").read_text(encoding="utf-8")
    assert page.count('class="suspect wrong"') == page.count('class="suspect missing"') == 4
    assert "data:image/" in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "missing.csv", "wrong.csv"]


def test_embeddings_show_words_and_escape_them(models: dict[str, Path], tmp_path: Path) -> None:
    from dataclasses import replace

    pairs = load_pairs(SPEC, split="train")
    pairs = replace(pairs, captions=tuple(f"<b>caption {n}</b>" for n in range(len(pairs))))
    report = audit(PairScorer.from_pretrained(models["vacsr"], device="cpu"), pairs, top=3)
    write_audit(tmp_path, report, pairs, title="a & b")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "<img" not in page
    assert "<b>caption" not in page
    assert f"&lt;b&gt;caption {report.wrong[0].col}&lt;/b&gt;" in page
    assert "a &amp; b" in page


def test_one_unreadable_photo_does_not_cost_the_page(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vacsr.data.photos import ArrayPhotos
    from vacsr.errors import DataError

    pairs = load_pairs(PHOTOS, split="train")
    report = audit(PairScorer.from_pretrained(models["photos"], device="cpu"), pairs, top=4, min_grade=0.0)
    broken, inner = report.wrong[0].row, type(pairs.photos).open

    def opened(self: ArrayPhotos, row: int, *, side: int = 0) -> Any:
        if row == broken:
            raise DataError("it cannot be read")
        return inner(self, row, side=side)

    monkeypatch.setattr(type(pairs.photos), "open", opened)
    write_audit(tmp_path, report, pairs, title="photos")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert f'<p class="small">{pairs.image_ids[broken]}</p>' in page
    assert "data:image/" in page  # the others


def test_photos_of_embeddings_lie_in_a_folder(vacsr: Command, models: dict[str, Path], tmp_path: Path) -> None:
    from PIL import Image

    pairs = load_pairs(SPEC, split="train")
    for row, name in enumerate(pairs.image_ids):  # by path and by name, one without a photo
        place = tmp_path / "photos" / ("" if row % 2 else "deep") / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if row:
            Image.new("RGB", (8, 8), (row, 0, 0)).save(place, "png")
    named = [f"deep/{name}" if row % 2 == 0 else name for row, name in enumerate(pairs.image_ids)]
    found = Pictures.lying_in(tmp_path / "photos", named)
    assert list(found.row) == named[1:]
    for name, row in found.row.items():
        assert found.photos.open(row).convert("RGB").getpixel((0, 0)) == (named.index(name), 0, 0)
    answer = vacsr("audit", models["vacsr"], "--pairs", SPEC, "--photos", tmp_path / "photos", "--out", tmp_path / "o",
                   "--top", 4, "--device", "cpu")  # fmt: skip
    assert answer.code == 0, answer.err
    assert "data:image/" in (tmp_path / "o" / "index.html").read_text(encoding="utf-8")


def test_a_photo_is_found_inside_the_folder_only(tmp_path: Path) -> None:
    for place in ("a.png", "in/a.png", "in/sub/b.png", "in/b.png"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_bytes(b"")
    ids = ["../a.png", str(tmp_path / "c.png"), "other/b.png", "sub/b.png", "x" * 5000, ""]
    found = Pictures.lying_in(tmp_path / "in", ids)
    paths = {name: found.photos.name(row) for name, row in found.row.items()}
    inside = tmp_path / "in"
    expected = {"../a.png": inside / "a.png", "other/b.png": inside / "b.png", "sub/b.png": inside / "sub/b.png"}
    assert paths == {name: str(path) for name, path in expected.items()}


def test_a_grade_that_nothing_reaches_is_told(vacsr: Command, models: dict[str, Path], tmp_path: Path) -> None:
    ask = ("audit", models["vacsr"], "--pairs", SPEC, "--out", tmp_path / "o", "--top", 3, "--device", "cpu")
    answer = vacsr(*ask, "--min-grade", 1)
    assert answer.code == 0
    assert answer.out.splitlines()[1].startswith("missing\t0\t")
    assert "no missing match is graded 1; three of four labelled pairs reach" in answer.err
    assert "three of four" not in vacsr(*ask).err


def test_the_other_image_is_told_by_another_caption(models: dict[str, Path], tmp_path: Path) -> None:
    from dataclasses import replace

    pairs = load_pairs(SPEC, split="train")
    pairs = replace(pairs, captions=tuple(f"words {n}" for n in range(len(pairs))))
    report = audit(PairScorer.from_pretrained(models["vacsr"], device="cpu"), pairs, top=3, min_grade=0.0)
    write_audit(tmp_path, report, pairs, title="x")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    told = re.findall(r"Labelled with this image, captioned “words (\d+)”", page)
    assert len(told) == len(report.missing) == 3
    for match, said in zip(report.missing, told, strict=True):
        assert int(said) != match.col
        assert int(pairs.caption_image[int(said)]) == match.own_row


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_captions_are_no_formulas_and_may_hold_half_characters(
    start: str, models: dict[str, Path], tmp_path: Path
) -> None:
    from dataclasses import replace

    pairs = load_pairs(SPEC, split="train")
    pairs = replace(pairs, captions=tuple(f"{start}1+1 \ud83d {n}" for n in range(len(pairs))))
    report = audit(PairScorer.from_pretrained(models["vacsr"], device="cpu"), pairs, top=3, min_grade=0.0)
    write_audit(tmp_path, report, pairs, title="odd")
    for name in ("wrong", "missing"):
        with (tmp_path / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        col = pairs.caption_ids.index(rows[0]["caption_id"])
        assert rows[0]["caption"] == f"'{start}1+1 \\ud83d {col}".replace("\r", " ")
    assert r"\ud83d" in (tmp_path / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("start", ["=HYPERLINK(0)", "+", "-", "@", "\t", "\r"])
def test_ids_are_no_formulas_and_end_no_line(start: str, models: dict[str, Path], tmp_path: Path) -> None:
    from dataclasses import replace

    pairs = load_pairs(SPEC, split="train")
    images = tuple(f"{start}{n}\rx" for n in range(len(pairs.image_ids)))
    captions = tuple(f"{start}c{n}\rx" for n in range(len(pairs)))
    pairs = replace(pairs, image_ids=images, caption_ids=captions)
    report = audit(PairScorer.from_pretrained(models["vacsr"], device="cpu"), pairs, top=3, min_grade=0.0)
    write_audit(tmp_path, report, pairs, title="odd")
    shown = {f"'{name}".replace("\r", " ") for name in images}, {f"'{name}".replace("\r", " ") for name in captions}
    columns = {"wrong": (("image", "better_image"), ("caption_id", "better_caption_id"))}
    columns["missing"] = (("image", "labelled_image"), ("caption_id",))
    for name, kinds in columns.items():
        with (tmp_path / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 3
        for row in rows:
            for expected, keys in zip(shown, kinds, strict=True):
                assert {row[key] for key in keys} <= expected


def test_refusals(vacsr: Command, models: dict[str, Path], tmp_path: Path) -> None:
    ask = ("audit", models["vacsr"], "--out", tmp_path / "o", "--device", "cpu")
    assert vacsr(*ask, "--pairs", SPEC, "--photos", SPEC).refused(2, "--photos", "are embeddings")
    assert vacsr(*ask, "--pairs", SPEC, "--photos", tmp_path).refused(4, "--photos", "none of the data's images")
    assert vacsr(*ask, "--pairs", PHOTOS).refused(4, "features")
    assert not (tmp_path / "o").exists()
