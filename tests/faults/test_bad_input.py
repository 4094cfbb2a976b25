"""Bad input, end to end: a typed error that names the field and says what would be right, and other requests are not
affected."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratoon.api.llm import LLM
from ratoon.cli import main
from ratoon.core.errors import ConfigError, ModelError, RatoonError, RequestError
from ratoon.core.params import MAX_CHOICES, MAX_LOGPROBS, SamplingParams
from ratoon.models.source import resolve_model
from tests.golden.engines import check_nothing_left, greedy, model_folder, oracle_tokens, scheduler_of, tokens_of
from tests.golden.tiny_models import MAX_POSITION, VOCAB_SIZE, random_token_ids
from tests.unit.models.model_files import embedding_only, llama_metadata, write_gguf

NAN, INF = math.nan, math.inf
FAMILY = "llama with grouped heads"
GOOD = [1, 2, 3]
SETTINGS: dict[str, Any] = {"num_blocks": 12, "num_threads": 1}  # 11 blocks of 16 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model, tokenizer included: the words w0 to w96."""
    return copied(model_folder(FAMILY), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as built:
        yield built


@pytest.fixture(autouse=True)
def everything_goes_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test with the engine: it holds nothing, and answers as it did when it was new."""
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm")
        check_nothing_left(engine)
        assert tokens_of(engine.generate([GOOD], greedy(3), progress=False)) == [answer(GOOD, 3)]


def answer(prompt: list[int], count: int) -> list[int]:
    """What the model says, by transformers."""
    return oracle_tokens(FAMILY, prompt, count)


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def check_error(error: RatoonError, *said: str) -> None:
    """Every error says what would be right, on one line that a person can read."""
    text = str(error)
    assert error.problem and error.expected, text  # type: ignore[attr-defined]
    assert "\n" not in text
    for part in said:
        assert part in text, f"{part!r} is not in: {text}"


# ---- prompts ----

BAD_PROMPTS: list[tuple[Any, str, str]] = [
    ("", "prompt", "empty"),
    ("   ", "prompt", "empty"),  # text without a token
    ({"prompt_token_ids": []}, "prompt_token_ids", "empty"),
    ("w1 " * MAX_POSITION, "prompt", f"has {MAX_POSITION} tokens"),
    ([1] * MAX_POSITION, "prompt_token_ids", f"at most {MAX_POSITION - 1}"),
    ([1] * 5000, "prompt_token_ids", "has 5000 tokens"),
    ([1, VOCAB_SIZE], "prompt_token_ids[1]", f"0 to {VOCAB_SIZE - 1}"),
    ([-1], "prompt_token_ids[0]", "-1 is not in the vocabulary"),
    ([1, 2, 2**70], "prompt_token_ids[2]", "not in the vocabulary"),
    ([1, "w1"], "prompt_token_ids[1]", "'w1' is not a token id"),
    ([1, 2.0], "prompt_token_ids[1]", "2.0 is not a token id"),
    ([1, True], "prompt_token_ids[1]", "True is not a token id"),
    ([1, None], "prompt_token_ids[1]", "None is not a token id"),
    ({}, "prompt", "missing"),
    ({"prompt": 5}, "prompt", "int is not text"),
    ({"text": "w1"}, "prompt", "'text'"),
    ("w1 \ud800", "prompt", "not valid Unicode"),
    (b"w1", "prompt", "bytes is not a prompt"),
    (None, "prompt", "NoneType is not a prompt"),
    (5, "prompt", "int is not a prompt"),
]


@pytest.mark.parametrize(("prompt", "field", "said"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_name(llm: LLM, prompt: Any, field: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt, greedy(3), progress=False)
    assert caught.value.field == field
    check_error(caught.value, said)


@pytest.mark.parametrize(("prompt", "field", "said"), [*BAD_PROMPTS, ([], "prompt_token_ids", "empty")])
def test_a_bad_prompt_of_a_batch_is_refused_with_its_place_before_any_other_is_started(
    llm: LLM, prompt: Any, field: str, said: str
) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(RequestError) as caught:
        llm.generate([GOOD, GOOD, prompt, GOOD], greedy(3), progress=False)
    assert caught.value.field == f"prompts[2].{field}"
    check_error(caught.value, said)
    assert llm.stats().num_steps == steps


def test_no_prompts_are_no_answers(llm: LLM) -> None:
    assert llm.generate([], greedy(3)) == []


def test_a_request_under_way_does_not_notice_a_bad_one(llm: LLM) -> None:
    stream = llm.stream(GOOD, greedy(6))
    tokens = [token for _ in range(2) for token in next(stream).outputs[0].token_ids]
    for prompt, _, _ in BAD_PROMPTS:
        with pytest.raises(RequestError):
            llm.generate(prompt, greedy(3), progress=False)
    with pytest.raises(RequestError):
        llm.generate(GOOD, SamplingParams(temperature=NAN), progress=False)
    tokens += [token for output in stream for token in output.outputs[0].token_ids]
    assert tokens == answer(GOOD, 6)


# ---- parameters ----

BAD_PARAMS: list[tuple[str, Any, str]] = [
    *[("n", value, f"at least 1 and at most {MAX_CHOICES}") for value in (0, -1, MAX_CHOICES + 1)],
    *[("n", value, "a whole number") for value in (1.5, True, None)],
    *[("temperature", value, "at least 0") for value in (-0.1, NAN, INF, -INF)],
    *[("temperature", value, "a number") for value in ("hot", None, True)],
    *[("top_p", value, "above 0 and at most 1") for value in (0.0, -0.5, 1.01, NAN)],
    ("top_k", -2, "at least 0"),
    *[("top_k", value, "a whole number") for value in (1.5, NAN)],
    *[("min_p", value, "at least 0 and at most 1") for value in (-0.1, 1.1, NAN)],
    *[("presence_penalty", value, "at least -2 and at most 2") for value in (-2.1, 2.1, NAN)],
    *[("frequency_penalty", value, "at least -2 and at most 2") for value in (-2.1, 2.1, NAN)],
    *[("repetition_penalty", value, "above 0") for value in (0.0, -1.0, NAN, INF)],
    *[("max_tokens", value, "at least 1") for value in (0, -3)],
    ("max_tokens", 2.5, "a whole number"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 0.5, "a whole number"),
    ("min_tokens", 17, "max_tokens"),
    *[("logprobs", value, f"at most {MAX_LOGPROBS}") for value in (-1, MAX_LOGPROBS + 1)],
    ("logprobs", 2.0, "a whole number"),
    *[("prompt_logprobs", value, f"at most {MAX_LOGPROBS}") for value in (-1, MAX_LOGPROBS + 1)],
    *[("seed", value, "whole number") for value in (1.5, "lucky", 2**64)],
    ("stop", [""], "at least one character"),
    ("stop", [5], "a list of texts"),
    ("stop", ["x"] * 65, "64 at most"),
    ("stop_token_ids", [VOCAB_SIZE], f"0 to {VOCAB_SIZE - 1}"),
    ("stop_token_ids", ["w1"], "a list of whole numbers"),
    ("allowed_token_ids", [], "at least one token"),
    ("allowed_token_ids", [1, -1], f"0 to {VOCAB_SIZE - 1}"),
    ("logit_bias", {1: NAN}, "finite"),
    ("logit_bias", {1: 101.0}, "at most 100"),
    ("logit_bias", {VOCAB_SIZE: 1.0}, f"0 to {VOCAB_SIZE - 1}"),
    ("logit_bias", [1, 2], "mapping"),
    ("logit_bias", {"w1": 1.0}, "whole numbers"),
    ("bad_words", "w1", "a list of texts"),
]


@pytest.mark.parametrize(("field", "value", "said"), BAD_PARAMS)
def test_a_senseless_parameter_is_refused_by_name_alone_and_in_a_batch(
    llm: LLM, field: str, value: Any, said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(GOOD, SamplingParams(**{field: value}), progress=False)
    assert caught.value.field == field
    check_error(caught.value, said)
    try:
        params = SamplingParams(**{field: value})
    except RequestError:  # a value of a wrong type is refused where it is written
        return
    with pytest.raises(RequestError) as caught:
        llm.generate([GOOD, GOOD], [greedy(3), params], progress=False)
    assert caught.value.field == f"prompts[1].{field}"


def test_a_bad_word_that_is_empty_is_refused_with_its_place(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(GOOD, SamplingParams(bad_words=["w1", " "]), progress=False)
    assert caught.value.field == "bad_words[1]"
    check_error(caught.value)


def test_more_tokens_than_can_follow_the_prompt_are_refused_where_they_are_demanded(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([1] * 120, SamplingParams(min_tokens=20, max_tokens=30), progress=False)
    assert caught.value.field == "min_tokens"
    check_error(caught.value, "20", "8")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"priority": "high"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": [1, 2]}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
)
def test_senseless_arguments_of_a_call_are_refused_by_name(llm: LLM, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(GOOD, greedy(3), progress=False, **arguments)
    assert caught.value.field == field
    check_error(caught.value)


def test_a_model_without_a_chat_template_says_so(llm: LLM) -> None:
    with pytest.raises(RatoonError) as caught:
        llm.chat([{"role": "user", "content": "w1"}])
    check_error(caught.value, "chat template")


# ---- requests that the pool can never hold, or the model can't compute ----


def test_a_request_of_a_batch_that_can_never_fit_fails_with_the_numbers_and_the_others_go_on(folder: Path) -> None:
    with LLM(str(folder), num_blocks=4, num_threads=1) as small:  # 48 tokens
        prompts = [GOOD, [1] * 40, [1] * 60, [4, 5]]
        outputs = small.generate(prompts, [greedy(3), greedy(20), greedy(3), greedy(3)], progress=False)
        assert tokens_of([outputs[0], outputs[3]]) == [answer(GOOD, 3), answer([4, 5], 3)]
        too_many, too_long = outputs[1].error or "", outputs[2].error or ""
        assert too_many.startswith("max_tokens: needs 4 blocks of 16 tokens") and "at most 8" in too_many
        assert too_long.startswith("prompt: needs 4 blocks of 16 tokens") and "at most 47 tokens" in too_long
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "error", "length"]
        check_nothing_left(small)
        with pytest.raises(RequestError) as caught:  # alone, it raises
            small.generate([1] * 60, greedy(3), progress=False)
        assert caught.value.field == "prompt"
        check_error(caught.value)
        check_nothing_left(small)


def test_a_request_whose_numbers_overflow_fails_alone(folder: Path, tmp_path: Path) -> None:
    poisoned = copied(folder, tmp_path / "poisoned")
    tensors = load_file(poisoned / "model.safetensors")
    tensors["model.embed_tokens.weight"][96] = torch.nan
    save_file(tensors, poisoned / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(poisoned), **SETTINGS) as llm:
        prompts = [GOOD, [1, 96], random_token_ids(20), [96] * 20]
        outputs = llm.generate(prompts, [greedy(3), greedy(3, n=3), greedy(3), greedy(3)], progress=False)
        assert [bool(output.error) for output in outputs] == [False, True, False, True]
        assert "NaN" in (outputs[1].error or "")
        assert {choice.finish_reason for choice in outputs[1].outputs} == {"error"} and len(outputs[1].outputs) == 3
        check_nothing_left(llm)
        again = llm.generate([GOOD, prompts[2]], greedy(3), progress=False)
        assert tokens_of(again) == tokens_of([outputs[0], outputs[2]])
        assert tokens_of(again)[0] == answer(GOOD, 3)


def test_an_exception_in_a_step_is_the_answer_of_its_requests_and_the_next_call_works(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("no memory for activations")

    model = llm._client.core.executor._worker.runner.model
    monkeypatch.setattr(model, "forward", fail)
    outputs = llm.generate([GOOD, [4, 5]], greedy(3, n=2), progress=False)
    for output in outputs:
        assert output.error == "MemoryError: no memory for activations"
        assert [choice.finish_reason for choice in output.outputs] == ["error", "error"]
    monkeypatch.undo()
    assert tokens_of(llm.generate([GOOD], greedy(3), progress=False)) == [answer(GOOD, 3)]


# ---- models ----


@pytest.mark.parametrize("name", ["no-such-model", "", "/no/such/folder", "./nowhere.gguf", "smollm2-135"])
def test_an_unknown_model_is_an_error_that_lists_what_can_be_named(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        LLM(name)
    assert caught.value.source == name
    check_error(caught.value, "folder", ".gguf", "smollm2-135m")


def test_a_folder_that_is_no_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        LLM(str(tmp_path))
    check_error(caught.value, "config.json")


@pytest.mark.parametrize("kept", [0, 5, 200, 0.5, -1])
def test_a_truncated_safetensors_file_is_an_error_before_memory_is_spent(
    folder: Path, tmp_path: Path, kept: float
) -> None:
    broken = copied(folder, tmp_path / "broken")
    truncate(broken / "model.safetensors", kept)
    with pytest.raises(ModelError) as caught:
        LLM(str(broken), **SETTINGS)
    assert "model.safetensors" in caught.value.source
    check_error(caught.value, "cut short", "fetch the file again")


@pytest.mark.parametrize("kept", [0, 5, 20, 200, 0.5, -1])
def test_a_truncated_gguf_file_is_an_error_before_memory_is_spent(tmp_path: Path, kept: float) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", llama_metadata(), embedding_only())
    truncate(path, kept)
    for build in (LLM, resolve_model):
        with pytest.raises(ModelError) as caught:
            build(str(path))
        assert caught.value.source == str(path)
        check_error(caught.value)


def truncate(path: Path, kept: float) -> None:
    """A number of bytes, a share of the file, or, below 0, that many bytes less than all."""
    content = path.read_bytes()
    size = int(kept * len(content)) if isinstance(kept, float) else kept
    path.write_bytes(content[:size])


def test_bytes_that_are_no_gguf_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(bytes(range(256)) * 40)
    with pytest.raises(ModelError) as caught:
        LLM(str(path))
    check_error(caught.value, "noise.gguf")


def test_a_missing_tokenizer_is_an_error_that_names_the_file_and_ids_still_work(folder: Path, tmp_path: Path) -> None:
    silent = copied(folder, tmp_path / "silent")
    (silent / "tokenizer.json").unlink()
    with pytest.raises(ModelError) as caught:
        LLM(str(silent), **SETTINGS)
    check_error(caught.value, "tokenizer.json")
    with LLM(str(silent), skip_tokenizer=True, **SETTINGS) as llm:
        assert tokens_of(llm.generate([GOOD], greedy(3), progress=False)) == [answer(GOOD, 3)]
        for prompt, params, field in (
            ("w1", greedy(3), "prompt"),
            (GOOD, greedy(3, stop=["w1"]), "stop"),
            (GOOD, greedy(3, bad_words=["w1"]), "bad_words"),
        ):
            with pytest.raises(RequestError) as refused:
                llm.generate(prompt, params, progress=False)
            assert refused.value.field == field
            check_error(refused.value, "tokenizer")


@pytest.mark.parametrize("content", ["{", "[]", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_an_error_that_names_the_file(folder: Path, tmp_path: Path, content: str) -> None:
    broken = copied(folder, tmp_path / "broken")
    (broken / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        LLM(str(broken), **SETTINGS)
    check_error(caught.value, "tokenizer.json")


def changed_config(folder: Path, target: Path, **changes: Any) -> Path:
    path = copied(folder, target) / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return target


@pytest.mark.parametrize("architectures", [["OtherForCausalLM"], ["ElectraModel"], [], ..., "Llama", 5])
def test_an_unknown_architecture_is_an_error_that_lists_the_known_ones(
    folder: Path, tmp_path: Path, architectures: Any
) -> None:
    model_type = ... if not isinstance(architectures, list) else "mamba"
    strange = changed_config(folder, tmp_path / "strange", architectures=architectures, model_type=model_type)
    with pytest.raises(ModelError) as caught:
        LLM(str(strange), **SETTINGS)
    check_error(caught.value, "…ForCausalLM of", "Llama", "Qwen3", "GPT2LMHeadModel")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        ({"num_hidden_layers": 4}, "layers.3"),  # one more than the file has
        ({"num_hidden_layers": 2}, "layers.2"),  # one less
        ({"intermediate_size": 128}, "mlp"),
        ({"vocab_size": 98}, "embed_tokens"),
    ],
)
def test_a_config_that_makes_no_sense_or_does_not_fit_its_weights_is_an_error(
    folder: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError) as caught:
        LLM(str(changed_config(folder, tmp_path / "strange", **changes)), **SETTINGS)
    check_error(caught.value, said)


def test_a_config_that_is_no_json_is_an_error_that_names_the_file(folder: Path, tmp_path: Path) -> None:
    broken = copied(folder, tmp_path / "broken")
    (broken / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelError) as caught:
        LLM(str(broken))
    check_error(caught.value, "config.json")


def deep_header(folder: Path) -> None:
    header = b"[" * 100_000
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def odd_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"chat_template": [5]}')


def panicking_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def layers_without_end(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**8}))


def odd_architectures(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [{}]}))


def more_positions_than_memory(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2**31 - 1}))


@pytest.mark.parametrize(
    "damage",
    [
        *(deep_header, odd_template, panicking_tokenizer, layers_without_end, odd_architectures),
        more_positions_than_memory,
    ],
)
def test_a_damaged_model_ends_a_command_with_code_2_and_one_sentence(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    damage(broken := copied(folder, tmp_path / "broken"))
    began = time.process_time()
    assert main(["info", str(broken), "--threads", "1", "--num-blocks", "12"]) == 2
    assert time.process_time() - began < 20  # seconds; one is usual
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and str(broken) in line and "unexpected" not in line


def test_a_name_of_5000_characters_ends_a_command_with_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "x" * 5000]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "5,000 characters" in line and len(line) < 1000


# ---- settings ----


@pytest.mark.parametrize(
    ("settings", "field", "said"),
    [
        ({"kv_memory": 1}, "kv_memory", "at least 2 blocks"),
        ({"kv_memory": "12KiB"}, "kv_memory", "24,576 bytes"),  # one block, and that is the null block
        ({"kv_memory_fraction": 1e-12}, "kv_memory_fraction", "at least 2 blocks"),
        ({"num_blocks": 1}, "num_blocks", "at least 2"),
        ({"num_blocks": 0}, "num_blocks", "at least 2"),
        ({"num_blocks": 10**12}, "num_blocks", "less of it"),
        ({"kv_memory": "a lot"}, "kv_memory", ""),
        ({"kv_memory_fraction": 0.0}, "kv_memory_fraction", "above 0"),
        ({"kv_memory_fraction": NAN}, "kv_memory_fraction", "above 0"),
        ({"block_size": 0}, "block_size", "at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs", "at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens", "at least 1"),
        ({"max_prefill_chunk": 0}, "max_prefill_chunk", "at least 1"),
        ({"max_model_len": 0}, "max_model_len", "at least 1"),
        ({"max_model_len": MAX_POSITION + 1}, "max_model_len", str(MAX_POSITION)),
        ({"policy": "random"}, "policy", "fcfs or priority"),
        ({"device": "abacus"}, "device", "cpu"),
        ({"device": "meta"}, "device", "cpu"),
        ({"dtype": "int3"}, "dtype", "float32"),
        ({"attention_backend": "magic"}, "attention_backend", "torch"),
        ({"attention_backend": "cpu", "block_size": 8}, "attention_backend", "multiple of 16"),
        ({"load_format": "pickle"}, "load_format", "auto or dummy"),
        ({"num_threads": 0}, "num_threads", "at least 1"),
    ],
)
def test_settings_that_can_not_work_are_refused_by_name(
    folder: Path, settings: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(folder), **({"num_threads": 1} | settings))
    assert caught.value.field == field
    check_error(caught.value, said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(folder), device="cuda")
    assert caught.value.field == "device"
    check_error(caught.value, "cpu")


def test_the_smallest_engine_that_is_accepted_answers(folder: Path) -> None:
    """The other side of the border: two blocks, one of them the null block."""
    with LLM(str(folder), kv_memory="24KiB", num_threads=1, max_num_seqs=1, max_num_batched_tokens=1) as llm:
        assert scheduler_of(llm).kv_cache.num_usable_blocks == 1
        assert tokens_of(llm.generate([GOOD], greedy(3), progress=False)) == [answer(GOOD, 3)]
        check_nothing_left(llm)
