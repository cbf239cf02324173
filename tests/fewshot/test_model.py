"""A trained run as a person uses it: photos in, names out, wherever its CLIP lies."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.errors import DataError, UsageError
from vacsr.fewshot import fewshot_from, load_fewshot, run_fewshot
from vacsr.fewshot.data import load_sets
from vacsr.fewshot.model import FewshotModel
from vacsr.files import read_tensors
from vacsr.provenance import UNKNOWN

from .conftest import CLASSES, TRANSFORM, Toy, colours

QUICK = ("train.epochs=1", "train.steps_per_epoch=2", "train.lr=1e-3")


@pytest.mark.parametrize("method", ["vacsr", "coop", "mmrl"])
def test_predictions_are_the_reports(raw: dict[str, Any], tmp_path: Path, method: str) -> None:
    recipe = fewshot_from(raw, [f"method={method}", *QUICK])
    run_fewshot(recipe, tmp_path, progress=False)
    model = load_fewshot(tmp_path, device="cpu")
    saved, _ = read_tensors(tmp_path / "answers.safetensors")
    base = load_sets(recipe.data).tests[0]
    photos = [base.photos.photos.open(row) for row in range(len(base.photos))]
    predicted = model.predict(photos, batch_size=5)
    assert predicted.names == base.classes.names
    assert predicted.best() == [base.classes.names[index] for index in saved["base.predicted"].tolist()]
    torch.testing.assert_close(
        predicted.probabilities.amax(dim=1).double(), saved["base.confidence"], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(predicted.probabilities.sum(dim=1), torch.ones(12))
    assert (predicted.uncertainty is not None) == (method == "vacsr")
    if predicted.uncertainty is not None:
        own = predicted.uncertainty[torch.arange(12), saved["base.predicted"]]
        torch.testing.assert_close(own.double(), saved["base.uncertainty"], rtol=0, atol=1e-5)
    same = model.predict(photos[:2], list(model.classes.names))
    torch.testing.assert_close(same.probabilities, predicted.probabilities[:2], rtol=0, atol=1e-5)


def test_other_names(raw: dict[str, Any], tmp_path: Path) -> None:
    recipe = fewshot_from(raw, ["method=coprompt", *QUICK])
    run_fewshot(recipe, tmp_path, progress=False)
    model = load_fewshot(tmp_path, device="cpu")
    model = replace(model, classes=model.classes._replace(sentences=(("one",),) * 3))
    photo = load_sets(recipe.data).tests[0].photos.photos.open(0)
    predicted = model.predict([photo], ["red tree", "blue fish"])
    assert (predicted.names, predicted.probabilities.shape) == (("red tree", "blue fish"), (1, 2))
    assert predicted.best()[0] in predicted.names
    swapped = model.predict([photo], ["blue fish", "red tree"])
    torch.testing.assert_close(swapped.probabilities, predicted.probabilities.flip(1), rtol=0, atol=1e-5)
    for photos, names in (([photo], "red tree"), ([photo], []), ([photo], ["red tree", " "]), ([], None)):
        with pytest.raises(UsageError, match="give a list of"):
            model.predict(photos, names)


def test_a_relative_start_is_found_from_anywhere(
    raw: dict[str, Any], tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(start / "model", tmp_path / "here" / "clip" / "model")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run_fewshot(fewshot_from(raw, ["backbone.start=clip", *QUICK]), Path("run"), progress=False)
    monkeypatch.chdir(tmp_path / "there")
    model = load_fewshot("../here/run", device="cpu")
    (tmp_path / "here" / "clip").rename(tmp_path / "moved")
    with pytest.raises(DataError, match=r"here/clip, which is missing — .*start=FOLDER"):
        load_fewshot("../here/run", device="cpu")
    again = load_fewshot("../here/run", device="cpu", start="../moved")
    assert all(torch.equal(tensor, again.method.weights()[name]) for name, tensor in model.method.weights().items())


def test_answers_do_not_depend_on_the_batch() -> None:
    method, photos = Toy(torch.Generator().manual_seed(0)), colours(11)
    model = FewshotModel(method, CLASSES, TRANSFORM, UNKNOWN)
    one, many = (model.evaluate(photos, CLASSES, batch_size=size) for size in (1, 4))
    assert torch.equal(one.predicted, many.predicted)
    for row in range(11):
        square = TRANSFORM.pixels(photos.photos.open(row))
        logits = method.predict(TRANSFORM.normalize(square[None]), method.prepare(CLASSES))[0][0]
        assert int(one.predicted[row]) == int(logits.argmax())
        assert float(many.confidence[row]) == pytest.approx(logits.detach().softmax(0).max().item(), abs=1e-5)
