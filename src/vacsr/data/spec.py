"""SPEC strings, ``scheme:path,key=value,key=value``: how a data set is named in a recipe or on the command line."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vacsr.errors import UsageError

_NEXT_OPTION = re.compile(r",(?=[A-Za-z_]\w*=)")  # other commas belong to the path or the value
_OPTION = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SUFFIXES = {".csv": "csv", ".jsonl": "jsonl", ".safetensors": "features", ".tar": "shards"}


class Scheme(NamedTuple):
    """What may follow ``scheme:``."""

    path: str
    """What the path names, "" where there is none."""
    options: tuple[str, ...]


SCHEMES: Mapping[str, Scheme] = {
    "features": Scheme("FILE", ("captions", "text", "split")),
    "coco": Scheme("ROOT", ("split", "captions", "annotations", "images")),
    "flickr8k": Scheme("ROOT", ("split", "captions", "images")),
    "csv": Scheme("FILE", ("split", "root")),
    "jsonl": Scheme("FILE", ("split", "root")),
    "folder": Scheme("DIR", ("split",)),
    "photos": Scheme("DIR", ("split",)),
    "shards": Scheme("PATTERN", ("split",)),
    "scenes": Scheme("", ("images", "held_out", "per_image", "size", "subject", "seed", "split")),
    "synthetic": Scheme("", ("images", "held_out", "per_image", "noise", "seed", "split")),
}


@dataclass(frozen=True)
class Spec:
    """A parsed SPEC; ``str(spec)`` writes it again."""

    scheme: str
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise UsageError(
                f"unknown scheme {self.scheme!r}{_nearest(self.scheme, SCHEMES)} — write one of: {usage()}"
            )
        known = SCHEMES[self.scheme]
        if known.path and not self.path:
            raise UsageError(f"{self.scheme}: needs a path — write {usage(self.scheme)}")
        for name, value in self.options.items():
            if name not in known.options:
                near = _nearest(name, known.options)
                raise UsageError(f"{self.scheme}: has no option {name!r}{near} — write {usage(self.scheme)}")
            if not value:
                raise UsageError(f"option {name!r} of {self.scheme}: is empty — write {name}=VALUE or leave it out")

    def with_options(self, options: Mapping[str, str | None]) -> Spec:
        """The same SPEC with these options added or replaced; None leaves an option as it is."""
        given = {name: value for name, value in options.items() if value is not None}
        return Spec(self.scheme, self.path, {**self.options, **given})

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        parts = [self.path, *options] if SCHEMES[self.scheme].path else options
        return f"{self.scheme}:{','.join(parts)}"


def parse_spec(spec: str) -> Spec:
    """Read a SPEC string.

    A comma starts an option only where ``key=`` follows, so paths may hold commas.

    >>> parse_spec("features:a,b.safetensors,split=dev")
    Spec(scheme='features', path='a,b.safetensors', options={'split': 'dev'})
    >>> parse_spec("synthetic:images=100,seed=1").options
    {'images': '100', 'seed': '1'}
    """
    scheme, colon, rest = spec.partition(":")
    if not colon:
        raise UsageError(f"{spec!r} has no scheme{_with_scheme(spec)}")
    parts = _NEXT_OPTION.split(rest) if rest else []
    path = parts.pop(0) if parts and (scheme not in SCHEMES or SCHEMES[scheme].path) else ""
    options: dict[str, str] = {}
    for part in parts:
        match = _OPTION.fullmatch(part)
        if match is None:
            raise UsageError(f"{scheme}: takes no path, {part!r} was given — write {usage(scheme)}")
        if match[1] in options:
            raise UsageError(f"option {match[1]!r} is given twice in {spec!r} — keep one")
        options[match[1]] = match[2]
    return Spec(scheme, path, options)


def usage(scheme: str | None = None) -> str:
    """How to write one scheme, or all of them.

    >>> usage("features")
    'features:FILE[,captions=…][,text=…][,split=…]'
    """
    if scheme is None:
        return " · ".join(usage(name) for name in SCHEMES)
    path, options = SCHEMES[scheme]
    written = "".join(f"[,{name}=…]" for name in options)
    return f"{scheme}:{path}{written}" if path else f"{scheme}:{written.replace('[,', '[', 1)}"


def _with_scheme(path: str) -> str:
    """How to write a bare path, by its name and by what lies there."""
    if os.path.isdir(path):
        both = f"folder:{path} for photos with texts beside them, or photos:{path} for photos to index and search"
        return f" — write {both}"
    scheme = _SUFFIXES.get(os.path.splitext(path)[1].lower())
    return f" — write {scheme}:{path}" if scheme else f", and no folder has this name — write one of: {usage()}"


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
