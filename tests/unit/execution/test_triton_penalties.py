"""Penalties that are kept on the device, against the rule on the host: on the GPU where there is one, otherwise under
Triton's interpreter (tests/conftest.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.execution.sampling.penalty_rows import PenaltyRows
from ratoon.execution.sampling.sampling_rows import SamplingRows
from ratoon.layers.triton import penalties

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB_SIZE = 2500
KINDS = [
    {"repetition_penalty": 1.3},
    {"temperature": 0.0},
    {"frequency_penalty": 0.5, "presence_penalty": -0.25},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "presence_penalty": 1.0, "logit_bias": {7: 2.0}},
    {"presence_penalty": 0.5, "bad_words_token_ids": [[5, 6]]},
]
PROMPT = [1, 2, 2, 3, VOCAB_SIZE - 1, VOCAB_SIZE + 5]


def rows_with(penalty_rows: PenaltyRows | None) -> SamplingRows:
    rows = SamplingRows(2, penalty_rows)
    for slot, kind in enumerate(KINDS):
        rows.add(slot, SamplingParams(**kind), slot, PROMPT, [5, 9, 9])
    return rows


def random_logits(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def assert_edits_are_equal(kept: SamplingRows, reference: SamplingRows, slots: list[int], seed: int) -> None:
    logits = random_logits(len(slots), seed)
    found, expected = logits.clone().to(DEVICE), logits.clone()
    kept.edit(found, np.array(slots))
    reference.edit(expected, np.array(slots))
    assert torch.allclose(found.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert (found.cpu() != logits).any()


def test_edits_are_those_of_the_rules_as_texts_grow():
    kept, reference = rows_with(PenaltyRows(VOCAB_SIZE, DEVICE)), rows_with(None)
    all_slots = list(range(len(KINDS)))
    for step, tokens in enumerate(([9, 9, 9, 9, 5], [3, 4, 3, 2499, 6], [3, 4, 0, 5, 5])):
        assert_edits_are_equal(kept, reference, all_slots, step)
        token_ids = torch.tensor([*tokens, 1], device=DEVICE)  # more were drawn than appended
        kept.append_on_device(np.array(all_slots), token_ids)
        kept.append_tokens(np.array(all_slots), np.array(tokens))
        reference.append_tokens(np.array(all_slots), np.array(tokens))
    assert_edits_are_equal(kept, reference, [4, 2, 0], 10)


def test_the_host_does_not_wait_for_tokens_because_of_penalties():
    kept, reference = rows_with(PenaltyRows(VOCAB_SIZE, DEVICE)), rows_with(None)
    assert reference.need_tokens(np.array([0]))
    assert not kept.need_tokens(np.array([0, 1, 2, 3]))
    assert kept.need_tokens(np.array([4]))  # its bad words do


def test_a_slot_is_as_new_after_removal():
    penalty_rows = PenaltyRows(VOCAB_SIZE, DEVICE)
    kept = rows_with(penalty_rows)
    for slot in (0, 2):
        kept.remove(slot)
    kept.add(2, SamplingParams(repetition_penalty=2.0), 0, [8], [])
    reference = SamplingRows(3)
    reference.add(2, SamplingParams(repetition_penalty=2.0), 0, [8], [])
    assert_edits_are_equal(kept, reference, [2], 0)
    kept.remove(2)
    kept.add(2, SamplingParams(temperature=0.0), 0, [8], [])
    assert not kept.needs[2]
    assert len(penalty_rows) == 2


def test_beams_keep_their_rules_on_the_host():
    kept = SamplingRows(1, PenaltyRows(VOCAB_SIZE, DEVICE))
    kept.add(0, BeamSearchParams(beam_width=2, max_tokens=3, repetition_penalty=1.5), 0, [1, 2], [])
    assert len(kept.rules[0]) == 1


def test_counts_stay_at_their_largest_value():
    occurred = torch.tensor([[0, penalties.MAX_COUNT, penalties.MAX_COUNT | penalties.IN_PROMPT]], dtype=torch.int16)
    occurred = occurred.repeat(3, 1).to(DEVICE)
    index = torch.arange(3, device=DEVICE)
    penalties.count_tokens(occurred, index, index, torch.tensor([0, 1, 2], device=DEVICE))
    assert occurred.tolist() == [
        [1, penalties.MAX_COUNT, penalties.MAX_COUNT | penalties.IN_PROMPT],
        *[[0, penalties.MAX_COUNT, penalties.MAX_COUNT | penalties.IN_PROMPT]] * 2,
    ]
