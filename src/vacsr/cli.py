"""The command line: parses, calls the library, prints. stdout is data, stderr is progress and messages."""

from __future__ import annotations

import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console

from vacsr import __version__
from vacsr.errors import NoSuchSplit, UsageError, VacsrError

if TYPE_CHECKING:
    from vacsr.config import EvaluateConfig
    from vacsr.data import PairSet, PhotoSet

app = typer.Typer(
    help="Image-text similarity with a grade and an uncertainty.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Change a field, e.g. --set train.epochs=5. Repeatable."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
_ONE_CELL = str.maketrans(dict.fromkeys("\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", " "))
"""Tabs and line breaks as spaces, so that a cell of a table stays one."""


class Bins(StrEnum):
    """Uncertainty bins of equal count or of equal width."""

    COUNT = "count"
    EQUAL = "equal"


class PoolingChoice(StrEnum):
    """How tokens become one vector."""

    AUTO = "auto"
    CLS = "cls"
    MEAN = "mean"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vacsr {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print and leave.")
    ] = False,
) -> None:
    """Image-text similarity with a grade and an uncertainty."""


@app.command()
def doctor() -> None:
    """Check this machine: Python, torch, GPU, optional extras and known traps."""
    from vacsr.doctor import examine

    findings = examine()
    for finding in findings:
        typer.echo(finding.line())
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(3)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the models, the table and the page go.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="World and training seed.")] = 0,
) -> None:
    """Train infonce, sigmoid and vacsr on generated pictures whose every truth is known; print a table, draw a page.

    Takes some minutes on two cores. OUT/index.html shows the figures and some queries with their answers.
    """
    from vacsr.demo import run_demo

    typer.echo(run_demo(out, seed=seed))


@app.command()
def embed(
    backbone: Annotated[str, typer.Option(help="clip:ID_OR_FOLDER or towers:IMAGE,TEXT.", metavar="SPEC")],
    pairs: Annotated[
        str, typer.Option(help="Photos and captions: folder:DIR, csv:FILE, flickr8k:DIR, coco:DIR, …", metavar="SPEC")
    ],
    out: Annotated[Path, typer.Option(help="Where the features go, a .safetensors file.", metavar="FILE")],
    split: Annotated[str | None, typer.Option(help="Only this split; default: all, with the splits noted.")] = None,
    pooling: Annotated[
        PoolingChoice, typer.Option(help="Tokens to one vector: class token or mean; auto as the towers are used to.")
    ] = PoolingChoice.AUTO,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A=B", help="Change a field of the backbone, e.g. --set resize=center."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Write float32 instead of float16.")] = False,
    skip: Annotated[bool, typer.Option("--skip", help="Leave out what cannot be read instead of stopping.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Threads that decode photos; 0 for one per core.")] = 0,
    device: Device = "auto",
) -> None:
    """Embed photos and captions once, with ids and provenance; the same command goes on where it stopped."""
    import torch

    from vacsr.config import BackboneConfig
    from vacsr.embed import embed_pairs, embedding_config
    from vacsr.recipes import merge, parse, parse_overrides
    from vacsr.train.progress import PhotoProgress

    base = embedding_config(backbone, pooling=pooling.value)
    config = parse(BackboneConfig, merge(base.model_dump(mode="json"), parse_overrides(overrides or [])))
    with PhotoProgress("reading", show=True) as bar:
        found = embed_pairs(
            config, pairs, out,
            split=split, pooling=pooling.value, dtype=torch.float32 if full else torch.float16, device=device,
            workers=workers, on_error="skip" if skip else "fail", progress=bar.named,
        )  # fmt: skip
    left = f", {len(found.skipped):,} left out" if found.skipped else ""
    typer.echo(f"embedded {found.images:,} photos and {found.captions:,} captions{left}", err=True)
    typer.echo(found.spec)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/features.yaml.", metavar="RECIPE.yaml")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/RECIPE.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
) -> None:
    """Train by a recipe; leaves config.yaml, metrics.jsonl, checkpoint/, model/ and report.json in the run folder."""
    from vacsr.recipes import read_recipe
    from vacsr.train import run_recipe

    folder = out or Path("runs") / recipe.stem
    result = run_recipe(read_recipe(recipe, overrides or []), folder, resume=resume)
    if result.run.interrupted:
        again = f"vacsr train {folder / 'config.yaml'} --out {folder} --resume"
        typer.echo(f"stopped after step {result.run.state.step}; go on with: {again}", err=True)
        raise typer.Exit(130)
    if result.report is not None:
        typer.echo(result.report.to_markdown())


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder or a model folder.")],
    pairs: Annotated[
        str | None, typer.Option(help="SPEC such as features:FILE,captions=FILE; default: the run's.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split to report; default: test, or all where there is none.")
    ] = None,
    protocol: Annotated[list[str] | None, typer.Option(help="Protocol; repeatable. Default: flickr.")] = None,
    judgments: Annotated[
        list[Path] | None, typer.Option(help="File of human grades; repeatable. Default: the run's.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the report as JSON.")] = None,
    pessimistic: Annotated[
        bool | None,
        typer.Option("--pessimistic/--stable", help="Among equal scores, wrong items first, or index order."),
    ] = None,
    bins: Annotated[Bins | None, typer.Option(help="Uncertainty bins of equal count, or of equal width.")] = None,
    device: Device = "auto",
) -> None:
    """Report retrieval, uncertainty and agreement with human grades.

    Judgments, ties and bins that are not given are the run's own, unless --pairs names other data.
    """
    from vacsr.evaluate.judgments import read_judgments
    from vacsr.evaluate.retrieval import evaluate_retrieval
    from vacsr.files import write_json
    from vacsr.scoring import PairScorer

    scorer = PairScorer.from_pretrained(run, device=device)
    data = _pairs_to_report(run, pairs, split=split)
    given: dict[str, Any] = {}
    if judgments:
        given["judgments"] = [str(path) for path in judgments]
    if pessimistic is not None:
        given["ties"] = "pessimistic" if pessimistic else "stable"
    if bins is not None:
        given["bins"] = bins.value
    settings = _evaluate_settings({} if pairs else _run_section(run, "evaluate"), given)
    report = evaluate_retrieval(
        scorer, data,
        protocols=protocol or ["flickr"],
        judgments=[read_judgments(Path(path).expanduser()) for path in settings.judgments],
        ties=settings.ties, bins=settings.bins,
    )  # fmt: skip
    if json is not None:
        write_json(json, report.to_json())
    typer.echo(report.to_markdown())


def _pairs_to_report(run: Path, pairs: str | None, *, split: str | None) -> PairSet | PhotoSet:
    """The split asked for; else `test` where the data have one, and everything, with a word about it, otherwise.

    What could not be read when the run was trained is left out here too, if the run says so.
    """
    from vacsr.config import DataConfig
    from vacsr.data import parse_spec
    from vacsr.recipes import parse
    from vacsr.train.recipe import read_split

    policy = {} if pairs else {k: v for k, v in _run_section(run, "data").items() if k in ("on_error", "workers")}
    config = parse(DataConfig, {**policy, "pairs": pairs or _run_pairs(run)})
    chosen = split or (parse_spec(pairs).options.get("split") if pairs else None)
    if chosen:
        return read_split(config, chosen)
    try:
        return read_split(config, "test")
    except NoSuchSplit:
        data = read_split(config, "all")
    count = f"all {len(data.image_ids):,} images, any that were trained on included"
    typer.echo(f"the data have no split 'test': reporting {count} — choose with --split", err=True)
    return data


def _evaluate_settings(own: dict[str, Any], given: dict[str, Any]) -> EvaluateConfig:
    """The run's own judgments, ties and bins, and on top of them the options that were given."""
    from vacsr.config import EvaluateConfig
    from vacsr.recipes import parse

    known = {name: value for name, value in own.items() if name in ("judgments", "ties", "bins")}
    return parse(EvaluateConfig, {**known, **given})


def _run_section(run: Path, name: str) -> dict[str, Any]:
    """A section of the run folder's config.yaml, unchecked: an older run may have other fields. Empty if not there."""
    from vacsr.recipes import read_yaml

    config = run / "config.yaml"
    section = read_yaml(config).get(name) if config.is_file() else None
    return section if isinstance(section, dict) else {}


def _run_pairs(run: Path) -> str:
    """The data that a run folder was trained on."""
    data = _run_section(run, "data")
    if "pairs" not in data:
        raise UsageError(f"{run} is a model folder, so it does not say on which data — add --pairs SPEC")
    return str(data["pairs"])


@app.command()
def score(
    run: Annotated[Path, typer.Argument(help="A run folder or a model folder.")],
    image: Annotated[str, typer.Option(help="A photo's path; an image id where the model reads embeddings.")],
    text: Annotated[
        list[str], typer.Option(help="Any words; a caption id or exact words where it reads embeddings. Repeatable.")
    ],
    pairs: Annotated[
        str | None, typer.Option(help="SPEC in which image and text are ids; default for embeddings: the run's.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Grade image-text pairs: score, grade in 0–1 and uncertainty, tab-separated.

    A model with towers takes any photo and any words; one on embeddings takes those of its data.
    """
    from vacsr.data import load_pairs
    from vacsr.scoring import PairScorer
    from vacsr.scoring.lookup import score_named, score_photo

    scorer = PairScorer.from_pretrained(run, device=device)
    if scorer.model.has_towers and pairs is None:
        found = score_photo(scorer, image=image, texts=text)
    else:
        found = score_named(scorer, load_pairs(pairs or _run_pairs(run), split="all"), image=image, texts=text)
    lines = [("image", "text", "score", "grade", "uncertainty"), *found]
    typer.echo("\n".join("\t".join(cell.translate(_ONE_CELL) for cell in line) for line in lines))


@app.command()
def compare(
    table: Annotated[Path, typer.Argument(help="A table, e.g. tables/flickr8k-features.yaml.", metavar="TABLE.yaml")],
    overrides: Overrides = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated, instead of the table's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of run folders; default runs/TABLE.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Worker processes; several may share a GPU.")] = 1,
    row: Annotated[list[str] | None, typer.Option(help="Only these rows; repeatable.")] = None,
    against: Annotated[str | None, typer.Option(help="Also print every row's difference from this one.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete runs of another recipe and start them again.")] = False,
) -> None:
    """Run methods × settings × seeds; finished cells are kept, so the same command goes on where it stopped."""
    from vacsr.compare import compare as run_table
    from vacsr.compare import read_table

    folder = out or Path("runs") / table.stem
    chosen = _numbers(seeds) if seeds else []
    plan = read_table(table, overrides or [])
    if against is not None and against not in {variant.name for variant in plan.rows}:
        raise UsageError(f"no row '{against}' — the table has: {', '.join(variant.name for variant in plan.rows)}")
    result = run_table(plan, folder, seeds=chosen, jobs=jobs, rows=row or [], fresh=fresh)
    typer.echo(result.to_markdown())
    if against is not None:
        typer.echo(result.differences(against))


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds takes numbers such as 0,1,2, not '{text}'") from error


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One plain line on stderr, without Python's source line."""
    print("warning:", " ".join(str(message).splitlines()), file=sys.stderr)


def main() -> None:
    """Entry point: a VacsrError becomes one message and its exit code, a warning one line, Ctrl-C becomes 130."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            app()
    except VacsrError as error:
        Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: ", end="")
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
