"""A hub in memory on the loopback, for the real huggingface_hub: what it asks for to load models, and no more."""

import hashlib
import http.server
import json
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Repo:
    """Files of every commit, and where branches and tags stand."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)


class Hub:
    """`with Hub() as hub:`; `hub.environment` is for the processes that are to use it."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.unknown: list[str] = []
        self.cut = 0  # bytes that are lacking at the end of the weights
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        switches = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": "hf_of_the_test", "NO_PROXY": "127.0.0.1", **switches}

    def upload(self, folder: Path, name: str, tag: str = "main") -> None:
        """All files of a folder, as one commit."""
        repo, files = self.repos.setdefault(name, Repo()), {path.name: path.read_bytes() for path in folder.iterdir()}
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        repo.commits[sha] = files
        repo.heads |= {"main": sha, tag: sha}

    def __enter__(self) -> "Hub":
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
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
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        if match := RESOLVE.fullmatch(path):
            self.resolve(**match.groupdict())
        else:
            self.hub.unknown.append(f"{self.command} {self.path}")
            self.reply(404, {"error": "unknown request"})

    do_GET = do_HEAD = answer

    def reply(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.close_connection = self.hub.cut > 0 and self.path.endswith(".safetensors")
            self.wfile.write(data[: len(data) - self.hub.cut * self.close_connection])

    def resolve(self, repo: str, revision: str, path: str) -> None:
        if repo not in self.hub.repos:
            return self.reply(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        stored = self.hub.repos[repo]
        sha = stored.heads.get(revision, revision)
        data = stored.commits[sha].get(path)
        if data is None:
            return self.reply(404, {"error": path}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        tag = hashlib.sha256(data).hexdigest()
        return self.reply(200, data, {"X-Repo-Commit": sha, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"})

    def log_message(self, *_: object) -> None:
        """Not to the terminal."""
