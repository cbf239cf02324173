"""Webdataset shards (``shards:PATTERN``): tar files whose members ``KEY.jpg``, ``KEY.json`` … make up one sample.

Reading lists the members once and then reads photos where they lie, so a shard must not be compressed. A sample's
captions are ``captions`` of its ``.json``, otherwise the lines of its ``.txt``, otherwise ``caption`` of its ``.json``;
its image id is ``id`` there, otherwise the key. Writing gives both: ``.json`` for us, ``.txt`` for other readers.
"""

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

from vacsr.data.archives import BoundedReader, StoredPhotos, TarPhoto
from vacsr.data.captions import photo_set, table_of
from vacsr.data.formats import OnError, Spec, register
from vacsr.data.photos import PhotoSet
from vacsr.errors import DataError, UsageError
from vacsr.files import atomic_paths, load_json

Format = Literal["same", "jpg", "png", "webp"]
MAX_SHARDS = 100_000
MEMBER_BYTES = 1 << 24  # the largest text of a sample, and the largest header of a member
_PHOTOS = ("jpg", "jpeg", "png", "webp")
_QUALITY: dict[str, dict[str, int]] = {"jpg": {"quality": 95}, "webp": {"quality": 95}, "png": {}}
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")  # the key ends at the first dot of the last part


class _Sample(NamedTuple):
    """The members of one key."""

    key: str
    photo: TarPhoto | None
    image_id: str
    captions: list[str]
    caption_ids: list[str]
    split: Any


@register("shards", path="PATTERN", options=("split",), suffix=".tar")
def load_shards(spec: Spec, on_error: OnError) -> PhotoSet:
    """``shards:PATTERN[,split=S]``; the pattern is a path with a range (``{0000..0010}.tar``) or a glob (``*.tar``)."""
    samples = [sample for path in shard_paths(spec.path) for sample in _samples(path)]
    whole, photos = [sample for sample in samples if sample.photo], [one.photo for one in samples if one.photo]
    if not whole:
        known = ", ".join(f".{kind}" for kind in _PHOTOS)
        raise DataError(f"{spec.path} holds no photo — expected members KEY.jpg (or {known}) with KEY.txt or KEY.json")
    splits = [sample.split for sample in whole]
    table = table_of(
        spec.path,
        [sample.image_id for sample in whole],
        [sample.captions for sample in whole],
        caption_ids=[sample.caption_ids for sample in whole],
        splits=[str(name) for name in splits] if all(isinstance(name, str) for name in splits) else None,
    )
    return photo_set(
        table,
        StoredPhotos(tuple(photos)),
        split=spec.option("split"),
        on_error=on_error,
        problems=[f"{spec.path}: sample {one.key!r} has no photo" for one in samples if one.photo is None],
    )


def shard_paths(pattern: str) -> list[Path]:
    """The files that a pattern names: every one of a range, what exists of a glob."""
    paths = _expand(pattern)
    if len(paths) == 1 and not paths[0].is_file():
        paths = [Path(name) for name in sorted(glob.glob(str(paths[0]), recursive=True))]
    absent = [str(path) for path in paths if not path.is_file()]
    if absent or not paths:
        lost = f"{len(absent):,} of {len(paths):,} shards are missing, first {absent[0]}" if absent else "no shard"
        raise DataError(f"{pattern}: {lost} — write a range (shards/{{0000..0010}}.tar) or a glob (shards/*.tar)")
    return paths


def _expand(pattern: str) -> list[Path]:
    """Every name of a pattern with ranges; leading zeros of the first number are kept.

    >>> [path.name for path in _expand("a/{08..10}.tar")]
    ['08.tar', '09.tar', '10.tar']
    """
    parts = _RANGE.split(str(Path(pattern).expanduser()))
    choices: list[Sequence[str]] = [[parts[0]]]
    total = 1
    for first, last, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if len(first) + len(last) > 40 or (total := total * max(1, int(last) - int(first) + 1)) > MAX_SHARDS:
            raise DataError(f"{pattern[:200]} names more than {MAX_SHARDS:,} shards — write a shorter range")
        if int(first) > int(last):
            raise UsageError(f"{pattern}: the range {first}..{last} runs backwards — write {{{last}..{first}}}")
        choices += [[str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)], [rest]]
    return [Path("".join(words)) for words in itertools.product(*choices)]


def _samples(path: Path) -> Iterator[_Sample]:
    """Samples of one shard: adjacent members that share a key."""
    try:
        with BoundedReader(path, limit=MEMBER_BYTES) as file, tarfile.open(path, "r:", fileobj=file) as tar:
            files = [(member, match) for member in tar if member.isfile() and (match := _NAME.fullmatch(member.name))]
            for key, group in itertools.groupby(files, key=lambda file: file[1][1]):
                yield _sample(key, {match[2].lower(): member for member, match in group}, tar=tar, path=path)
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{path} is not a complete tar ({error}) — give it uncompressed, or copy it again") from error


def _sample(key: str, members: dict[str, tarfile.TarInfo], *, tar: tarfile.TarFile, path: Path) -> _Sample:
    name = f"{path}/{key}"
    if any(member.issparse() for member in members.values()):
        raise DataError(f"{name} is stored as a sparse file — write the shard again with plain members")
    photos = [members[kind] for kind in _PHOTOS if kind in members]
    photo = TarPhoto(path, photos[0].name, photos[0].offset_data, photos[0].size) if photos else None
    facts = load_json(_text(tar, members["json"], name=name), source=f"{name}.json") if "json" in members else {}
    if not isinstance(facts, dict):
        raise DataError(f'{name}.json is not an object — write {{"captions": […], "id": …}}')
    captions, single = facts.get("captions"), facts.get("caption")
    if captions is None:
        lines = _text(tar, members["txt"], name=name).split("\n") if "txt" in members else []
        captions = [line.removesuffix("\r") for line in lines if line.strip()]
        captions = captions or ([single] if isinstance(single, str) else [])
    if not isinstance(captions, list) or not all(isinstance(text, str) for text in captions):
        raise DataError(f'sample {key!r}: "captions" is not a list of texts — write ["…", "…"]')
    image_id, caption_ids = str(facts.get("id", key)), facts.get("caption_ids")
    if caption_ids is None:
        caption_ids = [f"{image_id}#{index}" for index in range(len(captions))]
    if not isinstance(caption_ids, list) or len(caption_ids) != len(captions):
        raise DataError(f'sample {key!r}: "caption_ids" does not fit its {len(captions)} captions — give one each')
    return _Sample(key, photo, image_id, captions, [str(name) for name in caption_ids], facts.get("split"))


def _text(tar: tarfile.TarFile, member: tarfile.TarInfo, *, name: str) -> str:
    if member.size > MEMBER_BYTES:
        raise DataError(f"{name} has a text of {member.size:,} bytes, the limit is {MEMBER_BYTES:,} — shorten it")
    file = tar.extractfile(member)
    try:
        return "" if file is None else file.read(member.size).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} has a text that is not UTF-8 ({error}) — write the shard again") from error


def write_shards(pairs: PhotoSet, folder: str | Path, *, per_shard: int = 1000, format: Format = "same") -> list[Path]:
    """Write the pairs as ``00000.tar``, ``00001.tar`` … in a folder, in their order; all shards appear at once.

    The same pairs give the same bytes. Photos that are already in this ``format`` are copied, others are encoded again
    (JPEG and WebP at quality 95); ``same`` copies JPEG, PNG and WebP and encodes the rest as PNG. Other ``.tar`` files
    in the folder are an error: a glob would read them too.
    """
    if per_shard < 1 or format not in get_args(Format):
        kinds = ", ".join(get_args(Format))
        raise UsageError(f"per_shard={per_shard}, format={format!r} — give at least 1, and one of {kinds}")
    count, root = len(pairs.image_ids), Path(folder).expanduser()
    targets = [root / f"{number:05d}.tar" for number in range(math.ceil(count / per_shard))]
    stale = sorted(set(root.glob("*.tar")) - set(targets))
    if stale:
        raise UsageError(f"{stale[0]} is there already and would be read too — remove it, or write elsewhere")
    captions: list[list[int]] = [[] for _ in range(count)]
    for row, image in enumerate(pairs.caption_image.tolist()):
        captions[image].append(row)
    with atomic_paths(*targets) as temporaries:
        for number, temporary in enumerate(temporaries):
            with tarfile.open(temporary, "w:", format=tarfile.USTAR_FORMAT) as tar:
                for row in range(number * per_shard, min((number + 1) * per_shard, count)):
                    _add_sample(tar, pairs, row, captions=captions[row], format=format)
    return targets


def _add_sample(tar: tarfile.TarFile, pairs: PhotoSet, row: int, *, captions: Sequence[int], format: Format) -> None:
    """Photo, ``.json`` and ``.txt`` of one sample; headers depend on neither time nor user."""
    kind, data = encoded_photo(pairs, row, format=format)
    texts = [pairs.captions[caption] for caption in captions]
    caption_ids = [pairs.caption_ids[caption] for caption in captions]
    facts: dict[str, Any] = {"id": pairs.image_ids[row], "captions": texts, "caption_ids": caption_ids}
    if pairs.split != "all":
        facts["split"] = pairs.split
    lines = "\n".join(" ".join(text.splitlines()) for text in texts)
    members = {kind: data, "json": json.dumps(facts).encode(), "txt": lines.encode(errors="replace")}
    for suffix, content in members.items():
        header = tarfile.TarInfo(f"{row:09d}.{suffix}")
        header.size, header.mode = len(content), 0o644
        tar.addfile(header, io.BytesIO(content))


def encoded_photo(pairs: PhotoSet, row: int, *, format: Format) -> tuple[str, bytes]:
    """The suffix and the bytes of a photo, as stored if its format fits."""
    if isinstance(pairs.photos, StoredPhotos):
        data = pairs.photos.items[row].read()
        kinds = {"jpg": b"\xff\xd8\xff", "png": b"\x89PNG\r\n\x1a\n", "webp": b"RIFF"}
        kind = next((kind for kind, start in kinds.items() if data.startswith(start)), None)
        if kind is not None and format in ("same", kind) and (kind != "webp" or data[8:12] == b"WEBP"):
            return kind, data
    kind = "png" if format == "same" else format
    buffer = io.BytesIO()
    pairs.photos.open(row).save(buffer, format="JPEG" if kind == "jpg" else kind.upper(), **_QUALITY[kind])
    return kind, buffer.getvalue()
