"""The connector of LMCache where there is no server that is of use: an error of the setting at the start, and within
seconds. What it does with a real server is in tests/golden/test_lmcache.py."""

from __future__ import annotations

import pytest
import zmq

from ratoon.core.errors import ConfigError
from ratoon.core.kv import KVFingerprint, PageLayout
from ratoon.core.kv_connector import open_connector
from ratoon.distributed import lmcache

KIND = KVFingerprint(weights="w", layout=PageLayout((64,), ()))


@pytest.mark.parametrize("options", [{}, {"url": 3}, {"url": "http://here"}, {"url": "tcp://here:1", "size": 1}])
def test_options_that_it_does_not_have_are_refused(options):
    with pytest.raises(ConfigError, match=r'kv_connector_options: lmcache refuses .*"url": "tcp://HOST:PORT"'):
        open_connector("lmcache", options)


@pytest.mark.parametrize("is_there", [True, False], ids=["silent", "none"])
def test_a_server_that_does_not_answer_is_an_error_at_the_start(monkeypatch, tmp_path, is_there):
    monkeypatch.setattr(lmcache, "SECONDS_TO_CONNECT", 0.1)
    url = f"ipc://{tmp_path}/server"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        if is_there:
            socket.bind(url)
        connector = open_connector("lmcache", {"url": url})
        with pytest.raises(ConfigError, match=r"kv_connector_options: no LMCache server at ipc://.*0\.1 seconds"):
            connector.open_mover(KIND)
