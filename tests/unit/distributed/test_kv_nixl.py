"""Blocks between two exchanges by the real NIXL, over UCX and without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratoon.distributed.kv_nixl import NixlConnector, NixlExchange
from tests.unit.distributed.test_kv_peers import FINGERPRINT, NUM_BYTES, block, nothing_is_there, send
from tests.waiting import PATIENCE, wait_until


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[NixlExchange, NixlExchange]]:
    pytest.importorskip("nixl._api", reason="the extra nixl is not installed")
    both = [NixlExchange(str(tmp_path), None, NUM_BYTES, 100 * NUM_BYTES, FINGERPRINT, []) for _ in range(2)]
    yield both[0], both[1]
    for one in both:
        one.close()


def test_nixl_reads_blocks_as_they_are_computed(pair: tuple[NixlExchange, NixlExchange]) -> None:
    sender, receiver = pair
    done = receiver.receive("a", sender.address, nothing_is_there)
    sender.begin_sending("a")
    send(sender, "a", range(3))
    wait_until("the first blocks have come", lambda: len(receiver.inbox) == 3)
    send(sender, "a", range(3, 9))
    sender.end_sending("a")
    done.result(PATIENCE)
    found = [bytes(receiver.inbox.take(block(number)[0]) or b"") for number in range(9)]
    assert found == [b"".join(block(number)[1]) for number in range(9)]
    wait_until("nothing is kept", lambda: sender.outbox.num_kept == 0)


def test_nixl_finds_a_damaged_block(pair: tuple[NixlExchange, NixlExchange]) -> None:
    sender, receiver = pair
    sender.begin_sending("a")
    send(sender, "a", range(3))
    kept = sender.outbox.find(block(1)[0])
    assert kept is not None
    sender.outbox.view(kept.slot)[5] ^= 1
    sender.end_sending("a")
    receiver.receive("a", sender.address, nothing_is_there).result(PATIENCE)
    assert [block(number)[0] in receiver.inbox for number in range(3)] == [True, False, True]


def test_options_of_nixl(tmp_path: Path) -> None:
    try:
        import nixl._api  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match=r"pip install 'ratoon\[nixl\]'"):
            NixlConnector({"folder": str(tmp_path)})
    else:
        with pytest.raises(ValueError, match="other is unknown"):
            NixlConnector({"folder": str(tmp_path), "other": 1})
