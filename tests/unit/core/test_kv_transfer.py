"""`kv_transfer_params`: what a request may ask for, and what the answer of one engine is to another."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.kv_transfer import KVTransfer, answer_of, parse_transfer


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "remote_host": None}])
def test_nothing_is_asked_for(params: Any) -> None:
    assert parse_transfer(params, "id") is None


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///run/x/kv-1",
        "tcp://10.0.0.1:7000",
        "tcp://[fd00::1]:7000",
        "tcp://10.0.0.1:7000,tcp://10.0.0.1:7001",  # of two ranks
    ],
)
def test_what_one_engine_answers_the_other_one_understands(address: str) -> None:
    sent = parse_transfer({"do_remote_decode": True}, "id")
    assert sent == KVTransfer("id") and sent.sends
    answer = answer_of(sent, address, 100)
    assert parse_transfer(answer, "other") == KVTransfer("id", address)
    if address.startswith("tcp") and "," not in address:  # a router that passes on vLLM's fields alone
        assert parse_transfer(answer | {"remote_engine_id": None}, "other") == KVTransfer("id", address)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (3, "kv_transfer_params"),
        ({"do_remote_decode": 1}, "kv_transfer_params.do_remote_decode"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, "kv_transfer_params"),
        ({"do_remote_prefill": True}, "kv_transfer_params.remote_request_id"),
        ({"do_remote_prefill": True, "remote_request_id": "x" * 600}, "kv_transfer_params.remote_request_id"),
        ({"do_remote_prefill": True, "remote_request_id": "x"}, "kv_transfer_params.remote_host"),
        (
            {"do_remote_prefill": True, "remote_request_id": "x", "remote_host": "h", "remote_port": "7"},
            "kv_transfer_params.remote_port",
        ),
        ({"do_remote_prefill": True, "remote_request_id": "x", "remote_engine_id": 3}, "kv_transfer_params.remote_eng"),
    ],
)
def test_what_can_not_be_is_refused_by_its_field(params: Any, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_transfer(params, "id")
    assert refused.value.field.startswith(field)
