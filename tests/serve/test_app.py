"""What the service answers is what the searcher and the scorer say, and nothing of the machine."""

import base64
import io
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
import torch
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from vacsr import BackboneConfig, HeadConfig, TrainConfig, fit
from vacsr.data import load_pairs
from vacsr.errors import ConfigError, UsageError
from vacsr.scoring import PairScorer
from vacsr.search import open_index
from vacsr.search.searcher import Searcher
from vacsr.serve import create_app
from vacsr.serve.schemas import Info, ScoreAnswer, SearchAnswer, ServiceSettings

Opened = Callable[..., TestClient]
Picture = Callable[..., bytes]
DOG = {"text": "a dog", "k": 100}


def test_search_by_text_is_the_searchers(client: TestClient, world: Any) -> None:
    answer = client.post("/search", json={"text": "a red circle", "k": 5})
    assert answer.status_code == 200
    found, expected = answer.json(), world.searcher.search_texts(["a red circle"], k=5)[0]
    jsonschema_rs.validate(SearchAnswer.model_json_schema(mode="serialization"), found)
    assert [hit["id"] for hit in found["hits"]] == [hit.id for hit in expected.hits]
    for hit, wanted in zip(found["hits"], expected.hits, strict=True):
        for name in ("score", "grade", "uncertainty", "cosine"):
            assert hit[name] == pytest.approx(getattr(wanted, name), abs=1e-5)
        assert hit["metadata"] == {"captions": wanted.metadata["captions"]}, "where a file is stays here"
    assert found["index_size"] == len(world.searcher.index)


@pytest.mark.parametrize("direction", ["i2t", "i2i"])
def test_search_by_image_is_the_searchers(
    client: TestClient, image_client: TestClient, world: Any, picture: Picture, direction: str
) -> None:
    data, asked, searcher = picture(), client, world.searcher
    if direction == "i2t":
        asked, searcher = image_client, world.texts
    expected = searcher.search_images([Image.open(io.BytesIO(data))], k=3)[0]
    encoded = base64.b64encode(data).decode()
    for answer in (
        asked.post("/search?k=3", content=data, headers={"content-type": "image/png"}),
        asked.post("/search", json={"image": encoded, "k": 3, "policy": "score"}),
        asked.post("/search?k=3", json={"image": encoded}),
    ):
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["direction"] == direction
        for hit, wanted in zip(found["hits"], expected.hits, strict=True):
            assert (hit["id"], hit["cosine"]) == (wanted.id, pytest.approx(wanted.cosine, abs=1e-5))
            assert (hit["score"] is None) == (hit["grade"] is None) == (direction == "i2i")
            assert hit["photo"] is None if direction == "i2t" else client.get(f"/{hit['photo']}").status_code == 200


def test_policies_that_do_not_apply_are_refused(client: TestClient, image_client: TestClient, picture: Picture) -> None:
    """Similar items have no grades for a policy or a threshold, and what was not fitted says what to type."""
    data = base64.b64encode(picture()).decode()
    for asked, body, action in (
        (client, {"image": data, "policy": "confident"}, "leave both out"),
        (client, {"image": data, "min_grade": 0.5}, "leave both out"),
        (image_client, {"text": "a dog", "policy": "confident"}, "leave both out"),
        (client, {"text": "a dog", "policy": "confident"}, "vacsr calibrate"),
    ):
        answer = asked.post("/search", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "refused")
        assert action in answer.json()["error"]["message"]
    info = client.get("/info").json()
    assert (info["policies"], info["calibrated"], info["gallery"]) == (["score"], False, None)


@pytest.mark.parametrize("where", ["the body", "the query"])
def test_hits_below_a_grade_are_left_out(client: TestClient, where: str) -> None:
    every = client.post("/search", json=DOG).json()["hits"]
    least = sorted(hit["grade"] for hit in every)[len(every) // 2]
    asked = {"json": {**DOG, "min_grade": least}} if where == "the body" else {"json": DOG}
    asked |= {} if where == "the body" else {"params": {"min_grade": least}}
    answer = client.post("/search", **asked).json()
    assert [hit["id"] for hit in answer["hits"]] == [hit["id"] for hit in every if hit["grade"] >= least]
    assert answer["answered"]


def test_a_calibrated_service_marks_confident_hits(opened: Opened, calibrated: Any) -> None:
    every = opened(calibrated(None)).post("/search", json=DOG).json()
    assert (every["confident"], every["answered"], every["precision"]) == (0, True, 0.9)
    cutoff = every["hits"][2]["grade"]
    client = opened(calibrated(cutoff))
    found = client.post("/search", json=DOG).json()
    jsonschema_rs.validate(SearchAnswer.model_json_schema(mode="serialization"), found)
    assert [hit["grade"] for hit in found["hits"]] == [hit["grade"] for hit in every["hits"]]
    assert [hit["confident"] for hit in found["hits"]] == [hit["grade"] >= cutoff for hit in found["hits"]]
    assert (found["confident"], found["cutoff"], found["guaranteed"], found["note"]) == (3, cutoff, True, "")
    only = client.post("/search", json={**DOG, "policy": "confident"}).json()
    assert only["hits"] == found["hits"][:3]
    info = Info.model_validate(client.get("/info").json())
    assert (info.policies, info.calibrated, info.gallery) == (["score", "confident"], True, 128)


def test_where_nothing_is_confident_that_policy_shows_nothing(opened: Opened, calibrated: Any) -> None:
    fourth = opened(calibrated(None)).post("/search", json=DOG).json()["hits"][3]["grade"]
    client = opened(calibrated(None, set_cutoff=fourth))
    found = client.post("/search", json={**DOG, "policy": "confident"}).json()
    assert (found["hits"], found["answered"], found["confident"], found["answer_set"]) == ([], False, 0, 4)
    assert found["reason"]
    values = client.app.state.service.registry  # type: ignore[attr-defined]
    assert values.get_sample_value("vacsr_abstained_total") == 1


def test_grades_of_pairs_are_the_methods_own(opened: Opened, client: TestClient, calibrated: Any, world: Any) -> None:
    """A calibrated grade depends on the other candidates, and a pair alone has none."""
    body = {"texts": ["a dog"], "ids": list(world.photos.image_ids[:3])}
    assert opened(calibrated(0.5)).post("/score", json=body).json() == client.post("/score", json=body).json()


def test_score_is_the_scorers(client: TestClient, world: Any, picture: Picture) -> None:
    texts, data = ["a red circle", "two blue squares", "ünï \N{DOG}"], picture()
    body = {"texts": texts, "ids": list(world.photos.image_ids[:2]), "images": [base64.b64encode(data).decode()]}
    answer = client.post("/score", json=body)
    assert answer.status_code == 200, answer.text
    ScoreAnswer.model_validate(answer.json())
    images = [world.photos.photos.open(0), world.photos.photos.open(1), Image.open(io.BytesIO(data))]
    for row, text in enumerate(texts):
        for col, image in enumerate(images):
            one = world.searcher.scorer.score_pairs([image], [text])
            for name in ("score", "grade", "uncertainty"):
                assert answer.json()[name][row][col] == pytest.approx(float(getattr(one, name)[0]), abs=1e-4)


def test_the_least_limits() -> None:
    counts = ("max_pixels", "max_text", "max_k", "max_pairs", "max_images", "concurrency", "connections", "batch")
    assert ServiceSettings(**dict.fromkeys(counts, 1)).max_pixels == 1
    for name in counts:
        with pytest.raises(ConfigError, match=name):
            ServiceSettings(**{name: 0})


def test_score_limits(opened: Opened, world: Any) -> None:
    client, names = opened(max_images=2, max_pairs=4), list(world.photos.image_ids)
    for status, body in (
        (200, {"texts": ["a", "b"], "ids": names[:2]}),
        (422, {"texts": ["a"], "ids": names[:3]}),
        (422, {"texts": ["a", "b", "c"], "ids": names[:2]}),
        (422, {"texts": [], "ids": names[:1]}),
        (422, {"texts": ["a"]}),
        (422, {"texts": ["a"], "images": ["no base64!"]}),
        (422, {"texts": ["a"], "images": ["AAAA"]}),
        (422, {"texts": ["a", " "], "ids": names[:1]}),
        (404, {"texts": ["a"], "ids": ["no such"]}),
    ):
        assert client.post("/score", json=body).status_code == status, body


def test_photos_are_shown_by_id_and_without_metadata(client: TestClient, opened: Opened, world: Any) -> None:
    name = world.photos.image_ids[3]
    hits = client.post("/search", json=DOG).json()["hits"]
    answer = client.get("/" + next(hit["photo"] for hit in hits if hit["id"] == name))
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg")
    shown = Image.open(io.BytesIO(answer.content))
    assert shown.size == world.photos.photos.open(3).size
    assert not shown.getexif()
    assert "no-store" not in answer.headers["cache-control"]
    some = world.photos.subset(range(5))
    with TestClient(create_app(world.searcher, photos=lambda: [some])) as fewer:
        hits = fewer.post("/search", json=DOG).json()["hits"]
        assert {hit["id"] for hit in hits if hit["photo"] is not None} == set(some.image_ids)
    without = opened(photos=False)
    assert without.post("/search", json=DOG).json()["hits"][0]["photo"] is None
    assert without.get(f"/photo/{name}").status_code == 404
    assert without.get("/info").json()["photos"] is False


def test_a_photo_that_left_the_index_is_not_shown(world: Any, tmp_path: Any) -> None:
    scorer, names = world.searcher.scorer, world.photos.image_ids
    index = open_index(f"exact:{tmp_path / 'i'}", dim=8, create=True)
    index.add(names[:2], torch.eye(8)[:2])
    with TestClient(create_app(Searcher(scorer, index), photos=lambda: [world.photos])) as client:
        assert [client.get(f"/photo/{name}").status_code for name in names[:3]] == [200, 200, 404]
        index.delete([names[0]])
        assert client.get(f"/photo/{names[0]}").status_code == 404


def test_a_model_without_towers_is_refused(tmp_path: Any) -> None:
    pairs, small = load_pairs("synthetic:images=10", split="train"), BackboneConfig(head=HeadConfig(dim=8))
    model = fit("vacsr", pairs, TrainConfig(epochs=1, batch_size=8, device="cpu"), backbone=small).model
    index = open_index(f"exact:{tmp_path / 'i'}", dim=8, create=True)
    with pytest.raises(UsageError, match="towers"):
        create_app(Searcher(PairScorer(model, device="cpu"), index))


def test_health_and_info(client: TestClient, world: Any) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    head = client.head("/healthz")
    assert (head.status_code, head.content, client.head("/info").status_code) == (200, b"", 405)
    said = Info.model_validate(client.get("/info").json())
    assert (said.index_size, said.direction, said.photos) == (len(world.searcher.index), "t2i", True)


def test_metrics_count_what_happened(opened: Opened, world: Any) -> None:
    client = opened()
    for _ in range(3):
        client.post("/search", json={"text": "a dog"})
    client.post("/search", json={"text": ""})
    client.get("/no/such/path")
    families = text_string_to_metric_families(client.get("/metrics").text)
    values = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    assert values["vacsr_requests_total", "/search", "200"] == 3
    assert values["vacsr_requests_total", "/search", "422"] == 1
    assert values["vacsr_requests_total", "other", "404"] == 1
    assert values["vacsr_request_seconds_count", "/search"] == 4
    assert values["vacsr_batch_size_count",] == values["vacsr_batch_seconds_count",] == 3
    assert values["vacsr_index_vectors",] == len(world.searcher.index)
    assert values["vacsr_queue_length",] == values["vacsr_abstained_total",] == values["vacsr_index_stale",] == 0
    assert not any(name.endswith("_created") for name, *_ in values)


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
    text = json.dumps(said)
    assert "127.0.0.1" not in text
    assert set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', text)) <= said["components"]["schemas"].keys()
