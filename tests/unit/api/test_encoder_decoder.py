"""Encoder-decoder models through LLM and the command line: their two prompts, and what is said of them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

import ratoon
from ratoon.api.commands import complete
from ratoon.api.llm import LLM
from ratoon.cli import main
from ratoon.core.errors import RequestError
from ratoon.core.params import HiddenStatesParams, SamplingParams
from tests.unit.engine.fakes import DECODER_START, END, encoder_decoder_config, model_config


@pytest.fixture
def encoder_decoder(client, source):
    source.config = encoder_decoder_config()
    source.chat_template = None
    client.script = lambda request, choice: [*b"yz", END]
    return client


def test_generate_takes_all_forms_in_one_list(encoder_decoder):
    prompts = ["ab", [1, 2], {"encoder_prompt": {"prompt": "cd"}, "decoder_prompt": "x"}]
    outputs = LLM("fake").generate(prompts, SamplingParams(max_tokens=4))
    assert [output.encoder_prompt for output in outputs] == ["ab", None, "cd"]
    assert [output.encoder_prompt_token_ids for output in outputs] == [[97, 98], [1, 2], [99, 100]]
    assert [output.prompt for output in outputs] == [None, None, "x"]
    assert [output.prompt_token_ids for output in outputs] == [DECODER_START, DECODER_START, [*DECODER_START, 120]]


def test_one_bad_pair_among_many_is_named(encoder_decoder):
    with pytest.raises(RequestError) as caught:
        LLM("fake").generate(["ab", {"encoder_prompt": "ab", "decoder_prompt": [1, 999]}])
    assert caught.value.field == "prompts[1].decoder_prompt_token_ids[1]"


def test_an_answer_can_be_continued_and_its_encoder_states_read(encoder_decoder):
    llm = LLM("fake")
    (parent,) = llm.generate("ab", SamplingParams(max_tokens=4))
    child = llm.generate_continuation(parent, "w", SamplingParams(max_tokens=4))
    assert child.encoder_prompt_token_ids == [97, 98]
    states = llm.extract_hidden_states(child, HiddenStatesParams(side="encoder", positions="all"))
    assert states.token_ids == [97, 98]


@pytest.mark.parametrize("params", [None, SamplingParams()])
def test_a_model_without_a_decoder_refuses_the_call_and_no_single_prompt(client, source, params):
    source.config = model_config(causal=False)
    with pytest.raises(RequestError) as caught:
        LLM("fake").generate(["ab", "cd"], params)
    assert caught.value.field == "model"


def test_the_call_is_refused_as_well_where_there_are_no_vectors(encoder_decoder):
    with pytest.raises(RequestError) as caught:
        LLM("fake").embed(["ab", "cd"])
    assert caught.value.field == "model"


# ---- the command line ----


def test_generate_takes_a_decoder_prompt(encoder_decoder, capsys):
    assert main(["generate", "fake", "ab", "--decoder-prompt", "x", "--json"]) == 0
    (request,) = encoder_decoder.added
    assert request.encoder_input.token_ids == [97, 98]
    assert request.prompt_token_ids == [*DECODER_START, 120]
    printed = json.loads(capsys.readouterr().out)
    assert (printed["num_prompt_tokens"], printed["num_encoder_tokens"]) == (3, 2)
    assert printed["outputs"][0]["text"] == "yz"


def test_a_decoder_prompt_for_a_model_without_an_encoder_is_an_error(client, capsys):
    assert main(["generate", "fake", "ab", "--decoder-prompt", "x"]) == 2
    assert "--decoder-prompt: the model has no encoder" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--chat"], ["--system", "be kind"]])
def test_a_decoder_prompt_has_no_place_in_a_chat(encoder_decoder, capsys, options):
    assert main(["generate", "fake", "ab", "--decoder-prompt", "x", *options]) == 2
    assert options[0] in capsys.readouterr().err


def test_complete_sends_the_decoder_prompt():
    parser = argparse.ArgumentParser()
    complete.add_parser(parser.add_subparsers())
    for options, expected in ((["--decoder-prompt", "x"], {"decoder_prompt": "x"}), ([], {})):
        args = parser.parse_args(["complete", "--url", "http://there", "ab", *options])
        _, body = complete.make_request("model", "ab", args)
        assert {name: body[name] for name in body if name.endswith("prompt")} == {"prompt": "ab", **expected}


def test_hidden_states_of_the_encoder(encoder_decoder, capsys):
    assert main(["hidden-states", "fake", "ab", "--side", "encoder", "--positions", "all"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["token_id"] for line in lines] == [97, 98]


# ---- names ----


def test_the_forms_of_prompts_have_names_that_cost_nothing_to_import():
    prompt = ratoon.ExplicitEncoderDecoderPrompt(
        encoder_prompt=ratoon.TextPrompt(prompt="ab"), decoder_prompt=ratoon.TokensPrompt(prompt_token_ids=[1])
    )
    assert prompt == {"encoder_prompt": {"prompt": "ab"}, "decoder_prompt": {"prompt_token_ids": [1]}}
    code = "from ratoon import AudioPrompt; import sys; print('numpy' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False False"
