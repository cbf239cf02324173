"""Methods by name: a head and a loss each, all in the one training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vacsr.config import (
    AnyMethodConfig,
    BicroConfig,
    Config,
    DaaConfig,
    InfoNCEConfig,
    NcrConfig,
    NpcConfig,
    PcmeConfig,
    PcmeppConfig,
    SigmoidConfig,
    VacsrConfig,
    VseConfig,
)
from vacsr.methods.base import Embedding, Method, ParamGroup
from vacsr.methods.bicro import Bicro
from vacsr.methods.daa import Daa
from vacsr.methods.infonce import InfoNCE
from vacsr.methods.ncr import Ncr
from vacsr.methods.npc import Npc
from vacsr.methods.pcme import Pcme
from vacsr.methods.pcmepp import Pcmepp
from vacsr.methods.sigmoid import Sigmoid
from vacsr.methods.vacsr import Vacsr
from vacsr.methods.vse import Vse

__all__ = [
    "Bicro",
    "Daa",
    "Embedding",
    "InfoNCE",
    "Method",
    "Ncr",
    "Npc",
    "ParamGroup",
    "Pcme",
    "Pcmepp",
    "Sigmoid",
    "Vacsr",
    "Vse",
    "build_method",
]

_BY_CONFIG: dict[type[Config], Callable[[Any], Method]] = {
    SigmoidConfig: Sigmoid,
    InfoNCEConfig: InfoNCE,
    VseConfig: Vse,
    PcmeConfig: Pcme,
    PcmeppConfig: Pcmepp,
    DaaConfig: Daa,
    NcrConfig: Ncr,
    BicroConfig: Bicro,
    NpcConfig: Npc,
}


def build_method(config: AnyMethodConfig, *, dim: int) -> Method:
    """The method that a config describes, for embeddings of dimension ``dim``."""
    return Vacsr(dim, config) if isinstance(config, VacsrConfig) else _BY_CONFIG[type(config)](config)
