"""Exact top-k beside top-k with a cosine prefilter: time, and how much of the exact top-k is kept.

    python benchmarks/cascade.py [--run RUN --pairs SPEC --split dev] [-k 10] [--threads 1] [--json FILE]

RUN is a run folder or a model folder. Without one, a small model is trained on generated features first: that shows the
script, not a figure to quote. Times are the processor's.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vacsr
from vacsr.files import write_json
from vacsr.scoring import PairScorer, PairScores

CANDIDATES = (10, 20, 50, 100, 200)


def main() -> None:
    """Print a Markdown table for each direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--pairs", default="synthetic:images=200")
    parser.add_argument("--split", default="train")
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pairs = vacsr.load_pairs(args.pairs, split=args.split)
    scorer = trained(pairs) if args.run is None else PairScorer.from_pretrained(args.run, device="cpu")
    scores = scorer.score_set(pairs)
    print(f"{len(pairs.image_ids):,} images, {len(pairs):,} captions, top-{args.k}, threads: {args.threads}\n")
    found = [measured(scores, args.k, direction=way) for way in ("i2t", "t2i")]
    for result in found:
        print(f"{result['direction']}: exact {result['exact_s']:.2f} s\n")
        print("| candidates | recall of the exact top-k | nothing missed | seconds |\n|---|---|---|---|")
        for row in result["rows"]:
            print(f"| {row['candidates']} | {row['recall']:.4f} | {row['complete']:.4f} | {row['seconds']:.2f} |")
        print()
    if args.json:
        write_json(args.json, found)


def trained(pairs: Any) -> PairScorer:
    """One epoch of a small model."""
    config = vacsr.TrainConfig(epochs=1, batch_size=64, device="cpu")
    run = vacsr.fit("vacsr", pairs, config, backbone=vacsr.BackboneConfig(head=vacsr.HeadConfig(dim=64)))
    return PairScorer(run.model, device="cpu")


def measured(scores: PairScores, k: int, *, direction: Any) -> dict[str, Any]:
    """Recall and time for each number of candidates."""
    exact, exact_s = timed(scores, k, direction=direction, prefilter=None)
    rows = []
    for candidates in CANDIDATES:
        if candidates >= k:
            index, seconds = timed(scores, k, direction=direction, prefilter=candidates)
            hits = (exact.unsqueeze(2) == index.unsqueeze(1)).any(dim=2)
            share = {"recall": float(hits.double().mean()), "complete": float(hits.all(dim=1).double().mean())}
            rows.append({"candidates": candidates, **share, "seconds": seconds})
    return {"direction": direction, "exact_s": exact_s, "rows": rows}


def timed(scores: PairScores, k: int, *, direction: Any, prefilter: int | None) -> tuple[Tensor, float]:
    """Indices of the best k, and the processor time of the call."""
    started = time.process_time()
    top = scores.topk(k, direction=direction, prefilter=prefilter)
    return top.index, time.process_time() - started


if __name__ == "__main__":
    main()
