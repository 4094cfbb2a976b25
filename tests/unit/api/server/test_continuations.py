"""Continuations over HTTP: what is asked and answered, whose they are, and that a chat goes on as if sent afresh."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from ratoon.api.server.context import ServerContext
from ratoon.api.server.protocol.chat import ChatCompletion, ChatCompletionChunk
from ratoon.api.server.protocol.completions import Completion
from ratoon.api.server.routes.requests import EndedRequests, ForgottenRequest
from ratoon.api.server.settings import ServerSettings
from ratoon.api.server.state import RequestNames
from ratoon.observe.metrics import EngineMetrics
from tests.engines_async import make_thread_engine
from tests.real_models import needs_embedded_model
from tests.unit.api.server.harness import END, MODEL, TINY_SETTINGS, Client, say, scripted, write_tiny_model
from tests.unit.engine.fakes_async import on_event_loop

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
PROMPT = "a prompt that fills more than one block of the cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@asynccontextmanager
async def serving(model, **settings):
    llm = make_thread_engine(str(model), metrics=EngineMetrics(MODEL), **{**TINY_SETTINGS, **settings})
    async with llm:
        yield Client(ServerContext(llm, ServerSettings()))


def whole(body, choice=0):
    """All tokens of a choice, prompt and answer."""
    found = body["choices"][choice]
    return found["prompt_token_ids"] + found["token_ids"]


async def afresh(client, tokens):
    answer = await client.complete(prompt=tokens, cache_salt="another", **GREEDY)
    return answer.json()["choices"][0]["token_ids"]


# ---- completions ----


@on_event_loop
async def test_a_leased_answer_goes_on_and_says_how(folder):
    async with serving(folder) as client:
        parent = (await client.complete(prompt=PROMPT, retain_kv=60, **GREEDY)).json()
        assert "continuation" not in parent
        fields = {"continuation_of": parent["id"], "continuation_suffix": "more", **GREEDY}
        child = (await client.complete(**fields)).json()
        Completion.model_validate(child)
        assert child["continuation"] == {
            "parent": parent["id"],
            "inherited_tokens": len(PROMPT) + 5,
            "computed_tokens": 5,
            "source": "lease",
            "fallback": False,
        }
        assert child["usage"]["prompt_tokens"] == len(PROMPT) + 6 + 4
        assert child["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) + 5
        assert child["choices"][0]["prompt_token_ids"] == whole(parent) + list(b"more")
        assert child["choices"][0]["token_ids"] == await afresh(client, whole(parent) + list(b"more"))
        by_ids = (await client.complete(**{**fields, "continuation_suffix": list(b"more")})).json()
        assert by_ids["choices"][0]["token_ids"] == child["choices"][0]["token_ids"]
        no_suffix = (await client.complete(continuation_of=child["id"], **GREEDY)).json()
        assert no_suffix["choices"][0]["prompt_token_ids"] == whole(child)


@on_event_loop
async def test_a_stream_tells_in_its_first_chunk(folder):
    async with serving(folder) as client:
        parent = (await client.complete(prompt=PROMPT, retain_kv=60, **GREEDY)).json()
        fields = {"continuation_of": parent["id"], "stream": True, "stream_options": {"include_usage": True}, **GREEDY}
        first, *others = (await client.complete(**fields)).events()
        Completion.model_validate(first)
        assert first["continuation"]["source"] == "lease"
        assert not any("continuation" in event for event in others)
        assert others[-1]["usage"]["prompt_tokens"] == len(PROMPT) + 6
        first, *others = (await client.chat("more", **fields)).events()
        ChatCompletionChunk.model_validate(first)
        assert first["continuation"]["parent"] == parent["id"]
        assert not any("continuation" in event for event in others)


@on_event_loop
async def test_choices_places_and_prompts_of_a_batch(folder):
    async with serving(folder) as client:
        sampled = {**GREEDY, "temperature": 1.5, "seed": 3, "n": 3}
        parent = (await client.complete(prompt=PROMPT, retain_kv=60, **sampled)).json()
        tokens = list(PROMPT.encode()) + parent["choices"][2]["token_ids"]
        fields = {"continuation_of": parent["id"], "continuation_choice": 2, "continuation_suffix": [7], **GREEDY}
        child = (await client.complete(**fields)).json()
        assert child["choices"][0]["prompt_token_ids"] == [*tokens, 7]
        early = (await client.complete(**fields, continuation_at=9)).json()
        assert early["choices"][0]["prompt_token_ids"] == [*tokens[:9], 7]
        assert early["choices"][0]["token_ids"] == await afresh(client, [*tokens[:9], 7])
        batch = (await client.complete(prompt=["one", "two"], **GREEDY)).json()
        second = (await client.complete(continuation_of=f"{batch['id']}-1", **GREEDY)).json()
        assert second["choices"][0]["prompt_token_ids"] == whole(batch, 1)


@on_event_loop
async def test_a_running_parent_is_waited_for_or_forked():
    async with scripted(say("a long answer"), by_hand=True) as client:
        running = client.open("POST", "/v1/completions", {"model": MODEL, "prompt": "p", "request_id": "x"})
        while not client.engine.core.has_work():
            await asyncio.sleep(0.001)
        client.engine.step(4)
        while client.engine.num_steps < 4:
            await asyncio.sleep(0.001)
        body = {"model": MODEL, "continuation_of": "cmpl-x", "return_token_ids": True}
        waiting = client.open("POST", "/v1/completions", body)
        forked = client.open("POST", "/v1/completions", {**body, "continuation_wait": False})
        while len(client.engine.core.added) < 2:  # the fork is there, and what waits is not
            await asyncio.sleep(0.001)
        assert not running.sent and not waiting.sent
        client.engine.step(100)
        assert (await running.answer()).status == 200
        prompts = [(await opened.answer()).json()["choices"][0]["prompt_token_ids"] for opened in (waiting, forked)]
        assert prompts == [[*b"pa long answer", END], [*b"pa lo"]]


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"continuation_of": None}, "prompt", 400),
        ({"echo": True}, "echo", 400),
        ({"add_special_tokens": True}, "add_special_tokens", 400),
        ({"data_parallel_rank": 1}, "data_parallel_rank", 400),
        ({"continuation_suffix": 5}, "continuation_suffix", 400),
        ({"continuation_suffix": [1, -1]}, "continuation_suffix", 400),
        ({"continuation_suffix": [["nested"]]}, "continuation_suffix", 400),
        ({"continuation_suffix": [1, 9999]}, "continuation_suffix[1]", 400),
        ({"continuation_suffix": "x" * 600}, "continuation_suffix", 400),
        ({"continuation_choice": 1}, "continuation_choice", 400),
        ({"continuation_at": 0}, "continuation_at", 400),
        ({"continuation_at": 100}, "continuation_at", 400),
        ({"retain_kv": 0}, "retain_kv", 400),
        ({"retain_kv": "long"}, "retain_kv", 400),
        ({"retain_kv": 1e9}, "retain_kv", 400),
        ({"continuation_of": "cmpl-never"}, "continuation_of", 404),
        ({"continuation_of": "x" * 10_000}, "continuation_of", 404),
        ({"continuation_of": "cmpl-never", "prompt": ""}, "continuation_of", 404),
        ({"continuation_of": "cmpl-never", "prompt": ["", ""]}, "continuation_of", 404),
        ({"continuation_of": "cmpl-never", "prompt": ["a", "b"]}, "prompt", 400),
        ({"continuation_of": "cmpl-never", "prompt": [1, 9999]}, "prompt", 400),
        ({"continuation_of": "cmpl-never", "prompt": "x" * 600}, "prompt", 400),
        ({"continuation_of": 7}, "continuation_of", 400),
        ({"cache_salt": "mine"}, "continuation_of", 404),
    ],
)
@on_event_loop
async def test_what_is_wrong_is_named(fields, param, status):
    async with scripted() as client:
        await client.complete(prompt="parent", request_id="x")
        for stream in (False, True):
            answer = await client.complete(**{"continuation_of": "cmpl-x", "stream": stream, **fields})
            assert (answer.status, answer.error["param"]) == (status, param), answer.body
            assert len(answer.body) < 1000
            if status == 404:
                assert answer.error["code"] == "request_not_found"


@on_event_loop
async def test_neither_is_refused_by_both_names():
    async with scripted() as client:
        message = (await client.complete()).error["message"]
        assert "prompt" in message and "continuation_of" in message
        for name in ("continuation_suffix", "continuation_choice", "continuation_at", "continuation_wait"):
            value = {"continuation_suffix": "x", "continuation_wait": False}.get(name, 1)
            assert (await client.complete(prompt="x", **{name: value})).error["param"] == name


@on_event_loop
async def test_too_long_has_its_code():
    async with scripted() as client:
        await client.complete(prompt="parent", request_id="x")
        error = (await client.complete(continuation_of="cmpl-x", continuation_suffix="x" * 510)).error
        assert error["code"] == "context_length_exceeded"
        error = (await client.chat("x" * 510, continuation_of="cmpl-x")).error
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@on_event_loop
async def test_a_prompt_that_was_only_scored_is_no_parent():
    """It has a token that nobody saw."""
    async with scripted() as client:
        await client.complete(prompt="scored", request_id="x", echo=True, max_tokens=0)
        assert (await client.complete(continuation_of="cmpl-x")).status == 404
        refused = await client.complete(prompt="scored", echo=True, max_tokens=0, retain_kv=10)
        assert (refused.status, refused.error["param"]) == (400, "retain_kv")


# ---- prompts beside a parent ----


@on_event_loop
async def test_a_prompt_beside_a_known_parent_is_ignored():
    async with scripted(say("fine")) as client:
        await client.complete(prompt="parent", request_id="x")
        for prompt in ("", "another", ["a", "b"], [1, 9999], "x" * 600):
            fields = {"prompt": prompt, "continuation_of": "cmpl-x", "continuation_suffix": "!"}
            answer = (await client.complete(return_token_ids=True, **fields)).json()
            assert answer["choices"][0]["prompt_token_ids"] == [*b"parentfine", END, *b"!"]
            assert answer["continuation"]["fallback"] is False


@pytest.mark.parametrize("stream", [False, True])
@on_event_loop
async def test_a_prompt_stands_in_for_a_forgotten_parent_and_the_answer_says_so(folder, stream):
    async with serving(folder) as client:
        before = (await client.complete(prompt=PROMPT, **GREEDY)).json()
        fields = {"prompt": PROMPT, "continuation_of": "cmpl-gone", "continuation_suffix": "ignored", **GREEDY}
        answer = await client.complete(**fields, stream=stream)
        assert answer.status == 200
        first = answer.events()[0] if stream else answer.json()
        Completion.model_validate(first)
        cached = len(PROMPT) // 16 * 16
        assert first["continuation"] == {
            "parent": "cmpl-gone",
            "inherited_tokens": cached,
            "computed_tokens": len(PROMPT) - cached,
            "source": "prefix_cache",
            "fallback": True,
        }
        if not stream:
            assert first["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
            assert first["usage"]["prompt_tokens"] == len(PROMPT)


@on_event_loop
async def test_another_salt_gets_its_own_prompt_and_not_the_parent():
    async with scripted(say("fine")) as client:
        await client.complete(prompt="secret", request_id="x", cache_salt="mine")
        fields = {"continuation_of": "cmpl-x", "prompt": "open", "cache_salt": "yours", "return_token_ids": True}
        answer = (await client.complete(**fields)).json()
        assert answer["choices"][0]["prompt_token_ids"] == [*b"open"] and answer["continuation"]["fallback"] is True
        assert client.engine.core.added[-1].cache_salt == "yours"


@on_event_loop
async def test_a_chat_brings_the_whole_conversation_for_a_forgotten_parent():
    async with scripted(say("Fine.")) as client:
        whole = [
            {"role": "user", "content": "How are you?"},
            {"role": "assistant", "content": "Fine."},
            {"role": "user", "content": "And now?"},
        ]
        fields = {"fallback_messages": whole, "return_token_ids": True}
        fresh = await client.post("/v1/chat/completions", {"model": MODEL, "messages": whole, "return_token_ids": True})
        answer = (await client.chat("And now?", continuation_of="chatcmpl-gone", **fields)).json()
        ChatCompletion.model_validate(answer)
        assert answer["prompt_token_ids"] == fresh.json()["prompt_token_ids"]
        assert answer["continuation"]["fallback"] is True
        parent = (await client.chat("Hello?", return_token_ids=True)).json()
        known = (await client.chat("And now?", continuation_of=parent["id"], **fields)).json()
        assert known["continuation"]["fallback"] is False
        assert known["prompt_token_ids"][: len(parent["prompt_token_ids"])] == parent["prompt_token_ids"]
        assert (await client.chat("x", fallback_messages=whole)).error["param"] == "fallback_messages"
        for wrong in ([], [{"role": "user", "content": "x" * 600}]):
            refused = await client.chat("x", continuation_of="chatcmpl-gone", fallback_messages=wrong)
            assert (refused.status, refused.error["param"]) == (400, "fallback_messages")


# ---- what clients call their requests ----


@on_event_loop
async def test_a_clients_own_id_names_its_answer_as_it_is():
    async with scripted(say("fine")) as client:
        body = {"model": MODEL, "prompt": "by field", "request_id": "mine"}
        assert (await client.post("/v1/completions", body)).json()["id"] == "cmpl-mine"
        headers = {"content-type": "application/json", "x-request-id": "trace/7"}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "by header"}]}
        by_header = (await client.post("/v1/chat/completions", body, headers=headers)).json()
        for name, parent in (("mine", "cmpl-mine"), ("cmpl-mine", "cmpl-mine"), ("trace/7", by_header["id"])):
            child = (await client.complete(continuation_of=name)).json()
            assert child["continuation"]["parent"] == parent
        states = {"model": MODEL, "original_request_id": "mine", "positions": [0]}
        assert (await client.post("/v1/hidden_states", states)).status == 200
        gone = await client.open("DELETE", "/v1/requests/mine").answer()
        assert (gone.status, gone.json()["id"]) == (200, "cmpl-mine")
        assert (await client.complete(continuation_of="mine")).error["message"].count("'mine'") == 1


@on_event_loop
async def test_a_name_that_is_used_again_is_the_newest_and_every_prompt_of_a_batch_has_its_own():
    async with scripted(say("fine")) as client:
        headers = {"content-type": "application/json", "x-request-id": "same"}
        for prompt in ("one", "two", ["three", "four"]):
            await client.post("/v1/completions", {"model": MODEL, "prompt": prompt}, headers=headers)
        for name, prompt in (("same", b"two"), ("same-0", b"three"), ("same-1", b"four")):
            child = (await client.complete(continuation_of=name, return_token_ids=True)).json()
            assert bytes(child["choices"][0]["prompt_token_ids"][: len(prompt)]) == prompt


@on_event_loop
async def test_names_are_an_owners_own_and_bounded():
    async with scripted(say("fine"), api_keys=("mine", "yours")) as client:
        client.context.shared.names = RequestNames(4)
        body = {"model": MODEL, "prompt": "secret", "request_id": "x"}
        await client.post("/v1/completions", body, headers=with_key("mine"))
        for number in range(5):
            body = {"model": MODEL, "prompt": "other", "request_id": f"y{number}"}
            await client.post("/v1/completions", body, headers=with_key("yours"))
        for name, key, status in (("x", "mine", 200), ("x", "yours", 404), ("y4", "yours", 200), ("y0", "yours", 404)):
            child = {"model": MODEL, "continuation_of": name}
            answer = await client.post("/v1/completions", child, headers=with_key(key))
            assert answer.status == status, (name, key)


# ---- chat ----

CHATML = (
    "{% for message in messages %}<|other|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|other|>assistant\n{% endif %}"
)
SPACED = CHATML.replace("<|end|>", " <|end|>")  # as Llama 2 has it
FORGETFUL = "{{ messages[-1].content }}"


@pytest.mark.parametrize("template", [None, CHATML], ids=["ends lines", "ends turns"])
@pytest.mark.parametrize("max_tokens", [3, 20], ids=["cut off", "ended"])
@on_event_loop
async def test_a_chat_goes_on_as_the_template_writes_it(template, max_tokens):
    options = {} if template is None else {"template": template}
    async with scripted(say("Fine."), **options) as client:
        fields = {"return_token_ids": True, "max_tokens": max_tokens}
        parent = (await client.chat("How are you?", **fields)).json()
        child = (await client.chat("And now?", continuation_of=parent["id"], **fields)).json()
        ChatCompletion.model_validate(child)
        conversation = [
            {"role": "user", "content": "How are you?"},
            {"role": "assistant", "content": parent["choices"][0]["message"]["content"]},
            {"role": "user", "content": "And now?"},
        ]
        body = {"model": MODEL, "messages": conversation, **fields}
        fresh = (await client.post("/v1/chat/completions", body)).json()
        assert child["prompt_token_ids"] == fresh["prompt_token_ids"]


@on_event_loop
async def test_the_end_of_a_turn_stands_there_once_where_the_template_puts_a_space_before_it():
    async with scripted(say("Fine."), template=SPACED) as client:
        parent = (await client.chat("How are you?", return_token_ids=True)).json()
        child = (await client.chat("And now?", continuation_of=parent["id"], return_token_ids=True)).json()
        ended = parent["prompt_token_ids"] + parent["choices"][0]["token_ids"]
        assert ended[-1] == END
        behind = "\n<|other|>user\nAnd now? <|end|>\n<|other|>assistant\n"
        tokenizer = client.context.llm.get_tokenizer()
        assert child["prompt_token_ids"] == ended + tokenizer.encode(behind, add_special_tokens=False)


@on_event_loop
async def test_a_template_that_drops_history_is_refused():
    async with scripted(template=FORGETFUL) as client:
        parent = (await client.chat("one")).json()
        answer = await client.chat("two", continuation_of=parent["id"])
        assert (answer.status, answer.error["param"]) == (400, "continuation_of")
        assert "template" in answer.error["message"]


@on_event_loop
async def test_what_chat_has_not_is_refused():
    async with scripted() as client:
        for name, value in (("continuation_suffix", "x"), ("continuation_at", 3)):
            answer = await client.chat("x", **{name: value})
            assert (answer.error["param"], answer.error["code"]) == (name, "unsupported_parameter")
        assert (await client.chat("x", continuation_wait=False)).error["param"] == "continuation_wait"
        assert (await client.chat("x", continuation_of="chatcmpl-never")).error["code"] == "request_not_found"


@needs_embedded_model
@pytest.mark.slow
@on_event_loop
async def test_a_real_chat_goes_on_token_for_token_as_if_sent_afresh():
    name = "smollm2-135m"
    async with serving(name, load_format="auto") as client:
        fields = {"model": name, "temperature": 0, "return_token_ids": True, "max_tokens": 24}
        for max_tokens in (24, 4):  # it ends by itself, it is cut off
            messages = [{"role": "user", "content": "What is the capital of Japan?"}]
            ask = {**fields, "max_tokens": max_tokens}
            parent = (await client.post("/v1/chat/completions", {**ask, "messages": messages, "retain_kv": 60})).json()
            assert parent["choices"][0]["finish_reason"] == ("stop" if max_tokens == 24 else "length")
            new = [{"role": "user", "content": "And of France?"}]
            ask = {**fields, "messages": new, "continuation_of": parent["id"]}
            child = (await client.post("/v1/chat/completions", ask)).json()
            said = {"role": "assistant", "content": parent["choices"][0]["message"]["content"]}
            ask = {**fields, "messages": [*messages, said, *new], "cache_salt": "another"}
            fresh = (await client.post("/v1/chat/completions", ask)).json()
            assert child["prompt_token_ids"] == fresh["prompt_token_ids"]
            assert child["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]
            assert child["continuation"]["source"] == "lease"
            assert child["continuation"]["computed_tokens"] < 20 < child["continuation"]["inherited_tokens"]


# ---- whose they are ----


def with_key(key):
    return {"content-type": "application/json", "authorization": f"Bearer {key}"}


@on_event_loop
async def test_another_key_gets_what_an_unknown_id_gets():
    async with scripted(api_keys=("mine", "yours")) as client:
        body = {"model": MODEL, "prompt": "x", "request_id": "x"}
        assert (await client.post("/v1/completions", body, headers=with_key("mine"))).status == 200

        async def ask(request_id, key):
            child = {"model": MODEL, "continuation_of": request_id}
            return await client.post("/v1/completions", child, headers=with_key(key))

        async def delete(request_id, key):
            return await client.open("DELETE", f"/v1/requests/{request_id}", headers=with_key(key)).answer()

        assert (await ask("cmpl-x", "mine")).status == 200
        for call in (ask, delete):
            other, unknown = await call("cmpl-x", "yours"), await call("cmpl-y", "yours")
            assert other.status == unknown.status == 404
            assert other.body.replace(b"cmpl-x", b"cmpl-y") == unknown.body
        assert (await client.get("/v1/requests", headers=with_key("yours"))).json()["data"] == []
        # An id of one's own choice takes nothing from others who chose the same.
        await client.post("/v1/completions", body, headers=with_key("yours"))
        assert (await ask("cmpl-x", "mine")).status == 200
        assert (await delete("cmpl-x", "mine")).status == 200
        assert (await ask("cmpl-x", "mine")).status == 404
        assert (await ask("cmpl-x", "yours")).status == 200


@on_event_loop
async def test_strangers_do_not_wait_for_what_runs():
    async with scripted(by_hand=True, api_keys=("mine", "yours")) as client:
        body = {"model": MODEL, "prompt": "x", "request_id": "x"}
        running = client.open("POST", "/v1/completions", body, headers=with_key("mine"))
        while not client.engine.core.has_work():
            await asyncio.sleep(0.001)
        child = {"model": MODEL, "continuation_of": "cmpl-x"}
        assert (await client.post("/v1/completions", child, headers=with_key("yours"))).status == 404
        client.engine.step(100)
        await running.answer()


@on_event_loop
async def test_an_id_that_another_key_uses_right_now_is_free():
    """To say that it is in use would say that there is such a request."""
    async with scripted(say("an answer"), by_hand=True, api_keys=("mine", "yours")) as client:
        body = {"model": MODEL, "prompt": "x", "request_id": "x", "return_token_ids": True}
        opened = [client.open("POST", "/v1/completions", body, headers=with_key(key)) for key in ("mine", "yours")]
        while len(client.engine.core.added) < 2:
            await asyncio.sleep(0.001)
        again = await client.post("/v1/completions", body, headers=with_key("mine"))
        assert (again.status, again.error["param"]) == (400, "request_id")
        client.engine.step(100)
        for one, key in zip(opened, ("mine", "yours")):
            assert (await one.answer()).json()["choices"][0]["text"] == "an answer"
            listed = await client.open("GET", "/v1/requests", headers=with_key(key)).answer()
            assert [entry["id"] for entry in listed.json()["data"]] == ["cmpl-x"]


@on_event_loop
async def test_a_parent_with_a_salt_needs_the_same_salt():
    async with scripted() as client:
        await client.complete(prompt="parent", request_id="x", cache_salt="mine")
        for salt, status in (("mine", 200), ("yours", 404), (None, 404)):
            assert (await client.complete(continuation_of="cmpl-x", cache_salt=salt)).status == status


@on_event_loop
async def test_ended_requests_are_listed_and_forgotten(folder):
    async with serving(folder) as client:
        first = (await client.complete(prompt=PROMPT, retain_kv=60, n=2, **{**GREEDY, "temperature": 1})).json()
        second = (await client.chat("x", **GREEDY)).json()
        listed = (await client.get("/v1/requests")).json()
        EndedRequests.model_validate(listed)
        assert [entry["id"] for entry in listed["data"]] == [second["id"], first["id"]]
        entry = listed["data"][1]
        assert (entry["prompt_tokens"], [choice["completion_tokens"] for choice in entry["choices"]]) == (
            len(PROMPT),
            [6, 6],
        )
        short = (await client.get("/v1/requests?limit=1")).json()
        assert (len(short["data"]), short["has_more"]) == (1, True)
        assert (await client.get("/v1/requests?limit=0")).status == 400

        assert (await client.context.llm.stats())[0].leases.num_active == 2
        gone = await client.open("DELETE", f"/v1/requests/{first['id']}").answer()
        ForgottenRequest.model_validate(gone.json())
        assert (await client.context.llm.stats())[0].leases.num_active == 0
        again = await client.open("DELETE", f"/v1/requests/{first['id']}").answer()
        assert (again.status, again.error["code"]) == (404, "request_not_found")
        assert (await client.complete(continuation_of=first["id"])).status == 404
        assert [entry["id"] for entry in (await client.get("/v1/requests")).json()["data"]] == [second["id"]]


@on_event_loop
async def test_leases_and_continuations_are_counted(folder):
    async with serving(folder) as client:
        parent = (await client.complete(prompt=PROMPT, retain_kv=60, **GREEDY)).json()
        await client.complete(continuation_of=parent["id"], **GREEDY)
        other = (await client.complete(prompt="short", **GREEDY)).json()
        await client.complete(continuation_of=other["id"], **GREEDY)
        page = (await client.get("/metrics")).body.decode()
        for line in (
            'ratoon_leases_active{engine="0"} 1.0',
            'ratoon_lease_blocks{engine="0"} 4.0',
            'ratoon_leases_granted_total{engine="0"} 1.0',
            'ratoon_leases_expired_total{engine="0"} 0.0',
            'ratoon_leases_evicted_total{engine="0"} 0.0',
            'ratoon_continuations_total{source="lease"} 1.0',
            'ratoon_continuations_total{source="recomputed"} 1.0',
            'ratoon_continuations_total{source="prefix_cache"} 0.0',
        ):
            assert line in page, line
