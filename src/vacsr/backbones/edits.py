"""Change what a tower computes for a while, without another copy of it: prompts and adapters are edits.

An edit sees the tokens at the tower's own joints and gives others back. The hooks that bring them there are on only
inside :func:`edited`; the tower itself never learns of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vacsr.backbones.base import Tower
from vacsr.backbones.hub_towers import HubImageTower, HubTextTower
from vacsr.backbones.tiny import TinyImageTower, TinyTextTower
from vacsr.errors import UsageError


class TowerEdits:
    """Every method gives back what it got; a subclass overrides the joints it wants to change."""

    def words(self, tokens: Tensor) -> Tensor:
        """Text only: word embeddings before positions are added; as many as came. [B, L, W] -> [B, L, W]"""
        return tokens

    def entry(self, tokens: Tensor) -> Tensor:
        """After positions, before the first norm or block; may add tokens. [B, L, W] -> [B, L', W]"""
        return tokens

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        """What block ``depth`` (from 0) is given; may add or replace tokens. [B, L, W] -> [B, L', W]

        In texts, tokens are added somewhere before the end of the text, never after it.
        """
        return tokens

    def after(self, depth: int, given: Tensor, tokens: Tensor) -> Tensor:
        """What block ``depth`` gives; ``given`` is its input as :meth:`before` made it. [B, L, W] -> [B, L', W]"""
        return tokens


class _Joints(NamedTuple):
    """Where a tower can be opened."""

    words: nn.Module | None  # its output is the word embeddings
    entry: nn.Module | None  # its output is embeddings with positions; None: the first block's input is that


@contextmanager
def edited(tower: Tower, edits: TowerEdits | None) -> Iterator[None]:
    """Inside, the tower computes with ``edits``; afterwards, also after an error, as before. None changes nothing."""
    with ExitStack() as stack:
        if edits is not None:
            for handle in _hooked(tower, edits):
                stack.enter_context(handle)
        yield


def first_norm(block: nn.Module) -> nn.Module:
    """The norm in front of a block's attention."""
    for name in ("layer_norm1", "attention_norm"):
        found = getattr(block, name, None)
        if isinstance(found, nn.Module):
            return found
    raise UsageError(f"{type(block).__name__} has no norm before its attention — use clip: or tiny: towers")


def token_width(tower: Tower) -> int:
    """W of the tokens between the blocks, which the output's dimension may differ from."""
    weight = first_norm(tower.blocks()[0]).weight
    assert isinstance(weight, Tensor)
    return len(weight)


def word_table(tower: Tower) -> nn.Embedding:
    """The embeddings of the words a text tower knows."""
    table = _joints(tower).words
    if not isinstance(table, nn.Embedding):
        raise UsageError(f"{type(tower).__name__} has no table of words — give a text tower")
    return table


def _joints(tower: Tower) -> _Joints:
    if isinstance(tower, TinyImageTower):
        return _Joints(None, None)
    if isinstance(tower, TinyTextTower):
        return _Joints(tower.words, None)
    if isinstance(tower, HubImageTower | HubTextTower):
        entry = getattr(tower.model, "embeddings", None)
        words = getattr(entry, "token_embedding", None)
        if isinstance(entry, nn.Module) and (words is not None or isinstance(tower, HubImageTower)):
            return _Joints(words, entry)
    raise UsageError(f"{type(tower).__name__} cannot be given prompts or adapters — use clip: or tiny: towers")


def _hooked(tower: Tower, edits: TowerEdits) -> Iterator[RemovableHandle]:
    """Put the hooks on one by one, so that each can be taken off should the next one fail."""
    joints = _joints(tower)
    if joints.words is not None:
        yield joints.words.register_forward_hook(lambda _block, _given, tokens: edits.words(tokens))
    if joints.entry is not None:
        yield joints.entry.register_forward_hook(lambda _block, _given, tokens: edits.entry(tokens))
    for depth, block in enumerate(tower.blocks()):
        enters = depth == 0 and joints.entry is None
        enter, leave = partial(_enter, edits, depth, enters), partial(_leave, edits, depth)
        yield block.register_forward_pre_hook(enter, with_kwargs=True)
        yield block.register_forward_hook(leave, with_kwargs=True)


def _enter(
    edits: TowerEdits, depth: int, enters: bool, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Edit a block's input. Every block is handed the mask that fits the row as it was at first."""
    given = _given(args, kwargs)
    tokens = edits.before(depth, edits.entry(given) if enters else given)

    def changed(value: Any) -> Any:
        return tokens if value is given else _fitted(value, tokens)

    return tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}


def _leave(
    edits: TowerEdits, depth: int, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor
) -> Tensor:
    return edits.after(depth, _given(args, kwargs), tokens)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given: Tensor = args[0] if args else kwargs["hidden_states"]
    return given


def _fitted(mask: Any, tokens: Tensor) -> Any:
    """An attention mask for a row of another length; anything else as it is. [B, 1, 1 or L, L] -> [.., 1 or L', L']

    One row of keys (tiny) says where the text ends: the tokens added before its end are seen. A square is causal: it
    is drawn anew.
    """
    length = tokens.shape[1]
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-1] == length:
        return mask
    if mask.shape[-2] == 1:
        extra = length - mask.shape[-1]
        return torch.cat((mask.new_ones(*mask.shape[:-1], extra), mask), dim=-1) if extra > 0 else mask[..., -extra:]
    seen = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()[None, None]
    if mask.dtype == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=mask.dtype, device=mask.device).masked_fill(~seen, torch.finfo(mask.dtype).min)
