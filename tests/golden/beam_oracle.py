"""Beam search by transformers, and how its texts are compared with ours."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from transformers.generation import GenerationConfig, GenerationMode, LogitsProcessorList

from ratoon.core.outputs import RequestOutput
from ratoon.core.params import BeamSearchParams
from tests.golden.engines import tiny_model
from tests.golden.tiny_models import VOCAB_SIZE

TOLERANCE = 1e-4  # of a score
NOISE = 2e-5  # texts whose scores are closer than this may change places

PENALTIES = [-1.0, 0.0, 0.5, 1.0, 2.0]
EARLY_STOPPING: list[Any] = [False, True, "never"]


class Text(NamedTuple):
    token_ids: list[int]
    score: float


def texts_of(output: RequestOutput) -> list[Text]:
    """The choices of a beam search of ours."""
    assert output.error is None
    texts = []
    for choice in output.outputs:
        assert choice.score is not None
        texts.append(Text(list(choice.token_ids), choice.score))
    return texts


@torch.inference_mode()
def oracle_search(
    oracle: Any,
    prompt: Sequence[int],
    params: BeamSearchParams,
    stop_token_ids: list[int] | None,
    logits_processor: LogitsProcessorList | None = None,
    **settings: Any,  # of `generate`
) -> list[Text]:
    with pytest.MonkeyPatch.context() as patch:
        # It would take a width of 1 for a greedy search, which has no scores.
        patch.setattr(GenerationConfig, "get_generation_mode", lambda *_, **__: GenerationMode.BEAM_SEARCH)
        found = oracle.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            num_beams=params.beam_width, num_return_sequences=params.n, max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None, length_penalty=params.length_penalty,
            early_stopping=params.early_stopping, eos_token_id=stop_token_ids, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True, logits_processor=logits_processor,
            **settings,
        )  # fmt: skip
    lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
    return [
        Text(row[len(prompt) : len(prompt) + length], score)
        for row, length, score in zip(found.sequences.tolist(), lengths, found.sequences_scores.tolist())
    ]


def assert_same_texts(ours: Sequence[Text], theirs: Sequence[Text], what: object) -> None:
    """The same texts and scores in the same order, up to the noise that two ways to compute the model make."""
    assert [text.score for text in ours] == pytest.approx([text.score for text in theirs], abs=TOLERANCE), what
    expected = {tuple(text.token_ids) for text in theirs}
    for our, their in zip(ours, theirs):
        if our.token_ids != their.token_ids:
            assert tuple(our.token_ids) in expected and abs(our.score - their.score) < NOISE, (what, ours, theirs)


@functools.cache
def likely_tokens(family: str, prompt: tuple[int, ...]) -> list[int]:
    """Tokens that the best texts behind this prompt hold, the most frequent first."""
    texts = oracle_search(tiny_model(family).oracle, prompt, BeamSearchParams(beam_width=8, n=8, max_tokens=8), None)
    tokens = [token for text in texts for token in text.token_ids]
    return sorted(set(tokens), key=lambda token: (-tokens.count(token), token))


def stop_tokens(kind: str, family: str, prompt: list[int], chance: random.Random) -> list[int] | None:
    """Some that end a search early, late, in many ways or never."""
    likely = likely_tokens(family, tuple(prompt))
    if kind == "likely":
        return [chance.choice(likely[:6])]
    if kind == "several":
        return chance.sample(likely, min(len(likely), chance.randint(2, 4)))
    if kind == "unlikely":
        return [chance.choice([token for token in range(VOCAB_SIZE) if token not in likely])]
    return None
