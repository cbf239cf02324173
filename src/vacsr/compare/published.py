"""Which published figures belong into a table: those of its own data and towers, or those named beside a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

from vacsr.report.tables import Published


class TablePublished(Published):
    """Published figures as a table file has them: with the towers that they are of."""

    backbone: str = ""
    """Pattern of backbone.spec, such as `clip:*32`, for which a row of theirs may stand among ours; empty for any."""


def placed(entries: Iterable[TablePublished], *, data: str, backbone: Callable[[str], str]) -> Iterator[Published]:
    """With their data and towers, published figures have rows of their own; elsewhere only those beside ours stay.

    ``backbone`` gives the spec of a setting's towers, or the table's for an empty name.
    """
    for entry in entries:
        bound = bool(entry.data or entry.backbone)
        towers = not entry.backbone or fnmatchcase(backbone(entry.setting).lower(), entry.backbone.lower())
        same = bound and towers and data.startswith(entry.data)
        if same or entry.beside or not bound:
            found = Published(**entry.model_dump(exclude={"backbone"}))
            yield found.model_copy(update={"beside": ""}) if same else found
