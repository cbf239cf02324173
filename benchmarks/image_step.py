"""Time and memory of one step with towers: training and inference, with the adapter and with the sigmoid loss alone.

    python benchmarks/image_step.py --backbone clip:vit-b32 --dim 1024 [--precision fp32] [--json FILE]
    python benchmarks/image_step.py --backbone towers:IMAGE,TEXT --dim 512 --precision bf16

Random weights, random photos of 224×224 on the device, captions that fill the context; everything in one run, so that
the ratios compare like with like. `towers` is forward and backward of the two towers alone, without pooling, loss and
optimiser. Memory is the peak of the eager step. Without a GPU it says so and leaves. The paper's table
of the same steps: `vacsr compare tables/efficiency.yaml`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from _graphs import captured
from vacsr.config import BackboneConfig, DataConfig, HeadConfig, TowersConfig, TrainConfig
from vacsr.efficiency import inference_step, random_photos, training_step
from vacsr.recipes import method_config
from vacsr.train.assemble import Parts, assemble
from vacsr.train.precision import matmul_precision

MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graph": {"cuda_graph": True},
    "compiled": {"cuda_graph": True, "compile": True},
}
_WARM, _GROUPS = 8, 5


def milliseconds(step: Callable[[], object], *, steps: int) -> float:
    """Median over groups of steps, after a warm-up that compiles and captures."""
    for _ in range(_WARM):
        step()
    times = []
    for _ in range(_GROUPS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(max(1, steps // _GROUPS)):
            step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started) / max(1, steps // _GROUPS))
    return statistics.median(times)


def towers(parts: Parts, batch: int, precision: str) -> Callable[[], object]:
    """Forward and backward of the towers alone."""
    backbone, data = parts.model.backbone, parts.feed.data
    images, texts = data.images[:batch], data.texts[:batch]

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            total = backbone.encode_image(images).values.sum() + backbone.encode_text(texts).values.sum()
        total.backward()
        parts.step.optimizer.zero_grad(set_to_none=True)

    return step


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each method, mode and kind of step."""
    head = HeadConfig(kind="linear", dim=args.dim, init="xavier")
    backbone = BackboneConfig(spec=args.backbone, weights="random", head=head, context=args.context)
    photos = random_photos(args.batch, words=args.words)
    for mode in args.modes.split(","):
        for number, method in enumerate(args.methods.split(",")):
            config = TrainConfig.model_validate(
                {
                    "batch_size": args.batch, "precision": args.precision, "optimizer": args.optimizer,
                    "towers": TowersConfig(freeze_image=0, ramp=False), **MODES[mode],
                }
            )  # fmt: skip
            started = time.perf_counter()
            parts = assemble(
                method_config(method), photos, config, backbone=backbone, dev=None, reading=DataConfig(cache_gb=64)
            )
            with matmul_precision(config.precision):
                if number == 0:
                    alone = towers(parts, args.batch, args.precision)
                    found = milliseconds(alone if mode == "eager" else captured(alone), steps=args.steps)
                    yield {"step": "towers", "method": "–", "mode": mode, "ms": found}
                torch.cuda.reset_peak_memory_stats()
                found = milliseconds(training_step(parts, args.batch), steps=args.steps)
                peak = torch.cuda.max_memory_allocated() / 2**30
                yield {"step": "training", "method": method, "mode": mode, "ms": found, "peak_gib": peak}
                if mode == "eager":
                    parts.step.optimizer.state.clear()
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                    found = milliseconds(inference_step(parts, args.batch, precision=args.precision), steps=args.steps)
                    peak = torch.cuda.max_memory_allocated() / 2**30
                    yield {"step": "inference", "method": method, "mode": mode, "ms": found, "peak_gib": peak}
            print(f"({method}, {mode}: {time.perf_counter() - started:.0f} s in all)", file=sys.stderr)
            del parts
            torch.cuda.empty_cache()


def main() -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="clip:vit-b32")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--context", type=int, default=0, help="0: the text tower's own")
    parser.add_argument("--words", type=int, default=120, help="of a caption; enough to fill the context")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--optimizer", default="adamp", choices=("adamp", "adamw"))
    parser.add_argument("--methods", default="sigmoid,vacsr")
    parser.add_argument("--modes", default="eager,graph,compiled")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU", file=sys.stderr)
        return 3
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{where}, {args.backbone}, d={args.dim}, B={args.batch}, {args.precision}, {args.optimizer}\n")
    print("| step | method | mode | ms | images/s | peak GiB |\n|---|---|---|---|---|---|")
    rows = []
    for row in measure(args):
        rows.append(row)
        rate = 1e3 * args.batch / row["ms"]
        peak = f"{row['peak_gib']:.2f}" if "peak_gib" in row and row["mode"] == "eager" else "–"
        print(
            f"| {row['step']} | {row['method']} | {row['mode']} | {row['ms']:.2f} | {rate:,.0f} | {peak} |", flush=True
        )
    if args.json:
        options = {name: value for name, value in vars(args).items() if name != "json"}
        args.json.write_text(json.dumps({"where": where, "options": options, "rows": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
