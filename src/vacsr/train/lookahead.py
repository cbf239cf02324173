"""A trial step on a batch, undone at once, for methods that weigh each pair by it: does it help trusted pairs?

The step moves heads and pooling. Towers learn a hundred times more slowly, so they stay as they are: their tokens are
computed once, without gradient. On cached features this costs seven passes through the heads; with towers three more
forward passes, which about doubles a step. Photos that are not on the device come with the batch, its neighbours' too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vacsr.backbones.base import Tokens
from vacsr.methods.base import Embedding, Neighbours
from vacsr.model import MatchingModel, Network
from vacsr.objective import same_image
from vacsr.train.data import Batch, PairLoader
from vacsr.train.distributed import gather_rows, sum_over_ranks


class _Pairs(NamedTuple):
    """Encoded pairs of this rank, without augmentation and without gradient."""

    image: Tensor  # [B] the image of each caption, of all ranks
    images: Tokens
    texts: Tokens


class LookAhead:
    """Gives the method the weights of a batch; the loss of its trusted pairs is to be added to that of the batch."""

    def __init__(self, model: MatchingModel, loader: PairLoader, *, half: bool) -> None:
        """``half``: matrix products in bfloat16, as in the loss."""
        self.model, self.loader, self.world, self.half = model, loader, loader.world, half
        self.heads = _Heads(model)

    def __call__(self, batch: Batch) -> Tensor:
        """This rank's share of the loss of the trusted pairs. -> 0-d"""
        method = self.model.method
        neighbours = batch.near or ((captions, None) for captions in method.neighbours(batch.captions))
        pairs = self._encode(batch.captions, batch.photos)
        near = [self._encode(captions, photos) for captions, photos in neighbours]
        trial = self._trial_weights(pairs)
        before = Neighbours(*(self._losses(pairs, {}) for pairs in near))
        with torch.no_grad():
            after = Neighbours(*(self._losses(pairs, trial) for pairs in near))
        return method.weigh(batch.captions, before, after) / self.world.size

    @torch.no_grad()
    def _encode(self, captions: Tensor, photos: Tensor | None) -> _Pairs:
        """Captions [B] and this rank's photos, None where all are on the device."""
        rows = captions[self.world.rows(len(captions))]
        with torch.autocast(captions.device.type, torch.bfloat16, enabled=self.half):
            images = self.model.backbone.encode_images(self.loader.images_of(rows) if photos is None else photos)
            texts = self.model.backbone.encode_texts(self.loader.texts[rows])
        return _Pairs(self.loader.caption_image[captions], images, texts)

    def _losses(self, pairs: _Pairs, weights: dict[str, Tensor]) -> Tensor:
        """Each pair's loss with these weights instead of the heads'. -> [B]"""
        with torch.autocast(pairs.image.device.type, torch.bfloat16, enabled=self.half):
            embedded = functional_call(self.heads, weights, (pairs.images, pairs.texts))
            v, t = (Embedding(gather_rows(x.float(), self.world)) for x in embedded)
            return self.model.method.pair_losses(v, t, same_image(pairs.image, pairs.image))

    def _trial_weights(self, pairs: _Pairs) -> dict[str, Tensor]:
        """The heads after a step down these pairs' gradient, of ``look_ahead`` times their own length."""
        named = {f"network.{name}": parameter for name, parameter in self.model.head_params()}
        loss = self._losses(pairs, {}).mean() / self.world.size
        grads = torch.autograd.grad(loss, list(named.values()))
        flat = sum_over_ranks(torch.cat([grad.reshape(-1) for grad in grads]), self.world)
        with torch.no_grad():
            heads = torch.cat([parameter.reshape(-1) for parameter in named.values()])
            moved = heads - flat * (self.model.method.look_ahead * heads.norm() / flat.norm().clamp_min(1e-12))
            parts = moved.split([parameter.numel() for parameter in named.values()])
            return {name: part.view_as(parameter) for (name, parameter), part in zip(named.items(), parts, strict=True)}


class _Heads(nn.Module):
    """Heads and pooling as one function of their weights."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tokens, texts: Tokens) -> tuple[Tensor, Tensor]:
        """-> [R, d], [R, d]"""
        return self.network.project_images(images).mean, self.network.project_texts(texts).mean
