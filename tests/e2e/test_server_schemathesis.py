"""The OpenAPI document against the server: requests made from the document, and answers that it must have foreseen."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ratoon.api.server.app import create_app
from ratoon.api.server.settings import ServerSettings
from tests import seeds
from tests.engines_async import make_thread_engine
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, write_tiny_model
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NUM_EXAMPLES = seeds.examples(50)  # for each operation, of requests that keep to the document and of those that do not
REQUIRED = ("model", "max_tokens", "prompt", "messages", "input", "tokens", "file")
NUM_OPTIONAL = 3
ADMIN_KEY = "admin"
AS_ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
EVENTS = "/v1/engine/events"  # a stream that ends by itself only if it is told after how many
CONVERSATION = "/v1/conversations/{conversation_id}"
WITH_INPUT = [
    *(("post", f"/v1/{name}") for name in ("completions", "chat/completions", "embeddings", "hidden_states")),
    *(("post", f"/v1/{name}") for name in ("responses", "messages", "messages/count_tokens")),
    *(("post", path) for path in ("/v1/rerank", "/v2/rerank", "/v1/score", "/v1/classify")),
    *(("post", f"/api/{name}") for name in ("chat", "generate", "embed", "embeddings", "show")),
    *(("post", f"/v1/audio/{name}") for name in ("transcriptions", "translations")),
    *(("post", "/tokenize"), ("post", "/detokenize"), ("post", "/admin/sleep"), ("get", "/v1/requests")),
    *(("post", f"/v1/{name}_lora_adapter") for name in ("load", "unload")),
    ("post", "/admin/replicas/{index}/drain"),
    *(("get", "/v1/responses/{response_id}"), ("get", "/v1/responses/{response_id}/input_items")),
    *(("post", path) for path in ("/v1/conversations", CONVERSATION, f"{CONVERSATION}/items")),
    ("get", f"{CONVERSATION}/items"),
]
WHATEVER_INPUT = [  # none, or a name, with which nothing can be wrong
    *(("post", f"/admin/{name}") for name in ("wake_up", "pause", "resume", "reset_prefix_cache", "replicas")),
    *(("post", "/admin/profile/start"), ("post", "/admin/profile/stop"), ("get", "/admin/stats")),
    *(("get", path) for path in ("/v1/models", "/v1/models/{model}", "/health", "/version", "/metrics")),
    *(("get", f"/api/{name}") for name in ("tags", "ps", "version")),
    ("delete", "/v1/requests/{request_id}"),
    *(("delete", f"/v1/engine/{name}/{{request_id}}") for name in ("requests", "leases")),
    ("get", EVENTS),
    *(("delete", "/v1/responses/{response_id}"), ("post", "/v1/responses/{response_id}/cancel")),
    *((method, path) for method in ("get", "delete") for path in (CONVERSATION, f"{CONVERSATION}/items/{{item_id}}")),
]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The application on an event loop of its own, in a thread; whoever calls it from another loop is sent there."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def on_loop(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    folder = write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)
    # Short, so that a request for as much as possible is answered soon.
    llm = make_thread_engine(str(folder), **{**TINY_SETTINGS, "max_model_len": 64})
    on_loop(llm.start())

    inner = create_app(llm, ServerSettings(admin=True, admin_keys=(ADMIN_KEY,), max_request_tokens=256, max_batch=4))

    async def app(scope, receive, send):
        async def call():
            await inner(scope, lambda: across(receive()), lambda message: across(send(message)))

        caller = asyncio.get_running_loop()

        async def across(work):
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, caller))

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), loop))

    yield app
    on_loop(llm.shutdown())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture(scope="module")
def schema(app):
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *((*operation, mode) for operation in WITH_INPUT for mode in GenerationMode),
        *((*operation, GenerationMode.POSITIVE) for operation in WHATEVER_INPUT),
    ],
)
@pytest.mark.one_in(5)
def test_no_answer_is_a_surprise(schema, method, path, mode):
    operation = schema[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=NUM_EXAMPLES, suppress_health_check=list(HealthCheck))
    def ask(case):
        if isinstance(case.body, dict):
            lighten(case.body)
        if path == EVENTS:
            case.query["count"] = 1
        case.call_and_validate(checks=CHECKS, headers=AS_ADMIN, timeout=PATIENCE)

    try:
        ask()
    finally:  # an engine that was paused, or sleeps, answers the next test again
        for name in ("wake_up", "resume"):
            schema[f"/admin/{name}"]["post"].Case().call(headers=AS_ADMIN, timeout=PATIENCE)


def lighten(body: dict) -> None:
    """Of thirty fields with any value one is always wrong, and the rest is never looked at. So: few fields, the right
    model, and messages that say something."""
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    for message in body["messages"] if isinstance(body.get("messages"), list) else []:
        if isinstance(message, dict):
            message.setdefault("content", "x")
    optional = [name for name in body if name not in REQUIRED]
    for name in optional[:-NUM_OPTIONAL]:
        del body[name]


def test_every_operation_was_asked(schema):
    documented = {(result.ok().method, result.ok().path) for result in schema.get_all_operations()}
    assert documented == {*WITH_INPUT, *WHATEVER_INPUT}
