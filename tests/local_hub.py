"""A hub of Hugging Face on 127.0.0.1, which the real `huggingface_hub` asks."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from huggingface_hub import HfFileSystem, constants

TOKEN = "hf_secret"
API = re.compile(r"/api/(?:models|datasets)/(.+?)(?:/(revision|tree|paths-info)/([^/]+)(/.*)?)?")
FILE = re.compile(r"(?:/datasets)?/(.+)/resolve/([^/]+)/([^?]+)")


class LocalHub:
    """Repositories by name, each a folder, and what goes wrong with them.

    Attributes:
        commits: Commits of a name's branch main, the newest last.
        gated: Names that need `TOKEN`.
        moved: From an old name to the one that it redirects to.
        breaks: Files whose transfer breaks, by the number of times; each sends half of what is asked for.
        fails: Files, and names of uploads, that end in status 500.
        uploads: Files, a dict from path to bytes, that were pushed, by name.
        asked: Pairs of method and path with query, of all requests.
        num_sent: Bytes of files that were sent.
    """

    def __init__(self):
        self.folders, self.commits, self.gated, self.moved, self.breaks = {}, {}, set(), {}, {}
        self.uploads, self.fails, self.asked, self.num_sent, self.entries = {}, set(), [], 0, {}

    def add(self, name, folder, commit="1"):
        self.folders[name], self.entries[name] = Path(folder), _list_entries(Path(folder))
        self.commits.setdefault(name, []).append(hashlib.sha1(f"{name} {commit}".encode()).hexdigest())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Nothing: the log of a test is its own."""

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def do_POST(self):
        self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _answer(self, body=b""):
        hub, path = self.server.hub, self.path
        hub.asked.append((self.command, path))
        for old, new in hub.moved.items():
            if re.search(rf"/{old}(/|$)", path):
                return self._send(307, headers={"Location": path.replace(old, new)})
        if self.command == "POST" and "/paths-info/" not in path:
            return self._take(path, body)
        if match := API.fullmatch(path.partition("?")[0]):
            name, kind, revision, below = match.groups()
        elif match := FILE.fullmatch(path.partition("?")[0]):
            (name, revision, below), kind = match.groups(), "file"
        else:
            return self._send(404)
        if name not in hub.folders:
            return self._send(401, headers={"X-Error-Code": "RepoNotFound"})
        if name in hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, headers={"X-Error-Code": "GatedRepo"})
        commit = revision if revision in hub.commits[name] else hub.commits[name][-1]
        if revision not in (None, "main", "refs%2Fconvert%2Fparquet", commit):
            return self._send(404, headers={"X-Error-Code": "RevisionNotFound"})
        entries = hub.entries[name]
        if kind in (None, "revision"):
            siblings = [{"rfilename": e["path"]} for e in entries if e["type"] == "file"]
            return self._send(200, {"id": name, "sha": commit, "siblings": siblings})
        if kind == "tree":
            within = f"{below[1:]}/" if below else ""
            inside = [e for e in entries if e["path"].startswith(within)]
            if "recursive=true" not in path.lower():
                inside = [e for e in inside if "/" not in e["path"].removeprefix(within)]
            return self._send(200, inside)
        if kind == "paths-info":
            wanted = json.loads(body)["paths"]
            return self._send(200, [e for e in entries if e["path"] in wanted])
        return self._send_file(hub.folders[name] / below, commit, below)

    def _take(self, path, body):
        """Answer the requests of an upload; files are kept by `uploads`."""
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(403)
        here = f"http://{self.headers['Host']}"
        if path.endswith("/create"):
            asked = json.loads(body)
            return self._send(200, {"url": f"{here}/{asked['organization']}/{asked['name']}"})
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            answer = {"uploadMode": "regular", "shouldIgnore": False}
            return self._send(200, {"files": [{"path": name, **answer} for name in names]})
        if match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            if match[1] in self.server.hub.fails:
                return self._send(500)
            lines = [json.loads(line)["value"] for line in body.splitlines()]
            files = {line["path"]: base64.b64decode(line["content"]) for line in lines if "path" in line}
            self.server.hub.uploads[match[1]] = files
            url = f"{here}/{match[1]}/commit/{'0' * 40}"
            return self._send(200, {"commitUrl": url, "commitOid": "0" * 40})
        return self._send(200, {})

    def _send_file(self, path, commit, name):
        if name in self.server.hub.fails:
            return self._send(500)
        if not path.is_file():
            return self._send(404, headers={"X-Error-Code": "EntryNotFound"})
        content = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        status, asked = 200, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            first, last = int(asked[1]), int(asked[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            status, content = 206, content[first : last + 1]
        breaks = self.server.hub.breaks
        is_broken = self.command == "GET" and breaks.get(name, 0) > 0
        if is_broken:
            breaks[name] -= 1
        self.server.hub.num_sent += len(content) if self.command == "GET" else 0
        self._send(status, content, headers, len(content) // 2 if is_broken else None)

    def _send(self, status, content=b"", headers=None, num_bytes=None):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:num_bytes])
        if num_bytes is not None:
            self.close_connection = True


def _list_entries(folder):
    return [
        {
            "type": "file" if path.is_file() else "directory",
            "path": path.relative_to(folder).as_posix(),
            "size": path.stat().st_size if path.is_file() else 0,
            "oid": hashlib.sha1(path.read_bytes() if path.is_file() else b"").hexdigest(),
            **(_lfs(path.read_bytes()) if path.suffix == ".parquet" else {}),
        }
        for path in sorted(folder.rglob("*"))
    ]


def _lfs(content):
    return {"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}}


@contextlib.contextmanager
def serve():
    """Start a `LocalHub`: yields it and its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.hub, server.daemon_threads = LocalHub(), True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server.hub, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def point_to(monkeypatch, url, cache):
    """Let the `huggingface_hub` of this process, which has read its environment, ask a hub."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    HfFileSystem.clear_instance_cache()
