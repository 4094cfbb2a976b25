"""The package's logger: quiet unless something is wrong, or RATOON_LOG (debug, info, warning, error) asks for more.

Messages go to standard error. Results of commands are not log messages and do not come through here.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

ROOT = "ratoon"
VARIABLE = "RATOON_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever standard error is at the moment of the message."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def get_logger(name: str) -> logging.Logger:
    """The logger of one of our modules."""
    return logging.getLogger(name)


def configure_logging(level: str | None = None) -> None:
    """Set the package's level and give it a handler, once. For programs; a library's user configures logging alone."""
    asked = (level or os.environ.get(VARIABLE) or "warning").lower()
    logger = logging.getLogger(ROOT)
    logger.setLevel(LEVELS.get(asked, logging.WARNING))
    if not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers):
        handler = ConsoleHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
    if asked not in LEVELS:
        logger.warning("%s=%s is unknown; one of %s", VARIABLE, asked, ", ".join(LEVELS))
