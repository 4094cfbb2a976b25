"""The server without a network: requests are played to the ASGI application, and its answers are read from there.

Behind it is an AsyncLLM over an engine that plays a script, or a real one with a tiny model of random weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from ratoon.api.server.app import build_app
from ratoon.api.server.context import ServerContext
from ratoon.api.server.exchange import BODY_WRITER, AsgiApp
from ratoon.api.server.settings import ServerSettings
from ratoon.core.config import ModelConfig
from ratoon.core.messages import EngineReady
from ratoon.engine.async_llm import AsyncLLM
from ratoon.models.token_bound import byte_level_alphabet
from ratoon.models.tokenizer import Tokenizer
from ratoon.observe.metrics import EngineMetrics
from tests.unit.engine.fakes import Script, echo, model_config
from tests.unit.engine.fakes_async import FakeAsyncClient, FakeSource

MODEL = "tiny"
MAX_MODEL_LEN = 512
VOCAB_SIZE = 258
END = 256
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if tools %}[tools: {{ tools | length }}]{% endif %}"
    "{% if shout %}!{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_backend() -> Backend:
    """One token for each byte, and two special ones behind them."""
    backend = Backend(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|other|>"])
    return backend


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    templates = {} if template is None else {"default": template}
    return Tokenizer(byte_backend(), {"eos_token": "<|end|>"}, templates)


def say(text: str, *others: str) -> Script:
    """An engine that says this, and something else for each further choice; then it ends."""
    return lambda request, choice: [*(text, *others)[choice].encode(), END]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]

    def events(self) -> list[Any]:
        """The data of a stream, without the [DONE] at its end, which must be there."""
        *events, last = self.body.decode().split("\n\n")[:-1]
        assert last == "data: [DONE]"
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


@dataclass
class OpenRequest:
    """A request under way. What was sent so far can be looked at, and the client can go away, or read nothing."""

    task: asyncio.Task[None]
    inbox: asyncio.Queue[dict[str, Any]]
    sent: list[dict[str, Any]] = field(default_factory=list)
    num_direct_writes: int = 0
    reads: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: `send` waits

    def __post_init__(self) -> None:
        self.reads.set()

    async def send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        self.sent.append(message)

    # The server's BodyWriter

    @property
    def is_ready(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body", True) and self.reads.is_set()

    def write(self, body: bytes) -> None:
        assert self.is_ready
        self.num_direct_writes += 1
        self.sent.append({"type": "http.response.body", "body": body, "more_body": True})

    def disconnect(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def sent_something(self) -> None:
        while len(self.sent) < 2:
            await asyncio.sleep(0.001)

    async def answer(self) -> Answer:
        await self.task
        start = self.sent[0]
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], headers, b"".join(message["body"] for message in self.sent[1:]))


class Client:
    def __init__(self, context: Any, engine: Any = None, app: AsgiApp | None = None) -> None:
        """`app`: None: the application of a server with one model."""
        self.context = context
        self.engine = engine  # the script's player
        self.app = build_app(context) if app is None else app
        self.headers: dict[str, str] = {}  # of requests that bring none of their own
        self.writes_directly = True  # the HTTP server has a BodyWriter

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.open("GET", path, **options).answer()

    async def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return await self.open("POST", path, body, **options).answer()

    async def complete(self, **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"model": MODEL, **fields})

    async def chat(self, *messages: str, **fields: Any) -> Answer:
        """Messages of the user."""
        conversation = [{"role": "user", "content": message} for message in messages]
        return await self.post("/v1/chat/completions", {"model": MODEL, "messages": conversation, **fields})

    def open(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        pieces: list[bytes] | None = None,
        complete: bool = True,
    ) -> OpenRequest:
        """`body` is bytes, or goes as JSON. `pieces` replace it: a body that comes so, and ends if it is complete."""
        given = {"content-type": "application/json", **self.headers} if headers is None else dict(headers)
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        if pieces is None:
            pieces = [body if isinstance(body, bytes) else json.dumps(body).encode()]
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for number, piece in enumerate(pieces):
            more = number < len(pieces) - 1 or not complete
            inbox.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        opened = OpenRequest(asyncio.ensure_future(asyncio.sleep(0)), inbox)

        if self.writes_directly:
            scope["extensions"] = {BODY_WRITER: opened}
        opened.task = asyncio.ensure_future(self.app(scope, inbox.get, opened.send))
        return opened


@contextlib.asynccontextmanager
async def scripted(
    script: Script = echo,
    *,
    by_hand: bool = False,
    template: str | None = TEMPLATE,
    defaults: dict[str, Any] | None = None,
    policy: str = "fcfs",
    config: ModelConfig | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> AsyncIterator[Client]:
    """A server whose engine plays a script. `settings` are the server's."""
    engine = FakeAsyncClient(script, by_hand)
    engine.ready = EngineReady({"device": "fake"}, MAX_MODEL_LEN, 16)
    source = FakeSource(
        name=MODEL,
        config=config or model_config(max_position=MAX_MODEL_LEN),
        generation_defaults=defaults or {},
        pooling=None,
        chat_template=template,
        tokenizer=tokenizer or byte_tokenizer(template),
    )
    llm = AsyncLLM(MODEL, client=engine, metrics=EngineMetrics(MODEL), policy=policy)
    with mock.patch("ratoon.models.source.resolve_model", return_value=source):
        await llm.start()
    try:
        yield Client(ServerContext(llm, ServerSettings(**settings)), engine)
        assert llm.num_unfinished_requests() == 0 or by_hand
    finally:
        await llm.shutdown()


def write_tiny_model(folder: Path) -> Path:
    """A Llama of a few thousand weights, which the engine makes up, with a tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": END,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    byte_backend().save(str(folder / "tokenizer.json"))
    return folder


TINY_SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "num_threads": 1,
    "num_blocks": 200,
    "max_num_seqs": 32,
}
