"""Search over HTTP: one process, one model, one index. Needs the extra ``serve``."""

from vacsr.errors import MissingExtra

try:
    from vacsr.serve.app import create_app
    from vacsr.serve.index_watch import find_photos
    from vacsr.serve.schemas import ServiceSettings
    from vacsr.serve.server import bind, default_hosts, is_loopback, run_server
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "fastapi", "serve") from error

__all__ = ["ServiceSettings", "bind", "create_app", "default_hosts", "find_photos", "is_loopback", "run_server"]
