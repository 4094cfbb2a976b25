"""What can be set about the HTTP server, as opposed to the engine behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    cors_origins: tuple[str, ...] = ()

    max_body: int = 16 * MEBIBYTE  # bytes
    max_audio: int = 64 * MEBIBYTE  # the same of requests that bring a recording
    max_audio_seconds: float = 2 * 3600.0  # of a recording
    body_timeout: float = 60.0  # seconds until a body must be here in full
    max_batch: int = 256  # prompts in a request
    max_request_tokens: int = 2**20  # prompts × choices × tokens that a request may ask for
    max_queue: int = 4096  # unfinished prompts, of all requests together

    drain_seconds: float = 30.0  # for what is under way at shutdown
    access_log: bool = False

    def verify(self) -> None:
        """ConfigError for what has no meaning, before anything is loaded."""
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", f"{self.port} is out of range", "0 to 65535")
        for name in ("max_body", "max_audio", "max_batch", "max_request_tokens", "max_queue"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is out of range", "at least 1")
        for name in ("drain_seconds", "body_timeout", "max_audio_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, f"{getattr(self, name)} is out of range", "a number of seconds")
        if any(not key or not key.isprintable() or key != key.strip() for key in self.api_keys):
            raise ConfigError("api_key", "is empty, or has spaces around it", "printable characters")
        if any(not name for name in self.served_names):
            raise ConfigError("served_model_name", "is empty", "at least one character")

    @property
    def batch_limit(self) -> int:
        """A batch that could never enter the queue is too large, not early."""
        return min(self.max_batch, self.max_queue)
