"""The console's files and its page at /: what is served, under which policy, and what is not."""

from __future__ import annotations

import gzip
import re

import pytest

from ratoon.api.server.routes import console
from ratoon.version import __version__
from tests.unit.api.server.harness import MODEL, scripted
from tests.unit.engine.fakes_async import on_event_loop

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8", "host": "server.test"}
PAGE = b"<!doctype html><script type=module src=console/app.js></script>"
SCRIPT = b"export const text = 'the same line again and again';\n" * 50


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    folder = tmp_path / "console"
    (folder / "vendor").mkdir(parents=True)
    (folder / "index.html").write_bytes(PAGE)
    (folder / "app.js").write_bytes(SCRIPT)
    (folder / "style.css").write_text("body { margin: 0 }")
    (folder / "vendor" / "icon.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (folder / "__init__.py").write_text("SECRET = 1")
    (folder / ".hidden.js").write_text("secret")
    (tmp_path / "outside.js").write_text("secret")
    (folder / "link.js").symlink_to(tmp_path / "outside.js")
    monkeypatch.setattr(console, "FOLDER", folder)
    return folder


@on_event_loop
async def test_browsers_get_the_page_and_programs_what_they_had():
    async with scripted() as client:
        page = await client.get("/", headers=BROWSER)
        assert (page.status, page.body, page.headers["content-type"]) == (200, PAGE, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"].split("; ")
        assert policy == [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data: blob:",
            "media-src 'self' data: blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["referrer-policy"] == "no-referrer"
        curl = await client.get("/", headers={"accept": "*/*", "host": "server.test"})
        assert curl.headers["content-type"].startswith("text/plain")
        assert (await client.get("/", headers={"accept": "application/json"})).json()["name"] == "ratoon"


@on_event_loop
async def test_files_have_types_and_tags_and_are_compressed_where_that_is_accepted(files):
    async with scripted() as client:
        for path, kind in (
            ("app.js", "text/javascript"),
            ("style.css", "text/css"),
            ("vendor/icon.svg", "image/svg+xml"),
        ):
            answer = await client.get(f"/console/{path}", headers={})
            assert answer.status == 200 and answer.headers["content-type"].startswith(kind)
            assert "content-security-policy" in answer.headers and answer.headers["cache-control"] == "no-cache"
        plain = await client.get("/console/app.js", headers={})
        packed = await client.get("/console/app.js", headers={"accept-encoding": "br, gzip;q=0.5"})
        assert plain.body == SCRIPT and "content-encoding" not in plain.headers
        assert gzip.decompress(packed.body) == SCRIPT and packed.headers["content-encoding"] == "gzip"
        tag = plain.headers["etag"]
        again = await client.get("/console/app.js", headers={"if-none-match": tag})
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
        (files / "app.js").write_bytes(b"export {};")
        changed = await client.get("/console/app.js", headers={"if-none-match": tag})
        assert (changed.status, changed.body) == (200, b"export {};")


@on_event_loop
async def test_a_browser_keeps_files_below_the_tag_of_their_contents(files, monkeypatch):
    (files / "index.html").write_text('<link rel="stylesheet" href="console/style.css" />')
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    async with scripted() as client:
        page = (await client.get("/", headers=BROWSER)).body.decode()
        (path,) = re.findall(r'href="(console/v-[0-9a-f]{16}/style\.css)"', page)
        kept = await client.get(f"/{path}", headers={})
        assert (kept.status, kept.body) == (200, b"body { margin: 0 }")
        assert kept.headers["cache-control"] == "public, max-age=31536000, immutable"
        (files / "app.js").write_bytes(b"export {};")
        now += 1
        changed = await client.get("/", headers=BROWSER)
        assert changed.headers["cache-control"] == "no-cache" and path not in changed.body.decode()
        old = await client.get(f"/{path}", headers={})
        assert (old.status, old.headers["cache-control"]) == (200, "no-cache"), "it is not what that tag stood for"
        for wrong in ("v-/style.css", "v-1/../style.css", "v-1/.hidden.js", "v-1", "v-1/v-1/style.css"):
            answer = await client.get(f"/console/{wrong}", headers={})
            assert answer.status == (200 if wrong == "v-/style.css" else 404), wrong
            assert answer.headers.get("cache-control") in ("no-cache", None)


@pytest.mark.parametrize(
    "path",
    ["nothing.js", "__init__.py", ".hidden.js", "../outside.js", "vendor/../app.js", "link.js", "vendor", "", "a\0.js"],
)
def test_nothing_else_is_served(path):
    @on_event_loop
    async def refused():
        async with scripted() as client:
            answer = await client.get(f"/console/{path}", headers={})
            assert answer.status == 404 and b"secret" not in answer.body.lower().replace(b"'.hidden", b"")

    refused()


@on_event_loop
async def test_the_page_learns_what_it_needs_without_a_key():
    async with scripted() as client:
        config = (await client.get("/console/config.json", headers={})).json()
        assert config == {
            "version": __version__,
            "needs_key": False,
            "needs_admin_key": False,
            "admin": False,
            "models": [MODEL],
        }
    settings = {"api_keys": ("sesame",), "admin": True, "admin_keys": ("root",)}
    async with scripted(served_names=("secret-model",), **settings) as client:
        config = (await client.get("/console/config.json", headers={})).json()
        assert (config["needs_key"], config["needs_admin_key"], config["admin"]) == (True, True, True)
        assert config["models"] == []
        assert (await client.get("/", headers=BROWSER)).body == PAGE
        assert (await client.get("/console/app.js", headers={})).status == 200
        assert (await client.get("/v1/models", headers={})).status == 401


@on_event_loop
async def test_without_the_console_there_is_the_plain_page():
    async with scripted(console=False) as client:
        page = await client.get("/", headers=BROWSER)
        assert page.status == 200 and MODEL in page.body.decode() and page.body != PAGE
        for path in ("app.js", "config.json"):
            assert (await client.get(f"/console/{path}", headers={})).status == 404


@on_event_loop
async def test_where_the_files_are_not_installed_there_is_the_plain_page(files):
    (files / "index.html").unlink()
    async with scripted() as client:
        assert MODEL in (await client.get("/", headers=BROWSER)).body.decode()
