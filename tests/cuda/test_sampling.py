"""Sampling on a GPU at the sizes of real models: against the CPU's functions, in CUDA graphs, and without waiting for
the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from ratoon.core.params import SamplingParams
from ratoon.execution.sampling.penalty_rows import PenaltyRows
from ratoon.execution.sampling.sampler import Sampler
from ratoon.execution.sampling.sampling_rows import SamplingRows
from ratoon.layers import beams, sampling
from ratoon.layers.beams import SearchRows
from ratoon.layers.sampling import Chosen, Mode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Tensor = torch.Tensor
# temperature, top_k, top_p, min_p
KINDS = [
    (0.0, 0, 1.0, 0.0),
    (0.6, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 0.999, 0.0),
    (0.8, 0, 1.0, 0.05),
    (1.3, 5000, 0.5, 0.001),
]


def random_logits(num_rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def numbers_of(kinds: list[tuple], seed: int = 0) -> list[Tensor]:
    temperature, top_k, top_p, min_p = zip(*kinds)
    return [
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float32),
        torch.rand(len(kinds), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)),
    ]


def on_gpu(logits: Tensor, numbers: list[Tensor], mode: Mode) -> Chosen:
    temperature, top_k, top_p, min_p, uniforms = (number.cuda() for number in numbers)
    return sampling.sample_plain(logits.cuda(), temperature, top_k, top_p, min_p, uniforms, mode)


def on_cpu(logits: Tensor, numbers: list[Tensor], mode: Mode) -> Chosen:
    temperature, top_k, top_p, min_p, uniforms = numbers
    return sampling.sample_plain(logits, temperature, top_k, top_p, min_p, uniforms, mode)


@pytest.mark.parametrize("mode", list(Mode))
def test_masked_rows_get_tokens_of_their_masks(mode: Mode) -> None:
    kinds = {Mode.GREEDY: KINDS[:1] * 3, Mode.RANDOM: KINDS[:3], Mode.FILTERED: KINDS}[mode]
    numbers, logits = numbers_of(kinds), random_logits(len(kinds), 151_936).bfloat16()
    chance = np.random.default_rng(0)
    words = torch.from_numpy(chance.integers(-(2**31), 2**31, (len(kinds), 4748)).astype(np.int32))
    mask_of = torch.arange(len(kinds), dtype=torch.int32)
    mask_of[1] = -1
    expected = sampling.sample_plain(logits.clone(), *numbers, mode, sampling.Masks(mask_of, words))
    masks = sampling.Masks(mask_of.cuda(), words.cuda())
    changed, on_device = logits.cuda(), [number.cuda() for number in numbers]
    with without_waiting():
        found = sampling.sample_plain(changed, *on_device, mode, masks)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    allowed = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]] != 0
    allowed[1] = True
    assert np.array_equal(changed.isfinite().cpu().numpy(), allowed)


@contextmanager
def without_waiting() -> Iterator[None]:
    """An operation that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "scale"),
    [
        (151_936, torch.float32, 1.0),
        (151_936, torch.bfloat16, 4.0),
        (128_256, torch.float32, 4.0),
        (128_256, torch.bfloat16, 1.0),
        (50_257, torch.float32, 1.0),  # rows that are not aligned
        (50_257, torch.bfloat16, 4.0),
    ],
)
def test_tokens_are_those_of_the_cpu(vocab_size, dtype, scale):
    """All but a few draws whose number is within rounding of the border between two tokens."""
    kinds = KINDS * 4
    logits = random_logits(len(kinds), vocab_size, scale).to(dtype)
    for mode in Mode:
        numbers = numbers_of(kinds)
        found, expected = on_gpu(logits, numbers, mode), on_cpu(logits, numbers, mode)
        assert not found.bad.any()
        same = found.token_ids.cpu() == expected.token_ids
        assert same[numbers[0] == 0].all()
        assert same.sum() >= len(kinds) - 1, (mode, found.token_ids.tolist(), expected.token_ids.tolist())


def test_a_row_gets_the_same_token_alone_in_any_batch_and_in_any_mode():
    kinds = (KINDS * 29)[:257]
    logits, numbers = random_logits(257, 151_936), numbers_of(kinds)
    together = on_gpu(logits, numbers, Mode.FILTERED).token_ids.tolist()
    for rows in (slice(0, 1), slice(5, 6), slice(3, 40), slice(130, 257)):
        part = on_gpu(logits[rows], [number[rows] for number in numbers], Mode.FILTERED).token_ids.tolist()
        assert part == together[rows]
    plain = [row for row, kind in enumerate(kinds) if kind[1:] == (0, 1.0, 0.0)]
    random = on_gpu(logits, numbers, Mode.RANDOM).token_ids.tolist()
    assert [random[row] for row in plain] == [together[row] for row in plain]


def test_rows_that_are_not_numbers_are_flagged():
    logits = random_logits(8, 151_936)
    logits[1, 77], logits[3, 151_935], logits[5] = math.nan, math.inf, -math.inf
    for mode in Mode:
        found = on_gpu(logits, numbers_of([(1.0, 20, 0.9, 0.0)] * 8), mode)
        assert found.bad.tolist() == [False, True, False, True, False, True, False, False]
        assert ((found.token_ids >= 0) & (found.token_ids < 151_936)).all()


def test_frequencies_match_the_filtered_distribution():
    num_draws, vocab_size = 20_000, 1000
    row = random_logits(1, vocab_size, scale=1.5)
    numbers = numbers_of([(0.9, 200, 0.9, 0.0)] * num_draws)
    numbers[4] = torch.from_numpy(sampling.uniform(np.full(num_draws, 11, dtype=np.uint64), np.arange(num_draws)))
    tokens = on_gpu(row.expand(num_draws, -1).contiguous(), numbers, Mode.FILTERED).token_ids.cpu()
    probabilities = torch.softmax(row[0].double() / 0.9, -1)
    order = probabilities.argsort(descending=True)
    kept = probabilities[order[:200]]
    kept = kept[: int((kept.cumsum(0) < 0.9 * kept.sum()).sum()) + 1]
    expected = torch.zeros(vocab_size, dtype=torch.float64)
    expected[order[: len(kept)]] = kept / kept.sum() * num_draws
    counts = torch.bincount(tokens, minlength=vocab_size)
    assert counts[expected == 0].sum() == 0
    often = expected > 0
    statistic = ((counts[often] - expected[often]) ** 2 / expected[often]).sum().item()
    assert statistic < len(kept) + 5 * math.sqrt(2 * len(kept))


@pytest.mark.parametrize("mode", list(Mode))
def test_a_graph_samples_from_new_logits_and_numbers(mode):
    kinds = KINDS * 2
    logits = random_logits(len(kinds), 151_936).cuda()
    numbers = [number.cuda() for number in numbers_of(kinds)]
    temperature, top_k, top_p, min_p, uniforms = numbers
    sampling.sample_plain(logits, temperature, top_k, top_p, min_p, uniforms, mode)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampling.sample_plain(logits, temperature, top_k, top_p, min_p, uniforms, mode)
    for seed in (1, 2):
        fresh, fresh_numbers = random_logits(len(kinds), 151_936, seed=seed), numbers_of(kinds, seed)
        logits.copy_(fresh)
        for ours, theirs in zip(numbers, fresh_numbers):
            ours.copy_(theirs)
        captured.token_ids.fill_(-1)
        graph.replay()
        assert captured.token_ids.tolist() == on_gpu(fresh, fresh_numbers, mode).token_ids.tolist()


EVERY_KIND = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "top_p": 0.5, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": -0.5, "logprobs": 7},
    {"temperature": 0.0, "logit_bias": {3: 5.0, 8: -100.0}},
    {"temperature": 1.0, "allowed_token_ids": [1, 4, 9, 16, 25]},
    {"temperature": 1.0, "bad_words_token_ids": [[2], [5, 6]]},
    {"temperature": 0.9, "min_tokens": 4, "eos_token_ids": [0], "stop_token_ids": [7]},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.0, "no_repeat_ngram_size": 2},
    {"temperature": 0.0, "forced_eos_token_id": [11], "max_tokens": 4},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sampler_gives_the_same_on_both_devices_and_does_not_wait(dtype):
    reference = SamplingRows(len(EVERY_KIND))
    kept = SamplingRows(len(EVERY_KIND), PenaltyRows(50_257, torch.device("cuda")))
    for slot, kind in enumerate(EVERY_KIND):
        for rows in (reference, kept):
            rows.add(slot, SamplingParams(**kind), 1000 + slot, (1, 2, 3), (5, 9, 9))
    slots, seeds = np.arange(len(EVERY_KIND)), reference.seeds[: len(EVERY_KIND)]
    logits = random_logits(len(EVERY_KIND), 50_257).to(dtype)
    expected = Sampler(reference).sample(logits.clone(), slots, seeds)
    on_device = logits.cuda()
    Sampler(kept).sample(on_device, slots, seeds)  # compiles
    with without_waiting():
        found = Sampler(kept).sample(on_device, slots, seeds)
        kept.append_on_device(slots, found.token_ids)
        found._packed()
    assert found.to_numpy().tolist() == expected.to_numpy().tolist()
    assert found.bad_rows == []
    for row, lists in expected.logprobs_lists().items():
        ours = found.logprobs_lists()[row]
        assert ours.token_ids == lists.token_ids or dtype is torch.bfloat16  # bfloat16 has many equal logits
        assert ours.sampled_ranks == lists.sampled_ranks
        assert np.allclose(ours.logprobs, lists.logprobs, atol=1e-4)


@pytest.mark.parametrize(("num_searches", "num_beams", "num_candidates"), [(1, 32, 64), (32, 32, 64), (3, 5, 700)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidates_of_beams_are_the_best(num_searches, num_beams, num_candidates, dtype, monkeypatch):
    generator = torch.Generator(device="cuda").manual_seed(num_searches)
    num_rows = num_searches * num_beams
    logits = torch.randn(num_rows, 151_936, device="cuda", generator=generator).mul_(3).to(dtype)
    scores = -torch.rand(num_rows, device="cuda", generator=generator) * 4
    searches = [SearchRows(at, at + num_beams, num_candidates) for at in range(0, num_rows, num_beams)]
    beams.best_keys_of_searches(logits, scores, searches)  # compiles
    with without_waiting():
        keys = beams.best_keys_of_searches(logits, scores, searches)
    on_host = beams.candidates_of_keys(keys.cpu().numpy(), searches, 151_936)
    for search, candidates in zip(searches, on_host, strict=True):
        assert candidates is not None
        found = beams.Candidates(*map(torch.as_tensor, candidates))
        rows = slice(search.start, search.stop)
        sums = (torch.log_softmax(logits[rows].double(), -1) + scores[rows, None].double()).flatten()
        best = sums.topk(num_candidates).values.cpu()
        places = found.beams * 151_936 + found.tokens
        own = sums[places.cuda()].cpu()
        assert (own - best).abs().max() < 2e-5
        assert (own - found.scores.double()).abs().max() < 2e-5
        assert len(set(places.tolist())) == num_candidates
        assert (found.scores[1:] <= found.scores[:-1]).all()
        equal = found.scores[1:] == found.scores[:-1]
        assert (places[1:] > places[:-1])[equal].all()


def test_edited_candidates_are_those_of_the_cpu():
    logits, scores = random_logits(12, 50_257), -torch.rand(12)
    searches = [SearchRows(0, 4, 8), SearchRows(4, 12, 16)]

    def edit(logits: Tensor) -> None:
        logits[:, ::3] = -math.inf
        logits[5] *= 0.5

    expected = beams.best_candidates_of_searches(logits.clone(), scores, searches, edit, [5])
    found = beams.best_candidates_of_searches(logits.cuda(), scores.cuda(), searches, edit, [5])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None and theirs is not None
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.beams.tolist() == theirs.beams.tolist()
        assert np.allclose(ours.scores, theirs.scores, atol=1e-5)
