"""SPEC strings of data sets with classes. Their schemes share names with those of pairs, and have other options."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vacsr.data.spec import Scheme, Spec
from vacsr.errors import UsageError

_SHARES = ("val", "test", "seed")
CLASS_SCHEMES: Mapping[str, Scheme] = {
    "coop": Scheme("ROOT", ("set", "template")),
    "folder": Scheme("DIR", ("template", *_SHARES)),
    "csv": Scheme("FILE", ("root", "image", "label", "classname", "split", "template", *_SHARES)),
    "scenes": Scheme("", ()),
}
"""What may follow each scheme; the options of ``scenes:`` are checked by the world itself."""
_NEXT_OPTION = re.compile(r",(?=[A-Za-z_]\w*=)")  # other commas belong to the path or the value


@dataclass(frozen=True)
class ClassSpec(Spec):
    """A parsed SPEC of photos with classes; ``str(spec)`` writes it again."""

    def __post_init__(self) -> None:
        if self.scheme not in CLASS_SCHEMES:
            raise UsageError(f"unknown scheme {self.scheme!r} for photos with classes — write one of: {class_usage()}")
        if self.scheme == "scenes":
            return
        if not self.path:
            raise UsageError(f"{self.scheme}: needs a path — write {class_usage(self.scheme)}")
        known = CLASS_SCHEMES[self.scheme].options
        for name, value in self.options.items():
            if name not in known:
                raise UsageError(
                    f"{self.scheme}: has no option {name!r}{nearest(name, known)} — write {class_usage(self.scheme)}"
                )
            if not value:
                raise UsageError(f"option {name!r} of {self.scheme}: is empty — write {name}=VALUE or leave it out")

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        return f"{self.scheme}:{','.join([self.path, *options] if self.path else options)}"


def parse_class_spec(spec: str) -> ClassSpec:
    """Read a SPEC string; a comma starts an option only where ``key=`` follows.

    >>> parse_class_spec("coop:data,set=dtd,template=a {}, rough.").options
    {'set': 'dtd', 'template': 'a {}, rough.'}
    """
    scheme, colon, rest = spec.partition(":")
    if not colon:
        raise UsageError(f"{spec!r} has no scheme — write one of: {class_usage()}")
    parts = _NEXT_OPTION.split(rest) if rest else []
    path = parts.pop(0) if parts and scheme != "scenes" else ""
    options: dict[str, str] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"{scheme}: takes no path, {part!r} was given — write {class_usage(scheme)}")
        if name in options:
            raise UsageError(f"option {name!r} is given twice in {spec!r} — keep one")
        options[name] = value
    return ClassSpec(scheme, path, options)


def class_usage(scheme: str | None = None) -> str:
    """How to write one scheme, or all of them.

    >>> class_usage("coop")
    'coop:ROOT[,set=…][,template=…]'
    """
    if scheme is None:
        return " · ".join(class_usage(name) for name in CLASS_SCHEMES)
    path, options = CLASS_SCHEMES[scheme]
    return f"{scheme}:{path}{''.join(f'[,{name}=…]' for name in options) or '[OPTION=…]'}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that was perhaps mistyped, "" where nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
