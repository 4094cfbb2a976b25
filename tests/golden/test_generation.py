"""The engine's greedy answers are those of transformers, whatever it does with batches, chunks, blocks and memory."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from ratoon.api.llm import LLM
from ratoon.core.outputs import RequestOutput, TokenLogprobs
from ratoon.core.params import SamplingParams
from ratoon.core.plan import BlockCopy, SchedulerOutput
from tests.depths import both_depths
from tests.golden.engines import (
    ENGINE_FAMILIES,
    engine,
    greedy,
    oracle_tokens,
    run,
    scheduler_of,
    tiny_model,
    tokens_of,
)
from tests.golden.marks import checked
from tests.golden.tiny_decoder_models import DECODERS
from tests.golden.tiny_models import VOCAB_SIZE, random_token_ids

LENGTHS = (33, 1, 61, 5, 16)  # below, at and above the ends of blocks
PROMPTS = [random_token_ids(length, seed=length) for length in LENGTHS]
COUNT = 14  # every prompt but the first crosses into another block

LLAMA = "llama with grouped heads"
NARROW_WINDOW = "mistral with a window shorter than the sequence"
WIDE_WINDOW = "mistral with a window wider than a block"
TWO_GROUPS = "qwen2 with windows by layer type"
QWEN3 = "qwen3 untied with heads that the native kernels take"
ODD_HEADS = "qwen3 untied with attention bias"  # 24 wide: only the reference backend takes them
SHAPES = [LLAMA, NARROW_WINDOW, WIDE_WINDOW, TWO_GROUPS, QWEN3, "gpt2"]
EVERYTHING = 4096  # a budget that holds all prompts in one step


def expected(family: str, prompts: list[list[int]] = PROMPTS, count: int = COUNT) -> list[list[int]]:
    return [oracle_tokens(family, prompt, count) for prompt in prompts]


@pytest.mark.parametrize("family", checked(ENGINE_FAMILIES, "llama with grouped heads", "gpt2"))
@pytest.mark.one_in(3)
def test_a_mixed_batch_gets_the_tokens_of_transformers_and_gets_them_again_from_the_prefix_cache(family: str) -> None:
    with engine(family) as llm:
        first = run(llm, PROMPTS, greedy(COUNT))
        assert tokens_of(first) == expected(family)
        assert [output.num_cached_tokens for output in first] == [0] * len(PROMPTS)
        second = run(llm, PROMPTS, greedy(COUNT))
        assert tokens_of(second) == expected(family)
        # Whole blocks, and at least one token is computed: a prompt of exactly one block has no hit.
        assert [output.num_cached_tokens for output in second] == [32, 0, 48, 0, 0]


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.one_in(2)
def test_long_answers_are_those_of_transformers(family: str) -> None:
    """Over the ends of windows and several blocks, with the one pass recorded that all steps repeat."""
    name = next(name for name in ENGINE_FAMILIES if name.startswith(family))
    with engine(name) as llm:
        assert tokens_of(run(llm, PROMPTS[:2], greedy(64))) == expected(name, PROMPTS[:2], 64)


@pytest.mark.parametrize("family", ENGINE_FAMILIES)
@pytest.mark.one_in(3)
def test_logprobs_of_prompt_and_answer_are_those_of_transformers(family: str) -> None:
    with engine(family, max_prefill_chunk=23) as llm:
        outputs = run(llm, PROMPTS, greedy(COUNT, logprobs=5, prompt_logprobs=3))
    for prompt, output in zip(PROMPTS, outputs):
        check_logprobs(family, prompt, output)


def check_logprobs(family: str, prompt: list[int], output: RequestOutput) -> None:
    (choice,) = output.outputs
    sequence = prompt + list(choice.token_ids)
    logprobs = tiny_model(family).oracle_logits(sequence).log_softmax(-1).numpy()  # row i is about token i + 1
    assert output.prompt_logprobs is not None and choice.logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert (len(output.prompt_logprobs), len(choice.logprobs)) == (len(prompt), len(choice.token_ids))
    for position in range(1, len(prompt)):
        row = output.prompt_logprobs[position]
        assert row is not None
        check_row(row, sequence[position], logprobs[position - 1], num_top=3)
    for index, row in enumerate(choice.logprobs):
        check_row(row, sequence[len(prompt) + index], logprobs[len(prompt) + index - 1], num_top=5)
    own = [float(logprobs[position - 1, sequence[position]]) for position in range(len(prompt), len(sequence))]
    assert choice.cumulative_logprob == pytest.approx(sum(own), abs=1e-4 * len(own))


def check_row(row: TokenLogprobs, token: int, oracle: np.ndarray, num_top: int) -> None:
    """The token itself and the top ones, with the ranks that transformers' numbers give them."""
    top_ranks = {entry.rank for entry in row.values()}
    assert token in row and set(range(1, num_top + 1)) <= top_ranks and len(row) in (num_top, num_top + 1)
    for candidate, entry in row.items():
        value = float(oracle[candidate])
        assert abs(entry.logprob - value) < 1e-4
        lowest, highest = int((oracle > value + 1e-5).sum()) + 1, int((oracle >= value - 1e-5).sum())
        assert entry.rank is not None and lowest <= entry.rank <= highest  # the same number, but for ties


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, EVERYTHING])
@pytest.mark.parametrize("family", [LLAMA, NARROW_WINDOW, TWO_GROUPS])
@pytest.mark.one_in(4)
def test_the_token_budget_of_a_step_changes_no_token(family: str, chunk: int) -> None:
    with engine(family, max_num_batched_tokens=chunk) as llm:
        assert tokens_of(run(llm, PROMPTS, greedy(COUNT))) == expected(family)
        assert tokens_of(run(llm, PROMPTS, greedy(COUNT))) == expected(family)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, EVERYTHING])
@pytest.mark.parametrize("family", [WIDE_WINDOW, QWEN3, "gpt2"])
@pytest.mark.one_in(4)
def test_the_longest_part_of_a_prompt_in_a_step_changes_no_token(family: str, chunk: int) -> None:
    with engine(family, max_prefill_chunk=chunk) as llm:
        assert tokens_of(run(llm, PROMPTS, greedy(COUNT))) == expected(family)
        longest = max(len(prompt) for prompt in PROMPTS)
        assert llm.stats().num_steps >= -(-longest // chunk) + COUNT - 1  # it really went in parts


@pytest.mark.parametrize(
    ("family", "block_size", "backend"),
    [
        (LLAMA, 16, "cpu"),
        (LLAMA, 32, "cpu"),
        (LLAMA, 8, "torch"),
        (NARROW_WINDOW, 32, "cpu"),
        (NARROW_WINDOW, 8, "torch"),
        (WIDE_WINDOW, 8, "torch"),
        (TWO_GROUPS, 32, "cpu"),
        (TWO_GROUPS, 8, "torch"),
        (TWO_GROUPS, 1, "torch"),
        (ODD_HEADS, 16, "torch"),
        (ODD_HEADS, 8, "torch"),
    ],
)
@pytest.mark.one_in(3)
def test_blocks_of_other_sizes_give_the_same_tokens(family: str, block_size: int, backend: str) -> None:
    with engine(family, block_size=block_size, num_blocks=1200 // block_size, max_num_batched_tokens=40) as llm:
        assert llm.describe()["attention_backend"] == backend
        assert tokens_of(run(llm, PROMPTS, greedy(COUNT))) == expected(family)
        again = run(llm, PROMPTS, greedy(COUNT))
        assert tokens_of(again) == expected(family)
        hits = [(len(prompt) - 1) // block_size * block_size for prompt in PROMPTS]
        assert [output.num_cached_tokens for output in again] == hits


@pytest.mark.parametrize("family", [LLAMA, TWO_GROUPS, "gpt2"])
def test_the_reference_backend_answers_as_the_native_one(family: str) -> None:
    with engine(family, attention_backend="torch") as llm:
        assert tokens_of(run(llm, PROMPTS, greedy(COUNT))) == expected(family)


@pytest.mark.parametrize(
    ("kept", "share", "error"), [("fp8", 1 / 4, 0.3), ("float16", 1 / 2, 0.002), ("int8", None, 0.05)]
)
def test_keys_and_values_in_fewer_bits_take_less_and_change_probabilities_a_little(
    kept: str, share: float | None, error: float
) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, ignore_eos=True)
    found = []
    for dtype in ("auto", kept):
        with engine(LLAMA, kv_cache_dtype=dtype) as llm:
            logprobs = [output.outputs[0].logprobs[0] for output in run(llm, PROMPTS, params)]
            found.append((llm.describe()["kv_bytes_per_token"], logprobs))
            if dtype in ("float16", "int8"):  # found in the cache, they are the same to the bit
                again = [output.outputs[0].logprobs[0] for output in run(llm, PROMPTS, params)]
                assert again == logprobs
                assert llm.describe()["attention_backend"] == "cpu"
    (exact_bytes, exact), (small_bytes, small) = found
    head_dim = tiny_model(LLAMA).config.head_dim
    assert small_bytes / exact_bytes == (share or 1 / 4 + 1 / head_dim)  # with a scale of 4 bytes a head
    assert small != exact
    for one, other in zip(small, exact, strict=True):
        for token in one.keys() & other.keys():
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=error)


# ---- prefix hits ----


@both_depths
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("chunk", [11, EVERYTHING])
@pytest.mark.one_in(5)
def test_prompts_that_share_a_prefix_compute_only_what_differs(family: str, chunk: int) -> None:
    base = PROMPTS[2]  # 61 tokens
    sharing = [base[:50], [*base, 7], [*base[:32], 3, 3], [*base[:31], 3, 3], base[:15] + [4] * 20]
    hits = [48, 48, 32, 16, 0]
    with engine(family, max_num_batched_tokens=chunk) as llm:
        run(llm, [base], greedy(COUNT))
        rows_before = computed_rows(llm)
        outputs = run(llm, sharing, greedy(COUNT))
        assert [output.num_cached_tokens for output in outputs] == hits
        # Rows through the model: what was not found, and every generated token but the last.
        num_computed = sum(map(len, sharing)) - sum(hits) + len(sharing) * (COUNT - 1)
        assert computed_rows(llm) - rows_before == num_computed
        assert tokens_of(outputs) == expected(family, sharing)


@both_depths
def test_prompts_of_one_batch_share_their_prefix_while_it_is_being_computed() -> None:
    base = PROMPTS[2]
    batch = [base, [*base[:40], 5], [*base[:20], 6]]
    with engine(LLAMA) as llm:
        outputs = run(llm, batch, greedy(COUNT))
        assert tokens_of(outputs) == expected(LLAMA, batch)
        assert [output.num_cached_tokens for output in outputs] == [0, 32, 16]


@both_depths
def test_an_answer_can_be_gone_on_from_without_computing_it_again() -> None:
    with engine(LLAMA) as llm:
        answer = tokens_of(run(llm, [PROMPTS[0]], greedy(COUNT)))[0]
        longer = PROMPTS[0] + answer + [8, 9]  # 33 + 13 of these 49 tokens were computed: two whole blocks
        (output,) = run(llm, [longer], greedy(COUNT))
        assert output.num_cached_tokens == 32
        longest = longer + tokens_of([output])[0]  # 63 tokens, of which the last was never computed
        (output,) = run(llm, [[*longest, 1]], greedy(COUNT))
        assert output.num_cached_tokens == 48
        assert tokens_of([output])[0] == oracle_tokens(LLAMA, [*longest, 1], COUNT)


def test_different_salts_share_nothing() -> None:
    with engine(LLAMA) as llm:
        prompt = [PROMPTS[2]]
        for salt, hit in (("a", 0), ("b", 0), ("a", 48), (None, 0)):
            (output,) = llm.generate(prompt, greedy(COUNT), cache_salt=salt, progress=False)
            assert output.num_cached_tokens == hit
            assert tokens_of([output]) == expected(LLAMA, prompt)


def test_without_prefix_caching_everything_is_computed_and_the_same() -> None:
    with engine(TWO_GROUPS, enable_prefix_caching=False) as llm:
        for _ in range(2):
            outputs = run(llm, PROMPTS, greedy(COUNT))
            assert tokens_of(outputs) == expected(TWO_GROUPS)
            assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)


def test_a_forgotten_prefix_is_computed_again() -> None:
    with engine(LLAMA) as llm:
        run(llm, PROMPTS, greedy(COUNT))
        assert llm.reset_prefix_cache()
        outputs = run(llm, PROMPTS, greedy(COUNT))
        assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
        assert tokens_of(outputs) == expected(LLAMA)


def computed_rows(llm: LLM) -> int:
    return llm._client.core.executor._worker.runner.num_computed_tokens


# ---- too little memory for all at once ----


@pytest.mark.parametrize(
    ("family", "num_blocks", "settings"),
    [
        (LLAMA, 9, {}),
        (LLAMA, 9, {"max_num_batched_tokens": 9}),
        (LLAMA, 9, {"enable_prefix_caching": False}),
        (LLAMA, 6, {"max_num_batched_tokens": 33}),  # exactly the longest sequence
        (LLAMA, 13, {"block_size": 8}),
        (NARROW_WINDOW, 5, {"max_num_batched_tokens": 16}),
        (WIDE_WINDOW, 7, {"max_num_batched_tokens": 16}),
        (TWO_GROUPS, 14, {}),
        (TWO_GROUPS, 12, {"max_num_batched_tokens": 21, "enable_prefix_caching": False}),
        (QWEN3, 9, {"policy": "priority"}),
        ("gpt2", 9, {"max_prefill_chunk": 7}),
    ],
)
@pytest.mark.one_in(3)
def test_preempted_requests_end_with_the_tokens_they_would_have_had(
    family: str, num_blocks: int, settings: dict, steps_in_flight: int
) -> None:
    with engine(family, num_blocks=num_blocks, **settings) as llm:
        for _ in range(2):  # and once more, with whatever the cache has kept
            preemptions = llm.stats().num_preemptions
            assert tokens_of(run(llm, PROMPTS, greedy(COUNT))) == expected(family)
            # With two in flight it happens less often: what a step frees is known before anything is preempted.
            assert llm.stats().num_preemptions > preemptions or steps_in_flight > 1


@both_depths
def test_prompt_logprobs_of_a_prompt_that_was_preempted_are_complete_and_right() -> None:
    with engine(LLAMA, num_blocks=8, max_num_batched_tokens=17) as llm:
        outputs = run(llm, PROMPTS, greedy(COUNT, logprobs=5, prompt_logprobs=3))
        assert llm.stats().num_preemptions > 0
    for prompt, output in zip(PROMPTS, outputs):
        check_logprobs(LLAMA, prompt, output)


# ---- several choices ----


@both_depths
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize(
    ("length", "num_copies"),
    [(21, 3), (16, 0), (61, 3)],  # the last of four choices may write where it is; a full block is not written
)
@pytest.mark.one_in(5)
def test_choices_fork_in_the_middle_of_a_block_and_all_go_on_as_transformers(
    family: str, length: int, num_copies: int
) -> None:
    prompts = [random_token_ids(length, seed=length)]
    with engine(family) as llm:
        copies = record_copies(llm)
        rows_before = computed_rows(llm)
        (output,) = run(llm, prompts, greedy(COUNT, n=4))
        assert [list(choice.token_ids) for choice in output.outputs] == expected(family, prompts) * 4
        num_groups = llm.describe()["kv_groups"]
        assert len(copies) == num_copies * num_groups
        assert computed_rows(llm) - rows_before == length + 4 * (COUNT - 1)  # the prompt once


@both_depths
def test_choices_beyond_the_rows_and_the_memory_of_a_step_take_turns() -> None:
    prompts = [PROMPTS[2], PROMPTS[3], PROMPTS[0]]
    with engine(TWO_GROUPS, max_num_seqs=3, num_blocks=14, max_num_batched_tokens=20) as llm:
        outputs = run(llm, prompts, [greedy(COUNT, n=5), greedy(COUNT, n=2), greedy(COUNT)])
        assert llm.stats().num_preemptions > 0
    for output, tokens in zip(outputs, expected(TWO_GROUPS, prompts)):
        assert all(list(choice.token_ids) == tokens for choice in output.outputs)
    assert [len(output.outputs) for output in outputs] == [5, 2, 1]


@both_depths
@pytest.mark.parametrize("family", [LLAMA, TWO_GROUPS])
def test_choices_that_are_preempted_go_on_with_their_own_tokens(family: str) -> None:
    prompts = [random_token_ids(21, seed=21), random_token_ids(37, seed=37)]
    num_groups = 2 if family == TWO_GROUPS else 1
    with engine(family, num_blocks=1 + 6 * num_groups) as llm:
        outputs = run(llm, prompts, greedy(COUNT, n=4))
        assert llm.stats().num_preemptions > 0
    for output, tokens in zip(outputs, expected(family, prompts)):
        assert [list(choice.token_ids) for choice in output.outputs] == [tokens] * 4


def record_copies(llm: LLM) -> list[BlockCopy]:
    kv = llm._client.core.executor._worker.runner.kv
    carry_out, seen = kv.move_blocks, []

    def move_blocks(plan: SchedulerOutput) -> None:
        seen.extend(plan.block_copies)
        carry_out(plan)

    kv.move_blocks = move_blocks
    return seen


# ---- all of it together, and endings ----


@both_depths
def test_requests_that_come_while_others_run_disturb_nobody() -> None:
    prompts = [random_token_ids(length, seed=length) for length in (40, 3, 18, 33, 61, 9)]
    with engine(LLAMA, num_blocks=14, max_num_batched_tokens=19) as llm:
        streams = []
        received: list[list[int]] = [[] for _ in prompts]
        waiting = list(enumerate(prompts))
        for turn in itertools.count():
            if turn % 3 == 0 and waiting:
                index, prompt = waiting.pop(0)
                streams.append((index, llm.stream(prompt, greedy(COUNT))))
            for index, stream in list(streams):
                output = next(stream, None)
                if output is None:
                    streams.remove((index, stream))
                else:
                    received[index] += output.outputs[0].token_ids
            if not waiting and not streams:
                break
        assert received == expected(LLAMA, prompts)


@both_depths
@pytest.mark.parametrize("family", [LLAMA, "gpt2"])
def test_an_end_token_ends_the_answer_where_it_ends_that_of_transformers(family: str) -> None:
    for prompt, tokens in zip(PROMPTS, expected(family)):
        end = tokens[-1]
        length = tokens.index(end) + 1
        with engine(family) as llm:
            params = greedy(COUNT, stop_token_ids=[end])
            (output,) = run(llm, [prompt], params)
        choice = output.outputs[0]
        assert list(choice.token_ids) == tokens[:length]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", end)


@both_depths
def test_a_stop_string_ends_its_own_choice_and_no_other() -> None:
    params = SamplingParams(n=4, temperature=1.5, seed=3, max_tokens=12, ignore_eos=True)
    with engine(LLAMA, skip_tokenizer=False) as llm:
        (free,) = run(llm, PROMPTS[:1], params)
        stop = free.outputs[2].text.split()[4]  # a word that choice 2 says
        (stopped,) = run(llm, PROMPTS[:1], msgspec.structs.replace(params, stop=[f" {stop} "]))
    num_stopped = 0
    for before, after in zip(free.outputs, stopped.outputs):
        words = [f"w{token}" for token in before.token_ids]
        if stop in words[1:-1]:
            num_stopped += 1
            assert (after.finish_reason, after.stop_reason) == ("stop", f" {stop} ")
            assert after.text.split() == words[: words.index(stop, 1)]
        else:
            assert (after.finish_reason, after.text) == ("length", before.text)
            assert list(after.token_ids) == list(before.token_ids)
    assert 0 < num_stopped < 4


@both_depths
def test_a_sequence_ends_at_the_models_length() -> None:
    prompt = random_token_ids(120, seed=120)
    with engine(LLAMA, num_blocks=9) as llm:
        (output,) = run(llm, [prompt], greedy(50))
        assert tokens_of([output])[0] == oracle_tokens(LLAMA, prompt, 8)
        assert output.outputs[0].finish_reason == "length"
        assert scheduler_of(llm).kv_cache.num_usable_blocks == 8  # 128 tokens, which is all there is


def test_the_vocabulary_of_the_tiny_models_is_used() -> None:
    """The tests above would prove little if every prompt led to the same tokens."""
    answers = expected(LLAMA)
    assert len({tuple(answer) for answer in answers}) == len(answers)
    assert len({token for answer in answers for token in answer}) > VOCAB_SIZE // 4
