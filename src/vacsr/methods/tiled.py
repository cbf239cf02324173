"""A method's loss walked in tiles of the pair matrix: the same figures and gradients, and the memory of one tile.

Each tile's gradient is taken as soon as its share of the loss is known, and added to one gradient of the embeddings and
of the method's parameters; then the tile is forgotten. The caller's ``backward`` scales these and passes them on.
Draws are a pure function of a pair's place, so that pairs which a loss chooses among all tiles can be drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vacsr.methods.base import Embedding, Method
from vacsr.methods.compiled import compile_pairs
from vacsr.methods.running import RunningTop, SideGradient
from vacsr.methods.tile_shape import Tileable, TileShape
from vacsr.objective import LossTerms
from vacsr.pairwise import AlignedNoise, PairBlock, PairTile
from vacsr.tiles import ChosenPairs, Pick, TileTerms

PairLoss = Callable[[Embedding, Embedding, PairBlock], LossTerms]


class TiledLoss:
    """The loss of a method in tiles; a drop-in for ``method.loss``. Its parts carry no gradient, its total does."""

    def __init__(self, method: Method, shape: TileShape, *, compiled: bool = False) -> None:
        assert isinstance(method, nn.Module), "a method is a module"
        self.method, self.shape = method, shape
        self.picks = method.picks() if isinstance(method, Tileable) else ()
        self.share: Callable[[Embedding, Embedding, Any], TileTerms] = self._share
        self.chosen: Callable[..., LossTerms] = self._chosen
        if compiled:  # equal tiles share one compilation; ragged edges have their own
            self.share, self.chosen = compile_pairs(self._share), compile_pairs(self._chosen)

    def compiled(self) -> TiledLoss:
        """The same with its tile compiled."""
        return TiledLoss(self.method, self.shape, compiled=True)

    def _share(self, v: Embedding, t: Embedding, block: PairBlock) -> TileTerms:
        """A tile's, or a strip's."""
        if isinstance(block, PairTile):
            assert isinstance(self.method, Tileable), "others get strips"
            return self.method.tile_terms(v, t, block)
        return TileTerms(self.method.loss(v, t, block), {})

    def _chosen(self, v: Embedding, t: Embedding, pairs: ChosenPairs) -> LossTerms:
        assert isinstance(self.method, Tileable), "others choose nothing"
        return self.method.chosen_terms(v, t, pairs)

    def __call__(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """[R, d], [C, d] -> the block's share of the batch's loss."""
        params = [p for p in self.method.parameters() if p.requires_grad]
        walk = _Walk(self, v, t, pairs=pairs, params=params)
        total, *parts = _GradientsInForward.apply(walk, *walk.inputs)  # type: ignore[no-untyped-call]
        return LossTerms(total, dict(zip(walk.sums, parts, strict=True)))


class _GradientsInForward(torch.autograd.Function):
    """Computes a loss together with its gradients, which backward only scales."""

    @staticmethod
    def forward(ctx: Any, walk: _Walk, *inputs: Tensor) -> tuple[Tensor, ...]:
        walk.run(ctx.needs_input_grad[1:])
        parts = tuple(walk.sums.values())
        ctx.save_for_backward(*walk.gradients())
        ctx.mark_non_differentiable(*parts)
        return (walk.total, *parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(None if g is None else g * grads[0] for g in ctx.saved_tensors))


class _Walk:
    """One walk over all tiles, and what has been added up on the way."""

    def __init__(
        self, loss: TiledLoss, v: Embedding, t: Embedding, *, pairs: PairBlock, params: list[nn.Parameter]
    ) -> None:
        self.loss, self.pairs, self.params = loss, pairs, params
        self.sides, self.learns = (v, t), torch.is_grad_enabled()
        self.inputs: list[Tensor] = [*(x for x in (*v, *t) if x is not None), *params]
        self.total = v.mean.new_zeros((), dtype=torch.promote_types(v.mean.dtype, torch.float32))
        self.sums: dict[str, Tensor] = {}

    def run(self, wanted: tuple[bool, ...]) -> None:
        """Walk. ``wanted``: which of the inputs need a gradient, if anything learns here."""
        flags = iter(self.learns and need for need in wanted)
        self.rows, self.cols = (SideGradient(x, [next(flags) for y in x if y is not None]) for x in self.sides)
        self.params = [p for p, need in zip(self.params, flags, strict=True) if need]
        self.param_grads: list[Tensor | None] = [None] * len(self.params)
        height, width = self.pairs.relevance.shape
        tops = [
            RunningTop(height if pick.by == "rows" else width, pick.count, like=self.total) for pick in self.loss.picks
        ]
        matches = self.pairs.relevance.sum(dim=1)
        for rows in _parts(height, self.loss.shape.rows):
            for cols in _parts(width, self.loss.shape.cols):
                self._tile(rows, cols, matches, tops)
        for pick, top in zip(self.loss.picks, tops, strict=True):
            counts = matches if pick.by == "rows" else self.pairs.relevance.sum(dim=0)
            self._picked(pick, top, counts)

    def _tile(self, rows: slice, cols: slice, matches: Tensor, tops: list[RunningTop]) -> None:
        tileable = isinstance(self.loss.method, Tileable)
        block = self.pairs.tile(rows, cols, matches=matches) if tileable else self.pairs.rows(rows)
        found: dict[str, Tensor] = {}

        def share(v: Embedding, t: Embedding) -> LossTerms:
            terms, candidates = self.loss.share(v, t, block)
            found.update(candidates)
            return terms

        self._add(share, rows, cols)
        for pick, top in zip(self.loss.picks, tops, strict=True):
            if pick.by == "rows":
                top.add(rows, found[pick.values], first=cols.start)
            else:
                top.add(cols, found[pick.values].T, first=rows.start)

    def _picked(self, pick: Pick, top: RunningTop, matches: Tensor) -> None:
        """The terms of a pick's pairs, no more at a time than a tile has."""
        height, width = self.loss.shape
        for group in _parts(len(top.values), max(1, height * width // pick.count)):
            members = top.places[group].flatten()
            owners = torch.arange(group.start, group.stop, device=members.device)
            owners = owners.unsqueeze(1).expand(-1, pick.count).flatten()
            rows, cols = (owners, members) if pick.by == "rows" else (members, owners)
            pairs = ChosenPairs(
                pick, top.filled[group], matches[group],
                rows=self.pairs.batch, columns=self.pairs.relevance.shape[1],
                noise=AlignedNoise.of(self.pairs.noise, rows, cols),
            )  # fmt: skip
            self._add(partial(self.loss.chosen, pairs=pairs), rows, cols)

    def _add(
        self, share: Callable[[Embedding, Embedding], LossTerms], rows: slice | Tensor, cols: slice | Tensor
    ) -> None:
        """Add a share of the loss and its gradient."""
        v, t = self.rows.leaf(rows), self.cols.leaf(cols)
        own, other = self.rows.wanted(v), self.cols.wanted(t)
        inputs = [*own, *other, *self.params]
        with torch.set_grad_enabled(bool(inputs)):
            terms = share(v, t)
            grads = iter(torch.autograd.grad(terms.total, inputs, allow_unused=True) if inputs else ())
        self.total = self.total + terms.total.detach()
        for name, part in terms.parts.items():
            self.sums[name] = self.sums[name] + part.detach() if name in self.sums else part.detach().clone()
        self.rows.add(rows, list(islice(grads, len(own))))
        self.cols.add(cols, list(islice(grads, len(other))))
        self._add_to_parameters(list(grads))

    def _add_to_parameters(self, grads: list[Tensor | None]) -> None:
        """In one launch for all that have a gradient already; the first is copied, as two may share memory."""
        pairs = zip(self.param_grads, grads, strict=True)
        known = [(old, new) for old, new in pairs if old is not None and new is not None]
        for number, new in enumerate(grads):
            if new is not None and self.param_grads[number] is None:
                self.param_grads[number] = new.clone()
        if known:
            torch._foreach_add_([old for old, _ in known], [new for _, new in known])

    def gradients(self) -> Iterator[Tensor | None]:
        """Of every input, in order."""
        yield from self.rows.grads
        yield from self.cols.grads
        yield from self.param_grads


def _parts(length: int, edge: int) -> list[slice]:
    return [slice(start, min(start + edge, length)) for start in range(0, length, edge)]
