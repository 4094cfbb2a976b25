"""Rules over the next token against transformers on random texts: forbidden tokens, n-grams that may not
repeat, a forced end, Whisper's timestamps."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import SamplingParams, TimestampRules
from ratoon.core.plan import BeamStep, NewRequestData
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.readers.beams import choose_candidates
from ratoon.execution.sampling.beam_rows import BeamRows
from ratoon.execution.sampling.sampler import Sampler
from ratoon.execution.sampling.sampling_rows import SamplingRows

VOCAB_SIZE = 60  # 30 words, the end, other special tokens, and 20 timestamps
END = 30
NO_TIMESTAMPS = 39
FIRST_TIMESTAMP = 40
PROMPT = [31, 33, 55]  # a timestamp in the prompt is none of the text's

Tensor = torch.Tensor


def timestamp_rules(max_initial_index: int | None = None) -> TimestampRules:
    return TimestampRules(
        first_token_id=FIRST_TIMESTAMP,
        no_timestamps_token_id=NO_TIMESTAMPS,
        end_token_id=END,
        max_initial_index=max_initial_index,
    )


def random_rules(chance: random.Random, weighed: bool = True) -> dict[str, Any]:
    """Fields of params: some, all or none. `weighed`: penalties and a bias may be among them."""
    fields: dict[str, Any] = {}
    if chance.random() < 0.6:
        fields["suppressed_token_ids"] = chance.sample(range(VOCAB_SIZE), chance.randint(1, 25))
    if chance.random() < 0.6:
        fields["suppressed_first_token_ids"] = chance.sample(range(VOCAB_SIZE), chance.randint(1, 5))
    if chance.random() < 0.7:
        fields["timestamps"] = timestamp_rules(chance.choice([None, 0, 1, 5, 1000]))
    if chance.random() < 0.4:
        fields["no_repeat_ngram_size"] = chance.choice([1, 2, 2, 3])
    if chance.random() < 0.4:
        fields["encoder_no_repeat_ngram_size"] = chance.choice([1, 2, 2, 3])
    if chance.random() < 0.4:
        fields["bad_words_ids"] = [
            [chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 3))] for _ in "abcdef"
        ]
        fields["bad_words_ids"] += [[token, chance.randrange(60)] for token in chance.sample(range(60), 40)]
    if chance.random() < 0.4:
        fields |= {"forced_eos_token_id": chance.choice([[END], [END, 31]]), "max_tokens": chance.choice([1, 2, 3, 6])}
    if chance.random() < 0.3:
        fields |= {"min_tokens": chance.choice([1, 2, 5]), "all_stop_token_ids": [END, 4]}
    if weighed and "timestamps" not in fields and chance.random() < 0.5:  # which transformers applies behind penalties
        fields["repetition_penalty"] = chance.choice([0.7, 1.3])
        if "forced_eos_token_id" not in fields:
            fields["logit_bias"] = {token: chance.uniform(-3, 3) for token in chance.sample(range(VOCAB_SIZE), 9)}
    return fields


def oracle(fields: dict[str, Any], num_prompt_tokens: int) -> LogitsProcessorList:
    """In the order of Whisper's `generate`."""
    processors = LogitsProcessorList()
    if "logit_bias" in fields:
        processors.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in fields["logit_bias"].items()}))
    if "repetition_penalty" in fields:
        processors.append(RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"]))
    if "no_repeat_ngram_size" in fields:
        processors.append(NoRepeatNGramLogitsProcessor(fields["no_repeat_ngram_size"]))
    if "encoder_no_repeat_ngram_size" in fields:
        source = torch.tensor([fields.get("encoder_token_ids", PROMPT)])
        processors.append(EncoderNoRepeatNGramLogitsProcessor(fields["encoder_no_repeat_ngram_size"], source))
    if "bad_words_ids" in fields:
        processors.append(NoBadWordsLogitsProcessor(fields["bad_words_ids"]))
    if "min_tokens" in fields:
        ends = fields["all_stop_token_ids"]
        processors.append(
            MinNewTokensLengthLogitsProcessor(num_prompt_tokens, fields["min_tokens"], ends, device="cpu")
        )
    if "suppressed_first_token_ids" in fields:
        tokens = fields["suppressed_first_token_ids"]
        processors.append(SuppressTokensAtBeginLogitsProcessor(tokens, num_prompt_tokens))
    if "suppressed_token_ids" in fields:
        processors.append(SuppressTokensLogitsProcessor(fields["suppressed_token_ids"]))
    if "timestamps" in fields:
        rules = fields["timestamps"]
        config: Any = SimpleNamespace(
            no_timestamps_token_id=rules.no_timestamps_token_id,
            eos_token_id=rules.end_token_id,
            max_initial_timestamp_index=rules.max_initial_index,
        )
        processors.append(WhisperTimeStampLogitsProcessor(config, num_prompt_tokens))
    if "forced_eos_token_id" in fields:  # last: what is forced goes before what is forbidden
        max_length = num_prompt_tokens + fields["max_tokens"]
        processors.append(ForcedEOSTokenLogitsProcessor(max_length, fields["forced_eos_token_id"]))
    return processors


def random_text(chance: random.Random) -> list[int]:
    """Any text, including ones that the rules would not allow."""
    kinds = chance.choice([[range(END)], [range(FIRST_TIMESTAMP, VOCAB_SIZE)], [range(END), range(40, 60), range(60)]])
    text = [chance.choice(chance.choice(kinds)) for _ in range(chance.choice([0, 0, 1, 1, 2, 2, 3, 5, 12]))]
    return text if chance.random() < 0.5 else [chance.choice([*PROMPT, *text]) for _ in text]  # with repeats


def random_logits(chance: random.Random, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(chance.getrandbits(40))
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator) * chance.choice([0.3, 1.0, 4.0])
    logits[:, FIRST_TIMESTAMP:] += chance.choice([-4.0, -1.0, 0.0, 2.0])
    return logits


def edited(rows: SamplingRows, logits: Tensor, slots: list[int]) -> Tensor:
    logits = logits.clone()
    rows.edit(logits, np.array(slots))
    return logits


# ---- sampled rows ----


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.one_in(3)
def test_sampled_rows_keep_the_rules_that_transformers_keeps(seed):
    chance = random.Random(seed)
    kinds = [random_rules(chance) for _ in range(12)]
    texts = [random_text(chance) for _ in kinds]
    rows = SamplingRows(len(kinds))
    for slot, (fields, text) in enumerate(zip(kinds, texts)):
        # Part of it is known from the start, as of a branch that resumes, and part is appended.
        split = chance.randint(0, len(text))
        rows.add(slot, SamplingParams(temperature=0.0, **fields), 0, PROMPT, text[:split])
        for token in text[split:]:
            rows.append_tokens(np.array([slot]), np.array([token]))
    logits = random_logits(chance, len(kinds))
    found = edited(rows, logits, list(range(len(kinds))))
    for slot, (fields, text) in enumerate(zip(kinds, texts)):
        expected = oracle(fields, len(PROMPT))(torch.tensor([[*PROMPT, *text]]), logits[slot : slot + 1])
        assert torch.equal(found[slot], expected[0]), (fields, text)


def test_random_texts_meet_every_rule():
    """The cases above cover every rule."""
    chance = random.Random(0)
    outcomes = set()
    for _ in range(500):
        text, logits = random_text(chance), random_logits(chance, 1)
        processed = oracle({"timestamps": timestamp_rules(5)}, 0)(torch.tensor([text], dtype=torch.long), logits)[0]
        possible = processed.isfinite()
        outcomes.add((bool(possible[:END].any()), bool(possible[END]), bool(possible[FIRST_TIMESTAMP:].any())))
    assert outcomes == {(True, True, True), (True, True, False), (False, True, True), (False, False, True)}


def test_a_row_keeps_the_rules_from_token_to_token():
    """Greedy texts, each token chosen by the sampler itself."""
    for seed in range(20):
        chance = random.Random(seed)
        fields = {**random_rules(chance, weighed=False), "timestamps": timestamp_rules(3)}
        rows = SamplingRows(1)
        rows.add(0, SamplingParams(temperature=0.0, **fields), 0, PROMPT, [])
        processors, text = oracle(fields, len(PROMPT)), list[int]()
        for _ in range(15):
            logits = random_logits(chance, 1)
            expected = processors(torch.tensor([[*PROMPT, *text]]), logits)[0]
            sampled = Sampler(rows).sample(logits, np.array([0]), rows.seeds[:1])
            if not expected.isfinite().any():
                assert sampled.bad_rows == [0]
                break
            [token] = sampled.to_numpy().tolist()
            assert token == int(expected.argmax())
            rows.append_tokens(np.array([0]), np.array([token]))
            text.append(token)


def test_rows_without_rules_are_not_touched_by_those_beside_them():
    chance = random.Random(3)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"timestamps": timestamp_rules(1), "suppressed_token_ids": [1, 2]},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.0, "suppressed_first_token_ids": [4]},
        {"repetition_penalty": 1.2, "logprobs": 1},
        {"min_tokens": 3, "eos_token_ids": [END], "timestamps": timestamp_rules()},
    ]
    free = [slot for slot, fields in enumerate(kinds) if not {"timestamps", "suppressed_first_token_ids"} & {*fields}]
    for _ in range(20):
        text = random_text(chance)
        rows = SamplingRows(len(kinds))
        for slot, fields in enumerate(kinds):
            rows.add(slot, SamplingParams(**fields), slot, PROMPT, text)
        logits = random_logits(chance, len(kinds))
        kept = logits.clone()
        together = Sampler(rows).sample(logits, np.arange(len(kinds)), rows.seeds[: len(kinds)])
        assert torch.equal(logits, kept)
        alone = Sampler(rows).sample(logits[free], np.array(free), rows.seeds[free])
        assert [together.to_numpy().tolist()[slot] for slot in free] == alone.to_numpy().tolist()
        assert [together.logprobs_lists().get(slot) for slot in free] == [
            alone.logprobs_lists().get(place) for place in range(len(free))
        ]
        assert torch.equal(edited(rows, logits, list(range(len(kinds))))[0], logits[0])


def test_logprobs_are_the_model_s_own_whatever_is_suppressed():
    rows = SamplingRows(1)
    rows.add(0, SamplingParams(temperature=0.0, logprobs=1, suppressed_token_ids=[7]), 0, PROMPT, [])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7], logits[0, 8] = 5.0, 4.0
    sampled = Sampler(rows).sample(logits, np.array([0]), rows.seeds[:1])
    lists = sampled.logprobs_lists()[0]
    own, best = torch.log_softmax(logits, -1)[0, [8, 7]].tolist()
    assert (lists.token_ids, lists.sampled_ranks) == ([[8, 7]], [2])
    assert lists.logprobs == [pytest.approx([own, best])]


def test_a_row_that_is_past_its_first_token_and_has_no_other_rule_is_not_edited():
    rows = SamplingRows(1)
    rows.add(0, SamplingParams(temperature=0.0, suppressed_first_token_ids=[7]), 0, PROMPT, [])
    assert rows.needs[0]
    rows.append_tokens(np.array([0]), np.array([3]))
    assert not rows.needs[0]
    rows.add(0, SamplingParams(temperature=0.0, suppressed_first_token_ids=[7]), 0, PROMPT, [3])
    assert not rows.needs[0]


def test_timestamps_weigh_what_min_tokens_leaves():
    """The end, which is held back, is the most probable token, and timestamps are more probable than all others."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, END] = 9.0
    rows = SamplingRows(1)
    for min_tokens, text_is_possible in ((0, True), (9, False)):
        params = SamplingParams(min_tokens=min_tokens, eos_token_ids=[END], timestamps=timestamp_rules())
        rows.add(0, params, 0, PROMPT, [FIRST_TIMESTAMP, 3])
        assert edited(rows, logits, [0])[0, :END].isfinite().all() == text_is_possible


# ---- beams ----


class Search:
    """A search on the runner's side, without a model, and the same texts for transformers."""

    def __init__(self, chance: random.Random, name: str, fields: dict[str, Any]) -> None:
        self.chance, self.name, self.fields = chance, name, fields
        self.texts: list[list[int]] = [[]]
        self.parents: list[int] | None = None
        self.new_tokens: list[int] = []
        self.num_restored = 0

    def fork(self) -> None:
        width = self.chance.randint(1, 5)
        self.parents = [self.chance.randrange(len(self.texts)) for _ in range(width)]
        tokens = [self.chance.choice([self.chance.randrange(END), self.chance.randrange(40, 60)]) for _ in range(width)]
        self.texts = [[*self.texts[parent], token] for parent, token in zip(self.parents, tokens)]
        self.new_tokens = tokens
        self.num_restored = 0

    def lose_memory(self, num_restored: int) -> None:
        """Beams that come back behind a new trunk bring all their tokens, so many of them computed."""
        self.num_restored = num_restored
        self.parents = [0] * len(self.texts)
        self.new_tokens = [token for text in self.texts for token in text]

    def step(self) -> BeamStep:
        num_tokens = len(self.texts[0])
        return BeamStep(
            self.name,
            num_tokens=1 if num_tokens else 0,
            num_computed_tokens=len(PROMPT) + self.num_computed,
            parents=self.parents if num_tokens else None,
            token_ids=self.new_tokens,
            num_restored_tokens=self.num_restored,
            num_candidates=8,
            scores=[-self.chance.random() for _ in self.texts],
        )

    @property
    def num_computed(self) -> int:
        if self.parents is None:
            return 0
        return len(self.texts[0]) - len(self.new_tokens) // len(self.texts) + self.num_restored

    def expected(self, step: BeamStep, logits: Tensor) -> list[tuple[float, int, int]]:
        scores = torch.log_softmax(logits, -1)
        scores = oracle(self.fields, len(PROMPT))(torch.tensor([[*PROMPT, *text] for text in self.texts]), scores)
        sums = scores + torch.tensor(step.scores)[:, None]
        values, places = sums.flatten().sort(descending=True, stable=True)
        found = zip(values[:8].tolist(), places[:8].tolist())
        return [(value, place // VOCAB_SIZE, place % VOCAB_SIZE) for value, place in found if value > -torch.inf]


class BeamSide:
    """What the runner keeps for searches."""

    def __init__(self) -> None:
        self.rows = InputBatch(32, 64, [16])
        self.sampling_rows = SamplingRows(32)
        self.beam_rows = BeamRows(self.rows, self.sampling_rows)

    def add_trunk(self, search: Search) -> None:
        params = SamplingParams(temperature=0.0, **search.fields)
        new = NewRequestData(search.name, PROMPT, len(PROMPT), params, 0, ([],), 0)
        self.sampling_rows.add(self.rows.add(new), params, 0, PROMPT, [])

    def drop(self, search: Search) -> None:
        row = self.rows.drop(search.name)
        assert row is not None
        self.sampling_rows.remove(row)
        self.beam_rows.drop([search.name])

    def candidates(self, steps: list[BeamStep], logits: Tensor) -> ModelRunnerOutput:
        for step in steps:
            if step.num_tokens:
                self.beam_rows.apply(step)
        output = ModelRunnerOutput()
        choose_candidates(steps, logits, output, self.beam_rows)
        return output


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.one_in(7)
def test_beams_keep_the_rules_that_transformers_keeps(seed):
    chance = random.Random(seed)
    side = BeamSide()
    searches = [Search(chance, name, random_rules(chance)) for name in "abc"]
    for search in searches:
        side.add_trunk(search)
    for _ in range(8):
        steps = [search.step() for search in searches]
        logits = random_logits(chance, sum(len(step.scores) for step in steps))
        output = side.candidates(steps, logits.clone())
        start = 0
        for search, step in zip(searches, steps):
            stop = start + len(step.scores)
            expected = search.expected(step, logits[start:stop])
            found = output.candidates[search.name]
            possible = [entry for entry in zip(found.scores, found.beams, found.token_ids) if entry[0] > -torch.inf]
            assert possible == expected, (search.fields, search.texts)
            start = stop
            if step.num_tokens and chance.random() < 0.2:
                side.drop(search)
                side.add_trunk(search)
                search.lose_memory(chance.choice([0, len(search.texts[0]) - 1]))
            else:
                search.fork()


def test_a_search_that_takes_the_name_of_another_has_its_own_rules():
    side, chance = BeamSide(), random.Random(0)
    first = Search(chance, "s", {"timestamps": timestamp_rules(), "suppressed_token_ids": [3]})
    side.add_trunk(first)
    for _ in range(2):
        side.candidates([first.step()], random_logits(chance, len(first.texts)))
        first.fork()
    side.drop(first)
    second = Search(chance, "s", {"suppressed_first_token_ids": [4]})
    side.add_trunk(second)
    step, logits = second.step(), random_logits(chance, 1)
    found = side.candidates([step], logits.clone()).candidates["s"]
    assert list(zip(found.scores, found.beams, found.token_ids)) == second.expected(step, logits)
