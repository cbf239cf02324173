"""Change what a tower computes for a while, without another copy of it: prompts and adapters are edits.

An edit sees the tokens at the tower's joints and returns others. The hooks that do this are registered only inside
:func:`edited`; the tower itself does not change.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vacsr.backbones.towers import Tower
from vacsr.errors import UsageError


class TowerEdits:
    """Every method returns what it got; a subclass overrides the joints it wants to change."""

    def words(self, tokens: Tensor) -> Tensor:
        """Text only: word embeddings before positions are added; as many as came. [B, L, W] -> [B, L, W]"""
        return tokens

    def entry(self, tokens: Tensor) -> Tensor:
        """After positions, before the first norm or block; may add tokens. [B, L, W] -> [B, L', W]"""
        return tokens

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        """The input of block ``depth`` (from 0); may add or replace tokens. [B, L, W] -> [B, L', W]

        In texts, tokens are added somewhere before the end of the text, never after it.
        """
        return tokens

    def after(self, depth: int, inputs: Tensor, tokens: Tensor) -> Tensor:
        """The output of block ``depth``; ``inputs`` came out of :meth:`before`. [B, L, W] -> [B, L', W]"""
        return tokens


@contextmanager
def edited(tower: Tower, edits: TowerEdits | None) -> Iterator[None]:
    """Inside, the tower computes with ``edits``; afterwards, also after an error, as before. None changes nothing."""
    if edits is None or edits is tower.edits:
        yield
        return
    assert tower.edits is None, "a tower takes one set of edits at a time"
    words, entry = tower.joints()

    def before(depth: int, _block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Edit a block's input. Every block is handed the mask that fits the row as it was at first."""
        inputs = _inputs(args, kwargs)
        tokens = edits.before(depth, edits.entry(inputs) if depth == 0 and entry is None else inputs)
        changed = [tokens if x is inputs else _fitted(x, tokens) for x in (*args, *kwargs.values())]
        return tuple(changed[: len(args)]), dict(zip(kwargs, changed[len(args) :], strict=True))

    def after(depth: int, _block: nn.Module, args: Any, kwargs: Any, tokens: Tensor) -> Tensor:
        return edits.after(depth, _inputs(args, kwargs), tokens)

    with ExitStack() as stack:
        if words is not None:
            stack.enter_context(words.register_forward_hook(lambda _module, _args, tokens: edits.words(tokens)))
        if entry is not None:
            stack.enter_context(entry.register_forward_hook(lambda _module, _args, tokens: edits.entry(tokens)))
        for depth, block in enumerate(tower.blocks()):
            stack.enter_context(block.register_forward_pre_hook(partial(before, depth), with_kwargs=True))
            stack.enter_context(block.register_forward_hook(partial(after, depth), with_kwargs=True))
        tower.edits = edits
        stack.callback(setattr, tower, "edits", None)
        yield


def first_norm(block: nn.Module) -> nn.Module:
    """The norm in front of a block's attention."""
    norm = getattr(block, "layer_norm1", None) or getattr(block, "attention_norm", None)
    if isinstance(norm, nn.Module):
        return norm
    raise UsageError(f"{type(block).__name__} has no norm before its attention — use clip: or tiny: towers")


def word_table(tower: Tower) -> nn.Embedding:
    """The embeddings of the words that a text tower knows."""
    table, _ = tower.joints()
    assert table is not None, "image towers have no words"
    return table


def splice(tokens: Tensor, prompts: Tensor, *, start: int, insert: bool = False) -> Tensor:
    """Put prompts in place of the tokens from ``start`` on, or between them. [B, L, W], [n, W] or [B, n, W]"""
    rows = prompts.to(tokens.dtype).expand(len(tokens), -1, -1)
    return torch.cat((tokens[:, :start], rows, tokens[:, start if insert else start + rows.shape[1] :]), dim=1)


def _inputs(args: Any, kwargs: Any) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _fitted(mask: Any, tokens: Tensor) -> Any:
    """An attention mask for a row of another length; anything else as it is. [B, 1, 1 or L, L] -> [.., 1 or L', L']

    One row of keys (tiny) says where the text ends: the tokens added before its end are seen. A square is causal: it
    is drawn again.
    """
    length = tokens.shape[1]
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-1] == length:
        return mask
    if mask.shape[-2] == 1:
        extra = length - mask.shape[-1]
        return torch.cat((mask.new_ones(*mask.shape[:-1], extra), mask), dim=-1) if extra > 0 else mask[..., -extra:]
    return torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()[None, None]
