"""What may be wrong with this machine, and what to do about it: `vacsr doctor`.

A probe (:mod:`vacsr.probes`) looks at the machine and returns facts; a check turns facts into a finding and looks at
nothing. A check can therefore be tried with the facts of any machine.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from vacsr.probes import (
    Requirement,
    TorchFacts,
    import_error,
    installed,
    nvidia_present,
    one_line,
    release,
    requirements,
    torch_facts,
    usable_cpus,
)

Status = Literal["ok", "warn", "fail"]
Version = Callable[[str], str | None]
"""The installed version of a distribution, None where it is absent."""

_PYTHON, _TORCH = (3, 11), (2, 6)
_NEEDS_TORCHVISION = (5, 4), (5, 18)  # these transformers, first to last (exclusive), import it for image processors
_DISK_GB = 2.0
_PURPOSE = {
    "clip": "CLIP and other towers",
    "eval": "ECCV Caption",
    "kernels": "Triton kernels",
    "milvus": "a Milvus index",
    "serve": "the web service",
    "tensorboard": "TensorBoard logs",
    "wandb": "Weights & Biases logs",
    "onnx": "ONNX export",
}


class Finding(NamedTuple):
    """What one check says."""

    status: Status
    subject: str
    message: str

    def line(self) -> str:
        """For a person.

        >>> Finding("ok", "torch", "2.13.0, CPU only").line()
        'ok    torch        2.13.0, CPU only'
        """
        return f"{self.status:<5} {self.subject:<12} {self.message}"


def examine() -> list[Finding]:
    """Every check on this machine; a check that breaks is a finding too."""
    torch, needed, visible = torch_facts(), requirements(), os.environ.get("CUDA_VISIBLE_DEVICES")
    checks: dict[str, Callable[[], Finding | list[Finding]]] = {
        "python": lambda: check_python(tuple(sys.version_info[:3])),
        "torch": lambda: check_torch(torch),
        "gpu": lambda: [] if torch.error else check_gpu(torch, nvidia=nvidia_present(), visible=visible),
        "torchvision": lambda: check_torchvision(installed("torchvision"), import_error),
        "bf16": lambda: [] if torch.error else check_bf16(torch),
        "threads": lambda: [] if torch.error else check_threads(torch, cpus=usable_cpus()),
        "disk": lambda: check_disk(shutil.disk_usage(Path.cwd()).free),
        "packages": lambda: check_packages(needed, installed),
        "extras": lambda: check_extras(needed, installed),
    }
    return [finding for subject, check in checks.items() for finding in _guarded(subject, check)]


def _guarded(subject: str, check: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    try:
        found = check()
    except Exception as error:
        return [Finding("warn", subject, f"could not be checked: {one_line(error)}")]
    return [found] if isinstance(found, Finding) else found


def check_python(version: tuple[int, ...]) -> Finding:
    """Is it new enough?"""
    shown = ".".join(map(str, version))
    if version < _PYTHON:
        return Finding("fail", "python", f"{shown}; vacsr needs 3.11 or newer — make a new environment with one")
    return Finding("ok", "python", shown)


def check_torch(torch: TorchFacts) -> Finding:
    """Does it import, is it new enough, and for which hardware was it built?"""
    if torch.error:
        return Finding("fail", "torch", f"does not work ({torch.error}) — pip install --force-reinstall torch")
    if release(torch.version) < _TORCH:
        return Finding("fail", "torch", f"{torch.version}; vacsr needs 2.6 or newer — pip install --upgrade torch")
    build = f"CUDA {torch.cuda}" if torch.cuda else "CPU only"
    return Finding("ok", "torch", f"{torch.version.partition('+')[0]}, {build}")


def check_gpu(torch: TorchFacts, *, nvidia: bool, visible: str | None = None) -> Finding:
    """Do the machine's GPU and torch know of each other? ``visible`` is CUDA_VISIBLE_DEVICES."""
    if torch.gpus:
        return Finding("ok", "gpu", ", ".join(torch.gpus))
    if not nvidia:
        extra = "; a CPU-only torch would do and is several GB smaller" if torch.cuda else ""
        return Finding("ok", "gpu", f"none found, the CPU is used{extra}")
    if not torch.cuda:
        where = "choose the command at https://pytorch.org/get-started/locally/ and add --force-reinstall"
        return Finding("warn", "gpu", f"NVIDIA GPU here, but torch is a CPU-only build — install a CUDA build: {where}")
    if visible is not None and visible.strip() in ("", "-1"):
        return Finding("warn", "gpu", f"hidden by CUDA_VISIBLE_DEVICES='{visible}' — unset it to use the GPU")
    why = f"NVIDIA GPU or driver here, but torch (CUDA {torch.cuda}) does not see it"
    what = "run nvidia-smi, then update the driver or install a torch built for an older CUDA"
    return Finding("warn", "gpu", f"{why} — {what}")


def check_torchvision(version: str | None, why_not: Callable[[str], str | None]) -> Finding:
    """Not needed, but harmful where it does not fit torch: other packages import it wherever they find it."""
    subject = "torchvision"
    if version is None:
        return Finding("ok", subject, "absent, not needed")
    error = why_not(subject)
    if error is None:
        return Finding("ok", subject, f"{version}, imports; not needed")
    harm = "transformers and torchmetrics break on it, vacsr does not need it"
    trap = f"{version} cannot be imported beside this torch ({error}); {harm}"
    return Finding("fail", subject, f"{trap} — pip uninstall torchvision")


def check_bf16(torch: TorchFacts) -> Finding:
    """For information: where half-width arithmetic pays."""
    if torch.bf16:
        return Finding("ok", "bf16", f"fast on the {' and the '.join(torch.bf16)}")
    return Finding("ok", "bf16", "no fast path known here; keep train.precision=fp32")


def check_threads(torch: TorchFacts, *, cpus: int) -> Finding:
    """Too many threads slow each other down, too few leave processors idle (half of them may be hyper-threads)."""
    shown = f"torch uses {torch.threads} of {cpus} processors"
    if torch.threads > cpus or torch.threads < cpus // 2:
        return Finding("warn", "threads", f"{shown} — export OMP_NUM_THREADS={cpus}")
    return Finding("ok", "threads", shown)


def check_disk(free: int) -> Finding:
    """Room for checkpoints and features in the current folder. ``free`` in bytes"""
    gb = free / 1e9
    if gb < _DISK_GB:
        return Finding("warn", "disk", f"{gb:.1f} GB free in this folder — free some, or write elsewhere with --out")
    return Finding("ok", "disk", f"{gb:,.0f} GB free in this folder")


def check_packages(needed: Sequence[Requirement], version: Version) -> list[Finding]:
    """The core requirements: one line for all that fit, one for each that does not."""
    core = [item for item in needed if not item.extra and item.name != "torch"]
    if not core:
        return [Finding("warn", "packages", "vacsr has no metadata here — install it: pip install -e .")]
    found = {item: version(item.name) for item in core}
    good = [f"{item.name} {has}" for item, has in found.items() if has and item.fits(has)]
    bad = [
        Finding("fail", item.name, f"{has or 'absent'} — pip install --upgrade '{item.spec()}'")
        for item, has in found.items()
        if not (has and item.fits(has))
    ]
    return [*([Finding("ok", "packages", ", ".join(good))] if good else []), *bad]


def check_extras(needed: Sequence[Requirement], version: Version) -> list[Finding]:
    """The optional extras: which are here, and how to get the others."""
    groups: dict[str, list[Requirement]] = {}
    for item in needed:
        if item.extra in _PURPOSE:
            groups.setdefault(item.extra, []).append(item)
    return [check_extra(name, groups[name], version) for name in _PURPOSE if name in groups]


def check_extra(name: str, items: Sequence[Requirement], version: Version) -> Finding:
    """One extra; absent is no fault."""
    found = {item: has for item in items if (has := version(item.name))}
    if len(found) < len(items):
        return Finding("ok", name, f"not installed; for {_PURPOSE[name]}: pip install 'vacsr[{name}]'")
    shown = ", ".join(f"{item.name} {has}" for item, has in found.items())
    unfit = {item: has for item, has in found.items() if not item.fits(has)}
    if not unfit:
        return Finding("ok", name, shown)
    first, last = _NEEDS_TORCHVISION
    trap = any(item.name == "transformers" and first <= release(has) < last for item, has in unfit.items())
    why = "needs torchvision for its image processors" if trap else "is outside the range that vacsr is made for"
    return Finding("warn", name, f"{shown} {why} — pip install --upgrade '{next(iter(unfit)).spec()}'")
