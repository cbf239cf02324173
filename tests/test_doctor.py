"""Checks with the facts of other machines, and the torchvision trap for real."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vacsr import doctor
from vacsr.doctor import EXTRAS, Finding, check_gpu

TRAP = "operator torchvision::nms does not exist"


def parsed(*lines: str) -> list[Requirement]:
    return [Requirement(line) for line in lines]


def test_this_machine_is_examined_without_breaking() -> None:
    findings = doctor.run_checks()
    subjects = [finding.subject for finding in findings]
    assert subjects[:3] == ["python", "torch", "gpu"]
    assert {"torchvision", "threads", "packages", "clip"} <= set(subjects)
    assert "dev" not in subjects
    assert all(finding.message and "\n" not in finding.line() for finding in findings)
    assert {finding.line().index(finding.message, 10) for finding in findings} == {28}, "lines align"


def test_a_broken_torchvision_fails_with_the_remedy(tmp_path: Path) -> None:
    """The whole command in a process of its own, as a person meets it."""
    (tmp_path / "torchvision.py").write_text(f"raise RuntimeError({TRAP!r})\n")
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text(metadata)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "from vacsr.cli import main; main()", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=240)
    line = next(line for line in done.stdout.splitlines() if "torchvision" in line)
    assert done.returncode == 3, done.stderr
    assert line.startswith("fail ")
    assert TRAP in line
    assert line.endswith("pip uninstall torchvision")


@pytest.mark.parametrize(
    ("finding", "status", "words"),
    [
        (doctor.check_torch("2.13.0+cpu", None), "ok", "2.13.0, CPU only"),
        (doctor.check_torch("2.13.0", "12.8"), "ok", "2.13.0, CUDA 12.8"),
        (doctor.check_torch("2.5.1+cpu", None), "fail", "needs 2.6"),
        (doctor.check_torch("2.6.0+cu124", "12.4"), "ok", ""),
        (doctor.check_torchvision(None, None), "ok", "not installed"),
        (doctor.check_torchvision("0.28.0", None), "ok", "not needed"),
        (check_gpu([], cuda=None, nvidia=False), "ok", "none found"),
        (check_gpu([], cuda="12.8", nvidia=False), "ok", "several GB smaller"),
        (check_gpu([], cuda=None, nvidia=True), "warn", "install a CUDA build"),
        (check_gpu([], cuda="12.8", nvidia=True), "warn", "update the driver"),
        (check_gpu([], cuda="12.8", nvidia=True, visible=""), "warn", "unset it"),
        (check_gpu([], cuda="12.8", nvidia=True, visible="-1"), "warn", "unset it"),
        (check_gpu(["NVIDIA H200"], cuda="12.8", nvidia=True, visible="0"), "ok", "NVIDIA H200"),
        (doctor.check_threads(2, cpus=2), "ok", "2 of 2"),
        (doctor.check_threads(2, cpus=5), "ok", "2 of 5"),
        (doctor.check_threads(2, cpus=6), "warn", "OMP_NUM_THREADS=6"),
        (doctor.check_threads(2, cpus=1), "warn", "OMP_NUM_THREADS=1"),
    ],
)
def test_findings(finding: Finding, status: str, words: str) -> None:
    assert finding.status == status
    assert words in finding.message
    assert status == "ok" or " — " in finding.message, "a fault says what to do"


def test_a_broken_torch_is_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    findings = {finding.subject: finding for finding in doctor.run_checks()}
    assert findings["torch"].status == "fail"
    assert "ModuleNotFoundError" in findings["torch"].message
    assert not {"gpu", "threads"} & set(findings)


def test_core_packages_too_old_or_absent_fail() -> None:
    needed = parsed("numpy>=1.26", "rich>=13.7", "pillow>=10.0", "torch>=2.6", "wandb>=0.17; extra == 'wandb'")
    findings = doctor.check_packages(needed, {"numpy": "1.25.2", "rich": "15.0.0"}.get)
    assert [(f.status, f.subject) for f in findings[:3]] == [("fail", "numpy"), ("fail", "pillow"), ("ok", "packages")]
    assert "pip install --upgrade 'numpy>=1.26'" in findings[0].message
    assert doctor.check_packages([], lambda name: None)[0].status == "warn"


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        (None, "ok", "pip install 'vacsr[clip]'"),
        ("5.18.0", "ok", "transformers 5.18.0"),
        ("5.17.2", "warn", "needs >=5.18,<6"),
        ("6.0.0", "warn", "needs >=5.18,<6"),
    ],
)
def test_transformers_range(version: str | None, status: str, words: str) -> None:
    (finding,) = doctor.check_packages(parsed("transformers<6,>=5.18; extra == 'clip'"), lambda name: version)
    assert finding.status == status
    assert words in finding.message
    assert status == "ok" or finding.message.endswith("pip install --upgrade 'transformers>=5.18,<6'")


def test_an_extra_is_here_when_all_its_packages_are() -> None:
    items = parsed("pymilvus>=2.5; extra == 'milvus'", "milvus-lite>=2.4; extra == 'milvus'")
    (half,) = doctor.check_packages(items, {"pymilvus": "2.6.0"}.get)
    assert "not installed" in half.message
    (whole,) = doctor.check_packages(items, {"pymilvus": "2.6.0", "milvus-lite": "2.5.1"}.get)
    assert whole.message == "pymilvus 2.6.0, milvus-lite 2.5.1"


def test_every_extra_of_the_package_is_listed() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = project["optional-dependencies"]
    assert set(groups) - {"dev", "docs"} == set(EXTRAS)
    lines = [f"{line.partition(';')[0]}; extra == '{name}'" for name, group in groups.items() for line in group]
    findings = doctor.check_packages(parsed(*lines), lambda name: None)
    assert [finding.subject for finding in findings] == list(EXTRAS)
