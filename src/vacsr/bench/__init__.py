"""What `vacsr bench` runs: several ways to the same result, timed in turn in one run, as a table, JSON and a plot."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch

__all__ = ["BenchResult", "Cell", "Size", "What", "run_bench"]

What = Literal["scoring", "training", "metrics"]
Size = Literal["small", "coco"]
Cell = str | float | None


def run_bench(
    what: What, *, device: torch.device, size: Size | None = None, log: Callable[[str], None] = lambda _: None
) -> BenchResult:
    """Run one benchmark. The default size is ``coco`` on a GPU, ``small`` elsewhere and always for metrics.

    ``log`` receives the name of each way before it is timed.
    """
    large = device.type == "cuda" and what != "metrics"
    module = import_module(f"vacsr.bench.{what}")
    result: BenchResult = module.run(module.SIZES[size or ("coco" if large else "small")], device, log)
    return result


@dataclass(frozen=True)
class BenchResult:
    """Numbers of several ways, measured in one run."""

    bench: str
    where: str
    """GPU or CPU, threads, torch."""
    settings: Mapping[str, Any]
    """Sizes of the problem."""
    rows: Sequence[Mapping[str, Cell]]
    """One per way; ``way`` names it, ``problem`` says why it has no numbers."""
    columns: Mapping[str, str]
    """Keys that the table shows, with their headings."""
    plotted: Sequence[str]
    """Keys that the plot shows, one panel each."""
    notes: Sequence[str] = ()
    label: str = "way"
    """The key that names a row of the plot."""

    def to_json(self) -> dict[str, Any]:
        """Everything but how it is shown."""
        known = {"bench": self.bench, "where": self.where, "settings": dict(self.settings)}
        return {"schema": 1, **known, "rows": [dict(row) for row in self.rows], "notes": list(self.notes)}

    def to_markdown(self) -> str:
        """A table, the settings under it, and notes."""
        rules = ["---:" if any(isinstance(row.get(key), float) for row in self.rows) else "---" for key in self.columns]
        lines = [list(self.columns.values()), rules]
        lines += [[_cell(row, key) for key in self.columns] for row in self.rows]
        table = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([*table, "", self._settings(), *self.notes])

    def to_svg(self) -> str:
        """The plotted columns on logarithmic axes. A way that failed says why; one without any value is left out."""
        import matplotlib
        from matplotlib.figure import Figure

        rows = [row for row in self.rows if row.get("problem") or any(_is_number(row, key) for key in self.plotted)]
        names = [textwrap.shorten(str(row[self.label]), 60, placeholder=" …") for row in rows]
        style: Any = {"svg.fonttype": "none", "svg.hashsalt": "vacsr", "font.size": 9, "axes.spines.right": False,
                 "axes.spines.top": False}  # fmt: skip
        with matplotlib.rc_context(style):
            figure = Figure(figsize=(4 + 4 * len(self.plotted), 1.8 + 0.3 * len(rows)), layout="constrained")
            figure.suptitle(self.bench)
            panels = figure.subplots(1, len(self.plotted), squeeze=False, sharey=True)[0]
            for axes, key in zip(panels, self.plotted, strict=True):
                axes.set(xscale="log", xlabel=self.columns[key], ylim=(max(len(rows), 1) - 0.5, -0.5))
                axes.set_yticks(range(len(rows)), names)
                axes.grid(axis="x", alpha=0.3)
                axes.margins(x=0.25)
                for position, row in enumerate(rows):
                    if _is_number(row, key):
                        axes.plot(row[key], position, "o", color="#3a3fb5")
                        axes.annotate(f"  {_number(row[key])}", (row[key], position), va="center")
                    else:
                        text = str(row.get("problem") or "–")
                        axes.text(0.02, position, text, va="center", transform=axes.get_yaxis_transform())
            figure.supxlabel("\n".join(textwrap.wrap(self._settings(), 60 * (1 + len(self.plotted)))), fontsize=8)
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()

    def _settings(self) -> str:
        return f"{', '.join(f'{name} {_number(value)}' for name, value in self.settings.items())}; {self.where}."


def _is_number(row: Mapping[str, Cell], key: str) -> bool:
    value = row.get(key)
    return isinstance(value, float) and value > 0


def _cell(row: Mapping[str, Cell], key: str) -> str:
    """A way without numbers says why beside its name."""
    value = row.get(key)
    if key == "way" and row.get("problem"):
        return f"{value} ({row['problem']})"
    return "–" if value is None else _number(value)


def _number(value: Any) -> str:
    """Three digits of a float, the rest as it is.

    >>> _number(0.0123456), _number(1234.5), _number(5000), _number("a"), _number(1.0)
    ('0.0123', '1,234', '5,000', 'a', '1')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"
