"""Scores of all pairs of a COCO-5K-sized set, every way in one run on one GPU.

    python benchmarks/scoring.py [--images 5000] [--texts 25000] [--dim 1024] [--rounds 3] [--only WORD …]
                                 [--json FILE]

ceiling      cuBLAS: the same multiplications as one batch of large products, nothing else (bf16, and fp8 where it can)
paper-style  all heads for every pair of 128 × 128 chunks, mixture mean, decoder; float32, then TF32
folded       `BlockScorer` in bf16: eager, and one tile compiled
kernel       `KernelScorer`: linear and 16-wide decoder, bf16 or fp8; matrix out, or top-10 of both directions streamed
default      `PairScores.topk`: the kernel finds 26 of each query in fp16, float32 scores these

Every row scores all images. Weights and unit vectors are random. A row that fails is printed with its error and the
others go on. Rankings are compared on the first 256 images.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from _scoring_ways import CHUNK, WIDE, Problem, Way, problem, ways
from vacsr.methods.base import Embedding
from vacsr.scoring import kernel
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.kernel_error import ranking_error, topk_overlap
from vacsr.scoring.kernel_pack import FP8
from vacsr.scoring.kernel_scorer import FinderScorer, KernelScorer
from vacsr.scoring.topk import stable_topk

COMPARED = 256


def seconds(call: Callable[[], object], *, rounds: int, warm: bool) -> float:
    """Median over the rounds; where ``warm``, after one that is not counted (it compiles and picks tiles)."""
    times = []
    for number in range(rounds + warm):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if number >= warm:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(way: Way, p: Problem, *, rounds: int) -> dict[str, Any]:
    """One row; what goes wrong becomes part of it."""
    row: dict[str, Any] = {"way": way.name, "decoder": way.decoder, "dtype": way.dtype, "note": way.note}
    try:
        call = way.make(p)
        if way.name == "paper-style":  # too slow to run twice: warmed up on one row of chunks
            way.make(p._replace(v=p.v[:CHUNK]))()
        row["seconds"] = seconds(call, rounds=way.rounds or rounds, warm=way.name != "paper-style")
        row["tflops"] = p.operations / row["seconds"] / 1e12
    except Exception as error:  # one row must not end the run
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    torch.cuda.empty_cache()
    return row


def ratios(rows: list[dict[str, Any]]) -> None:
    """Share of the bf16 ceiling, and how many times faster than the paper's way."""
    found = {(row["way"], row["dtype"]): row["seconds"] for row in rows if "seconds" in row}
    for row in rows:
        for key, other in (("ceiling", ("ceiling (cuBLAS)", "bf16")), ("fp32", ("paper-style", "fp32")),
                           ("tf32", ("paper-style", "TF32"))):  # fmt: skip
            row[f"x_{key}"] = found[other] / row["seconds"] if "seconds" in row and other in found else None


def rankings(p: Problem) -> dict[str, Any]:
    """Overlap of the top 10 texts and Kendall's τ on some images: each precision against float32, fp8 against bf16."""
    v, t = Embedding(p.v[:COMPARED]), Embedding(p.t)
    method = p.methods[WIDE]
    matrices = {"fp32": BlockScorer(method).block(v, t)}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp8", FP8)):
        matrices[name] = KernelScorer(method, dtype=dtype).block(v, t)
    result: dict[str, Any] = {}
    for name, reference in (("bf16", "fp32"), ("fp16", "fp32"), ("fp8", "fp32"), ("fp8", "bf16")):
        error = ranking_error(matrices[name], matrices[reference])
        spread = float((matrices[name] - matrices[reference]).square().mean().sqrt() / matrices[reference].std())
        result[f"{name} against {reference}"] = {**error._asdict(), "rms_over_std": spread}
    again = KernelScorer(method, dtype=FP8).topk_both(v, t, k=10)
    found = FinderScorer(method).topk(v, t, k=10, direction="i2t").index
    result["default topk against fp32"] = {"overlap": topk_overlap(found, stable_topk(matrices["fp32"], 10).index)}
    for reference in ("fp32", "bf16"):
        texts = topk_overlap(again.texts.index, stable_topk(matrices[reference], 10).index)
        images = topk_overlap(again.images.index, stable_topk(matrices[reference].T, 10).index)
        result[f"fp8 rescored against {reference}"] = {"overlap": texts, "overlap_images": images}
    return result


def line(row: dict[str, Any]) -> str:
    """A row as Markdown."""
    if "error" in row:
        cells = ["–", "–", "–", "–", "–", row["error"]]
    else:
        share = [f"{row[key]:.3g}" if row.get(key) else "–" for key in ("x_ceiling", "x_fp32", "x_tf32")]
        cells = [f"{row['seconds']:.4f}", f"{row['tflops']:.0f}", *share, row["note"]]
    return "| " + " | ".join([row["way"], row["decoder"], row["dtype"], *cells]) + " |"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--texts", type=int, default=25_000)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3, help="timed repetitions of the fast rows")
    parser.add_argument(
        "--only", nargs="+", default=[], help="rows whose name, decoder or dtype has one of these words"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if min(args.images, args.texts, args.dim, args.rounds) < 1:
        parser.error("--images, --texts, --dim and --rounds start at 1")
    if not kernel.available("cuda"):
        print("the scoring kernel is timed on a CUDA GPU with Triton; there is none here", file=sys.stderr)
        raise SystemExit(3)
    torch.backends.cuda.matmul.allow_tf32 = False
    picked = [w for w in ways() if not args.only or any(x in f"{w.name} {w.decoder} {w.dtype}" for x in args.only)]
    p = problem(args.images, args.texts, args.dim)
    rows = []
    with torch.inference_mode():
        for way in picked:
            rows.append(measure(way, p, rounds=args.rounds))
            print(line(rows[-1]), file=sys.stderr, flush=True)
        try:
            ranked = rankings(p)
        except Exception as error:  # the times are worth printing without it
            ranked = {"error": f"{type(error).__name__}: {error}"[:200]}
    ratios(rows)
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    size = {"images": args.images, "texts": args.texts, "dim": args.dim}
    print(f"{where}; {args.images:,} × {args.texts:,} pairs, d = {args.dim}, median of {args.rounds} unless noted\n")
    head = ["way", "decoder", "dtype", "seconds", "TFLOP/s of the trunk", "of the bf16 ceiling", "× paper-style fp32"]
    print(f"| {' | '.join([*head, '× paper-style TF32', 'note'])} |")
    print("|---" * 3 + "|---:" * 5 + "|---|")
    print("\n".join(map(line, rows)))
    for name, figures in ranked.items():
        print(f"\n{name}: {figures}")
    if args.json is not None:
        result = {"schema": 1, "where": where, "settings": size, "rows": rows, "rankings": ranked}
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
