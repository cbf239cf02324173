"""The page in a real browser: tokens, refusals, a service that is busy or gone, and what an index may hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]
Start = Callable[..., Any]
HITS = "document.querySelectorAll('.hit').length"
IMAGES = "[...document.querySelectorAll('.hit > img')]"
SEEN = f"{IMAGES}.length == {HITS} && {IMAGES}.every(image => image.complete && image.naturalWidth > 0)"


def test_a_file_that_is_no_image_is_refused(live: Start, world: Any, tab: Any, tmp_path: Path) -> None:
    tab.open(live(world.texts).port)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    tab.choose("#file", broken)
    tab.until("!at('trouble').hidden")
    assert "cannot be read" in tab.text("#trouble")
    other = tmp_path / "notes.txt"
    other.write_text("words", encoding="utf-8")
    tab.choose("#file", other)
    tab.until("at('trouble-text').textContent.includes('no image')")


def test_a_token_is_asked_for_and_kept_in_memory_only(live: Start, tab: Any) -> None:
    service = live(token="open-sesame")
    tab.open(service.port)
    assert tab.js("[at('gate').hidden, at('ask').hidden]") == [False, True]
    assert tab.focus() == "token"
    tab.write("wrong")
    tab.press("Enter")
    tab.until("at('trouble-text').textContent == 'The service did not take this token.'")
    tab.write("open-sesame")
    tab.press("Enter")
    tab.until("!at('ask').hidden && document.activeElement == at('text')")
    tab.ask()
    assert tab.js(HITS) == 10
    tab.until(SEEN)
    kept = "[localStorage.length, sessionStorage.length, document.cookie, location.href.includes('sesame')]"
    assert tab.js(kept) == [0, 0, "", False]
    assert tab.js("at('token').value") == ""
    tab.js("at('forget').click()")
    assert tab.js(f"[at('gate').hidden, {HITS}]") == [False, 0]
    assert tab.violations() == []


def test_a_service_that_is_gone_is_named_and_tried_again(live: Start, tab: Any) -> None:
    service = live()
    tab.open(service.port)
    tab.ask()
    service.server.should_exit = True
    service.thread.join(30)
    tab.ask()
    assert tab.text("#trouble p") == "The service does not answer. Is it still running?"
    assert tab.js(f"[{HITS}, at('again').hidden, at('trouble').getAttribute('role')]") == [0, False, "alert"]
    assert not any("exception" in words.lower() for words in tab.complaints())


def test_a_busy_service_is_tried_again(live: Start, world: Any, tab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go, search = threading.Event(), world.searcher.search_texts

    def slow(*args: Any, **named: Any) -> Any:
        assert go.wait(60)
        return search(*args, **named)

    monkeypatch.setattr(world.searcher, "search_texts", slow)
    service, body = live(concurrency=1), b'{"text": "a dog"}'
    tab.open(service.port)
    with service.connect() as other:  # takes the only place
        head = f"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        other.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        wait_for(tab, 429)
        tab.ask()
        assert tab.text("#trouble p").startswith("The service has too much to do right now.")
        go.set()
        wait_for(tab, 200)
    tab.js("at('again').click()")
    tab.until(f"{HITS} == 10 && at('trouble').hidden")


def wait_for(tab: Any, status: int) -> None:
    while tab.js("fetch('info').then(answer => answer.status, () => 0)") != status:
        pass


def test_nothing_that_an_index_holds_is_run(live: Start, world: Any, tab: Any, tmp_path: Path) -> None:
    from vacsr.search import embedding_provenance, open_index
    from vacsr.search.searcher import Searcher

    scorer = world.searcher.scorer
    evil = [
        "<img src=x onerror=hacked()>",
        "../healthz",
        "a/b?c#d&e %41.jpg",
        "javascript:hacked()",
        "</script>",
        "ü\u202e☃",
    ]
    index = open_index(f"exact:{tmp_path / 'evil'}", dim=8, provenance=embedding_provenance(scorer.model), create=True)
    index.add(evil, scorer.embed_texts(evil).mean, [{"captions": [f"{name}<svg onload=hacked()>"]} for name in evil])
    photos = replace(world.photos.subset(range(len(evil))), image_ids=tuple(evil))
    tab.open(live(Searcher(scorer, index), photos=photos).port)
    tab.js("window.hacked = () => { window.hurt = true; }; 0")
    tab.ask("<b onclick=hacked()>x</b>")
    assert sorted(tab.ids()) == sorted(evil)
    assert tab.js("document.querySelectorAll('#found b[onclick], #found svg, #found script').length") == 0
    asked = "performance.getEntriesByType('resource').map(entry => entry.name)"
    tab.until(f"{asked}.some(name => name.endsWith('/photo/a%2Fb%3Fc%23d%26e%20%2541.jpg'))")
    tab.until(SEEN)
    assert tab.js("window.hurt") is None
    assert tab.violations() == []
