"""`vacsr filter`: which captions stay, and that the cleaned data can be read again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.data import load_pairs
from vacsr.errors import DataError, UsageError
from vacsr.search.audit import AuditRows
from vacsr.search.filter import choose_captions

from .test_audit_page import CPU, Command, Models, own_photos


def rows(chances: list[float]) -> AuditRows:
    """The more probably wrong, the more suspected."""
    chance, none = torch.tensor(chances), torch.zeros(len(chances), dtype=torch.int64)
    return AuditRows(none, chance, chance, chance, chance > 0.5, none, none)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"keep": 0.5}, [1, 3]),
        ({"keep": 1.0}, [0, 1, 2, 3]),
        ({"max_wrong": 0.06}, [1, 3]),  # 0.0 and 0.1
        ({"max_wrong": 0.31}, [1, 2, 3]),
        ({"max_wrong": 1.0}, [0, 1, 2, 3]),
    ],
)
def test_the_least_suspected_stay(limits: dict[str, float], kept: list[int]) -> None:
    assert choose_captions(rows([0.9, 0.1, 0.8, 0.0]), **limits).tolist() == kept


def test_a_share_that_is_just_reached_is_allowed() -> None:
    assert choose_captions(rows([0.5, 0.0]), max_wrong=0.25).tolist() == [0, 1]


@pytest.mark.parametrize("limits", [{}, {"keep": 0.5, "max_wrong": 0.1}, {"keep": 0.0}, {"max_wrong": 1.5}])
def test_limits_that_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="--keep"):
        choose_captions(rows([0.5]), **limits)


def test_nothing_is_left_or_known() -> None:
    with pytest.raises(DataError, match="no caption is left"):
        choose_captions(rows([0.9, 0.8]), max_wrong=0.1)
    with pytest.raises(DataError, match="keep"):
        choose_captions(rows([float("nan")]), max_wrong=0.1)


def test_embeddings_are_read_again(vacsr: Command, models: Models, features: str, tmp_path: Path) -> None:
    out = tmp_path / "cleaned.safetensors"
    answer = vacsr("filter", models["features"], "--pairs", features, "--keep", 0.25, "--out", out, *CPU)
    assert answer.code == 0, answer.err
    name, count, spec = answer.out.strip().split("\t")
    assert (name, count) == ("kept", "30")
    before, after = load_pairs(features, split="train"), load_pairs(spec, split="train")
    cols = [before.caption_ids.index(one) for one in after.caption_ids]
    assert cols == sorted(cols)
    assert after.texts.equal(before.texts[cols])  # type: ignore[union-attr]
    assert after.images[after.caption_image].equal(before.images[before.caption_image[cols]])  # type: ignore[union-attr]
    assert after.captions == (before.captions and tuple(before.captions[col] for col in cols))
    assert after.provenance == before.provenance


@pytest.mark.parametrize("target", ["clean/data.csv", "clean/data.parquet", "shards"])
def test_photos_are_read_again(target: str, vacsr: Command, models: Models, tmp_path: Path) -> None:
    spec = own_photos(tmp_path, split="train")
    shutil.copy(tmp_path / "1.png", tmp_path / "2.png")
    answer = vacsr("filter", models["towers"], "--pairs", spec, "--keep", "0.5", "--out", tmp_path / target, *CPU)
    assert answer.code == 0, answer.err
    before, after = load_pairs(spec), load_pairs(answer.out.strip().split("\t")[2])
    assert len(after) == len(after.image_ids) == 2
    for name, caption, photo in zip(after.image_ids, after.captions, range(2), strict=True):  # type: ignore[arg-type]
        row = before.image_ids.index(name)
        assert caption == before.captions[row]  # type: ignore[index]
        assert colour(after, photo) == colour(before, row)


def colour(pairs: Any, row: int) -> Any:
    return pairs.photos.open(row).convert("RGB").getpixel((0, 0))


def test_max_wrong_takes_percent(vacsr: Command, models: Models, features: str, tmp_path: Path) -> None:
    ask = ("filter", models["features"], "--pairs", features, *CPU, "--out")
    out = tmp_path / "o.safetensors"
    assert vacsr(*ask, out, "--max-wrong", "100%").out.split("\t")[1] == "120"
    assert vacsr(*ask, out, "--max-wrong", "few").refused(2, "5%")
    assert vacsr(*ask, out).refused(2, "--max-wrong")
    assert vacsr(*ask, tmp_path / "o.csv", "--keep", 0.5).refused(2, "safetensors")


def test_photos_of_an_archive_go_to_shards(vacsr: Command, models: Models, scenes: str, tmp_path: Path) -> None:
    ask = ("filter", models["towers"], "--pairs", scenes, "--keep", "50%", *CPU, "--out")
    assert vacsr(*ask, tmp_path / "o.csv").refused(2, "folder")
    assert vacsr(*ask, tmp_path / "o").code == 0
