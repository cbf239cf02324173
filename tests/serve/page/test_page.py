"""What can be said of the page without a browser: it stands alone, keeps to its policy, and fits the service."""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

from vacsr.search.policies import POLICIES
from vacsr.serve.app import page_html, page_policy
from vacsr.serve.schemas import HitAnswer, Info, ScoreAnswer, SearchAnswer

HTML = page_html().decode()
STYLE = re.search(r"<style>(.*?)</style>", HTML, re.DOTALL)
SCRIPT = re.search(r"<script>(.*?)</script>", HTML, re.DOTALL)
assert STYLE is not None
assert SCRIPT is not None


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))


READER = Reader()
READER.feed(HTML)
TAGS = READER.tags


def test_nothing_is_fetched_from_elsewhere() -> None:
    outside = [
        value for _, known in TAGS for name, value in known.items() if name in ("src", "href", "action", "srcset")
    ]
    assert sorted(outside) == ["#results", "data:,", "openapi.json"]
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|import\(", STYLE[1] + SCRIPT[1])


def test_nothing_needs_a_weaker_policy() -> None:
    assert [tag for tag, _ in TAGS if tag in ("script", "style")] == ["style", "script"]
    inline = [(tag, name) for tag, known in TAGS for name in known if name == "style" or name.startswith("on")]
    assert inline == []
    markup = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|setTimeout\(\s*[\"'`]"
    )
    assert re.findall(markup, SCRIPT[1]) == []
    assert re.findall(r"localStorage|sessionStorage|cookie|indexedDB", SCRIPT[1]) == []


def test_the_policy_names_this_script_and_this_style() -> None:
    for text, directive in ((SCRIPT[1], "script-src"), (STYLE[1], "style-src")):
        mark = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{mark}';" in page_policy(HTML.encode())
    assert "unsafe" not in page_policy(HTML.encode())
    assert page_policy(b"<script>other</script>") != page_policy(HTML.encode())


def test_it_is_served_without_a_token_and_nothing_else_is(opened: Callable[..., Any]) -> None:
    client = opened(token="secret")
    answer = client.get("/")
    assert (answer.status_code, answer.content) == (200, HTML.encode())
    assert answer.headers["content-security-policy"] == page_policy(HTML.encode())
    assert client.get("/info").status_code == 401


def test_ids_are_unique_and_names_lead_to_them() -> None:
    ids = Counter(known["id"] for _, known in TAGS if "id" in known)
    assert [name for name, times in ids.items() if times > 1] == []
    pointing = ("for", "aria-describedby", "aria-labelledby")
    named = [part for _, known in TAGS for name in pointing for part in known.get(name, "").split()]
    assert named
    assert [name for name in named if name not in ids] == []
    used = re.findall(r"\bat\(\"([\w-]+)\"\)", SCRIPT[1])
    assert len(set(used)) > 15
    assert [name for name in used if name not in ids] == []


def test_every_style_is_of_something_on_the_page() -> None:
    styled = set(re.findall(r"[.#]([a-z][\w-]*)(?=[^{}]*\{)", re.sub(r"\{[^{}]*\}", "{}", STYLE[1])))
    there = {word for _, known in TAGS for name in ("id", "class") for word in known.get(name, "").split()}
    there |= {word for words in re.findall(r"\"([\w -]+)\"|`([\w -]+) ", SCRIPT[1]) for word in " ".join(words).split()}
    assert len(styled) > 20
    assert styled <= there


def test_it_reads_fields_that_the_service_sends() -> None:
    answer = {*SearchAnswer.model_fields}
    fields = {
        "found": answer, "hit": {*HitAnswer.model_fields}, "other": {*HitAnswer.model_fields},
        "own": {*ScoreAnswer.model_fields}, "info": {*Info.model_fields},
    }  # fmt: skip
    for name, known in fields.items():
        used = set(re.findall(rf"(?<![\w\"-]){name}\.(\w+)", SCRIPT[1]))
        assert used, name
        assert used <= known, name
    offered = [known["value"] for tag, known in TAGS if tag == "input" and known.get("name") == "policy"]
    assert offered == list(POLICIES)
