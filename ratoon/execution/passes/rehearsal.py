"""Requests of the usual kinds that are run once in moments without work, before the first real one of their kind comes:
what a first step loads, allocates and captures is there then.

They are hand-written plans over the null block, whose results are not read: the scheduler does not know of them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import BeamSearchParams, GenerationParams, SamplingParams
from ratoon.core.plan import BeamStep, BlockCopy, CachedRequestData, NewRequestData, SchedulerOutput
from ratoon.core.structured import StructuredOutput

if TYPE_CHECKING:
    from ratoon.execution.model_runner import ModelRunner

logger = logging.getLogger(__name__)

NAME = "rehearsal"  # a request's has eight random characters behind it
PROMPT, LONG_PROMPT = 128, 1900  # tokens
CONTINUED, NEW = 700, 5  # tokens of a root, and behind it
NUM_DECODES = 3  # of which the first runs as it is, and the second is captured
NUM_CHOICES = 4
NUM_BEAMS = 8


class Rehearsal:
    """The kinds that are left, the likeliest first. For models without an encoder."""

    def __init__(self, runner: ModelRunner, max_num_tokens: int) -> None:
        """`max_num_tokens`: of a step."""
        self._runner = runner
        rows = runner.input_batch
        self._longest = rows.max_model_len - NUM_DECODES - 1
        self._block_sizes = rows.block_sizes.tolist()
        filtered = SamplingParams(temperature=0.8, top_p=0.9, top_k=40)
        greedy, prompt = SamplingParams(temperature=0.0), min(PROMPT, self._longest, max_num_tokens)
        structured = SamplingParams(temperature=0.0, structured_output=StructuredOutput(json_object=True))
        self._structured = partial(self._generate, structured, prompt)
        self._kinds = deque(
            [
                partial(self._generate, greedy, prompt),
                partial(self._generate, filtered, prompt),
                partial(self._continue, greedy, min(CONTINUED, self._longest - NEW)),
                partial(self._generate, SamplingParams(temperature=0.8), prompt),
                partial(self._search, prompt),
                partial(self._generate, greedy, min(LONG_PROMPT, self._longest, max_num_tokens)),
                partial(self._choices, prompt),
                partial(self._generate, SamplingParams(temperature=0.0, logprobs=5), prompt),
                partial(self._generate, SamplingParams(temperature=0.0, presence_penalty=0.5), prompt),
            ]
        )

    def expect_grammars(self) -> None:
        """The library of grammars is loaded: a request whose text must match one can be run too."""
        self._kinds.append(self._structured)

    @property
    def can_go_on(self) -> bool:
        """Whether a kind is left, and no request has a row."""
        return bool(self._kinds) and not self._runner.input_batch.row_of

    def run_next(self) -> bool:
        """Run a request of the next kind from its prompt to its end, and wait for it. False: it could not be run, and
        no other will be."""
        runner, num_computed = self._runner, self._runner.num_computed_tokens
        try:
            for plan in self._kinds.popleft()():
                runner.execute_model(plan)
                output = runner.sample_tokens()
                if not isinstance(output, ModelRunnerOutput):
                    output.get_output()
        except Exception:
            self._kinds.clear()
            logger.warning("a request could not be run in advance", exc_info=True)
            return False
        finally:
            runner.execute_model(SchedulerOutput(finished_req_ids=list(runner.input_batch.row_of)))
            runner.sample_tokens()
            runner.num_computed_tokens = num_computed
        return True

    # ---- kinds: the plans of one request ----

    def _generate(self, params: SamplingParams, num_tokens: int) -> Iterator[SchedulerOutput]:
        first = self._begin(NAME, params, num_tokens)
        first.sampled_req_ids = [NAME]
        yield first
        yield from self._decode([NAME], num_tokens)

    def _continue(self, params: SamplingParams, num_computed: int) -> Iterator[SchedulerOutput]:
        """With a copy of the block that the root ends in, to the null block."""
        first = self._begin(NAME, params, NEW, num_computed)
        first.sampled_req_ids = [NAME]
        first.block_copies = [
            BlockCopy(NAME, group, num_computed // size, src=1, dst=0) for group, size in enumerate(self._block_sizes)
        ]
        yield first

    def _choices(self, num_tokens: int) -> Iterator[SchedulerOutput]:
        params = SamplingParams(temperature=0.8, n=NUM_CHOICES)
        children = [f"{NAME}#{choice}" for choice in range(1, NUM_CHOICES)]
        first = self._begin(NAME, params, num_tokens)
        first.sampled_req_ids, first.fanout = [NAME], {NAME: [(child, 0) for child in children]}
        yield first
        forked = self._decoding([NAME], num_tokens)
        for child in children:
            forked.scheduled_new_reqs.append(self._request(child, params, num_tokens, 1))
            forked.num_scheduled_tokens[child] = 1
        forked.sampled_req_ids += children
        forked.total_num_scheduled_tokens += len(children)
        yield forked
        yield from self._decode([NAME, *children], num_tokens + 1)

    def _search(self, num_tokens: int) -> Iterator[SchedulerOutput]:
        first = self._begin(NAME, BeamSearchParams(beam_width=NUM_BEAMS, max_tokens=NUM_DECODES + 1), num_tokens)
        first.beam_steps = [BeamStep(NAME, num_candidates=2 * NUM_BEAMS, scores=[0.0])]
        yield first
        for number in range(NUM_DECODES):
            columns = [(num_tokens + number) // size for size in self._block_sizes]
            step = BeamStep(
                NAME,
                num_tokens=1,
                num_computed_tokens=num_tokens + number,
                parents=[0] * NUM_BEAMS if number == 0 else list(range(NUM_BEAMS)),
                token_ids=[0] * NUM_BEAMS,
                first_columns=columns,
                block_ids=tuple([0] * NUM_BEAMS for _ in columns),
                num_candidates=2 * NUM_BEAMS,
                scores=[0.0] * NUM_BEAMS,
            )
            yield SchedulerOutput(beam_steps=[step], total_num_scheduled_tokens=NUM_BEAMS)

    # ---- plans ----

    def _begin(self, name: str, params: GenerationParams, num_tokens: int, num_computed: int = 0) -> SchedulerOutput:
        return SchedulerOutput(
            scheduled_new_reqs=[self._request(name, params, num_computed, num_tokens)],
            num_scheduled_tokens={name: num_tokens},
            total_num_scheduled_tokens=num_tokens,
        )

    def _request(self, name: str, params: GenerationParams, num_computed: int, num_tokens: int) -> NewRequestData:
        total = num_computed + num_tokens
        tables = tuple([0] * -(-(total + NUM_DECODES + 1) // size) for size in self._block_sizes)
        return NewRequestData(name, [0] * total, total, params, 0, tables, num_computed)

    def _decode(self, names: list[str], num_computed: int) -> Iterator[SchedulerOutput]:
        for number in range(NUM_DECODES):
            yield self._decoding(names, num_computed + number)

    def _decoding(self, names: list[str], num_computed: int) -> SchedulerOutput:
        count = len(names)
        return SchedulerOutput(
            scheduled_cached_reqs=CachedRequestData(list(names), [num_computed] * count, [None] * count),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            sampled_req_ids=list(names),
            total_num_scheduled_tokens=count,
        )
