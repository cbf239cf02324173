"""Scores of all pairs of a COCO-5K-sized set, every way in one run on one GPU.

    python benchmarks/scoring.py [--images 5000] [--texts 25000] [--dim 1024] [--rounds 3] [--only WORD …]
                                 [--json FILE] [--device cuda|cpu]

cuBLAS       ceilings, bf16 and fp8: the trunk's own multiplications, one product for 16 images, and as many operations
             in products of 8192³ back to back; one such product alone, after a pause, is reported beside them
kernel       `KernelScorer`: linear and 16-wide decoder, bf16 or fp8; all scores, or top-10 of both sides streamed
default      `PairScores.topk` and `topk_both`: the kernel finds 26 of each query in fp16, float32 scores these
folded       `BlockScorer` in bf16: eager, and one tile compiled
paper-style  all heads for every pair of 128 × 128 chunks, mixture mean, decoder; float32 and TF32, timed once each

Every row scores all images; the rounds go round all rows, so that all meet the same clocks, and medians are shown. A
row that takes over two seconds is timed once.
Weights and unit vectors are random. A row that fails says why and the others go on; FILE is written after each round.
Rankings: 256 images with all texts, 256 texts with all images. A CPU runs what it can, for trying the script out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from _scoring_rankings import QUERIES, TOP, rankings
from _scoring_ways import PAPERS, PRODUCTS, TRUNK, Problem, Way, problem, ways
from vacsr.bench.ceilings import EDGE
from vacsr.bench.scoring_ways import Runner
from vacsr.bench.timing import once, what_failed
from vacsr.efficiency import where_it_runs
from vacsr.files import write_json
from vacsr.scoring import kernel

Row = dict[str, Any]
TABLE = {
    "way": "way", "decoder": "decoder", "dtype": "dtype", "seconds": "seconds", "rounds": "rounds", "tflops": "TFLOP/s",
    "x_ceiling": "× the trunk's products", "x_sustained": "× the best sustained",
    "x_fp32": "faster than paper-style fp32", "x_tf32": "TF32",
}  # fmt: skip
RANKED = {"overlap": "texts of an image kept", "overlap_images": "images of a text kept", "tau": "Kendall's τ",
          "rms_over_std": "error / spread"}  # fmt: skip

SCORES = {
    "fp16": "kernel, fp16", "bf16": "kernel, bf16", "fp8": "kernel, fp8",
    "fp8 rescored": "kernel, fp8, 30 candidates scored again in fp16", "default topk": "default topk(10)",
}  # fmt: skip
SLOW_S = 2.0  # a row that takes longer is timed once
DIGITS = {"seconds": ".3f", "rounds": "d", "tau": ".4f"}  # .2f for others


def started(way: Way, p: Problem) -> tuple[Row, Runner | None]:
    """A row without figures yet and its call, warm; what goes wrong becomes part of the row."""
    print(f"{way.name}, {way.decoder}, {way.dtype}: first call", file=sys.stderr, flush=True)
    row: Row = {"way": way.name, "decoder": way.decoder, "dtype": way.dtype, "note": way.note}
    try:
        runner = way.make(p)
        (runner.warm or runner.run)()
    except Exception as error:  # one row must not end the run
        row["error"] = what_failed(error)
        return row, None
    if runner.alone is not None:
        row["alone_tflops"] = runner.alone
    return row, runner


def time_once(row: Row, runner: Runner, p: Problem) -> None:
    """One more round of a row that has not failed and is not so slow that one must do."""
    if "error" in row or max(row.get("times", [0.0])) > SLOW_S:
        return
    try:
        row.setdefault("times", []).append(once(runner.run, device=p.v.device))
    except Exception as error:
        row["error"] = what_failed(error)
        return
    row["rounds"], row["seconds"] = len(row["times"]), statistics.median(row["times"])
    row["tflops"] = (runner.operations or p.operations) / row["seconds"] / 1e12


def ceilings(rows: list[Row]) -> list[Row]:
    """The rates of large products: what shares are taken of, and the single ones, for comparison."""
    found = []
    for row in rows:
        if row["way"].startswith(PRODUCTS) and "tflops" in row:
            known = {"name": row["way"].removeprefix(f"{PRODUCTS}: "), "dtype": row["dtype"]}
            found.append({**known, "sustained": True, "tflops": row["tflops"]})
            if "alone_tflops" in row:
                single = (
                    known["name"].replace("products", "one product").replace("back to back", "alone, after a pause")
                )
                found.append({**known, "name": single, "sustained": False, "tflops": row["alone_tflops"]})
    return found


def ratios(rows: list[Row]) -> None:
    """Rates beside those of the bf16 ceilings, of the ceilings in the row's own precision, and of the paper's way."""
    rates = {(row["way"], row["dtype"]): row["tflops"] for row in rows if "tflops" in row}
    for row in rows:
        if "tflops" not in row:
            continue
        own = "fp8" if row["dtype"] == "fp8" else "bf16"
        for key, dtype in (("", "bf16"), ("own_", own)):
            best = [rate for (way, precision), rate in rates.items() if way.startswith(PRODUCTS) and precision == dtype]
            row[f"x_{key}ceiling"] = _share(row, rates.get((TRUNK, dtype)))
            row[f"x_{key}sustained"] = _share(row, max(best, default=None))
        for key, dtype in (("x_fp32", "fp32"), ("x_tf32", "TF32")):
            row[key] = _share(row, rates.get((PAPERS, dtype)))


def _share(row: Row, rate: float | None) -> float | None:
    return None if rate is None else row["tflops"] / rate


def tables(found: dict[str, Any]) -> str:
    """Markdown, as on the page of results: rows, ceilings, rankings."""
    rows = [[_cell(row, key) for key in TABLE] for row in found["rows"]]
    products = [[row["name"], row["dtype"], _cell(row, "tflops")] for row in found["ceilings"]]
    ranked = [
        [_named(name, row), *(_cell(row, key) for key in RANKED)]
        for name, row in ((name, found["rankings"].get(f"{key} against fp32")) for key, name in SCORES.items())
        if row is not None
    ]
    parts = [(list(TABLE.values()), rows), (["product", "dtype", "TFLOP/s"], products),
             (["scores", *RANKED.values()], ranked)]  # fmt: skip
    return "\n\n".join("\n".join([_line(head), "|---" * len(head) + "|", *map(_line, body)]) for head, body in parts)


def _named(name: str, row: Row) -> str:
    """With what there is to say of it."""
    said = row.get("error") or row.get("note")
    return f"{name} ({said})" if said else name


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(row: Row, key: str) -> str:
    """A figure with the digits that mean something."""
    value = row.get(key)
    if key == "way":
        return _named(row["way"], row)
    if value is None or isinstance(value, str):
        return value or "–"
    if key in ("x_fp32", "x_tf32"):
        return f"{value:.{0 if value >= 30 else 1}f}×".replace("1.0×", "1×") if value >= 1 else "–"
    if key in ("overlap", "overlap_images", "rms_over_std"):
        return f"{100 * value:.2f}%"
    if key == "tflops":
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:{DIGITS.get(key, '.2f')}}"


def measure(picked: list[Way], p: Problem, *, rounds: int, found: dict[str, Any], save: Callable[[], None]) -> None:
    """All rounds of the fast rows in turn, then rankings, then the slow rows once; ``save`` after each step."""
    begun = [started(way, p) for way in picked if not way.slow]
    found["rows"] = [row for row, _ in begun]
    save()
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for row, runner in begun:
            if runner is not None:
                time_once(row, runner, p)
        save()
    try:
        found["rankings"] = rankings(p)
    except Exception as error:  # the times are worth printing without it
        found["rankings"] = {f"{name} against fp32": {"error": what_failed(error)} for name in SCORES}
    save()
    for way in (way for way in picked if way.slow):
        row, runner = started(way, p)
        found["rows"].append(row)
        if runner is not None:
            time_once(row, runner, p)
        save()


def options() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--texts", type=int, default=25_000)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--edge", type=int, help="of the square ceilings; default 8192, on a CPU 1024")
    parser.add_argument("--rounds", type=int, default=3, help="timed repetitions of all but the paper's way")
    parser.add_argument(
        "--only", nargs="+", default=[], help="rows whose name, decoder or dtype has one of these words"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    args.edge = EDGE[args.device] if args.edge is None else args.edge
    if min(args.images, args.texts, args.dim, args.rounds, args.edge) < 1:
        parser.error("--images, --texts, --dim, --rounds and --edge start at 1")
    if args.device == "cuda" and not kernel.available("cuda"):
        print("the scoring kernel is timed on a CUDA GPU with Triton; there is none here", file=sys.stderr)
        raise SystemExit(3)
    return args


def main() -> None:
    """Measure, print, write."""
    args, begun = options(), time.perf_counter()
    device = torch.device(args.device)
    sizes = {name: getattr(args, name) for name in ("images", "texts", "dim", "edge")}
    found: dict[str, Any] = {
        "schema": 2, "where": where_it_runs(device), "settings": sizes, "wall_s": None, "ceilings": [], "rows": [],
        "compared": {"images": min(QUERIES, args.images), "texts": min(QUERIES, args.texts), "k": TOP}, "rankings": {},
    }  # fmt: skip

    def save() -> None:
        ratios(found["rows"])
        found["ceilings"], found["wall_s"] = ceilings(found["rows"]), round(time.perf_counter() - begun, 1)
        if args.json is not None:
            write_json(args.json, found)

    picked = [
        way
        for way in ways(args.edge)
        if not args.only or any(word in f"{way.name} {way.decoder} {way.dtype}" for word in args.only)
    ]
    p = problem(args.images, args.texts, args.dim, device=device)
    with torch.inference_mode():
        measure(picked, p, rounds=args.rounds, found=found, save=save)
    print(f"{found['where']}; {args.images:,} × {args.texts:,} pairs, d = {args.dim}; {found['wall_s']:g} s in all\n")
    print(tables(found))


if __name__ == "__main__":
    main()
