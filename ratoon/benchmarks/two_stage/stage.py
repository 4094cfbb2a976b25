"""Requests that are sent together and run to their end, and when each of their outputs came.

It works below `LLM.generate`, which gives no output before the last one, and no time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ratoon.api.llm import LLM
from ratoon.core.errors import EngineError
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import BeamSearchParams, GenerationParams, RequestOutputKind, SamplingParams
from ratoon.engine.front_end import Prepared


@dataclass(frozen=True, slots=True)
class Send:
    """One request: a prompt, or a continuation."""

    token_ids: list[int]
    params: GenerationParams
    parent: RequestOutput | None = None
    retain_kv: float | None = None


@dataclass(slots=True)
class TimedAnswer:
    times: list[float] = field(default_factory=list)  # of its outputs, in seconds since the requests were sent
    last: RequestOutput | None = None

    @property
    def output(self) -> RequestOutput:
        assert self.last is not None, "it has ended"
        return self.last


class StageRunner:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._ids = itertools.count()

    def run(self, sends: Sequence[Send]) -> list[TimedAnswer]:
        """Answers in the order of the requests. What is timed begins with the checking of the first request."""
        engine = self._llm.engine
        answers: dict[str, TimedAnswer] = {}
        begin = time.perf_counter()
        for send in sends:
            request_id = f"stage-{next(self._ids)}"
            answers[request_id] = TimedAnswer()
            engine.submit(self._prepare(request_id, send))
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - begin
            for output in outputs:
                assert isinstance(output, RequestOutput), "no vectors were requested"
                if output.error is not None:
                    raise EngineError(output.error)
                answers[output.request_id].times.append(now)
                answers[output.request_id].last = output
        return list(answers.values())

    def _prepare(self, request_id: str, send: Send) -> Prepared:
        engine = self._llm.engine
        if send.parent is None:
            return engine.prepare(request_id, send.token_ids, send.params, retain_kv=send.retain_kv)
        root = engine.output_processor.find_root(send.parent.request_id)
        return engine.prepare_continuation(request_id, root, send.token_ids, send.params, retain_kv=send.retain_kv)


def sampling(num_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def beam_search(width: int, num_tokens: int) -> BeamSearchParams:
    """All beams, and an output after every step, the first of which tells when stage 2 has something to show."""
    return BeamSearchParams(
        beam_width=width,
        n=width,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
