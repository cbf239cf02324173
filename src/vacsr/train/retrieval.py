"""Retrieval as a task of the trainer: image–caption pairs, a matching model, dev RSUM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from vacsr.backbones.base import Tokens
from vacsr.backbones.images import TowerInputs, tower_inputs
from vacsr.config import BackboneConfig, DataConfig, TrainConfig
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import UsageError
from vacsr.evaluate.retrieval import dev_rsum
from vacsr.methods.base import Embedding, Neighbours, SetEmbeddings, TrainingView
from vacsr.model import MatchingModel, Network
from vacsr.objective import LossTerms
from vacsr.pairwise import batch_block, same_image
from vacsr.progress import PhotoProgress
from vacsr.scoring import PairScorer
from vacsr.strips import PairLoss, StripLoss, compile_pairs, strip_rows
from vacsr.train.callbacks import Callback, FreezeTowers
from vacsr.train.checkpoint import describe
from vacsr.train.data import Batch, Mixer, PairLoader, batch_order, build_loader, check_batches
from vacsr.train.distributed import gather_rows, join_world, sum_over_ranks, take_device
from vacsr.train.optim import build_optimizer, lr_factor
from vacsr.train.trainer import Task

_TOWERS = {"cpu": 32, "cuda": 256}  # photos or captions embedded at a time
_FEATURES = 8192


class RetrievalTask(Task):
    """Train a matching model on pairs. ``dev`` chooses the best weights by RSUM."""

    metric = "dev_rsum"

    def __init__(
        self,
        model: MatchingModel,
        loader: PairLoader,
        config: TrainConfig,
        *,
        pairs: PairSet | PhotoSet,
        dev: PairSet | PhotoSet | None = None,
        dev_inputs: TowerInputs | None = None,
        described: dict[str, Any],
    ) -> None:
        self.model: MatchingModel = model
        self.loader, self.config, self.pairs = loader, config, pairs
        self.dev, self.dev_inputs = dev, dev_inputs
        self.described = described
        self.device, self.world = loader.device, loader.world
        self.label = type(model.method).__name__.lower()
        # Full batches only, and an optimiser step never reaches into the next epoch.
        self.steps_per_epoch = len(pairs) // config.batch_size // config.accumulate * config.accumulate
        self.graphed = is_graphed(config, self.device, ranks=self.world.size)
        self.seed = torch.tensor(config.seed, device=self.device)
        self.epoch = torch.zeros((), dtype=torch.int64, device=self.device)
        mix = model.method.mix
        self.mixer = None if mix is None or mix.share == 0 else Mixer(mix, model, loader)
        towers = model.has_towers and self.device.type == "cuda"
        self.stream = torch.cuda.Stream() if towers else None  # type: ignore[no-untyped-call]
        self.pair_loss = self._plain_pair_loss()

    def _plain_pair_loss(self) -> PairLoss:
        """The method's loss, uncompiled, whole or in strips of rows."""
        method, batch = self.model.method, self.config.batch_size
        height = batch // self.world.size if method.pairwise else batch
        itemsize = 2 if self.config.precision == "bf16" else 4
        rows = strip_rows(method, self.config.tile, rows=height, columns=batch, itemsize=itemsize, graphed=self.graphed)
        return method.loss if rows == height else StripLoss(method.loss, method, rows)

    def build_optimizer(self) -> Optimizer:
        config = self.config
        return build_optimizer(
            self.model.param_groups(config.towers), config.optimizer,
            lr=config.lr, weight_decay=config.weight_decay, betas=config.betas, capturable=self.graphed,
        )  # fmt: skip

    def learning_rate(self, step: int) -> float:
        per_epoch = max(1, self.steps_per_epoch // self.config.accumulate)
        return self.config.lr * lr_factor(step, steps_per_epoch=per_epoch, config=self.config)

    def callbacks(self) -> list[Callback]:
        return [FreezeTowers(self.model, self.config.towers)] if self.model.has_towers else []

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Before an epoch's first batch the method may look at the whole training set."""
        config = self.config
        self.epoch.fill_(epoch)
        if start == 0:
            view = TrainingView(
                epoch=epoch, epochs=config.epochs, seed=config.seed, batch_size=config.batch_size,
                caption_image=self.loader.caption_image, embed=self.embed_training_set,
            )  # fmt: skip
            self.model.method.start_epoch(view)
        return self.loader.batches(islice(self._order(epoch), start, self.steps_per_epoch))

    def _order(self, epoch: int) -> Iterator[Tensor]:
        return batch_order(len(self.pairs), batch=self.config.batch_size, seed=self.config.seed, epoch=epoch)

    def batch_ids(self, step: int) -> list[str]:
        epoch, number = divmod(step, self.steps_per_epoch)
        return [self.pairs.caption_ids[row] for row in next(islice(self._order(epoch), number, None)).tolist()]

    def loss(self, batch: Batch, step: Tensor) -> LossTerms:
        model, captions = self.model, batch.captions
        rows = self.world.rows(len(captions))
        image = self.loader.caption_image[captions]
        positions = torch.arange(len(captions), device=self.device)[rows]
        image_noise, text_noise = model.dropout_noise(seed=self.seed, step=step, rows=positions)
        with self._autocast():
            with self._text_stream():
                t = model.embed_texts(self.loader.texts[captions[rows]], text_noise)
            block = batch_block(image, seed=self.seed, step=step, captions=captions, epoch=self.epoch)
            block, partners = (block, None) if self.mixer is None else self.mixer(block, image)
            v = model.embed_images(self.loader.batch_images(batch), image_noise, partners)
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
            v, t = _float(v), self._gathered(_float(t))
            if model.method.pairwise:
                return self.pair_loss(v, t, block.rows(rows))
            whole = self.pair_loss(self._gathered(v), t, block)
        return LossTerms(whole.total / self.world.size, {k: p / self.world.size for k, p in whole.parts.items()})

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def _gathered(self, x: Embedding) -> Embedding:
        """Every rank's rows."""
        log_var = None if x.log_var is None else gather_rows(x.log_var, self.world)
        return Embedding(gather_rows(x.mean, self.world), log_var)

    @contextmanager
    def _text_stream(self) -> Iterator[None]:
        """On a GPU the text tower runs on its own stream: its small kernels fill what the image tower leaves free."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def compile(self) -> Callable[[Batch, Tensor], LossTerms]:
        """On features the whole loss; with towers their blocks, one compilation for all of a kind, and the pairs.

        Of strips only one is compiled: the compiler would unroll the loop over them.
        """
        if not self.model.has_towers and not isinstance(self.pair_loss, StripLoss):
            return compile_pairs(self.loss)
        self.model.compile_blocks(True)
        plain = self.pair_loss
        self.pair_loss = plain.compiled() if isinstance(plain, StripLoss) else compile_pairs(plain)
        return self.loss

    def uncompile(self) -> None:
        self.model.compile_blocks(False)
        self.pair_loss = self._plain_pair_loss()

    def evaluate(self) -> dict[str, float]:
        if self.dev is None:
            return {}
        with self.model.plain_blocks():
            scorer = PairScorer(self.model, device=self.device)
            return {"dev_rsum": dev_rsum(scorer.score_set(self.dev, inputs=self.dev_inputs), self.dev)}

    @torch.no_grad()
    def embed_training_set(self) -> SetEmbeddings:
        """Every image and caption without augmentation; ranks share the work and all get the result."""
        model, texts, images = self.model, self.loader.texts, len(self.pairs.image_ids)
        size = _TOWERS[self.device.type] if model.has_towers else _FEATURES
        model.eval()
        try:
            with model.plain_blocks():
                blocks = self.loader.all_images(self._blocks(images, size))
                v = self._from_all((model.embed_images(part).mean for part in blocks), images)
                rows = self._blocks(len(texts), size)
                t = self._from_all((model.embed_texts(texts[r.start : r.stop]).mean for r in rows), len(texts))
        finally:
            model.train()
        return SetEmbeddings(v, t)

    def _blocks(self, count: int, size: int) -> list[range]:
        """This rank's share of the rows, in blocks."""
        share = -(-count // self.world.size)
        stop = min((self.world.rank + 1) * share, count)
        return [range(start, min(start + size, stop)) for start in range(self.world.rank * share, stop, size)]

    def _from_all(self, parts: Iterable[Tensor], count: int) -> Tensor:
        """All ranks' rows; a last, smaller share is padded on the way, since ranks send equally much. -> [count, d]"""
        share = torch.zeros(-(-count // self.world.size), self.model.dim, device=self.device)
        done = 0
        for part in parts:
            share[done : done + len(part)] = part.float()
            done += len(part)
        return gather_rows(share, self.world)[:count]

    def training_state(self) -> dict[str, Tensor]:
        return self.model.method.training_state()

    def load_training_state(self, state: Mapping[str, Tensor]) -> None:
        self.model.method.load_training_state(state)


class LookAheadTask(RetrievalTask):
    """For methods that weigh each pair by a trial step on the batch, undone at once: does it help trusted pairs?

    The step moves heads and pooling. Towers learn a hundred times more slowly, so they stay as they are: their tokens
    are computed once, without gradient. On cached features this costs seven passes through the heads; with towers three
    more forward passes, which about doubles a step. Photos that are not on the device come with the batch, its
    neighbours' too.
    """

    def __init__(self, model: MatchingModel, loader: PairLoader, config: TrainConfig, **parts: Any) -> None:
        super().__init__(model, loader, config, **parts)
        self.heads = _Heads(model)
        self.batch_loss: Callable[[Batch, Tensor], LossTerms] = super().loss

    def loss(self, batch: Batch, step: Tensor) -> LossTerms:
        share = self.look_ahead(batch) / self.world.size  # before the loss, which uses the weights
        terms = self.batch_loss(batch, step)
        return LossTerms(terms.total + share, {**terms.parts, "bank": share})

    def compile(self) -> Callable[[Batch, Tensor], LossTerms]:
        """Everything but the trial step."""
        if not self.model.has_towers:
            self.batch_loss = compile_pairs(super().loss)
        else:
            super().compile()
        return self.loss

    def uncompile(self) -> None:
        super().uncompile()
        self.batch_loss = super().loss

    def look_ahead(self, batch: Batch) -> Tensor:
        """Give the method the weights of this batch; returns the loss of its trusted pairs. -> 0-d"""
        method = self.model.method
        pairs = self._tokens(batch.captions, batch.photos)
        if batch.near is None:
            near = [self._tokens(captions, None) for captions in method.neighbours(batch.captions)]
        else:
            near = [self._tokens(captions, photos) for captions, photos in zip(*batch.near, strict=True)]
        trial = self._trial_weights(pairs)
        before = Neighbours(*(self._pair_losses(pairs, {}) for pairs in near))
        with torch.no_grad():
            after = Neighbours(*(self._pair_losses(pairs, trial) for pairs in near))
        return method.weigh(batch.captions, before, after)

    @torch.no_grad()
    def _tokens(self, captions: Tensor, photos: Tensor | None) -> _Pairs:
        """Pairs through the backbone, without augmentation; ``photos`` are this rank's, None where on the device."""
        rows = captions[self.world.rows(len(captions))]
        with self._autocast():
            images = self.model.backbone.encode_images(self.loader.images_of(rows) if photos is None else photos)
            return _Pairs(captions, images, self.model.backbone.encode_texts(self.loader.texts[rows]))

    def _pair_losses(self, pairs: _Pairs, weights: dict[str, Tensor]) -> Tensor:
        """Each pair's loss with these weights instead of the heads'. -> [B]"""
        with self._autocast():
            v, t = functional_call(self.heads, weights, (pairs.images, pairs.texts))
            v, t = (Embedding(gather_rows(x.float(), self.world)) for x in (v, t))
            image = self.loader.caption_image[pairs.captions]
            return self.model.method.pair_losses(v, t, same_image(image, image))

    def _trial_weights(self, pairs: _Pairs) -> dict[str, Tensor]:
        """The heads after a step down these pairs' gradient, of ``look_ahead`` times their own length."""
        named = {f"network.{name}": parameter for name, parameter in self.model.head_params()}
        loss = self._pair_losses(pairs, {}).mean() / self.world.size
        grads = torch.autograd.grad(loss, list(named.values()))
        flat = sum_over_ranks(torch.cat([grad.reshape(-1) for grad in grads]), self.world)
        with torch.no_grad():
            heads = torch.cat([parameter.reshape(-1) for parameter in named.values()])
            moved = heads - flat * (self.model.method.look_ahead * heads.norm() / flat.norm().clamp_min(1e-12))
            parts = moved.split([parameter.numel() for parameter in named.values()])
            return {name: part.view_as(parameter) for (name, parameter), part in zip(named.items(), parts, strict=True)}


class _Pairs(NamedTuple):
    """Some pairs as the heads get them."""

    captions: Tensor  # [B], of all ranks
    images: Tokens  # of this rank's rows
    texts: Tokens


class _Heads(nn.Module):
    """Heads and pooling as one function of their weights."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tokens, texts: Tokens) -> tuple[Tensor, Tensor]:
        """-> [R, d], [R, d]"""
        return self.network.project_images(images).mean, self.network.project_texts(texts).mean


def retrieval_task(
    method: Any,
    pairs: PairSet | PhotoSet,
    config: TrainConfig,
    *,
    backbone: BackboneConfig,
    dev: PairSet | PhotoSet | None = None,
    reading: DataConfig | None = None,
    progress: bool = False,
) -> RetrievalTask:
    """Build model and dataloader on the right device; photos are decoded here where they fit into memory."""
    check_batches(pairs, config)
    device = take_device(config.device)
    world = join_world(device)
    world.rows(config.batch_size)  # refuses a batch that does not divide, before anything is written
    graphed = is_graphed(config, device, ranks=world.size)
    if dev is not None and 0 < config.dev_images < len(dev.image_ids):
        dev = dev.subset(range(config.dev_images))
    dims = (pairs.images.shape[1], pairs.texts.shape[1]) if isinstance(pairs, PairSet) else (0, 0)
    model = MatchingModel.build(
        method, backbone,
        image_dim=dims[0], text_dim=dims[1], provenance=pairs.provenance, seed=config.seed, fit=pairs,
    )  # fmt: skip
    model.method.fit(pairs.captions, pairs.caption_image)
    model.to(device).train()
    reading = reading or DataConfig()
    with PhotoProgress("reading photos", show=progress and world.is_main and isinstance(pairs, PhotoSet)) as bar:
        loader = build_loader(model, pairs, config=reading, device=device, world=world, progress=bar)
        dev_inputs = None
        if isinstance(dev, PhotoSet):  # read in every epoch, so decoded once where they fit
            dev_inputs = tower_inputs(model.backbone, dev, workers=reading.workers, cache_gb=reading.cache_gb)
    if graphed and loader.reader is not None:
        raise UsageError(
            f"train.cuda_graph needs all photos on the GPU: {loader.how_to_fit()}, or train.cuda_graph=false"
        )
    described = describe(method, pairs, dev=dev, config=config, backbone=backbone, photo_size=reading.photo_size)
    kind = LookAheadTask if model.method.look_ahead > 0 else RetrievalTask
    return kind(model, loader, config, pairs=pairs, dev=dev, dev_inputs=dev_inputs, described=described)


def is_graphed(config: TrainConfig, device: torch.device, *, ranks: int = 1) -> bool:
    """Are steps replayed as a CUDA graph? A config that no graph can hold is refused."""
    graphed = config.cuda_graph and device.type == "cuda"
    if graphed and (ranks > 1 or config.accumulate > 1):
        raise UsageError("train.cuda_graph needs one rank and accumulate=1 — set train.cuda_graph=false")
    return graphed


def _float(x: Embedding) -> Embedding:
    """In float32, whatever the towers computed in. [N, d]"""
    return Embedding(x.mean.float(), None if x.log_var is None else x.log_var.float())
