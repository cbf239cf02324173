"""Models on the Hub: pushed to a server on loopback and read again, by commit, from the cache, and when broken."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants

from vacsr import Recipe, run_recipe
from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.data import load_pairs
from vacsr.errors import DataError, EnvironmentProblem, UsageError
from vacsr.hub import hub_id
from vacsr.model import MatchingModel, load_model
from vacsr.pretrained import encoder_spec
from vacsr.scoring import PairScorer
from vacsr.search import model_digest

from .conftest import Answer, clip_folder
from .fake_hub import PUSH, FakeHub, serve_hub

REPO = "someone/matcher"
WORLD = "scenes:images=16,held_out=6,per_image=2,size=32"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """What HF_ENDPOINT, HF_HUB_CACHE and HF_TOKEN set, which huggingface_hub reads when it is imported."""
    with serve_hub() as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", PUSH)
        yield hub


def small(seed: int = 0) -> MatchingModel:
    config = BackboneConfig(
        spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(kind="linear", dim=8)
    )
    pairs = load_pairs(WORLD, split="train")
    return MatchingModel.build(method_config("vacsr"), config, seed=seed, fit=pairs).eval()


def scores(model: MatchingModel) -> torch.Tensor:
    return PairScorer(model, device="cpu").score_set(load_pairs(WORLD, split="test")).score


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a report."""
    out = tmp_path_factory.mktemp("hub") / "run"
    recipe = {
        "data": {"pairs": WORLD},
        "backbone": {"spec": "tiny:width=16,depth=1,text_depth=1,heads=2,size=32", "head": {"dim": 8}},
        "method": {"name": "infonce"},
        "train": {"epochs": 1, "batch_size": 8, "device": "cpu"},
    }
    run_recipe(Recipe.model_validate(recipe), out, progress=False)
    return out


def front_matter(card: str) -> dict[str, object]:
    front: dict[str, object] = yaml.safe_load(card.split("---\n")[1])
    return front


def test_pushed_and_read_by_id_it_scores_the_same(hub: FakeHub, run: Path, tmp_path: Path) -> None:
    model = load_model(run)
    assert hub.requests == [], "a folder needs no Hub"
    commit = model.push_to_hub(REPO)
    assert commit == f"{REPO}@{hub.branches[REPO]['main']}"
    assert hub.large[REPO] == {"model.safetensors"}
    files = set(hub.repos[REPO][commit.partition("@")[2]])
    assert {"README.md", "config.json", "model.safetensors", "modules.json"} < files
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pkl"))]
    again = load_model(REPO)
    assert torch.equal(scores(again), scores(model))
    assert model_digest(again) == model_digest(model), "an index of one fits the other"
    assert again.identity() == {"weights": model.identity()["weights"], "revision": commit}
    again.save_pretrained(tmp_path / "copy")
    assert load_model(tmp_path / "copy").identity() == again.identity()
    with torch.no_grad():
        again.image_head.last.weight.add_(1)
    assert set(again.identity()) == {"weights"}, "other weights are not those of the Hub"
    assert "## Metrics" not in again.card()


def test_revisions_are_commits_and_branches(hub: FakeHub) -> None:
    first, second = small(1), small(2)
    old, new = first.push_to_hub(REPO), second.push_to_hub(REPO)
    other = first.push_to_hub(f"{REPO}@trial")
    assert len({old, new, other}) == 3 or other == old, "the same files are the same commit"
    assert torch.equal(scores(load_model(REPO)), scores(second))
    assert torch.equal(scores(load_model(REPO, revision=old.partition("@")[2])), scores(first))
    assert torch.equal(scores(load_model(old)), scores(first))
    assert torch.equal(scores(load_model(REPO, revision="trial")), scores(first))
    with pytest.raises(EnvironmentProblem, match=r"someone/matcher@v9.* not found"):
        load_model(REPO, revision="v9")


def test_a_revision_beside_an_id_wins() -> None:
    assert hub_id("user/model@v1", "v2") == ("user/model", "v2")


def test_offline_the_cache_is_enough(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = small()
    commit = model.push_to_hub(REPO)
    load_model(REPO)
    model.save_pretrained(tmp_path / "folder")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    for source in (REPO, commit, tmp_path / "folder"):
        assert torch.equal(scores(load_model(source)), scores(model))
    with pytest.raises(EnvironmentProblem, match=r"someone/other.* not found"):
        load_model("someone/other")
    assert hub.requests == []


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", flipped, "not those that were saved"),
        ("model.safetensors", lambda data: data[: len(data) // 2], "not a complete safetensors file"),
        ("config.json", lambda data: data[:40], "is not JSON"),
        ("backbone/tokenizer.json", flipped, "missing or changed"),
    ],
)
def test_damage_on_the_way_is_named(
    hub: FakeHub, name: str, damage: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    commit = small().push_to_hub(REPO).partition("@")[2]
    tree = hub.repos[REPO][commit]
    name = name if name in tree else next(path for path in tree if path.startswith("backbone/"))
    hub.replace(REPO, name, damage(tree[name]))
    with pytest.raises(DataError, match=message):
        load_model(REPO)


def test_nothing_there_and_no_access(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = logging.getLogger("huggingface_hub.utils._http")
    monkeypatch.setattr(log, "level", logging.WARNING)
    with pytest.raises(EnvironmentProblem, match=r"'someone/nothing' not found .* — .*give a folder"):
        load_model("someone/nothing")
    assert log.level == logging.WARNING, "it is quiet only meanwhile"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(EnvironmentProblem, match=r"cannot be pushed .*hf auth login"):
        small().push_to_hub(REPO)
    assert REPO not in hub.repos
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone").mkdir()
    hub.requests.clear()
    with pytest.raises(UsageError, match="write user/model"):
        small().push_to_hub(REPO)
    with pytest.raises(DataError, match="no such folder: someone/matcher"):
        load_model(REPO)
    with pytest.raises(UsageError, match="only these have revisions"):
        load_model(REPO, revision="v1")
    assert hub.requests == [], "where the folder someone is, this is a path"


def test_the_card_says_what_made_the_model(hub: FakeHub, run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    card = (run / "model" / "README.md").read_text()
    assert front_matter(card) == {
        "library_name": "vacsr",
        "pipeline_tag": "zero-shot-image-classification",
        "tags": ["image-text-retrieval", "uncertainty", "sentence-transformers"],
        "license": "unknown",
    }
    assert report["model"]["weights"] in card
    assert WORLD in card
    (result,) = [one for one in report["results"] if one["split"] == "test"]
    assert f"| {result['rsum']:.1f} |" in card
    recipe = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert Recipe.model_validate(recipe) == Recipe.model_validate(yaml.safe_load((run / "config.yaml").read_text()))
    usage = card.split("```python\n")[1].split("```")[0]
    assert len(usage.splitlines()) <= 5
    load_model(run).push_to_hub(REPO)
    pushed = hub.repos[REPO][hub.branches[REPO]["main"]]["README.md"].decode()
    assert pushed == card.replace("FOLDER_OR_ID", REPO)


def test_your_edits_of_the_card_are_kept(hub: FakeHub, tmp_path: Path) -> None:
    small().save_pretrained(tmp_path / "m")
    card = tmp_path / "m" / "README.md"
    edited = card.read_text().replace("license: unknown", "license: mit") + "\nTrained on my own photos.\n"
    card.write_text(edited)
    load_model(tmp_path / "m").push_to_hub(REPO)
    assert load_model(REPO).card() == edited.replace("FOLDER_OR_ID", REPO)


def test_licences_and_base_models_of_towers(hub: FakeHub, tmp_path: Path) -> None:
    """Of a checkpoint on the Hub only by what the cache has; folders of this machine are not named."""
    transformers = pytest.importorskip("transformers")
    clip = clip_folder(tmp_path / "clips" / "small-clip")
    method, head = method_config("infonce"), HeadConfig(kind="linear", dim=8)

    def card(spec: str) -> str:
        return MatchingModel.build(method, BackboneConfig(spec=spec, head=head)).card()

    assert front_matter(card(f"clip:{clip}"))["license"] == "unknown"
    (clip / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A CLIP\n")
    here = card(f"clip:{clip}")
    assert front_matter(here)["license"] == "apache-2.0"
    assert "base_model" not in front_matter(here)
    assert str(tmp_path) not in here
    commit = hashed_upload(hub, "someone/clip", clip)
    assert encoder_spec("someone/clip") == "clip:someone/clip"
    with pytest.raises(UsageError, match="checkpoint of transformers"):
        load_model(f"someone/clip@{commit}")
    published = front_matter(card("clip:someone/clip"))
    assert published["base_model"] == ["someone/clip"]
    assert published["license"] == "unknown", "its card was not downloaded"
    assert not [line for line in hub.requests if line.endswith("README.md")]
    load_model("someone/clip").save_pretrained(tmp_path / "plain")
    transformers.utils.cached_file("someone/clip", "README.md")
    mixed = card(f"towers:someone/clip,{clip}")
    assert front_matter(mixed)["license"] == "apache-2.0"
    assert "someone/clip: apache-2.0, small-clip: apache-2.0" in mixed
    shutil.rmtree(clip)
    moved = MatchingModel.from_pretrained(tmp_path / "plain").card()
    assert front_matter(moved)["base_model"] == ["someone/clip"]


def hashed_upload(hub: FakeHub, repo: str, folder: Path) -> str:
    """As `hf upload` does it."""
    from huggingface_hub import HfApi

    api = HfApi(token=PUSH)
    api.create_repo(repo)
    return str(api.upload_folder(repo_id=repo, folder_path=folder).oid)


def test_every_command_takes_a_hub_id(hub: FakeHub, run: Path, tmp_path: Path, vacsr: Callable[..., Answer]) -> None:
    commit = load_model(run).push_to_hub(REPO)
    file = tmp_path / "report.json"
    answer = vacsr("evaluate", commit, "--pairs", WORLD, "--split", "test", "--json", file)
    assert answer.code == 0, answer.err
    ours, theirs = (json.loads(path.read_text()) for path in (file, run / "report.json"))
    assert ours["model"] == theirs["model"] | {"revision": commit}
    assert ours["results"][0]["rsum"] == theirs["results"][-1]["rsum"]
    index = f"exact:{tmp_path / 'index'}"
    assert vacsr("index", "add", index, "--run", REPO, "--pairs", WORLD).code == 0
    assert vacsr("search", run, "--index", index, "--text", "a red boat").code == 0
    assert vacsr("calibrate", REPO, "--pairs", WORLD).refused(2, "--index", "--out")
    assert vacsr("evaluate", "someone/nothing", "--pairs", WORLD).refused(3, "not found")


@pytest.mark.slow
def test_the_environment_names_the_hub(run: Path, tmp_path: Path) -> None:
    """In a process of its own, with the variables that users set."""
    code = (
        "import sys, vacsr; print(vacsr.load_model(vacsr.load_model(sys.argv[1]).push_to_hub(sys.argv[2])).identity())"
    )
    with serve_hub() as hub:
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": PUSH}
        env |= {"HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code, str(run), REPO], env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert hub.branches[REPO]["main"] in done.stdout
