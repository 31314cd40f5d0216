"""A real browser without a screen: Chromium of the distribution, driven through its debugging protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websocket

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")

START_S = 30.0


class Tab:
    """One page of the browser."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=30, suppress_origin=True)
        self._numbers = itertools.count(1)
        self.problems: list[str] = []  # errors of scripts, and violations of the content security policy
        self.requests: list[str] = []  # addresses of all requests
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        given = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(given["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.problems.append(f"{given['entry']['text']} ({given['entry'].get('url', '')})")
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])

    def open(self, url: str, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this size and scheme."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 15.0) -> Any:
        """Return the first true value of an expression. While the page loads, it may have none."""
        deadline = time.monotonic() + timeout_s
        guarded = f"(() => {{ try {{ return {expression}; }} catch {{ return null; }} }})()"
        while not (found := self.value(guarded)):
            assert time.monotonic() < deadline, f"{expression} is {found!r}; page: {self.text()[:2000]}; {self.problems}"
            time.sleep(0.05)
        return found

    def text(self) -> str:
        return str(self.value("document.body ? document.body.innerText : ''"))

    def picture(self, file: Path) -> None:
        """Write a picture of the whole page."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Start the browser, and yield its page.

    Args:
        folder: for its profile.
    """
    assert CHROMIUM is not None
    profile = folder / "chromium"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += ["--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + START_S
        while not port_file.exists() or len(port_file.read_text().splitlines()) < 2:
            assert time.monotonic() < deadline, "the browser has not opened its port"
            assert process.poll() is None, "the browser has ended"
            time.sleep(0.05)
        port = int(port_file.read_text().splitlines()[0])
        yield from _tab_of(port)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _tab_of(port: int) -> Iterator[Tab]:
    import urllib.request

    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=5) as answer:
            pages = [each for each in json.load(answer) if each["type"] == "page"]
            if pages:
                break
        assert time.monotonic() < deadline, "the browser has no page"
        time.sleep(0.05)
    tab = Tab(pages[0]["webSocketDebuggerUrl"])
    try:
        yield tab
    finally:
        tab.close()
