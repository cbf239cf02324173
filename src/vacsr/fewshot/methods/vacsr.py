"""VACSR for recognition: the variational adapter on CLIP's features of photos and class prompts (Tables 4 and 5).

The pair matrix is photos × classes with one match per row, or photos × the prompts of the batch's own labels. Beside
the adapter some blocks of both towers learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from vacsr.adapter import AdapterConfig, VariationalAdapter
from vacsr.config.base import MethodConfig, method_entry, register
from vacsr.fewshot.methods.base import ClassSet, FewshotMethod, PublishedPlan, ShotBatch, drawn_from, encode_chunks
from vacsr.methods.base import Embedding, ParamGroup, split_by_decay
from vacsr.objective import LossTerms, ObjectiveConfig, PairBlock, VacsrObjective, batch_block, cosines
from vacsr.strips import PairLoss, StripLoss

Blocks = Annotated[str, Field(pattern=r"^((first|last) [0-9]+|all|none)$")]
"""`first 2`, `last 3`, `all` or `none`. A count beyond the tower means all of it."""


class FewshotVacsrConfig(MethodConfig):
    """Adapter and objective as in retrieval, on CLIP's own features. The defaults are the preset `default`."""

    name: Literal["vacsr"] = "vacsr"
    adapter: AdapterConfig = AdapterConfig()
    """The model."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss."""
    image_blocks: Blocks = "first 2"
    """Blocks of the image tower that learn; the paper's words, taken literally."""
    text_blocks: Blocks = "first 3"
    """Blocks of the text tower that learn."""
    pairs: Literal["classes", "batch"] = "classes"
    """What photos are compared with: every class's prompt, or the prompts of the batch's own labels."""
    tower_lr: Annotated[float, Field(ge=0)] = 0.1
    """The unfrozen blocks' learning rate relative to train.lr, which is the adapter's; 0 freezes them too."""
    text_chunk: Annotated[int, Field(ge=0)] = 0
    """Prompts encoded at a time and recomputed in the backward pass: less memory for many classes; 0 takes all."""
    pair_chunk: Annotated[int, Field(ge=0)] = 0
    """Pairs of photo and class in the loss at a time, in strips of whole rows: less memory; 0 takes all."""

    @model_validator(mode="after")
    def _fits(self) -> FewshotVacsrConfig:
        if self.pairs == "classes" and self.objective.positives == "diagonal":
            raise ValueError("objective.positives=diagonal is undefined for photos × classes — use pairs=batch or ids")
        if self.pairs == "classes" and self.objective.contrastive_weight:
            message = "objective.contrastive_weight needs a caption for every photo, not classes"
            raise ValueError(f"{message} — use pairs=batch, or set it to 0")
        if self.pair_chunk and "both" in (self.objective.negative_direction, self.objective.contrastive_direction):
            raise ValueError("objective: the direction 'both' needs whole columns — set pair_chunk=0")
        return self


@register("vacsr", FewshotVacsrConfig, presets={"paper": method_entry("vacsr").presets["paper"]})
class FewshotVacsr(FewshotMethod):
    """Logit = decoder of the mixture's mean (+ a·cos + b); uncertainty = mixed bounded variance of the pair."""

    config: FewshotVacsrConfig
    test_pairs: int = 16_384  # pairs scored at a time: 64 MiB for each tensor of 1,024 numbers per pair
    # The paper states neither optimiser nor rate; it says that it follows MMA's set-up.
    plan = PublishedPlan(
        {"lr": 0.0015, "batch_size": 16, "epochs": 5, "warmup_epochs": 0},
        train_on={"imagenet": {"batch_size": 128}, "sun397": {"batch_size": 128}, "eurosat": {"batch_size": 5}},
        # Prompts and pairs in chunks: for memory, with the same result.
        method_on={name: {"text_chunk": 250, "pair_chunk": 16_384} for name in ("imagenet", "sun397")},
    )

    def add_weights(self, classes: ClassSet, generator: torch.Generator) -> None:
        clip, config = self.clip, self.config
        with drawn_from(generator):
            self.adapter = VariationalAdapter(clip.dim, config.adapter).to(clip.device)
        self.objective = VacsrObjective(config.objective)
        if self.adapter.residual is not None:  # a·cos+b starts at CLIP's scale, the decoder at 0: zero-shot CLIP
            self.adapter.residual.data[0] = clip.scale
            for parameter in self.adapter.decoder[-1].parameters():
                nn.init.zeros_(parameter)
        for name, tower in (("image_blocks", clip.backbone.image), ("text_blocks", clip.backbone.text)):
            blocks = tower.blocks()
            chosen = chosen_blocks(getattr(config, name), len(blocks))
            for number in chosen if config.tower_lr > 0 else ():
                blocks[number].requires_grad_(True)

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """The objective over the pair matrix, whole or in strips of about ``pair_chunk`` pairs.

        The first step sets the residual's b, so that the mean probability of the batch's pairs is the share of matches
        among them: a larger one would call every pair a match and disturb the towers.
        """
        images, labels, ids = self.image_features(batch.pixels), batch.labels, self.sentence_ids(classes)
        if self.config.pairs == "classes":
            texts, columns = self._encode(ids), torch.arange(len(ids), device=labels.device)
        else:
            present, index = torch.unique(labels, return_inverse=True)
            ids = ids[present]
            longest = int((ids >= 0).sum(dim=1).max())
            texts, columns = self._encode(ids[:, :longest])[index], labels
        block = batch_block(labels, columns, seed=batch.seed, step=batch.step)
        residual = self.adapter.residual
        if batch.step == 0 and residual is not None:
            with torch.no_grad():
                scores = residual[0] * cosines(images, texts)
                residual[1] = centred_bias(scores, share=block.relevance.double().mean())
        rows = max(1, self.config.pair_chunk // len(texts)) if self.config.pair_chunk else len(images)
        pair_loss: PairLoss = self._pair_loss if rows >= len(images) else StripLoss(self._pair_loss, self.adapter, rows)
        return pair_loss(Embedding(images), Embedding(texts), block)

    def _pair_loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """L = α·KL + recon + β(L_P + γ·L_N). [R, d], [C, d]"""
        return self.objective(self.adapter, v.mean, t.mean, block=pairs)

    def text_features(self, classes: ClassSet) -> Tensor:
        return self._encode(self.sentence_ids(classes))

    def _encode(self, ids: Tensor) -> Tensor:
        """[C, L] ids -> [C, d]"""
        return encode_chunks(self.clip.text, ids, size=self.config.text_chunk or len(ids))

    @torch.no_grad()
    def predict(self, pixels: Tensor, prepared: Tensor) -> tuple[Tensor, Tensor | None]:
        """Some photos at a time."""
        chunks = torch.split(self.image_features(pixels).unsqueeze(1), max(1, self.test_pairs // len(prepared)))
        logits, sigma = (
            torch.cat([of_pairs(chunk, prepared.unsqueeze(0)) for chunk in chunks])
            for of_pairs in (self.adapter.logit, self.adapter.uncertainty)
        )
        return logits, sigma

    def weights(self) -> Mapping[str, Tensor]:
        """What learns, and a and b also where they do not."""
        residual = self.adapter.residual
        return self.trainable() if residual is None else {**self.trainable(), "adapter.residual": residual}

    def param_groups(self) -> list[ParamGroup]:
        """The adapter and the unfrozen blocks, each at a rate of its own; biases, norms and scalars do not decay."""
        towers = [(name, parameter) for name, parameter in self.trainable().items() if name.startswith("clip.")]
        return [
            *split_by_decay("adapter", self.adapter.named_parameters()),
            *split_by_decay("towers", towers, lr_scale=self.config.tower_lr),
        ]


def centred_bias(scores: Tensor, *, share: Tensor) -> Tensor:
    """The b at which sigmoid(scores + b) has the mean ``share``, by bisection. [...], 0-d -> 0-d"""
    scores = scores.double()
    logit = torch.logit(share.double(), eps=1e-6)
    low, high = logit - scores.max(), logit - scores.min()  # at these all probabilities are below or above the share
    for _ in range(60):
        middle = (low + high) / 2
        above = torch.sigmoid(scores + middle).mean() > share
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (low + high) / 2


def chosen_blocks(setting: str, depth: int) -> range:
    """Numbers of the blocks that a setting names in a tower of ``depth`` blocks; more than there are means all.

    >>> chosen_blocks("last 2", 12), chosen_blocks("first 3", 2)
    (range(10, 12), range(0, 2))
    """
    word, _, count = setting.partition(" ")
    number = min(int(count), depth) if count else {"all": depth, "none": 0}[word]
    return range(depth - number, depth) if word == "last" else range(number)
