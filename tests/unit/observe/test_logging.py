from __future__ import annotations

import logging

import pytest

from ratoon.observe.logging import configure_logging, get_logger


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
