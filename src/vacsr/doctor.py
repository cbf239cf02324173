"""`vacsr doctor`: check this machine and say how to fix what is wrong.

A check turns facts into a finding and looks at nothing itself, so it can be tested with the facts of any machine.
"""

from __future__ import annotations

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

GetVersion = Callable[[str], str | None]
"""The installed version of a distribution, None if it is missing."""

EXTRAS = {
    "clip": "CLIP and other towers",
    "eval": "ECCV Caption",
    "kernels": "Triton kernels",
    "milvus": "a Milvus index",
    "serve": "the web service",
    "tensorboard": "TensorBoard logs",
    "wandb": "Weights & Biases logs",
}
"""The optional extras and what they are for."""


class Finding(NamedTuple):
    """The result of one check."""

    status: Literal["ok", "warn", "fail"]
    subject: str
    message: str

    def line(self) -> str:
        """One line of the report."""
        return f"{self.status:<5} {self.subject:<12} {self.message}"


class TorchInfo(NamedTuple):
    """What torch reports about itself."""

    version: str = ""
    cuda: str | None = None  # the CUDA version it was built for; None for a CPU-only build
    gpus: tuple[str, ...] = ()
    threads: int = 1
    error: str = ""  # why it could not be imported


def run_checks() -> list[Finding]:
    """Every check on this machine."""
    torch, torchvision = torch_info(), installed("torchvision")
    findings = [Finding("ok", "python", platform.python_version()), check_torch(torch)]
    if not torch.error:
        nvidia = shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()
        # A container or batch system may allow fewer processors than the machine has; macOS cannot say.
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        findings += [
            check_gpu(torch, nvidia=nvidia, visible=os.environ.get("CUDA_VISIBLE_DEVICES")),
            check_threads(torch, cpus=cpus),
        ]
    findings.append(check_torchvision(torchvision, torchvision and import_error("torchvision")))
    try:
        needed = [Requirement(line) for line in importlib.metadata.requires("vacsr") or []]
    except importlib.metadata.PackageNotFoundError:
        needed = []
    disk = check_disk(shutil.disk_usage(".").free)
    return [*findings, disk, *check_packages(needed, installed), *check_extras(needed, installed)]


def torch_info() -> TorchInfo:
    """Import torch and ask it."""
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = tuple(torch.cuda.get_device_name(index) for index in range(count))
        return TorchInfo(torch.__version__, torch.version.cuda, gpus, torch.get_num_threads())
    except Exception as error:  # a broken library raises OSError, a broken package anything
        return TorchInfo(error=" ".join(f"{type(error).__name__}: {error}".split()))


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


def check_torch(torch: TorchInfo) -> Finding:
    """Can it be imported, is it new enough, and for which hardware was it built?"""
    if torch.error:
        return Finding("fail", "torch", f"does not work ({torch.error}) — pip install --force-reinstall torch")
    if Version(torch.version) < Version("2.6"):
        return Finding("fail", "torch", f"{torch.version}; vacsr needs 2.6 — pip install --upgrade torch")
    build = f"CUDA {torch.cuda}" if torch.cuda else "CPU only"
    return Finding("ok", "torch", f"{torch.version.partition('+')[0]}, {build}")


def check_gpu(torch: TorchInfo, *, nvidia: bool, visible: str | None = None) -> Finding:
    """Does torch see the machine's GPU? ``visible`` is CUDA_VISIBLE_DEVICES."""
    if torch.gpus:
        return Finding("ok", "gpu", ", ".join(torch.gpus))
    if not nvidia:
        hint = "; a CPU-only torch would do and is several GB smaller" if torch.cuda else ""
        return Finding("ok", "gpu", f"none found, the CPU is used{hint}")
    if not torch.cuda:
        where = "choose the command at https://pytorch.org/get-started/locally/ and add --force-reinstall"
        return Finding("warn", "gpu", f"NVIDIA GPU here, but torch is a CPU-only build — install a CUDA build: {where}")
    if visible is not None and visible.strip() in ("", "-1"):
        return Finding("warn", "gpu", f"hidden by CUDA_VISIBLE_DEVICES='{visible}' — unset it to use the GPU")
    remedy = "run nvidia-smi, then update the driver or install a torch built for an older CUDA"
    return Finding("warn", "gpu", f"NVIDIA GPU here, but torch (CUDA {torch.cuda}) does not see it — {remedy}")


def check_torchvision(version: str | None, error: str | None) -> Finding:
    """vacsr does not need it, but a version that does not fit torch breaks other packages that import it."""
    if version is None or error is None:
        state = "not installed" if version is None else f"{version}, imports"
        return Finding("ok", "torchvision", f"{state}; not needed")
    harm = "transformers and torchmetrics break on it, vacsr does not need it — pip uninstall torchvision"
    return Finding("fail", "torchvision", f"{version} cannot be imported with this torch ({error}); {harm}")


def check_threads(torch: TorchInfo, *, cpus: int) -> Finding:
    """Too many threads slow each other down, too few leave processors idle (half of them may be hyper-threads)."""
    shown = f"torch uses {torch.threads} of {cpus} processors"
    if torch.threads > cpus or torch.threads < cpus // 2:
        return Finding("warn", "threads", f"{shown} — export OMP_NUM_THREADS={cpus}")
    return Finding("ok", "threads", shown)


def check_disk(free: int) -> Finding:
    """Is there space for checkpoints and features in the current folder? ``free`` in bytes"""
    shown = f"{free / 1e9:,.1f} GB free in this folder"
    if free < 2e9:
        return Finding("warn", "disk", f"{shown} — free some, or write elsewhere with --out")
    return Finding("ok", "disk", shown)


def check_packages(needed: Sequence[Requirement], version: GetVersion) -> list[Finding]:
    """The core requirements: one line for all that fit, one for each that does not."""
    versions = {item: version(item.name) for item in needed if item.name != "torch" and _applies(item, "")}
    if not versions:
        return [Finding("warn", "packages", "vacsr has no metadata here — install it: pip install -e .")]
    fitting = ", ".join(f"{item.name} {has}" for item, has in versions.items() if _fits(item, has))
    bad = [
        Finding("fail", item.name, f"{has or 'missing'} — {_upgrade(item)}")
        for item, has in versions.items()
        if not _fits(item, has)
    ]
    return [Finding("ok", "packages", fitting), *bad] if fitting else bad


def check_extras(needed: Sequence[Requirement], version: GetVersion) -> list[Finding]:
    """The optional extras: which are installed, and how to install the others."""
    findings = []
    for name, purpose in EXTRAS.items():
        items = [item for item in needed if _applies(item, name) and not _applies(item, "")]
        versions = {item: version(item.name) for item in items}
        if None in versions.values():
            findings.append(Finding("ok", name, f"not installed; for {purpose}: pip install 'vacsr[{name}]'"))
        elif items:
            shown = ", ".join(f"{item.name} {has}" for item, has in versions.items())
            unfit = [item for item, has in versions.items() if not _fits(item, has)]
            remedy = f" is outside the range that vacsr supports — {_upgrade(unfit[0])}" if unfit else ""
            findings.append(Finding("warn" if unfit else "ok", name, shown + remedy))
    return findings


def _applies(item: Requirement, extra: str) -> bool:
    return item.marker is None or item.marker.evaluate({"extra": extra})


def _fits(item: Requirement, version: str | None) -> bool:
    return version is not None and item.specifier.contains(Version(version).base_version)


def _upgrade(item: Requirement) -> str:
    """The command, the lower bound first."""
    return f"pip install --upgrade '{item.name}{','.join(sorted(map(str, item.specifier), reverse=True))}'"
