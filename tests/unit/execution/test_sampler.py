"""The sampler: each feature of SamplingParams, rows of every kind side by side, and the independence of rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ratoon.core.params import SamplingParams
from ratoon.execution.sampling.sampler import Sampler
from ratoon.execution.sampling.sampling_rows import SamplingRows
from ratoon.execution.sampling.tokens import PromptLogprobs, SampledTokens
from ratoon.layers import sampling

EVERY_KIND = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 50},
    {"temperature": 0.9, "top_k": 700},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.5, "top_p": 0.5, "logprobs": 3},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": -0.5, "logprobs": 7},
    {"temperature": 0.0, "logit_bias": {3: 5.0, 8: -100.0}},
    {"temperature": 1.0, "allowed_token_ids": [1, 4, 9, 16, 25]},
    {"temperature": 1.0, "bad_words_token_ids": [[2], [5, 6]]},
    {"temperature": 0.9, "min_tokens": 4, "eos_token_ids": [0], "stop_token_ids": [7]},
    {"temperature": 0.0, "logprobs": 0},
]


def random_logits(num_rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


class Harness:
    """One request in each slot, and a call that samples for some of them."""

    def __init__(self, kinds: list[dict], prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = ()) -> None:
        self.rows = SamplingRows(len(kinds))
        self.sampler = Sampler(self.rows)
        for slot, kind in enumerate(kinds):
            self.rows.add(slot, SamplingParams(**kind), 1000 + slot, prompt, output)

    def sample(self, logits: torch.Tensor, slots: list[int] | None = None) -> SampledTokens:
        chosen = np.arange(len(logits)) if slots is None else np.array(slots)
        return self.sampler.sample(logits, chosen, self.rows.seeds[chosen])

    def tokens(self, logits: torch.Tensor, slots: list[int] | None = None) -> list[int]:
        return self.sample(logits, slots).to_numpy().tolist()

    def edited(self, logits: torch.Tensor) -> torch.Tensor:
        """What the logits become before a token is chosen."""
        logits = logits.clone()
        self.rows.edit(logits, np.arange(len(logits)))
        return logits


def everything(sampled: SampledTokens, row: int) -> tuple:
    """All results of a row; floats are compared bit for bit."""
    lists = sampled.logprobs_lists().get(row)
    logprobs = None if lists is None else (lists.token_ids, lists.logprobs, lists.sampled_ranks)
    return sampled.to_numpy().tolist()[row], row in sampled.bad_rows, logprobs


# --- rows do not see each other


@pytest.mark.parametrize("vocab_size", [31, 257, 2999, 49152])
def test_a_row_gets_the_same_bits_alone_and_in_any_batch(vocab_size):
    num_rows = 33
    kinds = [EVERY_KIND[i % len(EVERY_KIND)] for i in range(num_rows)]
    harness = Harness(kinds, output=(5, 9, 9))
    logits = random_logits(num_rows, vocab_size)
    alone = [everything(harness.sample(logits[row : row + 1], [row]), 0) for row in range(num_rows)]
    for size in (2, 3, 7, 16, 33):
        order = np.random.default_rng(size).permutation(num_rows)[:size].tolist()
        batch = harness.sample(logits[order], order)
        assert [everything(batch, place) for place in range(size)] == [alone[row] for row in order]


@pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
def test_the_number_of_threads_does_not_show(kind):
    harness = Harness([kind] * 5, output=(5, 9, 9))
    logits = random_logits(5, 49152)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            batch = harness.sample(logits)
            results.append([everything(batch, row) for row in range(5)])
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1] == results[2]


def test_the_logits_stay_as_they_were():
    harness = Harness(EVERY_KIND, output=(5, 9))
    logits = random_logits(len(EVERY_KIND), 3000)
    before = logits.clone()
    harness.sample(logits)
    for slot in range(len(EVERY_KIND)):
        harness.sample(logits[slot : slot + 1], [slot])
    assert torch.equal(logits, before)


def test_a_resumed_branch_goes_on_with_the_same_stream():
    kind = {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.7, "bad_words_token_ids": [[4, 5]]}
    logits = random_logits(1, 500)
    straight = Harness([kind])
    tokens = []
    for _ in range(12):
        tokens += straight.tokens(logits)
        straight.rows.append_tokens(np.array([0]), np.array([tokens[-1]]))
    resumed = SamplingRows(8)
    resumed.add(6, SamplingParams(**kind), 1000, (1, 2, 3), tokens[:5])
    again = []
    for _ in range(7):
        again += Sampler(resumed).sample(logits, np.array([6]), resumed.seeds[[6]]).to_numpy().tolist()
        resumed.append_tokens(np.array([6]), np.array(again[-1:]))
    assert again == tokens[5:]
    assert len(set(tokens)) > 3


def test_choices_from_one_slot_follow_their_own_seeds():
    harness = Harness([{"temperature": 1.0}])
    logits = random_logits(1, 5000, scale=0.5).expand(6, -1).contiguous()
    seeds = np.array([1, 2, 3, 4, 5, 1], dtype=np.uint64)
    tokens = harness.sampler.sample(logits, np.zeros(6, dtype=np.int64), seeds).to_numpy().tolist()
    assert len(set(tokens)) == 5
    assert tokens[0] == tokens[5]


def test_a_seed_gives_another_token_at_another_position():
    harness = Harness([{"temperature": 1.0}])
    logits = random_logits(1, 5000, scale=0.5)
    tokens = []
    for _ in range(10):
        tokens += harness.tokens(logits)
        harness.rows.append_tokens(np.array([0]), np.array([0]))
    assert len(set(tokens)) >= 9


def test_frequencies_over_a_branch_follow_the_filtered_distribution():
    harness = Harness([{"temperature": 0.7, "top_k": 6, "top_p": 0.9}])
    logits = random_logits(1, 50, scale=1.0)
    draws = 4000
    counts = np.zeros(50)
    slots = np.zeros(draws, dtype=np.int64)
    sampled = harness.sampler.sample(logits.expand(draws, -1), slots, np.arange(draws).astype(np.uint64))
    np.add.at(counts, sampled.to_numpy(), 1)
    probabilities = torch.softmax(logits[0].double() / 0.7, -1)
    top, order = probabilities.sort(descending=True)
    top = top[:6] / top[:6].sum()
    kept = int((top.cumsum(0) - top < 0.9).sum())
    expected = np.zeros(50)
    expected[order[:kept].numpy()] = (top[:kept] / top[:kept].sum()).numpy() * draws
    assert (counts[expected == 0] == 0).all()
    here = expected > 0
    assert ((counts[here] - expected[here]) ** 2 / expected[here]).sum() < 20  # 5 degrees of freedom at most, 0.1%


# --- cost: rows pay only for what they use


def test_a_plain_greedy_batch_runs_nothing_but_the_argmax(monkeypatch):
    harness = Harness([{"temperature": 0.0}] * 4)
    logits = random_logits(4, 300)
    for name in ("uniform", "draw", "draw_filtered", "token_logprobs", "apply_penalties", "add_bias"):
        monkeypatch.setattr(sampling, name, None)  # a call would raise
    assert harness.tokens(logits) == logits.argmax(-1).tolist()


def test_each_function_sees_only_the_rows_that_asked_for_it(monkeypatch):
    seen = {}

    def spy(name):
        function = getattr(sampling, name)

        def wrapped(logits, *rest):
            seen.setdefault(name, []).append(logits.shape[0])
            return function(logits, *rest)

        monkeypatch.setattr(sampling, name, wrapped)

    for name in ("greedy", "draw", "draw_filtered", "token_logprobs", "apply_penalties"):
        spy(name)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0},
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.5, "logprobs": 1},
        {"temperature": 0.0, "presence_penalty": 1.0},
    ]
    Harness(kinds).tokens(random_logits(7, 300))
    assert sorted(seen.pop("greedy")) == [1, 3]
    assert seen == {"draw": [2], "draw_filtered": [1], "token_logprobs": [1], "apply_penalties": [1]}


def test_greedy_rows_beside_random_ones_get_the_largest_logit():
    harness = Harness([{"temperature": 0.0 if slot % 2 else 1.0} for slot in range(8)])
    logits = random_logits(8, 5000)
    assert harness.tokens(logits)[1::2] == logits[1::2].argmax(-1).tolist()


# --- features


def test_penalties_count_the_output_and_see_the_prompt():
    kind = {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    harness = Harness([kind], prompt=(7, 7, 8), output=(8, 9, 9))
    harness.rows.append_tokens(np.array([0]), np.array([10]))
    logits = random_logits(1, 12)
    expected = logits.clone()
    for token, count in ((7, 0), (8, 1), (9, 2), (10, 1)):
        value = logits[0, token] / 1.5 if logits[0, token] > 0 else logits[0, token] * 1.5
        expected[0, token] = value - 0.25 * count - (0.5 if count else 0)
    torch.testing.assert_close(harness.edited(logits), expected)


def test_frequency_and_presence_leave_the_prompt_alone():
    harness = Harness([{"frequency_penalty": 1.0, "presence_penalty": 1.0}], prompt=(7, 8))
    logits = random_logits(1, 12)
    assert torch.equal(harness.edited(logits), logits)


def test_counts_grow_past_their_first_room():
    harness = Harness([{"frequency_penalty": 0.5}], prompt=())
    for token in [*range(300), 17]:
        harness.rows.append_tokens(np.array([0]), np.array([token]))
    edited = harness.edited(torch.zeros(1, 400))[0]
    assert edited[299] == -0.5 and edited[17] == -1.0 and edited[300] == 0.0


def test_tokens_outside_the_vocabulary_are_passed_over():
    harness = Harness([{"repetition_penalty": 2.0}], prompt=(5, 151_700, -1))
    logits = torch.ones(1, 10)
    assert harness.edited(logits)[0].tolist() == [1, 1, 1, 1, 1, 0.5, 1, 1, 1, 1]


def test_logit_bias_is_added():
    harness = Harness([{"temperature": 0.0, "logit_bias": {4: 100.0}}, {"temperature": 0.0, "logit_bias": {2: -100.0}}])
    logits = torch.zeros(2, 10)
    logits[:, 2] = 1.0
    assert harness.tokens(logits) == [4, 0]


def test_only_allowed_tokens_are_sampled():
    harness = Harness([{"temperature": 5.0, "allowed_token_ids": [3, 400, 3]}] * 40)
    logits = random_logits(1, 500, scale=0.1).expand(40, -1)
    assert set(harness.tokens(logits)) == {3, 400}


def test_bad_words_are_never_completed():
    words = [[4], [5, 6], [1, 2, 3], [9, 2, 3]]
    harness = Harness([{"bad_words_token_ids": words}], prompt=(5,))
    forbidden = []
    for token in (5, 1, 2, 2, 3):
        forbidden.append(set(np.flatnonzero(harness.edited(torch.zeros(1, 10))[0] < 0).tolist()))
        harness.rows.append_tokens(np.array([0]), np.array([token]))
    # The prompt's 5 does not count; after the output's 5 the 6 is out, after 1, 2 the 3.
    assert forbidden == [{4}, {4, 6}, {4}, {3, 4}, {4}]


def test_stop_tokens_are_held_back_until_min_tokens():
    kind = {"temperature": 0.0, "min_tokens": 2, "eos_token_ids": [0], "stop_token_ids": [1], "all_stop_token_ids": [2]}
    harness = Harness([kind])
    logits = torch.tensor([[9.0, 8.0, 7.0, 6.0]])
    tokens = []
    for _ in range(3):
        tokens += harness.tokens(logits)
        harness.rows.append_tokens(np.array([0]), np.array([tokens[-1]]))
    assert tokens == [3, 3, 0]


def test_a_branch_resumed_past_min_tokens_may_stop():
    kind = {"temperature": 0.0, "min_tokens": 2, "eos_token_ids": [0]}
    assert Harness([kind], output=(3, 3)).tokens(torch.tensor([[9.0, 1.0]])) == [0]


def test_masks_bias_and_penalties_work_together():
    """Penalties come last: they see the biased logit. A mask is not undone by either."""
    kind = {"logit_bias": {1: 3.0, 2: 100.0}, "repetition_penalty": 2.0, "allowed_token_ids": [0, 1]}
    edited = Harness([kind], prompt=(1, 2)).edited(torch.tensor([[1.0, -1.0, 1.0]]))
    assert edited[0].tolist() == [1.0, 1.0, -math.inf]


def test_a_seed_near_the_ends_of_the_interval_returns_an_allowed_token(monkeypatch):
    kinds = [{"temperature": 1.0, "allowed_token_ids": [7, 11], **more} for more in ({}, {"top_k": 9}, {"top_p": 0.99})]
    harness = Harness(kinds)
    for value in (0.0, 1 - 2.0**-53):
        monkeypatch.setattr(sampling, "uniform", lambda seeds, positions, value=value: np.full(len(seeds), value))
        assert set(harness.tokens(random_logits(3, 5000))) <= {7, 11}


# --- log-probabilities


def test_logprobs_are_those_of_the_raw_logits():
    kinds = [
        {"temperature": 0.3, "top_k": 5, "logprobs": 2, "logit_bias": {9: 100.0}},
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 4, "repetition_penalty": 3.0},
        {"temperature": 0.0, "logprobs": 0},
    ]
    harness = Harness(kinds)
    logits = random_logits(4, 300)
    sampled = harness.sample(logits)
    tokens, lists = sampled.to_numpy().tolist(), sampled.logprobs_lists()
    exact = torch.log_softmax(logits.double(), -1)
    assert tokens[0] == 9
    assert sorted(lists) == [0, 2, 3]
    for row, num_top in ((0, 2), (2, 4), (3, 0)):
        ids, values = lists[row].token_ids[0], lists[row].logprobs[0]
        assert ids == [tokens[row], *exact[row].topk(num_top).indices.tolist()]
        assert values == pytest.approx(exact[row][ids].tolist(), abs=1e-5)
        assert lists[row].sampled_ranks == [int((exact[row] > exact[row][tokens[row]]).sum()) + 1]


def test_no_logprobs_where_nobody_asked():
    assert Harness([{"temperature": 1.0}]).sample(random_logits(1, 30)).logprobs_lists() == {}


def test_prompt_logprobs_have_a_row_for_each_target():
    logits = random_logits(5, 3000)
    targets = torch.tensor([4, 0, 2999, int(logits[3].argmax()), 7])
    parts = [sampling.token_logprobs(logits[rows], targets[rows], 3) for rows in (slice(0, 2), slice(2, 5))]
    lists = PromptLogprobs(parts).lists()
    exact = torch.log_softmax(logits.double(), -1)
    for row, target in enumerate(targets.tolist()):
        ids = [target, *exact[row].topk(3).indices.tolist()]
        assert lists.token_ids[row] == ids
        assert lists.logprobs[row] == pytest.approx(exact[row][ids].tolist(), abs=1e-5)
        assert lists.sampled_ranks[row] == int((exact[row] > exact[row][target]).sum()) + 1


# --- bad rows


@pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
def test_a_row_of_nan_is_flagged_and_the_others_are_unharmed(kind):
    kinds = [*EVERY_KIND, kind, *EVERY_KIND]
    harness = Harness(kinds, output=(5, 9))
    logits = random_logits(len(kinds), 2999)
    broken = logits.clone()
    place = len(EVERY_KIND)
    broken[place, 4] = math.nan
    clean, sampled = harness.sample(logits), harness.sample(broken)
    assert clean.bad_rows == []
    assert sampled.bad_rows == [place]
    others = [row for row in range(len(kinds)) if row != place]
    assert [everything(sampled, row) for row in others] == [everything(clean, row) for row in others]


@pytest.mark.parametrize("more", [{"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.5}])
def test_a_row_whose_tokens_are_all_forbidden_is_flagged(more):
    kind = {"allowed_token_ids": [5], "bad_words_token_ids": [[5]], **more}
    assert Harness([kind, {"temperature": 0.0}]).sample(random_logits(2, 4000)).bad_rows == [0]


# --- slots


def test_a_slot_is_as_new_after_removal():
    harness = Harness([{"temperature": 0.0, "logit_bias": {4: 100.0}, "logprobs": 1}])
    harness.rows.append_tokens(np.array([0]), np.array([4]))
    harness.rows.remove(0)
    harness.rows.add(0, SamplingParams(temperature=0.0), 5, (1,), ())
    logits = random_logits(1, 10)
    assert harness.tokens(logits) == logits.argmax(-1).tolist()
    assert harness.sample(logits).logprobs_lists() == {}
    assert harness.rows.num_outputs[0] == 0


def test_slots_beyond_the_end_are_made_and_the_others_kept():
    rows = SamplingRows(1)
    rows.add(0, SamplingParams(temperature=0.0, logit_bias={3: 100.0}), 1, (), ())
    rows.add(9, SamplingParams(temperature=1.0, top_p=0.5), -1, (), (1, 2))
    tokens = Sampler(rows).sample(torch.zeros(1, 8), np.array([0]), rows.seeds[[0]]).to_numpy().tolist()
    assert tokens == [3]
    assert rows.seeds[9] == 2**64 - 1
    assert rows.num_outputs[9] == 2


def test_one_call_appends_a_token_to_each_of_several_slots():
    harness = Harness([{"frequency_penalty": 1.0}, {}, {"frequency_penalty": 2.0}])
    harness.rows.append_tokens(np.array([2, 0, 1]), np.array([5, 6, 7]))
    edited = harness.edited(torch.zeros(3, 8))
    assert edited[0, 6] == -1.0 and edited[2, 5] == -2.0
    assert edited.count_nonzero() == 2
    assert harness.rows.num_outputs.tolist() == [1, 1, 1]


# --- all rows in one call, as on a GPU


@pytest.mark.parametrize("vocab_size", [31, 2999])
def test_rows_sampled_together_get_what_they_get_in_groups(vocab_size):
    for kinds in (EVERY_KIND, EVERY_KIND[:1], EVERY_KIND[:2], EVERY_KIND[8:9], EVERY_KIND[:8]):
        harness = Harness(kinds, output=(5, 9, 9))
        logits = random_logits(len(kinds), vocab_size)
        logits[0, 7] = math.nan
        slots = np.arange(len(kinds))
        arguments = logits, slots, harness.rows.seeds[slots], harness.rows.needs[slots]
        in_groups, together = (
            harness.sampler._choose_in_groups(*arguments),
            harness.sampler._choose_together(*arguments),
        )
        assert together.bad.tolist() == in_groups.bad.tolist()
        assert together.token_ids[1:].tolist() == in_groups.token_ids[1:].tolist()


def test_all_results_are_in_one_tensor():
    harness = Harness([{"temperature": 0.0, "logprobs": 2}, {"temperature": 0.7}])
    sampled = harness.sample(random_logits(2, 40))
    assert sampled._packed().shape == (2 + 3 + 3 + 1,)  # tokens, ids, log-probabilities, rank
