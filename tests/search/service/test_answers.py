"""What the service answers is what the searcher and the scorer say, and nothing of the machine."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from vacsr.backbones.images import PhotoTransform
from vacsr.errors import UsageError
from vacsr.scoring import PairScorer
from vacsr.search import open_index
from vacsr.search.engine import Searcher
from vacsr.search.service import ServiceSettings, create_app
from vacsr.search.service.images import as_seen
from vacsr.search.service.page import make_page
from vacsr.search.service.schemas import Info, ScoreAnswer, SearchAnswer

Opened = Callable[..., TestClient]
Picture = Callable[..., bytes]


def test_search_by_text_is_the_searchers(client: TestClient, world: Any) -> None:
    answer = client.post("/search", json={"text": "a red circle", "k": 5})
    assert answer.status_code == 200
    found, expected = answer.json(), world.searcher.search_texts(["a red circle"], k=5)[0]
    jsonschema_rs.validate(SearchAnswer.model_json_schema(mode="serialization"), found)
    assert [hit["id"] for hit in found["hits"]] == [hit.id for hit in expected.hits]
    for hit, wanted in zip(found["hits"], expected.hits, strict=True):
        for name in ("score", "grade", "uncertainty", "cosine"):
            assert hit[name] == pytest.approx(getattr(wanted, name), abs=1e-5)
        assert hit["metadata"] == {"captions": wanted.metadata["captions"]}, "where a file lies is not told"
    assert found["index_size"] == len(world.searcher.index)


def test_search_by_image_is_the_searchers(image_client: TestClient, world: Any, picture: Picture) -> None:
    data = picture()
    expected = world.texts.search_images([Image.open(io.BytesIO(data))], k=3)[0]
    ways = [
        image_client.post("/search?k=3", content=data, headers={"content-type": "image/png"}),
        image_client.post("/search", json={"image": base64.b64encode(data).decode(), "k": 3}),
        image_client.post("/search?k=3", json={"image": base64.b64encode(data).decode()}),
    ]
    for answer in ways:
        assert answer.status_code == 200, answer.text
        assert [hit["id"] for hit in answer.json()["hits"]] == [hit.id for hit in expected.hits]
        assert answer.json()["hits"][0]["photo"] is None


def test_an_image_finds_similar_images_by_cosine_alone(client: TestClient, world: Any, picture: Picture) -> None:
    data = picture()
    vectors = world.searcher.scorer.embed_images([world.photos.photos.open(row) for row in range(32)]).mean
    mine = world.searcher.scorer.embed_images([Image.open(io.BytesIO(data))]).mean[0]
    cosine = dict(
        zip(world.photos.image_ids, (vectors @ mine / (vectors.norm(dim=1) * mine.norm())).tolist(), strict=True)
    )
    for answer in (
        client.post("/search?k=4", content=data, headers={"content-type": "image/png"}),
        client.post("/search", json={"image": base64.b64encode(data).decode(), "k": 4, "policy": "score"}),
    ):
        found = answer.json()
        shown = [hit["cosine"] for hit in found["hits"]]
        assert shown == pytest.approx(sorted(cosine.values(), reverse=True)[:4], abs=1e-4)
        for hit in found["hits"]:
            assert hit["cosine"] == pytest.approx(cosine[hit["id"]], abs=1e-4)
            assert [hit[name] for name in ("score", "grade", "uncertainty")] == [None] * 3
            assert client.get(f"/{hit['photo']}").status_code == 200
        assert (found["direction"], found["promised"], found["confidence"]) == ("i2i", False, None)
        assert "by cosine alone" in found["note"]


def test_a_text_finds_similar_texts_by_cosine_alone(image_client: TestClient, world: Any) -> None:
    words = world.photos.captions[5]
    found = image_client.post("/search", json={"text": words, "k": 3}).json()
    vectors = world.texts.scorer.embed_texts(list(world.photos.captions)).mean
    cosine = (vectors @ vectors[5]).tolist()
    best = sorted(range(len(cosine)), key=lambda row: (-cosine[row], row))[:3]
    assert found["direction"] == "t2t"
    assert [hit["cosine"] for hit in found["hits"]] == pytest.approx([cosine[row] for row in best], abs=1e-4)
    assert [hit["grade"] for hit in found["hits"]] == [None] * 3


def test_what_is_similar_has_no_policy(client: TestClient, image_client: TestClient, picture: Picture) -> None:
    data = base64.b64encode(picture()).decode()
    for asked, body in ((client, {"image": data}), (image_client, {"text": "a dog"})):
        for policy in ("lcb", "abstain", "missed"):
            answer = asked.post("/search", json={**body, "policy": policy})
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "refused")
            assert "leave the policy out" in answer.json()["error"]["message"]


@pytest.mark.parametrize("policy", ["lcb", "abstain", "missed"])
def test_a_policy_that_was_not_fitted_is_refused_with_what_to_type(client: TestClient, policy: str) -> None:
    answer = client.post("/search", json={"text": "a dog", "policy": policy})
    assert answer.status_code == 422
    assert "vacsr calibrate" in answer.json()["error"]["message"]
    assert client.get("/info").json()["policies"] == ["score"]


def test_score_is_the_scorers(client: TestClient, world: Any, picture: Picture) -> None:
    texts, data = ["a red circle", "two blue squares", "ünï \N{DOG}"], picture()
    names = list(world.photos.image_ids[:2])
    body = {"texts": texts, "ids": names, "images": [base64.b64encode(data).decode()]}
    answer = client.post("/score", json=body)
    assert answer.status_code == 200, answer.text
    ScoreAnswer.model_validate(answer.json())
    images = [world.photos.photos.open(0), world.photos.photos.open(1), Image.open(io.BytesIO(data))]
    for row, text in enumerate(texts):
        for col, image in enumerate(images):
            one = world.searcher.scorer.score_pairs([image], [text])
            for name in ("score", "grade", "uncertainty"):
                assert answer.json()[name][row][col] == pytest.approx(float(getattr(one, name)[0]), abs=1e-4)


def test_score_limits(opened: Opened, world: Any) -> None:
    client, names = opened(max_images=2, max_pairs=4), list(world.photos.image_ids)
    assert client.post("/score", json={"texts": ["a", "b"], "ids": names[:2]}).status_code == 200
    for body in (
        {"texts": ["a"], "ids": names[:3]},
        {"texts": ["a", "b", "c"], "ids": names[:2]},
        {"texts": [], "ids": names[:1]},
        {"texts": ["a"]},
        {"texts": ["a"], "images": ["no base64!"]},
        {"texts": ["a"], "images": ["AAAA"]},
        {"texts": ["a", " "], "ids": names[:1]},
    ):
        assert client.post("/score", json=body).status_code == 422, body
    assert client.post("/score", json={"texts": ["a"], "ids": ["no such"]}).status_code == 404


@pytest.mark.parametrize(
    "transform",
    [PhotoTransform(32), PhotoTransform(32, resize="center"), PhotoTransform(32, resize="center", short=40)],
)
@pytest.mark.parametrize("size", [(50, 70), (333, 64), (20, 20)])
def test_the_small_copy_looks_the_same_to_a_tower(transform: PhotoTransform, size: tuple[int, int]) -> None:
    noise = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    photo = Image.fromarray(noise.numpy())
    assert torch.equal(transform.pixels(as_seen(photo, transform)), transform.pixels(photo))


def test_photos_are_shown_by_id_and_without_what_their_files_tell(client: TestClient, world: Any) -> None:
    name = world.photos.image_ids[3]
    hits = client.post("/search", json={"text": "a dog", "k": 100}).json()["hits"]
    path = next(hit["photo"] for hit in hits if hit["id"] == name)
    answer = client.get(f"/{path}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg")
    shown = Image.open(io.BytesIO(answer.content))
    assert shown.size == world.photos.photos.open(3).size
    assert not shown.getexif()
    assert "no-store" not in answer.headers["cache-control"]


def test_a_hit_without_a_photo_says_so(world: Any) -> None:
    some = world.photos.subset(range(5))
    with TestClient(create_app(world.searcher, photos=[some])) as client:
        hits = client.post("/search", json={"text": "a dog", "k": 100}).json()["hits"]
        assert {hit["id"] for hit in hits if hit["photo"] is not None} == set(some.image_ids)
        for hit in hits:
            assert hit["photo"] is None or client.get(f"/{hit['photo']}").status_code == 200


def test_large_counts_keep_their_digits(opened: Opened) -> None:
    client = opened()
    metrics = client.app.state.service.metrics  # type: ignore[attr-defined]
    metrics.requests.add((("path", "/x"),), 12_345_678)
    metrics.work.add(1_234_567.890625)
    said = client.get("/metrics").text
    assert '\nvacsr_requests_total{path="/x"} 12345678\n' in said
    assert "\nvacsr_batch_seconds_sum 1234567.890625\n" in said


def test_head_of_health(client: TestClient) -> None:
    answer = client.head("/healthz")
    assert (answer.status_code, answer.content) == (200, b"")
    assert client.head("/info").status_code == 405


def test_without_photos_nothing_is_shown(opened: Opened, world: Any) -> None:
    client = opened(photos=False)
    assert client.post("/search", json={"text": "a dog"}).json()["hits"][0]["photo"] is None
    assert client.get(f"/photo/{world.photos.image_ids[0]}").status_code == 404
    assert client.get("/info").json()["photos"] is False


def test_a_photo_that_left_the_index_is_not_shown(world: Any, tmp_path: Any) -> None:
    scorer, names = world.searcher.scorer, world.photos.image_ids[:2]
    index = open_index(f"exact:{tmp_path / 'i'}", dim=8, create=True)
    index.add(names, torch.eye(8)[:2])
    with TestClient(create_app(Searcher(scorer, index), photos=[world.photos])) as client:
        assert client.get(f"/photo/{names[0]}").status_code == 200
        assert client.get(f"/photo/{world.photos.image_ids[2]}").status_code == 404
        index.delete([names[0]])
        assert client.get(f"/photo/{names[0]}").status_code == 404


def test_what_others_add_is_found(world: Any, tmp_path: Any) -> None:
    spec = f"exact:{tmp_path / 'i'}"
    index, other = (open_index(spec, dim=8, create=True) for _ in range(2))
    index.add(["a"], torch.eye(8)[:1], [{"note": "\ud800"}])
    with TestClient(create_app(Searcher(world.searcher.scorer, index), ServiceSettings(refresh_seconds=0))) as client:
        answer = client.post("/search", json={"text": "x"})
        assert [hit["id"] for hit in answer.json()["hits"]] == ["a"]
        assert answer.json()["hits"][0]["metadata"] == {"note": "\ud800"}, "half a pair is not UTF-8, and is JSON"
        other.add(["b\ud800"], -torch.eye(8)[:1])
        found = client.post("/search", json={"text": "x"}).json()["hits"]
        assert {hit["id"] for hit in found} == {"a", "b\ud800"}


def test_a_model_without_towers_is_refused(tmp_path: Any) -> None:
    from vacsr import BackboneConfig, HeadConfig, TrainConfig, fit
    from vacsr.data import load_pairs

    pairs = load_pairs("synthetic:images=10", split="train")
    small = BackboneConfig(head=HeadConfig(dim=8))
    model = fit("vacsr", pairs, TrainConfig(epochs=1, batch_size=8, device="cpu"), backbone=small).model
    index = open_index(f"exact:{tmp_path / 'i'}", dim=8, create=True)
    with pytest.raises(UsageError, match="towers"):
        create_app(Searcher(PairScorer(model, device="cpu"), index))


def test_health_and_info(client: TestClient, world: Any) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    said = Info.model_validate(client.get("/info").json())
    assert (said.index_size, said.direction, said.photos) == (len(world.searcher.index), "t2i", True)


def test_the_size_is_asked_for_by_the_worker_only(opened: Opened, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, asked, inner = opened(), set[str](), type(world.searcher.index).__len__

    def size(index: Any) -> int:
        asked.add(threading.current_thread().name)
        return inner(index)

    monkeypatch.setattr(type(world.searcher.index), "__len__", size)
    assert client.get("/info").json()["index_size"] == inner(world.searcher.index)
    assert "vacsr_index_vectors" in client.get("/metrics").text
    assert not asked
    assert client.post("/search", json={"text": "a dog"}).status_code == 200
    assert asked
    assert all(name.startswith("model") for name in asked)


def test_metrics_count_what_happened(opened: Opened) -> None:
    client = opened()
    for _ in range(3):
        client.post("/search", json={"text": "a dog"})
    client.post("/search", json={"text": ""})
    client.get("/no/such/path")
    values = dict(_samples(client.get("/metrics").text))
    assert values['vacsr_requests_total{path="/search",status="200"}'] == 3
    assert values['vacsr_requests_total{path="/search",status="422"}'] == 1
    assert values['vacsr_requests_total{path="other",status="404"}'] == 1
    assert values['vacsr_request_seconds_count{path="/search"}'] == 4
    assert values['vacsr_request_seconds_bucket{path="/search",le="+Inf"}'] == 4
    assert values["vacsr_batch_size_count"] == 3
    bounds = [v for k, v in values.items() if k.startswith('vacsr_request_seconds_bucket{path="/search"')]
    assert bounds == sorted(bounds)
    assert values["vacsr_index_vectors"] > 0


def _samples(text: str) -> list[tuple[str, float]]:
    """Prometheus' text format, read by its grammar."""
    assert text.endswith("\n")
    name, label = "[a-zA-Z_:][a-zA-Z0-9_:]*", r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*"'
    sample = re.compile(rf"({name}(?:\{{{label}(?:,{label})*\}})?) (\S+)")
    found = []
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(rf"# (HELP {name} .+|TYPE {name} (counter|gauge|histogram))", line), line
        else:
            match = sample.fullmatch(line)
            assert match, line
            found.append((match[1], float(match[2])))
    return found


def test_the_page_may_run_its_own_script_and_no_other() -> None:
    page = make_page(b"<html><style>p{}</style><script>go()</script><script type='x'>\nb\n</script></html>")
    import base64
    import hashlib

    for part, where in ((b"p{}", "style-src"), (b"go()", "script-src"), (b"\nb\n", "script-src")):
        wanted = "'sha256-" + base64.b64encode(hashlib.sha256(part).digest()).decode() + "'"
        rule = next(rule for rule in page.policy.split("; ") if rule.startswith(where))
        assert wanted in rule.split()
    assert "unsafe" not in page.policy
    assert "script-src 'none'" in make_page(b"<p>").policy


def test_every_answer_carries_the_headers_and_no_origin_is_let_in(client: TestClient) -> None:
    for path in ("/", "/healthz", "/nothing", "/metrics"):
        answer = client.get(path, headers={"origin": "https://example.org"})
        for name in ("content-security-policy", "x-content-type-options", "referrer-policy", "x-frame-options"):
            assert name in answer.headers, (path, name)
        assert not any(name.startswith("access-control") for name in answer.headers)
    answer = client.options("/search", headers={"origin": "https://a.b", "access-control-request-method": "POST"})
    assert answer.status_code == 405


def test_the_description_names_every_path_and_its_errors(opened: Opened) -> None:
    said = opened(max_k=7, max_text=9).get("/openapi.json").json()
    assert set(said["paths"]) == {"/search", "/score", "/photo/{id}", "/healthz", "/info", "/metrics"}
    for path in said["paths"].values():
        for operation in path.values():
            for status in ("400", "401", "408", "413", "421", "429", "500", "503"):
                schema = operation["responses"][status]["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}
    body = said["paths"]["/search"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["k"]["maximum"] == 7
    assert body["properties"]["text"]["maxLength"] == 9
    assert "127.0.0.1" not in json.dumps(said)
