"""The run: rounds in which the variants take turns with the same conversations, and the records of each.

Every variant begins with an empty KV cache, so that it finds nothing of the previous one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from ratoon.api.llm import LLM
from ratoon.benchmarks.two_stage.settings import TwoStageSettings
from ratoon.benchmarks.two_stage.stage import Send, StageRunner, TimedAnswer
from ratoon.benchmarks.two_stage.ways import WAYS, Beam, Between, Way
from ratoon.core.errors import EngineError
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import BeamSearchParams, RequestOutputKind, SamplingParams

LEASE_SECONDS = 600.0
WARM_UP_TOKENS = 4


class Turn(msgspec.Struct, kw_only=True):
    """One way in one round. Lists have an entry for each conversation."""

    stage1_seconds: float
    ttft_seconds: list[float]  # of stage 2: to the result of its first step
    stage2_seconds: float
    computed_tokens: list[int]  # of stage 2's prompt, by its output
    inherited_tokens: list[int]
    sources: list[str]
    runner_tokens: int | None  # the runner's own count over all conversations; None: not available
    answers: list[list[int]]  # of stage 1
    beams: list[list[Beam]]  # of stage 2, best first

    @property
    def total_seconds(self) -> float:
        return self.stage1_seconds + self.stage2_seconds


class Conversation(msgspec.Struct, frozen=True):
    prompt: list[int]
    suffix: list[int]
    seed: int


Round = dict[str, Turn]  # by the way's key


class TwoStageExperiment:
    def __init__(self, llm: LLM, settings: TwoStageSettings) -> None:
        self._llm = llm
        self._settings = settings
        self._stages = StageRunner(llm)
        self._random = random.Random(settings.seed)
        self._lease_seconds = min(LEASE_SECONDS, llm.config.cache.max_lease_seconds)

    def run(self, on_turn: Callable[[], None] = lambda: None) -> list[Round]:
        """All rounds. Conversations are new in each, and another way goes first."""
        self._warm_up()
        rounds = []
        for index in range(self._settings.rounds):
            conversations = [self._conversation() for _ in range(self._settings.requests)]
            turns: Round = {}
            for offset in range(len(WAYS)):
                way = WAYS[(index + offset) % len(WAYS)]
                turns[way.key] = self._take_turn(way, conversations, self._settings.stage1_tokens)
                on_turn()
            rounds.append({way.key: turns[way.key] for way in WAYS})
        return rounds

    def _warm_up(self) -> None:
        """Both kinds of stage 2, with short answers before it."""
        conversations = [self._conversation() for _ in range(self._settings.requests)]
        for way in WAYS[1:3]:
            self._take_turn(way, conversations, min(WARM_UP_TOKENS, self._settings.stage1_tokens))

    def _conversation(self) -> Conversation:
        settings = self._settings
        return Conversation(
            self._token_ids(settings.prompt_tokens),
            self._token_ids(settings.suffix_tokens),
            self._random.getrandbits(31),
        )

    def _token_ids(self, count: int) -> list[int]:
        vocab_size = self._llm.source.config.vocab_size
        return [self._random.randrange(vocab_size) for _ in range(count)]

    def _take_turn(self, way: Way, conversations: Sequence[Conversation], stage1_tokens: int) -> Turn:
        self._forget()
        retain_kv = self._lease_seconds if way.continues else None
        parents = self._stages.run(
            [Send(one.prompt, sampling(stage1_tokens, one.seed), retain_kv=retain_kv) for one in conversations]
        )
        if way.between is Between.FORGET:
            self._forget()
        elif way.between is Between.FILL:
            self._fill_memory()
        before = self._num_runner_tokens()
        children = self._stages.run(
            [self._second(way, parent.output, one.suffix) for parent, one in zip(parents, conversations)]
        )
        after = self._num_runner_tokens()
        return Turn(
            stage1_seconds=_seconds(parents),
            ttft_seconds=[child.times[0] for child in children],
            stage2_seconds=_seconds(children),
            computed_tokens=[_num_prompt(child.output) - _num_cached(child.output) for child in children],
            inherited_tokens=[_num_cached(child.output) for child in children],
            sources=[_source(child.output) for child in children],
            runner_tokens=None if before is None or after is None else after - before - self._num_beam_rows(),
            answers=[list(parent.output.outputs[0].token_ids) for parent in parents],
            beams=[_beams(child.output) for child in children],
        )

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
            self._stages.run([Send(self._token_ids(columns * facts["block_size"]), sampling(1, seed=0))])
            num_left -= columns * facts["kv_groups"]

    def _num_beam_rows(self) -> int:
        """The tokens that stage 2 computes after its prompts: each beam's tokens but the last."""
        settings = self._settings
        return settings.requests * settings.beam_width * (settings.beam_tokens - 1)

    def _num_runner_tokens(self) -> int | None:
        core = getattr(self._llm.engine.client, "core", None)  # an engine in this process
        count: int | None = getattr(getattr(core, "executor", None), "num_computed_tokens", None)
        return count


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


def _seconds(answers: Sequence[TimedAnswer]) -> float:
    return max(answer.times[-1] for answer in answers)


def _num_prompt(output: RequestOutput) -> int:
    return len(output.prompt_token_ids or ())


def _num_cached(output: RequestOutput) -> int:
    return output.num_cached_tokens or 0 if output.continuation is None else output.continuation.inherited_tokens


def _source(output: RequestOutput) -> str:
    if output.continuation is not None:
        return output.continuation.source
    return "prefix_cache" if output.num_cached_tokens else "recomputed"


def _beams(output: RequestOutput) -> list[Beam]:
    return [Beam(tuple(choice.token_ids), choice.score or 0.0) for choice in output.outputs]
