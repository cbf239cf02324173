import pytest
import torch

from vacsr.backbones import TowerBackbone, load_backbone
from vacsr.backbones.tiny import Block, TinyConfig
from vacsr.config import BackboneConfig
from vacsr.errors import UsageError
from vacsr.noise import seeded


def load(spec: str = "tiny:width=32,size=32", **fields: object) -> TowerBackbone:
    with seeded(0):
        backbone = load_backbone(BackboneConfig.model_validate({"spec": spec, **fields}))
    assert isinstance(backbone, TowerBackbone)
    return backbone


def test_a_block_is_attention_and_a_perceptron_written_out() -> None:
    with seeded(0):
        block, x = Block(8, heads=2), torch.randn(1, 5, 8)
        assert torch.equal(block(x), x)  # before training
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    mask = torch.tensor([[[[True, True, True, False, True]]]])
    q, k, v = block.inputs(block.attention_norm(x))[0].split(8, dim=-1)
    mixed = []
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)
        scores = (q[:, part] @ k[:, part].T / 2.0).masked_fill(~mask[0, 0], -torch.inf)
        mixed.append(scores.softmax(-1) @ v[:, part])
    middle = x + block.output(torch.cat(mixed, dim=-1))
    torch.testing.assert_close(block(x, mask), middle + block.mlp(block.mlp_norm(middle)))


def test_fitting_narrows_the_embedding_and_the_seed_alone_decides_it() -> None:
    one, other = load(), load()
    full = one.text.words.weight.detach().clone()
    assert len(full) == TinyConfig().words
    one.fit_words(["a red dog", "a dog"])
    torch.manual_seed(99)
    other.fit_words(["a red dog", "a dog"])
    assert torch.equal(one.text.words.weight, full[:7])
    assert torch.equal(one.text.words.weight, other.text.words.weight)
    assert one.ordinary.tolist() == [4, 5, 6]
    one.fit_words(["entirely other words"])
    assert one.tokenizer.words == ("a", "dog", "red")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tiny:wide=3", "did you mean 'width'"),
        ("tiny:width=a", "tiny.width: .*valid integer"),
        ("tiny:width=33", "multiple of 8"),
        ("tiny:size=40", "size 40"),
        ("tiny:depth=0", "tiny.depth: .*greater than or equal to 1"),
    ],
)
def test_bad_options_are_refused(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(spec)


def test_options_reach_the_towers() -> None:
    backbone = load("tiny:width=48,depth=1,text_depth=3,heads=2,size=48,context=7,words=20", image_output="norm")
    assert (backbone.image_dim, backbone.transform.size, backbone.tokenizer.context) == (48, 48, 7)
    assert [len(tower.blocks()) for tower in (backbone.image, backbone.text)] == [1, 3]
    assert load("tiny:", image_size=96).encode_images(torch.zeros(1, 3, 96, 96).byte()).values.shape[1] == 1 + 36
    with pytest.raises(UsageError, match="no projection"):
        load(image_output="projected")
