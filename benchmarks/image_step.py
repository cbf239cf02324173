"""Time and memory of one step with towers: training and inference, with the adapter and with other heads.

    python benchmarks/image_step.py --backbone clip:vit-b32 --dim 1024 [--precision fp32,tf32,bf16] [--tile 0,64]
                                    [--methods sigmoid,vacsr,pcmepp] [--fused] [--no-optimizer] [--json FILE]
    python benchmarks/image_step.py --backbone towers:IMAGE,TEXT --dim 512 --precision bf16 --no-optimizer

Random weights, random photos of 224×224 on the device, captions that fill the context; everything in one run, so that
the ratios compare like with like. `towers` is forward and backward of the two towers alone, without pooling, loss and
optimiser, one after the other. With --no-optimizer a step ends with its gradients. `vacsr, fused` has hand-written
kernels between heads and decoder. Memory is the peak of a step that is not replayed (for a graph, of the one that is
captured), above what was held before its model was built. Under the table stand the ratios: what the adapter adds to
the sigmoid loss beside its own matrix products, and to PCME++'s inference; each step over the towers alone. Without a
GPU it says so and leaves. The paper's table of the same steps: `vacsr compare tables/efficiency.yaml`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from _common import adapter_flops, captured, finish, log, need_gpu, parser, peak_gib, product_rate
from vacsr.bench import BenchResult, Step, describe_device, seconds_per_step
from vacsr.bench.training import inference_step, random_photos, training_step
from vacsr.config import BackboneConfig, DataConfig, HeadConfig, TowersConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.methods.vacsr import Vacsr
from vacsr.train.data import Batch
from vacsr.train.retrieval import RetrievalTask
from vacsr.train.step import matmul_precision
from vacsr.train.trainer import Trainer

MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graph": {"cuda_graph": True},
    "compiled": {"cuda_graph": True, "compile": True},
}
FUSED = ", fused"  # how the name of vacsr with its kernels ends
_WARM_UP, _GROUPS = 3, 5  # a graphed step is captured after three
Row = dict[str, Any]


def held_bytes() -> int:
    """Bytes that earlier rows have left behind, such as workspaces, and that count for no row."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def measured(step: Step, *, steps: int, before: int, replayed: Callable[[Step], Step] = lambda step: step) -> Row:
    """Peak of one step after a warm-up that compiles, above ``before``; then the median time over groups of steps."""
    for _ in range(_WARM_UP):
        step()
    torch.cuda.synchronize()
    peak = peak_gib(step, before=before)
    step = replayed(step)
    for _ in range(_WARM_UP):
        step()
    seconds = seconds_per_step(step, device=torch.device("cuda"), steps=steps, groups=_GROUPS)
    return {"ms": 1e3 * seconds, "peak_gib": peak}


def towers(trainer: Trainer, batch: int, precision: str) -> Step:
    """Forward and backward of the towers alone."""
    task = trainer.task
    backbone, data = task.model.backbone, task.loader
    images, texts = data.images[:batch], data.texts[:batch]

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            total = backbone.encode_texts(texts).values.sum() + backbone.encode_images(images).values.sum()
        total.backward()
        trainer.optimizer.zero_grad(set_to_none=True)

    return step


def gradients(trainer: Trainer, batch: int) -> Step:
    """A training step without clipping and update."""
    rows, number = torch.arange(batch, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")

    def step() -> None:
        trainer.step.run(Batch(rows), number, last=False)
        trainer.optimizer.zero_grad(set_to_none=True)

    return step


def built(args: argparse.Namespace, method: str, *, tile: int | str, mode: str, precision: str) -> Trainer:
    """Model, photos and step."""
    head = HeadConfig(kind="linear", dim=args.dim, init="xavier")
    backbone = BackboneConfig(spec=args.backbone, weights="random", head=head, context=args.context)
    settings = {"batch_size": args.batch, "precision": precision, "optimizer": args.optimizer, "tile": tile}
    towers = TowersConfig(freeze_image=0, ramp=False)
    config = TrainConfig.model_validate({**settings, "towers": towers, **MODES[mode]})
    photos, reading = random_photos(args.batch, words=args.words), DataConfig(cache_gb=64)
    chosen: Any = {"name": method.removesuffix(FUSED)}
    if chosen["name"] == "vacsr":
        chosen["objective"] = {"fused": method.endswith(FUSED)}
    return Trainer(RetrievalTask(method_config(chosen), photos, config, backbone=backbone, reading=reading), config)


def timed(args: argparse.Namespace) -> Iterator[Row]:
    """One row for each precision, mode, method, tile and kind of step."""
    methods = [*args.methods, *(["vacsr" + FUSED] if args.fused else [])]
    runs = [(method, tile) for method in methods for tile in (args.tile if "vacsr" in method else [0])]
    first = next((number for number, (method, _) in enumerate(runs) if "vacsr" in method), None)
    for precision, mode in itertools.product(args.precision, args.modes):
        for number, (method, tile) in enumerate(runs):
            started, before = time.perf_counter(), held_bytes()
            trainer = built(args, method, tile=tile, mode=mode, precision=precision)
            known = {"way": method, "tile": tile, "mode": mode, "precision": precision}
            with matmul_precision(precision):
                for step, row in steps_of(args, trainer, mode, precision, before=before, first=number == 0):
                    alone = {"way": "–", "tile": 0} if step == "towers" else {}
                    yield {"step": step, **known, **alone, **row, "images_per_s": 1e3 * args.batch / row["ms"]}
                if number == first:
                    yield {"step": "products", **known, **products(trainer.task.model.method, args.batch, precision)}
            log(f"{method}, {mode}: {time.perf_counter() - started:.0f} s in all")
            del trainer
            torch._dynamo.reset()
            torch.cuda.empty_cache()


def steps_of(
    args: argparse.Namespace, trainer: Trainer, mode: str, precision: str, *, before: int, first: bool
) -> Iterator[tuple[str, Row]]:
    """The towers alone for the first of a mode, then training, and inference where nothing is captured."""
    plain = {"steps": args.steps, "before": before}
    again = plain if mode == "eager" else {**plain, "replayed": captured}
    if first:
        yield "towers", measured(towers(trainer, args.batch, precision), **again)
    if args.no_optimizer:
        yield "training", measured(gradients(trainer, args.batch), **again)
    else:  # it is captured by itself
        yield "training", measured(training_step(trainer), **plain)
    if mode == "eager" and trainer.task.config.tile in (0, args.tile[0]):
        trainer.optimizer.state.clear()
        yield "inference", measured(inference_step(trainer.task), **plain)


def products(method: Vacsr, batch: int, precision: str) -> Row:
    """The adapter's matrix products at the rate of a large one."""
    flops, rate = adapter_flops(method.adapter, batch**2), product_rate(precision)
    return {"ms": 1e3 * flops / rate, "gflop": flops / 1e9, "tflops": rate / 1e12}


def ratios(rows: list[Row]) -> Iterator[str]:
    """What the table of absolute numbers does not show by itself."""
    known = {(r["precision"], r["mode"], r["step"], r["way"], r["tile"]): r for r in rows}
    products = {row["precision"]: row for row in rows if row["step"] == "products"}
    for (precision, mode, step, method, tile), row in known.items():
        named = f"{precision}, {mode}: {step} of {method}" + (f" in tiles of {tile}" if tile else "")
        plain = known.get((precision, mode, step, "sigmoid", 0))
        if step == "training" and method.startswith("vacsr") and plain is not None:
            added, work = row["ms"] - plain["ms"], products[precision]
            more = row["peak_gib"] / plain["peak_gib"] - 1
            yield (
                f"- {named} adds {added:.2f} ms to sigmoid's {plain['ms']:.2f}: {added / work['ms']:.2f} × its "
                f"{work['gflop']:.0f} GFLOP at {work['tflops']:.0f} TFLOP/s ({work['ms']:.2f} ms); memory {more:+.1%}"
            )
        other = known.get((precision, mode, step, "pcmepp", 0))
        if step == "inference" and method == "vacsr" and other is not None:
            yield f"- {named} takes {row['ms'] / other['ms']:.4f} × pcmepp's {other['ms']:.2f} ms"
        alone = known.get((precision, mode, "towers", "–", 0))
        if step == "training" and alone is not None:
            yield f"- {named} takes {row['ms'] / alone['ms']:.3f} × forward and backward of the towers"


def main() -> None:
    """Time every step that was asked for."""
    words = lambda text: text.split(",")  # noqa: E731
    options = parser(__doc__)
    options.add_argument("--backbone", default="clip:vit-b32")
    options.add_argument("--dim", type=int, default=1024)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--context", type=int, default=0, help="0: the text tower's own")
    options.add_argument("--words", type=int, default=120, help="of a caption; enough to fill the context")
    options.add_argument("--precision", type=words, default=["fp32"], help="some of fp32,tf32,bf16")
    options.add_argument("--optimizer", default="adamp", choices=("adamp", "adamw"))
    options.add_argument("--no-optimizer", action="store_true", help="a step ends with its gradients")
    options.add_argument("--methods", type=words, default=["sigmoid", "vacsr"])
    options.add_argument("--modes", type=words, default=list(MODES), help="some of eager,graph,compiled")
    options.add_argument("--fused", action="store_true", help="also vacsr with fused kernels")
    options.add_argument("--tile", type=words, default=["0"], help="of vacsr's loss: 0 (whole), numbers, auto")
    options.add_argument("--steps", type=int, default=100)
    args = options.parse_args()
    where = describe_device(need_gpu("a step with towers"))
    args.tile = [tile if tile == "auto" else int(tile) for tile in args.tile]
    rows = list(timed(args))
    columns = {
        "precision": "precision", "mode": "mode", "step": "step", "way": "method", "tile": "tile", "ms": "ms",
        "images_per_s": "images/s", "peak_gib": "peak GiB",
    }  # fmt: skip
    update = "no optimiser" if args.no_optimizer else args.optimizer
    settings = {"backbone": args.backbone, "d": args.dim, "B": args.batch, "update": update}
    finish(BenchResult("image-step", where, settings, rows, columns, notes=tuple(ratios(rows))), args.json)


if __name__ == "__main__":
    main()
