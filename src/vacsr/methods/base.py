"""What a method is: a loss over the pairs of a batch, a score, perhaps an uncertainty, and hooks into training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from vacsr.adapter import FoldedScore
from vacsr.config import MixConfig, Share
from vacsr.config.base import MethodConfig as MethodConfig
from vacsr.config.base import Task, method_entry
from vacsr.config.base import register as register
from vacsr.errors import UsageError
from vacsr.noise import epoch_generator
from vacsr.objective import LossTerms, PairBlock, same_image


class RetrievalConfig(MethodConfig):
    """Settings that every retrieval method has."""

    members: Annotated[int, Field(ge=1, le=64)] = 1
    """Copies of heads and method on the same backbone. Each learns by itself; scores are averaged."""
    teacher: Share = 0.0
    """How far the label of an unlabelled pair gives way to the averaged model's opinion of it; needs `train.ema`."""
    trust: Share = 0.0
    """Share of the epochs, one at least unless 0, after which each caption counts as much as the averaged model finds
    it likely to be right; needs `train.ema`. 0 trusts all captions."""


_SQUARE = 64  # pairs whose diagonal gives scores of aligned pairs
_STRIP_BYTES = 1 << 28  # pairs × width in a strip of `auto`: 65,536 pairs of two components at d = 1024 in bfloat16


class Embedding(NamedTuple):
    """A batch of items in the shared space."""

    mean: Tensor  # [N, d], L2-normalised
    log_var: Tensor | None = None  # [N, d] for methods that give each item a variance

    def map(self, function: Callable[[Tensor], Tensor]) -> Embedding:
        """The function of both tensors."""
        return Embedding(function(self.mean), None if self.log_var is None else function(self.log_var))


def take(x: Embedding, rows: slice | Tensor) -> Embedding:
    """Some rows of an embedding."""
    return x.map(lambda tensor: tensor[rows])


class Likelihood(NamedTuple):
    """How a loss makes cosines probabilities: a softmax of scale·cos over rows and columns, or σ(scale·cos + bias)."""

    kind: Literal["softmax", "logistic"]
    scale: float
    bias: float = 0.0


class ParamGroup(NamedTuple):
    """Parameters that share a learning rate."""

    name: str
    params: list[nn.Parameter]
    lr_scale: float = 1.0
    decay: bool = True


def split_by_decay(name: str, named: Iterable[tuple[str, nn.Parameter]], *, lr_scale: float = 1.0) -> list[ParamGroup]:
    """Matrices decay; biases, norms and scalars do not."""
    params = [p for _, p in named if p.requires_grad]
    groups = [
        ParamGroup(name, [p for p in params if p.ndim >= 2], lr_scale, True),
        ParamGroup(f"{name}-plain", [p for p in params if p.ndim < 2], lr_scale, False),
    ]
    return [group for group in groups if group.params]


class SetEmbeddings(NamedTuple):
    """The whole training set in the shared space, without augmentation. [N, D], [M, D]"""

    images: Tensor
    texts: Tensor


@dataclass(frozen=True)
class TrainingView:
    """What a method sees of the training set between two epochs; the same on all ranks."""

    epoch: int  # the one that starts, from 0
    epochs: int
    seed: int
    batch_size: int
    caption_image: Tensor  # [M]
    embed: Callable[[], SetEmbeddings]
    """A function, since it costs a pass over the training set."""

    def first_epochs(self, share: float) -> int:
        """The epochs in this share of the run, rounded; at least one unless 0: no short run skips its warm-up."""
        return max(round(share * self.epochs), int(share > 0))

    def groups(self) -> Tensor:
        """All captions in random groups of the batch size, the last filled up with others; new each epoch. -> [G, B]"""
        count = len(self.caption_image)
        size = min(self.batch_size, count)
        order = torch.randperm(count, generator=epoch_generator(self.seed, self.epoch, kind=1 << 62))
        return torch.cat((order, order[: -count % size])).view(-1, size).to(self.caption_image.device)

    def caption_losses(self, embedded: SetEmbeddings, method: Method, *, at_once: int = 1 << 20) -> Tensor:
        """:meth:`Method.pair_losses` of every caption in its group, about ``at_once`` pairs at a time. -> [..., M]"""
        groups, count = self.groups(), len(self.caption_image)
        losses = []
        for part in torch.split(groups, max(1, at_once // groups.shape[1] ** 2)):
            image = self.caption_image[part]
            v, t = Embedding(embedded.images[image]), Embedding(embedded.texts[part])
            losses.append(method.pair_losses(v, t, same_image(image, image)).flatten(-2))
        values = torch.cat(losses, dim=-1)[..., :count]  # without the padding of the last group
        return torch.empty_like(values).index_copy(-1, groups.flatten()[:count], values)


class Method(nn.Module, ABC):
    """A loss, a score and hooks, on embeddings only. Subclasses override what differs from a plain cosine method.

    Training may replay a step as a CUDA graph. State that changes between epochs therefore lives in tensors that are
    updated in place, and a loss that depends on it selects with ``torch.where``, never with ``if``.
    """

    task: ClassVar[Task] = "retrieval"
    members: int = 1
    """Of an ensemble: see :class:`vacsr.methods.members.Members`."""
    logit_score: bool = False
    """The score is the logit of the probability that a pair matches."""
    soft_labels: bool = False
    """The loss reads ``PairBlock.targets`` and ``PairBlock.trust``, so that a teacher may correct the labels."""
    pairwise: bool = False
    """The loss is a sum over rows of the pair matrix, so that strips and ranks may split it."""
    networks: int = 1
    """2 for methods that train two networks on each other's choices; their embeddings are then joined."""
    log_var_start: float | None = None
    """Set by methods that give each item a variance: its logarithm at the start."""
    variance_norm: float | None = None
    """The weight that a LayerNorm on logσ² starts with; None for no norm."""
    pair_width: int = 1
    """Numbers that the loss holds per pair; :meth:`strip_rows` goes by it."""
    mix: MixConfig | None = None
    """Mixup and cutmix of the batch's images, with soft labels in ``PairBlock.targets``."""
    look_ahead: float = 0.0
    """Length of a trial step relative to the heads' weights; above 0 the three look-ahead hooks are called."""

    def __init__(self, config: MethodConfig, *, dim: int) -> None:
        """``dim``: d of the shared space."""
        super().__init__()
        self.config = config
        self._training_state: list[str] = []

    @abstractmethod
    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """The block's part of the batch's loss. [R, d], [C, d]"""

    def strip_rows(self, tile: int | Literal["auto"], *, rows: int, columns: int, itemsize: int = 4) -> int:
        """Rows of a strip of a [rows, columns] pair matrix; ``rows`` means that the loss takes the matrix whole.

        What a strip costs beside its pairs is the same for a large one: weights are rounded, and gradients of weights
        and texts are added up, once per strip. ``auto`` takes strips of 256 MiB for each :attr:`pair_width` numbers of
        a pair (``itemsize``: bytes of a number in a matrix product), of which vacsr with its kernel holds five times.
        """
        if tile == 0 or not rows * columns or (tile == "auto" and not self.pairwise):
            return rows
        if not self.pairwise:
            message = f"train.tile={tile}: the loss of '{self.config.name}' compares pairs across rows"
            raise UsageError(f"{message} and cannot be split into strips — set train.tile=0 or auto")
        if tile != "auto":
            return _even(rows, tile)
        most = min(rows, max(_STRIP_BYTES // (itemsize * self.pair_width * columns), 1))
        # Strips of one shape are compiled once; where the divisors are all small, the last strip is shorter instead.
        divisor = max(n for n in range(1, most + 1) if rows % n == 0)
        return divisor if 2 * divisor >= most else _even(rows, most)

    def score(self, v: Embedding, t: Embedding) -> Tensor:
        """Score of every pair, larger is more similar. By default the cosine. [I, d], [T, d] -> [I, T]"""
        return v.mean @ t.mean.T

    def aligned_score(self, v: Embedding, t: Embedding) -> Tensor:
        """Score of the pairs (n, n), by default from the diagonals of small squares. [N, d], [N, d] -> [N]"""
        blocks = [slice(start, start + _SQUARE) for start in range(0, len(v.mean), _SQUARE)]
        parts = [self.score(take(v, rows), take(t, rows)).diagonal() for rows in blocks]
        return torch.cat(parts) if parts else v.mean.new_empty(0)

    def grade(self, score: Tensor) -> Tensor | None:
        """Scores as the probability that a pair matches, as the loss trains it, order kept. [...] -> [...]

        None, the default, for methods that only rank: their scores have no such meaning without a calibration.
        """
        return None

    def opinion(self, score: Tensor) -> Tensor:
        """What a teacher with these scores says of each pair of a batch, in [0, 1]. [B, B] -> [B, B]"""
        grade = self.grade(score)
        assert grade is not None, "a method with soft labels has grades, or its own opinion"
        return grade

    def uncertainty(self, v: Embedding, t: Embedding) -> Tensor | None:
        """Of aligned pairs; None where the method has none. [N, d], [N, d] -> [N]"""
        return None

    def param_groups(self) -> list[ParamGroup]:
        """The method's parameters with learning rates and decay; by default scalars and biases do not decay."""
        return split_by_decay("loss", self.named_parameters())

    def disagreement(self, v: Embedding, t: Embedding) -> Tensor | None:
        """Of aligned pairs: the standard deviation of the members' grades, or of their scores where they only rank.

        None without members. [N, d], [N, d] -> [N]
        """
        return None

    def fold(self) -> FoldedScore | None:
        """An exact, cheaper form of :meth:`score`, for scoring at scale; None where there is none."""
        return None

    def likelihood(self) -> Likelihood | None:
        """Of the labels given the cosines, as the loss has it; None where the loss is no likelihood of cosines."""
        return None

    def fit(self, captions: Sequence[str] | None, caption_image: Tensor) -> None:
        """Called once before training with the M captions, where they are known, and the image of each [M]."""

    def start_epoch(self, view: TrainingView) -> None:
        """Called before the first step of each epoch, and not again where a run resumes within an epoch."""

    def register_training_state(self, name: str, value: Tensor) -> None:
        """A buffer that checkpoints hold and saved models do not. Update it in place."""
        self.register_buffer(name, value, persistent=False)
        if name not in self._training_state:
            self._training_state.append(name)

    def training_state(self) -> dict[str, Tensor]:
        """What a checkpoint needs beyond parameters and buffers."""
        return {name: self.get_buffer(name) for name in self._training_state}

    @torch.no_grad()
    def load_training_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`training_state`, in place: a captured CUDA graph reads these tensors."""
        for name, value in self.training_state().items():
            value.copy_(state[name])

    def neighbours(self, captions: Tensor) -> Tensor:
        """Look-ahead: the trusted pairs with the nearest image and with the nearest text. [B] captions -> [2, B]"""
        raise NotImplementedError

    def pair_losses(self, v: Embedding, t: Embedding, relevance: Tensor) -> Tensor:
        """The loss of each aligned pair against the others. [..., B, d], [..., B, d], [..., B, B] -> [..., B]"""
        raise NotImplementedError

    def weigh(self, captions: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Look-ahead: take the neighbours' losses before and after the trial step; returns what to add to the loss.

        ``before`` has a gradient to heads and pooling, ``after`` has none. [B], [2, B], [2, B] -> 0-d
        """
        raise NotImplementedError


def _even(rows: int, most: int) -> int:
    """Rows of the fewest strips with at most ``most`` rows, all of one height but perhaps the last."""
    return -(-rows // -(-rows // most))


def build_method(config: MethodConfig, *, dim: int) -> Method:
    """The method that a config describes, for embeddings of dimension ``dim``."""
    kind: type[Method] = method_entry(config.name).method
    count = config.members if isinstance(config, RetrievalConfig) else 1
    if count == 1:
        return kind(config, dim=dim)
    from vacsr.methods.members import Members

    return Members(config, [kind(config, dim=dim) for _ in range(count)])
