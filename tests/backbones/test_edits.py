"""Edits of towers: at the right joints, causal where the tower is, and gone afterwards."""

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


@pytest.fixture(scope="module", params=["tiny", "clip"])
def backbone(request: pytest.FixtureRequest, clip_checkpoint: Path) -> TowerBackbone:
    """With trained-looking weights: fresh blocks of tiny: are the identity."""
    tiny = "tiny:width=32,depth=3,text_depth=3,size=32"
    spec = tiny if request.param == "tiny" else f"clip:{clip_checkpoint}"
    backbone = load_backbone(BackboneConfig(spec=spec, pooling="cls"))
    assert isinstance(backbone, TowerBackbone)
    backbone.fit_words(WORDS)
    generator = torch.Generator().manual_seed(1)
    for parameter in backbone.parameters():
        parameter.data += 0.15 * torch.randn(parameter.shape, generator=generator)
    return backbone.eval().requires_grad_(False)


def pixels() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def rows_for(backbone: TowerBackbone, seed: int = 4) -> Tensor:
    return torch.randn(2, backbone.text.width, generator=torch.Generator().manual_seed(seed))


def hooks(tower: Tower) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in tower.modules())


def text(backbone: TowerBackbone, edits: TowerEdits | None, captions: list[str] = WORDS) -> Tensor:
    with edited(backbone.text, edits):
        return backbone.encode_texts(backbone.tokenize(captions)).values


class Watch(TowerEdits):
    """Notes where it was asked and what it saw."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], Tensor] = {}

    def _note(self, joint: str, depth: int, tokens: Tensor) -> Tensor:
        assert (joint, depth) not in self.seen
        self.seen[joint, depth] = tokens
        return tokens

    def words(self, tokens: Tensor) -> Tensor:
        return self._note("words", -1, tokens)

    def entry(self, tokens: Tensor) -> Tensor:
        return self._note("entry", -1, tokens)

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        return self._note("before", depth, tokens)

    def after(self, depth: int, inputs: Tensor, tokens: Tensor) -> Tensor:
        self._note("inputs", depth, inputs)
        return self._note("after", depth, tokens)


class Insert(TowerEdits):
    """Two rows after the first token, at one depth; −1 for the entry."""

    def __init__(self, rows: Tensor, *, depth: int) -> None:
        self.rows, self.depth = rows, depth

    def entry(self, tokens: Tensor) -> Tensor:
        return self.before(-1, tokens)

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        rows = self.rows.expand(len(tokens), -1, -1)
        return torch.cat((tokens[:, :1], rows, tokens[:, 1:]), dim=1) if depth == self.depth else tokens


class Remove(Insert):
    """The same two rows taken out again after the block."""

    def after(self, depth: int, inputs: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat((tokens[:, :1], tokens[:, 3:]), dim=1) if depth == self.depth else tokens


def test_edits_that_change_nothing_change_nothing(backbone: TowerBackbone) -> None:
    words, image = Watch(), Watch()
    plain, watched = text(backbone, None), text(backbone, words)
    assert torch.equal(plain, watched)
    blocks = [(joint, depth) for depth in range(3) for joint in ("before", "inputs", "after")]
    assert list(words.seen) == [("words", -1), ("entry", -1), *blocks]
    ids = backbone.tokenize(WORDS)
    longest = ids[ids.min(dim=1).values >= 0]  # its words are real up to the end
    assert torch.equal(words.seen["words", -1][-1], word_table(backbone.text).weight[longest[0].long()])
    assert torch.equal(words.seen["inputs", 1], words.seen["after", 0])
    torch.testing.assert_close(backbone.text.finish(words.seen["after", 2]), plain)
    with edited(backbone.image, image):
        backbone.image(pixels())
    assert list(image.seen) == [("entry", -1), *blocks]
    entry, first = image.seen["entry", -1], image.seen["before", 0]
    model = backbone.image.model if hasattr(backbone.image, "model") else None
    if isinstance(model, nn.Module):  # CLIP has a norm between the embeddings and the first block
        torch.testing.assert_close(model.get_submodule("embeddings")(pixels()), entry)
        entry = model.get_submodule("pre_layrnorm")(entry)
    torch.testing.assert_close(entry, first)


@pytest.mark.parametrize("depth", [-1, 0, 2])
def test_rows_grow_and_shrink_in_both_towers(backbone: TowerBackbone, depth: int) -> None:
    rows = torch.zeros(2, backbone.text.width)
    plain, image = text(backbone, None), backbone.image(pixels())
    with edited(backbone.image, Insert(torch.ones(2, backbone.image.width), depth=depth)):
        assert backbone.image(pixels()).shape[1] == image.shape[1] + 2
    assert text(backbone, Insert(rows, depth=depth)).shape[1] == plain.shape[1] + 2
    if depth >= 0:
        again = text(backbone, Remove(rows, depth=depth))
        assert again.shape == plain.shape
        assert not torch.allclose(again, plain)


def test_padding_never_matters_to_longer_rows(backbone: TowerBackbone) -> None:
    rows = rows_for(backbone)
    for edits in (Insert(rows, depth=0), Insert(rows, depth=1), Remove(rows, depth=1)):
        alone, padded = text(backbone, edits, WORDS[:1]), text(backbone, edits, WORDS)
        torch.testing.assert_close(padded[:1, : alone.shape[1]], alone)


@pytest.mark.parametrize("backbone", ["clip"], indirect=True)
def test_longer_rows_stay_causal_in_clip(backbone: TowerBackbone) -> None:
    rows = rows_for(backbone)
    one, other = (text(backbone, Insert(rows, depth=1), [f"a red {end}"]) for end in ("dog", "cat"))
    same = 1 + 2 + len("ared")  # start, the two rows and the equal letters
    torch.testing.assert_close(one[:, :same], other[:, :same])
    assert not torch.allclose(one[:, same], other[:, same])
    moved = text(backbone, Insert(-rows, depth=1), ["a red dog"])
    assert torch.allclose(moved[:, 0], one[:, 0])  # the start token sees none of them
    assert (moved[:, 3:] - one[:, 3:]).abs().amax(dim=-1).min() > 1e-4  # all later ones do


def test_edited_blocks_can_be_recomputed(backbone: TowerBackbone) -> None:
    rows = rows_for(backbone).requires_grad_()
    gradients = []
    for on in (False, True):
        backbone.set_checkpointing(on)  # in evaluation mode, as few-shot methods have their towers
        gradients.append(torch.autograd.grad(text(backbone, Insert(rows, depth=1)).square().sum(), rows)[0])
    backbone.set_checkpointing(False)
    assert float(gradients[0].abs().max()) > 0
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("joint", ["words", "entry", "before", "after"])
def test_no_hook_is_left_behind_even_after_an_error(backbone: TowerBackbone, joint: str) -> None:
    def fail(*_: object) -> Tensor:
        raise RuntimeError("on purpose")

    edits = TowerEdits()
    setattr(edits, joint, fail)
    before, plain = hooks(backbone.text), text(backbone, None)
    with pytest.raises(RuntimeError, match="on purpose"):
        text(backbone, edits)
    assert hooks(backbone.text) == before
    assert torch.equal(text(backbone, None), plain)


def test_first_norms_and_other_towers(backbone: TowerBackbone) -> None:
    tiny = not hasattr(backbone.text, "model")
    name = "layers.1.attention_norm" if tiny else "model.encoder.layers.1.layer_norm1"
    assert first_norm(backbone.text.blocks()[1]) is backbone.text.get_submodule(name)
    with pytest.raises(UsageError, match="clip: or tiny:"):
        first_norm(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="clip: or tiny:"), edited(Tower(), TowerEdits()):
        pass
