"""Webdataset shards (``shards:PATTERN``): tar files whose members ``KEY.jpg``, ``KEY.json`` … make up one sample.

Reading lists the members once and then reads photos where they lie, so a shard must not be compressed. A sample's
captions are ``captions`` of its ``.json``, otherwise the lines of its ``.txt``, otherwise ``caption`` of its ``.json``;
its image id is ``id`` there, otherwise the key. Writing gives both: ``.json`` for us, ``.txt`` for other readers.
"""

from __future__ import annotations

import glob
import io
import itertools
import json
import math
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from vacsr.config.io import load_json
from vacsr.data.captions import CaptionTable, choose_split, number_captions
from vacsr.data.checks import check_unique
from vacsr.data.decode import encoded_format
from vacsr.data.photos import PhotoSet
from vacsr.data.problems import OnError, photo_set
from vacsr.data.sources import StoredPhotos, TarMember, TarPhotos
from vacsr.data.spec import Spec
from vacsr.errors import DataError, UsageError
from vacsr.files import atomic_paths

Format = Literal["same", "jpg", "png", "webp"]

_PHOTOS = ("jpg", "jpeg", "png", "webp")
_QUALITY: dict[str, dict[str, int]] = {"jpg": {"quality": 95}, "webp": {"quality": 95}, "png": {}}
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")  # the key ends at the first dot of the last part


class _Sample(NamedTuple):
    """The members of one key."""

    key: str
    photo: TarMember | None
    facts: dict[str, Any]
    """The ``.json``, or nothing."""
    lines: tuple[str, ...]
    """The ``.txt``."""


def load_shards(spec: Spec, on_error: OnError) -> PhotoSet:
    """``shards:PATTERN[,split=S]``; the pattern is a path with a range (``{0000..0010}.tar``) or a glob (``*.tar``)."""
    paths = shard_paths(spec.path)
    samples = [sample for number, path in enumerate(paths) for sample in _samples(path, number)]
    whole = [sample for sample in samples if sample.photo is not None]
    lonely = [f"{spec.path}: sample {sample.key!r} has no photo" for sample in samples if sample.photo is None]
    if not whole:
        known = ", ".join(f".{kind}" for kind in _PHOTOS)
        raise DataError(f"{spec.path} holds no photo — expected members KEY.jpg (or {known}) with KEY.txt or KEY.json")
    split = spec.options.get("split")
    table = _table(spec.path, whole)
    rows = {name: row for row, name in enumerate(table.image_ids)}
    chosen = choose_split(table, split)
    members = tuple(sample.photo for sample in whole if sample.photo is not None)
    photos = TarPhotos(tuple(paths), members).take([rows[name] for name in chosen.image_ids])
    return photo_set(chosen, photos, split=split, on_error=on_error, problems=lonely)


def shard_paths(pattern: str) -> list[Path]:
    """The files that a pattern names: every one of a range, what exists of a glob.

    >>> [path.name for path in _expand("a/{08..10}.tar")]
    ['08.tar', '09.tar', '10.tar']
    """
    paths = _expand(pattern)
    if len(paths) == 1 and not paths[0].is_file():
        paths = [Path(name) for name in sorted(glob.glob(str(paths[0]), recursive=True))]
    absent = [str(path) for path in paths if not path.is_file()]
    if absent or not paths:
        found = f"{len(absent):,} of {len(paths):,} shards are absent, first {absent[0]}" if absent else "no shard"
        raise DataError(f"{pattern}: {found} — write a range (shards/{{0000..0010}}.tar) or a glob (shards/*.tar)")
    return paths


def _expand(pattern: str) -> list[Path]:
    """Every name of a pattern with ranges; zeros in front of the first number are kept."""
    parts = _RANGE.split(str(Path(pattern).expanduser()))
    choices: list[list[str]] = [[parts[0]]]
    for first, last, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if int(first) > int(last):
            raise UsageError(f"{pattern}: the range {first}..{last} runs backwards — write {{{last}..{first}}}")
        choices += [[str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)], [rest]]
    return [Path("".join(words)) for words in itertools.product(*choices)]


def _samples(path: Path, shard: int) -> Iterator[_Sample]:
    """Samples of one shard: members that stand together and share a key."""
    try:
        with tarfile.open(path, "r:") as tar:
            files = [(member, match) for member in tar if member.isfile() and (match := _NAME.fullmatch(member.name))]
            for key, group in itertools.groupby(files, key=lambda file: file[1][1]):
                yield _sample(key, {match[2].lower(): member for member, match in group}, tar=tar, shard=shard)
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{path} is not a whole tar ({error}) — give it uncompressed, or copy it again") from error


def _sample(key: str, members: dict[str, tarfile.TarInfo], *, tar: tarfile.TarFile, shard: int) -> _Sample:
    kind = next((kind for kind in _PHOTOS if kind in members), None)
    photo = None
    if kind is not None:
        photo = TarMember(shard, members[kind].name, members[kind].offset_data, members[kind].size)
    place = f"{tar.name!s}/{key}"
    facts = _json(_text(tar, members["json"], place=place), place=place) if "json" in members else {}
    lines = _text(tar, members["txt"], place=place).split("\n") if "txt" in members else []
    return _Sample(key, photo, facts, tuple(line.removesuffix("\r") for line in lines if line.strip()))


def _text(tar: tarfile.TarFile, member: tarfile.TarInfo, *, place: str) -> str:
    file = tar.extractfile(member)
    try:
        return "" if file is None else file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{place} has a text that is not UTF-8 ({error}) — write the shard again") from error


def _json(text: str, *, place: str) -> dict[str, Any]:
    try:
        value = load_json(text, source=f"{place}.json")
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{place}.json is not JSON ({error}) — write the shard again") from error
    if not isinstance(value, dict):
        raise DataError(f'{place}.json is not an object — write {{"captions": […], "id": …}}')
    return value


def _captions(sample: _Sample) -> tuple[str, ...]:
    given = sample.facts.get("captions")
    if given is None:
        single = sample.facts.get("caption")
        return sample.lines or ((single,) if isinstance(single, str) else ())
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise DataError(f'sample {sample.key!r}: "captions" is not a list of texts — write ["…", "…"]')
    return tuple(given)


def _caption_ids(sample: _Sample, image_id: str, captions: tuple[str, ...]) -> tuple[str, ...]:
    given = sample.facts.get("caption_ids")
    if given is None:
        return number_captions([image_id] * len(captions))
    if not isinstance(given, list) or len(given) != len(captions):
        raise DataError(
            f'sample {sample.key!r}: "caption_ids" does not fit its {len(captions)} captions — give one each'
        )
    return tuple(map(str, given))


def _table(source: str, samples: list[_Sample]) -> CaptionTable:
    ids = [str(sample.facts.get("id", sample.key)) for sample in samples]
    captions = [_captions(sample) for sample in samples]
    names = [_caption_ids(*parts) for parts in zip(samples, ids, captions, strict=True)]
    splits = [sample.facts.get("split") for sample in samples]
    caption_ids = tuple(name for part in names for name in part)
    check_unique(ids, kind="image")
    check_unique(caption_ids, kind="caption")
    return CaptionTable(
        source=source,
        image_ids=tuple(ids),
        caption_ids=caption_ids,
        caption_image=tuple(row for row, texts in enumerate(captions) for _ in texts),
        captions=tuple(text for texts in captions for text in texts),
        splits=tuple(map(str, splits)) if all(isinstance(split, str) for split in splits) else None,
    )


def write_shards(
    pairs: PhotoSet, pattern_or_dir: str | Path, *, per_shard: int = 1000, format: Format = "same"
) -> list[Path]:
    """Write the pairs as shards, in their order; the same pairs give the same bytes, and all shards appear at once.

    ``pattern_or_dir``: a folder (``00000.tar``, ``00001.tar`` … in it), or a pattern with a range that is long enough.
    ``format``: a photo that is already encoded so is passed on as it is, others are encoded anew (JPEG and WebP at
    quality 95). ``same`` passes on JPEG, PNG and WebP alike, undecoded, and encodes anything else as PNG.
    """
    if per_shard < 1 or format not in get_args(Format):
        given = f"per_shard={per_shard}, format={format!r}"
        raise UsageError(f"{given}, expected at least 1, and one of {', '.join(get_args(Format))} — correct it")
    count = len(pairs.image_ids)
    targets = _targets(Path(pattern_or_dir).expanduser(), math.ceil(count / per_shard))
    captions: list[list[int]] = [[] for _ in range(count)]
    for row, image in enumerate(pairs.caption_image.tolist()):
        captions[image].append(row)
    with atomic_paths(*targets) as temporaries:
        for number, temporary in enumerate(temporaries):
            with tarfile.open(temporary, "w:", format=tarfile.USTAR_FORMAT) as tar:
                for row in range(number * per_shard, min((number + 1) * per_shard, count)):
                    _add_sample(tar, pairs, row, captions=captions[row], format=format)
    return targets


def _targets(place: Path, shards: int) -> list[Path]:
    """The shards' names. Older shards that would stand beside them unnoticed are refused."""
    if place.suffix == ".tar":
        names = _expand(str(place))
        beside = [name for name in names if name.exists()]
    else:
        names = [place / f"{number:05d}.tar" for number in range(shards)]
        beside = list(place.glob("*.tar"))
    if len(names) < shards:
        raise UsageError(f"{place} names {len(names):,} shards, {shards:,} are needed — write a longer range")
    stale = sorted(set(beside) - set(names[:shards]))
    if stale:
        message = f"{stale[0]} is there already and not one of the {shards:,} shards to be written"
        raise UsageError(f"{message} — remove it, or write to another place")
    return names[:shards]


def _add_sample(tar: tarfile.TarFile, pairs: PhotoSet, row: int, *, captions: Sequence[int], format: Format) -> None:
    """Photo, ``.json`` and ``.txt`` of one sample, with nothing in the headers that depends on when and who."""
    kind, data = _encoded(pairs, row, format=format)
    texts = [pairs.captions[caption] for caption in captions]
    facts: dict[str, Any] = {
        "id": pairs.image_ids[row],
        "captions": texts,
        "caption_ids": [pairs.caption_ids[caption] for caption in captions],
    }
    if pairs.split != "all":
        facts["split"] = pairs.split
    lines = "\n".join(" ".join(text.splitlines()) for text in texts)
    members = {kind: data, "json": json.dumps(facts).encode(), "txt": lines.encode(errors="replace")}
    for suffix, content in members.items():
        header = tarfile.TarInfo(f"{row:09d}.{suffix}")
        header.size, header.mode = len(content), 0o644
        tar.addfile(header, io.BytesIO(content))


def _encoded(pairs: PhotoSet, row: int, *, format: Format) -> tuple[str, bytes]:
    """The photo as stored where that will do, else encoded now: its suffix and its bytes."""
    if isinstance(pairs.photos, StoredPhotos):
        data = pairs.photos.encoded(row)
        kind = encoded_format(data)
        if kind is not None and format in ("same", kind):
            return kind, data
    kind = "png" if format == "same" else format
    buffer = io.BytesIO()
    pairs.photos.open(row).save(buffer, format="JPEG" if kind == "jpg" else kind.upper(), **_QUALITY[kind])
    return kind, buffer.getvalue()
