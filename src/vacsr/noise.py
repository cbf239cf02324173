"""Random draws as a pure function of (seed, step, global row, global column).

A training step needs noise for every pair of the batch. Drawing it from a stateful generator would tie the numbers to
the order of evaluation; here each pair has a SplitMix64 stream keyed by its position in the batch. One process, two
ranks and a strip of rows therefore see the same draw, and resuming needs no generator state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2^64 / golden ratio
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class Stream(IntEnum):
    """All streams of draws: no two kinds of draw share bits. The numbers decide every draw of a run, so never change
    one; a new kind of draw takes a new number.

    Draws of a pair: Gumbel and normal. Uniform draws of an item: 3 to 15. The others are multiples of 16, for
    :meth:`RowNoise.other`, and are added to an item's stream.
    """

    GUMBEL = 1
    NORMAL = 2

    IMAGE = 3  # dropout of heads
    TEXT = 4
    IMAGE_SAMPLES = 5  # PCME's samples of an embedding
    TEXT_SAMPLES = 6
    SENTENCES = 10  # CoPrompt's choice among the sentences of a class

    CROP = 16
    IMAGE_TOKENS = 2 * 16  # dropped before pooling
    TEXT_TOKENS = 3 * 16  # words masked, replaced or dropped
    MIX = 4 * 16  # mixup and cutmix
    VARIANCE = 5 * 16  # dropout of variance heads
    SECOND_NETWORK = 64 * 16  # co-teaching; all of the above may be added to it
    FIRST_VIEW = 101 * 16  # few-shot photos
    SECOND_VIEW = 102 * 16


def _signed(value: int) -> int:
    """The int64 with the same bits as ``value`` modulo 2^64; torch has no unsigned arithmetic."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of the 64-bit integers in which every input bit moves every output bit."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def _stream(key: Tensor, lanes: int) -> Tensor:
    """The first ``lanes`` outputs of each key's SplitMix64 stream. [...] -> [..., lanes]"""
    return _at(key.unsqueeze(-1), torch.arange(1, lanes + 1, device=key.device))


def _at(key: Tensor, position: Tensor) -> Tensor:
    """Output number ``position`` of the SplitMix64 stream that starts at key·γ.

    (key + position)·γ, not key·γ + position·γ: a compiler must not fold position·γ into 32-bit index arithmetic.
    """
    return mix64((key + position) * _signed(_GAMMA))


def _unit(bits: Tensor) -> Tensor:
    """23 bits to a float32 strictly inside (0, 1): both ends stay finite under log."""
    return (bits.to(torch.float32) + 0.5) * (1.0 / (1 << 23))


@dataclass(frozen=True)
class PairNoise:
    """The draws of a block of pairs.

    ``seed`` and ``step`` may be 0-d int64 tensors, so that a compiled step serves every seed and a captured CUDA graph
    can be replayed with the next step's noise; ``rows`` and ``cols`` are the pairs' positions in the global batch.

    >>> noise = PairNoise.create(seed=0, step=3, rows=4, cols=5)
    >>> below = replace(noise, rows=noise.rows[2:])
    >>> bool((noise.normal(6)[2:] == below.normal(6)).all())
    True
    """

    seed: int | Tensor
    step: Tensor
    rows: Tensor
    cols: Tensor

    @classmethod
    def create(
        cls, *, seed: int | Tensor, step: int | Tensor, rows: int, cols: int, device: torch.device | None = None
    ) -> PairNoise:
        """Of the first so many rows and columns."""
        step = torch.as_tensor(step, dtype=torch.int64, device=device)
        return cls(seed, step, torch.arange(rows, device=device), torch.arange(cols, device=device))

    def _keys(self, stream: int) -> Tensor:
        """One key per pair. [R, C]"""
        key = _at(_start(self.seed, stream), self.step)
        return _at(_at(key, self.rows.unsqueeze(1)), self.cols.unsqueeze(0))

    def normal_keys(self) -> Tensor:
        """Where each pair's stream of :meth:`normal` begins, for a kernel that draws it itself. [R, C] int64"""
        return self._keys(Stream.NORMAL)

    def gumbel(self, lanes: int) -> Tensor:
        """Standard Gumbel draws. [R, C, lanes]"""
        u = _unit(_shift_right(_stream(self._keys(Stream.GUMBEL), lanes), 41))
        return -torch.log(-torch.log(u))

    def normal(self, lanes: int) -> Tensor:
        """Standard normal draws by Box–Muller, two from each 64-bit word. [R, C, lanes]"""
        bits = _stream(self.normal_keys(), (lanes + 1) // 2)
        return _box_muller(_unit(_shift_right(bits, 41)), _unit(bits & ((1 << 23) - 1)))[..., :lanes]


@dataclass(frozen=True)
class RowNoise:
    """The draws of single items, for dropout or augmentation, by their position in the global batch."""

    seed: int | Tensor
    step: Tensor
    rows: Tensor
    stream: int  # a Stream, or the sum of several

    def other(self, stream: Stream) -> RowNoise:
        """The same items' draws of another kind: they share no bits with these."""
        return replace(self, stream=int(self.stream) + int(stream))

    def uniform(self, lanes: int) -> Tensor:
        """Uniform draws in (0, 1). [R, lanes]"""
        key = _at(_start(self.seed, self.stream), self.step)
        return _unit(_shift_right(_stream(_at(key, self.rows), lanes), 41))

    def normal(self, lanes: int) -> Tensor:
        """Standard normal draws. [R, lanes]"""
        return _box_muller(*self.uniform(lanes + lanes % 2).chunk(2, dim=-1))[..., :lanes]


N = TypeVar("N", PairNoise, RowNoise | None)


def of_member(noise: N, number: int) -> N:
    """The draws of one member of an ensemble; those of number 0 are the draws themselves."""
    return replace(noise, seed=noise.seed + (number << 40)) if noise is not None and number else noise


def _box_muller(first: Tensor, second: Tensor) -> Tensor:
    """Two uniform draws to two standard normal ones. [..., n], [..., n] -> [..., 2n]"""
    radius, angle = torch.sqrt(-2.0 * torch.log(first)), (2.0 * math.pi) * second
    return torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)


def _start(seed: int | Tensor, stream: int) -> Tensor:
    """Where a (seed, stream) begins, mixed so that near seeds are far apart. -> 0-d"""
    number = int(stream)  # a plain integer for torch.compile, whose tracing of enumerations differs between versions
    return mix64(torch.as_tensor(seed) * _signed(_GAMMA) + _signed(number * _MIX_2))


def epoch_generator(seed: int, epoch: int, *, kind: int = 0) -> torch.Generator:
    """For draws over a whole training set: a function of seed and epoch. ``kind`` sets apart the draws of one epoch."""
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch + kind) % 2**64)  # it takes no more bits


@contextmanager
def seeded(seed: int, part: str = "") -> Iterator[None]:
    """Inside, torch's own generator draws fresh weights from this seed; afterwards it is where it was.

    A named ``part`` has a stream that no seed's main draws have: seed + 1 would make neighbouring runs share weights.
    """
    if part:
        seed = int.from_bytes(hashlib.sha256(f"{part} {seed}".encode()).digest()[:8]) >> 1
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
        yield
