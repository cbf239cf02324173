from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vacsr.data import _LOADERS
from vacsr.data.spec import SCHEMES, Spec, parse_spec, usage
from vacsr.errors import UsageError

VALUES = st.text(min_size=1).filter(lambda text: not re.search(r",[A-Za-z_]\w*=", text))


@given(st.sampled_from(sorted(SCHEMES)), VALUES, st.data())
def test_what_is_written_is_read(scheme: str, path: str, data: st.DataObject) -> None:
    options = data.draw(st.dictionaries(st.sampled_from(SCHEMES[scheme].options), VALUES))
    spec = Spec(scheme, path if SCHEMES[scheme].path else "", options)
    assert parse_spec(str(spec)) == spec
    assert list(parse_spec(str(spec)).options) == list(options)


@given(st.text())
def test_any_text_is_read_or_refused_as_usage(text: str) -> None:
    try:
        spec = parse_spec(text)
    except UsageError as error:
        assert error.exit_code == 2  # noqa: PT017
        assert " — " in str(error)  # noqa: PT017
    else:
        assert spec.scheme in SCHEMES


@given(st.text(alphabet="abcdefgh", min_size=1))
def test_an_unknown_scheme_is_refused_with_the_known_ones(scheme: str) -> None:
    assume(scheme not in SCHEMES)
    with pytest.raises(UsageError) as caught:
        parse_spec(f"{scheme}:path,split=dev")
    assert all(word in str(caught.value) for word in (repr(scheme), *SCHEMES))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("features", ("'features'", "no scheme", "features:FILE", "photos:DIR")),
        ("a/b.safetensors", ("'a/b.safetensors'", "no scheme", "write features:a/b.safetensors")),
        ("B.CSV", ("'B.CSV'", "no scheme", "write csv:B.CSV")),
        (".", ("'.'", "no scheme", "folder:. for photos with texts", "photos:. for photos to index")),
        ("feature:x", ("'feature'", "did you mean 'features'?")),
        ("features:", ("needs a path", "features:FILE")),
        ("features:x,caption=y", ("no option 'caption'", "did you mean 'captions'?")),
        ("features:x,Split=dev", ("no option 'Split'", "did you mean 'split'?")),
        ("features:x,split=", ("'split'", "empty")),
        ("features:x,split=a,split=b", ("'split'", "twice")),
        ("synthetic:world", ("'world'", "takes no path")),
        ("synthetic:captions=x", ("no option 'captions'",)),
    ],
)
def test_what_is_refused(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec(text)
    assert caught.value.exit_code == 2
    assert all(word in str(caught.value) for word in (*words, " — ")), str(caught.value)


def test_paths_may_hold_commas_colons_and_equals_signs() -> None:
    assert parse_spec("features:c:/a,b/k=v.npy,text=x,y").path == "c:/a,b/k=v.npy"
    assert parse_spec("features:split=dev/f.npy").path == "split=dev/f.npy"


def test_with_options_adds_and_replaces() -> None:
    spec = parse_spec("features:x,split=dev").with_options({"split": "test", "captions": "c.json", "text": None})
    assert spec.options == {"split": "test", "captions": "c.json"}
    assert str(spec) == "features:x,split=test,captions=c.json"


def test_usage_of_a_scheme_without_path() -> None:
    assert usage("synthetic").startswith("synthetic:[images=…][,held_out=…]")


def test_every_scheme_has_a_loader() -> None:
    assert set(_LOADERS) == set(SCHEMES)
