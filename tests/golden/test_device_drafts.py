"""Drafts by a smaller model and by heads through whole engines: they change no text, and right ones are kept."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from ratoon import LLM, HiddenStatesParams, SamplingParams
from ratoon.core.errors import ConfigError, ModelError
from tests.golden.draft_heads import random_head
from tests.golden.engines import engine, engine_of_folder, model_folder, scheduler_of, tiny_model, write_word_tokenizer
from tests.golden.grammar_engines import grammar_engine, grammar_folder
from tests.golden.test_drafts import FAMILIES, PARAMS, PROMPTS, answers
from tests.golden.test_encoder_decoder_api import folder_of
from tests.unit.layers.test_rejection import highest_statistic

LLAMA = "llama with grouped heads"
OTHER = "qwen3 untied with heads that the native kernels take"
# Drafts are made whatever they are worth.
ALWAYS = {"speculate_tokens": 4, "speculate_max_seqs": 64, "speculate_min_acceptance": 0}
INPUTS = [{"prompt_token_ids": prompt} for prompt in PROMPTS]


@functools.cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ratoon-drafts-")  # removed when the process ends


@functools.cache
def head_folder(kind: str, family: str, draft_vocab: int | None = None) -> Path:
    head = random_head(kind, tiny_model(family).config, draft_vocab=draft_vocab)
    return head.save(Path(_folders().name) / f"{kind}-{family.replace(' ', '-')}-{draft_vocab}")


def source_of(kind: str, family: str) -> str:
    if kind == "model":
        return f"draft:{model_folder(OTHER)}"
    return f"head:{head_folder(kind, family, 40 if kind == 'eagle3' else None)}"


def generate(llm: LLM, params: SamplingParams, inputs: Any = INPUTS) -> list[Any]:
    return answers(llm.generate(inputs, params, progress=False))


@functools.cache
def texts_without(family: str, name: str) -> list[Any]:
    with engine(family) as llm:
        return generate(llm, PARAMS[name])


KINDS = ("model", "eagle3", "mtp")


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(7)
def test_drafts_change_no_text(kind: str, family: str, name: str) -> None:
    with engine(family, speculate=source_of(kind, family), **ALWAYS) as llm:
        assert generate(llm, PARAMS[name]) == texts_without(family, name)
        stats = llm.stats().drafts["draft" if kind == "model" else "head"]
        assert stats.draft_tokens > stats.accepted_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.one_in(2)
def test_a_model_that_drafts_for_itself_is_always_right(family: str, steps: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True)
    settings = {**ALWAYS, "max_steps_in_flight": steps}
    with engine(family, speculate=f"draft:{model_folder(family)}", **settings) as llm:
        num_before = scheduler_of(llm).planner.num_steps
        llm.generate(INPUTS[:1], params, progress=False)
        stats = llm.stats().drafts["draft"]
        assert stats.accepted_tokens == stats.draft_tokens
        # The first step brings one token, each of the others five
        assert scheduler_of(llm).planner.num_steps - num_before == 9


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.one_in(2)
def test_a_drawn_draft_is_kept_as_often_as_both_distributions_have_it(family: str, steps: int) -> None:
    """Always, where they are the same, and each draft is compared with the distribution that it was drawn from."""
    params = [
        SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=31, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=2, max_tokens=31, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=31, ignore_eos=True),
    ]
    settings = {**ALWAYS, "max_steps_in_flight": steps, "draft_acceptance": "rejection"}
    with engine(family, speculate=f"draft:{model_folder(family)}", **settings) as llm:
        llm.generate(INPUTS[:3], params, progress=False)
        stats = llm.stats().drafts["draft"]
        assert stats.accepted_tokens == stats.draft_tokens > 80


def count_texts(**settings: Any) -> tuple[Counter[tuple[int, ...]], int]:
    """Texts of three tokens, by what is left of these divided by three; and how many drafts were accepted."""
    texts: Counter[tuple[int, ...]] = Counter()
    with engine(LLAMA, num_blocks=400, max_num_seqs=256, **settings) as llm:
        for seed in range(12):
            params = SamplingParams(n=60, seed=seed, temperature=1.5, max_tokens=5, ignore_eos=True)
            (output,) = llm.generate([{"prompt_token_ids": [4, 7, 9, 4, 4, 7]}], params, progress=False)
            texts.update(tuple(token % 3 for token in choice.token_ids[1:4]) for choice in output.outputs)
        return texts, sum(stats.accepted_tokens for stats in llm.stats().drafts.values())


@functools.cache
def texts_drawn_one_by_one() -> Counter[tuple[int, ...]]:
    return count_texts()[0]


@pytest.mark.parametrize("sources", ["eagle3", "ngram and model"])
def test_drawn_drafts_keep_the_distribution(sources: str) -> None:
    """By a test of chi-square for two samples."""
    source = source_of(sources.rpartition(" ")[2], LLAMA)
    drafts = {**ALWAYS, "speculate": f"ngram,{source}" if "ngram" in sources else source, "speculate_ngram_min": 1}
    plain = texts_drawn_one_by_one()
    kept, num_accepted = count_texts(draft_acceptance="rejection", **drafts)
    assert num_accepted > 50 and plain.total() == kept.total() and plain != kept
    cells = [(plain[text], kept[text]) for text in plain.keys() | kept.keys()]
    assert sum((a - b) ** 2 / (a + b) for a, b in cells) < highest_statistic(len(cells) - 1)


def test_a_head_whose_guesses_are_right_is_followed() -> None:
    """The next token of this model depends on the last one alone, and its head knows it."""
    model = LlamaForCausalLM(tiny_model(LLAMA).oracle.config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.normal_()
    folder = Path(_folders().name) / "bigrams"
    model.save_pretrained(folder)
    write_word_tokenizer(folder)
    head = random_head("mtp", tiny_model(LLAMA).config)
    size, place = tiny_model(LLAMA).config.hidden_size, f"model.layers.{tiny_model(LLAMA).config.num_layers}."
    for name, tensor in head.tensors.items():
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensor.fill_(1.0)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    head.tensors[place + "eh_proj.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    del head.tensors[place + "embed_tokens.weight"]  # the model's
    saved = head.save(Path(_folders().name) / "bigrams-head")
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with engine_of_folder(folder) as llm:
        expected = generate(llm, params)
    with engine_of_folder(folder, speculate=f"head:{saved}", **ALWAYS) as llm:
        assert generate(llm, params) == expected
        stats = llm.stats().drafts["head"]
        assert stats.accepted_tokens == stats.draft_tokens > 60


@pytest.mark.parametrize("kind", ["itself", *KINDS])
def test_prefix_hits_and_continuations_carry_what_drafts_read(kind: str) -> None:
    source = f"draft:{model_folder(LLAMA)}" if kind == "itself" else source_of(kind, LLAMA)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompt = list(range(20, 60))
    suffix = [3, 4, 5]

    def run(**settings: Any) -> list[Any]:
        with engine(LLAMA, **settings) as llm:
            first = llm.generate([{"prompt_token_ids": prompt}], params, progress=False, retain_kv=60)
            again = llm.generate([{"prompt_token_ids": [*prompt[:35], 9]}], params, progress=False)
            assert again[0].num_cached_tokens == 32
            ahead = llm.generate_continuation(first[0], suffix, params)
            assert ahead.continuation.source == "lease"
            llm.forget(first[0].request_id)
            if kind == "itself" and settings:
                stats = llm.stats().drafts["draft"]
                assert stats.accepted_tokens == stats.draft_tokens > 30
            return answers([*first, *again, ahead])

    assert run(speculate=source, **ALWAYS) == run()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("kind", ["itself", *KINDS])
@pytest.mark.one_in(3)
def test_preempted_branches_go_on_drafting(kind: str, mode: str) -> None:
    source = f"draft:{model_folder(LLAMA)}" if kind == "itself" else source_of(kind, LLAMA)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with engine(LLAMA) as llm:
        expected = generate(llm, params)
    few = {"num_blocks": 11, "preemption_mode": mode, "swap_memory": "1MiB"}
    with engine(LLAMA, speculate=source, **few, **ALWAYS) as llm:
        assert generate(llm, params) == expected
        assert llm.stats().num_preemptions > 0
        if kind == "itself":
            stats = llm.stats().drafts["draft"]
            assert stats.accepted_tokens == stats.draft_tokens


@pytest.mark.parametrize("kind", ["itself", *KINDS])
@pytest.mark.one_in(3)
def test_grammars_hold_beside_drafts(kind: str) -> None:
    models = {"itself": LLAMA, "model": OTHER}
    source = f"draft:{grammar_folder(models[kind])}" if kind in models else source_of(kind, LLAMA)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["true", "ab"]}}}
    params = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=30, structured_output={"json_schema": schema})
        for seed in range(3)
    ]
    prompts = ["abc", "12", "true"]

    def run(**settings: Any) -> list[Any]:
        with grammar_engine(**settings) as llm:
            return answers(llm.generate(prompts, params, progress=False))

    assert run(speculate=source, **ALWAYS) == run()


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_the_same_beside_drafts(kind: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def run(**settings: Any) -> Any:
        with engine(LLAMA, **settings) as llm:
            (output,) = llm.generate(INPUTS[:1], params, progress=False, retain_kv=60)
            states = llm.extract_hidden_states(output, HiddenStatesParams(layers=[1, 3]), progress=False)
            llm.forget(output.request_id)
            return states.tensor

    ours, theirs = run(speculate=source_of(kind, LLAMA), **ALWAYS), run()
    assert torch.equal(ours, theirs)


def test_a_model_of_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    config = tiny_model(LLAMA).oracle.config
    config = type(config)(**{**config.to_dict(), "vocab_size": 55})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with (
        pytest.raises(ConfigError, match=r"speculate.*vocabulary of 55 tokens.*97"),
        engine(LLAMA, speculate=f"draft:{tmp_path}"),
    ):
        pass


def test_a_model_whose_tokens_have_other_ids_is_refused() -> None:
    problem = r"speculate: draft:.* has another vocabulary: token 3 is 'w3' there, and 'a' in the model; a smaller"
    with pytest.raises(ConfigError, match=problem), grammar_engine(speculate=f"draft:{model_folder(OTHER)}"):
        pass


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    config = tiny_model(LLAMA).config
    head = random_head("eagle3", config)
    head.raw_config["vocab_size"] = 96
    head.save(tmp_path / "vocabulary")
    with (
        pytest.raises(ModelError, match="vocabulary of 96 tokens, and the model one of 97"),
        engine(LLAMA, speculate=f"head:{tmp_path / 'vocabulary'}"),
    ):
        pass
    head = random_head("eagle3", config)
    del head.tensors["fc.weight"]
    head.save(tmp_path / "missing")
    with (
        pytest.raises(ModelError, match=r"'fc.weight' is missing"),
        engine(LLAMA, speculate=f"head:{tmp_path / 'missing'}"),
    ):
        pass
    head = random_head("eagle3", config)
    head.tensors["more.weight"] = torch.zeros(3)
    head.save(tmp_path / "more")
    with (
        pytest.raises(ModelError, match=r"no place for: more.weight"),
        engine(LLAMA, speculate=f"head:{tmp_path / 'more'}"),
    ):
        pass
    with pytest.raises(ModelError, match="is no draft head"), engine(LLAMA, speculate=f"head:{model_folder(LLAMA)}"):
        pass


def test_two_models_on_the_device_are_refused() -> None:
    with (
        pytest.raises(ConfigError, match="would both run on the device"),
        engine(LLAMA, speculate=f"draft:{model_folder(LLAMA)},head:{head_folder('mtp', LLAMA)}"),
    ):
        pass


def test_a_pipeline_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="last stage, and a pipeline has 2"),
        engine(LLAMA, speculate=f"draft:{model_folder(LLAMA)}", pipeline_parallel_size=2),
    ):
        pass


def test_a_model_with_an_encoder_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="is for decoders alone"),
        engine_of_folder(folder_of("bart"), speculate=f"draft:{model_folder(LLAMA)}"),
    ):
        pass


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_slept_drafts_again(kind: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with engine(LLAMA, speculate=source_of(kind, LLAMA), **ALWAYS) as llm:
        expected = generate(llm, params)
        stats = llm.stats().drafts["draft" if kind == "model" else "head"]
        before = stats.draft_tokens, stats.accepted_tokens
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert generate(llm, params) == expected
            stats = llm.stats().drafts["draft" if kind == "model" else "head"]
            assert (stats.draft_tokens, stats.accepted_tokens) == tuple(count * (level + 1) for count in before)
