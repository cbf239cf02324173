"""What every few-shot method must do, and zero-shot CLIP, which is the base class itself."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from vacsr.config import BackboneConfig
from vacsr.config.base import METHODS
from vacsr.errors import DataError
from vacsr.fewshot.methods import ClassSet, FewshotMethod, ShotBatch
from vacsr.fewshot.methods.base import ZeroshotConfig
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.prompts import CoopConfig

from .plain_clip import build_fewshot, photos, plain_image, plain_text, small_clip

FAR = ClassSet(("cat", "night_heron", "x"), "a {}, seen from afar.")
BASE = ClassSet(("cat", "night_heron", "x"), "a {}.")
NEW = ClassSet(("dog", "red car", "blue"), "a {}.")
TEXTURE = BASE._replace(template="{} texture.")
SMALL: dict[str, Any] = {"adapter": {"hidden": 8, "latent": 6, "decoder_hidden": 5}}
CHANGES: dict[str, dict[str, Any]] = {
    "mma": {"template": ""},
    "vacsr": SMALL,
    "batch": {"name": "vacsr", "pairs": "batch", **SMALL},
    "fixed": {"name": "vacsr", "adapter": {**SMALL["adapter"], "residual_learnable": False}},
}
NAMES = [*METHODS["fewshot"], "batch"]
OWN_WORDS = ("coop", "cocoop", "maple", "coprompt")
LEARNS = {
    "coop": {"context"},
    "cocoop": {"context", "meta"},
    "maple": {"tokens", "maps"},
    "coprompt": {"tokens", "maps", "image_adapter", "text_adapter"},
    "mma": {"image_adapters", "text_adapters", "shared"},
    "mmrl": {"tokens", "image_maps", "text_maps", "projection"},
    "clipood": {"clip.backbone.image"},
    "vacsr": {"adapter", "clip.backbone.image", "clip.backbone.text"},
}
"""The modules whose parameters learn, of every method that trains."""
FIXED_START = {"context", "tokens.0", "adapter.decoder.2.weight"}
"""Matrices that start at the same values whatever the generator."""


def built(name: str, *, seed: int = 0) -> FewshotMethod:
    fields = {"name": name, **CHANGES.get(name, {})}
    config = METHODS["fewshot"][fields["name"]].config.model_validate(fields)
    generator = torch.Generator().manual_seed(seed)
    return build_fewshot(small_clip(dtype=torch.float32), config, classes=BASE, generator=generator)


def batch() -> ShotBatch:
    pixels = photos(2, dtype=torch.float32)
    return ShotBatch(pixels, torch.tensor([2, 0]), pixels.flip(-1), seed=1, step=3)


def loss_and_logits(method: FewshotMethod, classes: ClassSet) -> tuple[Tensor, Tensor]:
    loss = method.loss(batch(), classes).total.detach()
    return loss, method.predict(batch().pixels, method.prepare(classes))[0]


def trained(method: FewshotMethod, *, steps: int) -> list[float]:
    """The losses of some steps on the same two photos."""
    optimizer = torch.optim.AdamW([p for group in method.param_groups() for p in group.params], lr=1e-3)
    losses = []
    for step in range(steps):
        loss = method.loss(batch(), BASE).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        method.after_step(step, steps)
        losses.append(float(loss.detach()))
    method.finish()
    return losses


def test_every_method_that_trains_is_listed() -> None:
    assert {name for name, entry in METHODS["fewshot"].items() if entry.method.trains} == LEARNS.keys()


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("maple", 3_555_072),
        ("coprompt", 3_817_216),
        ("mma", 674_560),
        ("mmrl", 4_992_256),
        ("clipood", 86_192_640),
        ("vacsr", 24_954_405),
    ],
)
def test_as_many_numbers_learn_as_published(name: str, count: int) -> None:
    """On ViT-B/16, with the defaults; for vacsr the adapter's 1,321,509 and five blocks."""
    with torch.device("meta"):
        clip = ClipModel.from_config(BackboneConfig(spec="clip:vit-b16", weights="random"))
    config = METHODS["fewshot"][name].config(name=name)
    method = build_fewshot(clip, config, classes=BASE, generator=torch.Generator())
    assert method.trainable_count() == count


@pytest.mark.parametrize("name", LEARNS)
def test_steps_learn_and_move_nothing_else(name: str) -> None:
    method = built(name)
    learns = set(method.trainable())
    assert {name for name in learns if not any(name.startswith(part) for part in LEARNS[method.config.name])} == set()
    assert all(any(name.startswith(part) for name in learns) for part in LEARNS[name])
    groups = [parameter for group in method.param_groups() for parameter in group.params]
    assert sorted(map(id, groups)) == sorted(id(parameter) for parameter in method.trainable().values())
    before = {name: parameter.clone() for name, parameter in method.named_parameters()}
    losses = trained(method, steps=10)
    assert losses[-1] < losses[0]
    frozen = [name for name in before if name not in learns and not name.startswith("average.")]
    assert all(torch.equal(method.get_parameter(name), before[name]) for name in frozen)
    assert not all(torch.equal(method.get_parameter(name), before[name]) for name in learns)


@pytest.mark.parametrize("name", [*LEARNS, "fixed"])
def test_weights_are_the_whole_method(name: str) -> None:
    method, other = built(name), built(name, seed=1)
    trained(method, steps=2)
    other.load_weights(method.weights())
    for classes in (BASE, NEW):
        logits = [m.predict(batch().pixels, m.prepare(classes))[0] for m in (method, other)]
        assert torch.equal(*logits)


@pytest.mark.parametrize("name", LEARNS)
def test_new_weights_come_from_the_generator(name: str) -> None:
    before = torch.random.get_rng_state()
    one, same, other = (built(name, seed=seed).weights() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(one[key], same[key]) for key in one)
    equal = {key for key in one if torch.equal(one[key], other[key]) and one[key].ndim > 1}
    assert {key for key in equal if not key.startswith("clip.")} <= FIXED_START


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every sentence that a tokenizer is given from now on."""
    sentences: list[str] = []
    plain = ClipModel.tokens

    def tokens(self: ClipModel, prompts: Sequence[str]) -> Tensor:
        sentences.extend(prompts)
        return plain(self, prompts)

    monkeypatch.setattr(ClipModel, "tokens", tokens)
    return sentences


@pytest.mark.parametrize("name", NAMES)
def test_names_are_tokenised_when_the_list_changes(name: str, tokenised: list[str]) -> None:
    method = built(name)
    tokenised.clear()
    first = loss_and_logits(method, BASE)
    assert sum("night heron" in sentence for sentence in tokenised) == (2 if name == "coprompt" else 1)
    tokenised.clear()
    again = loss_and_logits(method, ClassSet(*BASE))
    assert tokenised == []
    others = loss_and_logits(method, NEW)
    assert any("red car" in sentence for sentence in tokenised)
    assert not any("heron" in sentence for sentence in tokenised)
    for numbers, classes in ((again, BASE), (others, NEW), (loss_and_logits(method, BASE), BASE)):
        assert all(map(torch.equal, numbers, loss_and_logits(built(name), classes)))
    assert not torch.equal(first[1], others[1])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN_WORDS])
def test_another_template_is_another_sentence(name: str) -> None:
    method = built(name)
    before, after = loss_and_logits(method, BASE), loss_and_logits(method, TEXTURE)
    assert not torch.equal(before[1], after[1])
    assert all(map(torch.equal, after, loss_and_logits(built(name), TEXTURE)))


@pytest.mark.parametrize("name", LEARNS)
def test_half_precision_stays_close_and_reaches_all_that_learns(name: str) -> None:
    method = built(name)
    exact = method.predict(batch().pixels, method.prepare(BASE))[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough, loss = loss_and_logits(method, BASE)[1], method.loss(batch(), BASE).total
    assert rough.dtype == loss.dtype == torch.float32
    assert 0 < float((rough - exact).abs().max()) < 0.1 * float(exact.abs().max())
    loss.backward()
    assert all(parameter.grad is not None for parameter in method.trainable().values())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "zeroshot"])
def test_training_follows_a_test_in_inference_mode(name: str) -> None:
    """What is cached must not be an inference tensor, which no gradient can be taken through."""
    method, fresh = built(name), built(name)
    with torch.inference_mode():
        method.prepare(BASE)
    for trained in (method, fresh):
        trained.loss(batch(), BASE).total.backward()
    gradients, expected = ([p.grad for p in one.trainable().values() if p.grad is not None] for one in (method, fresh))
    assert gradients
    assert all(map(torch.equal, gradients, expected))


# --------------------------------------------------------------------------------------------------------- zero-shot


def test_zeroshot_logits_are_a_hundred_cosines() -> None:
    clip, pixels = small_clip(), photos(2)
    method = build_fewshot(clip, ZeroshotConfig(), classes=FAR, generator=torch.Generator())
    images, texts = plain_image(clip, pixels), plain_text(clip, clip.tokens(FAR.prompts()))
    expected = torch.tensor([[100.0 * float((v * t).sum()) for t in texts] for v in images], dtype=torch.float64)
    logits = method.predict(pixels, method.prepare(FAR))[0]
    torch.testing.assert_close(logits, expected)
    terms = method.loss(ShotBatch(pixels, torch.tensor([2, 0])), FAR)
    manual = [-float(torch.log_softmax(row, 0)[label]) for row, label in zip(expected, (2, 0), strict=True)]
    assert float(terms.total) == pytest.approx(sum(manual) / 2)
    assert (method.trains, method.trainable_count(), method.param_groups(), method.weights()) == (False, 0, [], {})
    assert method.predict(pixels, method.prepare(FAR))[1] is None


def test_saved_weights_must_be_those_that_learn() -> None:
    method = build_fewshot(small_clip(), CoopConfig(), classes=FAR, generator=torch.Generator())
    saved = method.weights()
    for other in ({}, {**saved, "other": torch.zeros(1)}, {"context": saved["context"][:3]}):
        with pytest.raises(DataError, match="build it with the recipe"):
            method.load_weights(other)


def test_towers_never_train() -> None:
    method = build_fewshot(small_clip(), CoopConfig(), classes=FAR, generator=torch.Generator()).train()
    assert method.training
    assert not any(module.training for module in method.clip.modules())
