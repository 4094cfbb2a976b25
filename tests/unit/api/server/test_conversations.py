"""/v1/conversations: items that clients and responses add, whose they are, how many are kept, and what is refused."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from openai.types.conversations import Conversation as OpenAIConversation
from openai.types.conversations import ConversationItem as OpenAIItem
from pydantic import TypeAdapter

from ratoon.api.server.protocol.conversations import ConversationAnswer, DeletedConversation
from ratoon.api.server.protocol.responses import InputItems
from ratoon.api.server.response_items import store_items
from ratoon.api.server.response_store import COMPLETED, FAILED, IN_PROGRESS, ResponseStore, StoredResponse
from ratoon.api.server.stored_turns import StoredConversation, Turn, items_of
from tests.unit.api.server.harness import MODEL, say, scripted, write_tiny_model
from tests.unit.api.server.test_response_log import item, store_in
from tests.unit.api.server.test_responses import GREEDY, create, serving, text_of
from tests.unit.engine.fakes_async import on_event_loop

PATH = "/v1/conversations"
HELLO = {"role": "user", "content": "Hello"}
LONG = "a prompt that fills more than one block"
ITEM = TypeAdapter(OpenAIItem)


async def ask(client, method, path, body=None, status=200):
    answer = await client.open(method, path, body).answer()
    assert answer.status == status, answer.body
    return answer.json() if status == 200 else answer.error


async def make(client, *items, **fields):
    found = await ask(client, "POST", PATH, {"items": list(items), **fields})
    ConversationAnswer.model_validate(found)
    OpenAIConversation.model_validate(found)
    return found["id"]


async def texts_in(client, conversation, **query):
    options = "&".join(f"{name}={value}" for name, value in {"order": "asc", **query}.items())
    found = await ask(client, "GET", f"{PATH}/{conversation}/items?{options}")
    InputItems.model_validate(found)
    for one in found["data"]:
        ITEM.validate_python(one)
    return [part["text"] for one in found["data"] for part in one["content"]]


@on_event_loop
async def test_a_response_reads_the_items_of_its_conversation_and_adds_its_own():
    async with scripted(say("Good day")) as client:
        conversation = await make(client, HELLO, metadata={"a": "b"})
        first = await create(client, "Who are you?", conversation=conversation)
        assert first["conversation"] == {"id": conversation}
        prompt = bytes(client.engine.core.added[-1].prompt_token_ids)
        assert prompt == b"<user>Hello\n<user>Who are you?\n<assistant>"
        assert await texts_in(client, conversation) == ["Hello", "Who are you?", "Good day"]
        second = await create(client, "And?", conversation={"id": conversation})
        prompt = bytes(client.engine.core.added[-1].prompt_token_ids)
        assert prompt == b"<user>Hello\n<user>Who are you?\n<assistant>Good day\n<user>And?\n<assistant>"
        assert await texts_in(client, conversation) == ["Hello", "Who are you?", "Good day", "And?", "Good day"]
        listed = await ask(client, "GET", f"/v1/responses/{second['id']}/input_items?order=asc")
        assert [one["content"][0]["text"] for one in listed["data"]] == ["Hello", "Who are you?", "Good day", "And?"]
        # What is asked for without new items is answered from those that are there.
        assert text_of(await create(client, None, conversation=conversation)) == "Good day"
        alone = await create(client, "Alone")
        assert alone["conversation"] is None


@on_event_loop
async def test_items_are_listed_added_retrieved_and_deleted():
    async with scripted(say("Good day")) as client:
        conversation = await make(client)
        assert await texts_in(client, conversation) == []
        added = await ask(client, "POST", f"{PATH}/{conversation}/items", {"items": [HELLO, {**HELLO, "content": "B"}]})
        assert [one["content"][0]["text"] for one in added["data"]] == ["Hello", "B"] and not added["has_more"]
        await create(client, "C", conversation=conversation)
        assert await texts_in(client, conversation, limit=2) == ["Hello", "B"]
        last_id = added["last_id"]
        assert await texts_in(client, conversation, after=last_id) == ["C", "Good day"]
        assert await texts_in(client, conversation, order="desc", limit=1) == ["Good day"]
        one = await ask(client, "GET", f"{PATH}/{conversation}/items/{last_id}")
        assert one == added["data"][1]
        changed = await ask(client, "DELETE", f"{PATH}/{conversation}/items/{last_id}")
        assert changed["id"] == conversation and changed["object"] == "conversation"
        assert await texts_in(client, conversation) == ["Hello", "C", "Good day"]
        gone = await ask(client, "GET", f"{PATH}/{conversation}/items/{last_id}", status=404)
        assert gone["code"] == "item_not_found"
        assert (await ask(client, "DELETE", f"{PATH}/{conversation}/items/{last_id}", status=404))["param"] == "item_id"
        await create(client, "D", conversation=conversation)
        prompt = bytes(client.engine.core.added[-1].prompt_token_ids)
        assert prompt == b"<user>Hello\n<user>C\n<assistant>Good day\n<user>D\n<assistant>"
        # An item of a conversation can be referred to from elsewhere.
        await create(client, [{"type": "item_reference", "id": added["first_id"]}])
        assert bytes(client.engine.core.added[-1].prompt_token_ids) == b"<user>Hello\n<assistant>"


@on_event_loop
async def test_metadata_change_and_a_deleted_conversation_leaves_its_responses():
    async with scripted(say("Good day")) as client:
        conversation = await make(client, HELLO, metadata={"a": "b"})
        found = await ask(client, "GET", f"{PATH}/{conversation}")
        assert found["metadata"] == {"a": "b"}
        found = await ask(client, "POST", f"{PATH}/{conversation}", {"metadata": {"c": "d"}})
        assert found["metadata"] == {"c": "d"} == (await ask(client, "GET", f"{PATH}/{conversation}"))["metadata"]
        response = await create(client, "A", conversation=conversation)
        deleted = await ask(client, "DELETE", f"{PATH}/{conversation}")
        DeletedConversation.model_validate(deleted)
        assert deleted == {"id": conversation, "object": "conversation.deleted", "deleted": True}
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/items"),
            ("GET", "/items/x"),
            ("DELETE", "/items/x"),
        ):
            error = await ask(client, method, f"{PATH}/{conversation}{path}", status=404)
            assert error["code"] == "conversation_not_found" and error["param"] == "conversation"
        assert (await ask(client, "GET", f"/v1/responses/{response['id']}"))["status"] == "completed"
        assert (await create(client, "B", status=404, conversation=conversation))["error"]["param"] == "conversation"


@on_event_loop
async def test_responses_that_run_at_once_are_added_in_the_order_in_which_they_end():
    async with scripted(say("Good day")) as client:
        conversation = await make(client, HELLO)
        await asyncio.gather(*(create(client, f"q{number}", conversation=conversation) for number in range(3)))
        texts = await texts_in(client, conversation)
        assert texts[0] == "Hello" and len(texts) == 7
        assert sorted(texts[1::2]) == ["q0", "q1", "q2"] and texts[2::2] == ["Good day"] * 3


@on_event_loop
async def test_a_response_in_the_background_is_added_when_it_ends():
    async with scripted(say("Good day")) as client:
        conversation = await make(client, HELLO)
        begun = await create(client, "A", conversation=conversation, background=True)
        await client.context.shared.responses.find_ended(begun["id"], None)
        assert await texts_in(client, conversation) == ["Hello", "A", "Good day"]


@on_event_loop
@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"conversation": 3}, "conversation", "neither the id of a conversation"),
        ({"conversation": {"name": "x"}}, "conversation", "neither the id of a conversation"),
        ({"conversation": {"id": ""}}, "conversation", "neither the id of a conversation"),
        ({"conversation": "x", "previous_response_id": "y"}, "conversation", "one of the two"),
        ({"conversation": "x", "store": False}, "conversation", "store is false"),
    ],
)
async def test_responses_that_name_conversations_wrongly_are_refused(fields, param, problem):
    async with scripted(say("x")) as client:
        error = (await create(client, "A", status=400, **fields))["error"]
        assert error["param"] == param and problem in error["message"]


@on_event_loop
@pytest.mark.parametrize(
    ("body", "param", "problem"),
    [
        ({"items": "x"}, "items", "is not a list of items"),
        ({"items": [3]}, "items", "is not a list of items"),
        ({"items": [HELLO] * 21}, "items", "has 21 entries; 20 at most"),
        ({"items": [{"role": "dancer", "content": "x"}]}, "items[0].role", "'dancer' is unknown"),
        ({"items": [HELLO, {"role": "user"}]}, "items[1].content", "is missing"),
        ({"metadata": {"a": 3}}, "metadata", ""),
    ],
)
async def test_items_that_are_wrong_are_refused(body, param, problem):
    async with scripted(say("x")) as client:
        conversation = await make(client)
        paths = [PATH] if "metadata" in body else [PATH, f"{PATH}/{conversation}/items"]
        for path in paths:
            error = await ask(client, "POST", path, body, status=400)
            assert error["param"].startswith(param) and problem in error["message"]
        assert await texts_in(client, conversation) == []


@on_event_loop
async def test_a_conversation_is_no_longer_than_a_response_can_read():
    async with scripted(say("x"), max_body=4096) as client:
        conversation = await make(client, {**HELLO, "content": "x" * 2000})
        error = await ask(
            client, "POST", f"{PATH}/{conversation}/items", {"items": [{**HELLO, "content": "y" * 2000}]}, status=400
        )
        assert error["param"] == "items" and "at most 4096 (--max-body)" in error["message"]


@on_event_loop
async def test_a_server_that_keeps_nothing_makes_no_conversation():
    async with scripted(say("x"), max_responses=0) as client:
        error = await ask(client, "POST", PATH, {"items": [HELLO]}, status=400)
        assert error["code"] == "conversations_not_kept" and "--max-responses 0" in error["message"]
        error = await ask(client, "POST", PATH, {"metadata": {"a": 3}}, status=400)
        assert error["param"].startswith("metadata")  # what is wrong with a body is told before
        answer = await client.open("POST", "/v1/responses", {"input": "Hi", "conversation": "conv_1"}).answer()
        assert answer.status == 404 and answer.error["code"] == "conversation_not_found"
        assert text_of(await create(client, "Hi")) == "x"  # a response needs no store


# ---- with a model ----


@on_event_loop
async def test_a_conversation_is_a_session_goes_on_from_its_tokens_and_outlives_the_process(tmp_path):
    folder = write_tiny_model(tmp_path / MODEL)

    @asynccontextmanager
    async def started():
        async with serving(folder, kv_files=str(tmp_path / "files"), swap_memory="1MiB") as client:
            yield client
            client.context.shared.responses.store.close()  # as the end of its process does

    async with started() as client:
        conversation = await make(client, {**HELLO, "content": LONG}, metadata={"a": "b"})
        first = await create(client, "and a question", conversation=conversation, **GREEDY)
        second = await create(client, "and another", conversation=conversation, **GREEDY)
        (stats,) = await client.context.llm.stats()
        assert (stats.sessions.num_sessions, stats.sessions.num_roots, stats.sessions.superseded) == (1, 1, 1)
        # All of the first one's tokens but the last are there.
        assert second["continuation"]["source"] == "lease"
        assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1
        listed = await texts_in(client, conversation)
        added = await ask(client, "POST", f"{PATH}/{conversation}/items", {"items": [{**HELLO, "content": "aside"}]})
    async with started() as client:
        assert (await ask(client, "GET", f"{PATH}/{conversation}"))["metadata"] == {"a": "b"}
        assert await texts_in(client, conversation) == [*listed, "aside"]
        third = await create(client, "more", conversation=conversation, **GREEDY)
        assert third["continuation"]["parent"] == second["id"]
        assert third["usage"]["input_tokens_details"]["cached_tokens"] >= 64
        await ask(client, "DELETE", f"{PATH}/{conversation}/items/{added['first_id']}")
    async with started() as client:
        assert await texts_in(client, conversation) == [*listed, "more", text_of(third)]
        await create(client, "after all", conversation=conversation, **GREEDY)
        await ask(client, "DELETE", f"{PATH}/{conversation}")
    async with started() as client:
        await ask(client, "GET", f"{PATH}/{conversation}", status=404)


# ---- the store ----


def conversation_of(store, name, owner=None, *texts):
    turn = Turn(None, store_items([item(text) for text in texts])) if texts else None
    made = StoredConversation(name, owner, turn)
    store.add_conversation(made)
    return made


def answer_in(store, conversation, name, status=COMPLETED):
    response = StoredResponse(
        name, conversation.owner, b"", False, Turn(conversation.turn, store_items([item(f"{name}-in")])),
        conversation_id=conversation.id,
    )  # fmt: skip
    response.status = IN_PROGRESS
    store.add(response)
    response.output, response.status = [item(f"{name}-out")], status
    response.close_output()
    store.settle(response)
    store.settle(response)
    return response


def texts_of(conversation):
    return [one["text"] for one in items_of(conversation.turn)]


def test_what_a_conversation_holds_is_counted_once_and_freed_when_all_are_gone():
    store = ResponseStore(100, 1 << 20)
    made = conversation_of(store, "c", "x", "first")
    empty = store.num_bytes
    response = answer_in(store, made, "r")
    assert texts_of(made) == ["first", "r-in", "r-out"] and made.response_id == "r"
    whole = store.num_bytes
    store.remove(response)
    assert texts_of(made) == ["first", "r-in", "r-out"]
    assert whole > store.num_bytes > empty, "its turn is held by the conversation"
    store.remove_conversation(made)
    assert store.num_bytes == 0
    assert answer_in(store, made, "late").conversation_id is None, "one that ends after its conversation is kept alone"


def test_failed_responses_are_not_added_and_one_behind_another_is_no_root():
    store = ResponseStore(100, 1 << 20)
    made = conversation_of(store, "c", None, "first")
    answer_in(store, made, "bad", FAILED)
    assert texts_of(made) == ["first"] and made.response_id is None
    before = made.turn
    answer_in(store, made, "a")
    made_late = StoredConversation("c", None, before)  # as the second one saw it
    answer_in(store, made_late, "b")
    assert texts_of(made) == ["first", "a-in", "a-out", "b-in", "b-out"] and made.response_id is None


def test_the_store_is_bounded_in_number_and_bytes_and_the_owner_of_most_loses_first():
    store = ResponseStore(4, 1 << 20)
    few = conversation_of(store, "few", "a", "x")
    for number in range(9):
        conversation_of(store, f"c{number}", "b", "x")
    assert [one.id for one in store.conversations()] == ["few", "c6", "c7", "c8"]
    store.find_conversation("c6", "b")
    conversation_of(store, "c9", "b")
    assert [one.id for one in store.conversations()] == ["few", "c8", "c6", "c9"]
    assert store.find_conversation("few", "b") is None, "another owner's"
    small = ResponseStore(100, 12_000)
    kept = conversation_of(small, "kept", "a", "x")
    for number in range(20):
        conversation_of(small, f"c{number}", "b", "y" * 1000)
    assert small.num_bytes <= 12_000
    assert small.find_conversation("kept", "a") is kept and small.find_conversation("c19", "b") is not None
    assert few.turn is not None
    conversation_of(small, "huge", "a", "z" * 20_000)
    assert small.num_bytes <= 12_000 and small.find_conversation("huge", "a") is None, "more than there is room for"


def test_a_store_of_none_drops_a_conversation_at_once_also_while_responses_run():
    store = ResponseStore(0, 3000)
    running = StoredResponse("r", "x", b"", True, Turn(None, store_items([item("y" * 4000)])))
    running.status = IN_PROGRESS
    store.add(running)
    assert store.num_bytes > 3000, "what runs is not evicted"
    made = conversation_of(store, "c", "x", "first")
    assert store.find_conversation(made.id, "x") is None and store.find("r", "x") is running


def test_a_log_is_read_back_with_conversations_and_written_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("ratoon.api.server.response_log.SPARE_RECORDS", 10)
    store, log = store_in(tmp_path)
    made = conversation_of(store, "c", "x", "first")
    store.set_metadata(made, {"a": "b"})
    for number in range(30):
        answer_in(store, made, f"r{number}")
        if number:
            store.remove(store.find(f"r{number - 1}", "x"))
    gone = conversation_of(store, "gone", "x")
    store.remove_conversation(gone)
    log.close()
    later, log = store_in(tmp_path)
    (found,) = later.conversations()
    assert (found.id, found.owner, found.metadata, found.response_id) == ("c", "x", {"a": "b"}, "r29")
    assert texts_of(found) == texts_of(made) and found.created_at == made.created_at
    assert found.turn is later.find("r29", "x").turn, "they share it, as before"
    answer_in(later, found, "more")
    log.close()
    last, log = store_in(tmp_path)
    assert texts_of(next(last.conversations()))[-3:] == ["r29-out", "more-in", "more-out"]
    log.close()
