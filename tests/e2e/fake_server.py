"""A small OpenAI-compatible server that plays a script, on a thread of its own: what clients are tested against.

It knows no model. Answers are numbered words, one token each, and every request it got is kept.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.waiting import PATIENCE


@dataclass
class Script:
    """How the server behaves. A test may change it while it runs."""

    seconds_per_token: float = 0.0
    num_tokens: int | None = None  # where an answer ends by itself, unless ignore_eos; None: at max_tokens
    tokens_per_chunk: int = 1
    api_key: str | None = None
    refused_fields: tuple[str, ...] = ()  # 400 for requests with one of these
    refused_prompt: str | None = None
    has_models: bool = True
    has_tokenize: bool = True
    takes_token_ids: bool = True
    tells_usage: bool = True
    cached_tokens: int | None = None
    status: int = 200  # of every answer
    break_after: int | None = None  # tokens, then the connection is cut
    hold_after: int | None = None  # tokens, then nothing more comes until the client leaves
    error_after: int | None = None  # tokens, then an error stands in the stream
    finish_reason: str | None = None  # in the place of the right one
    line_break: str = "\n"

    received: list[dict[str, Any]] = field(default_factory=list)
    num_left: int = 0  # clients that closed the connection before the answer's end
    running: int = 0
    most_running: int = 0


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid", "code": status}}, status=status)


class FakeServer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self.models)
        self.app.router.add_post("/tokenize", self.tokenize)
        self.app.router.add_post("/v1/completions", self.answer)
        self.app.router.add_post("/v1/chat/completions", self.answer)

    def refusal(self, request: web.Request) -> web.Response | None:
        key = self.script.api_key
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            return error(401, "wrong API key")
        if self.script.status != 200:
            return error(self.script.status, "not today")
        return None

    async def models(self, request: web.Request) -> web.Response:
        if not self.script.has_models:
            return web.Response(status=404)
        return self.refusal(request) or web.json_response({"data": [{"id": "fake-model"}, {"id": "other"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        if not self.script.has_tokenize:
            return web.Response(status=404, text="Not Found")
        words = (await request.json())["prompt"].split()
        return web.json_response({"count": len(words), "tokens": list(range(1000, 1000 + len(words)))})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        script = self.script
        if refusal := self.refusal(request):
            return refusal
        for name in script.refused_fields:
            if name in body or name in body.get("stream_options", {}):
                return error(400, f"{name}: unknown field")
        if script.refused_prompt is not None and body.get("prompt") == script.refused_prompt:
            return error(400, "prompt: no")
        if isinstance(body.get("prompt"), list) and not script.takes_token_ids:
            return error(400, "prompt: must be text")
        script.received.append(body)
        script.running += 1
        script.most_running = max(script.most_running, script.running)
        try:
            return await (self.stream(request, body) if body.get("stream") else self.whole(body))
        finally:
            script.running -= 1

    def num_tokens(self, body: dict[str, Any]) -> tuple[int, str]:
        limit, own = body.get("max_tokens", 16), self.script.num_tokens
        if own is None or own >= limit or body.get("ignore_eos"):
            return limit, "length"
        return own, "stop"

    def usage(self, body: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        if "prompt" in body:
            prompt = body["prompt"] if isinstance(body["prompt"], list) else body["prompt"].split()
        else:
            prompt = [word for message in body["messages"] for word in message["content"].split()]
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
        if self.script.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.script.cached_tokens}
        return usage

    async def whole(self, body: dict[str, Any]) -> web.Response:
        count, reason = self.num_tokens(body)
        text = "".join(f" w{index}" for index in range(count))
        content = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
        choices = [{"index": index, **content, "finish_reason": reason} for index in range(body.get("n", 1))]
        if body.get("use_beam_search"):
            choices = [{**choice, "score": -0.5 - choice["index"], "cumulative_logprob": -2.0} for choice in choices]
        return web.json_response({"model": "fake-model", "choices": choices, "usage": self.usage(body, count)})

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self.write_events(response, body)
        except (ConnectionError, asyncio.CancelledError):
            self.script.num_left += 1
            raise
        return response

    async def write_events(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        script, chat = self.script, "messages" in body
        options = body.get("stream_options", {})
        count, reason = self.num_tokens(body)
        reason = script.finish_reason or reason

        async def send(data: Any) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            await response.write(f"data: {text}{script.line_break * 2}".encode())

        if chat:
            await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        sent = 0
        while sent < count:
            if script.break_after is not None and sent >= script.break_after:
                response._req.transport.close()  # type: ignore[union-attr]
                return
            if script.hold_after is not None and sent >= script.hold_after:
                await asyncio.Event().wait()
            if script.error_after is not None and sent >= script.error_after:
                return await send({"error": {"message": "the engine fell over"}})
            new = min(script.tokens_per_chunk, count - sent)
            if script.seconds_per_token:
                await asyncio.sleep(script.seconds_per_token * new)
            text = "".join(f" w{index}" for index in range(sent, sent + new))
            sent += new
            choice = {"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}
            chunk: dict[str, Any] = {"choices": [{**choice, "finish_reason": reason if sent == count else None}]}
            if options.get("continuous_usage_stats"):
                chunk["usage"] = self.usage(body, sent)
            await send(chunk)
        if options.get("include_usage") and script.tells_usage:
            await send({"choices": [], "usage": self.usage(body, count)})
        await send("[DONE]")


@contextmanager
def fake_server(script: Script | None = None, port: int = 0) -> Iterator[tuple[str, Script]]:
    """Yields the address and the script."""
    script = script or Script()
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(FakeServer(script).app, handler_cancellation=True, shutdown_timeout=0.1)

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        return int(runner.addresses[0][1])

    chosen = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{chosen}", script
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(timeout=PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=PATIENCE)
        loop.close()
