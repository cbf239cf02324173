"""Between two epochs: the whole training set in the shared space, for methods that take stock of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vacsr.config import TrainConfig
from vacsr.methods.base import SetEmbeddings, TrainingView
from vacsr.model import MatchingModel
from vacsr.train.distributed import World, gather_rows
from vacsr.train.feed import Feed

_TOWERS = {"cpu": 32, "cuda": 256}  # photos or captions at a time
_FEATURES = 8192


def take_stock(model: MatchingModel, feed: Feed, *, config: TrainConfig, epoch: int, images: int) -> None:
    """Let the method see the training set of so many images before this epoch, counted from 0."""
    view = TrainingView(
        epoch=epoch,
        epochs=config.epochs,
        seed=config.seed,
        batch_size=config.batch_size,
        caption_image=feed.data.caption_image,
        embed=lambda: embed_training_set(model, feed, images=images),
    )
    model.method.start_epoch(view)


@torch.no_grad()
def embed_training_set(model: MatchingModel, feed: Feed, *, images: int) -> SetEmbeddings:
    """Every image and caption without augmentation; ranks share the work and all get the result."""
    model.eval()
    try:
        with model.plain_blocks():
            at_once = _TOWERS[feed.device.type] if model.has_towers else _FEATURES
            batches = _own_batches(images, at_once, feed.world)
            pixels = (model.embed_images(part).mean.float() for part in _images(feed, batches))
            v = _from_all(pixels, images, dim=model.dim, feed=feed)
            rows = _own_batches(len(feed.data.texts), at_once, feed.world)
            words = (model.embed_texts(feed.data.texts[part.start : part.stop]).mean.float() for part in rows)
            t = _from_all(words, len(feed.data.texts), dim=model.dim, feed=feed)
    finally:
        model.train()
    return SetEmbeddings(v, t)


def _own_batches(count: int, at_once: int, world: World) -> list[range]:
    """This rank's share of the rows, in blocks."""
    share = -(-count // world.size)
    stop = min((world.rank + 1) * share, count)
    return [range(start, min(start + at_once, stop)) for start in range(world.rank * share, stop, at_once)]


def _images(feed: Feed, batches: list[range]) -> Iterator[Tensor]:
    """On the device, from wherever they are kept."""
    if feed.reader is not None:
        return (photos.to(feed.device) for photos in feed.reader.stream(batches))
    kept = feed.data.images
    assert kept is not None, "images are on the device or come from a reader"
    return (kept[part.start : part.stop] for part in batches)


def _from_all(parts: Iterable[Tensor], count: int, *, dim: int, feed: Feed) -> Tensor:
    """All ranks' rows. A last, smaller share is filled up on the way, since ranks send equally much. -> [count, dim]"""
    share = -(-count // feed.world.size)
    own = torch.zeros(share, dim, device=feed.device)
    done = 0
    for part in parts:
        own[done : done + len(part)] = part
        done += len(part)
    return gather_rows(own, feed.world)[:count]
