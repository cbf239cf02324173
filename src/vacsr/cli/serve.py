"""`vacsr serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vacsr.cli.options import Device
from vacsr.errors import DataError, MissingExtra

if TYPE_CHECKING:
    from vacsr.data import PhotoSet


def serve(
    run: Annotated[Path, typer.Argument(help="A run folder or a model folder.")],
    index: Annotated[
        str, typer.Option(metavar="INDEX", help="exact:FOLDER, milvus:FILE.db or milvus:http://HOST:PORT.")
    ],
    photos: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Photos to show with hits: the SPEC that the index was filled from."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default is reached from this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(envvar="VACSR_TOKEN", show_envvar=True, help="Asked for as Authorization: Bearer TOKEN."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A=B", help="Change a limit, e.g. --set max_k=50. Repeatable; see docs/cli.md."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Answer searches over HTTP until Ctrl-C: /search, /score, /photo, /info, /healthz, /metrics, and a page at /."""
    try:
        from vacsr.search.service.server import bind, is_loopback, own_names, run_server
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "uvicorn", "serve") from error
    from vacsr.recipes import parse, parse_overrides
    from vacsr.search import open_index
    from vacsr.search.engine import Searcher
    from vacsr.search.service import ServiceSettings, create_app

    given: dict[str, Any] = {"hosts": own_names(host), "token": token, **parse_overrides(overrides or [])}
    settings = parse(ServiceSettings, given)
    listening = bind(host, port)
    with listening:
        opened = open_index(index)
        try:
            searcher = Searcher.from_pretrained(run, opened, device=device)
            app = create_app(searcher, settings, photos=None if photos is None else _photos(photos))
            if settings.token is None and not is_loopback(host):
                typer.echo(f"warning: everybody who can reach {host} may search — set VACSR_TOKEN", err=True)
            name, number = (f"[{host}]" if ":" in host else host), listening.getsockname()[1]
            typer.echo(f"{len(opened):,} in the index; Ctrl-C stops", err=True)
            typer.echo(f"http://{name}:{number}")
            run_server(app, listening, settings)
        finally:
            opened.close()


def _photos(spec: str) -> PhotoSet:
    from vacsr.data import PhotoSet, load_pairs

    found = load_pairs(spec, split="all", on_error="skip")
    if not isinstance(found, PhotoSet):
        raise DataError(f"--photos {spec} holds cached features and no photos — give photos, e.g. folder:DIR")
    return found
