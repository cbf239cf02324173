"""CLIPood against a plain CLIP, its margin in words, and its mean of weights in closed form."""

from pathlib import Path

import pytest
import torch
from scipy.stats import beta as beta_distribution
from torch import Tensor

from vacsr.config import BackboneConfig
from vacsr.fewshot.methods.base import ClassSet, ShotBatch
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.clipood import Clipood, ClipoodConfig, beta_weight
from vacsr.methods.infonce import InfoNCEConfig

from .plain_clip import assert_same_gradients, photos, plain_image, plain_text, small_clip, trained_tiny

CLASSES = ClassSet(("night_heron", "cat", "plum"), "{} texture.")
OTHERS = ClassSet(("oak", "old_oak"))
LABELS = torch.tensor([2, 0])


def clipood(clip: ClipModel | None = None, **fields: float) -> Clipood:
    config = ClipoodConfig.model_validate(fields)
    return Clipood(clip or small_clip(), config, classes=CLASSES, generator=torch.Generator())


def trained(method: Clipood, steps: int) -> list[list[Tensor]]:
    """A few large steps; the weights before the first and after each."""
    optimizer = torch.optim.SGD(list(method.trainable().values()), lr=0.01)
    history = [[p.detach().clone() for p in method.trainable().values()]]
    for step in range(steps):
        optimizer.zero_grad()
        method.loss(ShotBatch(photos(2, seed=step), LABELS, step=step), CLASSES).total.backward()
        optimizer.step()
        method.after_step(step, steps)
        history.append([p.detach().clone() for p in method.trainable().values()])
    return history


def test_starts_as_zero_shot_clip() -> None:
    method, pixels = clipood(), photos(2)
    for classes in (CLASSES, OTHERS):
        rows = method.clip.tokens(classes.prompts())
        plain = 100.0 * plain_image(method.clip, pixels) @ plain_text(method.clip, rows).T
        torch.testing.assert_close(method.predict(pixels, method.prepare(classes))[0], plain, rtol=1e-8, atol=1e-7)


def test_loss_and_gradients_are_the_plain_ones() -> None:
    method, pixels = clipood(margin=0.4), photos(2)
    clip = method.clip
    terms = method.loss(ShotBatch(pixels, LABELS), CLASSES)
    images, texts = plain_image(clip, pixels), plain_text(clip, clip.tokens(CLASSES.prompts())).detach()
    plain = torch.zeros((), dtype=torch.float64)
    for feature, label in zip(images, LABELS.tolist(), strict=True):
        logits = torch.stack([100.0 * ((feature - 0.4 * texts[label]) @ text) for text in texts])
        plain = plain - torch.log_softmax(logits, dim=0)[label] / 2
    assert_same_gradients(method, terms.total, plain, rtol=1e-5)


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("steps", [1, 7, 5000])
def test_weights_are_the_beta_density(beta: float, steps: int) -> None:
    numbers = sorted({0, 1, steps // 3, steps - 1, steps})
    ours = torch.tensor([beta_weight(i, steps, beta=beta) for i in numbers], dtype=torch.float64)
    density = beta_distribution(beta, beta).pdf([(i + 0.5) / (steps + 1) for i in numbers])
    theirs = torch.tensor(density, dtype=torch.float64)
    torch.testing.assert_close(ours / ours.sum(), theirs / theirs.sum(), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("beta", "tiny"), [(0.1, False), (0.5, False), (1.0, True)])
def test_training_ends_at_the_weighted_mean(tmp_path: Path, beta: float, tiny: bool) -> None:
    """The image tower's and, of a trained start, its head's; the mean stays apart until the end."""
    if tiny:
        trained_tiny(tmp_path, InfoNCEConfig())
    clip = ClipModel.from_config(BackboneConfig(start=str(tmp_path))).double() if tiny else None
    method = clipood(clip, beta=beta)
    assert any(name.startswith("clip.image_map.") for name in method.trainable()) == tiny
    history = trained(method, 6)
    assert not torch.allclose(history[0][0], history[6][0], atol=1e-4)
    weight = [float(beta_distribution(beta, beta).pdf((i + 0.5) / 7)) for i in range(7)]
    texts = method.prepare(OTHERS)
    last = method.predict(photos(1), texts)[0]
    assert all(map(torch.equal, method.trainable().values(), history[-1]))
    method.finish()
    for index, mean in enumerate(method.trainable().values()):
        wanted = sum(w * past[index] for w, past in zip(weight, history, strict=True)) / sum(weight)
        torch.testing.assert_close(mean.detach(), wanted, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(method.predict(photos(1), texts)[0], last)


def test_texts_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    method, calls = clipood(), []
    text = method.clip.text
    monkeypatch.setattr(method.clip, "text", lambda *args: (calls.append(1), text(*args))[1])
    trained(method, 3)
    assert len(calls) == 1
    method.prepare(OTHERS)
    assert len(calls) == 2
