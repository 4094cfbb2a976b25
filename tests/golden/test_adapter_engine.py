"""Adapters through the whole engine: what each request gets is what PEFT gives with its adapter, whatever happens to
names, files, slots and memory meanwhile."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from ratoon import LLM, AsyncLLM, BeamSearchParams, HiddenStatesParams, LoRARequest, SamplingParams
from ratoon.core.errors import ConfigError, RequestError
from tests.golden.engines import model_folder, tiny_model
from tests.golden.peft_oracle import PeftAdapter, logits_of
from tests.golden.tiny_models import random_token_ids

FAMILY = "llama with grouped heads"
SETTINGS = {"num_blocks": 96, "num_threads": 1, "block_size": 4, "dtype": "float32", "enable_lora": True}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = random_token_ids(13, seed=1)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PeftAdapter]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: PeftAdapter(tiny_model(FAMILY), folder / name, seed=seed) for seed, name in enumerate("abcde")}


@pytest.fixture(scope="module")
def llm(adapters: dict[str, PeftAdapter]) -> Iterator[LLM]:
    named = {name: str(adapters[name].folder) for name in "abc"}
    with LLM(str(model_folder(FAMILY)), adapters=named, max_loras=2, max_lora_rank=8, **SETTINGS) as llm:
        yield llm


def expected(
    adapter: PeftAdapter | None, prompt: list[int], count: int = 6, allowed: list[int] | None = None
) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        logits = logits_of(tiny_model(FAMILY).oracle, tokens) if adapter is None else adapter.logits(tokens)
        last = logits[-1]
        tokens.append(int(last.argmax()) if allowed is None else allowed[int(last[allowed].argmax())])
    return tokens[len(prompt) :]


def tokens_of(output) -> list[int]:
    return list(output.outputs[0].token_ids)


def ids(prompt: list[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": prompt}


def test_a_batch_of_more_adapters_than_slots_gets_what_peft_gives_each(llm, adapters) -> None:
    names = [None, "a", "b", "c", "a", None, "c", "b", "a", "c"]
    prompts = [random_token_ids(5 + index, seed=index) for index in range(len(names))]
    outputs = llm.generate([ids(prompt) for prompt in prompts], GREEDY, adapter=names, progress=False)
    for name, prompt, output in zip(names, prompts, outputs):
        assert tokens_of(output) == expected(adapters.get(name), prompt), name
    stats = llm.stats().adapters
    assert (stats.num_slots, stats.num_loaded, stats.num_waiting, stats.holders) == (2, 2, 0, {})
    assert stats.loads >= 3 and stats.evicted >= 1


def test_an_adapter_is_named_by_path_and_as_vllm_does(llm, adapters) -> None:
    want = expected(adapters["d"], PROMPT)
    folder = adapters["d"].folder
    for options in ({"adapter": folder}, {"adapter": str(folder)}, {"lora_request": LoRARequest("d", 1, str(folder))}):
        assert tokens_of(llm.generate(ids(PROMPT), GREEDY, **options)[0]) == want
    named = LoRARequest("a", 7)
    assert tokens_of(llm.generate(ids(PROMPT), GREEDY, lora_request=named)[0]) == expected(adapters["a"], PROMPT)


def test_prefixes_are_shared_by_requests_with_the_same_files_alone(llm, adapters, tmp_path) -> None:
    prompt = random_token_ids(17, seed=77)
    copied = shutil.copytree(adapters["a"].folder, tmp_path / "copy")
    for adapter, num_cached in ((None, 0), ("a", 0), ("b", 0), ("a", 16), (str(copied), 16), (None, 16)):
        (output,) = llm.generate(ids(prompt), GREEDY, adapter=adapter)
        assert output.num_cached_tokens == num_cached, adapter


def test_other_files_under_the_same_name_are_another_adapter(llm, adapters, tmp_path) -> None:
    """No block that was computed with the old files is found by a request with the new ones."""
    prompt, folder = random_token_ids(17, seed=78), tmp_path / "changing"
    before = PeftAdapter(tiny_model(FAMILY), folder, seed=100)
    llm.load_adapter("changing", folder)
    (first,) = llm.generate(ids(prompt), GREEDY, adapter="changing", retain_kv=60)
    assert tokens_of(first) == expected(before, prompt)
    shutil.rmtree(folder)
    shutil.copytree(adapters["e"].folder, folder)
    llm.load_adapter("changing", folder)
    (second,) = llm.generate(ids(prompt), GREEDY, adapter="changing")
    assert tokens_of(second) == expected(adapters["e"], prompt)
    assert second.num_cached_tokens == 0
    with pytest.raises(RequestError, match=r"adapter: '.*changing' of the request that it goes on from was unloaded"):
        llm.generate_continuation(first, [5], GREEDY)
    llm.unload_adapter("changing")
    with pytest.raises(RequestError, match="adapter: there is no adapter 'changing'"):
        llm.generate(ids(prompt), GREEDY, adapter="changing")


def test_a_continuation_has_the_adapter_of_its_parent_and_no_other(llm, adapters) -> None:
    (parent,) = llm.generate(ids(PROMPT), GREEDY, adapter="a", retain_kv=60)
    for options in ({}, {"adapter": "a"}, {"adapter": adapters["a"].folder}):
        child = llm.generate_continuation(parent, [5, 6], GREEDY, **options)
        assert tokens_of(child) == expected(adapters["a"], PROMPT + tokens_of(parent) + [5, 6])
        assert child.continuation.source == "lease"
    with pytest.raises(RequestError, match=r"adapter: is 'b', and the request that it goes on from has 'a'"):
        llm.generate_continuation(parent, [5], GREEDY, adapter="b")
    (plain,) = llm.generate(ids(PROMPT), GREEDY)
    with pytest.raises(RequestError, match=r"adapter: is 'b', and the request that it goes on from has none"):
        llm.generate_continuation(plain, [5], GREEDY, adapter="b")


def test_choices_beams_vectors_and_hidden_states_have_the_adapter(llm, adapters) -> None:
    want = expected(adapters["b"], PROMPT)
    several = SamplingParams(n=3, temperature=0.0, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate(ids(PROMPT), several, adapter="b")
    assert [list(choice.token_ids) for choice in output.outputs] == [want] * 3
    search = BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
    assert tokens_of(llm.beam_search(ids(PROMPT), search, adapter="b")[0]) == want

    states = llm.extract_hidden_states(ids(PROMPT), HiddenStatesParams(positions=[-1]), adapter="b").tensor
    model = adapters["b"].model
    with torch.inference_mode():
        oracle = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[-1][0, -1]
    torch.testing.assert_close(states.reshape(-1), oracle, atol=1e-4, rtol=1e-4)
    (vector,) = llm.embed(ids(PROMPT), adapter="b")
    cosine = numpy.dot(vector.embedding, oracle.numpy() / oracle.norm().numpy())
    assert cosine == pytest.approx(1.0, abs=1e-5)
    (parent,) = llm.generate(ids(PROMPT), GREEDY, adapter="b")
    read = llm.extract_hidden_states(parent, HiddenStatesParams(positions=[len(PROMPT) - 1])).tensor
    torch.testing.assert_close(read.reshape(-1), oracle, atol=1e-4, rtol=1e-4)


def test_bad_adapters_are_refused_with_the_field(llm, adapters, tmp_path) -> None:
    with pytest.raises(RequestError, match=r"adapter: there is no adapter 'nowhere'; one of 'a', 'b', 'c', or a path"):
        llm.generate(ids(PROMPT), GREEDY, adapter="nowhere")
    with pytest.raises(RequestError, match=r"adapter: .* has no adapter_config.json|adapter: .*adapter_config.json"):
        llm.generate(ids(PROMPT), GREEDY, adapter=tmp_path)
    with pytest.raises(RequestError, match="lora_name: ' x' is not a name"):
        llm.load_adapter(" x", adapters["a"].folder)
    with pytest.raises(RequestError, match=r"lora_path: .*rank 16; at most 8"):
        llm.load_adapter("large", PeftAdapter(tiny_model(FAMILY), tmp_path / "large", r=16).folder)
    with pytest.raises(RequestError, match="lora_name: there is no adapter 'x'"):
        llm.unload_adapter("x")


def test_files_that_vanish_fail_the_request_alone(adapters, tmp_path) -> None:
    folder = Path(shutil.copytree(adapters["a"].folder, tmp_path / "vanishing"))
    with LLM(str(model_folder(FAMILY)), adapters={"v": str(folder)}, max_lora_rank=8, **SETTINGS) as llm:
        shutil.rmtree(folder)
        with pytest.raises(RequestError, match=r"adapter: .*vanishing can't be loaded: .*"):
            llm.generate(ids(PROMPT), GREEDY, adapter="v")
        assert tokens_of(llm.generate(ids(PROMPT), GREEDY)[0]) == expected(None, PROMPT)
        assert llm.stats().adapters.failed == 1


def test_adapters_of_the_settings_are_checked_at_the_start(tmp_path) -> None:
    with pytest.raises(ConfigError, match="adapters: the path of 'x'"):
        LLM(str(model_folder(FAMILY)), adapters={"x": str(tmp_path)}, num_threads=1, num_blocks=8)
    with pytest.raises(ConfigError, match="enable_lora: contradicts adapters"):
        LLM(str(model_folder(FAMILY)), adapters={"x": str(tmp_path)}, enable_lora=False)


def test_an_engine_without_adapters_says_how_to_get_them() -> None:
    problem = r"adapter: the engine has no memory for adapters; .*enable_lora=True"
    with LLM(str(model_folder(FAMILY)), num_threads=1, num_blocks=8) as llm, pytest.raises(RequestError, match=problem):
        llm.generate(ids(PROMPT), GREEDY, adapter="a")


@pytest.mark.slow  # an engine process
def test_an_engine_process_that_dies_goes_on_with_the_adapter_that_was_loaded_while_serving(adapters) -> None:
    async def run() -> None:
        async with AsyncLLM(str(model_folder(FAMILY)), max_lora_rank=8, **SETTINGS) as llm:
            await llm.load_adapter("late", adapters["c"].folder)
            long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
            tokens: list[int] = []
            killed = False
            async for output in llm.stream(ids(PROMPT), long, adapter="late"):
                tokens += output.outputs[0].token_ids
                if len(tokens) >= 5 and not killed:
                    killed = True
                    await llm.unload_adapter("late")  # ends for new requests, and not for this one
                    llm._client.replicas[0].process.kill()
            assert killed and tokens == expected(adapters["c"], PROMPT, 30)
            assert llm.health().engines[0].num_restarts == 1

    asyncio.run(run())


def test_drafts_change_no_token_of_an_adapter(adapters) -> None:
    prompt, allowed = random_token_ids(9, seed=5), [3, 7, 11]  # texts of three tokens repeat themselves
    named = {name: str(adapters[name].folder) for name in "ab"}
    drafts = {
        "speculate": "ngram", "speculate_ngram_min": 1, "speculate_min_acceptance": 0.0, "speculate_max_seqs": 32
    }  # fmt: skip
    settings = {**SETTINGS, **drafts, "max_loras": 2, "max_lora_rank": 8}
    with LLM(str(model_folder(FAMILY)), adapters=named, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, allowed_token_ids=allowed)
        names = ["a", None, "b"]
        outputs = llm.generate([ids(prompt)] * 3, params, adapter=names, progress=False)
        for name, output in zip(names, outputs):
            assert tokens_of(output) == expected(adapters.get(name), prompt, 40, allowed), name
        assert sum(source.draft_tokens for source in llm.stats().drafts.values()) > 0
