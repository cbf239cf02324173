"""Prompts that learn: CoOp and CoCoOp put them in place of words, MaPLe and CoPrompt into the blocks of both towers.

CoOp (Zhou et al., IJCV 2022): the context in front of the class name learns, from the embeddings of real words. Before
training, with the same words as the template, it is zero-shot CLIP. CoCoOp (Zhou et al., CVPR 2022) adds a vector made
from the photo to every context vector, so each photo has sentences of its own: B photos and C classes are B·C passes
through the text tower.

MaPLe (Khattak et al., CVPR 2023): in the text tower the learned tokens follow the start token, in place of the first
context words; in the image tower they come last, a linear map of the text tokens of the same block. Each further block
replaces them by its own. CoPrompt (Roy & Etemad, ICLR 2024) adds an adapter on each side's features and a pull towards
the frozen towers' features: of a second view of the photos, and of one sentence per class, drawn in each step from the
class's descriptions. Loss = CE + W·[(1 − cos(t, t°)) + (1 − cos(v, v°))].
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones.edits import TowerEdits, splice, word_table
from vacsr.config.base import MethodConfig, register
from vacsr.errors import UsageError
from vacsr.fewshot.methods.base import (
    ClassSet,
    FewshotMethod,
    PublishedPlan,
    ShotBatch,
    cosine_distance,
    cross_entropy,
    drawn_from,
    encode_chunks,
)
from vacsr.fewshot.methods.clip import ClipModel, unit
from vacsr.noise import RowNoise, Stream
from vacsr.objective import LossTerms


class CoopConfig(MethodConfig):
    """Context words shared by all classes are learned as vectors (CoOp). Defaults as published for base-to-novel."""

    name: Literal["coop"] = "coop"
    context: Annotated[str, Field(min_length=1)] = "a photo of a"
    """Words whose embeddings the context starts at, one vector per token; the class name and a full stop follow."""


class CocoopConfig(CoopConfig):
    """CoOp's context, shifted by a small network that sees the photo (CoCoOp). Defaults as published."""

    name: Literal["cocoop"] = "cocoop"  # type: ignore[assignment]
    reduction: Annotated[int, Field(ge=1)] = 16
    """The network's hidden layer has d divided by this: 32 for CLIP's 512."""
    chunk: Annotated[int, Field(ge=1)] = 2048
    """Prompts encoded at a time, of photos × classes; where more are needed, training recomputes them."""


class MapleConfig(MethodConfig):
    """Learned tokens in the first blocks of both towers (MaPLe). Defaults as published for base-to-novel.

    Its ImageNet run for other domains has depth 3.
    """

    name: Literal["maple"] = "maple"
    tokens: Annotated[int, Field(ge=1)] = 2
    """Tokens per block; they replace the context's first tokens."""
    depth: Annotated[int, Field(ge=1)] = 9
    """Blocks that get tokens of their own, from the first on; at most all blocks of the shallower tower."""
    context: str = "a photo of a"
    """A class is described as these words, its name and a full stop; the first block's tokens start as its first."""


class CopromptConfig(MapleConfig):
    """CoPrompt: MaPLe, adapters on the features, and a pull towards the frozen towers.

    Defaults are those of its configuration file; its runs set tokens, depth and consistency per data set.
    """

    name: Literal["coprompt"] = "coprompt"  # type: ignore[assignment]
    reduction: Annotated[int, Field(ge=1)] = 4
    """The adapters' hidden layer has the features' dimension divided by this."""
    image_blend: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the adapter's output in an image's feature."""
    text_blend: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of the adapter's output in a class's feature."""
    consistency: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the two cosine terms."""


@dataclass(frozen=True, eq=False)
class TextPrompts(TowerEdits):
    """Replaces what follows the start of every sentence by vectors: the words, and the input of further blocks."""

    prompts: Sequence[Tensor]  # of the words and of blocks 1, 2, …: [n, W] for all sentences, or [C, n, W]

    def words(self, tokens: Tensor) -> Tensor:
        return splice(tokens, self.prompts[0], start=1)

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        return splice(tokens, self.prompts[depth], start=1) if 0 < depth < len(self.prompts) else tokens


@dataclass(frozen=True, eq=False)
class ImagePrompts(TowerEdits):
    """Appends the first block's tokens; each deeper block replaces them by its own."""

    prompts: Sequence[Tensor]  # of each block [n, W]

    def entry(self, tokens: Tensor) -> Tensor:
        return splice(tokens, self.prompts[0], start=tokens.shape[1], insert=True)

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        if not 0 < depth < len(self.prompts):
            return tokens
        return splice(tokens, self.prompts[depth], start=tokens.shape[1] - len(self.prompts[depth]))


@register("coop", CoopConfig, presets={"paper": {}})
class Coop(FewshotMethod):
    """One context for all classes; cross-entropy of scaled cosines."""

    config: CoopConfig
    plan = PublishedPlan({"lr": 0.002, "batch_size": 32, "epochs": 200}, train_on={"imagenet": {"epochs": 50}})

    def add_weights(self, classes: ClassSet, generator: torch.Generator) -> None:
        self.prefix = self.clip.tokens([self.config.context])[0, 1:-1]
        self.context = nn.Parameter(word_table(self.clip.backbone.text).weight.detach()[self.prefix].clone())

    def text_edits(self) -> TextPrompts:
        return TextPrompts([self.context])

    def template(self, classes: ClassSet) -> str:
        return f"{self.config.context} {{}}."

    def tokenize(self, sentences: Sequence[str]) -> Tensor:
        """All ids must begin with those of the context."""
        ids, n = super().tokenize(sentences), len(self.prefix)
        complete = ids[:, 1 + n :].ge(0).sum(dim=1) >= 2  # a word of the name and the end
        if not bool(complete.all() and (ids[:, 1 : 1 + n] == self.prefix.to(ids.device)).all()):
            message = f"context {self.config.context!r} is not tokenised as {n} tokens before every class name"
            limit = self.clip.backbone.text.context
            raise UsageError(f"{message} — end it with a whole word and keep sentences within {limit} tokens")
        return ids


@register("cocoop", CocoopConfig, presets={"paper": {}})
class Cocoop(Coop):
    """CoOp's context and a network that shifts it; cross-entropy of scaled cosines."""

    config: CocoopConfig
    plan = PublishedPlan({"lr": 0.002, "batch_size": 1, "epochs": 10})

    def add_weights(self, classes: ClassSet, generator: torch.Generator) -> None:
        super().add_weights(classes, generator)
        clip = self.clip
        hidden = max(1, clip.dim // self.config.reduction)
        with drawn_from(generator):
            self.meta = nn.Sequential(nn.Linear(clip.dim, hidden), nn.ReLU(), nn.Linear(hidden, clip.text_width))
        self.meta.to(self.context)

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        return cross_entropy(self._logits(batch.pixels, self.sentence_ids(classes)), batch.labels)

    def prepare(self, classes: ClassSet) -> Tensor:
        """The ids of the classes' sentences: their features depend on the photo. -> [C, L]"""
        return self.sentence_ids(classes)

    @torch.no_grad()
    def predict(self, pixels: Tensor, prepared: Tensor) -> tuple[Tensor, None]:
        return self._logits(pixels, prepared), None

    def _logits(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """Every class's sentence with every photo's context. [B, 3, S, S], [C, L] -> [B, C]"""
        images = self.image_features(pixels)
        contexts = self.context + self.meta(images).unsqueeze(1)  # [B, n, W]

        def encode(pairs: Tensor) -> Tensor:
            """Pair p is photo p // C with class p % C. [P] -> [P, d]"""
            return self.clip.text(ids[pairs % len(ids)], edits=TextPrompts([contexts[pairs // len(ids)]]))

        pairs = torch.arange(len(images) * len(ids), device=ids.device)
        texts = encode_chunks(encode, pairs, size=self.config.chunk).view(len(images), len(ids), self.clip.dim)
        with torch.autocast(images.device.type, enabled=False):
            return self.clip.scale * (images.unsqueeze(1) * texts).sum(dim=-1)


@register("maple", MapleConfig, presets={"paper": {}})
class Maple(FewshotMethod):
    """Cross-entropy on scaled cosines of the prompted towers.

    ``tokens`` are the text tokens of every prompted block, ``maps`` make image tokens of them.
    """

    config: MapleConfig
    plan = PublishedPlan(
        {"lr": 0.0035, "batch_size": 4, "epochs": 5},
        domain_method={"depth": 3},
        domain_train={"lr": 0.0026, "epochs": 2},
    )

    def add_weights(self, classes: ClassSet, generator: torch.Generator) -> None:
        clip, config = self.clip, self.config
        words = clip.tokens([config.context])[0, 1:-1]  # without start and end
        if len(words) < config.tokens:
            message = f"method.tokens is {config.tokens}, {config.context!r} has {len(words)} tokens"
            raise UsageError(f"{message} — set method.tokens to at most {len(words)}, or write a longer method.context")
        first = word_table(clip.backbone.text).weight.detach()[words[: config.tokens]]
        deeper = min(config.depth, *clip.depths) - 1
        fresh = [0.02 * torch.randn(first.shape, generator=generator) for _ in range(deeper)]
        with drawn_from(generator):
            first_map, other_map = (nn.Linear(clip.text_width, clip.image_width) for _ in range(2))
        maps = [first_map, *(deepcopy(other_map) for _ in fresh)]  # the others start equal
        self.tokens, self.maps = nn.ParameterList([first.clone(), *fresh]).to(first), nn.ModuleList(maps).to(first)

    def image_edits(self) -> ImagePrompts:
        return ImagePrompts([linear(tokens) for linear, tokens in zip(self.maps, self.tokens, strict=True)])

    def text_edits(self) -> TextPrompts:
        return TextPrompts(list(self.tokens))

    def template(self, classes: ClassSet) -> str:
        return f"{self.config.context} {{}}."


_COPROMPT_DEPTH_TOKENS_CONSISTENCY = {
    "imagenet": (12, 4, 8.0), "caltech101": (12, 4, 4.0), "oxford_pets": (12, 2, 0.1), "stanford_cars": (12, 4, 4.0),
    "oxford_flowers": (9, 4, 8.0), "food101": (9, 4, 0.5), "fgvc_aircraft": (9, 4, 2.0), "sun397": (12, 4, 8.0),
    "dtd": (12, 2, 8.0), "eurosat": (12, 2, 0.1), "ucf101": (12, 4, 2.0),
}  # fmt: skip
"""Chosen for each data set in the public code."""


class FeatureAdapter(nn.Module):
    """d → d/r → d without biases, ReLU after both, blended with its input.

    The adapter of c·x is c times that of x, so features may be normalised before it.
    """

    def __init__(self, dim: int, *, reduction: int, blend: float) -> None:
        super().__init__()
        self.blend = blend
        self.down = nn.Linear(dim, max(1, dim // reduction), bias=False)
        self.up = nn.Linear(max(1, dim // reduction), dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Unit vectors to unit vectors. [N, d] -> [N, d]"""
        adapted = functional.relu(self.up(functional.relu(self.down(x))))
        return unit(self.blend * adapted + (1.0 - self.blend) * x)


@register("coprompt", CopromptConfig, presets={"paper": {}})
class Coprompt(Maple):
    """MaPLe's towers with adapters; trained to classify and to stay consistent."""

    config: CopromptConfig
    second_view = True
    # Both views squeeze the whole photo into the square and go through RandAugment; no crop and no flip.
    plan = PublishedPlan(
        {"lr": 0.0035, "batch_size": 4, "epochs": 8, "view": "randaugment", "second_view": "randaugment"},
        train_on={"food101": {"epochs": 5}},
        method_on={
            name: {"depth": depth, "tokens": tokens, "consistency": weight}
            for name, (depth, tokens, weight) in _COPROMPT_DEPTH_TOKENS_CONSISTENCY.items()
        },
    )

    def add_weights(self, classes: ClassSet, generator: torch.Generator) -> None:
        super().add_weights(classes, generator)
        dim, config = self.clip.dim, self.config
        with drawn_from(generator):
            self.image_adapter, self.text_adapter = (
                FeatureAdapter(dim, reduction=config.reduction, blend=blend).to(self.tokens[0])
                for blend in (config.image_blend, config.text_blend)
            )

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        assert batch.second is not None, "it asks for a second view"
        images, texts = self.image_features(batch.pixels), self.text_features(classes)
        ce = functional.cross_entropy(self.scaled_cosines(images, texts), batch.labels)
        with torch.no_grad():
            frozen_images = self.clip.image(batch.second)
        frozen_texts = self.drawn_sentences(classes, seed=batch.seed, step=batch.step)
        text, image = cosine_distance(texts, frozen_texts), cosine_distance(images, frozen_images)
        total = ce + self.config.consistency * (text + image)
        return LossTerms(total, {"ce": ce.detach(), "text": text.detach(), "image": image.detach()})

    def image_features(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.image_adapter(super().image_features(pixels))
        return features

    def text_features(self, classes: ClassSet) -> Tensor:
        features: Tensor = self.text_adapter(super().text_features(classes))
        return features

    def drawn_sentences(self, classes: ClassSet, *, seed: int, step: int) -> Tensor:
        """Frozen features of one sentence of each class, determined by seed and step. -> [C, d]"""
        features, lengths = self.cached("sentences", classes, lambda: encode_sentences(self.clip, classes))
        draw = RowNoise(seed, torch.tensor(step), torch.arange(len(lengths)), Stream.SENTENCES).uniform(1)[:, 0]
        chosen = torch.minimum((draw * lengths).long(), lengths - 1)
        first = lengths.cumsum(0) - lengths
        return features[(first + chosen).to(features.device)]


def encode_sentences(clip: ClipModel, classes: ClassSet, *, chunk: int = 256) -> tuple[Tensor, Tensor]:
    """Features of every sentence, class after class, ``chunk`` at a time; sentences per class. -> [S, d], [C]"""
    described = classes.sentences or ((),) * len(classes.names)
    lists = [sentences or (prompt,) for sentences, prompt in zip(described, classes.prompts(), strict=True)]
    flat = [sentence for sentences in lists for sentence in sentences]
    features = [clip.text(clip.tokens(flat[row : row + chunk])) for row in range(0, len(flat), chunk)]
    return torch.cat(features), torch.tensor([len(sentences) for sentences in lists])
