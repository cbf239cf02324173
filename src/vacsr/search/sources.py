"""Where the items of an index come from: a SPEC, written so that it means the same in any folder.

Its paths are absolute. An index that is copied to another machine still names them, and they may mean nothing there.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping

from vacsr.data.spec import SCHEMES, Spec, parse_spec

_PATHS: Mapping[str, tuple[str, ...]] = {
    "features": ("captions", "text"),
    "coco": ("annotations", "images"),
    "flickr8k": ("captions", "images"),
    "csv": ("root",),
    "jsonl": ("root",),
}  # options that are paths
_SPLIT = re.compile(r"(?:,|(?<=:))split=[^,=]*$")


def noted_spec(spec: str, *, split: str | None = None) -> str:
    """A SPEC with absolute paths, its options in one order and the split last, left out where it is "all".

    >>> noted_spec("csv:/a/../photos.csv,split=dev,root=/b", split="test")
    'csv:/photos.csv,root=/b,split=test'
    >>> noted_spec("scenes:images=6,split=all")
    'scenes:images=6'
    """
    parsed = parse_spec(spec).with_options({"split": split})
    paths = _PATHS.get(parsed.scheme, ())
    written = {name: _absolute(value) if name in paths else value for name, value in parsed.options.items()}
    last = written.pop("split", "all")
    options = {name: written[name] for name in SCHEMES[parsed.scheme].options if name in written}
    options |= {} if last == "all" else {"split": last}
    return str(Spec(parsed.scheme, _absolute(parsed.path) if SCHEMES[parsed.scheme].path else "", options))


def without_split(source: str) -> str:
    """What :func:`noted_spec` gives, for all splits; other words stay as they are.

    >>> without_split("folder:/photos,split=dev"), without_split("scenes:split=dev"), without_split("a walk")
    ('folder:/photos', 'scenes:', 'a walk')
    """
    return _SPLIT.sub("", source)


def covers(source: str, other: str) -> bool:
    """Does a source give all that the other gives: the same one, or all splits of it?

    >>> covers("folder:/a", "folder:/a,split=dev"), covers("folder:/a,split=dev", "folder:/a")
    (True, False)
    """
    return source in (other, without_split(other))


def source_key(source: str) -> str:
    """A source in twelve letters, as every item of it keeps it; "" of "".

    >>> source_key("folder:/photos")
    '4f2cba51e731'
    """
    return hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest() if source else ""


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
