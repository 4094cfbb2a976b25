"""The package's logger: quiet unless something is wrong, or RATOON_LOG (debug, info, warning, error) asks for more.

Messages go to standard error, and to a file where RATOON_LOG_FILE names one. Messages that can't be written are
dropped: a full disk must not stop the server. Results of commands are not logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from ratoon.core.errors import ConfigError

ROOT = "ratoon"
VARIABLE = "RATOON_LOG"
FILE_VARIABLE = "RATOON_LOG_FILE"
FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"
LIVE_VARIABLE = "RATOON_LIVE_DISPLAY"  # set for child processes: the id of the one that draws on their terminal
ERASE_LINE = "\r\x1b[2K"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever standard error is at the moment of the message."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Formats a message. If another process has a spinner on the line, the message replaces it, and the spinner is
        redrawn on the next line. Displays of this process handle messages themselves."""
        text = super().format(record)
        drawing = os.environ.get(LIVE_VARIABLE)
        return ERASE_LINE + text if drawing and drawing != str(os.getpid()) and sys.stderr.isatty() else text


@contextlib.contextmanager
def live_display() -> Iterator[None]:
    """A spinner or a bar is on the terminal inside the block: processes that are started here write around it."""
    os.environ[LIVE_VARIABLE] = str(os.getpid())
    try:
        yield
    finally:
        forget_live_display()


def forget_live_display() -> None:
    """Forgets the parent's display; a child process calls this when it knows that the display is over."""
    os.environ.pop(LIVE_VARIABLE, None)


class FileLog(logging.Handler):
    """Appends to a file, unbuffered: what a full disk refuses does not pile up in memory. Several processes may write
    to one file, for each message is one write."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FILE_FORMAT))
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ConfigError("log_file", f"can't write to {path}: {error.strerror}", "another path") from None

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            os.write(self._file, (self.format(record) + "\n").encode("utf-8", "replace"))


def get_logger(name: str) -> logging.Logger:
    """The logger of one of our modules."""
    return logging.getLogger(name)


def configure_logging(level: str | None = None) -> None:
    """Set the package's level and give it handlers, once. For programs; a library's user configures logging alone."""
    logging.raiseExceptions = False  # else a handler that fails would say so on standard error, which may be full too
    asked = (level or os.environ.get(VARIABLE) or "warning").lower()
    logger = logging.getLogger(ROOT)
    logger.setLevel(LEVELS.get(asked, logging.WARNING))
    if not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers):
        handler = ConsoleHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
    file = os.environ.get(FILE_VARIABLE)
    if file and not any(isinstance(handler, FileLog) for handler in logger.handlers):
        logger.addHandler(FileLog(file))
    if asked not in LEVELS:
        logger.warning("%s=%s is unknown; one of %s", VARIABLE, asked, ", ".join(LEVELS))


def set_up_logging(level: str | None, file: str | None) -> None:
    """Sets up the log as options of a command say. Processes that are started here inherit the environment, and with it
    the level and the file. Raises ConfigError."""
    if level is not None and level not in LEVELS:
        raise ConfigError("log_level", f"{level!r} is unknown", ", ".join(LEVELS))
    if level is not None:
        os.environ[VARIABLE] = level
    if file is not None:
        os.environ[FILE_VARIABLE] = os.path.abspath(file)
    configure_logging()
