"""Scores of pairs of texts: which prompts a model has to read for them, and the scores that its answers make.

A cross-encoder reads both texts at once, and its head gives the score. A model that gives vectors reads each text
alone; the score is the cosine of the two. LLM and the server run the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratoon.core.config import ModelConfig
from ratoon.core.errors import EngineError, RequestError
from ratoon.core.outputs import ClassificationOutput, EmbeddingOutput, RerankOutput, ScoringOutput
from ratoon.core.params import PoolingParams
from ratoon.engine.input.pairs import TO_MODEL_LENGTH, PairEncoder, find_limit

QUERY, DOCUMENT = "query", "document"  # names of prompts that models for retrieval have


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The prompts that are run for scores, and how scores are read off their results."""

    prompts: list[Any]
    params: PoolingParams
    fields: list[str]  # what errors call the prompts
    read: Callable[[Sequence[Any]], list[float]]  # the vectors of the prompts, in order → the scores


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    instruction: str | None = None  # what a document has to do with a query, for models with a template
    truncate: int | None = None  # cut pairs to so many tokens, or -1: to the model's length; None: refuse longer ones
    max_document_tokens: int | None = None  # cut documents before that
    activation: str | None = None  # of the head's logit; None: the model's own


def verify_scores(config: ModelConfig) -> None:
    """RequestError: the model gives no scores, with what it can."""
    head = config.classifier
    if config.encoder is not None:
        raise RequestError("model", "has an encoder and a decoder: it gives no scores", "a model that gives scores")
    if head is None and config.generates:
        problem = "has no head that scores pairs of texts: it generates text and gives vectors"
        raise RequestError("model", problem, "a reranker, or an embedding model")
    if head is not None and len(head.labels) != 1:
        problem = f"its head has {len(head.labels)} labels, and that of a reranker has one: it classifies texts"
        raise RequestError("model", problem, "classify, or a model whose head has one label")


def plan_scores(
    config: ModelConfig,
    tokenizer: Any,
    max_model_len: int,
    model_prompts: Mapping[str, str],
    pairs: Sequence[tuple[str, str]],
    fields: Sequence[str],  # what errors call the pairs
    options: ScoreOptions,
) -> ScorePlan:
    verify_scores(config)
    for (query, document), field in zip(pairs, fields, strict=True):
        for text in (query, document):
            if not isinstance(text, str):
                raise RequestError(field, f"{type(text).__name__} is no text", "a pair of texts")
    if config.classifier is not None:
        encoder = PairEncoder(config, tokenizer, max_model_len)
        prompts = encoder.encode(
            pairs, fields, options.instruction, options.truncate, options.max_document_tokens
        )  # fmt: skip
        activation = options.activation or config.classifier.score_activation
        params = PoolingParams(classify=True, activation=activation)
        return ScorePlan(list(prompts), params, list(fields), lambda found: [float(one[0]) for one in found])
    return _plan_cosines(tokenizer, max_model_len, model_prompts, pairs, fields, options)


def _plan_cosines(
    tokenizer: Any,
    max_model_len: int,
    model_prompts: Mapping[str, str],
    pairs: Sequence[tuple[str, str]],
    fields: Sequence[str],
    options: ScoreOptions,
) -> ScorePlan:
    """Each text is read once, however many pairs it is in."""
    for name in ("instruction", "activation"):
        if getattr(options, name) is not None:
            raise RequestError(name, "the model scores by the cosine of vectors", "None")
    places: dict[tuple[str, str], int] = {}
    names: list[str] = []
    for (query, document), field in zip(pairs, fields, strict=True):
        for key in ((QUERY, query), (DOCUMENT, document)):
            if key not in places:
                places[key] = len(places)
                names.append(field)
    if tokenizer is None:
        raise RequestError("model", "no tokenizer is loaded, and texts need one", "skip_tokenizer=False")
    limit = find_limit(options.truncate, max_model_len)
    prompts = []
    for (kind, text), field in zip(places, names, strict=True):
        whole = model_prompts.get(kind, "") + text
        limits = [] if options.truncate is None else [limit]
        if kind == DOCUMENT and options.max_document_tokens is not None:
            limits.append(options.max_document_tokens)
        if not limits and (num_tokens := tokenizer.refuse_early(whole, limit)) is not None:
            raise _too_long(field, f"at least {num_tokens}", limit)
        ids = tokenizer.encode_beginning(whole, min(limits)) if limits else tokenizer.encode(whole)
        if not ids:
            raise RequestError(field, "is empty", "at least one token")
        if len(ids) > max_model_len:
            raise _too_long(field, str(len(ids)), limit)
        prompts.append({"prompt_token_ids": ids})
    indices = [(places[QUERY, query], places[DOCUMENT, document]) for query, document in pairs]

    def read(found: Sequence[Any]) -> list[float]:
        return [float(found[one] @ found[other]) for one, other in indices]

    return ScorePlan(prompts, PoolingParams(), names, read)


def _too_long(field: str, num_tokens: str, limit: int) -> RequestError:
    problem = f"has {num_tokens} tokens, and at most {limit} fit"
    return RequestError(field, problem, f"shorter texts, or truncate_prompt_tokens: {TO_MODEL_LENGTH}")


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document by its place in the list that was sent."""

    index: int
    score: float


def rank(scores: Sequence[float], top_n: int | None = None) -> list[Ranked]:
    """The documents by falling score; equal ones in the order that they have."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [Ranked(index, scores[index]) for index in order[:top_n]]


def verify_top_n(top_n: Any) -> None:
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
        raise RequestError("top_n", f"{top_n!r} is out of range", "at least 1, or None for all")


# ---- what LLM and AsyncLLM share ----


def with_prompt(known: Mapping[str, str], default: str | None, texts: Any, name: str | None) -> Any:
    """A text, or a list of prompts, of which texts stand behind the known one of this name. None: behind the default,
    if there is one. RequestError: there is none of this name, or what is asked for is no text."""
    if name is None and default is None:
        return texts
    if name is not None and name not in known:
        expected = f"one of {', '.join(known)}" if known else "None: the model's files have none"
        raise RequestError("prompt_name", f"{name!r} is unknown", expected)
    prefix = known[str(default) if name is None else name]
    if isinstance(texts, str):
        return prefix + texts
    is_list = isinstance(texts, Sequence)
    if name is not None and not (is_list and texts and all(isinstance(text, str) for text in texts)):
        raise RequestError("prompt_name", "stands before texts, and these are none", "texts, or None")
    return [prefix + text if isinstance(text, str) else text for text in texts] if is_list else texts


def pairs_of(text_1: Any, text_2: Any) -> tuple[list[tuple[str, str]], list[str]]:
    """The pairs of one text and each of several, or of each of several and its counterpart, and what errors call
    them."""
    firsts = [text_1] if isinstance(text_1, str) else list(text_1)
    seconds = [text_2] if isinstance(text_2, str) else list(text_2)
    if not seconds or len(firsts) not in (1, len(seconds)):
        problem = f"{len(firsts)} and {len(seconds)} texts are no pairs"
        raise RequestError("text_1", problem, "one for all, or one for each of text_2, of which there is one at least")
    pairs = list(zip(firsts if len(firsts) > 1 else firsts * len(seconds), seconds))
    return pairs, [f"text_2[{index}]" for index in range(len(pairs))]


def document_pairs(query: str, documents: Any, top_n: Any) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns the pairs of a query and each document, and how errors name them."""
    verify_top_n(top_n)
    if isinstance(documents, str) or not documents:
        raise RequestError("documents", "is no list of texts, or an empty one", "a list of at least one text")
    return [(query, one) for one in documents], [f"documents[{index}]" for index in range(len(documents))]


def label_output(output: EmbeddingOutput, config: ModelConfig) -> ClassificationOutput:
    """What the head has made of a text, with the name of the most probable label."""
    assert config.classifier is not None
    probs = None if output.embedding is None else output.embedding.tolist()
    label = None if probs is None else config.classifier.labels[probs.index(max(probs))]
    ids = [token % config.vocab_size for token in output.prompt_token_ids]
    return ClassificationOutput(output.request_id, ids, probs, label, output.metrics, output.error, output.refusal)


def score_outputs(plan: ScorePlan, outputs: Sequence[EmbeddingOutput], num_pairs: int) -> list[ScoringOutput]:
    """The scores of pairs, of which some may have failed."""
    failed = next((output.error for output in outputs if output.error is not None), None)
    if failed is None:
        return [ScoringOutput(score) for score in plan.read([output.embedding for output in outputs])]
    if len(outputs) != num_pairs:  # texts that several pairs have
        return [ScoringOutput(None, failed)] * num_pairs
    return [
        ScoringOutput(None, output.error) if output.error else ScoringOutput(plan.read([output.embedding])[0])
        for output in outputs
    ]


def ranked_outputs(documents: Sequence[str], outputs: Sequence[ScoringOutput], top_n: int | None) -> list[RerankOutput]:
    """EngineError: one of the documents failed."""
    scores = []
    for index, output in enumerate(outputs):
        if output.score is None:
            raise EngineError(f"documents[{index}]: {output.error}")
        scores.append(output.score)
    return [RerankOutput(one.index, one.score, documents[one.index]) for one in rank(scores, top_n)]
