"""From a data set to batches on the device: what is read, in which order, and which images are mixed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.backbones.augment import Mixture, Partners, draw_mixture, mixed_labels
from vacsr.backbones.images import PhotoReader, Progress, tower_inputs
from vacsr.config import DataConfig, MixConfig
from vacsr.data import PairSet, PhotoSet, read_split
from vacsr.data.noise import CaptionNoise, apply_noise, load_noise, make_noise
from vacsr.errors import DataError, NoSuchSplit, UsageError
from vacsr.model import MatchingModel
from vacsr.noise import RowNoise, Stream, epoch_generator
from vacsr.objective import PairBlock, same_image
from vacsr.train.distributed import World

_GPU_SHARE = 0.5  # of a GPU's free memory that photos may take


class TrainingData(NamedTuple):
    """The training split, whose labels may be noisy, and a dev split, which is always clean."""

    train: PairSet | PhotoSet
    dev: PairSet | PhotoSet | None
    noise: CaptionNoise | None = None  # what was done to the labels


def training_data(config: DataConfig) -> TrainingData:
    """Read the training split with its noise, and a dev split where there is one."""
    train = read_split(config, config.train)
    dev: PairSet | PhotoSet | None = None
    if config.dev_share > 0:
        train, dev = train.split_images(config.dev_share, seed=config.noise.seed)
    elif config.dev:
        try:
            dev = read_split(config, config.dev)
        except NoSuchSplit as error:
            raise DataError(f"{error}; to do without it, set data.dev= (none) or data.dev_share=0.1") from error
    plan = config.noise
    if not plan.file and plan.ratio == 0:
        return TrainingData(train, dev)
    if plan.file:  # published labels
        noise = load_noise(Path(plan.file).expanduser(), caption_image=train.caption_image)
    else:
        noise = make_noise(
            plan.protocol, train.caption_image, ratio=plan.ratio, seed=plan.seed, captions=train.captions
        )
    return TrainingData(apply_noise(train, noise), dev, noise)


def batch_order(count: int, *, batch: int, seed: int, epoch: int) -> Tensor:
    """The caption rows of each batch of an epoch (from 0): a function of (seed, epoch), so resuming needs no state.

    A last, smaller batch is left out: its pair matrix would weigh differently. Its captions come in other epochs.
    -> [batches, B]
    """
    order = torch.randperm(count, generator=epoch_generator(seed, epoch))
    return order[: count // batch * batch].view(-1, batch)


class Batch(NamedTuple):
    """Caption rows of a step, the same on all ranks, and this rank's photos where they are not on the device."""

    captions: Tensor  # [B]
    photos: Tensor | None = None  # uint8 [R, 3, S, S]


@dataclass(frozen=True)
class PairLoader:
    """The dataloader: the training set on the device; photos that do not fit come with their batch."""

    images: Tensor | PhotoReader  # [N, D_image], or uint8 [N, 3, S, S]; or what reads photos that are not on the device
    texts: Tensor  # [M, D_text], or int32 [M, L]
    caption_image: Tensor  # [M]
    world: World

    @property
    def device(self) -> torch.device:
        """Where batches are put."""
        return self.texts.device

    def batches(self, order: Tensor) -> Iterator[Batch]:
        """One batch for each row of ``order``; photos are read some batches ahead. [n, B] rows of captions"""
        if isinstance(self.images, Tensor):
            for captions in order:
                yield Batch(captions.to(self.device))
            return
        images = self.caption_image.cpu()[order[:, self.world.rows(order.shape[1])]]
        for captions, photos in zip(order, self.images.stream(images.tolist()), strict=True):
            if self.device.type == "cuda" and photos.device.type == "cpu":
                photos = photos.pin_memory()
            yield Batch(captions.to(self.device), photos.to(self.device, non_blocking=True))

    def images_of(self, captions: Tensor, photos: Tensor | None = None) -> Tensor:
        """The images of captions: on the device, else those that came with the batch, else read now. [R] -> [R, ...]"""
        rows = self.caption_image[captions]
        if isinstance(self.images, Tensor):
            return self.images[rows]
        if photos is None:
            (photos,) = self.images.stream([rows.tolist()])
        return photos.to(self.device)


def build_loader(
    model: MatchingModel, pairs: PairSet | PhotoSet, *, config: DataConfig, device: torch.device,
    world: World, progress: Progress | None = None,
) -> PairLoader:  # fmt: skip
    """Features go to the device whole; so do photos that fit. The others stay where they are."""
    labels = pairs.caption_image.to(device)
    if isinstance(pairs, PairSet):
        return PairLoader(pairs.images.to(device), pairs.texts.to(device), labels, world=world)
    inputs = tower_inputs(
        model.backbone, pairs,
        size=config.photo_size, workers=config.workers, cache_gb=config.cache_gb, draft=True, progress=progress,
    )  # fmt: skip
    images: Tensor | PhotoReader = inputs.images
    pixels = inputs.images.decoded
    if pixels is not None:
        fits = device.type == "cpu" or pixels.nbytes <= _GPU_SHARE * torch.cuda.mem_get_info(device)[0]
        images = pixels.to(device) if fits else images
    return PairLoader(images, inputs.texts.to(device), labels, world)


class Mixer:
    """Mixes the images of every batch as a method's ``mix`` says; the partner of position i is position B−1−i."""

    def __init__(self, config: MixConfig, model: MatchingModel, loader: PairLoader) -> None:
        if not isinstance(loader.images, Tensor) and loader.world.size > 1:
            message = "method.mix blends photos of all ranks, but each rank decodes only those of its rows"
            raise UsageError(f"{message} — raise data.cache_gb until all fit, or set method.mix.share=0")
        self.config, self.loader = config, loader
        self.side = model.backbone.transform.size if model.has_towers else 0

    def __call__(self, block: PairBlock, image: Tensor) -> tuple[PairBlock, Partners]:
        """The whole batch's pairs with soft labels, and the partners of this rank's images.

        ``image`` [B] is the image at each position; every rank draws the same for all.
        """
        noise = RowNoise(block.noise.seed, block.noise.step, block.noise.rows, Stream.IMAGE)
        mixture = draw_mixture(noise, self.config, side=self.side)
        matches = block.relevance if self.config.labels == "ids" else same_image(block.noise.rows, block.noise.cols)
        targets = mixed_labels(matches.to(mixture.weight.dtype), mixture.weight)
        rows = self.loader.world.rows(len(image))
        partners, images = block.noise.rows.flip(0)[rows], None
        if self.loader.world.size > 1:  # a single rank has its partners' images already
            assert isinstance(self.loader.images, Tensor), "refused at the start"
            images = self.loader.images[image[partners]]
        mine = Mixture(mixture.weight[rows], mixture.cut[rows], mixture.box[rows])
        return replace(block, targets=targets), Partners(mine, partners, images)
