"""A fake hub on this machine: the part of the HTTP interface that huggingface_hub needs, with a record of requests.

Files of weights are uploaded as LFS objects. This process serves all files itself, without redirects to a storage.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

TOKEN = "hf_ofthetests"

_API = re.compile(
    r"/api/models/(?P<repo>[^/]+/[^/]+?)(?:/(?P<action>revision|tree|preupload|commit|branch)/(?P<rev>[^/]+))?"
)
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_LFS_BATCH = re.compile(r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch")


@dataclass
class Repo:
    """A model repository: files by branch, and access restrictions."""

    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    gated: bool = False
    private: bool = False

    def files(self, revision: str) -> dict[str, bytes] | None:
        """Return the files of a branch or commit; None if there is no such revision."""
        if revision in self.branches:
            return self.branches[revision]
        return next((files for files in self.branches.values() if commit_of(files) == revision), None)


def commit_of(files: Mapping[str, bytes]) -> str:
    """Return the hash of the files, which serves as the commit id."""
    digests = [[name, hashlib.sha1(data).hexdigest()] for name, data in sorted(files.items())]
    return hashlib.sha1(json.dumps(digests).encode()).hexdigest()


class FakeHub:
    """A fake hub."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str]] = []
        self.sent = 0
        self.commits: list[tuple[str, str, list[str]]] = []
        self.down = False
        self.ranges = True
        self.lock = threading.Lock()
        self.uploaded: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, repo_id: str, folder: Path, *, branch: str = "main", **settings: Any) -> Repo:
        """Publish a folder."""
        repo = self.repos.setdefault(repo_id, Repo())
        repo.branches[branch] = {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        for name, value in settings.items():
            setattr(repo, name, value)
        return repo

    def requests_for(self, part: str) -> list[tuple[str, str]]:
        """Return the requests whose path contains `part`."""
        return [(method, path) for method, path in self.requests if part in path]

    def environment(self, home: Path, **variables: str) -> dict[str, str]:
        """Return the environment of a process that uses this hub, with the cache in `home`."""
        base = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        base |= {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        return base | {
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **variables,
        }

    def run(self, home: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a minifloat command against this hub."""
        command = [sys.executable, "-m", "minifloat", *map(str, arguments)]
        return subprocess.run(
            command, env=self.environment(home, **variables), cwd=home, capture_output=True, text=True, check=False
        )

    @contextmanager
    def serving(self) -> Iterator[FakeHub]:
        """Serve requests until the end of the block."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        fake = hub

    return Handler


class _Answer(NamedTuple):
    """A response: status, body and headers."""

    status: int
    data: bytes = b""
    headers: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def of(cls, value: Any) -> _Answer:
        """Return a response of status 200 with `value` as JSON."""
        return cls(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    @classmethod
    def error(cls, status: int, code: str = "", message: str = "") -> _Answer:
        """Return an error response with the headers from which huggingface_hub builds its errors."""
        return cls(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})


class _Handler(BaseHTTPRequestHandler):
    """Handler of the requests of one connection."""

    protocol_version = "HTTP/1.1"
    fake: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because `FakeHub.requests` records all requests."""

    def _respond(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        with self.fake.lock:
            self.fake.requests.append((self.command, path))
            answer = _Answer(503) if self.fake.down else self._answer(path, body)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.data)

    do_GET = do_HEAD = do_POST = do_PUT = _respond  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    # ------------------------------------------------------------------------------------------ reading

    def _answer(self, path: str, body: bytes) -> _Answer:
        if path.startswith("/upload/"):
            self.fake.uploaded[path.rpartition("/")[2]] = body
            return _Answer(200)
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return _Answer.of({"errors": [], "warnings": []})
        if _LFS_BATCH.fullmatch(path):
            return self._lfs_batch(json.loads(body))
        match = _RESOLVE.fullmatch(path) or _API.fullmatch(path)
        if match is None:
            return _Answer.error(404, "EntryNotFound")
        repo = self.fake.repos.get(match["repo"])
        if repo is None or (repo.private and not self._has_token):
            return _Answer.error(404 if self._has_token else 401, "RepoNotFound")
        if match.re is _RESOLVE:
            return self._resolve(repo, unquote(match["rev"]), match["file"])
        return self._api(match["repo"], repo, match["action"], unquote(match["rev"] or "main"), body)

    @property
    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _api(self, repo_id: str, repo: Repo, action: str | None, revision: str, body: bytes) -> _Answer:
        if self.command == "POST" and not self._has_token:
            return _Answer.error(401, message="Invalid username or password.")
        if action == "branch":
            repo.branches.setdefault(revision, dict(repo.branches["main"]))
            return _Answer.of({})
        if action == "preupload":
            return _Answer.of(
                {"files": [{"path": file["path"], **_mode(file["path"])} for file in json.loads(body)["files"]]}
            )
        files = repo.files(revision)
        if files is None:
            return _Answer.error(404, "RevisionNotFound")
        if action == "commit":
            return self._commit(repo_id, repo, revision, body)
        if action == "tree":
            return _Answer.of([_entry(name, data) for name, data in sorted(files.items())])
        siblings: list[dict[str, Any]] = [{"rfilename": name} for name in sorted(files)]
        if "blobs" in self.path:
            siblings = [{**entry, "size": len(files[entry["rfilename"]]), "blobId": "0" * 40} for entry in siblings]
        return _Answer.of({"id": repo_id, "sha": commit_of(files), "siblings": siblings, "private": repo.private})

    def _resolve(self, repo: Repo, revision: str, name: str) -> _Answer:
        if repo.gated and not self._has_token:
            return _Answer.error(403, "GatedRepo")
        files = repo.files(revision)
        if files is None:
            return _Answer.error(404, "RevisionNotFound")
        if name not in files:
            return _Answer.error(404, "EntryNotFound")
        data, status = files[name], 200
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit_of(files)}
        if (match := _RANGE.fullmatch(self.headers.get("Range", ""))) and self.fake.ranges:
            first, last = int(match[1]), min(int(match[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        if self.command == "GET":
            self.fake.sent += len(data)
        return _Answer(status, data, headers)

    # ------------------------------------------------------------------------------------------ writing

    def _create(self, request: dict[str, Any]) -> _Answer:
        if not self._has_token:
            return _Answer.error(401, message="Invalid username or password.")
        repo_id = f"{request['organization'] or 'me'}/{request['name']}"
        if repo_id in self.fake.repos:
            return _Answer.of({"url": f"{self.fake.url}/{repo_id}"})._replace(status=409)
        self.fake.repos[repo_id] = Repo(private=request.get("visibility") == "private" or bool(request.get("private")))
        return _Answer.of({"url": f"{self.fake.url}/{repo_id}", "name": repo_id})

    def _lfs_batch(self, request: dict[str, Any]) -> _Answer:
        objects = [
            {**entry, "actions": {"upload": {"href": f"{self.fake.url}/upload/{entry['oid']}", "header": {}}}}
            for entry in request["objects"]
        ]
        return _Answer.of({"transfer": "basic", "objects": objects})

    def _commit(self, repo_id: str, repo: Repo, branch: str, body: bytes) -> _Answer:
        header, *lines = [json.loads(line) for line in body.splitlines() if line]
        target = dict(repo.branches[branch])
        for line in lines:
            value = line["value"]
            inline = line["key"] == "file"
            target[value["path"]] = base64.b64decode(value["content"]) if inline else self.fake.uploaded[value["oid"]]
        pull = "create_pr=1" in self.path
        branch = "refs/pr/1" if pull else branch
        repo.branches[branch] = target
        paths = sorted(line["value"]["path"] for line in lines)
        self.fake.commits.append((branch, header["value"]["summary"], paths))
        url = f"{self.fake.url}/{repo_id}"
        answer = {"success": True, "commitOid": commit_of(target), "commitUrl": f"{url}/commit/{commit_of(target)}"}
        return _Answer.of(answer | ({"pullRequestUrl": f"{url}/discussions/1"} if pull else {}))


def _is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def _mode(name: str) -> dict[str, Any]:
    return {"uploadMode": "lfs" if _is_lfs(name) else "regular", "shouldIgnore": False, "oid": None}


def _entry(name: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
    oid = hashlib.sha256(data).hexdigest()
    return entry | ({"lfs": {"oid": oid, "size": len(data), "pointerSize": 130}} if _is_lfs(name) else {})
