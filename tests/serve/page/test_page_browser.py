"""The page in a real browser, over a real port: questions and answers, tokens, refusals, a service that is gone."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vacsr.search import embedding_provenance, open_index
from vacsr.search.searcher import Searcher

pytestmark = [pytest.mark.slow, pytest.mark.long]
Start = Callable[..., Any]
QUERY = "a red boat"
DONE = "at('results').getAttribute('aria-busy') == 'false'"
HITS = "document.querySelectorAll('.hit').length"
IMAGES = "[...document.querySelectorAll('.hit > img')]"
SEEN = f"{IMAGES}.length == {HITS} && {IMAGES}.every(image => image.complete && image.naturalWidth > 0)"


def graded(grade: float) -> str:
    if grade < 0.001:
        return "< 0.001"
    return f"{grade:.3f}" if grade < 0.1 else f"{grade:.2f}"


def test_words_find_photos_and_every_policy_shows_its_hits(live: Start, searcher: Any, tab: Any) -> None:
    tab.open(live(searcher).port)
    assert tab.text("#holds") == "32 images in the index"
    tab.ask()
    for policy in ("score", "confident"):
        if policy != "score":
            tab.pick(policy)
        wanted = searcher.search_texts([QUERY], k=10, policy=policy)[0]
        assert tab.ids() == [hit.id for hit in wanted.hits]
        shown = tab.js("[...document.querySelectorAll('.hit .match b')].map(value => value.textContent)")
        assert shown == [graded(hit.grade) for hit in wanted.hits]
        bars = tab.js("[...document.querySelectorAll('.hit .track i')].map(bar => parseFloat(bar.style.width))")
        assert bars == pytest.approx([100 * hit.grade for hit in wanted.hits], abs=0.01)
        assert tab.text(".summary") == "3 confident matches"
        assert tab.js("[...document.querySelectorAll('.hit.sure .mark')].length") == 3
        assert tab.js("document.querySelectorAll('.hits.below .hit').length") == len(wanted.hits) - 3
        assert tab.js("document.querySelectorAll('.cut').length") == (len(wanted.hits) > 3)
        assert not tab.js("document.querySelector('.hit dl').checkVisibility()"), "behind details"
        tab.until(SEEN)
    assert tab.violations() == []
    assert tab.complaints() == []


def test_where_nothing_is_confident_the_page_says_so(live: Start, unsure: Any, tab: Any) -> None:
    tab.open(live(unsure).port)
    tab.ask()
    assert tab.text(".summary") == "No confident match; probably one of the first 2 hits (90%)"
    assert tab.js(f"[{HITS}, document.querySelectorAll('.mark, .cut').length]") == [10, 0]
    tab.pick("confident")
    assert tab.text("#status") == f"0 images for “{QUERY}”"
    assert tab.js(HITS) == 0
    tab.js("document.querySelector('#found button').focus()")
    tab.press("Enter")
    tab.until(f"{DONE} && {HITS} == 10")
    assert tab.js("document.querySelector('input[name=policy]:checked').value") == "score"
    assert tab.complaints() == []


def test_a_guarantee_is_named_only_where_it_holds(live: Start, calibrated: Any, tab: Any) -> None:
    service = live(calibrated(0.0))
    about = "document.querySelector('.about').textContent"
    tab.open(service.port)
    tab.ask()
    assert not tab.js("document.querySelector('.about dl').checkVisibility()"), "not the first thing to read"
    assert "at least 90% of such hits are right, with 90% confidence" in tab.js(about)
    for other, words in ((calibrated(0.0, size=20), "up to 20 items"), (calibrated(None), "no cutoff")):
        service.server.config.loaded_app.state.service.searcher.calibration = other.calibration
        tab.ask()
        assert words in tab.js(about)
        assert "at least 90%" not in tab.js(about)


def test_details_of_a_hit_leave_the_others_as_they_are(live: Start, searcher: Any, tab: Any) -> None:
    tab.open(live(searcher).port)
    tab.ask()
    tab.until(SEEN)
    heights = "[...document.querySelectorAll('.hit')].map(card => card.getBoundingClientRect().height)"
    before = tab.js(heights)
    tab.js("document.querySelector('.hit summary').click()")
    after = tab.js(heights)
    assert after[0] > before[0]
    assert after[1:] == before[1:]
    assert tab.js("[...document.querySelector('.hit dl').querySelectorAll('dt')].map(name => name.textContent)") == [
        "score", "cosine", "uncertainty",
    ]  # fmt: skip


def test_the_keyboard_is_enough(live: Start, searcher: Any, tab: Any) -> None:
    tab.open(live(searcher).port)
    order = [tab.focus()]
    for _ in range(4):
        tab.press("Tab")
        order.append(tab.focus())
        outlined = "(node => getComputedStyle(node).outlineStyle != 'none')"
        marked = "document.activeElement, document.activeElement.nextElementSibling, document.activeElement.parentNode"
        assert tab.js(f"[{marked}].filter(Boolean).some{outlined}"), order
        if tab.focus() == "SUMMARY":
            tab.press("Enter")
    assert order == ["text", "file", "BUTTON", "SUMMARY", "score"]
    tab.ask()
    assert tab.focus() == "text"
    for _ in range(4):
        tab.press("Tab")
    assert tab.focus() == "score"
    tab.press("ArrowRight")
    assert tab.focus() == "confident"
    tab.until(f"{DONE} && {HITS} == 3")


def test_the_address_asks_again(live: Start, searcher: Any, tab: Any) -> None:
    service, words = live(searcher), "a dog & a cat? 50%"
    tab.open(service.port)
    tab.ask(words)
    address = tab.js("location.search")
    found = tab.ids()
    tab.open(service.port)
    assert tab.js(f"[at('text').value, {HITS}]") == ["", 0]
    tab.open(service.port, address)
    tab.until(f"{DONE} && {HITS} == 10")
    assert (tab.js("at('text').value"), tab.ids()) == (words, found)
    assert tab.violations() == []


def as_file(picture: Callable[..., bytes], folder: Path) -> Path:
    file = folder / "mine.png"
    file.write_bytes(picture())
    return file


def test_an_image_finds_texts_chosen_dropped_or_pasted(
    live: Start, world: Any, tab: Any, picture: Callable[..., bytes], tmp_path: Path
) -> None:
    tab.open(live(world.texts).port)
    assert tab.text("h1") == "Find texts"
    tab.choose("#file", as_file(picture, tmp_path))
    tab.until(f"{DONE} && {HITS} == 10")
    first = tab.ids()
    held = f"Uint8Array.from({list(picture())})"
    given = f"const d = new DataTransfer(); d.items.add(new File([{held}], 'a.png', {{type: 'image/png'}}));"
    for event in (
        "new DragEvent('drop', {dataTransfer: d, bubbles: true, cancelable: true})",
        "new ClipboardEvent('paste', {clipboardData: d, bubbles: true, cancelable: true})",
    ):
        tab.js("at('remove').click(); at('found').replaceChildren()")
        tab.js(f"{{ {given} document.body.dispatchEvent({event}); }}")
        tab.until(f"{DONE} && {HITS} == 10")
        assert tab.ids() == first
    assert tab.violations() == []
    assert tab.complaints() == []


def test_an_image_finds_similar_ones_by_cosine(
    live: Start, world: Any, searcher: Any, tab: Any, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.png"
    world.photos.photos.open(5).save(mine)
    tab.open(live(searcher).port)
    tab.js("document.querySelector('input[value=confident]').click()")
    tab.choose("#file", mine)
    tab.until(f"{DONE} && {HITS} == 10")
    wanted = searcher.search_images([world.photos.photos.open(5)], k=10)[0]
    assert tab.ids()[0] == world.photos.image_ids[5]
    assert tab.text("#status") == "10 images similar to your photo"
    shown = tab.js("[...document.querySelectorAll('.hit .match')].map(bar => bar.innerText.trim().split(/\\s+/))")
    assert shown == [["cosine", f"{hit.cosine:.2f}"] for hit in wanted.hits]
    bars = tab.js("[...document.querySelectorAll('.hit .track i')].map(bar => parseFloat(bar.style.width))")
    assert bars == pytest.approx([100 * hit.cosine for hit in wanted.hits], abs=0.1)
    assert tab.js("document.querySelector('.summary, .mark, .cut')") is None
    assert tab.js("at('choice').hidden")
    tab.until(SEEN)
    tab.ask()  # words beside it: the chosen policy again, and the image scored
    assert tab.text(".summary") == "3 confident matches"
    assert tab.text(".own h2") == "Your photo with these words"
    assert not tab.js("at('choice').hidden")
    tab.js("at('text').value = ''; at('text').dispatchEvent(new Event('input')); at('remove').click()")
    assert tab.js(f"[{HITS}, at('status').textContent, at('choice').hidden]") == [0, "", False]
    assert tab.violations() == []
    assert tab.complaints() == []


def test_an_image_that_is_too_large_is_sent_smaller(
    live: Start, world: Any, tab: Any, picture: Callable[..., bytes], tmp_path: Path
) -> None:
    tab.open(live(world.texts, max_pixels=1000).port)
    tab.choose("#file", as_file(picture, tmp_path))
    tab.until(f"{DONE} && {HITS} == 10")
    assert tab.complaints() == []


def test_without_a_calibration_only_the_score_can_be_chosen(live: Start, tab: Any) -> None:
    tab.open(live().port)
    assert tab.js("[...document.getElementsByName('policy')].map(r => r.disabled)") == [False, True]
    assert tab.js("!at('unfitted').hidden")
    tab.ask()
    assert "not calibrated" in tab.js("document.querySelector('.about').textContent")
    assert tab.js("document.querySelector('.summary, .mark, .cut')") is None, "nothing backs them"


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
    scorer = world.searcher.scorer
    evil = ["<img src=x onerror=hacked()>", "../healthz", "a/b?c#d&e %41.jpg", "javascript:hacked()"]
    evil += ["</script>", "ü\u202e☃"]
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


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_sticks_out(live: Start, searcher: Any, tab: Any, width: int) -> None:
    tab.open(live(searcher).port)
    tab.resize(width)
    tab.ask()
    assert tab.js("document.documentElement.scrollWidth") <= width
    buttons = "[...document.querySelectorAll('button, select, .policy, .button')].filter(node => node.offsetHeight)"
    assert tab.js(f"Math.min(...{buttons}.map(node => node.getBoundingClientRect().height))") >= 36
