# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium, driven over the DevTools protocol, and a TensorBoard server, for tests and screenshots."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import waiting
import websocket

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_CHROMIUM = "no Chromium on the PATH: apt-get install chromium"
_STARTED_SECS = 120.0
# TensorBoard's own switch, so that the plugin is shown to need no TensorFlow, and starts in a second.
_TENSORBOARD = (
    "import sys, types; sys.modules['tensorboard.compat.notf'] = types.ModuleType('notf'); "
    "from tensorboard import main; main.run_main()"
)


@contextlib.contextmanager
def tensorboard(logdir: pathlib.Path | str) -> Iterator[str]:
    """Runs TensorBoard on a free port, and yields its address."""
    command = [sys.executable, "-c", _TENSORBOARD, f"--logdir={logdir}", "--port=0", "--host=127.0.0.1"]
    command += ["--load_fast=false", "--reload_interval=1"]
    with _running(command, r"at (http://\S+?)/? \(Press", os.environ) as address:
        yield address


@contextlib.contextmanager
def chromium(width: int = 1280, height: int = 900, is_dark: bool = False) -> Iterator[Browser]:
    """Runs Chromium without a window, and yields it with one blank page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [
            str(CHROMIUM),
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={home}",
            f"--window-size={width},{height}",
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--hide-scrollbars",
            # Chromium's sandbox doesn't start for root.
            *(["--no-sandbox"] if os.getuid() == 0 else []),
            "about:blank",
        ]
        environment = {**os.environ, "HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home}
        with _running(command, r"DevTools listening on (ws://\S+)", environment) as address:
            host = address.split("/")[2]
            with urllib.request.urlopen(f"http://{host}/json/list", timeout=60) as answer:
                pages = [each for each in json.load(answer) if each["type"] == "page"]
            socket = websocket.create_connection(pages[0]["webSocketDebuggerUrl"], timeout=120, suppress_origin=True)
            try:
                yield Browser(socket, width, height, is_dark)
            finally:
                socket.close()


class Browser:
    """One page of a browser."""

    def __init__(self, socket: websocket.WebSocket, width: int, height: int, is_dark: bool) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and notes errors that the page reports meanwhile."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:600])
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"] + " " + message["params"]["entry"].get("url", ""))
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Sets the size of the page."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def open(self, address: str) -> None:
        """Opens an address."""
        self.call("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """Evaluates JavaScript in the page; promises are awaited."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {json.dumps(done['exceptionDetails'])[:500]}")
        return done["result"].get("value")

    def wait_for(self, expression: str, timeout_secs: float = 120.0) -> Any:
        """Waits until an expression is true, looking at it in each frame that the page draws."""
        found = self.value(
            f"""new Promise(done => {{
              const end = performance.now() + {1000 * timeout_secs};
              const look = () => {{
                let found = false;
                try {{ found = {expression}; }} catch {{ /* not there yet */ }}
                if (found || performance.now() > end) done(found); else setTimeout(look, 5);
              }};
              look();
            }})"""
        )
        if not found:
            text = self.value("document.body.innerText.slice(0, 600)")
            raise TimeoutError(f"after {timeout_secs:.0f} s not: {expression}; the page: {text!r}; {self.errors}")
        return found

    def click(self, x: float, y: float) -> None:
        """Clicks with the mouse."""
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Sends a mouse event."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, key: str) -> None:
        """Presses a key."""
        text = {"text": key} if len(key) == 1 else {}
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        code = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def screenshot(self, path: pathlib.Path, clip: dict[str, float] | None = None) -> None:
        """Writes a PNG."""
        more = {"clip": {"scale": 1, **clip}, "captureBeyondViewport": True} if clip else {}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"]))


@contextlib.contextmanager
def _running(command: list[str], pattern: str, environment: Any) -> Iterator[str]:
    """Runs a program, yields what the pattern finds in its output, and ends it."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(environment),
        start_new_session=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    try:
        yield _found(lines, pattern, command)
    finally:
        waiting.end(process)
        reader.join(20)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in process.stdout or ():
        lines.put(line)
    lines.put(None)


def _found(lines: queue.Queue[str | None], pattern: str, command: list[str]) -> str:
    seen: list[str] = []
    end = time.monotonic() + _STARTED_SECS
    while True:
        try:
            line = lines.get(timeout=max(0.1, end - time.monotonic()))
        except queue.Empty:
            line = None
        if line is None:
            raise RuntimeError(f"{command[0]} didn't start:\n{''.join(seen[-20:])}")
        seen.append(line)
        if match := re.search(pattern, line):
            return match[1]
