"""Encrypted and authenticated sockets between the hosts of one engine: ZeroMQ's CURVE, with keys from a shared secret.

Every host derives the same pair of keys from the secret. A server accepts that key alone, and a client that server
alone, so either side proves that it has the secret, and nothing that is sent tells it. Each connection is encrypted
with keys of its own.
"""

from __future__ import annotations

import hashlib
import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from ratoon.core.config import EngineConfig
from ratoon.core.errors import ConfigError
from ratoon.core.ranks import LinkKeys

SECRET_VARIABLE = "RATOON_CLUSTER_SECRET"
LEAST_SECRET = 16  # characters
EXPECTED_SECRET = f"the same {LEAST_SECRET} or more characters on all hosts: `openssl rand -hex 32` makes some"
LINGER_MILLISECONDS = 1000  # for what was sent before a socket is closed
# ZeroMQ's own heartbeat: a connection whose other end went away without a word is closed, and then made again.
MILLISECONDS_BETWEEN_PINGS = 5_000
MILLISECONDS_WITHOUT_ANSWER = 30_000


def read_secret(config: EngineConfig) -> str:
    """Returns the secret of the file that the settings name, or of the environment. Raises ConfigError."""
    if config.cluster_secret_file is not None:
        field = "cluster_secret_file"
        try:
            secret = Path(config.cluster_secret_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(field, f"can't be read: {error}", EXPECTED_SECRET) from None
    else:
        field = SECRET_VARIABLE
        secret = os.environ.get(SECRET_VARIABLE, "").strip()
    if not secret:
        problem = "hosts authenticate each other by a secret, and there is none"
        raise ConfigError("nnodes", problem, f"set {SECRET_VARIABLE}: {EXPECTED_SECRET}")
    if len(secret) < LEAST_SECRET:
        raise ConfigError(field, f"a secret of {len(secret)} characters can be guessed", EXPECTED_SECRET)
    return secret


def keys_of_secret(secret: str) -> LinkKeys:
    """Returns keys that are the same on every host. They are made slowly, so that a secret is not found by trying."""
    key = hashlib.scrypt(secret.encode(), salt=b"ratoon cluster", n=2**14, r=8, p=1, dklen=32)
    private = z85.encode(key)
    return LinkKeys(zmq.curve_public(private).decode(), private.decode())


def new_keys() -> LinkKeys:
    public, private = zmq.curve_keypair()
    return LinkKeys(public.decode(), private.decode())


class EncryptedContext:
    """A ZeroMQ context whose sockets speak with owners of these keys alone."""

    def __init__(self, keys: LinkKeys) -> None:
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None

    def listen(self, kind: int, address: str, port: int = 0) -> tuple[zmq.Socket[bytes], str]:
        """A socket at this address of this host, and its endpoint; port 0: any that is free. Raises ZMQError."""
        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        made = self._make(kind, address)
        made.curve_server = True
        made.bind(f"tcp://{in_url(address)}:{port or '*'}")
        return made, made.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]

    def connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        made = self._make(kind, endpoint.removeprefix("tcp://").rpartition(":")[0])
        made.curve_serverkey = self._keys.public.encode()
        made.connect(endpoint)
        return made

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of this public key, in Z85, may connect; ZeroMQ's authenticator calls it."""
        return key == self._keys.public.encode()

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=LINGER_MILLISECONDS)

    def _make(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.ipv6 = ":" in address
        made.linger = LINGER_MILLISECONDS
        made.heartbeat_ivl = MILLISECONDS_BETWEEN_PINGS
        made.heartbeat_timeout = MILLISECONDS_WITHOUT_ANSWER
        made.sndhwm = made.rcvhwm = 0  # nothing is dropped: steps in flight bound what is queued
        made.curve_publickey = self._keys.public.encode()
        made.curve_secretkey = self._keys.secret.encode()
        return made


class Mailbox:
    """A queue that a thread can wait for beside sockets: `fileno` is readable while there may be something in it."""

    def __init__(self) -> None:
        self.fileno = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a signal may interrupt `put`
        self._is_closed = False

    def put(self, message: Any) -> None:
        with self._lock:
            if not self._is_closed:  # else nothing takes it any more
                self._queue.put(message)
                os.eventfd_write(self.fileno, 1)

    def take_all(self) -> Iterator[Any]:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fileno)
        while True:
            try:
                yield self._queue.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.fileno)


def resolve(field: str, host: str) -> str:
    """The address of a host. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(field, f"{host!r} can't be resolved ({error})", "the name or address of node 0") from None
    return str(found[0][4][0])


def address_towards(host: str, port: int) -> str:
    """The address of this host on the way to another one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
