"""The part of a method that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vacsr.errors import DataError, OtherRun
from vacsr.methods.fewshot import FewshotMethod
from vacsr.train.checkpoint import FILE


class Learned(nn.Module):
    """A method as checkpoints see it: what it stores, and its own buffers such as a running mean, without its CLIP."""

    def __init__(self, inner: FewshotMethod) -> None:
        super().__init__()
        self.inner = inner

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Tensors by name."""
        return {**self.inner.stored(), **self._own_buffers()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """What it stores comes first: a method may start its buffers from that."""
        names = self._own_buffers().keys() - self.inner.stored().keys()
        self.inner.load({name: tensor for name, tensor in state_dict.items() if name not in names})
        with torch.no_grad():
            for name, buffer in self._own_buffers().items():
                buffer.copy_(state_dict[name])

    def _own_buffers(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self.inner.named_buffers() if not name.startswith("clip.")}


def check_checkpoint(folder: Path, *, fingerprint: str) -> None:
    """Refuse a checkpoint of another run before anything beside it is written."""
    path = folder / FILE
    if not path.is_file():
        return
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get("fingerprint")
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} is not a whole checkpoint ({error}) — delete {folder}, or choose a new --out"
        ) from error
    if found != fingerprint:
        message = f"{path} belongs to a run with another configuration or data"
        raise OtherRun(f"{message} — resume with the recipe of that run, or choose a new --out")
