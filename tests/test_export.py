"""Exported graphs in the real onnxruntime and in torch: what PairScorer gives, at other sizes than those traced."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.errors import MissingExtra, UsageError
from vacsr.export import export_onnx, export_torch
from vacsr.methods.base import Embedding
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer, PairScores

from .scoring.models import inputs, model

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
LATER = [pytest.mark.slow, pytest.mark.long]
FIRST = pytest.param({"name": "vacsr", "members": 2}, marks=pytest.mark.slow)
UNFOLDED = {"mixing": "head", "trunk_norm": True, "decode": "argmax", "uncertainty": "std"}
METHODS: list[dict[str, Any]] = [
    {"name": "vacsr", "adapter": UNFOLDED}, {"name": "vacsr", "preset": "paper"}, {"name": "sigmoid"},
    {"name": "infonce", "members": 2}, {"name": "vse"}, {"name": "pcmepp", "members": 2}, {"name": "ncr"},
    {"name": "bicro"}, {"name": "npc"}, {"name": "daa", "base": {"name": "sigmoid"}},
]  # fmt: skip
TINY = "tiny:width=16,depth=1,text_depth=1,heads=2,size=32"


def run(file: Path, **arrays: Tensor) -> dict[str, Tensor]:
    """The graph's outputs by name."""
    session = onnxruntime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
    found = session.run(None, {name: tensor.numpy() for name, tensor in arrays.items()})
    return {one.name: torch.from_numpy(x) for one, x in zip(session.get_outputs(), found, strict=True)}


def wanted(scorer: PairScorer, v: Embedding, t: Embedding) -> dict[str, Tensor]:
    """What the scorer gives for all pairs, [I, T] each."""
    shape = len(v.mean), len(t.mean)
    rows, cols = torch.arange(shape[0]).repeat_interleave(shape[1]), torch.arange(shape[1]).repeat(shape[0])
    answers = PairScores(scorer, v, t).at(rows, cols)
    known = {"score": answers.score, "grade": answers.grade, "uncertainty": answers.uncertainty}
    return {name: x.view(shape) for name, x in known.items() if x is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-4)


def vectors(side: str, x: Embedding) -> dict[str, Tensor]:
    return {f"{side}_vectors": x.mean} | ({} if x.log_var is None else {f"{side}_log_variances": x.log_var})


@pytest.mark.parametrize("raw", [FIRST, *(pytest.param(each, marks=LATER) for each in METHODS)])
def test_scores_from_features(raw: dict[str, Any], tmp_path: Path) -> None:
    made, file = model(raw), tmp_path / "new" / "model.onnx"
    scorer = PairScorer(made, device="cpu")
    export_onnx(made, file)
    for images, texts in ((1, 1), (7, 1), (3, 90)):
        x, y = (rows.float() for rows in inputs(images, texts))
        assert_same(run(file, images=x, texts=y), wanted(scorer, scorer.embed_images(x), scorer.embed_texts(y)))
    assert [path.name for path in file.parent.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=LATER) for name in ("vacsr", "pcmepp")])
def test_vectors_of_each_side_and_their_scores(name: str, tmp_path: Path) -> None:
    made = model({"name": name, "members": 2})
    scorer, (images, texts) = PairScorer(made, device="cpu"), inputs(4, 5)
    v, t = scorer.embed_images(images), scorer.embed_texts(texts)
    files = {part: tmp_path / f"{part}.onnx" for part in ("images", "texts", "scores")}
    for part, file in files.items():
        export_onnx(made, file, part=part)  # type: ignore[arg-type]
    sides = vectors("image", v), vectors("text", t)
    assert_same(run(files["images"], images=images), sides[0])
    assert_same(run(files["texts"], texts=texts), sides[1])
    assert_same(run(files["scores"], **sides[0], **sides[1]), wanted(scorer, v, t))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "towers"), [("vacsr", "tiny"), ("vacsr", "clip"), ("vacsr", "projected"), ("pcmepp", "lora")]
)
def test_scores_from_pixels_and_ids(name: str, towers: str, clip_checkpoint: Path, tmp_path: Path) -> None:
    """Captions from the shortest to the longest, alone and together; GPO and class tokens; LoRA is merged."""
    fields: dict[str, Any] = {"spec": TINY if towers == "tiny" else f"clip:{clip_checkpoint}"}
    if towers == "projected":
        fields |= {"image_output": "projected", "text_output": "projected", "pooling": "cls"}
    if towers == "lora":
        pytest.importorskip("peft", reason="peft is not installed")
        fields["lora"] = {"rank": 2}
    config = BackboneConfig(head=HeadConfig(dim=8), **fields)
    made = MatchingModel.build(method_config(name), config, seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    scorer, file, saved = PairScorer(made, device="cpu"), tmp_path / "model.onnx", tmp_path / "model.pt2"
    graph = export_onnx(made, file)
    export_torch(made, saved)
    assert {n: str(one) for n, one in graph.inputs(2, 3).items()} == {
        "images": "uint8 [images, 3, 32, 32]",
        "texts": "int64 [texts, tokens]",
    }
    assert not any(b"site-packages" in path.read_bytes() for path in (file, saved)), "paths of this machine"
    photos = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    ids = made.backbone.tokenize(["a", "a dog", "one two three four five six seven eight nine"]).long()
    context = made.backbone.tokenizer.context
    for pixels, tokens in ((photos, ids), (photos[:1], ids[:1, :4]), (photos[:2], ids[1:2])):
        with torch.inference_mode():
            expected = wanted(scorer, made.embed_images(pixels), made.embed_texts(tokens))
        assert_same(run(file, images=pixels, texts=tokens), expected)
        padded = functional.pad(tokens, (0, context - tokens.shape[1]), value=-1)
        again = torch.export.load(saved).module()(pixels, padded)
        assert_same(dict(zip(expected, again, strict=True)), expected)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vacsr: Any) -> None:
    file = tmp_path / "model.onnx"
    for raw in ({"name": "pcme"}, {"name": "daa"}):
        with pytest.raises(UsageError, match="pcmepp"):
            export_onnx(model(raw), file)
    made = model("sigmoid")
    made.save_pretrained(tmp_path / "model")
    assert vacsr("export", tmp_path / "model").refused(2, "--onnx FILE")
    weights = tmp_path / "model/model.safetensors"
    assert vacsr("export", tmp_path / "model", "--onnx", weights).refused(2, "--onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtra, match=r"vacsr\[onnx\]"):
        export_onnx(made, file)
    assert not file.exists()


@pytest.mark.slow
def test_the_command_writes_what_was_asked_for(tmp_path: Path, vacsr: Any) -> None:
    made = model("sigmoid")
    made.save_pretrained(tmp_path / "model")
    file, saved = tmp_path / "model.onnx", tmp_path / "model.pt2"
    file.write_text("an older one")
    answer = vacsr("export", tmp_path / "model", "--onnx", file, "--torch-export", saved)
    assert answer.code == 0, answer.err
    assert answer.out.split() == [str(file), str(saved)]
    assert "images: float32 [images, 6]" in answer.err
    meta = onnxruntime.InferenceSession(str(file)).get_modelmeta().custom_metadata_map
    assert meta == {**made.identity(), "method": "sigmoid"}
    images, texts = inputs(4, 5)
    score, grade = torch.export.load(saved).module()(images, texts)
    assert_same(run(file, images=images, texts=texts), {"score": score, "grade": grade})
