from __future__ import annotations

import pytest
import torch
from torch import nn

from vacsr.backbones.patches import PatchConv, use_products


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_the_convolution_in_value_and_gradient(bias: bool) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 10, 4, stride=4, bias=bias).double()
    product = nn.Conv2d(3, 10, 4, stride=4, bias=bias).double()
    product.load_state_dict(conv.state_dict())
    use_products(nn.Sequential(product), size=12)
    assert type(product) is PatchConv
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    outs, grads = [], []
    for module in (conv, product):
        given = x.clone().requires_grad_()
        out = module(given)
        out.square().sum().backward()
        outs.append(out.detach())
        grads.append([given.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close(grads[1], grads[0])


def test_other_convolutions_stay() -> None:
    kinds = [
        nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 4, stride=2), nn.Conv2d(3, 4, 1),
        nn.Conv2d(4, 4, 2, stride=2, groups=2), nn.Conv2d(3, 4, (2, 4), stride=(2, 4)),
        nn.Conv2d(3, 4, 5, stride=5),
    ]  # fmt: skip
    use_products(nn.ModuleList(kinds), size=12)
    assert {type(kind) for kind in kinds} == {nn.Conv2d}
