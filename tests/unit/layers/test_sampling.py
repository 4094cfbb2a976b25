"""The sampling functions against slow references in float64, against transformers, and at their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ratoon.layers import native, sampling
from ratoon.layers.sampling import Filters, Mode

VOCABULARIES = [1, 2, 17, 255, 256, 257, 2049, 5003]
LAST_UNIFORM = 1 - 2.0**-53


def random_logits(num_rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def filters_for(num_rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p, dtype=torch.float64),
        torch.full((num_rows,), min_p),
    )


@pytest.fixture(params=["by the kernel", "by torch"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel draws where it was built, torch elsewhere."""
    if request.param == "by torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no kernels for this processor; `make setup` builds them")


def evenly_spread(count: int) -> torch.Tensor:
    """Numbers in [0, 1) that leave no part of it out, the two ends included."""
    numbers = torch.linspace(0, 1, count, dtype=torch.float64)
    numbers[-1] = LAST_UNIFORM
    return numbers


def reference_distribution(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Probabilities of one row after every filter, in plain float64. Equal probabilities stay or go together."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    probabilities = weights / weights.sum()
    probabilities[probabilities < min_p * probabilities.max()] = 0
    if 0 < top_k < len(logits):
        probabilities[probabilities < np.sort(probabilities)[-top_k]] = 0
    probabilities /= probabilities.sum()
    mass = 0.0
    for probability in np.sort(probabilities)[::-1]:
        if mass >= top_p:
            break
        mass += probability
        least = probability
    probabilities[probabilities < least] = 0
    return probabilities / probabilities.sum()


def assert_inverts(probabilities: np.ndarray, token: int, uniform: float) -> None:
    """The token is the one in whose piece of the cumulative distribution the number lies."""
    before = probabilities[:token].sum()
    assert probabilities[token] > 0
    assert before - 1e-5 <= uniform <= before + probabilities[token] + 1e-5


# --- random numbers


def test_uniforms_are_a_function_of_seed_and_position_alone():
    seeds = np.array([1, 2, 2**64 - 1, 1], dtype=np.uint64)
    positions = np.array([0, 5, 1_000_000, 1])
    together = sampling.uniform(seeds, positions)
    alone = [sampling.uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert together[0] != together[3]


def test_uniforms_do_not_change_between_releases():
    """A seed that a user wrote down must give the same text tomorrow."""
    values = sampling.uniform(np.array([0, 42], dtype=np.uint64), np.array([0, 7]))
    assert values.tolist() == [0.28176129772258496, 0.19535155971618223]


def test_uniforms_fill_their_interval_evenly_along_positions_and_along_seeds():
    many = np.arange(20_000)
    for values in (
        sampling.uniform(np.full(20_000, 7, dtype=np.uint64), many),
        sampling.uniform(many.astype(np.uint64), np.zeros(20_000, dtype=np.int64)),
    ):
        counts, _ = np.histogram(values, bins=50, range=(0, 1))
        assert ((counts - 400) ** 2 / 400).sum() < 86  # chi-square with 49 degrees of freedom, 0.1%
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
        assert values.min() >= 0 and values.max() < 1


def test_streams_of_neighbouring_seeds_are_not_shifted_copies():
    first = sampling.uniform(np.full(500, 3, dtype=np.uint64), np.arange(500))
    for seed in (4, 2, (3 + 0x9E3779B97F4A7C15) % 2**64):
        second = sampling.uniform(np.full(500, seed, dtype=np.uint64), np.arange(500))
        assert not np.intersect1d(first, second).size


def test_negative_seeds_are_their_twos_complement():
    assert sampling.seed_to_uint64(-1) == 2**64 - 1
    assert sampling.seed_to_uint64(2**64 - 1) == 2**64 - 1


# --- greedy


@pytest.mark.parametrize("vocab_size", [*VOCABULARIES, 49152])
def test_greedy_takes_the_largest_logit(vocab_size):
    logits = random_logits(5, vocab_size)
    chosen = sampling.greedy(logits)
    assert chosen.token_ids.tolist() == logits.argmax(-1).tolist()
    assert not chosen.bad.any()


@pytest.mark.parametrize("equal", [(3, 700), (255, 256), (4999, 5002), (0, 5002)])
def test_greedy_takes_the_lowest_of_equal_ids(equal):
    logits = torch.zeros(2, 5003)
    logits[1, list(equal)] = 1.0
    assert sampling.greedy(logits).token_ids.tolist() == [0, equal[0]]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 300, 5002])
def test_greedy_flags_rows_that_are_not_numbers_and_no_others(value, place):
    logits = random_logits(3, 5003)
    logits[1, place] = value
    chosen = sampling.greedy(logits)
    assert chosen.bad.tolist() == [False, True, False]
    assert chosen.token_ids[::2].tolist() == logits[::2].argmax(-1).tolist()


def test_greedy_flags_a_row_without_any_token_left():
    assert sampling.greedy(torch.full((1, 300), -math.inf)).bad.tolist() == [True]


# --- the draw


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("vocab_size", [*VOCABULARIES, 49152])
def test_draw_inverts_the_cumulative_distribution(vocab_size):
    uniforms = evenly_spread(41)
    logits = random_logits(1, vocab_size)
    tokens = sampling.draw(logits.expand(41, -1).contiguous(), torch.full((41,), 0.7), uniforms).token_ids
    probabilities = reference_distribution(logits[0].numpy(), 0.7)
    for token, uniform in zip(tokens.tolist(), uniforms.tolist()):
        assert_inverts(probabilities, token, uniform)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("uniform", [0.0, 5e-324, 0.5, 1 - 2.0**-24, LAST_UNIFORM])
@pytest.mark.parametrize("allowed", [[0], [5002], [255, 256], [4998], [17, 2000, 4000]])
def test_draw_never_returns_a_forbidden_token(uniform, allowed):
    logits = torch.full((1, 5003), -math.inf)
    logits[0, allowed] = random_logits(1, len(allowed))[0]
    chosen = sampling.draw(logits, torch.ones(1), torch.tensor([uniform], dtype=torch.float64))
    assert chosen.token_ids.item() in allowed
    assert not chosen.bad.any()


def test_first_above_skips_zeros_even_where_the_target_reaches_the_total():
    cumulative = torch.tensor([[0.0, 0.0, 0.5, 0.5, 1.0, 1.0]], dtype=torch.float64)
    for target, place in ((0.0, 2), (0.5, 4), (0.99, 4), (1.0, 4), (7.0, 4)):
        assert sampling.first_above(cumulative, torch.tensor([target], dtype=torch.float64)).item() == place


def test_sums_of_probabilities_are_exact_in_any_order():
    probabilities = sampling.exact_probabilities(random_logits(4, 49152, scale=8.0)).double()
    shuffled = probabilities[:, torch.randperm(49152, generator=torch.Generator().manual_seed(1))]
    forward, backward = probabilities.cumsum(-1)[:, -1], shuffled.cumsum(-1)[:, -1]
    assert torch.equal(forward, backward)
    assert torch.equal(forward, sampling.chunk_sums(probabilities.float()).sum(-1))
    assert forward.sub(1).abs().max() < 1e-5


def test_rounding_keeps_probabilities_to_seven_digits():
    logits = random_logits(2, 1000, scale=2.0)
    exact = torch.softmax(logits.double(), -1)
    large = exact > 1e-7
    assert ((sampling.exact_probabilities(logits).double() - exact).abs()[large] / exact[large]).max() < 2e-6
    assert (sampling.exact_probabilities(logits).double() - exact).abs().max() < 1e-7


def test_frequencies_of_draws_match_the_probabilities():
    logits = random_logits(1, 600, scale=1.5)
    draws = 40_000
    uniforms = torch.from_numpy(sampling.uniform(np.full(draws, 11, dtype=np.uint64), np.arange(draws)))
    tokens = sampling.draw(logits.expand(draws, -1), torch.full((draws,), 0.9), uniforms).token_ids
    expected = reference_distribution(logits[0].numpy(), 0.9) * draws
    counts = np.bincount(tokens.numpy(), minlength=600)
    often = expected >= 8
    pooled = np.append(counts[often], counts[~often].sum()), np.append(expected[often], expected[~often].sum())
    statistic = ((pooled[0] - pooled[1]) ** 2 / pooled[1]).sum()
    degrees = often.sum()
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("draw_kind", ["plain", "top_k", "top_p"])
def test_extreme_logits_give_a_token_and_the_right_one(draw_kind):
    logits = torch.zeros(4, 5003)
    logits[0, 77] = 1e30  # huge
    logits[1] = -1e30
    logits[1, 78] = -1e29  # hugely negative
    logits[2] = torch.finfo(torch.float32).min
    logits[2, 79] = 0.0
    logits[3] = -math.inf
    logits[3, 80] = -5.0
    uniforms = torch.full((4,), LAST_UNIFORM, dtype=torch.float64)
    filters = {"top_k": filters_for(4, top_k=20), "top_p": filters_for(4, top_p=0.9)}
    for temperature in (1e-5, 1.0, 2.0):
        temperatures = torch.full((4,), temperature)
        if draw_kind == "plain":
            chosen = sampling.draw(logits, temperatures, uniforms)
        else:
            chosen = sampling.draw_filtered(logits, temperatures, filters[draw_kind], uniforms)
        assert chosen.token_ids.tolist() == [77, 78, 79, 80]
        assert not chosen.bad.any()


def test_equal_logits_are_drawn_evenly():
    uniforms = evenly_spread(1001)[:-1]
    tokens = sampling.draw(torch.full((1000, 1000), 3.0), torch.ones(1000), uniforms).token_ids
    assert (tokens - torch.arange(1000)).abs().max() <= 1


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("vocab_size", [300, 5003])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_k": 900}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_draw_flags_rows_that_are_not_numbers_and_leaves_the_others_alone(vocab_size, filters):
    logits = random_logits(5, vocab_size)
    uniforms = torch.tensor([0.3, 0.9, 0.1, 0.7, 0.5], dtype=torch.float64)
    clean = sampling.draw_filtered(logits, torch.ones(5), filters_for(5, **filters), uniforms)
    logits[1, 200] = math.nan
    logits[2] = -math.inf
    logits[3, 0] = math.inf
    chosen = sampling.draw_filtered(logits, torch.ones(5), filters_for(5, **filters), uniforms)
    assert not clean.bad.any()
    assert chosen.bad.tolist() == [False, True, True, True, False]
    assert chosen.token_ids[[0, 4]].tolist() == clean.token_ids[[0, 4]].tolist()
    assert ((chosen.token_ids >= 0) & (chosen.token_ids < vocab_size)).all()


# --- all kinds of rows in one call


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("vocab_size", [300, 5003])
def test_a_row_gets_the_same_token_in_every_mode(vocab_size):
    logits = random_logits(6, vocab_size)
    temperature = torch.tensor([0.0, 0.7, 1.3, 0.0, 0.7, 1.0])
    uniforms = torch.tensor([0.3, 0.9, 0.1, 0.7, 0.5, 0.2], dtype=torch.float64)
    filters = Filters(
        torch.tensor([3, 0, 0, 0, 5, 0]),
        torch.tensor([0.5, 1, 1, 1, 1, 0.8], dtype=torch.float64),
        torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.0]),
    )
    filtered = sampling.sample_plain(logits, temperature, *filters, uniforms, Mode.FILTERED)
    random = sampling.sample_plain(logits, temperature, *filters, uniforms, Mode.RANDOM)
    greedy = sampling.sample_plain(logits, temperature, *filters, uniforms, Mode.GREEDY)
    assert filtered.token_ids[:4].tolist() == random.token_ids[:4].tolist()
    assert filtered.token_ids[[0, 3]].tolist() == greedy.token_ids[[0, 3]].tolist()
    assert random.token_ids.tolist()[1:3] == sampling.draw(logits, temperature, uniforms).token_ids.tolist()[1:3]
    alone = sampling.draw_filtered(logits[4:], temperature[4:], filters.select(slice(4, None)), uniforms[4:])
    assert filtered.token_ids[4:].tolist() == alone.token_ids.tolist()


def test_a_bad_row_is_flagged_in_every_mode():
    logits = random_logits(3, 300)
    logits[0, 5], logits[1] = math.nan, -math.inf
    numbers = torch.ones(3), *filters_for(3, top_k=4), torch.full((3,), 0.5, dtype=torch.float64)
    for mode in Mode:
        assert sampling.sample_plain(logits, *numbers, mode).bad.tolist() == [True, True, False]


# --- the filters

FILTERS = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 200},
    {"top_k": 1500},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 300, "top_p": 0.8, "min_p": 0.001},
    {"top_k": 1500, "top_p": 0.99},
    {"top_p": 0.7, "min_p": 0.0001},
]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("vocab_size", "scale"), [(17, 3.0), (300, 2.0), (5003, 3.0), (5003, 0.3)])
@pytest.mark.one_in(3)
def test_filtered_draw_follows_the_slow_reference(filters, vocab_size, scale):
    logits = random_logits(1, vocab_size, scale)
    uniforms = evenly_spread(33)
    rows = logits.expand(33, -1).contiguous()
    tokens = sampling.draw_filtered(rows, torch.full((33,), 0.8), filters_for(33, **filters), uniforms).token_ids
    probabilities = reference_distribution(logits[0].numpy(), 0.8, **filters)
    for token, uniform in zip(tokens.tolist(), uniforms.tolist()):
        assert_inverts(probabilities, token, uniform)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_keep_what_transformers_keeps(filters):
    vocab_size, temperature = 3000, 0.8
    logits = random_logits(6, vocab_size, scale=2.0)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if "min_p" in filters:
        expected = MinPLogitsWarper(filters["min_p"])(None, expected)
    if "top_k" in filters:
        expected = TopKLogitsWarper(filters["top_k"])(None, expected)
    if "top_p" in filters:
        expected = TopPLogitsWarper(filters["top_p"])(None, expected)
    probabilities = sampling.exact_probabilities(logits / temperature)
    threshold, _ = sampling.keep_threshold(probabilities.sort(-1).values, filters_for(6, **filters))
    assert torch.equal(probabilities >= threshold[:, None], expected > -math.inf)


@pytest.mark.slow
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "few"])
@pytest.mark.one_in(3)
def test_every_way_draws_the_token_of_a_full_sort(filters, kind):
    """Which way a row takes is a matter of speed."""
    logits = random_logits(24, 9001, scale={"peaked": 4.0, "flat": 0.1, "ties": 2.0, "few": 2.0}[kind])
    if kind == "ties":
        logits = logits.round()
    if kind == "few":
        logits[:, 60:] = -math.inf
    uniforms = evenly_spread(24)
    temperature = torch.full((24,), 0.9)
    plain = sampling._draw_sorted(
        sampling.exact_probabilities(logits / temperature[:, None]), filters_for(24, **filters), uniforms
    )
    chosen = sampling.draw_filtered(logits, temperature, filters_for(24, **filters), uniforms)
    assert chosen.token_ids.tolist() == plain.token_ids.tolist()


@pytest.mark.parametrize("vocab_size", [40, 5003])
@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.3}, {"top_k": 2, "top_p": 0.9}])
def test_tokens_of_equal_probability_stay_or_go_together(vocab_size, filters):
    logits = torch.full((200, vocab_size), -4.0)
    equal = [3, 20, vocab_size - 1]
    logits[:, equal] = 8.0
    tokens = sampling.draw_filtered(logits, torch.ones(200), filters_for(200, **filters), evenly_spread(200)).token_ids
    assert sorted(set(tokens.tolist())) == equal


@pytest.mark.usefixtures("either_way")
def test_more_equal_tokens_than_candidates_all_stay():
    logits = torch.full((4000, 3000), -4.0)
    logits[:, 100:1100] = 2.0
    tokens = sampling.draw_filtered(logits, torch.ones(4000), filters_for(4000, top_k=5), evenly_spread(4000)).token_ids
    assert sorted(set(tokens.tolist())) == list(range(100, 1100))


@pytest.mark.usefixtures("either_way")
def test_a_top_k_beyond_the_vocabulary_keeps_everything():
    logits = random_logits(9, 5003, scale=0.5)
    uniforms = evenly_spread(9)
    unlimited = sampling.draw(logits, torch.ones(9), uniforms).token_ids
    for top_k in (5003, 100_000):
        tokens = sampling.draw_filtered(logits, torch.ones(9), filters_for(9, top_k=top_k), uniforms).token_ids
        assert tokens.tolist() == unlimited.tolist()


# --- edits


def test_penalties_match_their_definition():
    logits = random_logits(2, 50)
    logits[0, 7] = -math.inf
    expected = logits.clone()
    cells = [(0, 3, 2.0), (0, 7, 1.0), (0, 9, 0.0), (1, 3, 0.0), (1, 4, 5.0)]
    penalties = {0: (1.3, 0.4, 0.2), 1: (0.8, -0.5, -1.0)}
    for row, token, count in cells:
        repetition, frequency, presence = penalties[row]
        value = logits[row, token].item()
        value = value / repetition if value > 0 else value * repetition
        expected[row, token] = value - frequency * count - (presence if count else 0.0)
    per_cell = torch.tensor([penalties[row] for row, _, _ in cells]).T
    rows, tokens = torch.tensor([cell[0] for cell in cells]), torch.tensor([cell[1] for cell in cells])
    sampling.apply_penalties(logits, rows, tokens, torch.tensor([cell[2] for cell in cells]), *per_cell)
    torch.testing.assert_close(logits, expected)


def test_repetition_penalty_is_that_of_transformers():
    logits = random_logits(1, 100)
    seen = torch.tensor([[5, 9, 5, 77, 0]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(seen, logits.clone())
    tokens = seen.unique()
    size = len(tokens)
    zero, one_point_seven = torch.zeros(size), torch.full((size,), 1.7)
    rows = torch.zeros(size, dtype=torch.int64)
    sampling.apply_penalties(logits, rows, tokens, torch.ones(size), one_point_seven, zero, zero)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_bias_and_masks_touch_their_cells_alone():
    original = random_logits(3, 20)
    logits = original.clone()
    sampling.add_bias(logits, torch.tensor([0, 0]), torch.tensor([4, 5]), torch.tensor([2.5, -1.0]))
    sampling.forbid_tokens(logits, torch.tensor([1, 1]), torch.tensor([6, 6]))
    sampling.allow_only(logits, torch.tensor([2]), torch.tensor([2, 2]), torch.tensor([7, 8]))
    expected = original.clone()
    expected[0, 4] += 2.5
    expected[0, 5] -= 1.0
    expected[1, 6] = -math.inf
    expected[2, :7] = expected[2, 9:] = -math.inf
    assert torch.equal(logits, expected)


# --- log-probabilities and leaders


@pytest.mark.parametrize("vocab_size", [3, 17, 300, 5003, 49152])
@pytest.mark.parametrize("num_top", [0, 1, 5, 64])
def test_logprobs_match_float64_and_ranks_count_larger_logits(vocab_size, num_top):
    logits = random_logits(6, vocab_size)
    order = logits.argsort(-1, descending=True)
    own_ranks = [0, min(4, vocab_size - 1), vocab_size // 2, vocab_size - 1, 0, vocab_size // 3]
    tokens = torch.stack([order[row, rank] for row, rank in enumerate(own_ranks)])
    result = sampling.token_logprobs(logits, tokens, num_top)
    exact = torch.log_softmax(logits.double(), -1)
    shown = min(num_top, vocab_size)
    assert result.ranks.tolist() == [rank + 1 for rank in own_ranks]
    assert torch.equal(result.token_ids, torch.cat([tokens[:, None], order[:, :shown]], 1))
    torch.testing.assert_close(result.logprobs.double(), exact.gather(1, result.token_ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [50, 5003])
def test_equal_alternatives_come_by_rising_id_and_share_a_rank(vocab_size):
    logits = torch.zeros(1, vocab_size)
    logits[0, [30, 10, 20]] = 2.0
    logits[0, 40] = 3.0
    result = sampling.token_logprobs(logits, torch.tensor([30]), 4)
    assert result.token_ids.tolist() == [[30, 40, 10, 20, 30]]
    assert result.ranks.tolist() == [2]


@pytest.mark.parametrize("vocab_size", [128, 2047, 2048, 2100, 49152])
@pytest.mark.parametrize("rounded", [False, True])
def test_top_candidates_are_the_largest_values(vocab_size, rounded):
    logits = random_logits(4, vocab_size)
    logits = logits.round() if rounded else logits
    values, columns = sampling.top_candidates(logits, 128)
    assert torch.equal(values, logits.topk(128, -1).values)
    assert torch.equal(values, logits.gather(1, columns))
    assert all(len(set(row)) == 128 for row in columns.tolist())
