"""What `vacsr audit` looks through: a split or everything, and what becomes of files that cannot be read."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vacsr import BackboneConfig, HeadConfig, TrainConfig, fit
from vacsr.data import load_pairs
from vacsr.errors import UsageError
from vacsr.scoring import PairScorer

Command = Callable[..., Any]
SPEC = "synthetic:images=40,held_out=10,per_image=3"
PHOTOS = "scenes:images=6,held_out=2,per_image=2,size=32"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, plan = tmp_path_factory.mktemp("models"), TrainConfig(epochs=1, batch_size=4, device="cpu")
    tiny = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(dim=8))
    fit("sigmoid", load_pairs(PHOTOS, split="train"), plan, backbone=tiny).model.save_pretrained(root / "photos")
    small = BackboneConfig(head=HeadConfig(dim=8))
    fit("vacsr", load_pairs(SPEC, split="train"), plan, backbone=small).model.save_pretrained(root / "vacsr")
    return {name: root / name for name in ("photos", "vacsr")}


def own_photos(folder: Path, *, split: str = "") -> str:
    """Four photos with a caption each; one file is no photo."""
    from PIL import Image

    lines = ["image,caption" + (",split" if split else "")]
    for n in range(4):
        Image.new("RGB", (40, 40), (60 * n, 0, 0)).save(folder / f"{n}.png")
        lines.append(f"{n}.png,photo {n}" + (f",{split}" if split else ""))
    (folder / "2.png").write_bytes(b"no photo")
    (folder / "captions.csv").write_text("\n".join(lines), encoding="utf-8")
    return f"csv:{folder / 'captions.csv'}"


def test_a_bad_file_stops_the_audit_or_is_left_out(vacsr: Command, models: dict[str, Path], tmp_path: Path) -> None:
    spec, out = own_photos(tmp_path, split="train"), tmp_path / "audit"
    ask = ("audit", models["photos"], "--pairs", spec, "--out", out, "--min-grade", 0, "--device", "cpu")
    assert vacsr(*ask).refused(4, "2.png", "--skip")
    assert not out.exists()
    answer = vacsr(*ask, "--skip")
    assert answer.code == 0, answer.err
    assert "2.png" in answer.err
    with (out / "wrong.csv").open(encoding="utf-8", newline="") as file:
        assert {row["image"] for row in csv.DictReader(file)} == {"0.png", "1.png", "3.png"}


def test_photos_that_are_not_there_stop_the_page_or_are_left_out(
    vacsr: Command, models: dict[str, Path], tmp_path: Path
) -> None:
    spec, out = own_photos(tmp_path), tmp_path / "audit"
    (tmp_path / "1.png").unlink()
    table = tmp_path / "captions.csv"
    names = load_pairs(SPEC, split="train").image_ids[:4]
    table.write_text("\n".join(["image,image_id,caption", *(f"{n}.png,{name},x" for n, name in enumerate(names))]))
    ask = ("audit", models["vacsr"], "--pairs", SPEC, "--photos", spec, "--out", out, "--device", "cpu")
    assert vacsr(*ask).refused(4, "1.png", "--skip")
    answer = vacsr(*ask, "--skip")
    assert answer.code == 0, answer.err
    assert "1.png" in answer.err


def test_data_without_splits_are_looked_through_whole(vacsr: Command, models: dict[str, Path], tmp_path: Path) -> None:
    spec, out = own_photos(tmp_path), tmp_path / "audit"
    ask = ("audit", models["photos"], "--pairs", spec, "--out", out, "--min-grade", 0, "--device", "cpu", "--skip")
    answer = vacsr(*ask)
    assert answer.code == 0, answer.err
    assert "no split 'train': looking through all 3 images" in answer.err
    assert answer.out.splitlines()[0].split("\t")[1] == "3"
    assert "captions.csv, all" in (out / "index.html").read_text(encoding="utf-8")
    refused = vacsr(*ask, "--split", "train")
    assert refused.refused(4, "has no splits", "--split all")
    assert "data.train" not in refused.err


def test_the_split_is_that_of_the_spec_or_train(vacsr: Command, models: dict[str, Path], tmp_path: Path) -> None:
    ask = ("audit", models["vacsr"], "--out", tmp_path / "audit", "--device", "cpu")
    assert vacsr(*ask, "--pairs", SPEC).out.splitlines()[2].split("\t")[1] == "120"
    assert vacsr(*ask, "--pairs", f"{SPEC},split=dev").out.splitlines()[2].split("\t")[1] == "30"
    assert vacsr(*ask, "--pairs", SPEC, "--split", "all").out.splitlines()[2].split("\t")[1] == "180"
    assert vacsr(*ask, "--pairs", SPEC, "--split", "val").refused(4, "val", "--split all")


def test_calibrate_leaves_bad_files_out_too(
    vacsr: Command, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vacsr.search import calibrate

    spec, seen = own_photos(tmp_path, split="dev"), []

    def fit_to(_scorer: PairScorer, data: Any, *_rest: object, **_more: object) -> None:
        seen.append(data.image_ids)
        raise UsageError("enough — it was read")

    monkeypatch.setattr(calibrate, "calibrate", fit_to)
    ask = ("calibrate", models["photos"], "--pairs", spec, "--device", "cpu")
    assert vacsr(*ask, "--skip").refused(2, "enough", "2.png")
    assert seen == [("0.png", "1.png", "3.png")]
