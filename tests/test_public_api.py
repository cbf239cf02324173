"""The names that README and DESIGN promise, used as promised."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vacsr
from vacsr.data import PhotoSet
from vacsr.errors import UsageError
from vacsr.search import embedding_provenance
from vacsr.search.fill import fill_index


def test_every_public_name_resolves() -> None:
    assert set(vacsr.__all__) == {"__version__", *(name for names in vacsr._HOMES.values() for name in names)}
    for name in vacsr.__all__:
        assert getattr(vacsr, name) is not None
    assert vacsr.data.load_images is vacsr.data.load_images, "packages need no import of their own"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vacsr.nothing


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, vacsr; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_promised_way(tmp_path: Path) -> None:
    """Train, save, score, evaluate, audit; results are readable and become JSON."""
    backbone = vacsr.BackboneConfig(head=vacsr.HeadConfig(dim=16))
    pairs = vacsr.load_pairs("synthetic:images=60", split="train")
    config = vacsr.TrainConfig(epochs=2, batch_size=32, seed=0, device="cpu")
    run = vacsr.fit("vacsr", pairs, config, backbone=backbone, progress=False)
    run.model.save_pretrained(tmp_path / "model")
    scorer = vacsr.PairScorer(vacsr.load_model(tmp_path / "model"), device="cpu")
    test = vacsr.load_pairs("synthetic:images=60", split="test")
    scores = scorer.score_all(test.images, test.texts)
    assert scorer.score_pairs(test.images[:2], test.texts[:2]).score.shape == (2,)
    best = scores.topk(3)
    assert best.index.shape == (len(test.image_ids), 3)
    assert torch.equal(best.score[:, 0], scores.score.max(dim=1).values)
    report = vacsr.evaluate_retrieval(scorer, test, protocols=["flickr"])
    assert report.to_markdown(details=False).count("\n") == 2
    findings = vacsr.audit(run.model, pairs, top=3, device="cpu")
    assert findings.to_dict()["wrong"][0]["known"]["grade"] == findings.wrong[0].known.grade
    results = (run, report, findings, best, scores.topk_both(2), scores.at(torch.arange(2), torch.arange(2)))
    for result in results:
        assert json.loads(json.dumps(result.to_dict())) == result.to_dict()
    for result in (run, report, findings, scores, run.model, pairs):
        assert len(repr(result)) < 130
    assert report.to_frame()["i2t.r1"].tolist() == [report.results[0]["i2t"]["r1"]]
    assert findings.to_frame()["known.grade"].tolist() == [suspect.known.grade for suspect in findings.wrong]
    assert report._repr_markdown_() == report.to_markdown()


TABLE = """
title: Two methods
base:
  data: {pairs: "synthetic:images=40", dev: ""}
  backbone: {head: {dim: 8}}
  train: {epochs: 1, batch_size: 32, device: cpu}
  evaluate: {splits: [test]}
rows: [{name: sigmoid, set: {method: sigmoid}}, {name: vacsr, set: {method: vacsr}}]
columns: [{key: test.rsum}]
"""


def test_the_promised_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.yaml").write_text(TABLE, encoding="utf-8")
    table = vacsr.compare("two.yaml")
    assert (tmp_path / "runs" / "two" / "results.json").is_file()
    assert "| sigmoid |" in table.to_markdown()
    assert json.loads(json.dumps(table.to_dict())) == table.to_dict()
    assert table.to_frame()["test.rsum"].notna().all()
    assert repr(table) == "ComparisonTable('Two methods': 2 rows, 1 settings, 2 runs)"
    run = next(path.parent for path in (tmp_path / "runs").rglob("model"))
    assert vacsr.load_model(run).method.config.name in ("sigmoid", "vacsr"), "a run folder is a model too"


def test_the_promised_search(tmp_path: Path) -> None:
    photos = vacsr.load_pairs("scenes:images=8,held_out=2,per_image=2,size=32", split="train")
    assert isinstance(photos, PhotoSet)
    backbone = vacsr.BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32")
    config = vacsr.TrainConfig(epochs=1, batch_size=8, device="cpu")
    model = vacsr.fit("vacsr", photos, config, backbone=backbone, progress=False).model
    spec = f"exact:{tmp_path / 'photos.index'}"
    index = vacsr.open_index(spec, dim=model.dim, provenance=embedding_provenance(model), create=True)
    fill_index(index, vacsr.PairScorer(model, device="cpu"), photos, source="scenes:")
    index.close()
    searcher = vacsr.Searcher(model, vacsr.open_index(spec))
    results = searcher.search(text=photos.captions[0], k=3)
    assert results.to_dict() == searcher.search_texts([photos.captions[0]], k=3)[0].to_dict()
    assert searcher.search(image=photos.photos.open(2), k=1).hits[0].id == photos.image_ids[2]
    for query in ({}, {"text": "a", "image": "b.jpg"}):
        with pytest.raises(UsageError, match="give one of them"):
            searcher.search(**query)
