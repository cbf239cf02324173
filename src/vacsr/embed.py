"""`vacsr embed`: photos and captions to cached features, with ids and provenance.

The work is stored in parts until the result is written, so the same command continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vacsr.backbones import Backbone, load_backbone, scheme_of
from vacsr.backbones.base import Tokens
from vacsr.backbones.images import PhotoReader, Progress
from vacsr.backbones.pooling import build_pooling
from vacsr.config import BackboneConfig
from vacsr.data import PhotoSet, load_pairs
from vacsr.data.photos import check_photos, without
from vacsr.errors import DataError, NoSuchSplit, UsageError
from vacsr.files import atomic_paths, read_tensors, save_tensors, write_tensors
from vacsr.scoring import choose_device

Pooling = Literal["auto", "cls", "mean"]
_BATCH = {"cpu": 32, "cuda": 256}
_SPLITS = ("train", "dev", "val", "test")


@dataclass(frozen=True)
class Embedded:
    """The result: where it is and how much it holds."""

    spec: str
    """Its SPEC as data: `features:FILE,captions=FILE`."""
    images: int
    captions: int
    skipped: tuple[str, ...]


def embedding_config(spec: str, *, pooling: Pooling = "auto") -> BackboneConfig:
    """The usual embeddings: CLIP's projected vectors, or else normed class tokens of photos and mean-pooled words.

    >>> embedding_config("clip:folder").image_output, embedding_config("towers:a,b").image_output
    ('projected', 'norm')
    """
    output: Literal["projected", "norm"] = "projected" if scheme_of(spec).matched else "norm"
    kind: Literal["mean", "cls"] = "mean" if pooling == "mean" else "cls"
    return BackboneConfig(spec=spec, image_output=output, text_output=output, pooling=kind)


def embed_pairs(
    config: BackboneConfig,
    pairs: str,
    out: Path,
    *,
    split: str | None = None,
    pooling: Pooling = "auto",
    dtype: torch.dtype = torch.float16,
    device: str = "auto",
    workers: int = 0,
    on_error: Literal["fail", "skip"] = "fail",
    progress: Callable[[str], Progress] | None = None,
    part_size: int = 2048,
) -> Embedded:
    """Embed the photos and captions that ``pairs`` names and write ``out`` (.safetensors) with its captions file.

    ``part_size``: photos or captions that are stored at a time, in case the job is stopped.
    """
    _check_request(config, out, pooling=pooling)
    data = load_pairs(pairs, split=split, on_error=on_error)
    if not isinstance(data, PhotoSet):
        raise DataError(f"{pairs} holds features already, not photos — give photos, e.g. folder:DIR or csv:FILE")
    if on_error == "skip":
        data = without(data, check_photos(data, workers=workers))
    backbone = _load_towers(config)
    backbone.to(choose_device(device)).eval()
    job = _Job(backbone, data, out, pooling=pooling, dtype=dtype, workers=workers, part_size=part_size)
    image = job.images(None if progress is None else progress("photos"))
    text = job.texts(None if progress is None else progress("captions"))
    captions = captions_path(out)
    provenance = backbone.provenance().as_metadata() | {"pooling": job.pooling}
    tensors = {"image": image, "text": text, "caption_image": data.caption_image}
    lines = _caption_lines(data, _split_names(pairs, data, split=split, on_error=on_error))
    with atomic_paths(out, captions) as (features, words):
        save_tensors(features, tensors, metadata=provenance)
        words.write_text("".join(lines), encoding="utf-8")
    shutil.rmtree(job.folder, ignore_errors=True)
    return Embedded(f"features:{out},captions={captions}", len(data.image_ids), len(data), data.skipped)


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


def _load_towers(config: BackboneConfig) -> Backbone:
    """Random weights, which only tests and benchmarks ask for, are the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return load_backbone(config)


class _Job:
    """One embedding job, whose parts stay on disk until all are there."""

    def __init__(
        self, backbone: Backbone, data: PhotoSet, out: Path, *, pooling: Pooling, dtype: torch.dtype, workers: int,
        part_size: int,
    ) -> None:  # fmt: skip
        self.backbone, self.data, self.dtype, self.workers, self.part_size = backbone, data, dtype, workers, part_size
        self.device = next(backbone.parameters()).device
        self.folder = out.with_name(f"{out.name}.parts")
        self.image_pool = build_pooling("mean" if pooling == "mean" else "cls")
        matched = scheme_of(backbone.config.spec).matched
        self.text_pool = build_pooling("cls" if pooling == "cls" or (pooling == "auto" and matched) else "mean")
        self.pooling = f"image {type(self.image_pool).__name__}, text {type(self.text_pool).__name__}"
        facts = [vars(backbone.provenance()), data.digest(), self.pooling, str(dtype)]
        self.fingerprint = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def images(self, progress: Progress | None) -> Tensor:
        """[N, D_image]"""
        reader = PhotoReader(self.data.photos, self.backbone.transform, workers=self.workers)

        def part(start: int, stop: int) -> Iterator[Tensor]:
            batches = [range(at, min(at + self._batch, stop)) for at in range(start, stop, self._batch)]
            for pixels in reader.stream(batches):
                yield self._pooled(self.backbone.encode_images(pixels.to(self.device)), self.image_pool)

        return self._parts("images", len(reader), part, progress)

    def texts(self, progress: Progress | None) -> Tensor:
        """[M, D_text]"""
        tokens = self.backbone.tokenize(self.data.captions)

        def part(start: int, stop: int) -> Iterator[Tensor]:
            for at in range(start, stop, self._batch):
                rows = tokens[at : min(at + self._batch, stop)].to(self.device)
                yield self._pooled(self.backbone.encode_texts(rows), self.text_pool)

        return self._parts("texts", len(tokens), part, progress)

    @property
    def _batch(self) -> int:
        return _BATCH[self.device.type]

    def _pooled(self, tokens: Tokens, pool: torch.nn.Module) -> Tensor:
        return torch.nn.functional.normalize(pool(tokens), dim=-1).to(self.dtype).cpu()

    @torch.inference_mode()
    def _parts(
        self, kind: str, count: int, part: Callable[[int, int], Iterator[Tensor]], progress: Progress | None
    ) -> Tensor:
        """All rows, part by part: read if an earlier attempt stored it, computed otherwise."""
        parts = []
        for start in range(0, count, self.part_size):
            stop = min(start + self.part_size, count)
            path = self.folder / f"{kind}-{start:08d}.safetensors"
            rows = self._stored(path, stop - start)
            if rows is None:
                rows = torch.cat(list(part(start, stop)))
                write_tensors(path, {"rows": rows}, metadata={"fingerprint": self.fingerprint})
            parts.append(rows)
            if progress is not None:
                progress(stop, count)
        return torch.cat(parts)

    def _stored(self, path: Path, count: int) -> Tensor | None:
        """A part of the same job, if there is a complete one."""
        try:
            tensors, metadata = read_tensors(path)
        except DataError:
            return None
        same = metadata.get("fingerprint") == self.fingerprint and len(tensors.get("rows", ())) == count
        return tensors["rows"] if same else None


def _split_names(pairs: str, data: PhotoSet, *, split: str | None, on_error: Literal["fail", "skip"]) -> dict[str, str]:
    """The split of each image, if the data have splits."""
    if split not in (None, "all"):
        return dict.fromkeys(data.image_ids, data.split)
    names: dict[str, str] = {}
    for name in _SPLITS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # everything that was skipped was reported when all splits were loaded
                part = load_pairs(pairs, split=name, on_error=on_error)
        except NoSuchSplit:
            continue
        except DataError as error:
            if on_error == "fail":
                raise
            warnings.warn(f"nothing of the split {name!r} is embedded: {error}", stacklevel=2)
            continue
        names |= dict.fromkeys(part.image_ids, name)
    missing = [image for image in data.image_ids if image not in names]
    if names and missing:
        message = f"{len(missing):,} images are in no split named {', '.join(_SPLITS)}, first {missing[0]!r}"
        warnings.warn(f"{message}: no splits are written — embed the splits one by one with --split", stacklevel=2)
    return {} if missing else names


def _caption_lines(data: PhotoSet, splits: dict[str, str]) -> Iterator[str]:
    """One JSON line per caption, in the order of the text features."""
    for caption, identity, row in zip(data.captions, data.caption_ids, data.caption_image.tolist(), strict=True):
        image = data.image_ids[row]
        line = {"image": image, "image_row": row, "caption_id": identity, "caption": caption}
        if splits:
            line["split"] = splits[image]
        readable = json.dumps(line, ensure_ascii=False) + "\n"
        yield readable if _is_unicode(readable) else json.dumps(line) + "\n"


def _is_unicode(text: str) -> bool:
    """No lone surrogate, which JSON allows and UTF-8 does not."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
