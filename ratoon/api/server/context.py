"""What all routes share: the engine, the settings, the model's names, the names of requests, and the number of
unfinished prompts."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from starlette.requests import Request

from ratoon.api.answer_parts.parser import choose_answer_format
from ratoon.api.answer_parts.plan import AnswerPlan, answer_plan
from ratoon.api.answer_parts.tool_use import NO_TOOLS, ToolUse
from ratoon.api.server.body_budget import BodyBudget
from ratoon.api.server.errors import model_not_found, queue_full
from ratoon.api.server.logprobs import TokenTexts
from ratoon.api.server.middleware import AllowedHosts
from ratoon.api.server.preparation import Preparation
from ratoon.api.server.response_store import ResponseStore
from ratoon.api.server.settings import ServerSettings
from ratoon.api.server.unknown_fields import IgnoredFieldsLog
from ratoon.core.errors import UnknownParentError
from ratoon.core.json_extent import ExtentLimit, extent_limit
from ratoon.core.shares import SharedLimit

if TYPE_CHECKING:
    from ratoon.engine.async_llm import AsyncLLM


class RequestNames:
    def __init__(self, max_names: int) -> None:
        self._max_names = max_names  # of each owner: one owner's requests do not evict another's
        self._ids: dict[str | None, OrderedDict[str, str]] = {}  # by owner: names and the ids of answers

    def note(self, owner: str | None, name: str, request_id: str) -> None:
        ids = self._ids.setdefault(owner, OrderedDict())
        ids[name] = request_id
        ids.move_to_end(name)
        if len(ids) > self._max_names:
            ids.popitem(last=False)

    async def resolve(self, llm: AsyncLLM, name: str, owner: str | None) -> str:
        """Returns the id of the request with this id or name. Ids take precedence."""
        try:
            await llm.find_parent(name, wait=False, owner=owner)
        except UnknownParentError:
            ids = self._ids.get(owner)
            return name if ids is None else ids.get(name, name)
        return name


@dataclass
class ServerContext:
    llm: AsyncLLM
    settings: ServerSettings
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # set at shutdown: new requests are refused
    allowed_hosts: AllowedHosts | None = None  # None: any Host header is accepted
    ignored_fields: IgnoredFieldsLog = field(default_factory=IgnoredFieldsLog)
    queue: SharedLimit = field(init=False)  # unfinished prompts of all requests, which API keys share

    bodies: BodyBudget = field(init=False)  # of all requests
    preparation: Preparation = field(default_factory=Preparation)  # of large ones

    def __post_init__(self) -> None:
        self.queue = SharedLimit(self.settings.max_queue)
        self.bodies = BodyBudget(self.settings.max_total_body)

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished prompts of all requests."""
        return self.queue.total

    @cached_property
    def served_names(self) -> tuple[str, ...]:
        return self.settings.served_names or (self.llm.source.name,)

    @cached_property
    def names(self) -> RequestNames:
        """The clients' names of requests that run or can be continued: two names each, per key."""
        return RequestNames(2 * (self.llm.config.max_roots + self.settings.max_queue))

    @cached_property
    def responses(self) -> ResponseStore:
        return ResponseStore(self.settings.max_responses, self.settings.max_response_bytes)

    @cached_property
    def max_model_len(self) -> int:
        length = self.llm.config.max_model_len
        assert length is not None, "the engine has started"
        return length

    @cached_property
    def extent_limit(self) -> ExtentLimit:
        """The limits on the contents of a body."""
        config = self.llm.source.config
        longest = max(self.max_model_len, 0 if config.encoder is None else config.encoder.max_position)
        return extent_limit(self.settings.batch_limit, longest, config.vocab_size)

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.llm.get_tokenizer())

    def answer_plan(
        self, tools: ToolUse = NO_TOOLS, template: str | None = None, continued: str | None = None
    ) -> AnswerPlan:
        """Returns how answers to a conversation are read. `template` is the request's own, `continued` the text of the
        assistant's that it continues."""
        tokenizer, settings = self.llm.get_tokenizer(), self.settings
        text = tokenizer.template_text(template or settings.chat_template, bool(tools.tools))
        chosen = choose_answer_format(text, settings.tool_parser, settings.reasoning_parser)
        return answer_plan(chosen, tokenizer, tools, continued)

    def check_model(self, name: str) -> None:
        if name not in self.served_names:
            raise model_not_found(name, self.served_names)

    @contextmanager
    def admit(self, count: int, tenant: str | None) -> Iterator[None]:
        """Reserves places for this many prompts during the block, or raise a 429. When the queue is full, only a tenant
        that has its share of it already is refused."""
        if not self.queue.take(tenant, count):
            raise queue_full(self._why_full(tenant))
        try:
            yield
        finally:
            self.queue.give_back(tenant, count)

    def _why_full(self, tenant: str | None) -> str:
        limit = self.settings.max_queue
        own = self.queue.held_by(tenant)
        if own == self.queue.total:
            return f"{own} prompts are unfinished, and {limit} is the limit; try again in a moment"
        num_tenants = self.queue.num_owners + (0 if own else 1)
        return (
            f"{own} prompts of this API key are unfinished, and {limit // num_tenants} is its share of the queue, "
            f"which {num_tenants} keys use; try again in a moment"
        )


def context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context
