"""One optimiser step over two small towers: the `adamp` package, our AdamP, and torch's fused AdamW as the floor.

    python benchmarks/adamp.py [--rounds 30] [--threads 2] [--json FILE]

Parameters have the shapes of DINOv2-small (12 blocks) and MiniLM-L6 (6 blocks and 30,522 word vectors), 22M each;
every block has a learning rate of its own, gradients are random. On a GPU what can be captured is timed as a CUDA
graph too. Medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from _gpu import captured
from vacsr.bench import describe_device, time_in_turn
from vacsr.files import write_json
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
    """By the authors of the paper."""
    from adamp import AdamP as Authors

    optimizer: Optimizer = Authors(groups, **settings)
    return optimizer


def ways(device: str) -> dict[str, Callable[[], object]]:
    """Each optimiser on its own towers."""
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


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2, help="torch's threads on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = sum(weight.numel() for group in towers("cpu") for weight in group)
    timings = time_in_turn(ways(device.type), device=device, rounds=args.rounds, budget=60.0)
    ms = {name: 1e3 * timing.median for name, timing in timings.items()}
    rows = [{"optimiser": name, "ms": each, "ratio": ms["adamp package"] / each} for name, each in ms.items()]
    print(f"{describe_device(device)}, {count / 1e6:.1f}M parameters, median of {args.rounds}\n")
    print("| optimiser | ms a step | package / this |\n|---|---|---|")
    for row in rows:
        print(f"| {row['optimiser']} | {row['ms']:.2f} | {row['ratio']:.2f} |")
    if args.json:
        write_json(args.json, {"where": describe_device(device), "parameters": count, "rows": rows})


if __name__ == "__main__":
    main()
