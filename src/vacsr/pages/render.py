"""Pages: plain data and a template give one HTML file that needs no network; only the audit's has a script."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vacsr.pages.curves import Curves, PlotGroup, RunRecord, row_styles, score_plots, sigma_plots, training_plots
from vacsr.pages.examples import Examples
from vacsr.pages.sweeps import Sweeps, sweep_plots


class Cell(NamedTuple):
    text: str
    best: bool = False  # set in bold
    spread: str = ""  # standard deviation: behind the number, in wide tables below it
    mark: str = ""  # † or ‡: differs from the best baseline

    @property
    def rest(self) -> str:
        """What follows the number."""
        return (f" ± {self.spread}" if self.spread else "") + self.mark


class Row(NamedTuple):
    name: str
    cells: Sequence[Cell]


class SettingTable(NamedTuple):
    """The table of one setting of a comparison."""

    setting: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    differences: Sequence[Row] = ()  # row, metric, other row, difference, 95% interval, p


class Comparison(NamedTuple):
    """What the page of a comparison shows."""

    title: str
    lead: str  # how much was run, in a sentence
    note: str
    tables: Sequence[SettingTable]
    runs: Sequence[RunRecord]
    rows: Sequence[str]  # in the plots
    settings: Sequence[str]  # in the plots
    left_out: int = 0  # rows that are only in the tables
    not_run: Sequence[str] = ()  # rows that were asked for and have no run
    sweeps: Sequence[Sweeps] = ()
    examples: Examples | None = None
    examples_wanted: bool = False  # whether examples were asked for; they need the models
    split: str = "test"  # whose results the plots show


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vacsr.pages"),
        autoescape=lambda name: name is None or not name.endswith(".md"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["style"] = Markup(files("vacsr.pages").joinpath("style.css").read_text(encoding="utf-8"))
    environment.filters["counted"] = counted
    return environment


def render(template: str, **values: Any) -> str:
    """A template of templates/ with these values; text is escaped, unless the template is Markdown."""
    return _environment().get_template(template).render(**values)


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def comparison_page(page: Comparison) -> str:
    """The whole page; sections without data are left out."""
    styles = row_styles(page.rows)
    curves = [Curves(page.runs, setting, styles, page.split) for setting in page.settings]
    sections = {
        "sigma": _groups([sigma_plots(one) for one in curves]),
        "scores": _groups([score_plots(one) for one in curves]),
        "sweeps": [plot for sweeps in page.sweeps for plot in sweep_plots(sweeps)],
        "training": _groups([training_plots(one) for one in curves]),
    }
    unsure = any((run.report.get(page.split) or {}).get("uncertainty") for run in page.runs)
    expected = [name for name in ("sigma", "scores", "training") if name != "sigma" or unsure]
    absent = [name for name in expected if not sections[name]]
    return render("comparison.html", page=page, absent=absent, **sections)


def _groups(groups: Sequence[PlotGroup]) -> list[PlotGroup]:
    """None at all where no setting has a plot."""
    return list(groups) if any(group.plots for group in groups) else []
