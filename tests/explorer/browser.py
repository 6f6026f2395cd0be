"""A headless Chromium over the WebDriver protocol: what the page tests need of it.

Reference: W3C, "WebDriver"; the commands under goog and se are ChromeDriver's own.
"""

import base64
import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # how the protocol marks elements
KEYS = {"up": "\ue013", "down": "\ue015", "left": "\ue012", "right": "\ue014"}


@contextlib.contextmanager
def chromium(profile: Path):
    """Yields a `Browser` with a new profile; skips where there is no Chromium."""
    driver, binary = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or binary is None:
        pytest.skip("needs chromium and chromedriver (Debian: chromium-driver)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        browser = Browser(port, binary, profile)
        try:
            yield browser
        finally:
            browser.command("DELETE", "")
    finally:
        process.terminate()
        process.wait(30)


class Browser:
    """One session: a window and what happens in it."""

    def __init__(self, port: int, binary: str, profile: Path):
        self.port, self.session = port, "/session"
        options = {
            "binary": binary,
            "args": [*SWITCHES, f"--user-data-dir={profile}", "about:blank"],
        }
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self._wait_for_driver()
        answer = self.command("POST", "", capabilities={"alwaysMatch": wanted})
        self.session = f"/session/{answer['sessionId']}"

    def _wait_for_driver(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(ConnectionError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            assert time.monotonic() < deadline, "chromedriver does not start"
            time.sleep(0.05)

    def command(self, method: str, path: str, **arguments):
        """The value that ChromeDriver answers; its error fails the test."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = json.dumps(arguments) if method == "POST" else None
        connection.request(method, self.session + path, body)
        value = json.loads(connection.getresponse().read())["value"]
        connection.close()
        error = value.get("error") if isinstance(value, dict) else None
        assert error is None, f"{path}: {error}: {value['message'].splitlines()[0]}"
        return value

    def open(self, address: str) -> None:
        self.command("POST", "/url", url=address)

    def run(self, script: str, *arguments):
        """What a script returns, run as the body of a function."""
        return self.command("POST", "/execute/sync", script=script, args=arguments)

    def wait(self, script: str, *arguments):
        """What a script returns as soon as that is true."""
        deadline = time.monotonic() + 60
        while not (value := self.run(script, *arguments)):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.03)
        return value

    def find(self, selector: str) -> str:
        found = self.command(
            "POST", "/element", using="css selector", value=selector
        )  # fmt: skip
        return found[ELEMENT]

    def click(self, selector: str) -> None:
        self.command("POST", f"/element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Types into an element; names of `KEYS` in braces are pressed."""
        for name, key in KEYS.items():
            text = text.replace("{" + name + "}", key)
        self.command("POST", f"/element/{self.find(selector)}/value", text=text)

    def retype(self, selector: str, text: str) -> None:
        self.command("POST", f"/element/{self.find(selector)}/clear")
        self.type(selector, text)

    def hover(self, selector: str) -> None:
        origin = {ELEMENT: self.find(selector)}
        move = {"type": "pointerMove", "origin": origin, "x": 0, "y": 0, "duration": 0}
        pointer = {"type": "pointer", "id": "mouse", "actions": [move]}
        self.command("POST", "/actions", actions=[pointer])

    def text(self, selector: str) -> str:
        return self.run(
            "return document.querySelector(arguments[0]).innerText", selector
        )

    def devtools(self, name: str, **parameters):
        return self.command("POST", "/goog/cdp/execute", cmd=name, params=parameters)

    def show_as(self, width: int, height: int, scheme: str, motion="reduce") -> None:
        """Sets the size of the window and the reader's preferences."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1},
            mobile=False,
        )
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """Writes the whole page as PNG."""
        taken = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def log(self, kind: str) -> list[dict]:
        """What was logged since the last call: of the "browser" or of "performance"."""
        return self.command("POST", "/se/log", type=kind)

    def requests(self) -> list[str]:
        """The addresses asked for since the last call."""
        events = [json.loads(entry["message"]) for entry in self.log("performance")]
        addresses = [
            event["message"]["params"]["request"]["url"]
            for event in events
            if event["message"]["method"] == "Network.requestWillBeSent"
        ]
        # Those of the browser's own pages and of inlined data go nowhere.
        return [url for url in addresses if not url.startswith(("chrome", "data:"))]
