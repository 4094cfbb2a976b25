"""The console in a real browser: Debian's Chromium without a window, driven by Playwright.

Where there is no Chromium, or no Playwright, the tests are skipped, and say so.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.waiting import PATIENCE, wait_until

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# The tests are their own users: nothing that the browser would fetch by itself belongs to them.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]


@contextmanager
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: the console is not tested"
    )
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium: the console is not tested")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=OPTIONS)
        try:
            yield started
        finally:
            started.close()


def module_of(name: str) -> str:
    """An expression whose value is a module of the page: the one that the page itself has, at its address."""
    return f"await import(new URL('{name}', document.querySelector('script[type=module]').src).href)"


class Console:
    """A page of the console, what it asked for, and what went wrong in it."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1300, "height": 850}, **options)
        self.context.set_default_timeout(PATIENCE * 1000)
        self.url = url
        self.requests: list[str] = []
        self.faults: list[str] = []
        self._open_tab()

    def _open_tab(self) -> None:
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.faults.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on(
            "response",
            lambda response: (
                self.faults.append(f"{response.status} of {response.url}") if response.status >= 500 else None
            ),
        )
        # Refusals (4xx) are logged by the browser; the page shows them.
        self.page.on(
            "console",
            lambda message: (
                self.faults.append(message.text)
                if message.type == "error" and "the server responded with a status of" not in message.text
                else None
            ),
        )

    def open(self) -> Console:
        self.page.goto(self.url)
        self.page.wait_for_selector("#composer")
        self.page.wait_for_selector(".bar .model:not(:empty), dialog")
        return self

    def set(self, **fields: object) -> None:
        for name, value in fields.items():
            self.page.fill(f"input[name={name}]", str(value))

    def ask(self, text: str) -> None:
        """Sends a message, and waits until its answer is there."""
        self.page.fill("#composer", text)
        self.page.press("#composer", "Enter")
        self.idle()

    def idle(self) -> None:
        """Until nothing is being written: the field for messages then has its button Send again."""
        self.page.wait_for_selector(".composer button[type=submit]")

    def wait_for(self, expression: str) -> None:
        """Until an expression of the page is true. The page's policy forbids what Playwright's own wait would do."""
        wait_until(expression, lambda: self.page.evaluate(expression))

    def answers(self) -> list[str]:
        return self.page.locator(".message.assistant .answer-text").all_inner_texts()

    def rows(self) -> list[str]:
        return self.page.locator(".outline .row .label").all_inner_texts()

    def chips(self) -> list[str]:
        return self.page.locator(".message.assistant").last.locator(".chip").all_inner_texts()

    def run(self, module: str, expression: str, *arguments: Any) -> Any:
        """The value of an expression over `m`, a module of the page, and `a`, the arguments."""
        return self.page.evaluate(f"async (a) => {{ const m = {module_of(module)}; return {expression}; }}", arguments)

    def open_again(self) -> Console:
        """Opens the page in a new tab, as a new visitor sees it whose browser has its files."""
        self.page.close()
        self.requests.clear()
        self._open_tab()
        return self.open()

    def close(self) -> None:
        self.context.close()
        self.check()

    def check(self) -> None:
        assert not self.faults
        foreign = [url for url in self.requests if not url.startswith((self.url, "data:", "blob:"))]
        assert not foreign, "the page asked another host"


def drop(console: Console, name: str, kind: str, content: bytes) -> None:
    """Drops a file on the field for messages, as a file manager does."""
    console.page.evaluate(
        """([data, name, kind]) => { const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
        const files = new DataTransfer();
        files.items.add(new File([bytes], name, {type: kind}));
        document.querySelector('.composer').dispatchEvent(
            new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true})); }""",
        [base64.b64encode(content).decode(), name, kind],
    )
