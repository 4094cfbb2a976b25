"""The server's log: to standard error, and to a file where one is named.

What can't be written is lost, and nothing else happens: a full disk is no reason to answer nobody.
"""

from __future__ import annotations

import logging
import os

from ratoon.core.errors import ConfigError
from ratoon.observe.logging import LEVELS, ROOT, configure_logging

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
HTTP_LOGGER = "uvicorn"


class FileLog(logging.Handler):
    """Appends to a file, unbuffered: what a full disk refuses does not pile up in memory."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ConfigError("log_file", f"can't write to {path}: {error.strerror}", "another path") from None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            os.write(self._file, (self.format(record) + "\n").encode("utf-8", "replace"))
        except Exception:
            return


def configure_server_logging(level: str | None, file: str | None, access_log: bool) -> None:
    if level is not None and level not in LEVELS:
        raise ConfigError("log_level", f"{level!r} is unknown", ", ".join(LEVELS))
    logging.raiseExceptions = (
        False  # else a handler that fails would report so on standard error, which may be full too
    )
    configure_logging(level)
    ours, http = logging.getLogger(ROOT), logging.getLogger(HTTP_LOGGER)
    if file is not None:
        ours.addHandler(FileLog(file))
    http.handlers = list(ours.handlers)
    http.propagate = False
    http.setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if access_log else logging.WARNING)
