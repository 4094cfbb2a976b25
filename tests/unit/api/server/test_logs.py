"""What the server's log has without being asked, and how libraries get into it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import logging
from ratoon.api.server.runner import configure_server_logging

configure_server_logging({level!r}, None, False)
logging.getLogger("ratoon.observe.throughput").info("the throughput")
logging.getLogger("ratoon.engine.build").info("something else")
logging.getLogger("opentelemetry.sdk").warning("no collector")
"""


@pytest.mark.slow  # processes that import a server
@pytest.mark.parametrize(("level", "shows_throughput"), [(None, True), ("info", True), ("warning", False)])
@pytest.mark.one_in(2)
def test_the_throughput_is_written_unless_a_level_forbids_it(monkeypatch, level, shows_throughput):
    monkeypatch.delenv("RATOON_LOG", raising=False)
    script = SCRIPT.format(level=level)
    log = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stderr
    assert ("INFO ratoon.observe.throughput: the throughput" in log) is shows_throughput
    assert ("something else" in log) is (level == "info")
    assert "WARNING opentelemetry.sdk: no collector" in log
