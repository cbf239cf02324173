"""Label noise: drawn by seed, saved and hashed, and read from files that others published."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vacsr.data import load_pairs
from vacsr.data.noise import (
    CaptionNoise,
    apply_noise,
    derange_captions,
    load_noise,
    make_noise,
    permute_captions,
    swap_captions,
)
from vacsr.data.nouns import find_nouns, photo_nouns
from vacsr.data.pairs import PairSet
from vacsr.errors import DataError, ShapeMismatch, UsageError, VacsrError
from vacsr.files import read_tensors, write_tensors

SHARED = Path(__file__).resolve().parents[3] / "shared"
ASSIGNMENTS = st.lists(st.integers(0, 20), max_size=60).map(lambda rows: torch.tensor(rows, dtype=torch.int64))
RATIOS = st.floats(0, 1)
SEEDS = st.integers(0, 2**32)


@given(ASSIGNMENTS, RATIOS, SEEDS)
def test_captions_move_among_their_slots(rows: torch.Tensor, ratio: float, seed: int) -> None:
    noise = permute_captions(rows, ratio=ratio, seed=seed)
    slots = noise.permutation.tolist()
    assert sorted(slots) == list(range(len(rows)))
    assert noise.assignment.tolist() == [rows[slot] for slot in slots]
    assert noise.assignment.sort().values.equal(rows.sort().values)
    assert noise.original.equal(rows)
    assert sum(slot != caption for caption, slot in enumerate(slots)) <= int(ratio * len(rows))
    changed = sum(int(new) != int(old) for new, old in zip(noise.assignment, rows, strict=True))
    assert noise.changed_share == pytest.approx(changed / max(1, len(rows)))


@pytest.mark.parametrize(
    ("protocol", "marks"),
    [
        ("permute-captions", ["fcf2f18d93180d3a", "fbb9819a12881b48"]),
        ("derange-captions", ["3661d69632db20e2", "2c88279713cb2668"]),
        ("swap-shared-noun", ["460703bb26f91088", "91979bb7e3767a1d"]),
    ],
)
def test_noise_stays_what_it_was(protocol: str, marks: list[str], tmp_path: Path) -> None:
    """Noise of earlier runs is drawn again by its seed alone, and saved with a hash of little-endian int64."""
    before, rows = torch.get_rng_state(), torch.arange(1000) // 5
    texts = [f"a noun{row // 5 % 7} in the noun{row // 5 % 11}" for row in range(1000)]
    for ratio, mark in zip((0.2, 1.0), marks, strict=True):
        noise = make_noise(protocol, rows, ratio=ratio, seed=0, captions=texts)
        assert noise.sha256.startswith(mark)
        assert noise.sha256 == hashlib.sha256(struct.pack("<1000q", *noise.permutation.tolist())).hexdigest()
        noise.save(tmp_path / "n.safetensors")
        again = load_noise(tmp_path / "n.safetensors", caption_image=rows)
        assert again.permutation.equal(noise.permutation)
        assert again.assignment.equal(noise.assignment)
        assert (again.ratio, again.seed, again.protocol) == (ratio, 0, protocol)
    assert make_noise(protocol, rows, ratio=0.2, seed=1, captions=texts).sha256[:16] not in marks
    assert torch.get_rng_state().equal(before)
    with pytest.raises(UsageError, match=f"'swap'.*{protocol}"):
        make_noise("swap", rows, ratio=0.5, seed=0)
    for ratio in (-0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match=f"{ratio}.* — "):
            make_noise(protocol, rows, ratio=ratio, seed=0, captions=texts)


@given(ASSIGNMENTS, RATIOS, SEEDS)
def test_deranged_captions_all_change_their_image(rows: torch.Tensor, ratio: float, seed: int) -> None:
    wanted = int(ratio * len(rows))
    usable = sum(min(int(count), wanted // 2) for count in rows.bincount())  # of no image more than half
    if usable < wanted:
        with pytest.raises(DataError, match="too few images"):
            derange_captions(rows, ratio=ratio, seed=seed)
        return
    noise = derange_captions(rows, ratio=ratio, seed=seed)
    assert sorted(noise.permutation.tolist()) == list(range(len(rows)))
    assert noise.assignment.equal(rows[noise.permutation])
    assert noise.original.equal(rows)
    changed = (noise.permutation != torch.arange(len(rows))).nonzero().flatten()
    assert len(changed) == wanted
    assert (noise.assignment[changed] != rows[changed]).all()
    assert noise.permutation.equal(derange_captions(rows, ratio=ratio, seed=seed).permutation)


@given(ASSIGNMENTS, RATIOS, SEEDS, st.integers(1, 12), st.randoms(use_true_random=False))
def test_swapped_captions_go_to_photos_that_share_a_noun(
    rows: torch.Tensor, ratio: float, seed: int, vocabulary: int, random: Any
) -> None:
    texts = [f"a noun{random.randrange(vocabulary)} on a noun{random.randrange(vocabulary)}" for _ in rows]
    wanted = int(ratio * len(rows))
    if sum(min(int(count), wanted // 2) for count in rows.bincount()) < wanted:
        with pytest.raises(DataError, match="too few images"):
            swap_captions(rows, texts, ratio=ratio, seed=seed)
        return
    noise = swap_captions(rows, texts, ratio=ratio, seed=seed)
    assert sorted(noise.permutation.tolist()) == list(range(len(rows)))
    assert noise.assignment.equal(rows[noise.permutation])
    assert noise.original.equal(rows)
    changed = (noise.permutation != torch.arange(len(rows))).nonzero().flatten().tolist()
    assert len(changed) == wanted
    nouns = photo_nouns(texts, rows.tolist())
    old, new = ([nouns[int(image)] for image in images[changed]] for images in (rows, noise.assignment))
    assert all(int(noise.assignment[row]) != int(rows[row]) for row in changed)
    assert noise.fallbacks == sum(not a & b for a, b in zip(old, new, strict=True))
    assert noise.permutation.equal(swap_captions(rows, texts, ratio=ratio, seed=seed).permutation)


def test_where_nouns_are_common_nearly_every_swap_shares_one(tmp_path: Path) -> None:
    rows = torch.arange(500) // 5
    texts = [f"a noun{row // 5 % 7} in the noun{row // 5 % 11}" for row in range(500)]
    noise = swap_captions(rows, texts, ratio=0.5, seed=0)
    assert noise.changed_share == 0.5
    assert noise.fallbacks <= 5
    alone = [f"a lone{row // 5} in the lone{row // 5}" for row in range(500)]
    other = swap_captions(rows, alone, ratio=0.5, seed=0)
    assert (other.changed_share, other.fallbacks) == (0.5, 250), "no partner anywhere: any other photo"
    other.save(tmp_path / "n.safetensors")
    assert load_noise(tmp_path / "n.safetensors").fallbacks == 250
    with pytest.raises(UsageError, match=r"words of captions.*captions=FILE"):
        make_noise("swap-shared-noun", rows, ratio=0.5, seed=0)


def test_nouns_end_a_phrase_after_a_determiner() -> None:
    texts = ["Two dogs on the beach", "A brown dog runs on a beach.", "the dog is brown", "a dog and two dogs."]
    assert find_nouns(texts) == {"dogs", "beach"}, "'dog' ends a phrase once only"
    assert find_nouns([*texts, "The DOG, a dog"]) == {"dog", "dogs", "beach"}
    rare = ["a red in it", "the red."] + ["a red ball in the sea"] * 30
    assert find_nouns(rare) == {"sea"}, "an adjective is used so in too few of its captions"
    assert photo_nouns(texts, [0, 0, 1, 1]) == {0: {"dogs", "beach"}, 1: {"dogs"}}


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "data/coco").is_dir(), reason="needs ../shared/data/coco")
def test_real_captions_share_nouns() -> None:
    spec = f"features:{SHARED}/data/coco/features-clipb16-minilm.safetensors,captions={SHARED}/data/coco/captions.json"
    pairs = load_pairs(spec, split="train")
    noise = make_noise("swap-shared-noun", pairs.caption_image, ratio=0.5, seed=0, captions=pairs.captions)
    assert int((noise.assignment != pairs.caption_image).sum()) == len(pairs) // 2 == 7197
    assert noise.fallbacks < 0.01 * 7197
    assert {"dog", "man", "street", "kitchen"} < find_nouns(pairs.captions or ())


def test_noise_changes_the_labels_of_its_own_pairs(parts: dict[str, Any]) -> None:
    pairs = PairSet(**parts)
    noise = CaptionNoise(torch.tensor([1, 0, 0]), torch.tensor([1, 2, 0]), ratio=1.0, seed=0)
    noisy = apply_noise(pairs, noise)
    assert (noisy.caption_image.tolist(), noisy.caption_ids) == ([1, 0, 0], pairs.caption_ids)
    assert torch.equal(noisy.texts, pairs.texts)
    for other in (torch.arange(4), torch.tensor([1, 1, 1])):
        with pytest.raises(DataError, match="other labels"):
            apply_noise(pairs, permute_captions(other, ratio=0.5, seed=0))


@pytest.mark.parametrize(
    ("tensors", "facts", "words"),
    [
        ({"permutation": torch.arange(6).flip(0)}, {}, "sha256"),
        ({"permutation": torch.arange(5)}, {}, "sha256"),
        ({"assignment": torch.arange(6.0)}, {}, "sha256"),
        ({}, {"sha256": "0" * 64}, "000000"),
        ({}, {"ratio": "half"}, "not a noise file .*half"),
        ({}, {"seed": "x"}, "not a noise file .*'x'"),
        ({}, {"protocol": None}, "not a noise file .*protocol"),
    ],
)
def test_a_file_that_was_changed(
    tmp_path: Path, tensors: dict[str, torch.Tensor], facts: dict[str, str | None], words: str
) -> None:
    path = tmp_path / "noise.safetensors"
    permute_captions(torch.arange(6), ratio=1, seed=0).save(path)
    stored, metadata = read_tensors(path)
    changed = {name: value for name, value in {**metadata, **facts}.items() if value is not None}
    write_tensors(path, {**stored, **tensors}, metadata=changed)
    with pytest.raises(DataError, match=rf"noise\.safetensors .*{words}.* — "):
        load_noise(path)


FIVE_EACH = torch.arange(20) // 5


def saved(path: Path, values: Any) -> Path:
    if path.suffix == ".npy":
        np.save(path, np.asarray(values))
    else:
        path.write_text(json.dumps(values) if path.suffix == ".json" else "\n".join(map(str, values)))
    return path


@pytest.mark.parametrize("suffix", [".npy", ".json", ".txt"])
def test_a_list_of_images(tmp_path: Path, suffix: str) -> None:
    """Entry j is the image of caption j, some of them shuffled, as NCR publishes them."""
    images = [0, 3, 0, 0, 2, 1, 1, 1, 1, 0, 2, 2, 2, 2, 1, 3, 3, 0, 3, 3]
    noise = load_noise(saved(tmp_path / f"index{suffix}", images), caption_image=FIVE_EACH)
    assert noise.assignment.tolist() == images
    assert noise.original.equal(FIVE_EACH)
    assert (noise.protocol, noise.seed) == ("file", None)
    assert noise.ratio == noise.changed_share == pytest.approx(5 / 20)
    noise.save(tmp_path / "noise.safetensors")
    again = load_noise(tmp_path / "noise.safetensors")
    assert (again.protocol, again.seed, again.ratio, again.sha256) == ("file", None, noise.ratio, noise.sha256)


def test_a_list_of_slots(tmp_path: Path) -> None:
    """Where each image has one caption, the same kind of file is a permutation."""
    slots = [1, 2, 0, 3]
    noise = load_noise(saved(tmp_path / "index.npy", slots), caption_image=torch.arange(4))
    assert noise.permutation.tolist() == noise.assignment.tolist() == slots
    moved = load_noise(saved(tmp_path / "index.npy", [5, *range(1, 5), 0]), caption_image=torch.arange(6) // 2)
    assert moved.assignment.tolist() == [2, 0, 1, 1, 2, 0]
    assert moved.changed_share == pytest.approx(2 / 6)


@given(st.lists(st.integers(0, 4), min_size=6, max_size=30), st.randoms())
def test_slots_for_any_list_of_images(tmp_path_factory: pytest.TempPathFactory, images: list[int], random: Any) -> None:
    shuffled = images.copy()
    random.shuffle(shuffled)
    before, path = torch.tensor(images), tmp_path_factory.mktemp("noise") / "index.txt"
    noise = load_noise(saved(path, shuffled), caption_image=before)
    slots = noise.permutation.tolist()
    assert sorted(slots) == list(range(len(images)))
    assert (noise.assignment.tolist(), before[noise.permutation].tolist()) == (shuffled, shuffled)
    assert all(slots[row] == row for row, (old, new) in enumerate(zip(images, shuffled, strict=True)) if old == new)
    assert noise.original.equal(before)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (list(range(19)), ShapeMismatch, ("19 captions", "20")),
        ([0] * 20, DataError, ("neither",)),
        ([*range(19), 20], DataError, ("neither",)),
        ([-1, *range(1, 20)], DataError, ("neither",)),
        ([0.5] * 20, DataError, ("float64", "whole numbers")),
        ([[0, 1]] * 10, DataError, ("[10, 2]",)),
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


def test_files_that_are_no_list(tmp_path: Path) -> None:
    for name, content in (("a.npy", b"junk"), ("a.json", b"{"), ("b.json", b'{"a": 1}'), ("a.txt", b"1 2 x")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            load_noise(tmp_path / name, caption_image=FIVE_EACH)
    path = saved(tmp_path / "i.npy", [1, 0])
    with pytest.raises(UsageError, match="caption_image="):
        load_noise(path)
    with pytest.raises(DataError, match="positions or images"):
        load_noise(path, caption_image=torch.tensor([1, 0]))
    for name, words in (("absent.npy", "no such file"), ("i.csv", r"not a noise file.*\.npy")):
        with pytest.raises(DataError, match=words):
            load_noise(tmp_path / name, caption_image=FIVE_EACH)
