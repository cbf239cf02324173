"""The scripts of benchmarks/ on a machine without a GPU: what they need, and some of them at a small size."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.bench.scoring import Problem
from vacsr.config.io import method_config
from vacsr.data import load_pairs
from vacsr.evaluate.report import evaluate_retrieval
from vacsr.model import MatchingModel
from vacsr.scoring import BlockScorer, PairScorer

from .conftest import load_script

SCRIPTS = Path(__file__).resolve().parents[1] / "benchmarks"
LORA = {"all weights", "LoRA, all linear layers", "LoRA, q_proj and v_proj"}
STRIPS = {"dense", "strips 8×16", "strips 5×24"}
SIZE = ["--device", "cpu", "--images", "20", "--texts", "45", "--dim", "16", "--edge", "32", "--rounds", "2"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A script as a command: its exit code and what it printed."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def command(name: str, *words: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        code: object = 0
        try:
            runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        except SystemExit as error:
            code = error.code
        return code, "".join(capsys.readouterr())

    return command


def test_every_script_explains_itself(run: Any) -> None:
    names = [file.stem for file in SCRIPTS.glob("[!_]*.py")]
    assert len(names) > 10
    for name in names:
        code, text = run(name, "--help")
        assert (code, f"python benchmarks/{name}.py" in text) == (0, True), name


@pytest.mark.parametrize(
    ("code", "words", "names"),
    [
        (0, "nothing to do without them", ["audit", "cutoffs", "readings"]),
        (3, "CUDA GPU", ["gpo", "image_step", "scoring"]),
    ],
)
def test_scripts_without_what_they_need(code: int, words: str, names: list[str], run: Any) -> None:
    for name in names:
        exit_code, text = run(name)
        assert (exit_code, words in text) == (code, True), name


@pytest.mark.parametrize(
    ("words", "code", "expected"), [(["--help"], 0, "STAGE"), ([], 2, "STAGE"), (["out"], 3, "CUDA GPU")]
)
def test_all_gpu_benchmarks(words: list[str], code: int, expected: str, tmp_path: Path) -> None:
    hidden = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(SCRIPTS / "on_gpu.sh"), *(str(tmp_path / word) if word == "out" else word for word in words)]
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert (done.returncode, expected in done.stdout + done.stderr) == (code, True)


@pytest.mark.parametrize(
    ("name", "words", "bench", "ways"),
    [
        ("strip_training", ["--dim", "8", "--batches", "16,24:9", "--check"], "strips", STRIPS),
        ("loader", ["--photos", "4", "--sides", "32", "--threads", "1", "--rounds", "1"], "loader", {32}),
        ("metrics", [], "metrics", {"vacsr", "torchmetrics"}),
        ("lora_memory", ["--rounds", "1"], "lora-memory", LORA),
    ],
)
def test_scripts_that_need_nothing(
    name: str, words: list[str], bench: str, ways: set[Any], run: Any, tmp_path: Path
) -> None:
    if name == "lora_memory":
        pytest.importorskip("peft", reason="peft is not installed")
    code, text = run(name, *words, "--json", str(tmp_path / "out.json"))
    assert code == 0, text
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert result["bench"] == bench
    assert {row["way"] for row in result["rows"]} == ways
    assert not any("problem" in row for row in result["rows"])


# ------------------------------------------------------------------------------------------------------------ scoring


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return load_script("benchmarks/scoring.py")


def test_scoring_rows_and_ratios(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The keys that tools/docs_tables.py reads."""
    file, only = tmp_path / "scoring.json", ["cuBLAS", "folded torch 16-wide", "paper-style"]
    monkeypatch.setattr(sys, "argv", ["scoring.py", *SIZE, "--json", str(file), "--only", *only])
    script.main()
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["settings"] == {"images": 20, "texts": 45, "dim": 16, "edge": 32}
    assert result["compared"] == {"images": 20, "texts": 45, "k": 10}
    rows = {(row["way"], row["dtype"]): row for row in result["rows"]}
    assert not [row for row in rows.values() if "problem" in row]
    assert len(rows) == 5
    work = 2 * 20 * 45 * 16 * 16
    squares = "cuBLAS: products of 32³, back to back"
    trunk, paper = rows["cuBLAS: the trunk's products", "bf16"], rows[script.PAPER, "fp32"]
    best = max(trunk["tflops"], rows[squares, "bf16"]["tflops"])
    for (way, _), row in rows.items():
        assert row["seconds"] == row["median"]
        done = 2 * 32**3 * round(work / (2 * 32**3)) if way == squares else work
        assert row["tflops"] == pytest.approx(done / row["seconds"] / 1e12)
        assert row["x_ceiling"] == pytest.approx(row["tflops"] / trunk["tflops"])
        assert row["x_sustained"] == pytest.approx(row["tflops"] / best)
        assert row["x_fp32"] == pytest.approx(row["tflops"] / paper["tflops"])
    assert "problem" in result["rankings"]["fp8 against fp32"], "no kernel without a GPU"


class Coarse(BlockScorer):
    """Scores with few values, whatever the precision."""

    def __init__(self, method: Any, *, dtype: torch.dtype) -> None:
        super().__init__(method, dtype=torch.float32)

    def block(self, v: Any, t: Any) -> torch.Tensor:
        return (3 * super().block(v, t)).round() / 3


@torch.inference_mode()
def test_rankings_are_of_all_items(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the kernel, against lists sorted one by one."""
    monkeypatch.setattr(script, "QUERIES", 3)
    monkeypatch.setattr(script, "TOP", 4)
    monkeypatch.setattr(script, "KernelScorer", Coarse)
    engines = {torch.float32: BlockScorer, torch.float8_e4m3fn: Coarse}
    monkeypatch.setattr(script, "choose_engine", lambda method, *, device, dtype: engines[dtype](method, dtype=dtype))
    problem = Problem(20, 45, 16, device=torch.device("cpu"))
    result = script.rankings(problem)
    scorers = BlockScorer(problem.method), Coarse(problem.method, dtype=torch.float16)
    matrices = [scorer.block(problem.v, problem.t) for scorer in scorers]
    for key, pair in (("overlap", [m[:3] for m in matrices]), ("overlap_images", [m.T[:3] for m in matrices])):
        best = [[set(sorted(range(len(row)), key=lambda i, row=row: -row[i])[:4]) for row in m.tolist()] for m in pair]
        same = sum(len(one & other) for one, other in zip(*best, strict=True))
        assert same < 12
        assert result["fp16 against fp32"][key] == pytest.approx(same / 12)
    assert result["default topk against fp32"] == {"overlap": 1.0, "overlap_images": 1.0}
    coarse = {key: result["fp16 against fp32"][key] for key in ("overlap", "overlap_images")}
    assert result["fp8 rescored against fp32"] == coarse
    assert 0 < result["fp16 against fp32"]["tau"] < 1


PAIRS = "synthetic:images=40,per_image=2"


def test_readings_are_those_of_a_model_with_that_switch(run: Any, vacsr: Any, tmp_path: Path) -> None:
    folder, recipe, out = tmp_path / "clean" / "vacsr-paper" / "seed-3", tmp_path / "recipe.yaml", tmp_path / "out.json"
    recipe.write_text(
        f"data: {{pairs: '{PAIRS}'}}\nmethod: vacsr-paper\nbackbone: {{head: {{dim: 8}}}}\n"
        "train: {epochs: 2, batch_size: 16, seed: 3, device: cpu}\n",
        encoding="utf-8",
    )
    assert vacsr("train", recipe, "--out", folder).code == 0
    code, printed = run("readings", str(folder), "--json", str(out))
    assert code == 0
    records = json.loads(out.read_text(encoding="utf-8"))["records"]
    trained, pairs = MatchingModel.from_pretrained(folder), load_pairs(PAIRS, split="test")
    dims = {"image_dim": trained.backbone.image_dim, "text_dim": trained.backbone.text_dim}
    for record in records:
        switch, _, value = record["reading"].partition(": ")
        method = trained.method.config.model_dump()
        method["adapter"] |= {switch: value} if switch in ("decode", "uncertainty") else {}
        model = MatchingModel.build(method_config(method), trained.config, **dims, provenance=trained.provenance)
        model.load_state_dict(trained.state_dict())
        options: Any = {switch: value} if switch in ("ties", "bins") else {}
        (expected,) = evaluate_retrieval(PairScorer(model, device="cpu"), pairs, **options).results
        assert record["figures"]["RSUM"] == expected["rsum"]
        assert record["figures"]["AURC i2t"] == expected["uncertainty"]["aurc_i2t"]
        assert f"| {record['reading']} | {expected['rsum']:.1f} |" in printed
    assert len({json.dumps(record["figures"]) for record in records}) > 3, "some switch must tell"
