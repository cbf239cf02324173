"""The page at ``/``: one file of the package, under a policy that runs nothing but what the file itself holds."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from typing import NamedTuple


class Page(NamedTuple):
    """What is sent."""

    html: bytes
    policy: str
    """The header content-security-policy."""


def load_page() -> Page | None:
    """Read at start; None where the package has none."""
    file = resources.files("vacsr.search").joinpath("page.html")
    return make_page(file.read_bytes()) if file.is_file() else None


def make_page(html: bytes) -> Page:
    """With a policy that names the file's own scripts and styles by their hashes, so that no others run."""
    scripts, styles = (" ".join(_hashes(html, tag)) or "'none'" for tag in (b"script", b"style"))
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src 'self' blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html, policy)


def _hashes(html: bytes, tag: bytes) -> list[str]:
    """Of each inline block, as a browser computes it."""
    blocks = re.findall(rb"<%s\b[^>]*>(.*?)</%s\s*>" % (tag, tag), html, re.DOTALL | re.IGNORECASE)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(block).digest()).decode()}'" for block in blocks]
