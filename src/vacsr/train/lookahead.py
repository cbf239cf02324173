"""A trial step on a batch, taken back at once: what it does to trusted pairs tells how much each pair should count."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vacsr.backbones.tokens import Tokens
from vacsr.config import TrainConfig
from vacsr.methods.base import Embedding, Neighbours
from vacsr.model import MatchingModel, Network
from vacsr.pairwise import same_image
from vacsr.train.distributed import World, gather_rows, sum_over_ranks
from vacsr.train.feed import Batch, TrainTensors


class _Read(NamedTuple):
    """Some pairs on the way into the heads, this rank's rows of them."""

    captions: Tensor  # [B], of all ranks
    images: Tokens
    texts: Tokens


class LookAhead:
    """Gives a method its neighbours' losses before and after a trial step of the heads and the pooling.

    Towers learn a hundred times more slowly, so they stay where they are: their tokens are computed once, without
    gradient. On cached features this costs seven passes through the heads; on towers three forward passes more, which
    about doubles a step. Photos that are not on the device come with the batch, its neighbours' too.
    """

    def __init__(self, model: MatchingModel, data: TrainTensors, *, config: TrainConfig, world: World) -> None:
        self.model, self.data, self.world = model, data, world
        self.method = model.method
        self.heads = _Heads(model)
        self.half = config.precision == "bf16"

    def __call__(self, batch: Batch) -> Tensor:
        """Tell the method about this batch; returns what its loss gains from the trusted pairs. -> 0-d"""
        captions = batch.captions
        own = self._read(captions, batch.photos)
        read = self._read_neighbours(batch)
        trial = self._stepped(own)
        before = Neighbours(*(self._losses(pairs, {}) for pairs in read))
        with torch.no_grad():
            after = Neighbours(*(self._losses(pairs, trial) for pairs in read))
        return self.method.weigh(captions, before, after)

    def _read_neighbours(self, batch: Batch) -> list[_Read]:
        """Those that the batch brought along, or else those that the method names."""
        if batch.near is None:
            return [self._read(rows, None) for rows in self.method.neighbours(batch.captions)]
        return [self._read(rows, photos) for rows, photos in zip(*batch.near, strict=True)]

    @torch.no_grad()
    def _read(self, captions: Tensor, photos: Tensor | None) -> _Read:
        """These pairs through the backbone, without augmentation; ``photos`` are this rank's, None to look them up."""
        own = captions[self.world.rows(len(captions))]
        with self._autocast():
            images = self.model.backbone.encode_images(self._looked_up(own) if photos is None else photos)
            return _Read(captions, images, self.model.backbone.encode_texts(self.data.texts[own]))

    def _looked_up(self, captions: Tensor) -> Tensor:
        """Their images on the device. [R] -> [R, ...]"""
        assert self.data.images is not None, "images are on the device or come with the batch"
        return self.data.images[self.data.caption_image[captions]]

    def _losses(self, pairs: _Read, weights: dict[str, Tensor]) -> Tensor:
        """Each pair's loss with these weights in the heads' place. -> [B]"""
        with self._autocast():
            v, t = functional_call(self.heads, weights, (pairs.images, pairs.texts))
            v, t = (Embedding(gather_rows(x.float(), self.world)) for x in (v, t))
            image = self.data.caption_image[pairs.captions]
            return self.method.pair_losses(v, t, same_image(image, image))

    def _stepped(self, pairs: _Read) -> dict[str, Tensor]:
        """The heads after a step down these pairs' gradient, ``look_ahead`` times as long as they are themselves."""
        named = {f"network.{name}": parameter for name, parameter in self.model.head_params()}
        loss = self._losses(pairs, {}).mean() / self.world.size
        grads = torch.autograd.grad(loss, list(named.values()))
        flat = sum_over_ranks(torch.cat([grad.reshape(-1) for grad in grads]), self.world)
        with torch.no_grad():
            own = torch.cat([parameter.reshape(-1) for parameter in named.values()])
            moved = own - flat * (self.method.look_ahead * own.norm() / flat.norm().clamp_min(1e-12))
            parts = moved.split([parameter.numel() for parameter in named.values()])
            return {name: part.view_as(parameter) for (name, parameter), part in zip(named.items(), parts, strict=True)}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.data.texts.device.type, torch.bfloat16, enabled=self.half)


class _Heads(nn.Module):
    """Heads and pooling as one function of their weights."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Any, texts: Any) -> tuple[Tensor, Tensor]:
        """-> [R, d], [R, d]"""
        return self.network.project_images(images).mean, self.network.project_texts(texts).mean


def look_ahead(model: MatchingModel, data: TrainTensors, *, config: TrainConfig, world: World) -> LookAhead | None:
    """For a method that asks for it."""
    return LookAhead(model, data, config=config, world=world) if model.method.look_ahead > 0 else None
