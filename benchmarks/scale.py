"""Photos a second of `vacsr embed --ray` with one worker and with two, and what Ray itself costs.

    python benchmarks/scale.py [--shards 8] [--photos 16] [--rounds 3] [--parts 300] [--json FILE]

ViT-B/32 with random weights on made-up JPEG files of 640×480 with a caption each, --photos to a shard. Every worker has
one core and one thread; `no Ray` does the same shards in one process with one thread. The ways take turns, and a rate
is the median of --rounds: from the start of the first shard to the end of the last one. `start` is the time before
that: Ray, the workers, and in each of them the model. `empty parts` have no work, so their rate is Ray's own cost.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from _common import finish, log, parser
from loader import made_up
from vacsr.bench import BenchResult, describe_device
from vacsr.data import PhotoSet, write_shards
from vacsr.embed import embedding_config
from vacsr.scale import Part, Task, do_part, embed_task, parts_of, run_parts


def shards(folder: Path, count: int, photos: int) -> str:
    """Shards of made-up photos with a caption each."""
    total = count * photos
    stored = made_up(folder, total)
    names = tuple(f"{row:05d}" for row in range(total))
    captions = tuple(f"a photo of thing number {row} in front of something else" for row in range(total))
    pairs = PhotoSet(stored, names, captions, tuple(f"{name}#0" for name in names), torch.arange(total))
    write_shards(pairs, folder / "shards", per_shard=photos)
    return f"shards:{folder}/shards/*.tar"


def empty() -> Task:
    """A task without work."""
    return Task("", (), lambda _part, _out: {})


def alone(make: Callable[[], Task], parts: list[Part], out: Path) -> None:
    """One part after the other in this process."""
    task = make()
    out.mkdir()
    for part in parts:
        do_part(task, part, out)


def with_ray(make: Callable[[], Task], parts: list[Part], out: Path, *, workers: int) -> None:
    """On as many cores as there are workers; Ray is started and stopped."""
    import ray

    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init("local", num_cpus=workers, object_store_memory=100 << 20, **quiet)
    run_parts(make, parts, out, ray=str(workers), device="cpu")
    ray.shutdown()


def timed(work: Callable[[Path], None]) -> dict[str, float]:
    """Seconds before the first part started, and until the last one ended."""
    folder = Path(tempfile.mkdtemp())
    begun = time.time()
    work(folder / "out")
    whole = time.time() - begun
    files = list((folder / "out").glob("*_stats.json"))
    ends = {path: path.stat().st_mtime for path in files}
    first = min(end - json.loads(path.read_text())["seconds"] for path, end in ends.items())
    shutil.rmtree(folder)
    return {"start": first - begun, "seconds": max(ends.values()) - first, "whole": whole}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shards", type=int, default=8)
    options.add_argument("--photos", type=int, default=16, help="of a shard")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--parts", type=int, default=300, help="without work")
    options.add_argument("--backbone", default="clip:vit-b32")
    args = options.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    torch.set_num_threads(1)
    config = embedding_config(args.backbone).model_copy(update={"weights": "random"})
    with tempfile.TemporaryDirectory() as folder:
        parts = parts_of(shards(Path(folder), args.shards, args.photos), Path(folder))
        none = [parts[0]._replace(name=f"{number:05d}") for number in range(args.parts)]
        make = partial(embed_task, config, None, "fail", "cpu", pooling="auto", dtype=torch.float16, workers=1)
        ways: dict[str, tuple[Callable[[Path], None], int]] = {
            "no Ray": (lambda out: alone(make, parts, out), args.shards * args.photos),
            "1 worker": (lambda out: with_ray(make, parts, out, workers=1), args.shards * args.photos),
            "2 workers": (lambda out: with_ray(make, parts, out, workers=2), args.shards * args.photos),
            "empty parts, 2 workers": (lambda out: with_ray(empty, none, out, workers=2), args.parts),
        }
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for number in range(args.rounds):
            for way, (work, count) in ways.items():
                runs[way].append(timed(work))
                log(f"round {number + 1}, {way}: {count / runs[way][-1]['seconds']:.1f} a second")
    rows: list[dict[str, Any]] = []
    for way, (_, count) in ways.items():
        rates = [count / run["seconds"] for run in runs[way]]
        row = {
            "way": way,
            "items": count,
            "per_second": statistics.median(rates),
            "low": min(rates),
            "high": max(rates),
        }
        rows.append({**row, "start_s": statistics.median(run["start"] for run in runs[way])})
    settings = {"shards": args.shards, "photos": args.photos, "rounds": args.rounds, "backbone": args.backbone}
    columns = {
        "way": "way",
        "items": "items",
        "per_second": "per second",
        "low": "least",
        "high": "most",
        "start_s": "start, s",
    }
    finish(BenchResult("scale", describe_device(torch.device("cpu")), settings, rows, columns), args.json)


if __name__ == "__main__":
    main()
