"""A Hugging Face hub on loopback: repositories, branches and commits, with the files that a commit brings."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_of_the_tests"


@dataclass
class Hub:
    """`repositories`: name -> is it private. `files`: (name, branch) -> path -> bytes. `messages`: of the commits.
    `cards`: model cards that came to be checked. `status`: the answer to requests of the kind `fails_at` instead."""

    repositories: dict[str, bool] = field(default_factory=dict)
    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    cards: list[str] = field(default_factory=list)
    address: str = ""
    status: int | None = None
    fails_at: str = "create"

    def create(self, name: str, private: bool) -> tuple[int, dict[str, Any]]:
        url = {"url": f"{self.address}/{name}", "name": name}
        if name in self.repositories:
            return 409, url
        self.repositories[name] = private
        self.files[name, "main"] = {".gitattributes": b""}
        return 200, url

    def branch(self, name: str, branch: str) -> tuple[int, dict[str, Any]]:
        known = (name, branch) in self.files
        self.files.setdefault((name, branch), dict(self.files[name, "main"]))
        return (409 if known else 200), {}

    def commit(self, name: str, branch: str, lines: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        files = self.files[name, branch]
        for line in lines:
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            if line["key"] == "file":
                assert line["value"]["encoding"] == "base64"
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return 200, {"commitUrl": f"{self.address}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40}


def _answers(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(self._chunks())
            parts = [unquote(part) for part in self.path.strip("/").split("/")]
            self._send(*self._answer(parts, body))

        def do_GET(self) -> None:
            name = "/".join(self.path.partition("?")[0].split("/")[3:5])
            self._send(*((200, {"id": name, "siblings": []}) if name in hub.repositories else (404, {})))

        def _answer(self, parts: list[str], body: bytes) -> tuple[int, dict[str, Any]]:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return 401, {"error": "Invalid credentials"}
            if hub.status is not None and hub.fails_at in parts:
                return hub.status, {"error": "no"}
            if parts == ["api", "repos", "create"]:
                asked = json.loads(body)
                name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
                return hub.create(name, bool(asked.get("private")) or asked.get("visibility") == "private")
            if parts == ["api", "validate-yaml"]:
                hub.cards.append(json.loads(body)["content"])
                return 200, {"errors": [], "warnings": []}
            name, verb, branch = "/".join(parts[2:4]), parts[4], "/".join(parts[5:])
            if verb == "branch":
                return hub.branch(name, branch)
            if verb == "preupload":
                named = json.loads(body)["files"]
                return 200, {
                    "files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in named]
                }
            if verb == "commit":
                return hub.commit(name, branch, [json.loads(line) for line in body.splitlines()])
            return 404, {"error": self.path}

        def _chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    return Answers


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), _answers(hub)) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()
