"""What a few-shot method is: a frozen CLIP, a little that learns, and logits over any list of classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.config.base import Config
from vacsr.errors import DataError
from vacsr.methods.base import ParamGroup
from vacsr.methods.fewshot.clip import ClipModel
from vacsr.methods.fewshot.kept import Kept
from vacsr.objective import LossTerms


class ClassSet(NamedTuple):
    """Classes by name, and the sentence each is told with."""

    names: tuple[str, ...]
    template: str = "a photo of a {}."
    sentences: tuple[tuple[str, ...], ...] = ()  # per class, descriptions; empty: the prompts serve
    shifted: bool = False  # photos of another domain than training's, though the names may be the same

    def prompts(self) -> list[str]:
        """One sentence per class.

        >>> ClassSet(("night_heron",), "{}, a type of bird.").prompts()
        ['night heron, a type of bird.']
        """
        return [self.template.format(name.replace("_", " ")) for name in self.names]


class ShotBatch(NamedTuple):
    """Some labelled photos of one training step."""

    pixels: Tensor  # [B, 3, S, S] normalised
    labels: Tensor  # [B] int64, into the classes of the loss
    second: Tensor | None = None  # [B, 3, S, S] another view of the same photos, for methods with ``second_view``
    seed: int = 0
    step: int = 0  # from 0; with the seed it names the step's draws
    steps: int = 1  # of the whole training


class FewshotMethod(nn.Module, ABC):
    """A frozen CLIP and what a method adds to it or wakes in it. What has a gradient is what learns and is saved."""

    second_view: bool = False
    """The loss wants another view of every photo."""
    trains: bool = True
    """There is something to learn."""

    def __init__(self, clip: ClipModel, config: Config, *, classes: ClassSet, generator: torch.Generator) -> None:
        """``classes``: those of training; fresh weights are drawn from ``generator``, a processor's."""
        super().__init__()
        clip.freeze()
        self.clip = clip
        self._ids = Kept[Tensor]()

    @abstractmethod
    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """Of one step."""

    @abstractmethod
    def prepared(self, classes: ClassSet) -> object:
        """The text side of any class list, worked out once and without gradient, for what follows."""

    @abstractmethod
    def logits(self, pixels: Tensor, prepared: Any) -> Tensor:
        """At test time; larger is likelier. [B, 3, S, S] -> [B, C]"""

    def uncertainty(self, pixels: Tensor, prepared: Any) -> Tensor | None:
        """Of every pair of photo and class; None where the method has none. [B, 3, S, S] -> [B, C]"""
        return None

    def scored(self, pixels: Tensor, prepared: Any) -> tuple[Tensor, Tensor | None]:
        """Logits and uncertainty; a method that has both may see each photo once. [B, 3, S, S] -> [B, C], [B, C]"""
        return self.logits(pixels, prepared), self.uncertainty(pixels, prepared)

    def sentence_ids(self, classes: ClassSet) -> Tensor:
        """Ids of the classes' sentences, worked out anew when names, template or device change. -> [C, L]"""
        key = classes.names, classes.template, self.clip.device
        return self._ids.of(key, lambda: self.tokenize(classes))

    def tokenize(self, classes: ClassSet) -> Tensor:
        """As the class list tells them; a method with a sentence of its own has its own way. -> [C, L]"""
        return self.clip.tokens(classes.prompts())

    def learned(self) -> dict[str, nn.Parameter]:
        """What learns, by name; the towers' woken parameters too."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def param_groups(self) -> list[ParamGroup]:
        """What learns, in one group; all of it decays, as in the public training of these methods."""
        params = list(self.learned().values())
        return [ParamGroup("learned", params)] if params else []

    def after_step(self, step: int, steps: int) -> None:
        """Called after every step of the optimiser, ``step`` from 0."""

    def finish(self) -> None:
        """Called once after training."""

    def stored(self) -> Mapping[str, Tensor]:
        """What :meth:`saved` keeps: what learns."""
        return self.learned()

    def saved(self) -> dict[str, Tensor]:
        """What was learned, by name: with the same CLIP it is the whole method."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self.stored().items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`saved` gave, into a method of the same configuration."""
        own = self.stored()
        for name in sorted(own.keys() | tensors.keys()):
            found = list(tensors[name].shape) if name in tensors else "nothing"
            wanted = list(own[name].shape) if name in own else "nothing"
            if found != wanted:
                message = f"saved few-shot weights have {found} as {name}, the method learns {wanted}"
                raise DataError(f"{message} — build it with the recipe the weights were trained with")
        for name, parameter in own.items():
            parameter.copy_(tensors[name])

    def trainable(self) -> int:
        """How many numbers learn."""
        return sum(parameter.numel() for parameter in self.learned().values())

    def train(self, mode: bool = True) -> FewshotMethod:
        """The towers stay in evaluation mode: they have no dropout to switch on."""
        super().train(mode)
        self.clip.eval()
        return self


@contextmanager
def drawn_from(generator: torch.Generator) -> Iterator[None]:
    """Inside, modules that draw their own start do so from ``generator``; torch's own stays where it was."""
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def scaled_cosines(images: Tensor, texts: Tensor, *, scale: float) -> Tensor:
    """Of unit vectors, not in half precision: a large scale would show the rounding. [B, d], [C, d] -> [B, C]"""
    with torch.autocast(images.device.type, enabled=False):
        return scale * images @ texts.T


def cross_entropy(logits: Tensor, labels: Tensor) -> LossTerms:
    """Mean over the batch, as a loss of one part. [B, C], [B]"""
    total = functional.cross_entropy(logits, labels)
    return LossTerms(total, {"ce": total.detach()})
