"""One optimiser step over two small towers: the `adamp` package, our AdamP, and torch's fused AdamW as the floor.

    python benchmarks/adamp.py [--rounds 30] [--threads 2] [--json FILE]

Parameters have the shapes of DINOv2-small (12 blocks) and MiniLM-L6 (6 blocks and 30,522 word vectors), 22M each;
every block has a learning rate of its own, gradients are random. On a GPU what can be captured is timed as a CUDA
graph too. Medians of interleaved rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from _common import captured, finish, medians, parser
from vacsr.bench import BenchResult, describe_device
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
        "vacsr AdamP": AdamP(
            options(towers(device), rate=lambda lr: torch.tensor(lr, device=device)), weight_decay=1e-4
        ).step,
        "torch AdamW, fused": torch.optim.AdamW(
            options(towers(device), rate=float), weight_decay=1e-4, fused=True
        ).step,
    }
    if device == "cuda":

        def groups() -> list[dict[str, Any]]:
            return options(towers(device), rate=lambda lr: torch.tensor(lr, device=device))

        graphed = {
            "vacsr AdamP, graph": AdamP(groups(), weight_decay=1e-4),
            "vacsr AdamP, compiled, graph": AdamP(groups(), weight_decay=1e-4, compiled=True),
            "torch AdamW, fused, graph": torch.optim.AdamW(groups(), weight_decay=1e-4, fused=True, capturable=True),
        }
        made |= {name: captured(optimizer.step) for name, optimizer in graphed.items()}
    return made


def main() -> None:
    """Time each optimiser on its own towers."""
    choices = parser(__doc__)
    choices.add_argument("--rounds", type=int, default=30)
    choices.add_argument("--threads", type=int, default=2, help="torch's threads on a CPU")
    args = choices.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = sum(weight.numel() for group in towers("cpu") for weight in group)
    ms = medians(ways(device.type), device=device, rounds=args.rounds)
    rows = [{"way": name, "ms": each, "ratio": ms["adamp package"] / each} for name, each in ms.items()]
    settings = {"parameters": count, "rounds": args.rounds}
    columns = {"way": "optimiser", "ms": "ms a step", "ratio": "package / this"}
    finish(BenchResult("adamp", describe_device(device), settings, rows, columns), args.json)


if __name__ == "__main__":
    main()
