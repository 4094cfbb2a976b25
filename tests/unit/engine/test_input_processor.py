"""What a request looks like when it reaches the engine, and what never does."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from ratoon.core.errors import RequestError
from ratoon.core.params import PoolingParams, SamplingParams
from ratoon.engine.input.default_params import default_sampling_params
from ratoon.engine.input.input_processor import InputProcessor
from tests.unit.engine.fakes import END, VOCAB_SIZE, byte_tokenizer, model_config

TOKENIZER = byte_tokenizer()


def processor(tokenizer=TOKENIZER, **options) -> InputProcessor:
    options.setdefault("max_model_len", 20)
    return InputProcessor(options.pop("config", model_config()), tokenizer, options.pop("defaults", {}), **options)


@pytest.mark.parametrize("prompt", ["hi", [104, 105], (104, 105), {"prompt": "hi"}, {"prompt_token_ids": [104, 105]}])
def test_every_form_of_prompt_becomes_the_same_tokens(prompt):
    assert processor().process("r", prompt, SamplingParams()).prompt_token_ids == [104, 105]


def test_numbers_of_other_integer_types_are_token_ids_too():
    numpy = pytest.importorskip("numpy")
    request = processor().process("r", list(numpy.array([104, 105])), SamplingParams())
    assert request.prompt_token_ids == [104, 105]
    assert {type(token) for token in request.prompt_token_ids} == {int}


def test_internal_ids_carry_the_callers_id_and_eight_random_characters():
    requests = [processor().process("job", "hi", SamplingParams()) for _ in range(20)]
    assert all(request.request_id.startswith("job-") and len(request.request_id) == 12 for request in requests)
    assert len({request.request_id for request in requests}) == 20
    assert {request.external_id for request in requests} == {"job"}


def test_the_callers_params_are_left_as_they_were():
    params = SamplingParams(max_tokens=None)
    request = processor().process("r", "hi", params)
    assert request.params is not params
    assert params == SamplingParams(max_tokens=None)


@pytest.mark.parametrize(("asked", "given"), [(None, 18), (5, 5), (1000, 18)])
def test_max_tokens_is_what_fits_behind_the_prompt(asked, given):
    request = processor(max_model_len=20).process("r", "hi", SamplingParams(max_tokens=asked))
    assert request.params.max_tokens == given


def test_a_seed_is_always_set_and_follows_from_the_engines_seed():
    first, again, other = processor(seed=1), processor(seed=1), processor(seed=2)
    drawn = [first.process("r", "hi", SamplingParams()).params.seed for _ in range(2)]
    assert drawn[0] != drawn[1]
    assert again.process("r", "hi", SamplingParams()).params.seed == drawn[0]
    assert other.process("r", "hi", SamplingParams()).params.seed != drawn[0]
    assert first.process("r", "hi", SamplingParams(seed=7)).params.seed == 7


def test_all_sources_of_eos_tokens_are_heard():
    config = model_config(eos_token_ids=(1,))
    made = processor(config=config, defaults={"eos_token_ids": (2, 1)})
    request = made.process("r", "hi", SamplingParams(stop_token_ids=[9]))
    assert request.params.eos_token_ids == [1, 2, END]
    assert request.params.all_stop_token_ids == [9, 1, 2, END]
    assert request.eos_token_id == 1


def test_ignore_eos_leaves_only_the_callers_stop_tokens():
    request = processor().process("r", "hi", SamplingParams(ignore_eos=True, stop_token_ids=[9]))
    assert request.params.all_stop_token_ids == [9]
    assert request.params.eos_token_ids == [END]


def test_bad_words_become_tokens_with_and_without_a_leading_space():
    request = processor().process("r", "hi", SamplingParams(bad_words=["ab", " ab"]))
    assert request.params.bad_words_token_ids == [[97, 98], [32, 97, 98]]


BAD_PROMPTS = [
    ("", "prompt", "empty"),
    ([], "prompt_token_ids", "empty"),
    ({"prompt": ""}, "prompt", "empty"),
    ({}, "prompt", "missing"),
    ({"text": "hi"}, "prompt", "'text'"),
    ({"prompt": 5}, "prompt", "int"),
    ({"prompt_token_ids": "hi"}, "prompt_token_ids", "str"),
    (None, "prompt", "NoneType"),
    (5, "prompt", "int"),
    (b"hi", "prompt", "bytes"),
    ("a" * 20, "prompt", "20"),
    ([1] * 20, "prompt_token_ids", "20"),
    ([1, -1], "prompt_token_ids[1]", "-1"),
    ([1, 2, VOCAB_SIZE], "prompt_token_ids[2]", str(VOCAB_SIZE)),
    ([1, "x"], "prompt_token_ids[1]", "'x'"),
    ([1, True], "prompt_token_ids[1]", "True"),
    ([1, 2.0], "prompt_token_ids[1]", "2.0"),
    ("a\ud800", "prompt", "character 1"),
]


@pytest.mark.parametrize(("prompt", "field", "part"), BAD_PROMPTS)
def test_bad_prompts_are_refused_with_field_and_value(prompt, field, part):
    with pytest.raises(RequestError) as caught:
        processor(max_model_len=20).process("r", prompt, SamplingParams())
    assert caught.value.field == field
    assert part in caught.value.problem
    assert caught.value.expected


def test_a_prompt_of_one_token_less_than_the_limit_is_taken():
    assert processor(max_model_len=20).process("r", [1] * 19, SamplingParams()).params.max_tokens == 1


BAD_PARAMS = [
    ({"n": 0}, "n"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 65}, "logprobs"),
    ({"prompt_logprobs": 65}, "prompt_logprobs"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stop": [""]}, "stop"),
    ({"bad_words": ["  "]}, "bad_words[0]"),
    ({"min_tokens": 19, "max_tokens": None}, "min_tokens"),
    ({"output_kind": 9}, "output_kind"),
]


@pytest.mark.parametrize(("fields", "field"), BAD_PARAMS)
def test_bad_params_are_refused_with_their_field(fields, field):
    with pytest.raises(RequestError) as caught:
        processor(max_model_len=20).process("r", "hi", SamplingParams(**fields))
    assert caught.value.field == field


def test_logprobs_can_not_exceed_a_small_vocabulary():
    with pytest.raises(RequestError) as caught:
        processor(None, config=model_config(vocab_size=8)).process("r", [1], SamplingParams(logprobs=9))
    assert (caught.value.field, caught.value.expected) == ("logprobs", "8 at most")


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("hi", SamplingParams(), "prompt"),
        ([1], SamplingParams(stop=["x"]), "stop"),
        ([1], SamplingParams(bad_words=["x"]), "bad_words"),
    ],
)
def test_text_without_a_tokenizer_is_refused(prompt, params, field):
    with pytest.raises(RequestError) as caught:
        processor(None).process("r", prompt, params)
    assert caught.value.field == field
    assert "tokenizer" in caught.value.problem


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": 5}, "request_id"),
        ({"params": {"n": 1}}, "sampling_params"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_other_arguments_of_the_wrong_kind_are_refused(arguments, field):
    call = {"request_id": "r", "prompt": "hi", "params": SamplingParams()} | arguments
    with pytest.raises(RequestError) as caught:
        processor().process(**call)
    assert caught.value.field == field


def test_default_params_come_from_the_models_generation_config():
    params = default_sampling_params(
        {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 99, "transformers_version": "5"}
    )
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.9, 99)
    assert default_sampling_params(None) == SamplingParams()


def test_a_senseless_generation_default_is_passed_over():
    assert default_sampling_params({"temperature": -3, "top_k": 5}) == SamplingParams(top_k=5)


def test_a_tokenizer_that_knows_more_than_the_model_fails_only_the_prompts_that_show_it():
    small = processor(config=replace(model_config(), vocab_size=105))
    assert small.process("a", "hi"[:1], SamplingParams()).prompt_token_ids == [104]
    with pytest.raises(RequestError, match="id 105, and the model's vocabulary ends at 104") as caught:
        small.process("b", "hi", SamplingParams())
    assert caught.value.field == "prompt"


# ---- vectors ----


def test_a_pooling_request_generates_nothing_and_may_fill_the_whole_length():
    request = processor().process_pooling("r", "x" * 20, PoolingParams(pooling="mean"), priority=3, cache_salt="s")
    assert request.params == PoolingParams(pooling="mean")
    assert len(request.prompt_token_ids) == 20
    assert (request.external_id, request.priority, request.cache_salt) == ("r", 3, "s")
    assert request.request_id.startswith("r-") and len(request.request_id) == 10
    assert request.num_choices == 1


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("x" * 21, PoolingParams(), "prompt"),
        ([], PoolingParams(), "prompt_token_ids"),
        ([VOCAB_SIZE], PoolingParams(), "prompt_token_ids[0]"),
        ("x", PoolingParams(pooling="max"), "pooling"),
        ("x", PoolingParams(pooling="first"), "pooling"),  # the first token has seen nothing
        ("x", msgspec.structs.replace(PoolingParams(), normalize="yes"), "normalize"),
        ("x", PoolingParams(dimensions=0), "dimensions"),
        ("x", PoolingParams(dimensions=9), "dimensions"),  # the model's states have 8
        ("x", SamplingParams(), "pooling_params"),
        ("x", None, "pooling_params"),
    ],
)
def test_what_can_have_no_vector_is_refused_with_the_fields_name(prompt, params, field):
    with pytest.raises(RequestError) as caught:
        processor().process_pooling("r", prompt, params)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("causal", "declared", "expected"),
    [(True, None, "last"), (True, "mean", "mean"), (False, None, "mean"), (False, "first", "first")],
)
def test_the_way_to_make_a_vector_is_the_model_s_unless_the_caller_has_one(causal, declared, expected):
    model = processor(config=replace(model_config(), causal=causal), pooling=declared)
    for asked in (None, "last", "mean"):
        request = model.process_pooling("r", "x", PoolingParams(pooling=asked, dimensions=3))
        assert request.params == PoolingParams(pooling=asked or expected, dimensions=3)


def test_a_pooling_request_arrives_before_it_is_tokenised():
    times = iter([1.0, 2.0])
    assert processor(clock=lambda: next(times)).process_pooling("r", "x", PoolingParams()).arrival_time == 1.0
    assert processor().process_pooling("r", "x", PoolingParams(), arrival_time=7.0).arrival_time == 7.0


def test_an_open_end_is_as_far_away_as_model_and_memory_allow() -> None:
    def longest(kv_capacity: int | None) -> int | None:
        request = processor(max_model_len=64, kv_capacity=kv_capacity).process(
            "r", [1] * 10, SamplingParams(max_tokens=None)
        )
        return request.params.max_tokens

    assert (longest(None), longest(100), longest(30), longest(5)) == (54, 54, 20, 1)
    asked = processor(max_model_len=64, kv_capacity=30).process("r", [1] * 10, SamplingParams(max_tokens=40))
    assert asked.params.max_tokens == 40  # what was asked for is not cut in silence


class NeverTokenises:
    """Knows how long texts are, and must not be asked for their tokens."""

    def __getattr__(self, name: str):
        assert name != "encode"
        return getattr(TOKENIZER, name)


@pytest.mark.parametrize(
    ("prompt", "field"), [("x" * 5000, "prompt"), ({"prompt": "x" * 5000}, "prompt"), ("é" * 5000, "prompt")]
)
def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenised(prompt, field):
    few = processor(tokenizer=NeverTokenises())
    with pytest.raises(RequestError, match=r"has at least \d+ tokens, and at most 19 leave room") as caught:
        few.process("r", prompt, SamplingParams())
    assert caught.value.field == field
    with pytest.raises(RequestError, match=r"has at least [0-9]+ tokens, and at most 20 fit"):
        few.process_pooling("r", "x" * 5000, PoolingParams())


def test_a_suffix_that_is_far_too_long_is_refused_before_it_is_tokenised():
    with pytest.raises(RequestError, match=r"has at least [0-9]+ tokens") as caught:
        processor(tokenizer=NeverTokenises())._prompts.process_suffix("x" * 5000, {})
    assert caught.value.field == "continuation_suffix"


def test_a_salt_that_would_make_every_block_dear_is_refused():
    processor().process("r", "hi", SamplingParams(), cache_salt="x" * 1024)
    with pytest.raises(RequestError, match="has 1025 characters; 1024 at most") as caught:
        processor().process("r", "hi", SamplingParams(), cache_salt="x" * 1025)
    assert caught.value.field == "cache_salt"


def test_bad_words_are_not_tokenised_whatever_their_length():
    with pytest.raises(RequestError, match="has 65537 characters in all; 65536 at most") as caught:
        processor(tokenizer=NeverTokenises()).process("r", "hi", SamplingParams(bad_words=["x" * 65536, "y"]))
    assert caught.value.field == "bad_words"
