"""Photos a second of `vacsr embed --ray` with one worker and with two, what Ray costs, and audits part by part.

    python benchmarks/scale.py [--shards 8] [--photos 16] [--rounds 3] [--parts 300] [--json FILE]
    python benchmarks/scale.py --flickr8k DIR [--json FILE]

ViT-B/32 with random weights on made-up JPEG files of 640×480 with a caption each, --photos to a shard. Every worker has
one core and one thread; `no Ray` does the same shards in one process with one thread. The ways take turns, and a rate
is the median of --rounds: from the start of the first shard to the end of the last one. `start` is the time before
that: Ray, the workers, and in each of them the model. `empty parts` have no work, so their rate is Ray's own cost.
Processor time per item depends less on what else the machine does than the rates.

With --flickr8k: InfoNCE on frozen features with 20% of the captions on another photo; of so many captions as are wrong,
how many of the most suspected are wrong, if all photos are audited together or in parts, and how many the parts count.
What the JSON file holds of the other measurement stays.
"""

from __future__ import annotations

import argparse
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

from _common import log, parser, stored
from audit import trained
from loader import made_up
from vacsr.bench import BenchResult, describe_device
from vacsr.data import PhotoSet, write_shards
from vacsr.embed import embedding_config
from vacsr.files import write_json
from vacsr.scale import Part, Task, do_part, embed_task, parts_of, run_parts
from vacsr.search.audit import audit

SIZES = (2000, 1000, 500, 250, 100)
"""Photos of a part."""


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
    """Seconds before the first part started, and until the last one ended; processor time of the parts."""
    folder = Path(tempfile.mkdtemp())
    begun = time.time()
    work(folder / "out")
    files = list((folder / "out").glob("*_stats.json"))
    ends, facts = [path.stat().st_mtime for path in files], [json.loads(path.read_text()) for path in files]
    first = min(end - fact["seconds"] for end, fact in zip(ends, facts, strict=True))
    shutil.rmtree(folder)
    return {"start": first - begun, "seconds": max(ends) - first, "cpu": sum(fact["cpu_seconds"] for fact in facts)}


def audited(folder: Path) -> list[dict[str, float]]:
    """One row per size of a part, in photos; the first has all."""
    scorer, pairs, wrong = trained(folder, "train", ratio=0.2)
    images, rows = len(pairs.image_ids), []
    order = torch.randperm(images, generator=torch.Generator().manual_seed(0))
    for size in (images, *SIZES):
        reports, truth = [], []
        for chosen in torch.split(order, size):
            of_part = torch.isin(pairs.caption_image, chosen)
            reports.append(audit(scorer, pairs.subset(chosen.sort().values), top=1))
            truth.append(wrong[of_part])
        labels, suspicion = torch.cat(truth), torch.cat([report.rows.suspicion for report in reports])
        first = labels[suspicion.argsort(descending=True, stable=True)[: int(labels.sum())]]
        counts = [report.wrong_count for report in reports if report.wrong_count is not None]
        sums = {name: sum(getattr(count, name) for count in counts) for name in ("value", "low", "high")}
        found = {"precision_at_n": 100 * float(first.float().mean()), "wrong": int(labels.sum())}
        rows.append({"photos": size, **found, **sums})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shards", type=int, default=8)
    options.add_argument("--photos", type=int, default=16, help="of a shard")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--parts", type=int, default=300, help="without work")
    options.add_argument("--backbone", default="clip:vit-b32")
    options.add_argument("--flickr8k", type=Path, help="folder with features and captions.json")
    args = options.parse_args()
    result = {"audits": audited(args.flickr8k)} if args.flickr8k else measured(args)
    if args.json:
        write_json(args.json, {**stored(args.json), **result})


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Every way in turn."""
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
        row |= {"cpu_ms": 1e3 * statistics.median(run["cpu"] for run in runs[way]) / count}
        rows.append({**row, "start_s": statistics.median(run["start"] for run in runs[way])})
    settings = {"shards": args.shards, "photos": args.photos, "rounds": args.rounds, "backbone": args.backbone}
    columns = {"way": "way", "items": "items", "per_second": "per second", "low": "least", "high": "most"}
    columns |= {"cpu_ms": "processor time, ms", "start_s": "start, s"}
    result = BenchResult("scale", describe_device(torch.device("cpu")), settings, rows, columns)
    print(result.to_markdown())
    return result.to_dict()


if __name__ == "__main__":
    main()
