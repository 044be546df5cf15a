"""A hub on the loopback: the part of the Hugging Face Hub's HTTP interface that a download uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


@dataclass
class LoopbackHub:
    """Serves one repository; each revision is a folder on disk, its commit a hash of the revision's name."""

    id: str
    revisions: dict[str, Path]
    endpoint: str = ""
    served: list[str] = field(default_factory=list)  # "revision/file" of every file whose bytes went out

    def commit(self, revision: str) -> str:
        return hashlib.sha1(revision.encode()).hexdigest()

    def find(self, revision: str) -> tuple[str, Path] | None:
        for name, folder in self.revisions.items():
            if revision in (name, self.commit(name)):
                return name, folder
        return None


@contextmanager
def serve(hub: LoopbackHub) -> Iterator[LoopbackHub]:
    """Serve `hub` until the block ends; sets its `endpoint`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: LoopbackHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # a connection per request, so that a closed hub is closed

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = urlsplit(self.path).path
            api, files = f"/api/models/{hub.id}/", f"/{hub.id}/resolve/"
            if path.startswith(api):
                kind, _, revision = path.removeprefix(api).partition("/")
                found = hub.find(revision.strip("/"))
                if found is None:
                    self.reply(404, {"X-Error-Code": "RevisionNotFound"}, b"{}", body)
                else:
                    self.reply(200, {}, json.dumps(self.describe(kind, *found)).encode(), body)
            elif path.startswith(files):
                revision, _, name = path.removeprefix(files).partition("/")
                found = hub.find(revision)
                if found is None or not (found[1] / name).is_file():
                    self.reply(404, {"X-Error-Code": "EntryNotFound"}, b"", body)
                    return
                content = (found[1] / name).read_bytes()
                headers = {
                    "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
                    "X-Repo-Commit": hub.commit(found[0]),
                    "Accept-Ranges": "bytes",
                }
                if body:
                    hub.served.append(f"{found[0]}/{name}")
                self.reply(200, headers, content, body)
            else:
                self.reply(404, {"X-Error-Code": "RepoNotFound"}, b"{}", body)

        def describe(self, kind: str, revision: str, folder: Path) -> object:
            names = sorted(path.name for path in folder.iterdir())
            if kind == "revision":
                siblings = [{"rfilename": name} for name in names]
                return {"id": hub.id, "modelId": hub.id, "sha": hub.commit(revision), "siblings": siblings}
            return [
                {
                    "type": "file",
                    "path": name,
                    "size": (folder / name).stat().st_size,
                    "oid": hashlib.sha1((folder / name).read_bytes()).hexdigest(),
                }
                for name in names
            ]

        def reply(self, status: int, headers: dict[str, str], content: bytes, body: bool) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

    return Handler
