"""VACSR for recognition: the variational adapter on CLIP's features of photos and class prompts (Tables 4 and 5).

The pair matrix is photos × classes with one match per row, or photos × the prompts of the batch's own labels. Beside
the adapter some blocks of both towers learn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vacsr.adapter import VariationalAdapter
from vacsr.backbones.base import Tower
from vacsr.config.fewshot.vacsr import FewshotVacsrConfig
from vacsr.errors import UsageError
from vacsr.methods.base import Embedding, ParamGroup, split_by_decay
from vacsr.methods.fewshot.base import ClassSet, FewshotMethod, ShotBatch, drawn_from
from vacsr.methods.fewshot.clip import ClipModel
from vacsr.noise import PairNoise
from vacsr.objective import LossTerms, VacsrObjective
from vacsr.pairwise import PairBlock, cosines, same_image
from vacsr.strips import PairLoss, StripLoss

_TEST_PAIRS = 16_384  # scored at a time: 64 MiB for each tensor of 1,024 numbers per pair


class FewshotVacsr(FewshotMethod):
    """Logit = decoder of the mixture's mean (+ a·cos + b); uncertainty = mixed bounded variance of the pair."""

    centred: Tensor

    def __init__(
        self, clip: ClipModel, config: FewshotVacsrConfig, *, classes: ClassSet, generator: torch.Generator
    ) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        self.config = config
        with drawn_from(generator):
            self.adapter = VariationalAdapter(clip.dim, config.adapter).to(clip.device)
        self.objective = VacsrObjective(config.objective)
        self.register_buffer("centred", torch.zeros((), dtype=torch.bool, device=clip.device))
        self._surely_centred = False
        self._start()
        if config.tower_lr > 0:
            _wake(clip.backbone.image, config.image_blocks, field="image_blocks")
            _wake(clip.backbone.text, config.text_blocks, field="text_blocks")

    @torch.no_grad()
    def _start(self) -> None:
        """With a cosine residual, training starts at CLIP's own logits where the config says so."""
        if self.adapter.residual is None:
            return
        if self.config.cosine_start == "clip":
            self.adapter.residual[0] = self.clip.scale
        if self.config.decoder_zero:
            for parameter in self.adapter.decoder[-1].parameters():
                parameter.zero_()

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """The objective over the pair matrix, whole or in strips of about ``pair_chunk`` pairs."""
        images, labels = self.clip.image(batch.pixels), batch.labels
        if self.config.pairs == "classes":
            texts, own = self._texts(self.sentence_ids(classes)), torch.arange(len(classes.names), device=labels.device)
        else:
            present, place = torch.unique(labels, return_inverse=True)
            texts, own = self._texts(trimmed(self.sentence_ids(classes)[present]))[place], labels
        relevance = same_image(labels, own)
        noise = PairNoise.create(
            seed=batch.seed, step=batch.step, rows=len(labels), cols=len(own), device=labels.device
        )
        block = PairBlock(relevance, len(labels), relevance.sum(), noise)
        if not self._is_centred():
            self._centre(images, texts, block)
        rows = max(1, self.config.pair_chunk // len(texts)) if self.config.pair_chunk else len(images)
        pair_loss: PairLoss = self._pair_loss if rows >= len(images) else StripLoss(self._pair_loss, self.adapter, rows)
        return pair_loss(Embedding(images), Embedding(texts), block)

    def _pair_loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """L = α·KL + recon + β(L_P + γ·L_N). [R, d], [C, d]"""
        return self.objective(self.adapter, v.mean, t.mean, block=pairs)

    def _is_centred(self) -> bool:
        """Whether b has been set, in this process or before; asked until it has, as every answer waits for a GPU."""
        self._surely_centred = self._surely_centred or bool(self.centred)
        return self._surely_centred

    @torch.no_grad()
    def _centre(self, images: Tensor, texts: Tensor, block: PairBlock) -> None:
        """The first batch's b: one too large would call every pair a match and shake the towers until it has fallen."""
        self.centred.fill_(True)
        residual = self.adapter.residual
        if residual is not None and self.config.cosine_start == "clip":
            residual[1] = centred_bias(residual[0] * cosines(images, texts), share=block.relevance.double().mean())

    def _texts(self, tokens: Tensor) -> Tensor:
        """[C, L] ids -> [C, d]"""
        chunks = torch.split(tokens, self.config.text_chunk or len(tokens))
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self.clip.backbone.text.parameters())
        if learns and len(chunks) > 1:
            return torch.cat([checkpoint(self.clip.text, chunk, use_reentrant=False) for chunk in chunks])
        return torch.cat([self.clip.text(chunk) for chunk in chunks])

    @torch.no_grad()
    def prepared(self, classes: ClassSet) -> Tensor:
        """-> [C, d]"""
        return self._texts(self.sentence_ids(classes))

    @torch.no_grad()
    def logits(self, pixels: Tensor, prepared: Tensor) -> Tensor:
        """[B, 3, S, S], [C, d] -> [B, C]"""
        return self._by_rows(self.adapter.logit, self.clip.image(pixels), prepared)

    @torch.no_grad()
    def uncertainty(self, pixels: Tensor, prepared: Tensor) -> Tensor | None:
        """[B, 3, S, S], [C, d] -> [B, C]"""
        return self._by_rows(self.adapter.uncertainty, self.clip.image(pixels), prepared)

    @torch.no_grad()
    def scored(self, pixels: Tensor, prepared: Tensor) -> tuple[Tensor, Tensor | None]:
        """Both, with one pass of the image tower. [B, 3, S, S], [C, d] -> [B, C], [B, C]"""
        images = self.clip.image(pixels)
        logits = self._by_rows(self.adapter.logit, images, prepared)
        return logits, self._by_rows(self.adapter.uncertainty, images, prepared)

    @staticmethod
    def _by_rows(of_pairs: Callable[[Tensor, Tensor], Tensor], images: Tensor, texts: Tensor) -> Tensor:
        """Every pair's number, some photos at a time. [B, d], [C, d] -> [B, C]"""
        some = torch.split(images, max(1, _TEST_PAIRS // len(texts)))
        return torch.cat([of_pairs(part.unsqueeze(1), texts.unsqueeze(0)) for part in some])

    def stored(self) -> Mapping[str, Tensor]:
        """What learns, a and b also where they do not, and whether the first batch has set b."""
        residual = self.adapter.residual
        kept: dict[str, Tensor] = {**self.learned(), "centred": self.centred}
        return kept if residual is None else kept | {"adapter.residual": residual}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Saved weights; they say whether b has been set."""
        super().load(tensors)
        self._surely_centred = False

    def param_groups(self) -> list[ParamGroup]:
        """The adapter and the blocks that learn, each at a rate of its own; biases, norms and scalars do not decay."""
        towers = [(name, parameter) for name, parameter in self.learned().items() if name.startswith("clip.")]
        return [
            *split_by_decay("adapter", self.adapter.named_parameters(), lr_scale=self.config.adapter_lr),
            *split_by_decay("towers", towers, lr_scale=self.config.tower_lr),
        ]


def trimmed(tokens: Tensor) -> Tensor:
    """Without the columns in which all these sentences have ended. [C, L] ids, −1 after the end -> [C, ≤ L]

    >>> trimmed(torch.tensor([[5, 6, -1, -1], [5, 7, 6, -1]]))
    tensor([[ 5,  6, -1],
            [ 5,  7,  6]])
    """
    return tokens[:, : int((tokens >= 0).sum(dim=1).max())]


def centred_bias(scores: Tensor, *, share: Tensor) -> Tensor:
    """The b at which sigmoid(scores + b) has the mean ``share``, by halving. [...], 0-d -> 0-d

    >>> scores = torch.tensor([3.0, 5.0])
    >>> round(float(centred_bias(scores, share=torch.tensor(0.5))), 4)
    -4.0
    """
    scores = scores.double()
    logit = torch.logit(share.double(), eps=1e-6)
    low, high = logit - scores.max(), logit - scores.min()  # at these all probabilities are below or above the share
    for _ in range(60):
        middle = (low + high) / 2
        above = torch.sigmoid(scores + middle).mean() > share
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (low + high) / 2


def chosen_blocks(setting: str | tuple[int, ...], depth: int, *, field: str) -> list[int]:
    """Numbers of the blocks that a setting names in a tower of ``depth`` blocks; more than there are means all.

    >>> chosen_blocks("last 2", 12, field="image_blocks"), chosen_blocks("first 3", 2, field="text_blocks")
    ([10, 11], [0, 1])
    """
    if isinstance(setting, tuple):
        if any(number >= depth for number in setting):
            raise UsageError(
                f"{field}={list(setting)}: the tower has blocks 0 to {depth - 1} — name these, or 'last 2'"
            )
        return sorted(set(setting))
    word, _, count = setting.partition(" ")
    number = min(int(count), depth) if count else {"all": depth, "none": 0}[word]
    return list(range(depth - number, depth)) if word == "last" else list(range(number))


def _wake(tower: Tower, setting: str | tuple[int, ...], *, field: str) -> None:
    blocks: list[nn.Module] = tower.blocks()
    for number in chosen_blocks(setting, len(blocks), field=field):
        blocks[number].requires_grad_(True)
