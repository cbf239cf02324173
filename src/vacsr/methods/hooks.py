"""What the training loop offers a method beyond the loss of a batch. A method asks by having the function.

A step may be replayed as a CUDA graph. What a method learns between epochs therefore lives in tensors that are changed
in place, and a loss that depends on it chooses by ``torch.where``, never by ``if``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vacsr.methods.base import Embedding


@runtime_checkable
class Studies(Protocol):
    """A method that looks at the training set once, before the first step, e.g. at the words of its captions."""

    def study(self, captions: Sequence[str] | None, caption_image: Tensor) -> None:
        """The M captions as words, where these are known, and the image row of each [M]."""


def networks_of(method: object) -> int:
    """How many networks a method asks for by its attribute ``networks``: 1, or 2 that teach each other."""
    return int(getattr(method, "networks", 1))


class SetEmbeddings(NamedTuple):
    """The whole training set in the shared space, without augmentation."""

    images: Tensor  # [N, D]
    texts: Tensor  # [M, D]


@dataclass(frozen=True)
class TrainingView:
    """What a method may look at between two epochs; the same on all ranks."""

    epoch: int  # the one that begins, from 0
    epochs: int
    seed: int
    batch_size: int
    caption_image: Tensor  # [M]
    embed: Callable[[], SetEmbeddings]
    """Computed when asked for, as it costs a pass over the training set."""

    def first_epochs(self, share: float) -> int:
        """So many epochs are this share of the run, rounded; one at least, unless the share is 0.

        A short run must not skip its warm-up: what an untrained model thinks of a pair is no evidence.
        """
        return max(round(share * self.epochs), int(share > 0))

    def groups(self) -> Tensor:
        """All captions in random groups of a batch's size, other ones each epoch. -> [G, B]

        The last group is filled up with captions of the first ones, so that every caption meets as many others.
        """
        count = len(self.caption_image)
        mixed = (self.seed * 1_000_003 + self.epoch + (1 << 62)) % 2**64  # not the order of the epoch's batches
        order = torch.randperm(count, generator=torch.Generator().manual_seed(mixed))
        size = min(self.batch_size, count)
        order = torch.cat((order, order[: -count % size]))
        return order.view(-1, size).to(self.caption_image.device)

    def by_caption(self, values: Tensor) -> Tensor:
        """What was found along :meth:`groups`, in the captions' order; what fills up the last group does not count.

        [..., G·B] -> [..., M]
        """
        rows = self.groups().flatten()[: len(self.caption_image)]
        return torch.empty_like(values[..., : len(rows)]).index_copy(-1, rows, values[..., : len(rows)])


@runtime_checkable
class BetweenEpochs(Protocol):
    """A method that takes stock of the training set before each epoch, and remembers what it found."""

    def start_epoch(self, view: TrainingView) -> None:
        """Called before an epoch's first step, and not again where a run resumes in its middle."""

    def notes(self) -> dict[str, Tensor]:
        """What it remembers, for the checkpoint; a saved model does without."""

    def take_notes(self, notes: Mapping[str, Tensor]) -> None:
        """What :meth:`notes` gave, read from a checkpoint."""


class Neighbours(NamedTuple):
    """For each caption of a batch two trusted pairs, named by their captions' rows in the training set."""

    by_image: Tensor  # [B]
    by_text: Tensor  # [B]


@runtime_checkable
class LooksAhead(Protocol):
    """A method that weighs each pair of a batch by what a trial step on the batch does to trusted pairs like it."""

    look_ahead: float
    """Length of the trial step relative to the weights'."""

    def neighbours(self, captions: Tensor) -> Neighbours:
        """Trusted pairs like these. [B] -> [B], [B]"""

    def pair_losses(self, v: Embedding, t: Embedding, relevance: Tensor) -> Tensor:
        """The loss of each aligned pair, with the others as negatives. [B, d], [B, d], [B, B] -> [B]"""

    def weigh(self, captions: Tensor, before: Neighbours, after: Neighbours) -> Tensor:
        """Take the neighbours' losses [B] before and after the trial step; returns what the loss gains, 0-d.

        ``before`` has gradient to heads and pooling, ``after`` has none.
        """


class Remembers(nn.Module):
    """Tensors that a run's checkpoint carries and a saved model does not: buffers, changed in place only."""

    def __init__(self) -> None:
        super().__init__()
        self._remembered: list[str] = []

    def remember(self, name: str, value: Tensor) -> None:
        """Start, or start anew, a tensor of this name."""
        self.register_buffer(name, value, persistent=False)
        if name not in self._remembered:
            self._remembered.append(name)

    def notes(self) -> dict[str, Tensor]:
        """All of them."""
        return {name: self.get_buffer(name) for name in self._remembered}

    @torch.no_grad()
    def take_notes(self, notes: Mapping[str, Tensor]) -> None:
        """In place: a captured graph reads where they lie."""
        for name in self._remembered:
            self.get_buffer(name).copy_(notes[name])
