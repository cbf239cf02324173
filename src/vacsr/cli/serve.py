"""`vacsr serve`."""

import os
from contextlib import closing
from functools import partial
from typing import Annotated

import typer

from vacsr.cli.options import CalibrationFile, Device, Index, RunFolder, note_untrained
from vacsr.errors import UsageError


def serve(
    run: RunFolder,
    index: Index,
    photos: Annotated[
        list[str] | None, typer.Option(metavar="DIR|SPEC", help="Photos to show; default: those that were indexed.")
    ] = None,
    no_photos: Annotated[bool, typer.Option("--no-photos", help="Show ids, captions and scores, not photos.")] = False,
    host: Annotated[str, typer.Option(help="Address; by default only this machine can connect.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    token: Annotated[str | None, typer.Option(envvar="VACSR_TOKEN", help="Require this bearer token.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A=B", help="Change a limit, e.g. --set max_k=50. Repeatable.")
    ] = None,
    calibration: CalibrationFile = None,
    device: Device = "auto",
) -> None:
    """Serve a search page and its HTTP API until Ctrl-C.

    Paths: /search, /score, /photo, /info, /healthz, /metrics, /openapi.json.
    """
    from vacsr.config.io import parse, parse_overrides
    from vacsr.search.index import open_index
    from vacsr.search.searcher import Searcher
    from vacsr.serve import ServiceSettings, bind, create_app, default_hosts, find_photos, is_loopback, run_server

    if token == "" or (token is None and os.environ.get("VACSR_TOKEN") == ""):  # whoever sets it wants a token
        where = "VACSR_TOKEN is set but empty" if token is None else "--token is empty"
        raise UsageError(f"{where}, so no token would be required — give a token, or: unset VACSR_TOKEN")
    if photos and no_photos:
        raise UsageError("--photos and --no-photos are both given — leave one out")
    fields = {"token": token, **parse_overrides(overrides or [])}
    settings = parse(ServiceSettings, fields)
    if "hosts" not in fields or settings.hosts is not None:
        settings = settings.model_copy(update={"hosts": default_hosts(host, more=settings.hosts)})
    with bind(host, port) as listening, closing(open_index(index)) as opened:
        searcher = Searcher.from_pretrained(run, opened, calibration=calibration, device=device)
        if searcher.fitted is None:
            note_untrained(searcher.scorer)
        find = partial(find_photos, searcher, photos or (), report=partial(typer.echo, err=True))
        app = create_app(searcher, settings, photos=None if no_photos else find)
        if settings.token is None and not is_loopback(host):
            may = "search" if app.state.service.watch.photos is None else "search and see the photos"
            typer.echo(f"warning: anybody who can reach {host} may {may} — set VACSR_TOKEN", err=True)
        access = "no token required" if settings.token is None else "token required"
        typer.echo(f"{len(opened):,} in the index; {access}; Ctrl-C stops", err=True)
        typer.echo(f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}")
        run_server(app, listening, settings)
