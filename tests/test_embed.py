"""Photos to features: ids, splits, captions and origin beside them; what was stopped goes on where it stood."""

import json
import multiprocessing
import runpy
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from vacsr.backbones import TowerBackbone, load_backbone
from vacsr.config import BackboneConfig
from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.embed import Embedded, embed_captions, embed_pairs, embedding_config
from vacsr.errors import DataError, ProvenanceMismatch, UsageError
from vacsr.evaluate.pair_files import read_caption_vectors
from vacsr.files import read_tensors, write_tensors

HERE = Path(__file__).parent
SPLITS = ("train",) * 6 + ("dev",) * 3 + ("test",) * 3
WORDS = ("a red dog", "ein Hund läuft", "собака", "犬が走る", "two dogs on a beach")


@pytest.fixture(scope="module")
def clip(clip_checkpoint: Path) -> str:
    return f"clip:{clip_checkpoint}"


def photo(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (20 + seed, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def folder(root: Path, splits: tuple[str, ...] = SPLITS) -> str:
    """Twelve photos, one to three captions each, in folders by their split."""
    for number, split in enumerate(splits):
        photo(root / split / f"{number:02d}.png", number)
        lines = [f"{WORDS[(number + line) % 5]} {number}" for line in range(1 + number % 3)]
        (root / split / f"{number:02d}.txt").write_text("\n".join(lines), encoding="utf-8")
    return f"folder:{root}"


@pytest.fixture
def photos(tmp_path: Path) -> str:
    return folder(tmp_path / "photos")


def embed(spec: str, pairs: str, out: Path, **options: Any) -> Embedded:
    """In three parts of photos and six of captions."""
    config = embedding_config(spec, pooling=options.get("pooling", "auto"))
    return embed_pairs(config, pairs, out, device="cpu", part_size=4, **options)


def reference(spec: str, pairs: PhotoSet, *, mean: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """One photo and one caption at a time, through the towers by hand."""
    backbone = load_backbone(embedding_config(spec))
    assert isinstance(backbone, TowerBackbone)
    images, texts = [], []
    with torch.no_grad():
        for row in range(len(pairs.image_ids)):
            square = backbone.transform.pixels(pairs.photos.open(row))[None]
            values = backbone.image(backbone.transform.normalize(square))[0]
            images.append(values.mean(dim=0) if mean else values[0])
        for caption in pairs.captions:
            ids = backbone.tokenize([caption]).long()
            values = backbone.text(ids, ids >= 0)[0]
            texts.append(values.mean(dim=0) if mean else values[-1])
    return functional.normalize(torch.stack(images), dim=-1), functional.normalize(torch.stack(texts), dim=-1)


@pytest.mark.parametrize("pooling", ["auto", "cls", "mean"])
def test_features_are_those_of_the_towers(
    clip: str, photos: str, tmp_path: Path, pooling: Literal["auto", "cls", "mean"]
) -> None:
    result = embed(clip, photos, tmp_path / "f.safetensors", pooling=pooling, dtype=torch.float32)
    data = load_pairs(photos)
    assert isinstance(data, PhotoSet)
    image, text = reference(clip, data, mean=pooling == "mean")
    tensors, metadata = read_tensors(tmp_path / "f.safetensors")
    torch.testing.assert_close(tensors["image"], image, atol=1e-5, rtol=0)
    torch.testing.assert_close(tensors["text"], text, atol=1e-5, rtol=0)
    assert tensors["image"].dtype == torch.float32
    assert (result.images, result.captions, result.skipped) == (12, 24, ())
    assert metadata["backbone"] == "clip:small-clip"
    assert metadata["preprocessing"].startswith("32 whole bicubic")
    assert len(metadata["revision"]) == 12
    assert metadata["encoder"].count('"mean"') == (3 if pooling == "mean" else 0), "of the towers, photos and captions"


def test_the_printed_spec_holds_the_same_data(clip: str, photos: str, tmp_path: Path) -> None:
    """Ids, captions and splits; half precision by default."""
    spec = embed(clip, photos, tmp_path / "new" / "f.safetensors").spec
    for split in (None, "train", "dev", "test"):
        old, new = load_pairs(photos, split=split), load_pairs(spec, split=split)
        assert isinstance(new, PairSet)
        assert (new.image_ids, new.caption_ids, new.captions) == (old.image_ids, old.caption_ids, old.captions)
        assert torch.equal(new.caption_image, old.caption_image)
    assert new.provenance.backbone == "clip:small-clip"
    assert read_tensors(tmp_path / "new" / "f.safetensors")[0]["image"].dtype == torch.float16
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["f-captions.jsonl", "f.safetensors"]


def test_one_split_alone_also_val(clip: str, tmp_path: Path) -> None:
    photos = folder(tmp_path / "photos", ("train", "train", "val", "test"))
    spec = embed(clip, photos, tmp_path / "f.safetensors", split="train").spec
    assert load_pairs(spec).image_ids == load_pairs(spec, split="train").image_ids == ("train/00.png", "train/01.png")
    with pytest.raises(DataError, match="no split 'val'"):
        load_pairs(spec, split="val")
    spec = embed(clip, photos, tmp_path / "g.safetensors").spec
    assert load_pairs(spec, split="val").image_ids == ("val/02.png",)


def test_data_without_splits_and_captions_of_any_kind(clip: str, tmp_path: Path) -> None:
    """A table: captions out of order, ids of its own, a line break, a quote, half a surrogate."""
    captions = ["line\nbreak", 'quote "', "half \ud83d", "日本語", "a\u2028b", "x" * 10_000]
    lines: list[dict[str, str]] = []
    for number, text in zip((2, 0, 1, 0, 2, 1), captions, strict=True):
        photo(tmp_path / f"{number}.png", number)
        ids = {"image": f"{number}.png", "image_id": f"i{number}", "caption_id": f"c{len(lines)}"}
        lines.append({**ids, "caption": text})
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = load_pairs(embed(clip, f"jsonl:{tmp_path / 't.jsonl'}", tmp_path / "f.safetensors").spec)
    old = load_pairs(f"jsonl:{tmp_path / 't.jsonl'}")
    assert new.captions == old.captions == tuple(captions)
    assert new.image_ids == old.image_ids == ("i2", "i0", "i1")
    assert new.caption_ids == old.caption_ids == tuple(f"c{n}" for n in range(6))
    assert torch.equal(new.caption_image, old.caption_image)


def test_splits_of_other_names_are_reported(clip: str, tmp_path: Path) -> None:
    rows = ["image,caption,split"]
    for number, split in enumerate(("train", "train", "fold-3")):
        photo(tmp_path / f"{number}.png", number)
        rows.append(f"{number}.png,a thing,{split}")
    (tmp_path / "t.csv").write_text("\n".join(rows), encoding="utf-8")
    with pytest.warns(
        UserWarning, match=r"1 images are in no split named train, dev, val, test, first '2\.png'.*--split"
    ):
        spec = embed(clip, f"csv:{tmp_path / 't.csv'}", tmp_path / "f.safetensors").spec
    assert len(load_pairs(spec).image_ids) == 3


def test_features_of_other_towers_are_refused(clip: str, photos: str, tmp_path: Path) -> None:
    same = embed(clip, photos, tmp_path / "f.safetensors", pooling="mean").spec
    origin = load_pairs(embed(clip, photos, tmp_path / "g.safetensors").spec).provenance
    origin.check(load_pairs(same).provenance)
    foreign = shutil.copytree(clip.partition(":")[2], tmp_path / "other-clip")
    strange = embed(f"clip:{foreign}", photos, tmp_path / "h.safetensors").spec
    with pytest.raises(ProvenanceMismatch, match="clip:other-clip"):
        origin.check(load_pairs(strange).provenance)


def counted(monkeypatch: pytest.MonkeyPatch, stop: int | None = None) -> list[str]:
    """The calls of the towers; Ctrl-C at the one of this number."""
    calls: list[str] = []
    for method in (TowerBackbone.encode_images, TowerBackbone.encode_texts):

        def encode(self: TowerBackbone, x: torch.Tensor, original: Any = method) -> Any:
            calls.append(original.__name__)
            if len(calls) == stop:
                raise KeyboardInterrupt
            return original(self, x)

        monkeypatch.setattr(TowerBackbone, method.__name__, encode)
    return calls


def stopped(clip: str, photos: str, out: Path, *, at: int) -> None:
    """Ctrl-C at this call of a tower."""
    with pytest.MonkeyPatch.context() as patched:
        counted(patched, at)
        with pytest.raises(KeyboardInterrupt):
            embed(clip, photos, out)


def continued(clip: str, photos: str, out: Path, **options: Any) -> int:
    """How many parts are made."""
    with pytest.MonkeyPatch.context() as patched:
        calls = counted(patched)
        embed(clip, photos, out, **options)
    return len(calls)


def same(one: Path, other: Path) -> bool:
    """Every bit of the features, the origin, and the captions file; safetensors writes metadata in any order."""
    (tensors, origin), (others, other_origin) = read_tensors(one), read_tensors(other)
    assert tensors.keys() == others.keys()
    assert all(
        torch.equal(tensor.view(torch.uint8), others[name].view(torch.uint8)) for name, tensor in tensors.items()
    )
    assert origin == other_origin
    captions = [path.with_name(f"{path.stem}-captions.jsonl").read_bytes() for path in (one, other)]
    return captions[0] == captions[1]


@pytest.mark.parametrize("stop", [1, 3, 4, 9])
def test_what_was_stopped_goes_on(clip: str, photos: str, tmp_path: Path, stop: int) -> None:
    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    embed(clip, photos, whole)
    stopped(clip, photos, broken, at=stop)
    assert not broken.exists()
    assert len(list((tmp_path / "broken.safetensors.parts").glob("*"))) == stop - 1
    assert continued(clip, photos, broken) == 9 - (stop - 1), "finished parts are not made again"
    assert same(broken, whole)
    assert not (tmp_path / "broken.safetensors.parts").exists()


@pytest.mark.parametrize("moment", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_and_run_again(clip: str, photos: str, tmp_path: Path, moment: int) -> None:
    """SIGKILL right after a part was written; the same command line then ends with the same bytes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vacsr.cli", "vacsr.train", "vacsr.compare", "torch._dynamo"])
    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    argv = ["embed", "--backbone", clip, "--pairs", photos, "--device", "cpu", "--out", str(broken)]
    job = {"argv": argv, "kill": ("after part", moment), "output": str(tmp_path / "output")}
    options = {"init_globals": {"JOB": job}, "run_name": "__main__"}
    process = context.Process(target=runpy.run_path, args=(str(HERE / "train" / "driver.py"),), kwargs=options)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert len(list((tmp_path / "broken.safetensors.parts").glob("*.safetensors"))) == moment
    assert continued(clip, photos, broken) == 9 - moment
    embed(clip, photos, whole)
    assert same(broken, whole)


@pytest.mark.parametrize("harm", ["torn", "from another job", "short"])
def test_a_part_that_does_not_fit_is_made_again(clip: str, photos: str, tmp_path: Path, harm: str) -> None:
    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    embed(clip, photos, whole)
    stopped(clip, photos, broken, at=3)
    part = tmp_path / "broken.safetensors.parts" / "images-00000004.safetensors"
    (tensors, metadata), content = read_tensors(part), part.read_bytes()
    if harm == "torn":
        part.write_bytes(content[:40])
    elif harm == "short":
        write_tensors(part, {"rows": tensors["rows"][:2].clone()}, metadata=metadata)
    else:
        write_tensors(part, tensors, metadata={"fingerprint": "another"})
    embed(clip, photos, broken)
    assert same(broken, whole)


def test_parts_of_other_photos_or_another_precision_are_not_used(clip: str, photos: str, tmp_path: Path) -> None:
    out = tmp_path / "f.safetensors"
    stopped(clip, photos, out, at=3)
    assert continued(clip, photos, out, dtype=torch.float32) == 9
    stopped(clip, photos, out, at=3)
    photo(tmp_path / "photos" / "train" / "00.png", 77)
    assert continued(clip, photos, out) == 9


def test_photos_that_cannot_be_read(clip: str, photos: str, tmp_path: Path) -> None:
    bad = tmp_path / "photos" / "dev" / "07.png"
    bad.write_bytes(bad.read_bytes()[:60])
    (tmp_path / "photos" / "test" / "10.txt").write_text("\n", encoding="utf-8")
    out = tmp_path / "f.safetensors"
    with pytest.raises(DataError, match=r"test/10\.png: no caption"):
        embed(clip, photos, out)
    (tmp_path / "photos" / "test" / "10.txt").write_text("something", encoding="utf-8")
    with pytest.raises(DataError, match=r"07\.png cannot be read as a photo"):
        embed(clip, photos, out)
    assert not out.exists()
    assert not (tmp_path / "f-captions.jsonl").exists()
    with pytest.warns(UserWarning, match="1 left out") as warned:
        result = embed(clip, photos, out, on_error="skip")
    assert len({str(one.message) for one in warned if "left out" in str(one.message)}) == 1, "one warning"
    assert ["dev/07.png cannot be read" in line for line in result.skipped] == [True]
    new = load_pairs(result.spec)
    assert (len(new.image_ids), "dev/07.png" in new.image_ids) == (11, False)
    assert load_pairs(result.spec, split="dev").image_ids == ("dev/06.png", "dev/08.png")


CLIP = embedding_config("clip:CLIP")
UNKNOWN = BackboneConfig(spec="open:x", pooling="cls")
NAMED = "is not the name of a .safetensors file"


@pytest.mark.parametrize(
    ("config", "pairs", "out", "error", "words"),
    [
        (embedding_config("tiny:"), "PHOTOS", "f.safetensors", UsageError, "no pretrained towers — use clip:"),
        (embedding_config("features:"), "PHOTOS", "f.safetensors", UsageError, "no pretrained towers — use clip:"),
        (UNKNOWN, "PHOTOS", "f.safetensors", UsageError, "unknown backbone 'open:x' — write"),
        (CLIP, "synthetic:images=5", "f.safetensors", DataError, "holds features already"),
        (CLIP, "PHOTOS", "f.npy", UsageError, NAMED),
        (CLIP, "PHOTOS", "folder.safetensors", UsageError, NAMED),
        (embedding_config("clip:CLIP", pooling="mean"), "PHOTOS", "f.safetensors", UsageError, "write --pooling cls"),
    ],
)
def test_what_cannot_be_embedded(
    photos: str, tmp_path: Path, config: BackboneConfig, pairs: str, out: str, error: type[Exception], words: str
) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=words):
        embed_pairs(config, pairs.replace("PHOTOS", photos), tmp_path / out, device="cpu")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command(clip: str, photos: str, tmp_path: Path, vacsr: Any) -> None:
    """stdout is the SPEC alone; --full writes float32, --set reaches the backbone."""
    out = tmp_path / "f.safetensors"
    options = ("--out", out, "--full", "--set", "resize=center", "--device", "cpu")
    with pytest.MonkeyPatch.context() as patched:
        counted(patched, 2)
        stop = vacsr("embed", "--backbone", clip, "--pairs", photos, *options)
    assert (stop.code, stop.out, "12 of 12 photos are stored" in stop.err) == (130, "", True), stop.err
    done = vacsr("embed", "--backbone", clip, "--pairs", photos, *options)
    assert done.code == 0, done.err
    assert done.out == f"features:{out},captions={tmp_path / 'f-captions.jsonl'}\n"
    assert "embedded 12 photos and 24 captions" in done.err
    tensors, metadata = read_tensors(out)
    assert tensors["text"].dtype == torch.float32
    assert metadata["preprocessing"].startswith("32 center of 32")
    assert load_pairs(done.out.strip()).provenance.preprocessing == metadata["preprocessing"]


def test_captions_alone_have_the_vectors_that_they_have_beside_photos(clip: str, photos: str, tmp_path: Path) -> None:
    """By exact text; a caption of the data and one outside of it."""
    embed(clip, photos, tmp_path / "pairs.safetensors")
    pairs = load_pairs(f"features:{tmp_path}/pairs.safetensors,captions={tmp_path}/pairs-captions.jsonl")
    assert isinstance(pairs, PairSet)
    assert pairs.captions is not None
    known, out = pairs.captions[4], tmp_path / "words.safetensors"
    embed_captions(embedding_config(clip), ["no such caption", known], out, device="cpu")
    vectors = read_caption_vectors(out)
    torch.testing.assert_close(vectors.vectors[vectors.rows[known]], pairs.texts[4], atol=1e-3, rtol=1e-3)
    assert vectors.rows["no such caption"] == 0
    assert vectors.provenance == pairs.provenance
    assert not out.with_name(f"{out.name}.parts").exists()
