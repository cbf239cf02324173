"""The names that README and DESIGN promise, used as promised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vacsr


def test_every_public_name_resolves() -> None:
    assert set(vacsr.__all__) == {"__version__", *vacsr._HOMES}
    for name in vacsr.__all__:
        assert getattr(vacsr, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vacsr.nothing


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, vacsr; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_promised_way(tmp_path: Path) -> None:
    backbone = vacsr.BackboneConfig(head=vacsr.HeadConfig(dim=16))
    pairs = vacsr.load_pairs("synthetic:images=60", split="train")
    config = vacsr.TrainConfig(epochs=2, batch_size=32, seed=0, device="cpu")
    run = vacsr.fit("vacsr", pairs, config, backbone=backbone, progress=False)
    run.model.save_pretrained(tmp_path / "model")
    scorer = vacsr.PairScorer.from_pretrained(tmp_path / "model", device="cpu")
    test = vacsr.load_pairs("synthetic:images=60", split="test")
    scores = scorer.score_all(test.images, test.texts)
    best = scores.topk(3)
    assert best.index.shape == (len(test.image_ids), 3)
    assert torch.equal(best.score[:, 0], scores.score.max(dim=1).values)
    report = vacsr.evaluate_retrieval(scorer, test, protocols=["flickr"])
    assert report.to_markdown().count("\n") == 2
