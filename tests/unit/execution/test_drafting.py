"""Drafts on the device, in plans that are written by hand: a smaller model, and heads that read hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ratoon.attention.cpu import CpuAttentionBackend
from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.core.kv import AttachedGroup, group_layers
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import BlockCopy, CaptureStep
from ratoon.execution.drafting.drawn import DrawnDrafts
from ratoon.execution.sampling.sampler import Sampler
from ratoon.layers.native_ops import NativeOps
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model
from ratoon.models.head_source import DraftHeadSource, build_draft_head, parse_head_config
from tests.golden.draft_heads import RandomHead, guesses, random_head
from tests.golden.tiny_models import DictSource, TinyModel, tiny_llama, tiny_qwen3
from tests.unit.execution.test_model_runner import (
    BACKENDS,
    BLOCK_SIZE,
    CPU,
    LLAMA,
    OTHER,
    PROMPT,
    TWO_GROUPS,
    Driver,
    needs_kernels,
    oracle_greedy,
    poisoned,
)

SMALLER = tiny_qwen3(seed=3, head_dim=32)  # with heads of another size
HEADS = {
    "EAGLE-3": random_head("eagle3", LLAMA.config),
    "EAGLE-3 with few tokens": random_head("eagle3", LLAMA.config, seed=1, draft_vocab=40),
    "multi-token prediction": random_head("mtp", LLAMA.config, seed=2),
}


def drafting_driver(draft: TinyModel | RandomHead, tiny: TinyModel = LLAMA, backend: str = "torch") -> Driver:
    is_native = backend in ("native", "recorded")
    ops = NativeOps() if is_native else TorchOps()
    driver: dict[str, Any] = {}
    if isinstance(draft, TinyModel):
        built: Any = build_model(draft.config, draft.source, ops, CPU, torch.float32)
    else:
        config = parse_head_config(draft.raw_config, "head", tiny.config)
        target = build_model(tiny.config, tiny.source, ops, CPU, torch.float32)
        source = DraftHeadSource(config, DictSource(draft.tensors))
        built = build_draft_head(source, target, ops, CPU, torch.float32, tiny.config.max_position)
    groups = group_layers([layer.kv_spec(BLOCK_SIZE, "float32") for layer in built.attention_layers])
    kind = CpuAttentionBackend if is_native else TorchReferenceBackend
    return Driver(
        tiny,
        backend,
        attached=tuple(AttachedGroup(group.spec, group.layers, 0) for group in groups),
        draft=built,
        draft_backends=[kind() for _ in groups],
        **driver,
    )


def drafts_of(output: ModelRunnerOutput) -> list[int]:
    return output.draft_token_ids["a"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tiny", [LLAMA, TWO_GROUPS], ids=["one group", "two groups"])
@pytest.mark.one_in(3)
def test_the_drafts_are_the_tokens_that_the_smaller_model_goes_on_with(tiny: TinyModel, backend: str) -> None:
    driver = drafting_driver(SMALLER, tiny, backend)
    text = list(PROMPT)
    output = driver.step(new=[driver.new("a", PROMPT, 1)], draft_lengths={"a": 4})
    for _ in range(3):
        text += output.sampled_token_ids[0]
        assert drafts_of(output) == oracle_greedy(SMALLER, text, 4)
        output = driver.step(known={"a": len(text) - 1}, draft_lengths={"a": 4})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
@pytest.mark.one_in(5)
def test_the_drafts_are_those_of_a_plain_computation_of_the_head(head: RandomHead, backend: str) -> None:
    driver = drafting_driver(head, LLAMA, backend)
    text = list(PROMPT)
    output = driver.step(new=[driver.new("a", PROMPT, 1)], draft_lengths={"a": 4})
    for _ in range(3):
        text += output.sampled_token_ids[0]
        assert drafts_of(output) == guesses(head, LLAMA, text, 4)
        output = driver.step(known={"a": len(text) - 1}, draft_lengths={"a": 4})


SOURCES = {"model": SMALLER, **HEADS}


def expected_drafts(source: TinyModel | RandomHead, text: list[int], count: int) -> list[int]:
    if isinstance(source, RandomHead):
        return guesses(source, LLAMA, text, count)
    return oracle_greedy(source, text, count)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
@pytest.mark.parametrize("border", [1, 16, 30])
def test_a_prompt_in_parts_leaves_what_drafts_read(source: TinyModel | RandomHead, border: int) -> None:
    driver = drafting_driver(source)
    output = driver.step(new=[driver.new("a", PROMPT, 1)], counts={"a": border}, sampled=[])
    assert not output.draft_token_ids
    output = driver.step(known={"a": border}, counts={"a": len(PROMPT) - border}, draft_lengths={"a": 3})
    assert drafts_of(output) == expected_drafts(source, PROMPT + output.sampled_token_ids[0], 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
@pytest.mark.one_in(5)
def test_drafts_behind_rejected_ones_do_not_read_them(source: TinyModel | RandomHead, backend: str) -> None:
    driver = drafting_driver(source, backend=backend)
    truth = oracle_greedy(LLAMA, PROMPT, 8)
    driver.step(new=[driver.new("a", PROMPT, 1)], draft_lengths={"a": 4})
    wrong = (truth[3] + 1) % 90
    output = driver.step(
        known={"a": len(PROMPT)},
        counts={"a": 5},
        scheduled_spec_decode_tokens={"a": [truth[1], truth[2], wrong, wrong]},
        draft_lengths={"a": 4},
    )
    assert output.sampled_token_ids == [truth[1:4]]
    text = PROMPT + truth[:4]
    assert drafts_of(output) == expected_drafts(source, text, 4)
    output = driver.step(known={"a": len(text) - 1}, draft_lengths={"a": 2})
    assert output.sampled_token_ids == [[truth[4]]]
    assert drafts_of(output) == expected_drafts(source, PROMPT + truth[:5], 2)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_branches_draft_as_many_tokens_as_the_plan_says_and_their_blocks_hold(source: TinyModel | RandomHead) -> None:
    driver = drafting_driver(source)
    lag = 0 if isinstance(source, TinyModel) else 1
    long = PROMPT[:30]
    new = [driver.new("a", long, 1), driver.new("b", OTHER, 11), driver.new("c", OTHER[:9], 21)]
    new[0].block_ids = ([1, 2],)  # 32 slots: the token that is sampled is at position 30
    output = driver.step(new=new, draft_lengths={"a": 9, "b": 2})
    texts = {"a": long + output.sampled_token_ids[0], "b": OTHER + output.sampled_token_ids[1]}
    assert {req_id: len(tokens) for req_id, tokens in output.draft_token_ids.items()} == {"a": 2 + lag, "b": 2}
    for req_id, text in texts.items():
        drafts = output.draft_token_ids[req_id]
        assert drafts == expected_drafts(source, text, len(drafts))


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_what_drafts_read_is_copied_with_a_block(source: TinyModel | RandomHead) -> None:
    driver = drafting_driver(source)
    text = PROMPT[:20]
    first = driver.step(new=[driver.new("a", text, 1)], draft_lengths={"a": 3}).sampled_token_ids[0]
    fork = driver.new("b", text + first, 11, computed=20)
    fork.block_ids = ([1, 12, 13],)  # the first block is shared, the second a copy
    output = driver.step(new=[fork], block_copies=[BlockCopy("b", 0, 1, 2, 12)], draft_lengths={"b": 3})
    whole = text + first + output.sampled_token_ids[0]
    assert output.draft_token_ids["b"] == expected_drafts(source, whole, 3)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_a_text_that_an_extraction_has_computed_can_be_drafted_behind(source: TinyModel | RandomHead) -> None:
    driver = drafting_driver(source)
    text = PROMPT[:17]
    capture = CaptureStep("x", text, [(0, 17, True)], ([1, 2],), [16], [1], "float32")
    output = driver.step(captures=[capture], total_num_scheduled_tokens=17)
    assert output.hidden_states["x"].shape == (1, 1, LLAMA.config.hidden_size)
    new = driver.new("a", text, 1, computed=16)
    new.block_ids = ([1, 3],)  # the first block is found in the prefix cache
    output = driver.step(new=[new], draft_lengths={"a": 3})
    assert drafts_of(output) == expected_drafts(source, text + output.sampled_token_ids[0], 3)


def test_a_draft_ends_where_the_model_gives_no_number() -> None:
    bad = poisoned(tiny_llama(seed=3))
    driver = drafting_driver(bad)
    output = driver.step(new=[driver.new("a", [*PROMPT[:20], 96], 1)], draft_lengths={"a": 3})
    assert output.sampled_token_ids and not output.draft_token_ids


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_a_model_may_be_put_to_sleep_with_its_draft(source: TinyModel | RandomHead) -> None:
    driver = drafting_driver(source)
    built = driver.runner.drafting
    assert built is not None
    driver.runner.kv.release()
    built.drafter.clear()
    driver.runner.kv.allocate()
    output = driver.step(new=[driver.new("a", PROMPT, 1)], draft_lengths={"a": 2})
    assert drafts_of(output) == expected_drafts(source, PROMPT + output.sampled_token_ids[0], 2)


def test_a_branch_without_a_new_token_drafts_nothing() -> None:
    driver = drafting_driver(SMALLER, poisoned(LLAMA))
    params = SamplingParams(temperature=0.0)
    output = driver.step(
        new=[driver.new("a", [*PROMPT[:20], 96], 1, params=params), driver.new("b", OTHER, 11)],
        draft_lengths={"a": 3, "b": 3},
    )
    assert "a" in output.errors and list(output.draft_token_ids) == ["b"]


@needs_kernels
def test_steps_whose_states_a_head_reads_are_recorded() -> None:
    driver, head = drafting_driver(HEADS["EAGLE-3"], LLAMA, "recorded"), HEADS["EAGLE-3"]
    text = list(PROMPT)
    output = driver.step(new=[driver.new("a", PROMPT, 1)], draft_lengths={"a": 2})
    assert driver.runner.recorded is not None
    for number in range(5):
        text += output.sampled_token_ids[0]
        assert drafts_of(output) == guesses(head, LLAMA, text, 2)
        assert (len(driver.runner.recorded) > 0) == (number > 1), "from the second step of a shape on"
        output = driver.step(known={"a": len(text) - 1}, draft_lengths={"a": 2})


def test_a_draft_whose_distribution_is_lost_is_not_taken_for_one_of_another_text() -> None:
    driver = drafting_driver(LLAMA)
    rows = driver.runner.sampling_rows
    drawn = DrawnDrafts(driver.runner.input_batch, Sampler(rows, by_rejection=True))
    params = {"a": SamplingParams(temperature=1.0, seed=1), "b": SamplingParams(temperature=0.0)}
    driver.step(new=[driver.new(name, PROMPT, 1, params=one) for name, one in params.items()])
    batch = driver.runner.input_batch
    own = np.array([batch.row_of[name] for name in params])
    for number in range(2):
        drawn.draw(torch.randn(2, LLAMA.config.vocab_size), list(params), own, number)
    assert drawn.take("b", int(batch.num_tokens[own[1]])) == [], "the likeliest tokens are certain"
    assert drawn.take("a", int(batch.num_tokens[own[0]]) + 1) is None, "they were drafted behind a shorter text"
    drawn.draw(torch.randn(2, LLAMA.config.vocab_size), list(params), own, 0)
    distributions = drawn.take("a", int(batch.num_tokens[own[0]]))
    assert distributions is not None and len(distributions) == 1 and float(distributions[0].sum()) == pytest.approx(1)
    assert drawn.take("a", int(batch.num_tokens[own[0]])) is None, "each draft is checked once"
