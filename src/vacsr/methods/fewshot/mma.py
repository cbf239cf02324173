"""MMA (Yang et al., CVPR 2024): adapters beside the upper blocks of both towers, joined by a shared middle layer.

In each of the last ``layers`` blocks a tower's stream x becomes block(x) + s·Up(ReLU(Mid(ReLU(Down(LN₁ x))))). LN₁ is
the block's own first norm, Down and Up belong to the tower, Mid belongs to both. Blocks are paired from the end, so
towers of different depth share too. All three maps have biases; only they learn.

s = 0.001 would make the adapters' gradients that small as well. So the gradient is multiplied by 1/s where it enters an
adapter and by s where it leaves to the stream: an adapter's weights learn as if s were 1, and the stream's gradient is
the true one.

At the start Up is not zero, so predictions are near zero-shot CLIP's but not equal to them; with Up at zero they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones.edits import TowerEdits, first_norm
from vacsr.config.fewshot.adapters import MmaConfig
from vacsr.methods.fewshot.base import ClassSet, FewshotMethod, ShotBatch, cross_entropy, drawn_from, scaled_cosines
from vacsr.methods.fewshot.clip import ClipModel
from vacsr.objective import LossTerms


class _ScaledGradient(torch.autograd.Function):
    """Forward identity, backward times a number."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.factor = inputs[1]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None  # type: ignore[attr-defined]


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x itself, whose gradient is ``factor`` times what arrives. [...] -> [...]

    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> y = scale_gradient(x, 0.5)
    >>> (3 * y).backward()
    >>> y.item(), x.grad.item()
    (2.0, 1.5)
    """
    result: Tensor = _ScaledGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return result


def kaiming_linear(inputs: int, outputs: int) -> nn.Linear:
    """Weights from N(0, 2/outputs), biases zero."""
    layer = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer


class Adapter(nn.Module):
    """One tower's way into and out of the narrow middle, beside one block."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.down, self.up = kaiming_linear(width, middle), kaiming_linear(middle, width)

    def forward(self, x: Tensor, shared: nn.Module) -> Tensor:
        """[B, L, W] -> [B, L, W]"""
        out: Tensor = self.up(functional.relu(shared(functional.relu(self.down(x)))))
        return out


class AdapterEdits(TowerEdits):
    """Adds what the adapters give to what the last blocks of one tower give."""

    def __init__(
        self, blocks: Sequence[nn.Module], adapters: nn.ModuleList, *, shared: nn.ModuleList, scale: float
    ) -> None:
        self.first = len(blocks) - len(adapters)
        self.norms = [first_norm(block) for block in blocks[self.first :]]
        self.adapters, self.shared, self.scale = adapters, shared, scale

    def after(self, depth: int, given: Tensor, tokens: Tensor) -> Tensor:
        """[B, L, W], [B, L, W] -> [B, L, W]"""
        place = depth - self.first
        if place < 0:
            return tokens
        normed = self.norms[place](scale_gradient(given, self.scale))
        added = self.scale * self.adapters[place](normed, self.shared[place])
        return tokens + scale_gradient(added, 1.0 / self.scale)


class Mma(FewshotMethod):
    """Cross-entropy on scaled cosines of the adapted towers."""

    def __init__(self, clip: ClipModel, config: MmaConfig, *, classes: ClassSet, generator: torch.Generator) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        self.config = config
        image, text = clip.backbone.image.blocks(), clip.backbone.text.blocks()
        depth = min(config.layers, len(image), len(text))
        with drawn_from(generator):
            self.image_adapters = nn.ModuleList(Adapter(clip.image_width, config.width) for _ in range(depth))
            self.text_adapters = nn.ModuleList(Adapter(clip.text_width, config.width) for _ in range(depth))
            self.shared = nn.ModuleList(kaiming_linear(config.width, config.width) for _ in range(depth))
        self.image_edits = AdapterEdits(image, self.image_adapters, shared=self.shared, scale=config.scale)
        self.text_edits = AdapterEdits(text, self.text_adapters, shared=self.shared, scale=config.scale)

    def texts(self, classes: ClassSet) -> Tensor:
        """Unit features of the classes' sentences. -> [C, d]"""
        return self.clip.text(self.sentence_ids(classes), edits=self.text_edits)

    def tokenize(self, classes: ClassSet) -> Tensor:
        """With the method's own template where it has one. -> [C, L]"""
        return super().tokenize(classes._replace(template=self.config.template or classes.template))

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """Of one step."""
        return cross_entropy(self._logits(batch.pixels, self.texts(classes)), batch.labels)

    @torch.no_grad()
    def prepared(self, classes: ClassSet) -> Tensor:
        """[C, d]"""
        return self.texts(classes)

    @torch.no_grad()
    def logits(self, pixels: Tensor, prepared: Tensor) -> Tensor:
        """[B, 3, S, S], [C, d] -> [B, C]"""
        return self._logits(pixels, prepared)

    def _logits(self, pixels: Tensor, prepared: Tensor) -> Tensor:
        return scaled_cosines(self.clip.image(pixels, edits=self.image_edits), prepared, scale=self.clip.scale)
