"""Finds the model of a request on a server that has several, and hands the request to that model's routes.

A request names its model in its body. One that continues another has the model that made it; paths with the id of a
request or a response belong to the model that has it. Everything else is the server's own (host_app.py).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import parse_qs

import msgspec
from pydantic import TypeAdapter, ValidationError
from starlette.responses import JSONResponse as JsonResponse

from ratoon.api.server.errors import (
    ApiError,
    as_api_error,
    conversation_not_found,
    refused,
    request_not_found,
)
from ratoon.api.server.exchange import AsgiApp, Exchange, Message, Receive, Scope, Send, exchange_of, header
from ratoon.api.server.middleware import is_admin_path
from ratoon.api.server.model_host import LoadedModel, ModelHost, ModelSlot
from ratoon.api.server.model_slots import parse_keep_alive
from ratoon.api.server.ollama_answers import now
from ratoon.api.server.request_bodies import decode_json, parse_form
from ratoon.api.server.responses import EVENT_STREAM, STREAM_HEADERS, event, messages_error, send_error
from ratoon.api.server.threads import LARGE
from ratoon.core.errors import ConfigError, UnknownParentError
from ratoon.core.prepared import prepared

OLLAMA_PREFIX = "/api/"
# Paths whose answers may be streams of events, in which a comment can stand.
EVENT_PATHS = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/audio/transcriptions",
    "/v1/audio/translations",
})  # fmt: skip
MODEL_PATHS = EVENT_PATHS | {
    "/v1/messages/count_tokens", "/v1/embeddings", "/v1/hidden_states", "/tokenize", "/detokenize", "/api/chat",
    "/api/generate", "/api/embed", "/api/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score",
    "/v1/classify", "/classify", "/v1/conversations",
}  # fmt: skip
CONVERSATIONS = "/v1/conversations/"
ID_PATHS = ("/v1/requests/", "/v1/responses/", CONVERSATIONS)
GRACE = 0.5  # seconds: an error of a request that waits no longer for its model has an HTTP status of its own
COMMENT_INTERVAL = 1.0  # seconds between comments in a stream that waits
MULTIPART = b"multipart/form-data"


class Asked(msgspec.Struct):
    """The fields of a body that say which model it is for, and how."""

    model: Any = None
    stream: Any = None
    keep_alive: Any = None
    continuation_of: Any = None
    previous_response_id: Any = None
    original_request_id: Any = None
    conversation: Any = None
    prompt: Any = None
    messages: Any = None
    input: Any = None

    @property
    def is_empty(self) -> bool:
        """Whether it asks for nothing but that the model be loaded, or not."""
        return not self.prompt and not self.messages and not self.input

    @property
    def parents(self) -> list[str]:
        conversation = self.conversation.get("id") if isinstance(self.conversation, dict) else self.conversation
        found = (self.continuation_of, self.previous_response_id, self.original_request_id, conversation)
        return [one for one in found if isinstance(one, str)]


_decoder = msgspec.json.Decoder(prepared(Asked))
_form_boolean = TypeAdapter(bool | None)  # fields of a form are texts


class ModelRouter:
    grace = GRACE

    def __init__(self, host: ModelHost, own: AsgiApp) -> None:
        """`own` answers what belongs to no model."""
        self._host = host
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        try:
            slot, asked = await self._find(scope, exchange)
        except ApiError as error:
            return await send_error(scope, send, error)
        if slot is None:
            return await self._own(scope, receive, send)
        try:
            keep_alive = self._keep_alive(scope, asked)
        except ApiError as error:
            return await send_error(scope, send, error)
        if keep_alive == 0 and asked.is_empty:
            return await self._unload(slot, asked, scope, send)
        self._host.enter(slot)
        try:
            await self._answer(slot, asked, scope, receive, send)
        finally:
            self._host.leave(slot, keep_alive)

    # ---- which model ----

    async def _find(self, scope: Scope, exchange: Exchange) -> tuple[ModelSlot | None, Asked]:
        """None: the request is for the server itself. ApiError: there is no such model."""
        path, nothing = scope["path"], Asked()
        if path.startswith(ID_PATHS):
            request_id = path.split("/")[3]
            maker = await self._maker(request_id, exchange.tenant)
            if maker is None and path.startswith(CONVERSATIONS):
                raise conversation_not_found(request_id)
            if maker is None:
                raise request_not_found(request_id, "response_id" if "responses" in path else "request_id")
            return maker, nothing
        if is_admin_path(path):
            return self._by_query(scope), nothing
        if path not in MODEL_PATHS or scope["method"] != "POST":
            return None, nothing
        asked = await self._read(scope, exchange)
        if asked.model is None:
            for parent in asked.parents:
                found = await self._maker(parent, exchange.tenant)
                if found is not None:
                    return found, asked
            raise refused("model", "is missing", f"one of {self._listed()}")
        if not isinstance(asked.model, str):
            raise refused("model", "is not text", f"one of {self._listed()}")
        return self._host.find(asked.model), asked

    def _listed(self) -> str:
        return ", ".join(self._host.names)

    def _by_query(self, scope: Scope) -> ModelSlot:
        names = parse_qs(scope["query_string"].decode("latin-1")).get("model")
        if names:
            return self._host.find(names[0])
        raise refused(
            "model", "is missing in the query: this server has several models", f"?model=, of {self._listed()}"
        )

    async def _maker(self, request_id: str, owner: str | None) -> ModelSlot | None:
        """Returns the model that made a request, a response or a conversation; None: there is none of this id."""
        for slot in self._host.slots:
            store = slot.store
            if store.find(request_id, owner) is not None or store.find_conversation(request_id, owner) is not None:
                return slot
            if slot.loaded is None:
                continue
            shared, llm = slot.loaded.context.shared, slot.loaded.context.llm
            try:
                await llm.find_parent(await shared.resolve(request_id, owner), wait=False, owner=owner)
                return slot
            except UnknownParentError:
                continue
        return None

    async def _read(self, scope: Scope, exchange: Exchange) -> Asked:
        body = exchange.body
        if (header(scope, b"content-type") or b"").strip().lower().startswith(MULTIPART):
            return await asyncio.to_thread(_read_form, body, header(scope, b"content-type") or b"")
        try:
            return await asyncio.to_thread(_decoder.decode, body) if len(body) >= LARGE else _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            decode_json(body)  # which says what is wrong with it
            raise ApiError(400, "The body is not a JSON object", code="invalid_json") from None

    def _keep_alive(self, scope: Scope, asked: Asked) -> float | None:
        """Returns how long the model should be kept, of requests in Ollama's protocol, which has a field for it."""
        if asked.keep_alive is None or not scope["path"].startswith(OLLAMA_PREFIX):
            return None
        try:
            return parse_keep_alive(asked.keep_alive)
        except ConfigError as error:
            raise refused(error.subject, error.problem, error.expected) from None

    async def _unload(self, slot: ModelSlot, asked: Asked, scope: Scope, send: Send) -> None:
        """Unloads a model for a request in Ollama's protocol that has no prompt and keep_alive 0, and answers it when
        that is done."""
        await self._host.unload(slot)
        words: dict[str, Any] = {"response": ""}
        if scope["path"] == "/api/chat":
            words = {"message": {"role": "assistant", "content": ""}}
        about = {"created_at": now(), "done": True, "done_reason": "unload"}
        response = JsonResponse({"model": asked.model, **words, **about}, headers=exchange_of(scope).headers())
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})

    # ---- the wait, and the answer ----

    async def _answer(self, slot: ModelSlot, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        if slot.is_ready:  # as it is for almost all requests
            assert slot.loaded is not None
            return await slot.loaded.app(scope, receive, send)
        exchange = exchange_of(scope)
        begin = time.monotonic()
        ready = asyncio.ensure_future(self._host.ready(slot))
        begun: BegunStream | None = None
        try:
            _check_json(exchange, scope)
            if asked.stream is True and scope["path"] in EVENT_PATHS:
                begun = await self._say_while_waiting(ready, slot, scope, send)
            model = await ready
        except Exception as error:
            answer = as_api_error(error)
            return await (send_error(scope, send, answer) if begun is None else begun.fail(answer))
        finally:
            ready.cancel()
        exchange.load_seconds = time.monotonic() - begin
        if begun is None:
            return await model.app(scope, receive, send)
        await model.app(scope, receive, begun)
        await begun.finish()

    async def _say_while_waiting(
        self, ready: asyncio.Future[LoadedModel], slot: ModelSlot, scope: Scope, send: Send
    ) -> BegunStream | None:
        """Returns when the model is there, or can't be loaded. If that takes long, the stream begins with comments."""
        await asyncio.wait([ready], timeout=self.grace)
        if ready.done():
            return None
        begun = BegunStream(scope, send)
        await begun.begin()
        begin = time.monotonic()
        while not ready.done():
            await begun.comment(f"waiting for {slot.name}: {slot.state}, {time.monotonic() - begin + self.grace:.1f} s")
            await asyncio.wait([ready], timeout=COMMENT_INTERVAL)
        return begun


class BegunStream:
    """The answer of a request whose stream has begun before its model was there. What the model's routes send goes on
    from there; an error with a status becomes an event."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._status = 0  # of the routes' answer
        self._body = bytearray()  # of an error

    async def begin(self) -> None:
        exchange = exchange_of(self._scope)
        exchange.writer = None  # which writes only once a response was begun by its own route
        headers = {**STREAM_HEADERS, **exchange.headers(), "Content-Type": f"{EVENT_STREAM}; charset=utf-8"}
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def comment(self, text: str) -> None:
        """Clients skip comments, which keep the connection open."""
        line = " ".join(text.split())
        await self._write(f": {line}\n\n".encode())

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status == 200:
            await self._send(message)
        else:
            self._body += message.get("body", b"")

    async def fail(self, error: ApiError) -> None:
        content: dict[str, Any] = error.as_dict()
        if self._scope["path"].startswith("/v1/messages"):
            content = messages_error(error, exchange_of(self._scope).request_id)
        await self._end_with(msgspec.json.encode(content))

    async def finish(self) -> None:
        """The routes have answered: an error is sent as the last event."""
        if self._status not in (0, 200):
            await self._end_with(bytes(self._body))

    async def _end_with(self, content: bytes) -> None:
        name = "event: error\n" if self._scope["path"] in ("/v1/messages", "/v1/responses") else ""
        end = b"" if name else b"data: [DONE]\n\n"
        await self._write(name.encode() + event(msgspec.Raw(content)) + end, more=False)

    async def _write(self, body: bytes, more: bool = True) -> None:
        raw_send = exchange_of(self._scope).raw_send
        await raw_send({"type": "http.response.body", "body": body, "more_body": more})


def _check_json(exchange: Exchange, scope: Scope) -> None:
    """A body that is no valid JSON is refused before a model is loaded for it."""
    kind = (header(scope, b"content-type") or b"").strip().lower()
    if exchange.body and not kind.startswith(MULTIPART) and len(exchange.body) < LARGE:
        decode_json(exchange.body)


def _read_form(body: bytes, content_type: bytes) -> Asked:
    from python_multipart.multipart import parse_options_header

    _, options = parse_options_header(content_type)
    form = parse_form(body, options.get(b"boundary", b""))
    try:
        stream = _form_boolean.validate_python(form.get("stream"))
    except ValidationError:  # the model's route says what is wrong with it
        stream = None
    return Asked(model=form.get("model"), stream=stream)
