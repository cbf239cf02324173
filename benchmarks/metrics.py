"""Time from one score matrix to the field's figures: vacsr, eccv_caption and torchmetrics side by side.

    python benchmarks/metrics.py [--threads 1] [--json FILE]

The same as `vacsr bench metrics --size coco`: 5,000 × 25,000 scores of COCO's test list. The run takes some minutes,
nearly all of them the others'. Figures are compared, too: a difference is an error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from vacsr.bench import run_bench
from vacsr.files import write_json


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = run_bench("metrics", device=torch.device("cpu"), size="coco", say=lambda what: print(what, file=sys.stderr))
    print(found.to_markdown())
    if args.json:
        write_json(args.json, found.to_json())


if __name__ == "__main__":
    main()
