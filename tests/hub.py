"""A fake Hugging Face hub on loopback, for the real huggingface_hub and `datasets` in processes with environment().

    with Hub() as hub:
        sha = hub.commit("datasets/me/texts", {"train.jsonl": b"..."}, token="secret")
        hub.fault = lambda request: 429 if request.method == "GET" else None
        subprocess.run(..., env=os.environ | hub.environment(tmp_path))

A repository is called by the path of its page: datasets/OWNER/NAME, or OWNER/NAME for a model.
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

CUT = 2  # an answer of half its content; then the connection is lost
LOST = -1  # no answer: the connection is lost


class Hub:
    """fault: called before each request with a Request (method, path, headers; the hub's content may be changed in it);
    returns None, a status to answer with, CUT or LOST. requests: of each so far, "METHOD /path"."""

    def __init__(self) -> None:
        self.commits: dict[
            tuple[str, str], dict[str, bytes]
        ] = {}  # (repository, commit): the files' content by path
        self.branches: dict[tuple[str, str], str] = {}  # (repository, branch): commit
        self.tokens: dict[str, str] = {}  # of private repositories
        self.fault: Callable[[Request], int | None] = lambda request: None
        # seconds
        self.retry_after = 1
        self.requests = []
        self.port = 0
        self.open()

    def open(self) -> None:
        """Serves, after close() on the same port."""
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Request)
        self.server.hub, self.port = self, self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """From now on connections are refused, and those that are open lost."""
        server, self.server = self.server, None
        server.shutdown()
        server.server_close()

    def __enter__(self) -> "Hub":
        return self

    def __exit__(self, *_: object) -> None:
        if self.server:
            self.close()

    def commit(
        self, repo: str, files: dict[str, bytes], branch: str = "main", token: str | None = None
    ) -> str:
        """Moves a branch to a new commit of these files alone, and returns it. token: without it, it is not found."""
        sha = hashlib.sha1(
            repr((repo, sorted(files.items()), len(self.commits))).encode()
        ).hexdigest()
        self.commits[repo, sha], self.branches[repo, branch] = files, sha
        if token:
            self.tokens[repo] = token
        return sha

    def environment(
        self, home: pathlib.Path, token: str | None = None, offline: bool = False
    ) -> dict[str, str]:
        """Environment variables of a process whose hub this is. home: of the libraries' caches."""
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": token or "",
            "HF_HUB_OFFLINE": str(int(offline)),
        }


class Request(BaseHTTPRequestHandler):
    """One request, and its answer."""

    protocol_version = "HTTP/1.1"
    method = property(lambda self: self.command)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        hub: Hub = self.server.hub
        hub.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.cut = False
        fault = LOST if hub.server is not self.server else hub.fault(self)
        if fault == LOST:
            self.close_connection = True
        elif fault == CUT:
            self.cut = True
            self.route(hub, body)
        elif fault:
            self.answer({"error": "as asked for"}, fault, {"Retry-After": str(hub.retry_after)})
        else:
            self.route(hub, body)

    do_HEAD = do_POST = do_GET

    def route(self, hub: Hub, body: bytes) -> None:
        url = urllib.parse.urlsplit(self.path)
        found = re.fullmatch(
            r"/(?P<repo>(?:datasets/)?[^/]+/[^/]+)/(?P<what>resolve)/(?P<revision>[^/]+)/(?P<path>.+)|"
            r"/api/(?P<kind>models/|(?=datasets/))(?P<of>(?:datasets/)?[^/]+/[^/]+)"
            r"(?:/(?P<ask>revision|tree|paths-info)/(?P<at>[^/]+)/?(?P<under>.*))?",
            url.path,
        )
        if not found:
            return self.missing("Entry")
        repo = found["repo"] or found["of"]
        revision = urllib.parse.unquote(found["revision"] or found["at"] or "main")
        path = urllib.parse.unquote(found["path"] or found["under"] or "")
        if not any(repo == known for known, _ in hub.commits) or (
            hub.tokens.get(repo)
            and self.headers.get("Authorization") != f"Bearer {hub.tokens[repo]}"
        ):
            # as the hub says: no token, a wrong one or no such repository
            return self.missing("Repo", 401)
        sha = hub.branches.get((repo, revision), revision)
        if (files := hub.commits.get((repo, sha))) is None:
            return self.missing("Revision")
        if found["what"]:
            return self.file(files[path], sha) if path in files else self.missing("Entry", sha=sha)
        if found["ask"] in ("tree", "paths-info"):
            return self.listing(files, path, url.query, body)
        self.answer(
            {
                "id": repo.removeprefix("datasets/"),
                "sha": sha,
                "private": repo in hub.tokens,
                "tags": [],
                "siblings": [{"rfilename": name} for name in files],
            }
        )

    def listing(self, files: dict[str, bytes], under: str, query: str, body: bytes) -> None:
        entries: dict[str, dict[str, Any]] = {}
        for name, content in files.items():
            for folder in [*pathlib.PurePosixPath(name).parents][:-1]:
                entries[str(folder)] = {
                    "type": "directory",
                    "path": str(folder),
                    "oid": "0" * 40,
                    "size": 0,
                }
            entries[name] = {
                "type": "file",
                "path": name,
                "oid": sha1(content),
                "size": len(content),
            }
        asked = urllib.parse.parse_qs(body.decode()).get("paths")
        if body and asked is None:
            asked = json.loads(body)["paths"]
        if asked is not None:
            return self.answer([entries[name] for name in asked if name in entries])
        if under and entries.get(under, {}).get("type") != "directory":
            return self.missing("Entry")
        recursive = urllib.parse.parse_qs(query).get("recursive", ["False"])[0].lower() in (
            "true",
            "1",
        )
        inside = [
            name
            for name in sorted(entries)
            if name.startswith(under + "/" * bool(under)) and name != under
        ]
        self.answer(
            [
                entries[name]
                for name in inside
                if recursive or str(pathlib.PurePosixPath(name).parent) == (under or ".")
            ]
        )

    def file(self, content: bytes, sha: str) -> None:
        headers = {"ETag": f'"{sha1(content)}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(content, 200, headers)
        begin, end = int(asked[1]), min(len(content), int(asked[2] or len(content)) + 1)
        if begin >= len(content):
            return self.answer({}, 416, headers | {"Content-Range": f"bytes */{len(content)}"})
        self.answer(
            content[begin:end],
            206,
            headers | {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"},
        )

    def missing(self, what: str, status: int = 404, sha: str = "") -> None:
        text = {
            "Entry": "Entry not found",
            "Revision": "Invalid rev id",
            "Repo": "Invalid username or password.",
        }[what]
        self.answer(
            {"error": text},
            status,
            {"X-Error-Code": f"{what}NotFound", "X-Error-Message": text}
            | ({"X-Repo-Commit": sha} if sha else {}),
        )

    def answer(
        self, content: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(raw))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw[: len(raw) // 2] if self.cut else raw)
        self.close_connection = self.close_connection or self.cut


def sha1(content: bytes) -> str:
    """As git names a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
