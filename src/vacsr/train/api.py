"""Training from Python, without a recipe file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from vacsr.config import BackboneConfig, DataConfig, MethodConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import UsageError
from vacsr.methods.base import Method
from vacsr.train.folder import holds_run, run_lock
from vacsr.train.loop import Run, Trainer


def fit(
    method: str | Mapping[str, Any] | MethodConfig | Method,
    pairs: PairSet | PhotoSet,
    config: TrainConfig | None = None,
    *,
    dev: PairSet | PhotoSet | None = None,
    backbone: BackboneConfig | None = None,
    data: DataConfig | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Run:
    """Train ``method`` (a name such as "vacsr" or "vacsr-paper", a config, or a Method object) on ``pairs``.

    ``dev`` gives model choice by RSUM; ``data`` says how photos are read; ``out`` is where log and checkpoint go;
    ``resume`` continues from it. Without ``resume``, a folder that already holds a run is refused, and always one that
    another process fills.
    """
    if out is not None and not resume and holds_run(Path(out)):
        raise UsageError(f"{out} already holds a run — continue it with resume=True, or choose another out")
    config, backbone = config or TrainConfig(), backbone or BackboneConfig()
    chosen = method if isinstance(method, nn.Module) else method_config(method)
    reading = data or DataConfig()
    with nullcontext() if out is None else run_lock(Path(out)):
        trainer = Trainer.create(
            chosen, pairs, config, backbone=backbone, dev=dev, out=out, reading=reading, progress=progress
        )
        if resume:
            trainer.resume()
        return trainer.run(progress=progress)
