"""`vacsr doctor`: check this machine and say how to fix what is wrong.

A check turns facts into a finding and looks at nothing itself, so it can be tested with the facts of any machine.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

EXTRAS = {
    "clip": "CLIP and other towers",
    "datasets": "data sets of the Hub",
    "eval": "ECCV Caption",
    "faiss": "a FAISS index",
    "kernels": "Triton kernels",
    "lora": "LoRA towers",
    "milvus": "a Milvus index",
    "mteb": "the benchmark MIEB",
    "onnx": "export to ONNX",
    "parquet": "data frames and Parquet files",
    "pgvector": "an index in PostgreSQL",
    "qdrant": "a Qdrant index",
    "ray": "shards on several processes or machines",
    "sentence-transformers": "models in sentence-transformers",
    "serve": "the web service",
    "tensorboard": "TensorBoard logs",
    "wandb": "Weights & Biases logs",
}
"""The optional extras and what they are for."""


class Finding(NamedTuple):
    status: Literal["ok", "warn", "fail"]
    subject: str
    message: str

    def line(self) -> str:
        return f"{self.status:<5} {self.subject:<21} {self.message}"


def run_checks() -> list[Finding]:
    findings = [Finding("ok", "python", platform.python_version())]
    try:
        import torch

        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # a broken library raises OSError, a broken package anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        findings.append(Finding("fail", "torch", f"does not work ({reason}) — pip install --force-reinstall torch"))
    else:
        cuda = torch.version.cuda
        nvidia = shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()
        # A container or batch system may allow fewer processors than the machine has; macOS cannot say.
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        findings += [
            check_torch(torch.__version__, cuda),
            check_gpu(gpus, cuda=cuda, nvidia=nvidia, visible=os.environ.get("CUDA_VISIBLE_DEVICES")),
            check_threads(torch.get_num_threads(), cpus=cpus),
        ]
    torchvision = installed("torchvision")
    findings.append(check_torchvision(torchvision, torchvision and import_error("torchvision")))
    try:
        needed = [Requirement(line) for line in importlib.metadata.requires("vacsr") or []]
    except importlib.metadata.PackageNotFoundError:
        needed = []
    return [*findings, *check_packages(needed, installed)]


def installed(name: str) -> str | None:
    """The version of a distribution, None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_error(name: str) -> str | None:
    """Why a package cannot be imported, None if it can. Tried in a subprocess, which a broken package may crash."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", f"import {name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 0:
        return None
    return (done.stderr.strip() or f"the import ended with status {done.returncode}").splitlines()[-1]


def check_torch(version: str, cuda: str | None) -> Finding:
    """Is it new enough, and for which hardware was it built? ``cuda``: its CUDA version; None for a CPU-only build."""
    if Version(version) < Version("2.6"):
        return Finding("fail", "torch", f"{version}; vacsr needs 2.6 — pip install --upgrade torch")
    return Finding("ok", "torch", f"{version.partition('+')[0]}, {f'CUDA {cuda}' if cuda else 'CPU only'}")


def check_gpu(gpus: Sequence[str], *, cuda: str | None, nvidia: bool, visible: str | None = None) -> Finding:
    """Does torch see the machine's GPU? ``visible`` is CUDA_VISIBLE_DEVICES."""
    if gpus:
        return Finding("ok", "gpu", ", ".join(gpus))
    if not nvidia:
        hint = "; a CPU-only torch would do and is several GB smaller" if cuda else ""
        return Finding("ok", "gpu", f"none found, the CPU is used{hint}")
    if not cuda:
        where = "choose the command at https://pytorch.org/get-started/locally/ and add --force-reinstall"
        return Finding("warn", "gpu", f"NVIDIA GPU here, but torch is a CPU-only build — install a CUDA build: {where}")
    if visible is not None and visible.strip() in ("", "-1"):
        return Finding("warn", "gpu", f"hidden by CUDA_VISIBLE_DEVICES='{visible}' — unset it to use the GPU")
    remedy = "run nvidia-smi, then update the driver or install a torch built for an older CUDA"
    return Finding("warn", "gpu", f"NVIDIA GPU here, but torch (CUDA {cuda}) does not see it — {remedy}")


def check_threads(threads: int, *, cpus: int) -> Finding:
    """Too many threads slow each other down, too few leave processors idle (half of them may be hyper-threads)."""
    shown = f"torch uses {threads} of {cpus} processors"
    if threads > cpus or threads < cpus // 2:
        return Finding("warn", "threads", f"{shown} — export OMP_NUM_THREADS={cpus}")
    return Finding("ok", "threads", shown)


def check_torchvision(version: str | None, error: str | None) -> Finding:
    """vacsr does not need it, but a version that does not fit torch breaks other packages that import it."""
    if version is None or error is None:
        state = "not installed" if version is None else f"{version}, imports"
        return Finding("ok", "torchvision", f"{state}; not needed")
    harm = "transformers and torchmetrics break on it, vacsr does not need it — pip uninstall torchvision"
    return Finding("fail", "torchvision", f"{version} cannot be imported with this torch ({error}); {harm}")


def check_packages(needed: Sequence[Requirement], version: Callable[[str], str | None]) -> list[Finding]:
    """One line for the core requirements, one per extra, and one for each package outside the range that vacsr needs.

    ``version`` gives the installed version of a distribution, None if it is missing.
    """
    if not needed:
        return [Finding("warn", "packages", "vacsr has no metadata here — install it: pip install -e .")]
    findings: list[Finding] = []
    for extra in ("", *EXTRAS):
        items = [item for item in needed if _applies(item, extra) and not (extra and _applies(item, ""))]
        versions = {item: version(item.name) for item in items if item.name != "torch"}
        if extra and None in versions.values():
            findings.append(Finding("ok", extra, f"not installed; for {EXTRAS[extra]}: pip install 'vacsr[{extra}]'"))
            continue
        fitting = []
        for item, has in versions.items():
            if has is not None and item.specifier.contains(Version(has).base_version):
                fitting.append(f"{item.name} {has}")
                continue
            limits = ",".join(sorted(map(str, item.specifier), reverse=True))  # the lower bound first
            remedy = f"{has or 'missing'}; vacsr needs {limits} — pip install --upgrade '{item.name}{limits}'"
            findings.append(Finding("warn" if extra else "fail", item.name, remedy))
        if fitting:
            findings.append(Finding("ok", extra or "packages", ", ".join(fitting)))
    return findings


def _applies(item: Requirement, extra: str) -> bool:
    return item.marker is None or item.marker.evaluate({"extra": extra})
