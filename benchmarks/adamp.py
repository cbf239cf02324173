"""One optimiser step over two small towers: the `adamp` package, our AdamP, and torch's fused AdamW as the floor.

    python benchmarks/adamp.py [--rounds 30] [--threads 2] [--json FILE]

Parameters have the shapes of DINOv2-small (12 blocks) and MiniLM-L6 (6 blocks and 30,522 word vectors), 22M each;
every block has a learning rate of its own, gradients are random. On a GPU what can be captured is timed as a CUDA
graph too. A figure is the median of the rounds, the ways taking turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from _gpu import captured
from vacsr.train.optim import AdamP

WIDTH, WORDS = 384, 30_522
BLOCK = [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)] + [(WIDTH,)] * 9 + [(4 * WIDTH,)]
IMAGE_STEM = [(WIDTH, 3, 14, 14), (WIDTH,), (1, 1, WIDTH), (1, 257, WIDTH), (WIDTH,), (WIDTH,)]
TEXT_STEM = [(WORDS, WIDTH), (512, WIDTH), (2, WIDTH), (WIDTH,), (WIDTH,)]


def towers(device: str) -> list[list[nn.Parameter]]:
    """Groups of parameters with gradients: two stems, and the blocks of two towers."""
    generator = torch.Generator(device).manual_seed(0)
    groups = [IMAGE_STEM, *[BLOCK] * 12, TEXT_STEM, *[BLOCK] * 6]
    made = [
        [nn.Parameter(torch.randn(shape, device=device, generator=generator) * 0.02) for shape in shapes]
        for shapes in groups
    ]
    for weight in (weight for group in made for weight in group):
        weight.grad = torch.randn(weight.shape, device=device, generator=generator) * 1e-3
    return made


def options(groups: list[list[nn.Parameter]], *, rate: Callable[[float], Any]) -> list[dict[str, Any]]:
    """A learning rate per block."""
    return [{"params": group, "lr": rate(5e-4 * 0.7 ** (number % 13))} for number, group in enumerate(groups)]


def package(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    """The authors' own."""
    from adamp import AdamP as Authors

    optimizer: Optimizer = Authors(groups, **settings)
    return optimizer


def ways(device: str) -> dict[str, Callable[[], object]]:
    """Each optimiser on towers of its own."""
    made: dict[str, Callable[[], object]] = {
        "adamp package": package(options(towers(device), rate=float), weight_decay=1e-4).step,
        "vacsr AdamP": AdamP(options(towers(device), rate=float), weight_decay=1e-4).step,
        "torch AdamW, fused": torch.optim.AdamW(
            options(towers(device), rate=float), weight_decay=1e-4, fused=True
        ).step,
    }
    if device == "cuda":
        held = options(towers(device), rate=lambda lr: torch.tensor(lr, device=device))
        made["vacsr AdamP, graph"] = captured(AdamP(held, weight_decay=1e-4, capturable=True).step)
        held = options(towers(device), rate=lambda lr: torch.tensor(lr, device=device))
        fused = torch.optim.AdamW(held, weight_decay=1e-4, fused=True, capturable=True)
        made["torch AdamW, fused, graph"] = captured(fused.step)
    return made


def time_all(steps: dict[str, Callable[[], object]], device: str, rounds: int) -> dict[str, float]:
    """Median milliseconds of each, taking turns."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 3):
        for name, step in steps.items():
            wait()
            started = time.perf_counter()
            step()
            wait()
            if number >= 3:
                times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2, help="torch's threads on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = sum(weight.numel() for group in towers("cpu") for weight in group)
    found = time_all(ways(device), device, args.rounds)
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {args.threads} threads"
    print(f"{where}, torch {torch.__version__}, {count / 1e6:.1f}M parameters, median of {args.rounds}\n")
    print("| optimiser | ms a step | package / this |\n|---|---|---|")
    for name, ms in found.items():
        print(f"| {name} | {ms:.2f} | {found['adamp package'] / ms:.2f} |")
    if args.json:
        rows = [{"optimiser": name, "ms": ms, "ratio": found["adamp package"] / ms} for name, ms in found.items()]
        args.json.write_text(json.dumps({"where": where, "parameters": count, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
