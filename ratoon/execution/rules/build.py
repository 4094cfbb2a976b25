"""From what a request asks for to the rules of its row, at the end of its prompt. A new rule is a file and some lines
here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ratoon.core.params import GenerationParams, SamplingParams
from ratoon.execution.grammar.compiler import GrammarCompiler
from ratoon.execution.rules.allowed_ids import AllowedIds
from ratoon.execution.rules.bad_words import BadWords
from ratoon.execution.rules.base import NO_RULES, LogitsRule, RowRules
from ratoon.execution.rules.bias import LogitBias
from ratoon.execution.rules.forced_end import ForcedEnd
from ratoon.execution.rules.grammar import grammar_rule
from ratoon.execution.rules.min_tokens import MinTokens
from ratoon.execution.rules.ngrams import NoNGramsOf, NoRepeatedNGrams
from ratoon.execution.rules.penalties import Penalties
from ratoon.execution.rules.suppressed import SuppressedFirst, SuppressedTokens
from ratoon.execution.rules.timestamps import Timestamps
from ratoon.execution.rules.typical import Typical


def rules_of(
    params: GenerationParams,
    prompt_token_ids: Sequence[int],
    encoder_token_ids: Sequence[int] = (),
    grammars: GrammarCompiler | None = None,
) -> RowRules:
    """Without an encoder, the prompt is used as the encoder tokens. `grammars`: for structured output."""
    rules: list[LogitsRule] = []
    if params.structured_output is not None:
        assert grammars is not None, "an engine without grammars"
        ends_of_text = {*(params.stop_token_ids or ()), *(params.all_stop_token_ids or ())}
        rules.append(grammar_rule(params.structured_output, ends_of_text, prompt_token_ids, grammars))
    if params.allowed_token_ids is not None:
        rules.append(AllowedIds(_sorted_ids(params.allowed_token_ids)))
    if params.no_repeat_ngram_size:
        rules.append(NoRepeatedNGrams.behind(params.no_repeat_ngram_size, prompt_token_ids))
    if params.encoder_no_repeat_ngram_size:
        source = encoder_token_ids or prompt_token_ids
        rules.append(NoNGramsOf.behind(params.encoder_no_repeat_ngram_size, source, prompt_token_ids))
    if params.bad_words_token_ids:
        rules.append(BadWords.behind(params.bad_words_token_ids))
    if params.bad_words_ids:
        rules.append(BadWords.behind(params.bad_words_ids, prompt_token_ids))
    ends = {*(params.stop_token_ids or ()), *(params.all_stop_token_ids or ())}
    if isinstance(params, SamplingParams):
        ends.update(params.eos_token_ids or ())
    if params.min_tokens > 0 and ends:
        rules.append(MinTokens(_sorted_ids(ends), params.min_tokens))
    if params.suppressed_first_token_ids:
        rules.append(SuppressedFirst(_sorted_ids(params.suppressed_first_token_ids)))
    suppressed = {*(params.suppressed_token_ids or ())}
    if params.timestamps is not None:
        suppressed.add(params.timestamps.no_timestamps_token_id)
        rules.append(Timestamps(params.timestamps))
    if suppressed:
        rules.append(SuppressedTokens(_sorted_ids(suppressed)))
    if params.forced_eos_token_id and params.max_tokens is not None:
        rules.append(ForcedEnd(tuple(params.forced_eos_token_id), params.max_tokens))
    if params.logit_bias:
        rules.append(LogitBias.of(params.logit_bias))
    weights = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    if weights != (1.0, 0.0, 0.0):
        rules.append(Penalties.behind(weights, prompt_token_ids))
    if isinstance(params, SamplingParams) and params.typical_p < 1.0 and not params.is_greedy:
        rules.append(Typical.of(params))
    return RowRules(rules) if rules else NO_RULES


def _sorted_ids(token_ids: Iterable[int]) -> np.ndarray:
    """Each once, as int64."""
    return np.unique(np.fromiter(token_ids, np.int64))
