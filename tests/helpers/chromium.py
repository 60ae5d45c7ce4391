"""A real Chromium without a driver: DevTools messages over two pipes.

`--remote-debugging-pipe` reads commands from descriptor 3 and writes answers to descriptor 4, each
a JSON text ended by a NUL.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_S = 30.0


def find_browser() -> str:
    """The browser to use: $HONESMITH_CHROMIUM, else the first of NAMES; "" without one."""
    named = os.environ.get("HONESMITH_CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), "")


class Chromium:
    """One browser with one page.

    Attributes:
        requests: addresses the page has asked for since it was opened.
        complaints: what it wrote to the console or threw.
    """

    def __init__(self, program: str) -> None:
        self.program = program
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="honesmith-browser-")
        self._count = 0
        self._buffer = b""
        self._session = ""

    def __enter__(self) -> "Chromium":
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        arguments += ["--remote-debugging-pipe", f"--user-data-dir={self._profile.name}"]
        arguments += ["--no-first-run", "--disable-extensions", "--disable-background-networking"]
        line = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", line, self.program, *arguments],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        attach = {"targetId": target, "flatten": True}
        self._session = self._ask("Target.attachToTarget", attach)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._ask(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def open(self, page: Path, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Load a file at a width of CSS pixels, in a light or a dark surrounding."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", size)
        self.requests.clear()
        self.complaints.clear()
        self._ask("Page.navigate", {"url": page.resolve().as_uri()})
        deadline = time.monotonic() + PATIENCE_S
        while self.ask_page("document.readyState") != "complete":
            assert time.monotonic() < deadline, "the page does not finish loading"
            time.sleep(0.02)

    def ask_page(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression."""
        said = {"expression": expression, "returnByValue": True}
        found = self._ask("Runtime.evaluate", said)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, whole: bool = False, top: int = 0, height: int = 0) -> bytes:
        """A PNG of what is seen, of the whole page, or of `height` pixels from `top` on."""
        asked: dict[str, Any] = {"format": "png", "captureBeyondViewport": True}
        if whole or height:
            size = self.ask_page("[innerWidth, document.documentElement.scrollHeight]")
            tall = min(height, size[1] - top) if height else size[1]
            asked["clip"] = {"x": 0, "y": top, "width": size[0], "height": tall, "scale": 1}
        return base64.b64decode(self._ask("Page.captureScreenshot", asked)["data"])

    def _ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params or {}}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], PATIENCE_S)
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, f"the browser is gone: {self._process.poll()}"
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method", ""), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(params)[:500])
