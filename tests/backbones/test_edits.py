"""Edits of towers: at the right joints, causal where the tower is, and gone afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vacsr.backbones import TowerBackbone, load_backbone
from vacsr.backbones.edits import TowerEdits, edited, first_norm, word_table
from vacsr.backbones.towers import Tower
from vacsr.config import BackboneConfig
from vacsr.errors import UsageError

WORDS = ["a red dog", "two cats sleep on a mat"]


@pytest.fixture(scope="module")
def tiny() -> TowerBackbone:
    """tiny: with trained-looking weights: fresh blocks are the identity."""
    backbone = load_backbone(BackboneConfig(spec="tiny:width=32,depth=3,text_depth=3,size=32", pooling="cls"))
    assert isinstance(backbone, TowerBackbone)
    backbone.fit_words(WORDS)
    generator = torch.Generator().manual_seed(1)
    for parameter in backbone.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return backbone.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def clip(clip_checkpoint: Path) -> TowerBackbone:
    backbone = load_backbone(BackboneConfig(spec=f"clip:{clip_checkpoint}", pooling="cls"))
    assert isinstance(backbone, TowerBackbone)
    generator = torch.Generator().manual_seed(2)
    for parameter in backbone.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return backbone.eval().requires_grad_(False)


@pytest.fixture(params=["tiny", "clip"])
def backbone(request: pytest.FixtureRequest) -> TowerBackbone:
    found: TowerBackbone = request.getfixturevalue(request.param)
    return found


def pixels() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def hooks(tower: Tower) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in tower.modules())


def text(backbone: TowerBackbone, edits: TowerEdits | None, captions: list[str] = WORDS) -> Tensor:
    with edited(backbone.text, edits):
        return backbone.encode_texts(backbone.tokenize(captions)).values


class Watch(TowerEdits):
    """Notes where it was asked and what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, Tensor]] = []

    def words(self, tokens: Tensor) -> Tensor:
        self.seen.append(("words", -1, tokens))
        return tokens

    def entry(self, tokens: Tensor) -> Tensor:
        self.seen.append(("entry", -1, tokens))
        return tokens

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        self.seen.append(("before", depth, tokens))
        return tokens

    def after(self, depth: int, given: Tensor, tokens: Tensor) -> Tensor:
        self.seen.append(("given", depth, given))
        self.seen.append(("after", depth, tokens))
        return tokens


class Insert(TowerEdits):
    """Two rows after the first token, at one depth."""

    def __init__(self, rows: Tensor, *, depth: int) -> None:
        self.rows, self.depth = rows, depth

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        rows = self.rows.expand(len(tokens), -1, -1)
        return torch.cat((tokens[:, :1], rows, tokens[:, 1:]), dim=1) if depth == self.depth else tokens


class Remove(Insert):
    """The same two rows taken out again after another block."""

    def after(self, depth: int, given: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat((tokens[:, :1], tokens[:, 3:]), dim=1) if depth == self.depth else tokens


def test_edits_that_change_nothing_change_nothing(backbone: TowerBackbone) -> None:
    watch = Watch()
    plain, watched = text(backbone, None), text(backbone, watch)
    assert torch.equal(plain, watched)
    kinds = [(kind, depth) for kind, depth, _ in watch.seen]
    blocks = [(kind, depth) for depth in range(3) for kind in ("before", "given", "after")]
    assert kinds == [("words", -1), ("entry", -1), *blocks]
    seen = {(kind, depth): tokens for kind, depth, tokens in watch.seen}
    ids = backbone.tokenize(WORDS)
    longest = ids[ids.min(dim=1).values >= 0]  # its words are real up to the end
    assert torch.equal(seen["words", -1][-1], word_table(backbone.text).weight[longest[0].long()])
    assert torch.equal(seen["given", 1], seen["after", 0])
    torch.testing.assert_close(backbone.text.finish(seen["after", 2]), plain)
    image = Watch()
    with edited(backbone.image, image):
        backbone.image(pixels())
    assert [(kind, depth) for kind, depth, _ in image.seen] == [("entry", -1), *blocks]
    assert image.seen[0][2].shape[-1] == backbone.image.width


def test_entry_stands_before_the_first_norm_of_clip(clip: TowerBackbone) -> None:
    model = clip.image.model
    assert isinstance(model, nn.Module)
    watch = Watch()
    with edited(clip.image, watch):
        clip.image(pixels())
    entry, first = watch.seen[0][2], watch.seen[1][2]
    torch.testing.assert_close(model.get_submodule("pre_layrnorm")(entry), first)
    torch.testing.assert_close(model.get_submodule("embeddings")(pixels()), entry)


def test_entry_makes_rows_longer_in_both_towers(backbone: TowerBackbone) -> None:
    class Append(TowerEdits):
        def entry(self, tokens: Tensor) -> Tensor:
            return torch.cat((tokens[:, :1], torch.ones_like(tokens[:, :2]), tokens[:, 1:]), dim=1)

    with edited(backbone.image, Append()):
        assert backbone.image(pixels()).shape[1] == backbone.image(pixels()[:1]).shape[1]
        longer = backbone.image(pixels()).shape[1]
    assert longer == backbone.image(pixels()).shape[1] + 2
    assert text(backbone, Append()).shape[1] == text(backbone, None).shape[1] + 2


def test_longer_rows_stay_causal_in_clip(clip: TowerBackbone) -> None:
    width = clip.text.width
    rows = torch.randn(2, width, generator=torch.Generator().manual_seed(4))
    one, other = (text(clip, Insert(rows, depth=1), [f"a red {end}"]) for end in ("dog", "cat"))
    same = 1 + 2 + len("ared")  # start, the two rows and the equal letters
    torch.testing.assert_close(one[:, :same], other[:, :same])
    assert not torch.allclose(one[:, same], other[:, same])
    moved = text(clip, Insert(-rows, depth=1), ["a red dog"])
    assert torch.allclose(moved[:, 0], one[:, 0])  # the start token sees none of them
    assert (moved[:, 3:] - one[:, 3:]).abs().amax(dim=-1).min() > 1e-4  # all later ones do


def test_padding_never_matters_to_longer_rows(backbone: TowerBackbone) -> None:
    rows = torch.randn(2, backbone.text.width, generator=torch.Generator().manual_seed(6))
    for edits in (Insert(rows, depth=0), Insert(rows, depth=1), Remove(rows, depth=1)):
        alone, padded = text(backbone, edits, WORDS[:1]), text(backbone, edits, WORDS)
        torch.testing.assert_close(padded[:1, : alone.shape[1]], alone)


def test_rows_that_shrink_again_fit_the_blocks_after(backbone: TowerBackbone) -> None:
    rows = torch.zeros(2, backbone.text.width)
    assert text(backbone, Remove(rows, depth=0)).shape == text(backbone, None).shape
    assert not torch.allclose(text(backbone, Remove(rows, depth=0)), text(backbone, None))


def test_edited_blocks_can_be_recomputed(backbone: TowerBackbone) -> None:
    rows = torch.randn(2, backbone.text.width, requires_grad=True)
    gradients = []
    for on in (False, True):
        backbone.set_checkpointing(on)  # in evaluation mode, as few-shot methods have their towers
        out = text(backbone, Insert(rows, depth=1))
        gradients.append(torch.autograd.grad(out.square().sum(), rows)[0])
    backbone.set_checkpointing(False)
    assert float(gradients[0].abs().max()) > 0
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("joint", ["words", "entry", "before", "after"])
def test_no_hook_is_left_behind_even_after_an_error(backbone: TowerBackbone, joint: str) -> None:
    def fail(*given: object) -> Tensor:
        raise RuntimeError("on purpose")

    edits = TowerEdits()
    setattr(edits, joint, fail)
    before, plain = hooks(backbone.text), text(backbone, None)
    with pytest.raises(RuntimeError, match="on purpose"):
        text(backbone, edits)
    assert hooks(backbone.text) == before
    assert torch.equal(text(backbone, None), plain)
    with edited(backbone.text, TowerEdits()):
        assert hooks(backbone.text) > before
    assert hooks(backbone.text) == before


def test_first_norms(tiny: TowerBackbone, clip: TowerBackbone) -> None:
    assert first_norm(tiny.image.blocks()[1]) is tiny.image.get_submodule("layers.1.attention_norm")
    assert first_norm(clip.text.blocks()[0]) is clip.text.get_submodule("model.encoder.layers.0.layer_norm1")
    with pytest.raises(UsageError, match="clip: or tiny:"):
        first_norm(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="text tower"):
        word_table(tiny.image)


def test_other_towers_are_refused_and_left_alone() -> None:
    class Other(Tower):
        def blocks(self) -> list[nn.Module]:
            return [nn.Identity()]

    with pytest.raises(UsageError, match="cannot be given prompts"), edited(Other(), TowerEdits()):
        pass
