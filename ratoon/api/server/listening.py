"""Where the server listens: a port or a Unix socket, taken before the model is loaded: a conflict shows at once."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from contextlib import closing, suppress

from ratoon.api.server.hosts import AllowedHosts
from ratoon.api.server.settings import ServerSettings
from ratoon.core.errors import ConfigError


def bind(settings: ServerSettings) -> socket.socket:
    """A bound socket that does not listen yet. ConfigError if the place is taken, or is none."""
    return _bind_port(settings.host, settings.port) if settings.uds is None else _bind_path(settings.uds)


def address(bound: socket.socket) -> str:
    """How a client reaches it."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"


def release(bound: socket.socket, settings: ServerSettings) -> None:
    """Give the place back; a Unix socket's file goes with it."""
    bound.close()
    if settings.uds is not None:
        with suppress(FileNotFoundError):
            os.unlink(settings.uds)


def is_local(bound: socket.socket) -> bool:
    """Only this machine can reach it."""
    return bound.family == socket.AF_UNIX or ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def allowed_hosts(bound: socket.socket, settings: ServerSettings) -> AllowedHosts | None:
    """The names that requests may call the server by; None where that does not matter: a key tells who asks, a Unix
    socket is out of a browser's reach, and an address for other machines has names that are not known here."""
    if bound.family == socket.AF_UNIX:
        return None
    if settings.allowed_hosts or (is_local(bound) and not settings.api_keys):
        return AllowedHosts((settings.host, *settings.allowed_hosts))
    return None


def _bind_port(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError("host", f"{host!r} is no address here: {error}", "127.0.0.1, 0.0.0.0 or ::") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(target)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError("port", f"{host}:{port} is in use", "another --port, or 0 for any free one") from None
        raise ConfigError("host", f"can't listen on {host}:{port}: {error.strerror}") from None
    return bound


def _bind_path(path: str) -> socket.socket:
    _remove_stale_socket(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise ConfigError("uds", f"can't listen on {path}: {error.strerror or error}", "a path that is free") from None
    return bound


def _remove_stale_socket(path: str) -> None:
    """A server that was killed leaves its socket behind. One that answers, or any other file, is left alone."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
