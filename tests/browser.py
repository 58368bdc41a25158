"""Headless Chromium, driven through its debugging pipe: real keys, real downloads, and what it tried to load."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager

from launch import LIMIT_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


class Page:
    """One page. `requests` are the addresses that it asked for, `complaints` what the console got."""

    def __init__(self, commands, replies):
        self.commands, self.replies = commands, replies
        self.buffer, self.count, self.session = b"", 0, None
        self.requests, self.complaints, self.loads, self.downloads = [], [], 0, []

    def call(self, method, **params):
        """Return the result of a command of the DevTools protocol."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session is not None and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self.read()
            if reply.get("id") == self.count:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]

    def read(self):
        """Return the next message, and note what it tells."""
        end = time.monotonic() + LIMIT_S
        while b"\0" not in self.buffer:
            assert select.select([self.replies], [], [], max(0.0, end - time.monotonic()))[0], "Chromium is silent."
            part = os.read(self.replies, 1 << 20)
            assert part, "Chromium has ended."
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Page.loadEventFired":
            self.loads += 1
        elif method == "Browser.downloadProgress" and params["state"] == "completed":
            self.downloads.append(params["guid"])
        return message

    def open(self, path, width, height=900):
        """Load a file at a width in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        before = self.loads
        self.call("Page.navigate", url=path.as_uri())
        while self.loads == before:
            self.read()

    def evaluate(self, expression):
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key):
        """Press a key, as a person does."""
        code = {"ArrowDown": 40, "ArrowUp": 38, "Tab": 9, "Enter": 13}.get(key) or ord(key)
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def download(self, expression, folder):
        """Return the bytes of the file that an action downloads."""
        self.call("Browser.setDownloadBehavior", behavior="allowAndName", downloadPath=str(folder), eventsEnabled=True)
        before = len(self.downloads)
        self.evaluate(expression)
        while len(self.downloads) == before:
            self.read()
        return (folder / self.downloads[-1]).read_bytes()

    def screenshot(self, path):
        """Write a picture of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def chromium(profile):
    """Start Chromium with an empty profile, and end it."""
    commands, to_chromium = os.pipe()
    from_chromium, replies = os.pipe()
    # The program reads commands from descriptor 3 and writes to 4.
    shell = f'exec "$0" "$@" 3<&{commands} 4>&{replies}'
    with subprocess.Popen(
        ["bash", "-c", shell, CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(commands, replies),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(commands)
        os.close(replies)
        try:
            page = Page(to_chromium, from_chromium)
            targets = page.call("Target.getTargets")["targetInfos"]
            (target,) = [t["targetId"] for t in targets if t["type"] == "page"]
            page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log"):
                page.call(f"{domain}.enable")
            yield page
            page.call("Browser.close")
        finally:
            os.close(to_chromium)
            os.close(from_chromium)
            process.kill()
