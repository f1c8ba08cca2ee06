"""A real browser without a window, told what to do over a pipe (the DevTools protocol)."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shlex
import shutil
import struct
import subprocess
import time
import zlib

from mpi_tests.cluster.command import end_group

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # containers have no user namespaces, and the page is ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
)


def find_browser():
    """The browser's path; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of one browser; everything that it fetched or complained about is kept."""

    def __init__(self, path, profile):
        self.requests, self.complaints = [], []
        self._number, self._pending = 0, b""
        ours, theirs = os.pipe(), os.pipe()  # commands to it, answers from it
        # It reads 3 and writes 4, whatever numbers the pipes have here.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (ours[0], theirs[1])]
        words = shlex.join([path, *FLAGS, f"--user-data-dir={profile}", "about:blank"])
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {words} 3<&{ends[0]} 4>&{ends[1]}"],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in (*ends, ours[0], theirs[1]):
            os.close(end)
        self._write, self._read = ours[1], theirs[0]
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self):
        target = self.ask("Target.getTargets", session=None)["targetInfos"]
        page = next(one["targetId"] for one in target if one["type"] == "page")
        attached = self.ask("Target.attachToTarget", session=None, targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method, *, session="", timeout_s=60.0, **parameters):
        """Give a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout_s
        while True:
            told = self._next(deadline)
            if told.get("id") == self._number:
                assert "error" not in told, (method, told["error"])
                return told["result"]

    def open(self, path, *, width, height=900, media="screen"):
        """Show a file in a window of this size, on paper if `media` is print."""
        self.requests.clear()
        self.complaints.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Emulation.setEmulatedMedia", media=media)
        self.ask("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 60
        while self.look("document.readyState + location.href") != f"complete{path.as_uri()}":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.02)

    def look(self, expression):
        """The value of an expression, in the page."""
        told = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def picture(self, **clip):
        """A picture of the page, or of a part of it: width, height, and its bytes in rows."""
        area = {"clip": {**clip, "scale": 1}} if clip else {}
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=True, **area)["data"]
        return read_png(base64.b64decode(data))

    def close(self):
        """End the browser and all its processes."""
        with contextlib.suppress(OSError):
            os.close(self._write)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)
        end_group(self._process)
        os.close(self._read)

    def _next(self, deadline):
        """The next message; what the page did on the way is noted."""
        while b"\0" not in self._pending:
            left = deadline - time.monotonic()
            ready = select.select([self._read], [], [], max(0.0, left))[0]
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._pending += data
        first, _, self._pending = self._pending.partition(b"\0")
        told = json.loads(first)
        method, said = told.get("method"), told.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(said["entry"]["text"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(said)[:200])
        return told


def read_png(data):
    """Width, height and the uncompressed rows of a PNG, filters and all."""
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    place, packed = 8, b""
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        if data[place + 4 : place + 8] == b"IDAT":
            packed += data[place + 8 : place + 8 + length]
        place += 12 + length
    return width, height, zlib.decompress(packed)
