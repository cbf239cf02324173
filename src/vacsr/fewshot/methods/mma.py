"""MMA (Yang et al., CVPR 2024): adapters beside the upper blocks of both towers, joined by a shared middle layer.

In each of the last ``layers`` blocks a tower's stream x becomes block(x) + s·Up(ReLU(Mid(ReLU(Down(LN₁ x))))). LN₁ is
the block's own first norm, Down and Up belong to the tower, Mid belongs to both; blocks are paired from the end.

The gradient is multiplied by 1/s where it enters an adapter and by s where it leaves to the stream: an adapter's
weights learn as if s were 1, and the stream's gradient is the true one.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones.edits import TowerEdits, first_norm
from vacsr.backbones.towers import Tower
from vacsr.config.base import MethodConfig, register
from vacsr.fewshot.methods.base import ClassSet, FewshotMethod, PublishedPlan, drawn_from


class MmaConfig(MethodConfig):
    """Small adapters beside the upper blocks of both towers; their middle layer is shared. Defaults as published."""

    name: Literal["mma"] = "mma"
    layers: Annotated[int, Field(ge=1)] = 8
    """The last so many blocks of each tower: of twelve, from the fifth on. At most all of the shallower tower.

    The published ImageNet run for other domains starts at the ninth of twelve: 4.
    """
    width: Annotated[int, Field(ge=1)] = 32
    """Of the adapters' middle layer."""
    scale: Annotated[float, Field(gt=0)] = 0.001
    """An adapter's output is multiplied by this; the adapter's own gradients are not made smaller by it."""
    template: Annotated[str, Field(pattern=r"^$|\{\}")] = "a photo of a {}."
    """Sentence of a class, the same for all data sets as published; empty: the data set's own."""


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x itself, whose gradient is ``factor`` times what arrives. [...] -> [...]

    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> y = scale_gradient(x, 0.5)
    >>> (3 * y).backward()
    >>> y.item(), x.grad.item()
    (2.0, 1.5)
    """
    result = x.view_as(x)
    if result.requires_grad:
        result.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return result


def kaiming_linear(inputs: int, outputs: int) -> nn.Linear:
    """Weights from N(0, 2/outputs), biases zero."""
    layer = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer


class Adapter(nn.Module):
    """One tower's maps into and out of the narrow middle layer, beside one block."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.down, self.up = kaiming_linear(width, middle), kaiming_linear(middle, width)

    def forward(self, x: Tensor, shared: nn.Module) -> Tensor:
        """[B, L, W] -> [B, L, W]"""
        out: Tensor = self.up(functional.relu(shared(functional.relu(self.down(x)))))
        return out


class AdapterEdits(TowerEdits):
    """Adds the adapters' outputs to those of the last blocks of one tower."""

    def __init__(self, tower: Tower, adapters: nn.ModuleList, shared: nn.ModuleList, *, scale: float) -> None:
        blocks = tower.blocks()
        self.first = len(blocks) - len(adapters)
        self.norms = [first_norm(block) for block in blocks[self.first :]]
        self.adapters, self.shared, self.scale = adapters, shared, scale

    def after(self, depth: int, inputs: Tensor, tokens: Tensor) -> Tensor:
        index = depth - self.first
        if index < 0:
            return tokens
        normed = self.norms[index](scale_gradient(inputs, self.scale))
        added = self.scale * self.adapters[index](normed, self.shared[index])
        return tokens + scale_gradient(added, 1.0 / self.scale)


@register("mma", MmaConfig, presets={"paper": {}})
class Mma(FewshotMethod):
    """Cross-entropy on scaled cosines of the adapted towers."""

    config: MmaConfig
    plan = PublishedPlan(
        {"lr": 0.0015, "batch_size": 16, "epochs": 5, "warmup_epochs": 0},
        train_on={"imagenet": {"batch_size": 128}},
        domain_method={"layers": 4},
        domain_train={"epochs": 1},
    )

    def add_weights(self, classes: ClassSet, generator: torch.Generator) -> None:
        clip, config = self.clip, self.config
        depth = min(config.layers, *clip.depths)
        with drawn_from(generator):
            self.image_adapters = nn.ModuleList(Adapter(clip.image_width, config.width) for _ in range(depth))
            self.text_adapters = nn.ModuleList(Adapter(clip.text_width, config.width) for _ in range(depth))
            self.shared = nn.ModuleList(kaiming_linear(config.width, config.width) for _ in range(depth))

    def image_edits(self) -> AdapterEdits:
        return AdapterEdits(self.clip.backbone.image, self.image_adapters, self.shared, scale=self.config.scale)

    def text_edits(self) -> AdapterEdits:
        return AdapterEdits(self.clip.backbone.text, self.text_adapters, self.shared, scale=self.config.scale)

    def template(self, classes: ClassSet) -> str:
        return self.config.template or classes.template
