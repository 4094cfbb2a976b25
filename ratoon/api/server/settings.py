"""Settings of the HTTP server, as opposed to those of the engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from pathlib import Path

from ratoon.api.answer_parts.parser import check_parser_names
from ratoon.api.answer_parts.reasoning_formats import REASONING_FORMATS
from ratoon.api.answer_parts.tool_formats import TOOL_FORMATS
from ratoon.api.server.body_budget import least_limit
from ratoon.api.server.model_slots import parse_keep_alive
from ratoon.core.errors import ConfigError
from ratoon.core.setting import SECONDS, at_least, number, setting, verify_settings, whole_between

MEBIBYTE = 2**20


class UnknownFields(enum.Enum):
    """What becomes of a field that a request does not have."""

    REPORT = "ignored and reported, unless its name looks like a misspelt one"
    REFUSE = "refused"
    IGNORE = "ignored and reported, whatever its name"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Each is an option of `ratoon serve`."""

    host: str = setting("127.0.0.1", "address to listen on; the default is this machine only", metavar="ADDRESS")
    port: int = setting(8000, "0: any free port", whole_between(0, 65535))
    num_api_servers: int = setting(
        1,
        "processes that serve HTTP on this address: one has enough to do with some hundreds of streams",
        whole_between(1, 64),
        name="api_servers",
        options=("--api-server-count",),
    )
    uds: str | None = setting(None, "listen on a Unix socket instead", metavar="PATH")

    served_names: tuple[str, ...] = setting(
        (), "the model's names in requests, the first also in answers; default: its own", name="served_model_name"
    )
    keep_alive: str | None = setting(
        None,
        "put a model to sleep that was idle for so long, such as 90s, 5m or 1h; it is loaded when it is first asked "
        "for; -1: never",
        metavar="DURATION",
    )
    unload_idle: bool = setting(False, "end the process of an idle model after keep_alive, and do not let it sleep")
    memory_budget: int | None = setting(
        None, "memory for weights and KV caches of all loaded models; those that are idle make room", size=True
    )
    chat_template: str | None = setting(None, "use this template instead of the model's own", metavar="FILE")
    allow_request_template: bool = setting(False, "requests may contain a chat template")
    tool_parser: str = setting(
        "auto",
        f"the form in which the model writes tool calls: {', '.join(TOOL_FORMATS)}; auto: from its chat template",
        metavar="NAME",
    )
    reasoning_parser: str = setting(
        "auto",
        f"the marks around the model's reasoning: {', '.join(REASONING_FORMATS)}, START...END, or none; "
        "auto: from its chat template",
        metavar="NAME",
    )
    strict: bool = setting(False, "refuse all unknown fields of requests; default: only those that look misspelt")
    lenient: bool = setting(False, "ignore unknown fields of requests, those that look misspelt as well")
    console: bool = setting(True, "serve the console, a page for browsers, at /")
    admin: bool = setting(False, "serve /admin/…, which needs an admin key")
    adapter_roots: tuple[str, ...] = setting(
        (),
        "adapters below this folder may be loaded while serving (/v1/load_lora_adapter, with --admin); may be repeated",
        name="adapter_root",
        metavar="DIR",
    )

    api_keys: tuple[str, ...] = setting(
        (), "may be repeated; visible in the process list", name="api_key", metavar="KEY", repr=False
    )
    admin_keys: tuple[str, ...] = setting(
        (),
        "for /admin/… only; may be repeated; visible in the process list",
        name="admin_key",
        metavar="KEY",
        repr=False,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (), "accept requests for this host name, too; may be repeated", name="allow_host"
    )
    cors_origins: tuple[str, ...] = setting(
        (), "allow web pages of this origin; may be repeated", name="cors_origin", metavar="ORIGIN"
    )
    media_hosts: tuple[str, ...] = setting(
        (),
        "requests may name images and videos of this host by address: HOST, HOST:PORT or *.HOST; may be repeated",
        name="allow_media_host",
        metavar="HOST",
    )
    response_lease: float = setting(
        300.0,
        "seconds that the memory of a stored response is kept for the next turn, at most max_lease_seconds; 0: not",
        SECONDS,
    )
    drain_seconds: float = setting(30.0, "time for running requests to finish at shutdown", SECONDS)

    max_body: int = setting(16 * MEBIBYTE, "largest body of a request", size=True, group="limits")
    max_audio: int = setting(64 * MEBIBYTE, "largest body of a request with a recording", size=True, group="limits")
    max_media: int = setting(
        64 * MEBIBYTE, "images and videos that are fetched for a request, together", size=True, group="limits"
    )
    media_timeout: float = setting(
        10.0,
        "seconds until an image or a video must have been fetched",
        number(lambda value: 0 < value < float("inf"), "seconds, more than 0"),
        group="limits",
    )
    max_total_body: int = setting(
        512 * MEBIBYTE, "bodies of all unanswered requests together, which API keys share", size=True, group="limits"
    )
    max_audio_seconds: float = setting(2 * 3600.0, "longest recording", SECONDS, group="limits")
    body_timeout: float = setting(60.0, "seconds until a body must have arrived in full", SECONDS, group="limits")
    write_timeout: float = setting(
        60.0,
        "seconds that a client may leave sent data unread",
        number(lambda value: 0 < value < float("inf"), "seconds, more than 0"),
        group="limits",
    )
    max_connections: int = setting(
        8192, "open connections; beyond, those that have been idle longest are closed", at_least(1), group="limits"
    )
    max_batch: int = setting(256, "prompts in a request", at_least(1), group="limits")
    max_request_tokens: int = setting(2**20, "prompts × n × max_tokens of a request", at_least(1), group="limits")
    max_queue: int = setting(4096, "unfinished prompts, of all requests together", at_least(1), group="limits")
    max_responses: int = setting(1024, "stored responses, and as many conversations", at_least(0), group="limits")
    max_response_bytes: int = setting(
        256 * MEBIBYTE, "stored responses: conversations, and events of those that run", size=True, group="limits"
    )

    access_log: bool = setting(False, "a line for every request", group="log")

    def verify(self) -> None:
        """ConfigError for invalid values, before anything is loaded."""
        from ratoon.api.server.middleware import is_host_name  # here, because the command line imports this module

        verify_settings(self)
        self._verify_total_body()
        if self.strict and self.lenient:
            raise ConfigError("lenient", "contradicts strict", "one of the two, or neither")
        check_parser_names(self.tool_parser, self.reasoning_parser)
        if self.keep_alive is not None:
            parse_keep_alive(self.keep_alive)
        if self.unload_idle and self.keep_alive is None:
            raise ConfigError("unload_idle", "has no meaning without keep_alive", "add --keep-alive DURATION")
        for name, keys in (("api_key", self.api_keys), ("admin_key", self.admin_keys)):
            if any(not key or not key.isprintable() or key != key.strip() for key in keys):
                raise ConfigError(name, "is empty, or has spaces around it", "printable characters")
        if self.admin and not self.admin_keys:
            raise ConfigError(
                "admin", "needs an admin key", "give --admin-key-file FILE, or set the variable RATOON_ADMIN_KEY"
            )
        if set(self.admin_keys) & set(self.api_keys):
            raise ConfigError("admin_key", "is one of the API keys as well", "a key for /admin/… only")
        for root in self.adapter_roots:
            if not Path(root).expanduser().is_dir():
                raise ConfigError("adapter_root", f"{root!r} is not a folder", "a folder of adapters")
        if any(not is_host_name(name) for name in self.allowed_hosts):
            raise ConfigError("allow_host", "is not a host name", "a name or an address, without scheme and port")
        self._verify_media_hosts()
        if any(not name for name in self.served_names):
            raise ConfigError("served_model_name", "is empty", "at least one character")

    def _verify_media_hosts(self) -> None:
        if not self.media_hosts:
            return
        from ratoon.api.server.media_fetcher import read_allowed_host  # here: it needs packages of the server

        for host in self.media_hosts:
            try:
                read_allowed_host(host)
            except ValueError:
                expected = "HOST, HOST:PORT or *.HOST, without scheme and path"
                raise ConfigError("allow_media_host", f"{host!r} is not a host", expected) from None

    def _verify_total_body(self) -> None:
        largest = max(self.max_body, self.max_audio)
        least = least_limit(largest) * self.num_api_servers
        if self.max_total_body < least:
            problem = f"{self.max_total_body} bytes have no room for a body of {largest} (max_body, max_audio)"
            if self.num_api_servers > 1:
                problem += f" in each of {self.num_api_servers} front ends (api_servers), which divide it"
            raise ConfigError("max_total_body", problem, f"{least} or more")

    def of_front_end(self) -> ServerSettings:
        """The settings of one of several front ends: it has its part of what is a process's own."""
        count = self.num_api_servers
        return replace(
            self,
            max_total_body=self.max_total_body // count,
            max_connections=-(-self.max_connections // count),
            num_api_servers=1,
        )

    @property
    def puts_models_away(self) -> bool:
        """Whether models are loaded when they are asked for. The command line sets it for several models."""
        return self.keep_alive is not None or self.memory_budget is not None

    @property
    def unknown_fields(self) -> UnknownFields:
        if self.strict:
            return UnknownFields.REFUSE
        return UnknownFields.IGNORE if self.lenient else UnknownFields.REPORT

    @property
    def batch_limit(self) -> int:
        """A batch that could never enter the queue is refused as too large."""
        return min(self.max_batch, self.max_queue)
