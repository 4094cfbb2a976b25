"""What holds for any logits and any parameters: masks are kept, filters are kept, rows do not see each other."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.core.params import SamplingParams
from ratoon.execution.sampling.sampler import Sampler
from ratoon.execution.sampling.sampling_rows import SamplingRows
from ratoon.layers import sampling
from ratoon.layers.sampling import Filters

logit_values = st.one_of(
    st.floats(-30, 30, width=32), st.sampled_from([0.0, 1.0, -1.0, 5.0, -math.inf, 1e30, -1e30]), st.just(-math.inf)
)


@st.composite
def logit_rows(draw) -> torch.Tensor:
    """One row of logits with at least one token left; repeated values, so that there are ties, to any length."""
    values = draw(st.lists(logit_values, min_size=1, max_size=40))
    values.append(draw(st.floats(-30, 30, width=32)))
    repeats = draw(st.sampled_from([1, 7, 100]))
    return torch.tensor(values, dtype=torch.float32).repeat(repeats)[None]


uniforms = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2.0**-53, 0.5]))
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-4, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 127, 128, 600, 10_000]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=150, deadline=None)
@given(row=logit_rows(), uniform=uniforms, temperature=st.sampled_from([1e-5, 0.3, 1.0, 4.0]))
def test_a_drawn_token_has_a_probability(row, uniform, temperature):
    chosen = sampling.draw(row, torch.tensor([temperature]), torch.tensor([uniform], dtype=torch.float64))
    assert not chosen.bad.item()
    assert sampling.exact_probabilities(row / temperature)[0, chosen.token_ids.item()] > 0


@settings(max_examples=150, deadline=None)
@given(row=logit_rows(), uniform=uniforms, params=sampling_params)
def test_a_filtered_token_passes_every_filter(row, uniform, params):
    temperature = max(params.temperature, 1e-4)
    filters = Filters(torch.tensor([params.top_k]), torch.tensor([params.top_p]).double(), torch.tensor([params.min_p]))
    number = torch.tensor([uniform], dtype=torch.float64)
    token = sampling.draw_filtered(row, torch.tensor([temperature]), filters, number).token_ids.item()
    probabilities = torch.softmax((row[0].double() / temperature), -1)
    own, larger = probabilities[token], probabilities[probabilities > probabilities[token] * (1 + 1e-5)]
    assert own > 0
    assert own >= params.min_p * probabilities.max() * (1 - 1e-5)
    assert params.top_k == 0 or len(larger) < params.top_k
    reachable = probabilities[probabilities >= params.min_p * probabilities.max()].sum()
    assert larger.sum() < params.top_p * reachable + 1e-6 or len(larger) == 0


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(sampling_params, min_size=2, max_size=6),
    width=st.sampled_from([1, 9, 300, 2600]),
    data_seed=st.integers(0, 2**31),
    step=st.sampled_from([0.0, 0.5]),
)
def test_a_row_alone_gets_the_bits_that_it_gets_in_a_batch(kinds, width, data_seed, step):
    logits = torch.randn(len(kinds), width, generator=torch.Generator().manual_seed(data_seed)) * 3
    logits = (logits / step).round() * step if step else logits  # coarse steps: ties
    rows = SamplingRows(len(kinds))
    for slot, params in enumerate(kinds):
        rows.add(slot, params, data_seed + slot, [0, width - 1], [0])
    sampler, slots = Sampler(rows), np.arange(len(kinds))
    together = sampler.sample(logits, slots, rows.seeds)
    for slot in slots.tolist():
        alone = sampler.sample(logits[slot : slot + 1], slots[slot : slot + 1], rows.seeds[slot : slot + 1])
        assert alone.to_numpy().tolist()[0] == together.to_numpy().tolist()[slot]
        assert alone.logprobs_lists().get(0) == together.logprobs_lists().get(slot)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40))
def test_random_numbers_are_below_one(seed, position):
    value = sampling.uniform(np.array([seed], dtype=np.uint64), np.array([position]))[0]
    assert 0 <= value < 1
