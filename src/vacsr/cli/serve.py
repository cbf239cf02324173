"""`vacsr serve`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vacsr.cli.options import Device
from vacsr.errors import DataError, MissingExtra, UsageError, VacsrError

if TYPE_CHECKING:
    from vacsr.data import PhotoSet
    from vacsr.search.engine import Searcher


def serve(
    run: Annotated[Path, typer.Argument(help="A run folder or a model folder.")],
    index: Annotated[
        str, typer.Option(metavar="INDEX", help="exact:FOLDER, milvus:FILE.db or milvus:http://HOST:PORT.")
    ],
    photos: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR|SPEC",
            help="Photos to show with hits, e.g. folder:DIR. Repeatable; default: what the index was "
            "filled from, where that can be read.",
        ),
    ] = None,
    no_photos: Annotated[bool, typer.Option("--no-photos", help="Show ids, captions and figures, no photos.")] = False,
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
    """Answer searches over HTTP until Ctrl-C, with a page at the address that is printed.

    E.g. vacsr serve runs/mine --index exact:photos-index

    Paths: /search, /score, /photo, /info, /healthz, /metrics, /openapi.json.
    """
    try:
        from vacsr.search.service.server import bind, is_loopback, own_names, run_server
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "uvicorn", "serve") from error
    from vacsr.config.io import parse, parse_overrides
    from vacsr.search import open_index
    from vacsr.search.engine import Searcher
    from vacsr.search.service import ServiceSettings, create_app

    given: dict[str, Any] = {"token": _token(token), **parse_overrides(overrides or [])}
    settings = parse(ServiceSettings, given)
    if "hosts" not in given or settings.hosts is not None:
        settings = settings.model_copy(update={"hosts": own_names(host, more=settings.hosts)})
    if photos and no_photos:
        raise UsageError("--photos and --no-photos are both given — leave one out")
    listening = bind(host, port)
    with listening:
        opened = open_index(index)
        try:
            searcher = Searcher.from_pretrained(run, opened, device=device)
            find = partial(_named_photos, photos) if photos else partial(_own_photos, searcher)
            shown = [] if no_photos else find()
            app = create_app(searcher, settings, photos=shown, find_photos=None if no_photos else find)
            if settings.token is None and not is_loopback(host):
                may = "search and see the photos" if shown else "search"
                typer.echo(f"warning: everybody who can reach {host} may {may} — set VACSR_TOKEN", err=True)
            name, number = (f"[{host}]" if ":" in host else host), listening.getsockname()[1]
            asked = "no token is asked for" if settings.token is None else "a token is asked for"
            typer.echo(f"{len(opened):,} in the index; {asked}; Ctrl-C stops", err=True)
            typer.echo(f"http://{name}:{number}")
            run_server(app, listening, settings)
        finally:
            opened.close()


def _token(given: str | None) -> str | None:
    """An empty variable is a mistake: whoever sets it wants a token, and would be served without."""
    if given == "" or (given is None and os.environ.get("VACSR_TOKEN") == ""):
        where = "VACSR_TOKEN is set and empty" if given is None else "--token is empty"
        raise UsageError(f"{where}, so nothing would be asked for — give a token, or: unset VACSR_TOKEN")
    return given


def _named_photos(specs: list[str]) -> list[PhotoSet]:
    """Those that were asked for: what cannot be read is an error."""
    found = [_photos(spec) for spec in specs]
    typer.echo(f"hits show photos of {', '.join(specs)}", err=True)
    return found


def _own_photos(searcher: Searcher) -> list[PhotoSet]:
    """Those that the index was filled from, as far as they are still there."""
    if searcher.direction != "t2i":
        return []
    found: list[PhotoSet] = []
    for spec in searcher.index.sources:
        try:
            found.append(_photos(spec))
        except (VacsrError, OSError) as error:
            typer.echo(f"warning: hits show no photos of {spec}: {error}", err=True)
        else:
            typer.echo(f"hits show photos of {spec}, from which the index was filled; --no-photos hides them", err=True)
    if not searcher.index.sources:
        typer.echo("hits show no photos: the index does not know where they lie — name them: --photos SPEC", err=True)
    return found


def _photos(spec: str) -> PhotoSet:
    from vacsr.data import PhotoSet, load_images

    found = load_images(spec, split="all", on_error="skip")
    if not isinstance(found, PhotoSet):
        raise DataError(f"{spec} holds cached features and no photos — give photos: --photos DIR")
    return found
