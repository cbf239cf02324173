from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vacsr.backbones import Tokens, TowerBackbone, build_pooling, load_backbone
from vacsr.config import BackboneConfig
from vacsr.noise import RowNoise, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CAPTIONS = ["a red dog", "two dogs on the grass", "grass", "a cat sleeps on a red mat"]


@pytest.fixture(params=["tiny", "clip"])
def backbone(request: pytest.FixtureRequest, clip_checkpoint: Path) -> TowerBackbone:
    spec = "tiny:width=32,size=32" if request.param == "tiny" else f"clip:{clip_checkpoint}"
    made = load_backbone(BackboneConfig(spec=spec))
    assert isinstance(made, TowerBackbone)
    made.fit_words(CAPTIONS)
    return made


def noise(stream: int, step: torch.Tensor) -> RowNoise:
    return RowNoise(0, step, torch.arange(4, device=step.device), stream)


def test_cuda_equals_the_cpu(backbone: TowerBackbone, photos: torch.Tensor) -> None:
    texts, step = backbone.tokenize(CAPTIONS), torch.tensor(3)
    here = [
        backbone.encode_images(photos, noise(Stream.IMAGE, step)),
        backbone.encode_texts(texts, noise(Stream.TEXT, step)),
    ]
    pool = build_pooling("gpo")
    pooled = [pool(tokens) for tokens in here]
    backbone.cuda()
    there = [
        backbone.encode_images(photos.cuda(), noise(Stream.IMAGE, step.cuda())),
        backbone.encode_texts(texts.cuda(), noise(Stream.TEXT, step.cuda())),
    ]
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.mask, other.mask.cpu())
        torch.testing.assert_close(other.values.cpu()[one.mask], one.values[one.mask], atol=2e-3, rtol=2e-3)
    for one, tokens in zip(pooled, there, strict=True):
        torch.testing.assert_close(pool.cuda()(tokens).cpu(), one, atol=2e-3, rtol=2e-3)


def test_nothing_waits_for_the_device_and_a_graph_can_hold_it(backbone: TowerBackbone, photos: torch.Tensor) -> None:
    backbone, pools = backbone.cuda().train(), [build_pooling("gpo").cuda() for _ in range(2)]
    texts, images, step = backbone.tokenize(CAPTIONS).cuda(), photos.cuda(), torch.zeros((), dtype=torch.int64).cuda()
    learned = [p for p in backbone.parameters() if p.requires_grad]
    parameters = [*learned, *(p for pool in pools for p in pool.parameters())]

    def run() -> tuple[torch.Tensor, ...]:
        sides = (
            backbone.encode_images(images, noise(Stream.IMAGE, step)),
            backbone.encode_texts(texts, noise(Stream.TEXT, step)),
        )
        with torch.autocast("cuda", enabled=False):
            total = sum(pool(Tokens(*side)).square().sum() for pool, side in zip(pools, sides, strict=True))
        assert isinstance(total, torch.Tensor)
        return total, *torch.autograd.grad(total, parameters)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = run()
    for number in (5, 9):
        step.fill_(number)
        graph.replay()
        for one, other in zip(held, run(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
