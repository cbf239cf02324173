"""Photos a second that the loader alone delivers: decoded and resized to squares, by number of threads and side.

    python benchmarks/loader.py [--pairs flickr8k:DIR] [--photos 1000] [--json FILE]

Without --pairs, photos of 640×480 (COCO's usual size) are made up as JPEG files in a temporary folder. Every number is
the median of --rounds passes over the same photos, after one that fills the page cache: what is measured is decoding,
not the disk. CPU time counts all threads, and unlike the rate it hardly depends on what else the machine does: cores
divided by it bound the rate. A GPU that trains on B photos a step at S steps a second needs B·S photos a second.
"""

from __future__ import annotations

import io
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from _common import finish, parser, timed
from vacsr.backbones.images import CLIP_MEAN, CLIP_STD, PhotoReader, PhotoTransform
from vacsr.bench import BenchResult, describe_device
from vacsr.data import PhotoSet, load_pairs
from vacsr.data.archives import file_photos
from vacsr.data.photos import Photos
from vacsr.errors import DataError

_BATCH = 128
_MADE = 64  # photos made up; more are copies under other names


def made_up(folder: Path, count: int) -> Photos:
    """JPEG files of 640×480 with smooth shapes and some grain, about as large as COCO's."""
    encoded = []
    for seed in range(min(count, _MADE)):
        rng = np.random.default_rng(seed)
        smooth = Image.fromarray(rng.integers(0, 256, (15, 20, 3), dtype=np.uint8)).resize(
            (640, 480), Image.Resampling.BICUBIC
        )
        grain = rng.normal(0, 12, (480, 640, 1))
        photo = Image.fromarray(np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8))
        buffer = io.BytesIO()
        photo.save(buffer, "JPEG", quality=90)
        encoded.append(buffer.getvalue())
    names = tuple(f"{row:05d}.jpg" for row in range(count))
    for row, name in enumerate(names):
        (folder / name).write_bytes(encoded[row % len(encoded)])
    return file_photos(folder, names)


def photos_of(spec: str, count: int) -> Photos:
    """The first photos of a data set."""
    pairs = load_pairs(spec, on_error="skip")
    if not isinstance(pairs, PhotoSet):
        raise DataError(f"{spec} holds features, not photos — give photos, e.g. folder:DIR or flickr8k:DIR")
    return pairs.photos.take(range(min(count, len(pairs.photos))))


def one_setting(photos: Photos, *, side: int, threads: int, rounds: int) -> dict[str, Any]:
    """Medians over passes through all photos, in batches as training asks for them."""
    reader = PhotoReader(photos, PhotoTransform(side, CLIP_MEAN, CLIP_STD), workers=threads)
    batches = [range(at, min(at + _BATCH, len(photos))) for at in range(0, len(photos), _BATCH)]
    costs = [timed(lambda: sum(map(len, reader.stream(batches))))[1] for _ in range(rounds)]
    wall, processor = np.median(costs, axis=0).tolist()
    rates = {"photos_per_second": len(photos) / wall, "cpu_ms_per_photo": 1e3 * processor / len(photos)}
    return {"way": side, "threads": threads, **rates}


def main() -> None:
    """One row per side and number of threads."""
    options = parser(__doc__)
    options.add_argument("--pairs", default="", help="SPEC of a data set of photos; default: made-up JPEGs of 640×480")
    options.add_argument("--photos", type=int, default=512, help="how many of them")
    options.add_argument("--sides", type=int, nargs="+", default=[224, 384])
    options.add_argument("--threads", type=int, nargs="+", default=list(range(1, (os.cpu_count() or 1) + 1)))
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        photos = photos_of(args.pairs, args.photos) if args.pairs else made_up(Path(folder), args.photos)
        one_setting(photos, side=min(args.sides), threads=max(args.threads), rounds=1)  # fills the page cache
        every = itertools.product(args.sides, args.threads)
        rows = [one_setting(photos, side=side, threads=count, rounds=args.rounds) for side, count in every]
        settings = {"photos": len(photos), "first": "×".join(map(str, photos.open(0).size)), "cores": os.cpu_count()}
    columns = {
        "way": "side", "threads": "threads", "photos_per_second": "photos/s", "cpu_ms_per_photo": "CPU ms a photo"
    }  # fmt: skip
    finish(BenchResult("loader", describe_device(torch.device("cpu")), settings, rows, columns), args.json)


if __name__ == "__main__":
    main()
