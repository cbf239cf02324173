"""Has the model seen these images? A promise that rests on such would be worth nothing."""

from __future__ import annotations

from vacsr.data.labelled import LabelledPairs
from vacsr.errors import DataError


def check_unseen(pairs: LabelledPairs, trained: LabelledPairs) -> None:
    """Refuse pairs with images that were trained on, however the data are spelled."""
    seen = seen_images(pairs, trained)
    if seen:
        message = f"{len(seen):,} of {len(pairs.image_ids):,} images of split '{pairs.split}' were trained on"
        action = "give images that the model has not seen: another split, or --pairs SPEC with other data"
        raise DataError(f"{message} (first {seen[0]}), so the model is too sure of them — {action}")


def check_apart(fit: LabelledPairs, check: LabelledPairs) -> None:
    """Refuse to count on images that the fit has seen. Both are of one data set."""
    both = set(fit.image_ids).intersection(check.image_ids)
    if both:
        message = f"splits '{fit.split}' and '{check.split}' share {len(both):,} images (first {min(both)})"
        action = "name two that share none, e.g. --split dev --check test"
        raise DataError(f"{message}, on which the promises look better than they are — {action}")


def seen_images(pairs: LabelledPairs, trained: LabelledPairs) -> list[str]:
    """The images that are among the trained ones: they have the same id, and share a caption.

    Other data may have other images of the same name, which is what the caption tells. Where a side knows no captions
    the name decides.
    """
    known, asked = _captions(trained), _captions(pairs)
    alike = pairs.captions is None or trained.captions is None
    return [name for name in pairs.image_ids if name in known and (alike or asked[name] & known[name])]


def _captions(pairs: LabelledPairs) -> dict[str, set[str]]:
    """What is said of each image; empty sets where the words are not known."""
    found: dict[str, set[str]] = {name: set() for name in pairs.image_ids}
    for text, row in zip(pairs.captions or (), pairs.caption_image.tolist(), strict=False):
        found[pairs.image_ids[row]].add(text.strip())
    return found
