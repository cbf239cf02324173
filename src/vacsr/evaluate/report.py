"""Retrieval reports: scores and ids in, the metrics of a protocol out, as a table or as JSON."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from vacsr.config import EvaluateConfig
from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.data.pairs import LabelledPairs
from vacsr.errors import DataError, EnvironmentProblem, UsageError
from vacsr.evaluate.agreement import JUDGED, Judgments, judged_result, read_judgments
from vacsr.evaluate.details import detail_tables
from vacsr.evaluate.histograms import score_histograms
from vacsr.evaluate.metrics import METRICS, RECALLS, retrieval_result
from vacsr.evaluate.pair_files import join_vectors, named_file, read_caption_vectors, read_preferences, read_rival
from vacsr.evaluate.pair_tests import PairTests, grades_result, preferences_result
from vacsr.evaluate.protocols import Gallery, check_protocols, coco_owners, fits_in_memory, protocol_galleries
from vacsr.evaluate.ranks import Ties
from vacsr.evaluate.score_files import MatrixIds, Scores, label_rows, read_ids, read_scores
from vacsr.evaluate.signals import Temperature, fit_temperatures, own_temperature, signals_result
from vacsr.evaluate.significance import Outcomes, query_outcomes
from vacsr.evaluate.truth import Truth, exact_metrics, scene_truth
from vacsr.evaluate.uncertainty import Bins, uncertainty_result
from vacsr.scoring.topk import DIRECTIONS, Direction

SCHEMA = 1
_DEFAULTS = EvaluateConfig()
_NO_TESTS = PairTests()
_UPSIDE_DOWN = 0.3  # correlation of σ with R@1 from which on it is no longer noise

ReportSets = Sequence[tuple[PairSet | PhotoSet, tuple[str, ...]]]
"""The splits of a report, each with those of the recipe's protocols that fit it."""


@runtime_checkable
class Scorer(Protocol):
    """Whatever scores a data set, such as :class:`vacsr.PairScorer`."""

    def score_set(self, pairs: Any) -> Scores:
        """Every pair."""


@dataclass(frozen=True, repr=False)
class RetrievalReport:
    """One result per protocol, with the keys of the evaluation JSON."""

    results: tuple[dict[str, Any], ...]
    outcomes: tuple[Outcomes, ...] = field(default=(), compare=False)
    """How each query did, in the order of the results; not part of the JSON."""
    model: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Which weights were evaluated, see :meth:`vacsr.MatchingModel.identity`, where it is a trained model."""

    @property
    def temperature(self) -> Temperature | None:
        """That of confidences, where one was fitted to a split."""
        for result in self.results:
            known = result.get("signals", {}).get("confidence", {})
            if known.get("fitted_on"):
                return Temperature(known["temperature_i2t"], known["temperature_t2i"], known["fitted_on"])
        return None

    def warn_of_sigma(self) -> None:
        """Say so where σ is upside down on the first split: the answers that it calls sure are wrong more often."""
        for result in self.results[:1]:
            sigma = result["uncertainty"] or {}
            ways = [way for way in DIRECTIONS if sigma.get(f"corr_r1_{way}", 0.0) > _UPSIDE_DOWN]
            if ways:
                where = f"on {result['split']} ({', '.join(ways)})"
                message = f"σ is upside down {where}: sure answers are wrong more often"
                warnings.warn(f"{message} — do not rely on σ; calibrate, or train longer", stacklevel=3)

    def __repr__(self) -> str:
        rows = []
        for result in self.results:
            row = [f"{result['protocol']} {result['split']}: RSUM {result['rsum']:.1f}"]
            row += [
                f"{name} τ-{one['variant']} {one['tau_published']:.1f}"
                for name, one in result.get("grades", {}).items()
            ]
            row += [f"{name} accuracy {one['accuracy']:.1f}" for name, one in result.get("preferences", {}).items()]
            rows.append(", ".join(row))
        return f"RetrievalReport({'; '.join(rows)})"

    def to_dict(self) -> dict[str, Any]:
        """``{"schema": 1, "model": {...}, "results": [...]}``, percent where a share; no model where it is unknown."""
        model = {"model": dict(self.model)} if self.model else {}
        return {"schema": SCHEMA, **model, "results": list(self.results)}

    def to_markdown(self, *, details: bool = True) -> str:
        """One row per protocol and split, with every metric but R-Precision, which mAP@R refines, and no empty column.

        ``details`` of each split's first protocol follow: AURC by uncertainty, agreement with grades, preferences.
        """
        more = {name: name for name in METRICS if name not in (*RECALLS, "r_precision")} | {"map_at_r": "mAP@R"}
        head = ["protocol", "split", *(f"{direction} R@1/5/10" for direction in DIRECTIONS), "RSUM"]
        head += [f"{title} i2t/t2i" for title in more.values()]
        head += ["σ–R@1 i2t/t2i", "τ-c experts", "τ-b crowd"]
        columns = zip(head, *(_markdown_row(result, tuple(more)) for result in self.results), strict=True)
        shown = (column for column in columns if not self.results or set(column[1:]) - {"–", "– / –"})
        first, *rows = zip(*shown, strict=True)
        tables = [markdown_table(first, rows)]
        by_split = {result["split"]: result for result in reversed(self.results)}  # the first of its protocols
        if details:
            tables += [markdown_table(*table) for table in detail_tables(list(by_split.values()))]
        return "\n\n".join(tables)

    def to_frame(self) -> Any:
        """One row per protocol and split, one column per metric, such as ``i2t.r1``; needs pandas."""
        return data_frame(self.results)

    _repr_markdown_ = to_markdown


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, align: str | Sequence[str] = "---") -> str:
    """A Markdown table; ``align`` is the rule below each heading, or below all but the first.

    >>> print(markdown_table(["way", "seconds"], [["a", "1"]], align="---:"))
    | way | seconds |
    | --- | ---: |
    | a | 1 |
    """
    rules = ["---", *[align] * (len(head) - 1)] if isinstance(align, str) else align
    lines = ([cell.replace("|", r"\|") for cell in cells] for cells in (head, rules, *rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def data_frame(rows: Iterable[dict[str, Any]]) -> Any:
    """A pandas DataFrame, one row per dictionary; names of nested ones are joined by dots, lists are left out.

    >>> data_frame([{"split": "test", "i2t": {"r1": 50.0, "bins": [1, 2]}}]).to_dict("records")
    [{'split': 'test', 'i2t.r1': 50.0}]
    """
    try:
        import pandas
    except ImportError as error:
        raise EnvironmentProblem("pandas is not installed — run: pip install pandas, or use to_dict()") from error
    frame = pandas.json_normalize(list(rows))
    return frame.loc[:, ~frame.map(lambda cell: isinstance(cell, list | tuple)).any()]


def evaluate_splits(
    scorer: Scorer,
    sets: ReportSets,
    config: EvaluateConfig,
    *,
    spec: str,
    dev: str | None = None,
    temperature: Temperature | None = None,
) -> RetrievalReport:
    """Score each split and report its protocols, as ``config`` says; ``spec`` is that of the data.

    The temperature of confidences is fitted to the split ``dev``, which is therefore scored first, or as given.
    """
    judgments, tests = config_judgments(config), config_tests(config)
    reports: dict[int, RetrievalReport] = {}
    for number, (pairs, protocols) in sorted(enumerate(sets), key=lambda entry: entry[1][0].split != dev):
        if protocols:
            fit = temperature is None and pairs.split == dev
            reports[number] = evaluate_retrieval(
                scorer, pairs,
                protocols=protocols, judgments=judgments, ties=config.ties, bins=config.bins,
                truth=scene_truth(spec, pairs), tests=tests, temperature="fit" if fit else temperature,
            )  # fmt: skip
            temperature = reports[number].temperature or temperature
    ordered = [report for _, report in sorted(reports.items())]
    results = tuple(result for report in ordered for result in report.results)
    return RetrievalReport(results, tuple(outcome for report in ordered for outcome in report.outcomes))


def evaluate_retrieval(
    scorer: Scorer | Scores,
    pairs: LabelledPairs,
    *,
    protocols: Sequence[str] = ("flickr",),
    judgments: Sequence[Judgments] = (),
    ties: Ties = "stable",
    bins: Bins = "count",
    truth: Truth | None = None,
    tests: PairTests = _NO_TESTS,
    temperature: Temperature | Literal["fit"] | None = None,
) -> RetrievalReport:
    """Score every pair of ``pairs``, or take given scores, and report each protocol.

    ``judgments`` adds agreement with human grades; ``ties`` orders equal scores; ``bins`` are the uncertainty's, of
    equal count or equal width; ``truth`` adds agreement with exact grades, where they are known; ``tests`` adds
    preferences, rivals and captions that are not in the data. ``temperature`` is that of the confidence: fitted to
    these pairs, or to a dev split before; None takes the scale of the loss.
    """
    by_protocol = protocol_galleries(protocols, pairs)  # refuses data that do not fit before anything is scored
    scores = scorer.score_set(pairs) if isinstance(scorer, Scorer) else scorer
    if fits_in_memory(pairs):
        _ = scores.score  # asked for once, it is kept: blocks are then views
    shared, missed = _human_sections(scores, pairs, judgments, tests)  # of every protocol
    if truth is not None:
        shared["exact"] = exact_metrics(scores, truth)
    shared["scores"] = score_histograms(scores, pairs)
    if temperature == "fit":
        gallery = Gallery.of_labels(pairs)
        temperature = fit_temperatures(scores, gallery, gallery.ranks(scores), split=pairs.split)
    heat = temperature or own_temperature(scores)
    cache: dict[Direction, Tensor] = {}
    signals: dict[Direction, dict[str, Tensor]] = {}
    results: list[dict[str, Any]] = []
    outcomes: list[Outcomes] = []
    for name, galleries in by_protocol.items():
        ranks = [gallery.ranks(scores, ties=ties) for gallery in galleries]
        sigma = uncertainty_result(scores, galleries, ranks, bins=bins, cache=cache)
        if sigma is not None and "judgments" in shared:
            by_experts = "auroc_false_negative_score" in shared["judgments"]
            sigma["auroc_false_negative"] = missed.get("sigma") if by_experts else None
        head = {"protocol": name, "split": pairs.split}
        by_signal = signals_result(scores, galleries, ranks, temperature=heat, missed=missed, cache=signals)
        results.append({**head, **retrieval_result(ranks), "uncertainty": sigma, "signals": by_signal, **shared})
        outcomes.append(query_outcomes(name, pairs, galleries=galleries, ranks=ranks))
    return RetrievalReport(tuple(results), tuple(outcomes))


evaluate_scores = evaluate_retrieval
"""By this name where scores are given."""


def _human_sections(
    scores: Scores, pairs: LabelledPairs, judgments: Sequence[Judgments], tests: PairTests
) -> tuple[dict[str, Any], dict[str, float]]:
    """The sections of a result that rest on people's grades, and by signal the AUROC of false negatives.

    That is of the reporting half of experts' grades, else of the first file of other grades.
    """
    sections: dict[str, Any] = {"grades": {}, "preferences": {}}
    missed: dict[str, float] = {}
    for key, split in JUDGED.items():
        section = judged_result(scores, pairs, judgments, split=split)
        by_signal = section.pop("auroc_false_negative", {})
        if by_signal:
            section["auroc_false_negative_score"] = by_signal["score"]
        if key == "judgments":
            missed = by_signal
        elif "sigma" in by_signal:
            section["auroc_false_negative"] = by_signal["sigma"]
        sections |= {key: section} if section else {}
    if judgments:
        sections["grades"] = grades_result(scores, pairs, judgments, tests)
    if tests.preferences:
        sections["preferences"] = preferences_result(scores, pairs, tests)
    return sections, missed or next((one["auroc_false_negative"] for one in sections["grades"].values()), {})


def evaluate_files(
    scores: Path,
    ids: Path,
    *,
    uncertainty: Path | None = None,
    pairs: str | None = None,
    split: str | None = None,
    config: EvaluateConfig = _DEFAULTS,
) -> RetrievalReport:
    """Report the score matrix of any system, see :mod:`.score_files`; ``config.splits`` and ``posthoc`` are not used.

    Labels come from the data set ``pairs`` if it is given, else from the ids file, or from COCO if the file has none
    and all protocols are COCO's.
    """
    check_protocols(config.protocols)
    names = read_ids(ids)
    if pairs is not None:
        data = load_pairs(pairs, split=split)
        image_ids = [data.image_ids[row] for row in data.caption_image.tolist()]
        owners = dict(zip(data.caption_ids, image_ids, strict=True))
    elif "caption_image" in names:
        owners = dict(zip(names["captions"], names["caption_image"], strict=True))
    elif "flickr" not in config.protocols:
        owners = coco_owners()
    else:
        message = f"{ids} does not say which image a caption belongs to"
        raise DataError(f"{message} — add caption_image, give --pairs SPEC, or choose a COCO protocol")
    images, captions = names["images"], names["captions"]
    labelled = MatrixIds(images, captions, label_rows(images, captions, owners), split=split or "all")
    return evaluate_scores(
        read_scores(scores, labelled, uncertainty=uncertainty), labelled,
        protocols=config.protocols, judgments=config_judgments(config), ties=config.ties, bins=config.bins,
        tests=config_tests(config),
    )  # fmt: skip


def config_judgments(config: EvaluateConfig) -> list[Judgments]:
    """The human grades that the config names."""
    return [read_judgments(path, name=name) for name, path in _named(config.judgments)]


def config_tests(config: EvaluateConfig) -> PairTests:
    """The preferences, rivals and vectors of captions that the config names."""
    return PairTests(
        preferences=tuple(read_preferences(path, name=name) for name, path in _named(config.preferences)),
        rivals={name: read_rival(path) for name, path in _named(config.rivals)},
        captions=join_vectors([read_caption_vectors(Path(path).expanduser()) for path in config.captions]),
    )


def _named(files: Sequence[str]) -> list[tuple[str, Path]]:
    """Names and paths; a name stands for one file."""
    named = [named_file(file) for file in files]
    for name, path in named:
        if [other for other, _ in named].count(name) > 1:
            raise UsageError(f"two files are called '{name}' — name them: NAME={path}")
    return named


def dev_rsum(scores: Scores, pairs: LabelledPairs) -> float:
    """RSUM alone: what model choice looks at."""
    return float(retrieval_result([Gallery.of_labels(pairs).ranks(scores)])["rsum"])


def _markdown_row(result: dict[str, Any], more: Sequence[str]) -> list[str]:
    def number(section: str, key: str, form: str = ".1f") -> str:
        value = (result.get(section) or {}).get(key)
        return "–" if value is None or value != value else format(value, form)

    return [
        result["protocol"],
        result["split"],
        *(" / ".join(number(direction, name) for name in RECALLS) for direction in DIRECTIONS),
        f"{result['rsum']:.1f}",
        *(" / ".join(number(direction, name) for direction in DIRECTIONS) for name in more),
        " / ".join(number("uncertainty", f"corr_r1_{direction}", ".2f") for direction in DIRECTIONS),
        number("judgments", "expert_tau_c"),
        number("judgments", "crowd_tau_b"),
    ]
