"""Your own photos: a table with one row per caption (``csv:``, ``jsonl:``), a folder of photos with texts beside them
(``folder:``), or with photos alone (``photos:``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vacsr.data.captions import CaptionTable, choose_split, number_captions, read_captions
from vacsr.data.folders import PHOTO_SUFFIXES, FolderFiles, list_folder
from vacsr.data.photos import PhotoSet
from vacsr.data.problems import OnError, missing, photo_set
from vacsr.data.sources import FilePhotos
from vacsr.data.spec import Spec
from vacsr.errors import DataError

SPLIT_FOLDERS = ("train", "dev", "val", "test")
_PHOTOS = f"photos ({' '.join(PHOTO_SUFFIXES)})"


def load_table(spec: Spec, on_error: OnError) -> PhotoSet:
    """``csv:FILE`` or ``jsonl:FILE[,root=DIR][,split=S]``: columns ``image`` and ``caption``, one row per caption.

    ``image`` is a path relative to the file, or to ``root``. Optional columns: ``image_id`` (otherwise the path is the
    id), ``caption_id`` (otherwise ``image#index``) and ``split``.
    """
    file = Path(spec.path).expanduser()
    if file.suffix.lower() != f".{spec.scheme}":
        raise DataError(f"{file} does not end in .{spec.scheme} — rename it, or write csv: or jsonl: as it is")
    table = choose_split(read_captions(file, photos=True), spec.options.get("split"))
    root = Path(spec.options["root"]).expanduser() if "root" in spec.options else file.parent
    photos = FilePhotos(root, table.files or table.image_ids)
    return photo_set(table, photos, split=spec.options.get("split"), on_error=on_error)


def load_folder(spec: Spec, on_error: OnError) -> PhotoSet:
    """``folder:DIR[,split=S]``: photos, each with a ``.txt`` of the same name that has one caption per line.

    Sub-folders are read too; an image's id is its path inside ``DIR``. A text is of one photo: where ``x.jpg`` and
    ``x.png`` lie beside one ``x.txt``, nothing says which it means, and the second is a problem. Where every photo lies
    under a sub-folder named train, dev, val or test, that is its split. Names that start with a dot are not looked at.
    """
    root = Path(spec.path).expanduser()
    files = _look(root, expected=f"{_PHOTOS} with texts beside them (a.jpg, a.txt)")
    found = files.photos
    texts = {_stem(name): root / name for name in files.texts}
    owners: dict[str, str] = {}
    for name in found:
        owners.setdefault(_stem(name), name)
    names = [name for name in found if name == owners[_stem(name)] or _stem(name) not in texts]
    split = spec.options.get("split")
    table = choose_split(_folder_table(root, names, [_read_lines(texts.get(_stem(name))) for name in names]), split)
    lonely = [f"{path}: no photo beside it" for stem, path in texts.items() if stem not in owners]
    shared = [
        f"{root / name}: its text {texts[_stem(name)].name} is that of {owners[_stem(name)]} too"
        for name in found
        if _stem(name) in texts and name != owners[_stem(name)]
    ]
    return photo_set(
        table,
        FilePhotos(root, table.image_ids),
        split=split,
        on_error=on_error,
        problems=[*files.problems, *lonely, *shared],
        uncaptioned=f"to index and search photos without captions, write photos:{spec.path}",
    )


def load_plain(spec: Spec, on_error: OnError) -> PhotoSet:
    """``photos:DIR[,split=S]``: the photos of a folder and its sub-folders, without captions.

    Ids and splits are those of ``folder:``, so that captions may be written later; texts are not looked at.
    """
    root = Path(spec.path).expanduser()
    files = _look(root, expected=_PHOTOS)
    split = spec.options.get("split")
    table = choose_split(_folder_table(root, files.photos, [()] * len(files.photos)), split)
    photos = FilePhotos(root, table.image_ids)
    return photo_set(table, photos, split=split, on_error=on_error, problems=files.problems, captioned=False)


def _look(root: Path, *, expected: str) -> FolderFiles:
    """What lies in a folder, one photo at least."""
    files = list_folder(root) if root.is_dir() else None
    if files is None or not files.photos:
        raise missing(root, expected=expected)
    return files


def _folder_table(root: Path, names: Sequence[str], texts: Sequence[Sequence[str]]) -> CaptionTable:
    rows = [row for row, lines in enumerate(texts) for _ in lines]
    firsts = [name.partition("/")[0] if "/" in name else "" for name in names]
    return CaptionTable(
        source=str(root),
        image_ids=tuple(names),
        caption_ids=number_captions([names[row] for row in rows]),
        caption_image=tuple(rows),
        captions=tuple(line for lines in texts for line in lines),
        splits=tuple(firsts) if all(first in SPLIT_FOLDERS for first in firsts) else None,
    )


def _stem(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}{file.rpartition('.')[0]}"


def _read_lines(path: Path | None) -> list[str]:
    """Lines that are not blank; none where there is no file."""
    if path is None:
        return []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}) — save it as UTF-8 text") from error
    return [line for line in text.split("\n") if line.strip()]
