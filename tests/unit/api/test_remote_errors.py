"""Addresses, and what servers say when they refuse: one line that names the cause."""

from __future__ import annotations

import sys

import pytest

from ratoon.api.remote.client import RefusedError, RemoteError, check_api_key, error_for_status, normalize_url
from ratoon.cli import main
from ratoon.core.errors import RequestError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost"),
        ("https://api.example.org/v1", "https://api.example.org"),
        ("https://api.example.org/openai/v1/", "https://api.example.org/openai"),
        (" http://[::1]:8000/ ", "http://[::1]:8000"),
    ],
)
def test_an_address_may_be_written_in_several_ways(given, expected):
    assert normalize_url(given) == expected


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://a b", "http://h/?q=1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(RequestError, match="--url"):
        normalize_url(url)


def test_a_key_that_no_header_can_carry_is_refused_without_being_shown():
    with pytest.raises(RequestError) as caught:
        check_api_key("geheim\n")
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "too hot", "type": "x", "param": null, "code": null}}',
        b'{"object": "error", "message": "too hot"}',
        b'{"detail": "too hot"}',
        b'{"error": "too hot"}',
        b"too\n   hot",
    ],
)
def test_the_message_is_found_in_every_shape_that_servers_use(body):
    assert str(error_for_status(400, "Bad Request", body)) == "server: too hot (HTTP 400)"


@pytest.mark.parametrize("body", [b"", b'""'])
def test_without_a_message_the_status_speaks(body):
    assert "Bad Gateway" in str(error_for_status(502, "Bad Gateway", body))


def test_a_long_page_is_shortened():
    assert len(str(error_for_status(502, "Bad Gateway", b"<p>" * 5000))) < 400


@pytest.mark.parametrize(("status", "refused"), [(400, True), (401, True), (404, True), (429, False), (500, False)])
def test_only_what_the_client_did_wrong_is_bad_input(status, refused):
    error = error_for_status(status, "", b"no")
    assert isinstance(error, RemoteError) and isinstance(error, RequestError) == refused
    assert isinstance(error, RefusedError) == refused
    assert error.kind == f"HTTP {status}"


@pytest.mark.parametrize("command", [["complete", "hi"], ["chat"], ["bench", "serve"]])
def test_without_the_http_library_it_is_said_what_to_install(monkeypatch, capsys, command):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main([*command, "--url", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err == 'error: aiohttp: is not installed; pip install "ratoon[serve]"\n'
