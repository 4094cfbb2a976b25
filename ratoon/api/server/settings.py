"""What can be set about the HTTP server, as opposed to the engine behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ratoon.api.server.hosts import is_host_name
from ratoon.core.errors import ConfigError

MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    uds: str | None = None  # a Unix socket's path, in place of host and port

    served_names: tuple[str, ...] = ()  # what requests call the model; the first one is in answers; (): its own name
    chat_template: str | None = None  # in place of the model's own
    allow_request_template: bool = False  # requests may bring a chat template
    lenient: bool = False  # ignore unknown fields instead of refusing them
    admin: bool = False  # serve /admin/…

    api_keys: tuple[str, ...] = field(default=(), repr=False)  # (): everybody is welcome
    admin_keys: tuple[str, ...] = field(default=(), repr=False)  # for /admin/…, and for nothing else
    allowed_hosts: tuple[str, ...] = ()  # names that requests may call the server by, beside those of loopback
    cors_origins: tuple[str, ...] = ()

    max_body: int = 16 * MEBIBYTE  # bytes
    max_audio: int = 64 * MEBIBYTE  # the same of requests that bring a recording
    max_audio_seconds: float = 2 * 3600.0  # of a recording
    body_timeout: float = 60.0  # seconds until a body must be here in full
    write_timeout: float = 60.0  # seconds that a client may leave what is sent to it unread
    max_total_hidden_states_bytes: int = 2**30  # that clients have asked for and not read yet
    max_batch: int = 256  # prompts in a request
    max_request_tokens: int = 2**20  # prompts × choices × tokens that a request may ask for
    max_queue: int = 4096  # unfinished prompts, of all requests together

    drain_seconds: float = 30.0  # for what is under way at shutdown
    access_log: bool = False

    def verify(self) -> None:
        """ConfigError for what has no meaning, before anything is loaded."""
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", f"{self.port} is out of range", "0 to 65535")
        for name in (
            "max_body",
            "max_audio",
            "max_batch",
            "max_request_tokens",
            "max_queue",
            "max_total_hidden_states_bytes",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is out of range", "at least 1")
        for name in ("drain_seconds", "body_timeout", "max_audio_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, f"{getattr(self, name)} is out of range", "a number of seconds")
        if not 0 < self.write_timeout < float("inf"):
            raise ConfigError("write_timeout", f"{self.write_timeout} is out of range", "seconds, more than 0")
        for name, keys in (("api_key", self.api_keys), ("admin_key", self.admin_keys)):
            if any(not key or not key.isprintable() or key != key.strip() for key in keys):
                raise ConfigError(name, "is empty, or has spaces around it", "printable characters")
        if self.admin and not self.admin_keys:
            raise ConfigError(
                "admin", "needs a key of its own", "give --admin-key-file FILE, or set the variable RATOON_ADMIN_KEY"
            )
        if set(self.admin_keys) & set(self.api_keys):
            raise ConfigError("admin_key", "is one of the API keys as well", "a key that opens /admin/… alone")
        if any(not is_host_name(name) for name in self.allowed_hosts):
            raise ConfigError("allow_host", "is no name of a host", "a name or an address, without scheme and port")
        if any(not name for name in self.served_names):
            raise ConfigError("served_model_name", "is empty", "at least one character")

    @property
    def batch_limit(self) -> int:
        """A batch that could never enter the queue is too large, not early."""
        return min(self.max_batch, self.max_queue)
