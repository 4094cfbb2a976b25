"""What tests of beam searches and continuations ask of an engine, and compare: numbers, to the bit."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import msgspec

from ratoon import LLM, BeamSearchParams, RequestOutput, RequestOutputKind
from ratoon.core.params import GenerationParams
from ratoon.engine.front_end import Prepared

Numbers = list[tuple[Any, ...]]  # everything that a caller can see of an answer, without times and cache figures


def numbers_of(output: RequestOutput) -> Numbers:
    assert output.error is None
    return [
        (list(choice.token_ids), choice.finish_reason, choice.stop_reason, choice.score, choice.cumulative_logprob)
        for choice in output.outputs
    ]


def whole(output: RequestOutput, choice: int = 0) -> list[int]:
    """The tokens of a choice with the prompt before it."""
    assert output.prompt_token_ids is not None
    return output.prompt_token_ids + list(output.outputs[choice].token_ids)


def num_computed(llm: LLM) -> int:
    """The runner's own count."""
    return llm._client.core.executor._worker.runner.num_computed_tokens


def start(llm: LLM, prompt: Sequence[int], params: GenerationParams, retain_kv: float | None = None) -> RequestOutput:
    (output,) = llm.generate(list(prompt), params, retain_kv=retain_kv, progress=False)
    return output


def afresh(llm: LLM, prompt: Sequence[int], params: GenerationParams) -> Numbers:
    """With nothing cached and nothing leased."""
    assert llm.reset_prefix_cache()
    return numbers_of(start(llm, prompt, params))


def open_search(
    llm: LLM,
    name: str,
    prompt: list[int],
    params: BeamSearchParams,
    parent: RequestOutput | None = None,
    retain_kv: float | None = None,
) -> Generator[RequestOutput, None, None]:
    """A search behind a prompt, or behind a parent and a prompt, that gives an output for every step."""
    params = msgspec.structs.replace(params, output_kind=RequestOutputKind.CUMULATIVE)
    processor = llm.engine.input_processor
    if parent is None:
        request = processor.process(name, prompt, params, retain_kv=retain_kv)
    else:
        root = llm.engine.output_processor.find_root(parent.request_id)
        request = processor.process_continuation(name, root, prompt, params, retain_kv=retain_kv)
    return llm.engine.run([Prepared(request)])
