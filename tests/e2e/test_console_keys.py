"""The console of a server with keys: it asks for one, keeps it in memory, and shows what the key may see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.consoles import Console
from tests.e2e.servers import ADMIN_KEY, Server, serving
from tests.unit.api.server.harness import write_tiny_model

KEY = "key-of-the-reader"


@pytest.fixture(scope="module")
def server(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with serving(folder, "--api-key", KEY, "--admin", "--admin-key", ADMIN_KEY) as started:
        yield started


def test_the_key_is_asked_for_and_kept_in_memory_alone(chromium: Any, server: Server):
    console = Console(chromium, server.url).open()
    page = console.page
    assert page.locator(".bar .model").inner_text() == "", "without a key no model is named"
    page.fill("dialog input[name=key]", KEY)
    page.press("dialog input[name=key]", "Enter")
    page.wait_for_selector(".bar .model >> text=tiny")
    kept = page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, document.documentElement.outerHTML])"
    )
    assert KEY not in kept
    assert console.context.cookies() == []
    assert all(KEY not in url for url in console.requests)
    page.reload()
    page.wait_for_selector("dialog input[name=key]")
    page.fill("dialog input[name=key]", "wrong")
    page.press("dialog input[name=key]", "Enter")
    page.wait_for_selector("dialog input[name=key]")
    console.close()


def test_the_map_is_the_key_s_own_and_an_admin_key_opens_all(chromium: Any, server: Server):
    console = Console(chromium, server.url).open()
    page = console.page
    page.fill("dialog input[name=key]", KEY)
    page.press("dialog input[name=key]", "Enter")
    page.wait_for_selector(".bar .model >> text=tiny")
    page.click("nav >> text=Engine")
    page.wait_for_selector(".blocks canvas")
    with page.expect_request("**/v1/engine/events*") as asked:
        page.click("summary:has-text('Admin key')")
        page.fill("input[name=admin]", ADMIN_KEY)
        page.press("input[name=admin]", "Enter")
    assert asked.value.headers["authorization"] == f"Bearer {ADMIN_KEY}"
    page.wait_for_selector(".blocks canvas")
    console.close()
