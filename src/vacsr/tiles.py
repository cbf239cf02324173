"""The paper's objective in tiles of the pair matrix: the same terms as :class:`VacsrObjective` has of the whole.

All of it is a sum over pairs but for the hard negatives, which take a whole row or column to find. So a tile gives the
terms of its pairs, and the values that hard negatives are chosen by; whoever walks the tiles keeps the largest, and
asks for the terms of the chosen pairs at the end. These are few, so that drawing them again costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vacsr.adapter import VariationalAdapter
from vacsr.objective import FusedDraw, LossTerms, PairDraw, VacsrObjective, mean_over_rows
from vacsr.pairwise import AlignedNoise, PairTile


@dataclass(frozen=True)
class Pick:
    """Pairs that a loss chooses: of each row, or column, those with the ``count`` largest values."""

    values: str  # which of a tile's candidates
    terms: tuple[str, ...]  # what the chosen pairs add to
    count: int
    by: Literal["rows", "columns"] = "rows"


class TileTerms(NamedTuple):
    """What a tile adds to the loss, and what may be chosen from it."""

    terms: LossTerms
    candidates: dict[str, Tensor]  # each [R, C], −inf where a pair may not be chosen


@dataclass(frozen=True)
class ChosenPairs:
    """The pairs of one pick, n of each of G rows (or columns), as a list of G·n pairs."""

    pick: Pick
    chosen: Tensor  # [G, n] bool: False fills up where there were fewer to choose from
    matches: Tensor  # [G] labelled matches in all of the row (or column)
    rows: int  # of the whole batch
    columns: int
    noise: AlignedNoise


@dataclass(frozen=True)
class TiledObjective:
    """An objective's terms of a tile, and of the pairs that were chosen among all tiles."""

    objective: VacsrObjective

    def picks(self) -> tuple[Pick, ...]:
        """Hard negatives by logit where L_N or KL wants them, by loss for ``literal_max``; of columns for ``both``."""
        c = self.objective.config
        literal, informative = c.negative_rule == "literal_max", c.kl_pairs == "informative"
        values = "loss" if literal else "logit"
        picks = [Pick(values, ("sigma_neg",) if literal or not informative else ("sigma_neg", "kl"), c.hard_negatives)]
        if literal and informative:
            picks.append(Pick("logit", ("kl",), c.hard_negatives))
        if c.negative_direction == "both":
            picks.append(Pick(values, ("sigma_neg",), c.hard_negatives, "columns"))
        return tuple(picks)

    def tile(self, adapter: VariationalAdapter, v: Tensor, t: Tensor, *, tile: PairTile) -> TileTerms:
        """All terms but those of hard negatives. [R, d], [C, d]"""
        o = self.objective
        tile = tile.diagonal() if o.config.positives == "diagonal" else tile
        draw = o.draw(adapter, v, t, block=tile)
        sigma = o.sigma_matrix(draw, 1.0)
        parts = {
            "recon": o.reconstruction(draw, tile),
            "kl": self._kl(draw, tile),
            "sigma_pos": torch.where(tile.relevance, sigma, 0.0).sum() / tile.positives,
            "sigma_neg": sigma.new_zeros(()),
        }
        parts |= o.cosine(draw, tile)
        wanted = {pick.values for pick in self.picks()}
        values = {name: self._values(name, draw, sigma) for name in sorted(wanted)}
        candidates = {name: x.detach().masked_fill(tile.relevance, -torch.inf) for name, x in values.items()}
        return TileTerms(LossTerms(o.total(parts), parts), candidates)

    def chosen(self, adapter: VariationalAdapter, v: Tensor, t: Tensor, *, pairs: ChosenPairs) -> LossTerms:
        """The terms of chosen pairs, aligned. [G·n, d], [G·n, d]"""
        o, c = self.objective, self.objective.config
        hidden = adapter.features(v, t)
        draw = o.draw_from(adapter, hidden, cosine=(v * t).sum(dim=-1), noise=pairs.noise)
        parts = {name: draw.logit.new_zeros(()) for name in ("recon", "kl", "sigma_pos", "sigma_neg")}
        if "sigma_neg" in pairs.pick.terms:
            loss = o.sigma_matrix(draw, float(c.negative_target)).view_as(pairs.chosen)
            whole = pairs.rows if pairs.pick.by == "rows" else pairs.columns
            share = 1.0 if c.negative_direction == "rows" else 0.5
            parts["sigma_neg"] = share * mean_over_rows(loss, pairs.chosen, rows=whole)
        if "kl" in pairs.pick.terms:
            kl = o.kl_bound(draw).view_as(pairs.chosen)
            own = torch.ones_like(pairs.matches) if c.positives == "diagonal" else pairs.matches
            parts["kl"] = self._informative(kl, pairs.chosen, matches=own, columns=pairs.columns) / pairs.rows
        return LossTerms(o.total(parts), parts)

    def _kl(self, draw: PairDraw | FusedDraw, tile: PairTile) -> Tensor:
        """Of all pairs; or the matches' share of each row's matches and hard negatives."""
        kl = self.objective.kl_bound(draw)
        if self.objective.config.kl_pairs == "all":
            return kl.sum() / tile.pairs
        return self._informative(kl, tile.relevance, matches=tile.matches, columns=tile.columns) / tile.batch

    def _informative(self, kl: Tensor, kept: Tensor, *, matches: Tensor, columns: int) -> Tensor:
        """What some of a row's informative pairs add to the mean over all of them, summed over rows. [R, n] -> 0-d"""
        negatives = (columns - matches).clamp_max(self.objective.config.hard_negatives)
        return (torch.where(kept, kl, 0.0).sum(dim=1) / (matches + negatives).clamp_min(1)).sum()

    def _values(self, name: str, draw: PairDraw | FusedDraw, sigma: Tensor) -> Tensor:
        """What hard negatives are chosen by. [R, C]"""
        if name == "logit":
            return draw.logit
        target = self.objective.config.negative_target
        if target == 1:
            return sigma
        with torch.no_grad():
            return self.objective.sigma_matrix(draw, float(target))
