"""A lens over hidden states, and the ids of alternatives, over a real engine with a tiny model."""

from __future__ import annotations

import base64
from contextlib import asynccontextmanager

import numpy as np
import pytest

from ratoon.api.server.context import ServerContext
from ratoon.api.server.protocol.chat import ChatCompletion
from ratoon.api.server.protocol.completions import Completion
from ratoon.api.server.protocol.hidden_states import HiddenStatesAnswer
from ratoon.api.server.settings import ServerSettings
from ratoon.core.errors import RequestError, TooLargeError
from ratoon.core.params import HiddenStatesParams
from tests.engines_async import thread_engine
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, Client, write_tiny_model
from tests.unit.engine.fakes_async import on_event_loop

PROMPT = "abcdefgh"
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@asynccontextmanager
async def serving(folder):
    async with thread_engine(str(folder), **TINY_SETTINGS) as llm:
        yield Client(ServerContext(llm, ServerSettings()))


async def look(client: Client, **fields):
    answer = await client.post("/v1/hidden_states", {"model": MODEL, "prompt": PROMPT, **fields})
    assert answer.status == 200, answer.body
    HiddenStatesAnswer.model_validate(answer.json())
    return answer.json()


@on_event_loop
async def test_the_last_layer_is_what_the_model_says(folder):
    async with serving(folder) as client:
        seen = await look(client, lens=5, layers="all", positions="all")
        assert seen["data"] is None and seen["shape"] == [NUM_LAYERS + 1, len(PROMPT)]
        assert [len(rows) for rows in seen["lens"]] == [len(PROMPT)] * (NUM_LAYERS + 1)
        fields = {"prompt": PROMPT, "max_tokens": 1, "logprobs": 5, "temperature": 0, "return_token_ids": True}
        said = (await client.complete(**fields)).json()["choices"][0]
        ids = said["logprobs"]["top_token_ids"][0]
        expected = {ids[text]: value for text, value in said["logprobs"]["top_logprobs"][0].items()}
        found = {one["token_id"]: one["logprob"] for one in seen["lens"][-1][-1]}
        assert found == pytest.approx(expected, abs=1e-5)
        values = [one["logprob"] for one in seen["lens"][0][0]]
        assert values == sorted(values, reverse=True) and values[0] < 0


@on_event_loop
async def test_inner_layers_go_through_the_final_norm_and_the_head(folder):
    """From the states themselves, with the model's own weights."""
    async with serving(folder) as client:
        seen = await look(client, lens=3, layers=[1, "pre_norm", "norm", 0], positions=[5, 2])
        states = await look(client, layers=[1, "pre_norm", "norm", 0], positions=[5, 2])
        numbers = np.frombuffer(base64.b64decode(states["data"]), np.float32).reshape(states["shape"])
        assert np.asarray(seen["norms"]) == pytest.approx(np.linalg.norm(numbers, axis=-1), rel=1e-5)
        model = client.context.llm._client.inproc.core.executor._worker.runner.program.model
        import torch

        for place, layer in enumerate(seen["layers"]):
            rows = torch.from_numpy(numbers[place].copy())
            normed = rows if layer == "norm" else model.final_norm(rows)
            logprobs = model.compute_logits(normed).float().log_softmax(-1)
            for row, entries in zip(logprobs, seen["lens"][place]):
                top = row.topk(3)
                assert [one["token_id"] for one in entries] == top.indices.tolist()
                assert [one["logprob"] for one in entries] == pytest.approx(top.values.tolist(), abs=1e-5)
        assert seen["lens"][1] == seen["lens"][2]  # "norm" is what is made of "pre_norm"


@on_event_loop
async def test_an_answer_is_looked_into_without_computing_it_again(folder):
    async with serving(folder) as client:
        done = (await client.complete(prompt=PROMPT, max_tokens=8, ignore_eos=True, retain_kv=600)).json()
        fields = {"original_request_id": done["id"], "lens": 2, "positions": [3, 9], "layers": "all"}
        answer = await client.post("/v1/hidden_states", {"model": MODEL, **fields})
        body = answer.json()
        assert body["computed_tokens"] == 2 and body["source"] == "lease"
        assert body["lens"][-1][0] == (await look(client, lens=2, positions=3))["lens"][0][0]


@pytest.mark.parametrize(
    ("fields", "headers", "status", "param"),
    [
        ({"lens": 0}, {}, 400, "lens"),
        ({"lens": 21}, {}, 400, "lens"),
        ({"lens": 2, "dtype": "float16"}, {}, 400, "dtype"),
        ({"lens": 2}, {"accept": "application/octet-stream"}, 400, "lens"),
        ({"lens": 2, "side": "encoder"}, {}, 400, "lens"),
    ],
)
def test_a_lens_that_makes_no_sense_is_refused(folder, fields, headers, status, param):
    @on_event_loop
    async def refused():
        async with serving(folder) as client:
            body = {"model": MODEL, "prompt": PROMPT, **fields}
            answer = await client.post(
                "/v1/hidden_states", body, headers={"content-type": "application/json", **headers}
            )
            assert (answer.status, answer.error["param"]) == (status, param)

    refused()


@on_event_loop
async def test_a_lens_has_a_limit_and_comes_with_no_answer(folder):
    async with serving(folder) as client:
        llm = client.context.llm
        repeated = HiddenStatesParams(lens=20, layers=[0] * 4000, positions=[0, 1])
        with pytest.raises(TooLargeError, match="lens: 20 tokens at 2 positions of 4000 layers"):
            await llm.extract_hidden_states(PROMPT, repeated)
        with pytest.raises(RequestError, match="lens: 21"):
            await llm.extract_hidden_states(PROMPT, HiddenStatesParams(lens=21))
        output = await llm.extract_hidden_states(PROMPT, HiddenStatesParams(lens=4))
        assert output.tensor is None and len(output.norms[0]) == 1
        assert [entry.rank for entry in output.lens[0][0].values()] == [1, 2, 3, 4]


@on_event_loop
async def test_alternatives_of_a_chat_have_ids_where_they_are_asked_for(folder):
    async with serving(folder) as client:
        fields = {"max_tokens": 3, "logprobs": True, "top_logprobs": 4, "seed": 1, "ignore_eos": True}
        with_ids = (await client.chat("hello", return_token_ids=True, **fields)).json()
        ChatCompletion.model_validate(with_ids)
        choice = with_ids["choices"][0]
        assert [one["token_id"] for one in choice["logprobs"]["content"]] == choice["token_ids"]
        for one in choice["logprobs"]["content"]:
            assert all(type(top["token_id"]) is int for top in one["top_logprobs"])
        assert with_ids["prompt_token_ids"]
        without = (await client.chat("hello", **fields)).json()
        assert "token_id" not in without["choices"][0]["logprobs"]["content"][0]
        streamed = (await client.chat("hello", stream=True, return_token_ids=True, **fields)).events()
        assert streamed[0]["prompt_token_ids"] == with_ids["prompt_token_ids"]
        body = (await client.complete(prompt="x", max_tokens=1, logprobs=2)).json()
        Completion.model_validate(body)
        assert "top_token_ids" not in body["choices"][0]["logprobs"]
