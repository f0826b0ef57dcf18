"""Debian's Chromium, driven by selenium: the page as a person sees it, and what it asks the network for."""

import base64
import contextlib
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars"
)
LIMIT_S = 30.0
DESK, PHONE = (1400, 900), (390, 844)
LOCAL = {"data", "blob", "about", "file", "chrome"}
INSIDE = {"127.0.0.1", "localhost", "", None}


def data_of(page: str) -> Any:
    """The numbers in a page that is a report."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


class Browser:
    """A browser with an empty profile in `folder`, as a context manager."""

    def __init__(self, folder: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        options = Options()
        options.binary_location = CHROMIUM
        for flag in [*FLAGS.split(), f"--user-data-dir={folder / 'profile'}"]:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, Service(DRIVER))
        self.requests: list[str] = []
        self.said: list[str] = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.driver.quit()

    def open(self, link: str, size=DESK, scheme="light") -> None:
        """Open a page in a window of a size."""
        self.look_like(size, scheme)
        self.driver.get("about:blank")
        self.driver.get(link)

    def look_like(self, size=DESK, scheme="light") -> None:
        """The size of the window, and the person's colour scheme."""
        width, height = size
        say = self.driver.execute_cdp_cmd
        say(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        say("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def find(self, css: str):
        """The elements of a selector."""
        return self.driver.find_elements("css selector", css)

    def text(self, css: str = "main") -> str:
        """The text of the first element of a selector."""
        elements = self.find(css)
        with contextlib.suppress(Exception):
            return elements[0].text
        return ""

    def wait(self, what, of: str) -> None:
        """Wait until `what()` holds."""
        end = time.monotonic() + LIMIT_S
        while not what():
            assert time.monotonic() < end, f"{of}\n{self.text('body')}\n{self.logs()}"
            time.sleep(0.1)

    def run(self, script: str, *words):
        """Run a script, and return what it returns."""
        return self.driver.execute_script(script, *words)

    def logs(self) -> list[str]:
        """What was written on the console so far, and in `requests` which addresses were asked for."""
        self.said += [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
        return self.said

    def outside(self) -> list[str]:
        """The addresses beyond the loopback that were asked for."""
        self.logs()
        urls = [urlsplit(url) for url in self.requests]
        return [url.geturl() for url in urls if url.scheme not in LOCAL and url.hostname not in INSIDE]

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write what is shown as a PNG: the whole page, or what the window shows."""
        size = self.run("return [document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        given = {"format": "png", **({"clip": clip, "captureBeyondViewport": True} if whole else {})}
        data = self.driver.execute_cdp_cmd("Page.captureScreenshot", given)["data"]
        path.write_bytes(base64.b64decode(data))
