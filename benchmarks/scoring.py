"""Scores of all pairs of a set as large as COCO's 5K test, every way in one run on one GPU.

    python benchmarks/scoring.py [--images 5000] [--texts 25000] [--dim 1024] [--rounds 3] [--only WORD …]
                                 [--json FILE] [--spare N …] [--device cuda|cpu]

The ways of `vacsr bench scoring` (vacsr/bench/scoring.py) with more decoders and precisions:

cuBLAS       ceilings in bf16: the trunk's own products, 16 images at a time, and as many operations in products of
             8192³ back to back
kernel       linear and 16-wide decoder, bf16, fp16 or fp8; all scores, or the top-10 of both sides
default      `PairScores.topk` and `topk_both`: the kernel chooses candidates in fp16, float32 scores them again
folded       plain torch in bf16: eager, and one tile compiled
paper-style  all heads for every pair of 128 × 128 chunks, mixture mean, decoder; float32 and TF32

All ways take turns, and medians are shown; a way that has used six seconds is not timed again. Weights and unit
vectors are random. A way that fails says why and the others go on. Rankings: 256 images with all texts, 256 texts with
all images. A CPU runs what it can, to try the script out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from _common import log, need_gpu, parser
from vacsr.bench import BenchResult, Prepared, Way, describe_device, describe_error, measure
from vacsr.bench.roofline import COSINE, DECODERS, LINEAR, WIDE, compiled, square_products
from vacsr.bench.scoring import (
    Problem,
    bare_product,
    matrix,
    papers_way,
    relative_error,
    top_overlap,
    topk,
)
from vacsr.files import write_json
from vacsr.methods.base import Embedding
from vacsr.scoring import BlockScorer, Engine, choose_engine, kernel
from vacsr.scoring.cascade import Cascade
from vacsr.scoring.folded import FP8
from vacsr.scoring.kernel import KernelScorer
from vacsr.scoring.topk import stable_topk

Row = dict[str, Any]
PRODUCTS = "cuBLAS"
TRUNK, PAPER = f"{PRODUCTS}: the trunk's products", "paper-style: all heads, 128 × 128 pairs"
COLUMNS = {
    "way": "way", "decoder": "decoder", "dtype": "dtype", "seconds": "seconds", "rounds": "rounds", "tflops": "TFLOP/s",
    "x_ceiling": "× the trunk's products", "x_sustained": "× the best sustained",
    "x_fp32": "faster than paper-style fp32", "x_tf32": "TF32",
}  # fmt: skip
RANKED = {"overlap": "texts of an image kept", "overlap_images": "images of a text kept", "tau": "Kendall's τ",
          "rms_over_std": "error / spread"}  # fmt: skip
SCORES = {
    "fp16": "kernel, fp16", "bf16": "kernel, bf16", "fp8": "kernel, fp8",
    "fp8 rescored": "kernel, fp8, 26 candidates scored again in fp16", "default topk": "default topk(10)",
}  # fmt: skip
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8}
QUERIES, TOP = 256, 10
DEFAULT = 16  # candidates beyond the top-10
SAMPLED = 1000  # items that a query's τ is computed over


def again_in_half(spare: int) -> str:
    """The name of a way, by the candidates beyond the top-10."""
    return f"kernel, top-10 of both sides ({TOP + max(TOP, spare)} of each scored again in fp16)"


def squares(problem: Problem, *, edge: int) -> Prepared:
    """As many operations as the trunk has."""
    return square_products(problem.device, edge=edge, times=max(1, round(problem.operations / (2.0 * edge**3))))


def rescoring(problem: Problem, spare: int) -> Engine:
    """Float8 with candidates scored again; `choose_engine` has its own number of them."""
    if spare == DEFAULT:
        return choose_engine(problem.method, device=problem.device, dtype=FP8)
    coarse = KernelScorer(problem.method, dtype=FP8)
    return Cascade(coarse, coarse.plain, exact=False, spare=spare)


def rescored(problem: Problem, *, spare: int) -> Prepared:
    """The top-10 of both sides by float8 and half precision."""
    return topk(problem, engine=rescoring(problem, spare))


def ways(edge: int, others: Sequence[int] = ()) -> Iterator[tuple[str, str, str, Callable[[Problem], Prepared], str]]:
    """Name, decoder, precision, how to prepare it, and a note; ``edge`` is that of the square products, ``others`` are
    further numbers of candidates of float8 beyond the top-10."""
    yield TRUNK, "–", "bf16", partial(bare_product, dtype=torch.bfloat16), ""
    yield f"{PRODUCTS}: products of {edge:,}³, back to back", "–", "bf16", partial(squares, edge=edge), ""
    full, both = "kernel, all scores", "kernel, top-10 of both sides"
    for decoder, name in ((LINEAR, "bf16"), (WIDE, "bf16"), (COSINE, "bf16"), (WIDE, "fp16")):
        yield full, decoder, name, partial(matrix, engine=KernelScorer, dtype=PRECISIONS[name]), ""
    for decoder in (LINEAR, WIDE):
        yield both, decoder, "bf16", partial(topk, dtype=torch.bfloat16), ""
    default = partial(topk, dtype=torch.float32)
    yield "default topk(10), texts of images", WIDE, "fp16, fp32", partial(default, directions=["i2t"]), ""
    yield "default topk(10), images of texts", WIDE, "fp16, fp32", partial(default, directions=["t2i"]), ""
    yield "default topk_both(10)", WIDE, "fp16, fp32", default, ""
    for decoder in (LINEAR, WIDE, COSINE):
        yield full, decoder, "fp8", partial(matrix, engine=KernelScorer, dtype=FP8), ""
    for decoder, spare in ((WIDE, DEFAULT), (COSINE, DEFAULT), *((WIDE, number) for number in others)):
        yield again_in_half(spare), decoder, "fp8", partial(rescored, spare=spare), ""
    yield "folded torch, compiled", LINEAR, "bf16", compiled, ""
    for decoder in (LINEAR, WIDE):
        yield "folded torch", decoder, "bf16", partial(matrix, engine=BlockScorer, dtype=torch.bfloat16), ""
    for name in ("TF32", "fp32"):
        yield PAPER, WIDE, name, partial(papers_way, precision=name.lower()), ""


def add_ratios(rows: list[Row]) -> None:
    """Rates relative to the trunk's products, to the best that cuBLAS sustained, and to the paper's way."""
    rates = {(row["way"], row["dtype"]): row["tflops"] for row in rows if "tflops" in row}
    best = max((rate for (way, _), rate in rates.items() if way.startswith(PRODUCTS)), default=None)
    known = {
        "x_ceiling": rates.get((TRUNK, "bf16")), "x_sustained": best,
        "x_fp32": rates.get((PAPER, "fp32")), "x_tf32": rates.get((PAPER, "TF32")),
    }  # fmt: skip
    for row in (row for row in rows if "tflops" in row):
        row |= {name: rate and row["tflops"] / rate for name, rate in known.items()}


class Sides(NamedTuple):
    """Of some images with all texts, and of some texts with all images: scores, or the indices of the best."""

    texts: Tensor  # [Q, T] or [Q, k]
    images: Tensor  # [Q, I] or [Q, k]


def rankings(problem: Problem, others: Sequence[int] = ()) -> dict[str, Any]:
    """Each precision against float32, float8 also against bfloat16; one that fails says why, the others go on."""
    v, t, method = problem.v, problem.t, problem.method
    images, texts = Embedding(v.mean[:QUERIES]), Embedding(t.mean[:QUERIES])

    def scores(engine: Engine) -> Sides:
        return Sides(engine.block(images, t), engine.block(v, texts).T)

    def best(engine: Engine) -> Sides:
        (texts_of,) = engine.topk(images, t, k=TOP, directions=["i2t"])
        (images_of,) = engine.topk(v, texts, k=TOP, directions=["t2i"])
        return Sides(texts_of.index, images_of.index)

    exact = {"fp32": scores(BlockScorer(method))}
    result: dict[str, Any] = {}
    engines: dict[str, Callable[[], Engine]] = {
        "default topk": lambda: choose_engine(method, device=problem.device, dtype=torch.float32),
        "fp8 rescored": partial(rescoring, problem, DEFAULT),
        **{f"fp8 rescored, spare {spare}": partial(rescoring, problem, spare) for spare in others},
    }
    for name in (*PRECISIONS, *engines):
        try:
            if name in PRECISIONS:
                exact[name] = scores(KernelScorer(method, dtype=PRECISIONS[name]))
            else:
                top = best(engines[name]())
            for reference in ("fp32", "bf16") if "fp8" in name else ("fp32",):
                compared = exact[reference]
                errors = overlaps(top, tops(compared)) if name not in PRECISIONS else differences(exact[name], compared)
                result[f"{name} against {reference}"] = errors
        except Exception as error:  # the others are worth having
            result[f"{name} against fp32"] = {"problem": describe_error(error)}
    return result


def tops(scores: Sides) -> Sides:
    """The best 10 of each query."""
    return Sides(stable_topk(scores.texts, TOP).index, stable_topk(scores.images, TOP).index)


def overlaps(top: Sides, reference: Sides) -> dict[str, float]:
    """Shares of the reference's top-10 that are kept."""
    texts, images = (top_overlap(*pair) for pair in zip(top, reference, strict=True))
    return {"overlap": texts, "overlap_images": images}


def differences(scores: Sides, reference: Sides) -> dict[str, float]:
    """Overlaps of the top-10; τ-a and the error of the scores for the texts of an image."""
    step = -(-scores.texts.shape[1] // SAMPLED)
    taus = []
    for pair in zip(scores.texts[:, ::step], reference.texts[:, ::step], strict=True):
        signs = [torch.sign(x.unsqueeze(1) - x.unsqueeze(0)) for x in pair]
        taus.append(float((signs[0] * signs[1]).sum()) / max(1, len(pair[0]) * (len(pair[0]) - 1)))
    shares = overlaps(tops(scores), tops(reference))
    return {**shares, "tau": statistics.fmean(taus), "rms_over_std": relative_error(scores.texts, reference.texts)}


def tables(result: dict[str, Any]) -> str:
    """Ways, and rankings against float32; docs/performance.md has them from the JSON file."""
    ranked = [
        {"way": SCORES.get(name, name), **errors}
        for key, errors in result["rankings"].items()
        for name, _, reference in [key.partition(" against ")]
        if reference == "fp32"
    ]
    parts = ((result["rows"], COLUMNS), (ranked, {"way": "scores", **RANKED}))
    where, settings = result["where"], {**result["settings"], "wall seconds": result["wall_s"]}
    return "\n\n".join(BenchResult("scoring", where, settings, rows, head).to_markdown() for rows, head in parts)


def options() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--images", type=int, default=5000)
    made.add_argument("--texts", type=int, default=25_000)
    made.add_argument("--dim", type=int, default=1024)
    made.add_argument("--edge", type=int, help="of the square products; default 8192, on a CPU 1024")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--only", nargs="+", default=[], help="ways whose name, decoder or dtype has such a word")
    made.add_argument("--spare", type=int, nargs="+", default=[], help="other numbers of candidates of float8 to try")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = made.parse_args()
    args.edge = args.edge or (8192 if args.device == "cuda" else 1024)
    return args


def main() -> None:
    """Measure, print, write."""
    args, started = options(), time.perf_counter()
    if args.device == "cuda":
        need_gpu("the scoring kernel", available=kernel.available(torch.device("cuda")))
    device = torch.device(args.device)
    problems = {
        name: Problem(args.images, args.texts, args.dim, device=device, adapter=config)
        for name, config in DECODERS.items()
    }
    picked = [
        Way({"way": name, "decoder": decoder, "dtype": dtype, "note": note},
            partial(prepare, problems.get(decoder, problems[WIDE])))
        for name, decoder, dtype, prepare, note in ways(args.edge, args.spare)
        if not args.only or any(word in f"{name} {decoder} {dtype}" for word in args.only)
    ]  # fmt: skip
    with torch.inference_mode():
        rows = measure(
            picked, device=device, log=log, rounds=args.rounds, budget=6.0, statistic=statistics.median
        )  # fmt: skip
        ranked = rankings(problems[WIDE], args.spare)
    add_ratios(rows)
    sizes = {name: getattr(args, name) for name in ("images", "texts", "dim", "edge")}
    result = {
        "schema": 2, "where": describe_device(device), "settings": sizes, "rows": rows,
        "compared": {"images": min(QUERIES, args.images), "texts": min(QUERIES, args.texts), "k": TOP},
        "rankings": ranked, "wall_s": round(time.perf_counter() - started, 1),
    }  # fmt: skip
    if args.json is not None:
        write_json(args.json, result)
    print(tables(result))


if __name__ == "__main__":
    main()
