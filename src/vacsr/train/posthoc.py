"""Post-hoc uncertainty of a run that is already there."""

from __future__ import annotations

from pathlib import Path

from vacsr.config import DataConfig, TrainConfig
from vacsr.config.io import parse, read_yaml
from vacsr.errors import UsageError
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.scoring.posthoc import POSTHOC_FILE, CosineDistanceScorer, PostHoc, PostHocScorer, PostHocUncertainty
from vacsr.train.recipe import training_data


def run_posthoc(run: Path, model: MatchingModel, *, kind: PostHoc, device: str = "auto") -> PairScorer:
    """A scorer with what the run kept, or else with a fit to the run's training data; 1 − cosine needs neither."""
    if kind == "cosine":
        return CosineDistanceScorer(model, device=device)
    if (run / POSTHOC_FILE).is_file():
        return PostHocScorer(model, PostHocUncertainty.load(run / POSTHOC_FILE), device=device)
    if not (run / "config.yaml").is_file():
        message = f"{run} is a model folder, so it does not say on which data post-hoc uncertainty is to be fitted"
        raise UsageError(f"{message} — give the run folder")
    raw = read_yaml(run / "config.yaml")
    data, plan = parse(DataConfig, raw.get("data") or {}), raw.get("train") or {}
    size, seed = (plan.get(name, TrainConfig.model_fields[name].default) for name in ("batch_size", "seed"))
    found = PostHocUncertainty.fit(model, training_data(data).train, batch_size=size, seed=seed, device=device)
    return PostHocScorer(model, found, device=device)
