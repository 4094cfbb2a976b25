"""A model that is an encoder alone, over HTTP: vectors as its folder says, and clear words about all the rest."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ratoon.api.server.context import ServerContext
from ratoon.api.server.routes.embeddings import Embeddings
from ratoon.api.server.settings import ServerSettings
from tests.engines_async import thread_engine
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, VOCAB_SIZE, Client, byte_backend
from tests.unit.engine.fakes_async import on_event_loop

LONGEST = 48
SENTENCE_POOLING = {
    "mean": "pooling_mode_mean_tokens",
    "first": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
}


def write_tiny_bert(folder: Path, pooling: str | None = None) -> Path:
    """Of weights that the engine makes up, with a tokenizer of bytes; a folder of sentence-transformers, if it says how
    vectors are made."""
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": LONGEST,
        "dtype": "float32",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    byte_backend().save(str(folder / "tokenizer.json"))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        modes = {name: name == SENTENCE_POOLING[pooling] for name in SENTENCE_POOLING.values()}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    return folder


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Client]:
    async with thread_engine(str(folder), **TINY_SETTINGS) as llm:
        yield Client(ServerContext(llm, ServerSettings()))


async def vectors(client: Client, **fields: Any) -> list[list[float]]:
    answer = await client.post("/v1/embeddings", {"model": MODEL, "input": ["one", "twenty"], **fields})
    assert answer.status == 200, answer.body
    body = answer.json()
    Embeddings.model_validate(body)
    return [entry["embedding"] for entry in body["data"]]


@pytest.mark.parametrize(("declared", "own"), [(None, "mean"), ("mean", "mean"), ("first", "first"), ("last", "last")])
@pytest.mark.one_in(3)
@on_event_loop
async def test_vectors_are_made_as_the_folder_says_unless_the_caller_says_otherwise(tmp_path, declared, own):
    async with serving(write_tiny_bert(tmp_path / MODEL, declared)) as client:
        asked_for = {pooling: await vectors(client, pooling=pooling) for pooling in SENTENCE_POOLING}
        assert await vectors(client) == asked_for[own]
        assert await vectors(client, pooling=None) == asked_for[own]
        assert len({json.dumps(found) for found in asked_for.values()}) == len(asked_for)
        for vector in asked_for[own]:
            assert sum(number * number for number in vector) == pytest.approx(1.0, abs=1e-5)


@on_event_loop
async def test_every_token_sees_those_behind_it(tmp_path):
    async with serving(write_tiny_bert(tmp_path / MODEL)) as client:
        one, other = await vectors(client, input=["abc", "abd"], pooling="first")
        assert one != pytest.approx(other, abs=1e-4)


@on_event_loop
async def test_a_text_that_is_too_long_is_a_400_with_the_numbers_and_a_full_one_is_not(tmp_path):
    async with serving(write_tiny_bert(tmp_path / MODEL)) as client:
        assert len(await vectors(client, input=["x" * LONGEST, "x"])) == 2
        answer = await client.post("/v1/embeddings", {"model": MODEL, "input": ["x", "x" * (LONGEST + 1)]})
        assert (answer.status, answer.error["param"]) == (400, "input[1]")
        assert answer.error["code"] == "context_length_exceeded"
        message = (
            f"has {LONGEST + 1} tokens, and the model's context is {LONGEST} tokens; shorten it to {LONGEST} tokens"
        )
        assert message in answer.error["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True, "n": 2}),
        ("/v1/completions", {"prompt": "x", "decoder_prompt": "y"}),
        ("/v1/completions", {"encoder_prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
@on_event_loop
async def test_nothing_is_generated_and_the_answer_says_why(tmp_path, path, fields):
    async with serving(write_tiny_bert(tmp_path / MODEL)) as client:
        answer = await client.post(path, {"model": MODEL, **fields})
        assert answer.status == 400, answer.body
        assert "has no decoder" in answer.error["message"] and "embed" in answer.error["message"]
        assert len(await vectors(client)) == 2
