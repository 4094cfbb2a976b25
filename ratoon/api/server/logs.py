"""The server's log: to standard error, and to a file where one is named; the engine processes write to the same."""

from __future__ import annotations

import logging
import os

from ratoon.core.errors import ConfigError
from ratoon.observe.logging import FILE_VARIABLE, LEVELS, ROOT, VARIABLE, configure_logging

HTTP_LOGGER = "uvicorn"
TRACE_LOGGER = "opentelemetry"  # says that a collector does not answer
THROUGHPUT_LOGGER = "ratoon.observe.throughput"


def configure_server_logging(level: str | None, file: str | None, access_log: bool) -> None:
    if level is not None and level not in LEVELS:
        raise ConfigError("log_level", f"{level!r} is unknown", ", ".join(LEVELS))
    # Engine processes inherit the environment, and with it where to write and how much.
    if level is not None:
        os.environ[VARIABLE] = level
    if file is not None:
        os.environ[FILE_VARIABLE] = os.path.abspath(file)
    configure_logging()
    if VARIABLE not in os.environ:  # no level was asked for: the throughput is written all the same
        logging.getLogger(THROUGHPUT_LOGGER).setLevel(logging.INFO)
    for name in (HTTP_LOGGER, TRACE_LOGGER):
        library = logging.getLogger(name)
        library.handlers = list(logging.getLogger(ROOT).handlers)
        library.propagate = False
        library.setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if access_log else logging.WARNING)
