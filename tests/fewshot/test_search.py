"""The search of Appendix C.2: validation shots decide, and nobody looks at the test."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.errors import DataError, UsageError
from vacsr.fewshot import fewshot_from, run_fewshot
from vacsr.fewshot.data import load_sets
from vacsr.fewshot.model import FewshotModel
from vacsr.fewshot.run import search, validation_accuracy, with_choice

CPU = torch.device("cpu")
LISTS = {"image_blocks": ["first 0", "last 1"], "text_blocks": ["none", "first 2"], "epochs": [1, 2]}


@pytest.fixture
def vacsr_raw(raw: dict[str, Any]) -> dict[str, Any]:
    return {**raw, "method": "vacsr", "search": LISTS}


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What candidates score instead of being trained; the test fills it, and finds the recipes that were asked for."""
    accuracies: list[Any] = []

    def score(recipe: Any, *args: Any, **kwargs: Any) -> float | None:
        asked.append(recipe)
        accuracy: float | None = accuracies[len(asked) - 1]
        return accuracy

    asked: list[Any] = []
    monkeypatch.setattr("vacsr.fewshot.run.validation_accuracy", score)
    return accuracies


def searched(raw: dict[str, Any], out: Path, *, mark: str = "mark") -> Any:
    recipe = fewshot_from(raw)
    task = load_sets(recipe.data)
    return search(recipe, task, out=out, description={"mark": mark}, device=CPU, progress=False)


def test_every_combination_is_a_candidate(vacsr_raw: dict[str, Any]) -> None:
    recipe = fewshot_from(vacsr_raw)
    table = recipe.search.candidates()
    assert len({json.dumps(choice) for choice in table}) == 8
    assert table[1] == {"image_blocks": "first 0", "text_blocks": "none", "epochs": 2}
    chosen = with_choice(recipe, table[-1])
    assert (chosen.method.image_blocks, chosen.method.text_blocks, chosen.train.epochs) == ("last 1", "first 2", 2)
    assert chosen.method.adapter == recipe.method.adapter  # type: ignore[union-attr]
    assert fewshot_from({}).search.candidates() == []


def test_a_stopped_search_continues_and_another_one_starts_again(
    vacsr_raw: dict[str, Any], scores: list[Any], tmp_path: Path
) -> None:
    """The best is taken, among equals the first."""

    def written() -> list[float]:
        return [one["val_accuracy"] for one in json.loads((tmp_path / "search.json").read_text())["candidates"]]

    table = fewshot_from(vacsr_raw).search.candidates()
    scores += [10.0, 20.0, None]
    assert searched(vacsr_raw, tmp_path) is None
    scores += [1.0, 20.0, 3.0, 4.0, 5.0, 6.0]
    assert searched(vacsr_raw, tmp_path) == table[1]
    assert written() == [10.0, 20.0, 1.0, 20.0, 3.0, 4.0, 5.0, 6.0]
    record = json.loads((tmp_path / "search.json").read_text())
    assert (record["best"], record["samples"]) == (table[1], 9)  # of three base classes
    scores += [7.0] * 8
    assert searched(vacsr_raw, tmp_path, mark="another") == table[0]
    assert written() == [7.0] * 8
    (tmp_path / "search.json").write_text("torn")
    with pytest.raises(DataError, match=r"search\.json"):
        searched(vacsr_raw, tmp_path)


def test_a_search_needs_validation_shots(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["data"]["shots"] = 8  # all there are
    with pytest.raises(UsageError, match="needs validation shots"):
        run_fewshot(fewshot_from({**raw, "search": {"epochs": [1]}}), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


class Sealed:
    """A test split that nobody may look at: neither photos nor labels, not even how many."""

    def __getattribute__(self, name: str) -> Any:
        raise PermissionError(f"the test split was read: {name}")

    def __len__(self) -> int:
        raise PermissionError("the test split was counted")


def test_a_candidate_is_scored_on_the_validation_shots(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the shots that it was trained on, and over the classes of training."""
    recipe = fewshot_from(raw, ["train.epochs=1"])
    sets = load_sets(recipe.data)
    tested: list[Any] = []
    evaluate = FewshotModel.evaluate

    def watched(self: FewshotModel, photos: Any, classes: Any, **options: Any) -> Any:
        tested.append((photos, classes))
        return evaluate(self, photos, classes, **options)

    monkeypatch.setattr(FewshotModel, "evaluate", watched)
    accuracy = validation_accuracy(recipe, sets, device=CPU, label="")
    assert tested == [(sets.val, sets.classes)]
    assert accuracy is not None
    assert 0 <= accuracy <= 100
    assert not set(sets.val.ids()) & set(sets.train.ids())


def test_the_test_is_read_when_the_choice_is_made_and_trained(raw: dict[str, Any], tmp_path: Path) -> None:
    """And what is trained is the chosen candidate."""

    def sealed(config: Any) -> Any:
        task = load_sets(config)
        return task._replace(tests=tuple(one._replace(photos=Sealed()) for one in task.tests))

    recipe = fewshot_from({**raw, "method": "vacsr", "search": {"image_blocks": ["none", "first 1"], "epochs": [1, 3]}})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("vacsr.fewshot.run.load_sets", sealed)
        with pytest.raises(PermissionError, match="the test split was"):
            run_fewshot(recipe, tmp_path / "run", progress=False)
    written = json.loads((tmp_path / "run" / "search.json").read_text())
    assert len(written["candidates"]) == 4
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file(), "only the report is missing"
    report = run_fewshot(recipe, tmp_path / "run", resume=True, progress=False).report
    choice = report["search"]
    assert choice == written["best"]
    direct = {"name": "vacsr", "image_blocks": choice["image_blocks"]}
    recipe = fewshot_from({**raw, "method": direct}, [f"train.epochs={choice['epochs']}"])
    plain = run_fewshot(recipe, tmp_path / "plain", progress=False).report
    assert (plain["results"], plain["trainable"]) == (report["results"], report["trainable"])
