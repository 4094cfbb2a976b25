"""Two replicas, and two front ends before two replicas, answer requests of every kind as one worker does, to the bit: a
request is computed by one of them, and what continues it may come in through the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratoon import LLM
from ratoon.engine.processes.sync_dp_client import SyncDPClient
from tests.golden.every_kind import (
    PROMPTS,
    SUFFIX,
    answers,
    ask_everything,
    encoder_prompts,
    greedy,
    open_engine,
    right_answers,
)
from tests.golden.every_kind_over_http import BEAMS, DRAWN, GREEDY, check_everything, tokens_of, two_front_ends
from tests.golden.grammar_engines import FAMILY, grammar_folder
from tests.golden.test_encoder_decoder_api import INPUTS, folder_of

pytestmark = pytest.mark.slow

QUANTISED = {"quantization": "int8"}


# ---- replicas ----


def open_replicas(folder: Path, **settings: Any) -> LLM:
    llm = open_engine(folder, data_parallel_size=2, **settings)
    assert isinstance(llm._client, SyncDPClient)
    return llm


@pytest.mark.parametrize("settings", [{}, QUANTISED], ids=str)
def test_replicas_answer_as_one_worker(settings: dict[str, Any]) -> None:
    with open_replicas(grammar_folder(FAMILY), **settings) as llm:
        found = ask_everything(llm)
        roots = llm.generate(PROMPTS * 2, greedy(1), progress=False)
        assert len({llm.find_parent(root.request_id).engine for root in roots}) == 2, "both have worked"
    found.check(right_answers(**settings), tolerance=0)


@pytest.mark.parametrize("family", ["t5", "whisper", pytest.param("marian", marks=pytest.mark.full)])
def test_replicas_of_a_model_with_an_encoder_answer_as_one_worker(family: str) -> None:
    prompts = encoder_prompts(family)

    def ask(llm: LLM) -> list[Any]:
        (root,) = llm.generate(prompts[:1], greedy(5), retain_kv=60, progress=False)
        child = llm.generate_continuation(root, SUFFIX, greedy(4))
        return [*answers(llm, prompts), child.outputs[0].token_ids, child.continuation.source]

    with open_engine(folder_of(family), skip_tokenizer=True) as llm:
        right = ask(llm)
    with open_replicas(folder_of(family), skip_tokenizer=True) as llm:
        assert ask(llm) == right


# ---- front ends ----


@pytest.mark.parametrize("settings", [{}, QUANTISED], ids=str)
@pytest.mark.one_in(2)
def test_front_ends_answer_as_one_worker(settings: dict[str, Any]) -> None:
    options = [word for name, value in settings.items() for word in (f"--{name}", value)]
    with two_front_ends(grammar_folder(FAMILY), *options) as client:
        check_everything(client, **settings)


@pytest.mark.parametrize("family", ["t5", pytest.param("marian", marks=pytest.mark.full)])
def test_front_ends_of_a_model_with_an_encoder_answer_as_one_worker(family: str) -> None:
    with open_engine(folder_of(family)) as llm:
        (root,) = llm.generate(INPUTS[:1], greedy(5), retain_kv=60, progress=False)
        child = llm.generate_continuation(root, SUFFIX, greedy(4))
        right = [*answers(llm, INPUTS[:3]), list(child.outputs[0].token_ids)]
    with two_front_ends(folder_of(family)) as client:
        found: list[Any] = []
        for params in ({**GREEDY, "max_tokens": 8}, DRAWN):
            for prompt in INPUTS[:3]:
                found += tokens_of(client.complete(prompt=prompt, **params))
        found += tokens_of(client.complete(prompt=INPUTS[0], max_tokens=5, **BEAMS))
        begun = client.complete(encoder_prompt=INPUTS[0], max_tokens=5, retain_kv=60, **GREEDY)
        rest = client.complete(continuation_of=begun["id"], continuation_suffix=SUFFIX, max_tokens=4, **GREEDY)
        assert rest["continuation"]["source"] == "lease"
        assert [*found, *tokens_of(rest)] == right
