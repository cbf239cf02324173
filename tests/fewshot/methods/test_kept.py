"""Class names become ids once, not in every step, and another class list is never mistaken for the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from vacsr.config.base import METHODS
from vacsr.fewshot.methods import ClassSet, FewshotMethod, ShotBatch, build_fewshot
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.vacsr import trimmed

from .plain_clip import photos, small_clip

BASE = ClassSet(("cat", "night_heron", "x"), "a {}.")
NEW = ClassSet(("dog", "red car", "blue"), "a {}.")
TOLD = BASE._replace(template="{} texture.")
# With cosine_start=clip the first step would set b, and a method would not be as it was.
SMALL: dict[str, Any] = {"adapter": {"hidden": 8, "latent": 6, "decoder_hidden": 5}, "cosine_start": "adapter"}
CHANGES: dict[str, dict[str, Any]] = {
    "mma": {"template": ""},
    "vacsr": SMALL,
    "batch": {"name": "vacsr", "pairs": "batch", **SMALL},
}
NAMES = [*METHODS["fewshot"], "batch"]
OWN_WORDS = ("coop", "cocoop", "maple", "coprompt")


def built(name: str) -> FewshotMethod:
    fields = {"name": name, **CHANGES.get(name, {})}
    config = METHODS["fewshot"][fields["name"]].config.model_validate(fields)
    generator = torch.Generator().manual_seed(0)
    return build_fewshot(small_clip(dtype=torch.float32), config, classes=BASE, generator=generator)


def batch() -> ShotBatch:
    pixels = photos(2, dtype=torch.float32)
    return ShotBatch(pixels, torch.tensor([2, 0]), pixels.flip(-1), seed=1, step=3, steps=9)


def loss_and_logits(method: FewshotMethod, classes: ClassSet) -> tuple[Tensor, Tensor]:
    loss = method.loss(batch(), classes).total.detach()
    return loss, method.logits(batch().pixels, method.prepare(classes))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every sentence that a tokenizer is given from now on."""
    found: list[str] = []
    plain = ClipModel.tokens

    def tokens(self: ClipModel, prompts: Sequence[str]) -> Tensor:
        found.extend(prompts)
        return plain(self, prompts)

    monkeypatch.setattr(ClipModel, "tokens", tokens)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_names_are_tokenised_when_the_list_changes(name: str, told: list[str]) -> None:
    method = built(name)
    told.clear()
    first = loss_and_logits(method, BASE)
    assert sum("night heron" in sentence for sentence in told) == (2 if name == "coprompt" else 1)
    told.clear()
    again = loss_and_logits(method, ClassSet(*BASE))
    assert told == []
    others = loss_and_logits(method, NEW)
    assert any("red car" in sentence for sentence in told)
    assert not any("heron" in sentence for sentence in told)
    for found, classes in ((again, BASE), (others, NEW), (loss_and_logits(method, BASE), BASE)):
        for one, other in zip(found, loss_and_logits(built(name), classes), strict=True):
            assert torch.equal(one, other)
    assert not torch.equal(first[1], others[1])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN_WORDS])
def test_another_template_is_another_sentence(name: str) -> None:
    method = built(name)
    before, after = loss_and_logits(method, BASE), loss_and_logits(method, TOLD)
    assert not torch.equal(before[1], after[1])
    for one, other in zip(after, loss_and_logits(built(name), TOLD), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "zeroshot"])
def test_training_follows_a_test_in_inference_mode(name: str) -> None:
    """What is kept must not be an inference tensor, which no gradient can be taken through."""
    method, fresh = built(name), built(name)
    with torch.inference_mode():
        method.prepare(BASE)
    for trained in (method, fresh):
        trained.loss(batch(), BASE).total.backward()
    found, expected = ([p.grad for p in one.trainable().values() if p.grad is not None] for one in (method, fresh))
    assert found
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_rows_are_cut_as_the_tokenizer_would_have_left_them() -> None:
    clip = small_clip()
    sentences = NEW.prompts()
    whole = clip.tokens(sentences)
    for rows in ([0], [2, 0], [1], [0, 1, 2]):
        assert torch.equal(trimmed(whole[rows]), clip.tokens([sentences[row] for row in rows]))
