"""The command line: exit codes, one message on stderr, data alone on stdout, nothing half-written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from vacsr import __version__
from vacsr.data import load_pairs
from vacsr.data.features import write_features
from vacsr.data.pairs import Provenance
from vacsr.evaluate.agreement import judged_split
from vacsr.evaluate.report import evaluate_retrieval

SPEC = "synthetic:images=20,held_out=15,per_image=2"
RECIPE: dict[str, Any] = {
    "data": {"pairs": SPEC},
    "backbone": {"head": {"dim": 4}},
    "train": {"epochs": 1, "batch_size": 8, "device": "cpu"},
}
DIRECTION = {"r1", "r5", "r10", "map_at_r", "r_precision"}
UNCERTAINTY = {"corr_r1_i2t", "corr_r1_t2i", "aurc_i2t", "aurc_t2i"}
JUDGMENTS = {"expert_tau_c", "crowd_tau_b", "expert_tau_c_published", "crowd_tau_b_published"}


Command = Callable[..., Any]
"""The fixture `vacsr` of conftest.py: words in, exit code and output out."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "small.yaml"
    path.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    """A trained run folder."""
    from vacsr.config.io import read_yaml, recipe_from
    from vacsr.train import run_recipe

    run_recipe(recipe_from(read_yaml(recipe)), recipe.parent / "run", progress=False)
    return recipe.parent / "run"


def test_version(vacsr: Command) -> None:
    assert vacsr("--version") == (0, f"vacsr {__version__}\n", "")


def test_the_installed_command(run: Path, tmp_path: Path) -> None:
    script = "from vacsr.cli import main; main()"
    command = [sys.executable, "-c", script, "evaluate", str(run), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("| protocol | split |")
    assert done.stderr == ""
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["schema"] == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("train", ["RECIPE.yaml", "--set", "--out", "--resume"]),
        ("evaluate", ["--pairs", "--split", "--protocol", "--judgments", "--json", "--bins", "--stable", "--device"]),
        ("evaluate", ["--scores", "--ids", "--uncertainty"]),
        ("score", ["--image", "--text", "--pairs", "--device"]),
        ("compare", ["TABLE.yaml", "--set", "--seeds", "--out", "--jobs", "--row"]),
        ("demo", ["--out", "--seed"]),
        ("doctor", []),
    ],
)
def test_help_names_the_options(vacsr: Command, name: str, options: list[str]) -> None:
    answer = vacsr(name, "--help")
    assert answer.code == 0
    assert all(option in answer.out for option in options), answer.out
    assert name in vacsr("--help").out


def test_train(vacsr: Command, recipe: Path, tmp_path: Path) -> None:
    answer = vacsr(
        "train", recipe, "--out", tmp_path / "run", "--set", "train.epochs=2", "--set", "method.name=sigmoid"
    )
    assert answer.code == 0, answer.err
    assert [line.split(" | ")[1] for line in answer.out.splitlines()[2:]] == ["dev", "test"]
    assert "epoch 2/2, dev RSUM" in answer.err
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert (config["train"]["epochs"], config["method"]["name"]) == (2, "sigmoid")
    for name in ("metrics.jsonl", "report.json", "model/model.safetensors", "checkpoint/state.safetensors"):
        assert (tmp_path / "run" / name).is_file(), name
    again = vacsr("train", recipe, "--out", tmp_path / "run")
    assert again.refused(2, "already holds a run", "--resume")


def test_train_has_a_default_folder(
    vacsr: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert vacsr("train", recipe).code == 0
    assert (tmp_path / "runs" / "small" / "report.json").is_file()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("method.name=vacs", ["unknown method 'vacs'", "did you mean 'vacsr'"]),
        ("method.preset=best", ["no preset 'best'"]),
        ("train.epoch=3", ["train.epoch"]),
        ("train.epochs=none", ["train.epochs"]),
        ("train.epochs", ["section.field=value"]),
        ("evaluate.protocols=[coco-9k]", ["unknown protocol 'coco-9k'", "flickr"]),
        ("data.pairs=synthetic", ["has no scheme"]),
        ("data.pairs=parquet:x", ["parquet"]),
    ],
)
def test_a_wrong_recipe_is_a_usage_error(
    vacsr: Command, recipe: Path, tmp_path: Path, change: str, words: list[str]
) -> None:
    assert vacsr("train", recipe, "--out", tmp_path / "run", "--set", change).refused(2, *words)
    assert not (tmp_path / "run").exists()


def test_wrong_files_and_options_are_usage_errors(vacsr: Command, run: Path, tmp_path: Path) -> None:
    assert vacsr("train", tmp_path / "none.yaml").refused(2, "no such file")
    (tmp_path / "bad.yaml").write_text("a: [", encoding="utf-8")
    assert vacsr("train", tmp_path / "bad.yaml").refused(2, "not readable YAML")
    (tmp_path / "list.yaml").write_text("- a\n", encoding="utf-8")
    assert vacsr("train", tmp_path / "list.yaml").refused(2, "should hold sections")
    assert vacsr("train").code == 2
    assert vacsr("tain").code == 2
    assert vacsr("evaluate", run, "--nonsense").code == 2
    assert vacsr("evaluate", run, "--protocol", "coco-9k").refused(2, "unknown protocol 'coco-9k'")


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


def duplicate(data: Features) -> None:
    data.entries[5]["image"] = "i4"


def no_dev(data: Features) -> None:
    for entry in data.entries:
        entry["split"] = entry["split"].replace("dev", "val")


def not_a_number(data: Features) -> None:
    data.images[3, 2] = torch.nan


def not_a_number_in_test(data: Features) -> None:
    data.texts[19, 1, 0] = torch.inf


def no_captions(data: Features) -> None:
    data.entries[7]["captions"] = []


def fewer_images(data: Features) -> None:
    data.images = data.images[:-1]


BROKEN: dict[Callable[[Features], None], str] = {
    duplicate: "'i4' is given 2 times",
    no_dev: "no split 'dev'",
    not_a_number: "first image 'i3'",
    not_a_number_in_test: "'i19#1'",
    no_captions: "image 'i7'",
    fewer_images: "features.safetensors",
}


@pytest.mark.parametrize("breakage", BROKEN, ids=lambda function: function.__name__)
def test_broken_data_are_refused_before_anything_is_written(
    vacsr: Command, recipe: Path, tmp_path: Path, breakage: Callable[[Features], None]
) -> None:
    data = Features(tmp_path)
    breakage(data)
    answer = vacsr("train", recipe, "--out", tmp_path / "run", "--set", f'data.pairs="{data.write()}"')
    assert answer.refused(4, BROKEN[breakage])
    assert not (tmp_path / "run").exists()


def test_whole_data_are_accepted(vacsr: Command, recipe: Path, tmp_path: Path) -> None:
    spec = Features(tmp_path).write()
    answer = vacsr("train", recipe, "--out", tmp_path / "run", "--set", f'data.pairs="{spec}"')
    assert answer.code == 0, answer.err


def test_a_torn_features_file(vacsr: Command, recipe: Path, run: Path, tmp_path: Path) -> None:
    spec = Features(tmp_path).write()
    file = tmp_path / "features.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    change = f'data.pairs="{spec}"'
    assert vacsr("train", recipe, "--out", tmp_path / "run", "--set", change).refused(4, "features.safetensors")
    assert not (tmp_path / "run").exists()
    answer = vacsr("evaluate", run, "--pairs", spec, "--json", tmp_path / "out.json")
    assert answer.refused(4, "features.safetensors")
    assert not (tmp_path / "out.json").exists()


def test_features_of_another_dimension(vacsr: Command, run: Path, tmp_path: Path) -> None:
    data = Features(tmp_path)
    data.images = data.images[:, :32]
    answer = vacsr("evaluate", run, "--pairs", data.write(), "--json", tmp_path / "out.json")
    assert answer.refused(4, "expects features of dimension 64, these have 32")
    assert not (tmp_path / "out.json").exists()


def test_embeddings_of_another_backbone(vacsr: Command, run: Path, tmp_path: Path) -> None:
    data = Features(tmp_path)
    data.provenance = Provenance("clip:other")
    answer = vacsr("evaluate", run, "--pairs", data.write(), "--json", tmp_path / "out.json")
    assert answer.refused(4, "ProvenanceMismatch", "'clip:other'")
    assert not (tmp_path / "out.json").exists()
    assert vacsr("evaluate", run, "--pairs", "synthetic:images=20,seed=1").refused(4, "ProvenanceMismatch")


def test_a_folder_without_a_model(vacsr: Command, run: Path, tmp_path: Path) -> None:
    assert vacsr("evaluate", tmp_path).refused(4, "no trained model", "vacsr train")
    assert vacsr("evaluate", run / "model").refused(2, "--pairs")
    answer = vacsr("evaluate", run / "model", "--pairs", SPEC)
    assert answer.code == 0, answer.err


def write_judgments(folder: Path) -> tuple[Path, Path]:
    """Grades for the test split: an image with a caption of its own and with one of its neighbour."""
    images = load_pairs(SPEC, split="test").image_ids
    expert, crowd = ["image\tcaption_image\tcaption_index\trating_1\trating_2\trating_3"], []
    for n, image in enumerate(images):
        for step in (0, 1, 2):
            other = images[(n + step) % len(images)]
            expert.append(f"{image}\t{other}\t0\t{4 - step}\t{1 + (n + step) % 4}\t{4 - (n % 2)}")
            crowd.append(f"{image}\t{other}\t1\t{((n + step) % 7) / 6}")
    files = folder / "expert.tsv", folder / "crowd.tsv"
    files[0].write_text("\n".join(expert) + "\n", encoding="utf-8")
    files[1].write_text("\n".join(["image\tcaption_image\tcaption_index\tyes_share", *crowd]) + "\n", encoding="utf-8")
    assert {judged_split(name) for name in images} == {"judged-dev", "judged-test"}
    return files


def test_evaluate_writes_the_contract(vacsr: Command, run: Path, tmp_path: Path) -> None:
    expert, crowd = write_judgments(tmp_path)
    file = tmp_path / "new" / "out.json"
    answer = vacsr("evaluate", run, "--pairs", SPEC, "--judgments", expert, "--judgments", crowd, "--json", file)
    assert answer.code == 0, answer.err
    assert answer.err == ""
    assert answer.out.splitlines()[2].startswith("| flickr | test |")
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["schema"] == 1
    (result,) = report["results"]
    assert (result["protocol"], result["split"]) == ("flickr", "test")
    for direction in ("i2t", "t2i"):
        assert result[direction].keys() >= DIRECTION
        assert all(0 <= result[direction][key] <= 100 for key in DIRECTION)
    assert 0 <= result["rsum"] <= 600
    assert result["uncertainty"].keys() >= UNCERTAINTY | {"auroc_false_negative"}
    assert 0 <= result["uncertainty"]["auroc_false_negative"] <= 100
    assert result["judgments"].keys() >= JUDGMENTS
    assert all(-100 <= result["judgments"][key] <= 100 for key in JUDGMENTS)


def test_evaluate_says_the_same_as_the_run(vacsr: Command, run: Path, tmp_path: Path) -> None:
    trained = json.loads((run / "report.json").read_text(encoding="utf-8"))["results"]
    for split, expected in zip(("dev", "test"), trained, strict=True):
        assert vacsr("evaluate", run, "--split", split, "--json", tmp_path / "out.json").code == 0
        assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"] == [expected]


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


def test_evaluate_keeps_the_split_of_a_spec(vacsr: Command, run: Path) -> None:
    assert "| flickr | dev |" in vacsr("evaluate", run, "--pairs", f"{SPEC},split=dev").out
    assert "| flickr | test |" in vacsr("evaluate", run, "--pairs", f"{SPEC},split=dev", "--split", "test").out


def test_evaluate_loads_the_data_once(vacsr: Command, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str | None] = []

    def counted(spec: str, *, split: str | None = None, on_error: Literal["fail", "skip"]) -> Any:
        calls.append(split)
        return load_pairs(spec, split=split, on_error=on_error)

    monkeypatch.setattr("vacsr.train.data.load_pairs", counted)
    assert vacsr("evaluate", run).code == 0
    assert calls == ["test"]


def with_config(run: Path, folder: Path, **evaluate: Any) -> Path:
    """The run with other evaluate settings, and with fields that this version does not know."""
    shutil.copytree(run, folder)
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    config |= {"evaluate": {"protocols": ["gone"], "folds": 5, **evaluate}, "tracking": {"url": "x"}}
    config["data"]["workers"] = 4
    config["method"] = {"name": "gone"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


class Settings:
    """What evaluate_retrieval was asked for last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last: dict[str, Any] = {}
        monkeypatch.setattr("vacsr.train.run.evaluate_retrieval", self.record)

    def record(self, scorer: Any, pairs: Any, *, protocols: Any, **settings: Any) -> Any:
        asked = {name: value for name, value in settings.items() if name != "truth"}
        self.last = {**asked, "judgments": [judged.kind for judged in settings["judgments"]]}
        return evaluate_retrieval(scorer, pairs, protocols=protocols, **settings)


def test_evaluate_takes_the_settings_of_the_run(
    vacsr: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expert, crowd = write_judgments(tmp_path)
    own = with_config(run, tmp_path / "own", judgments=[str(expert)], ties="pessimistic", bins="equal")
    asked = Settings(monkeypatch)

    def settings(*options: object) -> dict[str, Any]:
        answer = vacsr("evaluate", *options)
        assert (answer.code, answer.err) == (0, "")
        return asked.last

    plain = {"judgments": [], "ties": "stable", "bins": "count"}
    assert settings(run) == plain
    assert settings(own) == {"judgments": ["expert"], "ties": "pessimistic", "bins": "equal"}
    assert settings(own, "--judgments", crowd)["judgments"] == ["crowd"]
    assert settings(own, "--stable", "--bins", "count") == {**plain, "judgments": ["expert"]}
    assert settings(run, "--pessimistic", "--bins", "equal") == {**plain, "ties": "pessimistic", "bins": "equal"}
    assert settings(own, "--pairs", SPEC) == plain
    assert settings(own, "--pairs", SPEC, "--bins", "equal") == {**plain, "bins": "equal"}
    assert vacsr("evaluate", run, "--bins", "wide").code == 2


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


def test_wrong_judgments(vacsr: Command, run: Path, tmp_path: Path) -> None:
    assert vacsr("evaluate", run, "--judgments", tmp_path / "none.tsv").refused(4, "none.tsv")
    (tmp_path / "bad.tsv").write_text("image\tgrade\n", encoding="utf-8")
    answer = vacsr("evaluate", run, "--judgments", tmp_path / "bad.tsv", "--json", tmp_path / "out.json")
    assert answer.refused(4, "bad.tsv")
    assert not (tmp_path / "out.json").exists()


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


def test_score_prints_one_line_a_pair_whatever_the_words(vacsr: Command, run: Path, tmp_path: Path) -> None:
    data = Features(tmp_path)
    words = "a\tdog\nand\r\na cat\u2028here"
    data.entries[3]["captions"][1] = words
    data.entries[4]["image"] = "i\t4"
    spec = data.write()
    for image, printed in (("i3", "i3"), ("i\t4", "i 4")):
        answer = vacsr("score", run, "--pairs", spec, "--image", image, "--text", words)
        assert (answer.code, answer.err) == (0, "")
        head, line = (line.split("\t") for line in answer.out.splitlines())
        assert line[:2] == [printed, "a dog and a cat here"]
        assert len(line) == len(head) == 5


def test_score_takes_the_images_own_of_equal_captions(vacsr: Command, run: Path, tmp_path: Path) -> None:
    data = Features(tmp_path)  # every image has the captions "one" and "two"
    data.entries[0]["captions"] = ["three", "four"]
    spec = data.write()
    for image, caption in (("i5", "i5#1"), ("i0", "i1#1")):  # its own, else the first
        done = vacsr("score", run, "--pairs", spec, "--image", image, "--text", "two", "--text", caption)
        assert (done.code, done.err) == (0, "")
        _, by_words, by_id = (line.split("\t") for line in done.out.splitlines())
        assert by_words[2:] == by_id[2:]


def test_a_warning_is_one_plain_line(recipe: Path, tmp_path: Path) -> None:
    data = Features(tmp_path)
    np.save(tmp_path / "image.npy", data.images.numpy())
    np.save(tmp_path / "text.npy", data.texts.flatten(0, 1).numpy())
    names = tmp_path / "c.csv"
    splits = [entry["split"] for entry in data.entries]
    names.write_text("image,split\n" + "".join(f"i{n},{split}\n" for n, split in enumerate(splits)) * 2)
    spec = f"features:{tmp_path / 'image.npy'},text={tmp_path / 'text.npy'},captions={names}"
    argv = ["train", str(recipe), "--out", str(tmp_path / "run"), "--set", f'data.pairs="{spec}"']
    done = subprocess.run(
        [sys.executable, "-c", "from vacsr.cli import main; main()", *argv], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, *others = done.stderr.splitlines()
    assert first.startswith(f"warning: {names}, line 22: image 'i0' comes back after other images; ")
    assert first.endswith("— add a column image_row with each image's row, counted from 0")
    assert all(line.startswith("vacsr: epoch") for line in others), done.stderr  # three splits are read, said once


def test_score_of_an_unknown_name(vacsr: Command, run: Path) -> None:
    answer = vacsr("score", run, "--image", "test-003", "--text", "test-0003#0")
    assert answer.refused(4, "no image id 'test-003'", "did you mean 'test-0")
    assert vacsr("score", run, "--image", "test-0003", "--text", "test-0003#7").refused(4, "no caption id")
    assert vacsr("score", run, "--image", "test-0003").code == 2


def test_compare(vacsr: Command, tmp_path: Path) -> None:
    table = {
        "title": "Small",
        "base": {**RECIPE, "method": {"name": "sigmoid"}},
        "rows": [{"name": "a"}, {"name": "b", "set": {"train": {"lr": 0.01}}}],
        "columns": [{"key": "test.rsum", "name": "RSUM"}],
    }
    file, out = tmp_path / "table.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(table), encoding="utf-8")
    first = vacsr("compare", file, "--out", out, "--row", "a", "--seeds", "3")
    assert first.code == 0, first.err
    assert (out / "clean" / "a" / "seed-3" / "report.json").is_file()
    answer = vacsr("compare", file, "--out", out, "--seeds", "3", "--jobs", "1")
    assert answer.code == 0, answer.err
    assert "2 cells, 1 already done" in answer.err
    assert answer.out.startswith("# Small\n\n## clean\n\n| method | seeds | RSUM |\n")
    assert answer.out.strip() == (out / "table.md").read_text(encoding="utf-8").strip()
    assert vacsr("compare", file, "--out", out, "--seeds", "one").refused(2, "--seeds 'one', expected whole numbers")
    assert vacsr("compare", file, "--out", out, "--seeds", "").refused(2, "expected whole numbers")
    assert vacsr("compare", file, "--out", out, "--row", "c").refused(2, "no row 'c'")
    assert vacsr("compare", tmp_path / "none.yaml").refused(2, "no such file")


def test_a_missing_extra(vacsr: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_memory_that_runs_out(vacsr: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("vacsr.train.trainer.Trainer.run", full)
    answer = vacsr("train", recipe, "--out", tmp_path / "run")
    assert answer.refused(3, "CUDA out of memory — try --set train.tile=auto", "train.batch_size")


def test_ctrl_c_outside_training(vacsr: Command, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vacsr.train.run.evaluate_retrieval", interrupted)
    answer = vacsr("evaluate", run)
    assert (answer.code, answer.out) == (130, "")
