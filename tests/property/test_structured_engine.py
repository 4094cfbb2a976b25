"""Random schemas through an engine with a random model: what ends by itself matches, sampled and searched."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ratoon.api.llm import LLM
from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.core.structured import StructuredOutput
from tests.property.random_schemas import random_document
from tests.property.test_structured_texts import find_violations, refusal_of
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, write_tiny_model

NUM_SCHEMAS = 60
ENDING = dict.fromkeys(b'"}],:0123456789', 4.0)  # tokens are bytes; these bring a text nearer to its end
SPACES = dict.fromkeys(b" \t\r\n", -8.0)


def usable_schemas(count: int) -> list[Any]:
    found: list[Any] = []
    for seed in range(10_000, 10_000 + 4 * count):
        schema = random_document(Random(seed))
        if refusal_of(StructuredOutput(json_schema=json.dumps(schema))) is None:
            found.append(schema)
    return found[:count]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.one_in(2)
def test_what_an_engine_ends_by_itself_matches(tmp_path: Path, depth: int) -> None:
    schemas = usable_schemas(NUM_SCHEMAS)
    counts: Counter[str | None] = Counter()
    with LLM(str(write_tiny_model(tmp_path / MODEL)), **TINY_SETTINGS, max_steps_in_flight=depth) as llm:
        for make in (sampled, searched):
            outputs = llm.generate(["x"] * len(schemas), [make(schema, seed) for seed, schema in enumerate(schemas)])
            for schema, output in zip(schemas, outputs, strict=True):
                assert output.error is None
                for choice in output.outputs:
                    counts[choice.finish_reason] += 1
                    if choice.finish_reason == "stop":
                        assert not (found := find_violations(schema, choice.text)), (schema, choice.text, found)
    assert set(counts) == {"stop", "length"}
    assert counts["stop"] > NUM_SCHEMAS


def sampled(schema: Any, seed: int) -> SamplingParams:
    return SamplingParams(
        n=2,
        max_tokens=60,
        temperature=1.0,
        seed=seed,
        logit_bias=ENDING | SPACES,
        structured_output=StructuredOutput(json_schema=json.dumps(schema)),
    )


def searched(schema: Any, seed: int) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=2,
        n=1,  # some schemas have one text only
        max_tokens=40,
        logit_bias=ENDING | SPACES,
        structured_output=StructuredOutput(json_schema=json.dumps(schema)),
    )
