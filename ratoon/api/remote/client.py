"""A client of an OpenAI-compatible server: one connection pool, plain calls and streamed ones.

Failures are RemoteError, or RefusedError if the request itself was wrong. Requests are never retried. The load
generator's streams go over connections of their own (connections.py), and are taken apart when they have ended: events
are split by hand, and only the needed fields are decoded.
"""

from __future__ import annotations

import asyncio
import os
import socket
import urllib.parse
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from ratoon.core.errors import ConfigError, ExplainedError, RequestError
from ratoon.core.prepared import prepared

if TYPE_CHECKING:
    import aiohttp

    from ratoon.api.remote.connections import ConnectionPool, TimedAnswer


LONGEST_MESSAGE = 300  # characters of an answer that is not an error object, such as a proxy's page


class RemoteError(ExplainedError):
    """The server can't be reached, failed, or closed the connection early. `kind` is a short name for counts."""

    def __init__(self, subject: str, problem: str, expected: str = "", *, kind: str, status: int | None = None) -> None:
        super().__init__(subject, problem, expected)
        self.kind = kind
        self.status = status  # the HTTP status, if there was a response


class RefusedError(RemoteError, RequestError):
    """The server refused the request as wrong: a retry would not help."""


def error_for_status(status: int, reason: str, body: bytes) -> RemoteError:
    """The error of a response with an HTTP error status."""
    message = read_message(body) or reason or "no explanation"
    # 408 and 429 are client errors in name only: the same request may succeed later.
    refused = 400 <= status < 500 and status not in (408, 429)
    return (RefusedError if refused else RemoteError)(
        "server", f"{message} (HTTP {status})", kind=f"HTTP {status}", status=status
    )


def read_message(body: bytes) -> str:
    """The message in an error's body: OpenAI's shape, the shapes that other servers use, else the text itself."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return _shorten(body.decode(errors="replace"))
    return message_of(value)


def message_of(value: Any) -> str:
    while isinstance(value, dict):
        inner = next((value[key] for key in ("error", "message", "detail") if value.get(key)), None)
        if inner is None:
            return _shorten(msgspec.json.encode(value).decode())
        value = inner
    return _shorten(value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_MESSAGE else line[: LONGEST_MESSAGE - 1] + "…"


DONE = b"[DONE]"


class PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """None: the server does not say."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct, gc=False):
    text: str | None = None  # of a completion
    delta: Delta | None = None  # of a chat
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or ""

    @property
    def new_reasoning(self) -> str:
        return "" if self.delta is None else self.delta.reasoning_content or ""

    @property
    def has_text(self) -> bool:
        return bool(self.new_text or self.new_reasoning)


class Chunk(msgspec.Struct, gc=False):
    choices: list[ChunkChoice] = []
    usage: Usage | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(prepared(Chunk)).decode


class EventReader:
    """Splits the received bytes into events and returns their data. Chunk boundaries do not matter."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        if self._rest:
            data = self._rest + data
        if b"\r" in data:  # JSON writes its own line breaks as escapes: a raw one is always the protocol's
            data = data.replace(b"\r\n", b"\n")
        events = data.split(b"\n\n")
        self._rest = events.pop()
        payloads = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                payloads.append(event[6:])
            elif (payload := _data_of(event)) is not None:
                payloads.append(payload)
        return payloads


def _data_of(event: bytes) -> bytes | None:
    """The general form: several lines, comments, other fields. None: no data."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


Receive = Callable[[list[Chunk]], None]
ReceiveTimed = Callable[[float, list[Chunk]], None]


class ChunkReader:
    """The bytes of a streamed answer to its chunks, and whether it came to its end."""

    __slots__ = ("_decode", "_done", "_events", "_finish_reason", "_url")

    def __init__(self, url: str, decode: Callable[[bytes], Chunk]) -> None:
        self._url = url
        self._decode = decode
        self._events = EventReader()
        self._finish_reason: str | None = None
        self._done = False

    def feed(self, data: bytes) -> list[Chunk]:
        chunks: list[Chunk] = []
        for payload in self._events.feed(data):
            if payload == DONE:
                self._done = True
                break
            try:
                chunk = self._decode(payload)
            except msgspec.DecodeError as error:
                raise bad_answer(self._url, str(error)) from None
            if chunk.error is not None:
                raise RemoteError("server", message_of(chunk.error), kind="error in the stream")
            if chunk.choices:
                self._finish_reason = chunk.choices[0].finish_reason or self._finish_reason
            chunks.append(chunk)
        return chunks

    def check_end(self) -> None:
        if self._finish_reason in GIVEN_UP:
            raise RemoteError("server", "the server aborted the answer", kind="given up")
        if self._finish_reason is None and not self._done:
            raise RemoteError("server", "the stream ended before the answer was finished", kind="broke off")


COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# Additional fields of a chat whose last message, the assistant's, is continued.
CONTINUE = {"add_generation_prompt": False, "continue_final_message": True}
GIVEN_UP = ("abort", "error")  # finish reasons of a server that shuts down, or whose engine failed
HTTP_ERROR = 400  # the lowest status of an error
CONNECT_SECONDS = 10.0
# Servers close idle connections (uvicorn after 5 s). Reusing one at that moment fails: stay below.
KEEP_ALIVE_SECONDS = 2.0


class RemoteClient:
    """Use it with `async with`; any number of calls at once."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float | None = None) -> None:
        self.url = normalize_url(url)
        self._aiohttp = load_aiohttp()
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {check_api_key(api_key)}"
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None
        self._pool: ConnectionPool | None = None  # of `stream_timed`

    async def __aenter__(self) -> RemoteClient:
        connector = self._aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
        timeout = self._aiohttp.ClientTimeout(total=self._timeout, sock_connect=CONNECT_SECONDS)
        self._session = self._aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        if self._pool is not None:
            self._pool.close()
        await self._session.close()

    async def models(self) -> list[str]:
        """The names of the models that the server has."""
        answer = await self._call("GET", "/v1/models")
        try:
            return [str(model["id"]) for model in answer["data"]]
        except (KeyError, TypeError):
            raise self._bad_answer("the list of models is malformed") from None

    async def get(self, path: str) -> Any:
        return await self._call("GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._call("POST", path, body)
        if not isinstance(answer, dict):
            raise self._bad_answer("not a JSON object")
        return answer

    async def download(
        self, path: str, body: dict[str, Any], media_type: str, write: Callable[[bytes], object]
    ) -> None:
        """Pass an answer of this type to `write`, chunk by chunk."""
        async with self._request("POST", path, body, {"Accept": media_type}) as response:
            if response.content_type != media_type:
                raise self._bad_answer(f"{response.content_type}, not {media_type}")
            while data := await response.content.readany():
                write(data)

    async def stream(
        self, path: str, body: dict[str, Any], receive: Receive, decode: Callable[[bytes], Chunk] = decode_chunk
    ) -> None:
        """Pass the chunks of an answer to `receive`, grouped as they arrive, until it ends. `decode` may return chunks
        with more fields.

        `body` must request a stream. Cancellation closes the connection. RemoteError also for an answer that ends
        before it is finished.
        """
        reader = ChunkReader(self.url, decode)
        async with self._request("POST", path, body) as response:
            content = response.content
            while data := await content.readany():
                if chunks := reader.feed(data):
                    receive(chunks)
        reader.check_end()

    async def stream_timed(
        self,
        path: str,
        body: dict[str, Any],
        receive: ReceiveTimed,
        decode: Callable[[bytes], Chunk] = decode_chunk,
    ) -> float:
        """Streams an answer to measure it: `receive` also gets the time at which chunks came, and is called when the
        answer has ended or broken off. While it runs, nothing is done but to note times. Returns the time of its end;
        all times are of time.perf_counter."""
        from ratoon.api.remote.connections import TimedAnswer

        answer, reader = TimedAnswer(), ChunkReader(self.url, decode)

        def pass_on() -> None:
            for moment, data in answer.parts:
                if chunks := reader.feed(data):
                    receive(moment, chunks)

        try:
            await self._post_timed(path, msgspec.json.encode(body), answer)
        except (RemoteError, asyncio.CancelledError):
            with suppress(RemoteError):
                pass_on()
            raise
        if answer.status >= HTTP_ERROR:
            raise error_for_status(answer.status, answer.reason, answer.body)
        pass_on()
        reader.check_end()
        return answer.ended

    async def _post_timed(self, path: str, body: bytes, answer: TimedAnswer) -> None:
        from ratoon.api.remote.connections import BrokenAnswerError, ConnectionPool

        if self._pool is None:
            self._pool = ConnectionPool(self.url, self._headers, CONNECT_SECONDS, KEEP_ALIVE_SECONDS)
        try:
            async with asyncio.timeout(self._timeout):
                await self._pool.post(path, body, answer)
        except TimeoutError:
            raise RemoteError(self.url, "no answer in time", kind="timeout") from None
        except OSError as error:
            raise self._unreachable(error) from None
        except BrokenAnswerError as error:
            raise RemoteError("server", f"the connection broke off ({error})", kind="broke off") from None

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        async with self._request(method, path, body) as response:
            data = await response.read()
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError:
            raise self._bad_answer("not JSON") from None

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful response; network errors are raised as RemoteError, also while it is read."""
        assert self._session is not None
        errors = self._aiohttp
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, self.url + path, data=data, headers=headers) as response:
                if response.status >= HTTP_ERROR:
                    raise error_for_status(response.status, response.reason or "", await response.read())
                yield response
        except errors.ClientConnectorError as error:
            raise self._unreachable(error.os_error) from None
        except TimeoutError:
            raise RemoteError(self.url, "no answer in time", kind="timeout") from None
        except errors.ClientError as error:
            detail = " ".join(f"{type(error).__name__}: {error}".split())
            raise RemoteError("server", f"the connection broke off ({detail})", kind="broke off") from None

    def _unreachable(self, error: OSError) -> RemoteError:
        problem = f"can't be reached ({_reason(error)})"
        return RemoteError(self.url, problem, "is the server running?", kind="can't connect")

    def _bad_answer(self, detail: str) -> RemoteError:
        return bad_answer(self.url, detail)


def bad_answer(url: str, detail: str) -> RemoteError:
    return RemoteError(url, f"unexpected response: {detail}", "is it an OpenAI-compatible server?", kind="bad answer")


def _reason(error: OSError) -> str:
    """The system's own message, which asyncio replaces. Names that can't be resolved have their own table."""
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)


def load_aiohttp() -> ModuleType:
    try:
        import aiohttp
    except ImportError:
        raise ConfigError("aiohttp", "is not installed", 'pip install "ratoon[serve]"') from None
    return aiohttp


def normalize_url(url: str) -> str:
    """The server's root: the given URL without a trailing /v1, with which every path begins."""
    text = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urllib.parse.urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or any(letter.isspace() for letter in text):
        raise RequestError("--url", f"{url!r} is not the address of a server", "such as http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def check_api_key(key: str) -> str:
    """The error message does not contain the key."""
    if not (key.isascii() and key.isprintable()):
        raise RequestError("--api-key", "has characters that are not allowed in a header", "printable ASCII")
    return key
