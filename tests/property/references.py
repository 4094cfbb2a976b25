"""A model without weights: each next token, text, vector and state is a number made of the whole prefix.

The prefix of a sequence begins with what its encoder reads, where it has one: another input, another text.
"""

from __future__ import annotations

from array import array

from ratoon.core.encoder import EncoderInput
from ratoon.core.outputs import BeamCandidates, LogprobsLists
from ratoon.core.params import BeamSearchParams, GenerationParams, PoolingParams, SamplingParams
from ratoon.core.request import EngineCoreRequest, Extraction
from ratoon.core.wire import WireTensor
from ratoon.scheduling.beams import BeamSearch, Hypothesis
from tests.property.extractions import states_of
from tests.property.media import value_at


def start_of(encoder_input: EncoderInput | None) -> int:
    """The prefix before the first token."""
    return 0 if encoder_input is None else int.from_bytes(encoder_input.content_hash[:7], "little")


def extend_prefix(prefix: int, token: int) -> int:
    return hash((prefix, token))


def prefixes_of(request: EngineCoreRequest) -> list[int]:
    """The prefix that ends with each token of its prompt."""
    prefixes: list[int] = []
    for position, token in enumerate(request.prompt_token_ids):
        before = prefixes[-1] if prefixes else start_of(request.encoder_input)
        prefixes.append(extend_prefix(before, value_at(token, position, request.mm_features)))
    return prefixes


def next_token(prefix: int, seed: int, num_output_tokens: int, params: SamplingParams, vocabulary: int) -> int:
    token = hash((prefix, seed, 4)) % vocabulary
    stops = params.all_stop_token_ids or []
    while token in stops and num_output_tokens < params.min_tokens:
        token = (token + 1) % vocabulary
    return token


def reference_tokens(request: EngineCoreRequest, seed: int, max_total_tokens: int, vocabulary: int) -> list[int]:
    """The expected result of one choice, computed alone."""
    prompt, params = request.prompt_token_ids, request.params
    prefix = prefixes_of(request)[-1]
    output: list[int] = []
    while len(prompt) + len(output) < max_total_tokens:
        token = next_token(prefix, seed, len(output), params, vocabulary)
        output.append(token)
        prefix = extend_prefix(prefix, token)
        if token in (params.all_stop_token_ids or []):
            break
    return output


def forbidden_tokens(params: GenerationParams, prefix: int, num_tokens: int, vocabulary: int) -> set[int]:
    """The stop tokens, until there are `min_tokens`; within a grammar, all but those that it allows after this prefix:
    often one or two, so that a search becomes narrower, and wider again."""
    forbidden = set(params.all_stop_token_ids or []) if num_tokens < params.min_tokens else set()
    if params.structured_output is not None:
        num_allowed = (1, 1, 2, vocabulary)[hash((prefix, 11)) % 4]
        by_chance = sorted(range(vocabulary), key=lambda token: hash((prefix, token, 13)))
        forbidden.update(by_chance[num_allowed:])
    return forbidden


def best_candidates(
    prefixes: list[int],
    scores: list[float],
    num_candidates: int,
    params: GenerationParams,
    num_tokens: int,
    vocabulary: int,
) -> BeamCandidates:
    """Of beams with these prefixes and so many tokens: what a model would say that finds some tokens equally good."""
    found = []
    for beam, (prefix, score) in enumerate(zip(prefixes, scores)):
        forbidden = forbidden_tokens(params, prefix, num_tokens, vocabulary)
        for token in range(vocabulary):
            logprob = float("-inf") if token in forbidden else -(hash((prefix, token, 7)) % 40) / 8
            found.append((score + logprob, beam, token))
    found.sort(key=lambda candidate: (-candidate[0], candidate[1:]))
    best = found[:num_candidates]
    return BeamCandidates([c[0] for c in best], [c[1] for c in best], [c[2] for c in best])


def reference_texts(
    request: EngineCoreRequest, params: BeamSearchParams, max_total_tokens: int, vocabulary: int
) -> list[Hypothesis]:
    """The expected result of a beam search, computed alone."""
    search = BeamSearch(params, max_total_tokens - len(request.prompt_token_ids))
    prefixes = prefixes_of(request)[-1:]
    while not search.done:
        found = best_candidates(prefixes, search.scores, search.num_candidates, params, search.num_tokens, vocabulary)
        moves = search.advance(found.scores, found.beams, found.token_ids)
        prefixes = [extend_prefix(prefixes[parent], token) for parent, token in zip(moves.parents, moves.tokens)]
    return search.hypotheses()


def reference_states(request: EngineCoreRequest, extraction: Extraction) -> WireTensor:
    """What must be read out of a sequence, or of what its encoder reads."""
    if extraction.of_encoder:
        assert request.encoder_input is not None
        return encoder_states(request.encoder_input, extraction.positions, extraction.layers, extraction.dtype)
    prefixes = prefixes_of(request)
    return states_of([prefixes[position] for position in extraction.positions], extraction.layers, extraction.dtype)


def encoder_states(encoder_input: EncoderInput, positions: list[int], layers: list[int], dtype: str) -> WireTensor:
    start = start_of(encoder_input)
    return states_of([hash((start, position, 3)) for position in positions], layers, dtype)


def reference_vector(request: EngineCoreRequest, params: PoolingParams) -> WireTensor:
    """What a prompt's vector must be: a number for each row that went into it, in order."""
    prefixes = prefixes_of(request)
    return vector_of(prefixes if params.pooling == "mean" else prefixes[-1:])


def vector_of(numbers: list[int]) -> WireTensor:
    return WireTensor("int64", (len(numbers),), array("q", numbers).tobytes())


def logprobs_of(tokens: list[int]) -> LogprobsLists:
    return LogprobsLists([[token] for token in tokens], [[-float(token)] for token in tokens], [1] * len(tokens))
