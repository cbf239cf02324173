"""One training step: embed, pair up, loss, gradient, clip, update; eager, compiled, or replayed as a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from vacsr.config import TrainConfig
from vacsr.methods.base import Embedding
from vacsr.model import MatchingModel
from vacsr.objective import LossTerms
from vacsr.pairwise import batch_block
from vacsr.strips import PairLoss, StripLoss, compile_pairs, strip_rows
from vacsr.train.distributed import World, gather_rows, sum_gradients, sum_over_ranks
from vacsr.train.feed import Batch, TrainTensors
from vacsr.train.lookahead import look_ahead
from vacsr.train.mixing import mixer_of


class TrainStep:
    """Turns a batch of caption rows into an update; returns loss, its parts and the gradient norm as one tensor."""

    _GRAPHED = False

    def __init__(
        self, model: MatchingModel, optimizer: Optimizer, data: TrainTensors, *, config: TrainConfig, world: World
    ) -> None:
        self.model, self.optimizer, self.data, self.config, self.world = model, optimizer, data, config, world
        self.device = data.texts.device
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.names: tuple[str, ...] = ()
        self.seed = torch.tensor(config.seed, device=self.device)
        self.ramp = torch.ones((), device=self.device)
        self.epoch = torch.zeros((), dtype=torch.int64, device=self.device)
        apart = model.has_towers and self.device.type == "cuda"
        self.side = torch.cuda.Stream() if apart else None  # type: ignore[no-untyped-call]
        self.mixer = mixer_of(model, data, world=world)
        self.look_ahead = look_ahead(model, data, config=config, world=world)
        self.pair_loss: PairLoss = self._plain_pair_loss()
        self.loss: Callable[[Batch, Tensor], LossTerms] = self._loss
        if config.compile is True or (config.compile == "auto" and self.device.type == "cuda"):
            self._compile()
        self.may_give_up = config.compile == "auto" and config.accumulate == 1

    def _plain_pair_loss(self) -> PairLoss:
        """The method's loss, uncompiled, whole or in strips of rows."""
        method, batch = self.model.method, self.config.batch_size
        mine = self.world.rows(batch) if method.pairwise else slice(0, batch)
        height, itemsize = mine.stop - mine.start, 2 if self.config.precision == "bf16" else 4
        rows = strip_rows(
            method, self.config.tile, rows=height, columns=batch, itemsize=itemsize, graphed=self._GRAPHED
        )
        return method.loss if rows == height else StripLoss(method.loss, method, rows)

    def _compile(self) -> None:
        """On features all of the loss; with towers the blocks, one compilation for all of a kind, and the pairs.

        Of strips only one is compiled: the compiler would unroll the loop over them.
        """
        plain = self.pair_loss
        if not self.model.has_towers and not isinstance(plain, StripLoss):
            self.loss = compile_pairs(self._loss)
            return
        self.model.compile_blocks(True)
        self.pair_loss = plain.compiled() if isinstance(plain, StripLoss) else compile_pairs(plain)

    def _uncompile(self, error: Exception) -> None:
        """Where the compiler gives up, say so and go on without it; a step that did not end has changed nothing."""
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"torch.compile gave up ({first}); training goes on uncompiled", stacklevel=3)
        self.model.compile_blocks(False)
        self.loss, self.pair_loss = self._loss, self._plain_pair_loss()
        self.optimizer.zero_grad(set_to_none=True)
        self.may_give_up = False

    def rest(self, towers: frozenset[str]) -> None:
        """Let these towers rest from now on."""
        self.model.freeze(towers)

    def _loss(self, batch: Batch, step: Tensor) -> LossTerms:
        """This rank's share of the batch's loss."""
        captions = batch.captions
        rows = self.world.rows(len(captions))
        image = self.data.caption_image[captions]
        places = torch.arange(len(captions), device=self.device)[rows]
        image_noise, text_noise = self.model.dropout_noise(seed=self.seed, step=step, rows=places)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            with self._beside():
                t = self.model.embed_texts(self.data.texts[captions[rows]], text_noise)
            block = batch_block(image, seed=self.seed, step=step, captions=captions, epoch=self.epoch)
            block, partners = (block, None) if self.mixer is None else self.mixer(block, image)
            v = self.model.embed_images(self._images(batch, image[rows]), image_noise, partners)
            self._together()
            v, t = _float(v), self._gathered(_float(t))
            if self.model.method.pairwise:
                return self.pair_loss(v, t, block.rows(rows))
            whole = self.pair_loss(self._gathered(v), t, block)
        return LossTerms(whole.total / self.world.size, {k: p / self.world.size for k, p in whole.parts.items()})

    def _gathered(self, x: Embedding) -> Embedding:
        """Every rank's rows."""
        log_var = None if x.log_var is None else gather_rows(x.log_var, self.world)
        return Embedding(gather_rows(x.mean, self.world), log_var)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU the text tower runs on a stream of its own: its small kernels fill what the image tower leaves."""
        if self.side is None:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield

    def _together(self) -> None:
        """Wait for the text tower before its vectors are used."""
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)

    def _images(self, batch: Batch, rows: Tensor) -> Tensor:
        """This rank's images: brought along by the batch, or looked up on the device."""
        if batch.photos is not None:
            return batch.photos
        assert self.data.images is not None, "images are on the device or come with the batch"
        return self.data.images[rows]

    def accumulate(self, batch: Batch, step: Tensor) -> Tensor:
        """Add one batch's gradient; returns the loss and its parts, summed over ranks."""
        trusted = None if self.look_ahead is None else self.look_ahead(batch)  # before the loss: it weighs
        terms = self.loss(batch, step)
        if trusted is not None:
            share = trusted / self.world.size
            terms = LossTerms(terms.total + share, {**terms.parts, "bank": share})
        (terms.total * self.ramp / self.config.accumulate).backward()  # type: ignore[no-untyped-call]
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

    def __call__(self, batch: Batch, step: int, *, epoch: int = 0, ramp: float = 1.0) -> Tensor:
        """-> [loss, parts..., gradient norm]; the norm is 0 where gradients only accumulate.

        ``epoch`` counts from 0; ``ramp`` scales the gradient, not the figures.
        """
        self.ramp.fill_(ramp)
        self.epoch.fill_(epoch)
        try:
            return self._one(
                batch, torch.tensor(step, device=self.device), last=(step + 1) % self.config.accumulate == 0
            )
        except torch._dynamo.exc.TorchDynamoException as error:
            if not self.may_give_up:
                raise
            self._uncompile(error)
            return self(batch, step, epoch=epoch, ramp=ramp)

    def _one(self, batch: Batch, step: Tensor, *, last: bool) -> Tensor:
        values = self.accumulate(batch, step)
        norm = self.update() if last else values.new_zeros(())
        return torch.cat((values, norm.reshape(1)))


class GraphedStep(TrainStep):
    """The same step captured once and replayed: one launch instead of hundreds. Needs full batches and one rank."""

    _GRAPHED = True
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
        values = self.accumulate(Batch(self.captions), self.step)
        return torch.cat((values, self.update().reshape(1)))

    def rest(self, towers: frozenset[str]) -> None:
        """Other parameters learn from now on, so the graph is captured anew."""
        super().rest(towers)
        self.graph, self.done = None, 0

    def __call__(self, batch: Batch, step: int, *, epoch: int = 0, ramp: float = 1.0) -> Tensor:
        """-> [loss, parts..., gradient norm]"""
        self.epoch.fill_(epoch)
        self.captions.copy_(batch.captions)
        self.step.fill_(step)
        self.ramp.fill_(ramp)
        if self.graph is not None:
            self.graph.replay()
            return self.values.clone()
        if self.done == self._WARM:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.values = self._whole()
            self.graph.replay()
            return self.values.clone()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            values = self._warm()
        torch.cuda.current_stream().wait_stream(self.stream)
        self.done += 1
        return values

    def _warm(self) -> Tensor:
        """A step outside of the graph; what compiles, compiles here."""
        try:
            return self._whole()
        except torch._dynamo.exc.TorchDynamoException as error:
            if not self.may_give_up:
                raise
            self._uncompile(error)
            return self._whole()


def _float(x: Embedding) -> Embedding:
    """In float32 whatever the towers computed in. [N, d]"""
    return Embedding(x.mean.float(), None if x.log_var is None else x.log_var.float())
