"""CLIP written out plainly, one photo or sentence at a time, with places where tokens and adapters may come in.

The reference of all few-shot methods: it reads the weights of a :class:`ClipModel` by name and shares no code with it.
Edits are plain functions on one row of tokens [L, W]: ``words(x)``, ``entry(x)``, ``before(depth, x)`` and
``after(depth, inputs, x)``.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from vacsr.config import BackboneConfig, HeadConfig, MethodConfig
from vacsr.config.base import method_entry
from vacsr.fewshot.methods import ClassSet, ClipModel, FewshotMethod
from vacsr.model import MatchingModel

CAPTIONS = ["a red dog", "two cats sleep", "a photo of a dog"]
HEADS = 4
SIZE = 32


@dataclass(frozen=True)
class Plain:
    """What a reference puts in; all of it leaves the tokens alone unless set."""

    words: Callable[[Tensor], Tensor] = lambda x: x
    entry: Callable[[Tensor], Tensor] = lambda x: x
    before: Callable[[int, Tensor], Tensor] = lambda depth, x: x
    after: Callable[[int, Tensor, Tensor], Tensor] = lambda depth, inputs, x: x


NOTHING = Plain()


def build_fewshot(
    clip: ClipModel, config: MethodConfig, *, classes: ClassSet, generator: torch.Generator
) -> FewshotMethod:
    """The method that a config describes."""
    method: FewshotMethod = method_entry(config.name, task="fewshot").method(
        clip, config, classes=classes, generator=generator
    )
    return method


def small_clip(*, image_blocks: int = 3, text_blocks: int = 3, dtype: torch.dtype = torch.float64) -> ClipModel:
    """A CLIP of the real architecture with random weights, large enough that everything shows in the output.

    Images of 32×32 in 16 patches of width 32, texts of bytes with width 24, features of 16 dimensions.
    """
    return deepcopy(_small_clip(image_blocks, text_blocks)).to(dtype)


@lru_cache
def _small_clip(image_blocks: int, text_blocks: int) -> ClipModel:
    transformers = pytest.importorskip("transformers")
    sides = {"intermediate_size": 48, "num_attention_heads": HEADS}
    config = transformers.CLIPConfig(
        vision_config={
            **sides, "hidden_size": 32, "num_hidden_layers": image_blocks, "image_size": SIZE, "patch_size": 8,
        },
        text_config={
            **sides, "hidden_size": 24, "num_hidden_layers": text_blocks, "vocab_size": 300,
            "max_position_embeddings": 48, "bos_token_id": 298, "eos_token_id": 299,
        },
        projection_dim=16,
    )  # fmt: skip
    with TemporaryDirectory() as name:
        config.save_pretrained(Path(name))
        clip = ClipModel.from_config(BackboneConfig(spec=f"clip:{name}", weights="random"))
    generator = torch.Generator().manual_seed(0)
    for parameter in clip.parameters():
        draw = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.25 * draw if parameter.ndim > 1 else parameter.data + 0.2 * draw
    return clip


def photos(count: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normalised pixels. [B, 3, 32, 32]"""
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def trained_tiny(folder: Path, method: MethodConfig, **fields: object) -> MatchingModel:
    """A saved model on tiny: towers; fresh blocks are the identity, so their weights are moved."""
    config = BackboneConfig.model_validate(
        {"spec": "tiny:width=32,depth=2,text_depth=2,size=32", "pooling": "cls", "head": HeadConfig(dim=12), **fields}
    )
    model = MatchingModel.build(method, config)
    for network in model.networks:
        network.backbone.fit_words(CAPTIONS)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return MatchingModel.from_pretrained(folder)


def assert_same_gradients(method: FewshotMethod, loss: Tensor, expected: Tensor, *, rtol: float = 1e-6) -> None:
    """Two losses, equal and with the same gradients of all that learns, none of which are zero."""
    torch.testing.assert_close(loss, expected, rtol=1e-8, atol=1e-8)
    learned = method.trainable()
    ours, theirs = (torch.autograd.grad(total, list(learned.values())) for total in (loss, expected))
    for name, one, other in zip(learned, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-7)
        assert float(one.abs().max()) > 0 or name.endswith("k_proj.bias"), name  # a bias on all keys moves no softmax


def plain_image_tokens(clip: ClipModel, pixels: Tensor, plain: Plain = NOTHING) -> Tensor:
    """One photo's tokens after the last block, before the final norm. [3, S, S] -> [L, W]"""
    w = weights_of(clip, "image")
    side = int(len(w["embeddings.position_embedding.weight"]) ** 0.5)
    kernel = w["embeddings.patch_embedding.weight"]
    patch = kernel.shape[-1]
    rows = [w["embeddings.class_embedding"]]
    for y in range(side):
        for x in range(side):
            square = pixels[:, y * patch : (y + 1) * patch, x * patch : (x + 1) * patch]
            rows.append((kernel * square).sum(dim=(1, 2, 3)))
    tokens = plain.entry(torch.stack(rows) + w["embeddings.position_embedding.weight"])
    tokens = layer_norm(w, "pre_layrnorm", tokens)
    return plain_blocks(w, tokens, plain, causal=False)


def plain_image(clip: ClipModel, pixels: Tensor, plain: Plain = NOTHING) -> Tensor:
    """Photos to unit vectors by the class token. [B, 3, S, S] -> [B, d]"""
    first = [plain_image_tokens(clip, photo, plain)[0] for photo in pixels]
    return torch.stack([unit(plain_finish(clip, "image", token)) for token in first])


def plain_text(clip: ClipModel, tokens: Tensor, plain: Plain = NOTHING, *, shift: int = 0) -> Tensor:
    """Rows of ids, −1 after the end, to unit vectors by the end token. [C, L] -> [C, d]"""
    return torch.stack(
        [plain_sentence(clip, [i for i in row.tolist() if i >= 0], plain, shift=shift) for row in tokens]
    )


def plain_sentence(
    clip: ClipModel, ids: Sequence[int], plain: Plain = NOTHING, *, shift: int = 0, raw: bool = False
) -> Tensor:
    """One sentence without padding; its end is ``shift`` positions further on at the last block. -> [d]"""
    w = weights_of(clip, "text")
    words = plain.words(torch.stack([w["embeddings.token_embedding.weight"][number] for number in ids]))
    tokens = plain.entry(words + w["embeddings.position_embedding.weight"][: len(ids)])
    last = plain_blocks(w, tokens, plain, causal=True)
    feature = plain_finish(clip, "text", last[len(ids) - 1 + shift])
    return feature if raw else unit(feature)


def plain_finish(clip: ClipModel, side: str, token: Tensor) -> Tensor:
    """The final norm and projection of one token, not normalised. [W] -> [d]"""
    w = {name: tensor for name, tensor in clip.named_parameters()}
    name = {"image": "post_layernorm", "text": "final_layer_norm"}[side]
    normed = norm(token, w[f"backbone.{side}.model.{name}.weight"], w[f"backbone.{side}.model.{name}.bias"])
    return w[f"backbone.{side}.projection.weight"] @ normed


def plain_blocks(w: dict[str, Tensor], tokens: Tensor, plain: Plain, *, causal: bool) -> Tensor:
    """All blocks with the edits around them. [L, W] -> [L', W]"""
    depth = 0
    while f"encoder.layers.{depth}.layer_norm1.weight" in w:
        inputs = plain.before(depth, tokens)
        tokens = plain.after(depth, inputs, plain_block(w, depth, inputs, causal=causal))
        depth += 1
    return tokens


def plain_block(w: dict[str, Tensor], depth: int, x: Tensor, *, causal: bool) -> Tensor:
    """Attention and perceptron, each on a normed input and added to it. [L, W] -> [L, W]"""
    own = f"encoder.layers.{depth}"
    x = x + attention(w, own, layer_norm(w, f"{own}.layer_norm1", x), causal=causal)
    middle = linear(w, f"{own}.mlp.fc1", layer_norm(w, f"{own}.layer_norm2", x))
    return x + linear(w, f"{own}.mlp.fc2", middle * torch.sigmoid(1.702 * middle))


def attention(w: dict[str, Tensor], block: str, x: Tensor, *, causal: bool) -> Tensor:
    """Head by head and token by token; with ``causal`` a token sees itself and those before it. [L, W] -> [L, W]"""
    q, k, v = (linear(w, f"{block}.self_attn.{name}_proj", x) for name in "qkv")
    width = x.shape[1] // HEADS
    heads = []
    for head in range(HEADS):
        part = slice(head * width, (head + 1) * width)
        rows = []
        for position in range(len(x)):
            seen = position + 1 if causal else len(x)
            score = k[:seen, part] @ q[position, part] / width**0.5
            rows.append(torch.exp(score - score.max()) / torch.exp(score - score.max()).sum() @ v[:seen, part])
        heads.append(torch.stack(rows))
    return linear(w, f"{block}.self_attn.out_proj", torch.cat(heads, dim=1))


def weights_of(clip: ClipModel, side: str) -> dict[str, Tensor]:
    """A tower's parameters by their names in it; gradients flow to them."""
    start = f"backbone.{side}.model."
    return {name.removeprefix(start): p for name, p in clip.named_parameters() if name.startswith(start)}


def linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer_norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return norm(x, w[f"{name}.weight"], w[f"{name}.bias"])


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(dim=-1, keepdim=True) + 1e-5) * weight + bias


def unit(x: Tensor) -> Tensor:
    return x / x.square().sum().sqrt()
