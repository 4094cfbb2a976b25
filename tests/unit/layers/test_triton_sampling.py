"""Sampling kernels against the functions of layers/sampling.py and layers/beams.py: on the GPU where there is one,
otherwise under Triton's interpreter on the CPU (tests/conftest.py), which takes tens of milliseconds for a program: few
rows, and few programs a row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ratoon.layers import sampling
from ratoon.layers.beams import (
    Candidates,
    SearchRows,
    best_candidates_of_searches,
    best_keys_of_searches,
    candidates_of_keys,
)
from ratoon.layers.sampling import Chosen, Mode
from ratoon.layers.triton import sampling as kernels
from ratoon.layers.triton import sampling_filters, top

pytestmark = pytest.mark.slow  # Triton's interpreter

Tensor = torch.Tensor
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAST_UNIFORM = 1 - 2.0**-53
# temperature, top_k, top_p, min_p
GREEDY, PLAIN, TOP_K, TOP_P, MIN_P = (0, 0, 1, 0), (0.8, 0, 1, 0), (0.7, 5, 1, 0), (1.2, 0, 0.8, 0), (1, 0, 1, 0.1)
ALL_FILTERS, WIDE = (1, 40, 0.9, 0.01), (1.5, 900, 0.97, 0)


def random_logits(num_rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def sample(
    logits: Tensor, kinds: list[tuple], uniforms: list[float] | Tensor, mode: Mode, masks: sampling.Masks | None = None
) -> tuple[Chosen, Chosen]:
    """By the kernels, and by the functions for CPUs."""
    temperature, top_k, top_p, min_p = zip(*kinds)
    numbers = (
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float32),
        torch.as_tensor(uniforms, dtype=torch.float64),
    )
    on_device = [number.to(DEVICE) for number in numbers]
    masks_there = None if masks is None else (masks.mask_of.to(DEVICE), masks.words.to(DEVICE))
    logits_there = logits.clone().to(DEVICE)
    found = kernels.sample_plain(logits_there, *on_device, mode >= Mode.RANDOM, mode is Mode.FILTERED, masks_there)
    expected = sampling.sample_plain(logits, *numbers, mode, masks)
    torch.testing.assert_close(logits_there.cpu(), logits, rtol=0, atol=0, equal_nan=True)
    return Chosen(*(part.cpu() for part in found)), expected


def assert_alike(pair: tuple[Chosen, Chosen]) -> None:
    found, expected = pair
    assert found.bad.tolist() == expected.bad.tolist()
    good = ~expected.bad
    assert found.token_ids[good].tolist() == expected.token_ids[good].tolist()


# --- one token for each row


@pytest.mark.parametrize("vocab_size", [1, 4096, 9001])
def test_greedy_rows_get_the_largest_logit(vocab_size):
    logits = random_logits(3, vocab_size)
    assert_alike(sample(logits, [GREEDY] * 3, [0.5] * 3, Mode.GREEDY))
    assert_alike(sample(logits.bfloat16(), [GREEDY] * 3, [0.5] * 3, Mode.GREEDY))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.one_in(5)
def test_tokens_without_a_bit_of_their_rows_mask_are_impossible(mode, dtype):
    kinds = {Mode.GREEDY: [GREEDY] * 4, Mode.RANDOM: [PLAIN] * 4, Mode.FILTERED: [TOP_K, TOP_P, ALL_FILTERS, WIDE]}[
        mode
    ]
    logits = random_logits(4, 5000).to(dtype)
    plain, _ = sample(logits.clone(), kinds, [0.3, 0.6, 0.9, 0.1], mode)
    words = torch.zeros(2, 157, dtype=torch.int32)  # the last token has bit 7 of its word
    words[0, [3, 130]] = torch.tensor([1 << 5, -1 << 31], dtype=torch.int32)
    words[1, 156] = -1
    pair = sample(logits, kinds, [0.3, 0.6, 0.9, 0.1], mode, sampling.Masks(torch.tensor([1, -1, 0, -1]).int(), words))
    assert_alike(pair)
    first, second, third, fourth = pair[0].token_ids.tolist()
    assert 156 * 32 <= first < 5000 and third in (3 * 32 + 5, 130 * 32 + 31)
    assert [second, fourth] == plain.token_ids[[1, 3]].tolist()
    assert logits[2].isfinite().sum() == 2 and logits[1].isfinite().all()


def test_a_row_whose_mask_has_no_bit_is_flagged():
    masks = sampling.Masks(torch.tensor([-1, 0]).int(), torch.zeros(1, 16, dtype=torch.int32))
    found, _ = sample(random_logits(2, 500), [PLAIN] * 2, [0.5] * 2, Mode.RANDOM, masks)
    assert found.bad.tolist() == [False, True]


@pytest.mark.parametrize("equal", [(4095, 4096), (0, 9000)])
def test_greedy_rows_get_the_lowest_of_equal_ids(equal):
    logits = torch.zeros(2, 9001)
    logits[1, list(equal)] = 1.0
    found, _ = sample(logits, [GREEDY] * 2, [0.5] * 2, Mode.GREEDY)
    assert found.token_ids.tolist() == [0, equal[0]]


def test_rows_that_are_not_numbers_are_flagged_and_others_are_not_in_every_mode():
    logits = random_logits(6, 500)
    logits[0, 499], logits[1, 0], logits[2] = math.nan, math.inf, -math.inf
    logits[3, 100:] = -math.inf
    logits[5] = -math.inf
    logits[5, 498] = -1e30
    for mode, kind in ((Mode.GREEDY, GREEDY), (Mode.RANDOM, PLAIN), (Mode.FILTERED, ALL_FILTERS)):
        pair = sample(logits, [kind] * 6, [0.3] * 6, mode)
        assert pair[0].bad.tolist() == [True, True, True, False, False, False]
        assert_alike(pair)
        assert ((pair[0].token_ids >= 0) & (pair[0].token_ids < 500)).all()


@pytest.mark.parametrize("vocab_size", [1, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_are_those_of_the_cpu(vocab_size, dtype):
    logits = random_logits(4, vocab_size).to(dtype)
    kinds = [GREEDY, PLAIN, (0.2, 0, 1, 0), (2.0, 0, 1, 0)]
    assert_alike(sample(logits, kinds, [0.1, 0.25, 0.7, 0.9], Mode.RANDOM))


@pytest.mark.parametrize("kind", [TOP_K, TOP_P, MIN_P, ALL_FILTERS, WIDE])
@pytest.mark.one_in(3)
def test_filtered_draws_are_those_of_the_cpu(kind):
    logits = random_logits(2, 5003)
    assert_alike(sample(logits, [kind, PLAIN], [0.3, 0.6], Mode.FILTERED))


@pytest.mark.parametrize(
    ("kind", "from_list"),
    [
        (TOP_K, True),
        (TOP_P, False),  # flat: the nucleus has hundreds of tokens
        ((0.3, 0, 0.8, 0), True),
        (MIN_P, False),
        ((0.3, 0, 1, 0.5), True),
        (ALL_FILTERS, False),  # 40 tokens are more than the list has
        ((1, 15, 0.9, 0.01), True),
        ((1, 0, 0.9, 0.2), True),
    ],
)
@pytest.mark.one_in(5)
def test_filtered_draws_come_from_a_list_where_it_has_all_that_is_left(kind, from_list, monkeypatch):
    monkeypatch.setattr(kernels, "WANTED", 16)
    monkeypatch.setattr(kernels, "GROUP_ROOM", 32)
    monkeypatch.setattr(kernels, "LIST_ROOM", 64)
    monkeypatch.setattr(kernels, "GROUPS_AT_ONCE", 16)
    logits = random_logits(2, 3001, scale=2.0)
    if from_list and DEVICE.type == "cpu":  # a launch on a GPU needs a kernel
        monkeypatch.setattr(kernels, "draw_others", Skipped())
    assert_alike(sample(logits, [kind] * 2, [0.3, 0.9], Mode.FILTERED))


class Skipped:
    """A kernel that is not needed."""

    fn = "skipped"

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **options: None


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a compiled kernel holds what it calls")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("top_p", "slope"), [(0.9, 0.0), (0.5, 0.0), (0.9, 1.0)])
@pytest.mark.one_in(5)
def test_the_nucleus_of_a_flat_row_needs_no_search(top_p, slope, dtype, monkeypatch):
    """A sample tells where its threshold is, also where tokens of low ids are more probable."""

    def search(*args: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(sampling_filters, "search_threshold", search)
    logits = random_logits(2, 9001, scale=1.0) - slope * (torch.arange(9001) + 2.0).log()
    assert_alike(sample(logits.to(dtype), [(1.0, 0, top_p, 0)] * 2, [0.3, 0.95], Mode.FILTERED))


def test_a_sample_that_misleads_does_no_harm(monkeypatch):
    """Where the threshold is not between the two numbers that a sample gave, the row is searched."""
    monkeypatch.setattr(kernels, "SAMPLED_GROUPS", 1)
    logits = random_logits(2, 5003, scale=1.0)
    logits[:, :32] = torch.linspace(0, 2, 32)  # what is sampled
    assert_alike(sample(logits, [(1.0, 0, 0.7, 0)] * 2, [0.3, 0.95], Mode.FILTERED))


def test_many_equal_logits_overflow_a_list():
    logits = torch.zeros(2, 3001)
    logits[1, 5:2000] = 1.0
    assert_alike(sample(logits, [(1, 700, 1, 0), (1, 0, 0.5, 0)], [0.5, 0.9], Mode.FILTERED))


def test_a_row_draws_the_same_in_every_mode():
    logits = random_logits(3, 5003)
    kinds = [GREEDY, PLAIN, (1.4, 0, 1, 0)]
    random, _ = sample(logits, kinds, [0.1, 0.77, 0.33], Mode.RANDOM)
    filtered, _ = sample(logits, kinds, [0.1, 0.77, 0.33], Mode.FILTERED)
    greedy, _ = sample(logits, kinds, [0.1, 0.77, 0.33], Mode.GREEDY)
    assert random.token_ids.tolist() == filtered.token_ids.tolist()
    assert random.token_ids[0] == greedy.token_ids[0]


@pytest.mark.parametrize("uniform", [LAST_UNIFORM, 0.0])
@pytest.mark.one_in(2)
def test_a_forbidden_token_is_never_drawn(uniform):
    logits = torch.full((3, 5003), -math.inf)
    allowed = [[5002], [4095, 4096], [17, 2000, 4998]]
    for row, ids in enumerate(allowed):
        logits[row, ids] = random_logits(1, len(ids))[0]
    found, _ = sample(logits, [PLAIN, PLAIN, (1, 0, 0.99, 0)], [uniform] * 3, Mode.FILTERED)
    assert not found.bad.any()
    assert all(token in ids for token, ids in zip(found.token_ids.tolist(), allowed))


@pytest.mark.parametrize("kind", [ALL_FILTERS, PLAIN])
@pytest.mark.one_in(2)
def test_extreme_logits_give_the_right_token(kind):
    logits = torch.zeros(3, 1500)
    logits[0, 77] = 1e30
    logits[1] = -1e30
    logits[1, 78] = -1e29
    logits[2] = torch.finfo(torch.float32).min
    logits[2, 79] = 0.0
    found, _ = sample(logits, [(1e-5, *kind[1:]), (2.0, *kind[1:]), kind], [LAST_UNIFORM] * 3, Mode.FILTERED)
    assert found.token_ids.tolist() == [77, 78, 79]
    assert not found.bad.any()


@pytest.mark.parametrize("kind", [(1, 4, 1, 0), (1, 0, 0.5, 0), (1, 6, 0.6, 0.2)])
@pytest.mark.parametrize("room", [16, 1024])  # that of the list: only the larger holds the row
@pytest.mark.one_in(5)
def test_tokens_of_equal_probability_are_kept_or_removed_together(kind, room, monkeypatch):
    monkeypatch.setattr(kernels, "LIST_ROOM", room)
    logits = torch.full((2, 300), -4.0)
    logits[:, [7, 70, 77]] = 3.0
    logits[:, [1, 100, 299]] = 2.0
    assert_alike(sample(logits, [kind] * 2, [0.3, LAST_UNIFORM], Mode.FILTERED))


def test_frequencies_of_draws_match_the_probabilities():
    num_draws = 2000 if DEVICE.type == "cuda" else 24
    logits = random_logits(1, 5, scale=1.0).repeat(num_draws, 1)
    uniforms = sampling.uniform(np.full(num_draws, 11, dtype=np.uint64), np.arange(num_draws))
    found, _ = sample(logits, [(0.9, 0, 1, 0)] * num_draws, torch.from_numpy(uniforms), Mode.RANDOM)
    expected = torch.softmax(logits[0].double() / 0.9, -1) * num_draws
    counts = torch.bincount(found.token_ids, minlength=5)
    assert ((counts - expected) ** 2 / expected).sum() < 24  # chi-square with 4 degrees of freedom, 0.01%


# --- log-probabilities


@pytest.mark.parametrize(("vocab_size", "num_top"), [(7, 7), (300, 0), (5003, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.one_in(5)
def test_log_probabilities_and_ranks_are_those_of_the_cpu(vocab_size, num_top, dtype):
    logits = random_logits(2, vocab_size).to(dtype)
    token_ids = torch.tensor([vocab_size // 2, vocab_size - 1])
    found = top.token_logprobs(logits.to(DEVICE), token_ids.to(DEVICE), num_top)
    expected = sampling.token_logprobs(logits, token_ids, num_top)
    assert found[0].tolist() == expected.token_ids.tolist()
    assert torch.allclose(found[1].cpu(), expected.logprobs, rtol=1e-6, atol=1e-5)
    assert found[2].tolist() == expected.ranks.tolist()
    assert found[0].dtype == torch.int64 and found[1].dtype == torch.float32


# --- candidates of beam searches


def choose(logits: Tensor, scores: Tensor, searches: list[SearchRows], edit=None, logprob_rows=()) -> list:
    keys = best_keys_of_searches(logits.to(DEVICE), scores.to(DEVICE), searches, edit, logprob_rows)
    return candidates_of_keys(keys.cpu().numpy(), searches, logits.shape[1])


def assert_same_candidates(found: list[Candidates | None], expected: list[Candidates | None]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None and theirs is not None
        assert ours.beams.tolist() == theirs.beams.tolist()
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert np.allclose(ours.scores, theirs.scores, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("vocab_size", "beams", "num_candidates"), [(1, [3], 2), (600, [2, 5], 9), (5003, [2], 24)])
def test_candidates_are_those_of_the_cpu(vocab_size, beams, num_candidates):
    searches, start = [], 0
    for index, count in enumerate(beams):
        searches.append(SearchRows(start, start + count, num_candidates - index))
        start += count
    for logits, scores in (
        (random_logits(start, vocab_size), -torch.rand(start, generator=torch.Generator().manual_seed(1)) * 4),
        (random_logits(1, vocab_size, scale=1.0).round().repeat(start, 1), torch.zeros(start)),  # many equal ones
    ):
        expected = best_candidates_of_searches(logits.clone(), scores, searches)
        assert_same_candidates(choose(logits, scores, searches), expected)


def test_candidates_come_from_16_bit_logits_as_they_are():
    logits, searches = random_logits(3, 600), [SearchRows(0, 3, 7)]
    expected = best_candidates_of_searches(logits.bfloat16().float(), torch.zeros(3), searches)
    assert_same_candidates(choose(logits.bfloat16(), torch.zeros(3), searches), expected)


@pytest.mark.parametrize("logprob_rows", [(), (1, 3, 4)])
def test_candidates_of_a_search_with_a_row_that_is_not_a_number_are_missing(logprob_rows):
    logits = random_logits(6, 300)
    logits[3, 7] = math.nan
    searches = [SearchRows(0, 2, 4), SearchRows(2, 4, 4), SearchRows(4, 6, 4)]
    found = choose(logits.clone(), torch.zeros(6), searches, None, logprob_rows)
    assert [candidates is None for candidates in found] == [False, True, False]


def test_edits_of_logits_and_of_log_probabilities_are_those_of_the_cpu():
    logits, scores, searches = random_logits(4, 300), torch.zeros(4), [SearchRows(0, 1, 8), SearchRows(1, 4, 5)]

    def edit(logits: Tensor) -> None:
        logits[:, ::7] = -math.inf
        logits[2] *= 0.5

    expected = best_candidates_of_searches(logits.clone(), scores, searches, edit, logprob_rows=[2])
    assert_same_candidates(choose(logits.clone(), scores, searches, edit, logprob_rows=[2]), expected)
