"""/ and /docs: pages for people, that need nothing from elsewhere and give nothing away; and examples that work."""

from __future__ import annotations

import re

import pytest

from ratoon.api.server.context import ServerContext
from ratoon.api.server.settings import ServerSettings
from ratoon.version import __version__
from tests.engines_async import thread_engine
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, Client, scripted, write_tiny_model
from tests.unit.engine.fakes_async import on_event_loop

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "host": "server.test"}
LINKS = ("/docs", "/v1/models", "/health", "/metrics")


@on_event_loop
async def test_the_first_page_says_what_this_is():
    async with scripted(console=False) as client:
        page = await client.get("/", headers=BROWSER)
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        text = page.body.decode()
        assert __version__ in text and MODEL in text
        assert all(f'<a href="{path[1:]}">' in text for path in LINKS)
        plain = await client.get("/", headers={"accept": "*/*", "host": "server.test"})  # curl
        assert plain.headers["content-type"].startswith("text/plain")
        assert all(f"http://server.test{path}" in plain.body.decode() for path in LINKS)
        data = (await client.get("/", headers={"accept": "application/json"})).json()
        assert (data["name"], data["version"], data["models"]) == ("ratoon", __version__, [MODEL])


@on_event_loop
async def test_where_keys_are_asked_for_the_pages_are_open_and_say_nothing_private():
    async with scripted(api_keys=("sesame",), served_names=("secret-model",)) as client:
        for path in ("/", "/docs"):
            for accept in (BROWSER["accept"], "*/*", "application/json"):
                page = await client.get(path, headers={"accept": accept})
                assert page.status == 200
                assert b"secret-model" not in page.body and b"sesame" not in page.body
        assert (await client.get("/", headers={"accept": "application/json"})).json()["needs_api_key"] is True
        assert (await client.get("/openapi.json")).status == 401
        document = (await client.get("/openapi.json", headers={"authorization": "Bearer sesame"})).json()
        example = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["example"]
        assert example["model"] == "secret-model"


@on_event_loop
async def test_a_name_in_a_page_is_text():
    async with scripted(served_names=("<script>alert(1)</script>",), console=False) as client:
        page = (await client.get("/", headers={**BROWSER, "host": '"><b>'})).body
        assert b"<script>" not in page and b"<b>" not in page


@on_event_loop
async def test_the_pages_take_nothing_from_elsewhere():
    async with scripted() as client:
        for path in ("/", "/docs"):
            page = await client.get(path, headers={"accept": "text/html"})
            text = page.body.decode()
            assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text)
            assert "{{" not in text
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


@pytest.mark.slow
@on_event_loop
async def test_every_example_of_the_document_works(tmp_path):
    async with thread_engine(str(write_tiny_model(tmp_path / MODEL)), **TINY_SETTINGS) as llm:
        client = Client(ServerContext(llm, ServerSettings()))
        document = (await client.get("/openapi.json")).json()
        asked = []
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                content = operation.get("requestBody", {}).get("content", {}).get("application/json")
                for parameter in operation.get("parameters", ()):
                    path = path.replace(f"{{{parameter['name']}}}", str(parameter.get("example")))
                if (
                    "/audio/" in path or "/responses/" in path or "/conversations/" in path or method == "delete"
                ):  # need a recording, or an answer's id
                    continue
                if path.endswith(("/rerank", "/score", "/classify")):  # of other models: test_scoring.py
                    continue
                path += "?count=1" if path.endswith("/events") else ""  # a stream without an end
                answer = await client.open(method.upper(), path, content and content["example"]).answer()
                assert answer.status == 200, (path, answer.body)
                asked.append(path)
        assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/hidden_states"} <= set(asked)
        assert {"/tokenize", "/detokenize", f"/v1/models/{MODEL}"} <= set(asked)
