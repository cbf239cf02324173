"""LoRA (extra ``lora``): trainable low-rank updates beside the linear layers of a tower, made and merged by peft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from vacsr.config import LoraConfig
from vacsr.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from vacsr.backbones.towers import Tower


def add_lora(tower: Tower, config: LoraConfig, *, side: str) -> None:
    """Freeze the tower and add to each chosen layer of its blocks (alpha/rank)·B·A, which starts as 0.

    peft calls the new weights ``LAYER.lora_A.default.weight`` and the old ones ``LAYER.base_layer.weight``.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingExtra("peft", "lora") from error
    inside = {id(module) for block in tower.blocks() for module in block.modules()}
    linear = [name for name, layer in tower.named_modules() if isinstance(layer, nn.Linear) and id(layer) in inside]
    names = [name for name in linear if not config.targets or _last(name) in config.targets]
    if not names:
        known = ", ".join(sorted(set(map(_last, linear)))) or "none"
        message = f"no linear layer in the blocks of the {side} tower is called {' or '.join(config.targets)}"
        raise UsageError(f"{message} — set backbone.lora.targets to [] for all, or to some of these: {known}")
    chosen = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=names, lora_dropout=0.0)
    peft.inject_adapter_in_model(chosen, tower)


def merge_lora(tower: Tower) -> None:
    """Add the updates to the tower's own weights; what is left has the layers and names it had at first."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(tower.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge(safe_merge=True)
            tower.set_submodule(name, layer.get_base_layer())


def _last(name: str) -> str:
    return name.rpartition(".")[2]
