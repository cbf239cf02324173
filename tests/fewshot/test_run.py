"""Whole runs on the scenes world with tiny towers: folders, reports, every method, and models read back."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from vacsr.config.base import METHODS, MethodConfig, register
from vacsr.errors import DataError, FolderInUse, ProvenanceMismatch, UsageError
from vacsr.evaluate.fewshot import Answers, answers, fewshot_result
from vacsr.fewshot import fewshot_from, load_fewshot, read_fewshot, run_fewshot
from vacsr.fewshot.data import load_sets
from vacsr.fewshot.methods import ClassSet, ClipModel, FewshotMethod
from vacsr.fewshot.methods.base import PublishedPlan
from vacsr.fewshot.methods.clipood import Clipood
from vacsr.fewshot.model import FewshotModel
from vacsr.files import lock_file, read_tensors, write_tensors
from vacsr.model import MatchingModel
from vacsr.pretrained import config_digest


def run(raw: dict[str, Any], out: Path, *overrides: str, resume: bool = False) -> dict[str, Any]:
    report = run_fewshot(fewshot_from(raw, overrides), out, resume=resume, progress=False).report
    assert report is not None
    return report


@pytest.fixture
def coop_run(raw: dict[str, Any], tmp_path: Path) -> Path:
    """A finished run."""
    run(raw, tmp_path / "coop", "train.epochs=1")
    return tmp_path / "coop"


def test_a_folder_with_a_run_is_left_alone(raw: dict[str, Any], coop_run: Path) -> None:
    """Unless it is resumed, by the same recipe and by nobody else."""

    def snapshot() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in coop_run.rglob("*") if path.is_file()}

    before = snapshot()
    with lock_file(coop_run / ".lock", wait="", elsewhere="", remove=True):
        for resume in (False, True):
            with pytest.raises(FolderInUse, match=rf"\(pid {os.getpid()}\) is using"):
                run(raw, coop_run, "train.epochs=1", resume=resume)
    with pytest.raises(UsageError, match="already holds a run"):
        run(raw, coop_run, "train.epochs=1")
    for change in ("train.lr=0.2", "data.seed=3", "method.context=a picture of", "search.epochs=[1]"):
        with pytest.raises(DataError, match="another configuration or data"):
            run(raw, coop_run, "train.epochs=1", change, resume=True)
    assert snapshot() == before


@pytest.mark.parametrize("method", sorted(METHODS["fewshot"]))
def test_every_method_runs_and_is_read_back(raw: dict[str, Any], tmp_path: Path, method: str) -> None:
    report = run(raw, tmp_path, f"method={method}", "train.epochs=1", "train.steps_per_epoch=2", "train.lr=1e-3")
    names = {path.name for path in tmp_path.iterdir()}
    trained = {"checkpoint"} if method != "zeroshot" else set()
    assert names == trained | {
        "config.yaml", "shots.json", "metrics.jsonl", "model", "report.json", "answers.safetensors",
    }  # fmt: skip
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert (report["task"], report["method"], report["protocol"]) == ("fewshot", method, "base-to-novel")
    assert report["shots_hash"] == json.loads((tmp_path / "shots.json").read_text())["hash"]
    assert [(one["split"], one["samples"], one["classes"]) for one in report["results"]] == [
        ("base", 12, 3), ("new", 12, 3),
    ]  # fmt: skip
    base, new = (one["accuracy"] for one in report["results"])
    assert report["hm"] == pytest.approx(2 * base * new / (base + new) if base + new else 0.0)
    assert (report["trainable"] > 0) == (method != "zeroshot")
    assert all(("uncertainty" in one["selective"]) == (method == "vacsr") for one in report["results"])
    again = load_fewshot(tmp_path, device="cpu")
    task = load_sets(fewshot_from(raw).data)
    assert again.classes == task.classes
    new_set = task.tests[1]
    answers = again.evaluate(new_set.photos, new_set.classes)
    saved, _ = read_tensors(tmp_path / "answers.safetensors")
    assert torch.equal(answers.predicted, saved["new.predicted"])
    torch.testing.assert_close(answers.confidence, saved["new.confidence"], rtol=0, atol=1e-6)
    assert torch.equal(saved["new.label"], new_set.photos.labels)


class ScaleConfig(MethodConfig):
    """Settings of a method of one's own."""

    name: Literal["scale"] = "scale"
    start: float = 1.0


class Scale(FewshotMethod):
    """A learned scale of the features, registered as a user's module would do it."""

    plan = PublishedPlan({"lr": 0.25, "epochs": 1, "warmup_epochs": 0})

    def __init__(self, clip: ClipModel, config: ScaleConfig, *, classes: ClassSet, generator: torch.Generator) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        self.scale = nn.Parameter(torch.tensor([config.start]))

    def image_features(self, pixels: Tensor) -> Tensor:
        return self.scale * super().image_features(pixels)


def test_a_method_of_ones_own_trains_and_is_read_back(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "fewshot", dict(METHODS["fewshot"]))
    register("scale", ScaleConfig, presets={"half": {"start": 0.5}})(Scale)
    raw |= {"preset": "paper", "method": "scale-half", "train": {"device": "cpu", "batch_size": 4}}
    recipe = fewshot_from(raw)
    assert (recipe.method, recipe.train.lr, recipe.train.epochs) == (ScaleConfig(start=0.5), 0.25, 1)
    report = run_fewshot(recipe, tmp_path, progress=False).report
    assert (report["method"], report["trainable"]) == ("scale", 1)
    assert read_fewshot(tmp_path / "config.yaml") == recipe
    loaded = load_fewshot(tmp_path, device="cpu").method
    assert isinstance(loaded, Scale)
    assert loaded.scale.item() != 0.5


def test_the_report_has_the_bins_and_coverages_that_were_asked_for(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, evaluated = torch.Generator().manual_seed(0), []

    def evaluate(self: FewshotModel, photos: Any, classes: ClassSet, **options: Any) -> Answers:
        logits, sigma = 2 * torch.randn(12, 3, generator=draw), torch.rand(12, 3, generator=draw)
        evaluated.append(answers(logits, photos.labels, uncertainty=sigma))
        return evaluated[-1]

    monkeypatch.setattr(FewshotModel, "evaluate", evaluate)
    report = run(raw, tmp_path, "method=zeroshot", "evaluate.bins=4", "evaluate.coverages=[0.25,0.5,1.0]")
    saved, _ = read_tensors(tmp_path / "answers.safetensors")
    for split, predicted, result in zip(("base", "new"), evaluated, report["results"], strict=True):
        assert result == fewshot_result(split, predicted, classes=3, bins=4, coverages=(0.25, 0.5, 1.0))
        for name in ("predicted", "confidence", "uncertainty"):
            assert torch.equal(saved[f"{split}.{name}"], getattr(predicted, name))


# --------------------------------------------------------------------------------------------------- same and again


def same_model(one: Path, other: Path) -> bool:
    first, second = (read_tensors(folder / "model" / "model.safetensors")[0] for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("method", ["vacsr", "clipood", "coprompt"])
def test_a_stopped_run_ends_as_an_unbroken_one(
    raw: dict[str, Any], tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VACSR sets a bias in its first step, CLIPood carries a mean of its weights, CoPrompt draws and sees two views."""
    words = (f"method={method}", "train.lr=1e-3", "train.epochs=3")
    whole = run(raw, tmp_path / "whole", *words)
    kind = type(load_fewshot(tmp_path / "whole", device="cpu").method)
    plain = kind.after_step

    def interrupted(self: Any, step: int, steps: int) -> None:
        plain(self, step, steps)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "after_step", interrupted)
        cut = run_fewshot(fewshot_from(raw, words), tmp_path / "cut", progress=False)
    assert cut.interrupted
    assert cut.state.step == 3
    assert not (tmp_path / "cut" / "report.json").exists()
    recipe = read_fewshot(tmp_path / "cut" / "config.yaml")
    again = run_fewshot(recipe, tmp_path / "cut", resume=True, progress=False)
    assert again.report == whole
    assert same_model(tmp_path / "whole", tmp_path / "cut")


def test_the_same_recipe_gives_the_same_run_and_another_seed_another(raw: dict[str, Any], tmp_path: Path) -> None:
    first = run(raw, tmp_path / "a", "train.workers=2", "train.cache_gb=0")
    assert run(raw, tmp_path / "b") == first
    assert same_model(tmp_path / "a", tmp_path / "b")
    run(raw, tmp_path / "c", "train.seed=9")
    assert not same_model(tmp_path / "a", tmp_path / "c")


def test_a_draw_from_a_file_is_reported_as_such(raw: dict[str, Any], coop_run: Path, tmp_path: Path) -> None:
    file = coop_run / "shots.json"
    report = run(raw, tmp_path / "again", f"data.shots_file={file}", "data.seed=7", "train.epochs=1")
    drawn = json.loads((coop_run / "report.json").read_text())
    assert report["shots_file"] == str(file)
    assert not {"shots", "seed"} & report.keys()
    assert (drawn["shots"], drawn["seed"]) == (3, 1)
    assert "shots_file" not in drawn
    assert report["shots_hash"] == drawn["shots_hash"]


def test_other_targets_are_evaluated_and_a_search_is_kept(raw: dict[str, Any], tmp_path: Path) -> None:
    spec = raw["data"]["spec"]
    raw["data"] |= {"protocol": "domain", "targets": {"blur": f"{spec},domain=blur"}}
    raw["search"] = {"epochs": [1, 2]}
    report = run(raw, tmp_path)
    assert [(one["split"], one["classes"]) for one in report["results"]] == [("source", 6), ("blur", 6)]
    assert "hm" not in report
    raw["data"]["targets"] = {"outline": f"{spec},domain=outline"}
    again = run(raw, tmp_path, resume=True)
    assert [one["split"] for one in again["results"]] == ["source", "outline"]
    assert again["results"][0] == report["results"][0]
    assert again["search"] == report["search"] != {}


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_retrained_start_is_not_resumed_from(raw: dict[str, Any], tmp_path: Path, start: Path) -> None:
    own = tmp_path / "start"
    shutil.copytree(start / "model", own / "model")
    raw["backbone"]["start"] = str(own)
    run(raw, tmp_path / "run", "train.epochs=1")
    for part in ("head", "backbone"):  # heads alone are enough
        model = MatchingModel.from_pretrained(start)
        with torch.no_grad():
            next(tensor for name, tensor in model.named_parameters() if part in name).add_(1e-3)
        model.save_pretrained(own / "model")
        with pytest.raises(DataError, match="another configuration or data"):
            run(raw, tmp_path / "run", "train.epochs=1", resume=True)
    shutil.copytree(start / "model", own / "model", dirs_exist_ok=True)
    run(raw, tmp_path / "run", "train.epochs=1", resume=True)


def test_a_model_on_another_clip_is_refused(raw: dict[str, Any], tmp_path: Path, start: Path) -> None:
    run(raw, tmp_path, "method=clipood")
    loaded = load_fewshot(tmp_path, device="cpu")
    assert isinstance(loaded.method, Clipood)
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    described["origin"]["revision"] = "0" * 12
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match="not saved together"):
        load_fewshot(tmp_path)
    tensors, _ = read_tensors(tmp_path / "model" / "model.safetensors")
    write_tensors(tmp_path / "model" / "model.safetensors", tensors, metadata={"config": config_digest(described)})
    with pytest.raises(ProvenanceMismatch):
        load_fewshot(tmp_path)
    with pytest.raises(DataError, match="not a few-shot model"):
        load_fewshot(start)
