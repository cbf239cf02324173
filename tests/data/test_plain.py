"""Photos without captions: all of them are found, in one order, and only those who need no captions get them."""

from __future__ import annotations

import os
import string
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vacsr.data import PhotoSet, images_spec, load_images, load_pairs
from vacsr.data.folders import list_folder
from vacsr.errors import DataError, NoSuchSplit, UsageError

Draw = Callable[..., Path]
"""The fixture `draw` of conftest.py."""
NAMES = st.text(string.ascii_letters + ". äß", min_size=1, max_size=6).filter(lambda name: name.strip(". ") != "")
SUFFIXES = st.sampled_from([".jpg", ".JPEG", ".png", ".jfif", ".txt", ".mov", ""])


def plain(spec: str, **options: Any) -> PhotoSet:
    pairs = load_images(spec, **options)
    assert isinstance(pairs, PhotoSet)
    return pairs


def refused(spec: str, *words: str, error: type[Exception] = DataError, load: Any = load_images, **options: Any) -> str:
    with pytest.raises(error) as caught:
        load(spec, **options)
    message = str(caught.value)
    assert all(word in message for word in (*words, " — ")), message
    return message


@pytest.fixture
def album(tmp_path: Path, draw: Draw) -> Path:
    for name in ("b.png", "a.jpg", "trip/a.jpg", "trip/far away/c.webp", ".hidden.jpg", ".thumbs/a.jpg"):
        draw(tmp_path / name, "blue" if name == "trip/a.jpg" else "red")
    (tmp_path / "a.txt").write_text("not looked at", encoding="utf-8")
    (tmp_path / "notes.md").write_text("nor this", encoding="utf-8")
    return tmp_path


def test_photos_of_a_folder_have_ids_and_no_captions(album: Path) -> None:
    pairs = plain(f"photos:{album}")
    assert pairs.image_ids == ("a.jpg", "b.png", "trip/a.jpg", "trip/far away/c.webp")
    assert (len(pairs), pairs.captions, pairs.caption_ids, pairs.skipped) == (0, (), (), ())
    assert pairs.caption_image.shape == (0,)
    red, _, blue = pairs.photos.open(2).getpixel((0, 0))  # type: ignore[misc]
    assert blue > red
    assert pairs.describe() == "all: 4 photos, 0 captions, 0 per photo"
    assert pairs.subset([3, 0]).image_ids == ("trip/far away/c.webp", "a.jpg")


def test_a_plain_path_is_a_folder_of_photos(album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(album)
    assert images_spec("trip") == "photos:trip"
    assert plain("trip").image_ids == plain("photos:trip").image_ids == ("a.jpg", "far away/c.webp")
    assert plain(".").image_ids == plain(str(album)).image_ids
    (album / "folder").mkdir()
    for spec in ("folder:trip", "lost", "a.jpg", "folder:", "scenes:"):
        assert images_spec(spec) == spec
    refused("lost", "'lost' has no scheme, and no folder has this name", error=UsageError)


def test_the_ids_are_those_of_a_folder_with_captions(album: Path) -> None:
    """So that captions may be written later, and an index stays what it is."""
    for name in ("a", "b", "trip/a", "trip/far away/c"):
        (album / f"{name}.txt").write_text("words", encoding="utf-8")
    captioned, bare = plain(f"folder:{album}"), plain(f"photos:{album}")
    assert captioned.image_ids == bare.image_ids
    assert [captioned.photos.name(row) for row in range(4)] == [bare.photos.name(row) for row in range(4)]
    assert len(captioned) == 4


def test_splits_by_folders(tmp_path: Path, draw: Draw) -> None:
    for name in ("train/a.jpg", "test/b.jpg"):
        draw(tmp_path / name)
    assert plain(f"photos:{tmp_path}", split="all").image_ids == ("test/b.jpg", "train/a.jpg")
    assert plain(f"photos:{tmp_path}", split="test").image_ids == ("test/b.jpg",)
    assert plain(f"photos:{tmp_path},split=train").split == "train"
    draw(tmp_path / "c.jpg")
    refused(f"photos:{tmp_path}", "has no splits", error=NoSuchSplit, split="test")


@pytest.mark.parametrize("split", [None, "all", "train"])
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_who_needs_captions_is_told_how_to_give_them(album: Path, split: str | None, on_error: str) -> None:
    spec = f"photos:{album}"
    words = ("photos without captions", "a.txt", f"folder:{album}", f"vacsr index add INDEX --run RUN --pairs {spec}")
    refused(spec, *words, error=UsageError, load=load_pairs, split=split, on_error=on_error)
    refused(str(album), f"folder:{album}", f"photos:{album}", error=UsageError, load=load_pairs, on_error=on_error)


@pytest.mark.parametrize("spec", ["synthetic:images=4", "scenes:images=2,size=16"])
def test_what_has_captions_is_loaded_with_them(spec: str) -> None:
    one, other = load_images(spec, split="train"), load_pairs(spec, split="train")
    assert (one.image_ids, one.captions) == (other.image_ids, other.captions)
    assert one.captions


def test_a_folder_that_lacks_captions_names_the_other_way(album: Path) -> None:
    advice = f"to index and search photos without captions, write photos:{album}"
    assert refused(f"folder:{album}", "b.png: no caption", "--skip").endswith(f"; {advice}")
    (album / "a.txt").unlink()
    assert refused(f"folder:{album}", "none of 4 photos", on_error="skip").endswith(f"; {advice}")
    (album / "b.txt").write_text("one", encoding="utf-8")
    (album / "lost.txt").write_text("one", encoding="utf-8")
    for name in ("a", "trip/a", "trip/far away/c"):
        (album / f"{name}.txt").write_text("one", encoding="utf-8")
    assert advice not in refused(f"folder:{album}", "lost.txt: no photo beside it")


def test_folders_that_hold_none(tmp_path: Path) -> None:
    refused(f"photos:{tmp_path / 'lost'}", "lost is no folder", ".jpg .jpeg")
    refused(f"photos:{tmp_path}", "holds nothing", ".jpg .jpeg")
    refused("photos:", "needs a path", "photos:DIR", error=UsageError)


def test_links(album: Path) -> None:
    """One to a file is a photo, one to a folder is not followed, one to nothing is told."""
    (album / "link.jpg").symlink_to(album / "a.jpg")
    (album / "loop").symlink_to(album, target_is_directory=True)
    assert "link.jpg" in plain(f"photos:{album}").image_ids
    assert len(plain(f"photos:{album}").image_ids) == 5
    (album / "dead.jpg").symlink_to(album / "nowhere.jpg")
    refused(f"photos:{album}", "1 photos", "dead.jpg: no such file", "--skip")
    with pytest.warns(UserWarning, match=r"1 left out: .*dead\.jpg"):
        assert len(plain(f"photos:{album}", on_error="skip").image_ids) == 5


@pytest.mark.parametrize("scheme", ["photos", "folder"])
def test_a_folder_that_may_not_be_read_is_told(album: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pruned index would lose its photos otherwise."""
    (album / "b.txt").write_text("one", encoding="utf-8")
    scan = os.scandir

    def closed(path: Any) -> Iterator[os.DirEntry[str]]:
        if str(path).endswith("trip"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    refused(f"{scheme}:{album}", "1 photos", "trip: the folder cannot be read (Permission denied)", "--skip")
    with pytest.warns(UserWarning, match="1 left out: .*trip: the folder cannot be read"):
        assert plain(f"{scheme}:{album}", on_error="skip").image_ids == ("a.jpg", "b.png")


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="names are text there")
def test_a_name_that_is_no_text_is_told(album: Path) -> None:
    """No JSON file could hold its id."""
    with open(os.fsencode(album) + b"/caf\xe9.jpg", "wb") as file:
        file.write(b"any")
    refused(f"photos:{album}", "b'caf\\xe9.jpg': the name is not UTF-8")
    with pytest.warns(UserWarning, match="1 left out"):
        pairs = plain(f"photos:{album}", on_error="skip")
    assert len(pairs.image_ids) == 4
    assert all(name.encode() for name in (*pairs.image_ids, *pairs.skipped))


def test_kinds_that_nothing_can_decode_are_told(album: Path) -> None:
    for name in ("IMG_1.HEIC", "trip/2.dng"):
        (album / name).write_bytes(b"any")
    with pytest.warns(UserWarning, match=r"2 photos of kinds that are not read .* IMG_1\.HEIC — convert"):
        assert len(plain(f"photos:{album}").image_ids) == 4


@given(names=st.sets(st.tuples(st.lists(NAMES, max_size=2), NAMES, SUFFIXES).map(lambda t: ("/".join(t[0]), *t[1:]))))
def test_a_listing_is_what_a_plain_walk_finds(
    names: set[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("listing")
    for folder, name, suffix in names:
        path = root / folder / (name + suffix)
        if not any(part.is_file() for part in (path, *path.parents)) and not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
    expected = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = list_folder(root)
    photos = (".jpg", ".jpeg", ".png", ".jfif")
    assert found.photos == sorted(name for name in expected if name.lower().endswith(photos))
    assert found.texts == sorted(name for name in expected if name.lower().endswith(".txt"))
    assert found.problems == []
