"""How soon a browser paints the console: the first contentful paint of the page, with an empty cache and with its own.

    .venv/bin/python bench/console_paint.py --json console_paint.json

Chromium without a window, driven by Playwright, opens the page of a server with the embedded model. Times are those of
the browser, from the begin of the navigation. The aim is a median of less than 200 ms.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from export_hf import MODEL
from harness import Program, count, format_spread, spread
from peers.process import EngineFailedError
from service.server import ServerProcess

AIM = 200.0  # milliseconds
COLD, WARM = "cold", "warm"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
FIRST_PAINT = """() => new Promise((resolve) => {
  const look = () => {
    const found = performance.getEntriesByType("paint").find((entry) => entry.name === "first-contentful-paint");
    if (found) resolve(found.startTime); else setTimeout(look, 5);
  };
  look();
})"""


class ConsolePaint(Program):
    doc = __doc__
    rounds = None
    threads = False

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        count(parser, "--opens", 10, "of each kind")

    def measure(self) -> None:
        try:
            from playwright import sync_api
        except ImportError:
            raise EngineFailedError("Playwright is not installed") from None
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        if path is None:
            raise EngineFailedError(f"there is no Chromium: none of {', '.join(BROWSERS)} is found")
        with ExitStack() as stack:
            server = stack.enter_context(ServerProcess([MODEL]))
            driver = stack.enter_context(sync_api.sync_playwright())
            browser = driver.chromium.launch(executable_path=path, args=OPTIONS)
            stack.callback(browser.close)
            self.version = browser.version
            url = f"http://{server.host}:{server.port}/"
            open_page(browser, url)  # warms up the server and the browser's process
            self.found = {COLD: [], WARM: []}
            for _ in range(self.args.opens):
                context = browser.new_context()  # with a cache of its own, which is empty
                page = context.new_page()
                for kind in (COLD, WARM):
                    self.found[kind].append(first_paint(page, url))
                context.close()

    def title(self) -> str:
        return f"the console in Chromium {self.version}"

    def report(self) -> Iterator[str]:
        lines = [f"First contentful paint in milliseconds, {self.args.opens} opens: median (min–max)"]
        for kind, times in self.found.items():
            found = spread(times)
            verdict = "reached" if found["median"] < AIM else "missed"
            lines.append(f"  {kind:<6}{format_spread(found)}; the aim of {AIM:g} is {verdict}")
        yield "\n".join(lines)

    def figures(self) -> dict[str, Any]:
        return {"first_contentful_paint_ms": self.found}


def open_page(browser: Any, url: str) -> None:
    page = browser.new_page()
    first_paint(page, url)
    page.close()


def first_paint(page: Any, url: str) -> float:
    """Opens the page, and returns when it was painted. It is left once all of it is loaded, and kept in the cache."""
    page.goto(url, wait_until="load")
    painted: float = page.evaluate(FIRST_PAINT)
    page.wait_for_selector(".bar .model:not(:empty)")
    return painted


if __name__ == "__main__":
    sys.exit(ConsolePaint().run())
