"""The two kernels between heads and decoder alone: time, and how much of a copy's rate they reach.

    python benchmarks/fused_latents.py [--shapes 16384x2x512,16384x2x1024] [--widths 128,256,512] [--precision bf16]

A shape is pairs × components × latent numbers; a width is how many of these numbers a warp holds, the one choice that
the kernels leave open (`vacsr.kernels.latents` has the default). Each row is one forward and one backward kernel,
timed as a CUDA graph of 20; ``ideal`` is what they read and write at the rate of a copy in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from _gpu import captured, copy_rate, median_seconds, need_gpu
from vacsr.noise import PairNoise

REPEATS = 20


def milliseconds(step: Callable[[], object]) -> float:
    """Of one call: the median of graphs that hold many."""

    def many() -> None:
        for _ in range(REPEATS):
            step()

    return 1e3 * median_seconds(captured(many), rounds=12) / REPEATS


def inputs(pairs: int, components: int, latent: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Heads as a trained adapter might give them, weights, and keys."""
    torch.manual_seed(0)
    heads = torch.randn(pairs, 2 * components * latent, device="cuda", dtype=dtype)
    weights = torch.randn(pairs, components, device="cuda").softmax(dim=-1)
    noise = PairNoise.create(seed=0, step=0, rows=1, cols=pairs, device=heads.device)
    return heads, weights, weights, noise.normal_keys().flatten()


def row(shape: tuple[int, int, int], width: int, dtype: torch.dtype, rate: float) -> str:
    """Of the table."""
    pairs, components, latent = shape
    given = inputs(pairs, components, latent, dtype)
    from vacsr.kernels import latents

    reading = (10.0, False, True)  # clamp, bounded, squash
    latents.PER_WARP = width
    out = torch.ops.vacsr.pair_latents(*given, *reading)
    forward = milliseconds(lambda: torch.ops.vacsr.pair_latents(*given, *reading))
    backward = milliseconds(lambda: torch.ops.vacsr.pair_latents_backward(*given, *out, *reading))
    heads, z = given[0].nbytes, out[0].nbytes
    ideal = [1e3 * moved / rate for moved in (heads + z, 2 * heads + z)]
    name = "×".join(str(size) for size in shape)
    return f"| {name} | {width} | {forward:.4f} | {ideal[0]:.4f} | {backward:.4f} | {ideal[1]:.4f} |"


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="16384x2x256,16384x2x512,16384x2x768,16384x2x1024,16384x1x512,16384x3x512")
    parser.add_argument("--widths", default="128,256,512,1024")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    args = parser.parse_args()
    need_gpu("timing the fused kernels")
    dtype, rate = torch.bfloat16 if args.precision == "bf16" else torch.float32, copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.precision}, {rate / 1e12:.2f} TB/s\n")
    print("| pairs×K×D | a warp | forward ms | ideal | backward ms | ideal |\n|---|---|---|---|---|---|")
    for text in args.shapes.split(","):
        pairs, components, latent = (int(part) for part in text.split("x"))
        for width in args.widths.split(","):
            print(row((pairs, components, latent), int(width), dtype, rate), flush=True)


if __name__ == "__main__":
    main()
