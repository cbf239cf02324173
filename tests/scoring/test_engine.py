from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import vacsr.scoring.cpu as cpu
from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.errors import UsageError
from vacsr.methods import build_method
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.scoring.engine import choose_scorer

CPU = torch.device("cpu")
VACSR = {"name": "vacsr"}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """What was measured and read is forgotten before and after."""
    for cached in (cpu._fastest, cpu.cpu_flags):
        cached.cache_clear()
    yield
    for cached in (cpu._fastest, cpu.cpu_flags):
        cached.cache_clear()


def seconds(monkeypatch: pytest.MonkeyPatch, **given: float) -> list[object]:
    """Pretend that each arithmetic takes so long; returns what was measured."""
    seen: list[object] = []

    def pretend(adapter: object, dim: int, generator: object) -> float:
        kind = "int8" if isinstance(adapter, cpu.Int8Adapter) else str(adapter.trunk.dtype)  # type: ignore[attr-defined]
        seen.append(kind)
        return given[kind.removeprefix("torch.")]

    monkeypatch.setattr(cpu, "_seconds", pretend)
    monkeypatch.setattr(cpu, "offered_dtypes", lambda: [torch.float32, torch.bfloat16, torch.int8])
    return seen


def auto(raw: object = VACSR) -> torch.dtype:
    return choose_scorer(build_method(method_config(raw), dim=8), device=CPU, dtype="auto").dtype


def test_the_fastest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds(monkeypatch, float32=3.0, bfloat16=2.0, int8=1.0)
    assert auto() == torch.int8


def test_a_small_gain_is_not_worth_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds(monkeypatch, float32=1.0, bfloat16=0.9, int8=5.0)
    assert auto() == torch.float32


def test_a_shape_is_measured_once_and_again_for_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seconds(monkeypatch, float32=3.0, bfloat16=1.0, int8=2.0)
    assert auto() == auto() == torch.bfloat16
    assert len(seen) == 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    auto()
    assert len(seen) == 6


@pytest.mark.parametrize("raw", [{"name": "infonce"}, {"name": "vacsr", "adapter": {"trunk_norm": True}}], ids=str)
def test_what_does_not_fold_is_not_measured(raw: object, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seconds(monkeypatch, float32=3.0, bfloat16=1.0, int8=2.0)
    assert auto(raw) == torch.float32
    assert seen == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2", [torch.float32]),
        ("avx512_vnni", [torch.float32, torch.int8]),
        ("avx512_bf16 avx512_vnni", [torch.float32, torch.bfloat16, torch.int8]),
        ("amx_bf16 amx_int8", [torch.float32, torch.bfloat16, torch.int8]),
    ],
)
def test_what_a_processor_offers(flags: str, expected: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_field", lambda *_: [flags])
    assert cpu.offered_dtypes() == expected


def test_a_real_measurement_answers_with_something_offered() -> None:
    assert auto() in cpu.offered_dtypes()


def test_a_scorer_takes_a_precision() -> None:
    model = MatchingModel.build(
        method_config(VACSR), BackboneConfig(head=HeadConfig(dim=8)), image_dim=6, text_dim=4, seed=1
    )
    images, texts = torch.randn(3, 6), torch.randn(5, 4)
    model.backbone.fit(images, texts)
    exact = PairScorer(model, device="cpu").score_all(images, texts).score
    for dtype in (torch.bfloat16, torch.int8):
        found = PairScorer(model, device="cpu", dtype=dtype).score_all(images, texts).score
        assert 0 < (found - exact).abs().max() < 0.1 * exact.std()
    assert PairScorer(model, device="cpu", dtype="auto").blocks.dtype in cpu.offered_dtypes()
    with pytest.raises(UsageError, match=r"no scoring in torch\.float16 on cpu — use 'auto' or one of torch\.float32"):
        PairScorer(model, device="cpu", dtype=torch.float16)
