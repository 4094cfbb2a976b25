from __future__ import annotations

import io
import logging
import os

import pytest

from ratoon.observe.logging import ERASE_LINE, LIVE_VARIABLE, configure_logging, get_logger, live_display


@pytest.fixture(autouse=True)
def untouched_logger():
    logger = logging.getLogger("ratoon")
    saved = (logger.level, list(logger.handlers), logger.propagate)
    logger.handlers = []
    yield
    logger.level, logger.handlers, logger.propagate = saved
    logger.setLevel(saved[0])


def test_quiet_unless_something_is_wrong(capsys, monkeypatch):
    monkeypatch.delenv("RATOON_LOG", raising=False)
    configure_logging()
    logger = get_logger("ratoon.somewhere")
    logger.info("hidden")
    logger.warning("shown")
    captured = capsys.readouterr()
    assert "shown" in captured.err and "hidden" not in captured.err
    assert captured.out == ""


def test_the_environment_asks_for_more(capsys, monkeypatch):
    monkeypatch.setenv("RATOON_LOG", "debug")
    configure_logging()
    configure_logging()
    get_logger("ratoon.somewhere").debug("detail")
    assert capsys.readouterr().err.count("detail") == 1


def test_an_unknown_level_is_named(capsys, monkeypatch):
    monkeypatch.setenv("RATOON_LOG", "loud")
    configure_logging()
    assert "RATOON_LOG=loud" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_message_takes_the_place_of_a_spinner_that_another_process_draws(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    configure_logging()
    logger = get_logger("ratoon.somewhere")
    monkeypatch.setenv(LIVE_VARIABLE, str(os.getppid()))
    logger.warning("during")
    monkeypatch.delenv(LIVE_VARIABLE)
    logger.warning("behind")
    with live_display():  # this process draws: its display moves messages out of the way
        logger.warning("here")
    during, behind, here, _ = terminal.getvalue().split("\n")
    assert during.startswith(ERASE_LINE) and during.endswith("during")
    assert ERASE_LINE not in behind + here
    assert LIVE_VARIABLE not in os.environ


def test_a_pipe_gets_messages_alone(capsys, monkeypatch):
    monkeypatch.setenv(LIVE_VARIABLE, str(os.getppid()))
    configure_logging()
    get_logger("ratoon.somewhere").warning("plain")
    assert ERASE_LINE not in capsys.readouterr().err
