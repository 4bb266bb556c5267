"""A hub in a thread: the HTTP calls of huggingface_hub to publish a model, and network faults."""

import base64
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_right"
LARGE_SUFFIXES = (".safetensors", ".bin")  # uploaded as large files


class Hub:
    """State of the server: repositories with files, large files by hash, counted calls."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Any]] = {}
        self.large: dict[str, bytes] = {}
        self.calls: Counter[str] = Counter()
        # (call, status or 0 for a closed connection); each happens once
        self.faults: list[tuple[str, int]] = []
        self.branches: list[str] = []  # the branch of each commit
        self.address = ""

    def take_fault(self, call: str) -> int | None:
        """Return and remove the fault of a call; None if it has none."""
        for i, (name, status) in enumerate(self.faults):
            if name == call:
                del self.faults[i]
                return status
        return None

    def files(self, name: str) -> dict[str, bytes]:
        return self.repos[name]["files"]


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, value: Any = None) -> None:
        body = json.dumps(value if value is not None else {}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("x-error-message", "Invalid credentials in Authorization header")
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def failed(self, name: str) -> bool:
        """Count the call; return whether a fault answered it."""
        self.hub.calls[name] += 1
        status = self.hub.take_fault(name)
        if status is None:
            return False
        if status == 0:
            self.close_connection = True
            self.connection.close()
        else:
            self.answer(status, {"error": "internal error"})
        return True

    def has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def do_POST(self) -> None:
        data = self.body()
        path = self.path.partition("?")[0]
        if not self.has_token():
            self.hub.calls["unknown token"] += 1
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            return self.create(data)
        if path == "/api/validate-yaml":
            assert json.loads(data)["content"].startswith("---\n")
            return self.answer(200, {"errors": [], "warnings": []})
        parts = path.strip("/").split("/")
        if path.startswith("/api/models/") and parts[4] == "preupload":
            return self.preupload(data)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(data)
        if path.startswith("/api/models/") and parts[4] == "commit":
            self.hub.branches.append(parts[5])
            return self.commit("/".join(parts[2:4]), data)
        if path.startswith("/api/models/") and parts[4] == "branch":
            self.hub.calls["branch"] += 1
            return self.answer(200)
        return self.answer(404, {"error": path})

    def create(self, data: bytes) -> None:
        if self.failed("create"):
            return None
        request = json.loads(data)
        name = f"{request['organization']}/{request['name']}"
        if request["organization"] == "stranger":
            return self.answer(
                403, {"error": "You don't have the rights to create a model under this namespace"}
            )
        if name in self.hub.repos:
            return self.answer(
                409,
                {
                    "error": "You already created this model repo",
                    "url": f"{self.hub.address}/{name}",
                },
            )
        self.hub.repos[name] = {
            "private": request.get("visibility") == "private",
            "files": {},
            "commits": [],
        }
        return self.answer(200, {"url": f"{self.hub.address}/{name}", "name": name})

    def do_GET(self) -> None:
        self.answer(404 if self.has_token() else 401, {"error": "not here"})

    def preupload(self, data: bytes) -> None:
        if self.failed("preupload"):
            return None
        files = [
            {
                "path": f["path"],
                "uploadMode": "lfs" if f["path"].endswith(LARGE_SUFFIXES) else "regular",
                "shouldIgnore": False,
            }
            for f in json.loads(data)["files"]
        ]
        return self.answer(200, {"files": files})

    def batch(self, data: bytes) -> None:
        if self.failed("batch"):
            return None
        objects = []
        for file in json.loads(data)["objects"]:
            entry = {"oid": file["oid"], "size": file["size"]}
            if file["oid"] not in self.hub.large:
                address = f"{self.hub.address}/upload/{file['oid']}"
                entry["actions"] = {"upload": {"href": address}}
            objects.append(entry)
        return self.answer(200, {"objects": objects, "transfer": "basic"})

    def do_PUT(self) -> None:
        data = self.body()
        if self.failed("upload"):
            return None
        oid = self.path.rsplit("/", 1)[1]
        assert hashlib.sha256(data).hexdigest() == oid, "the data have the announced hash"
        self.hub.large[oid] = data
        return self.answer(200)

    def commit(self, name: str, data: bytes) -> None:
        if self.failed("commit"):
            return None
        lines = [json.loads(line) for line in data.splitlines()]
        repo = self.hub.repos[name]
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                repo["files"][value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "file":
                repo["files"][value["path"]] = base64.b64decode(value["content"])
        repo["commits"].append(lines[0]["value"]["summary"])
        return self.answer(
            200, {"commitUrl": f"{self.hub.address}/{name}/commit/abc", "commitOid": "a" * 40}
        )


@contextmanager
def serving_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
