"""How the scoring kernel cuts its work: the tile's shape by rule, the rest by trying a few on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

WIDEST = 128  # decoder units a pass takes; a wider decoder takes several
_NARROW = 32  # up to here a large tile and the decoder's sums fit the registers together
_SCRATCH = 1 << 30  # bytes of scaled weights at a time
_HELD: dict[tuple[object, ...], Tile] = {}


class Tile(NamedTuple):
    """One program's share, and how the compiler is to lay it out."""

    texts: int = 128
    hidden: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 4
    run: int = 4  # images one after the other
    tma: bool = True  # copies by Hopper's tensor memory accelerator; from 9.0 on


SMALL = Tile(texts=32, hidden=32, depth=32, run=2, tma=False)
"""For the interpreter, where a tile costs as much as its numbers."""


def candidates(hidden: int, width: int, *, dtype: torch.dtype, device: torch.device) -> list[Tile]:
    """Tiles of one shape for this adapter, the likeliest first. ``width``: decoder units of a pass, 0 if linear."""
    if device.type != "cuda":
        return [SMALL]
    depth = 128 // dtype.itemsize  # 128 bytes a row: the widest swizzle of shared memory
    if torch.cuda.get_device_capability(device)[0] != 9:
        return [Tile(hidden=128, depth=depth, stages=3, tma=False)]
    if width > _NARROW or -(-hidden // 256) * 256 > 1.1 * -(-hidden // 128) * 128:
        return [Tile(hidden=128, depth=depth, stages=stages, tma=tma) for stages, tma in ((4, True), (3, False))]
    large = Tile(depth=depth)
    return [large, large._replace(stages=3), large._replace(tma=False), large._replace(stages=3, tma=False)]


def fastest(tiles: Sequence[Tile], key: tuple[object, ...], run: Callable[[Tile], object]) -> Tile:
    """The tile with which ``run`` takes least time; remembered under ``key`` until the process ends.

    A tile that the GPU has no room for is passed over.
    """
    if key not in _HELD:
        times = {tile: seconds for tile in tiles if (seconds := _timed(run, tile)) is not None}
        _HELD[key] = min(times, key=lambda tile: times[tile]) if times else tiles[0]
    return _HELD[key]


def _timed(run: Callable[[Tile], object], tile: Tile) -> float | None:
    """Milliseconds of the best of three, after one to compile; None where the tile does not fit the GPU."""
    from vacsr.scoring.kernel_triton import OutOfResources

    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]
    try:
        run(tile)
        events[0].record()
        for event in events[1:]:
            run(tile)
            event.record()
    except OutOfResources:
        return None
    torch.cuda.synchronize()
    return min(float(before.elapsed_time(after)) for before, after in pairwise(events))


def images_at_a_time(image_bytes: int, device: torch.device) -> int:
    """Images whose scaled weights are held together, at least 1.

    Whole multiples of the GPU's processors leave none idle at the end of a block, however many texts there are.
    """
    if device.type != "cuda":
        return max(1, min(8, _SCRATCH // image_bytes))
    about = torch.cuda.get_device_properties(device)
    room = max(1, min(_SCRATCH, about.total_memory // 16) // image_bytes)
    processors = about.multi_processor_count
    return room if room < processors else min(2, room // processors) * processors


def text_tiles_together(tiles: int, tile_bytes: int, device: torch.device) -> int:
    """Text tiles that meet all images before the next ones come: a third of the L2 cache, in even groups."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 20
    groups = -(-tiles // max(1, cache // 3 // tile_bytes))
    return -(-tiles // groups)
