"""What the benchmarks share: options, the printed table, CUDA graphs, and rates that a GPU reaches in the same run."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vacsr.adapter import VariationalAdapter
from vacsr.bench import BenchResult, Prepared, Step, Way, measure
from vacsr.bench.training import GIB
from vacsr.files import write_json
from vacsr.train.step import matmul_precision

_EDGE = 8192


def parser(doc: str | None) -> argparse.ArgumentParser:
    """With --json, and the script's docstring as help."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="also write the numbers here")
    return made


def finish(result: BenchResult, path: Path | None) -> None:
    """Print the table, and write the numbers where asked."""
    print(result.to_markdown())
    if path is not None:
        write_json(path, result.to_dict())


def stored(path: Path | None) -> dict[str, Any]:
    """What a file of records holds already."""
    known = path is not None and path.exists()
    return json.loads(path.read_text(encoding="utf-8")) if known else {"schema": 1, "records": []}


def keep(path: Path | None, record: dict[str, Any], *, keys: Sequence[str]) -> None:
    """Add a record to a file, in place of one with the same values of these keys."""
    if path is not None:
        whole = stored(path)
        others = [old for old in whole["records"] if any(old.get(key) != record.get(key) for key in keys)]
        write_json(path, {**whole, "records": [*others, record]})


def log(text: str) -> None:
    """What is being timed, on stderr."""
    print(text, file=sys.stderr, flush=True)


def need_gpu(subject: str, *, available: bool | None = None) -> torch.device:
    """The GPU; without one the script ends with exit code 3, which `make bench` accepts."""
    if not (torch.cuda.is_available() if available is None else available):
        print(f"{subject} needs a CUDA GPU; there is none here", file=sys.stderr)
        raise SystemExit(3)
    return torch.device("cuda")


def medians(steps: Mapping[str, Step], *, device: torch.device, rounds: int, budget: float = 60.0) -> dict[str, float]:
    """Milliseconds of each, all in turn; one that fails is an error."""
    ways = [Way({"way": name}, lambda step=step: Prepared(step)) for name, step in steps.items()]
    rows = measure(ways, device=device, rounds=rounds, budget=budget, statistic=statistics.median)
    for row in rows:
        if "problem" in row:
            raise RuntimeError(f"{row['way']}: {row['problem']}")
    return {row["way"]: 1e3 * row["median"] for row in rows}


def timed(work: Callable[[], Any]) -> tuple[Any, np.ndarray]:
    """The result of one call, and its seconds of wall clock and of processor: other load affects the latter less."""
    started, busy = time.perf_counter(), time.process_time()
    with warnings.catch_warnings(action="ignore"):
        result = work()
    return result, np.array([time.perf_counter() - started, time.process_time() - busy])


def peak_gib(step: Step, *, before: int) -> float:
    """The peak of CUDA's allocated memory in one step, above ``before`` bytes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def captured(step: Step) -> Callable[[], None]:
    """The same as a CUDA graph. The graph does not keep its inputs alive; the step, which is kept, does."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_step: Step = step) -> None:
        graph.replay()

    return replay


def adapter_flops(adapter: VariationalAdapter, pairs: int) -> float:
    """Of all matrix products of a training step: forward, and twice that backward."""
    return 3 * 2.0 * pairs * sum(p.numel() for p in adapter.parameters() if p.ndim == 2)


def product_rate(precision: str) -> float:
    """FLOP/s of one product of 8192 × 8192 matrices."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(_EDGE, _EDGE, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    with matmul_precision(precision):
        ms = medians({"product": lambda: torch.mm(a, b, out=out)}, device=a.device, rounds=9)["product"]
    return 2e3 * _EDGE**3 / ms
