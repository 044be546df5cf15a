"""A page in headless Chromium through its debugging socket: open, wait for text, evaluate, take a picture."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def chromium() -> str | None:
    """The path of an installed Chromium, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    def __init__(self, socket: ClientConnection):
        self.socket = socket
        self.sent = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a DevTools command and return its result; events in between are ignored."""
        self.sent += 1
        self.socket.send(json.dumps({"id": self.sent, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv(timeout=60))
            if answer.get("id") == self.sent:
                return answer["result"]

    def evaluate(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def wait_for(self, script: str, seconds: float = 60) -> str:
        """Wait until `script` is true; returns the page's text, or raises TimeoutError with it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.evaluate(script):
                return self.text()
            time.sleep(0.3)
        raise TimeoutError(f"not within {seconds:.0f} s: {script}\n{self.text()[:2000]}")

    def text(self) -> str:
        return self.evaluate("document.body ? document.body.innerText : ''") or ""

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def open_page(executable: str, width: int = 1500, height: int = 1400) -> Iterator[Page]:
    """A fresh Chromium with an empty profile; it ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        browser = subprocess.Popen(
            [executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            port = _debugging_port(Path(profile))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10) as answer:
                target = next(item for item in json.load(answer) if item["type"] == "page")
            with connect(target["webSocketDebuggerUrl"], max_size=2**28) as socket:
                yield Page(socket)
        finally:
            browser.terminate()
            browser.wait(timeout=20)


def _debugging_port(profile: Path) -> str:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        lines = (
            (profile / "DevToolsActivePort").read_text().split()
            if (profile / "DevToolsActivePort").exists()
            else []
        )
        if lines:
            return lines[0]
        time.sleep(0.1)
    raise TimeoutError("Chromium opened no debugging port within 30 s")
