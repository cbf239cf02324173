"""Retrieval as a task of the trainer: image–caption pairs, a matching model, dev RSUM."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.optim import Optimizer

from vacsr.backbones.base import Backbone, Tokens
from vacsr.backbones.images import PhotoReader, tower_inputs
from vacsr.backbones.towers import hash_weights
from vacsr.config import BackboneConfig, DataConfig, MethodConfig, TrainConfig
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import DataError, UsageError
from vacsr.evaluate.report import dev_rsum
from vacsr.methods.base import Embedding, Method, RetrievalConfig, SetEmbeddings, TrainingView, take
from vacsr.methods.members import Members
from vacsr.methods.mixtures import trust_labels
from vacsr.model import Heads, MatchingModel
from vacsr.noise import RowNoise, Stream, epoch_generator
from vacsr.objective import LossTerms, PairBlock, batch_block, same_image
from vacsr.progress import PhotoProgress
from vacsr.scoring import PairScorer
from vacsr.strips import PairLoss, StripLoss, compile_pairs
from vacsr.train.callbacks import Callback, FreezeTowers, WeightAverage
from vacsr.train.checkpoint import describe_recipe
from vacsr.train.data import Batch, Mixer, PairLoader, batch_order, build_loader
from vacsr.train.distributed import gather_rows, join_world, sum_over_ranks, take_device
from vacsr.train.optim import build_optimizer, lr_factor
from vacsr.train.trainer import Task

_TOWERS = {"cpu": 32, "cuda": 256}  # photos or captions embedded at a time
_FEATURES = 8192
_TEACHER = 1 << 14  # pairs that the teacher scores at a time


class RetrievalTask(Task):
    """Train a matching model on pairs. ``dev`` chooses the best weights by RSUM."""

    metric = "dev_rsum"

    def __init__(
        self, method: MethodConfig | Method, pairs: PairSet | PhotoSet, config: TrainConfig, *,
        backbone: BackboneConfig, dev: PairSet | PhotoSet | None = None, reading: DataConfig | None = None,
        progress: bool = False,
    ) -> None:  # fmt: skip
        """Build model and dataloader on the right device; photos are decoded here where they fit into memory."""
        check_batches(pairs, config)
        self.config, self.pairs, self.device = config, pairs, take_device(config.device)
        self.world = join_world(self.device)
        self.world.rows(config.batch_size)  # refuses a batch that does not divide, before anything is written
        self.graphed = is_graphed(config, self.device, ranks=self.world.size)
        if dev is not None and 0 < config.dev_images < len(dev.image_ids):
            dev = dev.subset(range(config.dev_images))
        image_dim, text_dim = (pairs.images.shape[1], pairs.texts.shape[1]) if isinstance(pairs, PairSet) else (0, 0)
        model = MatchingModel.build(
            method, backbone,
            image_dim=image_dim, text_dim=text_dim, provenance=pairs.provenance, seed=config.seed, fit=pairs,
        )  # fmt: skip
        model.method.fit(pairs.captions, pairs.caption_image)
        model.to(self.device).train()
        self.model: MatchingModel = model
        self.members = model.method.members
        self.average = WeightAverage(model, config.ema) if config.ema else None
        self.teacher, self.trusting = teacher_plan(model.method, config)
        self.trust = torch.ones(len(pairs), device=self.device)
        """How likely each caption is right, see :meth:`update_trust`."""
        reading = reading or DataConfig()
        show = progress and self.world.is_main and isinstance(pairs, PhotoSet)
        with PhotoProgress("reading photos", show=show) as bar:
            self.loader = build_loader(model, pairs, config=reading, device=self.device, world=self.world, progress=bar)
            self.dev, self.dev_inputs = dev, None
            if isinstance(dev, PhotoSet):  # read in every epoch, so decoded once where they fit
                self.dev_inputs = tower_inputs(model.backbone, dev, workers=reading.workers, cache_gb=reading.cache_gb)
        if self.graphed and not isinstance(self.loader.images, Tensor):
            message = "train.cuda_graph needs all photos on the GPU, and they do not fit"
            raise UsageError(f"{message} — raise data.cache_gb, lower data.photo_size, or set train.cuda_graph=false")
        self.description = describe_recipe(method=model.method.config, backbone=backbone, train=config) | {
            "photo_size": reading.photo_size,
            "training data": describe_data(pairs),
            "dev data": None if dev is None else describe_data(dev),
        }
        if base := model.base_state():  # which checkpoints leave out
            self.description["towers"] = {"name": model.backbone.name, "weights": hash_weights(base)}
        self.eval_every, self.select_best = config.eval_every, config.select == "best"
        self.label = model.method.config.name
        # Full batches only, and an optimiser step never reaches into the next epoch.
        self.steps_per_epoch = len(pairs) // config.batch_size // config.accumulate * config.accumulate
        self.compiled = config.compile is True or (config.compile == "auto" and self.device.type == "cuda")
        self.falls_back = config.compile == "auto" and config.accumulate == 1
        self.seed = torch.tensor(config.seed, device=self.device)
        self.epoch = torch.zeros((), dtype=torch.int64, device=self.device)
        mix = model.method.mix
        self.mixer = None if mix is None or mix.share == 0 else Mixer(mix, model, self.loader)
        towers = model.has_towers and self.device.type == "cuda"
        # The text tower runs on its own stream: its small kernels fill what the image tower leaves free.
        self.stream = torch.cuda.Stream() if towers else None  # type: ignore[no-untyped-call]
        self.pair_loss = self._plain_pair_loss()
        self.look_ahead: list[Callable[[Batch], Tensor]] = []
        if model.method.look_ahead > 0:
            methods = model.method.each if isinstance(model.method, Members) else [model.method]
            self.look_ahead = [
                LookAhead(model.backbone, heads, method, self.loader, config)
                for heads, method in zip(model.heads, methods, strict=True)
            ]

    def _plain_pair_loss(self) -> PairLoss:
        """The method's loss, uncompiled, whole or in strips of rows."""
        method, batch = self.model.method, self.config.batch_size
        height = batch // self.world.size if method.pairwise else batch
        itemsize = 2 if self.config.precision == "bf16" else 4
        rows = method.strip_rows(self.config.tile, rows=height, columns=batch, itemsize=itemsize)
        return method.loss if rows == height else StripLoss(method.loss, method, rows)

    def build_optimizer(self) -> Optimizer:
        config = self.config
        return build_optimizer(
            self.model.param_groups(config.towers), config.optimizer,
            lr=config.lr, weight_decay=config.weight_decay, betas=config.betas,
            capturable=self.graphed, compiled=self.compiled,
        )  # fmt: skip

    def learning_rate(self, step: int) -> float:
        per_epoch = max(1, self.steps_per_epoch // self.config.accumulate)
        return self.config.lr * lr_factor(step, steps_per_epoch=per_epoch, config=self.config)

    def callbacks(self) -> list[Callback]:
        freeze = [FreezeTowers(self.model, self.config.towers)] if self.model.has_towers else []
        return [*freeze, *([self.average] if self.average else [])]

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Before an epoch's first batch the method may look at the whole training set."""
        self.epoch.fill_(epoch)
        if start == 0:
            epochs, seed, size = self.config.epochs, self.config.seed, self.config.batch_size
            labels, embed = self.loader.caption_image, self.embed_training_set
            view = TrainingView(epoch, epochs, seed, size, labels, embed)
            self.model.method.start_epoch(view)
            if self.trusting and epoch >= view.first_epochs(self.trusting):
                self.update_trust(epoch)
        return self.loader.batches(self.order(epoch)[start : self.steps_per_epoch])

    def order(self, epoch: int) -> Tensor:
        """The caption rows of each batch of an epoch. [batches, B]"""
        return batch_order(len(self.pairs), batch=self.config.batch_size, seed=self.config.seed, epoch=epoch)

    def batch_ids(self, step: int) -> list[str]:
        epoch, number = divmod(step, self.steps_per_epoch)
        return [self.pairs.caption_ids[row] for row in self.order(epoch)[number].tolist()]

    def loss(self, batch: Batch, step: Tensor) -> LossTerms:
        # First of all, since it also weighs the pairs of the batch.
        bank = torch.stack([look_ahead(batch) for look_ahead in self.look_ahead]).mean() if self.look_ahead else None
        model, captions, gather = self.model, batch.captions, partial(gather_rows, world=self.world)
        rows = self.world.rows(len(captions))
        image = self.loader.caption_image[captions]
        positions = torch.arange(len(captions), device=self.device)[rows]
        image_noise, text_noise = (RowNoise(self.seed, step, positions, kind) for kind in (Stream.IMAGE, Stream.TEXT))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream())
            with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
                texts = self.loader.texts[captions[rows]]
                t = model.embed_texts(texts, text_noise)
            block = batch_block(image, seed=self.seed, step=step, captions=captions, epoch=self.epoch)
            block, partners = (block, None) if self.mixer is None else self.mixer(block, image)
            images = self.loader.images_of(captions[rows], batch.photos)
            v = model.embed_images(images, image_noise, partners)
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
            v, t = v.map(Tensor.float), t.map(Tensor.float).map(gather)
            if self.trusting:
                block = replace(block, trust=self.trust[captions])
            if model.method.pairwise:  # every rank has its own rows of the pair matrix
                return self.pair_loss(v, t, self.taught(block.rows(rows), images, texts))
            whole = self.pair_loss(v.map(gather), t, self.taught(block, images, texts))
        total, parts = whole.total / self.world.size, {k: p / self.world.size for k, p in whole.parts.items()}
        return LossTerms(total, parts) if bank is None else LossTerms(total + bank, {**parts, "bank": bank.detach()})

    @torch.no_grad()
    def taught(self, block: PairBlock, images: Tensor, texts: Tensor) -> PairBlock:
        """With a teacher, the labels of unlabelled pairs give way to the averaged model: false negatives pull less."""
        if not self.teacher or self.average is None:
            return block
        model = self.average.model
        v, t = (x.map(Tensor.float) for x in (model.embed_images(images), model.embed_texts(texts)))
        t = t.map(partial(gather_rows, world=self.world))
        if len(v.mean) < len(block.row_ids):
            v = v.map(partial(gather_rows, world=self.world))
        parts = torch.split(torch.arange(len(v.mean), device=self.device), max(1, _TEACHER // len(t.mean)))
        score = torch.cat([model.method.score(take(v, rows), t).float() for rows in parts])
        targets = torch.where(block.relevance, 1.0, self.teacher * model.method.opinion(score))
        return replace(block, targets=targets)

    @torch.no_grad()
    def update_trust(self, epoch: int) -> None:
        """Compare the averaged model's cosine of every caption with its image and with an unrelated image.

        The cosine, not the score: a decoder of pairs learns wrong labels by heart sooner.
        """
        assert self.average is not None
        images, generator = self.loader.caption_image, epoch_generator(self.config.seed, epoch, kind=1 << 61)
        v, t = self.embed_training_set(self.average.model)
        shift = torch.randint(1, max(2, len(v)), images.shape, generator=generator).to(self.device)
        labelled, unrelated = ((v[rows] * t).sum(dim=-1) for rows in (images, (images + shift) % len(v)))
        self.trust.copy_(trust_labels(labelled, unrelated))

    def compile(self) -> Callable[[Batch, Tensor], LossTerms]:
        """On features the whole loss; with towers their blocks, one compilation for all of a kind, and the pairs.

        A trial step takes gradients of its own, which the compiler cannot trace.
        """
        self.look_ahead = [torch.compiler.disable(one) for one in self.look_ahead]  # type: ignore[no-untyped-call]
        if not self.model.has_towers and not isinstance(self.pair_loss, StripLoss):
            return compile_pairs(self.loss)
        self.model.compile_blocks(True)
        self.pair_loss = compile_pairs(self.pair_loss)
        return self.loss

    def uncompile(self) -> None:
        self.model.compile_blocks(False)
        self.pair_loss = self._plain_pair_loss()

    def evaluate(self) -> dict[str, float]:
        if self.dev is None:
            return {}
        with self._eagerly():
            scorer = PairScorer(self.average.model if self.average else self.model, device=self.device)
            return {"dev_rsum": dev_rsum(scorer.score_set(self.dev, inputs=self.dev_inputs), self.dev)}

    def _eagerly(self) -> AbstractContextManager[Any]:
        """Without compiled blocks: other batch sizes would each be compiled again."""
        return torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()

    @torch.no_grad()
    def embed_training_set(self, model: MatchingModel | None = None) -> SetEmbeddings:
        """Every image and caption without augmentation, at the precision of a step.

        Ranks share the work and all get the result.
        """
        model, loader = model or self.model, self.loader
        training, half = model.training, self.config.precision == "bf16"
        model.eval()
        with self._eagerly(), torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            v = self._embed_share(loader.images, len(self.pairs.image_ids), model.embed_images)
            t = self._embed_share(loader.texts, len(loader.texts), model.embed_texts)
        model.train(training)
        return SetEmbeddings(v, t)

    def _embed_share(self, inputs: Tensor | PhotoReader, count: int, embed: Callable[[Tensor], Embedding]) -> Tensor:
        """This rank embeds its share of ``count`` rows block by block, and gets the others' too. -> [count, d]"""
        share = -(-count // self.world.size)  # ranks send equally much, so the last share may end in zeros
        first, stop = self.world.rank * share, min((self.world.rank + 1) * share, count)
        size = _TOWERS[self.device.type] if self.model.has_towers else _FEATURES
        blocks = [range(start, min(start + size, stop)) for start in range(first, stop, size)]
        batches = (inputs[x.start : x.stop] for x in blocks) if isinstance(inputs, Tensor) else inputs.stream(blocks)
        rows = torch.zeros(share, self.model.dim, device=self.device)
        for block, batch in zip(blocks, batches, strict=True):
            rows[block.start - first : block.stop - first] = embed(batch.to(self.device)).mean.float()
        return gather_rows(rows, self.world)[:count]

    def state_dict(self) -> dict[str, Tensor]:
        return self.model.trained_state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_trained_state(state)

    def result_state(self) -> dict[str, Tensor]:
        return (self.average.model if self.average else self.model).trained_state()

    def finish(self) -> None:
        self.model.merge_lora()

    def training_state(self) -> dict[str, Tensor]:
        return {**self.model.method.training_state(), **({"trust": self.trust} if self.trusting else {})}

    def load_training_state(self, state: Mapping[str, Tensor]) -> None:
        self.model.method.load_training_state(state)
        if self.trusting:
            self.trust.copy_(state["trust"])


class LookAhead:
    """A trial step on a batch, undone at once, for methods that weigh each pair by it: does it help trusted pairs?

    The step moves heads and pooling. Towers learn a hundred times more slowly, so they stay as they are: their tokens
    are computed once, without gradient. On cached features this costs seven passes through the heads; with towers three
    more forward passes, which about doubles a step.
    """

    def __init__(
        self, backbone: Backbone, heads: Heads, method: Method, loader: PairLoader, config: TrainConfig
    ) -> None:
        self.backbone, self.heads, self.method = backbone, heads, method
        self.loader, self.world = loader, loader.world
        self.half = config.precision == "bf16"  # matrix products, as in the loss

    def __call__(self, batch: Batch) -> Tensor:
        """Give the method the weights of a batch. -> 0-d, this rank's share of the loss of the trusted pairs"""
        method = self.method
        pairs = self._encode(batch.captions, batch.photos)
        near = [self._encode(captions) for captions in method.neighbours(batch.captions)]
        trial = self._trial_weights(pairs)
        before = torch.stack([self._losses(pairs, {}) for pairs in near])
        with torch.no_grad():
            after = torch.stack([self._losses(pairs, trial) for pairs in near])
        return method.weigh(batch.captions, before, after) / self.world.size

    @torch.no_grad()
    def _encode(self, captions: Tensor, photos: Tensor | None = None) -> tuple[Tensor, Tokens, Tokens]:
        """Images of the captions [B], and tokens of this rank's pairs."""
        rows = captions[self.world.rows(len(captions))]
        with torch.autocast(captions.device.type, torch.bfloat16, enabled=self.half):
            images = self.backbone.encode_images(self.loader.images_of(rows, photos))
            texts = self.backbone.encode_texts(self.loader.texts[rows])
        return self.loader.caption_image[captions], images, texts

    def _losses(self, pairs: tuple[Tensor, Tokens, Tokens], weights: dict[str, Tensor]) -> Tensor:
        """Each pair's loss with these weights instead of the heads'. -> [B]"""
        image, *tokens = pairs
        with torch.autocast(image.device.type, torch.bfloat16, enabled=self.half):
            embedded = functional_call(self.heads, weights, tuple(tokens))
            v, t = (Embedding(gather_rows(x.mean.float(), self.world)) for x in embedded)
            return self.method.pair_losses(v, t, same_image(image, image))

    def _trial_weights(self, pairs: tuple[Tensor, Tokens, Tokens]) -> dict[str, Tensor]:
        """The heads after a step down these pairs' gradient, of ``look_ahead`` times their own length."""
        named = dict(self.heads.head_params())
        grads = torch.autograd.grad(self._losses(pairs, {}).mean() / self.world.size, list(named.values()))
        flat = sum_over_ranks(torch.cat([grad.reshape(-1) for grad in grads]), self.world)
        with torch.no_grad():
            heads = torch.cat([parameter.reshape(-1) for parameter in named.values()])
            moved = heads - flat * (self.method.look_ahead * heads.norm() / flat.norm().clamp_min(1e-12))
            parts = moved.split([parameter.numel() for parameter in named.values()])
            return {name: part.view_as(parameter) for (name, parameter), part in zip(named.items(), parts, strict=True)}


def teacher_plan(method: Method, config: TrainConfig) -> tuple[float, float]:
    """The weight of the teacher, and from which share of the epochs on captions are weighed by trust; both may be 0."""
    settings = method.config
    if not isinstance(settings, RetrievalConfig) or not (settings.teacher or settings.trust):
        return 0.0, 0.0
    field = "teacher" if settings.teacher else "trust"
    if not method.soft_labels:
        message = f"method.{field}={getattr(settings, field)}: the loss of '{settings.name}' takes no soft labels"
        raise UsageError(f"{message} — set it to 0, or use vacsr, sigmoid or infonce")
    if not config.ema:
        message = f"method.{field}={getattr(settings, field)} asks the average of the weights, and there is none"
        raise UsageError(f"{message} — set train.ema=0.998, or method.teacher=0 and method.trust=0")
    return settings.teacher, settings.trust


def check_batches(pairs: PairSet | PhotoSet, config: TrainConfig) -> None:
    """Refuse data that do not fill a step, or that have no mismatch."""
    if len(pairs) < config.batch_size * config.accumulate:
        message = f"{len(pairs)} captions do not fill a step of {config.accumulate} × {config.batch_size}"
        size = max(2, len(pairs) // (2 * config.accumulate))
        raise DataError(f"{message} — set train.batch_size={size} or give more data")
    if bool((pairs.caption_image == pairs.caption_image[0]).all()):
        image = pairs.image_ids[int(pairs.caption_image[0])]
        message = f"all {len(pairs)} training captions are of one image ('{image}'), so no pair can be a mismatch"
        raise DataError(f"{message} — give captions of at least two images")


def describe_data(pairs: PairSet | PhotoSet) -> dict[str, str]:
    """Digests of features or photos with their labels, and of the words of the captions, which a method may read."""
    captions = hashlib.sha256(json.dumps(pairs.captions).encode()).hexdigest()
    return {"photos" if isinstance(pairs, PhotoSet) else "features": pairs.digest(), "captions": captions}


def is_graphed(config: TrainConfig, device: torch.device, *, ranks: int = 1) -> bool:
    """Are steps replayed as a CUDA graph? A config that no graph can hold is refused."""
    graphed = config.cuda_graph and device.type == "cuda"
    if graphed and (ranks > 1 or config.accumulate > 1):
        raise UsageError("train.cuda_graph needs one rank and accumulate=1 — set train.cuda_graph=false")
    return graphed
