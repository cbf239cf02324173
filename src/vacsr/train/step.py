"""One training step: embed, pair up, loss, gradient, clip, update; eager, compiled, or replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from vacsr.config import TrainConfig
from vacsr.methods.base import Embedding
from vacsr.methods.model import MatchingModel
from vacsr.objective import LossTerms
from vacsr.pairwise import batch_block
from vacsr.train.distributed import World, gather_rows, sum_gradients, sum_over_ranks


@dataclass(frozen=True)
class TrainTensors:
    """The training set on the device."""

    images: Tensor  # [N, D_image]
    texts: Tensor  # [M, D_text]
    caption_image: Tensor  # [M]


class TrainStep:
    """Turns a batch of caption rows into an update; returns loss, its parts and the gradient norm as one tensor."""

    def __init__(
        self, model: MatchingModel, optimizer: Optimizer, data: TrainTensors, *, config: TrainConfig, world: World
    ) -> None:
        self.model, self.optimizer, self.data, self.config, self.world = model, optimizer, data, config, world
        self.device = data.texts.device
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.names: tuple[str, ...] = ()
        self.seed = torch.tensor(config.seed, device=self.device)
        self.loss: Callable[[Tensor, Tensor], LossTerms] = self._loss
        if config.compile is True or (config.compile == "auto" and self.device.type == "cuda"):
            self.loss = torch.compile(self._loss, dynamic=False)

    def _loss(self, captions: Tensor, step: Tensor) -> LossTerms:
        """This rank's share of the batch's loss. captions [B] rows of the training set, the same on all ranks."""
        rows = self.world.rows(len(captions))
        image = self.data.caption_image[captions]
        places = torch.arange(len(captions), device=self.device)[rows]
        image_noise, text_noise = self.model.dropout_noise(seed=self.seed, step=step, rows=places)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            v = self.model.embed_images(self.data.images[image[rows]], image_noise)
            t = self.model.embed_texts(self.data.texts[captions[rows]], text_noise)
            t = Embedding(gather_rows(t.mean.float(), self.world))
            if self.model.method.pairwise:
                block = batch_block(image, seed=self.seed, step=step, rows=rows)
                return self.model.method.loss(Embedding(v.mean.float()), t, block)
            v = Embedding(gather_rows(v.mean.float(), self.world))
            whole = self.model.method.loss(v, t, batch_block(image, seed=self.seed, step=step))
        return LossTerms(whole.total / self.world.size, {k: p / self.world.size for k, p in whole.parts.items()})

    def accumulate(self, captions: Tensor, step: Tensor) -> Tensor:
        """Add one batch's gradient; returns the loss and its parts, summed over ranks."""
        terms = self.loss(captions, step)
        (terms.total / self.config.accumulate).backward()  # type: ignore[no-untyped-call]
        self.names = ("loss", *terms.parts)
        values = torch.stack([terms.total.detach(), *(part.detach() for part in terms.parts.values())])
        return sum_over_ranks(values, self.world)

    def update(self) -> Tensor:
        """Clip and step; returns the gradient norm before clipping. A non-finite gradient changes nothing on a CPU."""
        sum_gradients(self.params, self.world)
        limit = self.config.clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.params, limit, foreach=True)
        if self.device.type == "cuda" or bool(norm.isfinite()):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.detach()

    def __call__(self, captions: Tensor, step: int) -> Tensor:
        """[B] -> [loss, parts..., gradient norm]; the norm is 0 where gradients only accumulate."""
        values = self.accumulate(captions, torch.tensor(step, device=self.device))
        last = (step + 1) % self.config.accumulate == 0
        norm = self.update() if last else values.new_zeros(())
        return torch.cat((values, norm.reshape(1)))


class GraphedStep(TrainStep):
    """The same step captured once and replayed: one launch instead of hundreds. Needs full batches and one rank."""

    _WARM = 3  # real steps taken eagerly on the side stream before capture, as CUDA graphs ask for

    def __init__(
        self, model: MatchingModel, optimizer: Optimizer, data: TrainTensors, *, config: TrainConfig, world: World
    ) -> None:
        super().__init__(model, optimizer, data, config=config, world=world)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0
        self.captions = torch.zeros(config.batch_size, dtype=torch.int64, device=self.device)
        self.step = torch.zeros((), dtype=torch.int64, device=self.device)
        self.values = torch.zeros(0, device=self.device)

    def _whole(self) -> Tensor:
        values = self.accumulate(self.captions, self.step)
        return torch.cat((values, self.update().reshape(1)))

    def __call__(self, captions: Tensor, step: int) -> Tensor:
        """[B] -> [loss, parts..., gradient norm]"""
        self.captions.copy_(captions)
        self.step.fill_(step)
        if self.graph is not None:
            self.graph.replay()
            return self.values.clone()
        if self.done == self._WARM:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.values = self._whole()
            self.graph.replay()
            return self.values.clone()
        self.done += 1
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            values = self._whole()
        torch.cuda.current_stream().wait_stream(self.stream)
        return values
