"""The runner, driven by plans that are written by hand: it executes exactly what the plan says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.attention.cpu import CpuAttentionBackend
from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.core.kv import AttachedGroup, KVCacheConfig, group_layers
from ratoon.core.outputs import LogprobsLists, ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import BlockCopy, CachedRequestData, NewRequestData, SchedulerOutput
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.inputs.step_inputs import InputPreparation, ReadRows
from ratoon.execution.model_runner import ModelRunner
from ratoon.execution.readers import prompt_logprobs
from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.ops import Ops
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model
from tests.golden.tiny_models import DictSource, TinyModel, random_token_ids, tiny_llama, tiny_qwen2

CPU = torch.device("cpu")
ATTENTION = {"native": CpuAttentionBackend, "recorded": CpuAttentionBackend, "triton": TritonAttentionBackend}
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)
WITH_LOGPROBS = SamplingParams(temperature=0.0, logprobs=2)
NAN_TOKEN = 96  # its embedding in the poisoned model
PROMPT = random_token_ids(37, seed=1)
OTHER = random_token_ids(21, seed=2)

LLAMA = tiny_llama()
TWO_GROUPS = tiny_qwen2(window=6, first_window_layer=1)
needs_kernels = pytest.mark.skipif(bool(native_ops_reasons(CPU, torch.float32)), reason="no native kernels here")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None, reason="needs Triton's interpreter"
)
# "resident": inputs prepared by kernels, under Triton's interpreter, with the torch backend
NATIVE = [pytest.param(name, marks=needs_kernels) for name in ("native", "recorded")]
BACKENDS = ["torch", *NATIVE, pytest.param("resident", marks=interpreted)]


class Driver:
    """A runner, with helpers that write plans for it and execute them."""

    def __init__(
        self,
        tiny: TinyModel = LLAMA,
        backend: str = "torch",
        max_num_reqs: int = 8,
        ops: Ops | None = None,
        attached: tuple[AttachedGroup, ...] = (),
        **settings: Any,
    ) -> None:
        if ops is None:
            ops = NativeOps() if backend in ("native", "recorded") else TorchOps()
        settings.setdefault("record", backend == "recorded")
        settings.setdefault("inputs_on_device", backend == "resident")
        model = build_model(tiny.config, tiny.source, ops, CPU, torch.float32)
        self.groups = group_layers([layer.kv_spec(BLOCK_SIZE, "float32") for layer in model.attention_layers])
        self.runner = ModelRunner(
            model,
            [ATTENTION.get(backend, TorchReferenceBackend)() for _ in self.groups],
            KVCacheConfig(num_blocks=40, block_size=BLOCK_SIZE, groups=self.groups, attached=attached),
            dtype=torch.float32,
            device=CPU,
            max_model_len=tiny.config.max_position,
            max_num_reqs=max_num_reqs,
            max_num_tokens=256,
            **settings,
        )

    def new(
        self,
        req_id: str,
        token_ids: Sequence[int],
        first_block: int,
        *,
        params: SamplingParams = GREEDY,
        seed: int = 0,
        computed: int = 0,
        num_prompt: int | None = None,
    ) -> NewRequestData:
        """With room for one more block of tokens, in consecutive blocks; groups are 10 ids apart."""
        blocks = range(first_block, first_block + len(token_ids) // BLOCK_SIZE + 2)
        return NewRequestData(
            req_id=req_id,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids) if num_prompt is None else num_prompt,
            params=params,
            seed=seed,
            block_ids=tuple([block + 10 * group for block in blocks] for group in range(len(self.groups))),
            num_computed_tokens=computed,
        )

    def step(
        self,
        *,
        new: Sequence[NewRequestData] = (),
        known: dict[str, int] | None = None,  # id → computed before
        counts: dict[str, int] | None = None,
        sampled: Sequence[str] | None = None,  # all, unless said
        **rest: Any,
    ) -> ModelRunnerOutput:
        known = known or {}
        counts = counts or {}
        for branch in new:
            counts.setdefault(branch.req_id, len(branch.token_ids) - branch.num_computed_tokens)
        for req_id in known:
            counts.setdefault(req_id, 1)
        rest.setdefault(
            "scheduled_cached_reqs", CachedRequestData(list(known), list(known.values()), [None] * len(known))
        )
        rest.setdefault("total_num_scheduled_tokens", sum(counts.values()))
        self.runner.execute_model(
            SchedulerOutput(
                scheduled_new_reqs=list(new),
                num_scheduled_tokens=counts,
                sampled_req_ids=list(counts) if sampled is None else list(sampled),
                **rest,
            )
        )
        output = self.runner.sample_tokens()
        return output if isinstance(output, ModelRunnerOutput) else output.get_output()

    def decode(self, req_id: str, computed: int, count: int) -> list[int]:
        """`count` more tokens of one branch, one step each."""
        return [token_of(self.step(known={req_id: computed + i}), req_id) for i in range(count)]


def token_of(output: ModelRunnerOutput, req_id: str) -> int:
    (token,) = output.sampled_token_ids[output.req_ids.index(req_id)]
    return token


def oracle_greedy(tiny: TinyModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(tiny.oracle_logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tiny", [LLAMA, TWO_GROUPS], ids=["one group", "two groups"])
def test_branches_of_a_batch_get_the_tokens_that_the_model_alone_would_give_them(tiny: TinyModel, backend: str) -> None:
    driver = Driver(tiny, backend)
    output = driver.step(new=[driver.new("a", PROMPT, 1), driver.new("b", OTHER, 21)])
    assert output.req_ids == ["a", "b"] and not output.errors
    tokens: dict[str, list[int]] = {"a": [token_of(output, "a")], "b": [token_of(output, "b")]}
    for i in range(5):
        output = driver.step(known={"b": len(OTHER) + i, "a": len(PROMPT) + i})
        for req_id, so_far in tokens.items():
            so_far.append(token_of(output, req_id))
    assert tokens == {"a": oracle_greedy(tiny, PROMPT, 6), "b": oracle_greedy(tiny, OTHER, 6)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("border", [1, 15, 16, 30])
def test_a_prompt_in_two_plans_is_the_prompt_in_one(border: int, backend: str) -> None:
    whole = Driver(backend=backend)
    expected = whole.step(new=[whole.new("a", PROMPT, 1, params=WITH_LOGPROBS)])
    parts = Driver(backend=backend)
    nothing = parts.step(new=[parts.new("a", PROMPT, 1, params=WITH_LOGPROBS)], counts={"a": border}, sampled=[])
    assert nothing == ModelRunnerOutput()
    output = parts.step(known={"a": border}, counts={"a": len(PROMPT) - border})
    assert output.sampled_token_ids == expected.sampled_token_ids
    assert_same_logprobs(output.logprobs["a"], expected.logprobs["a"], exactly=backend in ("native", "recorded"))


def assert_same_logprobs(ours: LogprobsLists, theirs: LogprobsLists, exactly: bool) -> None:
    assert (ours.token_ids, ours.sampled_ranks) == (theirs.token_ids, theirs.sampled_ranks)
    if exactly:
        assert ours.logprobs == theirs.logprobs
    else:
        np.testing.assert_allclose(np.array(ours.logprobs), np.array(theirs.logprobs), atol=1e-5)


def test_blocks_that_come_later_are_appended_to_the_table() -> None:
    driver = Driver()
    short = NewRequestData("a", PROMPT, len(PROMPT), GREEDY, 0, ([5],), 0)
    driver.step(new=[short], counts={"a": 16}, sampled=[])
    output = driver.step(counts={"a": 21}, scheduled_cached_reqs=CachedRequestData(["a"], [16], [([9, 3],)]))
    assert token_of(output, "a") == oracle_greedy(LLAMA, PROMPT, 1)[0]
    assert driver.runner.input_batch.block_tables[0][driver.runner.input_batch.row_of["a"]].tolist()[:4] == [5, 9, 3, 0]


# ---- coming and going ----


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tiny", [LLAMA, TWO_GROUPS], ids=["one group", "two groups"])
def test_a_branch_that_is_dropped_and_comes_back_elsewhere_goes_on_as_if_nothing_had_happened(
    tiny: TinyModel, backend: str
) -> None:
    expected = oracle_greedy(tiny, PROMPT, 6)
    driver = Driver(tiny, backend)
    tokens = [token_of(driver.step(new=[driver.new("a", PROMPT, 1)]), "a")]
    tokens += driver.decode("a", len(PROMPT), 2)
    # Preempted: another takes its row and its blocks.
    output = driver.step(new=[driver.new("b", OTHER, 1)], preempted_req_ids=["a"])
    assert token_of(output, "b") == oracle_greedy(tiny, OTHER, 1)[0]
    # Back in the step in which the other ends, with its output, computed anew in other blocks.
    back = driver.new("a", PROMPT + tokens, 4, num_prompt=len(PROMPT))
    tokens.append(token_of(driver.step(new=[back], finished_req_ids=["b"]), "a"))
    tokens += driver.decode("a", len(PROMPT) + 3, 2)
    assert tokens == expected
    assert list(driver.runner.input_batch.row_of) == ["a"]


def test_a_branch_can_be_dropped_and_added_in_one_plan() -> None:
    driver = Driver()
    first = token_of(driver.step(new=[driver.new("a", PROMPT, 1)]), "a")
    again = driver.new("a", [*PROMPT, first], 5, num_prompt=len(PROMPT))
    output = driver.step(new=[again], preempted_req_ids=["a"])
    assert [first, token_of(output, "a")] == oracle_greedy(LLAMA, PROMPT, 2)


def test_a_resumed_branch_draws_the_random_numbers_that_it_would_have_drawn() -> None:
    params = SamplingParams(temperature=1.5, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.5)
    driver = Driver()
    expected = [token_of(driver.step(new=[driver.new("a", PROMPT, 1, params=params, seed=5)]), "a")]
    expected += driver.decode("a", len(PROMPT), 7)
    driver = Driver()
    tokens = [token_of(driver.step(new=[driver.new("a", PROMPT, 1, params=params, seed=5)]), "a")]
    tokens += driver.decode("a", len(PROMPT), 3)
    back = driver.new("a", PROMPT + tokens, 7, params=params, seed=5, num_prompt=len(PROMPT))
    tokens.append(token_of(driver.step(new=[back], preempted_req_ids=["a"]), "a"))
    tokens += driver.decode("a", len(PROMPT) + 4, 3)
    assert tokens == expected
    assert len(set(tokens)) > 3


def test_ids_that_the_runner_never_heard_of_can_end() -> None:
    driver = Driver()
    output = driver.step(new=[driver.new("a", PROMPT, 1)], finished_req_ids=["ghost"], preempted_req_ids=["ghost#1"])
    assert output.req_ids == ["a"]


def test_an_empty_plan_gives_an_empty_result_and_still_drops_rows() -> None:
    driver = Driver()
    assert driver.step() == ModelRunnerOutput()
    driver.step(new=[driver.new("a", PROMPT, 1)])
    assert driver.step(finished_req_ids=["a"]) == ModelRunnerOutput()
    assert len(driver.runner.input_batch) == 0
    assert driver.runner.sample_tokens() == ModelRunnerOutput()


def test_a_row_that_is_given_up_leaves_no_sampling_demands_to_the_next() -> None:
    driver = Driver(max_num_reqs=1)
    wild = SamplingParams(temperature=2.0, logprobs=3, allowed_token_ids=[4], min_tokens=9, eos_token_ids=[2])
    assert token_of(driver.step(new=[driver.new("a", PROMPT, 1, params=wild)]), "a") == 4
    output = driver.step(new=[driver.new("b", PROMPT, 1)], finished_req_ids=["a"])
    assert token_of(output, "b") == oracle_greedy(LLAMA, PROMPT, 1)[0]
    assert output.logprobs == {}


def test_only_the_rows_that_the_plan_names_are_sampled() -> None:
    driver = Driver()
    output = driver.step(
        new=[driver.new("half", PROMPT, 1), driver.new("whole", OTHER, 5)], counts={"half": 20, "whole": 21},
        sampled=["whole"],
    )  # fmt: skip
    assert output.req_ids == ["whole"]
    rows = driver.runner.input_batch
    assert rows.num_tokens[rows.row_of["half"]] == len(PROMPT)
    assert driver.runner.num_computed_tokens == 41


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tiny", [LLAMA, TWO_GROUPS], ids=["one group", "two groups"])
def test_the_last_layer_attends_with_the_rows_that_are_read_and_stores_those_of_all(
    tiny: TinyModel, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, a branch that decodes and a part of another prompt; with all rows, results are the same."""
    results, counts = [], []
    for alone in (True, False):
        driver = Driver(tiny, backend)
        of_rows = ReadRows.of
        with monkeypatch.context() as patch:
            patch.setattr(ReadRows, "of", of_rows if alone else lambda rows, inputs: None)
            for attention in driver.runner.kv.backends:
                patch.setattr(
                    attention,
                    "attend",
                    lambda layer, q, *rest, f=attention.attend: counts.append(len(q)) or f(layer, q, *rest),
                )
            driver.step(new=[driver.new("a", PROMPT, 1, params=WITH_LOGPROBS)])
            output = driver.step(
                new=[driver.new("b", OTHER, 4, params=WITH_LOGPROBS), driver.new("half", PROMPT, 6)],
                known={"a": len(PROMPT)}, counts={"half": 20}, sampled=["b", "a"],
            )  # fmt: skip
            results.append([*output.logprobs.values()])
            output = driver.step(known={"half": 20}, counts={"half": 17})  # reads what the part has stored
            results[-1].append(token_of(output, "half"))
        if alone:
            num_layers = tiny.config.num_layers
            assert counts == [*[37] * (num_layers - 1), 1, *[42] * (num_layers - 1), 2, *[17] * (num_layers - 1), 1]
    ours, theirs = results
    assert ours[-1] == theirs[-1] == oracle_greedy(tiny, PROMPT, 1)[0]
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert_same_logprobs(one, other, exactly=backend in ("native", "recorded"))


def test_where_most_rows_are_read_the_last_layer_attends_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    (attention,) = driver.runner.kv.backends
    counts: list[int] = []
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda layer, q, *rest: counts.append(len(q)) or attend(layer, q, *rest))
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    output = driver.step(new=[driver.new("a", PROMPT, 1, params=params)])
    assert set(counts) == {len(PROMPT)}
    assert len(output.prompt_logprobs["a"].rows.token_ids) == len(PROMPT) - 1


def test_a_plan_whose_step_raised_leaves_the_runner_usable() -> None:
    driver = Driver()
    forward = driver.runner.model.forward
    driver.runner.model.forward = lambda *arguments: (_ for _ in ()).throw(RuntimeError("device lost"))
    with pytest.raises(RuntimeError, match="device lost"):
        driver.step(new=[driver.new("a", PROMPT, 1)])
    driver.runner.model.forward = forward
    assert driver.runner.sample_tokens() == ModelRunnerOutput()
    output = driver.step(new=[driver.new("b", OTHER, 1)], finished_req_ids=["a"])
    assert token_of(output, "b") == oracle_greedy(LLAMA, OTHER, 1)[0]


# ---- copy-on-write and fan-out ----


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tiny", [LLAMA, TWO_GROUPS], ids=["one group", "two groups"])
def test_forks_write_into_copies_and_the_shared_block_stays_as_it_was(tiny: TinyModel, backend: str) -> None:
    """A prompt of 21 tokens in blocks 1 and 2. The known branch and the new one both leave block 2 for their own."""
    driver = Driver(tiny, backend)
    groups = range(len(driver.groups))
    first = token_of(driver.step(new=[driver.new("a", OTHER, 1)]), "a")
    shared = [tensor[2 + 10 * group].clone() for group in groups for tensor in driver.runner.kv._tensors]
    other = (first + 1) % 97
    child = driver.new("a#1", [*OTHER, other], 1, computed=len(OTHER), num_prompt=len(OTHER))
    for group in groups:
        child.block_ids[group][1] = 8 + 10 * group
    copies = [BlockCopy("a", group, 1, 2 + 10 * group, 7 + 10 * group) for group in groups]
    copies += [BlockCopy("a#1", group, 1, 2 + 10 * group, 8 + 10 * group) for group in groups]
    output = driver.step(known={"a": len(OTHER)}, new=[child], block_copies=copies)
    assert [first, token_of(output, "a")] == oracle_greedy(tiny, OTHER, 2)
    assert token_of(output, "a#1") == oracle_greedy(tiny, [*OTHER, other], 1)[0]
    now = [tensor[2 + 10 * group] for group in groups for tensor in driver.runner.kv._tensors]
    assert all(torch.equal(before, after) for before, after in zip(shared, now))
    rows = driver.runner.input_batch
    for group in groups:
        assert rows.block_tables[group][rows.row_of["a"], :3].tolist() == [
            1 + 10 * group,
            7 + 10 * group,
            3 + 10 * group,
        ]
        assert rows.block_tables[group][rows.row_of["a#1"], 1] == 8 + 10 * group
    tokens = driver.decode("a", len(OTHER) + 1, 3)
    assert [first, token_of(output, "a"), *tokens] == oracle_greedy(tiny, OTHER, 5)


def test_a_block_can_be_the_source_of_one_copy_and_the_target_of_another() -> None:
    driver = Driver()
    tokens = {"a": [token_of(driver.step(new=[driver.new("a", OTHER, 1)]), "a")]}
    tokens["b"] = [token_of(driver.step(new=[driver.new("b", PROMPT[:21], 5)]), "b")]
    # Block 2 of `a` moves to 9; at once `b` moves its own block 6 into the 2 that has become free.
    copies = [BlockCopy("a", 0, 1, 2, 9), BlockCopy("b", 0, 1, 6, 2)]
    output = driver.step(known={"a": 21, "b": 21}, block_copies=copies)
    for req_id, prompt in (("a", OTHER), ("b", PROMPT[:21])):
        assert [*tokens[req_id], token_of(output, req_id)] == oracle_greedy(LLAMA, prompt, 2)


def test_children_of_a_fan_out_are_drawn_from_one_row_each_with_its_own_seed() -> None:
    params = SamplingParams(temperature=2.0, logprobs=1, n=4)
    seeds = {"a": 11, "a#1": 12, "a#2": 13, "a#3": 14}
    alone = {}
    for name, seed in seeds.items():
        driver = Driver()
        output = driver.step(new=[driver.new("x", PROMPT, 1, params=params, seed=seed)])
        alone[name] = (token_of(output, "x"), output.logprobs["x"])
    driver = Driver()
    output = driver.step(
        new=[driver.new("b", OTHER, 6), driver.new("a", PROMPT, 1, params=params, seed=11)],
        fanout={"a": [(child, seeds[child]) for child in ("a#1", "a#2", "a#3")]},
    )
    assert output.req_ids == ["b", "a", "a#1", "a#2", "a#3"]
    for name, (token, logprobs) in alone.items():
        assert token_of(output, name) == token
        assert_same_logprobs(output.logprobs[name], logprobs, exactly=False)
    assert len({token for token, _ in alone.values()}) > 1
    rows = driver.runner.input_batch
    assert sorted(rows.row_of) == ["a", "b"]  # children have no row yet
    assert rows.num_tokens[rows.row_of["a"]] == len(PROMPT) + 1
    assert rows.token_ids[rows.row_of["a"], len(PROMPT)] == alone["a"][0]


def test_a_child_goes_on_with_its_own_random_stream() -> None:
    """Choice 1 after the fork draws what a branch with its seed would have drawn alone."""
    params = SamplingParams(temperature=1.5)
    driver = Driver()
    expected = [token_of(driver.step(new=[driver.new("x", OTHER, 1, params=params, seed=12)]), "x")]
    expected += driver.decode("x", len(OTHER), 3)
    driver = Driver()
    output = driver.step(new=[driver.new("a", OTHER, 1, params=params, seed=11)], fanout={"a": [("a#1", 12)]})
    tokens = [token_of(output, "a#1")]
    child = driver.new("a#1", [*OTHER, *tokens], 1, params=params, seed=12, computed=21, num_prompt=21)
    child.block_ids[0][1] = 8
    output = driver.step(known={"a": 21}, new=[child], block_copies=[BlockCopy("a#1", 0, 1, 2, 8)])
    tokens.append(token_of(output, "a#1"))
    tokens += [token_of(driver.step(known={"a": 22 + i, "a#1": 22 + i}), "a#1") for i in range(2)]
    assert tokens == expected


# ---- prompt log-probabilities ----


@pytest.mark.parametrize("rows_at_a_time", [5, 128])
@pytest.mark.parametrize("borders", [[37], [1, 37], [16, 37], [15, 17, 36, 37]])
def test_prompt_logprobs_join_at_the_borders_of_chunks(
    borders: list[int], rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "ROWS_AT_ONCE", rows_at_a_time)
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    driver = Driver()
    rows: list[list[float]] = []
    for start, end in zip([0, *borders], borders):
        last = end == len(PROMPT)
        step: dict[str, Any] = {"counts": {"a": end - start}, "sampled": ["a"] if last else []}
        if start:
            output = driver.step(known={"a": start}, **step)
        else:
            output = driver.step(new=[driver.new("a", PROMPT, 1, params=params)], **step)
        if end - start == 1 and last:  # the last row is about the first new token, which is no prompt token
            assert output.prompt_logprobs == {}
            continue
        chunk = output.prompt_logprobs["a"]
        assert chunk.start == len(rows) + 1
        for own, values, ids in zip(PROMPT[chunk.start :], chunk.rows.logprobs, chunk.rows.token_ids):
            assert ids[0] == own and len(values) == 3
            rows.append(values)
    logprobs = LLAMA.oracle_logits(PROMPT).log_softmax(-1)[:-1]
    own = logprobs[range(36), PROMPT[1:]]
    expected = torch.cat([own[:, None], logprobs.topk(2).values], dim=1)
    np.testing.assert_allclose(np.array(rows), expected.numpy(), atol=1e-4)


def test_decoding_brings_no_further_prompt_logprobs() -> None:
    driver = Driver()
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    output = driver.step(new=[driver.new("a", PROMPT, 1, params=params), driver.new("b", OTHER, 6)])
    assert list(output.prompt_logprobs) == ["a"]
    assert driver.step(known={"a": len(PROMPT), "b": len(OTHER)}).prompt_logprobs == {}


# ---- NaN ----


def poisoned(tiny: TinyModel) -> TinyModel:
    """The same model, but NAN_TOKEN yields NaN keys, values and logits."""
    tensors = dict(tiny.source.tensors)
    embedding = tensors["model.embed_tokens.weight"].clone()
    embedding[NAN_TOKEN] = float("nan")
    tensors["model.embed_tokens.weight"] = embedding
    return tiny._replace(source=DictSource(tensors))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_branch_whose_logits_are_nan_fails_alone(backend: str) -> None:
    driver = Driver(poisoned(LLAMA), backend)
    bad = [*PROMPT[:20], NAN_TOKEN]
    output = driver.step(
        new=[driver.new("a", PROMPT, 1, params=WITH_LOGPROBS), driver.new("bad", bad, 6, params=WITH_LOGPROBS),
             driver.new("b", OTHER, 11)],
        fanout={"bad": [("bad#1", 3)]},
    )  # fmt: skip
    assert set(output.errors) == {"bad", "bad#1"} and "NaN" in output.errors["bad"]
    assert output.req_ids == ["a", "b"] and list(output.logprobs) == ["a"]
    assert [token_of(output, "a"), token_of(output, "b")] == [
        oracle_greedy(LLAMA, PROMPT, 1)[0], oracle_greedy(LLAMA, OTHER, 1)[0],
    ]  # fmt: skip
    output = driver.step(known={"a": len(PROMPT), "b": len(OTHER)}, finished_req_ids=["bad"])
    assert token_of(output, "b") == oracle_greedy(LLAMA, OTHER, 2)[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tiny", [LLAMA, TWO_GROUPS], ids=["one group", "two groups"])
def test_blocks_that_hold_nan_from_an_earlier_branch_do_no_harm_to_the_next(tiny: TinyModel, backend: str) -> None:
    driver = Driver(poisoned(tiny), backend)
    output = driver.step(new=[driver.new("bad", [NAN_TOKEN] * 60, 1)])
    assert set(output.errors) == {"bad"}
    output = driver.step(new=[driver.new("a", OTHER, 1)], finished_req_ids=["bad"])
    tokens = [token_of(output, "a"), *driver.decode("a", len(OTHER), 3)]
    assert tokens == oracle_greedy(tiny, OTHER, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_block_that_fell_out_of_the_window_does_no_harm(backend: str) -> None:
    """The row's table still names the block, which may belong to another sequence by then."""
    driver = Driver(poisoned(TWO_GROUPS), backend)
    tokens = [token_of(driver.step(new=[driver.new("a", PROMPT, 1)]), "a")]
    windowed = next(index for index, group in enumerate(driver.groups) if hasattr(group.spec, "window"))
    bad = driver.new("bad", [NAN_TOKEN] * 10, 25)
    bad.block_ids[windowed][:] = [1 + 10 * windowed, 28]  # the first block of `a`, which reads from position 32 on
    output = driver.step(known={"a": len(PROMPT)}, new=[bad])
    assert set(output.errors) == {"bad"}
    tokens += [token_of(output, "a"), *driver.decode("a", len(PROMPT) + 1, 3)]
    assert tokens == oracle_greedy(TWO_GROUPS, PROMPT, 5)


# ---- buffers ----


def test_steps_reuse_the_same_memory() -> None:
    driver = Driver()
    inputs = driver.runner.inputs
    seen = []
    prepare = inputs.prepare

    def remember(*arguments: Any) -> Any:
        step = prepare(*arguments)
        group = step.groups[0]
        seen.append([step.input_ids.data_ptr(), step.positions.data_ptr(), group.slot_mapping.data_ptr(),
                     group.block_table_device.data_ptr(), group.seq_lens_device.data_ptr()])  # fmt: skip
        return step

    inputs.prepare = remember
    driver.step(new=[driver.new("a", PROMPT, 1)])
    driver.decode("a", len(PROMPT), 2)
    assert seen[0] == seen[1] == seen[2]


def test_without_kernels_for_it_everything_that_the_model_reads_is_copied_to_the_device() -> None:
    """On a device that is not the host's memory: every tensor lies there, and the host's arrays hold the numbers."""
    rows = InputBatch(4, 64, [BLOCK_SIZE] * 2)
    rows.add(NewRequestData("a", PROMPT, len(PROMPT), GREEDY, 0, ([1, 2, 3], [4, 5, 6]), 16))
    step = InputPreparation(rows, 64, 4, torch.device("meta")).prepare(np.array([0]), np.array([21]))
    tensors = [step.input_ids, step.positions]
    for group in step.groups:
        tensors += [group.slot_mapping, group.block_table_device, group.seq_lens_device]
        tensors.append(group.query_start_loc_device)
        assert (group.seq_lens.tolist(), group.query_start_loc.tolist()) == ([37], [0, 21])
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert len(step.input_ids) == len(step.positions) == 21


# ---- results without waiting ----


def launch(driver: Driver, new: Sequence[NewRequestData] = (), known: dict[str, int] | None = None) -> Any:
    """Launch a step; its output may be pending."""
    known = known or {}
    counts = {branch.req_id: len(branch.token_ids) for branch in new} | dict.fromkeys(known, 1)
    cached = CachedRequestData(list(known), list(known.values()), [None] * len(known))
    driver.runner.execute_model(
        SchedulerOutput(
            scheduled_new_reqs=list(new),
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            sampled_req_ids=list(counts),
        )
    )
    return driver.runner.sample_tokens()


@interpreted
def test_steps_are_launched_before_the_tokens_of_earlier_ones_are_taken() -> None:
    driver = Driver(backend="resident")
    prompts = {"a": PROMPT, "b": OTHER}
    new = [driver.new("a", PROMPT, 1), driver.new("b", OTHER, 21)]
    pending = [launch(driver, new)]
    pending += [launch(driver, known={"b": len(OTHER) + i, "a": len(PROMPT) + i}) for i in range(4)]
    assert not any(isinstance(output, ModelRunnerOutput) for output in pending)
    assert not driver.runner.input_batch.token_ids[0, len(PROMPT) :].any(), "the host has not seen them"
    outputs = [output.get_output() for output in pending]
    for req_id, prompt in prompts.items():
        tokens = [token_of(output, req_id) for output in outputs]
        assert tokens == oracle_greedy(LLAMA, prompt, 5)
    assert pending[0].get_output() is outputs[0], "it can be taken again"


@interpreted
def test_rules_read_tokens_when_the_next_step_has_been_launched() -> None:
    for params in (
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=0.0, no_repeat_ngram_size=1),
        SamplingParams(temperature=0.0, min_tokens=3, eos_token_ids=[5]),
        SamplingParams(temperature=0.0, logprobs=2),
    ):
        expected = Driver()
        tokens = [token_of(expected.step(new=[expected.new("a", PROMPT, 1, params=params)]), "a")]
        tokens += expected.decode("a", len(PROMPT), 3)
        driver = Driver(backend="resident")
        pending = [launch(driver, [driver.new("a", PROMPT, 1, params=params)])]
        pending += [launch(driver, known={"a": len(PROMPT) + i}) for i in range(3)]
        assert not any(isinstance(output, ModelRunnerOutput) for output in pending)
        outputs = [output.get_output() for output in pending]
        assert [token_of(output, "a") for output in outputs] == tokens
        assert all(output.logprobs for output in outputs) == (params.logprobs is not None)


@interpreted
def test_a_pending_row_without_a_token_fails_alone() -> None:
    driver = Driver(poisoned(LLAMA), "resident")
    bad = [*PROMPT[:20], NAN_TOKEN]
    first = launch(driver, [driver.new("a", PROMPT, 1), driver.new("bad", bad, 6), driver.new("b", OTHER, 11)])
    second = launch(driver, known={"a": len(PROMPT), "bad": len(bad), "b": len(OTHER)})
    assert set(first.get_output().errors) == {"bad"} and first.get_output().req_ids == ["a", "b"]
    assert token_of(second.get_output(), "b") == oracle_greedy(LLAMA, OTHER, 2)[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_branches_that_share_a_prefix_are_neighbours_in_a_step(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of one prefix, and between them others: attention sees those that share side by side."""
    driver = Driver(backend=backend)
    prefix = PROMPT[:32]
    prompts = {"a": [*prefix, 3], "x": OTHER, "b": [*prefix, 4, 5], "y": OTHER[:9], "c": [*prefix, 6]}
    first_block = {"a": 1, "x": 5, "b": 9, "y": 13, "c": 17}
    new = [driver.new(name, tokens, first_block[name]) for name, tokens in prompts.items()]
    outputs = [driver.step(new=new[:1])]
    shared = new[0].block_ids[0][:2]  # the two blocks of the prefix
    for branch in new[1:]:
        if branch.token_ids[:32] == prefix:
            branch.block_ids[0][:2] = shared
            branch.num_computed_tokens = 32
    counts = {branch.req_id: len(branch.token_ids) - branch.num_computed_tokens for branch in new[1:]}
    outputs.append(driver.step(known={"a": 33}, new=new[1:], counts={"a": 1, **counts}))
    seen: list[list[int]] = []
    prepare = driver.runner.inputs.prepare

    def note(*arguments: Any) -> Any:
        inputs = prepare(*arguments)
        seen.append(inputs.groups[0].block_table[:, 0].tolist())
        return inputs

    monkeypatch.setattr(driver.runner.inputs, "prepare", note)
    outputs.append(driver.step(known={name: len(prompts[name]) + (name == "a") for name in ("x", "b", "y", "c", "a")}))
    assert seen == [[1, 1, 1, 5, 13]]
    for name, tokens in prompts.items():
        found = [token_of(output, name) for output in outputs if name in output.req_ids]
        assert found == oracle_greedy(LLAMA, tokens, len(found)) and len(found) >= 2
