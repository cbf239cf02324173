"""The exact index beside plain cosine top-k and Milvus Lite on the same vectors: time per query, in one run.

    python benchmarks/index.py [--vectors 1000000] [--dim 512] [--threads 2] [--milvus N] [--json FILE]

Vectors are drawn around cluster centres and have unit length. "plain" keeps them in memory and gives positions and
scores alone: first as one would write it, then with the product cut so that all threads work, then in float16, whose
order is that of rounded products. "search" finds the 200 nearest and reads ids and metadata of ten. "rerank" scores
the 200 with a freshly drawn adapter of the default preset, and their uncertainties: weights do not change the time.
Queries come one at a time. The ways take turns, so that a slow spell of the machine meets all. Milvus Lite keeps a FLAT
index; ``--milvus 0`` leaves it out, a smaller number runs it on the first so many vectors, which its row says.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _common import finish, log, parser
from vacsr.bench import BenchResult, describe_device, seconds
from vacsr.config.io import method_config
from vacsr.methods import build_method
from vacsr.methods.base import Embedding
from vacsr.methods.vacsr import Vacsr
from vacsr.scoring.folded import BlockScorer
from vacsr.search import Hits, VectorIndex, open_index

CHUNK = 10_000
SHOWN = 10  # hits of a search that a page has room for


def main() -> None:
    """Fill, time, print."""
    options = parser(__doc__)
    options.add_argument("--vectors", type=int, default=1_000_000)
    options.add_argument("--dim", type=int, default=512)
    options.add_argument("--clusters", type=int, default=1000)
    options.add_argument("--candidates", type=int, default=200)
    options.add_argument("--queries", type=int, default=50)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--milvus", type=int, help="vectors that Milvus Lite gets; default all, 0 for none")
    options.add_argument("--folder", type=Path, help="where the indexes lie meanwhile; default: the system's")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="index-bench-", dir=args.folder) as folder:
        rows = measured(args, Path(folder))
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "folder")}
    columns = {
        "way": "way", "vectors": "vectors", "p50_ms": "p50 ms", "p95_ms": "p95 ms", "fill_rate": "filled, vectors/s",
        "disk_mb": "on disk, MB",
    }  # fmt: skip
    finish(BenchResult("index", describe_device(torch.device("cpu")), settings, rows, columns), args.json)


def drawn(count: int, dim: int, *, clusters: int, seed: int) -> Tensor:
    """Unit vectors around centres, a quarter of their length away. [count, dim]"""
    centres = torch.randn(clusters, dim, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    out = torch.empty(count, dim)
    for start in range(0, count, CHUNK):
        rows = min(CHUNK, count - start)
        centre = centres[torch.randint(clusters, (rows,), generator=generator)]
        out[start : start + rows] = centre + torch.randn(rows, dim, generator=generator) / 4
    return torch.nn.functional.normalize(out, dim=1)


def measured(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each way."""
    vectors = drawn(args.vectors, args.dim, clusters=args.clusters, seed=1)
    queries = drawn(args.queries + 3, args.dim, clusters=args.clusters, seed=2)
    rerank = reranker(args.dim)
    ways = plain_ways(vectors, args.candidates)
    facts: dict[str, tuple[int, float | None, float | None]] = {name: (args.vectors, None, None) for name in ways}
    for name, spec, count in indexes(args, folder):
        index, rate = filled(spec, vectors[:count])
        size = (index.info().bytes or 0) / 1e6
        ways[f"{name}: search"] = lambda query, index=index: shown(index.search(query, args.candidates))
        ways[f"{name}: search + rerank"] = lambda query, index=index: rerank(
            query, shown(index.search(query, args.candidates))
        )
        facts |= {f"{name}: {what}": (count, rate, size) for what in ("search", "search + rerank")}
    times = in_turn(ways, queries)
    keys = ("vectors", "fill_rate", "disk_mb")
    return [{"way": name, **times[name], **dict(zip(keys, facts[name], strict=True))} for name in ways]


def plain_ways(vectors: Tensor, k: int) -> dict[str, Callable[[Tensor], object]]:
    """Cosine top-k of vectors in memory."""
    parts = max(part for part in range(1, 65) if len(vectors) % part == 0)
    stacked, half = vectors.view(parts, -1, vectors.shape[1]), vectors.half()

    def batched(query: Tensor) -> Tensor:
        return torch.bmm(stacked, query.T.expand(parts, -1, 1)).flatten()

    return {
        "plain top-k in memory": lambda query: (vectors @ query[0]).topk(k),
        "plain top-k in memory, batched": lambda query: batched(query).topk(k),
        "plain top-k in memory, float16": lambda query: (half @ query[0].half()).topk(k),
    }


def indexes(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, int]]:
    """Name, SPEC and size of each index."""
    yield "exact float32", f"exact:{folder / 'full'},", args.vectors
    yield "exact float16", f"exact:{folder / 'half'},float16", args.vectors
    count = args.vectors if args.milvus is None else min(args.milvus, args.vectors)
    if count:
        yield "Milvus Lite FLAT", f"milvus:{folder / 'lite.db'},", count


def filled(spec: str, vectors: Tensor) -> tuple[VectorIndex, float]:
    """An index with these vectors, and how many a second went in."""
    name, _, dtype = spec.rpartition(",")
    index = open_index(name, dim=vectors.shape[1], create=True, dtype=dtype or None)
    log(f"filling {name.partition(':')[0]} {dtype} with {len(vectors):,} vectors")
    started = time.perf_counter()
    for start in range(0, len(vectors), CHUNK):
        some = vectors[start : start + CHUNK]
        ids = [f"image {number:08d}" for number in range(start, start + len(some))]
        index.add(ids, some, [{"source": name} for name in ids])
    return index, len(vectors) / (time.perf_counter() - started)


def shown(hits: Hits) -> Hits:
    """With what a page shows read."""
    for row in range(len(hits.ids)):
        list(hits.ids[row][:SHOWN]), list(hits.metadata[row][:SHOWN])
    return hits


def reranker(dim: int) -> Callable[[Tensor, Hits], Tensor]:
    """Scores and uncertainties of a text with its candidates, by the adapter of the default preset."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        method = build_method(method_config({"name": "vacsr"}), dim=dim)
    assert isinstance(method, Vacsr)
    method.eval()
    scorer = BlockScorer(method)

    @torch.inference_mode()
    def rerank(query: Tensor, hits: Hits) -> Tensor:
        images = Embedding(hits.vectors[0])
        score = scorer.block(images, Embedding(query)).flatten()
        sigma = method.uncertainty(images, Embedding(query.expand(len(score), -1)))
        return torch.stack((score, sigma))[:, score.argsort(descending=True)]

    return rerank


def in_turn(ways: dict[str, Callable[[Tensor], object]], queries: Tensor) -> dict[str, dict[str, float]]:
    """p50 and p95 in milliseconds of every query but the first three, which find nothing in the caches."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for query in queries.split(1):
        for name, way in ways.items():
            times[name].append(1e3 * seconds(lambda way=way, query=query: way(query), device=query.device))
    cuts = {name: statistics.quantiles(each[3:], n=20, method="inclusive") for name, each in times.items()}
    return {name: {"p50_ms": each[9], "p95_ms": each[18]} for name, each in cuts.items()}


if __name__ == "__main__":
    main()
