"""SPEC strings, and the registry of formats behind them."""

import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vacsr.data import PhotoSet, load_pairs
from vacsr.data.archives import StoredPhoto, file_photos
from vacsr.data.formats import CLASS_FORMATS, FORMATS, Format, OnError, Spec, parse_spec, register
from vacsr.errors import UsageError
from vacsr.search.fill import absolute_spec

VALUES = st.text(min_size=1).filter(lambda text: not re.search(r",[A-Za-z_]\w*=", text))


@given(st.sampled_from([*FORMATS.values(), *CLASS_FORMATS.values()]), VALUES, st.data())
def test_a_spec_that_is_written_is_read_again(entry: Format, path: str, data: st.DataObject) -> None:
    options = data.draw(st.dictionaries(st.sampled_from(entry.all_options()), VALUES))
    spec = Spec(entry, path if entry.path else "", options)
    formats = FORMATS if entry in FORMATS.values() else CLASS_FORMATS
    assert parse_spec(str(spec), formats=formats) == spec
    assert list(parse_spec(str(spec), formats=formats).options) == list(options)


@given(st.text(), st.sampled_from([FORMATS, CLASS_FORMATS]))
def test_any_text_is_read_or_refused_as_usage(text: str, formats: dict[str, Format]) -> None:
    try:
        assert parse_spec(text, formats=formats).scheme in formats
    except UsageError as error:
        assert " — " in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("features", "photos:DIR"),
        ("a/b.safetensors", "write features:a/b.safetensors"),
        (".", "write folder:."),
        ("feature:x", "did you mean 'features'?"),
        ("features:", "write features:FILE"),
        ("features:x,caption=y", "did you mean 'captions'?"),
        ("features:x,split=", "write split=VALUE"),
        ("features:x,split=a,split=b", "keep one"),
        ("synthetic:world", "write synthetic:[images=…][,held_out=…]"),
        ("synthetic:captions=x", "no option 'captions'"),
    ],
)
def test_refused_specs_name_the_action(text: str, action: str) -> None:
    with pytest.raises(UsageError, match=re.escape(action)):
        parse_spec(text)


@pytest.fixture
def one_photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A format that a newcomer adds: one photo with one caption, named by the file of a list."""
    monkeypatch.delitem(FORMATS, "one", raising=False)
    Image.new("RGB", (4, 4), "red").save(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text("a.png")

    @register("one", path="FILE", options=("caption",), path_options=("root",), suffix=".one")
    def load(spec: Spec, _on_error: OnError) -> PhotoSet:
        names = (spec.location.read_text(),)
        photos = file_photos(spec.path_option("root") or spec.location.parent, names)
        return PhotoSet(photos, names, (spec.option("caption") or "red",), ("0",), torch.tensor([0]))

    monkeypatch.setitem(FORMATS, "one", FORMATS.pop("one"))  # forgotten again after the test
    return f"one:{tmp_path}/list.txt"


def test_a_format_is_one_entry_that_everything_reads(one_photo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, usage, hints for bare paths, absolute paths of an index and fingerprints need nothing else."""
    pairs = load_pairs(f"{one_photo},caption=a red square")
    assert isinstance(pairs, PhotoSet)
    assert (pairs.captions, pairs.image_ids, bool(pairs.photos.fingerprint(0))) == (("a red square",), ("a.png",), True)
    folder, file = os.path.split(one_photo.partition(":")[2])
    monkeypatch.chdir(folder)
    assert absolute_spec(f"one:{file},root=../r,caption=x") == f"{one_photo},caption=x,root={Path(folder).parent}/r"
    for text, action in (("x.one", "one:x.one"), ("one:x,roots=r", "did you mean 'root'"), ("two:x", "one:FILE[,cap")):
        with pytest.raises(UsageError, match=re.escape(action)):
            parse_spec(text)


def test_a_forgotten_piece_of_a_format_fails_loudly(one_photo: str) -> None:
    spec = parse_spec(one_photo)
    with pytest.raises(KeyError, match="add it to path_options"):
        spec.path_option("caption")  # a path that was declared as a plain option would not be stored as absolute
    with pytest.raises(KeyError, match="add it to options"):
        spec.option("size")
    with pytest.raises(ValueError, match="register every scheme once"):
        register("one")(lambda spec, on_error: None)

    class Unfinished(StoredPhoto):
        pass

    with pytest.raises(TypeError, match="fingerprint"):
        Unfinished()  # type: ignore[abstract]
