"""What a step offers to methods that mix: partners for its images, and labels that say so."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from vacsr.backbones.mixing import Mixture, Partners, draw_mixture, mixed_labels
from vacsr.config import MixConfig
from vacsr.errors import UsageError
from vacsr.model import MatchingModel
from vacsr.pairwise import PairBlock, same_image
from vacsr.train.distributed import World
from vacsr.train.feed import TrainTensors


class Mixed(NamedTuple):
    """A batch that is mixed."""

    block: PairBlock
    """All of its pairs, with soft labels."""
    partners: Partners
    """Of this rank's images."""


class Mixer:
    """Mixes every batch of a run as one config has it; the partner of place i is place B−1−i."""

    def __init__(self, config: MixConfig, model: MatchingModel, data: TrainTensors, *, world: World) -> None:
        if data.images is None and world.size > 1:
            raise UsageError(
                f"method.mix blends photos of all {world.size} ranks, but each rank decodes its own batch by batch — "
                "raise data.cache_gb until all fit in memory, or set method.mix.share=0"
            )
        self.config, self.model, self.data, self.world = config, model, data, world
        self.side = model.backbone.transform.size if model.has_towers else 0

    def __call__(self, block: PairBlock, image: Tensor) -> Mixed:
        """The whole batch's block, and the image [B] of each place in it; every rank draws the same for all."""
        noise = self.model.dropout_noise(seed=block.noise.seed, step=block.noise.step, rows=block.noise.rows)[0]
        mixture = draw_mixture(noise, self.config, side=self.side)
        matches = block.relevance if self.config.labels == "ids" else same_image(block.noise.rows, block.noise.cols)
        targets = mixed_labels(matches.to(mixture.own.dtype), mixture.own)
        return Mixed(replace(block, targets=targets), self._partners(mixture, image, places=block.noise.rows))

    def _partners(self, mixture: Mixture, image: Tensor, *, places: Tensor) -> Partners:
        """Of this rank's rows. Alone, a rank has them already; among several it looks them up."""
        rows = self.world.rows(len(image))
        mine = Mixture(mixture.own[rows], mixture.cut[rows], mixture.box[rows])
        partners = places.flip(0)[rows]
        if self.world.size == 1:
            return Partners(mine, partners)
        assert self.data.images is not None, "refused at the start"
        return Partners(mine, partners, self.data.images[image[partners]])


def mixer_of(model: MatchingModel, data: TrainTensors, *, world: World) -> Mixer | None:
    """What a method asks for by its attribute ``mix``; None where it mixes nothing."""
    config = model.method.mix
    return None if config is None or config.share == 0 else Mixer(config, model, data, world=world)
