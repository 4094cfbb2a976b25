"""Stored responses that outlive their store: their text, their turns and who may read them."""

from __future__ import annotations

from pathlib import Path

from ratoon.api.server import response_log
from ratoon.api.server.response_items import store_items
from ratoon.api.server.response_log import ResponseLog
from ratoon.api.server.response_store import COMPLETED, IN_PROGRESS, ResponseStore, StoredResponse
from ratoon.api.server.stored_turns import Turn, items_of
from ratoon.engine.output.record_log import RecordLog


def store_in(folder: Path, max_responses: int = 100) -> tuple[ResponseStore, ResponseLog]:
    log = ResponseLog(RecordLog(folder, "responses"))
    return ResponseStore(max_responses, 1 << 20, log), log


def item(name: str) -> dict[str, str]:
    return {"id": f"msg_{name}", "type": "message", "text": name}


def end(store: ResponseStore, name: str, owner: str | None = None, after: Turn | None = None) -> StoredResponse:
    response = StoredResponse(name, owner, b'"model":"m"', False, Turn(after, store_items([item(f"{name}-in")])))
    response.status = IN_PROGRESS
    store.add(response)
    response.output = [item(f"{name}-out")]
    response.status, response.usage = COMPLETED, {"total_tokens": 3}
    response.close_output()
    store.settle(response)
    store.settle(response)
    return response


def texts(response: StoredResponse) -> list[str]:
    return [one["text"] for one in items_of(response.turn)]


def test_a_conversation_is_read_back_with_its_turns_also_those_of_responses_that_are_gone(tmp_path):
    store, log = store_in(tmp_path)
    first = end(store, "a", owner="x")
    second = end(store, "b", owner="x", after=first.turn)
    end(store, "c", owner="x", after=first.turn)
    store.remove(first)
    running = StoredResponse("d", "x", b"", True, Turn(second.turn, store_items([])))
    store.add(running)
    log.close()
    later, log = store_in(tmp_path)
    assert len(later) == 2 and later.find("a", "x") is None and later.find("d", "x") is None
    assert later.find("b", "y") is None
    found = {name: later.find(name, "x") for name in ("b", "c")}
    assert texts(found["b"]) == ["a-in", "a-out", "b-in", "b-out"]
    assert texts(found["c"]) == ["a-in", "a-out", "c-in", "c-out"]
    assert found["b"].turn.before is found["c"].turn.before, "they share the turn, as before"
    assert found["b"].answer() == second.answer() and found["b"].ended.is_set()
    # What comes later goes on from it, and is kept as well.
    end(later, "e", owner="x", after=found["b"].turn)
    log.close()
    last, log = store_in(tmp_path)
    assert texts(last.find("e", "x"))[-3:] == ["b-out", "e-in", "e-out"]
    log.close()


def test_a_log_is_written_anew_when_most_of_it_is_outdated(tmp_path, monkeypatch):
    monkeypatch.setattr(response_log, "SPARE_RECORDS", 10)
    store, log = store_in(tmp_path, max_responses=3)
    for number in range(60):
        end(store, f"r{number}")
    log.close()
    records = RecordLog(tmp_path, "responses")
    assert len(records.read()) <= 3 * 3 + 10 + 3
    records.close()
    later, log = store_in(tmp_path, max_responses=3)
    assert sorted(one.id for one in later) == ["r57", "r58", "r59"]
    log.close()
