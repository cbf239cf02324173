from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vacsr.data.noise import (
    PROTOCOLS,
    CaptionNoise,
    apply_noise,
    derange_captions,
    load_noise,
    make_noise,
    permute_captions,
)
from vacsr.data.pairs import PairSet
from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.files import read_tensors, write_tensors

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


@given(ASSIGNMENTS, RATIOS, SEEDS)
def test_the_seed_decides(rows: torch.Tensor, ratio: float, seed: int) -> None:
    first, second = (permute_captions(rows, ratio=ratio, seed=seed) for _ in range(2))
    assert first.permutation.equal(second.permutation)
    assert first.sha256 == second.sha256


def test_exactly_the_chosen_slots_are_touched() -> None:
    """One draw can leave a chosen caption in place; over the draws, 20 of 100 are chosen and all but about one move."""
    moved = [
        int((permute_captions(torch.arange(100), ratio=0.2, seed=seed).permutation != torch.arange(100)).sum())
        for seed in range(200)
    ]
    assert max(moved) == 20
    assert sum(moved) / len(moved) == pytest.approx(19, abs=0.3)  # a uniform permutation has one fixed point on average


def test_every_caption_may_be_chosen_and_go_anywhere() -> None:
    seen = {
        (caption, int(slot))
        for seed in range(200)
        for caption, slot in enumerate(permute_captions(torch.arange(4), ratio=0.5, seed=seed).permutation)
    }
    assert len(seen) == 16


def test_no_noise_and_other_seeds() -> None:
    rows = torch.arange(50) // 5
    assert permute_captions(rows, ratio=0, seed=1).assignment.equal(rows)
    assert permute_captions(rows, ratio=0, seed=1).changed_share == 0
    one, two = (permute_captions(rows, ratio=0.5, seed=seed) for seed in (1, 2))
    assert one.sha256 != two.sha256
    assert 0 < one.changed_share <= 0.5


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    permute_captions(torch.arange(50), ratio=0.5, seed=1)
    assert torch.get_rng_state().equal(before)


def test_the_hash_is_of_little_endian_int64() -> None:
    noise = permute_captions(torch.arange(30), ratio=1, seed=0)
    expected = hashlib.sha256(struct.pack("<30q", *noise.permutation.tolist())).hexdigest()
    assert noise.sha256 == expected


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_that_is_none(ratio: float) -> None:
    with pytest.raises(UsageError, match=str(ratio)) as caught:
        permute_captions(torch.arange(5), ratio=ratio, seed=0)
    assert caught.value.exit_code == 2


def test_the_hash_of_a_known_draw() -> None:
    """Noise of earlier runs must be drawn again as it was."""
    assert permute_captions(torch.arange(1000) // 5, ratio=0.2, seed=0).sha256.startswith("fcf2f18d93180d3a")


@given(ASSIGNMENTS, RATIOS, SEEDS)
def test_deranged_captions_all_change_their_image(rows: torch.Tensor, ratio: float, seed: int) -> None:
    wanted = int(ratio * len(rows))
    usable = sum(min(int(count), wanted // 2) for count in rows.bincount())  # of no image more than half
    if usable < wanted:
        with pytest.raises(DataError, match="cannot all change"):
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


def test_deranged_captions_go_everywhere() -> None:
    """Two images with two captions each: every caption to every slot of the other image."""
    rows = torch.tensor([0, 0, 1, 1])
    seen = {
        (caption, int(slot))
        for seed in range(100)
        for caption, slot in enumerate(derange_captions(rows, ratio=1, seed=seed).permutation)
    }
    assert seen == {(0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1)}


def test_captions_of_one_image_are_spread() -> None:
    noise = derange_captions(torch.arange(5000) // 5, ratio=1, seed=0)
    images = noise.assignment.reshape(1000, 5)
    assert sum(len(set(row.tolist())) == 5 for row in images) > 950  # as a uniform draw: about 990


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
def test_protocols_by_name(protocol: str, tmp_path: Path) -> None:
    rows = torch.arange(100) // 5
    noise = make_noise(protocol, rows, ratio=0.5, seed=3)
    assert noise.permutation.equal(PROTOCOLS[protocol](rows, ratio=0.5, seed=3).permutation)
    assert noise.protocol == protocol
    noise.save(tmp_path / "n.safetensors")
    again = load_noise(tmp_path / "n.safetensors", caption_image=rows)
    assert (again.protocol, again.sha256, again.seed) == (protocol, noise.sha256, 3)


def test_a_protocol_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match=r"'swap'.*derange-captions"):
        make_noise("swap", torch.arange(4), ratio=0.5, seed=0)


def test_apply_noise_changes_labels_only(parts: dict[str, Any]) -> None:
    pairs = PairSet(**parts)
    noise = CaptionNoise(torch.tensor([1, 0, 0]), torch.tensor([1, 2, 0]), ratio=1.0, seed=0)
    noisy = apply_noise(pairs, noise)
    assert noisy.caption_image.tolist() == [1, 0, 0]
    assert torch.equal(noisy.texts, pairs.texts)
    assert noisy.caption_ids == pairs.caption_ids


def test_noise_of_other_pairs(parts: dict[str, Any]) -> None:
    pairs = PairSet(**parts)
    with pytest.raises(ShapeMismatch, match="4 captions, the pairs have 3"):
        apply_noise(pairs, permute_captions(torch.arange(4), ratio=0.5, seed=0))
    with pytest.raises(DataError, match="other labels") as caught:
        apply_noise(pairs, permute_captions(torch.tensor([1, 1, 1]), ratio=0.5, seed=0))
    assert caught.value.exit_code == 4


def test_saved_and_loaded(tmp_path: Path) -> None:
    noise = permute_captions(torch.arange(40) // 5, ratio=0.3, seed=7)
    noise.save(tmp_path / "noise.safetensors")
    again = load_noise(tmp_path / "noise.safetensors")
    assert again.permutation.equal(noise.permutation)
    assert again.assignment.equal(noise.assignment)
    assert (again.ratio, again.seed, again.protocol, again.sha256) == (0.3, 7, "permute-captions", noise.sha256)


@pytest.mark.parametrize(
    ("tensors", "facts", "words"),
    [
        ({"permutation": torch.arange(6).flip(0)}, {}, "sha256"),
        ({"permutation": torch.zeros(6).long()}, {}, "not hold a permutation"),
        ({"permutation": torch.arange(6).int()}, {}, "int32"),
        ({"permutation": torch.arange(5)}, {}, "int64 .5."),
        ({"more": torch.ones(1)}, {}, "not a noise file"),
        ({}, {"protocol": "other"}, "'other'"),
        ({}, {"ratio": "half"}, "unreadable ratio"),
        ({}, {"seed": "x"}, "unreadable ratio or seed"),
        ({}, {"sha256": "0" * 64}, "000000"),
    ],
)
def test_a_file_that_was_changed(
    tmp_path: Path, tensors: dict[str, torch.Tensor], facts: dict[str, str], words: str
) -> None:
    path = tmp_path / "noise.safetensors"
    permute_captions(torch.arange(6), ratio=1, seed=0).save(path)
    stored, metadata = read_tensors(path)
    write_tensors(path, {**stored, **tensors}, metadata={**metadata, **facts})
    with pytest.raises(DataError, match=words) as caught:
        load_noise(path)
    assert caught.value.exit_code == 4
    assert "noise.safetensors" in str(caught.value)


def test_a_file_without_metadata(tmp_path: Path) -> None:
    write_tensors(tmp_path / "n.safetensors", {"assignment": torch.arange(3), "permutation": torch.arange(3)})
    with pytest.raises(DataError, match="not a noise file"):
        load_noise(tmp_path / "n.safetensors")
