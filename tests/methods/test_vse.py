import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.methods import Embedding
from vacsr.methods.vse import Vse, VseConfig

from .cases import assert_same, block, pair


def reference(v: Embedding, t: Embedding, ids: list[int], *, margin: float, every: bool) -> torch.Tensor:
    """Pair by pair: all negatives, or the hardest of each row and column."""
    score = v.mean.double() @ t.mean.double().T
    total = 0.0 * score.sum()
    for i, own in enumerate(ids):
        others = [j for j, other in enumerate(ids) if other != own]
        for costs in ([margin + score[i, j] - score[i, i] for j in others],
                      [margin + score[j, i] - score[i, i] for j in others]):  # fmt: skip
            hinges = [cost.clamp_min(0.0) for cost in costs]
            total = total + (sum(hinges) if every else max(hinges, default=0.0))
    return total


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 7), st.floats(0.05, 1.5), st.booleans(), st.integers(0, 99))
def test_it_is_the_hinge_pair_by_pair(size: int, margin: float, warm: bool, seed: int) -> None:
    ids = [number % 4 for number in range(size)]
    method = Vse(VseConfig.model_validate({"margin": margin, "warmup_epochs": 3}), dim=8)
    v, t = pair(seed, size)
    terms = method.loss(v, t, block(ids, epoch=2 if warm else 3))
    expected = reference(v, t, ids, margin=margin, every=warm)
    assert_same(terms.total, expected, [v.mean, t.mean], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(terms.parts["i2t"] + terms.parts["t2i"], terms.total.detach())


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_hardest_count_outside_of_training_and_without_warm_up(warmup: int) -> None:
    (v, t), method = pair(2, 6), Vse(VseConfig(warmup_epochs=warmup), dim=8)
    expected = reference(v, t, list(range(6)), margin=0.2, every=False)
    for epoch in (None, *([0] if warmup == 0 else [])):
        torch.testing.assert_close(method.loss(v, t, block(range(6), epoch=epoch)).total.double(), expected)
