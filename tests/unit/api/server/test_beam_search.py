"""Beam search over HTTP: what is asked and answered, whole and streamed, and what contradicts it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from ratoon.api.server.context import ServerContext
from ratoon.api.server.protocol.chat import ChatCompletion, ChatCompletionChunk
from ratoon.api.server.protocol.completions import Completion
from ratoon.api.server.settings import ServerSettings
from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams, RequestOutputKind
from ratoon.core.request import EngineCoreOutput, FinishReason
from tests.engines_async import make_thread_engine
from tests.unit.api.server.harness import END, MODEL, TINY_SETTINGS, Client, say, scripted, write_tiny_model
from tests.unit.engine.fakes_async import on_event_loop

SEARCH = {"use_beam_search": True, "beam_width": 4, "n": 2}
PROMPT = "a prompt that fills more than one block of the cache"


def beam_params(client: Client) -> BeamSearchParams:
    params = client.engine.core.added[-1].params
    return params if isinstance(params, BeamSearchParams) else None


# ---- what is asked ----


@on_event_loop
async def test_fields_become_params():
    async with scripted(say("yes", "no", "perhaps")) as client:
        fields = {
            "use_beam_search": True,
            "beam_width": 8,
            "n": 3,
            "length_penalty": 0.5,
            "early_stopping": "never",
            "max_tokens": 9,
            "min_tokens": 1,
            "stop_token_ids": [7],
            "skip_special_tokens": False,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.25,
            "logit_bias": {"5": 1.5},
            "allowed_token_ids": [5, 6, 8],
            "bad_words_ids": [[5, 6]],
        }
        for answer in (await client.complete(prompt="p", **fields), await client.chat("p", **fields)):
            assert answer.status == 200
            assert beam_params(client) == BeamSearchParams(
                beam_width=8,
                n=3,
                length_penalty=0.5,
                early_stopping="never",
                max_tokens=9,
                min_tokens=1,
                stop_token_ids=[7],
                skip_special_tokens=False,
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                repetition_penalty=1.25,
                logit_bias={5: 1.5},
                allowed_token_ids=[5, 6, 8],
                bad_words_ids=[[5, 6]],
                all_stop_token_ids=[7, END],
            )


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({"beam_width": 6, "n": 2}, 6),
        ({"best_of": 5, "n": 2}, 5),
        ({"best_of": 5, "beam_width": 5}, 5),
        ({"n": 2}, 2),
        ({}, 1),
    ],
)
@on_event_loop
async def test_the_width_is_best_of_or_n_where_it_is_left_out(fields, width):
    async with scripted(say("yes", "no")) as client:
        answer = await client.complete(prompt="p", use_beam_search=True, **fields)
        assert answer.status == 200 and len(answer.json()["choices"]) == fields.get("n", 1)
        assert beam_params(client).beam_width == width


@on_event_loop
async def test_values_that_change_nothing_and_the_models_defaults_are_fine():
    harmless = {
        "temperature": 0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "bad_words": [],
        "stop": [],
        "include_stop_str_in_output": False,
        "logprobs": None,
        "seed": 5,
        "user": "me",
    }
    async with scripted(say("yes", "no"), defaults={"temperature": 0.7, "top_p": 0.9}) as client:
        assert (await client.complete(prompt="p", **SEARCH, **harmless)).status == 200
        assert (await client.chat("p", **SEARCH, **{**harmless, "logprobs": False})).status == 200
        assert (await client.complete(prompt="p", use_beam_search=False)).status == 200
        assert beam_params(client) is None


CONTRADICTIONS = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "stop": "x",
    "include_stop_str_in_output": True,
    "prompt_logprobs": 0,
}
WRONG = [
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "n": 2}, "n"),
    *(({name: value}, name) for name, value in CONTRADICTIONS.items()),
    ({"beam_width": 0}, "beam_width"),
    ({"beam_width": 2049}, "beam_width"),
    ({"beam_width": "4"}, "beam_width"),
    ({"n": 5}, "n"),
    ({"n": 0}, "n"),
    ({"length_penalty": 99}, "length_penalty"),
    ({"length_penalty": "long"}, "length_penalty"),
    ({"early_stopping": "soon"}, "early_stopping"),
    ({"early_stopping": 1}, "early_stopping"),
    ({"use_beam_search": "yes"}, "use_beam_search"),
    ({"stop_token_ids": list(range(17))}, "stop_token_ids"),
    ({"use_beam_search": False}, "beam_width"),
    ({"use_beam_search": None, "beam_width": None, "length_penalty": 2.0}, "length_penalty"),
    ({"use_beam_search": None, "beam_width": None, "early_stopping": True}, "early_stopping"),
    ({"max_tokens": 300_000_000}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:40])
@on_event_loop
async def test_what_contradicts_or_has_no_meaning_is_refused_by_its_name(fields, param):
    async with scripted() as client:
        answer = await client.complete(prompt="p", **{**SEARCH, **fields})
        assert (answer.status, answer.error["param"]) == (400, param)
        if param != "max_tokens":  # in chat the room behind the prompt counts
            answer = await client.chat("p", **{**SEARCH, **fields})
            assert (answer.status, answer.error["param"]) == (400, param)
        assert client.engine.core.added == []


@on_event_loop
async def test_fields_that_one_endpoint_has():
    async with scripted() as client:
        for fields, param in (
            ({"logprobs": 0}, "logprobs"),
            ({"best_of": 5}, "best_of"),
            ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ):
            answer = await client.complete(prompt="p", **{**SEARCH, **fields})
            assert (answer.status, answer.error["param"]) == (400, param)
        for fields, param in (
            ({"logprobs": True}, "logprobs"),
            ({"logprobs": True, "top_logprobs": 2}, "logprobs"),
            ({"best_of": 4}, "best_of"),
        ):
            answer = await client.chat("p", **{**SEARCH, **fields})
            assert (answer.status, answer.error["param"]) == (400, param)


@on_event_loop
async def test_beams_count_against_the_limit_of_a_request():
    async with scripted(say("yes", "no"), max_request_tokens=100) as client:
        fields = {"prompt": "p", "use_beam_search": True, "n": 1, "max_tokens": 10}
        assert (await client.complete(**fields, beam_width=10)).status == 200
        answer = await client.complete(**fields, beam_width=11)
        assert answer.error["param"] == "max_tokens" and "11 beams" in answer.error["message"]


@on_event_loop
async def test_what_the_engine_refuses_is_a_400():
    async with scripted() as client:
        client.engine.core.refuse = lambda request: RequestError("beam_width", "is 4", "at most 2")
        for stream in (False, True):
            answer = await client.complete(prompt="p", stream=stream, **SEARCH)
            assert (answer.status, answer.error["param"]) == (400, "beam_width")


# ---- what is answered ----


@on_event_loop
async def test_choices_come_best_first_with_their_scores():
    async with scripted(say("yes", "no")) as client:
        body = (await client.complete(prompt=["p", "q"], return_token_ids=True, echo=True, **SEARCH)).json()
        Completion.model_validate(body)
        assert [choice["text"] for choice in body["choices"]] == ["pyes", "pno", "qyes", "qno"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        first, second = body["choices"][:2]
        assert (first["score"], first["cumulative_logprob"], first["finish_reason"]) == (-0.5, -2.0, "stop")
        assert second["score"] == pytest.approx(-2.5 / 3)
        assert "best_so_far" not in first and first["token_ids"] == [*b"yes", END]
        assert body["usage"]["completion_tokens"] == 2 * (4 + 3)
        chat = (await client.chat("p", **SEARCH)).json()
        ChatCompletion.model_validate(chat)
        assert [choice["message"]["content"] for choice in chat["choices"]] == ["yes", "no"]
        assert [choice["score"] for choice in chat["choices"]] == [first["score"], second["score"]]
        assert chat["usage"]["completion_tokens"] == 4 + 3
        sampled = (await client.complete(prompt="p")).json()["choices"][0]
        assert "score" not in sampled and "cumulative_logprob" not in sampled


def joined(events, of=lambda choice: choice["text"]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + (of(choice) or "")
    return texts


def best_texts(events) -> list[str]:
    return [choice["best_so_far"] for event in events for choice in event["choices"] if "best_so_far" in choice]


@on_event_loop
async def test_a_stream_tells_the_best_so_far_and_its_texts_add_up():
    async with scripted(say("yes", "no"), by_hand=True) as client:
        fields = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, **SEARCH}
        opened = client.open("POST", "/v1/completions", {"model": MODEL, "prompt": "p", "echo": True, **fields})
        await let_it_search(client, opened)
        *events, last = (await opened.answer()).events()
        for event in events:
            Completion.model_validate(event)
        assert client.engine.core.added[0].params.output_kind == RequestOutputKind.CUMULATIVE
        assert best_texts(events) == ["n", "ye", "no"]
        searching = [choice for event in events for choice in event["choices"] if "best_so_far" in choice]
        assert all((one["text"], one["finish_reason"], one["score"]) == ("", None, -0.5) for one in searching)
        assert joined(events) == {0: "pyes", 1: "pno"}
        ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
        assert [(choice["index"], choice["token_ids"]) for choice in ends] == [(0, [*b"yes", END]), (1, [*b"no", END])]
        assert ends[1]["score"] == pytest.approx(-2.5 / 3)
        assert last["usage"]["completion_tokens"] == 7


async def let_it_search(client, opened) -> None:
    """Step by step, each told before the next: a reader that falls behind would get fewer of them."""
    client.engine.step()
    for _ in range(3):
        told = len(opened.sent)
        while len(opened.sent) == told:
            await asyncio.sleep(0.001)
        client.engine.step()


@on_event_loop
async def test_a_chat_stream_tells_whose_words_they_are_and_adds_up():
    async with scripted(say("yes", "no"), by_hand=True) as client:
        messages = [{"role": "user", "content": "p"}]
        body = {"model": MODEL, "messages": messages, "stream": True, **SEARCH}
        body["stream_options"] = {"continuous_usage_stats": True}
        opened = client.open("POST", "/v1/chat/completions", body)
        await let_it_search(client, opened)
        events = (await opened.answer()).events()
        for event in events:
            ChatCompletionChunk.model_validate(event)
        for place in (0, 1):  # the second begins at the end, when it is known that there is one
            roles = [
                choice["delta"].get("role")
                for event in events
                for choice in event["choices"]
                if choice["index"] == place
            ]
            assert roles == ["assistant", *[None] * (len(roles) - 1)]
        assert best_texts(events) == ["n", "ye", "no"]
        assert joined(events, lambda choice: choice["delta"]["content"]) == {0: "yes", 1: "no"}
        assert [event["usage"]["completion_tokens"] for event in events] == [0] * (len(events) - 3) + [7, 7, 7]


@on_event_loop
async def test_a_search_that_fails_in_a_stream_says_so():
    async with scripted(say("yes", "no"), by_hand=True) as client:
        opened = client.open("POST", "/v1/completions", {"model": MODEL, "prompt": "p", "stream": True, **SEARCH})
        while not client.engine.core.has_work():
            await asyncio.sleep(0.001)
        client.engine.step()
        await opened.sent_something()
        request_id = client.engine.core.added[0].request_id
        client.engine.core.abort_requests([request_id])
        client.engine.send(EngineCoreOutput(request_id, [], 0, FinishReason.ERROR, error="the step failed"))
        *_, last = (await opened.answer()).events()
        assert last["error"]["code"] == "generation_failed"
        assert client.context.llm.num_unfinished_requests() == 0


# ---- with continuations ----


@on_event_loop
async def test_a_search_that_runs_is_waited_for_and_can_not_be_forked():
    async with scripted(say("yes", "no"), by_hand=True) as client:
        fields = {"model": MODEL, "prompt": "p", "request_id": "x", **SEARCH}
        running = client.open("POST", "/v1/completions", fields)
        while not client.engine.core.has_work():
            await asyncio.sleep(0.001)
        child = {"model": MODEL, "continuation_of": "cmpl-x", "continuation_choice": 1, "return_token_ids": True}
        refused = await client.post("/v1/completions", {**child, "continuation_wait": False})
        assert (refused.status, refused.error["param"]) == (400, "continuation_of")
        assert "a beam search that has not ended" in refused.error["message"]
        waiting = client.open("POST", "/v1/completions", child)
        await asyncio.sleep(0.01)
        assert not waiting.sent
        client.engine.step(100)
        assert (await running.answer()).status == 200
        assert (await waiting.answer()).json()["choices"][0]["prompt_token_ids"] == [*b"pno", END]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@asynccontextmanager
async def serving(model, **settings):
    async with make_thread_engine(str(model), **{**TINY_SETTINGS, **settings}) as llm:
        yield Client(ServerContext(llm, ServerSettings()))


@on_event_loop
async def test_a_model_searches_the_same_whole_streamed_and_behind_a_parent(folder):
    async with serving(folder) as client:
        fields = {**SEARCH, "n": 3, "max_tokens": 6, "return_token_ids": True}
        greedy = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "retain_kv": 60}
        parent = (await client.complete(prompt=PROMPT, **greedy)).json()
        behind = {"continuation_of": parent["id"], "continuation_suffix": "more", **fields}
        child = (await client.complete(**behind, retain_kv=60)).json()
        Completion.model_validate(child)
        assert child["continuation"] == {
            "parent": parent["id"],
            "inherited_tokens": len(PROMPT) + 5,
            "computed_tokens": 5,
            "source": "lease",
            "fallback": False,
        }
        tokens = child["choices"][0]["prompt_token_ids"]
        afresh = (await client.complete(prompt=tokens, cache_salt="another", **fields)).json()
        for found, other in zip(child["choices"], afresh["choices"], strict=True):
            assert found["token_ids"] == other["token_ids"]
            assert found["score"] == pytest.approx(other["score"], abs=1e-5)
        scores = [choice["score"] for choice in child["choices"]]
        assert scores == sorted(scores, reverse=True)
        first, *others = (await client.complete(**behind, stream=True)).events()
        assert first["continuation"]["source"] == "lease" and "best_so_far" in first["choices"][0]
        assert not any("continuation" in event for event in others)
        assert joined([first, *others]) == {choice["index"]: choice["text"] for choice in child["choices"]}
        last = (await client.complete(continuation_of=child["id"], continuation_choice=2, **greedy)).json()
        assert last["continuation"]["source"] == "lease" and last["continuation"]["computed_tokens"] == 1
        assert last["choices"][0]["prompt_token_ids"] == tokens + child["choices"][2]["token_ids"]


@on_event_loop
async def test_a_chat_goes_on_behind_a_search(folder):
    async with serving(folder) as client:
        fields = {**SEARCH, "max_tokens": 6, "return_token_ids": True}
        parent = (await client.chat("hello", retain_kv=60, **fields)).json()
        ChatCompletion.model_validate(parent)
        child = (await client.chat("and?", continuation_of=parent["id"], continuation_choice=1, **fields)).json()
        assert child["continuation"]["source"] == "lease"
        before = parent["prompt_token_ids"] + parent["choices"][1]["token_ids"]
        assert child["prompt_token_ids"][: len(before)] == before


@on_event_loop
async def test_a_width_that_the_engine_can_not_run_is_a_400(folder):
    async with serving(folder) as client:  # which has 32 places in a step
        answer = await client.complete(prompt="p", use_beam_search=True, beam_width=33, n=1)
        assert (answer.status, answer.error["param"]) == (400, "beam_width")
        assert (await client.complete(prompt="p", use_beam_search=True, beam_width=32, n=1)).status == 200


OWN_SEARCH = {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True, "max_length": 60, "temperature": 0.0}


@pytest.mark.parametrize(
    ("fields", "searches"),
    [
        ({}, True),
        ({"n": 2, "seed": 5, "top_p": 1}, True),
        ({"stream": True}, True),
        ({"max_tokens": 9, "length_penalty": 0.5}, True),
        ({"use_beam_search": False}, False),
        ({"temperature": 0}, False),
        ({"temperature": 1.0}, False),
        ({"stop": "x"}, False),
        ({"logprobs": 1}, False),
        ({"max_tokens": 0, "echo": True}, False),
    ],
)
@on_event_loop
async def test_a_model_whose_files_say_so_is_searched_unless_the_request_samples(fields, searches):
    async with scripted(say("yes", "no"), defaults=OWN_SEARCH) as client:
        assert (await client.complete(prompt="p", **fields)).status == 200
        found = beam_params(client)
        assert (found is not None) == searches
        if found is not None:
            penalty = fields.get("length_penalty", 2.0)
            assert (found.beam_width, found.length_penalty, found.early_stopping) == (3, penalty, True)
            assert found.max_tokens == fields.get("max_tokens", 59)


@on_event_loop
async def test_a_search_that_is_asked_for_begins_with_the_model_s_own_values():
    async with scripted(say("a", "b", "c", "d"), defaults=OWN_SEARCH) as client:
        await client.complete(prompt="p", use_beam_search=True, temperature=0, n=4)
        found = beam_params(client)
        assert found is not None and (found.beam_width, found.length_penalty, found.n) == (4, 2.0, 4)


@pytest.mark.parametrize("search", [{}, {"use_beam_search": True}])
@on_event_loop
async def test_rules_over_tokens_reach_the_engine(search):
    rules = {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 3, "bad_words_ids": [[5, 6]]}
    async with scripted(say("yes")) as client:
        assert (await client.complete(prompt="p", forced_eos_token_id=7, **rules, **search)).status == 200
        params = client.engine.core.added[0].params
        assert {name: getattr(params, name) for name in rules} == rules and params.forced_eos_token_id == [7]
        for name, value in {
            "no_repeat_ngram_size": 1000,
            "forced_eos_token_id": "x",
            "bad_words_ids": [[]],
            "encoder_no_repeat_ngram_size": -1,
        }.items():
            answer = await client.complete(prompt="p", **{name: value}, **search)
            assert answer.status == 400 and answer.json()["error"]["param"].startswith(name)
