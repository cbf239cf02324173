"""On a CUDA GPU: the captured step equals the eager one, and scores agree with the processor's."""

from __future__ import annotations

import pytest
import torch

from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.data import load_pairs
from vacsr.scoring import PairScorer
from vacsr.train import fit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BACKBONE = BackboneConfig(head=HeadConfig(dim=32))


def _weights(method: str, **changes: object) -> dict[str, torch.Tensor]:
    pairs = load_pairs("synthetic:images=100", split="train")
    config = TrainConfig.model_validate({"epochs": 2, "batch_size": 64, **changes})
    return fit(method, pairs, config, backbone=BACKBONE, progress=False).model.cpu().state_dict()


@pytest.mark.parametrize("method", ["vacsr", "infonce", "sigmoid"])
def test_a_captured_step_trains_like_an_eager_one(method: str) -> None:
    eager = _weights(method, device="cuda")
    captured = _weights(method, device="cuda", cuda_graph=True)
    for name, weight in eager.items():
        torch.testing.assert_close(captured[name], weight, rtol=2e-3, atol=2e-3, msg=name)


def test_a_gpu_trains_like_a_processor() -> None:
    gpu, cpu = _weights("vacsr", device="cuda"), _weights("vacsr", device="cpu")
    for name, weight in cpu.items():
        torch.testing.assert_close(gpu[name], weight, rtol=5e-3, atol=5e-3, msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_scores_agree_with_the_processor(dtype: torch.dtype, tolerance: float) -> None:
    pairs = load_pairs("synthetic:images=100", split="train")
    run = fit("vacsr", pairs, TrainConfig(epochs=1, batch_size=64, device="cpu"), backbone=BACKBONE, progress=False)
    there = PairScorer(run.model, device="cpu").score_set(pairs)
    expected, top, sigma = (
        there.score,
        there.topk(5, direction="t2i"),
        there.uncertainty(torch.arange(9), torch.arange(9)),
    )
    here = PairScorer(run.model, device="cuda", dtype=dtype).score_set(pairs)
    scale = float(expected.std())
    assert float((here.score.cpu() - expected).abs().max()) <= tolerance * scale
    assert sigma is not None
    found = here.uncertainty(torch.arange(9), torch.arange(9))
    assert found is not None
    torch.testing.assert_close(found.cpu(), sigma, rtol=1e-4, atol=1e-4)
    if dtype == torch.float32:
        torch.testing.assert_close(here.topk(5, direction="t2i").score.cpu(), top.score, rtol=1e-3, atol=1e-3)
