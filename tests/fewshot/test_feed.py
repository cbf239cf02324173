"""Batches of shots: pure functions of seed, pass and shot, whatever the batch, the threads or the place of a resume."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vacsr.data.fewshot import LabelledPhotos
from vacsr.data.photos import ArrayPhotos
from vacsr.errors import DataError
from vacsr.fewshot.config import FewshotTrainConfig
from vacsr.fewshot.feed import CachedPhotos, ShotFeed, ShotPixels

from .conftest import TRANSFORM, CountingPhotos, colours


def feed(shots: LabelledPhotos, *, second: bool = False, **fields: Any) -> ShotFeed:
    config = FewshotTrainConfig(**{"batch_size": 4, "epochs": 3, "workers": 2, **fields})
    return ShotFeed(shots, config, transform=TRANSFORM, second=second)


def by_shot(batches: Iterator[ShotPixels]) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for batch in batches:
        for row, pixels in zip(batch.rows.tolist(), batch.first, strict=True):
            found.setdefault(row, []).append(pixels)
    return found


@pytest.mark.parametrize(
    ("count", "batch", "size", "steps"), [(14, 4, 4, 3), (12, 4, 4, 3), (3, 4, 3, 1), (4, 4, 4, 1), (5, 1, 1, 5)]
)
def test_a_last_batch_is_dropped_unless_it_is_the_only_one(count: int, batch: int, size: int, steps: int) -> None:
    shots = feed(colours(count), batch_size=batch)
    assert shots.steps_per_epoch == steps
    epoch = list(shots.stream(0, steps))
    assert [len(one.rows) for one in epoch] == [size] * steps
    seen = torch.cat([one.rows for one in epoch]).tolist()
    assert len(set(seen)) == len(seen) == size * steps


def test_an_epoch_of_many_steps_goes_over_the_shots_again() -> None:
    shots = feed(colours(8), steps_per_epoch=5)
    rows = [one.rows.tolist() for one in shots.stream(0, 10)]
    for start in (0, 2, 5, 7):  # an epoch is two passes and a half; the next one begins afresh
        assert sorted(rows[start] + rows[start + 1]) == list(range(8))
    assert len({tuple(batch) for batch in rows}) > 5


def test_a_stream_is_the_same_from_any_step() -> None:
    shots = feed(colours(14), second=True)
    whole = list(shots.stream(0, 9))
    for start in (1, 3, 8):
        for one, other in zip(whole[start:], feed(colours(14), second=True).stream(start, 9), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True) if a is not None)


def test_draws_do_not_depend_on_batch_threads_or_cache() -> None:
    first = by_shot(feed(colours(12), batch_size=4, workers=3).stream(0, 9))
    other = by_shot(feed(colours(12), batch_size=2, workers=1, cache_gb=0).stream(0, 18))
    assert first.keys() == other.keys() == set(range(12))
    for row, views in first.items():
        assert len(views) == 3
        assert all(torch.equal(a, b) for a, b in zip(views, other[row], strict=True))
        assert not torch.equal(views[0], views[1])


def test_draws_follow_the_seed_and_the_shot() -> None:
    photo = np.random.default_rng(0).integers(0, 256, (10, 14, 3), dtype=np.uint8)
    same = replace(colours(4), photos=ArrayPhotos(np.stack([photo] * 4), tuple("abcd")))
    views = by_shot(feed(same).stream(0, 1))
    assert not torch.equal(views[0][0], views[1][0])
    assert not torch.equal(views[0][0], by_shot(feed(same, seed=2).stream(0, 1))[0][0])


def test_a_second_view_is_another_one() -> None:
    batch = next(feed(colours(8), second=True, second_view="crop").stream(0, 1))
    assert batch.second is not None
    assert batch.second.shape == batch.first.shape == (4, 3, 8, 8)
    assert not torch.equal(batch.first, batch.second)
    assert next(feed(colours(8)).stream(0, 1)).second is None


def test_a_crop_of_all_and_no_flip_is_the_resized_photo() -> None:
    shots = colours(4, size=(12, 12))
    batch = next(feed(shots, crop=(1.0, 1.0), flip=0.0, workers=1).stream(0, 1))
    squares = 0
    for row, pixels in zip(batch.rows.tolist(), batch.first, strict=True):
        expected = shots.photos.open(row).resize((8, 8), Image.Resampling.BICUBIC)
        squares += int(np.array_equal(pixels.permute(1, 2, 0).numpy(), np.asarray(expected)))
    assert squares == 4  # a square's only crop with all of its area is the whole of it


def test_photos_are_decoded_once_where_they_fit() -> None:
    shots = colours(8)
    counting = CountingPhotos(shots.photos)  # type: ignore[arg-type]
    kept = replace(shots, photos=counting)
    list(feed(kept, workers=1).stream(0, 6))
    assert counting.opened == [1] * 8
    counting.opened = [0] * 8
    list(feed(kept, workers=1, cache_gb=0).stream(0, 6))
    assert counting.opened == [3] * 8
    half = CachedPhotos(counting, limit=4 * 10 * 14 * 4)
    for row in [*range(8), *range(8)]:
        half.open(row)
    assert len(half.kept) == 4
    assert half.room == 0


def test_a_photo_that_cannot_be_read_stops_the_stream() -> None:
    class Broken(CountingPhotos):
        def open(self, row: int, *, side: int = 0) -> Image.Image:
            raise DataError(f"photo {row} cannot be read — copy it again")

    shots = colours(8)
    with pytest.raises(DataError, match="copy it again"):
        list(feed(replace(shots, photos=Broken(shots.photos))).stream(0, 2))  # type: ignore[arg-type]
