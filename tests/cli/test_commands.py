"""The command line: exit codes, one message on stderr, data alone on stdout, nothing half-written."""

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from vacsr.data import load_pairs
from vacsr.data.features import write_features
from vacsr.data.pairs import Provenance
from vacsr.evaluate.report import evaluate_retrieval

SPEC = "synthetic:images=20,held_out=15,per_image=2"
Patch = pytest.MonkeyPatch
Command = Callable[..., Any]
"""The fixture `vacsr`: words in, exit code and output out."""


@pytest.fixture
def recipe(recipes: dict[str, Path]) -> Path:
    return recipes["features"]


@pytest.fixture
def run(trained: Callable[[str], Path]) -> Path:
    return trained("features")


def test_train(vacsr: Command, recipe: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = vacsr("train", recipe, "--set", "train.epochs=2", "--set", "method.name=sigmoid")
    assert answer.code == 0, answer.err
    assert [line.split(" | ")[1] for line in answer.out.splitlines()[2:]] == ["dev", "test"]
    assert "epoch 2/2, dev RSUM" in answer.err
    config = yaml.safe_load(Path("runs/small/config.yaml").read_text(encoding="utf-8"))
    assert (config["train"]["epochs"], config["method"]["name"]) == (2, "sigmoid")
    assert vacsr("train", recipe).refused(2, "already holds a run", "--resume")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("method.name=vacs", "did you mean 'vacsr'"),
        ("train.epoch=3", "train.epoch"),
        ("train.epochs", "section.field=value"),
        ("evaluate.protocols=[coco-9k]", "flickr"),
        ("data.pairs=parquet:x", "parquet"),
    ],
)
def test_a_wrong_recipe_is_a_usage_error(vacsr: Command, recipe: Path, tmp_path: Path, change: str, word: str) -> None:
    assert vacsr("train", recipe, "--out", tmp_path / "run", "--set", change).refused(2, word)
    assert not (tmp_path / "run").exists()


def test_wrong_files_and_options_are_usage_errors(vacsr: Command, run: Path, tmp_path: Path) -> None:
    assert vacsr("train", tmp_path / "none.yaml").refused(2, "no such file")
    (tmp_path / "bad.yaml").write_text("a: [", encoding="utf-8")
    assert vacsr("train", tmp_path / "bad.yaml").refused(2, "not readable YAML")
    (tmp_path / "list.yaml").write_text("- a\n", encoding="utf-8")
    assert vacsr("train", tmp_path / "list.yaml").refused(2, "should hold sections")
    table = Path(__file__).parents[2] / "tables" / "retrieval.yaml"
    assert vacsr("compare", table, "--seeds", "one").refused(2, "--seeds 0,1,2")
    for words in (["train"], ["tain"], ["evaluate", run, "--nonsense"], ["evaluate", run, "--bins", "wide"]):
        assert vacsr(*words).code == 2


class Features:
    """Files of 20 images with two captions each, which a test may break."""

    def __init__(self, folder: Path) -> None:
        pairs = load_pairs(SPEC, split="train")
        self.folder, self.images, self.texts = folder, pairs.images.clone(), pairs.texts.view(20, 2, -1).clone()
        splits = ["train"] * 12 + ["dev"] * 4 + ["test"] * 4
        self.entries: list[dict[str, Any]] = [
            {"image": f"i{n}", "split": split, "captions": ["one", "two"]} for n, split in enumerate(splits)
        ]
        self.provenance = Provenance()

    def write(self) -> str:
        file, captions = self.folder / "features.safetensors", self.folder / "captions.json"
        tensors = {"image": self.images, "text": self.texts}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        if self.provenance.backbone:
            write_features(file, image=self.images, text=self.texts, provenance=self.provenance)
        captions.write_text(json.dumps(self.entries), encoding="utf-8")
        return f"features:{file},captions={captions}"


def test_broken_data_are_refused_and_nothing_is_written(
    vacsr: Command, recipe: Path, run: Path, tmp_path: Path
) -> None:
    def train(data: Features) -> Any:
        return vacsr("train", recipe, "--out", tmp_path / "run", "--set", f'data.pairs="{data.write()}"')

    def evaluate(spec: str) -> Any:
        return vacsr("evaluate", run, "--pairs", spec, "--json", tmp_path / "out.json")

    duplicate, nan, other, narrow = (Features(tmp_path) for _ in range(4))
    duplicate.entries[5]["image"] = "i4"
    assert train(duplicate).refused(4, "duplicate image id 'i4'")
    nan.texts[19, 1, 0] = torch.inf  # in the test split
    assert train(nan).refused(4, "'i19#1'")
    narrow.images = narrow.images[:, :32]
    assert evaluate(narrow.write()).refused(4, "expects features of dimension 64, these have 32")
    other.provenance = Provenance("clip:other")
    assert evaluate(other.write()).refused(4, "ProvenanceMismatch", "'clip:other'")
    torn, file = Features(tmp_path).write(), tmp_path / "features.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert evaluate(torn).refused(4, "features.safetensors")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "out.json").exists()


def test_a_folder_without_a_model(vacsr: Command, run: Path, tmp_path: Path) -> None:
    assert vacsr("evaluate", tmp_path).refused(4, "no trained model", "vacsr train")
    assert vacsr("evaluate", run / "model").refused(2, "--pairs")
    answer = vacsr("evaluate", run / "model", "--pairs", SPEC)
    assert answer.code == 0, answer.err


@pytest.mark.parametrize("kind", ["features", "photos"])
def test_evaluate_repeats_the_report(vacsr: Command, trained: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    run, file = trained(kind), tmp_path / "new" / "out.json"
    stored = json.loads((run / "report.json").read_text(encoding="utf-8"))["results"]
    for split, expected in zip(("dev", "test"), stored, strict=True):
        answer = vacsr("evaluate", run, "--split", split, "--json", file)
        assert (answer.code, answer.err) == (0, "")
        assert answer.out.splitlines()[2].startswith(f"| flickr | {split} |")
        assert json.loads(file.read_text(encoding="utf-8"))["results"] == [expected]
        assert ("exact" in expected) == (kind == "photos"), "the truth of scenes is known"


def test_evaluate_chooses_a_split(vacsr: Command, run: Path, tmp_path: Path) -> None:
    assert "| flickr | all |" in vacsr("evaluate", run, "--split", "all").out
    assert vacsr("evaluate", run, "--split", "val").refused(4, "no split 'val'")
    data = Features(tmp_path)
    for entry in data.entries:
        entry["split"] = "train"
    spec = data.write()
    answer = vacsr("evaluate", run, "--pairs", spec)
    assert "| flickr | all |" in answer.out
    assert answer.err.startswith("warning: the data have no split 'test': taking all 20 images")
    assert "--split" in answer.err
    named = vacsr("evaluate", run, "--pairs", spec, "--split", "train")
    assert "| flickr | train |" in named.out
    assert named.err == ""
    assert "| flickr | dev |" in vacsr("evaluate", run, "--pairs", f"{SPEC},split=dev").out
    assert "| flickr | test |" in vacsr("evaluate", run, "--pairs", f"{SPEC},split=dev", "--split", "test").out


def with_config(run: Path, folder: Path, **evaluate: Any) -> Path:
    """The run with other evaluate settings, and with fields that this version does not know."""
    shutil.copytree(run, folder)
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    config |= {"evaluate": {"protocols": ["gone"], "folds": 5, **evaluate}, "tracking": {"url": "x"}}
    config["data"]["workers"] = 4
    config["method"] = {"name": "gone"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


def test_evaluate_takes_the_settings_of_the_run(
    vacsr: Command, run: Path, tmp_path: Path, judgments: tuple[Path, Path], monkeypatch: Patch
) -> None:
    expert, crowd = judgments
    own = with_config(run, tmp_path / "own", judgments=[str(expert)], ties="pessimistic", bins="equal")
    asked: dict[str, Any] = {}

    def record(scorer: Any, pairs: Any, *, protocols: Any, **options: Any) -> Any:
        asked.update(options, judgments=[judged.kind for judged in options["judgments"]])
        return evaluate_retrieval(scorer, pairs, protocols=protocols, **options)

    monkeypatch.setattr("vacsr.evaluate.report.evaluate_retrieval", record)

    def settings(*options: object) -> dict[str, Any]:
        answer = vacsr("evaluate", *options)
        assert (answer.code, answer.err) == (0, "")
        return {name: asked[name] for name in ("judgments", "ties", "bins")}

    plain = {"judgments": [], "ties": "stable", "bins": "count"}
    assert settings(run) == plain
    assert settings(own) == {"judgments": ["expert"], "ties": "pessimistic", "bins": "equal"}
    assert settings(own, "--judgments", crowd)["judgments"] == ["crowd"]
    assert settings(own, "--stable", "--bins", "count") == {**plain, "judgments": ["expert"]}
    assert settings(run, "--pessimistic", "--bins", "equal") == {**plain, "ties": "pessimistic", "bins": "equal"}
    assert settings(own, "--pairs", SPEC) == plain
    assert settings(own, "--pairs", SPEC, "--bins", "equal") == {**plain, "bins": "equal"}


@pytest.mark.parametrize("section", [None, "x", []])
def test_an_odd_config_does_not_stand_in_the_way(vacsr: Command, run: Path, tmp_path: Path, section: Any) -> None:
    old = with_config(run, tmp_path / "old")
    pair = ["--image", "test-0003", "--text", "test-0003#0"]
    assert vacsr("evaluate", old).code == 0
    assert vacsr("score", old, *pair).code == 0
    config = yaml.safe_load((old / "config.yaml").read_text(encoding="utf-8"))
    (old / "config.yaml").write_text(yaml.safe_dump({**config, "evaluate": section}), encoding="utf-8")
    assert vacsr("evaluate", old).code == 0
    (old / "config.yaml").write_text(yaml.safe_dump({"data": section}), encoding="utf-8")
    assert vacsr("evaluate", old).refused(2, "--pairs")
    assert vacsr("score", old, *pair, "--pairs", SPEC).code == 0
    (old / "config.yaml").write_text("a: [", encoding="utf-8")
    assert vacsr("evaluate", old, "--pairs", SPEC).code == 0


def test_score_prints_a_table(vacsr: Command, run: Path) -> None:
    answer = vacsr("score", run, "--image", "test-0003", "--text", "test-0003#0", "--text", "test-0004#1")
    assert (answer.code, answer.err) == (0, "")
    head, *lines = [line.split("\t") for line in answer.out.splitlines()]
    assert head == ["image", "text", "score", "grade", "uncertainty"]
    assert [line[:2] for line in lines] == [["test-0003", "test-0003#0"], ["test-0003", "test-0004#1"]]
    for line in lines:
        assert 0 <= float(line[3]) <= 1
        assert float(line[4]) > 0
    words = load_pairs(SPEC, split="test").captions
    assert words is not None
    assert vacsr("score", run, "--image", "test-0003", "--text", words[6]).code == 0


def test_score_of_an_ensemble_has_the_disagreement_too(vacsr: Command, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "ensemble"
    changes = [word for change in ("method.name=infonce", "method.members=2") for word in ("--set", change)]
    assert vacsr("train", recipe, "--out", out, *changes).code == 0
    answer = vacsr("score", out, "--image", "test-0003", "--text", "test-0003#0")
    head, line = [line.split("\t") for line in answer.out.splitlines()]
    assert head == ["image", "text", "score", "grade", "uncertainty", "disagreement"]
    assert (line[3:5], float(line[5]) > 0) == (["–", "–"], True)


def test_a_warning_is_one_plain_line(vacsr: Command, recipe: Path, tmp_path: Path) -> None:
    data = Features(tmp_path)
    np.save(tmp_path / "image.npy", data.images.numpy())
    np.save(tmp_path / "text.npy", data.texts.flatten(0, 1).numpy())
    names = tmp_path / "c.csv"
    splits = [entry["split"] for entry in data.entries]
    names.write_text("image,split\n" + "".join(f"i{n},{split}\n" for n, split in enumerate(splits)) * 2)
    spec = f"features:{tmp_path / 'image.npy'},text={tmp_path / 'text.npy'},captions={names}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", UserWarning)  # as outside of a test
        done = vacsr("train", recipe, "--out", tmp_path / "run", "--set", f'data.pairs="{spec}"')
    assert done.code == 0, done.err
    first, *others = done.err.splitlines()
    assert first.startswith(f"warning: {names}")
    assert "image_row" in first
    assert not any(line.startswith("warning") for line in others), done.err  # three splits are read, said once


def test_score_of_an_unknown_name(vacsr: Command, run: Path) -> None:
    answer = vacsr("score", run, "--image", "test-003", "--text", "test-0003#0")
    assert answer.refused(4, "no file or image id 'test-003'", "did you mean 'test-0")
    assert vacsr("score", run, "--image", "test-0003", "--text", "test-0003#7").refused(4, "no caption id")
    assert vacsr("score", run, "--image", "test-0003").code == 2


def test_a_missing_extra(vacsr: Command, recipe: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    answer = vacsr("train", recipe, "--out", tmp_path / "run", "--set", "train.trackers=[wandb]")
    assert (answer.code, answer.out) == (3, "")
    assert (
        answer.err == "MissingExtra: wandb is not installed; it comes with an extra — run: pip install 'vacsr[wandb]'\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(vacsr: Command, run: Path) -> None:
    answer = vacsr("evaluate", run, "--device", "cuda")
    assert (answer.code, answer.out) == (3, "")
    assert "use device=cpu" in answer.err


def test_memory_that_runs_out(vacsr: Command, recipe: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("vacsr.train.trainer.Trainer.run", full)
    answer = vacsr("train", recipe, "--out", tmp_path / "run")
    assert answer.refused(3, "CUDA out of memory — try --set train.tile=auto", "train.batch_size")


def test_ctrl_c_outside_training(vacsr: Command, run: Path, monkeypatch: Patch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vacsr.evaluate.report.evaluate_retrieval", interrupted)
    answer = vacsr("evaluate", run)
    assert (answer.code, answer.out) == (130, "")
