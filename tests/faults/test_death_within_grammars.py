"""Engines that are killed while texts with a grammar are generated: each text goes on in its grammar, with the tokens
that it would have had."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest

from ratoon import AsyncLLM, SamplingParams
from ratoon.core.params import RequestOutputKind
from tests.depths import both_depths
from tests.faults.executors import HALTING, Halt
from tests.faults.processes import FAMILY, engine_settings
from tests.golden.grammar_engines import THOUGHT, grammar_folder
from tests.waiting import until

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


@both_depths
@pytest.mark.slow
@pytest.mark.one_in(2)
def test_texts_go_on_in_their_grammars_in_another_engine(halt: Halt) -> None:
    async def run() -> None:
        async with AsyncLLM(str(grammar_folder(FAMILY)), executor=HALTING, **engine_settings(num_blocks=512)) as llm:
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
            # As they begin, inside of the reasoning, and far inside of all grammars
            for num_kills, num_steps in enumerate((1, 4, 24), start=1):
                halt.after(num_steps)
                asking = [asyncio.create_task(ask(llm, asked, "parent", begun)) for asked in ASKED]
                await until("they are under way", lambda: halt.is_reached)
                assert not all(task.done() for task in asking)
                os.kill(llm.health().engines[0].pid, signal.SIGKILL)
                assert await asyncio.gather(*asking) == right
                assert llm.health().engines[0].num_restarts == num_kills
            (books,) = await llm._client.call_utility("check")
            assert books["num_used_blocks"] == 0 and len(llm._client._ledger) == 0

    asyncio.run(run())
