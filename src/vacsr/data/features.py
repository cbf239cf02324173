"""Cached embeddings on disk: safetensors with ``image`` and ``text``, or two ``.npy`` files."""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vacsr.data.captions import CaptionTable, number_captions
from vacsr.data.formats import OnError, Spec, register
from vacsr.data.pairs import PairSet, check_assignment
from vacsr.data.tables import read_captions
from vacsr.errors import DataError, NoSuchSplit, ShapeMismatch, UsageError
from vacsr.files import read_npy, read_tensors, write_tensors
from vacsr.provenance import Provenance


@register("features", path="FILE", options=("split",), path_options=("captions", "text"), suffix=".safetensors")
def load_features(spec: Spec, _on_error: OnError) -> PairSet:
    """``features:FILE[,captions=FILE][,text=FILE][,split=S]``; any float dtype in, float32 out. A folder: its files.

    ``FILE``: safetensors with ``image`` [N, D] and ``text`` [N, C, D] or [M, D] (with an optional int tensor
    ``caption_image`` [M], and metadata ``backbone``, ``preprocessing``, ``revision``), or a ``.npy`` file of images
    with ``text`` naming the ``.npy`` file of texts. ``captions``: the ids, texts and splits, see
    :mod:`vacsr.data.tables`; without it, ids are row numbers.
    """
    captions, split = spec.path_option("captions"), spec.option("split")
    if spec.location.is_dir():
        return _join(spec)
    tensors, metadata = _read(spec.location, text=spec.path_option("text"))
    assignment = _check(tensors, source=spec.path)
    images, texts = tensors["image"], tensors["text"].flatten(0, -2)
    if captions is not None:
        table = read_captions(captions)
        _check_agreement(table, images, texts, assignment, source=spec.path)
    elif assignment is not None:
        names = [str(row) for row in range(len(images))]
        captions_of = number_captions([names[row] for row in assignment.tolist()])
        table = CaptionTable(spec.path, tuple(names), captions_of, assignment)
    else:
        action = "add captions=FILE (.json, .csv or .jsonl), or a tensor caption_image [M] with each caption's image"
        raise DataError(f"nothing says which image each caption in {spec.path} belongs to — {action}")
    chosen = torch.zeros(len(images), dtype=torch.bool)
    chosen[table.rows_of(split)] = True
    features = images[chosen].float(), texts[chosen[table.caption_image]].float()
    provenance = Provenance.from_metadata(metadata)
    return PairSet(*features, **table.subset(chosen).labels(), split=split or "all", provenance=provenance)


def folder_specs(spec: Spec) -> list[Spec]:
    """The SPEC of each file in a folder of embeddings, by name, with the captions file that lies beside it."""
    paths = sorted(spec.location.glob("*.safetensors"))
    if not paths:
        raise DataError(f"{spec.path} holds no .safetensors file — give a file, or a folder of vacsr embed --ray")
    beside = ([path.with_name(f"{path.stem}{end}") for end in ("-captions.jsonl", ".csv")] for path in paths)
    captions = (next((str(path) for path in some if path.is_file()), None) for some in beside)
    return [replace(spec, path=str(p)).with_options({"captions": c}) for p, c in zip(paths, captions, strict=True)]


def _join(spec: Spec) -> PairSet:
    """All files of a folder as one set. A file without the split is left out."""
    parts: list[PairSet] = []
    for one in folder_specs(spec):
        with suppress(NoSuchSplit):
            parts.append(load_features(one, "fail"))
            parts[0].provenance.check(parts[-1].provenance)
    if not parts:
        raise NoSuchSplit(f"no file in {spec.path} has a split {spec.option('split')!r} — ask for all")
    first = torch.tensor([0, *(len(part.image_ids) for part in parts)]).cumsum(0).tolist()
    rows = [part.caption_image + row for part, row in zip(parts, first, strict=False)]
    joined: dict[str, Any] = {"caption_image": torch.cat(rows)}
    joined |= {name: torch.cat([getattr(part, name) for part in parts]) for name in ("images", "texts")}
    for name in ("image_ids", "caption_ids", "captions"):
        joined[name] = tuple(one for part in parts for one in getattr(part, name) or ()) or None
    return replace(parts[0], **joined)


def write_features(
    path: str | Path,
    *,
    image: Tensor,
    text: Tensor,
    caption_image: Tensor | None = None,
    provenance: Provenance | None = None,
) -> None:
    """Write embeddings as :func:`load_features` reads them, in the dtype given.

    ``image`` [N, D_image]; ``text`` [N, C, D_text], or [M, D_text] with ``caption_image`` [M].
    """
    tensors = {"image": image, "text": text}
    if caption_image is not None:
        tensors["caption_image"] = caption_image
    if _check(tensors, source=str(path)) is None:
        raise DataError(f"text has shape {list(text.shape)}, nothing names its images — pass caption_image= [M]")
    write_tensors(Path(path), tensors, metadata=(provenance or Provenance()).as_metadata())


def _read(path: Path, *, text: Path | None) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """The tensors of a file, or of two, in their own dtype, and the metadata."""
    if path.suffix.lower() == ".npy":
        if text is None:
            raise UsageError(f"{path} holds images only — name the texts too: features:{path},text=FILE.npy")
        return {"image": _read_npy(path), "text": _read_npy(text)}, {}
    if path.suffix.lower() != ".safetensors":
        raise DataError(f"{path} is not a features file — give .safetensors, or .npy with text=FILE.npy")
    if text is not None:
        raise UsageError(f"text= goes with .npy images only, {path} holds texts itself — leave text={text} out")
    return read_tensors(path)


def _read_npy(path: Path) -> Tensor:
    """One array as a tensor; nothing in the file is executed."""
    array = read_npy(path)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise DataError(f"{path} holds {array.dtype}, expected one array of floats — save it with numpy.save")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _check(tensors: Mapping[str, Tensor], *, source: str) -> Tensor | None:
    """The image row of each caption [M], from the layout [N, C, D] or from the file; None where neither says it."""
    for name in ("image", "text"):
        if name not in tensors:
            held = ", ".join(sorted(tensors)) or "nothing"
            raise DataError(f"{source} holds {held}, expected tensors image and text — rename them")
        if not tensors[name].is_floating_point():
            raise DataError(f"{name} in {source} is {tensors[name].dtype}, expected floats — store embeddings there")
    image, text, stored = tensors["image"], tensors["text"], tensors.get("caption_image")
    if image.ndim != 2 or text.ndim not in (2, 3) or (text.ndim == 3 and len(text) != len(image)):
        message = f"image in {source} has shape {list(image.shape)}, text {list(text.shape)}"
        raise ShapeMismatch(f"{message}, expected [N, D], and [N, C, D] or [M, D] — pool or flatten them")
    implied = torch.arange(len(image)).repeat_interleave(text.shape[1]) if text.ndim == 3 else None
    if stored is None:
        return implied
    if stored.is_floating_point() or stored.is_complex() or stored.dtype == torch.bool:
        raise DataError(f"caption_image in {source} is {stored.dtype}, expected integers — store image rows there")
    rows = stored.long().flatten()
    check_assignment(rows, range(text.shape[:-1].numel()), images=len(image))
    if implied is not None and not torch.equal(rows, implied):
        raise DataError(f"caption_image in {source} contradicts the layout [N, C, D] of text — leave it out")
    return rows


def _check_agreement(
    table: CaptionTable, images: Tensor, texts: Tensor, assignment: Tensor | None, *, source: str
) -> None:
    """The captions file and the features speak of the same images and captions."""
    sizes = (("images", len(table.image_ids), len(images)), ("captions", len(table.caption_ids), len(texts)))
    for kind, named, stored in sizes:
        if named != stored:
            message = f"{table.source} has {named:,} {kind}, the features in {source} have {stored:,}"
            raise ShapeMismatch(f"{message} — give the captions file that these features were made from")
    if assignment is not None:
        wrong = (table.caption_image != assignment).nonzero().flatten().tolist()
        if wrong:
            name, row, other = table.caption_ids[wrong[0]], table.caption_image[wrong[0]], assignment[wrong[0]]
            message = f"caption {name!r} belongs to image row {int(row)} in {table.source}, to row {int(other)}"
            raise DataError(f"{message} in {source} — put both in the same order")
    elif table.apart is not None:  # nothing can tell a shuffled file from this one
        message = f"{table.source}: image {table.apart!r} has captions in two places"
        assumed = "features are assumed to be in the order of first appearance"
        warnings.warn(f"{message}; {assumed} — add a column image_row, counted from 0", stacklevel=3)
