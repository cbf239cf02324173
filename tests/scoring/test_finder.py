"""Top-k that the kernel finds and a finer arithmetic decides: right also where the kernel cannot tell items apart.

The kernel is interpreted as in test_kernel.py: one test runs the interpreted ones in a process of their own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import vacsr.scoring as scoring
from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.errors import UsageError
from vacsr.methods.base import Embedding
from vacsr.methods.vacsr import Vacsr
from vacsr.model import MatchingModel
from vacsr.scoring.engine import choose_scorer
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.kernel_pack import FP8
from vacsr.scoring.kernel_scorer import FinderScorer, KernelScorer, finest_half
from vacsr.scoring.topk import TopK, stable_topk

from ..interpreter import GPU, interpreted, run_interpreted
from .adapters import exact, method, units

HALF = torch.float16
WAYS = ("i2t", "t2i", "both")


def test_the_finder_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture
def _always_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few candidates to spare, and so with few items: the interpreter is slow."""
    monkeypatch.setattr("vacsr.scoring.kernel_scorer._WORTH_FINDING", 0.0)
    monkeypatch.setattr("vacsr.scoring.kernel_scorer._SPARE", 4)


def near(count: int, dim: int, *, device: str = "cpu") -> Tensor:
    """Unit vectors that differ by less than half precision can tell."""
    noise = torch.randn(count, dim, generator=torch.Generator().manual_seed(5))
    return functional.normalize(units(1, dim, seed=3) + 2e-5 * noise, dim=1).to(device)


def with_large_decoder(dim: int, *, device: str = "cpu") -> Vacsr:
    """Whose small matrix float16 does not hold."""
    made = method(dim, device=device)
    with torch.no_grad():
        made.adapter.mean_heads.weight *= 1e6
    return made


def best(scorer: BlockScorer, v: Tensor, t: Tensor, way: str, k: int = 3) -> list[TopK]:
    """Of images, of texts or of both."""
    if way == "both":
        return list(scorer.topk_both(Embedding(v), Embedding(t), k=k))
    return [scorer.topk(Embedding(v), Embedding(t), k=k, direction=way)]  # type: ignore[arg-type]


def check(found: list[TopK], scores: Tensor, way: str, *, atol: float) -> None:
    """The k highest scores of each query, and items that have them: both as in a full sort, but for rounding."""
    matrices = {"i2t": [scores], "t2i": [scores.T], "both": [scores, scores.T]}[way]
    for top, matrix in zip(found, matrices, strict=True):
        right = matrix.topk(top.index.shape[1], dim=1).values
        torch.testing.assert_close(top.score.to(right), right, atol=atol, rtol=1e-6)
        torch.testing.assert_close(matrix.gather(1, top.index), right, atol=atol, rtol=1e-6)
        assert all(len(set(row)) == len(row) for row in top.index.tolist())


@interpreted
@pytest.mark.usefixtures("_always_find")
@pytest.mark.parametrize("way", WAYS)
def test_interpreted_near_ties_are_decided_in_float32(way: str) -> None:
    """32 items that float16 cannot order: the candidates alone would be a matter of luck."""
    made, v, t = method(32), units(10, 32, seed=1), near(32, 32)
    if way == "t2i":
        v, t = t, v
    check(best(FinderScorer(made), v, t, way), exact(made.adapter, v, t), way, atol=1e-6)


@interpreted
@pytest.mark.usefixtures("_always_find")
@pytest.mark.parametrize("way", WAYS)
def test_interpreted_equal_items_go_by_index(way: str) -> None:
    made, same = method(20), units(1, 20, seed=2).expand(32, 20)
    other = units(10, 20, seed=1)
    v, t = (same, other) if way == "t2i" else (other, same)
    assert best(FinderScorer(made), v, t, way)[0].index.tolist() == [[0, 1, 2]] * 10


@interpreted
@pytest.mark.usefixtures("_always_find")
@pytest.mark.parametrize("way", WAYS)
def test_interpreted_what_is_clear_is_not_scored_twice(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items far apart: the kernel's one pass and the candidates decide, float32 never sees all pairs."""
    made, v, t = method(32), units(12, 32, seed=1), units(30, 32, seed=2)
    with torch.no_grad():  # the adapter's own part is small beside the cosine
        made.adapter.residual.copy_(torch.tensor([1000.0, 0.0]))
    scorer, reference = FinderScorer(made), exact(made.adapter, v, t)
    monkeypatch.setattr(BlockScorer, "block", lambda *_: pytest.fail("all items again"))
    check(best(scorer, v, t, way, k=2), reference, way, atol=1e-3)


@interpreted
@pytest.mark.usefixtures("_always_find")
def test_interpreted_only_the_unsure_are_scored_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two images are among texts that lie close together; for the others these are far off."""
    made = method(32)
    with torch.no_grad():
        made.adapter.residual.copy_(torch.tensor([1000.0, 0.0]))
    crowd = near(12, 32)
    v, t = torch.cat([units(9, 32, seed=1), -crowd[:1], crowd[:2]]), torch.cat([units(20, 32, seed=2), crowd])
    scorer, whole, asked = FinderScorer(made), BlockScorer.block, []
    monkeypatch.setattr(BlockScorer, "block", lambda self, v, t: asked.append(v.mean) or whole(self, v, t))
    found = best(scorer, v, t, "i2t")
    assert 2 <= sum(map(len, asked)) < 9
    for image in v[-2:]:
        assert any(torch.equal(image, one) for part in asked for one in part)
    check(found, exact(made.adapter, v, t), "i2t", atol=1e-3)


@interpreted
@pytest.mark.usefixtures("_always_find")
@pytest.mark.parametrize("way", WAYS)
def test_interpreted_a_decoder_beyond_float16(way: str) -> None:
    made, v, t = with_large_decoder(20), units(10, 20, seed=1), units(32, 20, seed=2)
    assert float(made.adapter.fold().small.abs().max()) > torch.finfo(HALF).max
    assert finest_half(made.adapter.fold()) == torch.bfloat16
    reference = exact(made.adapter, v, t)
    check(best(FinderScorer(made), v, t, way), reference, way, atol=1e-6 * float(reference.std()))


@interpreted
def test_interpreted_a_bias_beyond_float16() -> None:
    made = method(20)
    assert finest_half(made.adapter.fold()) == HALF
    with torch.no_grad():
        made.adapter.trunk.bias[3] = -2e5
    assert finest_half(made.adapter.fold()) == torch.bfloat16


@interpreted
@pytest.mark.parametrize("factor", [1e6, 1e-9])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, FP8])
def test_interpreted_decoder_units_of_any_size(dtype: torch.dtype, factor: float) -> None:
    """Scaled by a power of two, which is taken back exactly: the scores are those of the unscaled decoder."""
    plain, v, t = method(20, residual=False), Embedding(units(4, 20, seed=1)), Embedding(units(30, 20, seed=2))
    scaled, two = method(20, residual=False), 2.0 ** torch.tensor(factor).log2().round()
    with torch.no_grad():
        for part in (scaled.adapter.decoder[0].weight, scaled.adapter.decoder[0].bias):
            part[::2] *= two
        scaled.adapter.decoder[2].weight[:, ::2] /= two
    found = KernelScorer(scaled, dtype=dtype).block(v, t)
    torch.testing.assert_close(found, KernelScorer(plain, dtype=dtype).block(v, t), atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.usefixtures("_always_find")
def test_interpreted_one_struck_image_leaves_the_others() -> None:
    made, v, t = method(20), units(8, 20, seed=1), units(32, 20, seed=2)
    t[:25] = t[0]  # ties at every border
    v[3] = torch.nan
    rest = [row for row in range(8) if row != 3]
    for scorer in (FinderScorer(made), KernelScorer(made, dtype=HALF)):
        reference = scorer.block(Embedding(v), Embedding(t))
        for way in ("i2t", "both"):
            found = best(scorer, v, t, way)[0]
            assert found.index[3].tolist() == [0, 1, 2]
            assert found.score[3].isnan().all()
            torch.testing.assert_close(found.score[rest], stable_topk(reference[rest], 3).score, atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("way", WAYS)
def test_interpreted_float8_is_scored_again_in_every_way(way: str) -> None:
    """The best of 3·k by float8 in float16's order, close to float32's, which float8's own is not."""
    made, v, t = method(64), units(10, 64, seed=1), units(32, 64, seed=2)
    scorer, fine = KernelScorer(made, dtype=FP8), BlockScorer(made).block(Embedding(v), Embedding(t))
    rough = scorer.block(Embedding(v), Embedding(t))
    matrices = {"i2t": [(rough, fine)], "t2i": [(rough.T, fine.T)]}
    matrices["both"] = matrices["i2t"] + matrices["t2i"]
    for found, (own, other) in zip(best(scorer, v, t, way, k=3), matrices[way], strict=True):
        candidates = own.topk(9, dim=1).indices
        right = other.gather(1, candidates).topk(3, dim=1).values
        torch.testing.assert_close(found.score, right, atol=5e-3, rtol=0)
        torch.testing.assert_close(other.gather(1, found.index), right, atol=5e-3, rtol=0)
        assert not torch.equal(found.index, own.topk(3, dim=1).indices)


@interpreted
def test_interpreted_float8_of_nothing() -> None:
    scorer, none = KernelScorer(method(20), dtype=FP8), Embedding(torch.empty(0, 20))
    assert scorer.block(none, none).shape == (0, 0)
    assert [top.index.shape for top in scorer.topk_both(none, none, k=3)] == [(0, 0), (0, 0)]
    assert scorer.topk(none, Embedding(units(2, 20, seed=1)), k=3, direction="t2i").index.shape == (2, 0)


@interpreted
def test_interpreted_pair_scores_ask_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the documented way in: float8's top-k is scored again, whether or not the matrix is there."""
    model = MatchingModel.build(
        method_config({"name": "vacsr"}), BackboneConfig(head=HeadConfig(dim=16)), image_dim=6, text_dim=4, seed=1
    )
    x, y = (torch.randn(n, d, generator=torch.Generator().manual_seed(n)) for n, d in ((6, 6), (30, 4)))
    model.backbone.fit(x, y)
    monkeypatch.setattr(scoring, "choose_scorer", lambda made, **_: KernelScorer(made, dtype=FP8))
    scores = scoring.PairScorer(model, device="cpu").score_all(x, y)
    found = [*scores.topk_both(2), scores.topk(2), scores.topk(2, direction="t2i")]
    assert torch.equal(found[0].index, found[2].index)
    assert torch.equal(found[1].index, found[3].index)
    rough = scores.score
    for one, other in zip(found, [*scores.topk_both(2), scores.topk(2), scores.topk(2, direction="t2i")], strict=True):
        assert torch.equal(one.index, other.index)
    assert not torch.equal(found[0].score, stable_topk(rough, 2).score)
    with pytest.raises(UsageError, match=r"k is 2\.5"):
        KernelScorer(model.method, dtype=FP8).topk_both(scores.images, scores.texts, k=2.5)  # type: ignore[arg-type]


@pytest.mark.gpu
@GPU
@pytest.mark.usefixtures("_always_find")
def test_gpu_near_ties_and_large_decoders() -> None:
    """What float16 cannot order or hold; 1,000 texts of which 300 lie within its rounding, d as in test_gpu_topk."""
    for made in (method(1024, hidden=1024, width=16, device="cuda"), with_large_decoder(1024, device="cuda")):
        v = units(300, 1024, seed=1, device="cuda")
        t = torch.cat([units(700, 1024, seed=2, device="cuda"), near(300, 1024, device="cuda")])
        v[:40] = near(40, 1024, device="cuda")
        scorer, reference = choose_scorer(made, device=torch.device("cuda")), exact_in_parts(made, v, t)
        assert isinstance(scorer, FinderScorer)
        for way in WAYS:
            check(best(scorer, v, t, way), reference, way, atol=5e-6 * float(reference.abs().max()))


def exact_in_parts(made: Vacsr, v: Tensor, t: Tensor) -> Tensor:
    """`exact`, a few images at a time: it holds every hidden unit."""
    return torch.cat([exact(made.adapter, part, t) for part in v.split(8)])
