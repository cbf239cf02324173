"""Data formats and SPEC strings, ``scheme:path,key=value,key=value``: how a recipe or a command names a data set.

A format is one file with a loader under ``@register(...)``, and one line that imports the file in :mod:`vacsr.data`.
The parser, usage messages and the absolute paths of an index all read this entry. :data:`FORMATS` holds the formats of
pairs, :data:`CLASS_FORMATS` those of photos with classes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from vacsr.config.base import Config, did_you_mean
from vacsr.data.decode import PHOTO_SUFFIXES
from vacsr.errors import UsageError

OnError = Literal["fail", "skip"]
L = TypeVar("L", bound=Callable[..., Any])
C = TypeVar("C", bound=Config)
_NEXT_OPTION = re.compile(r",(?=[A-Za-z_]\w*=)")  # other commas belong to the path or the value
_OPTION = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Format:
    """One data format: what may follow ``scheme:``, and the function that loads it."""

    scheme: str
    load: Callable[..., Any]
    """(Spec, OnError) -> PairSet | PhotoSet; in :data:`CLASS_FORMATS`, (Spec, whole: bool) -> FewshotSource."""
    path: str = ""  # what the path names (FILE, DIR, …), "" where there is none
    options: tuple[str, ...] = ()
    path_options: tuple[str, ...] = ()  # name files or folders; an index stores them as absolute paths
    suffix: str = ""  # of its files, to recognize a path that is given without a scheme
    captioned: bool = True
    hub: bool = False  # the path may be an id of the Hub

    def all_options(self) -> tuple[str, ...]:
        """Plain options, then paths, then ``split``."""
        return tuple(sorted((*self.options, *self.path_options), key=lambda name: name == "split"))

    def usage(self) -> str:
        options = "".join(f"[,{name}=…]" for name in self.all_options())
        return f"{self.scheme}:{self.path}{options if self.path else options.replace('[,', '[', 1)}"


FORMATS: dict[str, Format] = {}
CLASS_FORMATS: dict[str, Format] = {}


def register(
    scheme: str,
    *,
    path: str = "",
    options: tuple[str, ...] = (),
    path_options: tuple[str, ...] = (),
    suffix: str = "",
    captioned: bool = True,
    hub: bool = False,
    formats: dict[str, Format] = FORMATS,
) -> Callable[[L], L]:
    """Decorate a loader: make it the format of a scheme. See :class:`Format` for the arguments."""

    def enter(load: L) -> L:
        if scheme in formats:
            raise ValueError(f"format {scheme!r} exists already — register every scheme once")
        formats[scheme] = Format(scheme, load, path, options, path_options, suffix, captioned, hub)
        return load

    return enter


@dataclass(frozen=True)
class Spec:
    """A parsed SPEC; ``str(spec)`` gives the text."""

    format: Format = field(repr=False)
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.format.path and not self.path:
            raise UsageError(f"{self.scheme}: needs a path — write {self.format.usage()}")
        known = self.format.all_options()
        for name, value in self.options.items():
            if name not in known:
                hint = did_you_mean(name, known)
                raise UsageError(f"{self.scheme}: has no option {name!r}{hint} — write {self.format.usage()}")
            if not value:
                raise UsageError(f"option {name!r} of {self.scheme}: is empty — write {name}=VALUE or leave it out")

    @property
    def scheme(self) -> str:
        return self.format.scheme

    @property
    def location(self) -> Path:
        """The path, with ``~`` expanded."""
        return Path(self.path).expanduser()

    def option(self, name: str) -> str | None:
        """A plain option, if it is given; one that the format does not declare is an error in the loader."""
        if name not in self.format.options:
            raise KeyError(f"{self.scheme}: declares no option {name!r} — add it to options of its @register(...)")
        return self.options.get(name)

    def path_option(self, name: str) -> Path | None:
        """The same for an option that names a file or folder."""
        if name not in self.format.path_options:
            raise KeyError(f"{self.scheme}: declares no path {name!r} — add it to path_options of its @register(...)")
        return Path(self.options[name]).expanduser() if name in self.options else None

    def fill(self, kind: type[C]) -> C:
        """The options that a config class declares, checked and converted to its types."""
        try:
            return kind.model_validate({name: self.options[name] for name in kind.model_fields if name in self.options})
        except ValidationError as error:
            lines = [": ".join([*map(str, item["loc"]), item["msg"]]) for item in error.errors()]
            raise UsageError(f"{self}: {'; '.join(lines)} — correct it") from error

    def with_options(self, options: Mapping[str, str | None]) -> Spec:
        """The same SPEC with these options added or replaced; None leaves an option as it is."""
        return replace(self, options={**self.options, **{k: v for k, v in options.items() if v is not None}})

    def absolute(self) -> Spec:
        """The same data from any folder: absolute paths, options in one order, the split last and only if not "all"."""
        options = {name: self.options[name] for name in self.format.all_options() if name in self.options}
        options |= {name: _absolute(options[name]) for name in self.format.path_options if name in options}
        if options.get("split") == "all":
            del options["split"]
        local = self.path and not (self.format.hub and not self.location.exists())
        return replace(self, path=_absolute(self.path) if local else self.path, options=options)

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        return f"{self.scheme}:{','.join([self.path, *options] if self.format.path else options)}"


def parse_spec(spec: str, *, formats: Mapping[str, Format] = FORMATS) -> Spec:
    """Read a SPEC string.

    A comma starts an option only where ``key=`` follows, so paths may hold commas.

    >>> parse_spec("features:a,b.safetensors,split=dev")
    Spec(path='a,b.safetensors', options={'split': 'dev'})
    >>> parse_spec("synthetic:images=100,seed=1").options
    {'images': '100', 'seed': '1'}
    """
    scheme, colon, rest = spec.partition(":")
    if not colon:
        raise UsageError(_without_scheme(spec, formats))
    if scheme not in formats:
        raise UsageError(f"unknown scheme {scheme!r}{did_you_mean(scheme, formats)} — write one of: {usage(formats)}")
    entry = formats[scheme]
    parts = _NEXT_OPTION.split(rest) if rest else []
    path = parts.pop(0) if parts and entry.path else ""
    options: dict[str, str] = {}
    for part in parts:
        match = _OPTION.fullmatch(part)
        if match is None:
            raise UsageError(f"{scheme}: takes no path, {part!r} was given — write {entry.usage()}")
        if match[1] in options:
            raise UsageError(f"option {match[1]!r} is given twice in {spec!r} — keep one")
        options[match[1]] = match[2]
    return Spec(entry, path, options)


def spec_files(spec: str | None) -> list[Path]:
    """The files that a SPEC names; a folder's are unknown."""
    if spec is None:
        return []
    parsed = parse_spec(str(spec))
    paths = [Path(text).expanduser() for text in (parsed.path, *parsed.options.values()) if text]
    return [path for path in paths if path.is_file()]


def usage(formats: Mapping[str, Format] = FORMATS) -> str:
    return " · ".join(entry.usage() for entry in formats.values())


def _without_scheme(path: str, formats: Mapping[str, Format]) -> str:
    """What to write instead of a bare path."""
    if os.path.isdir(path):
        others = f" if captions lie beside the photos; only `vacsr index add` takes photos alone, as photos:{path}"
        return f"{path!r} is a folder — write folder:{path}{others if 'photos' in formats else ''}"
    suffix = os.path.splitext(path)[1].lower()
    if os.path.isfile(path) and suffix in PHOTO_SUFFIXES:
        return f"{path} is a single photo — give its folder: {os.path.dirname(path) or '.'}"
    scheme = next((name for name, entry in formats.items() if suffix and entry.suffix == suffix), None)
    if scheme:
        return f"{path!r} has no scheme — write {scheme}:{path}"
    names = ", ".join(f"{name}:{entry.path}" for name, entry in formats.items())
    others = "" if os.sep in path or suffix else f", or write one of: {names}"
    return f"no such folder: {path} — check the name{others}"


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
