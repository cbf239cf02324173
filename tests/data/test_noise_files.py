from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vacsr.data.noise import CaptionNoise, apply_noise, load_noise
from vacsr.data.noise_files import _slots_of_images
from vacsr.data.pairs import PairSet
from vacsr.errors import DataError, ShapeMismatch, UsageError, VacsrError

FIVE_EACH = torch.arange(20) // 5


def saved(path: Path, values: Any) -> Path:
    if path.suffix == ".npy":
        np.save(path, np.asarray(values))
    else:
        path.write_text(json.dumps(values) if path.suffix == ".json" else "\n".join(map(str, values)))
    return path


def published_like_ncr(ratio: float, seed: int) -> np.ndarray[Any, Any]:
    """The image of each caption, some shuffled among themselves: what those who publish such files do."""
    random = np.random.default_rng(seed)
    index = np.arange(20) // 5
    chosen = random.permutation(20)[: int(ratio * 20)]
    index[chosen] = random.permutation(index[chosen])
    return index


@pytest.mark.parametrize("suffix", [".npy", ".json", ".txt"])
def test_a_list_of_images(tmp_path: Path, suffix: str) -> None:
    """Entry j is the image of caption j, as NCR pairs them."""
    index = published_like_ncr(0.5, seed=1)
    noise = load_noise(saved(tmp_path / f"index{suffix}", index.tolist()), caption_image=FIVE_EACH)
    assert noise.assignment.tolist() == index.tolist()
    assert noise.original.equal(FIVE_EACH)
    assert (noise.protocol, noise.seed) == ("file", None)
    assert noise.ratio == noise.changed_share == pytest.approx((index != np.arange(20) // 5).mean())


def test_a_list_of_slots(tmp_path: Path) -> None:
    """Where each image has one caption, the same kind of file is a permutation."""
    slots = [1, 2, 0, 3]
    noise = load_noise(saved(tmp_path / "index.npy", slots), caption_image=torch.arange(4))
    assert noise.permutation.tolist() == noise.assignment.tolist() == slots
    moved = load_noise(saved(tmp_path / "index.npy", [5, *range(1, 5), 0]), caption_image=torch.arange(6) // 2)
    assert moved.assignment.tolist() == [2, 0, 1, 1, 2, 0]
    assert moved.changed_share == pytest.approx(2 / 6)


def test_it_is_applied_saved_and_read_again(tmp_path: Path, parts: dict[str, Any]) -> None:
    pairs = PairSet(**parts)  # captions of images 0, 1, 0
    noise = load_noise(saved(tmp_path / "index.json", [1, 0, 0]), caption_image=pairs.caption_image)
    assert apply_noise(pairs, noise).caption_image.tolist() == [1, 0, 0]
    noise.save(tmp_path / "noise.safetensors")
    again = load_noise(tmp_path / "noise.safetensors")
    assert (again.protocol, again.seed, again.ratio, again.sha256) == ("file", None, noise.ratio, noise.sha256)


@given(st.lists(st.integers(0, 4), max_size=30), st.randoms())
def test_slots_for_any_list_of_images(images: list[int], random: Any) -> None:
    shuffled = images.copy()
    random.shuffle(shuffled)
    before, after = torch.tensor(images, dtype=torch.int64), torch.tensor(shuffled, dtype=torch.int64)
    slots = _slots_of_images(after, before)
    assert sorted(slots.tolist()) == list(range(len(images)))
    assert before[slots].equal(after)
    at_home = [row for row, (old, new) in enumerate(zip(images, shuffled, strict=True)) if old == new]
    assert all(int(slots[row]) == row for row in at_home)
    noise = CaptionNoise(before[slots], slots, ratio=1.0, seed=None)
    assert noise.original.equal(before)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (list(range(19)), ShapeMismatch, ("19 captions", "20")),
        (list(range(21)), ShapeMismatch, ("21 captions", "20")),
        ([0] * 20, DataError, ("neither", "too often")),
        ([*range(19), 20], DataError, ("neither", "20 is out of range")),
        ([-1, *range(1, 20)], DataError, ("neither", "-1 is out of range")),
        ([0.5] * 20, DataError, ("float64", "whole numbers")),
        ([[0, 1]] * 10, DataError, ("[10, 2]",)),
        ([True] * 20, DataError, ("bool",)),
        (["a"] * 20, DataError, ("whole numbers",)),
    ],
)
@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_lists_that_are_refused(
    tmp_path: Path, suffix: str, values: list[Any], error: type[VacsrError], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        load_noise(saved(tmp_path / f"index{suffix}", values), caption_image=FIVE_EACH)
    assert all(word in str(caught.value) for word in (f"index{suffix}", *words, " — ")), str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"), [("i.npy", b"junk"), ("i.json", b"{"), ("i.json", b'{"a": 1}'), ("i.txt", b"1 2 x")]
)
def test_files_that_are_no_list(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        load_noise(tmp_path / name, caption_image=FIVE_EACH)


def test_nothing_pickled_is_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "i.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"i\.npy"):
        load_noise(tmp_path / "i.npy", caption_image=FIVE_EACH)


def test_what_else_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "i.npy", [1, 0])
    with pytest.raises(UsageError, match="caption_image="):
        load_noise(path)
    with pytest.raises(DataError, match="no such noise file"):
        load_noise(tmp_path / "absent.npy", caption_image=FIVE_EACH)
    with pytest.raises(DataError, match=r"not a noise file.*\.npy"):
        load_noise(tmp_path / "i.csv", caption_image=FIVE_EACH)
    with pytest.raises(DataError, match="slots or images"):
        load_noise(path, caption_image=torch.tensor([1, 0]))
