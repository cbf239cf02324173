"""A recipe from data to report."""

import json
import os
import re
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr import TrainConfig, fit
from vacsr.config import DataConfig
from vacsr.config.io import read_recipe, read_yaml, recipe_from
from vacsr.data import load_pairs
from vacsr.data.features import write_features
from vacsr.data.noise import load_noise
from vacsr.errors import DataError, FolderInUse, MissingExtra, UsageError
from vacsr.evaluate.protocols import PROTOCOLS
from vacsr.evaluate.significance import read_outcomes
from vacsr.fewshot import check_fewshot, read_fewshot
from vacsr.scoring import PairScorer
from vacsr.train.checkpoint import LOCK, run_lock, run_pairs
from vacsr.train.data import training_data
from vacsr.train.run import check_recipe, run_recipe
from vacsr.train.step import TrainStep


def test_a_run_folder(recipes: Any, tmp_path: Path) -> None:
    recipe = recipes.recipe({"method.name": "vacsr", "data.noise.ratio": 0.5})
    done = run_recipe(recipe, tmp_path / "run", progress=False)
    names = {"config.yaml", "metrics.jsonl", "noise.safetensors", "checkpoint", "model", "report.json"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == names | {"outcomes.safetensors"}
    assert recipe_from(read_yaml(tmp_path / "run" / "config.yaml")) == recipe
    assert done.report is not None
    assert json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))["schema"] == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 24
    assert {"step", "epoch", "lr", "loss", "recon", "kl", "grad_norm"} <= set(rows[0])
    assert {"step", "epoch", "dev_rsum", "steps_per_second"} <= set(rows[-1])
    assert load_noise(tmp_path / "run" / "noise.safetensors").ratio == 0.5


@pytest.mark.parametrize("method", ["infonce", "ncr"])
def test_one_minus_cosine_as_uncertainty(method: str, recipes: Any, vacsr: Any, tmp_path: Path) -> None:
    """As the recipe says, unless the command says otherwise; a model folder has no recipe."""
    changes = {"method.name": method, "evaluate.posthoc": "cosine", "train.epochs": 2}
    run, file = tmp_path / "run", tmp_path / "report.json"
    run_recipe(recipes.recipe(changes), run, progress=False)

    def test_result(path: Path) -> dict[str, Any]:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        return next(result for result in results if result["split"] == "test")

    trained = test_result(run / "report.json")
    assert trained["uncertainty"]["aurc_t2i"] > 0
    for options in ([run], [run / "model", "--pairs", run_pairs(run), "--posthoc", "cosine"]):
        assert vacsr("evaluate", *options, "--device", "cpu", "--json", file).code == 0
        assert test_result(file)["uncertainty"] == trained["uncertainty"]
    assert vacsr("evaluate", run, "--posthoc", "none", "--device", "cpu", "--json", file).code == 0
    assert test_result(file)["uncertainty"] is None
    assert test_result(file)["rsum"] == trained["rsum"]


def test_noise_is_in_the_training_labels_only() -> None:
    spec = "synthetic:images=20,held_out=10,per_image=2"
    clean = training_data(DataConfig(pairs=spec))
    noisy = training_data(recipe_from({"data": {"pairs": spec, "noise": {"ratio": 0.5, "seed": 3}}}).data)
    assert clean.noise is None
    assert torch.equal(noisy.train.caption_image, noisy.noise.assignment)
    assert not torch.equal(noisy.train.caption_image, clean.train.caption_image)
    assert torch.equal(noisy.dev.caption_image, clean.dev.caption_image)


@pytest.fixture
def without_splits(tmp_path: Path) -> str:
    pairs = load_pairs("synthetic:images=20,per_image=2", split="train")
    file = tmp_path / "features.safetensors"
    write_features(file, image=pairs.images, text=pairs.texts.view(20, 2, -1))
    return f"features:{file}"


def test_data_without_splits(recipes: Any, without_splits: str, tmp_path: Path) -> None:
    """Without a dev split, or with a share of the training images, which is then reported as dev."""
    data = {"data.pairs": without_splits, "data.train": "all", "method.name": "sigmoid"}
    with pytest.raises(DataError, match="split 'dev' was asked for"):
        run_recipe(recipes.recipe(data), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    done = run_recipe(recipes.recipe({**data, "data.dev": ""}), tmp_path / "run", progress=False)
    assert done.state.best is None
    assert done.report.results == (), "neither dev nor test is there to report"
    recipe = recipes.recipe({**data, "data.dev_share": 0.3})
    shared = run_recipe(recipe, tmp_path / "share", progress=False)
    assert shared.report.results[0]["rsum"] == pytest.approx(shared.state.best)
    split = training_data(recipe.data)
    assert not set(split.train.image_ids) & set(split.dev.image_ids)


def test_broken_data_of_the_report_are_found_before_training(recipes: Any, tmp_path: Path) -> None:
    spec = with_captions(tmp_path, ["train"] * 20 + ["dev"] * 5 + ["test"] * 5, broken=29)
    recipe = recipes.recipe({"data.pairs": spec, "method.name": "sigmoid"})
    with pytest.raises(DataError, match="'i29'"):
        run_recipe(recipe, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"evaluate.protocols": ["coco-9k"]}, UsageError),
        ({"evaluate.judgments": ["nowhere.tsv"]}, DataError),
        ({"train.batch_size": 1000}, DataError),
        ({"data.train": "val"}, DataError),
        ({"train.trackers": ["tensorboard"]}, MissingExtra),
        ({"train.trackers": ["jsonl", "wandb"]}, MissingExtra),
        ({"data.pairs": "synthetic:images=1,per_image=20"}, DataError),
    ],
)
def test_what_is_refused_leaves_no_folder(
    recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], error: type[Exception]
) -> None:
    for module in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(error):
        run_recipe(recipes.recipe(change), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def killed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_changed_report_does_not_train_again(recipes: Any, tmp_path: Path) -> None:
    """It has those of the splits that exist, and an old report is never beside a new config."""
    fields = {"method.name": "sigmoid", "evaluate.splits": ["dev", "val", "test"]}
    first = run_recipe(recipes.recipe(fields), tmp_path, progress=False).report
    assert [result["split"] for result in first.results] == ["dev", "test"]
    for result, outcomes in zip(first.results, read_outcomes(tmp_path / "outcomes.safetensors"), strict=True):
        assert (outcomes.protocol, outcomes.split) == (result["protocol"], result["split"])
        assert result["t2i"]["r5"] == pytest.approx(100 * float(outcomes.t2i["r5"].mean()))
    recipe = recipes.recipe({**fields, "evaluate.splits": ["test"]})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("vacsr.evaluate.report.evaluate_retrieval", killed)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe, tmp_path, resume=True, progress=False)
    assert not (tmp_path / "report.json").exists()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainStep, "__call__", lambda *_: pytest.fail("trains"))
        done = run_recipe(recipe, tmp_path, resume=True, progress=False)
    assert [result["split"] for result in done.report.results] == ["test"]
    assert [outcomes.split for outcomes in read_outcomes(tmp_path / "outcomes.safetensors")] == ["test"]
    assert recipe_from(read_yaml(tmp_path / "config.yaml")) == recipe


def with_captions(folder: Path, splits: list[str], *, broken: int | None = None) -> str:
    """Features of as many images as splits are given, two captions each."""
    pairs = load_pairs(f"synthetic:images={len(splits)},per_image=2", split="train")
    images = pairs.images.clone()
    if broken is not None:
        images[broken] = torch.nan
    write_features(folder / "f.safetensors", image=images, text=pairs.texts.view(len(splits), 2, -1))
    entries = [{"image": f"i{n}", "split": split, "captions": ["a", "b"]} for n, split in enumerate(splits)]
    (folder / "captions.json").write_text(json.dumps(entries), encoding="utf-8")
    return f"features:{folder / 'f.safetensors'},captions={folder / 'captions.json'}"


def test_a_missing_dev_split_says_how_to_do_without(tmp_path: Path) -> None:
    spec = with_captions(tmp_path, ["train"] * 6 + ["test"] * 4)
    hint = r"no split 'dev'.*set data\.dev= \(none\) or data\.dev_share=0\.1"
    with pytest.raises(DataError, match=hint):
        training_data(DataConfig(pairs=spec))
    assert training_data(recipe_from({"data": {"pairs": spec}}, ["data.dev="]).data).dev is None
    assert training_data(recipe_from({"data": {"pairs": spec}}, ["data.dev_share=0.2"]).data).dev is not None
    spec = with_captions(tmp_path, ["train"] * 6 + ["dev"] * 4, broken=9)  # broken is not missing
    with pytest.raises(DataError, match="'i9'") as caught:
        training_data(DataConfig(pairs=spec))
    assert "dev_share" not in str(caught.value)


def test_what_never_got_far_may_be_started_again(recipes: Any, tmp_path: Path) -> None:
    noisy = {"method.name": "sigmoid", "data.noise.ratio": 0.5}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainStep, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipes.recipe(noisy), tmp_path, progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "metrics.jsonl", "noise.safetensors"}
    recipe = recipes.recipe({"method.name": "sigmoid"})
    assert run_recipe(recipe, tmp_path, progress=False).report is not None
    assert recipe_from(read_yaml(tmp_path / "config.yaml")) == recipe
    assert not (tmp_path / "noise.safetensors").exists(), "it was the other recipe's"


def test_a_run_is_a_checkpoint_or_a_report(recipes: Any, tmp_path: Path) -> None:
    recipe = recipes.recipe({"method.name": "sigmoid", "train.epochs": 1})
    run_recipe(recipe, tmp_path, progress=False)
    for name in ("config.yaml", "checkpoint/state.safetensors", "report.json"):
        with pytest.raises(UsageError, match="--resume"):
            run_recipe(recipe, tmp_path, progress=False)
        (tmp_path / name).unlink()
    assert run_recipe(recipe, tmp_path, progress=False).report is not None


def test_a_file_where_the_folder_should_be(recipes: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match="choose another --out"):
            run_recipe(recipes.recipe(), out, resume=True, progress=False)


def test_the_report_is_scored_in_full_precision(recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    original = PairScorer.score_set

    def watching(self: PairScorer, *args: Any, **options: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        return original(self, *args, **options)

    monkeypatch.setattr(PairScorer, "score_set", watching)
    torch.set_float32_matmul_precision("high")
    try:
        run_recipe(recipes.recipe({"method.name": "sigmoid", "train.precision": "tf32"}), tmp_path, progress=False)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen[:3]) == {"high"}, "three looks at dev while training"
    assert set(seen[3:]) == {"highest"}


def flattered(recipe: Any, out: Path) -> list[str]:
    """What is said of images that were trained on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_recipe(recipe, out, progress=False)
    return [str(one.message) for one in caught if "trained on" in str(one.message)]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"data.train": "all"}, {"dev": (6, 6), "test": (4, 4)}),
        ({"data.train": "all", "data.dev": ""}, {"dev": (6, 6), "test": (4, 4)}),
        ({"data.train": "all", "data.dev": "", "evaluate.splits": ["all", "train"]}, {"train": (20, 20)}),
        ({"data.train": "all", "data.dev": "", "evaluate.splits": ["all"]}, {}),
        ({"evaluate.splits": ["all", "train", "dev", "test"]}, {}),
        ({"data.dev_share": 0.2}, {}),
    ],
)
def test_images_of_a_judging_split_that_were_trained_on(
    recipes: Any, tmp_path: Path, change: dict[str, Any], found: dict[str, tuple[int, int]]
) -> None:
    spec = with_captions(tmp_path, ["train"] * 20 + ["dev"] * 6 + ["test"] * 4)
    recipe = recipes.recipe({"method.name": "sigmoid", "train.epochs": 1, "data.pairs": spec, **change})
    messages = flattered(recipe, tmp_path / "run")
    assert len(messages) == len(found)
    for split, (n, of) in found.items():
        assert any(f"{n} of the {of} images of {split!r}" in message for message in messages)
    assert all(message.endswith("set data.train=train") for message in messages)


def test_part_of_a_split_was_trained_on(recipes: Any, tmp_path: Path) -> None:
    """A share of everything is held out: it is clean, what is left of the test split is not."""
    spec = with_captions(tmp_path, ["train"] * 10 + ["test"] * 20)
    changes = {"method.name": "sigmoid", "train.epochs": 1, "data.pairs": spec, "data.train": "all"}
    recipe = recipes.recipe({**changes, "data.dev_share": 0.3})
    rows = set(training_data(recipe.data).train.image_ids)
    count = sum(f"i{number}" in rows for number in range(10, 30))
    assert 0 < count < 20
    (message,) = flattered(recipe, tmp_path / "run")
    assert f"{count} of the 20 images of 'test'" in message
    changes = {"method.name": "sigmoid", "train.epochs": 1, "data.dev": "train", "evaluate.splits": ["test"]}
    (message,) = flattered(recipes.recipe(changes), tmp_path / "dev")
    assert "29 of the 29 images of 'train'" in message
    assert message.endswith("set data.dev_share=0.1")


def test_a_protocol_is_reported_where_it_fits(recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_test(pairs: Any) -> Any:
        if pairs.split != "test":
            raise DataError(f"no test images in {pairs.split} — choose another")
        return PROTOCOLS["flickr"](pairs)

    monkeypatch.setattr("vacsr.evaluate.protocols.PROTOCOLS", {**PROTOCOLS, "coco-5k": only_test})
    monkeypatch.setattr("vacsr.train.run._NOT_COCO", ())
    changes = {"method.name": "sigmoid", "train.epochs": 1, "evaluate.protocols": ["flickr", "coco-5k"]}
    report = run_recipe(recipes.recipe(changes), tmp_path / "run", progress=False).report
    reported = [(result["split"], result["protocol"]) for result in report.results]
    assert reported == [("dev", "flickr"), ("test", "flickr"), ("test", "coco-5k")]
    alone = {**changes, "evaluate.protocols": ["coco-5k"]}
    report = run_recipe(recipes.recipe(alone), tmp_path / "alone", progress=False).report
    assert [result["split"] for result in report.results] == ["test"]
    with pytest.raises(DataError, match="no test images in dev"):
        run_recipe(recipes.recipe({**alone, "evaluate.splits": ["dev"]}), tmp_path / "none", progress=False)
    assert not (tmp_path / "none").exists()


ROOT = Path(__file__).resolve().parents[2]
TINY = {"spec": "tiny:", "text_output": "norm"}
SCENES = {"pairs": "scenes:"}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_can_finish(path: Path) -> None:
    if read_yaml(path).get("task") == "fewshot" or "base2novel" in path.stem or "domain" in path.stem:
        check_fewshot(read_fewshot(path))
    else:
        check_recipe(read_recipe(path))


COSINE = {"evaluate": {"posthoc": "cosine"}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "removed": ({"method": "infonce", "evaluate": {"posthoc": "laplace"}}, "'cosine'"),
    "no cosine": ({"method": "pcmepp", **COSINE}, "set evaluate.posthoc=none"),
    "no strips": ({"method": "npc", "train": {"tile": 16}}, "set train.tile=0 or auto"),
    "no words": ({"data": {"pairs": "features:x.safetensors"}, "method": "daa"}, "words of captions"),
    "photos for features": ({"data": SCENES}, "backbone.spec"),
    "features for towers": ({"backbone": TINY}, "backbone.spec=features:"),
    "no captions": ({"data": {"pairs": "photos:x"}, "backbone": TINY}, "without captions"),
    "unknown data": ({"data": {"pairs": "coko:x"}}, "coko"),
    "unknown towers": ({"data": SCENES, "backbone": {"spec": "vit:x"}}, "vit:x"),
    "odd towers": ({"data": SCENES, "backbone": {"spec": "tiny:width=13"}}, "width 13"),
    "no projection in tiny": ({"data": SCENES, "backbone": {**TINY, "text_output": "projected"}}, "text_output"),
    "unknown protocol": ({"evaluate": {"protocols": ["recall"]}}, "recall"),
    "not coco": (
        {"data": SCENES, "backbone": TINY, "evaluate": {"protocols": ["flickr", "cxc"]}},
        "set evaluate.protocols=[flickr]",
    ),
    "device": ({"train": {"device": "gpu"}}, "use auto, cpu or cuda"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_never_finish_is_refused(case: str) -> None:
    fields, action = REFUSED[case]
    before = torch.get_rng_state()
    with pytest.raises(UsageError, match=re.escape(action)):
        check_recipe(recipe_from({"method": "vacsr", **fields}))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "fields",
    [
        {"data": SCENES, "backbone": TINY, "method": "infonce", **COSINE},
        {"method": "ncr", **COSINE},
        {"data": {"pairs": "features:x.npz,captions=y.json"}, "method": "daa"},
        {"data": {"pairs": "features:x.npz"}, "method": "npc"},
        {"data": {"pairs": "csv:x.csv"}, "backbone": TINY, "evaluate": {"protocols": ["coco-1k"]}},
        {"method": "vacsr", "train": {"tile": 16}},
        {"method": "npc", "train": {"accumulate": 2, "cuda_graph": True, "device": "cpu"}},
    ],
)  # fmt: skip
def test_what_may_finish_is_let_through(fields: dict[str, Any]) -> None:
    check_recipe(recipe_from({"method": "vacsr", **fields}))


def test_steps_that_are_only_timed_need_no_data_and_no_report() -> None:
    recipe = recipe_from({"backbone": TINY, "method": "vacsr", **COSINE})
    check_recipe(recipe, timed=True)
    with pytest.raises(UsageError):
        check_recipe(recipe)


def test_a_graph_and_accumulation_need_other_plans_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="accumulate=1"):
        check_recipe(recipe_from({"method": "infonce", "train": {"accumulate": 2, "cuda_graph": True}}))


LONG = {"method.name": "infonce", "train.epochs": 100_000, "train.checkpoint_every": 5}


def test_a_second_run_of_a_folder_is_refused_and_the_first_goes_on(launch: Any, recipes: Any, tmp_path: Path) -> None:
    file, out = recipes.file(LONG), tmp_path / "run"
    first = launch.until_rows(out / "metrics.jsonl", 8, "train", file, "--out", out)
    for options in ((), ("--resume",), ("--resume", "--set", "train.lr=0.1")):
        second = launch("train", file, "--out", out, *options)
        assert (second.code, second.out) == (3, "")
        assert f"pid {first.process.pid}" in second.err
        assert "Traceback" not in second.err
    with pytest.raises(FolderInUse):
        fit("infonce", load_pairs("synthetic:images=20", split="train"), TrainConfig(epochs=1), out=out, resume=True)
    launch.wait_for_rows(out / "metrics.jsonl", len((out / "metrics.jsonl").read_text().splitlines()) + 8)
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.wait().code == 130
    steps = [line.split(",")[0] for line in (out / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps == [f'{{"step": {number}' for number in range(len(steps))], "one run's log"
    assert not (out / LOCK).exists()


def test_the_lock_of_a_killed_run_blocks_nobody(launch: Any, recipes: Any, tmp_path: Path) -> None:
    file, out = recipes.file({"method.name": "infonce"}), tmp_path / "run"
    assert launch("train", file, "--out", out, kill=("after step", 9)).code == -signal.SIGKILL
    assert (out / LOCK).exists()
    assert launch("train", file, "--out", out, "--resume").code == 0
    assert not (out / LOCK).exists()
    with run_lock(out):  # reading needs none, and does not mind one
        assert launch("evaluate", out, "--split", "dev").code == 0


def test_who_holds_it_may_ask_again_but_no_other_thread(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            with run_lock(tmp_path / "run"):
                pass
        except FolderInUse as error:
            errors.append(error)

    with run_lock(tmp_path / "run"):
        with run_lock(tmp_path / "." / "run"):
            pass
        assert (tmp_path / "run" / LOCK).exists(), "the inner one lets nothing go"
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert f"(pid {os.getpid()})" in str(errors[0])
    ask()
    assert len(errors) == 1


def test_other_ranks_leave_the_lock_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, locked in (("1", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        with run_lock(tmp_path / "run"):
            assert (tmp_path / "run" / LOCK).exists() == locked
