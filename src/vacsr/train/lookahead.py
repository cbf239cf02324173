"""A trial step on a batch, undone at once: what it does to trusted pairs tells how much each pair should count."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vacsr.backbones.base import Tokens
from vacsr.methods.base import Embedding, Neighbours
from vacsr.model import MatchingModel, Network
from vacsr.pairwise import same_image
from vacsr.train.data import Batch, PairLoader
from vacsr.train.distributed import gather_rows, sum_over_ranks


class _Inputs(NamedTuple):
    """Some pairs as the heads get them, this rank's rows."""

    captions: Tensor  # [B], of all ranks
    images: Tokens
    texts: Tokens


class LookAhead:
    """Gives a method its neighbours' losses before and after a trial step of the heads and the pooling.

    Towers learn a hundred times more slowly, so they stay as they are: their tokens are computed once, without
    gradient. On cached features this costs seven passes through the heads; with towers three more forward passes,
    which about doubles a step. Photos that are not on the device come with the batch, its neighbours' too.
    """

    def __init__(self, model: MatchingModel, loader: PairLoader, *, half: bool) -> None:
        self.model, self.loader, self.world, self.half = model, loader, loader.world, half
        self.method = model.method
        self.heads = _Heads(model)

    def __call__(self, batch: Batch) -> Tensor:
        """Give the method the weights of this batch; returns the loss of its trusted pairs. -> 0-d"""
        own = self._inputs(batch.captions, batch.photos)
        if batch.near is None:
            near = [self._inputs(captions, None) for captions in self.method.neighbours(batch.captions)]
        else:
            near = [self._inputs(captions, photos) for captions, photos in zip(*batch.near, strict=True)]
        trial = self._trial_weights(own)
        before = Neighbours(*(self._losses(pairs, {}) for pairs in near))
        with torch.no_grad():
            after = Neighbours(*(self._losses(pairs, trial) for pairs in near))
        return self.method.weigh(batch.captions, before, after)

    @torch.no_grad()
    def _inputs(self, captions: Tensor, photos: Tensor | None) -> _Inputs:
        """Pairs through the backbone, without augmentation; ``photos`` are this rank's, None where on the device."""
        rows = captions[self.world.rows(len(captions))]
        with self._autocast():
            images = self.model.backbone.encode_images(self.loader.images_of(rows) if photos is None else photos)
            return _Inputs(captions, images, self.model.backbone.encode_texts(self.loader.texts[rows]))

    def _losses(self, pairs: _Inputs, weights: dict[str, Tensor]) -> Tensor:
        """Each pair's loss with these weights instead of the heads'. -> [B]"""
        with self._autocast():
            v, t = functional_call(self.heads, weights, (pairs.images, pairs.texts))
            v, t = (Embedding(gather_rows(x.float(), self.world)) for x in (v, t))
            image = self.loader.caption_image[pairs.captions]
            return self.method.pair_losses(v, t, same_image(image, image))

    def _trial_weights(self, pairs: _Inputs) -> dict[str, Tensor]:
        """The heads after a step down these pairs' gradient, of ``look_ahead`` times their own length."""
        named = {f"network.{name}": parameter for name, parameter in self.model.head_params()}
        loss = self._losses(pairs, {}).mean() / self.world.size
        grads = torch.autograd.grad(loss, list(named.values()))
        flat = sum_over_ranks(torch.cat([grad.reshape(-1) for grad in grads]), self.world)
        with torch.no_grad():
            heads = torch.cat([parameter.reshape(-1) for parameter in named.values()])
            moved = heads - flat * (self.method.look_ahead * heads.norm() / flat.norm().clamp_min(1e-12))
            parts = moved.split([parameter.numel() for parameter in named.values()])
            return {name: part.view_as(parameter) for (name, parameter), part in zip(named.items(), parts, strict=True)}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.loader.device.type, torch.bfloat16, enabled=self.half)


class _Heads(nn.Module):
    """Heads and pooling as one function of their weights."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tokens, texts: Tokens) -> tuple[Tensor, Tensor]:
        """-> [R, d], [R, d]"""
        return self.network.project_images(images).mean, self.network.project_texts(texts).mean
