"""A hub in memory on the loopback, for the real huggingface_hub: what it asks for to push and load models, and no more.

Large files come by git's LFS protocol. Xet, which the client would prefer, is a store of its own with a protocol of its
own; `HF_HUB_DISABLE_XET=1` turns it off.
"""

import base64
import hashlib
import http.server
import json
import re
import threading
from dataclasses import dataclass, field
from pathlib import PurePosixPath

LFS = {".safetensors", ".bin"}
RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
ROUTES = {
    ("POST", re.compile(r"/api/repos/create")): "create",
    ("POST", re.compile(r"/api/validate-yaml")): "validate",
    ("POST", re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)")): "preupload",
    ("POST", re.compile(r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch")): "batch",
    ("PUT", re.compile(r"/lfs/(?P<oid>[0-9a-f]{64})")): "put",
    ("POST", re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)")): "commit",
    ("POST", re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tag/(?P<revision>[^/]+)")): "tag",
    ("GET", re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)")): "describe",
    ("HEAD", RESOLVE): "resolve",
    ("GET", RESOLVE): "resolve",
}


@dataclass
class Repo:
    """Files of every commit, and where branches and tags stand."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, changes: dict[str, bytes]) -> str:
        files = {**self.commits.get(self.heads.get(branch, ""), {}), **changes}
        sha = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[sha], self.heads[branch] = files, sha
        return sha


class Hub:
    """`with Hub() as hub:`; `hub.environment` is for the processes that are to use it."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.unknown: list[str] = []
        self.status: int | None = None  # what every request is answered with, if set
        self.cut = 0  # bytes that are lacking at the end of every file
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        switches = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": "hf_of_the_test", "NO_PROXY": "127.0.0.1", **switches}

    def __enter__(self) -> "Hub":
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def answer(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append(f"{self.command} {path}")
        if hub.status is not None:
            return self.reply(hub.status, {"error": "not now"})
        for (method, pattern), name in ROUTES.items():
            if method == self.command and (found := pattern.fullmatch(path)):
                return getattr(self, name)(body, **found.groupdict())
        hub.unknown.append(f"{self.command} {self.path}")
        return self.reply(404, {"error": "unknown request"})

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def reply(self, status: int, content: object = None, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) - self.hub.cut] if headers else data)
            self.close_connection = bool(headers and self.hub.cut)

    def create(self, body: bytes) -> None:
        given = json.loads(body)
        name = f"{given['organization']}/{given['name']}"
        self.hub.repos.setdefault(name, Repo())
        self.reply(200, {"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def validate(self, body: bytes) -> None:
        self.reply(200, {"errors": [], "warnings": []})

    def describe(self, body: bytes, repo: str, revision: str) -> None:
        """Clients before 1.0 ask before they upload."""
        self.reply(200, {"id": repo, "xetEnabled": False})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        paths = [file["path"] for file in json.loads(body)["files"]]
        modes = {path: "lfs" if PurePosixPath(path).suffix in LFS else "regular" for path in paths}
        self.reply(
            200, {"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]}
        )

    def batch(self, body: bytes, repo: str) -> None:
        wanted = json.loads(body)["objects"]
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}", "header": {}}}} for one in wanted
        ]
        self.reply(200, {"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.lfs[oid] = body
        self.reply(200, {})

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        changes = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changes[value["path"]] = self.hub.lfs[value["oid"]]
        sha = self.hub.repos[repo].commit(revision, changes)
        self.reply(200, {"commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "pullRequestUrl": None})

    def tag(self, body: bytes, repo: str, revision: str) -> None:
        heads = self.hub.repos[repo].heads
        heads[json.loads(body)["tag"]] = heads[revision]
        self.reply(200, {})

    def resolve(self, body: bytes, repo: str, revision: str, path: str) -> None:
        if repo not in self.hub.repos:
            return self.reply(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        found = self.hub.repos[repo]
        sha = found.heads.get(revision, revision)
        if sha not in found.commits:
            missing = "EntryNotFound" if revision == "main" else "RevisionNotFound"
            return self.reply(404, {"error": missing}, {"X-Error-Code": missing})
        data = found.commits[sha].get(path)
        if data is None:
            return self.reply(404, {"error": path}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        tag = hashlib.sha256(data).hexdigest()
        return self.reply(200, data, {"X-Repo-Commit": sha, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"})

    def log_message(self, *_: object) -> None:
        """Not to the terminal."""
