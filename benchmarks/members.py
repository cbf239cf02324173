"""Scores of all pairs by an ensemble: does it reach the same share of the matrix products' rate as one network?

    python benchmarks/members.py [--images 5000] [--texts 25000] [--dims 256,1024] [--members 4] [--json FILE]

For each d, in turns: the trunk's products alone (the ceiling), all scores by the kernel, and the top-10 of both sides,
once for one network and once for the ensemble. Weights and unit vectors are random, bf16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from _common import finish, log, need_gpu, parser
from vacsr.bench import BenchResult, Prepared, Way, describe_device, measure
from vacsr.bench.scoring import Problem, bare_product, matrix, topk
from vacsr.methods.base import Embedding
from vacsr.methods.members import Members
from vacsr.scoring.kernel import KernelScorer

COLUMNS = {key: key for key in ("d", "members", "way", "seconds")} | {"tflops": "TFLOP/s", "share": "share of products"}
PRODUCTS = "the trunk's products"


class Ensemble(Problem):
    """Several networks on vectors that stand end to end; one network is the problem itself."""

    @torch.no_grad()
    def __init__(self, images: int, texts: int, dim: int, members: int, *, device: torch.device) -> None:
        super().__init__(images, texts, dim, device=device)
        if members > 1:
            parts = [self.method, *(Problem(1, 1, dim, device=device).method for _ in range(members - 1))]
            self.method = Members(self.method.config, parts)  # type: ignore[assignment]
            generator = torch.Generator(device).manual_seed(1)
            v, t = (torch.randn(n, dim * members, device=device, generator=generator) for n in (images, texts))
            self.v, self.t = (Embedding(functional.normalize(x, dim=1)) for x in (v, t))
        self.operations *= members


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--images", type=int, default=5000)
    made.add_argument("--texts", type=int, default=25_000)
    made.add_argument("--dims", type=lambda text: [*map(int, text.split(","))], default=[256, 1024])
    made.add_argument("--members", type=int, default=4)
    args, device = made.parse_args(), need_gpu("this benchmark")
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for dim in args.dims:
            sizes = args.images, args.texts, dim
            problems = {count: Ensemble(*sizes, count, device=device) for count in (1, args.members)}
            ways = [Way({"d": dim, "members": 1, "way": PRODUCTS}, partial(bare_product, problems[1], torch.bfloat16))]
            for count, problem in problems.items():
                kernel: dict[str, partial[Prepared]] = {
                    "all scores": partial(matrix, problem, KernelScorer, torch.bfloat16),
                    "top-10 of both sides": partial(topk, problem, torch.bfloat16),
                }
                ways += [Way({"d": dim, "members": count, "way": name}, prepare) for name, prepare in kernel.items()]
            measured = measure(ways, device=device, log=log)
            ceiling = measured[0]["tflops"]
            rows += [{**row, "share": row["tflops"] / ceiling} if "tflops" in row else row for row in measured]
    settings = {"images": args.images, "texts": args.texts, "decoder": "16-wide + cosine", "precision": "bf16"}
    finish(BenchResult("members", describe_device(device), settings, rows, COLUMNS), args.json)


if __name__ == "__main__":
    main()
