"""Blocks of a rank on their way to the exchange in its engine's process, and back, over a socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratoon.core.kv import KVFingerprint
from ratoon.distributed import kv_links
from ratoon.distributed.kv_exchange import PeerExchange
from ratoon.distributed.kv_links import LinkedMover, RankLink, address_of
from ratoon.distributed.kv_peers import PeersConnector, _of_rank
from tests.unit.distributed.test_kv_peers import FINGERPRINT, NUM_BYTES, block, nothing_is_there
from tests.waiting import PATIENCE, wait_until


@pytest.fixture
def exchanges(tmp_path: Path) -> Iterator[list[PeerExchange]]:
    both = [PeerExchange(str(tmp_path), None, NUM_BYTES, 400 * NUM_BYTES, FINGERPRINT, []) for _ in range(2)]
    yield both
    for one in both:
        one.close()


def memory() -> list[memoryview]:
    return [memoryview(bytearray(len(part))) for part in block(0)[1]]


def test_blocks_go_from_a_rank_to_the_same_rank_of_another_engine(
    exchanges: list[PeerExchange], tmp_path: Path
) -> None:
    """More than wait in a socket, and the rank is there before its engine listens."""
    count = 2 * kv_links.MAX_QUEUED + 5
    movers = [LinkedMover(f"ipc://{tmp_path}/link{number}") for number in range(2)]
    links = [RankLink(exchange, f"ipc://{tmp_path}/link{number}") for number, exchange in enumerate(exchanges)]
    first, second = exchanges
    done = second.receive("a", first.address, nothing_is_there)
    first.begin_sending("a")
    for number in range(count):
        key, parts = block(number)
        assert first.send("a", key)
        movers[0].send(key, parts)
    wait_until("the exchange has them", lambda: all(first._sending["a"].is_kept.values()))
    first.end_sending("a")
    done.result(PATIENCE)
    wanted = [(block(number)[0], memory()) for number in range(count + 1)]  # the last one was not sent
    assert movers[1].load_all(wanted) == [True] * count + [False]
    for number, (_, parts) in enumerate(wanted[:count]):
        assert [bytes(part) for part in parts] == [bytes(part) for part in block(number)[1]]
    assert len(second.inbox) == 0, "what was loaded is not kept"
    for one in (*movers, *links):
        one.close()
    assert not list(tmp_path.glob("link*"))


def test_an_engine_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_links, "SECONDS_WITHOUT_ANSWER", 0.05)
    monkeypatch.setattr(kv_links, "MILLISECONDS_TO_SEND_THE_REST", 0)
    mover = LinkedMover(f"ipc://{tmp_path}/no-listener")
    assert mover.load_all([(block(number)[0], memory()) for number in range(3)]) == [False] * 3
    mover.close()


def test_late_answers_are_not_used(
    exchanges: list[PeerExchange], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = LinkedMover(address := f"ipc://{tmp_path}/link")
    key, parts = block(1)
    with monkeypatch.context() as impatient:
        impatient.setattr(kv_links, "SECONDS_WITHOUT_ANSWER", 0.05)
        exchanges[0].inbox.put(key, bytearray(b"".join(parts)))
        early = memory()
        assert mover.load_all([(key, early)]) == [False]  # nothing listens yet
    link = RankLink(exchanges[0], address)
    wait_until("the first question is answered", lambda: key not in exchanges[0].inbox)
    exchanges[0].inbox.put(block(2)[0], bytearray(b"".join(block(2)[1])))
    found = memory()
    assert mover.load_all([(block(2)[0], found)]) == [True]
    assert [bytes(part) for part in found] == [bytes(part) for part in block(2)[1]]
    assert not any(map(any, early)), "memory that may have another use by now"
    mover.close()
    link.close()


def test_ranks_have_ports_behind_the_first_and_sockets_of_their_own(tmp_path: Path) -> None:
    assert _of_rank("tcp://a:7000", 0) == "tcp://a:7000" and _of_rank("tcp://a:7000", 2) == "tcp://a:7002"
    assert _of_rank("tcp://a:0", 2) == "tcp://a:0" and _of_rank(str(tmp_path), 3) == str(tmp_path)
    kinds = [KVFingerprint(weights=f"those of rank {rank}") for rank in range(2)]
    assert len({address_of(str(tmp_path), kind) for kind in kinds}) == 2
    with pytest.raises(ValueError, match="other is unknown; there are folder, listen"):
        PeersConnector({"folder": str(tmp_path), "other": 1})
