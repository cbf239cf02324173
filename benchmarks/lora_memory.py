"""Memory and time of a training step with towers: all weights, or LoRA; with and without recomputed activations.

    python benchmarks/lora_memory.py [--backbone clip:vit-b16] [--batch 128] [--batches 8,16,32,64] [--rank 16]
                                     [--precision tf32] [--method sigmoid] [--rounds 3] [--json FILE]

Random weights, random photos, captions that fill the context, AdamW. `peak` is the peak of a whole step, model
included; `held` is what stays between two steps: weights and the optimiser's moments. Time is the median of interleaved
rounds at --batch; at the other sizes only the memory is measured, and notes say at which of them LoRA takes half of
what all weights take. Without a GPU a small CLIP shows that it runs; `peak` is then that of weights, gradients and
moments only.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from _common import finish, log, medians, parser, peak_gib
from vacsr.bench import BenchResult, describe_device
from vacsr.bench.training import GIB, random_photos
from vacsr.config import BackboneConfig, DataConfig, HeadConfig, LoraConfig, TowersConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.train.data import Batch
from vacsr.train.retrieval import RetrievalTask
from vacsr.train.step import matmul_precision
from vacsr.train.trainer import Trainer

ALL = "all weights"
COLUMNS = {
    "way": "way", "recompute": "recomputed", "batch": "batch", "trained": "trained, M", "held_gib": "held, GiB",
    "peak_gib": "peak, GiB", "share": "of all weights", "ms": "ms",
}  # fmt: skip


def small_clip(folder: Path) -> str:
    """The configuration of a CLIP that a CPU trains in no time."""
    from transformers import CLIPConfig

    side = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**side, "vocab_size": 600, "max_position_embeddings": 16}
    CLIPConfig(vision_config={**side, "image_size": 32, "patch_size": 16}, text_config=text).save_pretrained(folder)
    return f"clip:{folder}"


class Case:
    """A model that is trained in one way, and its steps."""

    def __init__(self, way: str, args: argparse.Namespace, lora: LoraConfig) -> None:
        self.way, before = way, allocated()
        head = HeadConfig(kind="linear", dim=args.dim)
        backbone = BackboneConfig(spec=args.backbone, weights="random", lora=lora, head=head)
        towers = TowersConfig(freeze_image=0, ramp=False)
        config = TrainConfig(batch_size=args.batch, precision=args.precision, device=args.device, towers=towers)
        reading, photos = DataConfig(cache_gb=64), random_photos(args.batch, words=120)
        self.task = RetrievalTask(method_config(args.method), photos, config, backbone=backbone, reading=reading)
        self.trainer = Trainer(self.task, config)
        self.trained = sum(p.numel() for p in self.trainer.step.params)
        self.gradients = sum(p.nbytes for p in self.trainer.step.params)
        self.step(2, recompute=True)  # the optimiser makes its moments
        moments = (x for state in self.trainer.optimizer.state.values() for x in state.values())
        tensors = (*self.task.model.parameters(), *self.task.model.buffers(), *moments)
        self.held = sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
        self.allocated = allocated() - before

    def step(self, batch: int, *, recompute: bool) -> None:
        """Of the first ``batch`` captions."""
        self.task.model.backbone.set_checkpointing(recompute)
        rows = torch.arange(batch, device=self.task.device)
        self.trainer.step(Batch(rows), 0)


def allocated() -> int:
    """Bytes on the GPU between two steps, without workspaces; 0 on a CPU."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def measured(cases: list[Case], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row per way, kind of activations and batch; the time at the largest batch, all ways in turn."""
    sizes = sorted({*args.batches, args.batch})
    ways = [(case, recompute) for recompute in (False, True) for case in cases]
    timed = {
        f"{case.way}, {recompute}": partial(case.step, args.batch, recompute=recompute) for case, recompute in ways
    }
    ms = medians(timed, device=torch.device(args.device), rounds=args.rounds)
    for batch in sizes:
        log(f"memory at a batch of {batch}")
        full = 0.0
        for case, recompute in ways:
            if args.device == "cuda":
                step, others = partial(case.step, batch, recompute=recompute), allocated() - case.allocated
                peak = peak_gib(step, before=others)
            else:
                peak = (case.held + case.gradients) / GIB
            full = full or peak  # that of the first way
            yield {
                "way": case.way, "recompute": "yes" if recompute else "no", "batch": batch, "peak_gib": peak,
                "trained": case.trained / 1e6, "held_gib": case.held / GIB, "share": peak / full,
                "ms": ms[f"{case.way}, {recompute}"] if batch == args.batch else None,
            }  # fmt: skip


def halves(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Up to which batch a way takes at most half of what all weights take, kept or recomputed alike, and without."""
    peaks = {(row["way"], row["recompute"], row["batch"]): row["peak_gib"] for row in rows}
    ways = dict.fromkeys(row["way"] for row in rows if row["way"] != ALL)
    for way, (ours, theirs) in ((way, pair) for way in ways for pair in (("no", "no"), ("yes", "yes"), ("yes", "no"))):
        sizes = sorted({row["batch"] for row in rows})
        fitting = [size for size in sizes if peaks[way, ours, size] <= peaks[ALL, theirs, size] / 2]
        said = f"at batches of {', '.join(map(str, fitting))}" if fitting else "at no measured batch"
        yield f"- {way} (recomputed: {ours}) takes at most half of {ALL} (recomputed: {theirs}) {said}"


def main() -> None:
    """Measure all ways."""
    options = parser(__doc__)
    options.add_argument("--backbone", default="clip:vit-b16")
    options.add_argument("--dim", type=int, default=1024)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--batches", type=lambda text: [*map(int, text.split(","))], default=[8, 16, 32, 64])
    options.add_argument("--rank", type=int, default=16)
    options.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="tf32")
    options.add_argument("--method", default="sigmoid")
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        if args.device == "cpu":
            small = {"backbone": small_clip(Path(folder)), "dim": 16, "batch": 8, "batches": [4], "rank": 2}
            vars(args).update(small)
        targets = {"LoRA, all linear layers": (), "LoRA, q_proj and v_proj": ("q_proj", "v_proj")}
        loras = {ALL: LoraConfig(), **{way: LoraConfig(rank=args.rank, targets=only) for way, only in targets.items()}}
        cases = []
        for way, lora in loras.items():
            log(f"building: {way}")
            cases.append(Case(way, args, lora))
    with matmul_precision(args.precision):
        rows = list(measured(cases, args))
    settings = {"backbone": args.backbone if args.device == "cuda" else "a small CLIP", "d": args.dim}
    settings |= {"rank": args.rank, "precision": args.precision, "method": args.method}
    where = describe_device(torch.device(args.device))
    finish(BenchResult("lora-memory", where, settings, rows, COLUMNS, notes=tuple(halves(rows))), args.json)


if __name__ == "__main__":
    main()
