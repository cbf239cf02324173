from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from vacsr.backbones import Tokens, TowerBackbone, build_pooling, load_backbone
from vacsr.backbones.towers import ASSETS
from vacsr.config import BackboneConfig
from vacsr.errors import DataError
from vacsr.noise import RowNoise, Stream, seeded

CAPTIONS = ["a red dog", "two dogs on the grass", "grass", "a cat sleeps on a red mat"]
Make = Callable[..., TowerBackbone]


def load(spec: str, **fields: Any) -> TowerBackbone:
    with seeded(0):
        backbone = load_backbone(BackboneConfig.model_validate({"spec": spec, **fields}))
    assert isinstance(backbone, TowerBackbone)
    backbone.fit_words(CAPTIONS)
    return backbone


@pytest.fixture(params=["tiny", "clip"])
def make(request: pytest.FixtureRequest, clip_checkpoint: Path) -> Make:
    spec = "tiny:width=32,size=32,depth=3" if request.param == "tiny" else f"clip:{clip_checkpoint}"
    return lambda **fields: load(spec, **fields)


def noise(rows: torch.Tensor | int, stream: Stream = Stream.IMAGE) -> RowNoise:
    return RowNoise(0, torch.tensor(5), torch.arange(rows) if isinstance(rows, int) else rows, stream)


def assert_same(one: Tokens, other: Tokens) -> None:
    torch.testing.assert_close(one.values, other.values)
    assert torch.equal(one.mask, other.mask)
    assert torch.equal(one.summary, other.summary)


def test_shapes(make: Make, photos: torch.Tensor) -> None:
    backbone = make()
    texts = backbone.tokenize(CAPTIONS)
    assert texts.dtype == torch.int32
    rows = backbone.tokenizer.encode(CAPTIONS)
    assert texts.tolist() == [row + [-1] * (texts.shape[1] - len(row)) for row in rows]
    image, text = backbone.encode_images(photos), backbone.encode_texts(texts)
    assert image.values.shape == (*image.mask.shape, backbone.image_dim)
    assert text.values.shape == (*text.mask.shape, backbone.text_dim)
    assert torch.equal(text.mask, texts >= 0)
    assert torch.equal(text.summary, (texts >= 0).sum(1) - 1)
    assert backbone.tokenize([]).shape == (0, 1)
    wide = backbone.encode_texts(functional.pad(texts, (0, backbone.text.context - texts.shape[1]), value=-1))
    torch.testing.assert_close(wide.values[wide.mask], text.values[text.mask])


def test_photos_of_another_size_are_resized_as_pil_would(make: Make) -> None:
    backbone = make()
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 41, 3), dtype=np.uint8))
    raw = torch.from_numpy(np.array(photo)).permute(2, 0, 1)
    ready = backbone.transform.pixels(photo)
    resized, expected = (backbone.encode_images(x.unsqueeze(0)).values for x in (raw, ready))
    torch.testing.assert_close(resized, expected, atol=0.03, rtol=0.03)


def test_noise_augments_each_row_by_its_own_draw(make: Make, photos: torch.Tensor) -> None:
    backbone = make(augment={"image_tokens": 0.5, "text_tokens": 0.5})
    texts, rows = backbone.tokenize(CAPTIONS), torch.tensor([2, 0])
    image, text = backbone.encode_images(photos, noise(4)), backbone.encode_texts(texts, noise(4, 1))
    some, words = backbone.encode_images(photos[rows], noise(rows)), backbone.encode_texts(texts[rows], noise(rows, 1))
    assert_same(some, Tokens(image.values[rows], image.mask[rows], image.summary[rows]))
    assert torch.equal(words.mask, text.mask[rows])
    torch.testing.assert_close(words.values[words.mask], text.values[rows][words.mask])
    assert not image.mask.all()
    assert not torch.allclose(image.values, backbone.encode_images(photos).values)
    assert not torch.equal(text.mask, texts >= 0)
    plain = make(augment={"crop": (1, 1), "flip": 0, "image_tokens": 0, "text_tokens": 0})  # turned off
    assert_same(plain.encode_images(photos, noise(4)), backbone.encode_images(photos))
    assert_same(plain.encode_texts(texts, noise(4, 1)), backbone.encode_texts(texts))


def test_tower_params_are_all_parameters_once(make: Make) -> None:
    backbone = make()
    parts = backbone.tower_params()
    listed = [pair for part in parts.values() for group in (part.stem, *part.blocks) for pair in group]
    unused = {id(parameter) for parameter in backbone.unused_params()}
    named = {name: parameter for name, parameter in backbone.named_parameters() if id(parameter) not in unused}
    assert len(listed) == len(named)
    assert all(parameter.requires_grad for parameter in named.values())
    assert not any(parameter.requires_grad for parameter in backbone.unused_params())
    assert all(named[name] is parameter for name, parameter in listed)
    assert all(name.startswith("text.") for name, _ in parts["text"].stem)
    assert [len(block) for block in parts["image"].blocks] == 3 * [len(parts["image"].blocks[0])]


def gradients(backbone: TowerBackbone, photos: torch.Tensor) -> list[torch.Tensor]:
    pool = build_pooling("mean")
    total = pool(backbone.encode_images(photos, noise(4))).square().sum()
    total = total + pool(backbone.encode_texts(backbone.tokenize(CAPTIONS), noise(4, 1))).square().sum()
    backbone.zero_grad()
    total.backward()
    return [p.grad for p in backbone.parameters() if p.grad is not None]


def test_checkpointing_gives_equal_gradients_and_reaches_every_parameter(make: Make, photos: torch.Tensor) -> None:
    backbone = make().train()
    plain = gradients(backbone, photos)
    assert len(plain) == len(list(backbone.parameters())) - len(backbone.unused_params())
    calls: list[bool] = []
    inner = next(m for m in backbone.image.blocks()[0].modules() if isinstance(m, torch.nn.Linear))
    inner.register_forward_hook(lambda *_: calls.append(True))
    for on, times in ((True, 2), (False, 1)):  # once forwards, once again in the backward pass
        backbone.set_checkpointing(on)
        for mine, theirs in zip(gradients(backbone, photos), plain, strict=True):
            torch.testing.assert_close(mine, theirs)
        assert len(calls) == times
        calls.clear()
    assert make(checkpointing=True).state_dict().keys() == backbone.state_dict().keys()


def test_compiled_blocks_can_be_switched_off(make: Make, photos: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    compile_, expected = torch.nn.Module.compile, make().encode_images(photos).values

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kw: compile_(self, backend=backend, **kw))
    backbone = make()
    backbone.compile_blocks(True)
    torch.testing.assert_close(backbone.encode_images(photos).values, expected)
    assert len(graphs) == 1  # equal blocks share it
    backbone.compile_blocks(False)
    torch.testing.assert_close(backbone.encode_images(photos[:3]).values, expected[:3])
    assert len(graphs) == 1
    backbone.compile_blocks(True)
    backbone.encode_images(photos)
    assert len(graphs) == 1


@pytest.mark.slow
def test_the_encoders_trace_to_one_graph_each(make: Make, photos: torch.Tensor) -> None:
    backbone = make()
    texts = backbone.tokenize(CAPTIONS)
    image = torch.compile(backbone.encode_images, backend="eager", fullgraph=True)
    text = torch.compile(backbone.encode_texts, backend="eager", fullgraph=True)
    assert_same(image(photos, noise(4)), backbone.encode_images(photos, noise(4)))
    assert_same(text(texts, noise(4, 1)), backbone.encode_texts(texts, noise(4, 1)))


def test_provenance_names_towers_inputs_and_weights(make: Make) -> None:
    backbone = make()
    before = backbone.provenance()
    assert before.backbone in ("tiny:width=32,size=32,depth=3", "clip:small-clip")
    assert before.preprocessing.startswith("32 whole")
    assert before == make().provenance()
    with torch.no_grad():
        next(backbone.text.parameters()).add_(1.0)
    assert backbone.provenance().revision != before.revision
    assert make(pixel_stats="imagenet", resize="center").provenance().preprocessing != before.preprocessing


@pytest.mark.parametrize("content", [None, "{", "{}", '{"transform": {"size": 3}}'])
def test_assets_that_are_none_are_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / ASSETS).write_text(content)
    with pytest.raises(DataError, match="save the model again"):
        load_backbone(BackboneConfig(spec="tiny:"), assets=tmp_path)


def encoded(backbone: TowerBackbone, photos: torch.Tensor, texts: torch.Tensor, step: torch.Tensor) -> list[Tokens]:
    rows = torch.arange(4, device=step.device)
    image_noise, text_noise = (RowNoise(0, step, rows, stream) for stream in (Stream.IMAGE, Stream.TEXT))
    return [backbone.encode_images(photos, image_noise), backbone.encode_texts(texts, text_noise)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_the_cpu(make: Make, photos: torch.Tensor) -> None:
    backbone = make()
    texts, step = backbone.tokenize(CAPTIONS), torch.tensor(3)
    here = encoded(backbone, photos, texts, step)
    pool = build_pooling("gpo")
    pooled = [pool(tokens) for tokens in here]
    there = encoded(backbone.cuda(), photos.cuda(), texts.cuda(), step.cuda())
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.mask, other.mask.cpu())
        torch.testing.assert_close(other.values.cpu()[one.mask], one.values[one.mask], atol=2e-3, rtol=2e-3)
    for one, tokens in zip(pooled, there, strict=True):
        torch.testing.assert_close(pool.cuda()(tokens).cpu(), one, atol=2e-3, rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_the_device_and_a_graph_can_hold_it(make: Make, photos: torch.Tensor) -> None:
    backbone, pools = make().cuda().train(), [build_pooling("gpo").cuda() for _ in range(2)]
    texts, images, step = backbone.tokenize(CAPTIONS).cuda(), photos.cuda(), torch.zeros((), dtype=torch.int64).cuda()
    learned = [p for p in backbone.parameters() if p.requires_grad]
    parameters = [*learned, *(p for pool in pools for p in pool.parameters())]

    def run() -> tuple[torch.Tensor, ...]:
        sides = encoded(backbone, images, texts, step)
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
