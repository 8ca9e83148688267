"""A headless Chromium for tests of pages, spoken to over a pipe; tests skip where there is none."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "there is no Chromium on this machine"
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One page, and what was said on its console."""

    def __init__(self, writes: int, reads: int) -> None:
        self._writes, self._reads, self._number, self._rest = writes, reads, 0, b""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """The answer to one call. Events before it are noted."""
        self._number += 1
        session = getattr(self, "_session", None)
        message = {"id": self._number, "method": method, "params": given, **({"sessionId": session} if session else {})}
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return dict(found["result"])
            self._note(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._reads, 1 << 16)
            assert part, "Chromium ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        if event.get("method") == "Log.entryAdded":
            self.complaints.append(given["entry"]["text"])
        elif event.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(given))
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif event.get("method") == "Page.javascriptDialogOpening":
            self.complaints.append("a dialog")
            os.write(self._writes, b"")

    def open(self, page: Path, *, width: int, dark: bool = False) -> None:
        """Open a file at a width, in light or dark, and wait until it is drawn."""
        self.complaints, self.requests = [], []
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        self.value(
            "new Promise(done => document.readyState == 'complete' ? done(1) : addEventListener('load', () => done(1)))"
        )

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium that ends with the block."""
    assert PROGRAM is not None, MISSING
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Chromium reads from file descriptor 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
        process = subprocess.Popen(
            ["bash", "-c", command, PROGRAM, *_QUIET, f"--user-data-dir={profile}"],
            pass_fds=(their_in, their_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(their_in)
        os.close(their_out)
        try:
            yield Browser(our_out, our_in)
        finally:
            process.terminate()
            process.wait(30)
            os.close(our_out)
            os.close(our_in)
