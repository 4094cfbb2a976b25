"""Agents' turns in sessions, with little memory on the device: the same tokens with and without sessions, host memory
and files, and what superseded texts held goes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratoon.api.llm import LLM
from ratoon.core.errors import RequestError
from ratoon.models.source import resolve_model
from tests.adapter_folders import write_adapter
from tests.depths import both_depths
from tests.golden.engines import engine, greedy, model_folder, scheduler_of, tokens_of
from tests.golden.tiny_models import random_token_ids

FAMILY = "llama with grouped heads"
NUM_SESSIONS, NUM_TURNS, THOUGHT = 3, 3, 5
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"swap_memory": "1MiB"},
    "files": {"swap_memory": "64KiB"},
}


def talk(llm: LLM, has_sessions: bool, **options: Any) -> tuple[list[list[list[int]]], int]:
    """Turns of all sessions at once: the tokens of each turn, and how many were found. A prompt leaves out the first
    tokens of the answer before it."""
    histories = [random_token_ids(40 + number, seed=number) for number in range(NUM_SESSIONS)]
    turns, num_found = [], 0
    for turn in range(NUM_TURNS):
        outputs = []
        for number, history in enumerate(histories):
            named = {"session": f"s{number}"} if has_sessions else {}
            outputs += llm.generate([{"prompt_token_ids": history}], greedy(24), use_tqdm=False, **named, **options)
        turns.append(tokens_of(outputs))
        num_found += sum(output.num_cached_tokens or 0 for output in outputs)
        histories = [
            [*history, *tokens[THOUGHT:], *random_token_ids(9, seed=100 * turn + number)]
            for number, (history, tokens) in enumerate(zip(histories, turns[-1], strict=True))
        ]
    return turns, num_found


@both_depths
@pytest.mark.parametrize("family", [FAMILY, "gemma3 with a window wider than a block"])
@pytest.mark.one_in(3)
def test_turns_have_the_same_tokens_with_sessions_and_tiers_on_and_off(family: str, tmp_path: Path) -> None:
    with engine(family) as llm:
        expected, _ = talk(llm, has_sessions=False)
    for tier, settings in TIERS.items():
        for has_sessions in (False, True):
            folder = {"kv_files": str(tmp_path / str(has_sessions))} if tier == "files" else {}
            with engine(family, num_blocks=28, **settings, **folder) as llm:
                found, _ = talk(llm, has_sessions)
                stats = scheduler_of(llm).stats()
                scheduler_of(llm).kv_cache.sessions.clear()
            assert found == expected, f"{tier}, sessions {has_sessions}"
            assert stats.sessions.superseded == (NUM_SESSIONS * (NUM_TURNS - 1) if has_sessions else 0)


def test_a_session_finds_more_where_others_pass_through() -> None:
    """Between two turns of a session others come, which together push it out by least recent use: with a session, what
    its superseded texts held and what belongs to no session goes first."""
    found = {}
    for has_session in (False, True):
        with engine(FAMILY, num_blocks=25) as llm:
            history, num_found = random_token_ids(60, seed=1), []
            for turn in range(3):
                options = {"session": "kept"} if has_session else {}
                (output,) = llm.generate([{"prompt_token_ids": history}], greedy(20), use_tqdm=False, **options)
                num_found.append(output.num_cached_tokens)
                history = [*history, *random_token_ids(20, seed=2 + turn)]
                for number in range(4):
                    passing = {"prompt_token_ids": random_token_ids(100, seed=10 * turn + number + 50)}
                    llm.generate([passing], greedy(2), use_tqdm=False)
            found[has_session] = num_found
    assert found == {False: [0, 0, 0], True: [0, 48, 80]}


def test_an_adapter_in_a_session_gives_the_same_tokens(tmp_path: Path) -> None:
    shapes = resolve_model(str(model_folder(FAMILY))).tensors.shapes()
    adapter = write_adapter(tmp_path / "adapter", shapes, seed=5)
    settings = {"enable_lora": True, "max_lora_rank": 8}
    with engine(FAMILY, **settings) as llm:
        expected, _ = talk(llm, has_sessions=False, adapter=str(adapter))
    with engine(FAMILY, **settings, num_blocks=28, swap_memory="1MiB") as llm:
        assert talk(llm, has_sessions=True, adapter=str(adapter))[0] == expected
        plain, _ = talk(llm, has_sessions=True)
        assert plain != expected, "the same sessions without it"


def test_bad_names_and_retentions_are_refused() -> None:
    with engine(FAMILY) as llm:
        for options, problem in (
            ({"session": ""}, "session: '' is not a name"),
            ({"session": 3}, "session: 3 is not a name"),
            ({"session": "x" * 513}, "session: is too long"),
            ({"retention": "1h"}, "retention: '1h' is unknown; one of in_memory, 24h, or None"),
        ):
            with pytest.raises(RequestError, match=problem):
                llm.generate([{"prompt_token_ids": [1, 2]}], greedy(1), use_tqdm=False, **options)
