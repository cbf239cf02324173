"""Protocols by name: what is ranked against what, and who counts as relevant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from vacsr.data.labelled import LabelledPairs
from vacsr.errors import DataError, UsageError
from vacsr.evaluate.captions import FOLDS, coco_galleries
from vacsr.evaluate.galleries import Gallery

PROTOCOLS: Mapping[str, Callable[[LabelledPairs], tuple[Gallery, ...]]] = {
    "flickr": lambda pairs: (Gallery.of_labels(pairs),),
    "coco-1k": partial(coco_galleries, source="coco", folds=FOLDS),
    "coco-5k": partial(coco_galleries, source="coco"),
    "cxc": partial(coco_galleries, source="cxc"),
    "eccv": partial(coco_galleries, source="eccv"),
}
"""``flickr``: the data's own labels, everything in one gallery. The others: :mod:`vacsr.evaluate.captions`."""


def check_protocols(names: Sequence[str]) -> None:
    """Every name is a protocol."""
    unknown = [name for name in names if name not in PROTOCOLS]
    if unknown:
        raise UsageError(f"unknown protocol '{unknown[0]}' — choose from: {', '.join(PROTOCOLS)}")


def protocol_galleries(names: Sequence[str], pairs: LabelledPairs) -> dict[str, tuple[Gallery, ...]]:
    """Each protocol's galleries in the data; data that a protocol does not fit are a DataError.

    >>> from vacsr.data import load_pairs
    >>> pairs = load_pairs("synthetic:images=4,per_image=2", split="train")
    >>> [gallery.i2t.count for gallery in protocol_galleries(["flickr"], pairs)["flickr"]]
    [tensor([2, 2, 2, 2])]
    """
    check_protocols(names)
    return {name: PROTOCOLS[name](pairs) for name in names}


def fitting_protocols(names: Sequence[str], pairs: LabelledPairs) -> tuple[str, ...]:
    """Those that are known and that the data hold the images of; ``flickr``, which fits all data, where none is.

    >>> from vacsr.data import load_pairs
    >>> fitting_protocols(["flickr"], load_pairs("synthetic:images=4", split="train"))
    ('flickr',)
    """
    return tuple(name for name in names if name in PROTOCOLS and _fits(name, pairs)) or ("flickr",)


def _fits(name: str, pairs: LabelledPairs) -> bool:
    try:
        protocol_galleries([name], pairs)
    except DataError:
        return False
    return True
