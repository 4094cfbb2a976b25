"""A transfer: blocks of one prompt that go from the engine that computes them to another one, under a name.

`kv_transfer_params` has vLLM's fields, so that a router for vLLM's engines can divide a request between two of these:
the first answers `{"do_remote_decode": true}` with what is to be given to the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ratoon.core.errors import RequestError

FIELD = "kv_transfer_params"
BETWEEN_ADDRESSES = ","  # of the ranks of one engine
LONGEST_TEXT = 512  # of a name or an address
ANY_PEER = "*"  # in the place of an address from which blocks may be fetched: all whose engines have the secret


class KVTransfer(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    name: str  # of the transfer, the same on both sides
    # Of the engine that has the blocks, which are fetched before the request is scheduled. Empty: this engine has
    # them, and keeps them for another one.
    address: str = ""

    @property
    def sends(self) -> bool:
        return not self.address


def parse_transfer(params: Any, request_id: str) -> KVTransfer | None:
    """Returns the transfer that `kv_transfer_params` of a request ask for; None: there is none. Raises RequestError."""
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise RequestError(FIELD, f"{params!r} is no object", 'an object such as {"do_remote_decode": true}')
    flags = {name: params.get(name) for name in ("do_remote_decode", "do_remote_prefill")}
    for name, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise RequestError(f"{FIELD}.{name}", f"{flag!r} is neither true nor false", "one of the two")
    if flags["do_remote_decode"] and flags["do_remote_prefill"]:
        raise RequestError(FIELD, "has do_remote_decode and do_remote_prefill", "one of the two")
    if flags["do_remote_decode"]:
        return KVTransfer(request_id)
    if not flags["do_remote_prefill"]:
        return None
    return KVTransfer(_text(params, "remote_request_id"), _address(params))


def answer_of(transfer: KVTransfer, address: str, num_tokens: int) -> dict[str, Any]:
    """Returns the `kv_transfer_params` of an answer, which the other engine is to be given."""
    found = urlsplit(address.partition(BETWEEN_ADDRESSES)[0])
    is_network = found.scheme == "tcp"
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": address,
        "remote_request_id": transfer.name,
        "remote_block_ids": None,  # blocks are found by the hashes of their tokens
        "remote_host": found.hostname if is_network else None,
        "remote_port": found.port if is_network else None,
        "remote_num_tokens": num_tokens,
    }


def _address(params: Mapping[str, Any]) -> str:
    given = params.get("remote_engine_id")
    if given is not None:
        return _text(params, "remote_engine_id")
    host, port = _text(params, "remote_host"), params.get("remote_port")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise RequestError(f"{FIELD}.remote_port", f"{port!r} is no port", "1 to 65535")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _text(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_TEXT:
        expected = f"what the engine that computed the prompt has answered: text of 1 to {LONGEST_TEXT} characters"
        raise RequestError(f"{FIELD}.{name}", f"{value!r} names nothing", expected)
    return value
