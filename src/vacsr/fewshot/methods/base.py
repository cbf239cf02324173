"""A few-shot method: a frozen CLIP, a few parameters that learn, and logits over any list of classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vacsr.backbones.edits import TowerEdits
from vacsr.config.base import MethodConfig, Task, register
from vacsr.errors import DataError
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.methods.base import ParamGroup
from vacsr.noise import seeded
from vacsr.objective import LossTerms

T = TypeVar("T")
Fields = dict[str, Any]


@dataclass(frozen=True)
class PublishedPlan:
    """The recipe fields that a method's paper and public configuration set; what `preset: paper` starts from."""

    train: Fields = field(default_factory=dict)  # training fields for any data set, base-to-novel
    train_on: dict[str, Fields] = field(default_factory=dict)  # training fields by data set, on top of these
    method_on: dict[str, Fields] = field(default_factory=dict)  # method fields by data set, on top of the defaults
    domain_method: Fields = field(default_factory=dict)  # method fields for domain shift, on top of these
    domain_train: Fields = field(default_factory=dict)  # training fields for domain shift, on ImageNet only

    def fields(self, dataset: str = "", protocol: str = "base-to-novel") -> dict[str, Fields]:
        """Method and training fields; a data set that the paper does not name gets those of most.

        >>> plan = PublishedPlan({"lr": 0.1}, train_on={"dtd": {"epochs": 2}}, domain_method={"depth": 3})
        >>> plan.fields("dtd", "domain")
        {'method': {'depth': 3}, 'train': {'lr': 0.1, 'epochs': 2}}
        """
        method = dict(self.method_on.get(dataset, {}))
        train = {**self.train, **self.train_on.get(dataset, {})}
        if protocol == "domain":
            method |= self.domain_method
            train |= self.domain_train if dataset == "imagenet" else {}
        return deepcopy({"method": method, "train": train})


class ClassSet(NamedTuple):
    """Classes by name, and the sentence that describes each."""

    names: tuple[str, ...]
    template: str = "a photo of a {}."
    sentences: tuple[tuple[str, ...], ...] = ()  # per class, descriptions; empty: the prompts serve
    shifted: bool = False  # photos of another domain than in training, though the names may be the same

    def prompts(self) -> list[str]:
        """One sentence per class.

        >>> ClassSet(("night_heron",), "{}, a type of bird.").prompts()
        ['night heron, a type of bird.']
        """
        return [self.template.replace("{}", name.replace("_", " ")) for name in self.names]


class ShotBatch(NamedTuple):
    """The labelled photos of one training step. A loader gives pixels as bytes, a method gets them normalised."""

    pixels: Tensor  # [B, 3, S, S]
    labels: Tensor  # [B] int64, into the classes of the loss
    second: Tensor | None = None  # [B, 3, S, S] another view of the same photos, for methods with ``second_view``
    seed: int = 0
    step: int = 0  # from 0; seed and step determine the step's random draws


class FewshotMethod(nn.Module):
    """A frozen CLIP and what a method adds to it or unfreezes in it. Parameters with a gradient learn and are saved.

    By default the loss is the cross-entropy of scaled cosines, so most methods only override :meth:`image_edits` and
    :meth:`text_edits`.
    """

    task: ClassVar[Task] = "fewshot"
    second_view: ClassVar[bool] = False  # the loss takes another view of every photo
    trains: ClassVar[bool] = True
    plan: ClassVar[PublishedPlan] = PublishedPlan()
    config: MethodConfig

    def __init__(self, clip: ClipModel, config: Any, *, classes: ClassSet, generator: torch.Generator) -> None:
        super().__init__()
        self.clip, self.config = clip.requires_grad_(False).eval(), config
        self._cache: dict[str, tuple[object, Any]] = {}
        self.add_weights(classes, generator)

    def add_weights(self, classes: ClassSet, generator: torch.Generator) -> None:
        """Make what learns, for these ``classes``; new weights are drawn from ``generator``, which is on the CPU."""

    def image_edits(self) -> TowerEdits | None:
        """What the method changes in the image tower, with the present weights."""
        return None

    def text_edits(self) -> TowerEdits | None:
        """What the method changes in the text tower, with the present weights."""
        return None

    def template(self, classes: ClassSet) -> str:
        """Of the sentence for each class, with {} for its name: the data set's own by default."""
        return classes.template

    def image_features(self, pixels: Tensor) -> Tensor:
        """Unit vectors. [B, 3, S, S] -> [B, d]"""
        return self.clip.image(pixels, edits=self.image_edits())

    def text_features(self, classes: ClassSet) -> Tensor:
        """Unit vectors. -> [C, d]"""
        return self.clip.text(self.sentence_ids(classes), edits=self.text_edits())

    def frozen_texts(self, classes: ClassSet) -> Tensor:
        """Unit vectors of the same sentences from the frozen text tower, cached. -> [C, d]"""
        return self.cached("texts", classes, lambda: self.clip.text(self.sentence_ids(classes)))

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """Of one step."""
        logits = self.scaled_cosines(self.image_features(batch.pixels), self.text_features(classes))
        return cross_entropy(logits, batch.labels)

    @torch.no_grad()
    def prepare(self, classes: ClassSet) -> Any:
        """The text side of a class list, computed once for all the photos to classify."""
        return self.text_features(classes)

    @torch.no_grad()
    def predict(self, pixels: Tensor, prepared: Any) -> tuple[Tensor, Tensor | None]:
        """Logits at test time, and the uncertainty of every pair of photo and class where the method has one.

        [B, 3, S, S] -> [B, C], [B, C]
        """
        return self.scaled_cosines(self.image_features(pixels), prepared), None

    def scaled_cosines(self, images: Tensor, texts: Tensor) -> Tensor:
        """Of unit vectors, never in half precision: the scale would amplify the rounding. [B, d], [C, d] -> [B, C]"""
        with torch.autocast(images.device.type, enabled=False):
            return self.clip.scale * images @ texts.T

    def sentence_ids(self, classes: ClassSet) -> Tensor:
        """Token ids of the classes' sentences, cached. -> [C, L]"""
        described = classes._replace(template=self.template(classes))
        return self.cached("ids", classes, lambda: self.tokenize(described.prompts()))

    def tokenize(self, sentences: Sequence[str]) -> Tensor:
        """-> [C, L]"""
        return self.clip.tokens(sentences)

    def cached(self, name: str, classes: ClassSet, compute: Callable[[], T]) -> T:
        """The last value under ``name``, computed again where classes or device change.

        Training asks for it in every step. It has no gradient, but is never an inference tensor: a step may use it.
        """
        key, last = (classes, self.clip.device), self._cache.get(name)
        if last is None or last[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                last = self._cache[name] = key, compute()
        value: T = last[1]
        return value

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that learn, by name; unfrozen parameters of the towers are among them."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def trainable_count(self) -> int:
        """How many numbers learn."""
        return sum(parameter.numel() for parameter in self.trainable().values())

    def param_groups(self) -> list[ParamGroup]:
        """All that learns in one group; all of it decays, as in the public code of most methods."""
        params = list(self.trainable().values())
        return [ParamGroup("learned", params)] if params else []

    def after_step(self, step: int, steps: int) -> None:
        """Called after every optimiser step, ``step`` from 0."""

    def finish(self) -> None:
        """Called once after training."""

    def weights(self) -> Mapping[str, Tensor]:
        """The tensors of a model file, by name: with the same CLIP they are the whole method."""
        return self.trainable()

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy :meth:`weights` of a method with the same configuration into this one."""
        weights = self.weights()
        saved, expected = ({(name, tensor.shape) for name, tensor in each.items()} for each in (tensors, weights))
        if saved != expected:
            name = min(saved ^ expected)[0]
            raise DataError(f"the saved weight '{name}' does not fit — build it with the recipe of its training")
        for name, tensor in weights.items():
            tensor.copy_(tensors[name])

    def train(self, mode: bool = True) -> FewshotMethod:
        """The towers stay in evaluation mode."""
        super().train(mode)
        self.clip.eval()
        return self


class ZeroshotConfig(MethodConfig):
    """Scaled cosines with the data set's own sentences; nothing learns."""

    name: Literal["zeroshot"] = "zeroshot"


@register("zeroshot", ZeroshotConfig, presets={"paper": {}})
class Zeroshot(FewshotMethod):
    """Zero-shot CLIP: the class whose sentence is nearest to the photo. The baseline of every other method."""

    trains = False


def drawn_from(generator: torch.Generator) -> AbstractContextManager[None]:
    """Inside, modules initialise themselves from ``generator``; torch's global generator is left as it was."""
    return seeded(int(torch.randint(2**62, (), generator=generator)))


def encode_chunks(encode: Callable[[Tensor], Tensor], inputs: Tensor, *, size: int) -> Tensor:
    """Encode ``size`` rows at a time; with gradients, the backward pass computes each chunk again: less memory."""
    chunks = torch.split(inputs, size)
    if torch.is_grad_enabled() and len(chunks) > 1:
        return torch.cat([checkpoint(encode, chunk, use_reentrant=False) for chunk in chunks])
    return torch.cat([encode(chunk) for chunk in chunks])


def cross_entropy(logits: Tensor, labels: Tensor) -> LossTerms:
    """Mean over the batch, as a loss of one part. [B, C], [B]"""
    total = functional.cross_entropy(logits, labels)
    return LossTerms(total, {"ce": total.detach()})


def cosine_distance(features: Tensor, frozen: Tensor) -> Tensor:
    """1 − the mean cosine of unit rows. [N, d], [N, d] -> 0-d"""
    return 1.0 - (features * frozen).sum(dim=-1).mean()
