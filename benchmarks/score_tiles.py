"""The tile of the plain-torch scorer: time and memory of a block of scores, by how much may be alive at a time.

    python benchmarks/score_tiles.py [--rounds 20]

Every image scales the trunk's weights (W·diag v), so a block of few texts needs more for the weights than for what
comes out. `outputs` bounds the latter (vacsr.scoring.folded.Limits, float32) with nothing bounding the former;
`default` has both bounds of the package. Medians, the bounds taking turns; memory is the peak above the start.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from torch.nn import functional

from vacsr.config.io import method_config
from vacsr.methods import Embedding, build_method
from vacsr.scoring.folded import BlockScorer, Limits

SHAPES = ((1024, 128, 128), (1024, 1000, 5000), (512, 500, 2500), (256, 128, 128), (256, 1000, 5000))
"""d, images, texts."""
OUTPUTS = (1 << 21, 1 << 22, 1 << 23, 1 << 24, 1 << 25, 1 << 27)
DEFAULT = 0


def unit(count: int, dim: int) -> Embedding:
    """Random unit vectors. [N, d]"""
    return Embedding(functional.normalize(torch.randn(count, dim, device="cuda"), dim=-1))


def once(scorer: BlockScorer, v: Embedding, t: Embedding) -> tuple[float, float]:
    """Milliseconds and MiB of one block."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    scorer.block(v, t)
    torch.cuda.synchronize()
    taken = (time.perf_counter() - start) * 1e3
    return taken, (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> int:
    """A line for every shape and bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("tiles are timed on a CUDA GPU; there is none here", file=sys.stderr)
        return 3
    torch.manual_seed(0)
    for dim, images, texts in SHAPES:
        method = build_method(method_config("vacsr"), dim=dim).cuda().eval()
        scorers = {DEFAULT: BlockScorer(method)}
        scorers |= {outputs: BlockScorer(method, limits=Limits(outputs)) for outputs in OUTPUTS}
        v, t = unit(images, dim), unit(texts, dim)
        times: dict[int, list[float]] = {}
        peaks: dict[int, float] = {}
        for turn in range(options.rounds + 1):  # the first warms up
            for outputs, scorer in scorers.items():
                taken, peaks[outputs] = once(scorer, v, t)
                if turn:
                    times.setdefault(outputs, []).append(taken)
        print(f"d={dim}, {images} images, {texts} texts")
        for outputs, found in times.items():
            name = f"outputs 2^{outputs.bit_length() - 1}" if outputs else "default"
            print(f"  {name:13} {statistics.median(found):10.3f} ms {peaks[outputs]:7.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
