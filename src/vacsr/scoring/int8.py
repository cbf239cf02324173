"""A folded adapter in int8, for processors with instructions for it: its product takes half of bfloat16's time.

Each row of both factors has a step of its own, its largest entry over 127. Sums are exact in int32; bias, ReLU and all
after them are float32. On random unit vectors at d = 512 the scores err by 2% of their spread, in bfloat16 by 0.6%.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.adapter import FoldedAdapter

_TEXTS = 256  # rows at a time: their sums then stay in a core's own cache
_LARGEST = 127


class Quantised(NamedTuple):
    """x ≈ values · step."""

    values: Tensor  # [N, d] int8
    step: Tensor  # [N, 1] float32


def quantised(x: Tensor) -> Quantised:
    """Rows rounded to 255 levels each; a row of zeros stays one. [N, d]

    >>> quantised(torch.tensor([[127.0, -63.4], [0.0, 0.0]])).values.tolist()
    [[127, -63], [0, 0]]
    """
    step = x.abs().amax(dim=1, keepdim=True).div_(_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return Quantised((x / step).round_().to(torch.int8), step)


class Int8Adapter:
    """Scores with the trunk's product in int8; the same calls as the :class:`FoldedAdapter` that it is made from."""

    def __init__(self, folded: FoldedAdapter) -> None:
        self.exact = folded
        self.trunk = quantised(folded.trunk)

    def logits(self, v: Tensor, t: Tensor) -> Tensor:
        """Every pair's logit, one product an item of the shorter side. [I, d], [T, d] -> [I, T] float32"""
        if len(t) < len(v):
            return self.logits(t, v).T
        out = torch.empty(len(v), len(t))
        rows = quantised(t)
        for image, place in zip(v, out, strict=True):
            self._scores(rows, quantised(self.exact.trunk * image), torch.mv(t, image), out=place)
        return out

    def aligned_logits(self, v: Tensor, t: Tensor) -> Tensor:
        """Logits of pairs (n, n). [N, d], [N, d] -> [N] float32"""
        pairs = v * t
        return self._scores(quantised(pairs), self.trunk, pairs.sum(dim=1), out=torch.empty(len(pairs)))

    def _scores(self, rows: Quantised, trunk: Quantised, cosine: Tensor, *, out: Tensor) -> Tensor:
        """[N, d], [H, d], [N] -> [N]"""
        weight, step = trunk.values.T, trunk.step.T
        room = min(_TEXTS, max(1, len(out)))
        sums, hidden = torch.empty(room, len(trunk.step), dtype=torch.int32), torch.empty(room, len(trunk.step))
        for start in range(0, len(out), room):
            here = slice(start, min(start + room, len(out)))
            count = here.stop - here.start
            torch._int_mm(rows.values[here], weight, out=sums[:count])
            part = hidden[:count].copy_(sums[:count]).mul_(rows.step[here]).mul_(step)
            out[here] = self._decode(part.add_(self.exact.trunk_bias).relu_(), cosine[here])
        return out

    def _decode(self, hidden: Tensor, cosine: Tensor) -> Tensor:
        """What follows the trunk. [N, H], [N] -> [N]"""
        own = self.exact
        small = functional.linear(hidden, own.small, own.small_bias)
        logit = small.squeeze(-1) if own.last is None else torch.mv(small.relu_(), own.last).add_(own.last_bias)
        return logit if own.residual is None else logit + own.residual[0] * cosine + own.residual[1]
