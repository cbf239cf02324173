"""Random models, adapters and vectors to score, and their scores written out in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.adapter import AdapterConfig, VariationalAdapter
from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.model import MatchingModel
from vacsr.provenance import UNKNOWN, Provenance

IMAGES, TEXTS = 150, 90  # three blocks of rows


def inputs(images: int = IMAGES, texts: int = TEXTS) -> tuple[Tensor, Tensor]:
    """Raw features of a :func:`model`."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(images, 6, generator=generator) + 2, torch.randn(texts, 4, generator=generator)


def model(raw: str | dict[str, Any], *, provenance: Provenance = UNKNOWN) -> MatchingModel:
    """On features, with weights unlike the initial ones, so that the method's order is far from the cosine's."""
    config = BackboneConfig(head=HeadConfig(dim=8))
    made = MatchingModel.build(method_config(raw), config, image_dim=6, text_dim=4, provenance=provenance, seed=1)
    images, texts = inputs()
    made.backbone.fit(SimpleNamespace(images=images, texts=texts))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.4 * torch.randn(p.shape, generator=generator))
    return made


def method(dim: int, *, hidden: int = 0, width: int = 16, residual: bool = True, device: str = "cpu") -> Vacsr:
    """Random weights, none of them zero."""
    config = AdapterConfig(hidden=hidden, decoder_hidden=width, residual="cosine" if residual else "none")
    made = Vacsr(VacsrConfig(adapter=config), dim=dim).eval()
    generator = torch.Generator().manual_seed(dim + hidden + width)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(1, parameter.shape[-1]) ** 0.5)
    return made.to(device)


def units(count: int, dim: int, *, seed: int, device: str = "cpu") -> Tensor:
    rows = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    return functional.normalize(rows, dim=1).to(device)


def exact(adapter: VariationalAdapter, v: Tensor, t: Tensor, *, absolute: bool = False) -> Tensor:
    """The test-time logit in float64, unfolded; or what it would be if every number in it were positive and every ReLU
    open, to which rounding errors are proportional."""
    p = {name: x.detach().double() for name, x in adapter.state_dict().items()}
    v, t = v.double(), t.double()
    relu = torch.relu
    if absolute:
        p = {name: x if name == "mixing_logits" else x.abs() for name, x in p.items()}
        v, t = v.abs(), t.abs()
    hidden = relu((v[:, None] * t[None]) * adapter.scale @ p["trunk.weight"].T + p["trunk.bias"])
    means = hidden @ p["mean_heads.weight"].T + p["mean_heads.bias"]
    alpha = torch.softmax(p["mixing_logits"], dim=0)
    z = sum(a * part for a, part in zip(alpha, means.chunk(len(alpha), dim=-1), strict=True))
    logit = z @ p["decoder.0.weight"].T + p["decoder.0.bias"]
    if "decoder.2.weight" in p:
        logit = relu(logit) @ p["decoder.2.weight"].T + p["decoder.2.bias"]
    logit = logit[..., 0]
    return logit + p["residual"][0] * (v @ t.T) + p["residual"][1] if "residual" in p else logit


def spread_error(scores: Tensor, reference: Tensor) -> float:
    return float((scores - reference).square().mean().sqrt() / reference.std())


def sorted_topk(scores: Tensor, k: int) -> list[list[int]]:
    """By (−score, index), row by row."""
    return [sorted(range(len(row)), key=lambda j, row=row: (-row[j], j))[:k] for row in scores.tolist()]
