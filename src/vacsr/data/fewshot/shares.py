"""Who is trained on and who tests, where a person's own photos do not say it all.

Without any splits photos are shared out by class: 30% to the test, 20% to validation (as CoOp did where a data set came
without splits), the rest to training. Training gets at least one photo of a class, and the test one where a class has
two. Which photos go where depends on the seed and the names alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vacsr.data.fewshot.entries import Entry, Splits
from vacsr.data.fewshot.order import rows_by_label, seeded_rows
from vacsr.data.fewshot.specs import ClassSpec
from vacsr.errors import UsageError

SPLIT_NAMES: Mapping[str, str] = {
    "train": "train",
    "val": "val",
    "dev": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
"""What a split may be called, in letters of any size, and what it is."""


class Shares(NamedTuple):
    """How photos without splits are shared out."""

    val: float = 0.2
    test: float = 0.3
    seed: int = 0
    given: bool = False
    """Whether the spec says any of these."""


def shares_of(spec: ClassSpec) -> Shares:
    """The options ``val``, ``test`` and ``seed`` of a spec."""
    said = {name: spec.options[name] for name in ("val", "test", "seed") if name in spec.options}
    default = Shares()
    try:
        val, test = float(said.get("val", default.val)), float(said.get("test", default.test))
        shares = Shares(val, test, int(said.get("seed", default.seed)), bool(said))
    except ValueError as error:
        raise UsageError(f"{spec}: {error} — write val=0.2,test=0.3,seed=0") from None
    if not (val >= 0 and test > 0 and val + test < 1):
        message = f"{spec}: shares val={val} and test={test} leave no photos to train or to test on"
        raise UsageError(f"{message} — write val=0.2,test=0.3")
    return shares


def split_named(name: str) -> str | None:
    """The split that a folder or a cell names, None where it names none.

    >>> split_named("Validation"), split_named("cat")
    ('val', None)
    """
    return SPLIT_NAMES.get(name.casefold())


def arrange(found: Mapping[str, Sequence[Entry]], shares: Shares, *, place: str, whole: bool = False) -> Splits:
    """Splits from what was found under ``train``, ``val`` and ``test``; ``train`` alone is shared out.

    With ``whole`` it is the test instead, unless the spec says its shares.

    Where there is no test the validation photos are the test, as is custom with ImageNet. Without training photos the
    source is for tests only.
    """
    if set(found) == {"train"}:
        if whole and not shares.given:
            return Splits((), None, found["train"])
        return _share_out(found["train"], shares)
    if shares.given:
        named = " and ".join(found)
        raise UsageError(f"{place} has splits of its own ({named}) — leave out val=, test= and seed=")
    train = found.get("train", ())
    if "test" not in found:
        return Splits(train, None, found["val"])
    return Splits(train, found.get("val"), found["test"])


def _share_out(entries: Sequence[Entry], shares: Shares) -> Splits:
    ids = [entry.path for entry in entries]
    part = ["train"] * len(entries)
    for rows in rows_by_label([entry.label for entry in entries]).values():
        order = seeded_rows(ids, rows, seed=shares.seed, purpose="split", class_name=entries[rows[0]].name)
        test = min(max(round(len(order) * shares.test), 1), len(order) - 1)
        val = min(round(len(order) * shares.val), len(order) - 1 - test)
        for place, row in enumerate(order[: test + val]):
            part[row] = "test" if place < test else "val"
    split = {name: [entry for entry, one in zip(entries, part, strict=True) if one == name] for name in SPLIT_NAMES}
    return Splits(split["train"], split["val"] or None, split["test"])
