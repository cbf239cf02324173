"""Where the figures of a run go: JSON lines, CSV, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from vacsr.errors import MissingExtra
from vacsr.files import atomic_path, disk_errors, write_text

Row = dict[str, Any]


class Tracker(Protocol):
    """Takes rows; each has at least ``step``."""

    def log(self, row: Row) -> None:
        """Write one row."""

    def close(self) -> None:
        """Finish."""


class JsonlTracker:
    """``metrics.jsonl``: one JSON object a line."""

    def __init__(self, path: Path, *, keep_before: int) -> None:
        """Rows from step ``keep_before`` on are of a past that a resumed run lives again; they go."""
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        kept = [line for line in lines if _step(line) < keep_before]
        write_text(path, "".join(f"{line}\n" for line in kept))

    def log(self, row: Row) -> None:
        """Append one line."""
        with disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Nothing is held open."""


def _step(line: str) -> float:
    """A line torn by a kill counts as after everything."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class CsvTracker:
    """``metrics.csv``: the same rows as columns; it is rewritten from the JSON lines when the run ends."""

    def __init__(self, path: Path, source: Path) -> None:
        self.path, self.source = path, source

    def log(self, row: Row) -> None:
        """The columns are known only at the end."""

    def close(self) -> None:
        """Write the table; a line that a full disk cut short is left out."""
        lines = self.source.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if _step(line) < float("inf")]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        with atomic_path(self.path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


class TensorBoardTracker:
    """Scalars for TensorBoard (extra ``tensorboard``)."""

    def __init__(self, folder: Path) -> None:
        self.writer = _tensorboard().SummaryWriter(str(folder))

    def log(self, row: Row) -> None:
        """One scalar a number."""
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush."""
        self.writer.close()


class WandbTracker:
    """Rows to Weights & Biases (extra ``wandb``)."""

    def __init__(self, folder: Path, config: Row) -> None:
        self.run = _wandb().init(project="vacsr", dir=str(folder), config=config)

    def log(self, row: Row) -> None:
        """One history entry."""
        self.run.log(row, step=row["step"])

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


def _tensorboard() -> Any:
    try:
        import torch.utils.tensorboard
    except ImportError as error:
        raise MissingExtra("tensorboard", "tensorboard") from error
    return torch.utils.tensorboard


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise MissingExtra("wandb", "wandb") from error
    return wandb


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker whose extra is missing, before a run writes anything."""
    if "tensorboard" in names:
        _tensorboard()
    if "wandb" in names:
        _wandb()


def open_trackers(names: Sequence[str], folder: Path, *, step: int, config: Row) -> list[Tracker]:
    """The trackers of a run folder whose next batch is ``step``.

    JSON lines are always kept, since the others and the reports read them.
    """
    lines = folder / "metrics.jsonl"
    trackers: list[Tracker] = [JsonlTracker(lines, keep_before=step)]
    if "csv" in names:
        trackers.append(CsvTracker(folder / "metrics.csv", lines))
    if "tensorboard" in names:
        trackers.append(TensorBoardTracker(folder / "tensorboard"))
    if "wandb" in names:
        trackers.append(WandbTracker(folder, config))
    return trackers
