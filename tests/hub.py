"""A Hugging Face hub on localhost, for the real huggingface_hub and `datasets` in processes with
environment().

    with Hub() as hub:
        commit = hub.commit("datasets/me/texts", {"train.jsonl": b"..."}, token="secret")
        hub.fault = lambda request: 503 if request.command == "GET" else None
        subprocess.run(..., env=os.environ | hub.environment(tmp_path))

A repository is named by the path of its page: datasets/OWNER/NAME, or OWNER/NAME of a model.
"""

import hashlib
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOST = -1  # a fault: no answer, the connection is lost
FILE = re.compile(r"/(?P<repo>(datasets/)?[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
API = re.compile(
    r"/api/(models/|(?=datasets/))(?P<repo>(datasets/)?[^/]+/[^/]+)"
    r"(/(?P<method>revision|tree|paths-info)/(?P<revision>[^/]+)/?(?P<path>.*))?"
)
TEXTS = {
    "Entry": "Entry not found",
    "Revision": "Invalid rev id",
    "Repo": "Invalid username or password.",
}


class Hub:
    def __init__(self) -> None:
        # (repository, commit): the content of its files by path
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self.branches: dict[tuple[str, str], str] = {}  # (repository, branch): commit
        self.tokens: dict[str, str] = {}  # of private repositories
        # called before each request; returns None, or the status to answer with, or LOST
        self.fault: Callable[[Request], int | None] = lambda request: None
        self.requests: list[str] = []  # "GET /path" of each so far
        self.port = 0
        self.open()

    def open(self) -> None:
        """Serves; after close() on the same port."""
        server = ThreadingHTTPServer(("127.0.0.1", self.port), Request)
        self.port = server.server_port
        server.hub = self  # pyrefly: ignore[missing-attribute]  # for its requests
        self.server: ThreadingHTTPServer | None = server
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """From now on connections are refused, and those that are open lost."""
        server = self.server
        self.server = None
        if server:
            server.shutdown()
            server.server_close()

    def __enter__(self) -> "Hub":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def commit(
        self, repo: str, files: dict[str, bytes], branch: str = "main", token: str | None = None
    ) -> str:
        """Moves a branch to a new commit of these files alone, and returns the commit. token:
        without it the repository is not found."""
        content = repr((repo, sorted(files.items()), len(self.commits)))
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.commits[repo, commit] = files
        self.branches[repo, branch] = commit
        if token:
            self.tokens[repo] = token
        return commit

    def environment(
        self, home: pathlib.Path, token: str = "", offline: bool = False
    ) -> dict[str, str]:
        """Variables of a process whose hub this is. home: of the libraries' caches."""
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": token,
            "HF_HUB_OFFLINE": str(int(offline)),
        }


class Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        hub: Hub = self.server.hub  # pyrefly: ignore[missing-attribute]
        hub.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = hub.fault(self)
        if fault == LOST or hub.server is not self.server:
            self.close_connection = True
        elif fault:
            self.answer({"error": "as asked for"}, fault)
        else:
            self.route(hub, body)

    do_HEAD = do_POST = do_GET

    def route(self, hub: Hub, body: bytes) -> None:
        url = urllib.parse.urlsplit(self.path)
        match = FILE.fullmatch(url.path) or API.fullmatch(url.path)
        if not match:
            return self.missing("Entry")
        parts = {name: urllib.parse.unquote(text or "") for name, text in match.groupdict().items()}
        repo = parts["repo"]
        token = hub.tokens.get(repo)
        is_known = any(repo == known for known, _ in hub.commits)
        if not is_known or (token and self.headers["Authorization"] != f"Bearer {token}"):
            return self.missing("Repo", 401)  # no such repository, or no right to see it
        revision = parts["revision"] or "main"
        commit = hub.branches.get((repo, revision), revision)
        files = hub.commits.get((repo, commit))
        if files is None:
            return self.missing("Revision")
        if "method" not in parts:
            if parts["path"] not in files:
                return self.missing("Entry", commit=commit)
            return self.send_file(files[parts["path"]], commit)
        if parts["method"] in ("tree", "paths-info"):
            return self.send_listing(files, parts["path"], urllib.parse.parse_qs(url.query), body)
        siblings = [{"rfilename": name, "size": len(files[name])} for name in files]
        name = repo.removeprefix("datasets/")
        self.answer({"id": name, "sha": commit, "private": bool(token), "siblings": siblings})

    def send_listing(self, files: dict[str, bytes], under: str, query: dict, body: bytes) -> None:
        """The entries of a folder, or those that the body names."""
        entries: dict[str, dict[str, Any]] = {}
        for path, content in files.items():
            for folder in [*map(str, pathlib.PurePosixPath(path).parents)][:-1]:
                entries[folder] = {"type": "directory", "path": folder, "oid": "0", "size": 0}
            size = len(content)
            entries[path] = {"type": "file", "path": path, "oid": sha1(content), "size": size}
        if body:
            form = urllib.parse.parse_qs(body.decode())
            paths = form["paths"] if "paths" in form else json.loads(body)["paths"]
            return self.answer([entries[path] for path in paths if path in entries])
        if under and entries.get(under, {}).get("type") != "directory":
            return self.missing("Entry")
        is_recursive = query.get("recursive", ["False"])[0].lower() in ("true", "1")
        inside = []
        for path in sorted(entries):
            is_child = str(pathlib.PurePosixPath(path).parent) == (under or ".")
            if is_child or (is_recursive and path.startswith(f"{under}/" if under else "")):
                inside.append(entries[path])
        self.answer(inside)

    def send_file(self, content: bytes, commit: str) -> None:
        """All of it, or the range that is asked for."""
        headers = {"ETag": f'"{sha1(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(content, 200, headers)
        begin = int(asked[1])
        end = min(len(content), int(asked[2] or len(content)) + 1)
        if begin >= len(content):
            headers["Content-Range"] = f"bytes */{len(content)}"
            return self.answer(b"", 416, headers)
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self.answer(content[begin:end], 206, headers)

    def missing(self, what: str, status: int = 404, commit: str = "") -> None:
        headers = {"X-Error-Code": f"{what}NotFound", "X-Error-Message": TEXTS[what]}
        if commit:
            headers["X-Repo-Commit"] = commit
        self.answer({"error": TEXTS[what]}, status, headers)

    def answer(
        self, content: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(raw))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)


def sha1(content: bytes) -> str:
    """As git names a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
