"""The stages as requests to an engine in this process, all conversations of a stage at once.

Every way begins with an empty KV cache, so that it finds nothing of the previous one. What happens between the stages
is not timed: stage 2 begins when the last stage 1 has ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ratoon.api.llm import LLM
from ratoon.benchmarks.loadgen.datasets import TokenPrompts
from ratoon.benchmarks.loadgen.measures import RequestRecord
from ratoon.benchmarks.two_stage.conversations import Conversation
from ratoon.benchmarks.two_stage.settings import TwoStageSettings
from ratoon.benchmarks.two_stage.stage import Send, StageRunner, TimedAnswer, beam_search, sampling
from ratoon.benchmarks.two_stage.trips import WAYS, Beam, Between, Trip, Turn, Way
from ratoon.core.errors import EngineError
from ratoon.core.outputs import RequestOutput

LEASE_SECONDS = 600.0


class EngineTransport:
    ways = WAYS

    def __init__(self, llm: LLM, settings: TwoStageSettings) -> None:
        self.prompts = TokenPrompts(list(range(llm.source.config.vocab_size)))
        self._llm = llm
        self._settings = settings
        self._stages = StageRunner(llm)
        self._random = random.Random(settings.seed)
        self._lease_seconds = min(LEASE_SECONDS, llm.config.cache.max_lease_seconds)

    def take_turn(
        self, way: Way, conversations: Sequence[Conversation], occasion: str, on_end: Callable[[Trip], None]
    ) -> Turn:
        self._forget()
        parents = self._stages.run([self._first(way, one) for one in conversations])
        if way.between is Between.FORGET:
            self._forget()
        elif way.between is Between.FILL:
            self._fill_memory()
        before = self._num_runner_tokens()
        children = self._stages.run(
            [self._second(way, parent.output, one.suffix) for parent, one in zip(parents, conversations)]
        )
        after = self._num_runner_tokens()
        stage1_seconds, stage2_seconds = (max(one.times[-1] for one in answers) for answers in (parents, children))
        trips: dict[int, Trip] = {}
        for index, (parent, child) in enumerate(zip(parents, children)):
            trips[index] = _trip(index, parent, child, stage1_seconds)
            on_end(trips[index])
        num_computed = None
        if before is not None and after is not None:
            num_computed = after - before - self._num_beam_rows(len(conversations))
        return Turn(trips, stage1_seconds + stage2_seconds, runner_tokens=num_computed)

    def _first(self, way: Way, conversation: Conversation) -> Send:
        turn = conversation.turn
        assert isinstance(turn.prompt, list), "prompts of an engine in this process are token ids"
        params = sampling(turn.output_len, conversation.seed)
        return Send(turn.prompt, params, retain_kv=self._lease_seconds if way.continues else None)

    def _second(self, way: Way, parent: RequestOutput, suffix: list[int]) -> Send:
        params = beam_search(self._settings.beam_width, self._settings.beam_tokens)
        if way.continues:
            return Send(suffix, params, parent=parent)
        assert parent.prompt_token_ids is not None
        return Send([*parent.prompt_token_ids, *parent.outputs[0].token_ids, *suffix], params)

    def _forget(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise EngineError("the KV cache can't be emptied: something still holds parts of it")

    def _fill_memory(self) -> None:
        """Other requests, one after another, until each block that is free now has been written to.

        The free list hands out what was used longest ago, so a block's turn comes before any has its second.
        """
        facts = self._llm.describe()
        num_usable = facts["num_blocks"] - 1  # block 0 is reserved
        num_free = num_usable - round(self._llm.stats().kv_usage * num_usable)
        longest = (self._llm.config.max_model_len or 0) - 1
        num_left = num_free
        while num_left > 0:
            # Whole blocks: what is half full would be handed out again before the others. And one is left for the next
            # request, for the engine wants room for an answer as well.
            columns = min(num_left, num_free - 1) // facts["kv_groups"]
            columns = max(1, min(columns, longest // facts["block_size"]))
            prompt = self.prompts.make(columns * facts["block_size"], self._random)
            self._stages.run([Send(prompt, sampling(1, seed=0))])
            num_left -= columns * facts["kv_groups"]

    def _num_beam_rows(self, num_conversations: int) -> int:
        """The tokens that stage 2 computes after its prompts: each beam's tokens but the last."""
        return num_conversations * self._settings.beam_width * (self._settings.beam_tokens - 1)

    def _num_runner_tokens(self) -> int | None:
        core = getattr(self._llm.engine.client, "core", None)  # an engine in this process
        return None if core is None else core.executor.stats.num_computed_tokens


def _trip(index: int, parent: TimedAnswer, child: TimedAnswer, stage1_seconds: float) -> Trip:
    output, found = parent.output.outputs[0], child.output
    num_cached, source = found.num_cached_tokens or 0, "prefix_cache" if found.num_cached_tokens else "recomputed"
    if found.continuation is not None:
        num_cached, source = found.continuation.inherited_tokens, found.continuation.source
    first = _record(index, 0, parent, 0.0, parent.output.num_cached_tokens or 0)
    second = _record(index, 1, child, stage1_seconds, num_cached)
    beams = [Beam(tuple(choice.token_ids), choice.score or 0.0) for choice in found.outputs]
    return Trip(first, second, list(output.token_ids), beams, source=source)


def _record(index: int, stage: int, answer: TimedAnswer, began: float, num_cached_tokens: int) -> RequestRecord:
    """Records the first and the last output of an answer: latencies are made of those."""
    output = answer.output
    num_tokens = sum(len(choice.token_ids) for choice in output.outputs)
    num_first = 0 if stage else 1  # the first output of a search has no tokens to keep
    return RequestRecord(
        session=index,
        turn=stage,
        scheduled=began,
        started=began,
        ended=began + answer.times[-1],
        chunk_times=[began + answer.times[0], began + answer.times[-1]],
        chunk_tokens=[num_first, num_tokens - num_first],
        num_prompt_tokens=len(output.prompt_token_ids or ()),
        num_cached_tokens=num_cached_tokens,
        num_output_tokens=num_tokens,
        finish_reason=output.outputs[0].finish_reason,
    )
