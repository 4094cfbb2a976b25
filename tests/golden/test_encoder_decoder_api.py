"""Encoder-decoder models as users get them: `LLM` over a folder that transformers saved gives the texts that it does.

What the core does with such requests is in test_encoder_decoder.py.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratoon import LLM, BeamSearchParams, HiddenStatesParams, RequestOutput, SamplingParams
from tests.golden.encoder_engines import (
    START,
    TEXT_FAMILIES,
    TOLERANCE,
    Source,
    encoder_states,
    generate,
    source_of,
    tiny_model,
)
from tests.golden.engines import check_nothing_left, write_word_tokenizer
from tests.golden.tiny_models import MAX_POSITION, random_token_ids

FORCED = 11  # the token that the config of one model forces to be the first
SOURCES = [Source(tuple(random_token_ids(length, seed=length))) for length in (1, 16, 33, MAX_POSITION)]
INPUTS = [list(source.token_ids) for source in SOURCES]


@functools.cache
def saved() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ratoon-golden-")  # removed when the process ends


@functools.cache
def folder_of(family: str, forced_bos: int | None = None) -> Path:
    folder = Path(saved().name) / f"{family.replace(' ', '-')}-{forced_bos}"
    oracle = copy.deepcopy(tiny_model(family).oracle)
    oracle.generation_config.forced_bos_token_id = forced_bos
    oracle.generation_config.eos_token_id = 2
    oracle.save_pretrained(folder)
    write_word_tokenizer(folder)
    return folder


@contextmanager
def engine(family: str, forced_bos: int | None = None, **settings: Any) -> Iterator[LLM]:
    defaults = {"device": "cpu", "num_blocks": 120, "num_threads": 1, "max_num_seqs": 16, "max_model_len": MAX_POSITION}
    with LLM(str(folder_of(family, forced_bos)), **(defaults | settings)) as llm:
        yield llm
        if not settings.get("process"):
            check_nothing_left(llm)


def by_transformers(family: str, source: Source, decoder: list[int], count: int = 8, **settings: Any) -> list[int]:
    found = generate(family, source, decoder, max_new_tokens=count, **({"num_beams": 1} | settings))
    return found.sequences[0, len(decoder) :].tolist()


def greedy(count: int = 8, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, **({"ignore_eos": True} | changes))


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_single_prompt_goes_to_the_encoder_and_the_text_is_that_of_transformers(family: str) -> None:
    with engine(family) as llm:
        outputs = llm.generate(INPUTS, greedy(), progress=False)
    assert tokens_of(outputs) == [by_transformers(family, source, [START]) for source in SOURCES]
    assert [output.encoder_prompt_token_ids for output in outputs] == INPUTS
    assert [output.prompt_token_ids for output in outputs] == [[START]] * len(INPUTS)


def test_pairs_in_any_form_and_the_token_that_the_config_forces() -> None:
    tokens = INPUTS[2]
    text = " ".join(f"w{token}" for token in tokens)
    decoders: list[tuple[Any, list[int]]] = [
        (None, [START, FORCED]),
        ([START, FORCED, 9], [START, FORCED, 9]),
        ({"prompt_token_ids": [9]}, [START, 9]),
        ("w9 w5", [START, FORCED, 9, 5]),
    ]
    with engine("bart", FORCED) as llm:
        prompts = [{"encoder_prompt": text, "decoder_prompt": decoder} for decoder, _ in decoders]
        outputs = llm.generate(prompts, greedy(), progress=False)
        assert llm.stats().num_encoder_runs == 1
    for output, (_, whole) in zip(outputs, decoders, strict=True):
        assert output.prompt_token_ids == whole and output.encoder_prompt == text
        assert output.encoder_prompt_token_ids == tokens
        assert tokens_of([output])[0] == by_transformers("bart", SOURCES[2], whole)


@pytest.mark.parametrize("family", ["marian", "t5"])
def test_texts_end_where_those_of_transformers_do(family: str) -> None:
    """Greedily and with beams."""
    sources = [source_of(family, length, seed=5) for length in (3, 10, 17, 24, 40)]
    stop = frequent_token(family, sources)
    with engine(family) as llm:
        prompts = [list(source.token_ids) for source in sources]
        outputs = llm.generate(prompts, greedy(12, stop_token_ids=[stop]), progress=False)
        beams = BeamSearchParams(beam_width=4, max_tokens=12, stop_token_ids=[stop], ignore_eos=True)
        searches = llm.generate(prompts, beams, progress=False)
    lengths = set()
    for source, output, search in zip(sources, outputs, searches, strict=True):
        for found, width in ((output, 1), (search, 4)):
            expected = by_transformers(family, source, [START], 12, num_beams=width, eos_token_id=[stop])
            (ours,) = tokens_of([found])
            assert ours == expected[: len(ours)] and set(expected[len(ours) :]) <= {0}, (source, width)
            lengths.add(len(ours))
    assert len(lengths) > 2


def frequent_token(family: str, sources: list[Source]) -> int:
    """One that many of these texts hold, not as their first."""
    texts = [by_transformers(family, source, [START], 12) for source in sources]
    found = [token for text in texts for token in set(text) if text[0] != token]
    return max(set(found), key=lambda token: (found.count(token), -token))


def test_answers_are_continued_and_read_out() -> None:
    family, tokens = "bart", INPUTS[2]
    with engine(family) as llm:
        (parent,) = llm.generate([list(tokens)], greedy(), retain_kv=60, progress=False)
        child = llm.generate_continuation(parent, [9, 4], greedy())
        whole = [START, *tokens_of([parent])[0], 9, 4]
        assert child.prompt_token_ids == whole and child.encoder_prompt_token_ids == tokens
        assert tokens_of([child])[0] == by_transformers(family, SOURCES[2], whole)
        assert llm.stats().num_encoder_runs == 1
        states = llm.extract_hidden_states(child, HiddenStatesParams(side="encoder", positions="all", layers="norm"))
        assert llm.reset_prefix_cache()
    expected = encoder_states(family, SOURCES[2])[0].numpy()
    np.testing.assert_allclose(np.asarray(states.tensor)[0], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_an_engine_in_a_process_of_its_own_reads_the_same(family: str) -> None:
    """Tokens and features travel over the wire."""
    if family == "whisper":
        sources = [source_of(family, 0, seed) for seed in range(3)]
        prompts: list[Any] = [{"encoder_prompt": {"features": source.for_oracle()[0].numpy()}} for source in sources]
    else:
        sources = SOURCES
        prompts = [{"encoder_prompt": {"prompt_token_ids": tokens}, "decoder_prompt": [START]} for tokens in INPUTS]
    with engine(family, process=True) as llm:
        outputs = llm.generate(prompts * 2, greedy(), progress=False)
        assert llm.stats().num_encoder_runs == len(prompts)
    assert tokens_of(outputs) == [by_transformers(family, source, [START]) for source in sources] * 2
