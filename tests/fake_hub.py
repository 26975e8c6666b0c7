"""A Hugging Face hub on loopback: repositories, branches and commits, with the files that a commit brings.

Weights come by the protocol of LFS, which `huggingface_hub` uses with `HF_HUB_DISABLE_XET`: the commit names their
digests. A `.gitignore` leaves out what it lists, and a commit whose parent is no longer the newest is refused.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_of_the_tests"
LARGE = ("*.safetensors", "*.bin", "*.gguf", "*.h5")
Answer = tuple[int, Any]


@dataclass
class Hub:
    """`repositories`: name -> is it private. `files`: (name, branch) -> path -> bytes. `messages`: of the commits.
    `commits`: (name, branch) -> ids, the newest last. `cards`: model cards that came to be checked. `objects`: digest
    -> bytes of large files. `role`: of the token. `status`: the answer to requests of the kind `fails_at` instead.
    `meanwhile`: called once before the next commit. `loses`: the answer to a commit does not arrive."""

    repositories: dict[str, bool] = field(default_factory=dict)
    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    commits: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    cards: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    address: str = ""
    role: str = "write"
    status: int | None = None
    fails_at: str = "create"
    meanwhile: Callable[[], object] | None = None
    loses: bool = False

    def create(self, name: str, private: bool) -> Answer:
        url = {"url": f"{self.address}/{name}", "name": name}
        if name in self.repositories:
            return 409, url
        self.repositories[name] = private
        self.put(name, "main", {".gitattributes": b""})
        return 200, url

    def branch(self, name: str, branch: str) -> Answer:
        if (name, branch) in self.files:
            return 409, {}
        self.files[name, branch] = dict(self.files[name, "main"])
        self.commits[name, branch] = list(self.commits[name, "main"])
        return 200, {}

    def put(self, name: str, branch: str, files: dict[str, bytes]) -> None:
        """Commit `files` to a branch as another person."""
        self.files.setdefault((name, branch), {}).update(files)
        ids = self.commits.setdefault((name, branch), [])
        ids.append(hashlib.sha1(f"{self.address} {name} {branch} {len(ids)}".encode()).hexdigest())

    def commit(self, name: str, branch: str, lines: list[dict[str, Any]]) -> Answer:
        if self.meanwhile:
            act, self.meanwhile = self.meanwhile, None
            act()
        head = next(line["value"] for line in lines if line["key"] == "header")
        if head.get("parentCommit") not in (None, self.commits[name, branch][-1]):
            return 412, {"error": "A commit has happened since. Please refresh and try again."}
        files = self.files[name, branch]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                assert value["encoding"] == "base64"
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.messages.append(head["summary"])
        self.put(name, branch, {})
        commit = self.commits[name, branch][-1]
        return 200, {"commitUrl": f"{self.address}/{name}/commit/{commit}", "commitOid": commit}

    def modes(self, name: str, branch: str, asked: dict[str, Any]) -> Answer:
        """How each file is to be uploaded, and whether it is left out."""
        ignored = asked.get("gitIgnore") or self.files[name, branch].get(".gitignore", b"").decode()
        return 200, {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if any(fnmatch(file["path"], each) for each in LARGE) else "regular",
                    "shouldIgnore": any(fnmatch(file["path"], each) for each in ignored.split()),
                }
                for file in asked["files"]
            ]
        }

    def found(self, name: str, verb: str, branch: str) -> Answer:
        """Answer to a GET of a repository's information (`verb` revision) or the token's rights."""
        if name not in self.repositories:
            return 404, "RepoNotFound"
        if (name, branch) not in self.files:
            return 404, "RevisionNotFound"
        if verb == "auth-check":
            return (200 if self.role == "write" else 403), {}
        siblings = [{"rfilename": path} for path in self.files[name, branch]]
        private = self.repositories[name]
        return 200, {"id": name, "private": private, "sha": self.commits[name, branch][-1], "siblings": siblings}


def _answers(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer = self._answer(self._parts(), self._body())
            if hub.loses and "commit" in self._parts():
                self.close_connection = True
            else:
                self._send(*answer)

        def do_PUT(self) -> None:
            body = self._body()
            digest = self._parts()[-1]
            assert hashlib.sha256(body).hexdigest() == digest
            hub.objects[digest] = body
            self._send(200, {})

        def do_GET(self) -> None:
            parts = self._parts()
            if parts == ["api", "whoami-v2"]:
                known = self.headers.get("Authorization") == f"Bearer {TOKEN}" and hub.status != 401
                me = {"type": "user", "name": "me", "orgs": [], "auth": {"accessToken": {"role": hub.role}}}
                self._send(*((200, me) if known else (401, {"error": "Invalid credentials"})))
            elif parts[0] == "api":
                verb, branch = (parts[4:5] or ["revision"])[0], "/".join(parts[5:]) or "main"
                self._send(*hub.found("/".join(parts[2:4]), verb, "main" if verb == "auth-check" else branch))
            else:
                self._send_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

        def _answer(self, parts: list[str], body: bytes) -> Answer:
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
            if parts[2:] == ["info", "lfs", "objects", "batch"]:
                return 200, {
                    "transfer": "basic",
                    "objects": [self._place(each) for each in json.loads(body)["objects"]],
                }
            name, verb, branch = "/".join(parts[2:4]), parts[4], "/".join(parts[5:])
            if verb == "branch":
                return hub.branch(name, branch)
            if verb == "preupload":
                return hub.modes(name, branch, json.loads(body))
            if verb == "commit":
                return hub.commit(name, branch, [json.loads(line) for line in body.splitlines()])
            return 404, {"error": self.path}

        def _place(self, asked: dict[str, Any]) -> dict[str, Any]:
            """Where a large file is to be sent, unless it is here."""
            if asked["oid"] in hub.objects:
                return asked
            return {**asked, "actions": {"upload": {"href": f"{hub.address}/objects/{asked['oid']}"}}}

        def _parts(self) -> list[str]:
            return [unquote(part) for part in self.path.partition("?")[0].strip("/").split("/")]

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                return b"".join(self._chunks())
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        def _send_file(self, name: str, revision: str, path: str) -> None:
            branches = (place for place, ids in hub.commits.items() if place[0] == name and ids[-1] == revision)
            files = hub.files.get(next(branches, (name, revision)), {})
            if hub.repositories.get(name) and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._send(401, {"error": "Invalid credentials"})
            if path not in files:
                return self._send(404, "EntryNotFound")
            return self._write(200, files[path], {})

        def _send(self, status: int, answer: Any) -> None:
            code = {"X-Error-Code": answer} if isinstance(answer, str) else {}
            body = {"error": answer} if code else answer
            self._write(status, json.dumps(body).encode(), {"Content-Type": "application/json", **code})

        def _write(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

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
