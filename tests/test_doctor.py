"""Checks with the facts of other machines, and the torchvision trap for real."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vacsr import doctor
from vacsr.doctor import EXTRAS, Finding, TorchInfo

TRAP = "operator torchvision::nms does not exist"
CPU = TorchInfo(version="2.13.0+cpu", threads=2)
CUDA = TorchInfo(version="2.13.0", cuda="12.8", threads=2)


def parsed(*lines: str) -> list[Requirement]:
    return [Requirement(line) for line in lines]


def fake_package(folder: Path, name: str, body: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(body)
    return folder


@pytest.fixture
def broken_torchvision(tmp_path: Path) -> Path:
    return fake_package(tmp_path / "site", "torchvision", f"raise RuntimeError({TRAP!r})\n")


def test_this_machine_is_examined_without_breaking() -> None:
    findings = doctor.run_checks()
    subjects = [finding.subject for finding in findings]
    assert subjects[:4] == ["python", "torch", "gpu", "torchvision"]
    assert {"bf16", "threads", "disk", "packages", "clip"} <= set(subjects)
    assert "dev" not in subjects
    assert all(finding.message and "\n" not in finding.line() for finding in findings)


def test_lines_align() -> None:
    assert Finding("ok", "torch", "2.13.0, CPU only").line() == "ok    torch        2.13.0, CPU only"
    starts = {finding.line().index(finding.message, 10) for finding in doctor.run_checks()}
    assert starts == {19}


def test_a_broken_torchvision_fails_with_the_remedy(broken_torchvision: Path) -> None:
    """The whole command in a process of its own, as a person meets it."""
    path = os.pathsep.join([str(broken_torchvision), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "from vacsr.cli import main; main()", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=240)
    line = next(line for line in done.stdout.splitlines() if "torchvision" in line)
    assert done.returncode == 3, done.stderr
    assert line.startswith("fail ")
    assert TRAP in line
    assert line.endswith("pip uninstall torchvision")


def test_the_import_is_tried_elsewhere(broken_torchvision: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(broken_torchvision)
    assert doctor.installed("torchvision") == "unknown"
    assert doctor.import_error("torchvision") == f"RuntimeError: {TRAP}"
    assert "torchvision" not in sys.modules


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os; os._exit(7)", "ended with status 7"),
        ("import time; time.sleep(60)", "longer than"),
        ("", None),
    ],
)
def test_an_import_may_die_hang_or_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str | None
) -> None:
    monkeypatch.syspath_prepend(fake_package(tmp_path, "odd_package", body))
    error = doctor.import_error("odd_package", timeout=5.0)
    assert (error is None) if said is None else (error is not None and said in error)


def test_torchvision_absent_or_working_is_fine() -> None:
    assert doctor.check_torchvision(None, None) == Finding("ok", "torchvision", "not installed, not needed")
    assert doctor.check_torchvision("0.28.0", None).status == "ok"


@pytest.mark.parametrize(
    ("torch", "nvidia", "visible", "status", "said"),
    [
        (CPU, False, None, "ok", "none found"),
        (CUDA, False, None, "ok", "several GB smaller"),
        (CPU, True, None, "warn", "install a CUDA build"),
        (CUDA, True, None, "warn", "update the driver"),
        (CUDA, True, "", "warn", "unset it"),
        (CUDA, True, "-1", "warn", "unset it"),
        (CUDA._replace(gpus=("NVIDIA H200",)), True, "0", "ok", "NVIDIA H200"),
    ],
)
def test_gpu_and_torch_must_know_of_each_other(
    torch: TorchInfo, nvidia: bool, visible: str | None, status: str, said: str
) -> None:
    found = doctor.check_gpu(torch, nvidia=nvidia, visible=visible)
    assert found.status == status
    assert said in found.message


def test_a_cpu_torch_beside_nvidia_smi_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "torch_info", lambda: CPU)
    found = {finding.subject: finding for finding in doctor.run_checks()}
    assert found["gpu"].status == "warn"
    assert "CPU-only build" in found["gpu"].message


def test_a_broken_torch_is_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "torch_info", lambda: TorchInfo(error="OSError: libcudart.so.12"))
    found = {finding.subject: finding for finding in doctor.run_checks()}
    assert found["torch"].status == "fail"
    assert "libcudart" in found["torch"].message
    assert not {"gpu", "bf16", "threads"} & set(found)


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(free: int) -> Finding:
        raise FileNotFoundError("no such folder")

    monkeypatch.setattr(doctor, "check_disk", gone)
    found = {finding.subject: finding for finding in doctor.run_checks()}
    assert found["disk"] == Finding("warn", "disk", "could not be checked: FileNotFoundError: no such folder")


@pytest.mark.parametrize(
    ("finding", "status"),
    [
        (doctor.check_torch(CPU), "ok"),
        (doctor.check_torch(CPU._replace(version="2.5.1")), "fail"),
        (doctor.check_torch(CPU._replace(version="2.6.0+cu124")), "ok"),
        (doctor.check_bf16(CPU), "ok"),
        (doctor.check_threads(CPU, cpus=2), "ok"),
        (doctor.check_threads(CPU, cpus=4), "ok"),
        (doctor.check_threads(CPU, cpus=16), "warn"),
        (doctor.check_threads(CPU, cpus=1), "warn"),
        (doctor.check_disk(1_900_000_000), "warn"),
        (doctor.check_disk(90_000_000_000), "ok"),
    ],
)
def test_thresholds(finding: Finding, status: str) -> None:
    assert finding.status == status
    assert status == "ok" or " — " in finding.message, "a fault says what to do"


def test_the_build_is_named() -> None:
    assert doctor.check_torch(CPU).message == "2.13.0, CPU only"
    assert doctor.check_torch(CUDA).message == "2.13.0, CUDA 12.8"


def test_core_packages_too_old_or_absent_fail() -> None:
    needed = parsed("numpy>=1.26", "rich>=13.7", "pillow>=10.0", "torch>=2.6", "wandb>=0.17; extra == 'wandb'")
    found = doctor.check_packages(needed, {"numpy": "1.25.2", "rich": "15.0.0"}.get)
    assert [(f.status, f.subject) for f in found] == [("ok", "packages"), ("fail", "numpy"), ("fail", "pillow")]
    assert "pip install --upgrade 'numpy>=1.26'" in found[1].message
    assert doctor.check_packages([], lambda name: None)[0].status == "warn"


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        (None, "ok", "pip install 'vacsr[clip]'"),
        ("5.18.0", "ok", "transformers 5.18.0"),
        ("5.17.2", "warn", "needs torchvision"),
        ("5.4.0", "warn", "needs torchvision"),
        ("5.3.0", "warn", "outside the range"),
        ("6.0.0", "warn", "outside the range"),
    ],
)
def test_transformers_range(version: str | None, status: str, said: str) -> None:
    (found,) = doctor.check_extras(parsed("transformers<6,>=5.18; extra == 'clip'"), lambda name: version)
    assert found.status == status
    assert said in found.message
    assert status == "ok" or found.message.endswith("pip install --upgrade 'transformers>=5.18,<6'")


def test_an_extra_is_here_when_all_its_packages_are() -> None:
    items = parsed("pymilvus>=2.5; extra == 'milvus'", "milvus-lite>=2.4; extra == 'milvus'")
    (half,) = doctor.check_extras(items, {"pymilvus": "2.6.0"}.get)
    assert "not installed" in half.message
    (whole,) = doctor.check_extras(items, {"pymilvus": "2.6.0", "milvus-lite": "2.5.1"}.get)
    assert whole.message == "pymilvus 2.6.0, milvus-lite 2.5.1"


def test_every_extra_of_the_package_is_listed() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]) - {"dev"} == set(EXTRAS)
    lines = [f"{line.partition(';')[0]}; extra == '{name}'"
             for name, group in project["optional-dependencies"].items() for line in group]  # fmt: skip
    found = doctor.check_extras(parsed(*project["dependencies"], *lines), lambda name: None)
    assert [finding.subject for finding in found] == list(EXTRAS)
