"""/v1/responses: conversations that continue their roots, typed events, background, and the store."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from ratoon.api.server.context import ServerContext
from ratoon.api.server.protocol.responses import DeletedResponse, InputItems, ResponseAnswer
from ratoon.api.server.settings import ServerSettings
from ratoon.observe.metrics import EngineMetrics
from tests.engines_async import make_thread_engine
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, Client, say, scripted, write_tiny_model
from tests.unit.engine.fakes_async import on_event_loop

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
LETTERS = {str(token): 100.0 for token in range(ord("a"), ord("z") + 1)}  # else a random model writes half characters
GREEDY = {"temperature": 0, "max_output_tokens": 6, "logit_bias": LETTERS}
WRONG_FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "dance"}}}
EVENT = TypeAdapter(ResponseStreamEvent)
# Ends every turn with the model's end token, so that a new turn repeats all that was generated.
ENDS_TURNS = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Leaves out what earlier answers have before a bar, as templates do with reasoning.
DROPS_REASONING = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content.split('|')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


async def create(client, body="Hello", status=200, **fields):
    answer = await client.post(PATH, {"model": MODEL, "input": body, **fields})
    assert answer.status == status, answer.body
    found = answer.json()
    if status == 200:
        ResponseAnswer.model_validate(found)
        OpenAIResponse.model_validate(found)
    return found


def text_of(response):
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def read_events(body: bytes):
    """The events of a stream, checked against the types of OpenAI's client and their own names and numbers."""
    events = []
    for block in body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        EVENT.validate_python(event)
        events.append(event)
    return events


# ---- one response ----


@on_event_loop
async def test_a_response_has_all_fields_of_the_api():
    async with scripted(say("Good day")) as client:
        found = await create(client, instructions="Be kind", metadata={"a": "b"}, temperature=0.5, top_p=0.9)
        assert found["id"].startswith("resp_") and found["object"] == "response"
        assert (found["status"], text_of(found)) == ("completed", "Good day")
        assert (found["temperature"], found["top_p"], found["metadata"]) == (0.5, 0.9, {"a": "b"})
        assert found["instructions"] == "Be kind" and found["store"] is True and found["background"] is False
        assert found["tool_choice"] == "auto" and found["tools"] == [] and found["text"]["format"] == {"type": "text"}
        assert client.engine.core.added[-1].prompt_token_ids == list(b"<system>Be kind\n<user>Hello\n<assistant>")
        usage = found["usage"]
        assert usage["output_tokens"] == len("Good day") + 1
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert found["completed_at"] >= found["created_at"] and "continuation" not in found


@on_event_loop
async def test_events_come_in_order_with_numbers():
    async with scripted(say("Hi you")) as client:
        answer = await client.post(PATH, {"model": MODEL, "input": "Hello", "stream": True})
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
        events = read_events(answer.body)
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert set(kinds[4:-4]) == {"output_text.delta"}
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
        assert "".join(event["delta"] for event in events[4:-4]) == "Hi you"
        final = events[-1]["response"]
        assert final == (await client.get(f"{PATH}/{final['id']}")).json()
        assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
        item = events[-2]["item"]
        assert item == final["output"][0] and {event["item_id"] for event in events[3:-2]} == {item["id"]}


@on_event_loop
async def test_events_are_written_without_waking_the_task():
    async with scripted(say("Hi you"), by_hand=True) as client:
        opened = client.open("POST", PATH, {"model": MODEL, "input": "Hello", "stream": True})
        while not client.engine.core.added:
            await asyncio.sleep(0.001)
        for _ in range(10):
            client.engine.step(1)
            await asyncio.sleep(0.01)
        read_events((await opened.answer()).body)
        assert opened.num_direct_writes > 1


@on_event_loop
async def test_an_answer_that_is_cut_off_is_incomplete():
    async with scripted(say("a long answer")) as client:
        found = await create(client, max_output_tokens=4)
        assert found["status"] == "incomplete" and found["completed_at"] is None
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}
        assert found["output"][0]["status"] == "incomplete" and text_of(found) == "a lo"
        answer = await client.post(PATH, {"model": MODEL, "input": "Hello", "max_output_tokens": 4, "stream": True})
        assert read_events(answer.body)[-1]["type"] == "response.incomplete"


@on_event_loop
async def test_an_empty_answer_is_an_empty_message():
    async with scripted(say("")) as client:
        found = await create(client)
        assert found["status"] == "completed" and text_of(found) == ""
        assert [item["type"] for item in found["output"]] == ["message"]


@on_event_loop
async def test_items_of_all_kinds_reach_the_template():
    items = [
        {"role": "developer", "content": "Be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Two", "annotations": []}]},
        {"role": "user", "content": "Three"},
    ]
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}{{ m.name }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.at }}]{% endfor %}{% endfor %}"
    )
    async with scripted(say("x"), template=template) as client:
        found = await create(client, items, instructions="Be kind")
        prompt = bytes(client.engine.core.added[-1].prompt_token_ids).decode()
        assert prompt == (
            "<system>Be kind\n\nBe brief<user>One<assistant>hm[look 1]<tool>seenlook<assistant>Two<user>Three"
        )
        listed = (await client.get(f"{PATH}/{found['id']}/input_items?order=asc")).json()
        InputItems.model_validate(listed)
        kinds = [item["type"] for item in listed["data"]]
        assert kinds == [*("message",) * 2, "reasoning", "function_call", "function_call_output", *("message",) * 2]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({}, "input"),
        ({"input": [{"role": "nurse", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "dance"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "x", "include": [LOGPROBS], "top_logprobs": 99}, "top_logprobs"),
        ({"input": "x", "include": [LOGPROBS], "top_logprobs": -1}, "top_logprobs"),
        ({"input": "x", "include": ["reasoning.encrypted_content", "message.logprobs"]}, "include[1]"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x", "conversation": 1}, "conversation"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tool_choice": "perhaps"}, "tool_choice"),
        ({"input": "x", "max_tokens": 5}, "max_tokens"),
        ({"input": "x" * 600}, "input"),
        ({"input": "x", "retain_kv": -1}, "retain_kv"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": "x", "text": WRONG_FORMAT}, "text.format.schema"),
        ({"input": "x", "text": WRONG_FORMAT, "background": True}, "text.format.schema"),
        ({"input": "x", "tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ],
)
@on_event_loop
async def test_a_wrong_request_names_the_field(body, param):
    async with scripted(say("x")) as client:
        answer = await client.post(PATH, {"model": MODEL, **body})
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert len(client.context.shared.responses.store) == 0


# ---- stored responses ----


@on_event_loop
async def test_a_stored_response_is_retrieved_and_deleted():
    async with scripted(say("Hi")) as client:
        made = await create(client)
        path = f"{PATH}/{made['id']}"
        assert (await client.get(path)).json() == made
        gone = (await client.open("DELETE", path).answer()).json()
        DeletedResponse.model_validate(gone)
        for method, where in (
            ("GET", path),
            ("DELETE", path),
            ("POST", f"{path}/cancel"),
            ("GET", f"{path}/input_items"),
        ):
            answer = await client.open(method, where).answer()
            assert (answer.status, answer.error["code"]) == (404, "response_not_found")
            assert "the server was restarted" in answer.error["message"]
        again = await create(client, previous_response_id=made["id"], status=404)
        assert again["error"]["param"] == "previous_response_id"
        assert client.context.llm.list_roots() == []


@on_event_loop
async def test_nothing_is_kept_of_a_response_that_is_not_stored():
    async with scripted(say("Hi")) as client:
        made = await create(client, store=False)
        assert made["store"] is False
        assert (await client.get(f"{PATH}/{made['id']}")).status == 404
        await asyncio.sleep(0)
        assert client.context.llm.list_roots() == [] and client.engine.core.added[-1].retain_kv is None


@on_event_loop
async def test_a_response_is_leased_for_as_long_as_the_server_says():
    async with scripted(say("Hi"), response_lease=20.0) as client:
        await create(client)
        await create(client, retain_kv=5)
        assert [request.retain_kv for request in client.engine.core.added] == [20.0, 5.0]
    async with scripted(say("Hi"), response_lease=0.0) as client:
        await create(client)
        assert client.engine.core.added[-1].retain_kv is None
    async with scripted(say("Hi"), response_lease=1e9) as client:
        await create(client)
        assert client.engine.core.added[-1].retain_kv == client.context.llm.config.cache.max_lease_seconds


@on_event_loop
async def test_responses_belong_to_the_key_that_made_them():
    async with scripted(say("Hi"), api_keys=("sk-a", "sk-b")) as client:

        def use(key):
            client.headers = {"authorization": f"Bearer {key}"}

        use("sk-a")
        made = await create(client)
        use("sk-b")
        for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            assert (await client.open(method, f"{PATH}/{made['id']}{end}").answer()).status == 404
        await create(client, previous_response_id=made["id"], status=404)
        reference = [{"type": "item_reference", "id": made["output"][0]["id"]}]
        assert (await create(client, reference, status=404))["error"]["param"] == "input[0].id"
        use("sk-a")
        assert (await client.get(f"{PATH}/{made['id']}")).status == 200
        await create(client, [*reference, {"role": "user", "content": "And?"}])


@on_event_loop
async def test_a_full_store_evicts_what_was_used_least_recently():
    async with scripted(say("Hi"), max_responses=2) as client:
        first, second = await create(client), await create(client)
        await client.get(f"{PATH}/{first['id']}")
        third = await create(client, previous_response_id=second["id"])  # uses the second
        statuses = [(await client.get(f"{PATH}/{one['id']}")).status for one in (first, second, third)]
        assert statuses == [404, 200, 200]
        await asyncio.sleep(0)
        assert {root.request_id for root in client.context.llm.list_roots()} == {second["id"], third["id"]}
    async with scripted(say("Hi"), max_response_bytes=12_000) as client:
        made = [await create(client, "x" * 400) for _ in range(5)]
        assert client.context.shared.responses.store.num_bytes <= 12_000
        assert (await client.get(f"{PATH}/{made[-1]['id']}")).status == 200
        assert (await client.get(f"{PATH}/{made[0]['id']}")).status == 404
    async with scripted(say("Hi"), max_response_bytes=20_000) as client:  # all that a request can make large counts
        text = "x" * 4000
        for fields in ({"instructions": text[:400]}, {"metadata": {"a": text}}, {"user": text}):
            for _ in range(8):
                await create(client, **fields)
            store = client.context.shared.responses.store
            assert store.num_bytes <= 20_000 and len(store) < 7
    async with scripted(say("Hi"), max_responses=0) as client:
        made = await create(client)
        assert (await client.get(f"{PATH}/{made['id']}")).status == 404


@on_event_loop
async def test_input_items_are_those_of_the_whole_conversation_in_pages():
    async with scripted(say("Hi")) as client:
        first = await create(client, "One")
        second = await create(client, "Two", previous_response_id=first["id"])
        path = f"{PATH}/{second['id']}/input_items"
        newest = (await client.get(f"{path}?limit=2")).json()
        texts = [item["content"][0]["text"] for item in newest["data"]]
        assert texts == ["Two", "Hi"] and newest["has_more"]
        rest = (await client.get(f"{path}?after={newest['last_id']}")).json()
        assert [item["content"][0]["text"] for item in rest["data"]] == ["One"] and not rest["has_more"]
        assert (await client.get(f"{path}?after=msg_none")).error["param"] == "after"
        assert (await client.get(f"{path}?limit=0")).error["param"] == "limit"


# ---- the next turn ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@asynccontextmanager
async def serving(model, template=ENDS_TURNS, settings=None, **engine):
    llm = make_thread_engine(str(model), metrics=EngineMetrics(MODEL), **{**TINY_SETTINGS, **engine})
    async with llm:
        yield Client(ServerContext(llm, ServerSettings(chat_template=template, **(settings or {}))))


async def afresh(client, response, *texts):
    """What the model says to the same conversation, sent as a whole."""
    items = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * len(texts), texts)]
    return text_of(await create(client, items, cache_salt="another", **GREEDY))


@on_event_loop
async def test_log_probabilities_come_with_the_text_and_with_its_events(folder):
    async with serving(folder) as client:
        asked = {**GREEDY, "include": [LOGPROBS], "top_logprobs": 2}
        found = await create(client, "Hello", **asked)
        (part,) = found["output"][0]["content"]
        assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] and found["top_logprobs"] == 2
        for entry in part["logprobs"]:
            assert entry["bytes"] == list(entry["token"].encode()) and entry["logprob"] <= 0
            assert len(entry["top_logprobs"]) == 2
        chat = {"max_tokens": 6, "temperature": 0, "logit_bias": LETTERS, "logprobs": True, "top_logprobs": 2}
        (choice,) = (await client.chat("Hello", **chat)).json()["choices"]
        assert choice["logprobs"]["content"] == part["logprobs"]
        streamed = await client.post(PATH, {"model": MODEL, "input": "Hello", "stream": True, **asked})
        events = read_events(streamed.body)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert all("".join(entry["token"] for entry in event["logprobs"]) == event["delta"] for event in deltas)
        assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
        for event in events:
            if event["type"] == "response.output_text.done":
                assert event["logprobs"] == part["logprobs"]
            if event["type"] == "response.completed":
                assert event["response"]["output"][0]["content"] == [part]
        # What was answered can be sent back as it is
        await create(client, [*found["output"], {"role": "user", "content": "And?"}], **GREEDY)
        without = await create(client, "Hello", **GREEDY, include=["reasoning.encrypted_content"])
        assert without["output"][0]["content"][0]["logprobs"] == [] and without["top_logprobs"] == 0


@on_event_loop
async def test_the_next_turn_computes_only_what_is_new(folder):
    async with serving(folder) as client:
        first = await create(client, "A question that fills a block", **GREEDY)
        second = await create(client, "And?", previous_response_id=first["id"], **GREEDY)
        parent = first["usage"]["total_tokens"]
        new = len("<|end|><user>And?<|end|><assistant>") - 2 * len("|end|>")
        assert second["usage"]["input_tokens"] == parent + new
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == parent - 1  # the last one has no memory yet
        assert second["continuation"] == {
            "parent": first["id"],
            "inherited_tokens": parent - 1,
            "computed_tokens": new + 1,
            "source": "lease",
            "fallback": False,
        }
        assert text_of(second) == await afresh(client, second, "A question that fills a block", text_of(first), "And?")


@on_event_loop
async def test_any_response_is_continued_again(folder):
    async with serving(folder) as client:
        first = await create(client, "A question that fills a block", **GREEDY)
        second = await create(client, "And?", previous_response_id=first["id"], **GREEDY)
        for parent in (second, first, second):
            fork = await create(client, "Another way", previous_response_id=parent["id"], **GREEDY)
            assert fork["usage"]["input_tokens_details"]["cached_tokens"] == parent["usage"]["total_tokens"] - 1
            assert fork["continuation"]["source"] == "lease"


@on_event_loop
async def test_what_a_template_rewrites_is_computed_again(folder):
    async with serving(folder, DROPS_REASONING) as client:
        bias = {str(ord("|")): 100.0}  # an answer of bars, of which nothing is repeated
        first = await create(client, "A question that fills a block", **{**GREEDY, "logit_bias": bias})
        assert text_of(first) == "|" * 6
        second = await create(client, "And?", previous_response_id=first["id"], **GREEDY)
        told = second["continuation"]
        assert told["inherited_tokens"] == first["usage"]["input_tokens"] and told["source"] == "lease"
        assert told["inherited_tokens"] + told["computed_tokens"] == second["usage"]["input_tokens"]
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == told["inherited_tokens"]


@on_event_loop
async def test_other_instructions_inherit_what_is_left_in_common(folder):
    async with serving(folder) as client:
        first = await create(client, "Hello", instructions="Be brief, and polite", **GREEDY)
        second = await create(
            client, "And?", instructions="Be brief, and strict", previous_response_id=first["id"], **GREEDY
        )
        assert second["continuation"]["inherited_tokens"] == len("<system>Be brief, and ")


@on_event_loop
async def test_a_lease_that_is_gone_falls_back_to_the_prefix_cache_and_says_so(folder):
    async with serving(folder) as client:
        first = await create(client, "A question that fills a block", **GREEDY)
        root = await client.context.llm.find_parent(first["id"])
        await client.context.llm._call("end_leases", root.branch_ids)
        second = await create(client, "And?", previous_response_id=first["id"], **GREEDY)
        assert second["continuation"]["source"] == "prefix_cache"
        cached = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert 0 < cached < first["usage"]["total_tokens"] - 1 and cached % 16 == 0
        await client.context.llm.forget(second["id"])
        third = await create(client, "So?", previous_response_id=second["id"], **GREEDY)
        assert third["continuation"]["fallback"] and third["continuation"]["parent"] == second["id"]
        fourth = await create(client, "Well?", previous_response_id=third["id"], **GREEDY)
        assert fourth["continuation"]["source"] == "lease"
        assert fourth["continuation"]["inherited_tokens"] == third["usage"]["total_tokens"] - 1


@on_event_loop
async def test_a_conversation_that_is_too_long_is_refused_or_truncated(folder):
    async with serving(folder) as client:
        long = {**GREEDY, "max_output_tokens": 20}
        first = await create(client, "a" * 200, instructions="Keep this", **long)
        second = await create(client, "b" * 150, instructions="Keep this", previous_response_id=first["id"], **long)
        ask = {"previous_response_id": second["id"], "instructions": "Keep this", **long}
        refusal = await create(client, "c" * 150, status=400, **ask)
        assert (refusal["error"]["param"], refusal["error"]["code"]) == ("input", "context_length_exceeded")
        third = await create(client, "c" * 150, truncation="auto", **ask)
        assert third["truncation"] == "auto" and third["status"] == "incomplete"
        root = await client.context.llm.find_parent(third["id"])
        prompt = client.context.llm.get_tokenizer().decode(root.prompt_token_ids, False)
        assert prompt.startswith("<system>Keep this<|end|><user>bbb") and "aaa" not in prompt
        assert third["continuation"]["inherited_tokens"] == len("<system>Keep this") + 1 + len("<user>")
        refusal = await create(client, "d" * 600, truncation="auto", status=400, **ask)
        assert refusal["error"]["code"] == "context_length_exceeded"


# ---- in the background ----


async def until_ended(client, made):
    while (found := (await client.get(f"{PATH}/{made['id']}")).json())["status"] in ("queued", "in_progress"):
        ResponseAnswer.model_validate(found)
        await asyncio.sleep(0.001)
    return found


@on_event_loop
async def test_a_response_in_the_background_is_polled():
    async with scripted(say("Good day"), by_hand=True) as client:
        made = await create(client, background=True)
        assert made["status"] == "queued" and made["output"] == [] and made["background"] is True
        client.engine.step(3)
        while not (found := (await client.get(f"{PATH}/{made['id']}")).json())["output"]:
            await asyncio.sleep(0.001)
        assert found["status"] == "in_progress" and "Good day".startswith(text_of(found))
        client.engine.step(100)
        found = await until_ended(client, made)
        assert found["status"] == "completed" and text_of(found) == "Good day"
        assert (await client.post(f"{PATH}/{made['id']}/cancel")).json() == found  # without effect


@on_event_loop
async def test_a_response_in_the_background_is_cancelled():
    async with scripted(say("Good day"), by_hand=True) as client:
        made = await create(client, background=True)
        client.engine.step(3)
        while not (await client.get(f"{PATH}/{made['id']}")).json()["output"]:
            await asyncio.sleep(0.001)
        for _ in range(2):
            found = (await client.post(f"{PATH}/{made['id']}/cancel")).json()
            ResponseAnswer.model_validate(found)
            assert found["status"] == "cancelled" and found["output"][0]["status"] == "incomplete"
        assert client.context.llm.num_unfinished_requests() == 0 and client.context.num_unfinished == 0
        refusal = await create(client, previous_response_id=made["id"], status=400)
        assert refusal["error"]["param"] == "previous_response_id"
        queued = await create(client, background=True)  # not a token yet
        assert (await client.post(f"{PATH}/{queued['id']}/cancel")).json()["status"] == "cancelled"
        assert client.context.llm.num_unfinished_requests() == 0


@on_event_loop
async def test_only_responses_in_the_background_are_cancelled():
    async with scripted(say("Hi")) as client:
        made = await create(client)
        assert (await client.post(f"{PATH}/{made['id']}/cancel")).status == 400


@on_event_loop
async def test_a_stream_of_the_background_is_left_and_taken_up_again():
    async with scripted(say("Good day"), by_hand=True) as client:
        opened = client.open("POST", PATH, {"model": MODEL, "input": "x", "stream": True, "background": True})
        client.engine.step(4)
        while b"output_text.delta" not in b"".join(message.get("body", b"") for message in opened.sent):
            await asyncio.sleep(0.001)
        opened.disconnect()
        await opened.task
        first = json.loads(opened.sent[2]["body"].split(b"data: ")[1].split(b"\n")[0])
        client.engine.step(100)
        found = await until_ended(client, first["response"])
        assert found["status"] == "completed" and text_of(found) == "Good day"
        whole = read_events((await client.get(f"{PATH}/{found['id']}?stream=true")).body)
        assert [event["type"] for event in whole[:3]] == [
            *("response.created", "response.queued", "response.in_progress")
        ]
        assert whole[-1]["response"] == found
        rest = (await client.get(f"{PATH}/{found['id']}?stream=true&starting_after=4")).body
        assert rest.startswith(b"event: ") and rest.count(b"sequence_number") == len(whole) - 5
        assert (await client.get(f"{PATH}/{found['id']}?starting_after=4")).error["param"] == "starting_after"
        other = await create(client, background=True)
        assert (await client.get(f"{PATH}/{other['id']}?stream=true")).error["param"] == "stream"
        await client.open("DELETE", f"{PATH}/{other['id']}").answer()


@pytest.mark.parametrize("stream", [False, True])
@on_event_loop
async def test_a_client_that_disconnects_cancels_its_response(stream):
    async with scripted(say("Good day"), by_hand=True) as client:
        opened = client.open("POST", PATH, {"model": MODEL, "input": "x", "stream": stream})
        client.engine.step(3)
        while not len(client.context.shared.responses.store):
            await asyncio.sleep(0.001)
        opened.disconnect()
        await opened.task
        (response,) = client.context.shared.responses.store._by_owner[None].values()
        assert response.status == "cancelled" and response.ended.is_set()
        assert client.context.llm.num_unfinished_requests() == 0 and client.context.num_unfinished == 0


@on_event_loop
async def test_the_next_turn_waits_for_a_response_that_runs():
    async with scripted(say("Good day"), by_hand=True) as client:
        made = await create(client, background=True)
        following = asyncio.create_task(create(client, "And?", previous_response_id=made["id"]))
        await asyncio.sleep(0.01)
        assert not following.done()
        client.engine.step(1000)
        second = await following
        assert second["continuation"]["parent"] == made["id"]


@on_event_loop
async def test_a_full_queue_refuses_a_response_in_the_background_at_once():
    async with scripted(say("Hi"), by_hand=True, max_queue=1) as client:
        made = await create(client, background=True)
        while client.context.num_unfinished < 1:
            await asyncio.sleep(0.001)
        answer = await client.post(PATH, {"model": MODEL, "input": "x", "background": True})
        assert answer.status == 429
        await client.open("DELETE", f"{PATH}/{made['id']}").answer()


@pytest.mark.parametrize("stream", [False, True])
@on_event_loop
async def test_an_engine_that_dies_fails_what_runs_in_the_background(stream):
    async with scripted(say("Good day"), by_hand=True) as client:
        opened = client.open("POST", PATH, {"model": MODEL, "input": "x", "background": True, "stream": stream})
        client.engine.step(3)
        while not len(client.context.shared.responses.store):
            await asyncio.sleep(0.001)
        (response,) = client.context.shared.responses.store._by_owner[None].values()
        while response.status != "in_progress":
            await asyncio.sleep(0.001)
        client.engine.die()
        answer = await opened.answer()
        await response.ended.wait()
        found = (await client.get(f"{PATH}/{response.id}")).json()
        OpenAIResponse.model_validate(found)
        assert found["status"] == "failed" and found["error"]["code"] == "server_error"
        if stream:
            assert read_events(answer.body)[-1]["type"] == "response.failed"


@on_event_loop
async def test_an_engine_that_dies_fails_a_stream_with_an_event():
    async with scripted(say("Good day"), by_hand=True) as client:
        opened = client.open("POST", PATH, {"model": MODEL, "input": "x", "stream": True})
        client.engine.step(3)
        await opened.sent_something()
        client.engine.die()
        events = read_events((await opened.answer()).body)
        assert events[-1]["type"] == "response.failed" and events[-1]["response"]["status"] == "failed"


# ---- tools and reasoning ----

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HERMES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if tools %}[{{ tools | length }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@on_event_loop
async def test_calls_are_items_and_their_results_continue_the_conversation():
    async with scripted(say(f"Wait.{CALL}{CALL}"), template=HERMES) as client:
        first = await create(client, "1+0?", tools=[TOOL])
        assert first["tools"][0]["name"] == "add" and first["tool_choice"] == "auto"
        assert [item["type"] for item in first["output"]] == ["message", "function_call", "function_call"]
        assert text_of(first) == "Wait." and json.loads(first["output"][1]["arguments"]) == {"a": 1}
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "1"} for item in first["output"][1:]
        ]
        await create(client, results, previous_response_id=first["id"], tools=[TOOL])
        prompt = client.engine.core.added[-1].prompt_token_ids
        assert bytes(token for token in prompt if token < 256).decode().count("<tool>1") == 2
        answer = await client.post(PATH, {"model": MODEL, "input": "x", "stream": True, "tools": [TOOL]})
        events = read_events(answer.body)
        kinds = [event["type"].removeprefix("response.") for event in events]
        begin = kinds.index("output_item.added", 3)
        assert kinds[begin - 1] == "output_item.done" and kinds[begin + 1] == "function_call_arguments.delta"
        done = kinds.index("function_call_arguments.done")
        assert json.loads(events[done]["arguments"]) == {"a": 1} and kinds[done + 1] == "output_item.done"
        assert [event["output_index"] for event in events if event["type"] == "response.output_item.added"] == [0, 1, 2]
        single = await create(client, "x", tools=[TOOL], parallel_tool_calls=False)
        assert [item["type"] for item in single["output"]] == ["message", "function_call"]


@on_event_loop
async def test_a_call_that_is_cut_off_within_its_arguments_is_incomplete_and_left_out_of_the_next_turn():
    async with scripted(say(CALL), template=HERMES) as client:
        first = await create(client, "1+0?", tools=[TOOL], max_output_tokens=CALL.index("1}"))
        assert first["status"] == "incomplete" and first["output"][-1]["status"] == "incomplete"
        assert first["output"][-1]["type"] == "function_call"
        await create(client, "Again", previous_response_id=first["id"], tools=[TOOL])
        prompt = client.engine.core.added[-1].prompt_token_ids
        assert b"tool_call" not in bytes(token for token in prompt if token < 256)


@on_event_loop
async def test_the_next_turn_behind_an_answer_that_was_cut_anywhere_is_the_same_prompt_as_in_chat():
    template = HERMES.replace("{{ m.content }}", "{{ m.content or '' }}")  # chat has null beside calls
    async with scripted(say(CALL), template=template) as client:
        chat_tool = {"type": "function", "function": {key: TOOL[key] for key in ("name", "parameters")}}
        num_kept = 0
        for length in range(1, len(CALL) + 1):
            asked = {"role": "user", "content": "1+0?"}
            answer = await client.post(
                "/v1/chat/completions",
                {"model": MODEL, "messages": [asked], "tools": [chat_tool], "max_tokens": length},
            )
            said = answer.json()["choices"][0]["message"]
            again = {"role": "user", "content": "Again"}
            body = {"model": MODEL, "messages": [asked, said, again], "tools": [chat_tool], "max_tokens": 1}
            status = (await client.post("/v1/chat/completions", body)).status
            in_chat = client.engine.core.added[-1].prompt_token_ids
            first = await create(client, "1+0?", tools=[TOOL], max_output_tokens=length)
            await create(client, "Again", previous_response_id=first["id"], tools=[TOOL], max_output_tokens=1)
            prompt = bytes(token for token in client.engine.core.added[-1].prompt_token_ids if token < 256)
            if status == 200:
                assert prompt == bytes(token for token in in_chat if token < 256), length
                num_kept += b'"name": "add"' in prompt
            else:
                assert b"tool_call" not in prompt, "chat refuses arguments that are no object"
        assert num_kept > len("}\n</tool_call>")


@on_event_loop
async def test_reasoning_is_an_item_and_its_tokens_are_counted():
    template = ENDS_TURNS + "{# </think> #}<think>"
    async with scripted(say("let me see</think>Yes"), template=template) as client:
        found = await create(client, reasoning={"effort": "low"})
        assert [item["type"] for item in found["output"]] == ["reasoning", "message"]
        assert found["output"][0]["content"][0]["text"] == "let me see" and text_of(found) == "Yes"
        assert found["reasoning"]["effort"] == "low"
        reasoning_tokens = found["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert len("let me see") <= reasoning_tokens <= len("let me see</think>")
        answer = await client.post(PATH, {"model": MODEL, "input": "x", "stream": True})
        kinds = [event["type"] for event in read_events(answer.body)]
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
