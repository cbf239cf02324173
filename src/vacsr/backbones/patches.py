"""Patch embedding as one matrix product: patches do not overlap, so a convolution library has nothing to add."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class PatchConv(nn.Conv2d):
    """A convolution whose kernel is as large as its stride, with the same parameters and the same result."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, D, H / k, W / k]"""
        batch, channels, height, width = x.shape
        (k, _), rows, columns = self.kernel_size, height // self.kernel_size[0], width // self.kernel_size[1]
        patches = x.view(batch, channels, rows, k, columns, k).permute(0, 2, 4, 1, 3, 5)
        out = functional.linear(patches.reshape(batch, rows * columns, -1), self.weight.flatten(1), self.bias)
        return out.transpose(1, 2).reshape(batch, -1, rows, columns)


def use_products(tower: nn.Module, *, size: int) -> None:
    """Turn the convolutions of a tower for photos of ``size`` into products where they cut them into patches."""
    for module in tower.modules():
        if type(module) is nn.Conv2d and _cuts(module) and size % module.kernel_size[0] == 0:
            module.__class__ = PatchConv


def _cuts(conv: nn.Conv2d) -> bool:
    square = len({*conv.kernel_size, *conv.stride}) == 1 and conv.kernel_size[0] > 1
    return square and conv.padding in ((0, 0), "valid", 0) and conv.groups == 1 and set(conv.dilation) == {1}
