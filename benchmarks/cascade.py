"""Exact top-k beside top-k with a cosine prefilter: time, and how much of the exact top-k is kept.

    python benchmarks/cascade.py [--run RUN --pairs SPEC --split dev] [-k 10] [--threads 1] [--json FILE]

RUN is a run folder or a model folder. Without one, a small model is trained on generated features first: that shows the
script, not a figure to quote. Times are the processor's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import vacsr
from _common import finish, parser
from vacsr.bench import BenchResult, describe_device, timed
from vacsr.scoring import PairScorer, PairScores

CANDIDATES = (10, 20, 50, 100, 200)


def main() -> None:
    """Print a table with both directions."""
    options = parser(__doc__)
    options.add_argument("--run", type=Path)
    options.add_argument("--pairs", default="synthetic:images=200")
    options.add_argument("--split", default="train")
    options.add_argument("-k", type=int, default=10)
    options.add_argument("--threads", type=int, default=1)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    pairs = vacsr.load_pairs(args.pairs, split=args.split)
    scorer = trained(pairs) if args.run is None else PairScorer.from_pretrained(args.run, device="cpu")
    scores = scorer.score_set(pairs)
    rows = [row for direction in ("i2t", "t2i") for row in measured(scores, args.k, direction=direction)]
    settings = {"images": len(pairs.image_ids), "captions": len(pairs), "top": args.k}
    columns = {
        "way": "candidates", "direction": "direction", "recall": "recall of the exact top-k",
        "complete": "nothing missed", "seconds": "seconds",
    }  # fmt: skip
    finish(BenchResult("cascade", describe_device(torch.device("cpu")), settings, rows, columns), args.json)


def trained(pairs: Any) -> PairScorer:
    """One epoch of a small model."""
    config = vacsr.TrainConfig(epochs=1, batch_size=64, device="cpu")
    run = vacsr.fit("vacsr", pairs, config, backbone=vacsr.BackboneConfig(head=vacsr.HeadConfig(dim=64)))
    return PairScorer(run.model, device="cpu")


def measured(scores: PairScores, k: int, *, direction: Any) -> Iterator[dict[str, Any]]:
    """Recall and time of the exact top-k, and for each number of candidates."""
    exact = scores.topk(k, direction=direction).index
    for candidates in (None, *(count for count in CANDIDATES if count >= k)):
        (_, index), cost = timed(partial(scores.topk, k, direction=direction, prefilter=candidates))
        hits = (exact.unsqueeze(2) == index.unsqueeze(1)).any(dim=2)
        share = {"recall": float(hits.double().mean()), "complete": float(hits.all(dim=1).double().mean())}
        yield {"way": candidates or "all: exact", "direction": direction, **share, "seconds": cost[1]}


if __name__ == "__main__":
    main()
