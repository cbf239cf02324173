"""Which recipes can never finish, whatever the data and the weights turn out to be: refused before either is read."""

from __future__ import annotations

import torch

from vacsr.backbones import check_backbone, scheme_of
from vacsr.config import Recipe
from vacsr.data import check_captioned, parse_spec
from vacsr.errors import UsageError
from vacsr.evaluate.protocols import check_protocols
from vacsr.methods import build_method
from vacsr.scoring import choose_device
from vacsr.scoring.posthoc import check_posthoc_plan
from vacsr.strips import strip_rows
from vacsr.train.assemble import is_graphed

_CACHED = ("features", "synthetic")  # the others are photos
_NOT_COCO = ("flickr8k", "scenes", "synthetic")  # files of one's own may hold COCO's images


def check_plan(recipe: Recipe, *, timed: bool = False) -> None:
    """Refuse a recipe that would be refused later, as far as it alone shows that.

    ``timed``: its steps are measured only. Nothing is reported then, and towers read photos made for the purpose.
    """
    device = choose_device(recipe.train.device)
    is_graphed(recipe.train, device)
    check_backbone(recipe.backbone)
    towers = not scheme_of(recipe.backbone.spec).cached
    if not (timed and towers):
        _check_data(recipe, towers=towers)
    if not timed:
        _check_protocols(recipe)
    _check_method(recipe, timed=timed)


def _check_data(recipe: Recipe, *, towers: bool) -> None:
    """Photos for towers, cached features without them."""
    spec, backbone = recipe.data.pairs, recipe.backbone.spec
    check_captioned(spec)
    scheme = parse_spec(spec).scheme
    if towers and scheme in _CACHED:
        message = f"backbone '{backbone}' reads photos, {spec} are cached features"
        raise UsageError(f"{message} — set backbone.spec=features:, or give photos such as data.pairs=folder:DIR")
    if not towers and scheme not in _CACHED:
        message = f"backbone 'features:' takes cached embeddings, {spec} are photos"
        raise UsageError(f"{message} — set backbone.spec to clip:…, towers:… or tiny:, or embed them: vacsr embed")


def _check_protocols(recipe: Recipe) -> None:
    """All but one are about COCO's test images."""
    check_protocols(recipe.evaluate.protocols)
    theirs = [name for name in recipe.evaluate.protocols if name != "flickr"]
    if theirs and parse_spec(recipe.data.pairs).scheme in _NOT_COCO:
        message = f"protocol '{theirs[0]}' is about COCO's test images, {recipe.data.pairs} has others"
        raise UsageError(f"{message} — set evaluate.protocols=[flickr]")


def _check_method(recipe: Recipe, *, timed: bool) -> None:
    """The method is asked itself, and built only where there is something to ask."""
    plan, kind = recipe.train, "none" if timed else recipe.evaluate.posthoc
    wordless = scheme_of(recipe.backbone.spec).cached and _wordless(recipe.data.pairs)
    if plan.tile in (0, "auto") and kind == "none" and not wordless:
        return
    with torch.random.fork_rng(devices=[]):
        method = build_method(recipe.method, dim=recipe.backbone.head.dim)
    strip_rows(method, plan.tile, rows=plan.batch_size, columns=plan.batch_size)
    if wordless:
        method.fit(None, torch.zeros(1, dtype=torch.int64))
    if kind != "none":
        check_posthoc_plan(method, recipe.backbone, kind=kind)


def _wordless(spec: str) -> bool:
    """Features whose captions no file tells."""
    parsed = parse_spec(spec)
    return parsed.scheme == "features" and "captions" not in parsed.options
