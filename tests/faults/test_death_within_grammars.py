"""Engines that are killed while texts with a grammar are generated: each text goes on in its grammar, with the tokens
that it would have had."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest

from ratoon import AsyncLLM, SamplingParams
from ratoon.core.params import RequestOutputKind
from tests.depths import both_depths
from tests.faults.processes import FAMILY, engine_settings
from tests.golden.grammar_engines import THOUGHT, grammar_folder

THOUGHT_ID = 1
WORDS = "[a-z]{70}"
SCHEMA = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 7, "maxItems": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["words", "count"],
    "additionalProperties": False,
}
JSON: dict[str, Any] = {"json_schema": SCHEMA, "disable_any_whitespace": True}

Texts = dict[int, tuple[str, str | None]]  # by choice: the text, and why it ended


def is_json(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def is_json_behind_a_thought(text: str) -> None:
    is_json(text.partition(THOUGHT)[2])


def is_words(text: str) -> None:
    assert re.fullmatch(WORDS, text), text


@dataclass(frozen=True)
class Asked:
    seed: int
    structured_output: dict[str, Any]
    check: Callable[[str], None]
    n: int = 1
    streams: bool = True

    def params(self, max_tokens: int = 120) -> SamplingParams:
        kind = RequestOutputKind.DELTA if self.streams else RequestOutputKind.FINAL_ONLY
        thinks = "begins_after" in self.structured_output
        return SamplingParams(
            structured_output=self.structured_output,
            seed=self.seed,
            n=self.n,
            max_tokens=max_tokens,
            output_kind=kind,
            logit_bias={THOUGHT_ID: 3.0} if thinks else None,  # so that the reasoning ends after some tokens
            skip_special_tokens=not thinks,
        )


REASONED = Asked(4, {**JSON, "begins_after": THOUGHT}, is_json_behind_a_thought)
CONTINUED = Asked(5, {"continue_grammar": True}, is_words)
ASKED = [
    Asked(1, JSON, is_json),
    Asked(2, JSON, is_json, streams=False),
    Asked(3, JSON, is_json, n=2),
    REASONED,
    CONTINUED,
    Asked(6, {"regex": WORDS}, is_words, n=2, streams=False),
]


async def ask(llm: AsyncLLM, asked: Asked, parent: str, begun: str) -> Texts:
    if asked is CONTINUED:
        outputs = llm.generate_continuation(parent, "", asked.params())
        texts = {0: begun}
    else:
        outputs, texts = llm.generate("hello", asked.params()), {}
    reasons: dict[int, str | None] = {}
    async for output in outputs:
        assert output.error is None
        for choice in output.outputs:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
    return {choice: (text, reasons[choice]) for choice, text in texts.items()}


def num_tokens_so_far(llm: AsyncLLM) -> list[int]:
    """Of the choices of all requests that run."""
    return [len(choice.token_ids) for entry in llm._client._ledger._entries.values() for choice in entry.choices]


async def kill_after(llm: AsyncLLM, num_tokens: int, asking: Sequence[asyncio.Task[Texts]]) -> bool:
    """When each choice has so many tokens, and none has ended. False: one ended before the others had as many, as on a
    machine that is busy with other work."""
    num_choices = sum(asked.n for asked in ASKED)
    deadline = time.monotonic() + 60
    while len(sizes := num_tokens_so_far(llm)) < num_choices or min(sizes) < num_tokens:
        assert time.monotonic() < deadline, sizes
        if any(task.done() for task in asking):
            return False
        await asyncio.sleep(0.001)
    if any(choice.finished for entry in llm._client._ledger._entries.values() for choice in entry.choices):
        return False
    os.kill(llm.health().engines[0].pid, signal.SIGKILL)
    return True


@both_depths
@pytest.mark.slow
def test_texts_go_on_in_their_grammars_in_another_engine() -> None:
    async def run() -> None:
        async with AsyncLLM(str(grammar_folder(FAMILY)), **engine_settings(num_blocks=512)) as llm:
            begin = SamplingParams(structured_output={"regex": WORDS}, seed=9, max_tokens=20)
            async for output in llm.generate("hello", begin, "parent"):
                begun = output.outputs[0].text
            assert output.outputs[0].finish_reason == "length"
            right = [await ask(llm, asked, "parent", begun) for asked in ASKED]
            for asked, texts in zip(ASKED, right, strict=True):
                assert len(texts) == asked.n
                for text, reason in texts.values():
                    assert reason == "stop"
                    asked.check(text)
            # While grammars are compiled, inside of the reasoning, and far inside of all grammars
            for num_kills, num_tokens in enumerate((0, 3, 20), start=1):
                for _ in range(20):
                    asking = [asyncio.create_task(ask(llm, asked, "parent", begun)) for asked in ASKED]
                    killed = await kill_after(llm, num_tokens, asking)
                    assert await asyncio.gather(*asking) == right
                    if killed:
                        break
                assert llm.health().engines[0].num_restarts == num_kills
            (books,) = await llm._client.call_utility("check")
            assert books["num_used_blocks"] == 0 and len(llm._client._ledger) == 0

    asyncio.run(run())
