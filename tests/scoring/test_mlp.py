"""Scores of every pair by a network, against the network itself in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck

import vacsr
from vacsr.errors import ShapeMismatch
from vacsr.scoring import pair_scores
from vacsr.scoring.mlp import folded_mlp

from ..interpreter import interpreted, on_gpu, run_interpreted

WIDTHS = {"one layer": (1,), "two": (11, 1), "three": (11, 5, 1), "four": (7, 6, 5, 1)}
UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def network(dim: int, *widths: int, bias: bool = True, seed: int = 0) -> nn.Sequential:
    """Linear layers of these widths with ReLU between, and weights that keep numbers near 1."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in zip((dim, *widths), widths, strict=False):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.ReLU()]
    made = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape) / max(1, parameter.shape[-1]) ** 0.5)
    return made


def sides(rows: int, cols: int, dim: int, *, device: str = "cpu") -> tuple[Tensor, Tensor]:
    x = torch.randn(rows + cols, dim, generator=torch.Generator().manual_seed(rows * 100 + cols))
    return x[:rows].to(device).requires_grad_(), x[rows:].to(device).requires_grad_()


def exact(v: Tensor, t: Tensor, mlp: nn.Sequential, *, absolute: bool = False) -> Tensor:
    """In float64; or as if every number were positive and every ReLU open, to which rounding is proportional."""
    x = v.double()[:, None] * t.double()[None]
    x = x.abs() if absolute else x
    for layer in mlp:
        if isinstance(layer, nn.Linear):
            parts = (p.double().abs() if absolute else p.double() for p in layer.parameters())
            x = nn.functional.linear(x, *parts)
        else:
            x = x if absolute else layer(x)
    return x[..., 0]


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize(("rows", "cols"), [(5, 7), (7, 2), (1, 9), (9, 1), (1, 1)])
def test_the_gradient_of_every_input_and_weight(rows: int, cols: int, widths: tuple[int, ...]) -> None:
    """Strips of one, two and all rows; the last may be shorter."""
    mlp, (v, t) = network(6, *widths).double(), sides(rows, cols, 6)
    inputs = v.detach().double().requires_grad_(), t.detach().double().requires_grad_()
    for strip in (1, 2 * cols, 1 << 15):
        scores = pair_scores(*inputs, mlp, strip=strip)
        torch.testing.assert_close(scores, exact(*inputs, mlp), rtol=1e-12, atol=1e-12)
        learned = [*inputs, *mlp.parameters()]
        push = torch.randn(rows, cols, dtype=torch.float64)
        ours, theirs = (torch.autograd.grad(x, learned, push) for x in (scores, exact(*inputs, mlp)))
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_numerical_gradients() -> None:
    mlp = network(4, 6, 3, 1).double()
    v, t = (x.detach().double().requires_grad_() for x in sides(3, 5, 4))
    assert gradcheck(lambda v, t, *_: pair_scores(v, t, mlp, strip=5), (v, t, *mlp.parameters()))


@pytest.mark.parametrize(("rows", "cols"), [(0, 4), (3, 0), (0, 0)])
def test_no_pairs(rows: int, cols: int) -> None:
    mlp, (v, t) = network(6, 8, 1), sides(rows, cols, 6)
    scores = pair_scores(v, t, mlp)
    assert scores.shape == (rows, cols)
    scores.sum().backward()
    for x in (v, t, *mlp.parameters()):
        assert x.grad is not None
        assert not x.grad.any()


def test_what_is_frozen_gets_no_gradient() -> None:
    mlp, (v, t) = network(6, 8, 1).requires_grad_(False), sides(3, 5, 6)
    pair_scores(v, t.detach(), mlp).sum().backward()
    assert v.grad is not None
    assert all(p.grad is None for p in mlp.parameters())
    assert not pair_scores(v.detach(), t.detach(), mlp).requires_grad


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_without_half_weights(autocast: bool) -> None:
    mlp, (v, t) = network(16, 24, 1), sides(5, 9, 16)
    half = [x.detach().bfloat16().requires_grad_() for x in (v, t)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = pair_scores(v, t, mlp) if autocast else pair_scores(*half, mlp)
    assert scores.dtype == torch.float32
    bound = 6 * UNITS[torch.bfloat16] * exact(v, t, mlp, absolute=True)
    assert bool(((scores - exact(v, t, mlp)).abs() <= bound).all())
    inputs = [*((v, t) if autocast else half), *mlp.parameters()]
    ours = torch.autograd.grad(scores.sum(), inputs)
    theirs = torch.autograd.grad(exact(v, t, mlp).sum(), [v, t, *mlp.parameters()])
    for x, one, other in zip(inputs, ours, theirs, strict=True):
        assert one.dtype == x.dtype
        assert float((one - other).norm() / other.norm()) < 0.05


def test_any_module_will_do_and_what_does_not_fit_says_so() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gate = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * self.gate(x).sigmoid()).sum(dim=-1, keepdim=True)

    gated, (v, t) = Gated(), sides(3, 5, 6)
    scores = vacsr.pair_scores(v, t, gated, strip=5)
    torch.testing.assert_close(scores, gated(v[:, None] * t)[..., 0])
    for wrong in (lambda: pair_scores(v, t[:, :5], gated), lambda: pair_scores(v, t, nn.Linear(6, 2))):
        with pytest.raises(ShapeMismatch):
            wrong()


class _Changed(nn.Linear):
    """A subclass may compute anything."""


def test_which_networks_the_kernel_takes() -> None:
    assert folded_mlp(network(6, 8, 1)) is not None
    assert folded_mlp(network(6, 8, 4, 1, bias=False)) is not None
    others = [
        nn.Linear(6, 1), network(6, 1), network(6, 8, 2), network(6, 8, 4, 3, 1),
        nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1)),
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid()),
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), nn.Sequential(),
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), _Changed(8, 1)),
    ]  # fmt: skip
    hooked = network(6, 8, 1)
    hooked[0].register_forward_hook(lambda layer, inputs, output: output + 1.0)
    others.append(hooked)
    assert [folded_mlp(mlp) for mlp in others] == [None] * len(others)


def check_kernel(
    rows: int, cols: int, dim: int, widths: tuple[int, ...], *, bias: bool, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Four roundings of a score: scaled weights, text, hidden unit, small matrix; the inputs are exact in ``dtype``."""
    mlp = network(dim, *widths, bias=bias).to(device)
    v, t = (x.detach().to(dtype).requires_grad_() for x in sides(rows, cols, dim, device=device))
    scores = pair_scores(v, t, mlp)
    assert (scores.shape, scores.dtype) == ((rows, cols), torch.float32)
    bound = 4.2 * UNITS[dtype] * exact(v, t, mlp, absolute=True) + 1e-4
    assert bool(((scores - exact(v, t, mlp)).abs() <= bound).all())
    learned = [v, t, *mlp.parameters()]
    ours = torch.autograd.grad(scores.square().sum(), learned)
    theirs = torch.autograd.grad(exact(v, t, mlp).square().sum(), learned)
    for one, other in zip(ours, theirs, strict=True):
        scale = float(other.norm()) + float(exact(v, t, mlp, absolute=True).square().sum()) ** 0.5
        assert float((one - other).norm()) <= 40 * UNITS[dtype] * scale


@pytest.mark.slow
def test_the_kernel_in_the_interpreter() -> None:
    run_interpreted("scoring/test_mlp.py")


@interpreted
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(1, 5), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.sampled_from([0, 3, 16, 20]),
    st.booleans(), st.sampled_from([torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_interpreted_scores_and_gradients_of_any_shape(
    rows: int, cols: int, dim: int, hidden: int, small: int, bias: bool, dtype: torch.dtype
) -> None:
    check_kernel(rows, cols, dim, (hidden, small, 1) if small else (hidden, 1), bias=bias, dtype=dtype)


@interpreted
@pytest.mark.parametrize(("rows", "cols"), [(0, 4), (3, 0)])
def test_interpreted_no_pairs(rows: int, cols: int) -> None:
    mlp, (v, t) = network(6, 8, 1), (x.detach().half().requires_grad_() for x in sides(rows, cols, 6))
    scores = pair_scores(v, t, mlp)
    assert scores.shape == (rows, cols)
    scores.sum().backward()
    assert not v.grad.any()


@on_gpu
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("widths", [(128, 1), (200, 16, 1)])
@pytest.mark.parametrize(("rows", "cols"), [(70, 130), (1, 33), (40, 1)])
def test_scores_and_gradients_on_a_gpu(rows: int, cols: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    check_kernel(rows, cols, 96, widths, bias=True, dtype=dtype, device="cuda")
