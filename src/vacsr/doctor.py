"""`vacsr doctor`: check this machine and say how to fix what is wrong.

A check turns facts into a finding and looks at nothing itself, so it can be tested with the facts of any machine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

Status = Literal["ok", "warn", "fail"]
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

    status: Status
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
    bf16: tuple[str, ...] = ()  # where bfloat16 is fast: `CPU`, `GPU`
    error: str = ""  # why it could not be imported


def run_checks() -> list[Finding]:
    """Every check on this machine; a check that raises becomes a warning."""
    torch = torch_info()
    torchvision = installed("torchvision")
    nvidia = shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()
    # A container or batch system may allow fewer processors than the machine has; macOS cannot say.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    checks: dict[str, Callable[[], Finding | list[Finding]]] = {
        "python": lambda: Finding("ok", "python", platform.python_version()),
        "torch": lambda: check_torch(torch),
        "gpu": lambda: check_gpu(torch, nvidia=nvidia, visible=os.environ.get("CUDA_VISIBLE_DEVICES")),
        "torchvision": lambda: check_torchvision(torchvision, torchvision and import_error("torchvision")),
        "bf16": lambda: check_bf16(torch),
        "threads": lambda: check_threads(torch, cpus=cpus),
        "disk": lambda: check_disk(shutil.disk_usage(Path.cwd()).free),
        "packages": lambda: check_packages(requirements(), installed),
        "extras": lambda: check_extras(requirements(), installed),
    }
    findings: list[Finding] = []
    for subject, check in checks.items():
        if torch.error and subject in ("gpu", "bf16", "threads"):
            continue
        try:
            result = check()
        except Exception as error:
            result = Finding("warn", subject, f"could not be checked: {_one_line(error)}")
        findings += [result] if isinstance(result, Finding) else result
    return findings


def torch_info() -> TorchInfo:
    """Import torch and ask it."""
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        cpu: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # missing from older versions
        fast = {
            "CPU": any(cpu.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")),
            "GPU": count > 0 and torch.cuda.get_device_capability()[0] >= 8,
        }
        return TorchInfo(
            version=torch.__version__,
            cuda=torch.version.cuda,
            gpus=tuple(torch.cuda.get_device_name(index) for index in range(count)),
            threads=torch.get_num_threads(),
            bf16=tuple(name for name, is_fast in fast.items() if is_fast),
        )
    except Exception as error:  # a broken library raises OSError, a broken package anything
        return TorchInfo(error=_one_line(error))


def installed(name: str) -> str | None:
    """The version of a distribution, `unknown` for a package without metadata, None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(name.replace("-", "_"))
        return "unknown" if spec is not None and spec.origin else None


def import_error(name: str, *, timeout: float = 120.0) -> str | None:
    """Why a package cannot be imported, None if it can. Tried in a subprocess, which a broken package may crash."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", f"import {name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return f"the import took longer than {timeout:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the import ended with status {done.returncode}"


def requirements() -> list[Requirement]:
    """The requirements of this package, from its own metadata; none where it is not installed."""
    try:
        return [Requirement(line) for line in importlib.metadata.requires("vacsr") or []]
    except importlib.metadata.PackageNotFoundError:
        return []


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
    message = f"NVIDIA GPU or driver here, but torch (CUDA {torch.cuda}) does not see it — {remedy}"
    return Finding("warn", "gpu", message)


def check_torchvision(version: str | None, error: str | None) -> Finding:
    """vacsr does not need it, but a version that does not fit torch breaks other packages that import it."""
    if version is None:
        return Finding("ok", "torchvision", "not installed, not needed")
    if error is None:
        return Finding("ok", "torchvision", f"{version}, imports; not needed")
    harm = "transformers and torchmetrics break on it, vacsr does not need it — pip uninstall torchvision"
    return Finding("fail", "torchvision", f"{version} cannot be imported with this torch ({error}); {harm}")


def check_bf16(torch: TorchInfo) -> Finding:
    """For information: where bfloat16 pays."""
    if torch.bf16:
        return Finding("ok", "bf16", f"fast on the {' and the '.join(torch.bf16)}")
    return Finding("ok", "bf16", "no fast path known here; keep train.precision=fp32")


def check_threads(torch: TorchInfo, *, cpus: int) -> Finding:
    """Too many threads slow each other down, too few leave processors idle (half of them may be hyper-threads)."""
    shown = f"torch uses {torch.threads} of {cpus} processors"
    if torch.threads > cpus or torch.threads < cpus // 2:
        return Finding("warn", "threads", f"{shown} — export OMP_NUM_THREADS={cpus}")
    return Finding("ok", "threads", shown)


def check_disk(free: int) -> Finding:
    """Is there space for checkpoints and features in the current folder? ``free`` in bytes"""
    gb = free / 1e9
    if gb < 2:
        return Finding("warn", "disk", f"{gb:.1f} GB free in this folder — free some, or write elsewhere with --out")
    return Finding("ok", "disk", f"{gb:,.0f} GB free in this folder")


def check_packages(needed: Sequence[Requirement], version: GetVersion) -> list[Finding]:
    """The core requirements: one line for all that fit, one for each that does not."""
    core = [item for item in needed if item.name != "torch" and _applies(item, "")]
    if not core:
        return [Finding("warn", "packages", "vacsr has no metadata here — install it: pip install -e .")]
    versions = {item: version(item.name) for item in core}
    fitting = [f"{item.name} {has}" for item, has in versions.items() if _fits(item, has)]
    bad = [
        Finding("fail", item.name, f"{has or 'missing'} — pip install --upgrade '{_spec(item)}'")
        for item, has in versions.items()
        if not _fits(item, has)
    ]
    return [*([Finding("ok", "packages", ", ".join(fitting))] if fitting else []), *bad]


def check_extras(needed: Sequence[Requirement], version: GetVersion) -> list[Finding]:
    """The optional extras: which are installed, and how to install the others."""
    groups = {name: [r for r in needed if _applies(r, name) and not _applies(r, "")] for name in EXTRAS}
    return [_check_extra(name, items, version) for name, items in groups.items() if items]


def _check_extra(name: str, items: Sequence[Requirement], version: GetVersion) -> Finding:
    versions = {item: version(item.name) for item in items}
    if None in versions.values():
        return Finding("ok", name, f"not installed; for {EXTRAS[name]}: pip install 'vacsr[{name}]'")
    shown = ", ".join(f"{item.name} {has}" for item, has in versions.items())
    unfit = next((item for item, has in versions.items() if not _fits(item, has)), None)
    if unfit is None:
        return Finding("ok", name, shown)
    # These versions of transformers import torchvision to read photos.
    trap = unfit.name == "transformers" and Version("5.4") <= Version(versions[unfit] or "") < Version("5.18")
    why = "needs torchvision for its image processors" if trap else "is outside the range that vacsr supports"
    return Finding("warn", name, f"{shown} {why} — pip install --upgrade '{_spec(unfit)}'")


def _applies(item: Requirement, extra: str) -> bool:
    return item.marker is None or item.marker.evaluate({"extra": extra})


def _fits(item: Requirement, version: str | None) -> bool:
    """A package that does not tell its version is accepted."""
    return version == "unknown" or (version is not None and item.specifier.contains(Version(version).base_version))


def _spec(item: Requirement) -> str:
    """As pip takes it, the lower bound first."""
    return item.name + ",".join(sorted(map(str, item.specifier), reverse=True))


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
