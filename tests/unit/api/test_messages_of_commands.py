"""Errors name what the user wrote: the option, the keyword, the argument."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ratoon.cli import main
from ratoon.core.config import EncoderConfig
from ratoon.core.errors import ConfigError
from ratoon.core.settings import engine_config


def error_of(words, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_long_prompt_is_called_prompt(client, capsys):
    long = "x" * 99
    assert error_of(["generate", "fake", long, "--raw"], capsys).startswith("error: PROMPT: has 99 tokens")
    said = error_of(["generate", "fake", "a", long, "--raw"], capsys)
    assert said.startswith("error: prompts[1]: has 99 tokens")
    assert "give a greater --max-model-len" in said and "token_ids" not in said


def test_a_conversation_that_is_too_long_is_called_so(client, capsys, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 5000 + "\n"))
    assert main(["chat", "fake"]) == 0
    assert capsys.readouterr().err.startswith("error: the conversation: has ")


def test_the_example_of_an_object_is_that_of_its_option(capsys):
    said = error_of(["generate", "smollm2-135m", "hi", "--hf-overrides", "{x"], capsys)
    assert said.startswith("error: --hf-overrides: '{x' is no JSON")
    assert 'such as {"max_position_embeddings": 4096}' in said
    with pytest.raises(ConfigError, match=r'such as \{"rope_type": "yarn"'):
        engine_config("m", rope_scaling="[1]")
    json.loads('{"max_position_embeddings": 4096}')


def test_a_model_for_speech_names_the_command_for_it(client, source, capsys):
    encoder = EncoderConfig(1, 1, 8, 8, 8, num_mel_bins=80)
    source.config = replace(source.config, encoder=encoder)
    said = error_of(["generate", "fake", "hi", "--raw"], capsys)
    assert "reads recordings, not text; `ratoon transcribe MODEL FILE`" in said


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"cache_slat": "x"}, "generate has no 'cache_slat'; did you mean cache_salt?"),
        ({"whatever": 1}, "generate has no 'whatever'"),
        ({"temperature": 0.5}, r"give SamplingParams\(…, temperature=…\) as sampling_params"),
    ],
)
def test_a_wrong_keyword_of_generate_is_named(client, keywords, message):
    from ratoon import LLM

    with LLM("fake") as llm, pytest.raises(TypeError, match=message):
        llm.generate("x", **keywords)
