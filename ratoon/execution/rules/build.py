"""From what a request asks for to the rules of its row, at the end of its prompt. A new rule is a file and a line
here."""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.core.params import SamplingParams
from ratoon.execution.rules.bad_words import BadWords
from ratoon.execution.rules.base import RowRules, TokenRule
from ratoon.execution.rules.forced_end import ForcedEnd
from ratoon.execution.rules.ngrams import NoNGramsOf, NoRepeatedNGrams
from ratoon.execution.timestamps import TextSoFar


def rules_of(
    params: SamplingParams, prompt_token_ids: Sequence[int], encoder_token_ids: Sequence[int] = ()
) -> RowRules | None:
    """None for a row without any. A model without an encoder has no encoder tokens; its prompt stands for them."""
    rules: list[TokenRule] = []
    if params.forced_eos_token_id and params.max_tokens is not None:
        rules.append(ForcedEnd(tuple(params.forced_eos_token_id), params.max_tokens))
    if params.no_repeat_ngram_size:
        rules.append(NoRepeatedNGrams.behind(params.no_repeat_ngram_size, prompt_token_ids))
    if params.encoder_no_repeat_ngram_size:
        source = encoder_token_ids or prompt_token_ids
        rules.append(NoNGramsOf.behind(params.encoder_no_repeat_ngram_size, source, prompt_token_ids))
    if params.bad_words_token_ids:
        rules.append(BadWords.behind(params.bad_words_token_ids))
    if params.bad_words_ids:
        rules.append(BadWords.behind(params.bad_words_ids, prompt_token_ids))
    text = None if params.timestamps is None else TextSoFar(params.timestamps)
    return RowRules(tuple(rules), text) if rules or text is not None else None
