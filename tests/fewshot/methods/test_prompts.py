"""CoOp, CoCoOp, MaPLe and CoPrompt against a plain CLIP whose tokens are exchanged one by one."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from vacsr.config import BackboneConfig
from vacsr.errors import UsageError
from vacsr.fewshot.methods import ClassSet, ClipModel, FewshotMethod, ShotBatch
from vacsr.fewshot.methods.base import ZeroshotConfig
from vacsr.fewshot.methods.prompts import (
    CocoopConfig,
    CoopConfig,
    Coprompt,
    CopromptConfig,
    FeatureAdapter,
    Maple,
    MapleConfig,
    encode_sentences,
)
from vacsr.methods.infonce import InfoNCEConfig

from .plain_clip import (
    Plain,
    assert_same_gradients,
    build_fewshot,
    photos,
    plain_finish,
    plain_image,
    plain_image_tokens,
    plain_sentence,
    plain_text,
    small_clip,
    trained_tiny,
    unit,
)

CLASSES = ClassSet(("night_heron", "cat", "plum"), "{} texture.")
DESCRIBED = CLASSES._replace(sentences=(("a bird", "grey wings", "by water"), ("whiskers",), ()))
OTHERS = ClassSet(("oak", "old_oak"))
LABELS = torch.tensor([2, 0])


# ------------------------------------------------------------------------------------------------------ CoOp and CoCoOp


def coop(config: Any, clip: ClipModel | None = None, classes: ClassSet = CLASSES) -> Any:
    return build_fewshot(clip or small_clip(), config, classes=classes, generator=torch.Generator().manual_seed(0))


def moved(config: CoopConfig) -> Any:
    """A method whose context has learned something."""
    method = coop(config)
    draw = torch.randn(method.context.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    method.context.data += 0.3 * draw
    return method


def plain_logits(method: Any, pixels: Tensor, names: tuple[str, ...]) -> Tensor:
    """Photo by photo and class by class: start, the context in place of its words, the name, a full stop, the end."""
    w = dict(method.named_parameters())
    rows = []
    for image in plain_image(method.clip, pixels):
        context = w["context"]
        if "meta.0.weight" in w:
            middle = (w["meta.0.weight"] @ image + w["meta.0.bias"]).clamp(min=0)
            context = context + w["meta.2.weight"] @ middle + w["meta.2.bias"]
        put = Plain(words=lambda x, context=context: torch.cat((x[:1], context, x[1 + len(context) :])))
        words = [f"{method.config.context} {name.replace('_', ' ')}." for name in names]
        texts = [plain_sentence(method.clip, [298, *sentence.encode(), 299], put) for sentence in words]
        rows.append(torch.stack([100.0 * image @ text for text in texts]))
    return torch.stack(rows)


CONFIGS = [CoopConfig(), *(CocoopConfig(context="a", chunk=chunk, reduction=4) for chunk in (2048, 4, 1))]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_coops_loss_gradients_and_logits_are_the_plain_ones(config: CoopConfig) -> None:
    method, pixels, labels = moved(config), photos(3), torch.tensor([0, 1, 1])
    loss = method.loss(ShotBatch(pixels, labels), CLASSES).total
    logits = plain_logits(method, pixels, CLASSES.names)
    expected = -torch.log_softmax(logits, dim=1)[torch.arange(3), labels].mean()
    assert_same_gradients(method, loss, expected)
    torch.testing.assert_close(method.predict(pixels, method.prepare(CLASSES))[0], logits.detach())
    others = method.predict(pixels, method.prepare(OTHERS))[0]
    torch.testing.assert_close(others, plain_logits(method, pixels, OTHERS.names).detach())
    assert not others.requires_grad


@pytest.mark.parametrize("tiny", [False, True])
def test_coop_starts_at_zero_shot_clip_exactly(tmp_path: Path, tiny: bool) -> None:
    clip, pixels = small_clip(dtype=torch.float32), photos(3, dtype=torch.float32)
    classes = ClassSet(("red dog", "cats"), "a photo of a {}.")
    if tiny:
        trained_tiny(tmp_path, InfoNCEConfig(scale=20.0))
        clip = ClipModel.from_config(BackboneConfig(start=str(tmp_path)))

    def logits(method: FewshotMethod) -> Tensor:
        return method.predict(pixels, method.prepare(classes))[0]

    zero = logits(coop(ZeroshotConfig(), clip, classes))
    started = coop(CoopConfig(), clip, classes)
    assert torch.equal(logits(started), zero)
    started.loss(ShotBatch(pixels, torch.tensor([0, 1, 1])), classes).total.backward()
    assert float(started.context.grad.abs().max(dim=1).values.min()) > 0


def test_a_context_must_leave_room_for_the_class() -> None:
    method = coop(CoopConfig(context="x" * 60))
    with pytest.raises(UsageError, match="within 48 tokens"):
        method.prepare(CLASSES)


# ---------------------------------------------------------------------------------------------------------------- MaPLe


class PlainPrompts(NamedTuple):
    """The edits of each tower, on one row of tokens."""

    image: Plain
    text: Plain


def build(kind: type[Maple], clip: ClipModel | None = None, **fields: Any) -> Any:
    """With prompts and adapters large enough to show in the output."""
    clip, generator = clip or small_clip(), torch.Generator().manual_seed(0)
    config = (CopromptConfig if kind is Coprompt else MapleConfig).model_validate(fields)
    method = kind(clip, config, classes=CLASSES, generator=generator)
    for parameter in method.trainable().values():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return method


def prompt_rows(clip: ClipModel, classes: ClassSet, context: str = "a photo of a") -> Tensor:
    return clip.tokens([f"{context} {name.replace('_', ' ')}." for name in classes.names])


def plain_prompts(method: Maple) -> PlainPrompts:
    texts = list(method.tokens)
    images = [
        torch.stack([layer.weight @ token + layer.bias for token in tokens])
        for layer, tokens in zip(method.maps, texts, strict=True)
    ]

    def over(x: Tensor, prompts: Tensor) -> Tensor:
        return torch.stack(
            [prompts[position - 1] if 1 <= position <= len(prompts) else token for position, token in enumerate(x)]
        )

    def last(x: Tensor, own: Tensor) -> Tensor:
        return torch.stack([*x[: len(x) - len(own)], *own])

    return PlainPrompts(
        Plain(
            entry=lambda x: torch.stack([*x, *images[0]]),
            before=lambda depth, x: last(x, images[depth]) if 1 <= depth < len(images) else x,
        ),
        Plain(
            words=lambda x: over(x, texts[0]),
            before=lambda depth, x: over(x, texts[depth]) if 1 <= depth < len(texts) else x,
        ),
    )


def adapted(adapter: FeatureAdapter | None, raw: Tensor, blend: float) -> Tensor:
    """On the raw feature, as published. [d] -> [d] unit"""
    if adapter is None:
        return unit(raw)
    middle = (adapter.down.weight @ raw).clamp(min=0)
    return unit(blend * (adapter.up.weight @ middle).clamp(min=0) + (1 - blend) * raw)


def plain_features(method: Any, pixels: Tensor, classes: ClassSet) -> tuple[Tensor, Tensor]:
    """Photos [B, d] and classes [C, d]; of CoPrompt through its adapters."""
    clip, plain, config = method.clip, plain_prompts(method), method.config
    image_adapter, text_adapter = (getattr(method, name, None) for name in ("image_adapter", "text_adapter"))
    raw = [plain_finish(clip, "image", plain_image_tokens(clip, photo, plain.image)[0]) for photo in pixels]
    images = [adapted(image_adapter, feature, getattr(config, "image_blend", 0.0)) for feature in raw]
    rows = [[i for i in row.tolist() if i >= 0] for row in prompt_rows(clip, classes)]
    sentences = [plain_sentence(clip, row, plain.text, raw=True) for row in rows]
    texts = [adapted(text_adapter, feature, getattr(config, "text_blend", 0.0)) for feature in sentences]
    return torch.stack(images), torch.stack(texts)


def plain_cross_entropy(images: Tensor, texts: Tensor) -> Tensor:
    logits = 100.0 * images @ texts.T
    return sum(logits[i].exp().sum().log() - logits[i, int(label)] for i, label in enumerate(LABELS)) / 2


@pytest.mark.parametrize(
    ("kind", "fields", "blocks"),
    [
        (Maple, {"tokens": 2, "depth": 2}, (3, 3)),
        (Maple, {"tokens": 4, "depth": 1}, (3, 3)),
        (Maple, {"tokens": 1, "depth": 9}, (3, 1)),  # the shallower tower bounds the depth
        (Maple, {}, (2, 3)),
        (Coprompt, {"depth": 2}, (3, 3)),
        (Coprompt, {"tokens": 4, "depth": 12, "image_blend": 0.6, "text_blend": 0.5}, (3, 3)),
    ],
)
def test_logits_are_the_plain_ones_for_any_classes(
    kind: type[Maple], fields: dict[str, Any], blocks: tuple[int, int]
) -> None:
    method, pixels = build(kind, small_clip(image_blocks=blocks[0], text_blocks=blocks[1]), **fields), photos(2)
    assert len(method.tokens) == min(method.config.depth, *blocks)
    for classes in (DESCRIBED, OTHERS):
        prepared = method.prepare(classes)
        assert not prepared.requires_grad
        images, texts = plain_features(method, pixels, classes)
        torch.testing.assert_close(method.predict(pixels, prepared)[0], 100.0 * images @ texts.T, rtol=1e-8, atol=1e-7)


def test_maples_loss_and_gradients_are_the_plain_ones() -> None:
    method, pixels = build(Maple, depth=2), photos(2)
    terms = method.loss(ShotBatch(pixels, LABELS), CLASSES)
    assert float(terms.parts["ce"]) == float(terms.total.detach())
    assert_same_gradients(method, terms.total, plain_cross_entropy(*plain_features(method, pixels, CLASSES)))


def test_text_starts_as_the_words_it_replaces() -> None:
    clip = small_clip()
    method = Maple(clip, MapleConfig(depth=1), classes=CLASSES, generator=torch.Generator().manual_seed(0))
    expected = clip.text(prompt_rows(clip, CLASSES))
    torch.testing.assert_close(method.prepare(CLASSES), expected, rtol=0, atol=0)
    deep = Maple(clip, MapleConfig(), classes=CLASSES, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(deep.prepare(CLASSES), expected)
    fresh = torch.stack(list(deep.tokens)[1:])
    assert 0.01 < fresh.std() < 0.03
    first, second, third = (layer.weight for layer in deep.maps)
    assert torch.equal(second, third)
    assert not torch.equal(first, second)
    assert second.data_ptr() != third.data_ptr()
    assert first.abs().max() <= 24**-0.5


def test_the_context_gives_the_words_and_the_first_tokens() -> None:
    method = build(Maple, context="{odd} words", tokens=1)
    rows = prompt_rows(method.clip, CLASSES, "{odd} words")
    expected = plain_text(method.clip, rows, plain_prompts(method).text)
    torch.testing.assert_close(method.prepare(CLASSES), expected, rtol=1e-8, atol=1e-8)
    assert len(build(Maple, tokens=12).tokens[0]) == 12  # a tokenizer of bytes
    with pytest.raises(UsageError, match=r"set method\.tokens to at most 12"):
        build(Maple, tokens=13)


# ---------------------------------------------------------------------------------------------------------- CoPrompt


@pytest.mark.parametrize("classes", [CLASSES, DESCRIBED])
def test_coprompts_loss_and_gradients_are_the_plain_ones(classes: ClassSet) -> None:
    method, pixels, second = build(Coprompt, depth=2, consistency=3.0), photos(2), photos(2, seed=1)
    clip = method.clip
    terms = method.loss(ShotBatch(pixels, LABELS, second, seed=4, step=7), classes)
    images, texts = plain_features(method, pixels, classes)
    ce, seen = plain_cross_entropy(images, texts), plain_image(clip, second)
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
    for name, part in (("ce", ce), ("text", nearest), ("image", image)):
        torch.testing.assert_close(terms.parts[name], part.detach(), rtol=1e-8, atol=1e-8)
    assert_same_gradients(method, terms.total, ce + 3.0 * (nearest + image))


def test_one_sentence_of_each_class_by_seed_and_step() -> None:
    method = build(Coprompt)
    many = CLASSES._replace(sentences=(("a", "b", "c", "d"), ("e", "f"), ("g",)))
    texts = [text for sentences in many.sentences for text in sentences]
    features = torch.cat([method.clip.text(method.clip.tokens([text])) for text in texts])

    def picked(seed: int, step: int) -> tuple[int, ...]:
        rows = method.drawn_sentences(many, seed=seed, step=step)
        near = torch.cdist(rows, features)
        assert float(near.amin(dim=1).max()) < 1e-7
        return tuple(near.argmin(dim=1).tolist())

    draws = [picked(0, step) for step in range(400)]
    assert [{draw[number] for draw in draws} for number in range(3)] == [{0, 1, 2, 3}, {4, 5}, {6}]
    assert all(70 < sum(draw[0] == sentence for draw in draws) < 130 for sentence in range(4))
    assert len({draw[:2] for draw in draws}) == 8  # classes draw for themselves
    assert draws == [picked(0, step) for step in range(400)]
    assert draws != [picked(1, step) for step in range(400)]


def test_more_sentences_than_are_encoded_at_a_time() -> None:
    clip = small_clip(dtype=torch.float32)
    many = ClassSet(("a", "b"), sentences=(("x0", "x1", "x2"), ("y0", "y1")))
    features, lengths = encode_sentences(clip, many, chunk=2)
    torch.testing.assert_close(features, clip.text(clip.tokens(["x0", "x1", "x2", "y0", "y1"])))
    assert lengths.tolist() == [3, 2]
