"""How the scoring kernel cuts its work: the tile's shape by rule, the rest by trying a few on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

WIDEST = 128  # decoder units a pass takes; a wider decoder takes several
_NARROW = 32  # up to here a large tile and the decoder's sums fit the registers together
_SCRATCH = 1 << 30  # bytes of scaled weights at a time
_SHARED = 99 << 10  # bytes of shared memory that every GPU from 8.0 on lets a program have
_REDUCED = 4 << 10  # bytes for sums across warps, and barriers
_LAYOUTS = ((4, True), (3, True), (4, False), (3, False), (2, True), (2, False))  # stages, and whether by TMA
_TRIED = 4  # of them, where there is time to choose; the others are for a GPU that has no room for these
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


def candidates(hidden: int, width: int, *, dim: int, dtype: torch.dtype, device: torch.device) -> list[Tile]:
    """Tiles of one shape for this adapter, the likeliest first; the GPU's shared memory has room for each.

    ``width``: decoder units of a pass, 0 if linear.
    """
    if device.type != "cuda":
        return [SMALL]
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    depth = 128 // dtype.itemsize  # 128 bytes a row: the widest swizzle of shared memory
    padded = [-(-hidden // edge) * edge for edge in (256, 128)]
    large = hopper and width <= _NARROW and padded[0] <= 1.1 * padded[1]
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _SHARED)
    found: list[Tile] = []
    for texts, units in ((128, 256), (128, 128), (64, 64), (32, 32))[0 if large else 1 :]:
        tiles = [Tile(texts, units, depth, stages=stages, tma=tma) for stages, tma in _LAYOUTS if hopper or not tma]
        found = [tile for tile in tiles if shared_bytes(tile, width, dim=dim, itemsize=dtype.itemsize) <= room]
        if found:
            break
    return found


def shared_bytes(tile: Tile, width: int, *, dim: int, itemsize: int) -> int:
    """Shared memory of a program, as far as a rule can tell: what the compiler keeps there of its loads.

    Texts and weights are loaded ahead by as many steps as there are stages. The decoder's small matrix, always in two
    bytes, is there once; or as often as they are, where one step goes through all of d and the compiler sees a loop
    without a branch.
    """
    operands = tile.stages * (tile.texts + tile.hidden) * tile.depth * itemsize
    copies = tile.stages if dim <= tile.depth else 1
    return operands + 2 * copies * tile.hidden * width + _REDUCED


def fastest(tiles: Sequence[Tile], key: tuple[object, ...], run: Callable[[Tile], object]) -> Tile:
    """The tile with which ``run`` takes least time; remembered under ``key`` until the process ends.

    A tile that the GPU has no room for is passed over.
    """
    if key not in _HELD:
        times = {tile: seconds for tile in tiles[:_TRIED] if (seconds := _timed(run, tile)) is not None}
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
