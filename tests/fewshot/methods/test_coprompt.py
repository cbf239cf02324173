"""CoPrompt against plain towers, adapters on raw features, and its three losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vacsr.errors import UsageError
from vacsr.fewshot.methods.base import ClassSet, ShotBatch
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.maple import Coprompt, CopromptConfig, FeatureAdapter, encode_sentences

from .plain_clip import (
    Plain,
    assert_same_gradients,
    photos,
    plain_blocks,
    plain_finish,
    plain_image,
    plain_image_tokens,
    plain_sentence,
    small_clip,
    tiny_clip,
    unit,
    weights_of,
)
from .plain_maple import plain_prompts, prompt_rows

CLASSES = ClassSet(("night_heron", "cat", "plum"), "{} texture.")
DESCRIBED = CLASSES._replace(sentences=(("a bird", "grey wings", "by water"), ("whiskers",), ()))
OTHERS = ClassSet(("oak", "old_oak"))
LABELS = torch.tensor([2, 0])


def coprompt(clip: ClipModel | None = None, *, seed: int = 0, **fields: float) -> Coprompt:
    """With prompts and adapters large enough to show in the output."""
    clip, generator = clip or small_clip(), torch.Generator().manual_seed(seed)
    method = Coprompt(clip, CopromptConfig.model_validate(fields), classes=CLASSES, generator=generator)
    for parameter in method.trainable().values():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return method


def raw_sentence(clip: ClipModel, ids: list[int], plain: Plain) -> Tensor:
    """The end token's feature before it is made a unit vector. -> [d]"""
    w = weights_of(clip, "text")
    words = plain.words(torch.stack([w["embeddings.token_embedding.weight"][number] for number in ids]))
    tokens = plain_blocks(w, words + w["embeddings.position_embedding.weight"][: len(ids)], plain, causal=True)
    return plain_finish(clip, "text", tokens[-1])


def adapted(adapter: FeatureAdapter, raw: Tensor, blend: float) -> Tensor:
    """On the raw feature, as published. [d] -> [d] unit"""
    middle = (adapter.down.weight @ raw).clamp(min=0)
    return unit(blend * (adapter.up.weight @ middle).clamp(min=0) + (1 - blend) * raw)


def plain_features(method: Coprompt, pixels: Tensor, classes: ClassSet) -> tuple[Tensor, Tensor]:
    """Photos [B, d] and classes [C, d]."""
    clip, plain, config = method.clip, plain_prompts(method), method.config
    raw = [plain_finish(clip, "image", plain_image_tokens(clip, photo, plain.image)[0]) for photo in pixels]
    images = [adapted(method.image_adapter, feature, config.image_blend) for feature in raw]
    rows = [[i for i in row.tolist() if i >= 0] for row in prompt_rows(clip, classes)]
    texts = [adapted(method.text_adapter, raw_sentence(clip, row, plain.text), config.text_blend) for row in rows]
    return torch.stack(images), torch.stack(texts)


@pytest.mark.parametrize("fields", [{"depth": 2}, {"tokens": 4, "depth": 12, "image_blend": 0.6, "text_blend": 0.5}])
def test_logits_are_the_plain_ones_for_any_classes(fields: dict[str, float]) -> None:
    method, pixels = coprompt(**fields), photos(2)
    for classes in (DESCRIBED, OTHERS):
        images, texts = plain_features(method, pixels, classes)
        prepared = method.prepare(classes)
        assert not prepared.requires_grad
        torch.testing.assert_close(method.logits(pixels, prepared), 100.0 * images @ texts.T, rtol=1e-8, atol=1e-7)


@pytest.mark.parametrize("classes", [CLASSES, DESCRIBED])
def test_loss_and_gradients_are_the_plain_ones(classes: ClassSet) -> None:
    method, pixels, second = coprompt(depth=2, consistency=3.0), photos(2), photos(2, seed=1)
    clip = method.clip
    terms = method.loss(ShotBatch(pixels, LABELS, second, seed=4, step=7, steps=9), classes)
    images, texts = plain_features(method, pixels, classes)
    logits = 100.0 * images @ texts.T
    ce = sum(logits[i].exp().sum().log() - logits[i, int(label)] for i, label in enumerate(LABELS)) / 2
    seen = plain_image(clip, second)
    image = 1 - sum(images[i] @ seen[i] for i in range(2)) / 2
    # Sentences are a draw; which one a class got shows in its own term only, so every combination is tried.
    lists = [
        own or (f"{name.replace('_', ' ')} texture.",)
        for name, own in zip(CLASSES.names, classes.sentences or ((),) * 3, strict=True)
    ]
    frozen = [
        [plain_sentence(clip, [i for i in clip.tokens([text])[0].tolist() if i >= 0]) for text in own] for own in lists
    ]
    text = [1 - (texts[0] @ first + texts[1] @ frozen[1][0] + texts[2] @ frozen[2][0]) / 3 for first in frozen[0]]
    nearest = min(text, key=lambda term: abs(float(term.detach()) - float(terms.parts["text"])))
    total = ce + 3.0 * (nearest + image)
    for name, part in (("ce", ce), ("text", nearest), ("image", image)):
        torch.testing.assert_close(terms.parts[name], part.detach(), rtol=1e-8, atol=1e-8)
    assert_same_gradients(method, terms.total, total)


def test_one_sentence_of_each_class_by_seed_and_step() -> None:
    method = coprompt()
    many = CLASSES._replace(sentences=(("a", "b", "c", "d"), ("e", "f"), ("g",)))
    texts = [text for sentences in many.sentences for text in sentences]
    features = torch.cat([method.clip.text(method.clip.tokens([text])) for text in texts])

    def picked(seed: int, step: int) -> tuple[int, ...]:
        rows = method.drawn_sentences(many, seed=seed, step=step)
        near = torch.cdist(rows, features)
        assert float(near.amin(dim=1).max()) < 1e-7
        return tuple(near.argmin(dim=1).tolist())

    draws = [picked(0, step) for step in range(400)]
    assert [len({draw[number] for draw in draws}) for number in range(3)] == [4, 2, 1]
    assert {draw[0] for draw in draws} == {0, 1, 2, 3}
    assert {draw[1] for draw in draws} == {4, 5}
    assert all(70 < sum(draw[0] == sentence for draw in draws) < 130 for sentence in range(4))
    assert len({draw[:2] for draw in draws}) == 8  # classes draw for themselves
    assert draws == [picked(0, step) for step in range(400)]
    assert draws != [picked(1, step) for step in range(400)]


def test_the_loss_draws_by_seed_and_step() -> None:
    method, batch = coprompt(small_clip(image_blocks=1, text_blocks=1)), ShotBatch(photos(2), LABELS, photos(2, seed=1))

    def parts(seed: int) -> list[tuple[float, float]]:
        terms = [method.loss(batch._replace(seed=seed, step=step), DESCRIBED).parts for step in range(12)]
        return [(float(part["text"]), float(part["ce"])) for part in terms]

    first = parts(0)
    assert len({text for text, _ in first}) == 3  # the heron's sentences
    assert len({ce for _, ce in first}) == 1
    assert parts(0) == first
    assert parts(1) != first


def test_more_sentences_than_are_encoded_at_a_time() -> None:
    clip = small_clip(dtype=torch.float32)
    many = ClassSet(("a", "b"), sentences=(("x0", "x1", "x2"), ("y0", "y1")))
    features, lengths = encode_sentences(clip, many, chunk=2)
    torch.testing.assert_close(features, clip.text(clip.tokens(["x0", "x1", "x2", "y0", "y1"])))
    assert lengths.tolist() == [3, 2]


def test_as_many_numbers_as_the_public_code() -> None:
    """512 → 128 → 512 twice, over MaPLe's 3,555,072."""
    adapter = FeatureAdapter(512, reduction=4, blend=0.1)
    assert 2 * sum(p.numel() for p in adapter.parameters()) == 262_144
    published = CopromptConfig(tokens=2, depth=9, reduction=4, image_blend=0.1, text_blend=0.2, consistency=1.0)
    assert CopromptConfig() == published


def test_tiny_towers() -> None:
    method, pixels = coprompt(tiny_clip(), reduction=1), photos(2)
    names = CLASSES._replace(sentences=(("a plum",), ("a cat", "photo of"), ("night",)))
    terms = method.loss(ShotBatch(pixels, LABELS, photos(2, seed=1), seed=1, step=2), names)
    terms.total.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in method.trainable().values())
    images, texts = method.image_features(pixels), method.prepare(OTHERS)
    torch.testing.assert_close(method.logits(pixels, texts), 20.0 * images @ texts.T)
    torch.testing.assert_close(images.norm(dim=1), torch.ones(2, dtype=images.dtype))


def test_one_view_is_not_enough() -> None:
    with pytest.raises(UsageError, match=r"give ShotBatch\.second"):
        coprompt().loss(ShotBatch(photos(2), LABELS), CLASSES)


def test_sentences_for_other_classes() -> None:
    with pytest.raises(UsageError, match="2 lists of sentences for 3 classes — give one list for each"):
        encode_sentences(small_clip(), CLASSES._replace(sentences=(("a",), ("b",))))
