"""A small Hub on loopback: the HTTP requests by which huggingface_hub makes, commits to and reads a repository."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Tree = dict[str, bytes]
PUSH = "hf_loopback"
"""The token that may write."""


class FakeHub:
    """Repositories, each with the files of its commits and with branches. ``requests`` is a log of what was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Tree]] = {}
        self.branches: dict[str, dict[str, str]] = {}
        self.objects: dict[str, bytes] = {}
        self.large: dict[str, set[str]] = {}
        self.requests: list[str] = []
        self.url = ""

    def commit_of(self, repo: str, revision: str) -> str | None:
        commit = self.branches.get(repo, {}).get(revision, revision)
        return commit if commit in self.repos.get(repo, {}) else None

    def commit(self, repo: str, branch: str, lines: list[dict[str, Any]]) -> str:
        tree = dict(self.repos[repo][self.branches[repo][branch]])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                tree[value["path"]] = self.objects[value["oid"]]
                self.large[repo].add(value["path"])
        commit = hashlib.sha1(b"".join(name.encode() + data for name, data in sorted(tree.items()))).hexdigest()
        self.repos[repo][commit] = tree
        self.branches[repo][branch] = commit
        return commit

    def add(self, repo: str, folder: Path) -> None:
        """A repository with the files of a folder, in one commit."""
        tree = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        commit = hashlib.sha1(repo.encode()).hexdigest()
        self.repos[repo], self.branches[repo], self.large[repo] = {commit: tree}, {"main": commit}, set()

    def replace(self, repo: str, path: str, data: bytes) -> None:
        """Damage a file of the newest commit, as a disk may do."""
        self.repos[repo][self.branches[repo]["main"]][path] = data


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes | dict[str, Any] | list[Any] = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content_length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, code: str) -> None:
        self.answer(404, {"error": "not here"}, X_Error_Code=code, X_Error_Message="not here")

    def handle_any(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self.rfile.read(int(self.headers.get("content-length", 0)))
        self.hub.requests.append(f"{self.command} {path}")
        for pattern, action in _ROUTES.items():
            match = re.fullmatch(pattern, f"{self.command} {path}")
            if match is not None:
                return action(self, body, *match.groups())
        return self.missing("EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def may_write(self) -> bool:
        allowed = self.headers.get("authorization") == f"Bearer {PUSH}"
        if not allowed:
            self.answer(401, {"error": "log in"})
        return allowed

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo = f"{asked['organization']}/{asked['name']}"
        if self.may_write():
            new = repo not in self.hub.repos
            if new:
                empty = hashlib.sha1(repo.encode()).hexdigest()
                self.hub.repos[repo], self.hub.branches[repo] = {empty: {}}, {"main": empty}
                self.hub.large[repo] = set()
            self.answer(200 if new else 409, {"url": f"{self.hub.url}/{repo}", "id": repo})

    def branch(self, _: bytes, repo: str, name: str) -> None:
        self.hub.branches[repo].setdefault(name, self.hub.branches[repo]["main"])
        self.answer(200, {})

    def card(self, _: bytes) -> None:
        self.answer(200, {"warnings": [], "errors": []})

    def preupload(self, body: bytes, *_: str) -> None:
        files = [file["path"] for file in json.loads(body)["files"]]
        modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
        self.answer(200, {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})

    def batch(self, body: bytes, _: str) -> None:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.hub.url}/objects/{one['oid']}", "header": {}}}}
            for one in json.loads(body)["objects"]
        ]
        self.answer(200, {"objects": objects, "transfer": "basic"})

    def store(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self.answer(200)

    def make_commit(self, body: bytes, repo: str, branch: str) -> None:
        if self.may_write():
            commit = self.hub.commit(repo, branch, [json.loads(line) for line in body.splitlines()])
            self.answer(200, {"commitUrl": f"{self.hub.url}/{repo}/commit/{commit}", "commitOid": commit})

    def info(self, _: bytes, repo: str, revision: str | None = None) -> None:
        commit = self.hub.commit_of(repo, revision or "main")
        if repo not in self.hub.repos:
            self.missing("RepoNotFound")
        elif commit is None:
            self.missing("RevisionNotFound")
        else:
            self.answer(200, {"id": repo, "sha": commit, "siblings": []})

    def tree(self, _: bytes, repo: str, revision: str) -> None:
        commit = self.hub.commit_of(repo, revision)
        assert commit is not None
        rows = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            | ({"lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}} if
               name in self.hub.large[repo] else {})
            for name, data in self.hub.repos[repo][commit].items()
        ]  # fmt: skip
        self.answer(200, rows)

    def resolve(self, _: bytes, repo: str, revision: str, name: str) -> None:
        commit = self.hub.commit_of(repo, revision)
        if commit is None:
            return self.missing("RevisionNotFound" if repo in self.hub.repos else "RepoNotFound")
        data = self.hub.repos[repo][commit].get(name)
        if data is None:
            return self.missing("EntryNotFound")
        return self.answer(200, data, ETag=f'"{hashlib.sha256(data).hexdigest()}"', X_Repo_Commit=commit)


_ROUTES: dict[str, Any] = {
    "POST /api/repos/create": _Handler.create,
    "POST /api/validate-yaml": _Handler.card,
    r"POST /api/models/([^/]+/[^/]+)/branch/(.+)": _Handler.branch,
    r"POST /api/models/([^/]+/[^/]+)/preupload/(.+)": _Handler.preupload,
    r"POST /api/models/([^/]+/[^/]+)/commit/(.+)": _Handler.make_commit,
    r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch": _Handler.batch,
    r"PUT /objects/(\w+)": _Handler.store,
    r"GET /api/models/([^/]+/[^/]+)/tree/([^/]+)": _Handler.tree,
    r"GET /api/models/([^/]+/[^/]+)/revision/(.+)": _Handler.info,
    r"GET /api/models/([^/]+/[^/]+)": _Handler.info,
    r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)": _Handler.resolve,
}


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    """On a free port of loopback, until the end of the block."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
