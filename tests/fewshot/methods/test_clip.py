"""CLIP's features against the plain reference, and where they come from."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from vacsr.backbones.edits import TowerEdits
from vacsr.config import BackboneConfig, MethodConfig
from vacsr.config.io import method_config
from vacsr.errors import DataError, UsageError
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.methods.vacsr import VacsrConfig
from vacsr.model import MatchingModel

from .plain_clip import (
    CAPTIONS,
    Plain,
    photos,
    plain_finish,
    plain_image,
    plain_image_tokens,
    plain_text,
    small_clip,
    trained_tiny,
    unit,
)

PROMPTS = ["a cat.", "two dogs", "x"]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_features_are_the_plain_ones() -> None:
    clip, pixels = small_clip(), photos(2)
    assert (clip.dim, clip.image_width, clip.text_width, clip.scale) == (16, 32, 24, 100.0)
    close(clip.image(pixels), plain_image(clip, pixels))
    tokens = clip.image_tokens(pixels)
    close(tokens[1], plain_image_tokens(clip, pixels[1]))
    close(clip.pool_image(tokens[:, 3:])[1], unit(plain_finish(clip, "image", tokens[1, 3])))
    ids = clip.tokens(PROMPTS)
    assert ids.shape == (3, 1 + 8 + 1)
    assert int((ids >= 0).sum()) == sum(map(len, PROMPTS)) + 2 * 3
    close(clip.text(ids), plain_text(clip, ids))


class AllJoints(TowerEdits):
    """Something at every joint, tokens inserted after the first at block 1."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def words(self, tokens: Tensor) -> Tensor:
        return tokens.flip(-1)

    def entry(self, tokens: Tensor) -> Tensor:
        return 0.5 * tokens

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        if depth != 1:
            return tokens
        return torch.cat((tokens[:, :1], self.rows.expand(len(tokens), -1, -1), tokens[:, 1:]), dim=1)

    def after(self, depth: int, inputs: Tensor, tokens: Tensor) -> Tensor:
        return tokens + (depth + 1) * inputs.sin()


def all_joints(rows: Tensor) -> Plain:
    """The same for one row of tokens."""
    return Plain(
        words=lambda x: x.flip(-1),
        entry=lambda x: 0.5 * x,
        before=lambda depth, x: torch.cat((x[:1], rows, x[1:])) if depth == 1 else x,
        after=lambda depth, inputs, x: x + (depth + 1) * inputs.sin(),
    )


def test_edited_features_are_the_plain_ones() -> None:
    clip, pixels, draw = small_clip(), photos(2), torch.Generator().manual_seed(1)
    wide = torch.randn(3, 32, generator=draw, dtype=torch.float64)
    close(clip.image(pixels, edits=AllJoints(wide)), plain_image(clip, pixels, all_joints(wide)))
    narrow, ids = torch.randn(2, 24, generator=draw, dtype=torch.float64), clip.tokens(PROMPTS)
    close(clip.text(ids, edits=AllJoints(narrow)), plain_text(clip, ids, all_joints(narrow), shift=2))


def test_too_long_prompts_are_cut() -> None:
    clip = small_clip()
    ids = clip.tokens(["x" * 100])
    assert ids.shape == (1, 48)
    assert clip.text(ids).shape == (1, 16)


def test_a_trained_run_gives_its_own_embeddings(tmp_path: Path) -> None:
    model = trained_tiny(tmp_path / "model", InfoNCEConfig(scale=20.0))
    clip = ClipModel.from_config(BackboneConfig(start=str(tmp_path)))
    assert (clip.dim, clip.image_width, clip.text_width) == (12, 32, 32)
    assert clip.scale == pytest.approx(20.0, rel=1e-6)
    bytes_ = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.embed_images(bytes_).mean, model.embed_texts(clip.tokens(CAPTIONS)).mean
        torch.testing.assert_close(clip.image(clip.backbone.transform.normalize(bytes_)), expected[0])
        torch.testing.assert_close(clip.text(clip.tokens(CAPTIONS)), expected[1])


@pytest.mark.parametrize(("method", "scale"), [(SigmoidConfig(scale=7.0), 7.0), (VacsrConfig(), 100.0)])
def test_scales_of_other_methods(tmp_path: Path, method: MethodConfig, scale: float) -> None:
    trained_tiny(tmp_path, method)
    assert ClipModel.from_config(BackboneConfig(start=str(tmp_path))).scale == scale


def test_what_cannot_be_started_from(tmp_path: Path) -> None:
    trained_tiny(tmp_path / "gpo", InfoNCEConfig(), pooling="gpo")
    trained_tiny(tmp_path / "cls", InfoNCEConfig())
    trained_tiny(tmp_path / "two", method_config("ncr"))
    features = MatchingModel.build(InfoNCEConfig(), BackboneConfig(), image_dim=4, text_dim=4)
    features.save_pretrained(tmp_path / "features")
    cases = [
        ({"spec": "tiny:"}, UsageError, "backbone.start"),
        ({"start": "nothing"}, DataError, "no such folder"),
        ({"start": "gpo"}, UsageError, "backbone.pooling=cls"),
        ({"start": "cls", "spec": "clip:vit-b32"}, UsageError, "leave backbone.spec out"),
        ({"start": "two"}, UsageError, "one, such as infonce"),
        ({"start": "features"}, UsageError, "clip: or tiny: towers"),
    ]
    for fields, error, action in cases:
        paths = {"start": str(tmp_path / fields["start"])} if "start" in fields else {}
        with pytest.raises(error, match=action):
            ClipModel.from_config(BackboneConfig.model_validate({**fields, **paths}))


def test_random_weights_are_always_the_same_and_leave_the_generator_alone(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sides = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sides, "image_size": 16, "patch_size": 8}
    transformers.CLIPConfig(vision_config=vision, text_config={**sides, "vocab_size": 300}).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    one, other = (ClipModel.from_config(BackboneConfig(spec=f"clip:{tmp_path}", weights="random")) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
