"""`vacsr evaluate`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vacsr.cli.options import Device
from vacsr.cli.runs import run_files, run_pairs, run_section, spec_files
from vacsr.errors import NoSuchSplit, UsageError

if TYPE_CHECKING:
    from vacsr.config import EvaluateConfig
    from vacsr.data import PairSet, PhotoSet
    from vacsr.evaluate.judgments import Judgments
    from vacsr.evaluate.retrieval import RetrievalReport


class Bins(StrEnum):
    """Uncertainty bins of equal count or of equal width."""

    COUNT = "count"
    EQUAL = "equal"


class PostHocChoice(StrEnum):
    """Uncertainty added to a trained cosine model."""

    NONE = "none"
    LAPLACE = "laplace"
    COSINE = "cosine"


class ScoreFiles(NamedTuple):
    """Anybody's scores."""

    scores: Path
    ids: Path
    uncertainty: Path | None


RunFolder = Annotated[
    Path | None, typer.Argument(help="A run folder or a model folder; none with --scores.", show_default=False)
]
Pairs = Annotated[
    str | None, typer.Option(metavar="SPEC", help="Data such as features:FILE,captions=FILE; default: the run's.")
]
Split = Annotated[
    str | None, typer.Option(metavar="S", help="Split to report; default: test, or all where there is none.")
]
Protocols = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P",
        help="flickr (all in one gallery, the data's labels), or on COCO's test images, by COCO's ids: coco-1k, "
        "coco-5k, cxc, eccv. Repeatable; default: the run's, or flickr.",
    ),
]
GradeFiles = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="Human grades; repeatable. Default: the run's.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the report as JSON.")]
Pessimistic = Annotated[
    bool | None, typer.Option("--pessimistic/--stable", help="Among equal scores, wrong items first, or index order.")
]
BinsOption = Annotated[Bins | None, typer.Option(help="Uncertainty bins of equal count, or of equal width.")]
Scores = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Instead of RUN: a matrix, a row an image, a column a caption; .npy or .safetensors."
    ),
]
Ids = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="With --scores: JSON with the lists images, captions and caption_image, all ids."
    ),
]
Uncertainty = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With --scores: the uncertainty of every pair, a file of the same shape."),
]
PostHoc = Annotated[
    PostHocChoice | None,
    typer.Option(
        help="Uncertainty for a cosine method: fitted on the run's training data, or with cosine 1 − its score."
    ),
]


def evaluate(
    run: RunFolder = None,
    pairs: Pairs = None,
    split: Split = None,
    protocol: Protocols = None,
    judgments: GradeFiles = None,
    json: JsonFile = None,
    pessimistic: Pessimistic = None,
    bins: BinsOption = None,
    scores: Scores = None,
    ids: Ids = None,
    uncertainty: Uncertainty = None,
    posthoc: PostHoc = None,
    device: Device = "auto",
) -> None:
    """Report retrieval, uncertainty and agreement with human grades, of a trained model or of anybody's scores.

    What is not given is as in the run (of its protocols, those that fit the split), unless --pairs names other data.
    """
    from vacsr.files import check_output, write_json

    given = _given(protocol, judgments, pessimistic=pessimistic, bins=bins, posthoc=posthoc)
    judged = _judged(run, scores, ids=ids, uncertainty=uncertainty, posthoc=posthoc)
    if json is not None:
        own = run_files(judged) if isinstance(judged, Path) else [path for path in judged if path is not None]
        check_output("--json", json, inputs=[*own, *spec_files(pairs), *(judgments or ())])
    if isinstance(judged, ScoreFiles):
        report = _judge_matrix(judged, pairs, split=split, given=given)
    else:
        report = _judge_run(judged, pairs, split=split, given=given, device=device)
    if json is not None:
        write_json(json, report.to_json())
    typer.echo(report.to_markdown())


def _judged(
    run: Path | None, scores: Path | None, *, ids: Path | None, uncertainty: Path | None, posthoc: PostHocChoice | None
) -> Path | ScoreFiles:
    """A run, or anybody's scores with their ids; what goes with neither is refused."""
    if scores is not None:
        if posthoc is not None:
            raise UsageError("--posthoc needs a trained model, --scores has none — give --uncertainty FILE instead")
        if run is not None or ids is None:
            raise UsageError(
                "--scores stands for a RUN and needs --ids — type: vacsr evaluate --scores M.npy --ids ids.json"
            )
        return ScoreFiles(scores, ids, uncertainty)
    if run is None or ids is not None or uncertainty is not None:
        raise UsageError(
            "evaluate takes a RUN alone, or --scores with --ids — type: vacsr evaluate runs/NAME, "
            "or: vacsr evaluate --scores M.npy --ids ids.json"
        )
    return run


def _given(
    protocol: list[str] | None,
    judgments: list[Path] | None,
    *,
    pessimistic: bool | None,
    bins: Bins | None,
    posthoc: PostHocChoice | None,
) -> dict[str, Any]:
    """The fields of a recipe's `evaluate` that were typed; the others are the run's, or the defaults."""
    fields: dict[str, Any] = {
        "protocols": protocol,
        "judgments": [str(path) for path in judgments or ()],
        "ties": None if pessimistic is None else "pessimistic" if pessimistic else "stable",
        "bins": bins and bins.value,
        "posthoc": posthoc and posthoc.value,
    }
    return {name: value for name, value in fields.items() if value}


def _judge_run(
    run: Path, pairs: str | None, *, split: str | None, given: dict[str, Any], device: str
) -> RetrievalReport:
    """A trained model on its own data or on others; protocols that nobody asked for now need not fit."""
    from vacsr.evaluate.exact import scene_truth
    from vacsr.evaluate.protocols import fitting_protocols
    from vacsr.evaluate.retrieval import evaluate_retrieval
    from vacsr.scoring import PairScorer
    from vacsr.train.run import run_posthoc

    settings = _evaluate_settings({} if pairs else run_section(run, "evaluate"), given)
    scorer = PairScorer.from_pretrained(run, device=device)
    if settings.posthoc != "none":
        scorer = run_posthoc(run, scorer.model, kind=settings.posthoc, device=device)
    data = _pairs_to_report(run, pairs, split=split)
    protocols = settings.protocols if "protocols" in given else fitting_protocols(settings.protocols, data)
    return evaluate_retrieval(
        scorer, data,
        protocols=protocols, judgments=_judgments(settings), ties=settings.ties, bins=settings.bins,
        truth=scene_truth(pairs or run_pairs(run), data),
    )  # fmt: skip


def _judge_matrix(files: ScoreFiles, pairs: str | None, *, split: str | None, given: dict[str, Any]) -> RetrievalReport:
    """Scores of any system; labels come from the ids file, from --pairs, or with COCO's protocols from COCO."""
    from vacsr.data import load_pairs
    from vacsr.evaluate.captions import coco_caption_image
    from vacsr.evaluate.protocols import check_protocols
    from vacsr.evaluate.retrieval import evaluate_scores
    from vacsr.evaluate.score_files import MatrixIds, labels_from, own_labels, read_ids, read_scores

    settings = _evaluate_settings({}, given)
    check_protocols(settings.protocols)
    ids = read_ids(files.ids)
    if pairs is not None:
        labels = labels_from(load_pairs(pairs, split=split), ids)
    elif ids.caption_image is None and "flickr" not in settings.protocols:
        labels = coco_caption_image(ids.images, ids.captions)
    else:
        labels = own_labels(ids)
    found = read_scores(files.scores, ids, uncertainty=files.uncertainty)
    return evaluate_scores(
        found, MatrixIds(ids.images, ids.captions, labels, split=split or "all"),
        protocols=settings.protocols, judgments=_judgments(settings), ties=settings.ties, bins=settings.bins,
    )  # fmt: skip


def _judgments(settings: EvaluateConfig) -> list[Judgments]:
    from vacsr.evaluate.judgments import read_judgments

    return [read_judgments(Path(path).expanduser()) for path in settings.judgments]


def _pairs_to_report(run: Path, pairs: str | None, *, split: str | None) -> PairSet | PhotoSet:
    """The split asked for; else `test` where the data have one, and everything, with a word about it, otherwise.

    What could not be read when the run was trained is left out here too, if the run says so.
    """
    from vacsr.config import DataConfig
    from vacsr.config.io import parse
    from vacsr.data import parse_spec
    from vacsr.train.data import read_split

    policy = {} if pairs else {k: v for k, v in run_section(run, "data").items() if k in ("on_error", "workers")}
    config = parse(DataConfig, {**policy, "pairs": pairs or run_pairs(run)})
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
    """The run's own settings but for its splits, and on top of them the options that were given."""
    from vacsr.config import EvaluateConfig
    from vacsr.config.io import parse

    known = {name: value for name, value in own.items() if name in EvaluateConfig.model_fields and name != "splits"}
    return parse(EvaluateConfig, {**known, **given})
