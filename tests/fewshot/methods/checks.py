"""What several methods are asked alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vacsr.fewshot.methods import ClassSet, FewshotMethod, ShotBatch

from .plain_clip import photos


def losses_of_steps(
    method: FewshotMethod, optimiser: torch.optim.Optimizer, *, classes: ClassSet, steps: int
) -> list[float]:
    """Of every step on the same six photos of three classes; no parameter of the towers may move."""
    batch = ShotBatch(photos(6, dtype=torch.float32), torch.arange(6) % 3)
    towers = {name: parameter.clone() for name, parameter in method.clip.named_parameters()}
    losses = []
    for _ in range(steps):
        loss = method.loss(batch, classes).total
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert all(parameter.equal(towers[name]) for name, parameter in method.clip.named_parameters())
    return losses


def alike_for_all_seeds(saved: Callable[[torch.Generator], dict[str, Tensor]]) -> set[str]:
    """What of a fresh method does not depend on the generator; nothing may depend on torch's own."""
    before = torch.random.get_rng_state()
    one, same, other = (saved(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    return {name for name in one if torch.equal(one[name], other[name])}
