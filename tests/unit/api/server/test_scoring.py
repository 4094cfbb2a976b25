"""Reranking, scores and labels over HTTP: the forms of Jina, Cohere and vLLM, on small random encoders."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from ratoon.api.server.context import ServerContext
from ratoon.api.server.routes.scoring import CohereReranked, Labels, Reranked, Scores
from ratoon.api.server.settings import ServerSettings
from tests.engines_async import thread_engine
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, VOCAB_SIZE, Client, byte_backend
from tests.unit.engine.fakes_async import on_event_loop

LONGEST = 48
DOCUMENTS = ["rice", "a grass", "cane regrows"]
ASK = {"model": MODEL, "query": "ratoon", "documents": DOCUMENTS}


def write_model(folder: Path, num_labels: int | None = 1, **more: Any) -> Path:
    """A BERT of weights that the engine makes up, which classifies unless there are no labels."""
    config = {
        "architectures": ["BertModel" if num_labels is None else "BertForSequenceClassification"],
        "model_type": "bert", "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": LONGEST, "dtype": "float32",
        **({} if num_labels is None else {"id2label": {str(one): f"label {one}" for one in range(num_labels)}}), **more,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    backend, end = byte_backend(), ("<|end|>", VOCAB_SIZE - 2)
    backend.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", pair="$A <|end|> $B:1 <|end|>:1", special_tokens=[end]
    )
    backend.save(str(folder / "tokenizer.json"))
    return folder


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Client]:
    async with thread_engine(str(folder), **TINY_SETTINGS) as llm:
        yield Client(ServerContext(llm, ServerSettings(**settings)))


async def post(client: Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, body)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


@on_event_loop
async def test_documents_are_sorted_in_the_forms_of_jina_and_cohere(tmp_path):
    async with serving(write_model(tmp_path / MODEL)) as client:
        body = await post(client, "/v1/rerank", ASK)
        Reranked.model_validate(body)
        results = body["results"]
        scores = [one["relevance_score"] for one in results]
        assert scores == sorted(scores, reverse=True) and len(set(scores)) == len(scores)
        assert sorted(one["index"] for one in results) == [0, 1, 2]
        assert all(one["document"]["text"] == DOCUMENTS[one["index"]] for one in results)
        num_tokens = sum(len("ratoon") + len(document) + 2 for document in DOCUMENTS)
        assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        objects = {**ASK, "documents": [{"text": one} for one in DOCUMENTS], "top_n": 2, "return_documents": False}
        short = await post(client, "/rerank", objects)
        assert short["results"] == [{key: one[key] for key in ("index", "relevance_score")} for one in results[:2]]
        cohere = await post(client, "/v2/rerank", {**ASK, "top_n": 3})
        CohereReranked.model_validate(cohere)
        assert cohere["results"] == [{key: one[key] for key in ("index", "relevance_score")} for one in results]
        assert cohere["meta"]["billed_units"] == {"search_units": 1}
        # As Cohere promises, documents are cut, and so are pairs that are too long then.
        assert len((await post(client, "/v2/rerank", {**ASK, "documents": ["x" * 500]}))["results"]) == 1
        assert client.context.num_unfinished == 0


@on_event_loop
async def test_pairs_have_scores_in_the_form_of_vllm(tmp_path):
    async with serving(write_model(tmp_path / MODEL)) as client:
        body = await post(client, "/v1/score", {"model": MODEL, "text_1": "ratoon", "text_2": DOCUMENTS})
        Scores.model_validate(body)
        ranked = (await post(client, "/v1/rerank", ASK))["results"]
        assert {one["index"]: one["score"] for one in body["data"]} == {
            one["index"]: one["relevance_score"] for one in ranked
        }
        each = {"model": MODEL, "text_1": ["ratoon"] * 2, "text_2": DOCUMENTS[:2]}
        assert (await post(client, "/score", each))["data"] == body["data"][:2]
        (swapped,) = (await post(client, "/score", {"text_1": "rice", "text_2": "ratoon"}))["data"]
        assert swapped["score"] != body["data"][0]["score"]


@on_event_loop
async def test_texts_have_labels_in_the_form_of_vllm(tmp_path):
    async with serving(write_model(tmp_path / MODEL, 3)) as client:
        body = await post(client, "/v1/classify", {"model": MODEL, "input": DOCUMENTS})
        Labels.model_validate(body)
        for one in body["data"]:
            assert sum(one["probs"]) == pytest.approx(1.0, abs=1e-5)
            assert (one["num_classes"], one["label"]) == (3, f"label {one['probs'].index(max(one['probs']))}")
        assert (await post(client, "/classify", {"input": "rice"}))["data"][0] == body["data"][0]
        ids = [*b"rice", VOCAB_SIZE - 2]
        assert (await post(client, "/classify", {"input": [ids]}))["data"][0]["label"] == body["data"][0]["label"]
        logits = await post(client, "/classify", {"input": "rice", "activation": "none"})
        assert sum(logits["data"][0]["probs"]) != pytest.approx(1.0, abs=1e-3)
        long = {"input": "x" * 500, "truncate_prompt_tokens": -1}
        cut = await post(client, "/classify", long)
        assert cut["usage"]["prompt_tokens"] == LONGEST
        answer = await client.post("/v1/rerank", ASK)
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert "its head has 3 labels" in answer.error["message"]


@on_event_loop
async def test_what_is_wrong_is_named(tmp_path):
    async with serving(write_model(tmp_path / MODEL), max_batch=4) as client:
        for path, change, param, message in (
            ("/v1/rerank", {"documents": []}, "documents", ""),
            ("/v1/rerank", {"documents": ["a"] * 5}, "documents", "has 5 texts; 4 at most"),
            ("/v1/rerank", {"documents": ["a", "x" * 60]}, "documents[1]", "at most 48 fit"),
            ("/v1/rerank", {"documents": ["a", 3]}, "documents", "entry 1 is neither text nor"),
            ("/v1/rerank", {"query": None}, "query", ""),
            ("/v1/rerank", {"top_n": 0}, "top_n", ""),
            ("/v1/rerank", {"instruction": "x"}, "instruction", "has no template"),
            ("/v1/rerank", {"truncate_prompt_tokens": 49}, "truncate_prompt_tokens", "1 to 48"),
            ("/v2/rerank", {"max_tokens_per_doc": 0}, "max_tokens_per_doc", ""),
            ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "has 2 texts for 3"),
            ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "is empty"),
            ("/v1/score", {"text_1": "a", "text_2": "b", "activation": "relu"}, "activation", ""),
            ("/v1/classify", {"input": "x" * 60}, "input", ""),
            ("/v1/classify", {"input": []}, "input", ""),
        ):
            body = {**(ASK if "rerank" in path else {"model": MODEL}), **change}
            answer = await client.post(path, body)
            assert (answer.status, answer.error["param"]) == (400, param), (path, change, answer.body)
            assert message in answer.error["message"], (path, change, answer.body)
        answer = await client.post("/v1/rerank", {**ASK, "model": "other"})
        assert answer.status == 404


@on_event_loop
async def test_a_model_without_a_head_scores_by_vectors_and_has_no_labels(tmp_path):
    async with serving(write_model(tmp_path / MODEL, None)) as client:
        scores = [one["relevance_score"] for one in (await post(client, "/v1/rerank", ASK))["results"]]
        assert all(-1 <= score <= 1.0001 for score in scores)
        answer = await client.post("/v1/classify", {"model": MODEL, "input": "x"})
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert "has no head that classifies: it gives vectors" in answer.error["message"]


@on_event_loop
async def test_vectors_are_cut_where_the_model_says_so(tmp_path):
    ask = {"model": MODEL, "input": "rice", "dimensions": 8}
    async with serving(write_model(tmp_path / "any" / MODEL, None, is_matryoshka=True)) as client:
        vector = (await post(client, "/v1/embeddings", ask))["data"][0]["embedding"]
        assert len(vector) == 8 and sum(number * number for number in vector) == pytest.approx(1.0, abs=1e-5)
    async with serving(write_model(tmp_path / "other" / MODEL, None)) as client:
        answer = await client.post("/v1/embeddings", ask)
        assert (answer.status, answer.error["param"]) == (400, "dimensions")
        assert len((await post(client, "/v1/embeddings", {**ask, "dimensions": 32}))["data"][0]["embedding"]) == 32
