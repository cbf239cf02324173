import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from vacsr.adapter import AdapterConfig, VariationalAdapter
from vacsr.errors import NotFoldable, ShapeMismatch

PROPERTY = settings(max_examples=30, deadline=None, derandomize=True)
foldable = st.fixed_dictionaries(
    {
        "components": st.integers(1, 4),
        "hidden": st.sampled_from([0, 1, 7]),
        "latent": st.sampled_from([0, 1, 6]),
        "decoder_hidden": st.sampled_from([0, 1, 5, 16]),
        "input_scale": st.sampled_from(["d", "sqrt_d", "none"]),
        "residual": st.sampled_from(["none", "cosine"]),
    }
)


def build(dim: int = 8, *, seed: int = 0, **fields: Any) -> VariationalAdapter:
    """An adapter with weights unlike its initial ones: unequal α, large log-variances, moved residual."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapter = VariationalAdapter(dim, AdapterConfig(**fields))
        with torch.no_grad():
            for p in adapter.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return adapter


def unit(count: int, dim: int = 8, *, seed: int = 0) -> Tensor:
    return functional.normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)), dim=-1)


def plain_logit(adapter: VariationalAdapter, v: Tensor, t: Tensor) -> float:
    """One pair, written out in float64."""
    c, d = adapter.config, adapter.dim
    w = {name: p.detach().double() for name, p in adapter.named_parameters()}
    pair = v.double() * t.double()
    if c.input_scale == "layernorm":
        pair = functional.layer_norm(pair, (d,), w["input_norm.weight"], w["input_norm.bias"])
    pair = pair * {"d": d, "sqrt_d": math.sqrt(d)}.get(c.input_scale, 1)
    hidden = (w["trunk.weight"] @ pair + w["trunk.bias"]).clamp_min(0)
    if c.trunk_norm:
        hidden = functional.layer_norm(hidden, hidden.shape, w["trunk_norm.weight"], w["trunk_norm.bias"])
    means = (w["mean_heads.weight"] @ hidden + w["mean_heads.bias"]).chunk(c.components)
    mixing = w["mixing_head.weight"] @ hidden + w["mixing_head.bias"] if c.mixing == "head" else w["mixing_logits"]
    alpha = mixing.exp() / mixing.exp().sum()
    z = means[int(alpha.argmax())] if c.decode == "argmax" else sum(a * m for a, m in zip(alpha, means, strict=True))
    out = w["decoder.0.weight"] @ z + w["decoder.0.bias"]
    if c.decoder_hidden:
        out = w["decoder.2.weight"] @ out.clamp_min(0) + w["decoder.2.bias"]
    if c.residual == "cosine":
        out = out + w["residual"][0] * (v.double() @ t.double()) + w["residual"][1]
    return float(out)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"residual": "none"},
        {"components": 1},
        {"components": 3, "hidden": 5, "latent": 6},
        {"decoder_hidden": 0},
        {"input_scale": "none"},
        {"input_scale": "sqrt_d"},
        {"input_scale": "layernorm"},
        {"trunk_norm": True},
        {"mixing": "head", "components": 3},
        {"decode": "argmax", "components": 3},
        {"decode": "argmax", "mixing": "head", "components": 3},
    ],
)
def test_the_logit_is_the_one_written_out(fields: dict[str, Any]) -> None:
    adapter, v, t = build(**fields), unit(4), unit(3, seed=1)
    got = adapter.logit(v.unsqueeze(1), t.unsqueeze(0))
    assert got.shape == (4, 3)
    expected = torch.tensor([[plain_logit(adapter, a, b) for b in t] for a in v])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(adapter.logit(v[:3], t), expected.diagonal(), atol=1e-5, rtol=1e-5)


def test_where_residual_and_mixing_start() -> None:
    torch.testing.assert_close(VariationalAdapter(4).log_alpha(torch.zeros(4)).exp(), torch.full((2,), 0.5))
    adapter = VariationalAdapter(4, AdapterConfig(residual_scale=3.0, residual_bias=-2.0))
    assert adapter.residual_logit(torch.tensor([0.0, 0.5])).tolist() == [-2.0, -0.5]  # type: ignore[union-attr]
    assert adapter.residual.requires_grad
    assert not VariationalAdapter(4, AdapterConfig(residual_learnable=False)).residual.requires_grad
    assert VariationalAdapter(4, AdapterConfig(residual="none")).residual_logit(torch.ones(1)) is None


@pytest.mark.parametrize("variance", ["exp", "sigmoid"])
def test_log_variance_is_clamped_and_read_as_configured(variance: str) -> None:
    adapter = build(log_var_clamp=0.5, variance=variance, latent=4)
    hidden = adapter.features(unit(20), unit(20, seed=1))
    raw = (hidden @ adapter.log_var_heads.weight.T + adapter.log_var_heads.bias).view(20, 2, 4)
    assert raw.abs().max() > 0.5
    clamped = raw.clamp(-0.5, 0.5)
    expected = clamped if variance == "exp" else torch.sigmoid(clamped).log()
    torch.testing.assert_close(adapter.log_var(hidden), expected)
    means = (hidden @ adapter.mean_heads.weight.T + adapter.mean_heads.bias).view(20, 2, 4)
    torch.testing.assert_close(adapter.mean(hidden), means)
    torch.testing.assert_close(adapter.heads(hidden).view(20, 2, 2, 4), torch.stack([means, raw], dim=1))


@pytest.mark.parametrize("variance", ["exp", "sigmoid"])
@pytest.mark.parametrize("kind", ["variance", "std", "exp"])
@pytest.mark.parametrize("mixing", ["global", "head"])
def test_uncertainty_is_the_loop(kind: str, variance: str, mixing: str) -> None:
    adapter = build(uncertainty=kind, variance=variance, mixing=mixing, components=3, latent=4)
    v, t = unit(6), unit(6, seed=1)
    got = adapter.uncertainty(v, t)
    hidden = adapter.features(v, t)
    raw = (hidden @ adapter.log_var_heads.weight.T + adapter.log_var_heads.bias).view(6, 3, 4).double()
    alpha = adapter.log_alpha(hidden).exp().expand(6, 3).detach().double()
    bounded = 1 / (1 + (-raw).exp())
    each = {"variance": bounded, "std": bounded.sqrt(), "exp": bounded if variance == "sigmoid" else raw.exp()}[kind]
    torch.testing.assert_close(got.double(), (alpha * each.mean(dim=-1)).sum(dim=-1), rtol=1e-4, atol=0)
    if kind != "exp":
        assert ((got > 0) & (got < 1)).all()


@pytest.mark.parametrize("dims", [(7, 8), (8, 9), (1, 8)])
def test_a_wrong_dimension_is_refused(dims: tuple[int, int]) -> None:
    with pytest.raises(ShapeMismatch) as caught:
        build().logit(unit(2, dims[0]), unit(2, dims[1]))
    assert caught.value.exit_code == 4
    assert "dimension 8" in str(caught.value)
    assert f"{dims[0]} (image)" in str(caught.value)


def test_autocast_leaves_the_mixture_in_float32() -> None:
    adapter = build()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = adapter.features(unit(2), unit(2, seed=1))
        mixture = adapter.mean(hidden), adapter.log_var(hidden), adapter.log_alpha(hidden)
    assert {x.dtype for x in mixture} == {torch.float32}


@PROPERTY
@given(foldable, st.integers(1, 12), st.integers(0, 5), st.integers(0, 5), st.integers(0, 999))
def test_folding_is_exact(fields: dict[str, Any], dim: int, images: int, texts: int, seed: int) -> None:
    adapter = build(dim, seed=seed, **fields)
    v, t = unit(images, dim, seed=seed), unit(texts, dim, seed=seed + 1)
    expected = adapter.logit(v.unsqueeze(1), t.unsqueeze(0))
    folded = adapter.fold()
    torch.testing.assert_close(folded.logits(v, t), expected, atol=1e-5, rtol=1e-5)
    count = min(images, texts)
    diagonal = folded.aligned_logits(v[:count], t[:count])
    assert diagonal.shape == (count,)
    torch.testing.assert_close(diagonal, expected[:count, :count].diagonal(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [{"mixing": "head"}, {"decode": "argmax"}, {"input_scale": "layernorm"}, {"mixing": "head", "trunk_norm": True}],
)
def test_what_cannot_be_folded_names_every_reason(fields: dict[str, Any]) -> None:
    with pytest.raises(NotFoldable, match=", ".join(f"{name}: {str(value).lower()}" for name, value in fields.items())):
        build(**fields).fold()


def test_a_fold_is_a_snapshot_without_gradient() -> None:
    adapter, v, t = build(components=1, decode="argmax"), unit(3), unit(3, seed=1)
    folded = adapter.fold()
    before = folded.logits(v, t)
    torch.testing.assert_close(before, adapter.logit(v.unsqueeze(1), t.unsqueeze(0)), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        for p in adapter.parameters():
            p.mul_(3)
    assert torch.equal(folded.logits(v, t), before)
    assert not before.requires_grad
