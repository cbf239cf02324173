"""Fill an index with the images or the captions of a data set, in batches that are stored one by one.

A stop at any time costs one batch: the same call continues, since it skips what the index already holds.
"""

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.backbones.images import PhotoReader
from vacsr.data import PairSet, PhotoSet
from vacsr.data.archives import StoredPhotos
from vacsr.data.formats import parse_spec
from vacsr.data.photos import content_fingerprint
from vacsr.errors import DataError, UsageError
from vacsr.scoring import PairScorer
from vacsr.search.index import Metadata, VectorIndex

ORIGIN = ("source", "from", "mark")  # metadata that say where an item comes from; of no use to whoever searches
_LOOKUP = 4096  # ids whose metadata are in memory at a time
_MAX_PRUNED = 0.5  # share of a source's items that are pruned without a question
_PHOTOS = {"cpu": 32, "cuda": 256}  # through the tower at a time
_SPLIT = re.compile(r"(?:,|(?<=:))split=[^,=]*$")


class Filled(NamedTuple):
    added: int = 0
    replaced: int = 0
    skipped: int = 0  # in the index already, unchanged or under another id
    of: int = 0
    removed: int = 0  # from the index, since the data set no longer has them


def fill_index(
    index: VectorIndex,
    scorer: PairScorer,
    pairs: PairSet | PhotoSet,
    *,
    source: str = "",
    texts: bool = False,
    batch: int = 1024,
    replace: bool = False,
    prune: bool = False,
    sure: bool = False,
    workers: int = 0,
    committed: Callable[[Filled], None] | None = None,
) -> Filled:
    """Embed the images, or captions, that the index lacks or that have changed, and add them ``batch`` at a time.

    ``source``: the SPEC, which the index remembers, see :func:`absolute_spec`. An id that is there from another source
    is an error before anything is embedded: it is another image. ``replace`` embeds everything and takes such ids over.
    A photo that is there under another id, from another source, is skipped with a warning.
    ``prune`` then removes what came from the source and is no longer in it; if that is more than half, it is an error
    at the start unless you are ``sure``. ``committed`` is called after each batch that is stored.
    """
    scorer.check_set(pairs)
    ids = pairs.caption_ids if texts else pairs.image_ids
    # read before anything is embedded: a change meanwhile shows the next time
    metadata = dict(zip(ids, (_text_metadata if texts else _image_metadata)(pairs, source), strict=True))
    gone = _find_gone(index, ids, source=source, sure=sure) if prune else []
    rows = list(range(len(ids))) if replace else _find_changed(index, metadata)
    if not texts:
        rows = _without_copies(index, metadata, rows, source=source)
    if source:
        index.note_source(source)
    done, batches = Filled(skipped=len(ids) - len(rows), of=len(ids)), _cut(rows, batch)
    vectors = _embed_texts(scorer, pairs, batches) if texts else _embed_images(scorer, pairs, batches, workers=workers)

    def check(stored: dict[str, Metadata]) -> None:
        """Another process may have added such an id since :func:`_find_changed`."""
        for name, item in stored.items():
            _check_source(name, item, metadata[name])

    for part, embedded in zip(batches, vectors, strict=True):
        names = [ids[row] for row in part]
        result = index.add(names, embedded, [metadata[name] for name in names], check=None if replace else check)
        done = done._replace(added=done.added + result.added, replaced=done.replaced + result.replaced)
        if committed is not None:
            committed(done)
    done = done._replace(removed=index.delete(gone) if gone else 0)
    index.optimize()
    return done


def _find_changed(index: VectorIndex, metadata: Mapping[str, Metadata]) -> list[int]:
    """Rows that the index lacks, or whose fingerprint has changed; an unknown fingerprint counts as unchanged."""
    ids, changed = list(metadata), list[int]()
    for some in _cut(range(len(ids)), _LOOKUP):
        stored = index.metadata([ids[row] for row in some])
        for row in some:
            before, new = stored.get(ids[row]), metadata[ids[row]]
            if before is not None:
                _check_source(ids[row], before, new)
            if before is None or (before.get("mark") and new["mark"] and before["mark"] != new["mark"]):
                changed.append(row)
    return changed


def _without_copies(
    index: VectorIndex, metadata: Mapping[str, Metadata], rows: Sequence[int], *, source: str
) -> list[int]:
    """The rows without photos that another source has put into the index under other ids.

    The same photo: a file of the same name, size and time, which is still there.
    """
    origin, ids = without_split(source), list(metadata)
    keys = {source_key(other) for other in index.sources if without_split(other) != origin}
    photo = {row: key for row in rows if (key := _photo_key(metadata[ids[row]])) is not None}
    if not source or not keys or not photo:
        return list(rows)
    known, wanted = dict[tuple[str, str], str](), set(photo.values())
    for name, stored in index.records():
        key = _photo_key(stored)
        if stored.get("from") in keys and name not in metadata and key in wanted and os.path.exists(stored["source"]):
            known[key] = name
    copies = [row for row, key in photo.items() if key in known]
    if copies:
        first, name = ids[copies[0]], known[photo[copies[0]]]
        message = f"{len(copies):,} photos are in the index already under other ids, first {first!r} as {name!r}"
        warnings.warn(f"{message}: skipped — to store them under the new ids, fill another index", stacklevel=3)
    return sorted({*rows} - {*copies})


def _photo_key(item: Metadata) -> tuple[str, str] | None:
    """File name and fingerprint; None where one is unknown."""
    name, mark = item.get("source"), item.get("mark")
    return (os.path.basename(name), mark) if name and mark else None


def _check_source(name: str, stored: Metadata, new: Metadata) -> None:
    """Raise where an id is there from another source; an unknown source fits any."""
    before, now = stored.get("source"), new["source"]
    if before and now and before != now:
        message = f"{name!r} was indexed from {before!r}, and now comes from {now!r}"
        action = "use the earlier SPEC, add --replace to take the new item, or fill another index"
        raise DataError(f"{message}, so it may be another item — {action}; for two folders, name their parent")


def _find_gone(index: VectorIndex, ids: Sequence[str], *, source: str, sure: bool) -> list[str]:
    """Ids that came from ``source``, or from a split of it, and are no longer in it."""
    keys = {source_key(other) for other in index.sources if source in (other, without_split(other))}
    present, stored = set(ids), [name for name, metadata in index.records() if metadata.get("from") in keys]
    gone = [name for name in stored if name not in present]
    if len(gone) > _MAX_PRUNED * len(stored) and not sure:
        message = f"{len(gone):,} of the {len(stored):,} items from {source} are missing now"
        action = "check the SPEC, or add --yes to remove them"
        raise UsageError(f"{message}, first {gone[0]!r}; nothing was changed — {action}")
    return gone


def _image_metadata(pairs: PairSet | PhotoSet, source: str) -> Iterator[Metadata]:
    """Of each image: its captions, where it comes from, and its fingerprint as "mark", "" if unknown."""
    captions: dict[int, list[str]] = {}
    for row, words in zip(pairs.caption_image.tolist(), pairs.captions or (), strict=False):
        captions.setdefault(row, []).append(words)
    for row in range(len(pairs.image_ids)):
        origin = without_split(source)
        if isinstance(pairs, PairSet):
            mark = _features_fingerprint(pairs.images[row])
        else:
            mark = pairs.photos.fingerprint(row)
            if isinstance(pairs.photos, StoredPhotos):
                origin = os.path.abspath(pairs.photos.name(row))  # the same file in any working directory
        yield {"source": origin, "captions": captions.get(row, []), "from": source_key(source), "mark": mark}


def _text_metadata(pairs: PairSet | PhotoSet, source: str) -> Iterator[Metadata]:
    """Of each caption: its words, where known, the id of its image, and where it comes from."""
    words = pairs.captions or ("",) * len(pairs.caption_ids)
    for row, image in enumerate(pairs.caption_image.tolist()):
        mark = content_fingerprint(words[row], pairs.image_ids[image])
        if isinstance(pairs, PairSet):
            mark = f"{mark} {_features_fingerprint(pairs.texts[row])}"
        content = {"text": words[row], "image": pairs.image_ids[image]}
        yield {"source": without_split(source), **content, "from": source_key(source), "mark": mark}


def _features_fingerprint(features: Tensor) -> str:
    return content_fingerprint(features.cpu().contiguous().numpy().tobytes())


@torch.inference_mode()
def _embed_images(
    scorer: PairScorer, pairs: PairSet | PhotoSet, batches: Sequence[Sequence[int]], *, workers: int
) -> Iterator[Tensor]:
    """Photos are decoded ahead, also while a batch is being stored."""
    if isinstance(pairs, PairSet):
        for rows in batches:
            yield scorer.model.embed_images(pairs.images[torch.tensor(rows)].to(scorer.device)).mean
        return
    size = _PHOTOS[scorer.device.type]
    small = [some for rows in batches for some in _cut(rows, size)]
    pixels = PhotoReader(pairs.photos, scorer.model.backbone.transform, workers=workers).stream(small)
    for rows in batches:
        yield torch.cat([scorer.model.embed_images(next(pixels).to(scorer.device)).mean for _ in _cut(rows, size)])


def _embed_texts(scorer: PairScorer, pairs: PairSet | PhotoSet, batches: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    for rows in batches:
        if isinstance(pairs, PairSet):
            yield scorer.embed_texts(pairs.texts[torch.tensor(rows)]).mean
        else:
            yield scorer.embed_texts([pairs.captions[row] for row in rows]).mean


def _cut(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def absolute_spec(spec: str, *, split: str | None = None) -> str:
    """A SPEC that means the same in any folder: absolute paths, options in one order, the split last unless "all".

    >>> absolute_spec("csv:/a/../photos.csv,split=dev,root=/b", split="test")
    'csv:/photos.csv,root=/b,split=test'
    >>> absolute_spec("scenes:images=6,split=all")
    'scenes:images=6'
    """
    return str(parse_spec(spec).with_options({"split": split}).absolute())


def without_split(source: str) -> str:
    """An :func:`absolute_spec` for all splits; other strings stay as they are.

    >>> without_split("folder:/photos,split=dev"), without_split("scenes:split=dev"), without_split("a walk")
    ('folder:/photos', 'scenes:', 'a walk')
    """
    return _SPLIT.sub("", source)


def source_key(source: str) -> str:
    """A source in twelve letters, which every item of it stores; "" for "".

    >>> source_key("folder:/photos")
    '4f2cba51e731'
    """
    return hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest() if source else ""
