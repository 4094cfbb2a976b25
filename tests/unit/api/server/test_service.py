"""What is around the generations: models, tokens, health, metrics, administration, CORS, and the OpenAPI document."""

from __future__ import annotations

import json
from unittest import mock

import pytest

from ratoon.api.server.errors import as_api_error
from ratoon.api.server.routes.service import HealthAnswer, Models, Stats
from ratoon.core.errors import RequestError
from ratoon.version import __version__
from tests.unit.api.server.harness import MAX_MODEL_LEN, MODEL, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

ORIGIN = {"origin": "https://page.example", "content-type": "application/json"}


@on_event_loop
async def test_models_are_listed_under_each_of_their_names():
    async with scripted(served_names=("org/one", "two")) as client:
        body = (await client.get("/v1/models")).json()
        Models.model_validate(body)
        assert [model["id"] for model in body["data"]] == ["org/one", "two"]
        assert body["data"][0]["max_model_len"] == MAX_MODEL_LEN
        assert body["data"][0]["input_modalities"] == ["text"]
        assert (await client.get("/v1/models/org/one")).json() == body["data"][0]
        assert (await client.get("/v1/models/three")).error["code"] == "model_not_found"


@on_event_loop
async def test_the_list_of_models_has_the_defaults_of_their_files():
    async with scripted(defaults={"temperature": 0.6, "top_k": 40, "max_new_tokens": 70}) as client:
        (model,) = Models.model_validate((await client.get("/v1/models")).json()).data
        assert model.sampling_defaults == {
            "temperature": 0.6,
            "top_k": 40,
            "top_p": 1,
            "min_p": 0,
            "typical_p": 1,
            "repetition_penalty": 1,
            "max_tokens": 70,
        }


@on_event_loop
async def test_tokens_there_and_back():
    async with scripted() as client:
        tokens = (await client.post("/tokenize", {"prompt": "a🙂", "return_token_strs": True})).json()
        assert tokens["tokens"] == list("a🙂".encode())
        assert (tokens["count"], tokens["max_model_len"]) == (5, MAX_MODEL_LEN)
        assert tokens["token_strs"] == ["a", "ð", "Ł", "Ļ", "Ĥ"]
        assert (await client.post("/detokenize", {"tokens": tokens["tokens"]})).json() == {"prompt": "a🙂"}


@on_event_loop
async def test_tokens_of_a_conversation():
    async with scripted() as client:
        messages = [{"role": "user", "content": "hi"}]
        with_prompt = (await client.post("/tokenize", {"messages": messages})).json()["tokens"]
        assert bytes(with_prompt).decode() == "<user>hi\n<assistant>"
        body = {"model": MODEL, "messages": messages, "add_generation_prompt": False}
        assert bytes((await client.post("/tokenize", body)).json()["tokens"]).decode() == "<user>hi\n"


@on_event_loop
async def test_text_of_any_length_can_be_counted():
    async with scripted() as client:
        assert (await client.post("/tokenize", {"prompt": "ab" * 50_000})).json()["count"] == 100_000
        assert (await client.post("/tokenize", {"prompt": ""})).json()["count"] == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/v1/embeddings", {"model": MODEL, "input": []}, "input"),
        ("/v1/embeddings", {"model": MODEL, "input": "x", "pooling": "max"}, "pooling"),
        ("/v1/embeddings", {"model": MODEL, "input": "x", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"model": MODEL, "input": "x", "dimensions": 9999}, "dimensions"),
        ("/v1/embeddings", {"model": MODEL, "input": "x", "encoding_format": "hex"}, "encoding_format"),
    ],
)
@on_event_loop
async def test_bad_requests_are_refused_by_name(path, body, param):
    async with scripted() as client:
        answer = await client.post(path, body)
        assert (answer.status, answer.error["param"]) == (400, param)


@on_event_loop
async def test_what_the_engine_finds_wrong_is_named_as_in_the_body():
    async with scripted() as client:
        refusal = RequestError("prompt_token_ids", "does not fit")
        with mock.patch.object(client.context.llm, "embed", side_effect=refusal):
            one = await client.post("/v1/embeddings", {"model": MODEL, "input": "x"})
            two = await client.post("/v1/embeddings", {"model": MODEL, "input": ["x", "y"]})
        assert (one.error["param"], two.error["param"]) == ("input", "input[0]")
    assert as_api_error(RequestError("task", "the model can't translate")).param == "model"
    assert as_api_error(RequestError("sleep", "requests are under way")).param is None


@on_event_loop
async def test_health_version_and_metrics():
    async with scripted(say("abc")) as client:
        health = await client.get("/health")
        HealthAnswer.model_validate(health.json())
        assert (health.status, health.json()["status"]) == (200, "ok")
        assert (await client.get("/version")).json() == {"version": __version__}
        await client.complete(prompt="x")
        await client.complete(prompt="x", model="other")
        await client.get("/nothing/here")
        await client.get("/v1/models/tiny")
        page = (await client.get("/metrics")).body.decode()
    assert 'ratoon_http_requests_total{route="/v1/completions",status="200"} 1.0' in page
    assert 'ratoon_http_requests_total{route="/v1/completions",status="404"} 1.0' in page
    assert 'ratoon_http_requests_total{route="other",status="404"} 1.0' in page
    assert 'route="/v1/models/{model' in page
    assert "ratoon_generation_tokens_total 4.0" in page


@on_event_loop
async def test_administration_exists_only_where_it_was_asked_for():
    async with scripted() as client:
        assert (await client.post("/admin/pause")).status == 404
    async with scripted(admin=True, admin_keys=("admin",)) as client:
        client.headers = {"authorization": "Bearer admin"}
        client.engine.results.update(reset_prefix_cache=True, stop_profile="/tmp/trace.json", stats={})
        for path in ("pause", "resume", "reset_prefix_cache", "sleep?level=2", "wake_up", "profile/start"):
            answer = await client.post(f"/admin/{path}")
            assert (answer.status, answer.json()) == (200, {"ok": True})
        assert (await client.post("/admin/profile/stop")).json() == {"ok": True, "files": ["/tmp/trace.json"]}
        names = [call[0] for call in client.engine.calls]
        assert names == [
            "pause", "resume", "reset_prefix_cache", "sleep", "wake_up", "start_profile", "stop_profile",
        ]  # fmt: skip
        assert ("sleep", 2) in client.engine.calls
        assert (await client.post("/admin/sleep?level=9")).error["param"] == "level"
        Stats.model_validate((await client.get("/admin/stats")).json())


@on_event_loop
async def test_engines_are_added_and_drained_by_an_administrator():
    async with scripted(admin=True, admin_keys=("admin",)) as client:
        client.headers = {"authorization": "Bearer admin"}
        assert (await client.post("/admin/replicas")).json() == {"ok": True, "index": 1}
        assert (await client.post("/admin/replicas/0/drain")).json() == {"ok": True}
        assert (await client.post("/admin/replicas/1/drain?seconds=2.5")).json() == {"ok": True}
        assert client.engine.calls == [("add_replica",), ("drain_replica", 0, 3600.0), ("drain_replica", 1, 2.5)]
        assert (await client.post("/admin/replicas/one/drain")).error["param"] == "index"
        assert (await client.post("/admin/replicas/0/drain?seconds=-1")).error["param"] == "seconds"


@on_event_loop
async def test_paths_and_methods_that_do_not_exist():
    async with scripted() as client:
        assert (await client.get("/nothing")).status == 404
        wrong = await client.get("/v1/completions")
        assert wrong.status == 405
        assert wrong.headers["allow"] == "POST"
        assert wrong.error["type"] == "invalid_request_error"
        assert "use POST" in wrong.error["message"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/completions", "did you mean /v1/completions?"),
        ("/v1/tokenize", "did you mean /tokenize?"),
        ("/v1/chat/completions/", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/admin/stats", "ratoon serve --admin turns it on"),
        ("/v1/nothing/like/it", "There is no '/v1/nothing/like/it' here"),
    ],
)
@on_event_loop
async def test_a_wrong_path_is_told_with_what_may_have_been_meant(path, hint):
    async with scripted() as client:
        answer = await client.post(path, {})
        assert (answer.status, answer.error["type"]) == (404, "invalid_request_error")
        assert hint in answer.error["message"]
        assert ("did you mean" in answer.error["message"]) == ("did you mean" in hint)


@on_event_loop
async def test_other_origins_are_strangers_unless_they_were_named():
    async with scripted(say("x")) as client:
        answer = await client.get("/v1/models", headers=ORIGIN)
        assert "access-control-allow-origin" not in answer.headers
    async with scripted(say("x"), cors_origins=("https://page.example",), api_keys=("key",)) as client:
        asked = {**ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = await client.open("OPTIONS", "/v1/completions", headers=asked).answer()
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        named = {name.strip().lower() for name in preflight.headers["access-control-allow-headers"].split(",")}
        assert {"authorization", "content-type", "x-request-id", "x-stainless-os"} <= named
        asked["access-control-request-headers"] = "authorization, x-of-their-own"
        preflight = await client.open("OPTIONS", "/v1/completions", headers=asked).answer()
        assert preflight.status == 400
        assert "x-of-their-own" not in preflight.headers["access-control-allow-headers"].lower()
        refused = await client.get("/v1/models", headers=ORIGIN)
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")
        body = {"model": MODEL, "prompt": "x", "stream": True}
        streamed = await client.post("/v1/completions", body, headers={**ORIGIN, "authorization": "Bearer key"})
        assert streamed.headers["access-control-allow-origin"] == "https://page.example"
        assert streamed.events()
        stranger = await client.get("/v1/models", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in stranger.headers


@on_event_loop
async def test_the_document_describes_every_route_and_every_answer():
    async with scripted(admin=True, admin_keys=("admin",), api_keys=("key",)) as client:
        answer = await client.get("/openapi.json", headers={"authorization": "Bearer key"})
        document = answer.json()
        assert (await client.get("/docs", headers={"authorization": "Bearer key"})).status == 200
    paths = document["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models", "/tokenize", "/health"} <= set(
        paths
    )
    text = json.dumps(document)
    assert "HTTPValidationError" not in text and "#/$defs" not in text
    for name in ("/v1/completions", "/v1/chat/completions"):
        operation = paths[name]["post"]
        assert set(operation["responses"]) == {
            "200", "400", "401", "403", "404", "408", "409", "413", "415", "417", "429", "500", "503",
        }  # fmt: skip
        assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        assert "application/json" in operation["requestBody"]["content"]
        assert operation["security"] == [{"key": []}]
    assert "security" not in paths["/health"]["get"]
    assert paths["/admin/stats"]["get"]["security"] == [{"adminKey": []}]
    assert set(document["components"]["securitySchemes"]) == {"key", "adminKey"}
    for reference in text.split('"$ref": "#/components/schemas/')[1:]:
        assert reference.split('"')[0] in document["components"]["schemas"]
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"top_k", "cache_salt", "chat_template_kwargs", "return_token_ids", "min_p"} <= set(fields)
