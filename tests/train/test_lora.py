"""LoRA on a small CLIP: what is trained, what a checkpoint and a saved model hold, and that resuming is exact."""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import PhotoSet
from vacsr.errors import MissingExtra, OtherRun, UsageError
from vacsr.files import read_tensors
from vacsr.model import MatchingModel, load_model
from vacsr.scoring import PairScorer
from vacsr.train import fit
from vacsr.train.callbacks import Callback
from vacsr.train.trainer import Run, Trainer

from ..conftest import clip_folder
from .conftest import Outcome, assert_same_weights

pytest.importorskip("peft", reason="peft is not installed")
TRAIN = {"batch_size": 8, "epochs": 3, "device": "cpu", "log_every": 1, "checkpoint_every": 0, "lr": 2e-3}
RATES = {"image_lr": 1, "text_lr": 1, "layer_decay": 1, "freeze_image": 1}


def backbone(checkpoint: Path, **fields: Any) -> BackboneConfig:
    lora = {"rank": 2, **fields.pop("lora", {})}
    return BackboneConfig(spec=f"clip:{checkpoint}", head=HeadConfig(dim=8), lora=lora, **fields)


def build(checkpoint: Path, method: str = "vacsr", **fields: Any) -> MatchingModel:
    return MatchingModel.build(method_config(method), backbone(checkpoint, **fields), seed=1)


def train(checkpoint: Path, photos: PhotoSet, *callbacks: Callback, out: Path | None = None, **fields: Any) -> Run:
    config = TrainConfig.model_validate({**TRAIN, "towers": RATES, **fields})
    found, resume = backbone(checkpoint), out is not None and out.exists()
    return fit("vacsr", photos, config, backbone=found, out=out, resume=resume, progress=False, callbacks=callbacks)


class CtrlC(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_step(self, trainer: Trainer, step: int) -> None:
        if step + 1 == self.after:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("targets", [(), ("q_proj", "fc2")])
def test_a_new_model_is_the_base_with_r_times_inputs_and_outputs_more(
    clip_checkpoint: Path, photos: PhotoSet, targets: tuple[str, ...]
) -> None:
    base, model = build(clip_checkpoint, lora={"rank": 0}), build(clip_checkpoint, lora={"rank": 3, "targets": targets})
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    texts = base.backbone.tokenize(["a dog", "two cats on a mat"])
    assert torch.equal(model.embed_images(pixels).mean, base.embed_images(pixels).mean)
    assert torch.equal(model.embed_texts(texts).mean, base.embed_texts(texts).mean)
    layers = {
        name: module
        for tower in (base.backbone.image, base.backbone.text)
        for block in tower.blocks()
        for name, module in block.named_modules(prefix=f"{id(block)}")
        if isinstance(module, nn.Linear) and (not targets or name.rpartition(".")[2] in targets)
    }
    assert len(layers) == 6 * (len(targets) or 6)
    added = sum(3 * (layer.in_features + layer.out_features) for layer in layers.values())
    assert model.count_parameters() - base.count_parameters() == added
    assert sum(x.numel() for name, x in model.trained_state().items() if "lora" in name) == added


@pytest.mark.parametrize("method", ["vacsr", "pcmepp", "ncr"])
def test_updates_heads_and_method_learn_and_the_towers_do_not(clip_checkpoint: Path, method: str) -> None:
    """Those of two networks too; a branch for variances is new, so all of it is trained."""
    model = build(clip_checkpoint, method)
    model.freeze(["image", "text"])
    model.freeze([])
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    in_towers = {name for name, _ in model.named_parameters() if "backbone.image." in name or "backbone.text." in name}
    assert {name for name in free & in_towers if "lora_" not in name} == set()
    others = {name for name, _ in model.named_parameters() if name not in in_towers}
    assert free - in_towers == others
    grouped = {id(p) for group in model.param_groups() for p in group.params}
    assert grouped == {id(p) for name, p in model.named_parameters() if name in free}
    decayed = {id(p) for group in model.param_groups() if group.decay for p in group.params}
    assert all(id(p) in decayed for name, p in model.named_parameters() if "lora_" in name)


def test_a_trained_model_is_an_ordinary_one(
    clip_checkpoint: Path, photos: PhotoSet, dev_photos: PhotoSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scores are those of the model with the updates beside the towers, which an interrupted run still has."""
    out, base = tmp_path / "run", build(clip_checkpoint, lora={"rank": 0}).state_dict()
    stopped = train(clip_checkpoint, photos, CtrlC(9), out=out)
    assert stopped.interrupted
    beside = PairScorer(stopped.model, device="cpu").score_set(dev_photos)
    stopped.model.save_pretrained(tmp_path / "stopped")
    assert stopped.model.config.lora.rank == 2, "saving changes nothing"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "peft", None)
        saved = load_model(tmp_path / "stopped")
    assert saved.config == backbone(clip_checkpoint, lora={"rank": 0})
    merged = PairScorer(saved, device="cpu").score_set(dev_photos)
    torch.testing.assert_close(merged.score, beside.score, atol=1e-5, rtol=1e-5)
    state = saved.state_dict()
    assert state.keys() == base.keys()
    moved = {name for name in base if name.startswith("backbone.") and not torch.equal(state[name], base[name])}
    assert moved
    assert all(".layers." in name and name.endswith(".weight") for name in moved)
    assert saved.identity() == load_model(tmp_path / "stopped").identity()
    assert saved.identity()["weights"] in (tmp_path / "stopped/README.md").read_text(encoding="utf-8")
    done = train(clip_checkpoint, photos, out=out).model
    assert done.config.lora.rank == 0
    done.save_pretrained(tmp_path / "done")
    assert_same_weights(done, load_model(tmp_path / "done"))


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"ema": 0.8, "optimizer": "adamp"}])
def test_resuming_is_exact_and_checkpoints_name_the_towers(
    clip_checkpoint: Path, photos: PhotoSet, tmp_path: Path, fields: dict[str, Any]
) -> None:
    whole = train(clip_checkpoint, photos, **fields)
    out, towers = tmp_path / "run", Path(shutil.copytree(clip_checkpoint, tmp_path / "towers" / clip_checkpoint.name))
    assert train(towers, photos, CtrlC(6), out=out, **fields).interrupted
    tensors, metadata = read_tensors(out / "checkpoint/state.safetensors")
    assert any("lora_" in name for name in tensors)
    assert not any("base_layer" in name or "embedding" in name for name in tensors), "the towers are where they were"
    assert f'"clip:{clip_checkpoint.name}"' in metadata["description"]
    kept = shutil.copytree(towers, tmp_path / "kept")
    shutil.rmtree(towers)
    clip_folder(towers, seed=1)
    with pytest.raises(OtherRun, match="towers"):
        train(towers, photos, out=out, **fields)
    shutil.rmtree(towers)
    kept.rename(towers)
    assert_same_weights(train(towers, photos, out=out, **fields).model, whole.model)


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_train_the_same_updates(
    clip_checkpoint: Path, launch: Any, reference: Any, recipes: Any, tmp_path: Path
) -> None:
    changes = {
        "data.pairs": "scenes:images=16,held_out=6,per_image=2,size=32", "data.dev": "", "evaluate.splits": ["test"],
        "backbone.spec": f"clip:{clip_checkpoint}", "backbone.lora": {"rank": 2}, "train.towers": RATES,
    }  # fmt: skip
    file, expected = reference(changes)
    first, second = launch.ranks([["train", file, "--out", tmp_path / "run"]] * 2)
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert Outcome.of(tmp_path / "run").close(expected, weights=5e-5, rows=1e-4)


def test_a_start_is_adapted(clip_checkpoint: Path, photos: PhotoSet, tmp_path: Path) -> None:
    trained = train(clip_checkpoint, photos).model
    trained.save_pretrained(tmp_path / "model")
    model = build(clip_checkpoint, start=str(tmp_path / "model"))
    texts = model.backbone.tokenize(["a dog"])
    assert torch.equal(model.embed_texts(texts).mean, trained.embed_texts(texts).mean)


def test_refusals(clip_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, vacsr: Any, recipes: Any) -> None:
    with pytest.raises(UsageError, match="k_proj"):
        build(clip_checkpoint, lora={"targets": ["query"]})
    for spec, pairs in (("tiny:", "scenes:images=16,held_out=6"), ("features:", "synthetic:images=29,held_out=12")):
        file = recipes.file({"data.pairs": pairs, "backbone": {"spec": spec, "lora": {"rank": 2}}})
        assert vacsr("train", file, "--out", recipes.folder / "refused").refused(2, "backbone.lora.rank", "clip:")
        assert not (recipes.folder / "refused").exists()
    few = recipes.folder / "few.yaml"
    few.write_text("task: fewshot\nbackbone: {spec: 'clip:vit-b16', lora: {rank: 2}}\nmethod: {name: coop}\n")
    assert vacsr("fewshot", few, "--out", recipes.folder / "refused").refused(2, "backbone.lora.rank=0")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match=r"vacsr\[lora\]"):
        build(clip_checkpoint)
