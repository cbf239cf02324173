"""MMA's adapters against a plain reference, their gradients, and where they start."""

import math

import pytest
import torch
from torch import Tensor, nn

from vacsr.fewshot.methods.base import ClassSet, ShotBatch
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.mma import Mma, MmaConfig

from .plain_clip import Plain, layer_norm, photos, plain_image, plain_text, small_clip, weights_of

CLASSES = ClassSet(("red_fox", "cat", "a boat"), template="{} texture.")


def build(clip: ClipModel | None = None, *, seed: int = 0, **fields: object) -> Mma:
    config = MmaConfig.model_validate({"layers": 2, "width": 5, "scale": 0.1, **fields})
    clip = small_clip(image_blocks=4, text_blocks=3) if clip is None else clip
    method = Mma(clip, config, classes=CLASSES, generator=torch.Generator().manual_seed(seed))
    return method.to(next(clip.parameters()).dtype)


def positive(x: Tensor) -> Tensor:
    """max(x, 0) with no gradient at 0, where a token that wakes nothing on its way down stands."""
    return torch.where(x > 0, x, 0.0)


def plain_edits(method: Mma, side: str, *, blocks: int, layers: int) -> Plain:
    """The adapters written out, by their saved names; the last ``layers`` of ``blocks``."""
    own, w = dict(method.named_parameters()), weights_of(method.clip, side)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]

    def after(depth: int, inputs: Tensor, x: Tensor) -> Tensor:
        index = depth - (blocks - layers)
        if index < 0:
            return x
        y = layer_norm(w, f"encoder.layers.{depth}.layer_norm1", inputs)
        y = positive(linear(f"{side}_adapters.{index}.down", y))
        y = positive(linear(f"shared.{index}", y))
        return x + method.config.scale * linear(f"{side}_adapters.{index}.up", y)

    return Plain(after=after)


def plain_logits(method: Mma, pixels: Tensor, *, blocks: tuple[int, int], layers: int) -> Tensor:
    image, text = (
        plain_edits(method, s, blocks=b, layers=layers) for s, b in zip(("image", "text"), blocks, strict=True)
    )
    ids = method.clip.tokens([f"a photo of a {name}." for name in ("red fox", "cat", "a boat")])
    return 100 * plain_image(method.clip, pixels, image) @ plain_text(method.clip, ids, text).T


@pytest.mark.parametrize(("wanted", "layers"), [(2, 2), (8, 3)])
def test_logits_and_loss_are_the_plain_ones(wanted: int, layers: int) -> None:
    method, pixels = build(layers=wanted), photos(3)
    assert len(method.image_adapters) == len(method.text_adapters) == len(method.shared) == layers
    expected = plain_logits(method, pixels, blocks=(4, 3), layers=layers)
    torch.testing.assert_close(method.predict(pixels, method.prepare(CLASSES))[0], expected, rtol=1e-8, atol=1e-8)
    loss = method.loss(ShotBatch(pixels, torch.tensor([2, 0, 1])), CLASSES)
    by_hand = -sum(row[y] - row.exp().sum().log() for row, y in zip(expected, (2, 0, 1), strict=True)) / 3
    torch.testing.assert_close(loss.total, by_hand, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(loss.parts["ce"], loss.total.detach())


def test_gradients_are_the_true_ones_over_the_scale_and_the_stream_keeps_its_own() -> None:
    method, labels = build(), torch.tensor([1, 2])
    pixels, plain_pixels = photos(2).requires_grad_(), photos(2).requires_grad_()
    method.loss(ShotBatch(pixels, labels), CLASSES).total.backward()
    logits = plain_logits(method, plain_pixels, blocks=(4, 3), layers=2)
    learned = method.trainable()
    true = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), [plain_pixels, *learned.values()])
    torch.testing.assert_close(pixels.grad, true[0], rtol=1e-7, atol=1e-10)
    for (name, parameter), grad in zip(learned.items(), true[1:], strict=True):
        assert float(grad.abs().max()) > 0, name
        torch.testing.assert_close(parameter.grad, grad / method.config.scale, rtol=1e-7, atol=1e-9)


def test_with_nothing_going_up_it_is_zero_shot_and_at_the_start_close_to_it() -> None:
    method, pixels = build(layers=8, scale=0.001, width=32, template=""), photos(4)
    zero_shot = 100 * method.clip.image(pixels) @ method.clip.text(method.clip.tokens(CLASSES.prompts())).T
    start = method.predict(pixels, method.prepare(CLASSES))[0]
    away = float((start - zero_shot).detach().abs().max())
    assert 0 < away < 0.3, away  # of a range of ±100
    for adapter in (*method.image_adapters, *method.text_adapters):
        nn.init.zeros_(adapter.up.weight)
    assert method.predict(pixels, method.prepare(CLASSES))[0].equal(zero_shot)


def test_the_start_is_kaiming_by_outputs() -> None:
    method = build(width=32)
    for name, parameter in method.trainable().items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        else:
            spread = float(parameter.detach().std()) / math.sqrt(2 / len(parameter))
            assert abs(spread - 1) < 4 / math.sqrt(2 * parameter.numel()), name
    layers = [method.image_adapters, method.text_adapters, method.shared]
    assert not any(p.equal(q) for first, second in layers for p, q in zip(*map(matrices, (first, second)), strict=True))


def matrices(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.ndim == 2]


def test_its_own_sentence_is_used_for_all_data_sets_unless_it_is_empty() -> None:
    named = [CLASSES._replace(template=template) for template in ("{} texture.", "a photo of a {}.")]
    texts, plain = ([method.prepare(classes) for classes in named] for method in (build(), build(template="")))
    assert texts[0].equal(texts[1])
    assert texts[1].equal(plain[1])
    assert not plain[0].allclose(plain[1])
