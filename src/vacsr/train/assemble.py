"""The parts of a run, put together on the right device before its first step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vacsr.backbones.inputs import TowerInputs, tower_inputs
from vacsr.config import BackboneConfig, DataConfig, TrainConfig
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import UsageError
from vacsr.model import MatchingModel
from vacsr.train.distributed import World, join_world, take_device
from vacsr.train.feed import Feed, build_feed, how_to_keep
from vacsr.train.optim import build_optimizer
from vacsr.train.progress import PhotoProgress
from vacsr.train.step import GraphedStep, TrainStep


class Parts(NamedTuple):
    """What a run works with."""

    model: MatchingModel
    feed: Feed
    step: TrainStep
    dev_inputs: TowerInputs | None
    """The dev split as towers take it."""
    world: World
    device: torch.device


def assemble(
    method: Any,
    pairs: PairSet | PhotoSet,
    config: TrainConfig,
    *,
    backbone: BackboneConfig,
    dev: PairSet | PhotoSet | None,
    reading: DataConfig,
    progress: bool = False,
) -> Parts:
    """Model, inputs, optimiser and step; photos are decoded here where they fit into memory."""
    device = take_device(config.device)
    world = join_world(device)
    world.rows(config.batch_size)  # refuses a batch that does not divide, before anything is written
    graphed = is_graphed(config, device, ranks=world.size)
    model = _model(method, pairs, backbone, seed=config.seed)
    model.method.fit(pairs.captions, pairs.caption_image)
    model.to(device).train()
    optimizer = build_optimizer(model.param_groups(config.towers), config, capturable=graphed)
    show = progress and world.is_main and isinstance(pairs, PhotoSet)
    with PhotoProgress("reading photos", show=show) as told:
        feed = build_feed(model, pairs, config=reading, device=device, world=world, progress=told)
        dev_inputs = _dev_inputs(model, dev, reading)
    if graphed and feed.reader is not None:
        raise UsageError(
            f"train.cuda_graph needs all photos on the GPU: {how_to_keep(feed.reader)}, or train.cuda_graph=false"
        )
    step = (GraphedStep if graphed else TrainStep)(model, optimizer, feed.data, config=config, world=world)
    return Parts(model, feed, step, dev_inputs, world, device)


def is_graphed(config: TrainConfig, device: torch.device, *, ranks: int = 1) -> bool:
    """Are steps replayed as a CUDA graph? A plan that none can hold is refused."""
    graphed = config.cuda_graph and device.type == "cuda"
    if graphed and (ranks > 1 or config.accumulate > 1):
        raise UsageError("train.cuda_graph needs one rank and accumulate=1 — set train.cuda_graph=false")
    return graphed


def _model(method: Any, pairs: PairSet | PhotoSet, backbone: BackboneConfig, *, seed: int) -> MatchingModel:
    """With fresh heads, for inputs of this kind."""
    dims = (pairs.images.shape[1], pairs.texts.shape[1]) if isinstance(pairs, PairSet) else (0, 0)
    return MatchingModel.build(
        method, backbone, image_dim=dims[0], text_dim=dims[1], provenance=pairs.provenance, seed=seed, fit=pairs
    )


def _dev_inputs(model: MatchingModel, dev: PairSet | PhotoSet | None, reading: DataConfig) -> TowerInputs | None:
    """Photos of the dev split are looked at every epoch, so they are decoded once where they fit."""
    if not isinstance(dev, PhotoSet):
        return None
    return tower_inputs(model.backbone, dev, workers=reading.workers, cache_gb=reading.cache_gb)
