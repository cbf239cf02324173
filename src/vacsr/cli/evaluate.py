"""`vacsr evaluate` and `vacsr score`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vacsr.cli.options import RUN_HELP, Device, JsonFile, Ray, RunFolder, Skip, load_scorer, one_line, say_untrained
from vacsr.errors import UsageError


def evaluate(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help=f"{RUN_HELP} Not with --scores.")] = None,
    pairs: Annotated[str | None, typer.Option(metavar="SPEC", help="Data (docs/data.md); default: the run's.")] = None,
    split: Annotated[str | None, typer.Option(metavar="S", help="Split to use; default: test, else all.")] = None,
    protocol: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P",
            help="flickr, or on COCO coco-1k, coco-5k, cxc, eccv, on a part of it cxc-part, eccv-part. Repeatable.",
        ),
    ] = None,
    grades: Annotated[
        list[str] | None,
        typer.Option("--grades", "--judgments", metavar="FILE", help="Human grades, FILE or NAME=FILE; repeatable."),
    ] = None,
    preferences: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Images with a better and a worse caption; repeatable.")
    ] = None,
    rival: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="Another system's scores of these pairs; repeatable.")
    ] = None,
    captions: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Vectors of captions outside the data; repeatable.")
    ] = None,
    json: JsonFile = None,
    pessimistic: Annotated[
        bool | None, typer.Option("--pessimistic/--stable", help="Ties: wrong items first, or in index order.")
    ] = None,
    bins: Annotated[
        Literal["count", "equal"] | None, typer.Option(help="Uncertainty bins of equal count, or of equal width.")
    ] = None,
    scores: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of RUN: images × captions, .npy or .safetensors.")
    ] = None,
    ids: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --scores: JSON with images, captions and caption_image.")
    ] = None,
    uncertainty: Annotated[Path | None, typer.Option(metavar="FILE", help="With --scores: one value per pair.")] = None,
    posthoc: Annotated[
        Literal["none", "cosine"] | None, typer.Option(help="Uncertainty for a cosine method: 1 − cosine.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Evaluate a model: retrieval, uncertainty, agreement with human grades.

    RUN is a trained model or pretrained encoders; --scores takes the score matrix of any other system.

    Options that you leave out have the run's values, unless --pairs names other data.
    """
    from vacsr.config import EvaluateConfig
    from vacsr.config.io import parse
    from vacsr.data.formats import spec_files
    from vacsr.evaluate.pair_files import named_file
    from vacsr.evaluate.report import evaluate_files
    from vacsr.files import check_output, write_json
    from vacsr.pretrained import encoder_spec
    from vacsr.train.checkpoint import run_files
    from vacsr.train.run import evaluate_run

    _check_kind(run, scores, ids=ids, uncertainty=uncertainty, posthoc=posthoc)
    fields: dict[str, Any] = {
        "protocols": protocol,
        "judgments": grades,
        "preferences": preferences,
        "rivals": rival,
        "captions": [str(path) for path in captions or ()],
        "ties": None if pessimistic is None else "pessimistic" if pessimistic else "stable",
        "bins": bins,
        "posthoc": posthoc,
    }
    settings = {name: value for name, value in fields.items() if value}
    if json is not None:
        named = [named_file(text)[1] for text in (*(grades or ()), *(preferences or ()), *(rival or ()))]
        inputs = [path for path in (scores, ids, uncertainty, *named, *(captions or ())) if path is not None]
        check_output("--json", json, inputs=[*inputs, *(run_files(run) if run else ()), *spec_files(pairs)])
    if scores is not None and ids is not None:
        config = parse(EvaluateConfig, settings)
        report = evaluate_files(scores, ids, uncertainty=uncertainty, pairs=pairs, split=split, config=config)
    else:
        assert run is not None, "checked above"
        report = evaluate_run(run, pairs=pairs, split=split, settings=settings, device=device)
        if encoder_spec(run) is not None:
            say_untrained(str(run))
    if json is not None:
        write_json(json, report.to_dict())
    typer.echo(report.to_markdown())


def _check_kind(
    run: Path | None, scores: Path | None, *, ids: Path | None, uncertainty: Path | None, posthoc: str | None
) -> None:
    """Either a run, or scores with their ids."""
    if scores is not None and posthoc is not None:
        raise UsageError("--posthoc needs a trained model, --scores has none — give --uncertainty FILE instead")
    if (run is None) == (scores is None) or (scores is None) != (ids is None) or (scores is None and uncertainty):
        examples = "vacsr evaluate runs/NAME, or: vacsr evaluate --scores M.npy --ids ids.json"
        raise UsageError(f"evaluate takes either RUN alone, or --scores with --ids — type: {examples}")


def score(
    run: RunFolder,
    image: Annotated[str | None, typer.Option(help="Path of a photo, or an image id of the data.")] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="A text; with an image id also a caption id. Repeatable.")
    ] = None,
    pairs: Annotated[str | None, typer.Option(metavar="SPEC", help="Data with the ids; default: the run's.")] = None,
    out: Annotated[Path | None, typer.Option(help="With --ray: a folder for the scores of all captions.")] = None,
    split: Annotated[str | None, typer.Option(help="With --ray: only this split; default: the SPEC's, or all.")] = None,
    skip: Skip = False,
    device: Device = "auto",
    ray: Ray = None,
) -> None:
    """Score a photo against texts: score, grade and the pair's uncertainty, tab-separated.

    The grade is the probability of a match; "–" for a method that only ranks. The uncertainty is σ; an ensemble has
    a column more, the disagreement of its members.

    A model with encoders takes any photo and any words; a model on embeddings of unknown origin takes ids of its data.

    With --ray, --pairs and --out instead of --image and --text, each caption is scored with its own image.
    """
    import torch

    from vacsr.data import load_pairs
    from vacsr.train.checkpoint import run_pairs

    if ray is not None and pairs is not None and out is not None:
        from vacsr.cli.options import over_parts
        from vacsr.scale import parts_of, score_task

        task = partial(score_task, run, split, "skip" if skip else "fail", device)
        over_parts(task, parts_of(pairs, out), out, ray=ray, device=device)
        typer.echo(f"{out}/*.parquet")
        return
    if image is None or not text:
        raise UsageError("score takes --image with --text, or --pairs with --out and --ray — see vacsr score --help")
    scorer = load_scorer(run, device=device)
    reads = scorer.model.has_towers or (scorer.model.backbone.reads_photos and Path(image).is_file())
    if reads and pairs is None:
        scores = scorer.score_all([image], text)
    else:
        scores = scorer.score_named(load_pairs(pairs or run_pairs(run), split="all"), image, text)
    cols = torch.arange(len(text))
    every = scores.at(torch.zeros_like(cols), cols)
    columns = {"score": every.score, "grade": every.grade, "uncertainty": every.uncertainty}
    columns |= {} if every.disagreement is None else {"disagreement": every.disagreement}
    typer.echo("\t".join(("image", "text", *columns)))
    for row, words in enumerate(text):
        forms = ((".4g" if name == "grade" else ".4f", values) for name, values in columns.items())
        numbers = ("–" if values is None else format(float(values[row]), form) for form, values in forms)
        typer.echo("\t".join(map(one_line, (image, words, *numbers))))
