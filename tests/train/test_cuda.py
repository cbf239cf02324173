"""On a CUDA GPU: the captured step equals the eager one, and scores agree with the processor's."""

from pathlib import Path

import pytest
import torch

from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.data import load_pairs
from vacsr.data.noise import apply_noise, make_noise
from vacsr.scoring import PairScorer
from vacsr.train import fit
from vacsr.train.data import Batch
from vacsr.train.step import GraphedStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BACKBONE = BackboneConfig(head=HeadConfig(dim=32))


def assert_close(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, within: float) -> None:
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=within, atol=within, msg=name)


def _weights(method: str, *, noise: float = 0.0, **changes: object) -> dict[str, torch.Tensor]:
    pairs = load_pairs("synthetic:images=100", split="train")
    pairs = apply_noise(pairs, make_noise("permute-captions", pairs.caption_image, ratio=noise, seed=0))
    config = TrainConfig.model_validate({"epochs": 2, "batch_size": 64, **changes})
    settings = {"name": method, "warmup": 0.25} if noise else method
    return fit(settings, pairs, config, backbone=BACKBONE, progress=False).model.cpu().state_dict()


@pytest.mark.parametrize("method", ["vacsr", "infonce", "sigmoid"])
def test_a_captured_step_trains_like_an_eager_one(method: str) -> None:
    assert_close(_weights(method, device="cuda", cuda_graph=True), _weights(method, device="cuda"), within=2e-3)


@pytest.mark.parametrize(("tile", "compiled"), [(24, False), (32, True)])
def test_a_captured_step_in_strips_trains_like_an_eager_dense_one(tile: int, compiled: bool) -> None:
    """Ragged strips as they are; equal ones compiled, as each shape is a compilation."""
    strips = _weights("vacsr", device="cuda", tile=tile, cuda_graph=True, compile=compiled)
    assert_close(strips, _weights("vacsr", device="cuda"), within=2e-3)


@pytest.mark.parametrize("compiled", [False, "auto"])
@pytest.mark.parametrize("method", ["ncr", "bicro", "npc"])
def test_a_captured_step_passes_through_all_stages_of_a_method(method: str, compiled: bool | str) -> None:
    eager = _weights(method, noise=0.5, epochs=4, device="cuda", compile=False)
    captured = _weights(method, noise=0.5, epochs=4, device="cuda", cuda_graph=True, compile=compiled)
    assert_close(captured, eager, within=5e-3)


def test_a_gpu_trains_like_a_processor() -> None:
    assert_close(_weights("vacsr", device="cuda"), _weights("vacsr", device="cpu"), within=5e-3)


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
    ours = here.uncertainty(torch.arange(9), torch.arange(9))
    torch.testing.assert_close(ours.cpu(), sigma, rtol=1e-4, atol=1e-4)
    if dtype == torch.float32:
        torch.testing.assert_close(here.topk(5, direction="t2i").score.cpu(), top.score, rtol=1e-3, atol=1e-3)


TINY = BackboneConfig(spec="tiny:width=16,depth=2,text_depth=1,heads=2,size=32", head=HeadConfig(kind="linear", dim=16))


def _towers(
    out: Path | None = None, *, resume: bool = False, epochs: int = 3, **changes: object
) -> dict[str, torch.Tensor]:
    """Small towers of which one is unfrozen in the second epoch, evaluated on dev after each."""
    world = "scenes:images=40,held_out=12,size=32"
    config = TrainConfig.model_validate(
        {"epochs": epochs, "batch_size": 40, "device": "cuda", "optimizer": "adamp", "schedule": "constant",
         "towers": {"image_lr": 1.0, "text_lr": 1.0, "layer_decay": 1.0, "freeze_image": 1}, **changes}
    )  # fmt: skip
    run = fit(
        "vacsr", load_pairs(world, split="train"), config,
        dev=load_pairs(world, split="dev"), backbone=TINY, out=out, resume=resume, progress=False,
    )  # fmt: skip
    return run.model.cpu().state_dict()


def test_a_graph_with_towers_that_unfreeze_trains_like_eager_steps() -> None:
    """Captured twice, with an evaluation between replays: no weight may move in memory."""
    assert_close(_towers(cuda_graph=True, select="last"), _towers(select="last"), within=2e-4)


def test_one_captured_step_moves_weights_as_far_as_an_eager_one() -> None:
    """Four steps: three that warm up, one that is replayed."""
    changes = {"epochs": 1, "batch_size": 50, "select": "last"}
    assert_close(_towers(cuda_graph=True, **changes), _towers(**changes), within=2e-5)


def test_a_graph_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _towers(cuda_graph=True, select="last")
    original = GraphedStep.__call__

    def killed(self: GraphedStep, batch: Batch, step: int) -> torch.Tensor:
        if step == 7:
            raise RuntimeError("killed")
        return original(self, batch, step)

    monkeypatch.setattr(GraphedStep, "__call__", killed)
    with pytest.raises(RuntimeError, match="killed"):
        _towers(tmp_path / "run", cuda_graph=True, select="last")
    monkeypatch.setattr(GraphedStep, "__call__", original)
    again = _towers(tmp_path / "run", resume=True, cuda_graph=True, select="last")
    assert_close(again, whole, within=2e-4)
