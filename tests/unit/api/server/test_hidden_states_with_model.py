"""Hidden states over HTTP from a real engine with a tiny model: the right numbers, at the right cost, by any way in."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager

import numpy as np
import pytest
from safetensors.numpy import load

from ratoon.api.llm import LLM
from ratoon.api.server.context import ServerContext
from ratoon.api.server.protocol.completions import Completion
from ratoon.api.server.protocol.hidden_states import HiddenStatesAnswer
from ratoon.api.server.settings import ServerSettings
from ratoon.core.params import HiddenStatesParams
from ratoon.observe.metrics import EngineMetrics
from tests.engines_async import make_thread_engine
from tests.unit.api.server.harness import END, MODEL, TINY_SETTINGS, Client, write_tiny_model
from tests.unit.engine.fakes_async import on_event_loop

PATH = "/v1/hidden_states"
PROMPT = "a prompt that fills more than one block of the cache"
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
EVERYTHING = HiddenStatesParams(positions="all", layers="all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def expected(folder):
    """All states of a sequence, [3 layers, tokens, 32], by the shortest way."""
    with LLM(str(folder), **TINY_SETTINGS) as llm:
        yield lambda token_ids: llm.extract_hidden_states(list(token_ids), EVERYTHING).tensor.numpy()


@asynccontextmanager
async def serving(folder, **settings):
    llm = make_thread_engine(str(folder), metrics=EngineMetrics(MODEL), **{**TINY_SETTINGS, **settings})
    async with llm:
        yield Client(ServerContext(llm, ServerSettings()))


async def ask(client, **fields):
    answer = await client.post(PATH, {"model": MODEL, **fields})
    assert answer.status == 200, answer.body
    HiddenStatesAnswer.model_validate(answer.json())
    return answer.json()


def numbers(body):
    return np.frombuffer(base64.b64decode(body["data"]), np.float32).reshape(body["shape"])


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@on_event_loop
async def test_a_prompt_by_positions_and_layers(folder, expected):
    whole = expected(PROMPT.encode())
    async with serving(folder) as client:
        body = await ask(client, prompt=PROMPT)
        close(numbers(body), whole[2:3, -1:])
        assert (body["layers"], body["positions"], body["token_ids"]) == ([2], [51], [ord("e")])
        assert body["source"] is None
        body = await ask(client, prompt=PROMPT, positions=[-1, [3, 5], 3, [49, None]], layers=["norm", 0])
        assert body["positions"] == [51, 3, 4, 49, 50], "each once, where it was named first"
        assert body["token_ids"] == [PROMPT.encode()[position] for position in body["positions"]]
        close(numbers(body), whole[[2, 0]][:, body["positions"]])
        headers = {"content-type": "application/json", "accept": "application/octet-stream"}
        fields = {"model": MODEL, "prompt": PROMPT, "positions": "all", "layers": "all"}
        close(load((await client.post(PATH, fields, headers=headers)).body)["hidden_states"], whole)


@pytest.mark.parametrize(("retain_kv", "source"), [(60, "lease"), (None, "prefix_cache")])
@on_event_loop
async def test_an_answers_last_token_costs_what_is_not_there_any_more(folder, expected, retain_kv, source):
    async with serving(folder) as client:
        parent = (await client.complete(prompt=PROMPT, retain_kv=retain_kv, **GREEDY)).json()
        sequence = [*PROMPT.encode(), *parent["choices"][0]["token_ids"]]
        body = await ask(client, original_request_id=parent["id"])
        assert (body["positions"], body["source"]) == ([57], source)
        assert body["computed_tokens"] == (1 if retain_kv else 10)
        close(numbers(body), expected(sequence)[2:3, -1:])
        body = await ask(client, original_request_id=parent["id"], scope="output", positions="all")
        assert body["positions"] == [*range(52, 58)] and body["token_ids"] == parent["choices"][0]["token_ids"]
        close(numbers(body), expected(sequence)[2:3, 52:])


@on_event_loop
async def test_any_choice_of_an_answer_and_any_prompt_of_a_batch(folder, expected):
    async with serving(folder) as client:
        sampled = {**GREEDY, "temperature": 1.5, "seed": 3, "n": 3}
        parent = (await client.complete(prompt=PROMPT, **sampled)).json()
        tokens = parent["choices"][2]["token_ids"]
        body = await ask(client, original_request_id=parent["id"], choice=2, positions="all")
        close(numbers(body)[0], expected([*PROMPT.encode(), *tokens])[2])
        answer = await client.post(PATH, {"model": MODEL, "original_request_id": parent["id"], "choice": 3})
        assert (answer.status, answer.error["param"]) == (400, "choice")
        batch = (await client.complete(prompt=["one", "two"], **GREEDY)).json()
        body = await ask(client, original_request_id=f"{batch['id']}-1", scope="prompt", positions="all")
        assert body["token_ids"] == [*b"two"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("search", [False, True])
@on_event_loop
async def test_states_come_with_the_answer(folder, expected, stream, search):
    async with serving(folder) as client:
        wish = {"positions": "all", "layers": [1, "norm"]}
        fields = {"temperature": 1.5, "seed": 3, "n": 2, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
        if search:
            fields = {**fields, "temperature": None, "seed": None, "use_beam_search": True, "beam_width": 3}
        answer = await client.complete(prompt=PROMPT, return_hidden_states=wish, stream=stream, **fields)
        assert answer.status == 200, answer.body
        bodies = answer.events() if stream else [answer.json()]
        tokens, states = {0: [], 1: []}, {}
        for body in bodies:
            Completion.model_validate(body)
            for choice in body["choices"]:
                tokens[choice["index"]] += choice.get("token_ids", [])
                if "hidden_states" in choice:
                    states[choice["index"]] = choice["hidden_states"]
        for index in (0, 1):
            whole = expected([*PROMPT.encode(), *tokens[index]])
            close(numbers(states[index]), whole[[1, 2]])
            assert states[index]["token_ids"] == [*PROMPT.encode(), *tokens[index]]
        assert (await client.context.llm.stats())[0].leases.num_active == 0


@on_event_loop
async def test_a_chat_and_its_continuation_have_states(folder, expected):
    async with serving(folder) as client:
        first = (await client.chat("Hello", return_hidden_states=True, retain_kv=60, **GREEDY)).json()
        tokens = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        states = first["choices"][0]["hidden_states"]
        close(numbers(states), expected(tokens)[2:3, -1:])
        assert states["computed_tokens"] == 1 and states["positions"] == [len(tokens) - 1]
        wish = {"scope": "prompt", "positions": "all"}
        child = await client.chat("More", continuation_of=first["id"], return_hidden_states=wish, **GREEDY)
        states = child.json()["choices"][0]["hidden_states"]
        assert states["token_ids"] == child.json()["prompt_token_ids"]
        close(numbers(states), expected(states["token_ids"])[2:3])


@pytest.mark.parametrize(
    ("fields", "status", "param", "told"),
    [
        ({"positions": 52}, 400, "positions", "52 tokens"),
        ({"positions": [-53]}, 400, "positions", "52 tokens"),
        ({"positions": [[0, 60]]}, 400, "positions", "60"),
        ({"positions": []}, 400, "positions", "empty"),
        ({"layers": 3}, 400, "layers", "2 layers"),
        ({"layers": -4}, 400, "layers", "2 layers"),
        ({"scope": "output"}, 400, "positions", "no tokens"),
        ({"positions": "all", "layers": "all"}, 413, "positions", "19968 bytes"),
        ({"positions": "all", "layers": [0, 1]}, 413, "positions", "13312 bytes"),
        ({"original_request_id": "cmpl-never", "prompt": None}, 404, "original_request_id", "cmpl-never"),
        ({"deadline": 1e-9}, 504, "deadline", ""),
    ],
)
@on_event_loop
async def test_bad_input_gets_the_numbers(folder, fields, status, param, told):
    async with serving(folder, max_hidden_states_bytes=10_000) as client:
        answer = await client.post(PATH, {"model": MODEL, "prompt": PROMPT, **fields})
        assert (answer.status, answer.error["param"]) == (status, param), answer.body
        assert told in answer.error["message"]
        await ask(client, prompt=PROMPT)  # nobody else notices


@pytest.mark.parametrize(
    ("wish", "status", "param"),
    [
        ({"positions": 52}, 400, "positions"),
        ({"layers": 3}, 400, "layers"),
        ({"positions": "all", "layers": "all"}, 413, "positions"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@on_event_loop
async def test_a_wish_that_no_answer_can_meet_is_refused_before_it_begins(folder, stream, wish, status, param):
    async with serving(folder, max_hidden_states_bytes=10_000) as client:
        fields = {"prompt": PROMPT, "stream": stream, "return_hidden_states": {"scope": "prompt", **wish}}
        answer = await client.complete(**fields)
        assert (answer.status, answer.error["param"]) == (status, f"return_hidden_states.{param}"), answer.body


@on_event_loop
async def test_a_wish_that_this_answer_does_not_meet_leaves_the_text(folder):
    async with serving(folder) as client:
        answer = await client.complete(
            prompt=PROMPT,
            allowed_token_ids=[END],
            max_tokens=5,
            return_hidden_states={"scope": "output", "positions": 3},
        )
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["hidden_states"]["error"]["param"].endswith("positions")


@on_event_loop
async def test_a_deadline_that_passes_leaves_the_text(folder):
    async with serving(folder) as client:
        for stream in (False, True):
            answer = await client.complete(
                prompt=PROMPT, return_hidden_states={"deadline": 1e-9}, stream=stream, **GREEDY
            )
            bodies = answer.events() if stream else [answer.json()]
            choice = bodies[-1]["choices"][0]
            assert choice["hidden_states"]["error"]["code"] == "deadline_exceeded"
            assert sum(len(body["choices"][0]["token_ids"]) for body in bodies) == 6


@on_event_loop
async def test_a_client_that_goes_away_takes_its_extraction_back(folder):
    async with serving(folder) as client:
        await client.context.llm.pause()
        opened = client.open("POST", PATH, {"model": MODEL, "prompt": PROMPT})
        while client.context.llm.num_unfinished_requests() == 0:
            await asyncio.sleep(0.001)
        opened.disconnect()
        await opened.task
        assert client.context.llm.num_unfinished_requests() == 0 and client.context.num_unfinished == 0
        await client.context.llm.resume()
        await ask(client, prompt=PROMPT)
