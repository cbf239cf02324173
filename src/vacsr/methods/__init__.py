"""Methods by name: a head and a loss each, all in the one training loop."""

from __future__ import annotations

from vacsr.config import InfoNCEConfig, SigmoidConfig, VacsrConfig
from vacsr.methods.base import Embedding, Method, ParamGroup
from vacsr.methods.infonce import InfoNCE
from vacsr.methods.sigmoid import Sigmoid
from vacsr.methods.vacsr import Vacsr

__all__ = ["Embedding", "InfoNCE", "Method", "ParamGroup", "Sigmoid", "Vacsr", "build_method"]


def build_method(config: VacsrConfig | SigmoidConfig | InfoNCEConfig, *, dim: int) -> Vacsr | Sigmoid | InfoNCE:
    """The method that a config describes, for embeddings of dimension ``dim``."""
    if isinstance(config, VacsrConfig):
        return Vacsr(dim, config)
    return Sigmoid(config) if isinstance(config, SigmoidConfig) else InfoNCE(config)
