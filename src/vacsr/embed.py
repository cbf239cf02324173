"""`vacsr embed`: photos and captions to cached features, with ids and provenance.

The work is stored in parts until the result is written, so the same command continues where it stopped.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vacsr.backbones import load_backbone, scheme_of
from vacsr.backbones.base import FeatureEncoder
from vacsr.backbones.images import PhotoReader, Progress
from vacsr.config import BackboneConfig
from vacsr.data import PhotoSet, load_pairs
from vacsr.data.photos import without_unreadable
from vacsr.errors import DataError, UsageError
from vacsr.files import atomic_paths, read_tensors, save_tensors, write_tensors
from vacsr.model import choose_device
from vacsr.noise import seeded

Pooling = Literal["auto", "cls", "mean"]
"""How the tokens of a pretrained tower become one vector; ``auto``: as the towers were trained."""
_SPLITS = ("train", "dev", "val", "test")


class Embedded(NamedTuple):
    """The result: where it is and how much it holds."""

    spec: str  # as data: `features:FILE,captions=FILE`
    images: int
    captions: int
    skipped: tuple[str, ...]


def embedding_config(spec: str, *, pooling: Pooling = "auto") -> BackboneConfig:
    """The usual embeddings: CLIP's projected vectors, or else normed class tokens of photos and mean-pooled words."""
    output: Literal["projected", "norm"] = "projected" if scheme_of(spec).matched else "norm"
    kind: Literal["mean", "cls"] = "mean" if pooling == "mean" else "cls"
    return BackboneConfig(spec=spec, image_output=output, text_output=output, pooling=kind)


def embed_pairs(
    config: BackboneConfig, pairs: str, out: Path, *, split: str | None = None, pooling: Pooling = "auto",
    dtype: torch.dtype = torch.float16, device: str = "auto", workers: int = 0,
    on_error: Literal["fail", "skip"] = "fail", progress: Callable[[str], Progress] | None = None,
    part_size: int | None = None, encoder: FeatureEncoder | None = None,
) -> Embedded:  # fmt: skip
    """Embed the photos and captions that ``pairs`` names and write ``out`` (.safetensors) with its captions file.

    ``part_size``: photos or captions that are stored at a time, in case the job is stopped; by default eight batches.
    ``encoder``: what :func:`open_encoder` made of the same config, where several sets are embedded.
    """
    _check_request(config, out, pooling=pooling)
    data = load_pairs(pairs, split=split, on_error=on_error)
    if not isinstance(data, PhotoSet):
        raise DataError(f"{pairs} holds features already, not photos — give photos, e.g. folder:DIR or csv:FILE")
    if on_error == "skip":
        data = without_unreadable(data, workers=workers)
    target = choose_device(device)
    encoder = (encoder or open_encoder(config, pooling)).to(target)
    batch = 256 if target.type == "cuda" else 32
    reader = PhotoReader(data.photos, encoder.backbone.transform, workers=workers)
    tokens = encoder.backbone.tokenize(data.captions)

    def images(rows: range) -> Iterator[Tensor]:
        """[B, D_image]"""
        for pixels in reader.stream(rows[start : start + batch] for start in range(0, len(rows), batch)):
            yield encoder.images(pixels.to(target)).to(dtype)

    def texts(rows: range) -> Iterator[Tensor]:
        """[B, D_text]"""
        for ids in torch.split(tokens[rows.start : rows.stop], batch):
            yield encoder.texts(ids.to(target)).to(dtype)

    metadata = encoder.provenance().as_metadata()
    digest = hashlib.sha256(json.dumps([metadata, data.digest(), str(dtype)], sort_keys=True).encode()).hexdigest()
    parts = _Parts(out.with_name(f"{out.name}.parts"), digest, part_size or 8 * batch)
    tensors = {
        "image": parts.join("images", len(data.photos), images, progress and progress("photos")),
        "text": parts.join("texts", len(data), texts, progress and progress("captions")),
        "caption_image": data.caption_image,
    }
    captions = captions_path(out)
    lines = _caption_lines(data)
    with atomic_paths(out, captions) as (features, words):
        save_tensors(features, tensors, metadata=metadata)
        # UTF-8 has no lone surrogates, which JSON allows: a backslash makes one an escape of JSON.
        words.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
    shutil.rmtree(parts.folder, ignore_errors=True)
    return Embedded(f"features:{out},captions={captions}", len(data.image_ids), len(data), data.skipped)


def embed_captions(
    config: BackboneConfig, captions: Sequence[str], out: Path, *, pooling: Pooling = "auto",
    dtype: torch.dtype = torch.float16, device: str = "auto", progress: Callable[[str], Progress] | None = None,
) -> None:  # fmt: skip
    """Embed captions alone, and write ``out`` (.safetensors) with ``text`` and its captions file.

    :func:`vacsr.evaluate.pair_files.read_caption_vectors` reads them, to test models on captions outside their data.
    """
    _check_request(config, out, pooling=pooling)
    target = choose_device(device)
    encoder = open_encoder(config, pooling).to(target)
    batch = 256 if target.type == "cuda" else 32

    def texts(rows: range) -> Iterator[Tensor]:
        """[B, D_text]"""
        for ids in torch.split(encoder.backbone.tokenize(captions[rows.start : rows.stop]), batch):
            yield encoder.texts(ids.to(target)).to(dtype)

    metadata = encoder.provenance().as_metadata()
    digest = hashlib.sha256(json.dumps([metadata, list(captions), str(dtype)], sort_keys=True).encode()).hexdigest()
    parts = _Parts(out.with_name(f"{out.name}.parts"), digest, 8 * batch)
    text = parts.join("texts", len(captions), texts, progress and progress("captions"))
    lines = (json.dumps({"caption": caption}, ensure_ascii=False) + "\n" for caption in captions)
    with atomic_paths(out, captions_path(out)) as (features, words):
        save_tensors(features, {"text": text}, metadata=metadata)
        words.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
    shutil.rmtree(parts.folder, ignore_errors=True)


def open_encoder(config: BackboneConfig, pooling: Pooling) -> FeatureEncoder:
    """The towers and what pools their tokens."""
    with seeded(0):  # random weights, as tests and benchmarks use, are the same every time
        backbone = load_backbone(config)
    mean_words = pooling == "mean" or (pooling == "auto" and not scheme_of(config.spec).matched)
    return FeatureEncoder(backbone, image="mean" if pooling == "mean" else "cls", text="mean" if mean_words else "cls")


def captions_path(out: Path) -> Path:
    """The captions file that belongs to the features in ``out``."""
    return out.with_name(f"{out.stem}-captions.jsonl")


def _check_request(config: BackboneConfig, out: Path, *, pooling: Pooling) -> None:
    """Refuse before the work what would fail, or mean something else, after it."""
    if out.suffix != ".safetensors" or out.is_dir():
        raise UsageError(f"{out} is not the name of a .safetensors file — write --out features.safetensors")
    if not scheme_of(config.spec).pretrained:
        message = f"backbone '{config.spec}' has no pretrained towers"
        raise UsageError(f"{message} — use clip:ID_OR_FOLDER or towers:IMAGE,TEXT")
    if config.pooling != ("mean" if pooling == "mean" else "cls"):
        message = f"backbone.pooling is {config.pooling}, features are pooled as --pooling says"
        raise UsageError(f"{message} — write --pooling cls or --pooling mean")


class _Parts(NamedTuple):
    """The parts of a job, which stay on disk until all are there."""

    folder: Path
    fingerprint: str  # of everything that the features depend on
    size: int  # rows of a part

    @torch.inference_mode()
    def join(
        self, kind: str, count: int, encode: Callable[[range], Iterator[Tensor]], progress: Progress | None
    ) -> Tensor:
        """All rows, part by part: read if an earlier attempt stored the part, computed otherwise. [N, D]"""
        parts = []
        for start in range(0, count, self.size):
            rows = range(start, min(start + self.size, count))
            path = self.folder / f"{kind}-{start:08d}.safetensors"
            try:
                tensors, metadata = read_tensors(path)
            except DataError:  # missing, or not written to the end
                tensors, metadata = {}, {}
            if metadata.get("fingerprint") != self.fingerprint or len(tensors["rows"]) != len(rows):
                tensors = {"rows": torch.cat([batch.cpu() for batch in encode(rows)])}
                write_tensors(path, tensors, metadata={"fingerprint": self.fingerprint})
            parts.append(tensors["rows"])
            if progress is not None:
                progress(rows.stop, count)
        return torch.cat(parts)


def _splits(data: PhotoSet) -> Sequence[str]:
    """The split of each image; of none where the data have no splits, or others than are known."""
    if data.split != "all":
        return [data.split] * len(data.image_ids)
    others = [image for image, name in zip(data.image_ids, data.splits or (), strict=False) if name not in _SPLITS]
    if others:
        message = f"{len(others):,} images are in no split named {', '.join(_SPLITS)}, first {others[0]!r}"
        warnings.warn(f"{message}: no splits are written — embed the splits one by one with --split", stacklevel=3)
    return () if others else data.splits or ()


def _caption_lines(data: PhotoSet) -> Iterator[str]:
    """One JSON line per caption, in the order of the text features."""
    splits = _splits(data)
    for caption, identity, row in zip(data.captions, data.caption_ids, data.caption_image.tolist(), strict=True):
        line = {"image": data.image_ids[row], "image_row": row, "caption_id": identity, "caption": caption}
        if splits:
            line["split"] = splits[row]
        yield json.dumps(line, ensure_ascii=False) + "\n"
