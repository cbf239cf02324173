"""VACSR on photos × classes against the retrieval method's own parts and a plain CLIP."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from vacsr.config.base import method_entry
from vacsr.fewshot.methods import ClassSet, ShotBatch
from vacsr.fewshot.methods.base import ZeroshotConfig
from vacsr.fewshot.methods.vacsr import FewshotVacsr, FewshotVacsrConfig, centred_bias, chosen_blocks
from vacsr.methods.base import Embedding
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.noise import PairNoise, seeded
from vacsr.objective import PairBlock

from .plain_clip import build_fewshot, photos, plain_image, plain_text, small_clip

CLASSES = ClassSet(("cat", "night_heron", "red car", "x"), "{} texture.")
OTHERS = ClassSet(("dog", "blue"))
LABELS = torch.tensor([0, 2, 2])
SMALL = {"hidden": 8, "latent": 6, "decoder_hidden": 5}


def built(*, seed: int = 0, **fields: object) -> FewshotVacsr:
    config = FewshotVacsrConfig.model_validate({"adapter": SMALL, "image_blocks": "first 1", **fields})
    clip = small_clip(dtype=torch.float32)
    return build_fewshot(clip, config, classes=CLASSES, generator=torch.Generator().manual_seed(seed))


def trained(**fields: object) -> FewshotVacsr:
    """With a decoder that is no longer at 0."""
    method = built(**fields)
    with seeded(3):
        method.adapter.decoder[-1].reset_parameters()
    return method


def batch(step: int = 1) -> ShotBatch:
    return ShotBatch(photos(3, dtype=torch.float32), LABELS, seed=7, step=step)


def reference(
    method: FewshotVacsr, rows: list[int], cols: list[int], columns: list[str], *, matches: int, step: int = 1
) -> Tensor:
    """Retrieval's loss on plain features, over a block written by hand."""
    v, t = plain_image(method.clip, batch().pixels), plain_text(method.clip, method.clip.tokens(columns))
    retrieval = Vacsr(VacsrConfig(adapter=method.config.adapter, objective=method.config.objective), dim=16)
    retrieval.adapter = method.adapter
    noise = PairNoise.create(seed=7, step=step, rows=3, cols=len(columns))
    block = PairBlock(torch.tensor(rows), torch.tensor(cols), 3, torch.tensor(matches), noise)
    return retrieval.loss(Embedding(v), Embedding(t), block).total


def close(ours: Sequence[Tensor], theirs: Sequence[Tensor], *, error: float) -> None:
    """Against the largest gradient of all: some, such as that of a key's bias, are zero but for rounding."""
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=error, atol=error * largest)


def test_photos_by_classes_with_one_match_each() -> None:
    method = trained()
    loss = method.loss(batch(), CLASSES)
    expected = reference(method, [0, 2, 2], [0, 1, 2, 3], CLASSES.prompts(), matches=3)
    assert set(loss.parts) == {"recon", "kl", "sigma_pos", "sigma_neg", "cosine"}
    torch.testing.assert_close(loss.total, expected, rtol=1e-4, atol=1e-4)
    learned = method.trainable()
    ours = torch.autograd.grad(loss.total, list(learned.values()))
    theirs = torch.autograd.grad(expected, list(learned.values()))
    close(ours, theirs, error=1e-4)
    assert all(float(gradient.abs().max()) > 0 for gradient in ours)


def test_prompts_of_the_batch_match_where_labels_are_equal() -> None:
    method = trained(pairs="batch")
    prompts = CLASSES.prompts()
    loss = method.loss(batch(), CLASSES).total
    expected = reference(method, [0, 2, 2], [0, 2, 2], [prompts[0], prompts[2], prompts[2]], matches=5)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    diagonal = trained(pairs="batch", objective={"positives": "diagonal"})
    loss = diagonal.loss(batch(), CLASSES).total
    strict = reference(diagonal, [0, 1, 2], [0, 1, 2], [prompts[0], prompts[2], prompts[2]], matches=3)
    torch.testing.assert_close(loss, strict, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "fields", [{"pair_chunk": 4}, {"pair_chunk": 9}, {"text_chunk": 3}, {"pairs": "batch", "pair_chunk": 1}]
)
def test_chunks_change_no_number(fields: dict[str, object]) -> None:
    unchunked = {**fields, "pair_chunk": 0, "text_chunk": 0}
    whole, parts = (trained(**settings) for settings in (unchunked, fields))
    losses = [method.loss(batch(), CLASSES) for method in (whole, parts)]
    for name in losses[0].parts:
        torch.testing.assert_close(losses[1].parts[name], losses[0].parts[name], rtol=1e-5, atol=1e-6)
    ours, theirs = (
        torch.autograd.grad(loss.total, list(method.trainable().values()))
        for loss, method in zip(losses, (whole, parts), strict=True)
    )
    close(ours, theirs, error=1e-5)


def test_draws_are_those_of_the_seed_and_the_step() -> None:
    method = trained()
    one, same = method.loss(batch(3), CLASSES).total, method.loss(batch(3), CLASSES).total
    assert torch.equal(one, same)
    assert not torch.equal(one, method.loss(batch(4), CLASSES).total)
    assert not torch.equal(one, method.loss(batch(3)._replace(seed=8), CLASSES).total)


def test_it_starts_at_zero_shot_clip() -> None:
    method = built()
    clip = small_clip(dtype=torch.float32)
    zero = build_fewshot(clip, ZeroshotConfig(), classes=CLASSES, generator=torch.Generator())
    pixels = photos(6, dtype=torch.float32)
    expected = zero.predict(pixels, zero.prepare(CLASSES))[0]
    logits = method.predict(pixels, method.prepare(CLASSES))[0]
    torch.testing.assert_close(logits - logits[:1, :1], expected - expected[:1, :1], rtol=1e-4, atol=1e-3)
    assert torch.equal(logits.argsort(dim=1), expected.argsort(dim=1))
    method.loss(batch(0), CLASSES)  # the first step moves every logit by the same number
    later = method.predict(pixels, method.prepare(CLASSES))[0]
    assert float((later - logits).abs().max()) > 1
    torch.testing.assert_close(later - logits, (later - logits)[:1, :1].expand(6, 4), rtol=1e-4, atol=1e-3)
    drawn = trained()
    assert not torch.allclose(drawn.predict(pixels, drawn.prepare(CLASSES))[0], logits, atol=1e-3)


def test_the_first_step_centres_the_bias_and_no_other_does() -> None:
    method = built()
    assert float(method.adapter.residual.detach()[1]) == method.config.adapter.residual_bias
    method.loss(batch(0), CLASSES)
    p = method.predict(batch().pixels, method.prepare(CLASSES))[0].sigmoid()
    assert float(p.mean()) == pytest.approx(1 / 4, abs=1e-4)
    with torch.no_grad():
        method.adapter.residual[1] = 3.0
    method.loss(batch(1), CLASSES)
    assert float(method.adapter.residual.detach()[1]) == 3.0


def test_the_papers_reading_has_no_cosine() -> None:
    paper = method_entry("vacsr", task="fewshot").presets["paper"]
    method = built(adapter={**SMALL, **paper["adapter"]}, objective=paper["objective"])
    assert method.adapter.residual is None
    assert bool(method.adapter.decoder[-1].weight.ne(0).all())
    assert set(method.loss(batch(0), CLASSES).parts) == {"recon", "kl", "sigma_pos", "sigma_neg"}


def test_test_time_numbers_are_the_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both from one pass of the image tower."""
    method, pixels = trained(), photos(5, dtype=torch.float32)
    method.test_pairs = 4
    prepared, plain, passes = method.prepare(OTHERS), method.clip.image, []
    monkeypatch.setattr(method.clip, "image", lambda x, edits: (passes.append(len(x)), plain(x, edits=edits))[1])
    logits, spread = method.predict(pixels, prepared)
    assert passes == [5]
    assert torch.equal(logits, method.predict(pixels, prepared)[0])
    v, t = plain_image(method.clip, pixels), plain_text(method.clip, method.clip.tokens(OTHERS.prompts()))
    for i in range(5):
        for j in range(2):
            torch.testing.assert_close(logits[i, j], method.adapter.logit(v[i], t[j]).detach(), rtol=1e-4, atol=1e-3)
            sigma = method.adapter.uncertainty(v[i], t[j]).detach()
            torch.testing.assert_close(spread[i, j], sigma, rtol=1e-4, atol=1e-4)


def test_only_the_named_blocks_and_the_adapter_learn() -> None:
    method = built(image_blocks="first 2", text_blocks="last 1")
    towers = {".".join(name.split(".")[2:7]) for name in method.trainable() if name.startswith("clip.")}
    prefix = "model.encoder.layers"
    assert towers == {f"image.{prefix}.0", f"image.{prefix}.1", f"text.{prefix}.2"}
    method.loss(batch(), CLASSES).total.backward()
    moved = {name for name, parameter in method.named_parameters() if parameter.grad is not None}
    assert moved == set(method.trainable())
    groups = method.param_groups()
    assert {(group.name, group.lr_scale, group.decay) for group in groups} == {
        ("adapter", 1.0, True), ("adapter-plain", 1.0, False), ("towers", 0.1, True), ("towers-plain", 0.1, False),
    }  # fmt: skip
    listed = [id(parameter) for group in groups for parameter in group.params]
    assert sorted(listed) == sorted(map(id, method.trainable().values()))
    assert method.trainable_count() == sum(p.numel() for group in groups for p in group.params)
    frozen = built(image_blocks="none", text_blocks="all", tower_lr=0.0)
    assert all(name.startswith("adapter.") for name in frozen.trainable())
    assert {group.name for group in frozen.param_groups()} == {"adapter", "adapter-plain"}


@settings(max_examples=50, deadline=None)
@given(
    scores=st.lists(st.floats(-200, 200), min_size=1, max_size=20),
    share=st.floats(0.001, 0.999),
)
def test_the_centred_bias_meets_the_share(scores: list[float], share: float) -> None:
    values = torch.tensor(scores, dtype=torch.float64)
    bias = centred_bias(values, share=torch.tensor(share, dtype=torch.float64))
    assert float(torch.sigmoid(values + bias).mean()) == pytest.approx(share, abs=1e-6)


def test_blocks_by_name() -> None:
    def chosen(setting: str) -> list[int]:
        return list(chosen_blocks(setting, 4))

    assert (chosen("first 2"), chosen("last 3")) == ([0, 1], [1, 2, 3])
    assert chosen("all") == chosen("first 9") == chosen("last 9") == [0, 1, 2, 3]
    assert chosen("none") == chosen("first 0") == chosen("last 0") == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image_blocks": "middle 2"}, "image_blocks"),
        ({"text_blocks": [0, 1]}, "text_blocks"),
        ({"objective": {"positives": "diagonal"}}, "pairs=batch"),
        ({"pair_chunk": 8, "objective": {"negative_direction": "both"}}, "pair_chunk=0"),
        ({"objective": {"contrastive_weight": 1.0}}, "pairs=batch"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        FewshotVacsrConfig.model_validate(fields)
