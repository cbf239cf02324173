"""`vacsr doctor`."""

from __future__ import annotations

import typer


def doctor() -> None:
    """Check this machine: Python, torch, GPU, optional extras and known traps."""
    from vacsr.doctor import run_checks

    findings = run_checks()
    for finding in findings:
        typer.echo(finding.line())
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(3)
