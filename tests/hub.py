"""A Hugging Face hub on localhost, for the real huggingface_hub and `datasets` in processes with environment().

A repository is named by the path of its page: datasets/OWNER/NAME, or OWNER/NAME of a model.
"""

import contextlib
import hashlib
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

METHODS = "resolve|revision|tree|paths-info"
URL = re.compile(
    r"(/api)?(/models)?/(?P<repo>(datasets/)?[^/]+/[^/]+)"
    rf"(/(?P<method>{METHODS})/(?P<revision>[^/]+)/?(?P<path>.*))?"
)


class Hub(contextlib.AbstractContextManager):
    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict] = {}  # (repository, commit): content by path
        self.branches: dict[tuple[str, str], str] = {}  # (repository, branch): commit
        self.tokens: dict[str, str] = {}  # by repository; empty of a public one
        self.is_lost: Callable[[str], Any] = lambda path: False  # a request of this path
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
        server, self.server = self.server, None
        if server:
            server.shutdown()
            server.server_close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def commit(self, repo: str, files: dict, branch: str = "main", token: str = "") -> str:
        """Moves a branch to a new commit of these files alone. Without the token nobody sees them."""
        commit = f"{len(self.commits) + 1:040x}"
        self.commits[repo, commit] = files
        self.branches[repo, branch] = commit
        self.tokens.setdefault(repo, token)
        return commit

    def environment(self, home: pathlib.Path, token: str = "", offline: bool = False) -> dict:
        """Variables of a process whose hub this is. home: of the libraries' caches."""
        endpoint = f"http://127.0.0.1:{self.port}"
        variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": token}
        variables |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return variables | {"HF_HUB_OFFLINE": str(int(offline))}


class Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        hub: Hub = self.server.hub  # pyrefly: ignore[missing-attribute]
        hub.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if hub.server is self.server and not hub.is_lost(self.path):
            self.route(hub, body)
        else:
            self.close_connection = True

    do_HEAD = do_POST = do_GET

    def route(self, hub: Hub, body: bytes) -> None:
        match = URL.fullmatch(urllib.parse.urlsplit(self.path).path)
        if not match:
            return self.missing("Entry")
        parts = {name: urllib.parse.unquote(text or "") for name, text in match.groupdict().items()}
        repo, revision = parts["repo"], parts["revision"] or "main"
        if not self.headers.get("Authorization", "").endswith(hub.tokens.get(repo, "\n")):
            return self.missing("Repo", 401)  # no such repository, or no right to see it
        commit = hub.branches.get((repo, revision), revision)
        files = hub.commits.get((repo, commit))
        if files is None:
            return self.missing("Revision")
        if parts["method"] == "resolve":
            content = files.get(parts["path"])
            return self.missing("Entry") if content is None else self.send_file(content, commit)
        if parts["method"] in ("tree", "paths-info"):
            return self.send_listing(files, parts["path"], body)
        siblings = [{"rfilename": name, "size": len(files[name])} for name in files]
        self.answer({"id": repo.removeprefix("datasets/"), "sha": commit, "siblings": siblings})

    def send_listing(self, files: dict[str, bytes], under: str, body: bytes) -> None:
        """The entries of a folder, or those that the body names."""
        entries: dict[str, dict[str, Any]] = {}
        for path, content in files.items():
            for folder in [*map(str, pathlib.PurePosixPath(path).parents)][:-1]:
                entries[folder] = {"type": "directory", "path": folder, "oid": "0", "size": 0}
            file = {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content)}
            entries[path] = {**file, "path": path}
        if body:
            paths = urllib.parse.parse_qs(body.decode())["paths"]
            return self.answer([entries[path] for path in paths if path in entries])
        pattern = re.escape(f"{under}/" if under else "")
        pattern += ".+" if re.search("recursive=(true|1)", self.path, re.I) else "[^/]+"
        inside = [entries[path] for path in sorted(entries) if re.fullmatch(pattern, path)]
        self.answer(inside) if inside else self.missing("Entry")

    def send_file(self, content: bytes, commit: str) -> None:
        """All of it, or the range that is asked for."""
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        headers["Accept-Ranges"] = "bytes"
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(content, 200, headers)
        begin = int(asked[1])
        part = content[begin : int(asked[2] or len(content)) + 1]
        headers["Content-Range"] = f"bytes {begin}-{begin + len(part) - 1}/{len(content)}"
        self.answer(part, 206 if part else 416, headers)

    def missing(self, what: str, status: int = 404) -> None:
        self.answer({}, status, {"X-Error-Code": f"{what}NotFound"})

    def answer(self, content: Any, status: int = 200, headers: dict | None = None) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(raw))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)
